"""`batchinfer run`: one command from a file to answers, killed at any instant and started again."""

from __future__ import annotations

import gzip
import io
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import echo_server
from batchinfer.cli.main import main
from batchinfer.core.errors import EngineLoadError
from batchinfer.engines.buckets import list_model
from batchinfer.engines.gpus import Gpu
from batchinfer.storage.opening import open_store
from fake_hub_upload import UploadHub
from tiny_model import DEMO_MODEL

ROWS = [{"text": f"row {index} " + "x " * (index % 7), "n": index} for index in range(60)]


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    return write_lines(tmp_path / "rows.jsonl", ROWS)


def write_lines(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def run(*arguments: object) -> int:
    return main(["run", *map(str, arguments), "--engine", "echo"])


def last(capsys: pytest.CaptureFixture[str]) -> tuple[dict[str, Any], str]:
    shown = capsys.readouterr()
    return json.loads(shown.out.splitlines()[-1]), shown.err


def fail_to_load(*_: object, **__: object) -> None:
    raise EngineLoadError("no engine today")


class TestFromAFileToAnswers:
    @pytest.mark.parametrize("name", ["answers.parquet", "answers.jsonl", "answers.csv"])
    def test_every_row_has_its_answer(
        self, rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
    ) -> None:
        dest = tmp_path / name
        assert run(rows, "-o", dest) == 0
        result, shown = last(capsys)
        assert (result["status"], result["rows"], result["dest"]) == ("SUCCESS", 60, str(dest))
        assert "taken from the data: --prompt-column text" in shown
        if name.endswith(".parquet"):
            table = pq.read_table(dest).to_pydict()
            assert table["text"] == [row["text"] for row in ROWS]
            assert table["_row"] == list(range(60))

    def test_a_folder_of_parquet_with_the_sources_columns(self, tmp_path: Path) -> None:
        pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "rows.parquet")
        assert run(tmp_path / "rows.parquet", "-o", tmp_path / "out", "--with-source") == 0
        table = pq.read_table(tmp_path / "out/part-00000.parquet").to_pydict()
        assert table["n"] == list(range(60))
        assert (tmp_path / "out/_COLLECTED").exists()

    @pytest.mark.parametrize(
        ("row", "said"),
        [
            ({"messages": [{"role": "user", "content": "hi"}]}, "--messages-column messages"),
            ({"conversation": [{"role": "user", "content": "hi"}]}, "--messages-column conversation"),
            ({"prompt": "hi", "text": "no"}, "--prompt-column prompt"),
            (
                {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions",
                 "body": {"messages": [{"role": "user", "content": "hi"}]}},
                "--request-format openai-batch",
            ),
        ],
    )  # fmt: skip
    def test_where_the_prompt_is_is_found_and_named(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], row: dict[str, Any], said: str
    ) -> None:
        source = write_lines(tmp_path / "rows.jsonl", [row])
        assert run(source, "-o", tmp_path / "a.jsonl") == 0
        result, shown = last(capsys)
        assert said in shown
        assert (result["rows"], result["rows_error"]) == (1, 0)

    def test_what_the_user_says_is_not_guessed(self, tmp_path: Path) -> None:
        source = write_lines(tmp_path / "rows.jsonl", [{"text": "no", "other": "yes"}])
        assert run(source, "-o", tmp_path / "a.jsonl", "--prompt-column", "other") == 0
        assert json.loads((tmp_path / "a.jsonl").read_text())["text"] == "yes"

    def test_a_system_prompt_makes_a_chat_of_a_text(
        self, rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert run(rows, "-o", tmp_path / "a.jsonl", "--system-prompt", "Be brief") == 0
        assert "sent as a user's message: --system-prompt" in last(capsys)[1]

    def test_at_a_terminal_it_ends_with_two_lines_and_elsewhere_with_one_object(
        self, rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:  # fmt: skip
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
        monkeypatch.chdir(tmp_path)
        assert run(rows, "-o", "a.jsonl") == 0
        shown = capsys.readouterr()
        assert shown.out == ""
        first, second = shown.err.splitlines()[-2:]
        assert re.fullmatch(r"60 answers in a.jsonl, 0 failed; [\d.k]+ tokens/s", first)
        assert second.endswith("batchinfer report a.jsonl.batchinfer/run")
        assert run(rows, "-o", "a.jsonl", "--json") == 0
        assert last(capsys)[0]["status"] == "UNCHANGED"
        assert run(rows, "-o", "b.jsonl", "--limit", "2", "--max-error-rate", "x") == 2
        assert capsys.readouterr().out == ""

    def test_a_text_file_has_a_prompt_a_line(self, tmp_path: Path) -> None:
        (tmp_path / "prompts.txt").write_text("one\n\n  \ntwo\r\nthree {x}")
        assert run(tmp_path / "prompts.txt", "-o", tmp_path / "a.jsonl") == 0
        lines = (tmp_path / "a.jsonl").read_text().splitlines()
        assert [json.loads(line)["text"] for line in lines] == ["one", "two", "three {x}"]


@pytest.mark.vllm
class TestWithTheDemoModel:
    @pytest.mark.s3
    def test_questions_are_asked_as_a_chat_of_a_model_in_a_bucket(
        self, tmp_path: Path, s3_url: Callable[..., str]
    ) -> None:
        url = s3_url("models/demo")
        for path in Path(DEMO_MODEL).glob("*.*"):
            open_store(url).put_file(path.name, path)
        (tmp_path / "questions.txt").write_text(
            "What is the capital of France?\nWhat is the capital of Japan?\n"
        )
        done = subprocess.run(
            [sys.executable, "-m", "batchinfer", "run", "questions.txt", "-o", "a.jsonl", "--model", url,
             "--max-tokens", "16", "--temperature", "0",
             "--kv-cache-memory-bytes", "67108864"],
            capture_output=True, text=True, cwd=tmp_path, env=os.environ | {"HF_HOME": "cache"},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert f"fetching {url} (" in done.stderr
        assert "the model has a template for chats" in done.stderr
        texts = [
            json.loads(line)["text"] for line in (tmp_path / "a.jsonl").read_text().splitlines()
        ]
        assert texts == ["Paris", "Tokyo"]
        result = json.loads(done.stdout.splitlines()[-1])
        assert result["worker"]["model"] == url
        config = json.loads((tmp_path / "a.jsonl.batchinfer/run/run.json").read_text())["config"]
        assert config["model"] == url
        assert config["model_identity"] == list_model(url).identity


class TestPipes:
    @pytest.mark.parametrize("is_text", [True, False])
    def test_from_standard_input_to_standard_output(self, tmp_path: Path, is_text: bool) -> None:
        given = "one\ntwo\n" if is_text else '{"prompt": "one"}\n{"prompt": "two"}\n'
        done = subprocess.run(
            [sys.executable, "-m", "batchinfer", "run", "-", "-o", "-", "--engine", "echo"],
            input=given, capture_output=True, text=True, cwd=tmp_path,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert [json.loads(line)["text"] for line in done.stdout.splitlines()] == ["one", "two"]
        assert list(tmp_path.iterdir()) == []

    def test_a_full_disk_behind_standard_output_is_an_error(self, rows: Path) -> None:
        with Path("/dev/full").open("w") as full:
            done = subprocess.run(
                [sys.executable, "-m", "batchinfer", "run", rows, "-o", "-", "--engine", "echo"],
                stdout=full, stderr=subprocess.PIPE, text=True,
            )  # fmt: skip
        assert done.returncode == 1
        assert "error: stdout: cannot take the answers (No space left on device)" in done.stderr
        assert "Traceback" not in done.stderr

    def test_nothing_on_standard_input_is_an_error(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\n")))
        assert run("-", "-o", tmp_path / "a.jsonl") == 2
        assert "is empty" in capsys.readouterr().err
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize(
        ("given", "said"),
        [
            (b'[{"text": "a"}]', "is a JSON array"),
            (gzip.compress(b"one", mtime=0), "not UTF-8"),
            (b"\xff\xfe\x00binary", "not UTF-8"),
        ],
    )
    def test_what_is_neither_rows_nor_text_is_not_sent_as_a_prompt(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
        given: bytes, said: str,
    ) -> None:  # fmt: skip
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(given)))
        assert run("-", "-o", tmp_path / "a.jsonl") == 2
        told = capsys.readouterr().err
        assert "stdin" in told
        assert said in told
        assert list(tmp_path.iterdir()) == []


class TestAgain:
    def test_a_finished_run_says_so_and_loads_nothing(
        self, rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert run(rows, "-o", tmp_path / "a.jsonl") == 0
        before = (tmp_path / "a.jsonl").stat().st_mtime_ns
        capsys.readouterr()
        assert run(rows, "-o", tmp_path / "a.jsonl") == 0
        result, shown = last(capsys)
        assert (result["status"], result["rows"]) == ("UNCHANGED", 60)
        assert "loading" not in shown
        assert (tmp_path / "a.jsonl").stat().st_mtime_ns == before

    def test_first_some_rows_then_all(
        self, rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        dest = tmp_path / "a.jsonl"
        assert run(rows, "-o", dest, "--limit", 20) == 0
        result, shown = last(capsys)
        assert result["rows"] == 20
        assert "WARNING" not in shown
        assert len(dest.read_text().splitlines()) == 20
        assert run(rows, "-o", dest) == 0
        result, _ = last(capsys)
        assert (result["rows"], result["worker"]["request_count"]) == (60, 40)
        texts = [json.loads(line)["text"] for line in dest.read_text().splitlines()]
        assert texts == [row["text"] for row in ROWS]

    def test_dest_is_known_however_it_is_spelt(
        self, rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:  # fmt: skip
        (tmp_path / "below").mkdir()
        monkeypatch.chdir(tmp_path)
        assert run(rows, "-o", "a.jsonl") == 0
        for spelling in ("./a.jsonl", tmp_path / "a.jsonl", "below/../a.jsonl"):
            assert run(rows, "-o", spelling) == 0
            assert last(capsys)[0]["status"] == "UNCHANGED"
        for spelling in ("b.jsonl", "./b.jsonl"):
            assert run(rows, "-o", spelling, "--work", f"memory://{tmp_path.name}/w") == 0
        assert last(capsys)[0]["status"] == "UNCHANGED"
        monkeypatch.chdir(tmp_path / "below")
        assert run(rows, "-o", "../a.jsonl") == 0
        assert last(capsys)[0]["status"] == "UNCHANGED"

    def test_the_folder_where_the_user_stands_can_be_dest(
        self, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "out").mkdir()
        monkeypatch.chdir(tmp_path / "out")
        assert run(rows, "-o", ".") == 0
        assert {path.name for path in Path().iterdir()} == {"_COLLECTED", "part-00000.parquet"}
        assert (tmp_path / "out.batchinfer/run").is_dir()

    def test_another_limit_does_whole_chunks(
        self, rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert run(rows, "-o", tmp_path / "a.jsonl", "--limit", 20) == 0
        assert run(rows, "-o", tmp_path / "a.jsonl", "--limit", 21) == 0
        result, shown = last(capsys)
        assert 21 <= result["rows"] < 60
        assert "--limit 21: the chunks with these rows have" in shown

    def test_another_configuration_is_refused_with_the_difference(
        self, rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert run(rows, "-o", tmp_path / "a.jsonl") == 0
        capsys.readouterr()
        assert run(rows, "-o", tmp_path / "a.jsonl", "--max-tokens", 3) == 2
        assert "max_tokens" in capsys.readouterr().err
        assert len((tmp_path / "a.jsonl").read_text().splitlines()) == 60

    def test_other_data_is_refused(
        self, rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert run(rows, "-o", tmp_path / "a.jsonl") == 0
        write_lines(rows, ROWS[:-1])
        capsys.readouterr()
        assert run(rows, "-o", tmp_path / "a.jsonl") == 2
        error = capsys.readouterr().err
        assert "differs in the sources' files" in error
        assert "name another DEST" in error
        assert "--overwrite" not in error


class TestWhatIsRefused:
    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            (["--prompt-column", "txet"], "txet"),
            (["--prompt-column", "text", "--messages-column", "text"], "--messages-column"),
            (["--engine", "vllm", "--model", "./no-such-folder"], "no-such-folder"),
        ],
    )  # fmt: skip
    def test_everything_is_checked_before_anything_is_written(
        self, rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
        arguments: list[str], said: str,
    ) -> None:  # fmt: skip
        dest = tmp_path / "a.jsonl"
        assert main(["run", str(rows), "-o", str(dest), "--engine", "echo", *arguments]) == 2
        shown = capsys.readouterr().err
        assert said in shown
        assert "Traceback" not in shown
        assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]

    def test_all_that_is_wrong_is_said_at_once_and_once(
        self, rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        wrong = ["--lora", "a=./nowhere", "--prompt-column", "txet"]
        assert run(rows, "-o", tmp_path / "a.jsonl", *wrong) == 2
        error = capsys.readouterr().err
        assert error.count("./nowhere is no folder") == 1
        assert error.count("has no column 'txet'") == 1

    def test_a_model_that_is_not_there_is_named_whatever_the_column(
        self, rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        model = tmp_path / "no-such-model"
        assert main(["run", str(rows), "-o", str(tmp_path / "a.jsonl"), "--model", str(model)]) == 2
        assert f"{model} is no folder on this machine" in capsys.readouterr().err

    def test_a_source_without_a_known_column_names_its_columns(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        source = write_lines(tmp_path / "rows.jsonl", [{"review": "good", "stars": 5}])
        assert run(source, "-o", tmp_path / "a.jsonl") == 2
        error = capsys.readouterr().err
        assert "review, stars" in error
        assert "--prompt-column" in error

    def test_somebody_elses_file_at_dest_is_left_alone(
        self, rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (tmp_path / "a.jsonl").write_text("mine")
        assert run(rows, "-o", tmp_path / "a.jsonl") == 2
        assert "is there already" in capsys.readouterr().err
        assert (tmp_path / "a.jsonl").read_text() == "mine"
        assert not (tmp_path / "a.jsonl.batchinfer").exists()

    def test_a_source_at_dest_is_named_as_one_and_nobody_is_told_to_remove_it(
        self, rows: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        before = rows.read_bytes()
        assert run(rows, "-o", rows) == 2
        error = capsys.readouterr().err
        assert f"{rows}: is a source" in error
        assert "remove" not in error
        assert rows.read_bytes() == before

    def test_a_rehearsal_finds_a_missing_adapter_before_it_writes(
        self, rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert run(rows, "-o", tmp_path / "a.jsonl", "--lora", "sql=./nowhere") == 2
        assert "./nowhere is no folder" in capsys.readouterr().err
        assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]

    @pytest.mark.parametrize("name", ["answers.json", "answers.tsv", "a.csv --format parquet"])
    def test_a_dest_that_cannot_be_written_is_refused_first(
        self, rows: Path, tmp_path: Path, name: str
    ) -> None:
        dest, *more = name.split()
        assert run(rows, "-o", tmp_path / dest, *more) == 2
        assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            (["-o", "file/a.jsonl", "--work", "w"], "is no folder"),
            (["-o", "/dev/stdout", "--work", "w"], "is no folder"),
            (["-o", "folder.jsonl"], "a folder has this name"),
            (["-o", "w", "--work", "w"], "is not apart from the work"),
            (["-o", "w.jsonl", "--work", "w.jsonl"], "is not apart from the work"),
            (["-o", "w/run/answers", "--work", "w"], "is not apart from the work"),
            (["-o", "out", "--work", "out/w"], "is not apart from the work"),
            (["-o", "rows/a.jsonl", "--work", "w"], "is not apart from the source rows"),
            (["-o", "-", "--format", "csv"], "takes JSON Lines"),
        ],
    )
    def test_a_dest_at_a_wrong_place_is_refused_first(
        self, rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch, arguments: list[str], said: str,
    ) -> None:  # fmt: skip
        monkeypatch.chdir(tmp_path)
        Path("rows").mkdir()
        rows.rename("rows/rows.jsonl")
        Path("file").touch()
        Path("folder.jsonl").mkdir()
        before = sorted(Path().rglob("*"))
        assert run("rows", *arguments) == 2
        assert said in capsys.readouterr().err
        assert sorted(Path().rglob("*")) == before

    def test_answers_are_no_source_of_the_next_command(
        self, rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        pattern = tmp_path / "*.jsonl"
        assert run(pattern, "-o", tmp_path / "answers.jsonl", "--limit", 3) == 0
        assert run(pattern, "-o", tmp_path / "answers.jsonl") == 2
        error = capsys.readouterr().err
        assert "answers.jsonl" in error
        assert "answers of an earlier run? narrow the source" in error

    def test_a_whole_bucket_needs_a_folder_in_it(
        self, rows: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert run(rows, "-o", "s3://bucket") == 2
        assert "s3://bucket/answers" in capsys.readouterr().err

    def test_the_hub_needs_a_place_for_the_work(
        self, rows: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert run(rows, "-o", "hf://datasets/org/name") == 2
        assert "--work" in capsys.readouterr().err

    @pytest.mark.filterwarnings("ignore:Use .content=:DeprecationWarning")
    def test_the_hub_gets_some_rows_and_then_all(
        self, rows: Path, tmp_path: Path, hub: UploadHub, capsys: pytest.CaptureFixture[str]
    ) -> None:
        dest = ("-o", "hf://datasets/org/new", "--work", tmp_path / "work")
        for limit, status, count in ((20, "PARTIAL", 20), (60, "SUCCESS", 60)):
            assert run(rows, *dest, "--limit", limit) == 0
            assert last(capsys)[0]["status"] == status
            table = pq.read_table(hub.repos["org/new"]["main"] / "data/part-00000.parquet")
            assert table.column("text").to_pylist() == [row["text"] for row in ROWS[:count]]
        assert run(rows, *dest, "--limit", 60) == 0
        assert last(capsys)[0]["status"] == "UNCHANGED"

    def test_a_token_that_may_not_write_is_refused_before_a_row_is_answered(
        self, rows: Path, tmp_path: Path, hub: UploadHub, capsys: pytest.CaptureFixture[str]
    ) -> None:
        hub.namespaces.clear()
        work = tmp_path / "work"
        assert run(rows, "-o", "hf://datasets/org/new", "--work", work) == 2
        assert "is 'org' your name" in capsys.readouterr().err
        assert not (work / "run").exists()


NOTING_SERVER = """
import json, os, sys
server, model, socket, gpus, notes = sys.argv[1:]
names = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER")
with open(f"{notes}/{os.getpid()}", "w") as file:
    json.dump([gpus, *map(os.environ.get, names)], file)
config = json.dumps({"engine": "echo", "model": model})
os.execv(sys.executable, [sys.executable, server, config, socket])
"""


@pytest.mark.parametrize(
    ("options", "visible", "groups", "order"),
    [
        ([], None, ["0", "1", "2", "3"], "PCI_BUS_ID"),
        (["--tensor-parallel-size", "2"], None, ["0,1", "2,3"], "PCI_BUS_ID"),
        (["--gpus", "1,2"], None, ["1", "2"], "PCI_BUS_ID"),
        ([], "3,1", ["3", "1"], None),
    ],
)
def test_every_gpu_of_the_machine_works(
    rows: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: list[str],
    visible: str | None,
    groups: list[str],
    order: str | None,
) -> None:
    """A machine with four GPUs, as far as the driver and the servers tell. The answers are echoes."""
    programs, notes = tmp_path / "bin", tmp_path / "notes"
    programs.mkdir()
    notes.mkdir()
    total = 23034 << 20
    gpus = [(Gpu(id=str(n), name="NVIDIA L4", total_bytes=total), f"GPU-{n}a") for n in range(4)]
    monkeypatch.setattr("batchinfer.engines.gpus.query_nvidia", lambda: gpus)
    (programs / "server.py").write_text(NOTING_SERVER)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    server = f"{sys.executable} {programs}/server.py {echo_server.__file__} {{model}} {{socket}} {{gpus}} {notes}"
    given = ["run", str(rows), "-o", str(tmp_path / "a.jsonl"), "--model", str(DEMO_MODEL)]
    assert main([*given, "--server-command", server, *options]) == 0
    found = [json.loads(path.read_text()) for path in notes.iterdir()]
    size = str(len(groups[0].split(",")))
    assert sorted(found) == sorted([size, group, order] for group in groups)
    answers = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    assert [answer["_row"] for answer in answers] == list(range(60))
    assert len({answer["text"] for answer in answers}) == 60


class TestWhatStopsIt:
    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
    def test_a_signal_ends_it_while_it_collects_too(
        self, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
    ) -> None:
        def collect(*_: object, **__: object) -> None:
            signal.raise_signal(number)
            raise AssertionError("the signal did nothing")

        monkeypatch.setattr("batchinfer.pipeline.steps.run_collect", collect)
        # A worker that another test has run in this process may have left its handler.
        before = signal.signal(number, signal.default_int_handler)
        try:
            assert run(rows, "-o", tmp_path / "a.jsonl") == 75
            assert signal.getsignal(number) == signal.default_int_handler
        finally:
            signal.signal(number, before)

    def test_starts_that_finish_no_row_do_not_use_it_up(
        self, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        dest = tmp_path / "a.jsonl"
        with monkeypatch.context() as patch:
            patch.setattr("batchinfer.engines.http.HttpEngine.open", fail_to_load)
            statuses = [run(rows, "-o", dest) for _ in range(6)]
            assert statuses == [33] * 6
        assert run(rows, "-o", dest) == 0
        assert len(dest.read_text().splitlines()) == len(ROWS)

    def test_too_many_failed_rows_stay_too_many_for_the_same_command(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        half = [{"prompt": "x" if index % 2 else None} for index in range(60)]
        source, dest = write_lines(tmp_path / "rows.jsonl", half), tmp_path / "a.jsonl"
        for _ in range(2):
            assert run(source, "-o", dest, "--max-error-rate", 0.1) == 3
            assert "--max-error-rate allows 10.0%" in capsys.readouterr().err
            assert not dest.exists()
        assert run(source, "-o", dest, "--max-error-rate", 0.5) == 0
        assert len(dest.read_text().splitlines()) == 60

    def test_failed_rows_of_a_finished_run_are_answered_again_when_asked(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        source = write_lines(tmp_path / "rows.jsonl", [{"prompt": "x"}, {"prompt": None}])
        dest = tmp_path / "a.jsonl"
        assert run(source, "-o", dest) == 0
        capsys.readouterr()
        assert run(source, "-o", dest, "--retry-errors") == 0
        assert last(capsys)[0]["worker"]["request_count"] == 1
