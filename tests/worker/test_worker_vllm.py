"""The worker on real vLLM (CPU), with a model whose answers can be checked: a misplaced row is a wrong answer."""

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.error import URLError

import pytest

from batchinfer.cli.main import main
from batchinfer.core import layout
from batchinfer.core.records import Marker
from batchinfer.ledger.looks import read_workers
from batchinfer.storage import Store
from batchinfer.storage.opening import open_store
from engine_contract import are_gone, descendants
from making import (
    finish_process,
    finished_chunks,
    output_lines,
    read_marker,
    said,
    split,
    start_process,
)
from metrics_reader import port_of, scrape
from models import DEMO_MODEL, ROOT

sys.path.insert(0, str(ROOT / "scripts"))
demo_data = pytest.importorskip("demo_data", reason="scripts/ is part of the checkout")

WAIT_SECONDS = 600
"""Most seconds to wait for anything: servers load in minutes where the machine has other work."""
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(3 * WAIT_SECONDS)]

NUM_ROWS = 240
CHUNK_ROWS = 40
OPTIONS = (
    "--model", str(DEMO_MODEL),
    "--messages-column", "conversation",
    "--max-tokens", "64",
    "--max-model-len", "256",
    "--max-num-seqs", "16",
    "--kv-cache-memory-bytes", "67108864",
    "--block-size", "32",
    "--lease-seconds", "8",
    "--checkpoint-seconds", "0.5",
)  # fmt: skip
GREEDY = ("--temperature", "0")


def examples() -> list[Any]:
    """The questions of the data set in row order, with their only right answers."""
    return list(demo_data.draw_examples(NUM_ROWS, seed=11, held_out=True))


