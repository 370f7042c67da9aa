"""What small runs write and print is byte for byte what was recorded."""

import pytest

from goldens import FOLDER, SCENES, record
from goldens.refusals import TABLE, record_refusals


@pytest.mark.parametrize("name", SCENES)
def test_a_run_leaves_what_was_recorded(name, tmp_path):
    recorded = (FOLDER / f"{name}.txt").read_text(encoding="utf-8")
    assert record(name, tmp_path) == recorded


def test_what_cannot_work_is_refused_in_a_line_and_leaves_nothing(tmp_path):
    assert record_refusals(tmp_path) == TABLE.read_text(encoding="utf-8")
