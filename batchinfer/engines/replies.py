"""What a server's reply means: an answer, a refusal of this row, a failure that may pass, or a refusal of everyone.

The tables go by the HTTP status and by the fields `param`, `code` and `type` of the body's error, never by its text.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Literal

import msgspec

from batchinfer.core.printable import printable
from batchinfer.core.records import Call, Failure, Reply
from batchinfer.core.row_codes import Code

FORBIDDEN = 403
"""Status with which an endpoint refuses either the key, or what one row says."""
_TRANSIENT = frozenset({408, 409, 425, 429, *range(500, 1000)} - {501})
"""Statuses of replies that may be another at the next attempt."""
_OVERLOADED = frozenset({429, 503, 529})
"""Statuses of a server that has too much to do. They say nothing about the row."""
DENIED = frozenset({401, 402})
"""Statuses with which an endpoint refuses everyone who has this key."""
_INVALID_TYPE = "invalid_answer"
"""Our `type` of the error in a reply that replaces a server's answer which is none."""
_PROMPT_PARAMS = frozenset({"input_tokens", "input_text", "prompt_tokens"})
_PROMPT_CODES = frozenset({"context_length_exceeded", "string_above_max_length"})
_USED_UP = "insufficient_quota"
_CONSTRAINT_PARAMS = frozenset(
    {"response_format", "structured_outputs", "guided_json", "json_schema", "grammar"}
)
_LONGEST_MESSAGE = 1000
Verdict = Literal["final", "denied", "busy", "failed"]


class Problem(msgspec.Struct, frozen=True):
    """The error in a body, in the shapes that servers give it."""

    message: str = ""
    type: str = ""
    param: str = ""
    code: str = ""


def problem_of(body: bytes) -> Problem:
    """Return the error that a body tells, empty if it tells none. A body that is no JSON object is its own message."""
    try:
        found = msgspec.json.decode(body)
    except (ValueError, RecursionError):
        found = printable(body[:_LONGEST_MESSAGE].decode("utf-8", "replace"))
    if isinstance(found, dict):
        is_old = found.get("object") == "error"
        own = found if is_old else found.get("detail") or found.get("message", "")
        found = found.get("error") or own
    if not isinstance(found, dict):
        return Problem(message=str(found)[:_LONGEST_MESSAGE])
    names = Problem.__struct_fields__
    texts = {name: str(found[name]) for name in names if found.get(name) is not None}
    # vLLM names a field that pydantic refuses by its place in the request: body.model.
    return Problem(**{**texts, "param": texts.get("param", "").removeprefix("body.")})


def is_lost(reply: Reply) -> bool:
    """Whether a server says that it does not have the model, or nothing of its own, as a proxy's page."""
    if reply.status not in (404, 405):
        return False
    problem = problem_of(reply.body)
    return _is_unknown_model(problem) or not (problem.type or problem.param or problem.code)


def _is_unknown_model(problem: Problem) -> bool:
    return problem.param == "model" or problem.code == "model_not_found"


def asks_for(call: Call, model: str) -> bool:
    """Whether a call asks for a model, by its name or by naming none."""
    try:
        body = msgspec.json.decode(call.body, type=dict[str, Any])
    except (ValueError, RecursionError):
        return False
    return bool(body.get("model", model) == model)


# Field that the body of an answer has, by the end of the call's path.
_ANSWER_FIELDS = {
    **dict.fromkeys(("embeddings", "pooling", "classify", "score"), "data"),
    "completions": "choices",
    "responses": "output",
    "rerank": "results",
}


_ITEMS = re.compile(rb'\[\s*\{\s*"')
"""How a list begins whose first item has a field."""


def judge(
    call: Call, status: int, body: bytes, masked: Callable[[bytes], bytes] = bytes
) -> tuple[Reply, Verdict]:
    """Return the reply to a call and what follows from it. Pure.

    It is final; or it would be the same for everyone who has this key; or the server has too much to do, which says
    nothing about the row; or it has failed, perhaps only this time.

    Args:
        call: The call.
        status: The server's status; 0 if no whole answer came.
        body: Its body, or the reason.
        masked: Hides the key in an answer that is none, before it is quoted.
    """
    reply = Reply(key=call.key, status=status or 503, body=body)
    if status == 200 and not _is_answer(call, body):
        body = masked(body)
        said = problem_of(body).message or printable(body[:200].decode("utf-8", "replace"))
        message = f"the server's answer is none: {said[:200]}"
        error = msgspec.json.encode({"error": {"message": message, "type": _INVALID_TYPE}})
        return Reply(key=call.key, status=502, body=error), "failed"
    problem = problem_of(body) if status == 429 else Problem()
    if status in DENIED or _USED_UP in (problem.code, problem.type):
        return reply, "denied"
    if status in _OVERLOADED:
        return reply, "busy"
    is_none = status < 400 and status != 200  # such as a redirection to a page for signing in
    is_failure = is_none or status in _TRANSIENT or status == FORBIDDEN
    return reply, "failed" if is_failure else "final"


def _is_answer(call: Call, body: bytes) -> bool:
    """Whether the body of a status 200 is an answer to a call: whole JSON, no error, with what such answers hold."""
    field = _ANSWER_FIELDS.get(call.path.rpartition("/")[2])
    try:
        found = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except (ValueError, RecursionError):
        is_file = not call.content_type.startswith("application/json")
        return is_file and bool(body)  # a transcription may be plain text
    has_error = bytes(found.get("error", b"null")) != b"null"
    if field is None:
        has_answer = "text" not in found or bytes(found["text"]).startswith(b'"')
    else:
        items = bytes(found.get(field, b""))
        # A response whose model said nothing has no item; a completion has its empty choice.
        has_answer = bool(_ITEMS.match(items)) or (field == "output" and items.startswith(b"["))
    return has_answer and not has_error


def failure_of(reply: Reply) -> Failure | None:
    """Return why a reply is no answer; None if it is one. Pure."""
    if reply.status == 0:
        message = reply.body.decode("utf-8", "replace")
        return Failure(code=Code.ENGINE_CRASH, message=message, status=500)
    if reply.status == 200:
        return None
    problem, status = problem_of(reply.body), reply.status
    message = problem.message[:_LONGEST_MESSAGE] or f"the server answered with status {status}"
    code, param = _code_of(status, problem), problem.param or None
    return Failure(code=code, message=message, status=status, param=param)


def _code_of(status: int, problem: Problem) -> Code:
    if problem.type == _INVALID_TYPE or status < 400:
        return Code.INVALID_ANSWER
    if status in _TRANSIENT:
        return Code.SERVER_ERROR
    if problem.param in _PROMPT_PARAMS or problem.code in _PROMPT_CODES:
        return Code.PROMPT_TOO_LONG
    if _is_unknown_model(problem):
        return Code.MODEL_NOT_FOUND
    if status in (404, 405):
        return Code.UNKNOWN_URL
    if problem.param.partition(".")[0] in _CONSTRAINT_PARAMS:
        return Code.INVALID_CONSTRAINT
    return Code.INVALID_PARAMETER if problem.param else Code.INVALID_REQUEST
