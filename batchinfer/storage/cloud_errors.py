"""Translates obstore's errors to ours. obstore tells little but a text, in which the server's own answer stands."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

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
from batchinfer.storage.retrying import NotSupported, TransientError, Unreachable


class Cloud(NamedTuple):
    """What differs between kinds of buckets."""

    name: str
    credentials_hint: str = ""
    rights_hint: str = ""
    place_hint: str = ""
    """What to check if the bucket is in another region, or if nothing answers there."""
    create_hint: str = ""
    """How to create the bucket {bucket}."""
    has_versions: bool = False
    """Whether a conditional write compares a version beside the etag."""
    is_remote: bool = True
    last_error: Callable[[], BatchinferError | None] = lambda: None
    """Returns why no credentials were found at the last try, if so."""


_STATUS = re.compile(r"non-2xx status code: (\d+)")
_CODE = re.compile(r"<Code>([^<]+)</Code>")
_SAYS = re.compile(r"<Message>([^<]+)</Message>")
_REQUEST = re.compile(r"^.*?Error performing \w+ \S+ in \S+ - ")

_NO_BUCKET = {"NoSuchBucket", "ContainerNotFound"}
_BAD_CREDENTIALS = {
    *("ExpiredToken", "ExpiredTokenException", "InvalidAccessKeyId", "InvalidToken"),
    *(
        "SignatureDoesNotMatch",
        "TokenRefreshRequired",
        "AuthenticationFailed",
        "InvalidAuthenticationInfo",
    ),
}
_WRONG_PLACE = {
    *("AuthorizationHeaderMalformed", "PermanentRedirect", "IllegalLocationConstraintException"),
}
_TRANSIENT = {"RequestTimeout", "SlowDown", "RequestTimeTooSkewed", "NoSuchUpload"}
"""The clock of a machine that was suspended is wrong until it is set again. An unknown upload was aborted, or completed
with a reply that was lost."""


def translate(
    error: BaseException, where: str, cloud: Cloud, bucket: str
) -> BatchinferError | None:
    """Return our error for what obstore has raised about `where`; None if it is no error of obstore."""
    kind = type(error).__name__
    is_theirs = kind == "PanicException" or type(error).__module__.startswith("obstore")
    if not is_theirs and not isinstance(error, FileNotFoundError):
        return None
    text = str(error)
    code, status = _first(_CODE, text), int(_first(_STATUS, text) or 0)
    said = _said(text, status, code)
    if code in _NO_BUCKET:
        return InputError(
            f"bucket {bucket!r}: does not exist at this endpoint, expected an existing bucket",
            hint=cloud.create_hint.format(bucket=bucket),
        )
    if code in _TRANSIENT:
        return TransientError(f"{where}: the store answered {said}")
    if code in _BAD_CREDENTIALS or kind == "UnauthenticatedError":
        return cloud.last_error() or AccessDenied(
            f"{where}: the store refused the credentials ({said})", hint=cloud.credentials_hint
        )
    if code in _WRONG_PLACE or "BareRedirect" in text:
        return ConfigError(
            f"{where}: the bucket is in another region or at another endpoint ({said})",
            hint=cloud.place_hint,
        )
    if isinstance(error, FileNotFoundError) or status == 404:
        return ObjectNotFound(f"{where}: no such object")
    if status == 409 and code != "BlobAlreadyExists":
        return TransientError(f"{where}: a concurrent write was in the way ({said})")
    return _of_kind(kind, where, cloud, said) or _of_status(status, where, cloud, said, text)


def _of_kind(kind: str, where: str, cloud: Cloud, said: str) -> BatchinferError | None:
    found: dict[str, BatchinferError] = {
        "AlreadyExistsError": AlreadyExists(f"{where}: exists with other bytes, expected none"),
        "PreconditionError": PreconditionFailed(f"{where}: is not the version that was expected"),
        "PermissionDeniedError": AccessDenied(
            f"{where}: the store refused access ({said})", hint=cloud.rights_hint
        ),
        "NotSupportedError": _not_supported(where, said),
        "InvalidPathError": InputError(
            f"{where}: {said}, expected names joined by single slashes",
            hint="remove or rename that object: no listing gets past it",
        ),
        "PanicException": ConfigError(
            f"{where}: no request can be made ({said})", hint=cloud.credentials_hint
        ),
    }
    return found.get(kind)


def _of_status(status: int, where: str, cloud: Cloud, said: str, text: str) -> BatchinferError:
    if status == 501:
        return _not_supported(where, said)
    if status:
        kind = StorageError if 400 <= status < 500 and status not in (408, 429) else TransientError
        return kind(f"{where}: the store answered {said}")
    if "kind: Connect" in text:
        return Unreachable(
            f"{where}: nothing answers at the store's address ({said})", hint=cloud.place_hint
        )
    return TransientError(f"{where}: no answer from the store ({said})", hint=cloud.place_hint)


def _not_supported(where: str, said: str) -> NotSupported:
    return NotSupported(f"{where}: the store does not support this request ({said})")


def bad_answer(where: str, what: str) -> TransientError:
    """Return the error for an answer that no store gives."""
    return TransientError(
        f"{where}: the answer is not one of a store ({what})",
        hint="check the endpoint and HTTP_PROXY: a proxy or a login page may answer in the store's place",
    )


def _said(text: str, status: int, code: str) -> str:
    """Return what the server or obstore says, in one line."""
    if status and code:
        return f"{status} {code}: {_first(_SAYS, text)}".removesuffix(": ")
    line = _REQUEST.sub("", text.strip().partition("\n")[0])
    for reason in ("dns error", "tcp connect error", "kind: Timeout", "invalid peer certificate"):
        if reason in text:
            return f"{line}: {reason.removeprefix('kind: ').lower()}"
    return line


def _first(pattern: re.Pattern[str], text: str) -> str:
    match = pattern.search(text)
    return match[1] if match else ""