@pytest.fixture(scope="session")
def source(tmp_path_factory):
    """A parquet file of LMSys's shape. Row 57 has no conversation, row 58 one that is far too long."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [
        [
            {"role": "user", "content": example.prompt},
            {"role": "assistant", "content": "some other model's answer"},
        ]
        for example in examples()
    ]
    rows[57] = []
    rows[58] = [{"role": "user", "content": "word " * 3000}]
    path = tmp_path_factory.mktemp("source") / "data.parquet"
    pq.write_table(
        pa.table({"conversation": rows, "number": list(range(NUM_ROWS))}), path, row_group_size=50
    )
    return path


def worker(job: str, run: str, *options: str) -> list[str]:
    manifest = f"{job}/manifests/all.txt"
    return ["worker", "--manifest", manifest, "--output", run, *OPTIONS, *options]


def markers(run: str) -> list[Marker]:
    store = open_store(run)
    return [read_marker(store, name) for name in sorted(finished_chunks(store))]


def assert_every_answer_right(run: str) -> None:
    """P1: each row once, in place; two bad rows are error lines; of the rest over 99 % are right to the letter."""
    found = output_lines(run)
    assert [line["_row"] for line in found] == list(range(NUM_ROWS))
    assert found[57]["error"]["code"] == "invalid_column"
    assert found[58]["error"]["code"] == "prompt_too_long"
    wrong = [
        (line["_row"], said(line), example.answer)
        for line, example in zip(found, examples(), strict=True)
        if "body" in line and said(line).strip() != example.answer
    ]
    assert len([line for line in found if "body" in line]) == NUM_ROWS - 2
    assert len(wrong) <= NUM_ROWS // 100, wrong


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"waited {WAIT_SECONDS} s for {what}"
        time.sleep(0.05)


def has_objects(store: Store, prefix: str) -> bool:
    return any(True for _ in store.list(prefix))


@pytest.mark.s3
@pytest.mark.usefixtures("workers_share_demo_engine")
def test_the_main_job_with_a_sigkill_and_a_resume(s3_url, source, capsys):
    """Split, a killed worker, and the same worker again: every answer right. On local disks `make demo` does it.

    The killed worker's server is tensor parallel: none of its processes outlives the worker. The second one is not
    parallel, which is no part of a run's identity.
    """
    job, run = s3_url("job"), s3_url("run")
    split(source, job, num_chunks=NUM_ROWS // CHUNK_ROWS)
    store = open_store(run)
    options = (*GREEDY, "--worker-id", "w0")
    first = start_process(
        worker(job, run, *options, "--max-num-seqs", "4", "--tensor-parallel-size", "2")
    )
    wait_until(lambda: has_objects(store, layout.CHECKPOINTS), "a checkpoint")
    children = descendants(first.pid)
    names = [Path(f"/proc/{child}/comm").read_text() for child in children]
    assert any("EngineCor" in name for name in names), names
    # The engine is in processes of its own: its crash is not the worker's.
    assert any(map(has_vllm, children))
    assert not has_vllm(first.pid)
    first.kill()
    finish_process(first)
    assert are_gone(children, WAIT_SECONDS)
    assert len(markers(run)) < NUM_ROWS // CHUNK_ROWS, "killed too late to show anything"
    capsys.readouterr()
    assert main(worker(job, run, *options)) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["rows_resumed"] > 0
    assert_every_answer_right(run)
    assert sum(marker.rows_ok for marker in markers(run)) == NUM_ROWS - 2


def has_vllm(pid: int) -> bool:
    return "/vllm/_C" in Path(f"/proc/{pid}/maps").read_text()


def metric(port: int, name: str, **labels: str) -> float:
    """The value of a metric of the only worker; 0 if it is missing, or a busy machine resets the connection."""
    try:
        values = scrape(port)[name]
    except URLError:
        return 0.0
    return next((value for key, value in values.items() if labels.items() <= set(key)), 0.0)


@pytest.mark.slow
@pytest.mark.usefixtures("workers_share_demo_engine")
def test_a_dead_engine_a_sigterm_and_a_resume_change_no_sampled_text(tmp_path, source, capsys):
    """The server's core is killed, and a server started again within the worker. Then the worker is stopped, and
    another one goes on.

    P1 and P9: each row is there once and in place. It has the texts that it has in an undisturbed run with another
    number of rows at once. The rows are one chunk, which is not complete at the stop; so every row that was finished,
    before and after the engine's death, is one that the other worker goes on from.
    """
    job, run, whole = (str(tmp_path / name) for name in ("job", "run", "whole"))
    split(source, job, num_chunks=1)
    sampled = ("--temperature", "1", "--n", "2", "--seed", "7")
    options = (*sampled, "--max-num-seqs", "2", "--grace-seconds", "3", "--metrics", "0")
    process = start_process(worker(job, run, *options))
    port = port_of(process)
    assert metric(port, "batchinfer_worker_state", state="loading") == 1
    wait_until(lambda: has_objects(open_store(run), layout.CHECKPOINTS), "a checkpoint")
    wait_until(lambda: metric(port, "batchinfer_completion_tokens_total") > 0, "tokens")
    assert metric(port, "batchinfer_worker_state", state="running") == 1
    assert metric(port, "batchinfer_model_load_seconds") > 0
    assert metric(port, "batchinfer_engine_restarts_total") == 0
    core = next(pid for pid in descendants(process.pid) if "EngineCore" in _command_line(pid))
    os.kill(core, signal.SIGKILL)
    wait_until(lambda: metric(port, "batchinfer_engine_restarts_total") == 1, "the restart")
    before = metric(port, "batchinfer_completion_tokens_total")
    wait_until(lambda: metric(port, "batchinfer_completion_tokens_total") > before, "new tokens")
    children = descendants(process.pid)
    process.send_signal(signal.SIGTERM)
    stopped = finish_process(process, timeout_seconds=WAIT_SECONDS)
    assert stopped.status == 75, stopped.err
    assert "it is started again" in stopped.err
    assert "Traceback" not in stopped.err
    assert are_gone(children, WAIT_SECONDS)
    assert not markers(run), "stopped too late to show anything"
    [(record, _)], _ = read_workers(open_store(run))
    assert record.engine["version"]
    assert (record.engine["device"], record.engine["max_num_seqs"]) == ("cpu", 2)
    assert main(worker(job, run, *sampled)) == 0
    resumed = json.loads(capsys.readouterr().out.splitlines()[-1])["rows_resumed"]
    assert resumed == stopped.result["request_count"] > 0
    assert main(worker(job, whole, *sampled)) == 0
    found, wanted = output_lines(run), output_lines(whole)
    assert [line["_row"] for line in found] == list(range(NUM_ROWS))
    texts, whole_texts = (
        [
            [each["message"]["content"] for each in line.get("body", {}).get("choices", ())]
            for line in run_lines
        ]
        for run_lines in (found, wanted)
    )
    assert texts == whole_texts
    assert {len(row) for index, row in enumerate(texts) if index not in (57, 58)} == {2}
    assert any(first != second for first, second in (row for row in texts if row)), (
        "two draws of a row differ"
    )


def _command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""
