"""Two machines that run one model with real vLLM, as two processes on 127.0.0.1: each of them is killed once."""

import subprocess
import sys
import time

import pytest

from batchinfer.core import layout
from batchinfer.storage.opening import open_store
from making import (
    finish_process,
    finished_chunks,
    free_ports,
    output_lines,
    said,
    split,
    start_process,
    write_lines,
)
from models import DEMO_MODEL, ROOT

sys.path.insert(0, str(ROOT / "scripts"))
demo_data = pytest.importorskip("demo_data", reason="scripts/ is part of the checkout")

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

NUM_ROWS = 360
SECONDS = 500
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
LOADED = (
    "--model", str(DEMO_MODEL), "--max-model-len", "256", "--max-num-seqs", "4",
    "--kv-cache-memory-bytes", "67108864", "--block-size", "32",
)  # fmt: skip


def texts_of(run: str) -> list[str]:
    lines = output_lines(run)
    assert [line["_row"] for line in lines] == list(range(NUM_ROWS))
    return [said(line) for line in lines]


def checkpoints(run: str) -> int:
    return sum(1 for _ in open_store(run).list(layout.CHECKPOINTS))


@pytest.mark.timeout(2400)
def test_two_machines_answer_as_one_and_end_together(tmp_path):
    source, job = tmp_path / "data.jsonl", str(tmp_path / "job")
    examples = demo_data.draw_examples(NUM_ROWS, seed=7, held_out=True)
    rows = [{"messages": [{"role": "user", "content": each.prompt}]} for each in examples]
    write_lines(source, rows)
    split(source, job, num_chunks=NUM_ROWS // 60)
    command = [
        "worker", "--job", job, "--messages-column", "messages", "--temperature", "0", "--max-tokens", "64",
        "--checkpoint-seconds", "0.3", "--worker-id", "w0", *LOADED,
    ]  # fmt: skip
    alone = str(tmp_path / "alone")
    done = finish_process(start_process([*command, "--output", alone]), SECONDS)
    assert done.status == 0, done.err

    run = str(tmp_path / "nodes")

    def start() -> tuple[subprocess.Popen[str], subprocess.Popen[str]]:
        several = (
            "--nnodes", "2", "--tensor-parallel-size", "2", "--master-addr", "127.0.0.1",
            "--master-port", str(free_ports()),
        )  # fmt: skip
        first = [*command, "--output", run, *several]
        second = ["worker", "--headless", "--node-rank", "1", *LOADED, *several]
        found = [start_process(each, environment=ONE_THREAD) for each in (first, second)]
        return found[0], found[1]

    def wait_for_rows(*processes: subprocess.Popen[str]) -> None:
        before, end = checkpoints(run), time.monotonic() + SECONDS
        while checkpoints(run) <= before and not finished_chunks(open_store(run)):
            assert [each.poll() for each in processes] == [None, None]
            assert time.monotonic() < end
            time.sleep(0.05)

    worker, other = start()
    wait_for_rows(worker, other)
    other.kill()
    other.communicate()
    done = finish_process(worker, 60)
    assert done.status == 33, done.err
    assert "a node that runs a share of the model has gone" in done.err

    worker, other = start()
    wait_for_rows(worker, other)
    worker.kill()
    worker.communicate()
    gone = finish_process(other, 60)
    assert (gone.status, "node 0 has gone" in gone.err) == (33, True), gone.err
    assert len(finished_chunks(open_store(run))) < NUM_ROWS // 60, "killed too late"

    worker, other = start()
    done, gone = finish_process(worker, SECONDS), finish_process(other, 60)
    assert (done.status, gone.status) == (0, 0), done.err + gone.err
    assert done.result["rows_resumed"] > 0
    assert gone.result == {"status": "SUCCESS", "node_rank": 1, "nnodes": 2}
    assert texts_of(run) == texts_of(alone)
