"""LoRA adapters before an engine is loaded: which vLLM takes, which not and why, and what they are called in a run."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from batchinfer.core.errors import ConfigError
from batchinfer.core.records import Request, Sampling
from batchinfer.engines import create_engine
from batchinfer.engines.adapters import (
    asked_slots,
    check_adapters,
    describe_adapters,
    slot_count,
    slot_rank,
)
from batchinfer.engines.config import EngineConfig
from batchinfer.engines.gpus import memory_per_gpu
from batchinfer.engines.models import describe_model
from batchinfer.engines.vllm_loading import load_adapters
from batchinfer.storage.opening import open_store
from engine_contract import ListSource, drive
from peft_adapter import write_adapter
from tiny_model import DEMO_MODEL


def config_with(**loras: Path | str) -> EngineConfig:
    return EngineConfig(
        model=str(DEMO_MODEL), loras={name: str(source) for name, source in loras.items()}
    )


def check(folder: Path | str) -> None:
    config = config_with(mine=folder)
    check_adapters(config, describe_model(config))


def test_adapters_are_described_by_their_content(tmp_path: Path) -> None:
    first = write_adapter(tmp_path / "first", seed=1)
    second = write_adapter(tmp_path / "second", seed=1)
    third = write_adapter(tmp_path / "third", seed=3, rank=20)
    found = describe_adapters(config_with(b=second, a=first, c=third))
    assert [one.name for one in found] == ["a", "b", "c"]
    assert [one.rank for one in found] == [4, 4, 20]
    assert found[0].identity == found[1].identity != found[2].identity
    assert (slot_rank(found), slot_rank(found[:2])) == (32, 8)
    assert (slot_count(found, is_cpu=True), slot_count(found, is_cpu=False)) == (4, 3)
    assert slot_count(found * 5, is_cpu=False) == 8


def spoil(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(change((folder / name).read_bytes()))


def with_tensors(change: Callable[[dict[str, Any]], None]) -> Callable[[bytes], bytes]:
    """Return a function that changes each tensor in the header of a safetensors file."""

    def changed(data: bytes) -> bytes:
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        for tensor in header.values():
            change(tensor)
        text = json.dumps(header).encode()
        return len(text).to_bytes(8, "little") + text + data[8 + length :]

    return changed


BAD: list[tuple[Callable[[Path], object], str]] = [
    (lambda f: write_adapter(f, use_dora=True), "has use_dora = true"),
    (lambda f: write_adapter(f, bias="all"), 'has bias = "all"'),
    (lambda f: write_adapter(f, lora_bias=True), "has lora_bias = true"),
    (lambda f: write_adapter(f, modules_to_save=["lm_head"]), "has modules_to_save"),
    (lambda f: write_adapter(f, peft_type="LOHA"), "is an adapter of the type LOHA"),
    (lambda f: write_adapter(f, r=1024), "has rank 1024, and vLLM takes up to 512"),
    (lambda f: write_adapter(f, rank_pattern={"q_proj": 600}), "has rank 600"),
    (lambda f: write_adapter(f, r="4"), "has no rank"),
    (lambda f: write_adapter(f, r=None), "has no rank"),
    (lambda f: write_adapter(f, hidden=64), "hidden size of 64, and the model's is 128"),
    (lambda f: write_adapter(f, num_layers=5), "changes layer 4, and the model has 4 layers"),
    (lambda f: (write_adapter(f) / "adapter_config.json").unlink(), "has no adapter_config.json"),
    (lambda f: (write_adapter(f) / "adapter_model.safetensors").unlink(), "has no weights"),
    (
        lambda f: spoil("adapter_model.safetensors", lambda data: data[:-5])(write_adapter(f)),
        "adapter_model.safetensors is cut short",
    ),
    (lambda f: spoil("adapter_config.json", lambda _: b"{")(write_adapter(f)), "is not JSON"),
    (lambda f: spoil("adapter_config.json", lambda _: b"[]")(write_adapter(f)), "no JSON object"),
    (
        lambda f: spoil(
            "adapter_model.safetensors", with_tensors(lambda tensor: tensor.pop("shape"))
        )(write_adapter(f)),
        "adapter_model.safetensors is no safetensors file, or damaged",
    ),
    (
        lambda f: spoil(
            "adapter_model.safetensors", with_tensors(lambda tensor: tensor.update(shape=[]))
        )(write_adapter(f)),
        "its weights file is damaged: the layer model.layers.0",
    ),
    (lambda f: write_adapter(f, targets=[]), "has no LoRA matrices"),
]


@pytest.mark.parametrize(
    ("make", "said"), BAD, ids=[f"{i}: {said}" for i, (_, said) in enumerate(BAD)]
)
def test_a_bad_adapter_is_refused_by_its_name(
    tmp_path: Path, make: Callable[[Path], object], said: str
) -> None:
    make(tmp_path / "adapter")
    with pytest.raises(ConfigError) as caught:
        check(tmp_path / "adapter")
    assert "--lora mine" in caught.value.message
    assert said in caught.value.message
    assert caught.value.exit_status == 2


@pytest.mark.parametrize("source", ["./nothing-here", "nothing", "/nothing/here"])
def test_an_adapter_that_is_no_folder_is_refused(source: str) -> None:
    with pytest.raises(ConfigError, match=r"--lora mine: .* is no folder on this machine"):
        check(source)


def test_a_good_one_is_taken_and_one_for_another_model_is_remarked_upon(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    check(write_adapter(tmp_path / "good"))
    assert not caplog.records
    caplog.set_level(logging.WARNING)
    check(write_adapter(tmp_path / "other", base_model_name_or_path="org/other-7b"))
    assert "was trained for org/other-7b" in caplog.text


def test_an_adapter_that_vllm_itself_refuses_ends_the_start_with_its_name(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    seen = []

    class Refusing:
        def add_lora(self, request: Any) -> None:
            seen.append((request.lora_name, request.lora_int_id, request.lora_path))
            if request.lora_name == "odd":
                raise ValueError("vLLM does not support init_lora_weights='pissa'.")

    good, odd = write_adapter(tmp_path / "good"), write_adapter(tmp_path / "odd")
    with pytest.raises(ConfigError, match=r"--lora odd: vLLM does not take it: .*'pissa'"):
        load_adapters(Refusing(), config_with(good=good, odd=odd))
    assert seen == [("good", 1, str(good)), ("odd", 2, str(odd))]


def test_adapters_take_memory_of_the_gpu(tmp_path: Path) -> None:
    plain = config_with()
    adapted = config_with(a=write_adapter(tmp_path / "a"), b=write_adapter(tmp_path / "b", rank=9))
    model = describe_model(plain)
    inputs_and_outputs = 4 * (128 + 128) + 3 * (128 + 384)
    added = memory_per_gpu(model, adapted, 1, 1)[0] - memory_per_gpu(model, plain, 1, 1)[0]
    assert added == 2 * 16 * 4 * inputs_and_outputs * 2


@pytest.mark.parametrize("slots", ["many", 0, 1.5])
def test_a_number_of_slots_that_is_none_is_refused(slots: Any) -> None:
    config = EngineConfig(engine_args={"max_loras": slots})
    with pytest.raises(ConfigError, match=r"max_loras: is .*, expected a whole number above 0"):
        asked_slots(config)


def test_a_rehearsal_knows_the_adapters(tmp_path: Path) -> None:
    config = EngineConfig(engine="echo", loras={"a": str(tmp_path)})
    engine = create_engine(config)
    requests = [
        Request(key=("c", index), text="hi", sampling=Sampling(), adapter=adapter)
        for index, adapter in enumerate([None, "a", "b"])
    ]
    found = drive(engine, ListSource(requests))
    codes = [found[one.key].failure and found[one.key].failure.code for one in requests]
    assert codes == [None, None, "model_not_found"]


def test_an_adapter_on_the_hub_is_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its identity is that of the same files in a folder."""
    huggingface_hub = pytest.importorskip("huggingface_hub")
    local = write_adapter(tmp_path / "local", seed=9)
    asked: list[Any] = []

    def snapshot(name: str, **given: Any) -> str:
        asked.append((name, given))
        return str(local)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    [there] = describe_adapters(config_with(mine="org/adapter-9"))
    [here] = describe_adapters(config_with(mine=local))
    assert there.identity == here.identity
    assert asked[0][0] == "org/adapter-9"
    assert "adapter_config.json" in asked[0][1]["allow_patterns"]


@pytest.mark.s3
def test_an_adapter_in_a_bucket_is_fetched(
    tmp_path: Path, s3_url: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    local, url = write_adapter(tmp_path / "local", seed=5), s3_url("adapters/five")
    for path in local.iterdir():
        open_store(url).create_file(path.name, path)
    config = config_with(mine=url)
    [there] = check_adapters(config, describe_model(config))
    [here] = describe_adapters(config_with(mine=local))
    assert there.identity == here.identity
    assert Path(there.folder).is_relative_to(tmp_path / "home")
    with pytest.raises(ConfigError, match="--lora none"):
        describe_adapters(config_with(none=s3_url("adapters/none")))
