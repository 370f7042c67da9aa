"""The request formats `completions` and `openai-batch`: each row is a request, which may set sampling parameters."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec

from batchinfer.core.errors import ConfigError, near
from batchinfer.core.records import Sampling
from batchinfer.prompts import conversation, from_pooling_requests, json_lines
from batchinfer.prompts.from_columns import token_ids
from batchinfer.prompts.json_lines import ID_FIELD, ROW_FIELD
from batchinfer.prompts.media import take_images
from batchinfer.prompts.parameters import RequestLimits, RequestOptions, read_parameters
from batchinfer.prompts.render_process import MANY_ROWS
from batchinfer.prompts.types import (
    CHAT_URL,
    COMPLETIONS_URL,
    Code,
    Draft,
    EchoView,
    EngineFacts,
    PromptConfig,
    RequestFormat,
    RowProblem,
    fill_each,
)

# Task that each endpoint of an OpenAI batch stands for. A row whose task is not the run's fails.
_TASKS = {
    CHAT_URL: "generate",
    COMPLETIONS_URL: "generate",
    **from_pooling_requests.TASKS,
    "/v1/moderations": "moderate",
    "/v1/audio/transcriptions": "transcribe",
    "/v1/audio/translations": "transcribe",
    "/v1/images/generations": "image",
}

_MAIN_URLS = (
    CHAT_URL,
    COMPLETIONS_URL,
    "/v1/embeddings",
    "/v1/score",
    "/v1/rerank",
    "/v1/classify",
)
"""Endpoints that are named to people. vLLM's other names of them are taken, too."""

_HINTS = {
    "transcribe": "; audio is not taken: write it down with another program, and ask about the text",
    "image": "; images are taken, not made",
}
"""What a row is told whose task no run can have."""
_MAX_PLANS = 1000
"""Largest number of different parameter sets that a reader remembers, so that equal ones are read once."""
_MAX_PLAN_BYTES = 16 << 20
"""Most bytes that the parameter sets take as JSON which a reader remembers."""
_encode = msgspec.json.encode


