"""The table of engines: the only place that tells one from another."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import batchinfer
from batchinfer.core.errors import ConfigError
from batchinfer.engines import (
    ENGINES,
    EngineKind,
    check_engine,
    create_engine,
    find_engine,
    has_model,
    identify_model,
    longest_sequence,
)
from batchinfer.engines.config import EngineConfig
from batchinfer.engines.echo import EchoEngine
from batchinfer.engines.gpus import place
from batchinfer.engines.tokenizers import tokenizer_for
from batchinfer.worker.command import command

PACKAGE = Path(batchinfer.__file__).parent


def compares_engines(path: Path) -> list[str]:
    """Return the comparisons in a module that mention an engine and the name of one."""
    text = path.read_text()
    found = [
        ast.get_source_segment(text, node) or ""
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Compare)
        and any(isinstance(part, ast.Constant) and part.value in ENGINES for part in ast.walk(node))
    ]
    return [f"{path.name}: {comparison}" for comparison in found if "engine" in comparison]


def test_no_module_compares_with_an_engines_name():
    assert [each for path in sorted(PACKAGE.rglob("*.py")) for each in compares_engines(path)] == []


def test_a_new_engine_needs_an_entry_in_the_table_and_nothing_else(monkeypatch):
    third = EngineKind(
        name="third",
        needs_model=False,
        is_rehearsal=True,
        create=EchoEngine,
    )
    monkeypatch.setitem(ENGINES, "third", third)
    config = EngineConfig(engine="third", model="ignored")
    assert check_engine(config) is third
    assert isinstance(create_engine(config), EchoEngine)
    assert tokenizer_for(config) is None
    assert identify_model(config) == "third"
    assert longest_sequence(config) is None
    assert [name for name, _ in place(config).replicas] == ["replica 0"]
    assert not has_model(config)


def test_the_help_of_the_option_names_every_engine():
    [option] = [each for each in command.params if each.name == "engine"]
    assert all(name in option.help for name in ENGINES)
    assert option.default == EngineConfig().engine


def test_an_unknown_engine_is_refused_with_its_nearest_neighbour():
    with pytest.raises(
        ConfigError, match="'Ecko' is not an engine, expected one of vllm, echo"
    ) as e:
        find_engine("Ecko")
    assert e.value.hint == "did you mean --engine echo?"
    with pytest.raises(ConfigError) as e:
        find_engine("sglang")
    assert e.value.hint == "the default is --engine vllm"


def test_the_default_engine_is_in_the_table_and_needs_a_model():
    assert find_engine(EngineConfig().engine).needs_model
    with pytest.raises(ConfigError, match="--model: is missing") as e:
        check_engine(EngineConfig())
    assert "--engine echo" in e.value.hint


def test_the_table_is_read_without_a_heavy_package():
    heavy = "{'vllm', 'torch', 'transformers', 'pyarrow', 'huggingface_hub', 'jinja2', 'fsspec'}"
    script = f"import sys, batchinfer.engines; print(sorted({heavy} & sys.modules.keys()))"
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
