"""The requests of `generate`: every prompt with every combination of sampling values."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec

from batchinfer.cli.run_options import value_of
from batchinfer.core import codec
from batchinfer.core.errors import InputError
from batchinfer.core.layout import chunk_name
from batchinfer.core.records import Record, Request
from batchinfer.playground.options import Choices, choices, listed_values
from batchinfer.prompts import PromptBuilder, RawRow, Tokenizer

_CHUNK = chunk_name(0, 1)
"""Name of a job's first chunk. Seeds are made from chunk and row, so a prompt has the seed that `run` gives its row."""


class Trial(Record, frozen=True, kw_only=True):
    """A prompt with one combination of sampling values."""

    prompt_index: int
    """Number of the prompt, from 0."""
    prompt: str
    values: dict[str, Any]
    """Values of the options that take lists, by parameter: those that were given, and the seed."""
    request: Request


class Point(Record, frozen=True, kw_only=True):
    """One combination of the values of the options that take lists."""

    values: dict[str, Any]
    choices: Choices
    run_seed: int | None


def points(options: dict[str, Any]) -> list[Point]:
    """Return every combination of the values of the options that take lists.

    Raises:
        ConfigError: an option's value cannot work.
    """
    lists = listed_values(options)
    found = []
    for combination in itertools.product(*lists.values()):
        values = dict(zip(lists, combination, strict=True))
        given = options | values
        run_seed = value_of("seed", given)
        values["seed"] = run_seed
        found.append(Point(values=values, choices=choices(given), run_seed=run_seed))
    return found


def check_text(text: str, subject: str) -> None:
    """Refuse a text from the command line or standard input that was not UTF-8.

    Raises:
        InputError: the message begins with `subject`.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(f"{subject}: holds bytes that are no text, expected UTF-8") from error


def trials(
    prompts: list[str],
    grid: list[Point],
    tokenizer: Tokenizer | None,
    max_model_len: int | None,
) -> list[Trial]:
    """Make the requests: all prompts of the first combination, then those of the next.

    Raises:
        ConfigError: the prompt options or sampling values cannot work.
        InputError: a prompt is empty or too long, or the chat template refuses it.
    """
    found: list[Trial] = []
    rows = [RawRow(index, codec.encode({"prompt": prompt})) for index, prompt in enumerate(prompts)]
    for point in grid:
        builder = PromptBuilder(
            point.choices.prompt,
            point.choices.sampling,
            point.run_seed,
            tokenizer,
            max_model_len,
        )
        for index, prepared in enumerate(builder.build(_CHUNK, 0, rows)):
            if prepared.request is None:
                failure = prepared.failure
                assert failure is not None
                raise InputError(
                    f"prompt {index + 1} of {len(prompts)}: {failure.message}",
                    hint="nothing was generated",
                )
            found.append(
                Trial(
                    prompt_index=index,
                    prompt=prompts[index],
                    values=point.values,
                    # The builder gives all trials of one prompt the same key.
                    request=msgspec.structs.replace(
                        prepared.request,
                        key=("generate", len(found)),
                        adapter=point.choices.adapter,
                    ),
                )
            )
    return found


def varying(grid: list[Point]) -> list[str]:
    """Return the names of the values in which the combinations differ."""
    return [name for name in grid[0].values if len({str(each.values[name]) for each in grid}) > 1]
