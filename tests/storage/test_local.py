from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from batchinfer.core.errors import (
    AccessDenied,
    AlreadyExists,
    ConfigError,
    InputError,
    ScratchFull,
    StorageError,
)
from batchinfer.storage import Store
from batchinfer.storage.local import LocalStore
from batchinfer.storage.opening import check_preconditions
from store_contract import StoreContract


class TestWithoutFolderLocks(StoreContract):
    """NFS."""

    @pytest.fixture
    def reopen(self, tmp_path: Path) -> Callable[[], Store]:
        return lambda: LocalStore(tmp_path / "root" / "deeper")

    @pytest.fixture(autouse=True)
    def refuse_folder_locks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        flock = fcntl.flock

        def files_only(handle: int, operation: int) -> None:
            if Path(f"/proc/self/fd/{handle}").resolve().is_dir():
                raise OSError(errno.EBADF, "Bad file descriptor")
            flock(handle, operation)

        monkeypatch.setattr(fcntl, "flock", files_only)


def test_a_filesystem_without_hard_links_is_refused(store: LocalStore, monkeypatch):
    def link(source: object, target: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", link)
    with pytest.raises(ConfigError, match="no hard links") as caught:
        check_preconditions(store)
    assert caught.value.exit_status == 2
    assert list(store.list()) == []


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "root")


def run_python(code: str, *arguments: object) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )


CREATOR = """
import sys
from batchinfer.core.errors import AlreadyExists
from batchinfer.storage.local import LocalStore
store = LocalStore(sys.argv[1])
wins = 0
print("ready", flush=True)
sys.stdin.readline()
for index in range(150):
    try:
        store.create(f"claims/{index}", f"{sys.argv[2]} {index}".encode())
        wins += 1
    except AlreadyExists:
        pass
print(wins, flush=True)
"""

REPLACER = """
import sys
from batchinfer.core.errors import PreconditionFailed
from batchinfer.storage.local import LocalStore
store = LocalStore(sys.argv[1])
print("ready", flush=True)
sys.stdin.readline()
for _ in range(100):
    while True:
        held = store.get("counter")
        owner, count = held.data.split()
        try:
            store.replace("counter", f"{sys.argv[2]} {int(count) + 1}".encode(), held.etag)
            break
        except PreconditionFailed:
            pass
print("done", flush=True)
"""


def race_processes(code: str, root: Path, num_processes: int) -> list[bytes]:
    processes = [run_python(code, root, f"p{index}") for index in range(num_processes)]
    for process in processes:
        assert process.stdout.readline() == b"ready\n"
    for process in processes:
        process.stdin.write(b"go\n")
        process.stdin.flush()
    outputs = [process.communicate(timeout=120)[0].strip() for process in processes]
    assert [process.returncode for process in processes] == [0] * num_processes
    return outputs


def test_two_processes_never_both_create(store: LocalStore):
    wins = race_processes(CREATOR, store.root, 2)
    assert sum(map(int, wins)) == 150
    assert len(list(store.list("claims/"))) == 150


def test_two_processes_lose_no_replace(store: LocalStore):
    store.create("counter", b"nobody 0")
    race_processes(REPLACER, store.root, 2)
    assert store.get("counter").data.split()[1] == b"200"


WRITER = """
import sys
from pathlib import Path
from batchinfer.storage.local import LocalStore
store = LocalStore(sys.argv[1])
print("ready", flush=True)
for index in range(10_000):
    store.put_file(f"outputs/{sys.argv[3]}-{index:05d}", Path(sys.argv[2]))
"""


def test_killed_writer_never_shows_a_part(store: LocalStore, tmp_path: Path):
    source = tmp_path / "source"
    source.write_bytes(random.Random(1).randbytes(20 << 20))
    sha256 = hashlib.sha256(source.read_bytes()).hexdigest()
    pauses = random.Random(2)
    num_whole = 0
    for round_index in range(8):
        writer = run_python(WRITER, store.root, source, round_index)
        assert writer.stdout.readline() == b"ready\n"
        time.sleep(pauses.uniform(0.0, 0.15))
        writer.kill()
        writer.wait()
        writer.stdout.close()
        writer.stdin.close()
        whole = list(store.list())
        for found in whole:
            assert found.bytes == 20 << 20
            assert hashlib.sha256(store.get(found.key).data).hexdigest() == sha256
        num_whole += len(whole)
        store.delete([found.key for found in whole])
    temps = list(store.root.rglob(".*.tmp"))
    assert num_whole or temps, "nothing was ever written: the test showed nothing"
    assert list(store.temps(3600)) == []
    assert set(store.temps(-1)) == set(temps)


def test_only_old_temporary_files_are_shown_as_left_behind(store: LocalStore):
    store.create("a/b", b"1")
    old = store.root / "a" / ".b.0123456789abcdef.tmp"
    old.write_bytes(b"part")
    os.utime(old, (1, 1))
    young = store.root / "a" / ".c.0123456789abcdef.tmp"
    young.write_bytes(b"part")
    os.utime(store.root / "a" / "b", (1, 1))
    assert list(store.temps(60)) == [old]
    assert [found.key for found in store.list()] == ["a/b"]


