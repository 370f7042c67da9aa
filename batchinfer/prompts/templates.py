"""Templates that make prompts from the columns of a row: the named ones of ``--template``, and users' own.

They run in Jinja's sandbox, in the worker's own process: whoever writes a template owns the machine. The sandbox keeps
what a row holds from reaching anything but the row.
"""

from __future__ import annotations

import json
from typing import Any, NoReturn

import jinja2
from jinja2 import meta, nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

from batchinfer.core.errors import ConfigError, near
from batchinfer.core.records import Record
from batchinfer.core.row_codes import Code
from batchinfer.prompts.types import RowProblem

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
    """Column with a conversation; empty if `source` is set."""
    separator: str = " "
    """Text between the prompt of a worked example and its answer."""


NAMED_TEMPLATES = {
    template.name: template
    for template in (
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
            description="a conversation of {from, value} turns, sent as a chat",
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
    )
}


def named_template(name: str) -> NamedTemplate:
    """Look up a template by its name.

    Raises:
        ConfigError: there is no template of this name. The message suggests the most similar one.
    """
    if name not in NAMED_TEMPLATES:
        raise ConfigError(
            f"--template {name}: no such template, expected one of {', '.join(NAMED_TEMPLATES)}"
            + near(name, NAMED_TEMPLATES),
            hint="`--template list` describes them; a file of your own goes into --prompt-template",
        )
    return NAMED_TEMPLATES[name]


def _tojson(value: Any, indent: int | None = None) -> str:
    # Jinja's own filter escapes for HTML. A prompt needs the text unescaped.
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
        extensions=["jinja2.ext.loopcontrols"],
    )
    del environment.filters["random"]  # the same row must always give the same prompt
    del environment.globals["lipsum"]
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    return environment


class PromptTemplate:
    """A compiled template that turns rows into prompt texts. Several threads may use it at once.

    Args:
        source: Jinja text. Its variables are the row's columns, `row` (the whole row), and the entries of `values`.
        name: Name of the template in error messages, for example the option that it comes from.
        values: Further variables, such as `examples`. A column of the same name takes precedence.

    Raises:
        ConfigError: the template does not compile.
    """

    def __init__(self, source: str, *, name: str, values: dict[str, Any] | None = None) -> None:
        environment = _environment()
        self._name = name
        self._values = values or {}
        try:
            self._template = environment.from_string(source)
            tree = environment.parse(source)
        except (jinja2.TemplateError, RecursionError) as error:
            line = (
                f" (line {error.lineno})" if isinstance(error, jinja2.TemplateSyntaxError) else ""
            )
            raise ConfigError(
                f"{name}{line}: {error}, expected a Jinja template over the row's columns",
                hint="see the section on templates in docs/format.md",
            ) from error
        known = {"row", *self._values, *environment.globals}
        self.variables = meta.find_undeclared_variables(tree) - known
        """Columns that the template may read."""
        self.needed_columns = sorted(self.variables & _always_read(tree))
        """Columns without which every render fails, as far as the template's text shows it."""
        self.uses_system_prompt = "system_prompt" in meta.find_undeclared_variables(tree)

    def render(self, row: dict[str, Any]) -> str:
        """Return the prompt text of one row.

        Raises:
            RowProblem: the template failed. If the cause is a missing column, the message names that column.
        """
        try:
            text = self._template.render({"row": row, **self._values, **row})
            text.encode()
        except jinja2.UndefinedError as error:
            # A template may test whether a column exists, so the cause is only a column that Jinja's message names.
            missing = (
                each for each in self.variables if each not in row and f"'{each}'" in str(error)
            )
            name = next(missing, None)
            if name is None:
                raise RowProblem(Code.TEMPLATE_ERROR, f"{self._name}: {error}") from error
            raise RowProblem(
                Code.MISSING_COLUMN,
                f"{self._name}: column {name!r} is not in the row (it has: {', '.join(list(row)[:20])})"
                + near(name, row),
            ) from error
        except Exception as error:  # a template runs arbitrary expressions on the row
            message = f"{self._name}: {type(error).__name__}: {str(error)[:500]}"
            raise RowProblem(Code.TEMPLATE_ERROR, message) from error
        return text


def _always_read(tree: nodes.Template) -> set[str]:
    """Return the variables that a template writes outside of all conditions and loops."""
    outputs = [node for node in tree.body if isinstance(node, nodes.Output)]
    always = [part for node in outputs for part in node.nodes if not _may_be_absent(part)]
    found = {part.name for part in always if isinstance(part, nodes.Name)}
    return found | {name.name for part in always for name in part.find_all(nodes.Name)}


def _may_be_absent(part: nodes.Node) -> bool:
    """Whether an expression may work without a variable that it names."""
    choices = (nodes.CondExpr, nodes.Test, nodes.And, nodes.Or)
    filters = [part, *part.find_all(nodes.Filter)]
    has_default = any(getattr(each, "name", "") in ("default", "d") for each in filters)
    return has_default or isinstance(part, choices) or any(part.find_all(choices))


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
    prompt = PromptTemplate(template.source, name=f"--template {template.name}")
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
