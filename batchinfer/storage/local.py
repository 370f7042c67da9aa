"""A store in a local folder.

An object is a file, and its key is the file's path below the folder. Files whose names start with a dot are hidden.

Each write makes a file with a temporary name, syncs it to the disk, and then gives it the object's name in one step
that fails if it must: link(2) where the object must not exist, rename(2) under the folder's lock where its version
matters. The folder is synced, too, so a completed write survives a power loss.

A killed process leaves at most a temporary file, which `temps` shows until somebody removes it. A folder's lock is a
flock(2) on the folder itself, which the kernel releases when the process that holds it dies. On NFS, which cannot lock
a folder, a hidden ``.lock`` file in it is locked instead. A filesystem without hard links is refused.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
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
from batchinfer.storage.scratch import NO_LOCKS, scratch_errors

TEMP_SUFFIX = ".tmp"
LOCK_NAME = ".lock"

_ABSENT = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP}
_REFUSED = {errno.EACCES, errno.EPERM, errno.EROFS}
_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}
_NO_FOLDER_LOCKS = {errno.EBADF, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EISDIR}


class LocalStore:
    """Objects as files below one folder, which is made by the first write.

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
            shutil.copyfileobj(source, target)

    def stat(self, key: str) -> ObjectInfo:
        """See `Store.stat`."""
        path = self._path(key)
        with self._errors(key):
            found = path.stat()
        if not stat.S_ISREG(found.st_mode):
            raise ObjectNotFound(f"{path}: is no file, expected one")
        return ObjectInfo(key, found.st_size, _etag(found), found.st_mtime)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """See `Store.list`. Hides dot-files, and leaves out files that vanish during the walk."""
        folder, slash, _ = check_prefix(prefix).rpartition("/")
        if any(part.startswith(".") for part in folder.split("/")):
            return iter(())
        return self._walk(folder + slash, prefix)

    def create(self, key: str, data: bytes) -> str:
        """See `Store.create`."""
        if not data:
            raise ValueError(f"{key}: an object that is created must not be empty")
        with self._new(key) as (path, temp):
            etag = _write(temp, data)
            try:
                os.link(temp, path)
            except FileExistsError:
                with contextlib.suppress(FileNotFoundError):  # it may be removed meanwhile
                    if path.is_file() and path.read_bytes() == data:
                        return _etag(path.stat())
                raise AlreadyExists(f"{path}: exists with other bytes, expected none") from None
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
                raise ConfigError(
                    f"{self.root}: its filesystem has no hard links, expected one that has",
                    hint="use another folder: FAT and most mounts of a bucket have none; give a bucket's URL instead",
                ) from error
        return etag

    def put_file(self, key: str, path: Path) -> None:
        """See `Store.put_file`."""
        with scratch_errors(path.parent), path.open("rb"), self._new(key) as (target, temp):
            try:
                os.link(path, temp)  # on one filesystem, no byte is copied
            except OSError:
                shutil.copyfile(path, temp)
            folder = target.parent.stat()
            if folder.st_mode & stat.S_ISGID:  # its files have its group
                os.chown(temp, -1, folder.st_gid)
            _fsync(temp)
            temp.replace(target)

    def replace(self, key: str, data: bytes, etag: str) -> str:
        """See `Store.replace`. The lock makes the comparison and the rename one step for all processes."""
        with self._new(key) as (path, temp):
            new_etag = _write(temp, data)
            with _locked(path.parent):
                current = _etag(path.stat()) if path.is_file() else ""
                if current == etag:
                    temp.replace(path)
                    return new_etag
                if current and path.read_bytes() == data:
                    return current
                raise PreconditionFailed(f"{path}: is not the version that was read")

    def delete(self, keys: Iterable[str]) -> None:
        """See `Store.delete`. Folders that become empty stay."""
        for key in keys:
            path = self._path(key)
            with contextlib.suppress(ObjectNotFound), self._errors(key), _locked(path.parent):
                path.unlink()

    def temps(self, older_than_seconds: float) -> Iterator[Path]:
        """Yield the temporary files that killed processes left. Younger ones may be a live process's."""
        limit = time.time() - older_than_seconds
        for path in self.root.rglob(f".*{TEMP_SUFFIX}"):
            with contextlib.suppress(FileNotFoundError):
                if path.is_file() and path.stat().st_mtime < limit:
                    yield path

    # ------------------------------------------------------------------ helpers of the verbs

    def _path(self, key: str) -> Path:
        return self.root / check_key(key)

    @contextmanager
    def _new(self, key: str) -> Iterator[tuple[Path, Path]]:
        """Provide the path of an object and a temporary one beside it, for a write. Afterwards sync the folder."""
        path = self._path(key)
        if any(part.startswith(".") for part in key.split("/")):
            raise InputError(
                f"key {key!r}: has a component that starts with a dot, which a local folder hides",
                hint="use a name without a dot at its start",
            )
        # The object's name is cut at 40 characters, so that the temporary name does not exceed the filesystem's limit.
        temp = path.with_name(f".{path.name[:40]}.{secrets.token_hex(8)}{TEMP_SUFFIX}")
        with self._errors(key):
            self._make_folder(path.parent)
            if path.is_dir():
                raise AccessDenied(
                    f"{path}: is a folder, expected a file",
                    hint="name a file in it, or move it away",
                )
            try:
                yield path, temp
            finally:
                temp.unlink(missing_ok=True)
            _fsync(path.parent)

    def _make_folder(self, folder: Path) -> None:
        """Make a folder and its parents, durably."""
        missing = itertools.takewhile(lambda each: not each.is_dir(), (folder, *folder.parents))
        try:
            for each in reversed(list(missing)):
                each.mkdir(exist_ok=True)
                _fsync(each.parent)
        except OSError as error:
            if error.errno not in {*_ABSENT, errno.EEXIST}:
                raise
            # A parent of the path is a file, or a system folder that takes no folders. This is not a missing object.
            raise AccessDenied(
                f"{folder}: cannot be made ({error.strerror}), expected a place for a folder",
                hint=f"check {self.root}, or use another folder",
            ) from error

    def _walk(self, start: str, prefix: str) -> Iterator[ObjectInfo]:
        """List the folder `start`, in the order of keys: a folder counts with its slash, so "a.x" is before "a/b"."""
        with self._errors(start):
            try:
                with os.scandir(self.root / start) as scan:
                    seen = [
                        (each.name + "/" * _is_folder(each), each)
                        for each in scan
                        if not each.name.startswith(".") and (start + each.name).startswith(prefix)
                    ]
            except OSError as error:
                if error.errno not in _ABSENT:
                    raise
                return
        for name, entry in sorted(seen, key=lambda pair: pair[0]):
            key = start + name
            if name.endswith("/"):
                yield from self._walk(key, prefix)
                continue
            with contextlib.suppress(ObjectNotFound), self._errors(key):
                found = entry.stat()
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
            if error.errno in NO_LOCKS:
                raise ConfigError(
                    f"{self.root}: its filesystem has no locks ({reason}), expected one that has",
                    hint="mount it with flock, or use another folder or a bucket",
                ) from error
            if error.errno == errno.ENAMETOOLONG:
                raise InputError(f"{where}: {reason}, expected a shorter name") from error
            is_full = error.errno in {errno.ENOSPC, errno.EDQUOT}
            hint = f"free space in {self.root}" if is_full else ""
            raise StorageError(f"{where}: {reason}", hint=hint) from error


