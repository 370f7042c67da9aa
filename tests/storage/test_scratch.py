"""Local scratch space: rows found again, folders of the dead removed, a full disk named."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType

import pytest

from batchinfer.core.errors import ConfigError, ScratchFull
from batchinfer.storage import scratch
from batchinfer.storage.scratch import Scratch, Spool, scratch_errors


def test_a_spool_gives_payloads_in_line_order_whatever_the_order_of_arrival(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "spool", 3)
    spool.append(b"<two><zero>", [(2, 1, 3), (0, 6, 4)])
    spool.append(b"<one>", [(1, 1, 3)])
    assert list(spool.payloads()) == [b"zero", b"one", b"two"]
    assert spool.read(0, spool.size_bytes) == b"<two><zero><one>"
    assert spool.read(11, 16) == b"<one>"
    spool.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("block_bytes", [1, 3, 100])
def test_a_spool_knows_where_its_records_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block_bytes: int
) -> None:
    monkeypatch.setattr(scratch, "_READ_BYTES", block_bytes)
    spool = Spool(tmp_path / "spool", 1)
    spool.append(b"a\nlong\n\nxyz\n", [])
    ends = [spool.record_end(place) for place in range(1, 14)]
    assert ends == [2, 2, 7, 7, 7, 7, 7, 8, 12, 12, 12, 12, 12]
    spool.close()


def test_the_folder_of_a_killed_worker_is_removed_by_the_next_one(tmp_path: Path) -> None:
    code = (
        "import sys, os, signal; from pathlib import Path; from batchinfer.storage.scratch import Scratch;"
        "s = Scratch(Path(sys.argv[1])); s.new_path('x').write_bytes(b'x'); os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    assert len(list(tmp_path.iterdir())) == 1
    scratch = Scratch(tmp_path)
    assert list(tmp_path.iterdir()) == [scratch.folder]
    scratch.close()


def test_the_folder_of_a_living_worker_is_left_alone(tmp_path: Path) -> None:
    first, second = Scratch(tmp_path), Scratch(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted([first.folder, second.folder])
    first.close()
    second.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("number", "what"),
    [(errno.ENOSPC, "is full"), (errno.EDQUOT, "is full"), (errno.EROFS, "cannot be written")],
)
def test_a_full_or_closed_disk_is_exit_34_and_names_the_folder(
    tmp_path: Path, number: int, what: str
) -> None:
    with pytest.raises(ScratchFull, match=what) as caught, scratch_errors(tmp_path):
        raise OSError(number, os.strerror(number))
    assert str(tmp_path) in caught.value.message
    assert "--scratch-dir" in caught.value.hint
    assert caught.value.exit_status == 34


@pytest.mark.parametrize("number", [errno.EACCES, errno.EPERM, errno.EROFS])
@pytest.mark.parametrize("step", [(os, "mkdir"), (tempfile, "mkdtemp")])
def test_a_folder_that_may_not_be_written_is_a_mistake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, step: tuple[ModuleType, str]
) -> None:
    def refuse(*_values: object, **_options: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(*step, refuse)
    with pytest.raises(ConfigError, match="cannot be written") as caught:
        Scratch(tmp_path / "scratch")
    assert str(tmp_path) in caught.value.message
    assert "check its owner and mount" in caught.value.hint
    assert caught.value.exit_status == 2


def test_a_really_full_disk_is_noticed(tmp_path: Path) -> None:
    with (
        pytest.raises(ScratchFull, match="/dev"),
        scratch_errors(Path("/dev/full")),
        Path("/dev/full").open("wb") as full,
    ):
        full.write(b"x" * 100_000)
