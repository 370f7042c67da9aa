"""The class for an option of a run, and help that shows options in sections.

The options themselves are rows of the table `batchinfer.cli.run_options.OPTIONS`. Each row defines the option of the
command line with its help, its environment variable, its key in settings files, and the value in the configuration. It
also defines how the option is written in the command that resumes a run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import click

from batchinfer.cli.values import Kind
from batchinfer.core.shell import FromFile

F = TypeVar("F", bound=Callable[..., Any])

SECTIONS = ("input", "model", "engine", "prompt", "media", "sampling", "output", "behaviour")
"""Sections of a run's options, in help and in settings files."""
FIRST = "what a first run needs"
LOOK = "a look before working"
COMMON = "settings and logs"
ENDPOINT = "endpoint, with --engine openai"
REHEARSAL = "rehearsal, with --engine echo"
_OTHERS = "options"
_HELP_ORDER = (_OTHERS, FIRST, *SECTIONS, ENDPOINT, LOOK, COMMON, REHEARSAL)


@dataclass(frozen=True, slots=True)
class Option:
    """One option of a run."""

    flags: str
    """Spelling on the command line: ``--top-k``, or ``--steal/--no-steal``."""
    kind: Kind
    help: str
    default: Any = None
    """Default, in a form that click accepts. None: there is no default, or `kind` defines the default."""
    name: str = ""
    """Name of click's parameter, if it differs from the flag's name. Settings files accept both names."""
    section: str = ""
    """Section of help. Empty: the section of the option's group."""
    is_first: bool = False
    """Whether help shows the option among the few that a first run needs."""
    struct: str | None = None
    """Name of the struct of the configuration that has a field for the value. Empty: no struct has such a field. None:
    the struct is that of the option's group."""
    field: str = ""
    """Name of the struct's field, if it differs from the name of click's parameter."""
    recorded: str = ""
    """Part of run.json that holds the value, such as ``config`` or ``recorded``. Empty: run.json keeps the value in the
    part with the struct's name, or not at all."""
    metavar: str | None = None
    envvar: Sequence[str] | None = None
    """Environment variables, if they are not just BATCHINFER_<COMMAND>_<OPTION>."""

    @property
    def flag(self) -> str:
        """Spelling on the command line, without the negated spelling: ``--steal`` for ``--steal/--no-steal``."""
        return self.flags.partition("/")[0]

    @property
    def parameter(self) -> str:
        """Name of click's parameter."""
        return self.name or self.flag.lstrip("-").replace("-", "_")

    @property
    def target(self) -> str:
        """Name of the struct's field."""
        return self.field or self.parameter

    @property
    def part(self) -> str:
        """Part of run.json that holds the value; empty if no part holds it."""
        return self.recorded or self.struct or ""

    @property
    def value_if_not_given(self) -> Any:
        """The value that click gives when the option is not on the command line."""
        return (self.kind.click | self._click_default).get("default")

    @property
    def _click_default(self) -> dict[str, Any]:
        return {} if self.default is None else {"default": self.default}

    def read(self, given: Any) -> Any:
        """Convert the value that click has parsed to the configuration's value. Reads the file if the value names one.

        Raises:
            ConfigError: the value cannot be read.
        """
        return self.kind.read(self.flag, given)

    def spell(self, value: Any) -> list[tuple[str, str | FromFile | None]]:
        """Return the words of a command line that give the option this value.

        Each item is a flag and the word after it; None instead of the word if the flag takes no word. The list is empty
        if the option can be left out, because the value is the default or an empty one.
        """
        settings = self.kind.click | self._click_default
        if value == self.read(self.value_if_not_given):
            return []
        if settings.get("is_flag"):
            return [(self.flag if value else self.flags.partition("/")[2], None)]
        return [(self.flag, word) for word in self.kind.write(value)]

    def decorate(self, function: F) -> F:
        """Add the option to a command."""
        return click.option(
            self.flags,
            self.parameter,
            cls=SectionOption,
            section=FIRST if self.is_first else self.section,
            **self.kind.click | self._click_default,
            show_default=self.default is not None and self.default not in ("", "{}"),
            metavar=self.metavar,
            envvar=self.envvar,
            help=self.help,
        )(function)


def group(section: str, struct: str, *options: Option) -> tuple[Option, ...]:
    """Return options with a section and a struct that they share. An option's own section or struct wins."""
    return tuple(
        replace(
            option,
            section=option.section or section,
            struct=struct if option.struct is None else option.struct,
        )
        for option in options
    )


# --------------------------------------------------------------------------- help in sections


class SectionOption(click.Option):
    """An option of click's with the section in which help shows it."""

    def __init__(self, *arguments: Any, section: str, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.section = section


class SectionCommand(click.Command):
    """A command whose help shows options in sections."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """See click.Command."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None and isinstance(parameter, click.Option):
                rest = COMMON if parameter is self.get_help_option(ctx) else _OTHERS
                section = parameter.section if isinstance(parameter, SectionOption) else rest
                sections.setdefault(section, []).append(record)
        for section in sorted(sections, key=_HELP_ORDER.index):
            with formatter.section(section.capitalize()):
                formatter.write_dl(sections[section])
