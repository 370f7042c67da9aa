"""Real vLLM on the CPU: one model and one engine for all tests that can share them."""

from __future__ import annotations

import threading

import msgspec
import pytest

from tiny_model import DEMO_MODEL, write_tiny_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """Folder of a tiny random model with 512 positions. Its two attention heads can be split over two processes."""
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def vllm_config(tiny_model):
    """Options with which vLLM starts fastest. Tests replace those that they are about."""
    from batchinfer.engines.config import EngineConfig

    return EngineConfig(
        engine="vllm",
        model=str(tiny_model),
        max_model_len=512,
        max_num_seqs=16,
        dtype="float32",
        engine_args={"kv_cache_memory_bytes": 64 << 20, "block_size": 32},
    )


@pytest.fixture(scope="session")
def vllm_engine(vllm_config):
    """An open engine in a process of its own, as a worker would have it."""
    from batchinfer.engines import create_engine

    engine = create_engine(vllm_config)
    engine.open(threading.Event())
    yield engine
    engine.close()


@pytest.fixture(scope="session")
def demo_config():
    """Options of `demo_engine`."""
    from batchinfer.engines.config import EngineConfig

    return EngineConfig(
        model=str(DEMO_MODEL),
        max_model_len=256,
        max_num_seqs=16,
        engine_args={"kv_cache_memory_bytes": 64 << 20, "block_size": 32},
    )


@pytest.fixture(scope="session")
def demo_engine(demo_config):
    """An open engine with the demo's model, for the workers of all tests that can share it.

    It knows where reasoning ends. That changes nothing for runs without reasoning.
    """
    from batchinfer.engines.config import CONSTRAINTS
    from shared_engine import opened

    # Constraints hold from the first token on, although the engine knows where reasoning ends.
    constraints = {"structured_outputs_config": {**CONSTRAINTS, "enable_in_reasoning": True}}
    config = msgspec.structs.replace(
        demo_config,
        reasoning_parser="qwen3",
        engine_args={**demo_config.engine_args, **constraints},
    )
    with opened(config) as engine:
        yield engine


@pytest.fixture
def workers_share_demo_engine(demo_engine, monkeypatch):
    """Workers that run in this process use `demo_engine` instead of an engine of their own."""
    monkeypatch.setattr("batchinfer.worker.config.create_engine", lambda _: demo_engine)
