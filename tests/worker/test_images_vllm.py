"""Images with real vLLM: a tiny Qwen2-VL on the CPU, in processes that have a copy of torchvision that works there.

The answers are compared with those of vLLM's own `LLM.chat`, called once for all rows, and the worker is killed in the
middle.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from batchinfer.core.layout import chunk_name
from batchinfer.storage.opening import open_store
from making import make_job, read_marker, start_process
from pictures import as_base64, as_data_url, as_hub, picture
from vision_model import vision_environment, write_vision_model

pytestmark = pytest.mark.vllm

COLORS = ("red", "green", "blue", "yellow")
PLACE = {"type": "image"}
NUM_ROWS = 48
PER_CHUNK = 12
BAD = {
    5: "invalid_media",
    17: "too_many_media",
    18: "prompt_too_long",
    29: "media_forbidden",
    30: "media_mismatch",
    41: "unsupported_content",
}
ENGINE = {
    "max_model_len": 256,
    "max_num_seqs": 4,
    "limit_mm_per_prompt": {"image": 2},
    "kv_cache_memory_bytes": 64 << 20,
    "block_size": 32,
}
# The worker that goes on, and `LLM.chat` after it, in one process, so that vLLM is imported once.
RESUMED_AND_DIRECT = """
import json, sys
import batchinfer.worker.config
from batchinfer.cli.main import main
from batchinfer.engines.vllm_engine import VllmEngine

work = json.load(sys.stdin)
batchinfer.worker.config.create_engine = VllmEngine
assert main(work["arguments"]) == 0
from vllm import LLM, SamplingParams

