"""Errors of the local files that objects are copied to and from."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from batchinfer.core.errors import ScratchFull, StorageError

_UNUSABLE = {errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS, errno.EFBIG}


@contextmanager
def scratch_errors(path: Path) -> Iterator[None]:
    """Turn OSError on a local scratch file into ScratchFull or StorageError that names its folder."""
    try:
        yield
    except OSError as error:
        if error.errno in _UNUSABLE:
            raise ScratchFull(
                f"{path.parent}: cannot hold {path.name} ({error.strerror}), "
                "expected free space and write permission",
                hint="free space there, or pass another folder with --scratch-dir",
            ) from error
        raise StorageError(f"{path}: {error.strerror or error}, expected a usable file") from error
