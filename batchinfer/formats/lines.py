"""Classes and functions that all output formats share, for writing output lines and for reading them."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

import msgspec

from batchinfer.core.errors import InputError
from batchinfer.core.records import Choice, Completion, Failure, Record, RowKey, TokenLogprob
from batchinfer.core.tasks import GENERATE
from batchinfer.formats.vectors import OutputVectors, Vector
from batchinfer.prompts import Prepared, PromptConfig

LOWEST_LOGPROB = -9999.0
"""Lowest log-probability that is written. It also stands for minus infinity, which JSON does not have."""
UNANSWERED = Failure(code="internal_error", message="the row has neither an answer nor an error")
DECODE_ERRORS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

_UNKNOWN_CODE = "unknown"
_encode = msgspec.json.Encoder().encode


class Encoder(Protocol):
    """The interface of an object that writes output lines in one format. Pure."""

    def encode(self, prepared: Prepared, completion: Completion | None = None) -> bytes:
        """Return the output line of one row: a JSON object, without a newline.

        Args:
            prepared: The row.
            completion: The engine's answer; None for a row that was never sent to the engine.
        """
        ...


# --------------------------------------------------------------------------- reading


class OutputChoice(msgspec.Struct, gc=False):
    """One answer of an output line."""

    index: int = 0
    text: str | None = None
    finish_reason: str | None = None
    reasoning: str | None = None
    tool_calls: msgspec.Raw = msgspec.Raw()
    logprobs: msgspec.Raw = msgspec.Raw()


class OutputUsage(msgspec.Struct, gc=False):
    """Token counts of an output line. A count that the line does not have is None."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    reasoning_tokens: int | msgspec.UnsetType | None = msgspec.UNSET


class OutputError(msgspec.Struct, gc=False):
    """Code and message of an error line."""

    code: str = _UNKNOWN_CODE
    message: str = ""


class OutputLine(msgspec.Struct, gc=False, rename={"row": "_row", "id": "_id"}):
    """An output line after it was read. Lines of all formats become this class, which has the fields of a native line.

    If the line's format has no row numbers, `row` is None; if it has no ids, `id` is None.
    """

    row: int | None
    id: str | None
    status: Literal["ok", "error"]
    choices: list[OutputChoice] = []
    usage: OutputUsage = msgspec.field(default_factory=OutputUsage)
    error: OutputError | None = None
    embedding: Vector | None = None
    token_embeddings: list[Vector] | None = None
    label: str | None = None
    probs: list[float | None] | None = None
    score: float | None = None
    reward: float | None = None
    rewards: list[list[float]] | None = None
    data: list[OutputVectors] = []
    """What the line of a request says about each of its texts. Other lines have the fields above instead."""
    prompt: msgspec.Raw = msgspec.Raw()
    source: msgspec.Raw = msgspec.Raw()
    model: str | None = None
    """Model or adapter that answered, where the line says it."""

    @property
    def is_ok(self) -> bool:
        """Whether the row was answered."""
        return self.status == "ok"

    @property
    def code(self) -> str:
        """Error code; empty for an answered row."""
        if self.is_ok:
            return ""
        return self.error.code if self.error is not None else _UNKNOWN_CODE

    @property
    def message(self) -> str:
        """Error message; empty for an answered row."""
        return "" if self.is_ok or self.error is None else self.error.message

    @property
    def vectors(self) -> list[OutputVectors]:
        """What the line says about each text; empty if it is not of a pooling model."""
        if self.data:
            return self.data
        names = OutputVectors.__struct_fields__
        found = OutputVectors(**{name: getattr(self, name) for name in names})
        return [] if found == OutputVectors() else [found]

    @property
    def texts(self) -> list[str]:
        """Text of every choice."""
        return [choice.text or "" for choice in self.choices]

    @property
    def finish_reasons(self) -> list[str]:
        """Finish reason of every choice."""
        return [choice.finish_reason or "" for choice in self.choices]


class OutputFormat(Record, frozen=True, kw_only=True):
    """An output format: how its lines are written and read. `batchinfer.formats.FORMATS` lists all formats."""

    name: str
    """Value of ``--output-format``."""
    make_encoder: Callable[[PromptConfig, str, int], Encoder]
    """Function that makes a run's encoder. Arguments: prompt options, model, time of the run in Unix seconds."""
    decoder: msgspec.json.Decoder[Any]
    """Decoder of this format's lines. It refuses lines of the other formats."""
    convert: Callable[[Any], OutputLine] | None = None
    """Function that turns a decoded line into an `OutputLine`; None if the decoder gives one already."""
    repeats_request: bool = False
    """Whether lines repeat the request. Then rows need their prompt even without ``--keep-prompt``, and tables have no
    prompt column."""
    has_flat_lines: bool = False
    """Whether the module arrow_lines can read the lines: their fields have the names and types of native lines."""

    def read_line(self, data: bytes) -> OutputLine:
        """Read one line.

        Raises:
            InputError: the line does not have this format.
        """
        try:
            line = self.decoder.decode(data)
        except DECODE_ERRORS as error:
            raise self._unreadable(error) from error
        return line if self.convert is None else self.convert(line)

    def read_lines(self, data: bytes) -> list[OutputLine]:
        """Read consecutive lines, each with its newline.

        Raises:
            InputError: a line does not have this format.
        """
        try:
            lines = self.decoder.decode_lines(data)
        except DECODE_ERRORS as error:
            raise self._unreadable(error) from error
        return lines if self.convert is None else list(map(self.convert, lines))

    def _unreadable(self, error: Exception) -> InputError:
        return InputError(
            f"output line: not readable ({error}), expected {self.name}",
            hint="`batchinfer verify` checks a run's outputs against their markers",
        )


