"""The worker over the echo engine: every row once and in place, whatever is thrown at it."""

import asyncio
import signal
import socket
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from batchinfer.core import layout
from batchinfer.core.codec import raw
from batchinfer.core.errors import ErrorRateExceeded, Interrupted
from batchinfer.core.records import FinishedRow
from batchinfer.engines.echo import EchoTarget
from batchinfer.engines.engine_config import EngineConfig
from batchinfer.ledger.checkpoints import encode_rows, write_segment
from batchinfer.prompts.types import PromptConfig
from batchinfer.storage.local import LocalStore
from batchinfer.storage.opening import open_store
from batchinfer.worker.command import _default_worker_id, describe_host
from batchinfer.worker.start import run_worker
from batchinfer.worker.worker_config import Environment, WorkerConfig, real_environment
from making import (
    ECHO,
    finish_process,
    finished_chunks,
    make_job,
    output_key,
    output_lines,
    read_marker,
    run_worker_here,
    start_process,
)


@pytest.fixture
def job(tmp_path):
    url = str(tmp_path / "job")
    make_job(url, rows=95, per_chunk=10, workers=2)
    return url


def quiet_environment() -> Environment:
    return real_environment(grace_seconds=0.5, show_progress=lambda *_: None)


def echo_over(job: str) -> WorkerConfig:
    return WorkerConfig(
        manifests=[f"{job}/manifests/all.txt"],
        output=f"{job}/runs/a",
        engine=EngineConfig(engine="echo"),
        prompt=PromptConfig(prompt_column="prompt"),
    )


def prompt_if(is_good: object) -> dict[str, str]:
    """A row that fails at once, or one that does not."""
    return {"prompt": "x" if is_good else ""}


def work_over(folder: Path, rows: list[dict[str, str]], per_chunk: int = 5000) -> partial[Any]:
    """Runs workers over a job of these rows, with further options. Job and run are in the folder."""
    make_job(folder / "job", rows=len(rows), per_chunk=per_chunk, make_row=rows.__getitem__)
    return partial(run_worker_here, folder / "job", folder / "run")


def test_rows_of_several_chunks_are_in_the_engine_at_once(job, monkeypatch):
    """The engine answers none of them before it has rows of five chunks."""
    chunks, are_five, post = set(), asyncio.Event(), EchoTarget.post

    async def post_later(self, call):
        chunks.add(call.key[0])
        if len(chunks) == 5:
            are_five.set()
        await are_five.wait()
        return await post(self, call)

    monkeypatch.setattr(EchoTarget, "post", post_later)
    assert run_worker_here(job, f"{job}/runs/a", "--max-num-seqs", "64")["request_count"] == 95


def test_a_finished_run_does_not_wait_for_the_engine(job, monkeypatch):
    """A restart of a worker whose work is done must not pay for loading the model."""
    run_worker_here(job, f"{job}/runs/a")
    monkeypatch.setattr("batchinfer.engines.echo.EchoTarget.look", mock.AsyncMock(return_value=""))
    result = run_worker_here(job, f"{job}/runs/a")
    assert (result["status"], result["engine_load_sec"]) == ("SUCCESS", None)


def test_a_bucket_that_is_away_holds_no_worker_up_that_has_to_go(job, monkeypatch):
    """The last heartbeat was tried for minutes, on the main thread, whatever signals came."""
    replace, silence = LocalStore.replace, threading.Event()

    def away(self: LocalStore, key: str, data: bytes, etag: str) -> str:
        if b'"state":"done"' in data:
            silence.wait(250)
        return replace(self, key, data, etag)

    monkeypatch.setattr(LocalStore, "replace", away)
    begin = time.monotonic()
    assert run_worker(echo_over(job), quiet_environment())["request_count"] == 95
    assert time.monotonic() - begin < 200
    silence.set()


