"""What an option of a run is: how it is spelled, which field it fills, and how a recorded value is spelled again.

The options themselves are rows of a table, `batchinfer.cli.run_options`. From a row come the option of the command line
with its help, its variable and its key in settings files, the value in the configuration, and the word in the command
that goes on with a run.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import click

from batchinfer.core.errors import ConfigError

F = TypeVar("F", bound=Callable[..., Any])

SECTIONS = ("input", "model", "engine", "prompt", "sampling", "output", "behaviour")
"""Sections of a run's options, in help and in settings files."""
FIRST = "what a first run needs"
LOOK = "a look before working"
COMMON = "settings and logs"
REHEARSAL = "rehearsal, with --engine echo"
_OTHERS = "options"
_HELP_ORDER = (_OTHERS, FIRST, *SECTIONS, LOOK, COMMON, REHEARSAL)


# --------------------------------------------------------------------------- kinds of values


class FromFile(NamedTuple):
    """A text that a command takes from a file."""

    text: str
    prefix: str = ""
    """What stands before the file's name on the command line."""


class Kind(NamedTuple):
    """How the values of an option are spelled."""

    click: dict[str, Any]
    """Arguments of click.Option: how the command line and its variables are parsed."""
    read: Callable[[str, Any], Any]
    """The value in the configuration. Takes the option's flag, for messages, and what click has parsed."""
    write: Callable[[Any], Sequence[str | FromFile]]
    """The way back: one word for each time that the option is given; none where it need not be given."""


def _write_plain(value: Any) -> list[str]:
    return [] if value in (None, "") else [str(value)]


def _plain(kind: click.ParamType[Any] | type) -> Kind:
    """Values that the configuration has as click parses them."""
    return Kind({"type": kind}, lambda _flag, given: given, _write_plain)


TEXT = _plain(str)
WHOLE = _plain(int)
NUMBER = _plain(float)
FLAG = _plain(bool)._replace(click={"is_flag": True, "default": False})
FLAG_OR_UNSET = _plain(bool)._replace(click={"is_flag": True, "default": None})


def at_least(least: int) -> Kind:
    """Whole numbers from `least` on."""
    return _plain(click.IntRange(least))


def number_from(least: float, most: float | None = None, *, is_open: bool = False) -> Kind:
    """Numbers from `least` on, or above it where `is_open`, up to `most` if given."""
    return _plain(click.FloatRange(least, most, min_open=is_open))


def one_of(*names: str) -> Kind:
    """One of some names."""
    return _plain(click.Choice(names))


def whole_or(word: str, meaning: str | None) -> Kind:
    """A whole number, or a word that stands for `meaning`."""

    def read(flag: str, given: Any) -> Any:
        return meaning if str(given).lower() == word else _integer(flag, given, f" or {word}")

    return Kind({"type": str}, read, lambda value: [word if value == meaning else str(value)])


def _integer(flag: str, text: Any, alternative: str = "") -> int:
    try:
        return int(text)
    except (TypeError, ValueError):
        raise ConfigError(f"{flag}: is {text!r}, expected a whole number{alternative}") from None


def _split_commas(text: str | None) -> list[str]:
    return [part.strip() for part in (text or "").split(",") if part.strip()]


def _write_commas(value: Any) -> list[str]:
    return _write_plain(",".join(map(str, value or ())))


NAMES = Kind({"type": str}, lambda _flag, given: _split_commas(given), _write_commas)
"""Names with commas between; a list, perhaps empty."""
NAMES_OR_NONE = NAMES._replace(read=lambda _flag, given: _split_commas(given) or None)


def _read_integers(flag: str, given: str | None) -> list[int] | None:
    return [_integer(flag, part) for part in _split_commas(given)] or None


INTEGERS = Kind({"type": str}, _read_integers, _write_commas)
"""Whole numbers with commas between; None for none."""


def _read_two(flag: str, given: str | None) -> tuple[int, int] | None:
    if not given:
        return None
    parts = _read_integers(flag, given) or []
    if len(parts) != 2:
        raise ConfigError(f"{flag} {given!r}: expected two numbers, e.g. 5,50")
    return parts[0], parts[1]