# --------------------------------------------------------------------------- writing


def failure_of(prepared: Prepared, completion: Completion | None) -> Failure | None:
    """Return the reason why a row has no answer; None if it has an answer."""
    if completion is None:
        return prepared.failure or UNANSWERED
    return completion.failure or prepared.failure


def shown_choices(prepared: Prepared, completion: Completion) -> Sequence[Choice]:
    """Return the answers as the output line shows them: with ``echo``, the prompt stands before or in place of each."""
    view = prepared.view
    if view is None or not view.echo:
        return [_with_call_ids(prepared.key, choice) for choice in completion.choices]
    prefix = prepared.prompt if isinstance(prepared.prompt, str) else ""
    positions = completion.prompt_logprobs
    most = prepared.request.sampling.logprobs if prepared.request is not None else None
    if positions is not None and most is not None and most >= 0:
        # A request may ask for more alternatives of the prompt's tokens than `echo` shows, by `prompt_logprobs`.
        positions = [
            each and msgspec.structs.replace(each, top=each.top[:most]) for each in positions
        ]
    return [
        _with_prompt(choice, prefix, positions, is_prompt_only=view.is_prompt_only)
        for choice in completion.choices
    ]


def digest_of(key: RowKey, *places: int) -> str:
    """Return a text of 24 digits that stands for a row, or for a place in its answer, in every worker alike."""
    parts = "\0".join([key[0], *map(str, (key[1], *places))])
    return hashlib.blake2b(parts.encode(), digest_size=12).hexdigest()


def _with_call_ids(key: RowKey, choice: Choice) -> Choice:
    if not choice.tool_calls or all(call.get("id") for call in choice.tool_calls):
        return choice
    calls = [
        call if call.get("id") else {"id": f"call_{digest_of(key, choice.index, place)}", **call}
        for place, call in enumerate(choice.tool_calls)
    ]
    return msgspec.structs.replace(choice, tool_calls=calls)


def asked_prompt_logprobs(
    prepared: Prepared, completion: Completion
) -> list[TokenLogprob | None] | None:
    """Return the log-probabilities of the prompt if the request or the run asked for them.

    None if only `echo` with `logprobs` needs them, which shows them in another place (`shown_choices`).
    """
    has_echo = prepared.view is not None and prepared.view.echo
    if has_echo and (prepared.body or {}).get("prompt_logprobs") is None:
        return None
    return completion.prompt_logprobs


def answering_model(prepared: Prepared, model: str) -> str:
    """Return the name of the adapter that answered a row; `model`, the run's, if none did."""
    adapter = prepared.request.adapter if prepared.request is not None else None
    return adapter or model


def task_of(prepared: Prepared) -> str:
    """Return the task of a row's request."""
    return prepared.request.task if prepared.request is not None else GENERATE


def num_completion_tokens(prepared: Prepared, completion: Completion) -> int:
    """Return the number of generated tokens to report. It is 0 if the request asked for its prompt and no answer."""
    if prepared.view is not None and prepared.view.is_prompt_only:
        return 0
    return completion.completion_tokens


def _with_prompt(
    choice: Choice,
    prefix: str,
    positions: list[TokenLogprob | None] | None,
    *,
    is_prompt_only: bool,
) -> Choice:
    logprobs = choice.logprobs
    if is_prompt_only:
        logprobs = [] if logprobs is not None else None
    if logprobs is not None and positions is not None:
        logprobs = [*_named(prefix, positions), *logprobs]
    return msgspec.structs.replace(
        choice,
        text=prefix if is_prompt_only else prefix + choice.text,
        finish_reason="length" if is_prompt_only else choice.finish_reason,
        logprobs=logprobs,
    )


def _named(prefix: str, positions: list[TokenLogprob | None]) -> list[TokenLogprob]:
    # Engines give None for a prompt's first token, because it has no predecessor and therefore no log-probability. The
    # text of this token is what remains of the prompt without the texts of the other tokens.
    rest = "".join(position.token for position in positions if position is not None)
    first = prefix[: len(prefix) - len(rest)] if rest and prefix.endswith(rest) else ""
    if not rest:
        first = prefix
    return [
        position if position is not None else TokenLogprob(token=first, logprob=float("nan"))
        for position in positions
    ]


def finite(logprob: float) -> float | None:
    """Return a log-probability in a form that JSON can hold. NaN, which marks a missing one, becomes None.

    >>> finite(float("-inf")), finite(float("nan"))
    (-9999.0, None)
    """
    if math.isnan(logprob):
        return None
    return max(logprob, LOWEST_LOGPROB)


def to_line(record: Any) -> bytes:
    """Encode an output line as JSON. A lone surrogate in a text becomes U+FFFD, because UTF-8 cannot hold it."""
    try:
        return _encode(record)
    except UnicodeEncodeError:
        return _encode(_clean(msgspec.to_builtins(record)))


def _clean(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, dict):
        return {_clean(key): _clean(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_clean(item) for item in value]
    return value
