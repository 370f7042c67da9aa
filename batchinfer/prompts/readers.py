"""The request formats: rows whose columns become requests by the run's options, and rows that are requests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from batchinfer.core.errors import near
from batchinfer.core.row_codes import Code
from batchinfer.core.tasks import is_pooling
from batchinfer.prompts.conversation import Message, read_conversation, select_turns
from batchinfer.prompts.json_lines import (
    ID_FIELD,
    ROW_FIELD,
    column,
    decode_text,
    reading,
    shown,
)
from batchinfer.prompts.media import SOUND, add_media, read_media
from batchinfer.prompts.prompt_config import read_constraint, read_tools
from batchinfer.prompts.templates import CONVERSATIONS, PromptTemplate, template_text
from batchinfer.prompts.types import (
    CHAT_URL,
    COMPLETIONS_URL,
    MEDIA_KINDS,
    SPEECH_URLS,
    TASK_PATHS,
    WITH_TOOLS,
    EngineRules,
    PromptConfig,
    RowError,
    Unfit,
)

_PROMPTS = ("messages", "prompt", "input", "text_1", "queries", "data_1", "query")
"""Fields that hold the prompt. They go first, so that bodies with a common beginning sort next to each other."""
_LET_THROUGH = {
    *("metadata", "service_tier", "store", "user", "safety_identifier", "prompt_cache_key"),
    *("prompt_cache_retention", "best_of", "file_url"),
}
"""Fields that no server has to know: options of OpenAI's hosted service, and what is taken out of the body here."""

_NO_FIELDS = ("engine", "id", ID_FIELD, ROW_FIELD)
"""Columns of a table of completions that are no fields of a body, besides the one with the id."""


