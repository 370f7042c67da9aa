"""Templates: the named ones, own Jinja over columns, worked examples, and the sandbox."""

from typing import Any

import pytest

from batchinfer.core.errors import ConfigError
from batchinfer.prompts.templates import NAMED_TEMPLATES
from prompt_rows import builder, code, prepare, sent


def render(template: str, row: dict[str, Any] | None = None, **options: Any) -> str:
    return str(sent(prepare(row or {}, prompt_template=template, **options))["prompt"])


def test_the_named_templates_are_those_of_the_guide_and_render_their_own_columns():
    assert set(NAMED_TEMPLATES) == {"alpaca", "gpteacher", "sharegpt", "completion"}
    for name, column in {"gpteacher": "instruction", "completion": "text"}.items():
        assert "<it>" in render(name, {column: "<it>"})
    conversation = [{"from": "human", "value": "hi"}]
    body = sent(prepare({"conversations": conversation}, prompt_template="sharegpt"))
    assert body["messages"] == [{"role": "user", "content": "hi"}]
    needed = builder(prompt_template="sharegpt").needed_columns
    assert needed["--prompt-template sharegpt"] == ["conversations"]


def test_alpaca_has_a_form_with_and_one_without_input():
    with_input = render("alpaca", {"instruction": "Add", "input": "1 1"})
    without = render("alpaca", {"instruction": "Add", "input": ""})
    assert with_input.endswith("\n\n### Instruction:\nAdd\n\n### Input:\n1 1\n\n### Response:")
    assert without == render("alpaca", {"instruction": "Add"})
    assert without.endswith("completes the request.\n\n### Instruction:\nAdd\n\n### Response:")


def test_a_template_sees_columns_row_and_system_prompt():
    text = render(
        "{{ q }} {{ row['odd name'] }} {{ system_prompt }} {{ secret }}|",
        {"q": "a", "odd name": "b", "secret": "x"},
        system_prompt="s",
        blank_columns=["secret"],
    )
    assert text == "a b s |"
    assert render("{{ q | tojson }}", {"q": {"a": "<é>"}}) == '{"a": "<é>"}'
    assert render("{{ system_prompt }}", {"system_prompt": "own"}, system_prompt="s") == "own"
    assert render("{{ x | default('none') }}") == "none"
    row = {"_row": 7, "_id": "i", "row": "mine", "x": None}
    assert render("{{ _row }} {{ _id }} {{ row.row }}{{ x or '' }}", row) == "7 i mine"
    assert render("{{ row | tojson }}", row) == '{"row": "mine", "x": null}'


def test_a_missing_column_is_named_before_and_while_rows_are_read():
    found = prepare({"qestion": "x"}, prompt_template="{{ question }}")
    assert code(found) == "missing_column"
    assert "did you mean 'qestion'?" in str(found.failure)
    for template, needed in (
        ("{{ q }} {{ r.s | upper }} {{ blank }}", ["q", "r"]),
        ("{{ q | default('') }}", []),
        ("{% if q %}{{ q }}{% endif %}", []),
        ("{{ row.q }} {{ system_prompt }}", []),
    ):
        columns = builder(prompt_template=template, blank_columns=["blank"]).needed_columns
        assert columns.get("the template: the variable", []) == needed


@pytest.mark.parametrize("template", ["{% for i in %}", "{{ q | random }}", "{{ q | nosuch }}"])
def test_a_template_that_could_not_work_is_refused_at_once(template):
    with pytest.raises(ConfigError, match="--prompt-template"):
        builder(prompt_template=template)


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ '{0.__class__.__mro__}'.format(q) }}",
        "{% include '/etc/passwd' %}",
        "{% for i in range(10**9) %}x{% endfor %}",
        "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
        "{{ q }}{{ row.null }}",
    ],
)
def test_a_template_that_fails_on_a_row_or_leaves_the_sandbox_is_the_rows_error(template):
    assert code(prepare({"q": [1], "null": None}, prompt_template=template)) == "template_error"
