"""Opens buckets of S3, GCS and Azure, and memory, with obstore. Nothing is sent before the first request.

S3's credentials, region and endpoint are found by botocore, as the AWS command line finds them: the environment, the
profile in ~/.aws, single sign-on, roles, the machine's metadata. obstore finds those of Google and Azure itself.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import obstore
from obstore.store import AzureStore, GCSStore, MemoryStore, S3Store

from batchinfer.core.errors import AccessDenied, BatchinferError, ConfigError
from batchinfer.storage import split_bucket
from batchinfer.storage.bucket import BucketStore
from batchinfer.storage.cloud_errors import Cloud
from batchinfer.storage.retrying import RetryPolicy, TransientError

KEYS_PER_PAGE = 1000
PART_BYTES = 8 << 20
"""Bytes of the parts in which a large file goes up. R2 wants equal ones, and no store takes more than 10,000."""
_PARTS_AT_ONCE = 4
_HEAVY_BYTES = 1 << 20
_SILENCE = {"quick": "20s", "patient": "120s"}
"""How long a connection may be silent. It counts from a request's beginning, so what takes long to send needs more."""
_CLIENT: Any = {
    "connect_timeout": "10s",
    "timeout": "24h",
    "allow_http": True,
    # Some routers forget connections that are idle for minutes and tell neither end.
    "pool_idle_timeout": "30s",
}
_ONCE: Any = {"max_retries": 0, "retry_timeout": timedelta(seconds=1)}
_CREDENTIALS_FOR = timedelta(minutes=12)
"""How long obstore may keep credentials, of which it uses all but five minutes. botocore renews them as they age."""

S3 = Cloud(
    "S3",
    credentials_hint="set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE for a profile in ~/.aws; "
    "for another provider than AWS also AWS_ENDPOINT_URL (see docs/object-storage.md)",
    rights_hint="grant s3:GetObject, s3:PutObject, s3:DeleteObject and s3:ListBucket on the bucket; "
    "without s3:ListBucket a missing object looks like a forbidden one",
    place_hint="set AWS_DEFAULT_REGION to the bucket's region, and AWS_ENDPOINT_URL if it is not on AWS",
    create_hint="create it (aws s3 mb s3://{bucket}), or check the name, AWS_ENDPOINT_URL and AWS_PROFILE",
)
GCS = Cloud(
    "GCS",
    credentials_hint="run `gcloud auth application-default login`, or set GOOGLE_APPLICATION_CREDENTIALS to a key "
    "file (see docs/object-storage.md)",
    rights_hint="grant the role Storage Object User (roles/storage.objectUser) on the bucket",
    place_hint="check the network and, on a machine of Google, its metadata server",
    create_hint="create it (gcloud storage buckets create gs://{bucket}), or check the name",
    has_versions=True,
)
AZURE = Cloud(
    "Azure",
    credentials_hint="set AZURE_STORAGE_ACCOUNT_NAME, and AZURE_STORAGE_ACCOUNT_KEY or another credential "
    "(see docs/object-storage.md)",
    rights_hint="grant the role Storage Blob Data Contributor on the container",
    place_hint="check AZURE_STORAGE_ACCOUNT_NAME, AZURE_STORAGE_ENDPOINT and the network",
    create_hint="create it (az storage container create -n {bucket}), or check the name and the account",
)
MEMORY = Cloud("memory", is_remote=False)

_memory: dict[str, Any] = {}
"""The memory:// buckets of this process, by name."""


class ObstoreClient:
    """`bucket.Client` by obstore. `patient` is the same store, with more time for each request."""

    def __init__(self, quick: Any, patient: Any) -> None:
        self._quick, self._patient = quick, patient

    def get(self, path: str) -> Any:
        """See `Client.get`."""
        return obstore.get(self._quick, path)

    def head(self, path: str) -> Mapping[str, Any]:
        """See `Client.head`."""
        return obstore.head(self._quick, path)

    def list(self, folder: str, after: str | None) -> Iterator[Sequence[Mapping[str, Any]]]:
        """See `Client.list`."""
        pages = obstore.list(self._quick, folder or None, offset=after, chunk_size=KEYS_PER_PAGE)
        return iter(pages)

    def put(self, path: str, file: bytes | Path, mode: Any = None) -> Mapping[str, Any]:
        """See `Client.put`. A large file goes up in parts, a few at a time."""
        is_light = isinstance(file, bytes) and len(file) < _HEAVY_BYTES
        return obstore.put(
            self._quick if is_light else self._patient,
            path,
            file,
            mode=mode,
            chunk_size=PART_BYTES,
            max_concurrency=_PARTS_AT_ONCE,
        )

    def delete(self, paths: Sequence[str]) -> None:
        """See `Client.delete`."""
        obstore.delete(self._quick, paths)