TWO_INTEGERS = Kind({"type": str}, _read_two, _write_commas)

REPEATED = Kind(
    {"type": str, "multiple": True},
    lambda _flag, given: list(given or ()) or None,
    lambda value: list(value or ()),
)
"""An option that may be given several times; None where it is not given."""


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _read_object(flag: str, given: str) -> dict[str, Any]:
    try:
        value = json.loads(given)
    except ValueError as error:
        raise ConfigError(f"{flag}: not JSON ({error})") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{flag}: expected a JSON object")
    return value


JSON_OBJECT = Kind({"type": str}, _read_object, lambda value: [_json(value)])

_NAME = re.compile(r"\s*([A-Za-z_][A-Za-z0-9_.-]*)\s*=\s*")
_NEXT = re.compile(r"\s*,(?=\s*[A-Za-z_][A-Za-z0-9_.-]*\s*=)")
_WORDS: dict[str, Any] = {"true": True, "false": False, "none": None}
_decode_json = json.JSONDecoder().raw_decode


def read_pairs(flag: str, arguments: Iterable[str]) -> dict[str, Any]:
    """Read NAME=VALUE pairs; an argument may hold several, with commas between. Pure.

    A value is JSON where it can be (commas inside belong to it), else text up to the next pair. Of equal names the
    last one counts.

    Raises:
        ConfigError: an argument that does not begin with NAME=.

    >>> read_pairs("--sampling", ['top_k=20,do_sample=true,bad_words=["a,b=c", "d"]', "stop=,"])
    {'top_k': 20, 'do_sample': True, 'bad_words': ['a,b=c', 'd'], 'stop': ','}
    """
    found: dict[str, Any] = {}
    for argument in arguments:
        position = 0
        while position < len(argument):
            match = _NAME.match(argument, position)
            if match is None:
                raise ConfigError(
                    f"{flag} {argument[position:]!r}: expected NAME=VALUE",
                    hint=f"several pairs have commas between them: {flag} top_k=20,min_p=0.1",
                )
            value, position = _read_value(argument, match.end())
            found[match[1].replace("-", "_")] = value
    return found


def _read_value(text: str, start: int) -> tuple[Any, int]:
    """The value that begins at `start`, and where the next pair begins."""
    try:
        value, end = _decode_json(text, start)
    except ValueError:
        pass
    else:
        after = _NEXT.match(text, end)
        if after is not None:
            return value, after.end()
        if text[end:].strip() in ("", ","):
            return value, len(text)
    after = _NEXT.search(text, start)
    end, position = (after.start(), after.end()) if after else (len(text), len(text))
    word = text[start:end]
    return _WORDS.get(word.lower(), word), position


PAIRS = Kind(
    {"type": str, "multiple": True},
    lambda flag, given: read_pairs(flag, given or ()),
    lambda value: [f"{name}={_json(item)}" for name, item in value.items()],
)
"""NAME=VALUE pairs, as a mapping."""


