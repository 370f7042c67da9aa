"""What `generate` shows and returns: the answers while they come, the table at the end, and the JSON object."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from batchinfer.cli.terminal import write
from batchinfer.core import units
from batchinfer.core.printable import one_line
from batchinfer.core.records import TextPiece
from batchinfer.playground.grid import Trial
from batchinfer.playground.session import Answered

_PROMPT_WIDTH = 32


def shortened(text: str, width: int) -> str:
    """Return a text on one line, cut to `width` characters."""
    line = one_line(" ".join(text.split()))
    return line if len(line) <= width else f"{line[: width - 1]}…"


def values_text(values: dict[str, Any], names: Sequence[str]) -> str:
    """Return the named sampling values as a text, such as "temperature 0.7, top_p 0.9"."""
    return ", ".join(f"{name} {_plain(values[name])}" for name in names)


def _plain(value: Any) -> str:
    """Write a number as a person would: 0, not 0.0."""
    return f"{value:g}" if isinstance(value, float) else str(value)


class LiveText:
    """Writes the answers of several trials to stdout, in the order of the trials.

    Of the trial whose turn it is, the first answer is written while it comes, the others when the trial is complete.
    The later trials wait. With several answers, a line before each says which one it is.

    Args:
        trials: The trials, in the order in which their answers are written.
        names: Names of the sampling values in which trials of one prompt differ.
    """

    def __init__(self, trials: Sequence[Trial], names: Sequence[str]) -> None:
        self._trials = trials
        self._names = names
        self._has_headings = len(trials) > 1 or trials[0].request.sampling.n > 1
        self._waiting: dict[tuple[int, int], str] = {}
        self._answered: dict[int, Answered] = {}
        self._turn = 0
        self._written = ""
        """Text of the first answer of the trial whose turn it is, as far as it is written."""
        self._is_begun = False

    def add(self, piece: TextPiece) -> None:
        """Take the next part of an answer."""
        number = piece.key[1]
        self._waiting[number, piece.index] = (
            self._waiting.get((number, piece.index), "") + piece.text
        )
        if number == self._turn and piece.index == 0:
            self._write_first(self._waiting[number, 0])

    def finish(self, answered: Answered) -> None:
        """Take the complete answers of one trial, and write every trial whose turn it is now."""
        self._answered[answered.completion.key[1]] = answered
        while (done := self._answered.get(self._turn)) is not None:
            self._write_rest(done)
            self._turn += 1
            self._written, self._is_begun = "", False
            if (text := self._waiting.get((self._turn, 0))) is not None:
                self._write_first(text)

    def end(self) -> None:
        """End the line of the answer that is being written, if any."""
        if self._is_begun:
            write("\n")

    def _write_first(self, text: str) -> None:
        self._begin(0)
        write(text[len(self._written) :])
        self._written = text

    def _begin(self, index: int) -> None:
        if index == 0 and self._is_begun:
            return
        self._is_begun = True
        if not self._has_headings:
            return
        trial = self._trials[self._turn]
        parts = [f"{trial.prompt_index + 1}: {shortened(trial.prompt, 60)}"]
        parts += [values_text(trial.values, self._names)] if self._names else []
        if trial.request.sampling.n > 1:
            parts.append(f"answer {index + 1} of {trial.request.sampling.n}")
        write(f"--- {' · '.join(parts)}\n")

    def _write_rest(self, answered: Answered) -> None:
        failure = answered.completion.failure
        if failure is not None:
            self._begin(0)
            lead = "\n" if self._written else ""
            write(f"{lead}[no answer: {failure.code}: {failure.message}]\n")
            return
        for choice in answered.completion.choices:
            if choice.index == 0:
                text = self._written + choice.text[len(self._written) :]
                self._write_first(text)
            else:
                self._begin(choice.index)
                write(choice.text)
            write("\n")


# --------------------------------------------------------------------------- the result


def result_of(trial: Trial, answered: Answered) -> dict[str, Any]:
    """Describe one trial and its answers for the JSON object."""
    completion = answered.completion
    failure = completion.failure
    return {
        "prompt_index": trial.prompt_index,
        "prompt": trial.prompt,
        "sampling": trial.values | {"n": trial.request.sampling.n},
        "answers": [
            {
                "text": choice.text,
                "finish_reason": choice.finish_reason,
                "output_tokens": choice.num_tokens,
            }
            for choice in completion.choices
        ],
        "error": None if failure is None else {"code": failure.code, "message": failure.message},
        "input_tokens": completion.prompt_tokens,
        "cached_tokens": completion.cached_tokens,
        "output_tokens": completion.completion_tokens,
        "first_token_seconds": _rounded(answered.first_seconds),
        "seconds": _rounded(answered.seconds),
        "output_tokens_per_second": _rate(completion.completion_tokens, answered.seconds),
    }


def totals_of(results: Sequence[dict[str, Any]], seconds: float) -> dict[str, Any]:
    """Sum the results up. `seconds` is the time that all of them took together."""
    firsts = [
        each["first_token_seconds"] for each in results if each["first_token_seconds"] is not None
    ]
    output = sum(each["output_tokens"] for each in results)
    return {
        "requests": len(results),
        "errors": sum(each["error"] is not None for each in results),
        "input_tokens": sum(each["input_tokens"] for each in results),
        "cached_tokens": sum(each["cached_tokens"] for each in results),
        "output_tokens": output,
        "first_token_seconds": _rounded(sum(firsts) / len(firsts)) if firsts else None,
        "seconds": _rounded(seconds),
        "output_tokens_per_second": _rate(output, seconds),
        "milliseconds_per_output_token": _rounded(1000 * seconds / output) if output else None,
    }


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)


def _rate(tokens: int, seconds: float) -> float | None:
    return round(tokens / seconds, 3) if tokens and seconds > 0 else None


# --------------------------------------------------------------------------- the table


def table_of(
    results: Sequence[dict[str, Any]], totals: dict[str, Any], names: Sequence[str]
) -> Table:
    """Make a table with a row for each trial, and a row of sums if there are several trials."""
    has_cached = bool(totals["cached_tokens"])
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_footer=len(results) > 1)
    numbers = ["input", *(["cached"] if has_cached else []), "output"]
    times = ["first token", "total", "tokens/s"]
    footer = [*_numbers(totals, has_cached=has_cached), *_times(totals)]
    table.add_column("prompt", footer="all", no_wrap=True)
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    for name, value in zip([*numbers, *times], footer, strict=True):
        table.add_column(name, footer=value, justify="right", no_wrap=True)
    for each in results:
        prompt = f"{each['prompt_index'] + 1}: {shortened(each['prompt'], _PROMPT_WIDTH)}"
        cells = [
            prompt,
            *(_plain(each["sampling"][name]) for name in names),
            *_numbers(each, has_cached=has_cached),
            *_times(each),
        ]
        table.add_row(*map(Text, cells))  # plain text: a prompt must not be read as rich's markup
    return table


def _numbers(each: dict[str, Any], *, has_cached: bool) -> list[str]:
    names = ["input_tokens", *(["cached_tokens"] if has_cached else []), "output_tokens"]
    return [units.count(each[name]) for name in names]


def _times(each: dict[str, Any]) -> list[str]:
    return [
        _seconds(each["first_token_seconds"]),
        _seconds(each["seconds"]),
        units.short(each["output_tokens_per_second"]),
    ]


def _seconds(seconds: float | None) -> str:
    if seconds is None:
        return units.NONE
    return f"{1000 * seconds:.0f} ms" if seconds < 1 else f"{seconds:.2f} s"
