"""Kinds of options' values: how a command line's word becomes the configuration's value, and the other way round.

The second direction is for the command that resumes a run: the values in run.json are written as words again.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click

from batchinfer.core.errors import ConfigError
from batchinfer.core.redaction import redact
from batchinfer.core.shell import FromFile


class Kind(NamedTuple):
    """One kind of values. `read` converts a word of the command line to a value, and `write` does the opposite."""

    click: dict[str, Any]
    """Arguments of click.Option that say how click parses the option's word."""
    read: Callable[[str, Any], Any]
    """Function that converts the value that click has parsed to the configuration's value. Its first argument is the
    option's flag, which error messages name."""
    write: Callable[[Any], Sequence[str | FromFile]]
    """Function that converts the configuration's value to words. The option is given once for each word."""


def _write_plain(value: Any) -> list[str]:
    return [] if value in (None, "") else [str(value)]


def _plain(kind: click.ParamType[Any] | type) -> Kind:
    """Return a kind whose values need no conversion after click has parsed them, such as numbers."""
    return Kind({"type": kind}, lambda _flag, given: given, _write_plain)


TEXT = _plain(str)


WHOLE = _plain(int)
NUMBER = _plain(float)
FLAG = _plain(bool)._replace(click={"is_flag": True, "default": False})
FLAG_OR_NONE = _plain(bool)._replace(click={"is_flag": True, "default": None})


