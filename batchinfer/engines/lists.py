"""Pooling rows in lists: rows with equal options become one request with a list of texts, whose answer is split.

A request for one short text costs the server twice to four times as much CPU as a text in a list.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence

import msgspec

from batchinfer.core import codec
from batchinfer.core.records import Call, Reply, Tokens

MOST_TEXTS = 64
_PATHS = frozenset({"/v1/embeddings", "/pooling", "/classify"})
# With a vector for each token, the answer for 64 long texts may be more than the longest that is read.
_LARGE = b'"token_embed"'
# A body whose first field is one text, as the prompt builder writes it; and all other fields.
_TEXT = re.compile(rb'\{"input": ?("(?:[^"\\]++|\\.)*+")(|,.*)\}', re.DOTALL)
_decode = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_items = msgspec.json.Decoder(list[dict[str, msgspec.Raw]]).decode
_encode = msgspec.json.Encoder().encode


def group(calls: Sequence[Call]) -> list[list[Call]]:
    """Divide calls into groups that may be sent as one request each. Most groups of generating calls have one call.

    The order of the calls stays within a group.
    """
    alike = defaultdict[object, list[Call]](list)
    for number, call in enumerate(calls):
        match = _TEXT.fullmatch(call.body) if call.path in _PATHS else None
        is_text = match is not None and _LARGE not in match[2]
        alike[(call.path, match[2]) if match and is_text else number].append(call)
    return [x[n : n + MOST_TEXTS] for x in alike.values() for n in range(0, len(x), MOST_TEXTS)]


def merge(calls: Sequence[Call]) -> Call:
    """Return the request for the texts of all these calls, which `group` has put together."""
    if len(calls) == 1:
        return calls[0]
    matches = [match for call in calls if (match := _TEXT.fullmatch(call.body))]
    texts = b",".join(match[1] for match in matches)
    body = b'{"input":[%b]%b}' % (texts, matches[0][2])
    return Call(key=calls[0].key, path=calls[0].path, body=body)


def split(calls: Sequence[Call], reply: Reply) -> list[Reply]:
    """Return the reply for each call from the reply to the merged request; none if it lacks the answer to one.

    The items say by their index whose they are; some servers leave it out where it is the item's place. The server
    counts the tokens of all texts together. Each reply gets a share of them by the length of its call's body; the
    shares are the whole count together. The bodies have no usage.
    """
    if len(calls) == 1:
        return [reply]
    try:
        rest = _decode(reply.body)
        items = _decode_items(rest.pop("data"))
        named = ((item.get("index", b"%d" % place), item) for place, item in enumerate(items))
        by_place = {int(bytes(index)): item for index, item in named}
        usage = msgspec.json.decode(rest.pop("usage", b"{}"))
        count = codec.convert(usage.get("prompt_tokens") or 0, Tokens)
    except (LookupError, AttributeError, TypeError, ValueError, RecursionError):
        return []
    if len(items) != len(calls) or by_place.keys() != set(range(len(calls))):
        return []
    total, replies, before, given = sum(len(call.body) for call in calls), list[Reply](), 0, 0
    for place, call in enumerate(calls):
        before += len(call.body)
        share = count * before // total - given
        given += share
        item = by_place[place] | {"index": msgspec.Raw(b"0")}
        one = rest | {"data": msgspec.Raw(_encode([item]))}
        replies.append(Reply(key=call.key, status=200, body=_encode(one), prompt_tokens=share))
    return replies
