"""Turns many output lines at once into columns, from which `collect` makes tables. Pure."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

from batchinfer.core.errors import InputError
from batchinfer.core.records import Record
from batchinfer.core.tasks import GENERATE, is_pooling
from batchinfer.formats import find_format
from batchinfer.formats.lines import OutputChoice, OutputLine
from batchinfer.formats.vector_columns import (
    list_columns,
    list_names,
    single_columns,
    single_names,
)
from batchinfer.formats.vectors import OutputVectors
from batchinfer.prompts import find_request_format

SINGLE, LISTS, EXPLODED = "single", "lists", "exploded"
"""Layouts of a table: each line becomes one table row with its only answer, one table row with lists of its answers, or
a table row for each of its answers."""


class Counts(NamedTuple):
    """Sums over some output lines: tokens, and in `errors` the number of failed lines with each error code."""

    errors: Counter[str]
    prompt_tokens: int
    completion_tokens: int


_ROW = ("row", "id", "status")
_COUNTS = ("prompt_tokens", "cached_tokens", "completion_tokens")
_ERROR = ("error_code", "error_message")


class Shape(Record, frozen=True, kw_only=True):
    """Columns of a run's tables.

    The columns are derived from run.json alone, never from lines, so that all files of a table have the same columns.
    """

    output_format: str
    answers: str
    has_reasoning: bool = False
    has_tool_calls: bool = False
    has_logprobs: bool = False
    has_prompt: bool = False
    task: str = GENERATE
    """Task of the run."""
    is_of_requests: bool = False
    """Whether the run's rows are requests, which may be of several tasks and hold several texts."""
    is_base64: bool = False
    """Whether output lines hold vectors as base64."""
    has_model: bool = False

    @property
    def names(self) -> list[str]:
        """Names of the columns, in order."""
        if self.answers == LISTS:
            answer = ["texts", "finish_reasons"]
        else:
            answer = ["choice_index"] if self.answers == EXPLODED else []
            answer += ["text", "finish_reason"]
        answer += ["reasoning"] if self.has_reasoning else []
        answer += ["tool_calls"] if self.has_tool_calls else []
        answer += ["logprobs"] if self.has_logprobs else []
        if self.answers == LISTS and self.is_pooling:
            answer = list_names(self.task)
        elif self.is_pooling:
            answer = ["choice_index"] if self.answers == EXPLODED else []
            answer += single_names(self.task, is_of_requests=self.is_of_requests)
        prompt = ["prompt"] if self.has_prompt else []
        answer += ["model"] if self.has_model else []
        counts = [*_COUNTS] if not self.is_pooling else ["prompt_tokens", "cached_tokens"]
        return [*_ROW, *answer, *counts, *_ERROR, *prompt]

    @property
    def is_pooling(self) -> bool:
        """Whether the table has numbers of a pooling model in place of texts."""
        return is_pooling(self.task)

    @property
    def has_vectors(self) -> bool:
        """Whether the table may have vectors, which all have one length."""
        names = {"embedding", "embeddings", "token_embeddings"}
        return self.is_pooling and not names.isdisjoint(self.names)


def shape_of(config: dict[str, Any], *, explode: bool) -> Shape:
    """Derive the columns from the `config` of run.json. With `explode`, each answer gets a table row.

    >>> shape_of({"prompt": {}, "sampling": {"n": 2}}, explode=False).names[3:5]
    ['texts', 'finish_reasons']
    """
    prompt, sampling = config.get("prompt") or {}, config.get("sampling") or {}
    # A request with parameters of its own may ask for several answers, or for logprobs, which run.json does not tell.
    request_format = find_request_format(prompt.get("request_format") or "")
    may_differ = request_format.has_own_parameters
    has_several = may_differ or int(sampling.get("n") or 1) > 1
    output_format = find_format(prompt.get("output_format") or "")
    return Shape(
        output_format=output_format.name,
        answers=EXPLODED if explode else LISTS if has_several else SINGLE,
        has_reasoning=_mentions(config, "reasoning"),
        has_tool_calls=request_format.has_own_tools or _mentions(config, "tool"),
        has_logprobs=may_differ or sampling.get("logprobs") is not None,
        has_prompt=bool(prompt.get("keep_prompt")) and not output_format.repeats_request,
        has_model=bool(prompt.get("adapters")),
        task=str(prompt.get("task") or GENERATE),
        is_of_requests=may_differ,
        is_base64=prompt.get("embedding_format") == "base64",
    )


