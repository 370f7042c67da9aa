"""Forms of an answer beside tables: one JSON object a row, made of the output line, for programs that know it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import msgspec

from batchinfer.formats.lines import OutputLine, read_line

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_SERVER_FAULT = 500


def _error_of(line: OutputLine) -> dict[str, Any]:
    """Return the error of a line as an OpenAI server writes it."""
    assert line.error is not None
    kind = "invalid_request_error" if line.status < _SERVER_FAULT else "server_error"
    error = line.error
    return {"code": error.code, "message": error.message, "param": error.param, "type": kind}


def openai_batch(line: str, _source: str) -> bytes:
    """Return the line of the output file of OpenAI's batch API. Its ids follow from the row."""
    found = read_line(line.encode())
    digest = hashlib.blake2b(f"{found.row}\0{found.id}".encode(), digest_size=12).hexdigest()
    body: Any = found.body if found.error is None else {"error": _error_of(found)}
    request = f"req_{digest}"
    response: Any = {"status_code": found.status, "request_id": request, "body": body}
    error = None
    if found.error is not None and found.status >= _SERVER_FAULT:  # no fault of the request
        response, error = None, {"code": found.code, "message": found.error.message}
    names = {"id": f"batch_{request}", "custom_id": found.id}
    return _encode({**names, "response": response, "error": error})


def completions(line: str, source: str) -> bytes:
    """Return the row's request and its result. A failed row has no result, but an error."""
    found = read_line(line.encode())
    try:
        request: Any = _decode(source)
        request = {name: value for name, value in request.items() if name not in ("_row", "_id")}
    except msgspec.DecodeError:
        request = None  # the line is no JSON object
    if found.error is not None:
        return _encode({"request": request, "result": None, "error": _error_of(found)})
    choices = _decode(found.body).get("choices", msgspec.Raw(b"[]"))
    return _encode({"request": request, "result": {"choices": choices}})


def unchanged(line: str, _source: str) -> bytes:
    """Return the output line itself."""
    return line.encode()


ENCODERS: dict[str, Callable[[str, str], bytes]] = {
    "openai-batch": openai_batch,
    "completions": completions,
    "lines": unchanged,
}
"""By the name of the form: a function of a row's output line, and of its line in the chunk if NEEDS_SOURCE."""
NEEDS_SOURCE = ("completions",)
