from __future__ import annotations

import json
from types import SimpleNamespace

import huggingface_hub
import pytest
from huggingface_hub import constants
from huggingface_hub import errors as hub_errors

from batchinfer.core.errors import AccessDenied, ConfigError, EngineLoadError, InputError
from batchinfer.engines.config import EngineConfig
from batchinfer.engines.gpus import (
    GIB,
    Gpu,
    choose_parallelism,
    memory_per_gpu,
    parse_nvidia_smi,
    place,
    query_nvml,
    visible_gpus,
)
from batchinfer.engines.models import ModelInfo, check_length, describe_model, weight_files
from tiny_model import write_model_stub


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
    assert choose_parallelism(info, gpus(4, 80), config_of(folder, tensor_parallel_size=4))


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


# --------------------------------------------------------------------------- the Hub


@pytest.fixture
def fake_hub(monkeypatch, tmp_path):
    """A Hub with one model at one commit; the test sets `error` to have it fail."""
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
    """An error of the Hub's client as it raises it, whatever its constructor takes."""
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


# --------------------------------------------------------------------------- layout on GPUs


def model(parameters_gib: float, **changes) -> ModelInfo:
    """A model with grouped heads like Llama 3's: 32 and 8, 128 KiB of KV cache a token."""
    values = {
        "name": "m",
        "identity": "",
        "max_model_len": 8192,
        "parameter_bytes": int(parameters_gib * GIB),
        "kv_bytes_per_token": 131072,
        "num_heads": 32,
        "num_kv_heads": 8,
    }
    return ModelInfo(**{**values, **changes})


def gpus(count: int, gibibytes: float) -> list[Gpu]:
    return [Gpu(id=str(index), total_bytes=int(gibibytes * GIB)) for index in range(count)]


def chosen(info, devices, **options) -> tuple[int, int]:
    layout = choose_parallelism(info, devices, EngineConfig(model="m", **options))
    return layout.tensor_parallel_size, layout.replicas


@pytest.mark.parametrize(
    ("parameters_gib", "count", "gibibytes", "expected"),
    [
        (1, 1, 24, (1, 1)),
        (1, 8, 24, (1, 8)),  # a small model eight times
        (15, 8, 80, (1, 8)),  # 8B on H100
        (15, 8, 24, (2, 4)),  # 8B on L4: 7.5 + 4 of 20.1 GiB
        (15, 1, 24, (1, 1)),  # weights fit, the cache is small: it is tried
        (132, 8, 80, (4, 2)),  # 70B on H100: 33 + 5 of 71.6 GiB
        (132, 4, 80, (4, 1)),
        (132, 6, 80, (4, 1)),  # two stay idle, since 32 heads do not divide by 6
        (15, 3, 24, (2, 1)),
    ],
)
def test_the_fewest_gpus_that_serve_the_model_well_make_a_replica(
    parameters_gib, count, gibibytes, expected
):
    cache = 327_680 if parameters_gib > 100 else 131_072  # of Llama 3's 70B and 8B
    info = model(parameters_gib, kv_bytes_per_token=cache)
    assert chosen(info, gpus(count, gibibytes)) == expected


def test_a_long_context_needs_room_for_one_whole_sequence():
    long = model(15, max_model_len=1 << 19)  # 64 GiB for one sequence
    assert chosen(long, gpus(8, 80)) == (2, 4)
    assert chosen(long, gpus(8, 80), max_model_len=4096) == (1, 8)


def test_what_the_user_states_is_taken():
    assert chosen(model(1), gpus(8, 80), tensor_parallel_size=4) == (4, 2)
    assert chosen(model(1), gpus(8, 80), tensor_parallel_size=4, replicas=1) == (4, 1)
    assert chosen(model(1), gpus(8, 80), replicas=3) == (1, 3)
    assert chosen(model(15), gpus(8, 24), replicas=2) == (2, 2)
    assert chosen(model(1), gpus(8, 80), pipeline_parallel_size=2) == (1, 4)


def test_unknown_sizes_take_all_gpus_for_one_replica():
    assert chosen(model(0), gpus(4, 80)) == (4, 1)
    assert chosen(model(5), gpus(4, 0)) == (4, 1)


