"""Templates that make prompts from the columns of a row: the named ones of ``--template``, and users' own."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jinja2
from jinja2 import meta, nodes

from batchinfer.core.errors import ConfigError, near
from batchinfer.core.records import Record
from batchinfer.prompts.sandbox import BoundedEnvironment, compile_template
from batchinfer.prompts.types import Code, RowProblem

# The Alpaca format. Models that were trained on it expect exactly these words.
_ALPACA = """\
{% if input is defined and input -%}
Below is an instruction that describes a task, paired with an input that provides further context. \
Write a response that appropriately completes the request.

### Instruction:
{{ instruction }}

### Input:
{{ input }}

### Response:
{%- else -%}
Below is an instruction that describes a task. \
Write a response that appropriately completes the request.

### Instruction:
{{ instruction }}

### Response:
{%- endif %}
"""

_QUESTION_ANSWER = """\
{% if context is defined and context -%}
Context: {{ context }}
{% endif -%}
Question: {{ question }}
Answer:"""

_SUMMARISE = """\
{% set document = text if text is defined else article if article is defined else document -%}
{{ document }}

Summary:"""


class NamedTemplate(Record, frozen=True, kw_only=True):
    """A template that ``--template NAME`` selects. It has either Jinja text or a column with conversations."""

    name: str
    description: str
    columns: list[str]
    """Columns that the template reads."""
    source: str = ""
    """Jinja text over `columns`; empty if `messages_column` is set."""
    answers: list[str] = []
    """Columns in which a worked example may have its answer; the first one that the example has is used."""
    messages_column: str = ""
    """Column with a conversation that the model's chat template turns into the prompt; empty if `source` is set."""
    separator: str = " "
    """Text between the prompt of a worked example and its answer."""


_TEMPLATES = [
    NamedTemplate(
        name="alpaca",
        description="instruction with an optional input, in the Alpaca format",
        columns=["instruction", "input"],
        source=_ALPACA,
        answers=["output", "response"],
        separator="\n",
    ),
    NamedTemplate(
        name="gpteacher",
        description="as alpaca, for rows whose answer is in `response`",
        columns=["instruction", "input"],
        source=_ALPACA,
        answers=["response", "output"],
        separator="\n",
    ),
    NamedTemplate(
        name="sharegpt",
        description="a conversation of {from, value} turns, through the model's chat template",
        columns=["conversations"],
        messages_column="conversations",
    ),
    NamedTemplate(
        name="completion",
        description="the column `text` as it is",
        columns=["text"],
        source="{{ text }}",
    ),
    NamedTemplate(
        name="question-answer",
        description="a question with an optional context, answered after `Answer:`",
        columns=["question", "context"],
        source=_QUESTION_ANSWER,
        answers=["answer", "response", "output"],
    ),
    NamedTemplate(
        name="summarise",
        description="a text (column `text`, `article` or `document`), summed up after `Summary:`",
        columns=["text", "article", "document"],
        source=_SUMMARISE,
        answers=["summary", "highlights", "response", "output"],
    ),
]


def list_templates() -> list[NamedTemplate]:
    """Return the named templates, for `--template list`."""
    return list(_TEMPLATES)


def named_template(name: str) -> NamedTemplate:
    """Look up a template by its name.

    Raises:
        ConfigError: there is no template of this name. The message suggests the most similar one.
    """
    by_name = {template.name: template for template in _TEMPLATES}
    if name not in by_name:
        raise ConfigError(
            f"--template {name}: no such template, expected one of {', '.join(by_name)}"
            + near(name, by_name),
            hint="`--template list` describes them; a file of your own goes into --prompt-template",
        )
    return by_name[name]


