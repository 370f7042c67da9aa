"""The codes of error rows: every reason why a row has no answer. docs/format.md says what each of them means."""

from __future__ import annotations

from enum import StrEnum, auto


class Code(StrEnum):
    """Reasons why a row has no answer. The values are stable: users' scripts compare them."""

    # The line
    INVALID_JSON = auto()
    MISSING_COLUMN = auto()
    INVALID_COLUMN = auto()
    TEMPLATE_ERROR = auto()
    # Media
    INVALID_MEDIA = auto()
    MEDIA_FORBIDDEN = auto()
    MEDIA_UNAVAILABLE = auto()
    MEDIA_TOO_LARGE = auto()
    # The request, refused here or by the server
    INVALID_REQUEST = auto()
    UNKNOWN_URL = auto()
    UNKNOWN_PARAMETER = auto()
    INVALID_PARAMETER = auto()
    INVALID_CONSTRAINT = auto()
    MODEL_NOT_FOUND = auto()
    PROMPT_TOO_LONG = auto()
    # The engine
    ENGINE_CRASH = auto()
    SERVER_ERROR = auto()
    INVALID_ANSWER = auto()
    INTERNAL_ERROR = auto()
