"""Options of commands, read off the structs that declare them; see `batchinfer.core.option_help`."""

from __future__ import annotations

import ast
import functools
import inspect
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

import click
import msgspec

from batchinfer.cli.help import SectionOption
from batchinfer.cli.values import FORMS, Kind, NumberRange, kind_of_type
from batchinfer.core import codec
from batchinfer.core.option_help import NO_OPTION, Opt
from batchinfer.core.shell import FromFile, in_bash

F = TypeVar("F", bound=Callable[..., Any])
S = TypeVar("S", bound=msgspec.Struct)
_METAVARS: dict[type, str] = {click.IntRange: "N", NumberRange: "X"}
LEFT_OUT = "options_left_out"
"""Attribute of a command's function: names of the declared options that the command does without."""


@dataclass(frozen=True, slots=True)
class Option:
    """One option, as the field of a struct declares it."""

    struct: type[msgspec.Struct]
    field: str
    """Name of the struct's field, and of click's parameter."""
    kind: Kind
    default: Any
    """Value of the field if the option is not given; None if the field has no default."""
    help: str
    mark: Opt

    @property
    def flag(self) -> str:
        """Spelling on the command line, without the negated spelling: ``--check`` for ``--check/--no-check``."""
        return self.mark.flag or "--" + self.field.replace("_", "-")

    @property
    def flags(self) -> str:
        """Spelling on the command line, with the negated one of a flag that may be on by default."""
        is_negatable = self.kind.click.get("is_flag") and self.default is not False
        return f"{self.flag}/--no-{self.flag[2:]}" if is_negatable else self.flag

    @property
    def section(self) -> str:
        """Section in help and in settings files."""
        return self.mark.section or getattr(self.struct, "SECTION", "")

    @property
    def value_if_not_given(self) -> Any:
        """The value that click gives when the option is not given; None if only `read` knows the default."""
        settings = self.kind.click
        if settings.get("multiple"):
            return ()
        is_path = isinstance(settings.get("type"), click.Path)
        return self.default if isinstance(self.default, int | float | str) and not is_path else None

    def read(self, given: Any) -> Any:
        """Convert the value that click has parsed to the configuration's value. Reads the file if the value names one.

        Raises:
            ConfigError: the value cannot be read.
        """
        if given is None or given in ((), "", self.value_if_not_given):
            return self.default
        value = self.kind.read(self.flag, given)
        return self.default if value in ([], {}) else value

    def spell(self, value: Any) -> list[tuple[str, str | FromFile | None]]:
        """Return the words of a command line that give the option this value.

        Each item is a flag and the word after it; None instead of the word if the flag takes no word. The list is empty
        if the option can be left out, because the value is the default.
        """
        if value == self.default:
            return []
        if self.kind.click.get("is_flag"):
            return [(self.flag if value else f"--no-{self.flag[2:]}", None)]
        return [(self.flag, word) for word in self.kind.write(value)]

    def decorate(self, function: F) -> F:
        """Add the option to a command."""
        default = self.value_if_not_given
        return click.option(
            *filter(None, (self.mark.short, self.flags, self.field)),
            cls=SectionOption,
            section=self.section,
            is_first=self.mark.is_first,
            default=default,
            show_default=default not in (None, (), "", False),
            metavar=self.mark.metavar or _METAVARS.get(type(self.kind.click.get("type"))),
            envvar=self.mark.variables or None,
            help=self.help,
            **self.kind.click,
        )(function)


@functools.cache
def options_of(struct: type[msgspec.Struct]) -> tuple[Option, ...]:
    """Return the options that a struct declares, and the structs in its fields, in their order."""
    hints, texts = get_type_hints(struct, include_extras=True), _texts(struct)
    found: list[Option] = []
    for field in msgspec.structs.fields(struct):
        mark, hint = _divided(hints[field.name])
        if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
            found += options_of(hint)
        elif mark is not NO_OPTION:
            kind = FORMS[mark.form] if mark.form else kind_of_type(hint)
            default = None if field.required else _default(field)
            found.append(Option(struct, field.name, kind, default, texts.get(field.name, ""), mark))
    return tuple(found)


