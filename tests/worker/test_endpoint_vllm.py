"""vLLM's own OpenAI server as the engine: killed in the middle of a run, and compared with vLLM in the worker."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from batchinfer.core import layout
from batchinfer.ledger.survey import finished_chunks
from batchinfer.storage.opening import open_store
from making import finish_process, read_marker, run_process, start_process

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "examples/demo-model"
sys.path.insert(0, str(ROOT / "scripts"))
demo_data = pytest.importorskip("demo_data", reason="scripts/ is part of the checkout")

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

NUM_ROWS = 1500
SERVER = (
    sys.executable, "-m", "vllm.entrypoints.openai.api_server",
    "--model", str(MODEL), "--served-model-name", "demo", "--host", "127.0.0.1",
    "--max-model-len", "256", "--max-num-seqs", "16", "--enforce-eager",
    "--kv-cache-memory-bytes", "67108864", "--block-size", "32",
    "--no-enable-chunked-prefill", "--max-num-batched-tokens", "512",
    "--disable-uvicorn-access-log",
)  # fmt: skip
OPTIONS = (
    "--max-tokens",
    "64",
    "--temperature",
    "0",
    "--logprobs",
    "1",
    "--checkpoint-seconds",
    "0.3",
)


@contextmanager
def server(port: int) -> Iterator[subprocess.Popen[bytes]]:
    """A server that answers. At the end it is killed with all its processes, as a lost machine would be."""
    process = subprocess.Popen(
        [*SERVER, "--port", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        env={**os.environ, "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"},
    )
    try:
        deadline = time.monotonic() + 300
        while True:
            with suppress(OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
                break
            assert process.poll() is None, "the server ended"
            assert time.monotonic() < deadline, "the server does not answer"
            time.sleep(0.2)
        yield process
    finally:
        kill(process)


def kill(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def answers(run: str) -> list[dict[str, Any]]:
    """The lines of a finished run in input order, without what differs between two engines: times, and token ids."""
    store = open_store(run)
    found = []
    for name in sorted(finished_chunks(store)):
        data = store.get(layout.output_key(read_marker(store, name).output)).data
        for text in data.split(b"\n")[:-1]:
            line = json.loads(text)
            line.pop("timing")
            line["usage"].pop("cached_tokens")
            for choice in line["choices"]:
                choice.pop("stop_reason", None)
                for position in choice["logprobs"]:
                    position.pop("token_id", None)
                    position["logprob"] = round(position["logprob"], 3)
                    position["top"] = [
                        [top["token"], round(top["logprob"], 3)] for top in position["top"]
                    ]
            found.append(line)
    return found


def test_a_server_killed_and_started_again_loses_no_row_and_answers_as_vllm_in_the_worker(
    tmp_path: Path,
) -> None:
    examples = list(demo_data.draw_examples(NUM_ROWS, seed=3, held_out=True))
    source = tmp_path / "data.jsonl"
    rows = [{"messages": [{"role": "user", "content": each.prompt}]} for each in examples]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    job = str(tmp_path / "job")
    assert run_process(["split", str(source), "--output", job, "--chunk-rows", "300"]).status == 0
    command = ["worker", "--job", job, "--messages-column", "messages", *OPTIONS]
    port, run = free_port(), str(tmp_path / "endpoint")
    endpoint = ("--engine", "openai", "--base-url", f"http://127.0.0.1:{port}", "--model", "demo")
    with server(port) as first:
        worker = start_process([*command, *endpoint, "--output", run, "--max-concurrency", "32"])
        store = open_store(run)
        while not any(True for _ in store.list(layout.CHECKPOINTS)):
            assert worker.poll() is None
            time.sleep(0.02)
        kill(first)
    assert not list(finished_chunks(store)) or len(finished_chunks(store)) < 5, "killed too late"
    with server(port):
        done = finish_process(worker, 200)
    assert done.status == 0, done.stderr
    assert "such requests are sent again" in done.stderr
    assert (done.result["request_count"], done.result["error_count"]) == (NUM_ROWS, 0)
    loaded = (
        "--model", str(MODEL), "--max-model-len", "256", "--max-num-seqs", "16",
        "--engine-arg", "kv_cache_memory_bytes=67108864", "--engine-arg", "block_size=32",
    )  # fmt: skip
    inside = str(tmp_path / "inside")
    whole = run_process([*command, *loaded, "--output", inside])
    assert whole.status == 0, whole.stderr
    through, direct = answers(run), answers(inside)
    assert [line["_row"] for line in through] == list(range(NUM_ROWS))
    assert [line["choices"][0]["text"] for line in through] == [
        line["choices"][0]["text"] for line in direct
    ]
    assert through == direct
