"""Translates obstore's errors to ours. obstore tells little but a text, in which the server's own answer stands."""

from __future__ import annotations

import re
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
from batchinfer.storage.error_rules import Rule, by_rules
from batchinfer.storage.retrying import NotSupported, TransientError


class Cloud(NamedTuple):
    """What differs between kinds of buckets. Fields of text are hints."""

    name: str
    credentials: str = ""
    rights: str = ""
    place: str = ""
    """What to check if the bucket is in another region, or if nothing answers there."""
    create: str = ""
    """How to create the bucket {bucket}."""
    is_remote: bool = True


_PASSING = (
    "CredentialRetrievalError MetadataRetrievalError EndpointConnectionError ConnectTimeoutError "
    "ReadTimeoutError ConnectionClosedError"
)
"""What botocore says while it has no credentials for the moment."""
_RULES = [
    # What made the upload fail is not told. The next try tells it, if it lasts.
    Rule(
        "DELETE",
        TransientError,
        "an upload failed, and its parts could not be removed ({said})",
        "{rights}",
    ),
    Rule(
        "NoSuchBucket ContainerNotFound",
        InputError,
        "the bucket does not exist at this endpoint, expected an existing bucket",
        "{create}",
    ),
    Rule("BlobAlreadyExists", AlreadyExists, "exists with other bytes, expected none"),
    # The clock of a machine that was suspended is wrong until it is set again. An unknown upload was aborted, or
    # completed with a reply that was lost. S3's 409 tells of a concurrent write.
    Rule(
        "RequestTimeout RequestTimeTooSkewed NoSuchUpload 408 409 429",
        TransientError,
        "the store answered {said}",
    ),
    # What gives the credentials, such as a metadata server or STS, may be away for a moment.
    Rule(
        f"{_PASSING} Throttling refreshed",
        TransientError,
        "no credentials ({said})",
        "{credentials}",
    ),
    Rule(
        "ExpiredToken ExpiredTokenException InvalidToken InvalidAccessKeyId SignatureDoesNotMatch "
        "TokenRefreshRequired AuthenticationFailed InvalidAuthenticationInfo UnauthenticatedError",
        AccessDenied,
        "credentials are missing or refused ({said})",
        "{credentials}",
    ),
    Rule(
        "AuthorizationHeaderMalformed PermanentRedirect IllegalLocationConstraintException BareRedirect",
        ConfigError,
        "the bucket is in another region or at another endpoint ({said})",
        "{place}",
    ),
    Rule("404 FileNotFoundError NotFoundError", ObjectNotFound, "no such object"),
    Rule("AlreadyExistsError", AlreadyExists, "exists with other bytes, expected none"),
    Rule("PreconditionError", PreconditionFailed, "is not the version that was expected"),
    Rule(
        "401 403 AccessDenied PermissionDeniedError",
        AccessDenied,
        "the store refused access ({said})",
        "{rights}",
    ),
    Rule("501 NotSupportedError", NotSupported, "the store does not support this ({said})"),
    Rule(
        "InvalidPathError",
        InputError,
        "{said}, expected names joined by single slashes; no listing gets past that object",
    ),
    Rule("PanicException", ConfigError, "no request can be made ({said})", "{credentials}"),
    Rule("4xx", StorageError, "the store answered {said}"),
    Rule("answered", TransientError, "the store answered {said}"),
    Rule("silent", TransientError, "no answer from the store ({said})", "{place}"),
]

_STATUS = re.compile(r"non-2xx status code: (\d+)")
_CODE = re.compile(r"<Code>([^<]+)</Code>|\(code: (\w+)\)")
"""Code in the server's answer, or as obstore tells it of one key of a deletion."""
_SAYS = re.compile(r"<Message>([^<]+)</Message>")
_REQUEST = re.compile(
    r"^.*?Error performing \w+ \S+ in \S+ - (Server returned non-2xx status code: )?|^.*?credential provider: |: $"
)
_WORDS = re.compile(
    rf"BareRedirect|{_PASSING.replace(' ', '|')}|(?<=\()Throttling|refreshed(?= credentials are still)"
    r"|DELETE(?= \S+\?uploadId=)"
)
_REASONS = ("dns error", "tcp connect error", "kind: Timeout", "invalid peer certificate")


def translate(error: BaseException, where: str, cloud: Cloud) -> BatchinferError | None:
    """Return our error for what obstore has raised about `where`; None if it is no error of obstore."""
    kind = type(error).__name__
    is_theirs = kind == "PanicException" or type(error).__module__.startswith("obstore")
    if not is_theirs and not isinstance(error, FileNotFoundError):
        return None
    text = str(error)
    code, status = _first(_CODE, text), _first(_STATUS, text)
    facts = {code, status, kind, *_WORDS.findall(text)}
    facts |= {f"{status[0]}xx", "answered"} if status else {"silent"}
    return by_rules(_RULES, facts, where, said=_said(text, status, code), **cloud._asdict())


def _said(text: str, status: str, code: str) -> str:
    """Return what the server or obstore says, in one line."""
    if status and code:
        return f"{status} {code}: {_first(_SAYS, text)}".removesuffix(": ")
    line = _REQUEST.sub("", text.strip().partition("\n")[0])
    reason = next((each for each in _REASONS if each in text), "")
    return f"{line}: {reason.removeprefix('kind: ').lower()}" if reason else line


def _first(pattern: re.Pattern[str], text: str) -> str:
    match = pattern.search(text)
    return match[match.lastindex or 0] if match else ""
