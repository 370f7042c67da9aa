"""Templates that make prompts from the columns of a row: the named ones of ``--prompt-template``, and users' own.

They run in Jinja's sandbox, in the worker's own process: whoever writes a template owns the machine. The sandbox keeps
what a row holds from reaching anything but the row.
"""

from __future__ import annotations

import json
import re
from typing import Any

from jinja2 import StrictUndefined, TemplateError, TemplateSyntaxError, UndefinedError, meta
from jinja2.sandbox import ImmutableSandboxedEnvironment

from batchinfer.core.errors import ConfigError, near
from batchinfer.core.row_codes import Code
from batchinfer.prompts.json_lines import ID_FIELD, ROW_FIELD, column
from batchinfer.prompts.types import RowError

# The Alpaca format. Models that were trained on it expect exactly these words.
_ALPACA = """\
Below is an instruction that describes a task\
{{ ", paired with an input that provides further context" if input is defined and input }}. \
Write a response that appropriately completes the request.

### Instruction:
{{ instruction }}

{{ "### Input:\\n" ~ input ~ "\\n\\n" if input is defined and input }}### Response:"""


NAMED_TEMPLATES = {
    "alpaca": _ALPACA,
    "gpteacher": _ALPACA,
    "sharegpt": "",
    "completion": "{{ text }}",
}
"""Jinja texts over columns, by the NAME of ``--prompt-template NAME``. One without text stands for `CONVERSATIONS`."""
CONVERSATIONS = "conversations"
"""Column that holds the conversation of a row of ShareGPT."""


def template_text(given: str) -> str:
    """Return the Jinja text that a value of ``--prompt-template`` means: that of a named template, or the value itself.

    Raises:
        ConfigError: there is no template of this name. The message suggests the most similar one.
    """
    if given not in NAMED_TEMPLATES and re.fullmatch("[a-z-]+", given):
        known = f"expected one of {', '.join(NAMED_TEMPLATES)}{near(given, NAMED_TEMPLATES)}"
        hint = "a file of your own is named as ./FILE"
        raise ConfigError(f"--prompt-template {given}: no such template, {known}", hint=hint)
    return NAMED_TEMPLATES.get(given, given)


def _printed(value: Any) -> Any:
    """Refuse to print null, which Jinja would print as the word None."""
    if value is None:
        raise ValueError("it prints null; where a value may be missing, write {{ x or '' }}")
    return value


_ENVIRONMENT = ImmutableSandboxedEnvironment(
    finalize=_printed,
    trim_blocks=True,
    lstrip_blocks=True,
    undefined=StrictUndefined,
    extensions=["jinja2.ext.loopcontrols"],
)
# The same row must always give the same prompt.
del _ENVIRONMENT.filters["random"], _ENVIRONMENT.globals["lipsum"]
# Jinja's own filter escapes for HTML. A prompt needs the text unescaped.
_ENVIRONMENT.filters["tojson"] = lambda value, indent=None: json.dumps(
    value, ensure_ascii=False, indent=indent
)


class PromptTemplate:
    """A compiled template that turns rows into prompt texts. Several threads may use it at once.

    Args:
        source: Jinja text. Its variables are the row's columns, `row` (the whole row), and the entries of `values`.
        values: Further variables, such as `system_prompt`. A column of the same name takes precedence.

    Raises:
        ConfigError: the template does not compile.
    """

    def __init__(self, source: str, values: dict[str, Any]) -> None:
        self._values = values
        try:
            self._template = _ENVIRONMENT.from_string(source)
            read = meta.find_undeclared_variables(_ENVIRONMENT.parse(source))
        except (TemplateError, RecursionError) as error:
            line = f" (line {error.lineno})" if isinstance(error, TemplateSyntaxError) else ""
            text = f"--prompt-template{line}: {error}, expected Jinja over the row's columns"
            raise ConfigError(text, hint="docs/format.md has a section on templates") from error
        self.variables = sorted(read - {"row", *self._values, *_ENVIRONMENT.globals})
        """Columns that the template may read."""
        may_do_without = re.search(r"{%|\b(defined|default|d|if|or|and)\b", source)
        self.needed_columns = [] if may_do_without else self.variables
        """Columns without which every render fails, as far as the template's text shows it."""

    def render(self, row: dict[str, Any]) -> str:
        """Return the prompt text of one row.

        Raises:
            RowError: the template failed. If the cause is a missing column, the message names that column.
        """
        try:
            columns = {name: x for name, x in row.items() if name not in (ROW_FIELD, ID_FIELD)}
            text = self._template.render({**self._values, **row, "row": columns})
            text.encode()
        except Exception as error:  # a template runs arbitrary expressions on the row
            # A template may test whether a column exists, so the cause is only a column that Jinja's message names.
            missing = [x for x in self.variables if x not in row and f"'{x}'" in str(error)]
            if isinstance(error, UndefinedError) and missing:
                column(row, missing[0])
            message = f"--prompt-template: {type(error).__name__}: {str(error)[:500]}"
            raise RowError(Code.TEMPLATE_ERROR, message) from error
        return text
