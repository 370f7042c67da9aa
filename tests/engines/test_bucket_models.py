"""Models in a bucket: their identity, and the cache that all processes of a machine share."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import threading
from collections import namedtuple
from pathlib import Path

import pytest

from batchinfer.core.errors import ConfigError, Interrupted, ScratchFull, StorageError
from batchinfer.engines import bucket_models, check_engine, identify_model
from batchinfer.engines.bucket_models import cache_folder, list_model, with_local_files
from batchinfer.engines.config import EngineConfig
from batchinfer.engines.models import describe_model
from batchinfer.storage.opening import open_store
from counting_store import CountingStore
from tiny_model import safetensors_of, write_model_stub


@pytest.fixture(autouse=True)
def fresh_listings():
    """Let every test be a process of its own, which lists a model once."""
    list_model.cache_clear()


@pytest.fixture
def url(tmp_path):
    """URL of a small model in a store; see `write_model_stub`."""
    return upload(write_model_stub(tmp_path / "m"), f"memory://{secrets.token_hex(4)}/m")


def upload(folder: Path, url: str) -> str:
    for path in folder.iterdir():
        open_store(url).create_file(path.name, path)
    return url


def config_of(url: str, cache: Path, **options) -> EngineConfig:
    return EngineConfig(model=url, model_cache=str(cache), **options)


def put(url: str, key: str, data: bytes) -> None:
    store = open_store(url)
    store.delete([key])
    store.create(key, data)
    list_model.cache_clear()


def fetched(config: EngineConfig) -> Path:
    return Path(with_local_files(config, with_weights=True).model)


# --------------------------------------------------------------------------- identity


def test_a_model_in_a_bucket_is_described_without_its_weights(url, tmp_path):
    config = config_of(url, tmp_path / "cache")
    info = describe_model(config)
    assert (info.architecture, info.max_model_len, info.parameter_bytes) == (
        "LlamaForCausalLM",
        8192,
        1000,
    )
    assert not info.is_local
    assert not list((tmp_path / "cache").rglob("*.safetensors"))


def test_the_identity_is_that_of_the_content_and_the_same_on_every_machine(url, tmp_path):
    first = identify_model(config_of(url, tmp_path / "one"))
    list_model.cache_clear()
    assert identify_model(config_of(url, tmp_path / "two")) == first
    put(url, "README.md", b"no matter")
    assert identify_model(config_of(url, tmp_path / "one")) == first
    put(url, "model.safetensors", safetensors_of(1000)[:-1] + b"\1")
    second = identify_model(config_of(url, tmp_path / "one"))
    put(url, "tokenizer.json", b'{"x": 1}')
    assert len({first, second, identify_model(config_of(url, tmp_path / "one"))}) == 3


def test_a_tokenizer_in_a_bucket_is_a_part_of_the_identity(url, tmp_path):
    folder = write_model_stub(tmp_path / "local")
    config = EngineConfig(model=str(folder), tokenizer=url, model_cache=str(tmp_path / "cache"))
    first = identify_model(config)
    assert first != identify_model(EngineConfig(model=str(folder)))
    put(url, "tokenizer.json", b'{"x": 1}')
    assert identify_model(config) != first
    local = with_local_files(config, with_weights=True)
    assert local.model == str(folder)
    assert (Path(local.tokenizer or "") / "tokenizer.json").read_bytes() == b'{"x": 1}'


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "there is no such folder"),
        ({"notes.md": b"x"}, "none of its files is a model's"),
        ({"model.safetensors": b"x"}, "has no config.json"),
        ({"config.json": b"{}", "model.safetensors": b"x"}, "has no tokenizer"),
        ({"config.json": b"{}", "tokenizer.json": b"{}"}, "has no weights"),
        (
            {
                "config.json": b"{}",
                "tokenizer.json": b"{}",
                "model-00001-of-00002.safetensors": b"x",
            },
            "lacks the weights file model-00002-of-00002.safetensors",
        ),
    ],
)
def test_a_folder_that_is_no_whole_model_is_refused(files, message, tmp_path):
    url = f"memory://{secrets.token_hex(4)}/m"
    for key, data in files.items():
        open_store(url).create(key, data)
    with pytest.raises(ConfigError, match=message) as caught:
        describe_model(config_of(url, tmp_path))
    assert caught.value.hint


@pytest.mark.parametrize(
    ("name", "hint"),
    [("hf://Qwen/Qwen3-0.6B", "--model Qwen/Qwen3-0.6B"), ("https://host/model", "s3://")],
)
def test_a_url_that_is_no_buckets_is_refused(name, hint, tmp_path):
    with pytest.raises(ConfigError, match="cannot be listed") as caught:
        describe_model(config_of(name, tmp_path))
    assert hint in caught.value.hint


def test_a_url_that_lacks_a_slash_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="lacks a slash") as caught:
        describe_model(config_of("s3:/bucket/m", tmp_path))
    assert "s3://bucket/m" in caught.value.hint


def test_a_config_in_a_bucket_and_a_model_elsewhere_is_refused():
    with pytest.raises(ConfigError, match="is a URL"):
        check_engine(EngineConfig(model="m", hf_config_path="s3://bucket/m"))


def test_a_file_url_is_a_local_folder(tmp_path):
    folder = write_model_stub(tmp_path / "m")
    config = EngineConfig(model=folder.as_uri())
    assert (
        describe_model(config).identity == describe_model(EngineConfig(model=str(folder))).identity
    )
    assert fetched(config) == folder


# --------------------------------------------------------------------------- the cache


def test_a_model_is_fetched_once(url, tmp_path, monkeypatch):
    config = config_of(url, tmp_path / "cache")
    folder = fetched(config)
    assert {path.name for path in folder.iterdir()} == {
        "config.json",
        "tokenizer.json",
        "model.safetensors",
    }
    assert (folder / "model.safetensors").read_bytes() == safetensors_of(1000)
    assert folder.name == "m"
    monkeypatch.setattr(bucket_models, "_Fetch", None)  # would be called
    assert fetched(config) == folder


def test_only_the_weights_that_vllm_loads_are_fetched(url, tmp_path):
    put(url, "pytorch_model.bin", b"PK")
    put(url, "optimizer.pt", b"PK")
    put(url, "checkpoint-5/model.safetensors", b"x")
    put(url, "1_Pooling/config.json", b"{}")
    folder = fetched(config_of(url, tmp_path / "cache"))
    names = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert names == {"config.json", "tokenizer.json", "model.safetensors", "1_Pooling/config.json"}
    other = fetched(config_of(url, tmp_path / "cache", engine_args={"load_format": "pt"}))
    assert (other / "pytorch_model.bin").read_bytes() == b"PK"
    dummy = fetched(config_of(url, tmp_path / "none", engine_args={"load_format": "dummy"}))
    assert not list(dummy.rglob("*.safetensors"))


def test_a_changed_object_alone_is_fetched_again_and_said(url, tmp_path, monkeypatch, caplog):
    config = config_of(url, tmp_path / "cache")
    old = fetched(config)
    put(url, "tokenizer.json", b'{"x": 1}')
    store = CountingStore(open_store(url))
    monkeypatch.setattr(bucket_models, "open_store", lambda _url: store)
    new = fetched(config)
    assert "changed since this machine fetched it: tokenizer.json" in caplog.text
    assert store.requests["download"] == 1
    assert (new / "tokenizer.json").read_bytes() == b'{"x": 1}'
    assert (old / "tokenizer.json").read_bytes() == b"{}"  # a worker may still load the old version


def test_an_object_that_changes_after_the_listing_is_never_loaded(url, tmp_path):
    config = config_of(url, tmp_path / "cache")
    describe_model(config)
    open_store(url).delete(["model.safetensors"])
    open_store(url).create("model.safetensors", safetensors_of(1000)[:-1] + b"\1")
    with pytest.raises(StorageError, match=r"model.safetensors: has changed since") as caught:
        fetched(config)
    assert "start the same command again" in caught.value.hint
    open_store(url).delete(["model.safetensors"])
    with pytest.raises(StorageError, match="has changed since"):
        fetched(config)
    assert not list((tmp_path / "cache").rglob("*.part"))


def test_a_part_that_somebody_removed_from_the_cache_is_fetched_again(url, tmp_path):
    config = config_of(url, tmp_path / "cache")
    folder = fetched(config)
    (folder / "model.safetensors").resolve().unlink()
    assert (fetched(config) / "model.safetensors").read_bytes() == safetensors_of(1000)
    (folder / "config.json").unlink()
    assert (fetched(config) / "config.json").is_file()


class Spoilt:
    """A store whose etags are MD5 digests and whose downloads bring other bytes, as many times as `texts` says."""

    def __init__(self, store, texts: list[bytes]) -> None:
        self._store, self._texts = store, texts

    def list(self, prefix):
        return [self._md5(info) for info in self._store.list(prefix)]

    def stat(self, key):
        return self._md5(self._store.stat(key))

    def _md5(self, info):
        return info._replace(etag=f'"{"0" * 32}"' if info.key == "tokenizer.json" else info.etag)

    def download(self, key, path):
        self._store.download(key, path)
        if key == "tokenizer.json":
            path.write_bytes(self._texts.pop(0))


@pytest.mark.parametrize(("texts", "is_taken"), [([b"ab", b"cd"], False), ([b"ab", b"ab"], True)])
def test_a_file_with_another_checksum_is_taken_only_if_it_arrives_so_twice(
    texts, is_taken, url, tmp_path, monkeypatch
):
    spoilt = Spoilt(open_store(url), list(texts))
    monkeypatch.setattr(bucket_models, "open_store", lambda _url: spoilt)
    config = config_of(url, tmp_path / "cache")
    with contextlib.nullcontext() if is_taken else pytest.raises(StorageError, match="damaged"):
        assert (fetched(config) / "tokenizer.json").read_bytes() == b"ab"
    assert not texts[2:]


def test_a_file_that_arrives_cut_short_is_not_kept(url, tmp_path, monkeypatch):
    spoilt = Spoilt(open_store(url), [b"a"])
    monkeypatch.setattr(bucket_models, "open_store", lambda _url: spoilt)
    with pytest.raises(StorageError, match="1 bytes arrived, expected 2"):
        fetched(config_of(url, tmp_path / "cache"))
    assert not list((tmp_path / "cache").rglob("*tokenizer.json*"))


def test_a_full_disk_is_said_before_anything_is_fetched(url, tmp_path, monkeypatch):
    usage = namedtuple("usage", "free")  # noqa: PYI024
    monkeypatch.setattr(bucket_models.shutil, "disk_usage", lambda _path: usage(1))
    with pytest.raises(ConfigError, match=r"has 1 B free, and memory://\S+/m takes") as caught:
        fetched(config_of(url, tmp_path / "cache"))
    assert "--model-cache" in caught.value.hint


def test_a_disk_that_fills_up_is_an_error_of_the_configuration(url, tmp_path, monkeypatch):
    def download(*_arguments):
        raise ScratchFull("scratch folder /c: is full (No space left on device)")

    monkeypatch.setattr(Spoilt, "download", download)
    monkeypatch.setattr(bucket_models, "open_store", lambda _url: Spoilt(store, []))
    store = open_store(url)
    with pytest.raises(ConfigError, match=r"--model-cache: \S+/cache is full") as caught:
        fetched(config_of(url, tmp_path / "cache"))
    assert "--model-cache" in caught.value.hint


def test_a_cache_that_cannot_be_a_folder_is_refused(url, tmp_path):
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(ConfigError, match="cannot be used: Not a directory"):
        fetched(config_of(url, tmp_path / "cache"))


def test_the_cache_lies_where_the_option_or_hf_home_says(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HOME", "/disk/hf")
    assert cache_folder(EngineConfig()) == Path("/disk/hf/batchinfer")
    assert cache_folder(EngineConfig(model_cache="/c")) == Path("/c")
    monkeypatch.delenv("HF_HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert cache_folder(EngineConfig()) == Path("/cache/batchinfer/models")


def test_a_stop_ends_a_fetch_that_hangs(url, tmp_path, monkeypatch):
    hangs, stop = threading.Event(), threading.Event()

    def download(*_arguments):
        stop.set()
        hangs.wait(60)
        raise StorageError("late")

    monkeypatch.setattr(Spoilt, "download", download)
    monkeypatch.setattr(bucket_models, "open_store", lambda _url: Spoilt(store, []))
    store = open_store(url)
    with pytest.raises(Interrupted):
        with_local_files(config_of(url, tmp_path / "cache"), with_weights=True, stop=stop)
    hangs.set()


# --------------------------------------------------------------------------- several processes, over S3

FETCH = """
import logging, sys, time
from batchinfer.engines import bucket_models
from batchinfer.engines.config import EngineConfig
from batchinfer.storage.s3 import S3Store

