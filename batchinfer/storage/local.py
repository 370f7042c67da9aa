"""A store in a local folder (or a network folder that behaves like one).

An object becomes visible as a whole, in three steps:

1. Its bytes are written to a hidden temporary file in the same folder, and the file is fsynced.
2. A create gives the file its final name with link(2), which fails if the name is taken. A replace takes the folder's
   lock, compares the etag, and renames the file over the old one.
3. The folder is fsynced, so that the new name survives a power cut.

A process that is killed meanwhile may leave one hidden file ``.<name>.<nonce>.tmp``. `list` does not show it,
and `sweep_temps` removes it. A folder's lock is a flock(2) on the folder itself, which the kernel releases when the
process that holds it dies. On NFS, which cannot lock a folder, a hidden ``.lock`` file in it is locked instead. A
filesystem without hard links is refused.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import shutil
import stat
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from batchinfer.core.errors import (
    AccessDenied,
    AlreadyExists,
    ConfigError,
    InputError,
    ObjectNotFound,
    PreconditionFailed,
    StorageError,
)
from batchinfer.storage import Object, ObjectInfo, check_key, check_prefix
from batchinfer.storage.scratch import scratch_errors

TEMP_SUFFIX = ".tmp"
LOCK_NAME = ".lock"

_ABSENT = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR}
_REFUSED = {errno.EACCES, errno.EPERM, errno.EROFS}
_FULL = {errno.ENOSPC, errno.EDQUOT}
_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}
_NO_FOLDER_LOCKS = {errno.EBADF, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EISDIR}
LOCK_SECONDS = 60.0
"""Seconds that a process waits for a folder's lock before it fails. Normally the lock is held for an instant."""

_COPY_BYTES = 1 << 17  # small enough to stay in the processor's cache


