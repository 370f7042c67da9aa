"""What is known of a model before it is loaded, wherever it is; and the adapters beside it."""

import json
import sys
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from unittest.mock import DEFAULT, Mock

import huggingface_hub
import pytest
from huggingface_hub import constants
from huggingface_hub.errors import LocalEntryNotFoundError

from batchinfer.core.errors import ConfigError, EngineLoadError, Interrupted, StorageError
from batchinfer.engines import identify_model, model_files, vllm_serve
from batchinfer.engines.adapters import check_fit, describe_adapters, write_options
from batchinfer.engines.engine_config import EngineConfig
from batchinfer.engines.model_files import fetch, list_model
from batchinfer.engines.models import describe_model
from batchinfer.engines.server import plan
from batchinfer.storage.opening import open_store
from batchinfer.storage.retrying import TransientError
from fakes import caused
from making import overwrite
from models import DEMO_MODEL, write_adapter, write_model_stub


def described(folder, **config):
    return describe_model(EngineConfig(model=str(write_model_stub(folder, **config))))


def test_a_folder_is_described_from_its_config_and_file_sizes(tmp_path):
    info = described(tmp_path / "m")
    assert (info.max_model_len, info.parameter_bytes) == (8192, 1000)
    assert (info.num_heads, info.num_kv_heads) == (32, 8)
    assert info.kv_bytes_per_token == 2 * 32 * 8 * 128 * 2
    assert not info.is_multimodal


@pytest.mark.parametrize(
    ("config", "field", "expected"),
    [
        ({"kv_lora_rank": 512, "qk_rope_head_dim": 64}, "kv_bytes_per_token", 32 * 576 * 2),
        ({"kv_lora_rank": 512, "qk_rope_head_dim": 64}, "num_kv_heads", 1),
        ({"text_config": {"max_position_embeddings": 77}}, "max_model_len", 77),
        ({"vision_config": {}}, "is_multimodal", True),
    ],
)
def test_what_changes_a_models_sizes(tmp_path, config, field, expected):
    assert getattr(described(tmp_path / "m", **config), field) == expected


@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer.json", "model.safetensors", "chat.jinja"]
)
def test_the_identity_changes_with_every_file_that_decides_the_answers(tmp_path, name):
    folder = write_model_stub(tmp_path / "m")
    before = identify_model(EngineConfig(model=str(folder)))
    (folder / "README.md").write_text("no matter")
    assert identify_model(EngineConfig(model=str(folder))) == before
    data = (folder / name).read_bytes() if (folder / name).exists() else b"{}"
    (folder / name).write_bytes(data + b" ")
    assert identify_model(EngineConfig(model=str(folder))) != before


@pytest.mark.parametrize("text", ["{", "[]", None])
def test_a_config_that_is_none_is_named(tmp_path, text):
    folder = write_model_stub(tmp_path / "m")
    (folder / "config.json").unlink() if text is None else (folder / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"config\.json"):
        describe_model(EngineConfig(model=str(folder)))


# --------------------------------------------------------------------------- the Hub


@pytest.fixture
def fake_hub(monkeypatch, tmp_path):
    """A Hub with one model at one commit, whose small files it gives."""
    folder = write_model_stub(tmp_path / ("c" * 40))
    (folder / "model.safetensors").unlink()
    sizes = {"config.json": 5, "model.safetensors": 1000, "original/model.safetensors": 10**9}
    files = [SimpleNamespace(rfilename=name, size=size) for name, size in sizes.items()]
    info = Mock(return_value=SimpleNamespace(siblings=files))
    snapshot = Mock(return_value=str(folder))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", info)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    return SimpleNamespace(model_info=info, snapshot_download=snapshot)


def test_a_model_on_the_hub_is_known_by_its_commit_without_its_weights(fake_hub):
    # It counted as one without weights, so one GPU held it.
    fake_hub.model_info.side_effect = [ConnectionError("reset"), DEFAULT]
    info = describe_model(EngineConfig(model="org/name", revision="main"))
    assert info.identity == info.revision == "c" * 40
    assert (info.parameter_bytes, info.max_model_len) == (1000, 8192)
    assert fake_hub.model_info.call_args.kwargs["revision"] == "c" * 40
    assert "safetensors" not in str(fake_hub.snapshot_download.call_args)


