"""DEST of a conversion in a bucket: what is there already, rights, and kills while uploading."""

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from batchinfer.convert.places import fetch_file, result_at
from batchinfer.core.errors import AccessDenied, InputError, StorageError
from batchinfer.storage.bucket import BucketStore
from batchinfer.storage.opening import open_store

NAMES = ["config.json", *(f"model-{index}.safetensors" for index in range(6))]


def convert(dest: str) -> None:
    with result_at(dest) as folder:
        for name in NAMES:
            (folder / name).write_bytes(name.encode() * 2000)


def keys(url: str) -> set[str]:
    return {info.key for info in open_store(url).list("")}


def test_after_kills_the_same_command_finishes(monkeypatch: pytest.MonkeyPatch) -> None:
    create, url = BucketStore.put_file, "memory://kills/hf"
    for after in (1, 4, len(NAMES) - 1):
        left = iter(range(after))

        def create_or_die(self: Any, *words: Any, left: Any = left) -> str:
            if next(left, None) is None:
                raise KeyboardInterrupt
            return create(self, *words)

        monkeypatch.setattr(BucketStore, "put_file", create_or_die)
        with pytest.raises(KeyboardInterrupt):
            convert(url)
        assert len(keys(url)) == after
        assert "config.json" not in keys(url), "a program would take this for a model"
    monkeypatch.undo()
    convert(url)
    assert keys(url) == set(NAMES)
    with pytest.raises(InputError, match="holds something already"):
        convert(url)


@pytest.mark.parametrize("there", ["notes.txt", "config.json", "model-3.safetensors"])
def test_what_is_there_of_others_is_never_replaced(there: str) -> None:
    url = f"memory://others/{there}"
    open_store(url).create(there, b"mine")
    with pytest.raises(InputError, match="holds something already"):
        convert(url)
    assert open_store(url).get(there).data == b"mine"
    assert "config.json" not in keys(url) - {there}


def test_a_bucket_that_cannot_be_written_is_refused_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BucketStore, "create", Mock(side_effect=AccessDenied("no")))
    with pytest.raises(AccessDenied), result_at("memory://denied/hf"):
        pytest.fail("the conversion began")


def test_a_conversion_that_fails_leaves_nothing(tmp_path: Path) -> None:
    for dest in ("memory://fails/hf", str(tmp_path / "hf")):
        with pytest.raises(StorageError), result_at(dest) as folder:
            folder.mkdir()
    assert not keys("memory://fails/hf")
    assert list(tmp_path.iterdir()) == []


def test_a_source_in_a_bucket_is_fetched(tmp_path: Path) -> None:
    open_store("memory://source/runs").create("ep0.pt", b"weights")
    assert fetch_file("memory://source/runs/ep0.pt", tmp_path).read_bytes() == b"weights"