class RequestsReader:
    """The reader of the request formats `completions` and `openai-batch`; see `RowReader`.

    Args:
        config: The prompt options.
        sampling: The run's sampling parameters. A parameter that a request sets itself replaces the run's.
        facts: Facts about the engine.
        is_batch: Whether rows are lines of an OpenAI batch (custom_id, method, url, body); otherwise the row itself is
            the body of a completion.

    Raises:
        ConfigError: an option that makes prompts from columns is set.
    """

    is_chat = False
    """Always False: not every request is a chat request, so the run does not require a chat template."""

    def __init__(
        self, config: PromptConfig, sampling: Sampling, facts: EngineFacts, *, is_batch: bool
    ) -> None:
        _refuse_row_options(config)
        self._config = config
        self._sampling = sampling
        self._facts = facts
        self._tasks = from_pooling_requests.tasks_of(config.task, facts.pairs)
        self._limits = RequestLimits(
            max_n=config.max_n,
            max_logprobs=config.max_logprobs,
            finds_calls=facts.finds_calls,
            passed_on=facts.own_parameters,
        )
        self._plans: dict[tuple[bool, bytes], tuple[Sampling, EchoView | None, RequestOptions]] = {}
        self._plan_bytes = 0
        self._is_batch = is_batch

    @property
    def needed_columns(self) -> dict[str, list[str]]:
        """See `RowReader.needed_columns`."""
        fields = ["custom_id", "method", "url", "body"] if self._is_batch else ["prompt"]
        return {
            f"--request-format {self._config.request_format}: the field": fields,
            "--id-column": [self._config.id_column],
        }

    rows_at_once = MANY_ROWS
    """See `RowReader.rows_at_once`."""

    def fill(self, drafts: Sequence[Draft], lines: Sequence[bytes]) -> None:
        """Read requests. See `RowReader.fill`."""
        fill_each(self._fill, drafts, lines)

    def _fill(self, draft: Draft, data: bytes) -> None:
        line = json_lines.decode_object(data)
        row = line.pop(ROW_FIELD, None)
        row_id = line.pop(ID_FIELD, None)
        if self._config.id_column:
            row_id = line.get(self._config.id_column)
        if row_id is not None:
            draft.id = json_lines.as_id(row_id)
        self._keep(draft, line)
        if self._is_batch:
            custom_id = line.get("custom_id")
            if isinstance(custom_id, str) and custom_id:
                draft.id = custom_id
        json_lines.check_place(draft, row)
        if self._is_batch:
            self._fill_batch(draft, line)
        else:
            draft.url = COMPLETIONS_URL
            draft.body = line
            self._fill_completion(draft, line)

    def _keep(self, draft: Draft, line: dict[str, Any]) -> None:
        keep = self._config.keep
        if keep == ["*"]:
            draft.source = dict(line)
        elif keep:
            draft.source = {name: line[name] for name in keep if name in line}
            if not self._is_batch:
                # The row itself is the request here. A column that --keep names is data of the user, so it is taken out
                # of the request, where it would be refused as an unknown parameter. Only `prompt` may be both.
                for name in draft.source:
                    if name != "prompt":
                        del line[name]

    def _fill_batch(self, draft: Draft, line: dict[str, Any]) -> None:
        custom_id = line.get("custom_id")
        if not isinstance(custom_id, str) or not custom_id:
            raise RowProblem(
                Code.INVALID_REQUEST,
                f"custom_id is {json_lines.type_of(line, 'custom_id')}, expected a text that is not empty",
                param="custom_id",
            )
        url = line.get("url")
        if not isinstance(url, str) or url not in _TASKS:
            shown = json_lines.type_of(line, "url")
            if isinstance(url, str):
                shown = repr(url[:80])
            raise RowProblem(
                Code.UNKNOWN_URL,
                f"url is {shown}, expected {self._expected_urls()}" + near(str(url)[:80], _TASKS),
                param="url",
            )
        draft.url = url
        method = line.get("method")
        if method != "POST":
            shown = json_lines.type_of(line, "method")
            if isinstance(method, str):
                shown = repr(method[:20])
            raise RowProblem(
                Code.INVALID_REQUEST,
                f"method is {shown}, expected POST",
                param="method",
            )
        body = line.get("body")
        if not isinstance(body, dict):
            raise RowProblem(
                Code.INVALID_REQUEST,
                f"body is {json_lines.type_of(line, 'body')}, expected an object",
                param="body",
            )
        draft.body = body
        if _TASKS[url] not in self._tasks:
            raise RowProblem(
                Code.WRONG_TASK,
                f"url {url} asks for the task {_TASKS[url]}, expected {' or '.join(sorted(self._tasks))}, the run's"
                + _HINTS.get(_TASKS[url], ""),
                param="url",
            )
        if url in from_pooling_requests.TASKS:
            from_pooling_requests.fill_request(draft, url, body, self._facts)
        elif url == CHAT_URL:
            self._fill_chat(draft, body)
        else:
            self._fill_completion(draft, body)

    def _expected_urls(self) -> str:
        found = [url for url in _MAIN_URLS if _TASKS[url] in self._tasks]
        others = [url for url in _MAIN_URLS if url not in found]
        return f"{' or '.join(found)}; {', '.join(others)} belong to other tasks (--task)"

    def _fill_chat(self, draft: Draft, body: dict[str, Any]) -> None:
        draft.model = body.get("model")
        parameters = dict(body)
        messages = parameters.pop("messages", None)
        if not isinstance(messages, list):
            raise RowProblem(
                Code.INVALID_MESSAGES,
                f"messages is {json_lines.type_of(body, 'messages')}, expected a list",
                param="messages",
            )
        if not messages:
            raise RowProblem(
                Code.EMPTY_CONVERSATION, "messages is empty, expected a message", param="messages"
            )
        draft.messages = conversation.read_conversation(messages)
        if any(type(message["content"]) is not str for message in draft.messages):
            draft.messages, images = take_images(draft.messages)
            draft.media = images or None
        self._apply(draft, parameters, is_chat=True)
        if draft.continue_final and draft.messages[-1]["role"] != "assistant":
            raise RowProblem(
                Code.NOTHING_TO_CONTINUE,
                "continue_final_message, but the last message is not an assistant's",
                param="continue_final_message",
            )

    def _fill_completion(self, draft: Draft, body: dict[str, Any]) -> None:
        draft.model = body.get("model")
        parameters = dict(body)
        prompt = parameters.pop("prompt", None)
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
            prompt = prompt[0]
        if isinstance(prompt, list) and any(isinstance(item, str | list) for item in prompt):
            raise RowProblem(
                Code.UNSUPPORTED_PARAMETER,
                f"prompt: a list of {len(prompt)} prompts, expected one prompt a row",
                param="prompt",
            )
        try:
            if not isinstance(prompt, str):
                draft.token_ids = token_ids(prompt, "prompt")
            elif prompt:
                draft.text = prompt
            else:
                raise RowProblem(Code.EMPTY_PROMPT, "prompt is empty, expected text")
        except RowProblem as error:
            error.param = "prompt"
            raise
        self._apply(draft, parameters, is_chat=False)

    def _apply(self, draft: Draft, parameters: dict[str, Any], *, is_chat: bool) -> None:
        # Requests often differ only in their prompts, so equal parameters are read once. This is
        # a fast path for the bar "a third of bare msgspec" (docs/performance.md).
        key = (is_chat, _encode(parameters))
        plan = self._plans.get(key)
        if plan is None:
            sampling, options = read_parameters(
                parameters, self._sampling, self._limits, is_chat=is_chat
            )
            view = (
                EchoView(echo=True, is_prompt_only=options.is_prompt_only) if options.echo else None
            )
            plan = sampling, view, options
            num_bytes = self._plan_bytes + len(key[1])
            if len(self._plans) < _MAX_PLANS and num_bytes <= _MAX_PLAN_BYTES:
                self._plans[key] = plan
                self._plan_bytes = num_bytes
        draft.sampling, draft.view, options = plan
        draft.continue_final = options.continue_final
        draft.chat_template_kwargs = options.chat_template_kwargs
        draft.is_open_ended = options.is_open_ended
        draft.most_prompt_tokens = options.most_prompt_tokens
        draft.truncation_side = options.truncation_side
        draft.returns_token_ids = options.returns_token_ids
        draft.priority = options.priority
        draft.form = options.form
        draft.includes_reasoning = options.includes_reasoning
        if options.constraint_name:
            draft.constraint = draft.sampling.structured
            draft.constraint_param = options.constraint_name