def joined(shapes: list[Shape]) -> list[Shape]:
    """Give the shapes of several runs the same columns: those of all. Each keeps its output format.

    Raises:
        InputError: the runs have different tasks, or the rows of only some are requests to a pooling model.
    """
    if len({(shape.task, shape.is_of_requests) for shape in shapes if shape.is_pooling}) > 1 or (
        len({shape.is_pooling for shape in shapes}) > 1
    ):
        kinds = {f"--task {shape.task}{' of requests' * shape.is_of_requests}" for shape in shapes}
        raise InputError(
            f"the runs have answers of different kinds ({', '.join(sorted(kinds))}), which do not fit into one table",
            hint="collect each run into a DEST of its own",
        )
    flags = {
        name: any(getattr(shape, name) for shape in shapes)
        for name in (
            "has_reasoning",
            "has_tool_calls",
            "has_logprobs",
            "has_prompt",
            "has_model",
        )
    }
    answers = LISTS if any(shape.answers == LISTS for shape in shapes) else shapes[0].answers
    return [msgspec.structs.replace(shape, answers=answers, **flags) for shape in shapes]


def _mentions(value: Any, word: str) -> bool:
    """Whether any setting, at any depth of `value`, has the word in its name and a value that is not empty or false."""
    if not isinstance(value, dict):
        return False
    return any((word in key and bool(item)) or _mentions(item, word) for key, item in value.items())


# --------------------------------------------------------------------------- lines


