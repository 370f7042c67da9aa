"""`batchinfer compare`: each row of the job counts once, whatever the two runs have done of it."""

from __future__ import annotations

import html
import json
import re
import tracemalloc
from pathlib import Path
from typing import Any

import msgspec
import pytest

from batchinfer.cli import main
from batchinfer.core import codec
from batchinfer.core.clock import SystemClock
from batchinfer.core.errors import InputError
from batchinfer.runs.compare import CompareConfig, marked, run_compare
from batchinfer.runs.comparison import Comparison
from batchinfer.runs.differences import Reservoir
from batchinfer.storage.opening import open_store
from big_run import HOSTILE
from making import ECHO, change_marker, make_job, overwrite, read_marker, run_worker_here

ROWS = 40


def make_row(index: int) -> dict[str, Any]:
    """Answers: `short` and `prompt` are equal for every fourth row. Some rows lack one of the columns, or both."""
    row = {"prompt": f"row {index}", "short": f"row {index}", "label": ["yes", "no"][index % 2]}
    if index % 4:
        row["short"] = f"other {index}"
    if index in (5, 7):
        del row["prompt"]
    if index in (6, 7):
        del row["short"]
    return row


def compare(a: str, b: str, **options: Any) -> Comparison:
    config = CompareConfig(run_a=a, run_b=b, **options)
    found, _ = run_compare(config, open_store=open_store, clock=SystemClock())
    return found


@pytest.fixture
def job(tmp_path: Path) -> str:
    url = str(tmp_path / "job")
    make_job(url, rows=ROWS, per_chunk=10, workers=4, make_row=make_row)
    return url


@pytest.fixture
def runs(job: str) -> tuple[str, str]:
    """Two done runs in different output formats."""
    a, b = f"{job}/runs/a", f"{job}/runs/b"
    run_worker_here(job, a)
    run_worker_here(job, b, "--prompt-column", "short", "--output-format", "openai-batch")
    return a, b


@pytest.mark.parametrize("place", ["memory", pytest.param("s3", marks=pytest.mark.s3)])
def test_every_row_has_one_outcome(place: str, request: pytest.FixtureRequest) -> None:
    url = f"memory://{request.node.name}"
    make_job(f"{url}/job", rows=ROWS, per_chunk=10, workers=4, make_row=make_row)
    options = ("--job", f"{url}/job", "--no-steal")
    other = ("--prompt-column", "short", "--output-format", "openai-batch")
    for index in (0, 1):
        run_worker_here(f"{url}/job", f"{url}/a", *options, index=index)
    for index in (0, 2):
        run_worker_here(f"{url}/job", f"{url}/b", *options, *other, index=index)
    if place == "s3":
        source, url = open_store(url), request.getfixturevalue("s3_url")("in")
        target = open_store(url)
        for info in source.list(""):
            target.create(info.key, source.get(info.key).data)
    found = compare(f"{url}/a", f"{url}/b", job=f"{url}/job")
    assert msgspec.to_builtins(found.rows) == {
        "total": ROWS,
        "equal": 3,  # 0, 4, 8
        "differing": 4,  # 1, 2, 3, 9
        "error_in_a": 1,
        "error_in_b": 1,
        "error_in_both": 1,
        "missing_in_a": 10,
        "missing_in_b": 10,
        "missing_in_both": 10,
    }
    assert [pair.id for pair in found.differing] == ["1", "2", "3", "9"]
    assert [(pair.row, bool(pair.a.error), bool(pair.b.error)) for pair in found.failed] == [
        (5, True, False),
        (6, False, True),
    ]
    assert found.differing[0].a.texts == ["row 1"]
    assert found.differing[0].b.texts == ["other 1"]


def test_figures_are_those_of_each_run(runs: tuple[str, str]) -> None:
    found = compare(*runs, price_per_hour=7.0)
    assert (found.a.rows_ok, found.a.rows_error, found.b.rows_error) == (ROWS - 2, 2, 2)
    assert found.a.errors == {"missing_column": 2}
    assert found.a.finish_reasons == {"stop": ROWS - 2}
    assert found.a.completion_tokens == 2 * (ROWS - 2)
    answered = [index for index in range(ROWS) if index not in (5, 6, 7)]
    assert found.a.lengths.rows == len(answered)
    assert found.a.lengths.characters == sum(len(f"row {index}") for index in answered)
    assert found.b.lengths.characters == sum(len(make_row(index)["short"]) for index in answered)
    assert found.a.cost is not None
    assert {setting.name for setting in found.settings} == {
        "prompt.output_format",
        "prompt.prompt_column",
    }


def test_a_limit_leaves_rows_missing_in_one_run_only(job: str, runs: tuple[str, str]) -> None:
    run_worker_here(job, f"{job}/runs/short", "--limit", "15")
    found = compare(runs[0], f"{job}/runs/short").rows
    assert (found.total, found.equal, found.differing) == (ROWS, 13, 0)
    assert (found.error_in_both, found.missing_in_b, found.missing_in_a) == (2, 25, 0)


