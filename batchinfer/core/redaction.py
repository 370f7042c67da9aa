"""Masks the secrets in URLs (user, password, query) before the URLs are shown or recorded. Pure."""

from __future__ import annotations

import re

_URL = re.compile(r"([a-z][a-z0-9+.-]*://)([^/?#\s]*@)?([^?\s]*)(\?\S+)?", re.IGNORECASE)
_WITH_QUERY = ("http://", "https://")
"""Schemes whose URLs can have a query. In URLs of other schemes, a question mark is part of a glob or a key."""
_PUNCTUATION = "'\"`:;,.)]}>"
"""Characters at the end of a URL that are taken for punctuation of the sentence around it."""
_MASK = "…"


def redact(text: str) -> str:
    """Mask the user, the password and the values of the query in every URL of a text. The text may be only a URL.

    >>> redact("http://me:secret@host/x.jsonl?token=secret&page=2: no such file")
    'http://…@host/x.jsonl?token=…&page=…: no such file'
    >>> redact("s3://bucket/part-?.jsonl"), redact("hf://datasets/org/name@main")
    ('s3://bucket/part-?.jsonl', 'hf://datasets/org/name@main')
    """
    return _URL.sub(_masked, text) if "://" in text else text


def _masked(found: re.Match[str]) -> str:
    scheme, user, rest, query = found.groups(default="")
    if query and scheme.lower() in _WITH_QUERY:
        body = query.rstrip(_PUNCTUATION)
        fields = [field.partition("=") for field in body[1:].split("&")]
        masked = "&".join(f"{name}={_MASK}" if equals else _MASK for name, equals, _ in fields)
        query = f"?{masked}{query[len(body) :]}"
    return f"{scheme}{_MASK + '@' if user else ''}{rest}{query}"
