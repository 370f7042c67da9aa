"""The request formats `openai-batch` and `completions`: each row is a request, whose body goes to the server."""

from __future__ import annotations

from typing import Any

from batchinfer.core.errors import near
from batchinfer.core.row_codes import Code
from batchinfer.prompts.json_lines import (
    ID_FIELD,
    ROW_FIELD,
    as_id,
    check_place,
    decode_object,
    shown,
    type_of,
)
from batchinfer.prompts.media import read_media
from batchinfer.prompts.types import (
    CHAT_URL,
    COMPLETIONS_URL,
    SPEECH_URLS,
    Draft,
    EngineRules,
    PromptConfig,
    RowProblem,
)

_PROMPTS = ("messages", "prompt", "input", "text_1", "queries", "data_1", "query")
"""Fields that hold the prompt. They go first, so that bodies with a common beginning sort next to each other."""
_OF_THE_SERVICE = frozenset(
    {
        *("metadata", "service_tier", "store", "user", "safety_identifier"),
        *("prompt_cache_key", "prompt_cache_retention", "best_of"),
    }
)
"""Fields that no server has to know: options of OpenAI's hosted service, and `best_of`, which does not leave us."""


class RequestsReader:
    """Reads rows that are requests: lines of an OpenAI batch file, or bodies of completions."""

    def __init__(self, config: PromptConfig, rules: EngineRules) -> None:
        self._config = config
        self._rules = rules
        self._is_batch = config.request_format == "openai-batch"

    @property
    def needed_columns(self) -> dict[str, list[str]]:
        """Columns that every row needs. Keys name the options."""
        fields = ["custom_id", "method", "url", "body"] if self._is_batch else ["prompt"]
        needed = {f"--request-format {self._config.request_format}: the field": fields}
        if self._config.id_column:
            needed["--id-column"] = [self._config.id_column]
        return needed

    def read(self, draft: Draft, data: bytes) -> None:
        """Read a line into its draft. A bad row's draft keeps what was read before the fault.

        Raises:
            RowProblem: the row is bad.
        """
        line = decode_object(data)
        row, row_id = line.pop(ROW_FIELD, None), line.pop(ID_FIELD, None)
        if name := self._config.id_column:
            row_id = line[name] if name == "prompt" else line.pop(name, None)
        if self._is_batch and line.get("custom_id"):
            row_id = line["custom_id"]
        draft.id = as_id(row_id) if row_id is not None else ""
        check_place(row, draft.row)
        if self._is_batch:
            draft.path, body = _envelope(line)
        else:
            draft.path, body = COMPLETIONS_URL, line
            body.pop("engine", None)  # a name of the model, from which it came
            if not body.get("prompt"):
                raise _invalid("prompt", f"{type_of(body, 'prompt')}, expected a prompt")
        first = [name for name in _PROMPTS if name in body]
        draft.body = {name: body[name] for name in first} | body
        if body.get("stream"):
            raise _invalid("stream", "expected the request without it; each answer comes whole")
        if draft.path in SPEECH_URLS:
            draft.sound = _sound_of(draft.body)
        self._check_names(draft)

    def _check_names(self, draft: Draft) -> None:
        known = self._rules.parameters(draft.path)
        for name in draft.body if known else ():
            if name in known or name in _OF_THE_SERVICE:
                continue
            advice = near(name, known)
            if name.startswith("guided_"):
                advice = f"; vLLM's name of it is structured_outputs: {{{name[7:]!r}: …}}"
            raise RowProblem(
                Code.UNKNOWN_PARAMETER,
                f"{name[:80]}: {draft.path} of the server has no such parameter{advice}",
                param=name[:80],
            )


def _envelope(line: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the path and the body of a line of an OpenAI batch file.

    Raises:
        RowProblem: a part is missing or wrong.
    """
    url, body = line.get("url"), line.get("body")
    for name, is_right, expected in (
        ("custom_id", isinstance(line.get("custom_id"), str) and line["custom_id"], "a text"),
        ("method", line.get("method") == "POST", "POST"),
        ("url", isinstance(url, str) and url.startswith("/"), f"a path, as in {CHAT_URL}"),
        ("body", isinstance(body, dict), "an object"),
    ):
        if not is_right:
            value = line.get(name)
            found = shown(value) if isinstance(value, str) else type_of(line, name)
            code = Code.UNKNOWN_URL if name == "url" else Code.INVALID_REQUEST
            raise RowProblem(code, f"{name} is {found}, expected {expected}", param=name)
    return str(url), dict(body or {})


def _sound_of(body: dict[str, Any]) -> str:
    """Take the sound out of a body, where it is a link or a data URL."""
    try:
        [url] = read_media(body.pop("file_url", None), "audio")
    except ValueError as error:
        raise _invalid("file_url", f"{error}; expected a link, or data:…;base64,…") from error
    return url


def _invalid(name: str, finding: str) -> RowProblem:
    return RowProblem(Code.INVALID_PARAMETER, f"{name}: {finding}", param=name)
