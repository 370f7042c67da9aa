"""Which GPUs there are, and how replicas of a model are laid out on them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from batchinfer.core.errors import ConfigError
from batchinfer.engines.config import EngineConfig
from batchinfer.engines.gpus import (
    GIB,
    Gpu,
    choose_parallelism,
    parse_nvidia_smi,
    place,
    query_nvml,
    visible_gpus,
)
from batchinfer.engines.models import ModelInfo
from tiny_model import write_model_stub

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
    """Models with windows, other kinds of layers or shared caches need less than the estimate; vLLM knows."""
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
    # weights of 21 GiB leave nearly nothing of 22.1 GiB, which is no reason to refuse
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
    config = EngineConfig(
        model=str(write_model_stub(tmp_path / "m")), gpus=wanted, tensor_parallel_size=1
    )
    for _, environment in place(config).replicas:
        assert environment.get("CUDA_DEVICE_ORDER") == ("PCI_BUS_ID" if is_translated else None)


def test_a_launch_that_may_not_fit_is_warned_of_in_the_log(
    three_gpus, tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr("batchinfer.engines.gpus.describe_model", lambda _: model(15, **LLAMA))
    monkeypatch.setattr(
        "batchinfer.engines.gpus.query_nvidia", lambda: [(gpus(1, 24)[0], "GPU-aa")]
    )
    place(EngineConfig(model=str(tmp_path), max_model_len=50_000))
    assert "--max-model-len 40960 fits" in caplog.text


def fake_nvml(**changes) -> SimpleNamespace:
    """NVML with four GPUs: the second one has failed, the third one does not tell its memory."""
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
