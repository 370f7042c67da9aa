"""Real vLLM on the CPU: one model and one engine for all tests that can share them."""

from __future__ import annotations

import pytest

from tiny_model import write_tiny_model


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

    class Never:
        def is_set(self):
            return False

    engine = create_engine(vllm_config)
    engine.open(Never())
    yield engine
    engine.close()
