"""Kinds of options' values: how a command line's word becomes the configuration's value, and the other way round.

The second direction is for the command that resumes a run: the values in run.json are written as words again.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click
from msgspec import inspect

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


_TEXT = _plain(str)
_FLAG = Kind({"is_flag": True}, lambda _flag, given: given, _write_plain)


class NumberRange(click.FloatRange):
    """A range of numbers as click's, which also refuses infinity, and "nan", which click takes to be in every range."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """See click.ParamType."""
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a number.", param, ctx)
        return number


def kind_of_type(hint: Any) -> Kind:
    """Return the kind of values that the type of a field says: its bounds and its choices are the option's."""
    kind = inspect.type_info(hint)
    if isinstance(kind, inspect.UnionType):
        (kind,) = (each for each in kind.types if not isinstance(each, inspect.NoneType))
    match kind:
        case inspect.BoolType():
            return _FLAG
        case inspect.IntType():
            is_free = kind.ge is None and kind.le is None
            return _plain(int if is_free else click.IntRange(kind.ge, kind.le))
        case inspect.FloatType():
            least = kind.ge if kind.gt is None else kind.gt
            return _plain(NumberRange(least, kind.le, min_open=kind.gt is not None))
        case inspect.LiteralType():
            return _plain(click.Choice(kind.values))
        case inspect.ListType():
            return _REPEATED
    return _TEXT


def _whole_or(least: int | None = None, **words: Any) -> Kind:
    """Return the kind of values that are a whole number from `least`, or a word, which stands for another value."""
    alternative = "".join(f" or {word}" for word in words)
    written = {meaning: word for word, meaning in words.items()}

    def read(flag: str, given: Any) -> Any:
        if (word := str(given).lower()) in words:
            return words[word]
        with contextlib.suppress(ValueError):
            if least is None or int(given) >= least:
                return int(given)
        start = "" if least is None else f" from {least}"
        raise ConfigError(f"{flag}: is {given!r}, expected a whole number{start}{alternative}")

    return Kind({"type": str}, read, lambda value: [written.get(value, str(value))])


_LISTED = re.compile(r'\s*(?:"((?:[^"]|"")*)"|([^,]*?))\s*(?:,|$)')


def _split_names(_flag: str, text: str) -> list[str]:
    """Return the names in an option. Double quotes stand around one with commas or outer blanks, as in CSV."""
    parts = (
        part[2].strip() if part[1] is None else part[1].replace('""', '"')
        for part in _LISTED.finditer(text)
    )
    return list(filter(None, parts))


def write_names(names: list[str]) -> list[str]:
    """Return the word of an option that has these names."""
    quoted = (f'"{name.replace(chr(34), 2 * chr(34))}"' for name in names)
    is_odd = (name != name.strip() or not {",", '"'}.isdisjoint(name) for name in names)
    return [",".join(it[1] if it[2] else it[0] for it in zip(names, quoted, is_odd, strict=True))]


_REPEATED = Kind({"type": str, "multiple": True}, lambda _flag, given: list(given), list)


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
    >>> read_pairs(
    ...     "--sampling", ["a=1, b = x y ,c=none", 'd={"k": [1, 2]},e=False', "bad-words=[]"]
    ... )
    {'a': 1, 'b': 'x y', 'c': None, 'd': {'k': [1, 2]}, 'e': False, 'bad_words': []}
    >>> read_pairs("--sampling", ["a=1", "a=1e-3x,b=1", "c=1,", ""])
    {'a': '1e-3x', 'b': 1, 'c': 1}
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


