"""Jinja with limits: a template can fail on a row, but it cannot hang the worker or fill its memory.

Jinja's own sandbox forbids private attributes and changes to the data. This module adds a limit on the number of
loop rounds and calls in one render, and a limit on the length of texts. The limits are counts, not seconds, so that a
row renders either on every machine or on none. They protect against accidents, for example a row that makes a template
loop for very long. They are no protection from a hostile author: a template from an unknown source is code, so read it
before use.

Widths (of `ljust`, `center`, `indent` and formats) are checked before the text is made. The limit on length is checked
on the finished text, which is too late: `'x'.ljust(3 * 10**9)` would have taken 3 GB by then.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from batchinfer.core.errors import ConfigError
from batchinfer.prompts.types import Code, RowProblem

MAX_STEPS = 200_000
"""Largest number of loop rounds and function calls in one render."""
MAX_CHARS = 32_000_000
"""Largest number of characters in a rendered prompt or a text inside a template. No model can read as many."""
MAX_RANGE = 10_000
"""Largest number of items in a `range` inside a template."""
MAX_WIDTH = 1_000_000
"""Largest number of characters to which a template may pad or indent a text."""

_WIDE_FORMAT = re.compile(r"\d{7,}")
_REFUSED_NODES = (nodes.Include, nodes.Import, nodes.FromImport, nodes.Extends)


class LimitExceeded(jinja2.TemplateError):
    """The template went over one of the limits."""


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """A Jinja environment with the limits of this module."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, *, undefined: type[jinja2.Undefined]) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            undefined=undefined,
            extensions=["jinja2.ext.loopcontrols"],
        )
        self._budget = threading.local()
        kept = {"dict", "namespace", "joiner", "cycler"}
        self.globals = {name: value for name, value in self.globals.items() if name in kept}
        self.globals["range"] = _bounded_range
        self.globals["raise_exception"] = _raise_exception
        # The same row must always give the same prompt.
        del self.filters["random"]
        for name in ("center", "indent", "slice", "batch", "format", "replace", "join"):
            self.filters[name] = _bounded_filter(name, self.filters[name])
        self.filters["tojson"] = _tojson
        self.filters["_counted"] = self._counted
        self.filters["_concatenated"] = _concatenated

    def start(self) -> None:
        """Give the calling thread MAX_STEPS steps. `Template.render` calls this before every render."""
        self._budget.steps = MAX_STEPS

    def spend(self) -> None:
        """Count one loop round or call as a step of the present render.

        Raises:
            LimitExceeded: the render has no steps left.
        """
        self._budget.steps -= 1
        if self._budget.steps < 0:
            raise LimitExceeded(f"more than {MAX_STEPS} loop rounds and calls")

    def _counted(self, items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            self.spend()
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
            loop.iter = _filtered(loop.iter, "_counted")
        return _Concatenations().visit(tree)  # type: ignore[no-any-return]

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805, PYI063 -- Jinja's signature, which leaves every keyword free
        """Call a function for a template. It counts as one step. Arguments of a text's method are checked before."""
        __self.spend()
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str):
            _check_text_method(getattr(__obj, "__name__", ""), owner, args)
        return super().call(__context, __obj, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Wrap the `format` method of a text, so that its widths are checked. Jinja runs this method without `call`."""
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None

        def bounded(*args: Any, **kwargs: Any) -> str:
            _check_format(value.__self__, [*args, *kwargs.values()])
            return wrapped(*args, **kwargs)

        return bounded

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Apply one of the operators in `intercepted_binops`, after a check that its result will not be too large."""
        if operator == "**":
            _check_power(left, right)
        elif operator == "*":
            for value, times in ((left, right), (right, left)):
                if isinstance(value, str | list | tuple) and isinstance(times, int):
                    _check_size(len(value) * times)
        elif operator == "+":
            if isinstance(left, str | list | tuple) and isinstance(right, str | list | tuple):
                _check_size(len(left) + len(right))
        elif isinstance(left, str):
            _check_format(left, right if isinstance(right, tuple) else ())
        return super().call_binop(context, operator, left, right)


class _Concatenations(NodeTransformer):
    """Turns the operator ``~`` into a filter with a size check, because `intercepted_binops` cannot include it."""

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802 -- the visitor's protocol
        parts = [self.visit(part) for part in node.nodes]
        return _filtered(nodes.List(parts, lineno=node.lineno), "_concatenated")


def _filtered(node: nodes.Node, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _constant(node: nodes.Node) -> Any:
    return node.value if isinstance(node, nodes.Const) else None


def _check_size(num_chars: int) -> None:
    if num_chars > MAX_CHARS:
        raise LimitExceeded(f"a text or list of {num_chars} elements, at most {MAX_CHARS}")


def _check_width(arguments: Iterable[Any]) -> None:
    for argument in arguments:
        if isinstance(argument, int) and abs(argument) > MAX_WIDTH:
            raise LimitExceeded(f"a width of {argument}, at most {MAX_WIDTH}")


def _check_power(base: Any, exponent: Any) -> None:
    if isinstance(base, int) and isinstance(exponent, int):
        _check_width([max(abs(base), 2).bit_length() * exponent])


def _check_format(text: str, arguments: Iterable[Any]) -> None:
    # A width stands either in the format itself ("%9d") or among the arguments ("%*d").
    _check_width(arguments)
    if _WIDE_FORMAT.search(text):
        raise LimitExceeded("a format that pads to millions of characters")


def _check_text_method(name: str, text: str, arguments: tuple[Any, ...]) -> None:
    _check_width(arguments)
    if name == "replace" and len(arguments) >= 2:
        _check_size(len(text) + text.count(str(arguments[0])) * len(str(arguments[1])))
    elif name == "join" and arguments and isinstance(arguments[0], list | tuple):
        _check_size(len(text) * len(arguments[0]))


def _bounded_filter(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    # Some filters want Jinja's context or environment as their first argument. Jinja sees this from an attribute of
    # the filter function, so the wrapper gets the same attributes.
    def bounded(*args: Any, **kwargs: Any) -> Any:
        _check_width(args)
        _check_width(kwargs.values())
        texts = [arg for arg in args if isinstance(arg, str)]
        if name == "format" and texts:
            _check_format(texts[0], ())
        if name == "replace" and len(texts) >= 3:
            _check_size(len(texts[0]) + texts[0].count(texts[1]) * len(texts[2]))
        return original(*args, **kwargs)

    bounded.__dict__.update(original.__dict__)
    return bounded


def _bounded_range(*args: int) -> range:
    numbers = range(*args)
    if len(numbers) > MAX_RANGE:
        raise LimitExceeded(f"a range of {len(numbers)} numbers, at most {MAX_RANGE}")
    return numbers


def _concatenated(parts: list[Any]) -> str:
    texts = [str(part) for part in parts]
    _check_size(sum(map(len, texts)))
    return "".join(texts)


def _tojson(value: Any, indent: int | None = None) -> str:
    # Jinja's own filter escapes for HTML. A prompt needs the text unescaped.
    _check_width([indent])
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def compile_template(source: str, *, name: str, undefined: type[jinja2.Undefined]) -> Template:
    """Compile a template.

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
    """A compiled template. Rendering is pure and may be done by several threads at once."""

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
            RowProblem: rendering failed in another way, or went over a limit.
        """
        self._environment.start()
        pieces = []
        num_chars = 0
        try:
            for piece in self._template.generate(values):
                num_chars += len(piece)
                _check_size(num_chars)
                pieces.append(piece)
            text = "".join(pieces)
            text.encode()
        except jinja2.UndefinedError:
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