def test_short_answers_are_counted_by_pair(job: str, runs: tuple[str, str]) -> None:
    for name, column in (("labels", "label"), ("shorts", "short")):
        run_worker_here(job, f"{job}/runs/{name}", "--prompt-column", column, "--max-tokens", "1")
    found = compare(f"{job}/runs/labels", f"{job}/runs/shorts")
    changes = {(change.a, change.b): change.rows for change in found.changes}
    numbers = [number for number in range(ROWS) if number not in (6, 7)]
    assert changes["yes", "row"] == len([number for number in numbers if number % 4 == 0])
    assert changes["no", "other"] == len([number for number in numbers if number % 2])
    assert sum(changes.values()) == found.rows.differing
    assert list(changes.values()) == sorted(changes.values(), reverse=True)


def test_answers_that_all_differ_are_not_counted_by_pair(runs: tuple[str, str]) -> None:
    found = compare(*runs)
    assert (found.rows.differing, found.changes) == (27, [])


def test_long_answers_are_not_counted_by_pair(tmp_path: Path) -> None:
    def make_long(index: int) -> dict[str, Any]:
        return {"prompt": f"{index} " * 40, "short": "x"}

    make_job(tmp_path / "job", rows=4, per_chunk=2, make_row=make_long)
    run_worker_here(tmp_path / "job", tmp_path / "a")
    run_worker_here(tmp_path / "job", tmp_path / "b", "--prompt-column", "short")
    found = compare(str(tmp_path / "a"), str(tmp_path / "b"), job=str(tmp_path / "job"))
    assert (found.rows.differing, found.changes) == (4, [])


def test_runs_over_different_jobs_are_refused_with_what_differs(
    tmp_path: Path, runs: tuple[str, str]
) -> None:
    make_job(tmp_path / "other", rows=30, per_chunk=15)
    run_worker_here(tmp_path / "other", tmp_path / "other/runs/a")
    with pytest.raises(InputError) as error:
        compare(runs[0], str(tmp_path / "other/runs/a"))
    assert "40 rows against 30" in error.value.message
    assert "columns only in the first: label, short" in error.value.message
    assert "4 chunks against 2" in error.value.message


def test_runs_over_one_list_are_compared_and_other_chunks_of_one_name_refused(
    tmp_path: Path,
) -> None:
    for name, rows in (("x", 5), ("y", 6)):
        lines = "".join(json.dumps({"prompt": f"{name} {index}"}) + "\n" for index in range(rows))
        (tmp_path / name).mkdir()
        (tmp_path / name / "data.jsonl").write_text(lines)
        (tmp_path / name / "list.txt").write_text("data.jsonl\n")
    runs = [str(tmp_path / run) for run in ("a", "b", "c")]
    for run, name in zip(runs, ("x", "x", "y"), strict=True):
        worker = ["worker", "--manifest", str(tmp_path / name / "list.txt"), "--output", run, *ECHO]
        assert main.main(worker) == 0
    a, b, c = runs
    assert compare(a, b).rows.equal == 5
    with pytest.raises(InputError, match="data: the two runs have answered different rows"):
        compare(a, c)


