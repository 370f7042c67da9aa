"""The request formats `openai-batch` and `completions`: each row is a request, whose body goes to the server."""

from __future__ import annotations

from typing import Any

from batchinfer.core.errors import near
from batchinfer.core.row_codes import Code
from batchinfer.prompts.json_lines import shown
from batchinfer.prompts.media import SOUND
from batchinfer.prompts.types import (
    CHAT_URL,
    COMPLETIONS_URL,
    SPEECH_URLS,
    EngineRules,
    PromptConfig,
    RowProblem,
)

_PROMPTS = ("messages", "prompt", "input", "text_1", "queries", "data_1", "query")
"""Fields that hold the prompt. They go first, so that bodies with a common beginning sort next to each other."""
_LET_THROUGH = {
    *("metadata", "service_tier", "store", "user", "safety_identifier", "prompt_cache_key"),
    *("prompt_cache_retention", "best_of", "file_url"),
}
"""Fields that no server has to know: options of OpenAI's hosted service, and what does not leave us."""


class RequestsReader:
    """Reads rows that are requests: lines of an OpenAI batch file, or bodies of completions."""

    path = ""
    """Path to which all rows go; here, each row says its own."""

    def __init__(self, config: PromptConfig, rules: EngineRules) -> None:
        self._config = config
        self._rules = rules
        self._is_batch = config.request_format == "openai-batch"

    @property
    def needed_columns(self) -> dict[str, list[str]]:
        """Columns that every row needs. Keys name the options."""
        fields = ["custom_id", "method", "url", "body"] if self._is_batch else ["prompt"]
        return {f"--request-format {self._config.request_format}: the field": fields}

    def read(self, columns: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        """Return the path and the body that a row states; a sound is the field `file` of the body.

        Raises:
            RowProblem: the row is bad.
        """
        if self._is_batch:
            path, given = _envelope(columns)
        else:
            others = {"engine", self._config.column("id")}
            given = {name: value for name, value in columns.items() if name not in others}
            path = COMPLETIONS_URL
        body = {name: given[name] for name in _PROMPTS if name in given} | given
        if body.get("stream"):
            message = "stream: expected the request without it; each answer comes whole"
            raise RowProblem(Code.INVALID_PARAMETER, message, param="stream")
        self._check_names(path, body)
        if path in SPEECH_URLS:
            body[SOUND] = body.pop("file_url", None)
            if not isinstance(body[SOUND], str):
                message = "file_url: expected the URL of a sound"
                raise RowProblem(Code.INVALID_MEDIA, message, param="file_url")
        return path, body

    def _check_names(self, path: str, body: dict[str, Any]) -> None:
        known = self._rules.parameters(path)
        unknown = [name for name in body if name not in known and name not in _LET_THROUGH]
        if known and unknown:
            name = unknown[0][:80]
            message = f"{name}: {path} of the server has no such parameter{near(name, known)}"
            raise RowProblem(Code.UNKNOWN_PARAMETER, message, param=name)


def _envelope(line: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the path and the body of a line of an OpenAI batch file.

    Raises:
        RowProblem: a part is missing or wrong.
    """
    url, body, custom_id = line.get("url"), line.get("body"), line.get("custom_id")
    for name, is_right, expected in (
        ("custom_id", isinstance(custom_id, str) and custom_id, "a text"),
        ("url", isinstance(url, str) and url.startswith("/"), f"a path, as in {CHAT_URL}"),
        ("method", line.get("method") == "POST", "POST"),
        ("body", isinstance(body, dict), "an object"),
    ):
        if not is_right:
            code = Code.UNKNOWN_URL if name == "url" else Code.INVALID_REQUEST
            found = shown(line[name]) if name in line else "missing"
            raise RowProblem(code, f"{name} is {found}, expected {expected}", param=name)
    return str(url), dict(body or {})