@pytest.mark.parametrize("revision", [None, "main"])
def test_a_server_that_is_started_again_loads_the_same_commit(fake_hub, tmp_path, revision):
    [launch] = plan(EngineConfig(model="org/name", revision=revision), tmp_path)
    assert launch.command[launch.command.index("--revision") + 1] == "c" * 40
    typed = ["--hf-config-path", "org/other"]
    [launch] = plan(EngineConfig(model="org/name", revision=revision, server_args=typed), tmp_path)
    assert "c" * 40 not in launch.command


@pytest.mark.parametrize(
    ("error", "is_offline", "raised"),
    [
        (ConnectionError("reset"), False, TransientError),
        (LocalEntryNotFoundError("not here"), False, EngineLoadError),
        (LocalEntryNotFoundError("not here"), True, ConfigError),
    ],
)
def test_what_the_hub_says_is_said_in_our_words(fake_hub, monkeypatch, error, is_offline, raised):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", is_offline)
    fake_hub.snapshot_download.side_effect = error
    with pytest.raises(raised, match="org/name"):
        describe_model(EngineConfig(model="org/name", revision="x"))


def _answered(status: int) -> Exception:
    error = OSError("from the test")
    error.response = SimpleNamespace(status_code=status)
    return error


LOADING = [
    (caused(ValueError("no config"), caused(OSError("so"), _answered(503))), False, None),
    (LocalEntryNotFoundError("not here"), False, None),
    (LocalEntryNotFoundError("not here"), True, 2),
    (caused(OSError("no config"), ConnectionError("reset")), False, None),
    (caused(OSError("no config"), _answered(429)), False, None),
    (caused(OSError("no config"), _answered(404)), False, 2),
    (ValueError("max_model_len"), False, 2),
]


@pytest.mark.parametrize(("error", "is_offline", "status"), LOADING)
def test_a_failure_of_the_hub_while_vllm_loads_may_pass(monkeypatch, error, is_offline, status):
    """It ended with 2, after which no cluster starts a worker again."""
    serve = Mock()
    serve.ServeSubcommand().validate.side_effect = error
    monkeypatch.setitem(sys.modules, "vllm.entrypoints.cli.serve", serve)
    monkeypatch.setitem(sys.modules, "vllm.utils.argparse_utils", Mock())
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", is_offline)
    with pytest.raises(SystemExit if status else type(error)) as caught:
        vllm_serve.main()
    assert getattr(caught.value, "code", None) == status


# --------------------------------------------------------------------------- buckets


