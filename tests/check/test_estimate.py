"""Sums of `check`, its rules for task files, and its memory arithmetic."""

from __future__ import annotations

from pathlib import Path

import pytest

from batchinfer.check.estimate import (
    Asked,
    chunk_rows_for,
    estimate,
    give_advice,
    measure_lengths,
    workers_for,
)
from batchinfer.check.memory import ask_for_memory, parse_gpu
from batchinfer.core.errors import ConfigError
from batchinfer.core.prices import Price
from batchinfer.engines.config import EngineConfig
from batchinfer.engines.models import ModelInfo

REPOSITORY = Path(__file__).resolve().parents[2]
LLAMA_8B = ModelInfo(
    name="llama-8b",
    identity="",
    dtype="bfloat16",
    max_model_len=8192,
    parameter_bytes=16 << 30,
    kv_bytes_per_token=131_072,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
)

# --------------------------------------------------------------------------- sums


def test_cost_holds_the_start_of_every_worker() -> None:
    found = estimate(rows=7200, rate=1.0, workers=4, start_seconds=900, price_per_hour=1.0)
    assert found.hours == pytest.approx(0.75)
    assert found.cost == pytest.approx(3.0)
    assert found.cost_per_million_rows == pytest.approx(3.0 / 7200 * 1e6)


def test_time_and_workers_agree() -> None:
    workers = workers_for(1_000_000, 10.0, 3600, 600)
    assert workers == 34
    found = estimate(
        rows=1_000_000, rate=10.0, workers=workers, start_seconds=600, price_per_hour=None
    )
    assert found.hours <= 1.0
    assert found.cost is None


@pytest.mark.parametrize("rows", [1, 10, 1000, 10**6, 10**9])
@pytest.mark.parametrize("rate", [0.01, 1.0, 500.0])
@pytest.mark.parametrize("workers", [1, 16, 400])
def test_advised_chunks_keep_every_worker_busy_and_stay_few(
    rows: int, rate: float, workers: int
) -> None:
    size = chunk_rows_for(rows, rate, workers)
    chunks = -(-rows // size)
    assert chunks >= min(workers, rows) * 0.9
    assert chunks <= 10_000


def test_lengths_are_counted_by_powers_of_two() -> None:
    found = measure_lengths([1, 2, 3, 4, 5, 1000])
    assert found.histogram == {"1": 1, "2": 1, "4": 2, "8": 1, "1024": 1}
    assert (found.longest, found.p95) == (1000, 1000)


def test_advice_speaks_of_short_jobs_few_chunks_and_dear_preemptions() -> None:
    price = Price(2.0, "told")
    found = give_advice(Asked(rows=1000, rate=10.0, chunks=3, workers=8, price=price))
    assert found["estimate"]["price_source"] == "told"
    text = "\n".join(found["advice"])
    assert "fewer workers cost less" in text
    assert "only 3 of 8 workers" in text
    alone = "\n".join(give_advice(Asked(rows=1000, rate=10.0, hours=1.0))["advice"])
    assert "1 worker finishes" in alone
    assert "starting takes" in alone
    assert "fewer workers" not in alone
    slow = give_advice(
        Asked(rows=10**6, rate=1.0, load_seconds=1300.0, checkpoint_seconds=300.0, hours=0.2)
    )
    text = "\n".join(slow["advice"])
    assert "more than half an hour" in text
    assert "allow more time" in text
    assert "--price-per-hour" in text
    assert "--chunk-rows" in text


# --------------------------------------------------------------------------- memory


def test_memory_of_a_model_that_fits() -> None:
    memory = ask_for_memory("L4", LLAMA_8B, EngineConfig(model="m", max_model_len=4096), 300, 200)
    assert (memory.tensor_parallel_size, memory.replicas) == (1, 1)
    # 22.5 GiB x 0.92 - 2 GiB - 16 GiB = 2.7 GiB at 128 KiB a token
    assert memory.cache_tokens == pytest.approx(22_118, rel=0.01)
    assert memory.rows_at_once == pytest.approx(55, abs=1)
    eight = ask_for_memory("H100:8", LLAMA_8B, EngineConfig(model="m"), 300, 200)
    assert (eight.tensor_parallel_size, eight.replicas) == (1, 8)


def test_memory_that_is_not_enough_is_said_with_its_sums() -> None:
    with pytest.raises(ConfigError, match="T4"):
        ask_for_memory("T4", LLAMA_8B, EngineConfig(model="m", tensor_parallel_size=1), None, None)
    with pytest.raises(ConfigError, match="less than one row") as caught:
        ask_for_memory("L4", LLAMA_8B, EngineConfig(model="m", max_model_len=40_000), None, None)
    assert "--max-model-len 22112" in caught.value.hint


@pytest.mark.parametrize("text", ["L44", "L4:", "L4:x", "L4:0", ""])
def test_unknown_gpu_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--gpu"):
        parse_gpu(text)
