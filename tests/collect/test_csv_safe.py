"""CSV that a spreadsheet opens: no text of a model or of a source becomes a formula."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from batchinfer.collect.command import run_collect
from batchinfer.collect.table import CollectConfig
from batchinfer.core.clock import SystemClock
from batchinfer.core.errors import ConfigError
from batchinfer.storage.opening import open_store
from making import make_job, run_process, run_worker_here

FORMULAS = [
    *("=1+1", "+1", "-2+3", "@SUM(A1)", "\t=1", "\r=1", "\n=1", "\uff1d1+1", "\uff0b1", "\uff0d1"),
    "\uff20x",
]
TEXTS = ["plain", "", "1=1", " =1", "'=1", 'say "=1"', "a\n=1", "-"]


def make_row(index: int) -> dict[str, Any]:
    text = [*FORMULAS, *TEXTS][index]
    return {"prompt": f"x{index}", "cell": text, "=name": index - 5, "list": [text], "none": None}


@pytest.fixture
def run(tmp_path: Path) -> str:
    rows = len(FORMULAS) + len(TEXTS)
    make_job(tmp_path / "job", rows=rows, per_chunk=10, make_row=make_row)
    run_worker_here(tmp_path / "job", tmp_path / "job/runs/a")
    return str(tmp_path / "job/runs/a")


def cells(run: str, dest: Path, **options: Any) -> list[dict[str, str]]:
    config = CollectConfig(run=run, dest=str(dest), with_source=True, **options)
    run_collect(config, open_store=open_store, clock=SystemClock())
    with dest.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_texts_that_a_spreadsheet_runs_get_an_apostrophe(run: str, tmp_path: Path) -> None:
    rows = cells(run, tmp_path / "out.csv", csv_safe=True)
    changed = len(FORMULAS)
    assert [row["cell"] for row in rows[:changed]] == [f"'{text}" for text in FORMULAS]
    assert [row["cell"] for row in rows[changed:]] == [*TEXTS[:-1], "'-"]
    assert [row["'=name"] for row in rows[:2]] == ["-5", "-4"]
    assert json.loads(rows[0]["list"]) == ["=1+1"]
    assert {row["none"] for row in rows} == {""}


def test_without_the_option_texts_stay_as_they_are(run: str, tmp_path: Path) -> None:
    rows = cells(run, tmp_path / "out.csv")
    assert [row["cell"] for row in rows] == [*FORMULAS, *TEXTS]
    assert "=name" in rows[0]


def test_answers_are_texts_too(tmp_path: Path) -> None:
    make_job(tmp_path / "job", rows=1, per_chunk=1, make_row=lambda _: {"prompt": "=HYPERLINK(1)"})
    run_worker_here(tmp_path / "job", tmp_path / "job/runs/a")
    finished = run_process(
        ["collect", str(tmp_path / "job/runs/a"), str(tmp_path / "out.csv"), "--csv-safe"]
    )
    assert finished.status == 0
    assert "\"'=HYPERLINK(1)" in (tmp_path / "out.csv").read_text()


def test_other_formats_need_no_apostrophes(run: str, tmp_path: Path) -> None:
    config = CollectConfig(run=run, dest=str(tmp_path / "out"), csv_safe=True)
    with pytest.raises(ConfigError, match=r"^--csv-safe: DEST is parquet"):
        run_collect(config, open_store=open_store, clock=SystemClock())
