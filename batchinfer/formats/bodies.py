"""Server bodies: checked, freed of what varies between equal answers, and cut down to the best answers."""

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
from batchinfer.core.records import RowKey, Usage

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


def read_body(data: bytes) -> Body:
    """Read a server's body.

    Bytes that are no UTF-8 become U+FFFD: readers of the output would refuse the whole file for one of them.

    Returns:
        The body's members, each as JSON on one line.

    Raises:
        InputError: the body is no JSON object, or nested too deep.
    """
    if is_deep(data, MAX_DEPTH - 1):  # its line is one level more
        raise InputError(f"the answer is nested deeper than {MAX_DEPTH - 1} levels", hint="")
    if not data.isascii():
        data = data.decode(errors="replace").encode()
    try:
        return _decode(msgspec.json.format(data, indent=-1) if b"\n" in data else data)
    except (ValueError, RecursionError) as error:
        raise InputError(f"the answer is no JSON object ({error})", hint="") from error


def with_whole_characters(text: str) -> str:
    """Return the text with U+FFFD in the place of surrogates without a partner, which UTF-8 cannot hold."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def digest_of(key: RowKey, place: int) -> str:
    """Return 24 digits that stand for a place in a row's answer, in every worker alike."""
    return hashlib.blake2b(f"{key[0]}\0{key[1]}\0{place}".encode(), digest_size=12).hexdigest()


# --------------------------------------------------------------------------- what varies


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
        return b'"%b":"%b%b"' % (match[1], match[2], digest_of(key, next(places)).encode())

    for name in _VARYING:
        body.pop(name, None)
    with contextlib.suppress(KeyError, ValueError, RecursionError):
        usage = _decode(body["usage"])
        if any(usage.pop(name, None) is not None for name in _OF_THE_CACHE):
            body["usage"] = _raw(usage)
    if "id" in body:
        body["id"] = msgspec.Raw(_ID.sub(named, b'"id":' + bytes(body["id"]))[5:])
    for name in ("output", "choices"):  # other members may repeat what the request said
        if name in body:
            body[name] = msgspec.Raw(_ID.sub(named, bytes(body[name])))
    return _encode(body)


def _raw(value: Any) -> msgspec.Raw:
    return msgspec.Raw(_encode(value))


# --------------------------------------------------------------------------- counts


def usage_of(body: Body) -> Usage:
    """Return the token counts of a body; 0 where it has none. The Responses API has names of its own for them."""
    try:
        given = msgspec.json.decode(body["usage"])
        found = {name: each for name, each in given.items() if each is not None}
        if "input_tokens" in found:
            names = (
                x.replace("input_", "prompt_").replace("output_", "completion_") for x in found
            )
            found = dict(zip(names, found.values(), strict=True))
        found["cached_tokens"] = found.get("prompt_tokens_details", {}).get("cached_tokens") or 0
        details = found.get("completion_tokens_details", {})
        return codec.convert(found | {"reasoning_tokens": details.get("reasoning_tokens")}, Usage)
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


# --------------------------------------------------------------------------- best_of


def keep_best(body: Body, count: int, *, keeps_logprobs: bool) -> None:
    """Keep the `count` answers whose tokens have the highest mean log-probability, in place.

    Args:
        body: Body of an answer with log-probabilities. Another one stays as it is.
        count: Number of answers to keep, the best first.
        keeps_logprobs: Whether the request asked for log-probabilities itself.
    """
    try:
        choices = msgspec.json.decode(body["choices"])
        best = sorted(choices, key=_mean_logprob, reverse=True)[:count]
    except (KeyError, AttributeError, TypeError, ValueError, RecursionError):
        return
    for index, choice in enumerate(best):
        choice["index"] = index
        if not keeps_logprobs:
            choice["logprobs"] = None
    body["choices"] = _raw(best)


def _mean_logprob(choice: dict[str, Any]) -> float:
    logprobs = choice.get("logprobs") or {}
    found: Sequence[float | None] | None = logprobs.get("token_logprobs")
    if found is None:
        found = [position["logprob"] for position in logprobs.get("content") or ()]
    numbers = [value for value in found if value is not None]
    return sum(numbers) / len(numbers) if numbers else _LOWEST
