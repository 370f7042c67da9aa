"""Constraints on answers: how options, columns and requests state them, and that none that is bad gets to an engine."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from batchinfer.core.errors import ConfigError
from batchinfer.core.records import Sampling
from batchinfer.prompts import (
    EngineRules,
    Prepared,
    PromptBuilder,
    PromptConfig,
    RawRow,
    constraint_process,
)
from batchinfer.prompts.constraint_process import ConstraintChecker, check_run_constraint
from batchinfer.prompts.constraints import read_options

needs_xgrammar = pytest.mark.skipif(
    importlib.util.find_spec("xgrammar") is None, reason="xgrammar comes with vLLM"
)
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
BAD_SCHEMA = {"type": "nothing"}
# Takes minutes to compile; each of the others takes less than 0.1 s.
HOSTILE = {"type": "object", "properties": {f"f{i}": {"type": "string"} for i in range(4000)}}


def options(*choices: str, **given: str) -> dict[str, Any] | None:
    texts = dict.fromkeys(("json_schema", "regex", "grammar", "structural_tag"), "") | given
    return read_options(choices=choices, **texts)


def test_each_option_states_its_constraint() -> None:
    tag = {"type": "structural_tag", "format": {"type": "any_text"}}
    assert options() is None
    assert options(json_schema=json.dumps(SCHEMA)) == {"json": SCHEMA}
    assert options("yes, no") == {"choice": ["yes", "no"]}
    assert options('["a, b", "c"]') == {"choice": ["a, b", "c"]}
    assert options("a, b", "c") == {"choice": ["a, b", "c"]}
    assert options("[a", "c") == {"choice": ["[a", "c"]}
    assert options(regex="a+") == {"regex": "a+"}
    assert options(grammar='root ::= "a"') == {"grammar": 'root ::= "a"'}
    assert options(structural_tag=json.dumps(tag)) == {"structural_tag": json.dumps(tag)}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"regex": "a", "grammar": "b"}, "--regex and --grammar: expected one constraint"),
        ({"json_schema": "{"}, "--json-schema: not JSON"),
        ({"json_schema": "[1]"}, "--json-schema: holds a JSON array"),
        ({"json_schema": "{}"}, "--json-schema: json is {}, expected a JSON schema, not empty"),
        ({"json_schema": '{"a":' * 90 + "1" + "}" * 90}, "nested deeper"),
    ],
)
def test_an_option_that_is_no_constraint_is_refused(given: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        options(**given)
    assert said in caught.value.message


@pytest.mark.parametrize(
    ("choice", "said"),
    [(",", "--choices: choice is [], expected a list of texts"), ("[1]", "choice is [1]")],
)
def test_choices_that_are_no_texts_are_refused(choice: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        options(choice)
    assert said in caught.value.message


# --------------------------------------------------------------------------- columns and requests


def build(
    rows: list[Any], checker: ConstraintChecker | None, run: Any = None, **config: Any
) -> list[Prepared]:
    builder = PromptBuilder(
        PromptConfig(**config),
        Sampling(structured=run),
        None,
        None,
        None,
        rules=EngineRules(checker=checker),
    )
    lines = [RawRow(index, json.dumps(row).encode()) for index, row in enumerate(rows)]
    return builder.build("part-00000", 0, lines)


def constraint(prepared: Prepared) -> Any:
    assert prepared.request is not None, prepared.failure
    return prepared.request.sampling.structured


@pytest.mark.parametrize("way", ["prompt_column", "messages_column", "template_name", "keep"])
def test_a_column_states_the_rows_own_constraint(way: str) -> None:
    run = {"choice": ["run"]}
    response_format = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    cases: list[tuple[Any, Any]] = [
        (None, run),
        ("", run),
        ({"type": "text"}, run),
        (SCHEMA, {"json": SCHEMA}),
        (json.dumps(SCHEMA), {"json": SCHEMA}),
        (["a", "b"], {"choice": ["a", "b"]}),
        ({"regex": "a+"}, {"regex": "a+"}),
        ({"grammar": 'root ::= "a"'}, {"grammar": 'root ::= "a"'}),
        ({"type": "json_object"}, {"json_object": True}),
        (response_format, {"json": SCHEMA}),
        ({"structural_tag": {"format": {}}}, {"structural_tag": '{"format": {}}'}),
    ]
    text: Any = [{"role": "user", "content": "x"}] if way == "messages_column" else "x"
    rows: list[Any] = [{"instruction": text, "c": value} for value, _ in cases]
    config: dict[str, Any] = {"prompt_column": "instruction", "keep": ["*"]}
    if way != "keep":
        config = {way: "alpaca" if way == "template_name" else "instruction"}
    found = build([*rows, {"instruction": text}], None, run, constraint_column="c", **config)
    assert [constraint(one) for one in found] == [*(wanted for _, wanted in cases), run]


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (5, "is a JSON number"),
        ("no JSON", "not JSON"),
        ([], "choice is []"),
        ([1], "choice is [1]"),
        ({}, "json is {}"),
        ({"regex": 5}, "regex is 5"),
        ({"json_object": False}, "json_object is false"),
        ({"type": "json_schema"}, "without an object in its field schema"),
        ("[" * 200 + "]" * 200, "nested deeper"),
        (r'["\ud800", 1]', "without its partner"),
        (r'["\udc00"]', "without its partner"),
    ],
)
def test_a_column_that_holds_no_constraint_is_an_error_row(value: Any, said: str) -> None:
    rows = [{"p": "x", "c": value}, {"p": "x"}]
    bad, good = build(rows, None, constraint_column="c", prompt_column="p")
    assert bad.failure is not None
    assert bad.failure.code == "invalid_constraint"
    assert said in bad.failure.message
    assert good.request is not None


def test_requests_have_their_own_way_to_state_constraints() -> None:
    with pytest.raises(ConfigError, match="--constraint-column with --request-format"):
        build([], None, request_format="openai-batch", constraint_column="c")


# --------------------------------------------------------------------------- compiling


@pytest.fixture(scope="module")
def checker() -> Iterator[ConstraintChecker]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(constraint_process, "CONSTRAINT_SECONDS", 2.0)
        yield ConstraintChecker()


def request_line(**body: Any) -> dict[str, Any]:
    body = {"prompt": "x", **body}
    return {"custom_id": "i", "method": "POST", "url": "/v1/completions", "body": body}


@needs_xgrammar
def test_rows_whose_constraint_does_not_compile_fail_and_their_neighbours_do_not(
    checker: ConstraintChecker,
) -> None:
    deep = json.loads('{"items":' * 70 + "{}" + "}" * 70)
    bad: list[tuple[Any, str]] = [
        (BAD_SCHEMA, 'Unsupported type "nothing"'),
        ({"json": "{not JSON"}, "Expecting property name"),
        ({"$ref": "#/nowhere"}, "nowhere"),
        ({"$ref": "#"}, "no answer satisfies it"),
        (
            {"type": "array", "uniqueItems": True, "items": {}},
            "would not keep: uniqueItems (the backend guidance",
        ),
        (deep, "more than 64 levels"),
        ({"regex": "("}, "not closed"),
        ({"regex": "(?=a)b"}, "Lookahead"),
        ({"regex": "a\0"}, "NUL"),
        ({"grammar": "nonsense ::= <"}, "Unexpected character"),
        ({"grammar": "root ::= root"}, "no answer satisfies it"),
        ({"grammar": "root ::= " + "(" * 100_000 + '"a"' + ")" * 100_000}, "does not compile"),
        ({"structural_tag": "{}"}, "does not compile"),
        (HOSTILE, "took more than 2 s of CPU time"),
    ]
    good: list[Any] = [
        SCHEMA,
        ["yes", 'line\n"b"', "é\U0001f600"],
        {"regex": "[A-C]{3}-\\d{2}"},
        {"grammar": 'root ::= "x" ("a"|"b"){3}'},
        {"grammar": 'start: "x" /[ab]{3}/'},
        {"type": "json_object"},
        {"type": "string", "maxLength": 20},
        {"structural_tag": {"type": "structural_tag", "format": {"type": "any_text"}}},
    ]
    values = [value for pair in zip(bad, bad, strict=True) for value in (pair[0][0], SCHEMA)]
    rows = [{"p": "x", "c": value} for value in [*values, *good]]
    found = build(rows, checker, constraint_column="c", prompt_column="p")
    for index, (_, said) in enumerate(bad):
        failure, neighbour = found[2 * index].failure, found[2 * index + 1]
        assert failure is not None, said
        assert (failure.code, said in failure.message) == ("invalid_constraint", True), failure
        assert constraint(neighbour) == {"json": SCHEMA}
    assert [one.failure for one in found[2 * len(bad) :]] == [None] * len(good)


@needs_xgrammar
def test_a_request_names_the_parameter_whose_constraint_does_not_compile(
    checker: ConstraintChecker,
) -> None:
    wrapped = {"type": "json_schema", "json_schema": {"name": "x", "schema": BAD_SCHEMA}}
    rows = [
        request_line(structured_outputs={"regex": "("}),
        request_line(response_format=wrapped),
        request_line(structured_outputs={"structural_tag": {"format": 5}}),
        request_line(structured_outputs={"regex": "a"}),
        request_line(),
    ]
    found = build(rows, checker, request_format="openai-batch")
    assert [one.failure.code if one.failure else "" for one in found] == [
        *["invalid_parameter"] * 3,
        *["", ""],
    ]
    params = ["structured_outputs", "response_format", "structured_outputs", None, None]
    assert [one.param for one in found] == params


@needs_xgrammar
def test_a_checker_whose_process_is_killed_goes_on_with_another(
    checker: ConstraintChecker, tmp_path: Path
) -> None:
    del tmp_path
    assert checker.problem_of({"regex": "b+"}) == ""
    process = checker._process._process
    assert process is not None
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert checker.problem_of({"regex": "c+"}) == ""
    assert "not closed" in checker.problem_of({"regex": "(c"})


@needs_xgrammar
def test_the_runs_own_constraint_is_refused_before_an_engine_loads(
    checker: ConstraintChecker,
) -> None:
    check_run_constraint({"json": SCHEMA}, checker)
    check_run_constraint({"yaml": 1}, checker)
    check_run_constraint({"json": BAD_SCHEMA}, None)
    with pytest.raises(ConfigError, match="the constraint does not compile: Unsupported type"):
        check_run_constraint({"json": BAD_SCHEMA}, checker)


def test_without_xgrammar_nothing_is_checked_and_a_warning_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(constraint_process, "BACKEND", "no_such_package_here")
    checker = ConstraintChecker()
    assert checker.problem_of({"regex": "("}) == ""
    assert checker.problem_of({"regex": "(("}) == ""
    assert len(caplog.records) == 1
