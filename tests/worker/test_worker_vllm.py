"""The worker on real vLLM (CPU), with a model whose answers can be checked: a misplaced row is a wrong answer."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from batchinfer.core import layout
from batchinfer.core.records import Marker
from batchinfer.ledger.survey import finished_chunks
from batchinfer.storage import Store
from batchinfer.storage.opening import open_store
from making import Finished, finish_process, read_marker, run_process, start_process
from metrics_reader import port_of, scrape

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "examples/demo-model"
sys.path.insert(0, str(ROOT / "scripts"))
demo_data = pytest.importorskip("demo_data", reason="scripts/ is part of the checkout")

pytestmark = [pytest.mark.vllm]

NUM_ROWS = 240
CHUNK_ROWS = 40
OPTIONS = (
    "--model", str(MODEL),
    "--messages-column", "conversation",
    "--max-tokens", "64",
    "--max-model-len", "256",
    "--max-num-seqs", "16",
    "--engine-arg", "kv_cache_memory_bytes=67108864",
    "--engine-arg", "block_size=32",
    "--lease-seconds", "8",
    "--checkpoint-seconds", "0.5",
)  # fmt: skip
GREEDY = ("--temperature", "0")


def examples() -> list[Any]:
    """The questions of the data set in row order, with their only right answers."""
    return list(demo_data.draw_examples(NUM_ROWS, seed=11, held_out=True))


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
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


def split(source: Path, job: str) -> None:
    done = run_process(
        [
            "split",
            str(source),
            "--output",
            job,
            "--chunk-rows",
            str(CHUNK_ROWS),
            "--num-workers",
            "2",
        ]
    )
    assert done.status == 0, done.stderr


def worker(job: str, run: str, *options: str, manifest: str = "all.txt") -> list[str]:
    return [
        "worker",
        "--manifest",
        f"{job}/manifests/{manifest}",
        "--output",
        run,
        *OPTIONS,
        *options,
    ]


def lines(run: str) -> list[dict[str, Any]]:
    store = open_store(run)
    found: list[dict[str, Any]] = []
    for name, generation in sorted(finished_chunks(store).items()):
        data = store.get(layout.output_key(read_marker(store, name, generation).output)).data
        found += [json.loads(line) for line in data.split(b"\n")[:-1]]
    return found


def markers(run: str) -> list[Marker]:
    store = open_store(run)
    return [read_marker(store, name) for name in sorted(finished_chunks(store))]


def assert_every_answer_right(run: str) -> None:
    """P1: each row once, in place; two bad rows are error lines; of the rest over 99 % are right to the letter."""
    found = lines(run)
    assert [line["_row"] for line in found] == list(range(NUM_ROWS))
    assert found[57]["error"]["code"] == "empty_conversation"
    assert found[58]["error"]["code"] == "prompt_too_long"
    wrong = [
        (line["_row"], line["choices"], example.answer)
        for line, example in zip(found, examples(), strict=True)
        if line["status"] == "ok" and line["choices"][0]["text"].strip() != example.answer
    ]
    assert len([line for line in found if line["status"] == "ok"]) == NUM_ROWS - 2
    assert len(wrong) <= NUM_ROWS // 100, wrong


def wait_until(condition: Callable[[], bool], what: str, seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds:.0f} s for {what}"
        time.sleep(0.05)


def has_objects(store: Store, prefix: str) -> bool:
    return any(True for _ in store.list(prefix))


def descendants(pid: int) -> set[int]:
    """Every process below one, by /proc."""
    children: dict[int, set[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
            except OSError:
                continue
            children.setdefault(int(fields[1]), set()).add(int(entry.name))
    found: set[int] = set()
    todo = [pid]
    while todo:
        new = children.get(todo.pop(), set()) - found
        found |= new
        todo += new
    return found


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def assert_all_gone(pids: set[int]) -> None:
    wait_until(lambda: not any(map(is_alive, pids)), "the engine's processes to end", seconds=15)


@pytest.mark.s3
def test_the_main_job_with_a_sigkill_and_a_resume(
    s3_url: Callable[[str], str], source: Path
) -> None:
    """Split, a killed worker, and the same worker again: every answer right. On local disks `make demo` does it."""
    job, run = s3_url("job"), s3_url("run")
    split(source, job)
    store = open_store(run)
    first = start_process(worker(job, run, *GREEDY, "--worker-id", "w0", "--max-num-seqs", "4"))
    wait_until(lambda: has_objects(store, layout.CHECKPOINTS), "a checkpoint")
    children = descendants(first.pid)
    assert children, "the engine runs in a process of its own"
    first.kill()
    finish_process(first)
    assert_all_gone(children)
    assert len(markers(run)) < NUM_ROWS // CHUNK_ROWS, "killed too late to show anything"
    again = finish_process(start_process(worker(job, run, *GREEDY, "--worker-id", "w0")), 240)
    assert again.status == 0, again.stderr
    assert again.result["rows_resumed"] > 0
    assert_every_answer_right(run)
    assert sum(marker.rows_ok for marker in markers(run)) == NUM_ROWS - 2


def test_two_workers_tensor_parallel_and_whole(tmp_path: Path, source: Path) -> None:
    """One worker with tensor-parallel size 2 and one without share a run: parallelism is no part of its identity."""
    job, run = str(tmp_path / "job"), str(tmp_path / "run")
    split(source, job)
    done = [
        finish_process(process, 280)
        for process in [
            start_process(
                worker(
                    job,
                    run,
                    *GREEDY,
                    "--tensor-parallel-size",
                    "2",
                    "--no-steal",
                    manifest="worker-00000.txt",
                )
            ),
            start_process(worker(job, run, *GREEDY, "--no-steal", manifest="worker-00001.txt")),
        ]
    ]
    assert [finished.status for finished in done] == [0, 0], done
    assert_every_answer_right(run)


def test_sampled_rows_repeat_whatever_shares_their_batch(tmp_path: Path, source: Path) -> None:
    """P9: the same row and seed give the same text, alone or among others, before and after a resume."""
    job = str(tmp_path / "job")
    split(source, job)
    texts = []
    for name, options in {
        "wide": ("--max-num-seqs", "32"),
        "narrow": ("--max-num-seqs", "3", "--limit", "60"),
    }.items():
        run = str(tmp_path / name)
        done = run_process(
            worker(job, run, "--temperature", "1", "--n", "2", "--seed", "7", *options)
        )
        assert done.status == 0, done.stderr
        texts.append([[choice["text"] for choice in line["choices"]] for line in lines(run)[:60]])
    assert texts[0] == texts[1]
    assert {len(row) for index, row in enumerate(texts[0]) if index not in (57, 58)} == {2}
    assert any(first != second for first, second in (row for row in texts[0] if row)), (
        "two draws of a row differ"
    )


@pytest.mark.parametrize("moment", ["loading", "running"])
def test_sigterm_ends_it_with_75_and_no_process_left(
    tmp_path: Path, source: Path, moment: str
) -> None:
    job, run = str(tmp_path / "job"), str(tmp_path / "run")
    split(source, job)
    process = start_process(
        worker(job, run, *GREEDY, "--max-num-seqs", "2", "--grace-seconds", "3")
    )
    wait_until(lambda: bool(descendants(process.pid)), "the engine's process")
    if moment == "running":
        wait_until(lambda: has_objects(open_store(run), layout.CHECKPOINTS), "a checkpoint")
    else:
        time.sleep(2)
    children = descendants(process.pid)
    process.send_signal(signal.SIGTERM)
    stopped = finish_process(process, timeout_seconds=25)
    assert stopped.status == 75, stopped.stderr
    assert "Traceback" not in stopped.stderr
    assert_all_gone(children)


def metric(port: int, name: str, **labels: str) -> float:
    """The value of a metric of the only worker; 0 if it is missing."""
    values = scrape(port)[name]
    return next((value for key, value in values.items() if labels.items() <= set(key)), 0.0)


def test_a_dead_engine_is_started_again_within_the_worker(tmp_path: Path, source: Path) -> None:
    job, run = str(tmp_path / "job"), str(tmp_path / "run")
    split(source, job)
    options = (*GREEDY, "--max-num-seqs", "2", "--worker-id", "w0", "--metrics-port", "0")
    process = start_process(worker(job, run, *options))
    port = port_of(process)
    assert metric(port, "batchinfer_worker_state", state="loading") == 1
    wait_until(lambda: has_objects(open_store(run), layout.CHECKPOINTS), "a checkpoint")
    wait_until(lambda: metric(port, "batchinfer_completion_tokens_total") > 0, "tokens")
    assert metric(port, "batchinfer_worker_state", state="running") == 1
    assert metric(port, "batchinfer_model_load_seconds") > 0
    assert metric(port, "batchinfer_engine_restarts_total") == 0
    (engine, *_) = [pid for pid in descendants(process.pid) if "engines.host" in _command_line(pid)]
    os.kill(engine, signal.SIGKILL)
    wait_until(lambda: metric(port, "batchinfer_engine_restarts_total") == 1, "the restart")
    done = finish_process(process, timeout_seconds=240)
    assert done.status == 0, done.stderr
    assert "SIGKILL" in done.stderr
    assert "and it is started again" in done.stderr
    assert "Traceback" not in done.stderr
    assert_every_answer_right(run)


def _command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--model", "/no/such/model"), "/no/such/model"),
        (("--tensor-parallel-size", "64"), "64"),
        (("--engine-arg", "no_such_argument=1"), "no_such_argument"),
    ],
)
def test_a_users_mistake_is_named(
    tmp_path: Path, source: Path, options: tuple[str, ...], message: str
) -> None:
    """Exit 2, and never a traceback."""
    job, run = str(tmp_path / "job"), str(tmp_path / "run")
    split(source, job)
    done: Finished = run_process(worker(job, run, *GREEDY, *options, "--max-error-rate", "0.5"))
    assert done.status == 2, done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_vllm_is_not_imported_by_the_worker_itself(tmp_path: Path, source: Path) -> None:
    """The engine is in a process of its own: its crash is not the worker's."""
    code = (
        "import sys; from batchinfer.cli.main import main; status = main(sys.argv[1:]);"
        "print([name for name in ('vllm',) if name in sys.modules], status)"
    )
    job, run = str(tmp_path / "job"), str(tmp_path / "run")
    split(source, job)
    done = subprocess.run(
        [sys.executable, "-c", code, *worker(job, run, *GREEDY, "--limit", "20")],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip().splitlines()[-1].endswith(" 0")
    assert "vllm" not in done.stdout.strip().splitlines()[-1]
