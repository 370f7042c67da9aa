"""Opens buckets of S3, GCS and Azure, and memory, with obstore. Nothing is sent before the first request.

S3's credentials, region and endpoint are found by botocore, as the AWS command line finds them: the environment, the
profile in ~/.aws, single sign-on, roles, the machine's metadata. obstore finds those of Google and Azure itself.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import obstore
from obstore.store import AzureStore, GCSStore, MemoryStore, S3Store

from batchinfer.core.errors import ConfigError
from batchinfer.storage import split_bucket
from batchinfer.storage.bucket import BucketStore
from batchinfer.storage.cloud_errors import Cloud
from batchinfer.storage.retrying import RetryPolicy

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
    credentials="set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE for a profile in ~/.aws; "
    "for another provider than AWS also AWS_ENDPOINT_URL (see docs/object-storage.md)",
    rights="grant s3:GetObject, s3:PutObject, s3:DeleteObject, s3:AbortMultipartUpload and s3:ListBucket on the "
    "bucket; without s3:ListBucket a missing object looks like a forbidden one",
    place="set AWS_DEFAULT_REGION to the bucket's region, and AWS_ENDPOINT_URL if it is not on AWS",
    create="create it (aws s3 mb s3://{bucket}), or check the name, AWS_ENDPOINT_URL and AWS_PROFILE",
)
GCS = Cloud(
    "GCS",
    credentials="run `gcloud auth application-default login`, or set GOOGLE_APPLICATION_CREDENTIALS to a key "
    "file (see docs/object-storage.md)",
    rights="grant the role Storage Object User (roles/storage.objectUser) on the bucket",
    place="check the network and, on a machine of Google, its metadata server",
    create="create it (gcloud storage buckets create gs://{bucket}), or check the name",
)
AZURE = Cloud(
    "Azure",
    credentials="set AZURE_STORAGE_ACCOUNT_NAME, and AZURE_STORAGE_ACCOUNT_KEY or another credential "
    "(see docs/object-storage.md)",
    rights="grant the role Storage Blob Data Contributor on the container",
    place="check AZURE_STORAGE_ACCOUNT_NAME, AZURE_STORAGE_ENDPOINT and the network",
    create="create it (az storage container create -n {bucket}), or check the name and the account",
)
MEMORY = Cloud("memory", is_remote=False)

_memory: dict[str, Any] = {}
"""The memory:// buckets of this process, by name."""

_PLACES = (
    "AWS_ENDPOINT_URL",
    "AWS_ENDPOINT_URL_S3",
    "AWS_ENDPOINT",
    "AWS_DEFAULT_REGION",
    "AWS_REGION",
)
"""Variables that obstore reads, too."""
_KINDS: dict[str, tuple[Any, Cloud]] = {
    "s3": (S3Store, S3),
    "r2": (S3Store, S3),
    "gs": (GCSStore, GCS),
    "az": (AzureStore, AZURE),
}


def open_bucket(scheme: str, url: str, retries: RetryPolicy | None = None) -> BucketStore:
    """Open the bucket of a URL, or memory:// of this process: two stores of one URL, or of nested ones, share objects.

    Raises:
        ConfigError: The cloud's configuration or credentials cannot be used.
    """
    bucket, (_, _, place) = split_bucket(url)[0], url.partition("://")
    if scheme == "memory":
        return BucketStore(url, _memory.setdefault(bucket, MemoryStore()), MEMORY)
    kind, cloud = _KINDS[scheme]
    options, client = _aws_settings(url) if cloud is S3 else ({}, {})
    try:
        quick, patient = (
            kind(
                bucket,
                client_options={**client, **_CLIENT, "read_timeout": silence},
                retry_config=_ONCE,
                **options,
            )
            for silence in _SILENCE.values()
        )
    except (obstore.exceptions.BaseError, ValueError) as error:
        raise ConfigError(
            f"{url}: {str(error).splitlines()[0]}, expected a working configuration for {cloud.name}",
            hint=f"{cloud.credentials}; {cloud.place}",
        ) from error
    place = f"{'s3' if cloud is S3 else scheme}://{place}"
    return BucketStore(place, quick, cloud, patient=patient, retries=retries)


def _aws_settings(url: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what botocore finds in environment and ~/.aws: options for S3Store, and for its client.

    Raises:
        ConfigError: The profile does not exist, or the endpoint is no URL.
    """
    import botocore.session
    from botocore.configprovider import ConfiguredEndpointProvider
    from botocore.exceptions import BotoCoreError

    for name in _PLACES:
        if os.environ.get(name) == "":
            del os.environ[name]  # botocore takes it for unset, obstore for a value
    session: Any = botocore.session.get_session()
    try:
        scoped = session.get_scoped_config()
        endpoint = ConfiguredEndpointProvider(
            full_config=session.full_config, scoped_config=scoped, client_name="s3"
        ).provide()
        region = os.environ.get("AWS_REGION") or session.get_config_variable("region")
        bundle = session.get_config_variable("ca_bundle")
        certificates = {"root_certificate": Path(bundle).read_bytes()} if bundle else {}
    except (BotoCoreError, OSError) as error:
        hint = "check AWS_CA_BUNDLE" if isinstance(error, OSError) else S3.credentials
        raise ConfigError(
            f"{url}: {error}, expected a working S3 configuration", hint=hint
        ) from error
    if endpoint and not endpoint.startswith(("http://", "https://")):
        raise ConfigError(
            f"{url}: the endpoint {endpoint!r} is no URL, expected http:// or https://",
            hint="check AWS_ENDPOINT_URL",
        )
    own = scoped.get("s3")
    is_virtual = isinstance(own, dict) and own.get("addressing_style") == "virtual"
    if endpoint and is_virtual:  # obstore wants the bucket in the endpoint then
        scheme, _, host = endpoint.partition("//")
        bucket = f"{split_bucket(url)[0]}."
        endpoint = f"{scheme}//{bucket}{host.removeprefix(bucket)}"
    options = {
        "endpoint": endpoint,
        "region": region or ("us-east-1" if endpoint else None),
        "virtual_hosted_style_request": "true" if is_virtual else None,
        "credential_provider": _aws_credentials(session),
    }
    options = {name: value for name, value in options.items() if value}
    return options, certificates


def _aws_credentials(session: Any) -> Callable[[], Any]:
    """Return a function that gives obstore the credentials of now. Its errors are botocore's."""
    from botocore.exceptions import NoCredentialsError

    lock = threading.Lock()

    def credentials() -> Any:
        with lock:
            found = session.get_credentials()
            if found is None:
                raise NoCredentialsError
            frozen = found.get_frozen_credentials()
        return {
            "access_key_id": frozen.access_key,
            "secret_access_key": frozen.secret_key,
            "token": frozen.token,
            "expires_at": datetime.now(UTC) + _CREDENTIALS_FOR,
        }

    return credentials
