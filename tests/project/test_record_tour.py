"""What `scripts/record_tour.py` makes of what terminals print."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"

FRAME = (
    "\x1b[1mdemo-model\x1b[0m  run  \x1b[1;32mrunning\x1b[0m\r\n"
    "rows     1,375 of 5,003 (27.4 %), 0 waiting\r\n"
    " w0       -       -      \x1b[31mgone   \x1b[0m   part-00001    169\r\n"
    " w1       -       -      \x1b[1;32mrunning\x1b[0m   part-00002    182\r\n"
)


@pytest.fixture
def tour(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("record_tour")


def test_progress_and_states_are_read_off_a_frame(tour: ModuleType) -> None:
    assert (tour.state_of(FRAME, "w0"), tour.state_of(FRAME, "w1"), tour.state_of(FRAME, "w2")) == (
        "gone",
        "running",
        "",
    )
    assert tour.percent_of(FRAME) == 27.4


def test_a_progress_bar_is_kept_as_it_was_last_and_styles_stay(tour: ModuleType) -> None:
    recording = tour.Recording(
        parts=["rows: 0%\rrows: 50%\rrows: 100%\r\n", FRAME, "\x1b[?25h{}  \r\n"]
    )
    assert recording.text().split("\n") == [
        "rows: 100%",
        "\x1b[1mdemo-model\x1b[0m  run  \x1b[1;32mrunning\x1b[0m",
        "rows     1,375 of 5,003 (27.4 %), 0 waiting",
        " w0       -       -      \x1b[31mgone   \x1b[0m   part-00001    169",
        " w1       -       -      \x1b[1;32mrunning\x1b[0m   part-00002    182",
        "{}",
        "",
    ]


def test_the_drawing_holds_the_text_and_asks_for_nothing(tour: ModuleType) -> None:
    drawing = tour.draw(tour.Recording(parts=[FRAME]).text())
    shown = "".join(ElementTree.fromstring(drawing).itertext()).replace("\N{NO-BREAK SPACE}", " ")
    assert "1,375 of 5,003 (27.4 %)" in shown
    assert not re.search(r"url\((?!#)|@import|href|<script", drawing)


def test_a_recording_of_a_failure_is_refused(tour: ModuleType) -> None:
    tour.check("$ ls\ndata\n")
    with pytest.raises(tour.TourFailed, match="Traceback"):
        tour.check("$ python show.py\nTraceback (most recent call last):\n")


def test_the_process_to_kill_is_the_one_that_the_shell_names(tour: ModuleType) -> None:
    assert tour.pid_of("[1] 4711\r\n") == 4711
    with pytest.raises(tour.TourFailed, match="no process id"):
        tour.pid_of("bash: no such command\r\n")