@pytest.mark.parametrize("damage", ["changed", "gone", "outside", "foreign"])
def test_a_damaged_output_is_left_out_and_named(
    damage: str, runs: tuple[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    store = open_store(runs[1])
    marker = read_marker(store, "part-00001")
    if damage == "changed":
        data = store.get(f"outputs/{marker.output}").data
        overwrite(store, f"outputs/{marker.output}", data.replace(b"other 11", b"row 11 !"))
    elif damage == "gone":
        store.delete([f"outputs/{marker.output}"])
    elif damage == "outside":
        change_marker(store, "part-00001", output="../run.json")
    else:
        change_marker(store, "part-00001", fingerprint="0" * 32)
    found = compare(*runs)
    assert (found.rows.missing_in_b, found.rows.total) == (10, ROWS)
    if damage != "foreign":
        assert found.b.damaged_chunks == ["part-00001"]
        assert "run B: part-00001" in caplog.text


def test_a_job_that_is_not_found_is_said_and_the_done_rows_are_compared(
    runs: tuple[str, str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    moved = []
    for run in runs:
        source, target = open_store(run), open_store(str(tmp_path / Path(run).name))
        for info in source.list(""):
            target.create(info.key, source.get(info.key).data)
        moved.append(target.url)
    open_store(str(tmp_path / "job")).delete(["job.json"])
    found = compare(*moved)
    assert (found.rows.total, found.rows.differing) == (ROWS, 27)
    assert "its job.json was not found" in caplog.text


def test_too_few_lines_are_an_error(runs: tuple[str, str]) -> None:
    store = open_store(runs[0])
    marker = read_marker(store, "part-00000")
    data = b"".join(store.get(f"outputs/{marker.output}").data.splitlines(keepends=True)[:4])
    overwrite(store, f"outputs/{marker.output}", data)
    change_marker(store, "part-00000", output_sha256=codec.sha256(data))
    with pytest.raises(InputError, match=r"part-00000: an output has 4 lines, .* counts 10 rows"):
        compare(*runs)


def test_memory_does_not_grow_with_the_rows(tmp_path: Path) -> None:
    peaks = []
    for rows in (1_000, 10_000):
        job = tmp_path / f"job{rows}"
        make_job(
            job, rows=rows, per_chunk=500,
            make_row=lambda index: {"prompt": f"{index} " * 20, "short": f"{index}"},
        )  # fmt: skip
        run_worker_here(job, job / "runs/a")
        run_worker_here(job, job / "runs/b", "--prompt-column", "short")
        tracemalloc.start()
        found = compare(str(job / "runs/a"), str(job / "runs/b"))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert found.rows.differing == rows
        assert len(found.differing) == 20
    assert peaks[1] < 1.5 * peaks[0]


def test_a_reservoir_is_uniform_and_repeats() -> None:
    def draw(num_items: int) -> list[int]:
        reservoir: Reservoir[int] = Reservoir(100)
        for item in range(num_items):
            reservoir.offer(lambda item=item: item)  # type: ignore[misc]
        return reservoir.items

    assert draw(50) == list(range(50))
    assert draw(10_000) == draw(10_000)
    thirds = [sum(item // 3334 == third for item in draw(10_000)) for third in range(3)]
    assert min(thirds) > 20
    assert len(set(draw(10_000))) == 100


# --------------------------------------------------------------------------- the page and the command


def test_the_page_shows_rows_and_marks_what_differs(runs: tuple[str, str], tmp_path: Path) -> None:
    compare(*runs, output=str(tmp_path / "page.html"))
    page = (tmp_path / "page.html").read_text()
    assert "<mark>row</mark> 1" in page
    assert "<mark>other</mark> 1" in page
    assert "Rows that failed in one run only" in page
    assert "missing_column: " in page
    assert '<span class="label">label</span> <code>no</code>' in page
    assert "prompt.output_format" in page
    assert not re.findall(r"https?://|<script|<link|<img|@import|url\(", page)


def test_hostile_answers_prompts_and_errors_are_text(tmp_path: Path) -> None:
    def make_hostile(index: int) -> dict[str, Any]:
        row = {"prompt": f"{HOSTILE} {index}", "short": f"{index} {HOSTILE}", HOSTILE: HOSTILE}
        return row if index else {"prompt": HOSTILE, HOSTILE: HOSTILE}

    make_job(tmp_path / "job", rows=4, per_chunk=2, make_row=make_hostile)
    run_worker_here(tmp_path / "job", tmp_path / "job/runs/a")
    run_worker_here(tmp_path / "job", tmp_path / "job/runs/b", "--prompt-column", "short")
    place = str(tmp_path / "page.html")
    compare(str(tmp_path / "job/runs/a"), str(tmp_path / "job/runs/b"), output=place)
    page = Path(place).read_text()
    assert "<script" not in page
    assert "<img" not in page
    text = html.unescape(re.sub(r"</?mark>", "", page))
    assert f"{HOSTILE} 3" in text
    assert f"3 {HOSTILE}" in text


def test_without_samples_no_answer_is_shown(runs: tuple[str, str], tmp_path: Path) -> None:
    found = compare(*runs, output=str(tmp_path / "page.html"), num_samples=0)
    assert (found.differing, found.failed, found.rows.differing) == ([], [], 27)
    page = (tmp_path / "page.html").read_text()
    assert "Rows with different answers" not in page


def test_the_command_prints_a_table_and_one_object(
    runs: tuple[str, str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    place = str(tmp_path / "page.html")
    assert main.main(["compare", *runs, "-o", place, "--samples", "2"]) == 0
    out, err = capfd.readouterr()
    result = json.loads(out)
    assert result["rows"]["differing"] == 27
    assert (result["report"], result["bytes"]) == (place, (tmp_path / "page.html").stat().st_size)
    assert re.search(r"different answers +27 +67.5 %", err)
    assert "openai-batch" in err
    assert main.main(["compare", *runs, "--json"]) == 0
    out, err = capfd.readouterr()
    result = json.loads(out)
    assert len(result["differing"]) == 20
    assert result["b"]["output_format"] == "openai-batch"
    assert "different answers" not in err


def test_texts_are_marked_where_they_differ() -> None:
    left, right = marked("one two three", "one 2 three four")
    assert "".join(piece.text for piece in left) == "one two three"
    assert [piece.text for piece in right if piece.is_changed] == [" 2", " four"]
    assert marked("", "new") == ([], [("new", True)])
