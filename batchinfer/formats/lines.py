"""The output line of one row: written by the worker, read by every other command, and shown to people.

The server's body is freed of what varies between equal answers, and cut down to the best ones.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import re
from collections.abc import Sequence
from typing import Any

import msgspec

from batchinfer.core import codec
from batchinfer.core.errors import InputError
from batchinfer.core.json_text import MAX_DEPTH, is_deep
from batchinfer.core.records import Failure, FinishedRow, Record, Reply, RowKey, Usage
from batchinfer.core.row_codes import Code
from batchinfer.prompts.types import BestOf, Prepared

Body = dict[str, msgspec.Raw]
"""A body's members, each as the server wrote it."""

_VARYING = ("created", "created_at", "request_id", "system_fingerprint")
"""Members that differ between equal answers. vLLM's fingerprint differs between degrees of parallelism."""
_OF_THE_CACHE = ("prompt_tokens_details", "input_tokens_details")
"""Members of `usage` that say how much of the prompt came from the server's prefix cache."""
# Within texts the quotes are escaped, so this finds members of objects only.
_ID = re.compile(rb'"(id|call_id)": *"(?!functions\.)((?:[A-Za-z]+[-_])?)[^"\\]*"')
_LOWEST = -9999.0

_decode = codec.json_decoder(dict[str, msgspec.Raw]).decode
_encode = msgspec.json.Encoder().encode


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


def encode_row(prepared: Prepared, result: Reply | Failure) -> tuple[FinishedRow, Failure | None]:
    """Write the output line of a row.

    Args:
        prepared: The row.
        result: The answer of the server; or why there is none, for a row that was refused here, or whose reply is no
            answer (see `engines.replies.failure_of`). A reply that is no JSON object becomes a failure by itself.

    Returns:
        The finished row, whose `output` is the line without a newline; and its failure, None for an answered row.
    """
    if isinstance(result, Reply):
        try:
            return _answered(prepared, result), None
        except InputError as error:
            result = Failure(code=Code.INVALID_ANSWER, message=error.message, status=502)
    fields = {"code": str(result.code), "message": result.message, "param": result.param}
    texts = [b'"%b":%b' % (x.encode(), _text(y)) for x, y in fields.items() if y is not None]
    line = _line(prepared, result.status, b'"error":{%b}' % b",".join(texts))
    row = FinishedRow(line=prepared.key[1], ok=False, code=str(result.code), output=codec.raw(line))
    return row, result


def _answered(prepared: Prepared, reply: Reply) -> FinishedRow:
    """Write the line of an answered row.

    Raises:
        InputError: the reply is no answer.
    """
    body = read_body(reply.body)
    usage = usage_of(body)
    if reply.prompt_tokens is not None:
        # The request was shared by several rows. What it cost together is no fact about this row.
        usage = Usage(prompt_tokens=reply.prompt_tokens)
        body.pop("usage", None)
    if prepared.best_of is not None:
        keep_best(body, prepared.best_of)
    reason = finish_reason_of(body)
    line = _line(prepared, 200, b'"body":%b' % settle(body, prepared.key))
    return FinishedRow(
        line=prepared.key[1],
        ok=True,
        finish_reason=reason,
        output=codec.raw(line),
        **msgspec.structs.asdict(usage),
    )


def _line(prepared: Prepared, status: int, rest: bytes) -> bytes:
    return b'{"_row":%d,"_id":%b,"status":%d,%b}' % (prepared.row, _text(prepared.id), status, rest)


def _text(value: str) -> bytes:
    """Write a text as JSON, with U+FFFD for surrogates without a partner, which UTF-8 cannot hold."""
    if not value.isascii():
        value = value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return _encode(value)


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
    except (AttributeError, LookupError, TypeError, ValueError):
        texts = []
    reason, usage = finish_reason_of(members), usage_of(members)
    return Answer(texts=texts, finish_reason=reason, usage=usage)


def _texts(body: dict[str, Any]) -> list[str]:
    """Return the texts of an answer.

    Raises:
        AttributeError, LookupError, TypeError: the body has an unknown shape.
    """
    if "choices" in body:
        messages = [x.get("message") or {"content": x["text"]} for x in body["choices"]]
        return [message.get("content") or "" for message in messages]
    if "output" in body:
        spoken = [item for item in body["output"] if item["type"] == "message"]
        return ["".join(part.get("text") or "" for item in spoken for part in item["content"])]
    if "text" in body:
        return [body["text"]]
    first = (body.get("results") or body["data"])[0]
    return [str(first[name]) for name in _OF_AN_INPUT if name in first]


# --------------------------------------------------------------------------- bodies


def read_body(data: bytes) -> Body:
    """Read a server's body.

    Bytes that are no UTF-8 become U+FFFD: readers of the output would refuse the whole file for one of them.

    Returns:
        The body's members, each as JSON on one line.

    Raises:
        InputError: the body is no JSON object, or nested too deep.
    """
    if is_deep(data, MAX_DEPTH - 1):  # its line is one level more
        raise InputError(f"the answer is nested deeper than {MAX_DEPTH - 1} levels")
    if not data.isascii():
        data = data.decode(errors="replace").encode()
    try:
        return _decode(msgspec.json.format(data, indent=-1) if b"\n" in data else data)
    except (ValueError, RecursionError) as error:
        raise InputError(f"the answer is no JSON object ({error})") from error