def _divided(hint: Any) -> tuple[Opt, Any]:
    """Divide the annotation of a field into its mark and its type."""
    if get_origin(hint) is not Annotated:
        return Opt(), hint
    kind, *rest = get_args(hint)
    marks = [one for one in rest if isinstance(one, Opt)]
    others = [one for one in rest if not isinstance(one, Opt)]
    return marks[0] if marks else Opt(), Annotated[(kind, *others)] if others else kind


def _default(field: msgspec.structs.FieldInfo) -> Any:
    has_factory = field.default_factory is not msgspec.NODEFAULT
    return field.default_factory() if has_factory else field.default


def _texts(struct: type[msgspec.Struct]) -> dict[str, str]:
    """Return the texts below the fields of a struct's class, by field, on one line each."""
    found: dict[str, str] = {}
    name = ""
    for node in _classes(struct.__module__)[struct.__name__].body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            name = node.target.id
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and name:
            found[name] = " ".join(str(node.value.value).replace("``", "").split())
        if not isinstance(node, ast.AnnAssign):
            name = ""
    return found


@functools.cache
def _classes(module: str) -> dict[str, ast.ClassDef]:
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    return {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}


def options(
    struct: type[msgspec.Struct], *, only: Collection[str] = (), without: Collection[str] = ()
) -> Callable[[F], F]:
    """Return a decorator that adds the options of a struct to a command.

    Args:
        struct: The struct.
        only: Names of the fields whose options are wanted; empty for all.
        without: Names of the fields whose options are left out.
    """

    def decorate(function: F) -> F:
        left_out: frozenset[str] = getattr(function, LEFT_OUT, frozenset())
        left_out |= {name.lstrip("-").replace("-", "_") for name in without}
        for option in reversed(options_of(struct)):
            if option.field in without or (only and option.field not in only):
                left_out |= {option.field, option.flag[2:].replace("-", "_")}
            else:
                function = option.decorate(function)
                left_out -= {option.field}  # declared anew, in place of another struct's
        setattr(function, LEFT_OUT, left_out)
        return function

    return decorate


def values_of(struct: type[msgspec.Struct], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that options give to the own fields of a struct, by field. Reads the files that options name.

    Args:
        struct: The struct.
        given: Values that click has parsed, by the names of its parameters. Those that are missing are defaults.

    Raises:
        ConfigError: a value cannot be read.
    """
    return {
        option.field: option.read(given.get(option.field))
        for option in options_of(struct)
        if option.struct is struct
    }


def value_of(struct: type[msgspec.Struct], field: str, given: Mapping[str, Any]) -> Any:
    """Return the value that one option gives to a field of a struct.

    Raises:
        ConfigError: the value cannot be read.
    """
    (option,) = (each for each in options_of(struct) if each.field == field)
    return option.read(given.get(field))


def words_of(
    struct: type[msgspec.Struct],
    given: Mapping[str, Any],
    *,
    is_parsed: bool = False,
) -> Iterator[tuple[str, str]]:
    """Yield the words of bash that give a struct's options some values, each with the flag that it belongs to.

    Args:
        struct: The struct.
        given: The values, by field.
        is_parsed: Whether they are what click has parsed, so that the files that they name are still to be read.

    Raises:
        ConfigError: a value cannot be read.
    """
    for option in options_of(struct):
        if option.field in given:
            value = given[option.field]
            for flag, word in option.spell(option.read(value) if is_parsed else value):
                yield flag, flag if word is None else f"{flag} {in_bash(word)}"


def recorded_values(config: msgspec.Struct) -> dict[str, Any]:
    """Return the values of a configuration that run.json records for the command that resumes the run, by field."""
    found: dict[str, Any] = {}
    parts = [config, *(getattr(config, name) for name in config.__struct_fields__)]
    for part in parts:
        if isinstance(part, msgspec.Struct):
            found |= {
                option.field: getattr(part, option.field)
                for option in options_of(type(part))
                if option.struct is type(part)
                and option.mark.is_recorded
                and getattr(part, option.field) != option.default
            }
    return found


def read_recorded(struct: type[msgspec.Struct], recorded: Any) -> dict[str, Any]:
    """Return the values of a struct's options that run.json records, by field; whatever else it holds is left out.

    Raises:
        msgspec.ValidationError: a value is not of its option's type.
    """
    found = codec.convert(recorded, dict[str, Any])
    return {
        option.field: codec.convert(
            found[option.field], get_type_hints(option.struct)[option.field]
        )
        for option in options_of(struct)
        if option.mark.is_recorded and option.field in found
    }
