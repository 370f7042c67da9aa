"""Every command of docs/cookbook.md does what the page shows.

A block is a session in a shell: commands after `$ `, their further lines after `> `, and what they print. `batchinfer`
runs in this process, so that all commands with the demo's model share one engine, which takes seconds to load.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import msgspec
import pytest

from batchinfer.cli.main import main
from batchinfer.core.records import Call, Reply
from batchinfer.engines import create_engine
from batchinfer.engines.engine_config import EngineConfig
from fake_endpoint import fake_endpoint
from tiny_model import DEMO_MODEL

ROOT = Path(__file__).resolve().parents[2]
MODEL = "examples/demo-model"
_LOG_LINE = re.compile(r"^\d\d:\d\d:\d\d [A-Z]+ ")


class Step(NamedTuple):
    """A command, and what the page says that it prints."""

    command: str
    shown: str


def steps_of(section: str) -> list[Step]:
    found: list[Step] = []
    for block in re.findall(r"^```console\n(.*?)^```", section, re.MULTILINE | re.DOTALL):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            lines = part.splitlines()
            count = 1
            while count < len(lines) and lines[count].startswith(">"):
                count += 1
            command = [lines[0], *(line[2:] for line in lines[1:count])]
            found.append(Step("\n".join(command), "\n".join(lines[count:])))
    return found


def sections() -> Iterator[Any]:
    page = (ROOT / "docs/cookbook.md").read_text()
    for part in re.split(r"^## ", page, flags=re.MULTILINE)[1:]:
        marks = [pytest.mark.vllm] if MODEL in part else []
        yield pytest.param(steps_of(part), id=part.splitlines()[0], marks=marks)


class Renamed:
    """The server that tests share, whose model has another name than on the page."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def ask(self, call: Call, stop: Any = None) -> Reply:
        return self._engine.ask(renamed(call), stop)

    def generate(self, source: Any, stop: Any) -> Any:
        def take(*arguments: Any) -> Any:
            calls = source.take(*arguments)
            return calls and [renamed(call) for call in calls]

        return self._engine.generate(SimpleNamespace(take=take, wait=source.wait), stop)


def renamed(call: Call) -> Call:
    body = call.body.replace(b'"%b"' % MODEL.encode(), b'"%b"' % str(DEMO_MODEL).encode())
    return msgspec.structs.replace(call, body=body)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where a reader of the page would be, with a server behind $ENDPOINT."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    with fake_endpoint() as endpoint:
        monkeypatch.setenv("ENDPOINT", endpoint.url)
        yield tmp_path


def run_command(command: str) -> str:
    """Run a command as the page's reader would, and return what it prints, without what the page leaves out."""
    if not command.startswith("batchinfer "):
        done = subprocess.run(
            ["bash", "-c", command], capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, f"{command}\n{done.stderr}"
        return done.stdout
    words = [os.path.expandvars(word) for word in shlex.split(command.replace("\\\n", ""))[1:]]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main(words)
    assert status == 0, f"{command}\n{err.getvalue()}"
    lines = [line for line in err.getvalue().splitlines() if not _LOG_LINE.match(line)]
    return "\n".join([*out.getvalue().splitlines()[:-1], *lines])


def neat(text: str) -> list[str]:
    return [line.rstrip() for line in text.splitlines() if line.strip()]


@pytest.mark.parametrize("steps", list(sections()))
def test_the_commands_print_what_the_page_shows(
    steps: list[Step],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    assert steps
    if any(MODEL in step.command for step in steps):
        kept = Renamed(request.getfixturevalue("demo_engine"))

        def create(config: EngineConfig) -> Any:
            is_kept = (config.engine, config.model) == ("vllm", MODEL)
            return kept if is_kept else create_engine(config)

        monkeypatch.setattr("batchinfer.engines.create_engine", create)
    for step in steps:
        shown = run_command(step.command).replace(f"{folder}/", "")
        assert neat(shown) == neat(step.shown), f"{step.command}\nprints\n{shown}"


def test_a_session_is_read_as_a_shell_shows_it() -> None:
    page = "text\n```console\n$ cat > a <<'END'\n> one\n>\n> END\n$ cat a\none\n\n```\n"
    assert steps_of(page) == [Step("cat > a <<'END'\none\n\nEND", ""), Step("cat a", "one\n")]
