"""`batchinfer run`: one command from a file to answers, stopped, refused, and started again with more to do."""

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchinfer.core.errors import AccessDenied, EngineLoadError
from batchinfer.storage.opening import open_store
from making import finish_process, start_process, write_lines

ROWS = [{"text": f"row {index} " + "x " * (index % 7), "n": index} for index in range(60)]
TEXTS = [row["text"] for row in ROWS]


@pytest.fixture
def rows(tmp_path):
    return write_lines(tmp_path / "rows.jsonl", ROWS)


@pytest.fixture
def dest(tmp_path):
    return tmp_path / "a.jsonl"


@pytest.fixture
def run(call):
    """Runs `batchinfer run` with the engine echo. Returns the status; has the last `result` and `err`."""

    def start(*arguments: object) -> int:
        done = call("run", *arguments, "--engine", "echo")
        vars(start).update(result=done.result, err=done.err)
        return done.status

    return start


def answers(path: Path) -> list[str]:
    return [json.loads(line)["text"] for line in path.read_text().splitlines()]


# --------------------------------------------------------------------------- from a file to answers


def test_every_row_has_its_answer_and_the_sources_columns(run, rows, tmp_path):
    assert run(rows, "-o", tmp_path / "a.parquet") == 0
    assert (run.result["status"], run.result["rows"]) == ("SUCCESS", 60)
    assert "taken from the data: --prompt-column text" in run.err
    table = pq.read_table(tmp_path / "a.parquet").to_pydict()
    assert (table["text"], table["_row"]) == (TEXTS, list(range(60)))
    assert run(rows, "-o", tmp_path / "a.parquet", "--with-source") == 0, "asked for later"
    assert pq.read_table(tmp_path / "a.parquet")["n"].to_pylist() == list(range(60))
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "rows.parquet")
    assert run(tmp_path / "rows.parquet", "-o", tmp_path / "out", "--with-source") == 0
    table = pq.read_table(tmp_path / "out/part-00000.parquet").to_pydict()
    assert table["n"] == list(range(60))


TALK = [{"role": "user", "content": "hi"}]
REQUEST = {
    "custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": TALK},
}  # fmt: skip


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"messages": TALK}, "--messages-column messages"),
        ({"prompt": "hi", "text": "no"}, "--prompt-column prompt"),
        (REQUEST, "--request-format openai-batch"),
    ],
)
def test_where_the_prompt_is_is_found_and_named(run, tmp_path, dest, row, said):
    assert run(write_lines(tmp_path / "rows.jsonl", [row]), "-o", dest) == 0
    assert said in run.err
    assert (run.result["rows"], run.result["rows_error"]) == (1, 0)
    assert answers(dest) == ["hi"]


# --------------------------------------------------------------------------- pipes


