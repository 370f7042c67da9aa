"""The codes of error rows: every reason why a row has no answer. docs/format.md shows this table."""

from __future__ import annotations

from enum import StrEnum
from typing import Self


class Code(StrEnum):
    """Reasons why a row has no answer. The values are stable: users' scripts compare them."""

    explanation: str
    """Sentence that explains this code in docs/format.md."""

    def __new__(cls, value: str, explanation: str) -> Self:
        """Make a member from its code and its explanation."""
        member = str.__new__(cls, value)
        member._value_ = value
        member.explanation = explanation
        return member

    # The line
    INVALID_JSON = "invalid_json", "The line is not a JSON object in UTF-8 (a blank line included)."
    MISSING_COLUMN = "missing_column", "A column that the request needs is not in the row."
    INVALID_COLUMN = "invalid_column", "A column's value cannot become what the option asks for."
    TEMPLATE_ERROR = "template_error", "The prompt template failed on this row."
    # Media
    INVALID_MEDIA = (
        "invalid_media",
        "An image, a video or a sound is broken, or named in no known form.",
    )
    MEDIA_FORBIDDEN = (
        "media_forbidden",
        "A link names a place that rows must not name: a private address, a local path, another scheme.",
    )
    MEDIA_UNAVAILABLE = "media_unavailable", "A link could not be fetched."
    MEDIA_TOO_LARGE = "media_too_large", "A file has more bytes than `--max-media-bytes`."
    # The request, refused here or by the server
    INVALID_REQUEST = "invalid_request", "The request is refused; the message says why."
    UNKNOWN_URL = "unknown_url", "The request's url is none that the server has."
    UNKNOWN_PARAMETER = "unknown_parameter", "The server has no parameter of this name."
    INVALID_PARAMETER = "invalid_parameter", "A parameter's value is wrong, or contradicts another."
    INVALID_CONSTRAINT = (
        "invalid_constraint",
        "The answer's schema, expression or grammar is refused.",
    )
    MODEL_NOT_FOUND = (
        "model_not_found",
        "The row asks for a model or an adapter that the run does not have.",
    )
    PROMPT_TOO_LONG = "prompt_too_long", "The prompt leaves the model no room for a token."
    # The engine
    ENGINE_CRASH = (
        "engine_crash",
        "The engine died several times with this row in it, at least once with it alone.",
    )
    SERVER_ERROR = (
        "server_error",
        "The server failed on this row again and again, and answered others.",
    )
    INVALID_ANSWER = "invalid_answer", "The server's answer is no answer, again and again."
    INTERNAL_ERROR = "internal_error", "batchinfer failed on this row; please report it."
