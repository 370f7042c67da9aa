"""Commands whose functions get what they are told as one configuration."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import click
import msgspec

from batchinfer.cli.help import SectionCommand
from batchinfer.cli.options import options, values_of
from batchinfer.cli.settings import common_options, price_options

S = TypeVar("S", bound=msgspec.Struct)


def config_command(
    name: str,
    struct: type[S],
    *arguments: Callable[[Any], Any],
    has_prices: bool = False,
) -> Callable[[Callable[[S], Any]], click.Command]:
    """Return a decorator that makes a command of a function, whose docstring is the help.

    Args:
        name: The command.
        struct: What the function gets. Its fields, and those of structs in them, declare the command's options.
        arguments: The command's arguments, as `click.argument` makes them, for fields without an option. Default: RUN.
        has_prices: Whether there are the options about prices, too, for the fields `price_per_hour` and `is_spot`.
    """

    def decorate(function: Callable[[S], Any]) -> click.Command:
        @functools.wraps(function)
        def called(**given: Any) -> Any:
            return function(_filled(struct, given))

        shared = common_options(called)
        own = options(struct)(price_options(shared) if has_prices else shared)
        for argument in reversed(arguments or (click.argument("run"),)):
            own = argument(own)
        return click.command(name, cls=SectionCommand)(own)

    return decorate


def _filled(struct: type[S], given: Mapping[str, Any]) -> S:
    """Make a configuration of what click has parsed.

    Raises:
        ConfigError: a value cannot be read.
    """
    values = values_of(struct, given)
    for field in msgspec.structs.fields(struct):
        if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct):
            values[field.name] = _filled(field.type, given)
        elif field.name not in values and field.name in given:
            values[field.name] = given[field.name]
    return struct(**values)
