from pathlib import Path

import pytest

from batchinfer.core.errors import InputError
from batchinfer.storage.bucket_files import BucketFiles
from batchinfer.storage.local import LocalStore
from batchinfer.storage.opening import is_inside, open_store


def test_paths_and_file_urls_open_folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for url, expected in {
        "runs/a": tmp_path / "runs/a",
        "./runs/../b": tmp_path / "b",
        ".": tmp_path,
        "/": Path("/"),
        f"{tmp_path}/c/": tmp_path / "c",
        "~/d": tmp_path / "home/d",
        "./s3:/bucket": tmp_path / "s3:/bucket",
        "runs/s3:/x": tmp_path / "runs/s3:/x",
        "job:1": tmp_path / "job:1",
        "C:/x": tmp_path / "C:/x",
    }.items():
        store = open_store(url)
        assert isinstance(store, LocalStore)
        assert store.url == str(expected)
    assert list(tmp_path.iterdir()) == []


def test_a_slash_at_the_end_of_a_url_is_none_of_its_place():
    assert open_store("s3://bucket/job/").url == "s3://bucket/job"


def test_a_place_behind_a_link_is_inside_the_folder_that_the_link_names(tmp_path):
    """DEST would have been written into the work folder, or over a source."""
    (tmp_path / "work").mkdir()
    (tmp_path / "link").symlink_to("work")
    assert is_inside(f"{tmp_path}/link/a.parquet", f"{tmp_path}/work")
    assert not is_inside(f"{tmp_path}/work2", f"{tmp_path}/work")


def test_a_folder_of_a_bucket_is_not_there_because_another_ones_name_begins_so(memory_url):
    open_store(memory_url).create("data2/x.jsonl", b"{}")
    files, bucket = BucketFiles(open_store(memory_url)), memory_url.partition("://")[2]
    assert files.info(f"{bucket}/data2") == {"type": "directory"}
    with pytest.raises(FileNotFoundError):
        files.info(f"{bucket}/data")


@pytest.mark.parametrize(
    "url", ["bucket//job", "bucket/./job", "bucket/../job", "bucket/job\r", "bucket\r"]
)
def test_a_url_that_keys_cannot_have_is_refused_before_a_request(url):
    with pytest.raises(InputError, match="is no plain path") as caught:
        open_store(f"s3://{url}/")
    assert caught.value.exit_status == 2
    assert ".." in caught.value.hint