def test_more_gpus_than_there_are_is_refused_with_the_product():
    for options in (
        {"replicas": 3, "tensor_parallel_size": 2},
        {"tensor_parallel_size": 8},
        {"replicas": 5},
        {"tensor_parallel_size": 2, "pipeline_parallel_size": 4},
    ):
        with pytest.raises(ConfigError, match=r"\d x \d x \d = \d+ GPUs are asked for, 4 are vis"):
            chosen(model(1), gpus(4, 80), **options)


def test_heads_that_do_not_divide_are_refused_with_what_would():
    with pytest.raises(ConfigError, match="32 attention heads") as caught:
        chosen(model(1), gpus(8, 80), tensor_parallel_size=3)
    assert "1, 2, 4, 8, 16, 32" in caught.value.hint


def test_weights_that_fit_nowhere_are_refused_with_the_arithmetic():
    with pytest.raises(ConfigError, match=r"132\.0 GiB per GPU .* 80\.0 GiB x 0\.9"):
        chosen(model(132), gpus(1, 80))
    assert chosen(model(132), gpus(1, 80), cpu_offload_gb=100.0) == (1, 1)
    assert chosen(model(132), gpus(1, 80), tensor_parallel_size=1) == (1, 1), "stated is tried"


LLAMA = {"max_model_len": 131_072}  # 16 GiB for one sequence


def test_a_long_sequence_is_no_reason_to_refuse_a_model():
    """Windows, hybrids and shared caches take less than the estimate: vLLM knows."""
    assert chosen(model(15, **LLAMA), gpus(1, 24)) == (1, 1)
    assert chosen(model(15, **LLAMA), gpus(2, 24)) == (2, 1), "8 + 7.5 of 20.1"


def test_what_may_not_load_is_warned_of():
    layout = choose_parallelism(
        model(15, **LLAMA), gpus(1, 24), EngineConfig(model="m", max_model_len=50_000)
    )
    # 24 GiB x 0.92 = 22.1: 20.1 without the overhead, 5.1 beside the weights
    for part in ("may not load", "15.0 GiB", "50000 tokens 6.1 GiB", "--max-model-len 40960 fits"):
        assert part in layout.warning
    for options in ({"max_model_len": 8192}, {"tensor_parallel_size": 1}):
        config = EngineConfig(model="m", **options)
        assert not choose_parallelism(model(15, **LLAMA), gpus(1, 24), config).warning
    # weights alone: 21 of 22.1 GiB are no reason to refuse
    tight = choose_parallelism(model(21), gpus(1, 24), EngineConfig(model="m"))
    assert "larger GPUs" in tight.warning


def test_weights_that_may_shrink_while_they_load_are_not_refused():
    assert chosen(model(132), gpus(1, 80), quantization="bitsandbytes") == (1, 1)
    assert chosen(model(132), gpus(1, 80), engine_args={"quantization": "fp8"}) == (1, 1)


def test_slices_of_a_gpu_hold_one_replica_each():
    slices = [Gpu(id="MIG-aa"), Gpu(id="MIG-bb")]
    assert chosen(model(15), slices) == (1, 2)


def test_the_choice_is_explained_with_its_numbers():
    layout = choose_parallelism(model(15), gpus(8, 24), EngineConfig(model="m"))
    for part in ("4 x tensor parallel 2", "8 of 8 GPUs", "7.5 GiB", "4.0 GiB", "20.1 GiB"):
        assert part in layout.explanation


def test_on_a_cpu_one_process_runs_unless_more_are_asked_for():
    assert chosen(model(1), []) == (1, 1)
    assert chosen(model(1), [], replicas=2) == (1, 2)
    with pytest.raises(ConfigError, match="cores"):
        chosen(model(1, num_heads=0, num_kv_heads=0), [], tensor_parallel_size=4096)


# --------------------------------------------------------------------------- which GPUs

SMI = "0, NVIDIA L4, 23034, GPU-aa\n1, NVIDIA L4, 23034, GPU-bb\n2, NVIDIA L4, [N/A], GPU-cc\n"


@pytest.fixture
def three_gpus(monkeypatch):
    found = parse_nvidia_smi(SMI)
    monkeypatch.setattr("batchinfer.engines.gpus.query_nvidia", lambda: found)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def ids(wanted=None) -> list[str]:
    return [gpu.id for gpu in visible_gpus(wanted)]


