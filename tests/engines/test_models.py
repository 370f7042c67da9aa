"""A model's description, from its config and its list of files."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
from huggingface_hub import constants
from huggingface_hub import errors as hub_errors

from batchinfer.core.errors import AccessDenied, ConfigError, EngineLoadError, InputError
from batchinfer.engines.config import EngineConfig
from batchinfer.engines.gpus import memory_per_gpu, place
from batchinfer.engines.models import ModelInfo, check_length, describe_model, weight_files
from tiny_model import safetensors_of, write_model_stub


def config_of(folder, **options) -> EngineConfig:
    return EngineConfig(model=str(folder), **options)


# --------------------------------------------------------------------------- local folders


def test_a_folder_is_described_from_its_config_and_file_sizes(tmp_path):
    info = describe_model(config_of(write_model_stub(tmp_path / "m")))
    assert info.architecture == "LlamaForCausalLM"
    assert (info.num_heads, info.num_kv_heads, info.num_layers) == (32, 8, 32)
    assert info.max_model_len == 8192
    assert info.dtype == "bfloat16"
    assert info.parameter_bytes == 1000
    # keys and values, 32 layers, 8 heads of 128, two bytes
    assert info.kv_bytes_per_token == 2 * 32 * 8 * 128 * 2
    assert info.is_local
    assert len(info.identity) == 40


def test_float32_weights_take_half_their_size_in_16_bits(tmp_path):
    folder = write_model_stub(tmp_path / "m", torch_dtype="float32")
    assert describe_model(config_of(folder)).parameter_bytes == 500
    assert describe_model(config_of(folder, dtype="float32")).parameter_bytes == 1000


def test_latent_attention_keeps_one_vector_per_layer_whole_on_every_rank(tmp_path):
    folder = write_model_stub(tmp_path / "m", kv_lora_rank=512, qk_rope_head_dim=64)
    info = describe_model(config_of(folder))
    assert info.kv_bytes_per_token == 32 * (512 + 64) * 2
    assert memory_per_gpu(info, config_of(folder), 4, 1024)[1] == 1024 * info.kv_bytes_per_token


def test_a_cache_of_eight_bits_takes_half_as_much(tmp_path):
    folder = write_model_stub(tmp_path / "m")
    half = describe_model(config_of(folder, engine_args={"kv_cache_dtype": "fp8"}))
    assert half.kv_bytes_per_token == describe_model(config_of(folder)).kv_bytes_per_token // 2


def test_of_several_lengths_the_smallest_counts(tmp_path):
    folder = write_model_stub(tmp_path / "m", max_position_embeddings=8192, max_seq_len=2048)
    assert describe_model(config_of(folder)).max_model_len == 2048


def test_a_length_beyond_the_models_is_refused_before_it_is_loaded(tmp_path):
    folder = write_model_stub(tmp_path / "m", max_position_embeddings=512)
    with pytest.raises(ConfigError, match="--max-model-len 513: the model takes 512") as caught:
        place(config_of(folder, max_model_len=513))
    assert caught.value.hint == "use --max-model-len 512, or leave it out"
    model = describe_model(config_of(folder))
    assert not check_length(config_of(folder, max_model_len=512), model)
    assert not check_length(config_of(folder), model)
    unknown = ModelInfo(name="m", identity="")
    assert not check_length(config_of(folder, max_model_len=513), unknown)


def test_a_length_that_only_vllm_can_judge_is_warned_of(tmp_path, monkeypatch, caplog):
    stretched = write_model_stub(tmp_path / "s", rope_scaling={"type": "yarn", "factor": 4.0})
    place(config_of(stretched, max_model_len=8193))
    assert "--max-model-len 8193: the model's config states 8192" in caplog.text
    folder = write_model_stub(tmp_path / "m")
    model = describe_model(config_of(folder))
    overridden = config_of(folder, max_model_len=8193, engine_args={"hf_overrides": {}})
    assert check_length(overridden, model)
    monkeypatch.setenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")
    assert check_length(config_of(folder, max_model_len=8193), model)


@pytest.mark.parametrize(
    ("entries", "is_exact"),
    [
        ({"rope_scaling": None}, True),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, False),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, True),
        ({"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 8.0}}}, False),
        ({"text_config": {"max_position_embeddings": 1024}}, True),
        ({"language_config": {"max_position_embeddings": 1024}}, False),
    ],
)
def test_a_length_is_exact_unless_vllm_may_derive_another(tmp_path, entries, is_exact):
    folder = write_model_stub(tmp_path / "m", **entries)
    assert describe_model(config_of(folder)).is_length_exact is is_exact


def test_a_multimodal_models_text_part_counts(tmp_path):
    folder = write_model_stub(tmp_path / "m", text_config={"num_attention_heads": 16})
    assert describe_model(config_of(folder)).num_heads == 16


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_the_identity_changes_with_every_file_that_decides_the_answers(tmp_path, name):
    folder = write_model_stub(tmp_path / "m")
    before = describe_model(config_of(folder)).identity
    (folder / "README.md").write_text("no matter")
    assert describe_model(config_of(folder)).identity == before
    data = (folder / name).read_bytes()
    changed = json.dumps({**json.loads(data), "x": 1}).encode() if name[-4:] == "json" else b""
    (folder / name).write_bytes(changed or data[:-1] + b"\1")
    assert describe_model(config_of(folder)).identity != before


@pytest.mark.parametrize(
    ("missing", "named", "option"),
    [
        ("config.json", "config.json", "--hf-config-path"),
        ("tokenizer.json", "tokenizer", "--tokenizer"),
        ("model.safetensors", "weights", "load_format"),
    ],
)
def test_a_missing_file_is_named_with_the_option_that_helps(tmp_path, missing, named, option):
    folder = write_model_stub(tmp_path / "m")
    (folder / missing).unlink()
    with pytest.raises(ConfigError, match=named) as caught:
        describe_model(config_of(folder))
    assert option in caught.value.hint


def test_the_options_for_missing_files_are_enough(tmp_path):
    whole, folder = write_model_stub(tmp_path / "whole"), write_model_stub(tmp_path / "m")
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (folder / name).unlink()
    info = describe_model(
        config_of(
            folder,
            hf_config_path=str(whole),
            tokenizer=str(whole),
            engine_args={"load_format": "dummy"},
        )
    )
    assert info.num_heads == 32


@pytest.mark.parametrize("text", [b"{", b"[1]", b"\xff"])
def test_a_config_that_is_no_json_object_is_named(tmp_path, text):
    folder = write_model_stub(tmp_path / "m")
    (folder / "config.json").write_bytes(text)
    with pytest.raises(ConfigError, match=r"config\.json"):
        describe_model(config_of(folder))


@pytest.mark.parametrize("name", ["./nowhere", "/no/such/model", "~/nowhere", "a/b/c"])
def test_a_folder_that_does_not_exist_is_no_name_on_the_hub(name):
    with pytest.raises(ConfigError, match="no folder on this machine"):
        describe_model(EngineConfig(model=name))


def test_a_second_copy_of_the_weights_is_not_counted():
    sizes = {"model-1.safetensors": 5, "consolidated.safetensors": 5, "pytorch_model.bin": 5}
    assert weight_files(sizes) == {"model-1.safetensors": 5}
    assert weight_files({"consolidated.safetensors": 5}) == {"consolidated.safetensors": 5}
    assert weight_files({"a.bin": 1}) == {"a.bin": 1}
    assert weight_files({"config.json": 1}) == {}


# --------------------------------------------------------------------------- weights that are not whole


def damage(folder: Path, kind: str) -> None:
    weights = folder / "model.safetensors"
    data = weights.read_bytes()
    match kind:
        case "shard":
            for index in (1, 3):
                (folder / f"model-{index:05d}-of-00003.safetensors").write_bytes(data)
        case "index":
            files = {"a": "model.safetensors", "b": "model-extra.safetensors"}
            (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
        case "torch":
            weights.unlink()
            with zipfile.ZipFile(folder / "pytorch_model.bin", "w") as archive:
                archive.writestr("data", b"x" * 1000)
            whole = (folder / "pytorch_model.bin").read_bytes()
            (folder / "pytorch_model.bin").write_bytes(whole[:-50])
        case "pointer":
            weights.write_bytes(
                b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
            )
        case _:
            weights.write_bytes(data[: int(kind)])


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("999", r"model\.safetensors is cut short: it has 999 bytes, and its header says 1000"),
        ("108", r"model\.safetensors is cut short: it has 108 bytes, and its header says 1000"),
        ("50", r"model\.safetensors is cut short: it has 50 bytes, and ends in its header"),
        ("0", r"model\.safetensors is cut short: it has 0 bytes"),
        ("shard", r"lacks the weights file model-00002-of-00003\.safetensors"),
        (
            "index",
            r"lacks the weights file model-extra\.safetensors, which model\.safetensors\.index",
        ),
        ("torch", r"pytorch_model\.bin is cut short"),
        ("pointer", r"model\.safetensors is a pointer of Git LFS"),
    ],
)
def test_weights_that_are_not_whole_are_found_before_an_engine_loads(tmp_path, kind, message):
    folder = write_model_stub(tmp_path / "m")
    damage(folder, kind)
    with pytest.raises(ConfigError, match=message) as caught:
        describe_model(config_of(folder))
    assert caught.value.exit_status == 2
    describe_model(config_of(folder, engine_args={"load_format": "dummy"}))


def test_weights_that_are_longer_than_their_header_says_or_no_safetensors_are_refused(tmp_path):
    folder = write_model_stub(tmp_path / "m")
    (folder / "model.safetensors").write_bytes(safetensors_of(1000) + b"x")
    with pytest.raises(ConfigError, match="is too long: it has 1001 bytes"):
        describe_model(config_of(folder))
    (folder / "model.safetensors").write_bytes(bytes(1000))
    with pytest.raises(ConfigError, match="is no safetensors file"):
        describe_model(config_of(folder))


@pytest.mark.parametrize(
    "tensor",
    [
        {},
        {"data_offsets": [0, 4]},
        {"shape": [1], "data_offsets": []},
        {"shape": [1], "data_offsets": [0, "4"]},
        {"shape": [1], "data_offsets": [0, 1e400]},
        {"shape": [-1], "data_offsets": [0, 4]},
        {"shape": None, "data_offsets": [0, 4]},
        7,
    ],
    ids=str,
)
def test_a_header_whose_tensors_lack_a_shape_or_a_place_is_damaged(tmp_path, tensor):
    folder = write_model_stub(tmp_path / "m")
    header = json.dumps({"__metadata__": {"format": "pt"}, "a": tensor}).encode()
    weights = len(header).to_bytes(8, "little") + header + bytes(4)
    (folder / "model.safetensors").write_bytes(weights)
    with pytest.raises(
        ConfigError, match=r"model\.safetensors .*damaged: its header cannot be read"
    ):
        describe_model(config_of(folder))


def test_whole_weights_in_shards_and_torch_files_are_taken(tmp_path):
    folder = write_model_stub(tmp_path / "m")
    names = [f"model-{index:05d}-of-00002.safetensors" for index in (1, 2)]
    for name in names:
        (folder / name).write_bytes(safetensors_of(500))
    (folder / "model.safetensors").unlink()
    index = {"weight_map": {"a": names[0], "b": names[1]}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    # The index of a format that is not loaded may list files that are not there.
    (folder / "pytorch_model.bin.index.json").write_text(
        '{"weight_map": {"a": "pytorch_model.bin"}}'
    )
    assert describe_model(config_of(folder)).parameter_bytes == 1000
    for name in names:
        (folder / name).unlink()
    (folder / "pytorch_model.bin").write_bytes(b"a pickle")
    assert describe_model(config_of(folder)).parameter_bytes == 8


# --------------------------------------------------------------------------- the Hub


@pytest.fixture
def fake_hub(monkeypatch, tmp_path):
    """A Hub with one model at one commit. A test sets `error` to make it fail."""
    folder = write_model_stub(tmp_path / "hub")
    state = SimpleNamespace(error=None, asked=[], folder=folder)

    def model_info(self, name, *, revision=None, **options):
        state.asked.append((name, revision))
        if state.error:
            raise state.error
        files = [
            SimpleNamespace(rfilename=path.name, size=path.stat().st_size)
            for path in folder.iterdir()
        ]
        files.append(SimpleNamespace(rfilename="original/model.safetensors", size=10**9))
        return SimpleNamespace(sha="c" * 40, siblings=files)

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", model_info)
    monkeypatch.setattr(
        huggingface_hub, "hf_hub_download", lambda name, file, revision: str(folder / file)
    )
    return state


def hub_error(kind):
    """Create an error of the Hub's client without the arguments of its constructor."""
    error = kind.__new__(kind)
    Exception.__init__(error, "from the test")
    return error


