import errno
import fcntl
import os
from itertools import islice
from pathlib import Path
from unittest.mock import Mock

import pytest

from batchinfer.core.errors import (
    AccessDenied,
    AlreadyExists,
    ConfigError,
    InputError,
    ScratchFull,
    StorageError,
)
from batchinfer.storage.local import LOCK_NAME, LocalStore
from batchinfer.storage.opening import check_preconditions
from batchinfer.storage.scratch import Scratch


def test_a_filesystem_without_locks_is_refused(store, monkeypatch):
    absent = OSError(errno.ENOSYS, "Function not implemented")
    monkeypatch.setattr(fcntl, "flock", Mock(side_effect=absent))
    with pytest.raises(ConfigError, match="has no locks"):
        check_preconditions(store)
    with pytest.raises(ConfigError, match="cannot be made"):
        Scratch(store.root / "scratch")
    assert not list((store.root / "scratch").iterdir())


def test_an_object_that_is_removed_meanwhile_was_there(store, monkeypatch):
    store.create("k", b"1")

    def read(path: Path) -> bytes:
        path.unlink()
        raise FileNotFoundError(errno.ENOENT, "No such file or directory")

    monkeypatch.setattr(Path, "read_bytes", read)
    with pytest.raises(AlreadyExists):
        store.create("k", b"2")


def test_a_filesystem_without_hard_links_is_refused(store, monkeypatch):
    refused = PermissionError(errno.EPERM, "Operation not permitted")
    monkeypatch.setattr(os, "link", Mock(side_effect=refused))
    with pytest.raises(ConfigError, match="no hard links") as caught:
        check_preconditions(store)
    assert caught.value.exit_status == 2
    assert list(store.list()) == []


@pytest.fixture
def store(tmp_path):
    return LocalStore(tmp_path / "root")


def test_dot_files_dangling_links_and_pipes_are_no_objects_and_linked_folders_are_listed(
    store, tmp_path
):
    store.create("a/b", b"1")
    (store.root / ".hidden").write_bytes(b"x")
    (store.root / "a" / ".lock").touch()
    (store.root / ".git").mkdir()
    (store.root / ".git" / "config").write_bytes(b"x")
    (store.root / "a" / "dangling").symlink_to("nowhere")
    os.mkfifo(store.root / "a" / "pipe")
    (store.root / "a" / "circle").symlink_to("circle")
    for place in (".", ".."):  # two of them made a list of 2^40 keys
        (store.root / "a" / f"to{place}").symlink_to(place)
    (tmp_path / "big-disk").mkdir()
    (store.root / "outputs").symlink_to(tmp_path / "big-disk")
    store.create("outputs/x", b"2")
    assert [found.key for found in islice(store.list(), 9)] == ["a/b", "outputs/x"]
    assert list(store.list(".git/")) == []
    assert list(LocalStore(store.root / "a" / "circle").list("x")) == []
    for key in (".x", "a/.x", ".a/x"):
        with pytest.raises(InputError, match="dot"):
            store.create(key, b"x")


def test_files_that_vanish_while_listing_are_left_out(store):
    for index in range(3):
        store.create(f"x/{index}/file", b"1")
    listing = store.list()
    assert next(listing).key == "x/0/file"
    (store.root / "x/1/file").unlink()
    (store.root / "x/2/file").unlink()
    (store.root / "x/2").rmdir()
    assert list(listing) == []


def test_etag_is_new_even_where_inode_and_tick_come_back(store):
    etags = {store.create("k", b"000")}
    for index in range(1, 200):
        store.delete(["k"])
        etags.add(store.create("k", b"%03d" % index))
    assert len(etags) == 200


@pytest.mark.parametrize("verb", ["create", "put_file"])
def test_full_disk_is_a_storage_error_and_leaves_nothing(store, tmp_path, monkeypatch, verb):
    store.create("a/b", b"1")
    (built := tmp_path / "built").write_bytes(b"1")
    full = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(os, "fsync", Mock(side_effect=full))
    with pytest.raises(StorageError, match="No space left") as caught:
        getattr(store, verb)("a/c", b"1" if verb == "create" else built)
    assert not isinstance(caught.value, ScratchFull), "it is not the scratch folder that is full"
    assert [path.name for path in (store.root / "a").iterdir()] == ["b"]


@pytest.mark.parametrize("is_apart", [False, True])
def test_bytes_are_on_the_disk_before_the_name_and_the_name_before_the_answer(
    tmp_path, monkeypatch, is_apart
):
    """P2 and P3: a marker must not outlive a power cut that its output does not.

    A file of another filesystem is copied, others are not.
    """
    store = LocalStore(tmp_path / "store")
    store.create("outputs/first", b"x")
    source = tmp_path / "built"
    source.write_bytes(b"rows\n")
    target = tmp_path / "store/outputs/a"
    synced = []
    real = os.fsync

    def fsync(handle):
        synced.append((os.fstat(handle).st_ino, target.exists()))
        real(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    if is_apart:
        apart = OSError(errno.EXDEV, "Invalid cross-device link")
        monkeypatch.setattr(os, "link", Mock(side_effect=apart))
    store.put_file("outputs/a", source)
    assert synced == [(target.stat().st_ino, False), (target.parent.stat().st_ino, True)]
    assert target.read_bytes() == b"rows\n"
    assert source.samefile(target) != is_apart


def test_files_of_a_shared_folder_have_its_group(store, tmp_path, monkeypatch):
    store.create("a/b", b"1")
    (store.root / "a").chmod(0o2775)
    (tmp_path / "built").write_bytes(b"1")
    monkeypatch.setattr(os, "chown", chown := Mock())
    store.put_file("a/c", tmp_path / "built")
    assert chown.call_args.args[1:] == (-1, (store.root / "a").stat().st_gid)


def test_a_lock_that_may_not_be_made_is_refused_access(store: LocalStore, monkeypatch):
    """The folder's handle was closed twice: of several threads, the second time it was another's."""
    etag, real = store.create("k", b"1"), os.open
    bad = OSError(errno.EBADF, "Bad file descriptor")

    def refuse(path, *rest):
        if Path(path).name == LOCK_NAME:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real(path, *rest)

    monkeypatch.setattr(fcntl, "flock", Mock(side_effect=bad))
    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(AccessDenied):
        store.replace("k", b"2", etag)
