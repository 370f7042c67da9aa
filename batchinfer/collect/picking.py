"""Which rows `collect` takes: all, those that fulfil conditions (--where), or a uniform sample of them (--sample)."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence

from batchinfer.core.errors import ConfigError, near
from batchinfer.core.records import Record
from batchinfer.formats import OutputLine

_VALUES: dict[str, Callable[[OutputLine], list[str]]] = {
    "status": lambda line: [line.status],
    "error_code": lambda line: [] if line.is_ok else [line.code],
    "finish_reason": lambda line: line.finish_reasons,
}
"""Functions that return a row's values of each column that --where takes. A row with several answers has several finish
reasons; a failed row has none."""
_STATUSES = ("ok", "error")
_CONDITION = re.compile(r"\s*(\w+)\s*(!?=)(?!=)(.*)", re.DOTALL)


class Condition(Record, frozen=True, kw_only=True):
    """A condition of --where: a row fulfils it if it has one of the values, or none of them if `is_negated`."""

    column: str
    values: list[str]
    is_negated: bool

    def is_fulfilled(self, line: OutputLine) -> bool:
        """Whether a row fulfils the condition. If it has several answers, one with such a value suffices."""
        found = not set(self.values).isdisjoint(_VALUES[self.column](line))
        return found != self.is_negated


def parse_condition(text: str) -> Condition:
    """Read a condition of --where.

    >>> parse_condition("error_code=prompt_too_long,engine_rejected").values
    ['prompt_too_long', 'engine_rejected']
    >>> parse_condition("status!=ok").is_negated
    True

    Raises:
        ConfigError: the text is no condition, or has a column or a value that --where does not take.
    """
    columns = ", ".join(_VALUES)
    match = _CONDITION.fullmatch(text)
    if match is None:
        raise ConfigError(
            f"--where {text}: is no condition, expected COLUMN=VALUE, COLUMN!=VALUE or COLUMN=VALUE,VALUE "
            f"with one of the columns {columns}",
            hint="for example --where status=error",
        )
    column, sign, written = match.groups()
    if column not in _VALUES:
        raise ConfigError(
            f"--where {text}: takes no condition on {column!r}, expected one of {columns}{near(column, _VALUES)}",
            hint="collect all rows, and select by other columns in the table",
        )
    values = [value.strip() for value in written.split(",")]
    unknown = [
        value for value in values if not value or (column == "status" and value not in _STATUSES)
    ]
    if unknown:
        expected = (
            f"one of {', '.join(_STATUSES)}" if column == "status" else "values separated by commas"
        )
        raise ConfigError(
            f"--where {text}: has the value {unknown[0]!r}, expected {expected}",
            hint="for example --where status=error, or --where finish_reason!=stop",
        )
    return Condition(column=column, values=values, is_negated=sign == "!=")


class Picking(Record, frozen=True, kw_only=True):
    """The options --where, --sample and --seed. Without conditions and `sample`, every row is taken."""

    conditions: list[Condition] = []
    sample: int | None = None
    seed: int = 0

    @property
    def is_all(self) -> bool:
        """Whether every row is taken."""
        return not self.conditions and self.sample is None

    def describe(self) -> str:
        """Return the choice in words, for the data set card; empty if every row is taken."""
        parts = [
            f"{one.column} {'is not' if one.is_negated else 'is'} {' or '.join(one.values)}"
            for one in self.conditions
        ]
        if self.sample is not None:
            parts.append(f"a uniform sample of {self.sample:,} rows of each run (seed {self.seed})")
        return ", ".join(parts)


class RowPicker:
    """Picks rows in one pass over a run. Two pickers with the same arguments pick the same rows.

    Args:
        picking: The options.
        num_rows: Number of rows of the run that fulfil the conditions. Needed for a sample only.
    """

    def __init__(self, picking: Picking, num_rows: int = 0) -> None:
        self._conditions = picking.conditions
        self._random = None if picking.sample is None else random.Random(picking.seed)
        self._rows_left = num_rows
        self._wanted = min(picking.sample or 0, num_rows)

    def pick(self, num_rows: int, lines: Sequence[OutputLine]) -> list[int]:
        """Return the indices of the rows to take among the next `num_rows` rows, in ascending order.

        `lines` are these rows. They are looked at only if there are conditions.
        """
        found: Sequence[int] = range(num_rows)
        if self._conditions:
            found = [
                index
                for index, line in enumerate(lines)
                if all(one.is_fulfilled(line) for one in self._conditions)
            ]
        if self._random is not None:
            found = [index for index in found if self._is_drawn(self._random)]
        return list(found)

    def _is_drawn(self, generator: random.Random) -> bool:
        """Decide about the next row. Each row has the same chance, and exactly the wanted number is drawn."""
        is_drawn = generator.random() * self._rows_left < self._wanted
        self._rows_left -= 1
        self._wanted -= is_drawn
        return is_drawn