logging.basicConfig(level=logging.INFO, format="%(message)s")
url, cache, hangs_at = sys.argv[1:]
plain = S3Store.download

def download(self, key, path):
    print("download", key, flush=True)
    plain(self, key, path)
    if key == hangs_at:
        path.write_bytes(path.read_bytes()[:500])
        print("hangs", flush=True)
        time.sleep(60)

S3Store.download = download
bucket_models.FILES_AT_ONCE = 1
local = bucket_models.with_local_files(EngineConfig(model=url, model_cache=cache), with_weights=True)
print("fetched", local.model, flush=True)
"""


def start_fetch(url: str, cache: Path, hangs_at: str = "") -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", FETCH, url, str(cache), hangs_at],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip


def read_until(process: subprocess.Popen[str], word: str) -> list[str]:
    lines: list[str] = []
    for line in process.stdout or ():
        lines.append(line)
        if word in line:
            return lines
    raise AssertionError(f"ended without {word!r}: {lines}")


@pytest.mark.s3
def test_one_process_fetches_and_a_killed_one_neither_blocks_nor_leaves_half_a_file(
    s3_url, tmp_path
):
    folder = write_model_stub(tmp_path / "m")
    (folder / "model.safetensors").unlink()
    for number, size in ((1, 3000), (2, 2000)):
        (folder / f"model-0000{number}-of-00002.safetensors").write_bytes(safetensors_of(size))
    url, cache = upload(folder, s3_url("models/m")), tmp_path / "cache"
    first = start_fetch(url, cache, "model-00002-of-00002.safetensors")
    second = None
    try:
        read_until(first, "hangs")  # the first weights file is there, the second one half
        second = start_fetch(url, cache)
        read_until(second, "being fetched already")
        os.killpg(first.pid, signal.SIGKILL)
        lines = read_until(second, "fetched /")
    finally:
        for process in filter(None, (first, second)):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            process.stdout.close()
    assert [line for line in lines if "download" in line] == [
        "download model-00002-of-00002.safetensors\n"
    ]
    model = Path(next(line for line in lines if line.startswith("fetched /")).split()[1])
    for path in folder.iterdir():
        assert (model / path.name).read_bytes() == path.read_bytes()
    assert not list(cache.rglob("*.part"))
