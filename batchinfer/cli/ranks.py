"""The options --rank I --of N of commands whose work several processes share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import click

from batchinfer.core.errors import ConfigError

F = TypeVar("F", bound=Callable[..., Any])


def rank_options(what: str) -> Callable[[F], F]:
    """Return a decorator that adds --rank and --of to a command. `what` is the help of --rank."""

    def with_options(function: F) -> F:
        of = click.option(
            "--of", "num_ranks", type=click.IntRange(min=1), metavar="N", help="See --rank."
        )
        rank = click.option("--rank", type=click.IntRange(min=0), metavar="I", help=what)
        return rank(of(function))

    return with_options


def check_rank(
    rank: int | None, num_ranks: int | None, *, refused: Mapping[str, object], hint: str
) -> None:
    """Refuse a --rank that does not fit --of, and options that ranks cannot have.

    Args:
        rank: The value of --rank; None if it is not given.
        num_ranks: The value of --of; None if it is not given.
        refused: Options that ranks cannot have, each with whether it is given.
        hint: What to do without such an option.

    Raises:
        ConfigError: The options do not go together.
    """
    if (rank is None) != (num_ranks is None):
        raise ConfigError("--rank, --of: one is given, expected both or none")
    if rank is None or num_ranks is None:
        return
    if rank >= num_ranks:
        raise ConfigError(
            f"--rank {rank}: expected less than --of {num_ranks}",
            hint=f"ranks are 0 to {num_ranks - 1}",
        )
    for option, is_given in refused.items():
        if is_given:
            raise ConfigError(f"{option}: not together with --rank", hint=hint)
