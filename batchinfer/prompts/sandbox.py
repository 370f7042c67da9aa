"""Compiles and renders Jinja templates, with the bounds that are cheap to keep: refused tags, and counts.

Jinja's own sandbox forbids private attributes and changes to the data. This module refuses templates that load others,
and it counts loop rounds, calls and the characters of the result. The counts end a template that loops for very long at
the same place on every machine, so that its row fails on every machine.

The counts do not bound memory or time: a single expression can ask for gigabytes or for hours. Templates of users are
therefore compiled and rendered in a process with hard limits (render_process.py). Only the named templates of this
package may be rendered elsewhere.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from batchinfer.core.errors import ConfigError
from batchinfer.prompts.types import Code, RowProblem

MAX_STEPS = 200_000
"""Largest number of loop rounds and function calls in one render."""
MAX_CHARS = 32_000_000
"""Largest number of characters in a rendered prompt."""
MAX_RANGE = 10_000
"""Largest number of items in a `range` inside a template."""

_REFUSED_NODES = (nodes.Include, nodes.Import, nodes.FromImport, nodes.Extends)


class LimitExceeded(jinja2.TemplateError):
    """The template went over one of the limits."""


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """A Jinja environment with the limits of this module. It renders one text at a time."""

    def __init__(self, *, undefined: type[jinja2.Undefined]) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            undefined=undefined,
            extensions=["jinja2.ext.loopcontrols"],
        )
        self._steps_left = MAX_STEPS
        kept = {"dict", "namespace", "joiner", "cycler"}
        self.globals = {name: value for name, value in self.globals.items() if name in kept}
        self.globals["range"] = _bounded_range
        self.globals["raise_exception"] = _raise_exception
        # The same row must always give the same prompt.
        del self.filters["random"]
        self.filters["tojson"] = _tojson
        self.filters["_counted"] = self._counted

    def start(self) -> None:
        """Begin a render, which may take MAX_STEPS steps."""
        self._steps_left = MAX_STEPS

    def _spend(self) -> None:
        self._steps_left -= 1
        if self._steps_left < 0:
            raise LimitExceeded(f"more than {MAX_STEPS} loop rounds and calls")

    def _counted(self, items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            self._spend()
            yield item

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for kind in _REFUSED_NODES:
            for node in tree.find_all(kind):
                raise jinja2.TemplateSyntaxError("templates cannot load others", node.lineno)
        for getter in tree.find_all((nodes.Getattr, nodes.Getitem)):
            key = getter.attr if isinstance(getter, nodes.Getattr) else _constant(getter.arg)  # type: ignore[attr-defined]
            if isinstance(key, str) and key.startswith("__"):
                raise jinja2.TemplateSyntaxError(f"attribute {key!r} is private", getter.lineno)
        for loop in tree.find_all(nodes.For):
            loop.iter = nodes.Filter(
                loop.iter, "_counted", [], [], None, None, lineno=loop.iter.lineno
            )
        return tree

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805, PYI063 -- Jinja's signature, which leaves every keyword free
        """Call a function for a template. It counts as one step."""
        __self._spend()
        return super().call(__context, __obj, *args, **kwargs)


def _constant(node: nodes.Node) -> Any:
    return node.value if isinstance(node, nodes.Const) else None


def _bounded_range(*args: int) -> range:
    numbers = range(*args)
    if len(numbers) > MAX_RANGE:
        raise LimitExceeded(f"a range of {len(numbers)} numbers, at most {MAX_RANGE}")
    return numbers


def _tojson(value: Any, indent: int | None = None) -> str:
    # Jinja's own filter escapes for HTML. A prompt needs the text unescaped.
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def compile_template(source: str, *, name: str, undefined: type[jinja2.Undefined]) -> Template:
    """Compile a template. Jinja computes constant expressions meanwhile, so this alone can take much time and memory.

    Args:
        source: Jinja text.
        name: Name of the template in error messages, for example the option that it comes from.
        undefined: Jinja class that stands for a missing variable. It decides whether using the variable is an error.

    Raises:
        ConfigError: the template does not compile, loads other templates or uses private attributes.
    """
    environment = BoundedEnvironment(undefined=undefined)
    try:
        return Template(environment, environment.from_string(source), name)
    except (jinja2.TemplateError, RecursionError) as error:
        line = f" (line {error.lineno})" if isinstance(error, jinja2.TemplateSyntaxError) else ""
        raise ConfigError(
            f"{name}{line}: {error}, expected a Jinja template over the row's columns",
            hint="see the section on templates in docs/format.md",
        ) from error


class Template:
    """A compiled template, for one thread at a time."""

    def __init__(
        self, environment: BoundedEnvironment, template: jinja2.Template, name: str
    ) -> None:
        self._environment = environment
        self._template = template
        self._name = name

    @property
    def global_names(self) -> set[str]:
        """Names that every template may use, such as `range`."""
        return set(self._environment.globals)

    def render(self, values: dict[str, Any]) -> str:
        """Return the text that the template makes with these variables.

        Raises:
            jinja2.UndefinedError: a variable is missing, and missing variables are refused.
            MemoryError: the text or a value on the way to it does not fit in memory.
            RowProblem: rendering failed in another way, or went over a limit.
        """
        self._environment.start()
        pieces = []
        num_chars = 0
        try:
            for piece in self._template.generate(values):
                num_chars += len(piece)
                if num_chars > MAX_CHARS:
                    raise LimitExceeded(f"a text of {num_chars} characters, at most {MAX_CHARS}")
                pieces.append(piece)
            text = "".join(pieces)
            text.encode()
        except (jinja2.UndefinedError, MemoryError):
            raise
        except UnicodeEncodeError as error:
            raise RowProblem(
                Code.TEMPLATE_ERROR, f"{self._name}: wrote a lone surrogate, expected Unicode text"
            ) from error
        except Exception as error:  # a template runs arbitrary expressions on the row
            raise RowProblem(
                Code.TEMPLATE_ERROR, f"{self._name}: {type(error).__name__}: {str(error)[:500]}"
            ) from error
        return text
