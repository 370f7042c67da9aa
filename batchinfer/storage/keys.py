"""What a key may be, the same for every store. Pure."""

from __future__ import annotations

from batchinfer.core.errors import InputError


def check_key(key: str) -> str:
    """Return `key` if it names one object below a store's root.

    Raises:
        InputError: The key is empty or absolute, or a component is empty, "." or "..".

    >>> check_key("outputs/part-00000.jsonl")
    'outputs/part-00000.jsonl'
    """
    _refuse_unless(bool(key), key)
    _check_components(key, key.split("/"))
    return key


def check_prefix(prefix: str) -> str:
    """Return `prefix` if it can be the start of a key. The empty prefix means every key.

    Raises:
        InputError: As for `check_key`; the last component may be incomplete or empty.

    >>> check_prefix("outputs/")
    'outputs/'
    """
    folder, _, rest = prefix.rpartition("/")
    if "/" in prefix:
        _check_components(prefix, folder.split("/"))
    _refuse_unless(rest != ".." and "\0" not in rest, prefix)
    return prefix


def _check_components(key: str, components: list[str]) -> None:
    _refuse_unless("\0" not in key and all(part not in {"", ".", ".."} for part in components), key)


def _refuse_unless(condition: bool, key: str) -> None:
    if not condition:
        raise InputError(
            f"key {key!r}: leaves the storage root or is no plain path, "
            "expected names joined by single slashes",
            hint="use a path relative to the root, without '..', and without a slash at its start",
        )
