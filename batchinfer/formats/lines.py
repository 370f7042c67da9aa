"""The output line of one row: written by the worker, read by every other command, and shown to people."""

from __future__ import annotations

from typing import Any

import msgspec

from batchinfer.core import codec
from batchinfer.core.errors import InputError
from batchinfer.core.json_text import is_deep
from batchinfer.core.records import Failure, Record, Reply, Usage
from batchinfer.core.row_codes import Code
from batchinfer.formats import bodies
from batchinfer.prompts.types import Prepared

_encode = msgspec.json.Encoder().encode


class EncodedRow(Record, frozen=True, kw_only=True, gc=False):
    """A row's output line, without a newline, and what the worker counts of it."""

    line: bytes
    ok: bool
    code: str = ""
    """Error code; empty for an answered row."""
    finish_reason: str = ""
    usage: Usage = Usage()
    failure: Failure | None = None


class OutputLine(msgspec.Struct, frozen=True, gc=False, rename={"row": "_row", "id": "_id"}):
    """An output line after it was read: of `body` and `error`, one is there."""

    row: int
    id: str
    status: int
    body: msgspec.Raw = msgspec.Raw()
    """The server's body as JSON; empty for a row without an answer."""
    error: Failure | None = None
    """Why there is no answer. Its own `status` is not in the line."""

    @property
    def is_ok(self) -> bool:
        """Whether the row was answered."""
        return self.error is None

    @property
    def code(self) -> str:
        """Error code; empty for an answered row."""
        return "" if self.error is None else self.error.code


_read = codec.json_decoder(OutputLine).decode


def encode_row(prepared: Prepared, result: Reply | Failure) -> EncodedRow:
    """Write the output line of a row.

    Args:
        prepared: The row.
        result: The answer of the server; or why there is none, for a row that was refused here, or whose reply is no
            answer (see `engines.replies.failure_of`). A reply that is no JSON object becomes a failure by itself.
    """
    if isinstance(result, Reply):
        try:
            return _answered(prepared, result)
        except InputError as error:
            result = Failure(code=Code.INVALID_ANSWER, message=error.message, status=502)
    fields = {"code": str(result.code), "message": result.message, "param": result.param}
    texts = [b'"%b":%b' % (x.encode(), _text(y)) for x, y in fields.items() if y is not None]
    line = _line(prepared, result.status, b'"error":{%b}' % b",".join(texts))
    return EncodedRow(line=line, ok=False, code=str(result.code), failure=result)


def _answered(prepared: Prepared, reply: Reply) -> EncodedRow:
    """Write the line of an answered row.

    Raises:
        InputError: the reply is no answer.
    """
    body = bodies.read_body(reply.body)
    usage = bodies.usage_of(body)
    if reply.prompt_tokens is not None:
        # The request was shared by several rows. What it cost together is no fact about this row.
        usage = Usage(prompt_tokens=reply.prompt_tokens)
        body.pop("usage", None)
    if prepared.best_of is not None:
        bodies.keep_best(body, prepared.best_of.n, keeps_logprobs=prepared.best_of.keeps_logprobs)
    reason = bodies.finish_reason_of(body)
    line = _line(prepared, 200, b'"body":%b' % bodies.settle(body, prepared.key))
    return EncodedRow(line=line, ok=True, finish_reason=reason, usage=usage)


def _line(prepared: Prepared, status: int, rest: bytes) -> bytes:
    return b'{"_row":%d,"_id":%b,"status":%d,%b}' % (prepared.row, _text(prepared.id), status, rest)


def _text(value: str) -> bytes:
    return _encode(value if value.isascii() else bodies.with_whole_characters(value))


def read_line(data: bytes) -> OutputLine:
    """Read one output line, without its newline.

    Raises:
        InputError: it is no output line.
    """
    try:
        line = _read(data)
        if bool(bytes(line.body)) == (line.error is not None):
            raise ValueError("expected a body or an error")
        if is_deep(data):
            raise ValueError("nested too deep")
    except (ValueError, RecursionError) as error:
        hint = "`batchinfer verify` checks a run's outputs against their markers"
        raise InputError(f"output line: not readable ({error})", hint=hint) from error
    return line


# --------------------------------------------------------------------------- for people

_OF_AN_INPUT = ("label", "probs", "score", "relevance_score", "embedding", "data")
"""What a pooling model says about an input."""


class Answer(Record, frozen=True, kw_only=True):
    """What a row's answer says. Fields that the answer does not have are empty."""

    texts: list[str] = []
    """Text of every answer (several if the request asked for `n`), or what a pooling model says of the first input."""
    finish_reason: str = ""
    """Reason why the first answer ended."""
    usage: Usage = Usage()


def answer_of(line: OutputLine) -> Answer:
    """Return what an answer says. A row without one, or with one of an unknown shape, has an empty answer."""
    if not line.is_ok or bytes(line.body)[:1] != b"{":
        return Answer()
    members = msgspec.json.decode(line.body, type=dict[str, msgspec.Raw])
    try:
        texts = _texts(msgspec.json.decode(line.body))
    except (AttributeError, LookupError, TypeError):
        texts = []
    reason, usage = bodies.finish_reason_of(members), bodies.usage_of(members)
    return Answer(texts=texts, finish_reason=reason, usage=usage)


def _texts(body: dict[str, Any]) -> list[str]:
    """Return the texts of an answer.

    Raises:
        AttributeError, LookupError, TypeError: the body has an unknown shape.
    """
    if "choices" in body:
        messages = [
            choice.get("message") or {"content": choice["text"]} for choice in body["choices"]
        ]
        return [message["content"] or "" for message in messages]
    if "output" in body:
        spoken = [item for item in body["output"] if item["type"] == "message"]
        return ["".join(part.get("text") or "" for item in spoken for part in item["content"])]
    if "text" in body:
        return [body["text"]]
    first = (body.get("results") or body["data"])[0]
    return [str(first[name]) for name in _OF_AN_INPUT if name in first]