llm = LLM(**work["engine"])
params = SamplingParams(temperature=0.0, max_tokens=8)
outputs = llm.chat(work["chats"], params, use_tqdm=False)
texts = [[output.outputs[0].text, len(output.prompt_token_ids)] for output in outputs]
print("\\n" + json.dumps(texts))
"""


def text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


def row(index: int) -> dict[str, Any]:
    """A row of one of several forms. Those of `BAD` cannot be answered."""
    red, blue = picture("red", 60), picture("blue", 60)
    own = picture(COLORS[index % 4], 40 + index, "JPEG" if index % 3 else "PNG")
    question = f"What is it? {index % 4}"
    if index in BAD:
        messages: Any = question
        value: Any = {
            "invalid_media": as_hub(own[:99]),
            "too_many_media": [as_hub(own)] * 3,
            "prompt_too_long": as_hub(own),
            "media_forbidden": "/etc/hostname",
            "media_mismatch": as_hub(own),
            "unsupported_content": None,
        }[BAD[index]]
        if BAD[index] == "prompt_too_long":
            messages = (
                "7" * 242
            )  # a token each: with the chat's own 255, and its image takes more than one
        if BAD[index] == "media_mismatch":
            messages = [{"role": "user", "content": [PLACE, PLACE, text(question)]}]
        if BAD[index] == "unsupported_content":
            messages = [{"role": "user", "content": [{"type": "input_audio"}, text(question)]}]
        return {"messages": messages, "image": value}
    if index % 6 == 0:
        return {"messages": question, "image": None}
    if index % 6 == 1:
        content = [text("First"), PLACE, text("and"), PLACE, text(question)]
        pair = [as_hub(red), as_hub(blue)] if index % 24 < 12 else [as_hub(blue), as_hub(red)]
        return {"messages": [{"role": "user", "content": content}], "image": pair}
    if index % 6 == 2:
        own_part = {"type": "image_url", "image_url": {"url": as_data_url(own)}}
        return {
            "messages": [{"role": "user", "content": [text(question), own_part]}],
            "image": None,
        }
    return {"messages": question, "image": as_base64(own) if index % 6 == 3 else as_hub(own)}


def chat(index: int) -> list[dict[str, Any]]:
    """The same row as a chat of `LLM.chat`."""
    given = row(index)
    images = given["image"] or []
    images = [
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{bytes_of(each)}"}}
        for each in (images if isinstance(images, list) else [images])
    ]
    messages = given["messages"]
    if isinstance(messages, str):
        return [{"role": "user", "content": [*images, text(messages)] if images else messages}]
    content = [images.pop(0) if part == PLACE else part for part in messages[0]["content"]]
    return [{"role": "user", "content": content}]


def bytes_of(value: Any) -> str:
    found: str = value["bytes"] if isinstance(value, dict) else value
    return found


@pytest.fixture(scope="module")
def environment() -> dict[str, str]:
    return vision_environment()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_vision_model(tmp_path_factory.mktemp("vision") / "model")


def arguments(job: Path, run: Path, model: Path) -> list[str]:
    arguments = {name: ENGINE[name] for name in ("kv_cache_memory_bytes", "block_size")}
    return [
        *("worker", "--job", str(job), "--output", str(run), "--model", str(model)),
        *("--messages-column", "messages", "--image-column", "image", "--no-timing"),
        *("--limit-mm-per-prompt", "image=2", "--max-model-len", str(ENGINE["max_model_len"])),
        *("--max-num-seqs", str(ENGINE["max_num_seqs"]), "--max-open-chunks", "1"),
        *("--engine-arg", ",".join(f"{name}={value}" for name, value in arguments.items())),
        *("--temperature", "0", "--max-tokens", "8", "--checkpoint-rows", "4"),
    ]


def lines_of(run: Path) -> list[dict[str, Any]]:
    store = open_store(str(run))
    found = []
    for index in range(NUM_ROWS // PER_CHUNK):
        marker = read_marker(store, chunk_name(index, NUM_ROWS // PER_CHUNK))
        data = store.get(f"outputs/{marker.output}").data
        found += [json.loads(line) for line in data.splitlines()]
    return found


def resumed_and_answered_directly(
    arguments: list[str], model: Path, environment: dict[str, str]
) -> tuple[dict[str, Any], dict[int, Any]]:
    """Run a worker to its end, then ask vLLM without batchinfer.

    Returns the worker's result, and by row what vLLM answers and how many tokens the prompt has.
    """
    good = [index for index in range(NUM_ROWS) if index not in BAD]
    engine = {**ENGINE, "model": str(model), "enforce_eager": True, "enable_chunked_prefill": False}
    work = {"arguments": arguments, "engine": engine, "chats": [chat(index) for index in good]}
    process = subprocess.run(
        [sys.executable, "-c", RESUMED_AND_DIRECT],
        input=json.dumps(work),
        capture_output=True,
        text=True,
        timeout=280,
        env={**environment, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"},
        check=False,
    )
    assert process.returncode == 0, process.stderr[-3000:]
    result, *_, answers = filter(None, process.stdout.splitlines())
    return json.loads(result), dict(zip(good, json.loads(answers), strict=True))


def test_answers_are_vllms_own_also_after_a_kill(
    tmp_path: Path, model: Path, environment: dict[str, str]
) -> None:
    job, run = tmp_path / "job", tmp_path / "run"
    make_job(job, rows=NUM_ROWS, per_chunk=PER_CHUNK, make_row=row)
    process = start_process(arguments(job, run, model), environment=environment)
    try:
        while not list((run / "checkpoints").rglob("*.jsonl")):
            assert process.poll() is None, process.communicate()[1][-3000:]
            time.sleep(0.03)
        os.kill(process.pid, signal.SIGKILL)
    finally:
        process.kill()
        process.communicate()
    assert len(list((run / "outputs").glob("*.succeed"))) < NUM_ROWS // PER_CHUNK
    result, expected = resumed_and_answered_directly(arguments(job, run, model), model, environment)
    assert result["error_count"] <= len(BAD)

    lines = lines_of(run)
    assert {
        index: line["error"]["code"] for index, line in enumerate(lines) if line["error"]
    } == BAD
    found = {
        index: [line["choices"][0]["text"], line["usage"]["prompt_tokens"]]
        for index, line in enumerate(lines)
        if not line["error"]
    }
    assert found == expected
    # The model sees the images, and their order: rows with the same words have other answers.
    by_words: dict[str, set[str]] = {}
    for index in expected:
        if index % 6 == 1:
            by_words.setdefault(json.dumps(row(index)["messages"]), set()).add(found[index][0])
    assert any(len(texts) > 1 for texts in by_words.values())
