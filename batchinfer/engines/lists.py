"""Pooling rows in lists: rows with equal options become one request with a list of texts, whose answer is split.

A request for one short text costs the server twice to four times as much CPU as a text in a list.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from batchinfer.core import codec
from batchinfer.core.records import Call, Reply

MOST_TEXTS = 64
_PATHS = frozenset({"/v1/embeddings", "/pooling", "/classify"})
_Fields = dict[str, msgspec.Raw]
_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])


class _Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int = 0


class _Answers(msgspec.Struct):
    data: list[_Fields]
    usage: _Usage = _Usage()


_answers = codec.json_decoder(_Answers)


def group(calls: Sequence[Call]) -> list[list[Call]]:
    """Divide calls into groups that may be sent as one request each. Most groups of generating calls have one call.

    The order of the calls stays within a group.
    """
    groups: list[list[Call]] = []
    open_groups: dict[tuple[str, bytes], list[Call]] = {}
    for call in calls:
        options = _options(call)
        found = open_groups.get((call.path, options)) if options is not None else None
        if found is None or len(found) >= MOST_TEXTS:
            found = []
            groups.append(found)
            if options is not None:
                open_groups[call.path, options] = found
        found.append(call)
    return groups


def _options(call: Call) -> bytes | None:
    """Return all fields of a body but its text, as bytes; None if the call is no request for one text."""
    if call.path not in _PATHS:
        return None
    try:
        fields = _decoder.decode(call.body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    text = fields.pop("input", None)
    return msgspec.json.encode(fields) if text is not None and bytes(text)[:1] == b'"' else None


def merge(calls: Sequence[Call]) -> Call:
    """Return the request for the texts of all these calls, which `group` has put together."""
    if len(calls) == 1:
        return calls[0]
    texts = [_decoder.decode(call.body)["input"] for call in calls]
    fields = _decoder.decode(calls[0].body) | {"input": msgspec.Raw(msgspec.json.encode(texts))}
    return Call(key=calls[0].key, path=calls[0].path, body=msgspec.json.encode(fields))


def split(calls: Sequence[Call], body: bytes) -> list[Reply] | None:
    """Return the reply for each call from the answer to the merged request; None if it has not one answer for each.

    The server counts the tokens of all texts together. Each reply gets a share of them by the length of its call's
    body; the shares are the whole count together. The bodies have no usage.
    """
    try:
        found = _answers.decode(body)
        rest = _decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    if len(found.data) != len(calls):
        return None
    rest.pop("usage", None)
    lengths = [len(call.body) for call in calls]
    total, replies, before, given = sum(lengths), list[Reply](), 0, 0
    for call, item, length in zip(calls, found.data, lengths, strict=True):
        before += length
        share = found.usage.prompt_tokens * before // total - given
        given += share
        item["index"] = msgspec.Raw(b"0")
        one = rest | {"data": msgspec.Raw(msgspec.json.encode([item]))}
        reply = Reply(key=call.key, status=200, body=msgspec.json.encode(one), prompt_tokens=share)
        replies.append(reply)
    return replies
