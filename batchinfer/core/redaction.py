"""Masks secrets before values are shown or recorded: those in URLs, and values whose names say so. Pure."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

_USER = r"[^/?#\s]*@|(?!arn:)[^/?#\s:@]*:(?!\d+(?:[/?#\s]|$))[^?#\s@]*@"
"""User and password at the start of a URL. The second form is for a password with a slash, which a secret key of
AWS may have. A port and an ARN are no passwords."""
_QUERY = r"\?(?:[^\s\"]|\"(?![,}\])>:\s]|$))+"
"""Query of a URL. A quote belongs to it unless it ends a text of JSON."""
_URL = re.compile(
    rf"([a-z][a-z0-9+.-]{{0,31}}:/{{1,2}}(?!/))({_USER})?([^?\s]*)({_QUERY})?", re.IGNORECASE
)
_WITH_QUERY = ("http", "https")
"""Schemes whose URLs can have a query. In URLs of other schemes, a question mark is part of a glob or a key."""
_PUNCTUATION = "'\"`:;,.)]}>"
"""Characters at the end of a URL that are taken for punctuation of the sentence around it."""
_SECRET_FIELD = re.compile(r"sig|key|token|secret|pass|auth|cred|code", re.IGNORECASE)
"""Names of a query's fields whose values may be secrets; rather too many than too few."""
_MASK = "…"


def redact(text: str, *, whole_queries: bool = True) -> str:
    """Mask the user and password in every URL of a text, and the values of the query in URLs of the web.

    Args:
        text: The text.
        whole_queries: Whether all values of queries are masked, or only those whose names say that they are secrets.

    >>> redact("http://me:secret@host/x.jsonl?token=secret&page=2: no such file")
    'http://…@host/x.jsonl?token=…&page=…: no such file'
    >>> redact("http://host/v1?api-version=1&sig=secret", whole_queries=False)
    'http://host/v1?api-version=1&sig=…'
    >>> redact("s3://key:sec/ret@bucket/x, s3:/key:secret@bucket/x")
    's3://…@bucket/x, s3:/…@bucket/x'
    >>> redact("s3://bucket/part-?.jsonl"), redact("hf://datasets/org/name@main")
    ('s3://bucket/part-?.jsonl', 'hf://datasets/org/name@main')
    """
    mask = partial(_masked, whole_queries=whole_queries)
    return _URL.sub(mask, text) if ":/" in text else text


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


def _masked(found: re.Match[str], *, whole_queries: bool) -> str:
    scheme, user, rest, query = found.groups(default="")
    if query and scheme.partition(":")[0].lower() in _WITH_QUERY:
        body = query.rstrip(_PUNCTUATION)
        fields = [field.partition("=") for field in body[1:].split("&")]
        for index, (name, equals, _) in enumerate(fields):
            if whole_queries or _SECRET_FIELD.search(name):
                fields[index] = (name, equals, _MASK) if equals else ("", "", _MASK)
        query = f"?{'&'.join(map(''.join, fields))}{query[len(body) :]}"
    return f"{scheme}{_MASK + '@' if user else ''}{rest}{query}"


_SECRET_NAME = re.compile(
    r"(^|[_-])(token|secret|password|passwd|credentials?|(api|access|secret)[_-]?key)$",
    re.IGNORECASE,
)
_HIDDEN = "(secret)"


def is_secret(name: str) -> bool:
    """Whether the name of a setting says that its value must not be shown.

    >>> is_secret("hf_token"), is_secret("max_tokens"), is_secret("stop_token_ids")
    (True, False, False)
    """
    return _SECRET_NAME.search(name) is not None


def without_secrets(value: Any, name: str = "") -> Any:
    """Return a value with each secret replaced by "(secret)", and those in URLs by "…".

    A value counts as a secret if its name does by `is_secret`. The name is `name`, the key in a dictionary, the option
    before it in a list of words, or KEY in a text KEY=VALUE.
    """
    if isinstance(value, dict):
        return {key: without_secrets(item, str(key)) for key, item in value.items()}
    if isinstance(value, list | tuple):
        shown, option = list[Any](), name
        for item in value:
            if isinstance(item, str) and item.startswith("--"):  # words of a command line
                option, has_value, _ = item.lstrip("-").partition("=")
                is_hidden = has_value and is_secret(option)
                shown.append(f"--{option}={_HIDDEN}" if is_hidden else redact(item))
            else:
                shown.append(without_secrets(item, option))
        return shown
    if value in (None, "", False):
        return value
    if is_secret(name):
        return _HIDDEN
    if isinstance(value, Path):
        value = str(value)
    if isinstance(value, str):
        key, equals, _ = value.partition("=")  # KEY=VALUE, as an option may be given
        if equals and is_secret(key):
            return f"{key}={_HIDDEN}"
        return redact(value)
    return value