@pytest.mark.parametrize("mark", ["", "\ufeff"])
@pytest.mark.parametrize("given", ["one\ntwo\n", '{"prompt": "one"}\n{"prompt": "two"}\n'])
def test_from_standard_input_to_standard_output(tmp_path, given, mark):
    done = subprocess.run(
        [sys.executable, "-m", "batchinfer", "run", "-", "-o", "-", "--engine", "echo"],
        input=mark + given, capture_output=True, text=True, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert [json.loads(line)["text"] for line in done.stdout.splitlines()] == ["one", "two"]
    assert list(tmp_path.iterdir()) == []


def test_options_whose_files_are_pipes_are_read_once(tmp_path):
    """A check read the pipe, and the worker then answered without schema, system prompt and options of the server."""
    words = (
        'run - -o a.jsonl --engine echo --json-schema <(echo \'{"type": "object"}\') '
        "--system-prompt @<(printf hey) --config <(echo 'vllm: {max_model_len: 99}')"
    )
    command = f"echo one | {sys.executable} -m batchinfer {words}"
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    run = json.loads((tmp_path / "a.jsonl.batchinfer/run/run.json").read_text())
    prompt = run["config"]["prompt"]
    assert (list(prompt["body"]), prompt["system_prompt"]) == (["response_format"], "hey")
    assert run["recorded"]["server_args"] == ["--max-model-len", "99"]


# --------------------------------------------------------------------------- the same command again


def test_first_some_rows_then_whole_chunks_then_all(run, rows, dest):
    assert run(rows, "-o", dest, "--limit", 20) == 0
    assert answers(dest) == TEXTS[:20]
    assert "WARNING" not in run.err
    assert run(rows, "-o", dest, "--limit", 21) == 0
    assert 21 <= (some := run.result["rows"]) < 60
    assert "--limit 21: the chunks with these rows have" in run.err
    assert run(rows, "-o", dest) == 0
    assert (run.result["rows"], run.result["worker"]["request_count"]) == (60, 60 - some)
    assert answers(dest) == TEXTS


def test_other_data_is_refused(run, rows, dest):
    assert run(rows, "-o", dest) == 0
    write_lines(rows, ROWS[:-1])
    assert run(rows, "-o", dest) == 2
    assert "differs in the sources' files" in run.err
    assert "name another DEST" in run.err


def test_rows_of_files_that_come_later_are_answered_and_the_others_kept(run, tmp_path, dest):
    """Rows of a file whose name comes first are last: rows that are there keep their numbers."""
    folder = tmp_path / "in"
    folder.mkdir()
    write_lines(folder / "2.jsonl", ROWS[:3])
    assert run(folder, "-o", dest, "--limit", "2") == 0
    write_lines(folder / "1.jsonl", ROWS[3:5])
    assert run(folder, "-o", dest) == 0
    assert "2 rows of new files: to be appended to the 3 that are there" in run.err
    assert run.result["worker"]["request_count"] == 3
    assert answers(dest) == TEXTS[:5]
    assert run(folder, "-o", dest) == 0
    assert run.result["status"] == "UNCHANGED"


# --------------------------------------------------------------------------- machines and commands side by side


def test_of_two_real_commands_at_once_one_is_refused_and_each_row_is_answered_once(rows, dest):
    slow = ["--engine", "echo", "--echo-latency-seconds", "0.2", "--max-num-seqs", "8"]
    words = ["run", str(rows), "-o", str(dest), *slow]
    first = start_process(words)
    try:
        next(line for line in first.stderr if ": open, " in line)
        first.send_signal(signal.SIGSTOP)  # on a busy machine it ended before the second began
        second = finish_process(start_process(words))
        first.send_signal(signal.SIGCONT)
        assert second.status == 2
        assert f"process {first.pid}" in second.err
        done = finish_process(first)
    finally:
        first.kill()
    assert done.status == 0, done.err
    assert done.result["worker"]["request_count"] == 60


def test_a_dest_that_cannot_be_written_costs_no_answer(run, rows, monkeypatch):
    """The job and the run are elsewhere, so nothing else found it before all rows were answered."""
    monkeypatch.chdir(rows.parent)
    refuses = Mock(side_effect=AccessDenied("may not write"))
    with monkeypatch.context() as patch:
        patch.setattr("batchinfer.storage.bucket.BucketStore.create", refuses)
        assert run(rows, "-o", "memory://b/a.jsonl", "--work", "work") == 2
    assert "may not write" in run.err
    assert not Path("work/run").exists()
    assert run(rows, "-o", "memory://b/a.jsonl", "--work", "work") == 0
    assert [info.key for info in open_store("memory://b").list()] == ["a.jsonl"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_while_it_collects_too(run, rows, dest, monkeypatch, number):
    def collect(*_: object, **__: object) -> None:
        signal.raise_signal(number)
        raise AssertionError("the signal did nothing")

    monkeypatch.setattr("batchinfer.pipeline.work_folder.run_collect", collect)
    signal.signal(number, signal.default_int_handler)
    assert run(rows, "-o", dest) == 75
    assert signal.getsignal(number) == signal.default_int_handler


# --------------------------------------------------------------------------- what stops it


def test_answers_that_are_paid_for_are_collected_although_the_limit_is_reached(run, rows, dest):
    reached = (rows, "-o", dest, "--max-hours", "1e-9")
    assert run(*reached, "--limit", "20") == 3, "nothing is answered yet"
    assert run(rows, "-o", dest, "--limit", "20") == 0
    dest.unlink()  # as after a kill before it was written
    assert run(*reached) == 3, "rows are left"
    assert run(*reached, "--limit", "20") == 0, run.err
    assert answers(dest) == TEXTS[:20]
    dest.unlink()
    assert run(*reached, "--limit", "20", "--retry-errors") == 3


def test_starts_that_finish_no_row_do_not_use_it_up(run, rows, dest, monkeypatch):
    with monkeypatch.context() as patch:
        failing = Mock(side_effect=EngineLoadError("no engine today"))
        patch.setattr("batchinfer.engines.http.HttpEngine.open", failing)
        assert [run(rows, "-o", dest) for _ in range(6)] == [33] * 6
    assert run(rows, "-o", dest) == 0
    assert len(answers(dest)) == 60


@pytest.mark.parametrize("name", ["a.jsonl", "folder"])
def test_a_dest_that_was_changed_is_neither_vouched_for_nor_replaced(run, rows, tmp_path, name):
    dest = tmp_path / name
    assert run(rows, "-o", dest) == 0
    [file] = [dest] if dest.is_file() else list(dest.glob("*.parquet"))
    whole = file.read_bytes()
    file.write_bytes(whole[:-9])
    for more in ((), ("--limit", 20)):
        assert run(rows, "-o", dest, *more) == 2
        assert "writes the answers again" in run.err
        assert file.read_bytes() == whole[:-9]
    shutil.move(dest, tmp_path / "away")
    assert run(rows, "-o", dest) == 0
    assert file.read_bytes() == whole
    assert run(rows, "-o", dest) == 0
    assert run.result["status"] == "UNCHANGED"


def test_too_many_failed_rows_stay_too_many_until_they_are_allowed_or_answered_again(
    run, tmp_path, dest
):
    half = [{"prompt": "x" if index % 2 else None} for index in range(60)]
    source = write_lines(tmp_path / "rows.jsonl", half)
    for most in (["--min-errors", 30], []):
        assert run(source, "-o", dest, "--max-error-rate", 0.1, *most) == 3
        assert run(source, "-o", dest, "--max-error-rate", 0.1, *most) == 3
        assert not dest.exists()
    for status in ("SUCCESS", "UNCHANGED"):
        assert run(source, "-o", dest, "--max-error-rate", 0.5) == 0
        figures = [run.result[name] for name in ("status", "rows", "rows_error")]
        assert figures == [status, 60, 30]
    assert len(answers(dest)) == 60
    assert run(source, "-o", dest, "--max-error-rate", 0.1, "--retry-errors") == 3
    assert run(source, "-o", dest, "--max-error-rate", 1, "--retry-errors") == 0
    assert run.result["worker"]["request_count"] == 30
    few = ("--max-error-rate", 0.1, "--min-errors", 31)
    assert run(source, "-o", tmp_path / "b.jsonl", *few) == 0
    assert run.result["rows_error"] == 30
