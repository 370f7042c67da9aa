"""Places of a conversion: what is there already, rights, and kills while uploading."""

import os
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


def test_a_killed_upload_is_no_model_and_is_never_replaced(monkeypatch):
    put, url, left = BucketStore.put_file, "memory://kills/hf", iter(range(len(NAMES) - 1))

    def put_or_die(self, *words):
        if next(left, None) is None:
            raise KeyboardInterrupt
        put(self, *words)

    with monkeypatch.context() as patch:
        patch.setattr(BucketStore, "put_file", put_or_die)
        with pytest.raises(KeyboardInterrupt):
            convert(url)
    assert keys(url) == {*NAMES} - {"config.json"}, "a program would take it for a model"
    with pytest.raises(InputError, match="holds something already"):
        convert(url)
    convert("memory://kills/again")
    assert keys("memory://kills/again") == {*NAMES}


def test_a_bucket_that_cannot_be_written_is_refused_first(monkeypatch):
    monkeypatch.setattr(BucketStore, "create", Mock(side_effect=AccessDenied("no")))
    with pytest.raises(AccessDenied), result_at("memory://denied/hf"):
        pytest.fail("the conversion began")


def test_a_conversion_that_fails_leaves_no_file(tmp_path):
    for dest in ("memory://fails/hf", str(tmp_path / "ft/2-gpu")):
        with pytest.raises(StorageError), result_at(dest) as folder:
            folder.mkdir()
    assert not keys("memory://fails/hf")
    assert not list((tmp_path / "ft").iterdir())


def test_a_mounted_folder_is_refused_before_the_conversion(tmp_path, monkeypatch):
    """Nothing can be renamed to its place, so the result was thrown away at the end."""
    monkeypatch.setattr(os.path, "ismount", lambda path: path == tmp_path)
    with pytest.raises(InputError, match="mounted"), result_at(str(tmp_path)):
        pytest.fail("the conversion began")
    convert(str(tmp_path / "hf"))


def test_a_source_in_a_bucket_is_fetched(tmp_path):
    open_store("memory://source/runs").create("ep0.pt", b"weights")
    assert fetch_file("memory://source/runs/ep0.pt", tmp_path).read_bytes() == b"weights"
