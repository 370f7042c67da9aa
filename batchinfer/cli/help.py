"""Help on one screen: what a first run needs, and the names of the other options by section."""

from __future__ import annotations

import contextlib
import itertools
import json
import textwrap
from typing import Any

import click

WIDTH, HEIGHT = 80, 45
"""Columns and lines of the screen that the help of every command fits."""
SECTIONS = ("input", "model", "engine", "prompt", "media", "sampling", "output", "behaviour")
"""Sections of a run's options, in help and in settings files."""
COMMON = "settings"
"""Section of the options that every command has."""
_OWN, _FIRST, _ALL = "options", "what a first run needs", "all"
_ORDER = (_OWN, *SECTIONS, "endpoint", "rehearsal", COMMON)


class SectionOption(click.Option):
    """An option of click's with the section in which help shows it."""

    def __init__(
        self, *arguments: Any, section: str = "", is_first: bool = False, **settings: Any
    ) -> None:
        super().__init__(*arguments, **settings)
        self.section = section or _OWN
        self.is_first = is_first

    def value_from_envvar(self, ctx: click.Context) -> Any:
        """See click.Option. Of an option that may be repeated, the whole text is one value, a JSON list several."""
        text = self.resolve_envvar_value(ctx)
        if text is None or not self.multiple:
            return super().value_from_envvar(ctx)
        with contextlib.suppress(ValueError, RecursionError):
            found = json.loads(text)
            if isinstance(found, list):
                return [one if isinstance(one, str) else json.dumps(one) for one in found]
        return [text]


class HelpOption(SectionOption):
    """An option that shows help and ends the command."""


class SectionCommand(click.Command):
    """A command whose help fits one screen; ``--help SECTION`` and ``--help-all`` show the rest."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings | {"add_help_option": False})
        shared: dict[str, Any] = {"expose_value": False, "is_eager": True, "section": COMMON}
        self.params += [
            HelpOption(
                ["-h", "--help"],
                is_flag=False,
                flag_value="",
                metavar="[SECTION]",
                callback=_show,
                help="Show what a first run needs, or the options of a section.",
                **shared,
            ),
            HelpOption(
                ["--help-all"],
                is_flag=True,
                callback=lambda ctx, option, value: _show(ctx, option, _ALL if value else None),
                help="Show every option.",
                **shared,
            ),
        ]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """See click.Command. Refuses an option in the place of another's value: most likely a variable is not set."""
        options = [one for one in self.get_params(ctx) if isinstance(one, click.Option)]
        takers = [one for one in options if not (one.is_flag or isinstance(one, HelpOption))]
        known, taking = ({name for one in some for name in one.opts} for some in (options, takers))
        for word, value in itertools.pairwise(args):
            if word in taking and value in known:
                ctx.fail(f"Option '{word}' requires an argument, and '{value}' follows it.")
        return super().parse_args(ctx, args)

    def get_help(self, ctx: click.Context) -> str:
        """See click.Command. Without a section, everything is shown if it fits one screen."""
        whole = self.help_of(ctx, _ALL)
        return whole if whole.count("\n") < HEIGHT else self.help_of(ctx, "")

    def help_of(self, ctx: click.Context, section: str) -> str:
        """Return the help of a section, of ``all`` of them, or of what a first run needs ("").

        Raises:
            UsageError: there is no such section.
        """
        formatter = ctx.make_formatter()
        self.format_usage(ctx, formatter)
        sections = shown = self.sections(ctx)
        if section and section != _ALL:
            if section not in sections:
                ctx.fail(f"No such section: {section}. (One of {', '.join(sections)}, all.)")
            shown = {section: sections[section]}
        else:
            self.format_help_text(ctx, formatter)
        if section:
            for name, options in shown.items():
                _write(formatter, name, options, ctx)
            return formatter.getvalue().rstrip("\n")
        first = [one for options in sections.values() for one in options if _is_first(one)]
        _write(formatter, _FIRST, first, ctx)
        formatter.write(f"\nMore, by `{ctx.command_path} --help SECTION` or --help-all:\n")
        for name, options in sections.items():
            flags = " ".join(max(one.opts, key=len) for one in options if not _is_first(one))
            margin = " " * 13
            lines = textwrap.wrap(flags, WIDTH - len(margin), break_on_hyphens=False)
            formatter.write(f"  {name:11}" + f"\n{margin}".join(lines) + "\n")
        return formatter.getvalue().rstrip("\n")

    def sections(self, ctx: click.Context) -> dict[str, list[click.Option]]:
        """Return the options that help shows, by section, in order."""
        found: dict[str, list[click.Option]] = {}
        for option in self.get_params(ctx):
            if isinstance(option, click.Option) and not option.hidden:
                found.setdefault(getattr(option, "section", _OWN), []).append(option)
        return {name: found[name] for name in sorted(found, key=_ORDER.index)}


def _is_first(option: click.Option) -> bool:
    return getattr(option, "is_first", False)


def _write(
    formatter: click.HelpFormatter, name: str, options: list[click.Option], ctx: click.Context
) -> None:
    with formatter.section(name.capitalize()):
        formatter.write_dl([record for one in options if (record := one.get_help_record(ctx))])


def _show(ctx: click.Context, _option: click.Parameter, section: str | None) -> None:
    """Show help if it is asked for, and end the command."""
    if section is None or ctx.resilient_parsing:
        return
    assert isinstance(ctx.command, SectionCommand)
    click.echo(ctx.command.help_of(ctx, section) if section else ctx.command.get_help(ctx))
    ctx.exit()