class LocalStore:
    """Objects as files below one folder, which is made by the first create.

    Safe for several threads, and for several processes of one machine. For several machines it is safe only if link(2)
    and flock(2) on the shared filesystem are.

    Args:
        root: The folder. A relative path is made absolute at once, from the current folder.
    """

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(os.path.abspath(root))  # noqa: PTH100 - resolve() would follow links
        self.url = str(self.root)

    def get(self, key: str) -> Object:
        """See `Store.get`."""
        path = self._path(key)
        with self._errors(key), path.open("rb") as file:
            return Object(file.read(), _etag(os.fstat(file.fileno())))

    def download(self, key: str, path: Path) -> None:
        """See `Store.download`."""
        with (
            self._errors(key),
            self._path(key).open("rb") as source,
            scratch_errors(path.parent),
            path.open("wb") as target,
        ):
            shutil.copyfileobj(source, target, _COPY_BYTES)

    def stat(self, key: str) -> ObjectInfo:
        """See `Store.stat`."""
        path = self._path(key)
        with self._errors(key):
            found = path.stat()
            if not path.is_file():
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        return ObjectInfo(key, found.st_size, _etag(found), found.st_mtime)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """See `Store.list`. Hides dot-files, and leaves out files that vanish during the walk."""
        folder = check_prefix(prefix).rpartition("/")[0]
        if any(part.startswith(".") for part in folder.split("/")):
            return iter(())
        top = self.root / folder if folder else self.root
        return self._walk(top, f"{folder}/" if folder else "", prefix, ())

    def create(self, key: str, data: bytes) -> str:
        """See `Store.create`."""
        if not data:
            raise ValueError(f"{key}: an object that is created must not be empty")

        path = self._path(key, writes=True)
        with self._errors(key):
            self._make_folder(path.parent)
            with _temp(path) as temp:
                _write(temp, data)
                etag = _touch(temp)
                try:
                    os.link(temp, path)
                except FileExistsError:
                    if path.is_file() and path.read_bytes() == data:
                        return _etag(path.stat())
                    raise AlreadyExists(f"{path}: exists with other bytes, expected none") from None
                except OSError as error:
                    if error.errno in _NO_LINKS:
                        raise self._no_links() from error
                    raise
            _fsync_folder(path.parent)
        return etag

    def put_file(self, key: str, path: Path) -> None:
        """See `Store.put_file`. Makes a hard link where that is possible."""
        target = self._path(key, writes=True)
        with scratch_errors(path.parent):
            path.stat()
        with self._errors(key):
            self._make_folder(target.parent)
            with _temp(target) as temp:
                _link_or_copy(path, temp)
                _touch(temp)
                os.replace(temp, target)  # noqa: PTH105 - the plain verb for an atomic step
            _fsync_folder(target.parent)

    def replace(self, key: str, data: bytes, etag: str) -> str:
        """See `Store.replace`. The lock makes the comparison and the rename one step for all processes."""
        path = self._path(key, writes=True)
        changed = PreconditionFailed(f"{path}: is not the version that was read")
        with self._errors(key):
            if not path.parent.is_dir():
                raise changed
            with _temp(path) as temp:
                _write(temp, data)
                with _locked(path.parent):
                    try:
                        before = path.stat()
                    except FileNotFoundError:
                        raise changed from None
                    if _etag(before) == etag:
                        new_etag = _touch(temp, after_ns=before.st_mtime_ns)
                        os.replace(temp, path)  # noqa: PTH105 - the plain verb for an atomic step
                    elif before.st_size == len(data) and path.read_bytes() == data:
                        new_etag = _etag(before)
                    else:
                        raise changed
            _fsync_folder(path.parent)
        return new_etag

    def delete(self, keys: Iterable[str]) -> None:
        """See `Store.delete`. Folders that become empty stay."""
        for key in keys:
            path = self._path(key)
            with self._errors(key):
                try:
                    with _locked(path.parent):
                        path.unlink()
                except (FileNotFoundError, NotADirectoryError):
                    pass

    def temps(self, older_than_seconds: float) -> Iterator[Path]:
        """Yield the temporary files that killed processes left. Younger ones may be a live process's."""
        limit = time.time() - older_than_seconds
        for path in self.root.rglob(f".*{TEMP_SUFFIX}"):
            with contextlib.suppress(FileNotFoundError):
                if path.stat().st_mtime < limit:
                    yield path

    def sweep_temps(self, older_than_seconds: float) -> int:
        """Remove the files that `temps` yields, and return their number."""
        found = list(self.temps(older_than_seconds))
        for path in found:
            with self._errors(path.name):
                path.unlink(missing_ok=True)
        return len(found)

    def _path(self, key: str, *, writes: bool = False) -> Path:
        check_key(key)
        if writes and any(part.startswith(".") for part in key.split("/")):
            raise InputError(
                f"key {key!r}: has a component that starts with a dot, which a local folder hides",
                hint="use a name without a dot at its start",
            )
        return self.root / key

    def _no_links(self) -> ConfigError:
        return ConfigError(
            f"{self.root}: its filesystem has no hard links, expected one that has",
            hint="use another folder: FAT and most mounts of a bucket have none; give a bucket's URL instead",
        )

    def _make_folder(self, folder: Path) -> None:
        try:
            _make_folder(folder)
            if folder == self.root and not folder.is_dir():
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), folder)
        except OSError as error:
            if error.errno not in _ABSENT:
                raise
            # A parent of the path is a file, or a system folder that takes no folders. This is not a missing object.
            raise AccessDenied(
                f"{folder}: cannot be made ({error.strerror}), expected a place for a folder",
                hint=f"check {self.root}, or use another folder",
            ) from error

    def _walk(
        self, folder: Path, start: str, prefix: str, above: tuple[tuple[int, int], ...]
    ) -> Iterator[ObjectInfo]:
        with self._errors(start or "."):
            try:
                held = folder.stat()
                with os.scandir(folder) as scan:
                    entries = [(_sort_name(entry), entry) for entry in scan]
            except (FileNotFoundError, NotADirectoryError):
                return
        place = (held.st_dev, held.st_ino)
        if (
            place in above
        ):  # The folder is reached again through a symbolic link to one of its own parents.
            return
        for name, entry in sorted(entries, key=lambda pair: pair[0]):
            key = start + name
            if name.startswith("."):
                continue
            if name.endswith("/"):
                if key.startswith(prefix):
                    yield from self._walk(Path(entry.path), key, prefix, (*above, place))
            elif key.startswith(prefix):
                with self._errors(key):
                    try:
                        found = entry.stat()
                    except FileNotFoundError:
                        continue
                if stat.S_ISREG(found.st_mode):
                    yield ObjectInfo(key, found.st_size, _etag(found), found.st_mtime)

    @contextmanager
    def _errors(self, key: str) -> Iterator[None]:
        """Turn OSError on the object `key` into one of our errors."""
        try:
            yield
        except OSError as error:
            where = self.root / key
            reason = error.strerror or str(error)
            if error.errno in _ABSENT:
                raise ObjectNotFound(f"{where}: no such object") from error
            if error.errno in _REFUSED:
                raise AccessDenied(
                    f"{where}: {reason}, expected permission to read and write",
                    hint=f"check owner and mount of {self.root} (ls -ld), or use another folder",
                ) from error
            if error.errno == errno.ENAMETOOLONG:
                raise InputError(f"key {key!r}: {reason}, expected a shorter name") from error
            if error.errno in _FULL:
                raise StorageError(
                    f"{where}: {reason}, expected free space", hint=f"free space in {self.root}"
                ) from error
            raise StorageError(f"{where}: {reason}") from error


