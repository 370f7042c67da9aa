"""The codes of failed rows that come from the row itself. Stable: scripts and docs/format.md rely on them."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from enum import StrEnum
from typing import Self


class Code(StrEnum):
    """One way in which a row or its request can be bad; `explanation` is the line in docs/format.md."""

    explanation: str

    def __new__(cls, value: str, explanation: str) -> Self:
        """Make a member that is its code and carries its explanation."""
        member = str.__new__(cls, value)
        member._value_ = value
        member.explanation = explanation
        return member

    # The line
    INVALID_JSON = "invalid_json", "The line is not JSON (a blank line included)."
    INVALID_TEXT = "invalid_text", "The line holds bytes or escapes that are no Unicode text."
    NOT_AN_OBJECT = "not_an_object", "The line is JSON, but no object."
    ROW_MISMATCH = "row_mismatch", "The line's `_row` is not the number that its place gives."
    MISSING_COLUMN = "missing_column", "A column that the prompt needs is not in the row."
    # The prompt
    INVALID_MESSAGES = "invalid_messages", "The conversation has no known shape."
    EMPTY_CONVERSATION = "empty_conversation", "The conversation has no user message with text."
    MISSING_CONTENT = "missing_content", "A message has no content."
    UNKNOWN_ROLE = "unknown_role", "A message's role is missing or unknown."
    UNSUPPORTED_CONTENT = "unsupported_content", "A message holds parts other than text."
    NOTHING_TO_CONTINUE = "nothing_to_continue", "No answer's beginning to continue."
    INVALID_PROMPT = "invalid_prompt", "The prompt is neither text nor a list of token ids."
    EMPTY_PROMPT = "empty_prompt", "The prompt is empty."
    TEMPLATE_ERROR = "template_error", "The template failed on this row, or went over its limits."
    TOKENIZER_ERROR = "tokenizer_error", "The tokenizer refused the prompt."
    PROMPT_TOO_LONG = "prompt_too_long", "The prompt leaves the model no room for a token."
    # The request
    INVALID_REQUEST = "invalid_request", "The request's frame is wrong: custom_id, method or body."
    UNKNOWN_URL = "unknown_url", "The request's url is none that can be answered."
    WRONG_TASK = "wrong_task", "The request's url belongs to another task than the run's."
    INVALID_PARAMETER = "invalid_parameter", "A parameter's value is wrong, or contradicts another."
    UNSUPPORTED_PARAMETER = "unsupported_parameter", "A parameter that is not supported."


def near(name: str, options: Iterable[str]) -> str:
    """Return `; did you mean 'x'?` for the closest option, else an empty string.

    >>> near("promt", ["prompt", "answer"])
    "; did you mean 'prompt'?"
    """
    matches = difflib.get_close_matches(name, list(options), n=1)
    return f"; did you mean {matches[0]!r}?" if matches else ""