@pytest.fixture
def url(tmp_path, monkeypatch, memory_url):
    """URL of a small model in a store; see `write_model_stub`."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    for path in write_model_stub(tmp_path / "m").iterdir():
        put(f"{memory_url}/m", path.name, path.read_bytes())
    return f"{memory_url}/m"


def put(url: str, key: str, data: bytes) -> None:
    overwrite(open_store(url), key, data)
    list_model.cache_clear()


def test_a_model_in_a_bucket_is_described_where_it_is_and_fetched_whole(url, monkeypatch):
    put(url, "README.md", b"no matter")
    put(url, "other/config.json", b"{}")
    put(url, "pytorch_model.bin", b"of another format")
    assert describe_model(EngineConfig(model=url)).parameter_bytes == 1000
    folder = fetch(url)
    assert folder.name == "m"
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["config.json", "model.safetensors", "tokenizer.json"]
    first = identify_model(EngineConfig(model=url))
    put(url, "model.safetensors", b"x" * 1000)
    assert identify_model(EngineConfig(model=url)) != first
    assert fetch(url) != folder
    monkeypatch.setattr(model_files, "open_store", None)
    assert fetch(url).is_dir()


def test_a_fetch_that_fails_or_is_stopped_leaves_nothing(url, tmp_path):
    stop = Event()
    stop.set()
    with pytest.raises(Interrupted):
        fetch(url, stop)
    overwrite(open_store(url), "model.safetensors", b"shorter")
    with pytest.raises(StorageError, match="has changed"):
        fetch(url)
    assert list((tmp_path / "home" / "batchinfer").iterdir()) == []
    with pytest.raises(ConfigError, match="no such folder with a model"):
        describe_model(EngineConfig(model=f"{url}-nothing"))


# --------------------------------------------------------------------------- adapters


def config_with(**loras: Path | str) -> EngineConfig:
    places = {name: str(place) for name, place in loras.items()}
    return EngineConfig(model=str(DEMO_MODEL), loras=places)


def test_adapters_are_described_by_their_content(tmp_path):
    first = write_adapter(tmp_path / "first", seed=1)
    second = write_adapter(tmp_path / "second", seed=1)
    third = write_adapter(tmp_path / "third", seed=3, rank=20)
    found = describe_adapters(config_with(b=second, a=first, c=third))
    assert [(one.name, one.rank) for one in found] == [("a", 4), ("b", 4), ("c", 20)]
    assert found[0].identity == found[1].identity != found[2].identity
    check_fit(found, str(DEMO_MODEL))
    options = write_options(found, is_cpu=True)
    assert options[options.index("--max-loras") + 1] == "4", "one slot stays empty"
    assert options[options.index("--max-lora-rank") + 1] == "32"
    assert "8" in write_options(found * 5, is_cpu=False)
    assert json.loads(options[-3]) == {"name": "a", "path": found[0].folder}
    with pytest.raises(ConfigError, match="--max-loras: is 3"):
        write_options(found, is_cpu=True, asked_slots=3)


def test_every_byte_of_an_adapter_counts(tmp_path):
    folder = write_adapter(tmp_path / "adapter", rank=512)
    weights = folder / "adapter_model.safetensors"
    data = bytearray(weights.read_bytes())
    assert len(data) > 4 << 20
    (before,) = describe_adapters(config_with(mine=folder))
    data[len(data) // 2] ^= 1
    weights.write_bytes(data)
    (after,) = describe_adapters(config_with(mine=folder))
    assert after.identity != before.identity


BAD = {
    "is 1024, expected 1 to 512": lambda f: write_adapter(f, r=1024),
    "is no adapter, or is damaged": lambda f: write_adapter(f, r=None),
    "r is 16, and the matrices of": lambda f: write_adapter(f, rank=5, r=16),
    "is [64, 64] there": lambda f: write_adapter(f, hidden=64),
    "has no such layer": lambda f: write_adapter(f, num_layers=5),
    "adapter_model.safetensors": lambda f: (write_adapter(f) / "adapter_model.safetensors").unlink(),
}  # fmt: skip


@pytest.mark.parametrize("said", BAD)
def test_a_bad_adapter_is_refused_by_its_name(tmp_path, said):
    BAD[said](tmp_path / "adapter")
    with pytest.raises(ConfigError) as caught:
        check_fit(describe_adapters(config_with(mine=tmp_path / "adapter")), str(DEMO_MODEL))
    assert "--lora mine" in caught.value.message
    assert said in caught.value.message


def test_an_adapter_is_compared_with_a_model_on_the_hub(tmp_path, monkeypatch):
    found = describe_adapters(config_with(mine=write_adapter(tmp_path / "adapter", hidden=64)))
    tensors = {"model.layers.0.self_attn.q_proj.weight": SimpleNamespace(shape=[128, 128])}
    files = {"model.safetensors": SimpleNamespace(tensors=tensors)}
    shown = SimpleNamespace(files_metadata=files)
    monkeypatch.setattr(huggingface_hub, "get_safetensors_metadata", lambda *_, **__: shown)
    with pytest.raises(ConfigError, match=r"--lora mine: .*q_proj is \[64, 64\] .* has \[128"):
        check_fit(found, "org/name", "abc")
    files.clear()
    check_fit(found, "org/name", "abc")