def _etag(found: os.stat_result) -> str:
    return f"{found.st_mtime_ns:x}-{found.st_size:x}-{found.st_ino:x}"


def _sort_name(entry: os.DirEntry[str]) -> str:
    """Return the name by which an entry is sorted: for a folder with "/" at its end, as in keys.

    A depth-first walk then yields keys in order, for example "a.x" before "a/b".
    """
    return entry.name + "/" if entry.is_dir() else entry.name


def _touch(temp: Path, *, after_ns: int = 0) -> str:
    """Set a temporary file's times, so that its etag differs from those of earlier versions. Return the etag.

    The kernel's own file times advance in steps of some milliseconds, and an inode number may be used again within one
    step. The time set here has a finer step, and is later than `after_ns`, the time of the previous version.
    """
    now = max(time.time_ns(), after_ns + 1000)
    os.utime(temp, ns=(now, now))
    return _etag(temp.stat())


@contextmanager
def _temp(path: Path) -> Iterator[Path]:
    """Provide a name for a temporary file next to `path`, and remove the file afterwards."""
    # The object's name is cut at 40 characters, so that the temporary name does not exceed the filesystem's limit.
    temp = path.with_name(f".{path.name[:40]}.{secrets.token_hex(8)}{TEMP_SUFFIX}")
    try:
        yield temp
    finally:
        temp.unlink(missing_ok=True)


def _write(temp: Path, data: bytes) -> None:
    with temp.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _link_or_copy(source: Path, temp: Path) -> None:
    """Make `temp` hold the bytes of `source`, durably."""
    with source.open("rb") as file:
        try:
            os.link(source, temp)
        except OSError:  # another filesystem
            with temp.open("xb") as target:
                shutil.copyfileobj(file, target, _COPY_BYTES)
                target.flush()
                os.fsync(target.fileno())
        else:
            os.fsync(file.fileno())


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold a folder's lock. Only one thread of one process holds it at a time. It is freed if that process dies."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            _flock(handle, folder)
        except OSError as error:
            if error.errno not in _NO_FOLDER_LOCKS:
                raise
            # NFS locks only files that are open for writing, and a folder cannot be opened for writing.
            os.close(handle)
            handle = os.open(folder / LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o666)
            _flock(handle, folder)
        yield
    finally:
        os.close(handle)


def _flock(handle: int, folder: Path) -> None:
    """Take a lock. Wait for it at most `LOCK_SECONDS`, because the process that holds it may be frozen."""
    deadline = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise StorageError(
                    f"{folder}: locked by another process for {LOCK_SECONDS:g} s, expected an instant",
                    hint=f"look for a stopped process that holds it: lslocks, or fuser -v {folder}",
                ) from None
            time.sleep(0.002)


def _make_folder(folder: Path) -> None:
    """Make a folder and its parents, durably."""
    if folder.is_dir():
        return
    _make_folder(folder.parent)
    with contextlib.suppress(FileExistsError):
        folder.mkdir()
        _fsync_folder(folder.parent)


def _fsync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno != errno.EINVAL:  # EINVAL means that this filesystem cannot sync a folder.
            raise
    finally:
        os.close(handle)
