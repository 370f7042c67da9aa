"""Sums over finished rows: exact, and bounded whatever codes an engine invents."""

from __future__ import annotations

import msgspec

from batchinfer.core.counts import MAX_CODES, OTHER, Counts
from batchinfer.ledger.checkpoints import FinishedRow, count_rows
from fakes import marker_record, worker_record

ROW = FinishedRow(line=0, ok=True, output=msgspec.Raw(b"{}"), prompt_tokens=2, completion_tokens=3)


def test_rows_are_counted_with_their_codes_and_reasons() -> None:
    replace = msgspec.structs.replace
    counts = count_rows(
        [
            replace(ROW, prompt_tokens=10**30, finish_reason="length", reasoning_tokens=2),
            replace(ROW, ok=False, code="bad", prompt_tokens=7),
            ROW,
        ]
    )
    assert counts == Counts(
        rows_ok=2,
        rows_error=1,
        prompt_tokens=10**30 + 9,
        completion_tokens=9,
        reasoning_tokens=2,
        errors={"bad": 1},
        finish_reasons={"length": 1},
    )
    assert counts.rows_done == 3


def test_every_record_with_counts_adds_them_up_and_keeps_the_rest() -> None:
    more = count_rows([ROW])
    assert worker_record(id="w7", rows_ok=4).plus(more).plus(more) == worker_record(
        id="w7", rows_ok=6, prompt_tokens=4, completion_tokens=6
    )
    assert marker_record(rows_ok=0).plus(more).rows_ok == 1


def test_an_engine_that_invents_codes_does_not_make_records_grow() -> None:
    counts = Counts()
    for number in range(3 * MAX_CODES):
        counts = counts.plus(Counts(rows_error=1, errors={f"code-{number}": 1}))
    assert len(counts.errors) == MAX_CODES + 1
    assert counts.errors[OTHER] == 2 * MAX_CODES
    assert sum(counts.errors.values()) == counts.rows_error == 3 * MAX_CODES
    assert counts.plus(Counts(errors={"code-0": 1})).errors["code-0"] == 2
