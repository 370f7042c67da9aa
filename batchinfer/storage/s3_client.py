"""botocore's clients for S3: how long they wait, which answers they refuse, and when idle connections are closed."""

from __future__ import annotations

import functools
import re
import threading
import time
from datetime import UTC, datetime
from typing import Any

import botocore.config
import botocore.exceptions
import botocore.loaders
import botocore.parsers
import botocore.session
import botocore.utils

CONNECT_SECONDS = 10.0
CONNECTION_SECONDS = 30.0
"""Seconds after which a client closes its idle connections. Some routers forget connections that are idle for minutes
and tell neither end; a request on such a connection gets no answer."""

_ROOTS = {
    "ListObjectsV2": b"ListBucketResult",
    "ListMultipartUploads": b"ListMultipartUploadsResult",
    "CreateMultipartUpload": b"InitiateMultipartUploadResult",
    "CompleteMultipartUpload": b"CompleteMultipartUploadResult",
    "DeleteObjects": b"DeleteResult",
}
"""XML element that the answer to a request must consist of, by the name of botocore's operation."""
_WITH_ETAG = ("GetObject", "HeadObject", "PutObject", "UploadPart")
"""Operations whose answer must have an ETag in its header."""
_FIRST_ELEMENT = re.compile(rb"(?:\xef\xbb\xbf)?\s*(?:<[?!][^>]*>\s*)*<(?:[\w.-]+:)?([\w.-]+)")


class S3Clients:
    """botocore's clients, one for each limit of silence. They share credentials. Safe for threads.

    A client is made only when it is needed, because making it may ask a server for credentials, which may fail for a
    moment. A request is repeated after such a failure, but the opening of a store is not.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._session: Any = None
        self._clients: dict[float, Any] = {}
        self._connected: dict[float, float] = {}

    def get(self, silence_seconds: float) -> Any:
        """Return the client that gives up a connection after so many seconds without a byte."""
        with self._lock:
            now = time.monotonic()
            client = self._clients.get(silence_seconds)
            if client is None:
                client = self._clients[silence_seconds] = self._make(silence_seconds)
                self._connected[silence_seconds] = now
            elif now - self._connected[silence_seconds] >= CONNECTION_SECONDS:
                client.close()  # This closes idle connections; requests that are under way go on.
                self._connected[silence_seconds] = now
            return client

    def _make(self, silence_seconds: float) -> Any:
        if self._session is None:
            session = botocore.session.get_session()
            parsers = session.get_component("response_parser_factory")
            parsers.set_parser_defaults(timestamp_parser=parse_time)
            loader = _shared_loader(session.get_config_variable("data_path"))
            session.register_component("data_loader", loader)
            self._session = session
        config = botocore.config.Config(
            # `S3Store` repeats requests itself. If botocore did so too, the numbers of attempts would multiply.
            retries={"total_max_attempts": 1},
            connect_timeout=CONNECT_SECONDS,
            read_timeout=silence_seconds,
            max_pool_connections=32,
        )
        client = self._session.create_client("s3", config=config)
        client.meta.events.register_first("before-parse.s3.*", check_answer)
        return client


@functools.cache
def _shared_loader(data_path: str | None) -> botocore.loaders.Loader:
    """Return botocore's loader of service descriptions, which keeps what it has loaded.

    Loading them takes about 0.1 s of CPU time, and a process opens several stores.
    """
    return botocore.loaders.create_loader(data_path)


def check_answer(response_dict: dict[str, Any], operation_model: Any, **_: Any) -> None:
    """Refuse an answer that was cut short or that no S3 server gives. Called by botocore before it parses an answer.

    botocore itself checks only the bodies of objects. Without this function, a listing whose body did not arrive, or
    that is a web page, would look like an empty listing, and such an answer to a bulk deletion like success.

    Raises:
        IncompleteReadError: The body has fewer bytes than its header says.
        ResponseParserError: The answer is not what S3 answers to this request. A proxy may have answered.
    """
    body, headers = response_dict["body"], response_dict["headers"]
    is_text = operation_model.http["method"] != "HEAD" and isinstance(body, bytes)
    expected = headers.get("content-length")
    if is_text and expected and len(body) < int(expected):
        raise botocore.exceptions.IncompleteReadError(
            actual_bytes=len(body), expected_bytes=int(expected)
        )
    if response_dict["status_code"] != 200:
        return
    name = operation_model.name
    if name in _WITH_ETAG:
        try:
            _check_header(name, headers)
        except botocore.parsers.ResponseParserError:
            if name == "GetObject":
                body.close()  # The object's bytes are still to come; nobody will read them.
            raise
    root = _ROOTS.get(name)
    if root is None or not is_text:
        return
    if name == "DeleteObjects" and expected == "0":
        return  # Some stores answer nothing to a deletion without failures.
    found = _FIRST_ELEMENT.match(body)
    # S3 may report an error with status 200; botocore finds that out.
    if found is None or found[1] not in (root, b"Error"):
        raise botocore.parsers.ResponseParserError(
            f"it is no {root.decode()} but begins with {body[:40]!r}" if body else "it is empty"
        )


def _check_header(name: str, headers: Any) -> None:
    """Refuse a header without an ETag or an object's length. Python's HTTP client accepts a header cut short."""
    etag = str(headers.get("etag") or "")
    if not etag or etag.count('"') == 1:
        raise botocore.parsers.ResponseParserError("it has no ETag")
    has_length = headers.get("content-length") or (
        name == "GetObject" and headers.get("transfer-encoding")
    )
    if name in ("GetObject", "HeadObject") and not has_length:
        raise botocore.parsers.ResponseParserError("it has no length")


def parse_time(text: Any) -> datetime:
    """Parse a time in an answer of the store. Times in ISO 8601 are parsed quickly, all others by botocore's parser.

    botocore's parser is slow. Reading a listing of 1000 keys takes about 110 ms of CPU time with it, and 30 ms with
    this function.
    """
    try:
        time_read = datetime.fromisoformat(text)
    except (TypeError, ValueError):
        time_read = botocore.utils.parse_timestamp(text)
    return time_read if time_read.tzinfo else time_read.replace(tzinfo=UTC)
