"""Multipart uploads to S3: files in parts, several at a time, and what killed processes left of theirs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from batchinfer.core.errors import BatchinferError, ObjectNotFound, PreconditionFailed
from batchinfer.storage.retrying import TransientError
from batchinfer.storage.scratch import scratch_errors

PART_BYTES = 16 << 20
"""Size of every part but the last (R2 wants them equal)."""
PART_CONCURRENCY = 4
MAX_PARTS = 10_000

Retry = Callable[[Callable[[], Any]], Any]


class Upload(NamedTuple):
    """An unfinished multipart upload; `started` is Unix seconds by the store's clock."""

    key: str
    upload_id: str
    started: float


class Call(Protocol):
    """Sends S3 requests."""

    def __call__(self, method: str, **arguments: Any) -> Any:
        """Send one, once, and give botocore's answer. Raises our errors."""
        ...


class Uploads:
    """Uploads to one bucket; paths are whole keys. Safe for threads.

    Args:
        call: Sends a request.
        retry: Repeats an action as often as is worth it. Not used for a whole upload: that is its caller's.
        url_of: A path's URL, for messages.
        part_bytes: As `PART_BYTES`.
    """

    def __init__(
        self, call: Call, retry: Retry, url_of: Callable[[str], str], *, part_bytes: int
    ) -> None:
        self._call = call
        self._retry = retry
        self._url_of = url_of
        self._part_bytes = part_bytes

    def send(self, path: str, file: Path, size: int) -> str:
        """Upload a file; only the last request makes it an object, if there is none. Returns the etag.

        Raises:
            PreconditionFailed: There is one, perhaps this very upload's, completed with its reply lost.
            TransientError: The upload is gone without having become an object; start again.
        """
        part_bytes = max(self._part_bytes, -(-size // MAX_PARTS))

        def read(number: int) -> bytes:
            with scratch_errors(file.parent), file.open("rb") as source:
                source.seek((number - 1) * part_bytes)
                return source.read(part_bytes)

        return self._send(path, read, -(-size // part_bytes))

    def send_bytes(self, path: str, data: bytes) -> str:
        """The same for a few bytes, as one part."""
        return self._send(path, lambda _: data, 1)

    def unfinished(self, prefix: str) -> Iterator[Upload]:
        """Unfinished uploads below a prefix, in key order. Lazy, a page at a time."""
        marker: dict[str, str] = {}
        while True:
            page = self._retry(
                partial(self._call, "list_multipart_uploads", Prefix=prefix, **marker)
            )
            for item in page.get("Uploads", ()):
                yield Upload(item["Key"], item["UploadId"], item["Initiated"].timestamp())
            if not page.get("IsTruncated"):
                return
            marker = {
                "KeyMarker": page["NextKeyMarker"],
                "UploadIdMarker": page["NextUploadIdMarker"],
            }

    def abort(self, path: str, upload_id: str) -> None:
        """Drop an upload and its parts. One request. Raises ObjectNotFound if it is gone."""
        self._call("abort_multipart_upload", Key=path, UploadId=upload_id)

    def _send(self, path: str, read: Callable[[int], bytes], num_parts: int) -> str:
        upload_id = self._call("create_multipart_upload", Key=path)["UploadId"]

        def send(number: int) -> dict[str, Any]:
            part = {"Key": path, "UploadId": upload_id, "PartNumber": number}
            answer = self._retry(partial(self._call, "upload_part", Body=read(number), **part))
            return {"PartNumber": number, "ETag": answer["ETag"]}

        pool = ThreadPoolExecutor(PART_CONCURRENCY, thread_name_prefix="upload-part")
        try:
            parts = list(pool.map(send, range(1, num_parts + 1)))
            return self._complete(path, upload_id, parts)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            with contextlib.suppress(BatchinferError):  # the first error is the one to report
                self.abort(path, upload_id)
            raise
        finally:
            pool.shutdown()

    def _complete(self, path: str, upload_id: str, parts: Sequence[dict[str, Any]]) -> str:
        complete = partial(
            self._call,
            "complete_multipart_upload",
            Key=path,
            UploadId=upload_id,
            MultipartUpload={"Parts": list(parts)},
            IfNoneMatch="*",
        )
        try:
            return str(self._retry(complete)["ETag"])
        except ObjectNotFound:
            # No such upload: an earlier try completed it and its reply was lost, or someone aborted it.
            try:
                self._retry(partial(self._call, "head_object", Key=path))
            except ObjectNotFound as error:
                raise TransientError(f"{self._url_of(path)}: its upload was aborted") from error
            raise PreconditionFailed(f"{self._url_of(path)}: exists") from None
