"""A quantized model, the KV cache's type, priorities and speculative decoding, with real vLLM."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from batchinfer.core import layout
from batchinfer.core.records import Request, Sampling
from batchinfer.engines import Engine, create_engine
from batchinfer.engines.config import EngineConfig
from batchinfer.ledger.survey import finished_chunks
from batchinfer.storage.opening import open_store
from engine_contract import Flag, ListSource, drive
from making import finish_process, read_marker, run_process, start_process
from quantized_model import write_quantized

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
demo_data = pytest.importorskip("demo_data", reason="scripts/ is part of the checkout")

pytestmark = pytest.mark.vllm

NUM_ROWS = 240
NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": 4,
    "prompt_lookup_max": 3,
    "prompt_lookup_min": 1,
}
HAS_AVX512 = torch.backends.cpu.get_cpu_capability().startswith("AVX512")
WEIGHTS, CACHE = ("gptq", "fp8") if HAS_AVX512 else ("int8", "bfloat16")
"""vLLM's CPU build takes weights of 4 bits, and a cache of 8, with AVX-512 only."""
METHODS = {"gptq": ("gptq", "auto_gptq"), "int8": ("compressed-tensors",)}
ARGUMENTS = {"kv_cache_memory_bytes": 64 << 20, "block_size": 32}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_quantized(WEIGHTS, tmp_path_factory.mktemp("quantized") / WEIGHTS))


@pytest.fixture(scope="module")
def engine(model: str) -> Iterator[Engine]:
    """Quantized weights, a cache of the stated type, and a queue by priority."""
    knobs = {"kv_cache_dtype": CACHE, "scheduling_policy": "priority"}
    config = EngineConfig(
        model=model, max_model_len=256, max_num_seqs=4, engine_args={**ARGUMENTS, **knobs}
    )
    engine = create_engine(config)
    info = engine.open(Flag())
    assert info.quantization in METHODS[WEIGHTS]
    yield engine
    engine.close()


def ask(engine: Engine, texts: list[str], **given: Any) -> list[Any]:
    """The completions of some chats, all given to the engine at once."""
    sampling = Sampling(**{"temperature": 0.0, "max_tokens": 24, **given})
    requests = [
        Request(key=("c", i), messages=[{"role": "user", "content": text}], sampling=sampling)
        for i, text in enumerate(texts)
    ]
    found = drive(engine, ListSource(requests))
    return [found[request.key] for request in requests]


def test_a_quantized_model_answers_as_the_whole_one(engine: Engine) -> None:
    names = {"France": "Paris", "Japan": "Tokyo", "Italy": "Rome", "Germany": "Berlin"}
    found = ask(engine, [f"What is the capital of {name}?" for name in names])
    assert [each.choices[0].text for each in found] == list(names.values())


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [
        "int8",
        "fp8",
        pytest.param("awq", marks=pytest.mark.skipif(not HAS_AVX512, reason="needs AVX-512")),
    ],
)
def test_other_kinds_of_quantized_models_answer_too(tmp_path: Path, kind: str) -> None:
    model = str(write_quantized(kind, tmp_path / kind))
    engine = create_engine(
        EngineConfig(model=model, max_model_len=256, max_num_seqs=4, engine_args=ARGUMENTS)
    )
    try:
        engine.open(Flag())
        found = ask(engine, [f"What is the capital of {name}?" for name in ("France", "Japan")])
        assert [each.choices[0].text for each in found] == ["Paris", "Tokyo"]
    finally:
        engine.close()


def test_requests_run_by_their_priority(engine: Engine) -> None:
    """Six requests are in the engine, of which four run at once: the two with the highest number come last."""
    sampling = Sampling(temperature=0.0, max_tokens=6, ignore_eos=True)
    requests = [
        Request(key=("c", i), text=f"row {i}", sampling=sampling, priority=priority)
        for i, priority in enumerate([9, 9, 0, -1, 0, -1])
    ]
    order = [
        completion.key[1]
        for batch in engine.generate(ListSource(requests), Flag())
        for completion in batch
    ]
    assert (set(order[:4]), set(order[4:])) == ({2, 3, 4, 5}, {0, 1})


# --------------------------------------------------------------------------- speculative decoding


def texts_of(run: str) -> list[str]:
    store = open_store(run)
    lines = []
    for name in sorted(finished_chunks(store)):
        data = store.get(layout.output_key(read_marker(store, name).output)).data
        lines += [json.loads(line) for line in data.split(b"\n")[:-1]]
    assert [line["_row"] for line in lines] == list(range(len(lines)))
    return [line["choices"][0]["text"] if line["choices"] else line["error"]["code"] for line in lines]  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_speculation_changes_no_greedy_text_and_is_killed_without_loss(
    tmp_path: Path, model: str
) -> None:
    """A worker that speculates is killed in the middle; another one of the run ends it. Its first start compiles."""
    examples = list(demo_data.draw_examples(NUM_ROWS, seed=5, held_out=True))
    bodies = [
        {"messages": [{"role": "user", "content": each.prompt}], "max_tokens": 64, "temperature": 0}
        for each in examples
    ]
    # What vLLM does not speculate with fails alone; what it does changes nothing.
    drawn = {"temperature": 1.0, "seed": 1}
    refused = {7: {"min_p": 0.1, **drawn}, 150: {"logit_bias": {"70": 5}}}
    beside = {
        20: {"logprobs": True},
        60: {"bad_words": ["zzz"]},
        90: {"n": 2},
        120: {"min_tokens": 2},
    }
    for row, fields in (refused | beside).items():
        bodies[row] |= fields
    source = tmp_path / "data.jsonl"
    frame = {"method": "POST", "url": "/v1/chat/completions"}
    source.write_text(
        "".join(
            json.dumps({"custom_id": f"r{i}", **frame, "body": body}) + "\n"
            for i, body in enumerate(bodies)
        )
    )
    job = str(tmp_path / "job")
    assert run_process(["split", str(source), "--output", job, "--chunk-rows", "40"]).status == 0
    speculation = tmp_path / "ngram.json"
    speculation.write_text(json.dumps(NGRAM))
    command = [
        "worker", "--job", job, "--model", model, "--request-format", "openai-batch", "--max-model-len", "256",
        "--max-num-seqs", "8", "--worker-id", "w0", "--kv-cache-dtype", CACHE, "--checkpoint-seconds", "0.3",
        "--engine-arg", "kv_cache_memory_bytes=67108864", "--engine-arg", "block_size=32",
    ]  # fmt: skip
    plain, run = str(tmp_path / "plain"), str(tmp_path / "ngram")
    whole = finish_process(start_process([*command, "--output", plain]), 400)
    assert whole.status == 0, whole.stderr
    command += ["--output", run, "--speculative-config", f"@{speculation}"]
    worker = start_process(command)
    store = open_store(run)
    while not any(True for _ in store.list(layout.CHECKPOINTS)):
        assert worker.poll() is None
        time.sleep(0.02)
    worker.kill()
    worker.communicate()
    assert len(finished_chunks(store)) < 6, "killed too late"
    done = finish_process(start_process(command), 400)
    assert done.status == 0, done.stderr
    assert done.result["rows_resumed"] > 0
    wanted = texts_of(plain)
    for row in refused:
        wanted[row] = "invalid_parameter"
    assert texts_of(run) == wanted
    recorded = json.loads(store.get(layout.RUN_KEY).data)["config"]["engine_args"]
    assert (recorded["speculative_config"], recorded["kv_cache_dtype"]) == (NGRAM, CACHE)
    steps = (whole.result["engine_steps"], done.result["engine_steps"])
    assert 0 < steps[1] < steps[0]
