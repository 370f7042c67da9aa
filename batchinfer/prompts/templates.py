"""Templates that make prompts from the columns of a row: the named ones of ``--prompt-template``, and users' own.

They run in Jinja's sandbox, in the worker's own process: whoever writes a template owns the machine. The sandbox keeps
what a row holds from reaching anything but the row.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, NamedTuple

from batchinfer.core.errors import ConfigError, near
from batchinfer.core.row_codes import Code
from batchinfer.prompts.json_lines import column
from batchinfer.prompts.types import RowProblem

if TYPE_CHECKING:
    from jinja2.sandbox import ImmutableSandboxedEnvironment

# The Alpaca format. Models that were trained on it expect exactly these words.
_ALPACA = """\
Below is an instruction that describes a task\
{{ ", paired with an input that provides further context" if input is defined and input }}. \
Write a response that appropriately completes the request.

### Instruction:
{{ instruction }}

{{ "### Input:\\n" ~ input ~ "\\n\\n" if input is defined and input }}### Response:"""


class NamedTemplate(NamedTuple):
    """A template that ``--prompt-template NAME`` selects. It has either Jinja text or a column with conversations."""

    description: str
    columns: list[str]
    """Columns that the template reads."""
    source: str
    """Jinja text over `columns`; empty if the first of them holds a conversation."""


_INPUT = ["instruction", "input"]
NAMED_TEMPLATES = {
    "alpaca": NamedTemplate(
        "instruction with an optional input, in the Alpaca format", _INPUT, _ALPACA
    ),
    "gpteacher": NamedTemplate("as alpaca", _INPUT, _ALPACA),
    "sharegpt": NamedTemplate(
        "a conversation of {from, value} turns, as a chat", ["conversations"], ""
    ),
    "completion": NamedTemplate("the column `text` as it is", ["text"], "{{ text }}"),
}
"""The templates of ``--prompt-template``, by their names."""


def find_template(given: str) -> NamedTemplate | None:
    """Return the named template that a value of ``--prompt-template`` names; None if the value is Jinja text.

    Raises:
        ConfigError: there is no template of this name. The message suggests the most similar one.
    """
    if given not in NAMED_TEMPLATES and re.fullmatch("[a-z-]+", given):
        raise ConfigError(
            f"--prompt-template {given}: no such template, expected one of {', '.join(NAMED_TEMPLATES)}"
            + near(given, NAMED_TEMPLATES),
            hint="`--prompt-template list` describes them; a file of your own is named as --prompt-template ./FILE",
        )
    return NAMED_TEMPLATES.get(given)


def _environment() -> ImmutableSandboxedEnvironment:
    from jinja2 import StrictUndefined
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
        extensions=["jinja2.ext.loopcontrols"],
    )
    # The same row must always give the same prompt.
    del environment.filters["random"], environment.globals["lipsum"]
    # Jinja's own filter escapes for HTML. A prompt needs the text unescaped.
    environment.filters["tojson"] = lambda value, indent=None: json.dumps(
        value, ensure_ascii=False, indent=indent
    )
    return environment


class PromptTemplate:
    """A compiled template that turns rows into prompt texts. Several threads may use it at once.

    Args:
        source: Jinja text. Its variables are the row's columns, `row` (the whole row), and the entries of `values`.
        values: Further variables, such as `system_prompt`. A column of the same name takes precedence.

    Raises:
        ConfigError: the template does not compile.
    """

    def __init__(self, source: str, values: dict[str, Any]) -> None:
        from jinja2 import TemplateError, TemplateSyntaxError, meta

        environment = _environment()
        self._values = values
        try:
            self._template = environment.from_string(source)
            read = meta.find_undeclared_variables(environment.parse(source))
        except (TemplateError, RecursionError) as error:
            line = f" (line {error.lineno})" if isinstance(error, TemplateSyntaxError) else ""
            raise ConfigError(
                f"--prompt-template{line}: {error}, expected a Jinja template over the row's columns",
                hint="see the section on templates in docs/format.md",
            ) from error
        self.variables = sorted(read - {"row", *self._values, *environment.globals})
        """Columns that the template may read."""
        may_do_without = re.search(r"{%|\b(defined|default|d|if|or|and)\b", source)
        self.needed_columns = [] if may_do_without else self.variables
        """Columns without which every render fails, as far as the template's text shows it."""

    def render(self, row: dict[str, Any]) -> str:
        """Return the prompt text of one row.

        Raises:
            RowProblem: the template failed. If the cause is a missing column, the message names that column.
        """
        from jinja2 import UndefinedError

        try:
            text = self._template.render({"row": row, **self._values, **row})
            text.encode()
        except Exception as error:  # a template runs arbitrary expressions on the row
            # A template may test whether a column exists, so the cause is only a column that Jinja's message names.
            missing = [
                each for each in self.variables if each not in row and f"'{each}'" in str(error)
            ]
            if isinstance(error, UndefinedError) and missing:
                column(row, missing[0])
            message = f"--prompt-template: {type(error).__name__}: {str(error)[:500]}"
            raise RowProblem(Code.TEMPLATE_ERROR, message) from error
        return text