class NumberRange(click.FloatRange):
    """A range of numbers as click's, which also refuses infinity, and "nan", which click takes to be in every range."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """See click.ParamType."""
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a number.", param, ctx)
        return number


def at_least(least: int, most: int | None = None) -> Kind:
    """Return the kind of whole numbers from `least` on, and up to `most` if it is given."""
    return _plain(click.IntRange(least, most))


def number_from(least: float, most: float | None = None, *, is_open: bool = False) -> Kind:
    """Return the kind of numbers from `least` to `most`. If `is_open`, `least` itself is excluded."""
    return _plain(NumberRange(least, most, min_open=is_open))


def one_of(*names: str) -> Kind:
    """Return the kind of values that are one of some names."""
    return _plain(click.Choice(names))


def whole_or(word: str, meaning: str | None) -> Kind:
    """Return the kind of values that are a whole number or `word`. `word` becomes `meaning` in the configuration."""

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
"""Names with commas between. The configuration has a list, which may be empty."""
NAMES_OR_NONE = NAMES._replace(read=lambda _flag, given: _split_commas(given) or None)
"""Names with commas between. The configuration has None in place of an empty list."""


def _read_integers(flag: str, given: str | None) -> list[int] | None:
    return [_integer(flag, part) for part in _split_commas(given)] or None


INTEGERS = Kind({"type": str}, _read_integers, _write_commas)
"""Whole numbers with commas between. The configuration has None in place of an empty list."""

REPEATED = Kind(
    {"type": str, "multiple": True},
    lambda _flag, given: list(given or ()) or None,
    lambda value: list(value or ()),
)
"""Texts. The option is repeated for each text. The configuration has None in place of an empty list."""
REPEATED_LIST = REPEATED._replace(read=lambda _flag, given: list(given or ()))
"""Texts. The option is repeated for each text. The configuration has a list, which may be empty."""


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _shallow(flag: str, text: str) -> str:
    """Return an option's text. It becomes a part of run.json, which readers refuse if it is nested too deep.

    Raises:
        ConfigError: The text is JSON that is nested too deep.
    """
    from batchinfer.core.json_text import MAX_DEPTH, is_deep

    if is_deep(text.encode(errors="replace"), MAX_DEPTH // 2):
        raise ConfigError(
            f"{flag}: JSON nested deeper than {MAX_DEPTH // 2} levels", hint="make it flatter"
        )
    return text


def _read_object(flag: str, given: str) -> dict[str, Any]:
    try:
        value = json.loads(_shallow(flag, given))
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


_PAIR_HINT = "several pairs have commas between them: --sampling top_k=20,min_p=0.1"


def read_pairs(flag: str, arguments: Iterable[str]) -> dict[str, Any]:
    """Read NAME=VALUE pairs. An argument may hold several pairs, separated by commas. Pure.

    If a value is valid JSON, it is read as JSON, and commas inside it belong to it. Otherwise it is the text up to the
    next pair; True, False and None are understood, too. If a name occurs several times, its last value counts.

    Raises:
        ConfigError: An argument is not made of such pairs, or is nested too deep.

    >>> read_pairs("--sampling", ['top_k=20,do_sample=true,bad_words=["a,b=c", "d"]', "stop=,"])
    {'top_k': 20, 'do_sample': True, 'bad_words': ['a,b=c', 'd'], 'stop': ','}
    """
    found: dict[str, Any] = {}
    for argument in arguments:
        _shallow(flag, argument)
        position = 0
        while position < len(argument):
            match = _NAME.match(argument, position)
            if match is None:
                raise ConfigError(
                    f"{flag} {argument[position:]!r}: expected NAME=VALUE",
                    hint=_PAIR_HINT,
                )
            value, position = _read_value(argument, match.end())
            found[match[1].replace("-", "_")] = value
    return found


def _read_value(text: str, start: int) -> tuple[Any, int]:
    """Return the value that begins at `start`, and the position where the next pair begins."""
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
"""NAME=VALUE pairs. The configuration has a mapping."""


def _read_adapters(flag: str, given: Iterable[str] | None) -> dict[str, str]:
    found: dict[str, str] = {}
    for argument in given or ():
        name, equals, source = (part.strip() for part in argument.partition("="))
        if not (name and equals and source) or "://" in name:
            raise ConfigError(
                f"{flag} {redact(argument)!r}: expected NAME=PATH",
                hint=f"as in {flag} sql=./sql-adapter",
            )
        if name in found:
            raise ConfigError(f"{flag} {name}: is given twice", hint="give each adapter one name")
        if source.startswith('"'):  # a mapping in a settings file arrives with its values as JSON
            with contextlib.suppress(ValueError):
                source = json.loads(source)
        found[name] = source
    return found


ADAPTERS = Kind(
    {"type": str, "multiple": True},
    _read_adapters,
    lambda value: [f"{name}={source}" for name, source in value.items()],
)
"""NAME=PATH pairs, one each time that the option is given. The configuration has a mapping."""


def _read_file(flag: str, path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(
            f"{flag} {path}: cannot be read ({reason})",
            hint="expected the name of a file of text in UTF-8",
        ) from error


def _read_text(flag: str, given: str) -> str:
    """Return the given text, or, if it begins with @, the content of the file whose name follows the @.

    Raises:
        ConfigError: the file cannot be read, or a text without @ is the name of an existing file.
    """
    if given.startswith("@"):
        return _read_file(flag, Path(given[1:]))
    with contextlib.suppress(OSError):  # the text is too long to be a file's name
        if given and Path(given).is_file():
            raise ConfigError(
                f"{flag} {given}: is the name of a file, expected a text, or @ before the name",
                hint=f"write {flag} @{given}",
            )
    return given


def _write_text(value: str) -> Sequence[str | FromFile]:
    return [FromFile(value, "@")] if value.startswith("@") else _write_plain(value)


TEXT_OR_FILE = Kind({"type": str}, _read_text, _write_text)
"""A text, or @ and the name of a file. The configuration has the text."""


_PATH = {"type": click.Path(path_type=Path)}
FOLDER = Kind(_PATH, lambda _flag, given: str(given) if given else None, _write_plain)
FILE = Kind(
    _PATH,
    lambda flag, given: _read_file(flag, given) if given else "",
    lambda value: [FromFile(value)] if value else [],
)
"""The name of a file. The configuration holds the file's text instead of its name."""


def _read_objects(flag: str, path: Path | None) -> Any:
    if not path:
        return []
    try:
        value = json.loads(_shallow(flag, _read_file(flag, path)))
    except ValueError as error:
        raise ConfigError(f"{flag} {path}: not JSON ({error})") from error
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise ConfigError(f"{flag} {path}: expected a JSON list of objects")
    return value


FILE_OF_OBJECTS = Kind(
    _PATH, _read_objects, lambda value: [FromFile(_json(value))] if value else []
)
"""The name of a file with a JSON list of objects. The configuration holds the list."""
