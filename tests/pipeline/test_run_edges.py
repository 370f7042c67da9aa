"""`batchinfer run`: two at once, sources that do not fit together, text files anywhere, and sources that come later."""

from __future__ import annotations

import gzip
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from batchinfer.cli.main import main
from batchinfer.core import codec
from batchinfer.core.records import Job
from batchinfer.split.command import SplitConfig, run_split
from batchinfer.storage.opening import open_store
from making import finish_process, start_process


def run(*arguments: object) -> int:
    return main(["run", *map(str, arguments), "--engine", "echo"])


def last(capsys: pytest.CaptureFixture[str]) -> tuple[dict[str, Any], str]:
    shown = capsys.readouterr()
    return json.loads(shown.out.splitlines()[-1]), shown.err


def lines(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def texts(name: str, count: int) -> list[dict[str, Any]]:
    return [{"text": f"{name} {index}"} for index in range(count)]


def answers(path: Path) -> list[str]:
    return [json.loads(line)["text"] for line in path.read_text().splitlines()]


def until(is_so: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    return lines(tmp_path / "rows.jsonl", texts("row", 20))


# --------------------------------------------------------------------------- two at once


class TestTwoAtOnce:
    def test_two_real_commands_answer_each_row_once(self, rows: Path, tmp_path: Path) -> None:
        dest = tmp_path / "a.jsonl"
        slow = ["--engine", "echo", "--echo-latency-seconds", "0.2", "--max-num-seqs", "2"]
        first = start_process(["run", str(rows), "-o", str(dest), *slow])
        try:
            until((tmp_path / "a.jsonl.batchinfer/run/run.json").exists)
            second = finish_process(start_process(["run", str(rows), "-o", str(dest), *slow]))
            assert second.status == 2
            assert f"process {first.pid}" in second.stderr
            done = finish_process(first)
        finally:
            first.kill()
        assert done.status == 0, done.stderr
        assert done.result["worker"]["request_count"] == 20
        third = finish_process(start_process(["run", str(rows), "-o", str(dest), *slow]))
        assert third.result["status"] == "UNCHANGED", third.stderr

    def test_a_kill_leaves_nothing_that_blocks(self, rows: Path, tmp_path: Path) -> None:
        dest = tmp_path / "a.jsonl"
        slow = ["--engine", "echo", "--echo-latency-seconds", "0.2", "--max-num-seqs", "2"]
        killed = start_process(["run", str(rows), "-o", str(dest), *slow])
        until((tmp_path / "a.jsonl.batchinfer/run/run.json").exists)
        os.kill(killed.pid, signal.SIGKILL)
        killed.communicate()
        assert run(rows, "-o", dest) == 0
        assert len(answers(dest)) == 20


# --------------------------------------------------------------------------- sources that do not fit together


class TestSourcesThatDiffer:
    @pytest.mark.parametrize("kind", ["parquet", "jsonl", "csv"])
    def test_a_file_without_the_prompts_column_is_refused_before_anything_is_written(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
    ) -> None:
        for name, column in (("a", "text"), ("b", "review")):
            path = tmp_path / f"{name}.{kind}"
            if kind == "parquet":
                pq.write_table(pa.table({column: ["x", "y"], "n": [1, 2]}), path)
            elif kind == "csv":
                path.write_text(f"{column},n\nx,1\ny,2\n")
            else:
                lines(path, [{column: "x", "n": 1}, {column: "y", "n": 2}])
        sources = [tmp_path / f"{name}.{kind}" for name in "ab"]
        assert run(*sources, "-o", tmp_path / "out.jsonl") == 2
        said = capsys.readouterr().err
        assert (
            f"{sources[1]}: has no column 'text' (from --prompt-column), expected one of: review, n"
            in said
        )
        assert "other files have it: rename the column, or leave this file out" in said
        assert not (tmp_path / "out.jsonl.batchinfer").exists()
        assert (
            main(["check", *map(str, sources), "--prompt-column", "text", "--engine", "echo"]) == 2
        )

    def test_rows_of_json_lines_may_have_it_late_or_lack_it(self, tmp_path: Path) -> None:
        first = lines(tmp_path / "1.jsonl", [{"text": "a"}, {"n": 1}])
        second = lines(tmp_path / "2.jsonl", [{"n": 1}] * 3000 + [{"text": "b"}])
        dest = tmp_path / "out.jsonl"
        assert run(first, second, "-o", dest, "--max-error-rate", "1") == 0
        found = [json.loads(line) for line in dest.read_text().splitlines()]
        assert [row["text"] for row in found if row["text"]] == ["a", "b"]


# --------------------------------------------------------------------------- text files


def pack(path: Path, data: bytes) -> None:
    if path.name.lower().endswith(".gz"):
        data = gzip.compress(data)
    elif path.name.endswith(".zst"):
        data = zstandard.ZstdCompressor().compress(data)
    path.write_bytes(data)


class TestTextFiles:
    @pytest.mark.parametrize("name", ["P.TXT", "p.txt.gz", "p.txt.zst", "P.Txt.GZ"])
    def test_the_ending_may_be_upper_case_or_packed(self, tmp_path: Path, name: str) -> None:
        pack(tmp_path / name, "one\ntwo ü\r\n".encode())
        assert run(tmp_path / name, "-o", tmp_path / "a.jsonl") == 0
        assert answers(tmp_path / "a.jsonl") == ["one", "two ü"]

    def test_a_url_a_glob_and_a_table_go_together(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        fsspec.filesystem("memory").pipe("/text-files/in/p.txt", b"from memory\n")
        for name in ("2.txt", "1.txt"):
            (tmp_path / name).write_text(f"from {name}")
        more = lines(tmp_path / "rows.jsonl", [{"prompt": "a row"}])
        sources = ["memory://text-files/in/p.txt", tmp_path / "?.txt", more]
        assert run(*sources, "-o", tmp_path / "a.jsonl") == 0
        assert answers(tmp_path / "a.jsonl") == ["from memory", "from 1.txt", "from 2.txt", "a row"]
        capsys.readouterr()
        assert run(tmp_path / "no.txt", "-o", tmp_path / "b.jsonl") == 2
        assert "no.txt" in capsys.readouterr().err

    @pytest.mark.s3
    def test_on_s3(self, tmp_path: Path, s3_url: Callable[[str], str]) -> None:
        url = s3_url("in")
        open_store(url).create("p.txt.gz", gzip.compress(b"one\ntwo\n"))
        assert run(f"{url}/*.txt.gz", "-o", tmp_path / "a.jsonl") == 0
        assert answers(tmp_path / "a.jsonl") == ["one", "two"]


# --------------------------------------------------------------------------- CSV


def test_a_delimiter_is_taken_by_run_and_check(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "rows.csv"
    source.write_text("text#n\none, two; x#1\n")
    dest = tmp_path / "a.jsonl"
    assert run(source, "-o", dest) == 2
    assert "see --delimiter" in capsys.readouterr().err
    assert run(source, "-o", dest, "--delimiter", "#") == 0
    assert answers(dest) == ["one, two; x"]
    capsys.readouterr()
    common = ["check", str(source), "--prompt-column", "text", "--engine", "echo"]
    assert main([*common, "--delimiter", "#"]) == 0
    assert main(common) == 2
    assert run(source, "-o", tmp_path / "b.jsonl", "--delimiter", "##") == 2
    assert "expected one character" in capsys.readouterr().err


# --------------------------------------------------------------------------- sources that come later


class TestSourcesThatComeLater:
    def test_rows_of_new_files_are_answered_and_the_others_kept(
        self, rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        dest = tmp_path / "a.jsonl"
        assert run(rows, "-o", dest) == 0
        before = answers(dest)
        capsys.readouterr()
        more = lines(tmp_path / "more.jsonl", texts("more", 5))
        assert run(rows, more, "-o", dest) == 0
        result, said = last(capsys)
        assert "5 rows of new files: appended to the 20 that are there" in said
        assert (result["rows"], result["worker"]["request_count"]) == (25, 5)
        assert answers(dest) == [*before, *(row["text"] for row in texts("more", 5))]
        assert run(rows, more, "-o", dest) == 0
        assert last(capsys)[0] == {
            "status": "UNCHANGED",
            "dest": str(dest),
            "rows": 25,
            "work": f"{dest}.batchinfer",
        }
        assert run(more, "-o", dest) == 2
        assert "differs in the sources' files" in capsys.readouterr().err

    def test_a_folder_that_has_grown_is_done_to_its_end(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Rows of a file whose name comes first are last: rows that are there keep their numbers."""
        folder = tmp_path / "in"
        folder.mkdir()
        lines(folder / "2.jsonl", texts("two", 3))
        dest = tmp_path / "a.jsonl"
        assert run(folder, "-o", dest, "--limit", "2") == 0
        lines(folder / "1.jsonl", texts("one", 2))
        assert run(folder, "-o", dest) == 0
        assert answers(dest) == ["two 0", "two 1", "two 2", "one 0", "one 1"]
        capsys.readouterr()
        assert run(folder, "-o", dest) == 0
        assert last(capsys)[0]["status"] == "UNCHANGED"
        lines(folder / "3.jsonl", [{"question": "x"}])
        assert run(folder, "-o", dest) == 2
        assert "3.jsonl: has no column 'text' (from the job)" in capsys.readouterr().err
        assert len(answers(dest)) == 5

    def test_killed_after_the_append_the_same_command_does_the_rest(
        self, rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        dest = tmp_path / "a.jsonl"
        assert run(rows, "-o", dest) == 0
        more = lines(tmp_path / "more.jsonl", texts("more", 5))
        job = f"{dest}.batchinfer/job"
        config = SplitConfig(sources=[str(more)], output=job, append=True)
        run_split(config, store=open_store(job))
        assert codec.decode(open_store(job).get("job.json").data, Job, name="").generation == 1
        assert run(rows, more, "-o", dest, "--limit", "22") == 0
        capsys.readouterr()
        assert run(rows, more, "-o", dest) == 0
        assert last(capsys)[0]["rows"] == 25