class OutputBlock:
    """Consecutive output lines as Python objects. It reads every format; `ArrowBlock` is faster for some.

    Args:
        data: Whole lines, each with its newline.
        shape: The columns to make.
        first_row: Number of the first line's row in the job.

    Raises:
        InputError: a line does not have the run's format, or its row number does not fit its place.
    """

    def __init__(self, data: bytes, shape: Shape, first_row: int) -> None:
        self._shape = shape
        self.lines: Sequence[OutputLine] = find_format(shape.output_format).read_lines(data)
        self._may_reason = b'"reasoning' in data
        for row, line in enumerate(self.lines, first_row):
            if line.row is None:
                line.row = row
                line.id = str(row) if line.id is None else line.id
            elif line.row != row:
                raise out_of_order(first_row)

    @property
    def num_rows(self) -> int:
        """Number of lines."""
        return len(self.lines)

    @property
    def dimension(self) -> int:
        """Length of the first vector; 0 if there is none."""
        found = (each for line in self.lines for each in line.vectors)
        return next(filter(None, (each.dimension for each in found)), 0)

    def counts(self) -> Counts:
        """Count the lines' errors by code, and their input and output tokens."""
        usages = [line.usage for line in self.lines]
        return Counts(
            Counter(line.error.code for line in self.lines if line.error is not None),
            sum([usage.prompt_tokens or 0 for usage in usages]),
            sum([usage.completion_tokens or 0 for usage in usages]),
        )

    def part(self, start: int, stop: int) -> OutputBlock:
        """Return the lines from `start` up to `stop`, exclusive."""
        part = copy.copy(self)
        part.lines = self.lines[start:stop]
        return part

    def take(self, indices: Sequence[int]) -> OutputBlock:
        """Return the lines at `indices`, which count from 0."""
        taken = copy.copy(self)
        taken.lines = [self.lines[index] for index in indices]
        return taken

    def sources(self) -> Iterator[bytes]:
        """Yield for every line the columns that ``--keep`` named, as JSON; empty bytes for a line without them."""
        return (bytes(line.source) for line in self.lines)

    def num_unshown(self) -> int:
        """Number of lines that have reasoning while the table has no column for it; 0 if the table has that column."""
        if self._shape.has_reasoning or not self._may_reason:
            return 0
        return sum(
            any(choice.reasoning is not None for choice in line.choices) for line in self.lines
        )

    def columns(self) -> tuple[dict[str, Any], list[int] | None]:
        """Return the values of each column, in the order of `Shape.names`.

        Returns:
            (columns, lines). With the layout `EXPLODED`, `lines` holds for each table row the index of the line that it
            was made from; with the other layouts it is None.
        """
        lines, shape = self.lines, self._shape
        if shape.is_pooling:
            return self._pooled_columns()
        if shape.answers != EXPLODED:
            found = self._of_lines(lines)
            firsts = [line.choices[0] if line.choices else None for line in lines]
            found |= self._single(firsts) if shape.answers == SINGLE else self._lists()
            return {name: found[name] for name in shape.names}, None
        places: list[tuple[int, OutputChoice | None]] = []
        for index, line in enumerate(lines):
            if line.choices:
                places += [(index, choice) for choice in line.choices]
            else:
                places.append((index, None))
        indices = [index for index, _ in places]
        found = self._of_lines([lines[index] for index in indices])
        found |= self._single([choice for _, choice in places])
        found["choice_index"] = [None if one is None else one.index for _, one in places]
        return {name: found[name] for name in shape.names}, indices

    def _of_lines(self, lines: Sequence[OutputLine]) -> dict[str, list[Any]]:
        usages = [line.usage for line in lines]
        found: dict[str, list[Any]] = {
            "row": [line.row for line in lines],
            "id": [line.id for line in lines],
            "status": [line.status for line in lines],
            "prompt_tokens": [usage.prompt_tokens for usage in usages],
            "cached_tokens": [usage.cached_tokens for usage in usages],
            "completion_tokens": [usage.completion_tokens for usage in usages],
            "error_code": [None if line.error is None else line.error.code for line in lines],
            "error_message": [None if line.error is None else line.error.message for line in lines],
        }
        if self._shape.has_prompt:
            found["prompt"] = [_text(line.prompt) for line in lines]
        if self._shape.has_model:
            found["model"] = [line.model for line in lines]
        return found

    def _pooled_columns(self) -> tuple[dict[str, Any], list[int] | None]:
        """See `columns`, for a run of a pooling model."""
        lines, shape = self.lines, self._shape
        if shape.answers != EXPLODED:
            found: dict[str, Any] = self._of_lines(lines)
            if shape.answers == LISTS:
                found |= list_columns([line.vectors for line in lines], list_names(shape.task))
            else:
                firsts = [next(iter(line.vectors), None) for line in lines]
                found |= single_columns(firsts, single_names(shape.task, is_of_requests=False))
            return {name: found[name] for name in shape.names}, None
        places: list[tuple[int, int | None, OutputVectors | None]] = []
        for index, line in enumerate(lines):
            vectors = line.vectors
            places += [(index, number, each) for number, each in enumerate(vectors)]
            places += [] if vectors else [(index, None, None)]
        indices = [index for index, _, _ in places]
        found = self._of_lines([lines[index] for index in indices])
        names = single_names(shape.task, is_of_requests=shape.is_of_requests)
        found |= single_columns([each for _, _, each in places], names)
        found["choice_index"] = [number for _, number, _ in places]
        return {name: found[name] for name in shape.names}, indices

    def _single(self, choices: Sequence[OutputChoice | None]) -> dict[str, list[Any]]:
        found: dict[str, list[Any]] = {
            "text": [None if one is None else one.text for one in choices],
            "finish_reason": [None if one is None else one.finish_reason for one in choices],
        }
        for name in self._extras():
            found[name] = [None if one is None else _extra(one, name) for one in choices]
        return found

    def _lists(self) -> dict[str, list[Any]]:
        lines = self.lines
        found: dict[str, list[Any]] = {
            "texts": [[one.text for one in line.choices] for line in lines],
            "finish_reasons": [[one.finish_reason for one in line.choices] for line in lines],
        }
        for name in self._extras():
            found[name] = [[_extra(one, name) for one in line.choices] for line in lines]
        return found

    def _extras(self) -> list[str]:
        return [
            name for name in ("reasoning", "tool_calls", "logprobs") if name in self._shape.names
        ]


def out_of_order(first_row: int) -> InputError:
    """Return the error for lines from `first_row` on whose row numbers do not fit their places."""
    return InputError(
        f"output lines from row {first_row} on: of other rows, or out of order",
        hint="`batchinfer verify --deep` says how to fix it",
    )


def _extra(choice: OutputChoice, name: str) -> str | None:
    value = getattr(choice, name)
    return _text(value) if isinstance(value, msgspec.Raw) else value


def _text(raw: msgspec.Raw) -> str | None:
    """Return the content of a JSON string, None for null or nothing, and any other value as JSON text."""
    data = bytes(raw)
    if not data or data == b"null":
        return None
    return str(msgspec.json.decode(data)) if data.startswith(b'"') else data.decode()