def _read_file(flag: str, path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{flag} {path}: cannot be read ({error})") from error


def _read_text(flag: str, given: str) -> str:
    """Return a text as it is, or the content of the file that is named after @.

    Raises:
        ConfigError: the file cannot be read, or the text is the name of a file.
    """
    if given.startswith("@"):
        return _read_file(flag, Path(given[1:]))
    with contextlib.suppress(OSError):  # too long for a name
        if given and Path(given).is_file():
            raise ConfigError(
                f"{flag} {given}: is the name of a file, expected a text, or @ before the name",
                hint=f"write {flag} @{given}",
            )
    return given


def _write_text(value: str) -> Sequence[str | FromFile]:
    return [FromFile(value, "@")] if value.startswith("@") else _write_plain(value)


TEXT_OR_FILE = Kind({"type": str}, _read_text, _write_text)
"""A text, or @ and the name of a file with the text."""


def _read_template(flag: str, given: str) -> str:
    template = _read_text(flag, given)
    if template and "{{" not in template and "{%" not in template:
        shown = given if len(given) <= 60 else f"{given[:59]}…"
        raise ConfigError(
            f"{flag} {shown}: holds neither {{{{ nor {{%, so every prompt would be the same; "
            "expected a Jinja template",
            hint=f"write {flag} @FILE to take it from a file",
        )
    return template


TEMPLATE = TEXT_OR_FILE._replace(read=_read_template)

_PATH = {"type": click.Path(path_type=Path)}
FOLDER = Kind(_PATH, lambda _flag, given: str(given) if given else None, _write_plain)
FILE = Kind(
    _PATH,
    lambda flag, given: _read_file(flag, given) if given else "",
    lambda value: [FromFile(value)] if value else [],
)
"""The name of a file; the configuration has its text."""


def _read_rows(flag: str, path: Path | None) -> list[dict[str, Any]]:
    lines = _read_file(flag, path).split("\n") if path else []
    try:
        return [json.loads(line) for line in lines if line.strip()]
    except ValueError as error:
        raise ConfigError(f"{flag} {path}: not JSON Lines ({error})") from error


def _write_rows(value: list[Any]) -> list[FromFile]:
    return [FromFile("".join(f"{_json(row)}\n" for row in value))] if value else []


FILE_OF_ROWS = Kind(_PATH, _read_rows, _write_rows)
"""The name of a JSON Lines file; the configuration has its rows."""


# --------------------------------------------------------------------------- an option


@dataclass(frozen=True, slots=True)
class Option:
    """One row of the table: everything about an option."""

    flags: str
    """As on the command line: ``--top-k``, or ``--steal/--no-steal``."""
    kind: Kind
    help: str
    default: Any = None
    """As a user would spell it. None: no default, or what the kind says."""
    name: str = ""
    """Name of click's parameter, if not that of the flag; settings files may use either."""
    section: str = ""
    """Where help shows it. Empty: in the section of its group."""
    is_first: bool = False
    """Whether help shows it among the few that a first run needs."""
    config: str | None = None
    """Name of the struct that has a field for it; empty: no struct has; None: that of its group."""
    field: str = ""
    """The struct's field, if it has another name than the parameter."""
    recorded: str = ""
    """Part of run.json that keeps the value, where the struct is not kept as a whole: ``config`` or ``recorded``."""
    metavar: str | None = None
    envvar: Sequence[str] | None = None
    """Variables, where there are others than BATCHINFER_<COMMAND>_<OPTION>."""

    @property
    def flag(self) -> str:
        """The spelling without its negation."""
        return self.flags.partition("/")[0]

    @property
    def parameter(self) -> str:
        """What click calls it."""
        return self.name or self.flag.lstrip("-").replace("-", "_")

    @property
    def target(self) -> str:
        """The field that it fills."""
        return self.field or self.parameter

    @property
    def _click_default(self) -> dict[str, Any]:
        return {} if self.default is None else {"default": self.default}

    def read(self, given: Any) -> Any:
        """Turn what click has parsed into the configuration's value. Reads the file that an option names.

        Raises:
            ConfigError: the value cannot be read.
        """
        return self.kind.read(self.flag, given)

    def spell(self, value: Any) -> list[tuple[str, str | FromFile | None]]:
        """Return flags that give this value of the configuration, each with its word, or None where it takes none.

        Empty where the value is the default, or is spelled by leaving the option out.
        """
        settings = self.kind.click | self._click_default
        if value == self.read(settings.get("default")):
            return []
        if settings.get("is_flag"):
            return [(self.flag if value else self.flags.partition("/")[2], None)]
        return [(self.flag, word) for word in self.kind.write(value)]

    def decorate(self, function: F) -> F:
        """Give a command this option."""
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


def group(section: str, config: str, *options: Option) -> tuple[Option, ...]:
    """Rows that are in this section and fill fields of this struct, where they do not say otherwise."""
    return tuple(
        replace(
            option,
            section=option.section or section,
            config=config if option.config is None else option.config,
        )
        for option in options
    )


# --------------------------------------------------------------------------- help in sections


class SectionOption(click.Option):
    """An option that help shows in a section."""

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
