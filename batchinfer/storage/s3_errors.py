"""Translates botocore's errors to ours. Kept apart from `s3` only because of its length."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import botocore.exceptions
import botocore.parsers
import urllib3.exceptions

from batchinfer.core.errors import (
    AccessDenied,
    AlreadyExists,
    BatchinferError,
    ConfigError,
    InputError,
    ObjectNotFound,
    PreconditionFailed,
    StorageError,
)
from batchinfer.storage.retrying import NotSupported, TransientError

CREDENTIALS_HINT = (
    "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE for a profile in ~/.aws; "
    "for another provider than AWS also AWS_ENDPOINT_URL (see docs/object-storage.md)"
)
_LIST_HINT = (
    "grant s3:GetObject, s3:PutObject, s3:DeleteObject, s3:ListBucket and s3:AbortMultipartUpload "
    "on the bucket; without s3:ListBucket a missing object looks like a forbidden one"
)

_NO_CREDENTIALS = (
    botocore.exceptions.NoCredentialsError,
    botocore.exceptions.PartialCredentialsError,
    botocore.exceptions.TokenRetrievalError,
    botocore.exceptions.UnauthorizedSSOTokenError,
    botocore.exceptions.SSOError,
    botocore.exceptions.ProfileNotFound,
    botocore.exceptions.NoAuthTokenError,
)
_LOST = (
    botocore.exceptions.ConnectionError,
    botocore.exceptions.HTTPClientError,
    botocore.exceptions.ResponseStreamingError,
    botocore.exceptions.IncompleteReadError,
    botocore.parsers.ResponseParserError,
    botocore.exceptions.FlexibleChecksumError,
    urllib3.exceptions.HTTPError,
    ConnectionError,
    TimeoutError,
)
_BAD_CREDENTIAL_CODES = {
    "ExpiredToken",
    "ExpiredTokenException",
    "InvalidAccessKeyId",
    "InvalidToken",
    "SignatureDoesNotMatch",
    "TokenRefreshRequired",
}
_TRANSIENT_CODES = {"RequestTimeout", "SlowDown", "Throttling", "TooManyRequests", "InternalError"}
_WRONG_REGION_CODES = {
    "AuthorizationHeaderMalformed",
    "PermanentRedirect",
    "IllegalLocationConstraintException",
}
_FAILURES = (
    OSError,
    ValueError,
    botocore.exceptions.BotoCoreError,
    botocore.exceptions.ClientError,
    *_LOST,
)


@contextmanager
def s3_errors(url: str, bucket: str) -> Iterator[None]:
    """Turn botocore's errors on the object or prefix at `url` into ours."""
    try:
        yield
    except BatchinferError:
        raise
    except _FAILURES as error:
        raise translate(error, url, bucket) from error


def is_unreachable(error: BatchinferError) -> bool:
    """Whether nothing could be reached at the store's address."""
    return isinstance(error.__cause__, botocore.exceptions.EndpointConnectionError)


def translate(error: Exception, url: str, bucket: str) -> BatchinferError:
    """Return our error for an error that botocore has raised."""
    if isinstance(error, botocore.exceptions.ClientError):
        return of_answer(error.response, url, bucket)
    if isinstance(error, _NO_CREDENTIALS):
        return AccessDenied(
            f"{url}: no usable credentials ({error}), expected a key for bucket {bucket}",
            hint=CREDENTIALS_HINT,
        )
    if isinstance(error, botocore.exceptions.CredentialRetrievalError):
        # The metadata server that gives the credentials may be down for a moment during a run. So this error counts as
        # transient.
        return TransientError(f"{url}: {_first_line(error)}", hint=CREDENTIALS_HINT)
    if isinstance(error, botocore.exceptions.ParamValidationError):
        return InputError(f"{url}: {_first_line(error)}, expected a valid bucket name and key")
    if isinstance(error, botocore.parsers.ResponseParserError):
        return _bad_answer(url, _first_line(error))
    if isinstance(error, _LOST):
        return TransientError(
            f"{url}: no answer from the store ({type(error).__name__}: {_first_line(error)})",
            hint="check the network and AWS_ENDPOINT_URL",
        )
    if isinstance(error, ValueError | botocore.exceptions.BotoCoreError):
        return ConfigError(
            f"{url}: {_first_line(error)}, expected a working S3 configuration",
            hint="check AWS_ENDPOINT_URL (with http:// or https://) and AWS_DEFAULT_REGION",
        )
    return StorageError(f"{url}: {_first_line(error)}")


