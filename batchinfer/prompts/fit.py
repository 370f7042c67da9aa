"""Prompts that are longer than the model allows."""

from __future__ import annotations

from batchinfer.prompts.codes import Code
from batchinfer.prompts.types import RowProblem


def fit(
    token_ids: list[int], *, max_model_len: int, max_tokens: int | None, mode: str
) -> list[int]:
    """Return the prompt, cut where `mode` says so.

    A prompt must leave room for one token. One that is to be cut is cut to leave room for `max_tokens`,
    though never below half of the model's length.

    Args:
        token_ids: The prompt.
        max_model_len: Tokens of prompt and answer together.
        max_tokens: Tokens wanted for the answer; None: one will do.
        mode: ``error``, or the end that loses tokens: ``left``, ``right`` or ``middle``.

    Raises:
        RowProblem: too long, and `mode` is ``error``.

    >>> fit([1, 2, 3, 4, 5, 6], max_model_len=5, max_tokens=1, mode="middle")
    [1, 2, 5, 6]
    """
    room = max_model_len - 1
    if mode == "error":
        if len(token_ids) > room:
            raise too_long(f"{len(token_ids)} tokens", max_model_len)
        return token_ids
    room = max(max_model_len - max(max_tokens or 1, 1), max_model_len // 2, 1)
    if len(token_ids) <= room:
        return token_ids
    if mode == "left":
        return token_ids[-room:]
    if mode == "right":
        return token_ids[:room]
    head = (room + 1) // 2
    tail = room - head
    return token_ids[:head] + (token_ids[-tail:] if tail else [])


def too_long(length: str, max_model_len: int) -> RowProblem:
    """Make the error of a prompt that leaves no room."""
    return RowProblem(
        Code.PROMPT_TOO_LONG,
        f"the prompt has {length}, expected at most {max_model_len - 1} of the model's "
        f"{max_model_len} (--max-model-len, --truncate-prompt)",
    )
