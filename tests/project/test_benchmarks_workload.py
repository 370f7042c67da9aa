"""What all ways of the engine benchmarks get alike."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from types import ModuleType

import pytest

FILE = Path(__file__).resolve().parents[2] / "benchmarks" / "workload.py"


@pytest.fixture(scope="module")
def workload() -> ModuleType:
    spec = importlib.util.spec_from_file_location("workload_of_benchmarks", FILE)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_vllm_that_is_on_the_python_path_only_stays_there(workload, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/site/vllm")
    paths = workload.environment()["PYTHONPATH"].split(os.pathsep)
    assert paths == [str(FILE.parents[1]), str(FILE.parent), "/site/vllm"]
    monkeypatch.delenv("PYTHONPATH")
    assert workload.environment()["PYTHONPATH"].split(os.pathsep) == paths[:2]


def test_every_way_sees_the_same_one_gpu(workload, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert workload.environment()["CUDA_VISIBLE_DEVICES"] == "0"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    assert workload.environment()["CUDA_VISIBLE_DEVICES"] == "3"
    options = workload.engine_options(workload.GPU_ENGINE)
    assert options[options.index("--tensor-parallel-size") + 1] == "1"
    assert options[options.index("--max-num-batched-tokens") + 1] == "8192"
    assert "--enforce-eager" in workload.engine_options(workload.CPU_ENGINE)