def _is_folder(entry: os.DirEntry[str]) -> bool:
    """Whether it is a folder. A link in a circle, or to where nobody may look, is none, and spoils no list."""
    with contextlib.suppress(OSError):
        return entry.is_dir() and not (entry.is_symlink() and _leads_up(Path(entry.path)))
    return False


def _leads_up(link: Path) -> bool:
    """Whether a link leads to a folder that holds it, so that a walk would come to it again."""
    return link.parent.resolve().is_relative_to(link.resolve())


def _etag(found: os.stat_result) -> str:
    return f"{found.st_mtime_ns:x}-{found.st_size:x}-{found.st_ino:x}"


def _write(temp: Path, data: bytes) -> str:
    """Write a temporary file, durably. Return its etag, which no earlier version had.

    The kernel's own file times advance in steps of some milliseconds, and an inode number may be used again within one
    step. The time that is set here has a finer step.
    """
    with temp.open("xb") as file:
        file.write(data)
        file.flush()
        os.utime(file.fileno(), ns=(time.time_ns(),) * 2)
        os.fsync(file.fileno())
        return _etag(os.fstat(file.fileno()))


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold a folder's lock. Only one thread of one process holds it at a time. It is freed if that process dies."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in _NO_FOLDER_LOCKS:
                raise
            # NFS locks only files that are open for writing, and a folder cannot be opened for writing.
            opened = os.open(folder / LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o666)
            os.close(handle)
            handle = opened
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno != errno.EINVAL:  # EINVAL means that this filesystem cannot sync a folder.
            raise
    finally:
        os.close(handle)