def test_dot_files_are_neither_listed_nor_created(store: LocalStore):
    store.create("a/b", b"1")
    (store.root / ".hidden").write_bytes(b"x")
    (store.root / "a" / ".lock").touch()
    (store.root / ".git").mkdir()
    (store.root / ".git" / "config").write_bytes(b"x")
    assert [found.key for found in store.list()] == ["a/b"]
    assert list(store.list(".git/")) == []
    for key in (".x", "a/.x", ".a/x"):
        with pytest.raises(InputError, match="dot"):
            store.create(key, b"x")


def test_files_that_vanish_while_listing_are_left_out(store: LocalStore):
    for index in range(3):
        store.create(f"x/{index}/file", b"1")
    listing = store.list()
    assert next(listing).key == "x/0/file"
    (store.root / "x/1/file").unlink()
    (store.root / "x/2/file").unlink()
    (store.root / "x/2").rmdir()
    assert list(listing) == []


def test_dangling_links_and_pipes_are_no_objects(store: LocalStore):
    store.create("a/b", b"1")
    (store.root / "a" / "dangling").symlink_to("nowhere")
    os.mkfifo(store.root / "a" / "pipe")
    assert [found.key for found in store.list()] == ["a/b"]


def test_linked_folder_is_listed(store: LocalStore, tmp_path: Path):
    (tmp_path / "big-disk").mkdir()
    store.create("a/b", b"1")
    (store.root / "outputs").symlink_to(tmp_path / "big-disk")
    store.create("outputs/x", b"2")
    assert [found.key for found in store.list()] == ["a/b", "outputs/x"]


def test_etag_is_new_even_where_inode_and_tick_come_back(store: LocalStore):
    etags = {store.create("k", b"000")}
    for index in range(1, 200):
        store.delete(["k"])
        etags.add(store.create("k", b"%03d" % index))
    assert len(etags) == 200


def test_read_only_filesystem_is_access_denied(store: LocalStore, monkeypatch):
    etag = store.create("a/b", b"1")

    def refuse(*arguments: object, **options: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Path, "open", refuse)
    for verb in (lambda: store.create("a/c", b"1"), lambda: store.replace("a/b", b"2", etag)):
        with pytest.raises(AccessDenied, match="Read-only") as caught:
            verb()
        assert str(store.root) in caught.value.hint
    with pytest.raises(AccessDenied):
        check_preconditions(store)


def test_folder_that_cannot_be_made_is_access_denied():
    with pytest.raises(AccessDenied, match="/sys/batchinfer"):
        LocalStore("/sys/batchinfer").create("k", b"1")


def test_folder_below_a_file_is_access_denied_not_a_missing_object(tmp_path: Path):
    (tmp_path / "file").write_bytes(b"1")
    with pytest.raises(AccessDenied, match="cannot be made"):
        LocalStore(tmp_path / "file/run").create("outputs/k", b"1")
    with pytest.raises(AccessDenied, match="cannot be made"):
        LocalStore(tmp_path / "file").create("k", b"1")
    with pytest.raises(AccessDenied, match="cannot be made"):
        LocalStore("/proc/batchinfer").create("k", b"1")


def test_full_disk_is_a_storage_error_and_leaves_nothing(store: LocalStore, monkeypatch):
    store.create("a/b", b"1")

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageError, match="No space left") as caught:
        store.create("a/c", b"1")
    assert not isinstance(caught.value, ScratchFull)
    assert [path.name for path in (store.root / "a").iterdir()] == ["b"]


def test_name_that_is_too_long_is_refused(store: LocalStore):
    with pytest.raises(InputError, match="shorter"):
        store.create("x" * 300, b"1")
    store.create("x" * 250, b"1")
    assert store.get("x" * 250).data == b"1"


def test_folder_in_the_place_of_an_object_is_no_object(store: LocalStore):
    store.create("a/b", b"1")
    with pytest.raises(AlreadyExists):
        store.create("a", b"1")
    with pytest.raises(AccessDenied, match="cannot be made"):
        store.create("a/b/c", b"1")


def test_lock_of_a_killed_process_is_free(store: LocalStore):
    etag = store.create("a/b", b"1")
    holder = run_python(
        "import fcntl, os, sys, time\n"
        "fcntl.flock(os.open(sys.argv[1], os.O_RDONLY), fcntl.LOCK_EX)\n"
        "print('held', flush=True); time.sleep(100)",
        store.root / "a",
    )
    assert holder.stdout.readline() == b"held\n"
    holder.send_signal(signal.SIGKILL)
    holder.communicate()
    store.replace("a/b", b"2", etag)


def test_bytes_are_on_the_disk_before_the_name_and_the_name_before_the_answer(
    tmp_path, monkeypatch
):
    """P2 and P3: a marker must not outlive a power cut that its output does not."""
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
    store.put_file("outputs/a", source)
    assert synced == [(target.stat().st_ino, False), (target.parent.stat().st_ino, True)]
