"""Secrets that URLs carry, masked wherever an address is shown or recorded. Pure."""

from __future__ import annotations

import re

_URL = re.compile(r"([a-z][a-z0-9+.-]*://)([^/?#\s]*@)?([^?\s]*)(\?\S+)?", re.IGNORECASE)
_WITH_QUERY = ("http://", "https://")
"""Schemes whose URLs have a query. In other URLs a question mark belongs to a glob or a key."""
_PUNCTUATION = "'\"`:;,.)]}>"
"""Characters that may follow an address in a sentence without being part of it."""
_MASK = "…"


def redact(text: str) -> str:
    """Mask user, password and the values of the query in every URL of a text, which may be a URL alone.

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