def _read_columns(flag: str, given: Iterable[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for argument in given:
        for kind, names in read_pairs(flag, [argument]).items():
            found.setdefault(kind, []).extend(
                map(str, names if isinstance(names, list) else [names])
            )
    return found


def _read_adapters(flag: str, given: Iterable[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for argument in given:
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


@functools.cache
def _text_of_pipe(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def text_of(path: Path) -> str:
    """Return a file's text. A pipe, as bash's ``<(…)`` is, gives it only once, so a pipe's text is kept."""
    return path.read_text(encoding="utf-8") if path.is_file() else _text_of_pipe(path)


def _read_file(flag: str, path: Path) -> str:
    try:
        return text_of(path)
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


_WORD = re.compile(r"[a-z-]+")


def _read_template(flag: str, given: str) -> str:
    """Return the text of a file; of a word that is no file's name, the word itself, which names a template."""
    path = Path(given)
    return given if _WORD.fullmatch(given) and not path.exists() else _read_file(flag, path)


def _write_text(value: str) -> Sequence[str | FromFile]:
    return [FromFile(value, "@")] if value.startswith("@") else _write_plain(value)


def _read_objects(flag: str, path: Path) -> Any:
    try:
        value = json.loads(_shallow(flag, _read_file(flag, path)))
    except ValueError as error:
        raise ConfigError(f"{flag} {path}: not JSON ({error})") from error
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise ConfigError(f"{flag} {path}: expected a JSON list of objects")
    return value


def _read_place(flag: str, given: str) -> str:
    host, _, port = given.rpartition(":")
    if not port.isdecimal() or int(port) > 65_535:
        raise ConfigError(f"{flag}: is {given!r}, expected [HOST:]PORT", hint=f"{flag} 9400")
    return f"{host or '127.0.0.1'}:{port}"


def _read_delimiter(flag: str, given: str) -> str:
    character = "\t" if given in ("tab", "\\t") else given
    if len(character) != 1 or character in '"\r\n':
        raise ConfigError(f"{flag}: is {given!r}, expected one character, or tab")
    return character


_PATH: dict[str, Any] = {"type": click.Path(path_type=Path)}
FORMS = {
    # NAME=PATH, once for each adapter
    "adapters": Kind(
        _REPEATED.click,
        _read_adapters,
        lambda value: [f"{name}={source}" for name, source in value.items()],
    ),
    # a whole number, or "auto"
    "auto": _whole_or(1, auto="auto"),
    # KIND=NAME, which may be repeated for a kind
    "columns": Kind(
        _REPEATED.click,
        _read_columns,
        lambda value: [f"{kind}={_json(names)}" for kind, names in value.items()],
    ),
    # the character between the fields of CSV
    "delimiter": Kind({"type": str}, _read_delimiter, _write_plain),
    # the name of a file, whose text is the value
    "file": Kind(_PATH, _read_file, lambda value: [FromFile(value)]),
    # the name of a template, or of a file, whose text is the value
    "template": Kind(
        {"type": str},
        _read_template,
        lambda value: [value if _WORD.fullmatch(value) else FromFile(value)],
    ),
    "existing file": _plain(click.Path(exists=True, dir_okay=False)),
    "folder": Kind(_PATH, lambda _flag, given: str(given), _write_plain),
    "json": Kind({"type": str}, _read_object, lambda value: [_json(value)]),
    # names with commas between
    "names": Kind({"type": str}, _split_names, write_names),
    # the name of a file with a JSON list of objects, which is the value
    "objects": Kind(_PATH, _read_objects, lambda value: [FromFile(_json(value))]),
    # NAME=VALUE with commas between
    "pairs": Kind(
        _REPEATED.click,
        read_pairs,
        lambda value: [f"{name}={_json(item)}" for name, item in value.items()],
    ),
    # [HOST:]PORT
    "place": Kind({"type": str}, _read_place, _write_plain),
    # a whole number; the word "none" stands for None
    "seed": _whole_or(none=None),
    # a text, or @ and the name of a file whose text is the value
    "text": Kind({"type": str}, _read_text, _write_text),
    # a number of turns; 0 stands for all
    "turns": _whole_or(1, first=1, all=0),
}
"""Ways in which words become values where the type of a field does not say it, by the names in `Opt.form`."""