class RowsReader:
    """Reads rows whose columns hold data.

    Raises:
        ConfigError: the template cannot be used.
    """

    def __init__(self, config: PromptConfig, rules: EngineRules) -> None:
        self._config = config
        self._rules = rules
        text = template_text(config.prompt_template) if config.prompt_template else ""
        values = {"system_prompt": config.system_prompt}
        self._template = PromptTemplate(text, values) if text else None
        is_conversation = config.prompt_template and not text
        self._messages_column = CONVERSATIONS if is_conversation else config.messages_column
        self._is_judged = is_pooling(config.task)
        self.path = TASK_PATHS.get(config.task, CHAT_URL if config.is_chat else COMPLETIONS_URL)
        """Path to which all rows go."""

    @property
    def needed_columns(self) -> dict[str, list[str]]:
        """Columns that every row needs. Keys name the options."""
        config, needed = self._config, {}
        needed["--prompt-column"] = [config.prompt_column]
        asks = "--messages-column" if config.messages_column else "--prompt-template sharegpt"
        needed[asks] = [self._messages_column]
        needed["--pair-columns"] = config.pair_columns
        needed |= {f"--column {kind}": config.columns.get(kind, []) for kind in MEDIA_KINDS}
        if self._template is not None:
            read = [x for x in self._template.needed_columns if x not in config.blank_columns]
            needed["the template: the variable"] = read
        return needed

    def read(self, columns: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        """Return the path of a row and the body that it states; a sound is the field `file` of the body.

        Raises:
            RowError: the row is bad.
        """
        config = self._config
        if self.path in SPEECH_URLS:
            sounds = self._media(columns, "audio")
            if len(sounds) != 1:
                raise RowError(Code.INVALID_MEDIA, f"{len(sounds)} sounds, expected one")
            body: dict[str, Any] = {SOUND: sounds[0]}
        elif config.pair_columns:
            fields = ("query", "documents") if config.task == "rerank" else ("text_1", "text_2")
            named = zip(fields, config.pair_columns, strict=True)
            body = {field: column(columns, name) for field, name in named}
        else:
            body = self._prompt(columns)
        if config.adapters:  # a single one answers every row
            name = config.column("lora")
            body["model"] = columns.get(name) if name else config.adapters[0]
        if name := config.column("constraint"):
            with reading(f"column {name!r}", Code.INVALID_CONSTRAINT):
                body |= read_constraint(columns.get(name))
        if name := config.column("tools"):
            with reading(f"column {name!r}"):
                tools = columns.get(name)
                tools = decode_text(tools) if isinstance(tools, str) and tools else tools
                if tools:
                    of_run = {x: config.body[x] for x in WITH_TOOLS if x in config.body}
                    body |= {"tools": read_tools(tools), "tool_choice": "auto", **of_run}
        return self.path, body

    def _prompt(self, columns: dict[str, Any]) -> dict[str, Any]:
        """Return the fields of a body that hold the prompt of a row."""
        config, value = self._config, None
        name = self._messages_column or config.prompt_column
        with reading(f"column {name!r}" if name else "the template's text"):
            if self._messages_column:
                messages = read_conversation(column(columns, name))
                selected = select_turns(messages, config.turns, is_judged=self._is_judged)
                return self._chat(columns, selected)
            if self._template is not None:
                blanks = dict.fromkeys(config.blank_columns, "")
                value = self._template.render({**columns, **blanks})
            else:
                value = column(columns, name)
            if self.path == COMPLETIONS_URL and isinstance(value, str):
                value = self._without_end(value)
            is_ids = isinstance(value, list) and all(type(item) is int for item in value)
            if not value or not (isinstance(value, str) or (is_ids and not config.is_chat)):
                raise Unfit(f"{shown(value)}, expected a text (or token ids), not empty")
            if config.is_chat:
                content = [{"type": "text", "text": value}]
                return self._chat(columns, [{"role": "user", "content": content}])
        return {"input" if self._is_judged else "prompt": value}

    def _without_end(self, text: str) -> str:
        mark, end = self._rules.eos_token, len(text)
        while mark and text.endswith(mark, 0, end):
            end -= len(mark)
        return text[:end]

    def _chat(self, columns: dict[str, Any], messages: list[Message]) -> dict[str, Any]:
        """Add media and the system prompt."""
        for kind in reversed(MEDIA_KINDS):  # those of the first kind come first
            add_media(messages, kind, self._media(columns, kind))
        for message in messages:
            parts = message["content"]
            if [part["type"] for part in parts] == ["text"]:
                message["content"] = parts[0]["text"]
            elif not parts and "tool_calls" in message:
                message["content"] = None
        if prompt := self._config.system_prompt:
            others = messages[messages[0]["role"] in ("system", "developer") :]
            messages = [{"role": "system", "content": prompt}, *others]
        return {"messages": messages}

    def _media(self, columns: Mapping[str, Any], kind: str) -> list[str]:
        found: list[str] = []
        for name in self._config.columns.get(kind, ()):
            value = column(columns, name)
            with reading(f"column {name!r}", Code.INVALID_MEDIA):
                found += read_media(value, kind)
        return found


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
            RowError: the row is bad.
        """
        if self._is_batch:
            path, given = _envelope(columns)
        else:
            path, others = COMPLETIONS_URL, {*_NO_FIELDS, self._config.column("id")} - {"prompt"}
            given = {name: value for name, value in columns.items() if name not in others}
            if not given.get("prompt"):
                message = "prompt: is missing or empty, expected a prompt"
                raise RowError(Code.INVALID_REQUEST, message, param="prompt")
        body = {name: given[name] for name in _PROMPTS if name in given} | given
        for name in ("stream", "background"):
            if body.get(name):
                message = f"{name}: expected the request without it; each answer comes whole"
                raise RowError(Code.INVALID_PARAMETER, message, param=name)
        self._check_names(path, body)
        if path in SPEECH_URLS:
            body[SOUND] = body.pop("file_url", None)
            if not isinstance(body[SOUND], str):
                message = "file_url: expected the URL of a sound"
                raise RowError(Code.INVALID_MEDIA, message, param="file_url")
        return path, body

    def _check_names(self, path: str, body: dict[str, Any]) -> None:
        known = self._rules.parameters(path)
        unknown = [name for name in body if name not in known and name not in _LET_THROUGH]
        if known and unknown:
            name = unknown[0][:80]
            message = f"{name}: {path} of the server has no such parameter{near(name, known)}"
            raise RowError(Code.UNKNOWN_PARAMETER, message, param=name)


def _envelope(line: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the path and the body of a line of an OpenAI batch file.

    Raises:
        RowError: a part is missing or wrong.
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
            raise RowError(code, f"{name} is {found}, expected {expected}", param=name)
    return str(url), dict(body or {})