def of_answer(answer: dict[str, Any], url: str, bucket: str) -> BatchinferError:
    """Return our error for a parsed error response of the store."""
    status = answer.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    code = str(answer.get("Error", {}).get("Code", ""))
    said = f"{code} {answer.get('Error', {}).get('Message', '')}".strip()
    if code == "NoSuchBucket":
        return no_such_bucket(bucket)
    if code in _BAD_CREDENTIAL_CODES:
        return AccessDenied(
            f"{url}: the store refused the credentials ({said})", hint=CREDENTIALS_HINT
        )
    if code == "RequestTimeTooSkewed":
        # The clock of a machine that was suspended is wrong until it has been set again, so this failure may pass.
        return TransientError(f"{url}: the store refused this machine's clock ({said})")
    if code in _WRONG_REGION_CODES or status in {301, 307}:
        return ConfigError(
            f"{url}: the bucket is in another region or at another endpoint ({said})",
            hint="set AWS_DEFAULT_REGION to the bucket's region, and AWS_ENDPOINT_URL if it is not on AWS",
        )
    if code in _TRANSIENT_CODES or status == 429 or status in {500, 502, 503, 504}:
        return TransientError(f"{url}: the store answered {status} {said}")
    if status in {401, 403}:
        return AccessDenied(f"{url}: the store refused access ({said})", hint=_LIST_HINT)
    if status == 404:
        return ObjectNotFound(f"{url}: no such object")
    if status == 412:
        return PreconditionFailed(f"{url}: is not the version that was expected")
    if status == 409:
        # ConditionalRequestConflict: someone else is writing the same key right now.
        return TransientError(f"{url}: a concurrent write was in the way ({said})")
    # Some stores refuse bulk deletions without an MD5 digest. AWS's clients no longer send this digest.
    is_md5_wanted = code == "MissingContentMD5" or (
        code == "InvalidRequest" and "content-md5" in said.lower()
    )
    if status == 501 or code == "NotImplemented" or is_md5_wanted:
        return NotSupported(
            f"{url}: the store does not support this request ({said})",
            hint="some stores need AWS_REQUEST_CHECKSUM_CALCULATION=when_required",
        )
    return StorageError(f"{url}: the store answered {status} {said}")


def fields_of(answer: dict[str, Any], url: str, *names: str) -> list[Any]:
    """Return the fields of a parsed answer. Raises TransientError if the answer about `url` lacks one."""
    for name in names:
        if name not in answer:
            raise _bad_answer(url, f"it has no {name}")
    return [answer[name] for name in names]


def _bad_answer(url: str, what: str) -> TransientError:
    return TransientError(
        f"{url}: the answer is not one of an S3 server ({what})",
        hint="check AWS_ENDPOINT_URL and HTTP_PROXY: a proxy or a login page may answer in the store's place",
    )


def no_such_bucket(bucket: str) -> InputError:
    """Return the error for a bucket that does not exist at this endpoint."""
    return InputError(
        f"bucket {bucket!r}: does not exist at this endpoint, expected an existing bucket",
        hint=f"create it (aws s3 mb s3://{bucket}), or check the name, AWS_ENDPOINT_URL and AWS_PROFILE",
    )


def already_exists(url: str) -> AlreadyExists:
    """Return the error for a create whose key is taken by an object with other bytes."""
    return AlreadyExists(f"{url}: exists with other bytes, expected none")


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