def test_all_gpus_are_visible_unless_the_environment_says_otherwise(three_gpus, monkeypatch):
    assert ids() == ["0", "1", "2"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,0")
    assert ids() == ["2", "0"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-bb")
    assert ids() == ["1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,9,2")
    assert ids() == ["1"], "as CUDA does"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert ids() == []


def test_stated_gpus_win_and_must_exist(three_gpus, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert ids(["1", "GPU-cc"]) == ["1", "2"]
    with pytest.raises(ConfigError, match="there are: 0, 1, 2"):
        ids(["5"])


def test_a_shortened_uuid_names_the_one_gpu_that_begins_so(monkeypatch):
    found = [(Gpu(id="0"), "GPU-8932aa"), (Gpu(id="1"), "GPU-8932bb")]
    monkeypatch.setattr("batchinfer.engines.gpus.query_nvidia", lambda: found)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-8932b")
    assert ids() == ["1"]
    assert ids(["GPU-8932a"]) == ["0"]
    with pytest.raises(ConfigError, match="GPU-8932'"):
        ids(["GPU-8932"])


@pytest.mark.parametrize(
    ("variable", "wanted", "is_translated"),
    [
        (None, None, True),
        ("GPU-bb,GPU-aa", None, True),
        ("2,0", None, False),
        ("MIG-aa", None, False),
        ("2,0", ["0", "1"], True),
    ],
)
def test_replicas_number_gpus_as_they_were_looked_up(
    three_gpus, monkeypatch, tmp_path, variable, wanted, is_translated
):
    if variable:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
    config = config_of(write_model_stub(tmp_path / "m"), gpus=wanted, tensor_parallel_size=1)
    for _, environment in place(config).replicas:
        assert environment.get("CUDA_DEVICE_ORDER") == ("PCI_BUS_ID" if is_translated else None)


def test_a_launch_that_may_not_fit_is_warned_of_in_the_log(
    three_gpus, tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr("batchinfer.engines.gpus.describe_model", lambda _: model(15, **LLAMA))
    monkeypatch.setattr(
        "batchinfer.engines.gpus.query_nvidia", lambda: [(gpus(1, 24)[0], "GPU-aa")]
    )
    place(config_of(tmp_path, max_model_len=50_000))
    assert "--max-model-len 40960 fits" in caplog.text


def fake_nvml(**changes) -> SimpleNamespace:
    """Four GPUs: the second has fallen off the bus, the third tells no memory."""
    error = type("NVMLError", (Exception,), {})

    def unless(bad: int, answer):
        def ask(index):
            if index == bad:
                raise error
            return answer(index)

        return ask

    functions = {
        "NVMLError": error,
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetCount": lambda: 4,
        "nvmlDeviceGetHandleByIndex": unless(1, int),
        "nvmlDeviceGetName": str,
        "nvmlDeviceGetUUID": lambda index: f"GPU-{index}",
        "nvmlDeviceGetMemoryInfo": unless(2, lambda _: SimpleNamespace(total=GIB)),
    }
    return SimpleNamespace(**{**functions, **changes})


def test_a_gpu_that_the_driver_cannot_describe_takes_no_other_along():
    found = [(gpu.id, gpu.total_bytes) for gpu, _ in query_nvml(fake_nvml())]
    assert found == [("0", GIB), ("2", 0), ("3", GIB)]


def test_a_driver_that_counts_no_gpus_has_none():
    nvml = fake_nvml()

    def fail():
        raise nvml.NVMLError

    assert query_nvml(fake_nvml(NVMLError=nvml.NVMLError, nvmlDeviceGetCount=fail)) == []


def test_memory_that_the_driver_does_not_tell_is_unknown(three_gpus):
    assert [gpu.total_bytes for gpu in visible_gpus()] == [23034 << 20, 23034 << 20, 0]


def test_a_machine_without_a_driver_has_no_gpu(monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setitem(__import__("sys").modules, "pynvml", None)
    assert visible_gpus() == []
    with pytest.raises(ConfigError, match="there are: none"):
        visible_gpus(["0"])
