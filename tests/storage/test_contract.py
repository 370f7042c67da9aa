"""Every store keeps the same promises: local, memory, S3 (moto), Azure (Azurite) and GCS (a fake with generations)."""

import errno
import fcntl
import secrets
import time
from pathlib import Path

import pytest

from batchinfer.storage.opening import open_store
from store_contract import StoreContract, race


class TestLocal(StoreContract):
    @pytest.fixture
    def reopen(self, tmp_path):
        return lambda: open_store(str(tmp_path / "new" / "root"))

    def test_comparing_and_replacing_is_one_step(self, store, monkeypatch):
        replace = Path.replace

        def late(temp: Path, target: Path) -> Path:
            time.sleep(0.05)
            return replace(temp, target)

        monkeypatch.setattr(Path, "replace", late)
        etag = store.create("k", b"0")
        etags, _ = race([lambda n=n: store.replace("k", b"%d" % n, etag) for n in range(1, 5)])
        assert len(etags) == 1


class TestWithoutFolderLocks(TestLocal):
    """NFS."""

    @pytest.fixture(autouse=True)
    def refuse_folder_locks(self, monkeypatch):
        flock = fcntl.flock

        def files_only(handle: int, operation: int) -> None:
            if Path(f"/proc/self/fd/{handle}").resolve().is_dir():
                raise OSError(errno.EBADF, "Bad file descriptor")
            flock(handle, operation)

        monkeypatch.setattr(fcntl, "flock", files_only)


class TestMemory(StoreContract):
    @pytest.fixture
    def reopen(self):
        url = f"memory://{secrets.token_hex(6)}/job"
        return lambda: open_store(url)


class TestBuckets(StoreContract):
    @pytest.fixture(params=[pytest.param("s3", marks=pytest.mark.s3), "azure", "gcs"])
    def reopen(self, request):
        url = request.getfixturevalue(f"{request.param}_url")("some/job")
        return lambda: open_store(url)
