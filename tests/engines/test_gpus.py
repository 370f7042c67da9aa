"""Which GPUs there are, and how replicas of a model are laid out on them."""

import sys
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from batchinfer.core.errors import ConfigError
from batchinfer.engines.engine_config import EngineConfig
from batchinfer.engines.gpus import (
    GIB,
    Gpu,
    choose_layout,
    device_variables,
    query_nvidia,
    visible_gpus,
)
from batchinfer.engines.models import ModelInfo


def model(parameters_gib: float, **changes) -> ModelInfo:
    """A model with grouped heads like Llama 3's: 32 and 8, 128 KiB of KV cache a token."""
    values = {
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


def chosen(info, devices, *arguments, **options) -> tuple[int, int]:
    config = EngineConfig(model="m", server_args=list(arguments), **options)
    layout = choose_layout(info, devices, config)
    return layout.tensor_parallel_size, layout.replicas


LLAMA_70B = model(132, kv_bytes_per_token=327_680)


@pytest.mark.parametrize(
    ("info", "devices", "expected"),
    [
        (model(1), gpus(1, 24), (1, 1)),
        (model(1), gpus(8, 24), (1, 8)),  # a small model eight times
        (model(15), gpus(8, 80), (1, 8)),  # 8B on H100
        (model(15), gpus(8, 24), (2, 4)),  # 8B on L4: 7.5 + 4 of 20.1 GiB
        (LLAMA_70B, gpus(8, 80), (4, 2)),  # on H100: 33 + 5 of 71.6 GiB
        (LLAMA_70B, gpus(6, 80), (4, 1)),  # two stay idle, since 32 heads do not divide by 6
        # 64 GiB for one whole sequence, and 16 GiB on each GPU, which all need the only head for keys and values.
        (model(15, max_model_len=1 << 19), gpus(8, 80), (2, 4)),
        (model(15, max_model_len=1 << 17, num_kv_heads=1), gpus(8, 24), (4, 2)),
        # Where sizes are not known, one replica takes all GPUs.
        (model(0), gpus(4, 80), (4, 1)),
        # A slice of a GPU holds a replica, and so does a CPU.
        (model(15), [Gpu(id="MIG-aa"), Gpu(id="MIG-bb")], (1, 2)),
        (model(1), [], (1, 1)),
    ],
)
def test_the_fewest_gpus_that_serve_the_model_well_make_a_replica(info, devices, expected):
    assert chosen(info, devices) == expected


def test_what_the_user_states_is_taken():
    assert chosen(model(1), gpus(8, 80), tensor_parallel_size=4) == (4, 2)
    assert chosen(model(1), gpus(8, 80), replicas=3) == (1, 3)
    assert chosen(model(1), gpus(8, 80), pipeline_parallel_size=2) == (1, 4)
    assert chosen(model(1), [], replicas=2) == (1, 2)
    long = model(15, max_model_len=1 << 19)
    assert chosen(long, gpus(8, 80), "--max-model-len", "4096") == (1, 8)
    nodes = {"nnodes": 2, "master_addr": "here"}
    assert chosen(model(1), gpus(8, 80), **nodes) == (16, 1)


def test_more_gpus_than_there_are_is_refused_with_the_product():
    options = {"replicas": 3, "tensor_parallel_size": 2, "pipeline_parallel_size": 1}
    with pytest.raises(ConfigError, match=r"\d x \d x \d = 6 GPUs are asked for, 4 are vis"):
        chosen(model(1), gpus(4, 80), **options)


# --------------------------------------------------------------------------- which GPUs


@pytest.fixture
def three_gpus(monkeypatch):
    found = [Gpu(id=str(number), uuid=f"GPU-{each}{each}") for number, each in enumerate("abc")]
    monkeypatch.setattr("batchinfer.engines.gpus.query_nvidia", lambda: found)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def ids(wanted=None) -> list[str]:
    return [gpu.id for gpu in visible_gpus(wanted)]


@pytest.mark.parametrize(
    ("variable", "expected"),
    [("2,0", ["2", "0"]), ("GPU-bb", ["1"]), ("GPU-b", ["GPU-b"]), ("1,9,2", ["1"]), ("", []),
     ("MIG-x", ["MIG-x"])],
)  # fmt: skip
def test_the_environment_says_which_gpus_are_visible(three_gpus, monkeypatch, variable, expected):
    assert ids() == ["0", "1", "2"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
    assert ids() == expected


def test_stated_gpus_win_and_must_exist(three_gpus, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert ids(["1", "GPU-cc"]) == ["1", "2"]
    with pytest.raises(ConfigError, match="there are: 0, 1, 2"):
        ids(["5"])


@pytest.mark.parametrize(
    ("variable", "wanted", "is_translated"),
    [
        (None, None, True),
        ("GPU-bb,GPU-aa", None, True),
        ("2,0", None, False),
        ("2,0", ["0", "1"], True),
    ],
)
def test_servers_number_gpus_as_they_were_looked_up(monkeypatch, variable, wanted, is_translated):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if variable:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
    found = device_variables(gpus(2, 80), wanted)
    assert found["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert found.get("CUDA_DEVICE_ORDER") == ("PCI_BUS_ID" if is_translated else None)
    assert device_variables([], wanted) == {}


def test_a_gpu_that_the_driver_cannot_describe_takes_no_other_along(monkeypatch):
    """Of four GPUs, the second one has failed, and the third one does not tell its memory."""
    memory = SimpleNamespace(total=GIB)
    nvml = Mock(
        NVMLError=KeyError,
        nvmlDeviceGetCount=lambda: 4,
        nvmlDeviceGetHandleByIndex={0: 0, 2: 2, 3: 3}.__getitem__,
        nvmlDeviceGetUUID="GPU-{}".format,
        nvmlDeviceGetMemoryInfo={0: memory, 3: memory}.__getitem__,
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    found = [(gpu.id, gpu.uuid, gpu.total_bytes) for gpu in query_nvidia()]
    assert found == [("0", "GPU-0", GIB), ("2", "GPU-2", 0), ("3", "GPU-3", GIB)]