@pytest.mark.s3
@pytest.mark.usefixtures("s3_environment")
def test_a_signal_while_storage_is_silent_at_the_start_ends_it_soon():
    """The main thread waited for each answer itself, for minutes, and with --job signals were not even heard."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(60)
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        process = start_process(
            ["worker", "--job", "s3://b/job", *ECHO, "--grace-seconds", "2"],
            environment={"AWS_ENDPOINT_URL": endpoint},
        )
        connection, _ = silent.accept()
        with connection:
            process.send_signal(signal.SIGTERM)
            stopped = finish_process(process, timeout_seconds=60)
    assert stopped.status == 75, stopped.err
    assert "SIGTERM" in stopped.err
    assert "Traceback" not in stopped.err


@pytest.mark.parametrize(
    ("verb", "key"),
    [
        ("get", layout.JOB_KEY),
        ("stat", layout.STOP_KEY),
        ("get", layout.RUN_KEY),
        ("create", layout.PROBES),
        ("create", layout.WORKERS),
        ("create", layout.RUN_KEY),
    ],
)
def test_no_request_of_the_set_up_keeps_it_from_ending(job, verb, key, monkeypatch):
    environment = quiet_environment()
    silence = threading.Event()
    real = getattr(LocalStore, verb)

    def silent(self: LocalStore, asked: str, *rest: object) -> object:
        if asked.startswith(key):
            environment.stopper.request(Interrupted("stopped by the test"))
            silence.wait(250)
        return real(self, asked, *rest)

    monkeypatch.setattr(LocalStore, verb, silent)
    begin = time.monotonic()
    with pytest.raises(Interrupted):
        run_worker(echo_over(job), environment)
    assert time.monotonic() - begin < 200
    silence.set()
    assert not finished_chunks(open_store(f"{job}/runs/a"))


def put_back(run: Path, name: str, num_rows: int, code: str = "") -> None:
    """Let a chunk be unfinished again, with a segment of its first rows. `code`: with which they have failed."""
    store = open_store(str(run))
    marker = read_marker(store, name)
    lines = store.get(output_key(store, name)).data.splitlines()[:num_rows]
    rows = [FinishedRow(line=n, ok=not code, code=code, output=raw(s)) for n, s in enumerate(lines)]
    sums = {"chunk_sha256": marker.chunk_sha256, "fingerprint": marker.fingerprint}
    write_segment(store, layout.segment_key(name, "w", 1), encode_rows(rows)[0], **sums)
    store.delete([layout.marker_key(name)])


def test_too_many_errors_end_the_worker_with_the_commonest(tmp_path):
    rows = [prompt_if(row < 10) for row in range(40)] + [{"other": "1"}] * 5
    with pytest.raises(ErrorRateExceeded) as caught:
        work_over(tmp_path, rows)("--max-error-rate", "0.5")
    assert caught.value.exit_status == 3
    assert "30 x invalid_column, e.g. part-00000 line 10" in caught.value.message


def test_too_many_errors_stay_too_many_for_later_starts(tmp_path):
    work = work_over(tmp_path, [prompt_if(row % 4) for row in range(80)], per_chunk=20)
    work("--max-error-rate", "0.1", "--min-errors", "21")
    for _ in range(2):
        with pytest.raises(ErrorRateExceeded, match="20 of 80 rows failed"):
            work("--max-error-rate", "0.1")
    assert work("--max-error-rate", "0.25")["status"] == "SUCCESS"


def test_rows_that_were_resumed_are_among_those_that_did_not_fail(tmp_path):
    work = work_over(tmp_path, [prompt_if(row > 30) for row in range(200)], per_chunk=100)
    work()
    put_back(tmp_path / "run", "part-00001", 100)
    done = work("--max-error-rate", "0.2")
    assert (done["status"], done["rows_resumed"]) == ("SUCCESS", 100)


def test_nearly_all_of_the_first_rows_failing_alike_ends_the_worker(tmp_path):
    rows = [prompt_if(True)] * 2 + [{"other": "1"}] * 3000
    with pytest.raises(
        ErrorRateExceeded, match=r"rows failed, 95.0% may\n  .* x missing_column"
    ) as caught:
        work_over(tmp_path, rows)()
    assert caught.value.exit_status == 3
    assert "e.g. part-00000 line 2: column 'prompt' is not in the row" in caught.value.message
    assert "--max-error-rate 1" in caught.value.hint


def test_bad_rows_that_finish_before_the_others_do_not_end_the_worker(tmp_path):
    """Rows without a prompt fail at once: 150 of them are the first to finish."""
    is_bad = [row < 150 for row in range(500)]
    slow = ("--echo-latency-seconds", "1", "--max-num-seqs", "400", "--max-error-rate", "0.31")
    work_over(tmp_path, [prompt_if(not each) for each in is_bad])(*slow)
    assert ["error" in line for line in output_lines(tmp_path / "run")] == is_bad


def test_a_run_of_error_rows_only_is_no_success(tmp_path):
    work = work_over(tmp_path, [{"other": "1"}] * 3)
    for _ in range(2):
        with pytest.raises(ErrorRateExceeded, match="3 of 3 rows failed") as caught:
            work()
        assert caught.value.result["status"] == "FAILED"
        assert "--retry-errors" in caught.value.hint
    for _ in range(2):
        assert work("--max-error-rate", "1")["status"] == "SUCCESS"
    few = work_over(tmp_path / "few", [{"other": "1"}] * 7)
    for repair in ((), ("--retry-errors",)):  # which counted the rows of its markers twice
        assert few("--max-error-rate", "0.5", *repair)["status"] == "SUCCESS", "under --min-errors"


def test_rows_that_failed_in_checkpoints_count_and_are_asked_again(tmp_path):
    """A second start called a run of errors a success, and --retry-errors published them as they were."""
    work = work_over(tmp_path, [{"other": "1"}] * 150)
    work("--max-error-rate", "1")
    for options, resumed in (((), 100), (("--retry-errors",), 0)):
        put_back(tmp_path / "run", "part-00000", 100, "missing_column")
        with pytest.raises(ErrorRateExceeded, match="150 of 150 rows failed") as caught:
            work(*options)
        assert caught.value.result["rows_resumed"] == resumed


def test_a_repair_is_not_judged_by_rows_that_have_failed_before(tmp_path):
    """It stopped itself at each start: rows that fail for good are among few."""
    work = work_over(tmp_path, [prompt_if(row % 13) for row in range(400)], per_chunk=100)
    assert work("--max-error-rate", "0.1")["error_count"] == 31
    again = work("--max-error-rate", "0.1", "--retry-errors")
    assert (again["status"], again["error_count"]) == ("SUCCESS", 31)


def test_a_start_whose_rows_all_fail_succeeds_if_the_run_has_answers(tmp_path):
    work = work_over(tmp_path, [prompt_if(row >= 4) for row in range(6)], per_chunk=2)
    assert work()["status"] == "SUCCESS"
    again = work("--retry-errors")
    assert (again["request_count"], again["error_count"]) == (4, 4)
    assert again["status"] == "SUCCESS"


def test_tasks_whose_long_names_begin_alike_have_workers_of_their_own():
    tasks = [f"sky-managed-{'x' * 200}_{number}-0" for number in range(3)]
    names = {_default_worker_id({"SKYPILOT_TASK_ID": task}) for task in tasks}
    assert len(names) == 3
    assert max(map(len, names)) <= 128


@pytest.mark.parametrize(
    ("said", "host"), [("1", {"spot": True}), ("false", {"spot": False}), ("", {}), ("perhaps", {})]
)
def test_a_worker_says_whether_its_machine_is_a_spot_machine_only_where_it_was_told(said, host):
    assert describe_host({"BATCHINFER_SPOT": said}) == host
