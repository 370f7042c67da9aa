"""How a configuration declares options: as the fields of a frozen struct, once.

A field of such a struct is an option, unless it is marked with `NO_OPTION` or holds a further struct. Its type says
which values the option takes, its default is the option's, and the text below the field is the option's help. What a
field cannot say that way, an `Opt` in its `Annotated` says. The class attribute `SECTION` names the options' section.

    class Speed(Record, frozen=True, kw_only=True):
        SECTION: ClassVar[str] = "behaviour"

        max_rate: Annotated[Positive | None, Opt(metavar="ROWS")] = None
        '''Most rows per second.'''

Click's options, settings files, variables of the environment, ``--show-config``, what run.json records and the printed
command that resumes a run are all read off these declarations; see `batchinfer.cli.options`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

Count = Annotated[int, Meta(ge=1)]
Positive = Annotated[float, Meta(gt=0)]
NotNegative = Annotated[float, Meta(ge=0)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Opt:
    """What the field of an option does not say by its name, type, default and text."""

    form: str = ""
    """How words of a command line become the value, where several ways fit the type: a name of
    `batchinfer.cli.values.FORMS`."""
    flag: str = ""
    """Spelling on the command line. Empty: the field's name, as in ``--top-p`` for `top_p`."""
    short: str = ""
    """Further spelling, as in ``-o``."""
    section: str = ""
    """Section of help and settings files. Empty: the struct's own."""
    metavar: str | None = None
    is_first: bool = False
    """Whether the option is among the few that a first run needs."""
    is_recorded: bool = False
    """Whether run.json records the value for the command that resumes the run."""
    variables: tuple[str, ...] = ()
    """Environment variables, if they are not just BATCHINFER_<COMMAND>_<OPTION>."""


NO_OPTION = Opt(form="none")
"""Marks a field that no option sets."""
FIRST = Opt(is_first=True)
RECORDED = Opt(is_recorded=True)