def test_a_model_on_the_hub_is_known_by_its_commit_without_its_weights(fake_hub):
    info = describe_model(EngineConfig(model="org/name", revision="main"))
    assert info.identity == info.revision == "c" * 40
    assert info.parameter_bytes == 1000
    assert not info.is_local
    assert fake_hub.asked == [("org/name", "main")]


@pytest.mark.parametrize(
    ("kind", "raised"),
    [
        (hub_errors.GatedRepoError, AccessDenied),
        (hub_errors.RepositoryNotFoundError, InputError),
        (hub_errors.RevisionNotFoundError, InputError),
        (hub_errors.HFValidationError, InputError),
        (hub_errors.HfHubHTTPError, EngineLoadError),
        (ConnectionError, EngineLoadError),
    ],
)
def test_what_the_hub_refuses_is_said_in_our_words(fake_hub, monkeypatch, tmp_path, kind, raised):
    def nothing_cached(*arguments, **options):
        raise hub_errors.LocalEntryNotFoundError("nothing")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", nothing_cached)
    fake_hub.error = hub_error(kind)
    with pytest.raises(raised, match=r"org/name|no branch"):
        describe_model(EngineConfig(model="org/name", revision="x"))


def test_a_model_that_is_nowhere_is_said_to_be_no_folder_either(fake_hub, monkeypatch):
    def nothing_cached(*arguments, **options):
        raise hub_errors.LocalEntryNotFoundError("nothing")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", nothing_cached)
    fake_hub.error = ConnectionError("no route")
    with pytest.raises(EngineLoadError, match="no folder on this machine") as caught:
        describe_model(EngineConfig(model="examples/demo-modl"))
    assert caught.value.message.count("examples/demo-modl") == 1
    assert "check the spelling" in caught.value.hint


def test_without_the_hub_the_cached_model_is_taken(fake_hub, monkeypatch, tmp_path):
    cached = write_model_stub(tmp_path / ("d" * 40))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *a, **o: str(cached))
    fake_hub.error = ConnectionError("no route")
    info = describe_model(EngineConfig(model="org/name"))
    assert info.revision == info.identity == "d" * 40
    assert info.name == "org/name"


def test_offline_and_not_cached_says_so(fake_hub, monkeypatch):
    def nothing_cached(*arguments, **options):
        raise hub_errors.LocalEntryNotFoundError("nothing")

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", nothing_cached)
    with pytest.raises(ConfigError, match="HF_HUB_OFFLINE"):
        describe_model(EngineConfig(model="org/name"))
    assert fake_hub.asked == []