def _in_order(items: msgspec.Raw) -> msgspec.Raw:
    """Return the items of an answer in the order of the row's inputs, by their indexes."""
    if bytes(items).count(b'"index":') < 2:
        return items
    try:
        found = msgspec.json.decode(items, type=list[dict[str, msgspec.Raw]])
        ordered = sorted(found, key=lambda item: int(bytes(item["index"])))
    except (KeyError, ValueError, RecursionError):
        return items
    return items if found == ordered else msgspec.Raw(_encode(ordered))


def settle(body: Body, key: RowKey) -> bytes:
    """Return a body as JSON without what varies between equal answers: ids follow from the row's key.

    Ids that mean something stay: those of Kimi's calls are the function's name and a number. So do the servers'
    prefixes ("chatcmpl-tool-" becomes "chatcmpl-").

    Args:
        body: The body's members, which are changed.
        key: The row's key.
    """
    places = itertools.count()

    def named(match: re.Match[bytes]) -> bytes:
        place = f"{key[0]}\0{key[1]}\0{next(places)}".encode()
        digest = hashlib.blake2b(place, digest_size=12).hexdigest().encode()
        return b'"%b":"%b%b"' % (match[1], match[2], digest)

    for name in _VARYING:
        body.pop(name, None)
    with contextlib.suppress(KeyError, ValueError, RecursionError):
        usage = _decode(body["usage"])
        kept = {name: value for name, value in usage.items() if name not in _OF_THE_CACHE}
        if kept != usage:
            body["usage"] = msgspec.Raw(_encode(kept))
    for name in ("choices", "data"):
        if name in body:
            body[name] = _in_order(body[name])
    if "id" in body:
        body["id"] = msgspec.Raw(_ID.sub(named, b'"id":' + bytes(body["id"]))[5:])
    for name in ("output", "choices"):  # other members may repeat what the request said
        if name in body:
            body[name] = msgspec.Raw(_ID.sub(named, bytes(body[name])))
    return _encode(body)


def usage_of(body: Body) -> Usage:
    """Return the token counts of a body; 0 where it has none, or one that cannot be.

    The Responses API has names of its own for them.
    """
    try:
        found = msgspec.json.decode(body["usage"])
        prompt, answer = (
            found.get(f"{one}_tokens_details") or found.get(f"{other}_tokens_details") or {}
            for one, other in (("prompt", "input"), ("completion", "output"))
        )
        counts = {
            "prompt_tokens": found.get("prompt_tokens") or found.get("input_tokens") or 0,
            "cached_tokens": prompt.get("cached_tokens") or 0,
            "completion_tokens": found.get("completion_tokens") or found.get("output_tokens") or 0,
            "reasoning_tokens": answer.get("reasoning_tokens"),
        }
        return codec.convert(counts, Usage)
    except (KeyError, AttributeError, ValueError, RecursionError):
        return Usage()


def finish_reason_of(body: Body) -> str:
    """Return the reason why the first answer ended, in the words of the chat API; empty if the body has none."""
    with contextlib.suppress(AttributeError, LookupError, TypeError, ValueError, RecursionError):
        if "choices" in body:
            return str(msgspec.json.decode(body["choices"])[0].get("finish_reason") or "")
        if "output" in body and "status" in body:
            details = msgspec.json.decode(body.get("incomplete_details", b"null"))
            reason = details.get("reason") if details else None
            return {"max_output_tokens": "length", None: "stop"}.get(reason, reason or "")
    return ""


def keep_best(body: Body, best: BestOf) -> None:
    """Keep the answers to each prompt whose tokens have the highest mean log-probability, the best first, in place.

    Args:
        body: Body of an answer with log-probabilities. Another one stays as it is.
        best: How many answers were asked for, and are kept.
    """

    def prompt_of(choice: dict[str, Any]) -> int:
        return int(choice["index"]) // best.asked

    try:
        choices = msgspec.json.decode(body["choices"])
        choices.sort(key=lambda choice: (prompt_of(choice), -_mean_logprob(choice)))
        groups = itertools.groupby(choices, prompt_of)
        kept = [choice for _, group in groups for choice in itertools.islice(group, best.n)]
    except (KeyError, AttributeError, TypeError, ValueError, RecursionError):
        return
    for index, choice in enumerate(kept):
        choice["index"] = index
        if not best.keeps_logprobs:
            choice["logprobs"] = None
    body["choices"] = msgspec.Raw(_encode(kept))


def _mean_logprob(choice: dict[str, Any]) -> float:
    logprobs = choice.get("logprobs") or {}
    found: Sequence[float | None] | None = logprobs.get("token_logprobs")
    if found is None:
        found = [position["logprob"] for position in logprobs.get("content") or ()]
    numbers = [value for value in found if value is not None]
    return sum(numbers) / len(numbers) if numbers else _LOWEST