class PromptTemplate:
    """A compiled template that turns rows into prompt texts.

    Args:
        source: Jinja text. Its variables are the row's columns, `row` (the whole row), and the entries of `values`.
        name: Name of the template in error messages.
        values: Further variables, such as `examples`. A column of the same name takes precedence.
    """

    def __init__(
        self,
        source: str,
        *,
        name: str,
        values: dict[str, Any],
        undefined: type[jinja2.Undefined] = jinja2.StrictUndefined,
    ) -> None:
        self._template = compile_template(source, name=name, undefined=undefined)
        parser = BoundedEnvironment(undefined=undefined)
        tree = parser.parse(source)
        self.variables = sorted(meta.find_undeclared_variables(tree))
        """Variables that the template reads, without those that it sets itself."""
        known = {"row", *values, *self._template.global_names}
        self.needed_columns = _needed_columns(tree, set(self.variables) - known)
        """Columns without which every render fails, as far as the template's text shows it."""
        self._name = name
        self._values = values

    def render(self, row: dict[str, Any]) -> str:
        """Return the prompt text of one row.

        Raises:
            RowProblem: the template failed. If the cause is a missing column, the message names that column.
        """
        try:
            return self._template.render({"row": row, **self._values, **row})
        except jinja2.UndefinedError as error:
            known = {"row", *self._values, *self._template.global_names}
            missing = [name for name in self.variables if name not in row and name not in known]
            # A template may test whether a column exists, so an absent column need not be the cause. The cause is the
            # column that Jinja's message names.
            missing = [name for name in missing if f"'{name}'" in str(error)]
            if missing:
                raise RowProblem(
                    Code.MISSING_COLUMN,
                    f"{self._name}: column {missing[0]!r} is not in the row (it has: "
                    f"{', '.join(list(row)[:20])}){near(missing[0], row)}",
                ) from error
            raise RowProblem(Code.TEMPLATE_ERROR, f"{self._name}: {error}") from error


def _needed_columns(tree: nodes.Template, variables: set[str]) -> list[str]:
    """Return the columns that a template reads on every way through it.

    A column counts if it is one of `variables`, or if the template reads it as ``row.name`` or ``row["name"]``. Columns
    that only some ways read do not count, nor columns that the template tests, gives a default or sets itself.
    """
    variables = variables - {name.name for name in tree.find_all(nodes.Name) if name.ctx != "load"}
    found = _always_read(tree)
    return sorted(name for kind, name in found if kind == "row" or name in variables)


def _always_read(node: nodes.Node) -> set[tuple[str, str]]:
    """Return what a part of a template reads in every case: pairs ("name", variable) and ("row", column)."""
    match node:
        case nodes.Name():
            return {("name", node.name)}
        case nodes.Getattr(node=nodes.Name(name="row")):
            # `row.items` and its like are methods of the dictionary, not columns.
            return set() if hasattr(dict, node.attr) else {("row", node.attr)}
        case nodes.Getitem(node=nodes.Name(name="row"), arg=nodes.Const(value=str(name))):
            return {("row", name)}
        case nodes.If():
            ways = [node.body, *(branch.body for branch in node.elif_), node.else_]
            return _always_read(node.test) | set.intersection(*map(_read_by_any, ways))
        case nodes.CondExpr():
            ways = [[node.expr1], [node.expr2] if node.expr2 is not None else []]
            return _always_read(node.test) | set.intersection(*map(_read_by_any, ways))
        case nodes.And() | nodes.Or():
            return _always_read(node.left)
        case nodes.For():
            return _always_read(node.iter)
        case nodes.Test(name="defined" | "undefined") | nodes.Filter(name="default" | "d"):
            return set()
        case nodes.Macro() | nodes.CallBlock():
            return set()
    return _read_by_any(node.iter_child_nodes())


def _read_by_any(parts: Iterable[nodes.Node]) -> set[tuple[str, str]]:
    return set().union(*map(_always_read, parts))


def examples_text(template: NamedTemplate, examples: list[dict[str, Any]]) -> str:
    """Return one text with all worked examples and their answers. The caller puts it before every prompt.

    Raises:
        ConfigError: an example lacks a column or an answer, or the template has no place for examples.
    """
    if not examples:
        return ""
    if not template.answers:
        raise ConfigError(
            f"--few-shot with --template {template.name}: this template has no place for examples",
            hint="write a Jinja file that loops over `examples` and pass it with --prompt-template",
        )
    prompt = PromptTemplate(template.source, name=f"--template {template.name}", values={})
    texts = []
    for index, example in enumerate(examples):
        answer = next((example[name] for name in template.answers if name in example), None)
        if answer is None:
            raise ConfigError(
                f"--few-shot example {index}: no answer, expected a column "
                + " or ".join(template.answers),
                hint="every example needs the answer that the model should imitate",
            )
        try:
            texts.append(prompt.render(example) + template.separator + str(answer))
        except RowProblem as error:
            raise ConfigError(f"--few-shot example {index}: {error.message}") from error
    return "\n\n".join(texts) + "\n\n"
