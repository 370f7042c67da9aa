"""The column `answer_json`: a struct where the run's schema says so, JSON text elsewhere, null where nothing fits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from batchinfer.collect.answer_json import AnswerParser, kind_of_schema, parser_for
from batchinfer.collect.command import run_collect
from batchinfer.collect.table import CollectConfig
from batchinfer.core.clock import SystemClock
from batchinfer.prompts import constraint_process
from batchinfer.storage.opening import open_store
from making import make_job, run_worker_here

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        "score": {"type": "number"},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}},
        "where": {"$ref": "#/$defs/Place"},
        "more": {"type": "object"},
    },
    "$defs": {"Place": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
ANSWERS = [
    '{"name": "Ann", "age": 5, "score": 1, "tags": ["a"], "where": {"city": "Rom"}, "more": {"x": [1]}}',
    '{"name": "Bo", "age": null}',
    '{"name": "cut off, "age',
    '{"name": 5}',
    '{"unknown": 5}',
    "no JSON",
]


def test_a_schema_says_the_kind() -> None:
    assert kind_of_schema(SCHEMA, SCHEMA) == (
        "struct",
        {
            "name": "str",
            "age": "int",
            "score": "float",
            "tags": ("list", "str"),
            "where": ("struct", {"city": "str"}),
            "more": "json",
        },
    )


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}},
        {"$ref": "#"},
        {"anyOf": [{"type": "string"}, {"type": "integer"}]},
        {"type": "object", "properties": {"a": {}}, "additionalProperties": True},
        {"type": "object", "properties": {str(i): {} for i in range(101)}},
        {"type": "array", "prefixItems": [{"type": "string"}]},
        {"type": ["string", "integer"]},
        {"enum": ["a", 1]},
        {"enum": []},
        {"properties": 5, "type": "object"},
        {"anyOf": 5},
        {"type": {"a": 1}},
    ],
)
def test_a_schema_that_no_type_holds_is_json_text(schema: Any) -> None:
    assert kind_of_schema(schema, schema) == "json"


def test_a_recursive_schema_ends() -> None:
    node: dict[str, Any] = {"type": "object", "properties": {"next": {"$ref": "#/$defs/n"}}}
    kind = kind_of_schema({"$ref": "#/$defs/n", "$defs": {"n": node}}, {"$defs": {"n": node}})
    assert str(kind).count("struct") < 40


@pytest.mark.parametrize(
    ("config", "is_wanted", "kind"),
    [
        ({}, None, None),
        ({}, True, "json"),
        ({"sampling": {"structured": {"json": SCHEMA}}}, False, None),
        ({"sampling": {"structured": {"json": {"type": "integer"}}}}, None, "int"),
        ({"sampling": {"structured": {"json": '{"type": "integer"}'}}}, None, "int"),
        ({"sampling": {"structured": {"json_object": True}}}, None, "json"),
        ({"sampling": {"structured": {"choice": ["a"]}}}, None, None),
        ({"prompt": {"constraint_column": "c"}}, None, "json"),
    ],
)
def test_which_runs_have_the_column(config: Any, is_wanted: bool | None, kind: str | None) -> None:
    parser = parser_for([config], is_wanted=is_wanted)
    assert (parser.kind if parser is not None else None) == kind


def test_runs_of_two_schemas_have_json_text() -> None:
    runs = [
        {"sampling": {"structured": {"json": {"type": kind}}}} for kind in ("integer", "string")
    ]
    parsers = [parser_for(each, is_wanted=None) for each in (runs, runs[:1], [*runs, {}], [{}])]
    assert [one and one.kind for one in parsers] == ["json", "int", "json", None]


def test_numbers_that_do_not_fit_are_null() -> None:
    parser = AnswerParser("int")
    texts = ["5", "5.0", "5.5", "true", str(2**63), "1e400", None, '"5"']
    assert parser.column(texts) == [5, 5, None, None, None, None, None, None]
    assert parser.num_unfit == 5


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of `ANSWERS`."""
    folder = tmp_path_factory.mktemp("run")
    make_job(
        folder / "job",
        rows=len(ANSWERS),
        per_chunk=4,
        make_row=lambda index: {"prompt": ANSWERS[index], "answer_json": "the source's own"},
    )
    (folder / "schema.json").write_text(json.dumps(SCHEMA))
    options = ("--json-schema", str(folder / "schema.json"), "--no-timing")
    with pytest.MonkeyPatch.context() as patch:
        # The schema is not compiled, which takes seconds.
        patch.setattr(constraint_process, "BACKEND", "no_such_package_here")
        run_worker_here(folder / "job", folder / "run", *options)
    return folder / "run"


@pytest.mark.parametrize("form", ["parquet", "jsonl", "csv"])
def test_collect_writes_the_parsed_answers(tmp_path: Path, run: Path, form: str) -> None:
    dest = tmp_path / f"answers.{form}"
    config = CollectConfig(run=str(run), dest=str(dest), with_source=True)
    run_collect(config, open_store=open_store, clock=SystemClock())
    whole = {
        "name": "Ann",
        "age": 5,
        "score": 1.0,
        "tags": ["a"],
        "where": {"city": "Rom"},
        "more": '{"x":[1]}',
    }
    rest = dict.fromkeys(whole, None)
    wanted = [whole, {**rest, "name": "Bo"}, None, None, None, None]
    if form == "parquet":
        from pyarrow import parquet

        rows = parquet.read_table(dest).to_pylist()
    elif form == "jsonl":
        rows = [json.loads(line) for line in dest.read_text().splitlines()]
    else:
        import csv

        with dest.open() as file:
            rows = list(csv.DictReader(file))
        for row in rows:
            row["answer_json"] = json.loads(row["answer_json"] or "null")
    assert [row["answer_json"] for row in rows] == wanted
    assert [row["text"] for row in rows] == ANSWERS
    assert {row["source_answer_json"] for row in rows} == {"the source's own"}
