"""Options: command line over environment over settings file over default."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from batchinfer.cli.help import SectionOption
from batchinfer.cli.logs import JsonFormatter
from batchinfer.cli.options import LEFT_OUT
from batchinfer.cli.settings import common_options
from batchinfer.core.errors import ConfigError


@click.command("worker", context_settings={"auto_envvar_prefix": "BATCHINFER_WORKER"})
@click.option("--model", default="the default")
@click.option("--top-k", cls=SectionOption, section="sampling", type=int, default=0)
@click.option("--strip", is_flag=True)
@click.option("--stop", multiple=True)
@click.option("--keep", default="")
@click.option("--sampling", multiple=True)
@common_options
def show(**options: Any) -> None:
    """Print what came in."""
    click.echo(json.dumps(options))


setattr(show.callback, LEFT_OUT, frozenset({"quiet"}))


def run(*arguments: str, **environment: str) -> dict[str, Any]:
    result = CliRunner().invoke(
        show, arguments, env=environment, catch_exceptions=False, standalone_mode=False
    )
    values: dict[str, Any] = json.loads(result.output)
    return values


def settings(folder: Path, text: str) -> str:
    path = folder / "run.yaml"
    path.write_text(text)
    return str(path)


def test_flag_over_environment_over_file_over_default(tmp_path: Path) -> None:
    path = settings(tmp_path, "model: from the file\n")
    assert run()["model"] == "the default"
    assert run("--config", path)["model"] == "from the file"
    assert (
        run("--config", path, BATCHINFER_WORKER_MODEL="from the environment")["model"]
        == "from the environment"
    )
    flags = ("--config", path, "--model", "from a flag")
    assert run(*flags, BATCHINFER_WORKER_MODEL="from the environment")["model"] == "from a flag"


def test_the_file_itself_may_come_from_the_environment(tmp_path: Path) -> None:
    assert run(BATCHINFER_CONFIG=settings(tmp_path, "top-k: 7\n"))["top_k"] == 7


def test_sections_only_group_and_other_commands_sections_are_passed_over(tmp_path: Path) -> None:
    path = settings(
        tmp_path,
        "model: m\nsampling: {top_k: 3, stop: ['###', END], quiet: 2}\n"
        "output:\n  strip: true\n  keep: [a, b]\nsplit: {num_chunks: 4}\n",
    )
    values = run("--config", path)
    assert (values["top_k"], values["strip"], values["keep"], values["stop"]) == (
        3,
        True,
        "a,b",
        ["###", "END"],
    )


def test_one_file_serves_the_split_and_the_worker(tmp_path: Path) -> None:
    """The run's sections are not the splitter's."""
    from batchinfer.cli.settings import read_settings
    from batchinfer.split.command import command as split
    from batchinfer.worker.command import command as worker

    path = tmp_path / "run.yaml"
    path.write_text(
        "split: {num_chunks: 4, output: job}\nmodel: {model: m}\n"
        "prompt: {prompt_column: p}\noutput: {output: job/runs/a}\n"
    )
    assert read_settings(path, split) == {
        "num_chunks": "4",
        "output": "job",
    }
    assert read_settings(path, worker) == {
        "model": "m",
        "prompt_column": "p",
        "output": "job/runs/a",
    }


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("modle: x\n", "unknown key 'modle'", "did you mean 'model'"),
        ("sampling: {topk: 1}\n", r"unknown key 'sampling\.topk'", "top_k"),
        ("- a\n- b\n", "expected a mapping", ""),
        ("model: [unclosed\n", "not readable as YAML", ""),
        ("stop: !!set {a, b}\n", "has a value that is no text", "no tags such as !!set"),
        ("model: !!binary aGk=\n", "has a value that is no text", "no tags such as !!set"),
        ("model: 2026-01-02\n", "has a value that is no text", "write dates in quotes"),
    ],
)
def test_a_mistake_in_the_file_is_named(tmp_path: Path, text: str, message: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        run("--config", settings(tmp_path, text))
    assert hint in caught.value.hint


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        run("--config", str(tmp_path / "gone.yaml"))


def test_a_json_log_line_is_one_object_whatever_the_message() -> None:
    record = logging.LogRecord(
        "batchinfer.x", logging.INFO, "", 0, "two\nlines of %s", ("text",), None
    )
    record.event = "chunk_done"
    entry = json.loads(JsonFormatter().format(record))
    assert (entry["message"], entry["event"], entry["level"]) == (
        "two\nlines of text",
        "chunk_done",
        "info",
    )