def _batch_row(row_id: str, text: str) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": text}]}
    return {"custom_id": row_id, "method": "POST", "url": CHAT_URL, "body": body}


COMPLETIONS = RequestFormat(
    name="completions",
    make_reader=partial(RequestsReader, is_batch=False),
    make_row=lambda _row_id, text: {"prompt": text},
)
OPENAI_BATCH = RequestFormat(
    name="openai-batch",
    make_reader=partial(RequestsReader, is_batch=True),
    has_own_tools=True,
    id_field="custom_id",
    make_row=_batch_row,
)


def _refuse_row_options(config: PromptConfig) -> None:
    options: dict[str, Any] = {
        "--messages-column": config.messages_column,
        "--prompt-column": config.prompt_column,
        "--prompt-template": config.prompt_template,
        "--template": config.template_name,
        "--as-chat": config.as_chat,
        "--system-prompt": config.system_prompt,
        "--continue-final": config.continue_final,
        "--blank-columns": config.blank_columns,
        "--few-shot": config.few_shot,
        "--constraint-column": config.constraint_column,
        "--lora-column": config.lora_column,
        "--image-column": config.image_columns,
        "--tools": config.tools,
        "--tools-column": config.tools_column,
        "--tool-choice": config.tool_choice,
        "--pair-columns": config.pair_columns,
    }
    for name, value in options.items():
        if value:
            raise ConfigError(
                f"{name} with --request-format {config.request_format}: such rows hold their prompts, "
                "expected no option that makes them",
                hint=f"leave out {name}, or use --request-format rows",
            )
