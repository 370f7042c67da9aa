"""Local scratch space: folders of the dead removed, a full disk named."""

import errno
import os
import signal
import tempfile
import time
from unittest.mock import Mock

import pytest

from batchinfer.core.errors import ConfigError, ScratchFull
from batchinfer.storage import scratch
from batchinfer.storage.scratch import Scratch, scratch_errors
from making import python


def make_old(folder):
    """Say that a process has made its lock some seconds ago."""
    then = time.time() - 11
    os.utime(folder / "lock", (then, then))


def test_the_folder_of_a_killed_worker_is_removed_by_the_next_one(tmp_path):
    code = (
        "import sys, os, signal; from pathlib import Path; from batchinfer.storage.scratch import Scratch;"
        "s = Scratch(Path(sys.argv[1])); s.new_path('x').write_bytes(b'x'); os.kill(os.getpid(), signal.SIGKILL)"
    )
    python(code, tmp_path, status=-signal.SIGKILL)
    (left,) = tmp_path.iterdir()
    Scratch(tmp_path).close()
    assert list(tmp_path.iterdir()) == [left], "it may be of a process that has not locked it yet"
    make_old(left)
    made = Scratch(tmp_path)
    assert list(tmp_path.iterdir()) == [made.folder]
    made.close()


def test_nothing_is_made_or_removed_in_another_users_folder(tmp_path, monkeypatch):
    """A link to elsewhere in a shared temporary folder would have a lock made there."""
    (tmp_path / "elsewhere").mkdir()
    link = tmp_path / "batchinfer-scratch-link"
    link.symlink_to(tmp_path / "elsewhere")
    monkeypatch.setattr(os, "getuid", lambda: link.lstat().st_uid + 1)
    monkeypatch.setattr(scratch, "_MAKING_SECONDS", 0.0)
    Scratch(tmp_path).close()
    assert sorted(tmp_path.rglob("*")) == [link, tmp_path / "elsewhere"]


def test_the_folder_of_a_living_worker_is_left_alone(tmp_path):
    first = Scratch(tmp_path)
    make_old(first.folder)
    second = Scratch(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted([first.folder, second.folder])
    first.close()
    second.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("number", "what"),
    [(errno.ENOSPC, "is full"), (errno.EDQUOT, "is full"), (errno.EROFS, "cannot be written")],
)
def test_a_full_or_closed_disk_is_exit_34_and_names_the_folder(tmp_path, number, what):
    with pytest.raises(ScratchFull, match=what) as caught, scratch_errors(tmp_path):
        raise OSError(number, os.strerror(number))
    assert str(tmp_path) in caught.value.message
    assert "--scratch-dir" in caught.value.hint
    assert caught.value.exit_status == 34


@pytest.mark.parametrize("number", [errno.EACCES, errno.EPERM, errno.EROFS])
@pytest.mark.parametrize("step", [(os, "mkdir"), (tempfile, "mkdtemp")])
def test_a_folder_that_may_not_be_written_is_a_mistake(tmp_path, monkeypatch, number, step):
    monkeypatch.setattr(*step, Mock(side_effect=OSError(number, os.strerror(number))))
    with pytest.raises(ConfigError, match="cannot be made") as caught:
        Scratch(tmp_path / "scratch")
    assert str(tmp_path) in caught.value.message
    assert "check its owner and mount" in caught.value.hint
    assert caught.value.exit_status == 2