def open_s3(url: str, retries: RetryPolicy | None) -> BucketStore:
    """Open the bucket of an s3:// or r2:// URL.

    Raises:
        ConfigError: AWS's configuration cannot be used, or r2:// has no endpoint.
    """
    settings = _AwsSettings(url)
    if url.startswith("r2://") and not settings.config.get("endpoint"):
        raise ConfigError(
            f"{url!r}: no endpoint is configured, so requests would go to AWS",
            hint="export AWS_ENDPOINT_URL=https://ACCOUNT_ID.r2.cloudflarestorage.com, "
            "or put endpoint_url into the profile that AWS_PROFILE names",
        )
    cloud = S3._replace(last_error=lambda: settings.error)
    options = {**settings.config, "credential_provider": settings}
    place = f"s3://{url.partition('://')[2]}"
    return _open(place, S3Store, cloud, retries, settings.client | _CLIENT, options)


def open_gcs(url: str, retries: RetryPolicy | None) -> BucketStore:
    """Open the bucket of a gs:// URL. Raises ConfigError if the configured credentials cannot be read."""
    return _open(f"gs://{url.partition('://')[2]}", GCSStore, GCS, retries, _CLIENT, {})


def open_azure(url: str, retries: RetryPolicy | None) -> BucketStore:
    """Open the container of an az:// URL. Raises ConfigError if no account is configured."""
    return _open(url, AzureStore, AZURE, retries, _CLIENT, {})


def open_memory(url: str) -> BucketStore:
    """Open memory:// of this process. Two stores of one URL, or of nested ones, share objects."""
    held = _memory.setdefault(split_bucket(url)[0], MemoryStore())
    return BucketStore(url, ObstoreClient(held, held), MEMORY)


def _open(
    url: str,
    kind: Any,
    cloud: Cloud,
    retries: RetryPolicy | None,
    client: Mapping[str, Any],
    options: Mapping[str, Any],
) -> BucketStore:
    bucket = split_bucket(url)[0]
    try:
        quick, patient = (
            kind(
                bucket,
                client_options={**client, "read_timeout": silence},
                retry_config=_ONCE,
                **options,
            )
            for silence in _SILENCE.values()
        )
    except obstore.exceptions.BaseError as error:
        raise ConfigError(
            f"{url}: {str(error).splitlines()[0]}, expected a working configuration for {cloud.name}",
            hint=f"{cloud.credentials_hint}; {cloud.place_hint}",
        ) from error
    return BucketStore(url, ObstoreClient(quick, patient), cloud, retries=retries)


class _AwsSettings:
    """What botocore finds in environment and ~/.aws: obstore's options for S3. Called by obstore for credentials.

    Raises:
        ConfigError: The profile does not exist, or the endpoint is no URL.
    """

    def __init__(self, url: str) -> None:
        import botocore.exceptions
        import botocore.session
        from botocore.configprovider import ConfiguredEndpointProvider

        self.error: BatchinferError | None = None
        self._url = url
        self._lock = threading.Lock()
        self._session: Any = botocore.session.get_session()
        self._credentials: Any = None
        try:
            scoped = self._session.get_scoped_config()
            endpoint = ConfiguredEndpointProvider(
                full_config=self._session.full_config, scoped_config=scoped, client_name="s3"
            ).provide()
            region = self._session.get_config_variable("region")
            bundle = self._session.get_config_variable("ca_bundle")
        except botocore.exceptions.BotoCoreError as error:
            raise ConfigError(
                f"{url}: {error}, expected a working S3 configuration", hint=S3.credentials_hint
            ) from error
        if endpoint and not endpoint.startswith(("http://", "https://")):
            raise ConfigError(
                f"{url}: the endpoint {endpoint!r} is no URL, expected http:// or https://",
                hint="check AWS_ENDPOINT_URL",
            )
        style = (scoped.get("s3") or {}).get("addressing_style")
        found = {
            "endpoint": endpoint,
            "region": region or ("us-east-1" if endpoint else None),
            "virtual_hosted_style_request": "true" if style == "virtual" else None,
        }
        self.config = {name: value for name, value in found.items() if value}
        self.client: dict[str, Any] = {}
        if bundle:
            self.client["root_certificate"] = Path(bundle).read_bytes()

    def __call__(self) -> Any:
        """Return credentials in obstore's form. Keeps in `error` why there are none."""
        import botocore.exceptions

        with self._lock:
            self.error = None
            try:
                self._credentials = self._credentials or self._session.get_credentials()
                if self._credentials is None:
                    raise botocore.exceptions.NoCredentialsError
                found = self._credentials.get_frozen_credentials()
            except botocore.exceptions.BotoCoreError as error:
                self.error = self._explain(error)
                raise
        return {
            "access_key_id": found.access_key,
            "secret_access_key": found.secret_key,
            "token": found.token,
            "expires_at": datetime.now(UTC) + _CREDENTIALS_FOR,
        }

    def _explain(self, error: Exception) -> BatchinferError:
        import botocore.exceptions

        line = str(error).partition("\n")[0]
        # The metadata server that gives the credentials may be down for a moment during a run.
        if isinstance(error, botocore.exceptions.CredentialRetrievalError):
            return TransientError(f"{self._url}: {line}", hint=S3.credentials_hint)
        return AccessDenied(
            f"{self._url}: no usable credentials ({line}), expected a key for the bucket",
            hint=S3.credentials_hint,
        )
