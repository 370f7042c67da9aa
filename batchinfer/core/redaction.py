"""Masks the secrets in URLs (user, password, query) before the URLs are shown or recorded. Pure."""

from __future__ import annotations

import re

_USER = r"[^/?#\s]*@|(?!arn:)[^/?#\s:@]*:(?!\d+(?:[/?#\s]|$))[^?#\s@]*@"
"""User and password at the start of a URL. The second form is for a password with a slash, which a secret key of
AWS may have. A port and an ARN are no passwords."""
_URL = re.compile(rf"([a-z][a-z0-9+.-]*:/{{1,2}}(?!/))({_USER})?([^?\s]*)(\?\S+)?", re.IGNORECASE)
_WITH_QUERY = ("http", "https")
"""Schemes whose URLs can have a query. In URLs of other schemes, a question mark is part of a glob or a key."""
_PUNCTUATION = "'\"`:;,.)]}>"
"""Characters at the end of a URL that are taken for punctuation of the sentence around it."""
_MASK = "…"


def redact(text: str) -> str:
    """Mask the user and password in every URL of a text, and the values of the query in URLs of the web.

    >>> redact("http://me:secret@host/x.jsonl?token=secret&page=2: no such file")
    'http://…@host/x.jsonl?token=…&page=…: no such file'
    >>> redact("s3://key:sec/ret@bucket/x, s3:/key:secret@bucket/x")
    's3://…@bucket/x, s3:/…@bucket/x'
    >>> redact("s3://bucket/part-?.jsonl"), redact("hf://datasets/org/name@main")
    ('s3://bucket/part-?.jsonl', 'hf://datasets/org/name@main')
    """
    return _URL.sub(_masked, text) if ":/" in text else text


def has_user(url: str) -> bool:
    """Whether a URL has a user, a password or another secret before its host or bucket.

    >>> (
    ...     has_user("s3://key:secret@bucket/x"),
    ...     has_user("s3://bucket/x@1"),
    ...     has_user("http://host:80/x@1"),
    ... )
    (True, False, False)
    """
    found = _URL.match(url)
    return found is not None and found[2] is not None


def _masked(found: re.Match[str]) -> str:
    scheme, user, rest, query = found.groups(default="")
    if query and scheme.partition(":")[0].lower() in _WITH_QUERY:
        body = query.rstrip(_PUNCTUATION)
        fields = [field.partition("=") for field in body[1:].split("&")]
        masked = "&".join(f"{name}={_MASK}" if equals else _MASK for name, equals, _ in fields)
        query = f"?{masked}{query[len(body) :]}"
    return f"{scheme}{_MASK + '@' if user else ''}{rest}{query}"
