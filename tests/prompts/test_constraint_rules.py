"""Values that are no constraint although they are JSON objects: a schema without a rule would let any JSON through."""

from __future__ import annotations

from typing import Any

import pytest

from batchinfer.core.errors import ConfigError
from batchinfer.prompts.constraints import ConstraintProblem, read_column, read_options
from batchinfer.prompts.parameters import make_sampling

NO_RULE = [
    {"regex": "a", "choice": ["b"]},
    {"choices": ["a", "b"]},
    {"name": "a text", "n": "a number"},
    {"title": "Answer", "description": "yes or no"},
    {"json": {"type": "object"}, "disable_any_whitespace": True},
]


@pytest.mark.parametrize("value", NO_RULE)
def test_an_object_without_a_rule_is_no_constraint(value: dict[str, Any]) -> None:
    with pytest.raises(ConstraintProblem, match="expected a JSON schema, with type, properties"):
        read_column(value)


def test_a_file_with_an_example_of_an_answer_is_no_schema() -> None:
    texts = dict.fromkeys(("regex", "grammar", "structural_tag"), "")
    with pytest.raises(ConfigError, match=r'--json-schema: an object of \["n","name"\], expected'):
        read_options(json_schema='{"name": "Ann", "n": 3}', choices=[], **texts)


def test_a_misspelt_kind_is_refused_before_the_model_is_loaded() -> None:
    with pytest.raises(ConfigError, match="'choices' is no kind of constraint; did you mean 'choi"):
        make_sampling({}, {"structured": {"choices": ["a"]}})
    constraint = {"regex": "a", "disable_any_whitespace": True}
    assert make_sampling({}, {"structured": constraint}).structured == constraint


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#/$defs/a", "$defs": {"a": {"type": "string"}}},
        {"enum": [1, 2]},
        {"title": "t", "anyOf": [{"type": "string"}, {"type": "null"}]},
        {"minimum": 3},
    ],
)
def test_an_object_with_a_rule_is_a_schema(schema: dict[str, Any]) -> None:
    assert read_column(schema) == {"json": schema}
