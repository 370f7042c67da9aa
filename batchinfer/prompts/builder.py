"""Turns the lines of a chunk into calls for the engine: one result for each line, in order."""

from __future__ import annotations

import functools
import logging
import traceback
from collections.abc import Callable, Sequence
from pathlib import PurePath
from typing import Any

import msgspec

from batchinfer.core import codec
from batchinfer.core.errors import ConfigError, near
from batchinfer.core.records import Call, Failure
from batchinfer.core.row_codes import Code
from batchinfer.prompts.json_lines import ID_FIELD, as_id, decode_object
from batchinfer.prompts.media import data_url, multipart, places_in, put_url, take_links
from batchinfer.prompts.prompt_config import check_config
from batchinfer.prompts.readers import RequestsReader, RowsReader
from batchinfer.prompts.types import (
    CHAT_URL,
    COMPLETIONS_URL,
    RESPONSES_URL,
    SPEECH_URLS,
    TASK_PATHS,
    WITH_TOOLS,
    BestOf,
    EngineRules,
    Prepared,
    PromptConfig,
    RawRow,
    RowError,
)

logger = logging.getLogger(__name__)

_TASK_FIELDS: dict[str, dict[str, Any]] = {
    "embed": {"encoding_format": "base64"},
    "token-embed": {"task": "token_embed"},  # base64 would not say where a vector ends
    "reward": {"use_activation": False},
}
"""Fields of bodies that a task implies, unless a row or the run says otherwise."""
_EXCLUSIVE = (
    {"max_tokens", "max_completion_tokens", "max_output_tokens"},
    {"response_format", "structured_outputs", "text"},
    {"logprobs", "top_logprobs"},
    {"tools", *WITH_TOOLS},
)
"""Fields that mean something together: if a row states one of them, it gets none of the run's."""
_RESPONSES_NAMES = dict.fromkeys(("max_tokens", "max_completion_tokens"), "max_output_tokens")
_CHAT_ONLY = {"tools", *WITH_TOOLS, "chat_template_kwargs"}
_GENERATING = (CHAT_URL, COMPLETIONS_URL)
_API_MAX_TOKENS = 16
"""Length of an answer to a request for a completion that does not state it."""

_encode = msgspec.json.Encoder().encode
_Seed = Callable[[int], int] | None


class PromptBuilder:
    """Turns rows into calls. Several threads may use it at once.

    Args:
        config: The options that say how rows become requests. The constructor checks them.
        run_seed: The run's seed. The seed of a row is computed from it and the row's key. With None, rows get no
            computed seeds.
        rules: What the run's engine takes.

    Raises:
        ConfigError: options contradict each other, or one of them has a value that cannot work.
    """

    def __init__(self, config: PromptConfig, run_seed: int | None, *, rules: EngineRules) -> None:
        check_config(config)
        self._config = config
        self._run_seed = run_seed
        self._rules = rules
        reader_of: Any = RowsReader if config.request_format == "rows" else RequestsReader
        self._reader: RowsReader | RequestsReader = reader_of(config, rules)
        self._task_path = TASK_PATHS.get(config.task, CHAT_URL)
        self._fields_for = functools.lru_cache(64)(self._make_fields)
        self._check_names()
        self._check_length()

    @property
    def needed_columns(self) -> dict[str, list[str]]:
        """Columns that every row needs to become the request that the options ask for. Keys name the options."""
        needed = {**self._reader.needed_columns, "--column id": [self._config.column("id")]}
        return {option: names for option, names in needed.items() if any(names)}

    def build(self, chunk_name: str, first_row: int, rows: Sequence[RawRow]) -> list[Prepared]:
        """Return one result for each row, in the order of `rows`. The result of a bad row holds a failure.

        Args:
            chunk_name: Name of the chunk. The key of a row is this name and the row's line index.
            first_row: Number of the chunk's first row in the job; 0 for a chunk that `split` did not make.
            rows: Some lines of this chunk, in any order.
        """
        seed_of = None if self._run_seed is None else codec.row_seeds(self._run_seed, chunk_name)
        return [self._build(chunk_name, first_row, row, seed_of) for row in rows]

    def probe(self) -> Call | None:
        """Return a tiny call with the run's own fields, whose refusal means that every row would be refused.

        None if the run has no fields, or if the rows themselves say what kind of requests they are.
        """
        path, text = self._reader.path, "Hello as JSON"  # some endpoints want the word for JSON
        if not path or not self._config.body or path in SPEECH_URLS:
            return None
        prompts: dict[str, dict[str, Any]] = {
            CHAT_URL: {"messages": [{"role": "user", "content": text}]},
            COMPLETIONS_URL: {"prompt": text},
            "/score": {"text_1": text, "text_2": text},
            "/rerank": {"query": text, "documents": [text]},
        }
        body = prompts.get(path, {"input": text})
        if path in _GENERATING and "max_completion_tokens" not in self._config.body:
            body["max_tokens"] = self._config.body.get("min_tokens") or 1
        return self._finish(Prepared(key=("", 0), row=0, id=""), path, body, None).call

    # ------------------------------------------------------------------ a row

    def _build(self, chunk_name: str, first_row: int, row: RawRow, seed_of: _Seed) -> Prepared:
        number = first_row + row.line_index
        prepared = Prepared(key=(chunk_name, row.line_index), row=number, id=str(number))
        try:
            columns = decode_object(row.data)
            own_id = columns.get(self._config.column("id") or ID_FIELD)
            if self._config.request_format == "openai-batch":
                own_id = columns.get("custom_id") or own_id
            if own_id is not None:
                prepared = msgspec.structs.replace(prepared, id=as_id(own_id))
            return self._finish(prepared, *self._reader.read(columns), seed_of)
        except RowError as problem:
            return msgspec.structs.replace(prepared, failure=problem.as_failure())
        except Exception as error:  # noqa: BLE001 -- a fault of any class must not concern other rows
            return msgspec.structs.replace(prepared, failure=internal_failure(error))

    def _finish(self, row: Prepared, path: str, body: dict[str, Any], seed_of: _Seed) -> Prepared:
        """Complete a body with what the run says, and take out of it what the engine does not get."""
        taken = {name for name, value in body.items() if value is not None}
        for group in _EXCLUSIVE:
            taken |= group if taken & group else set()
        body |= {name: x for name, x in self._fields_for(path).items() if name not in taken}
        body["model"] = body.get("model") or self._rules.model
        if self._config.column("tools") and not body.get("tools"):
            for name in WITH_TOOLS:  # a row without tools is answered as text
                body.pop(name, None)
        best = _take_best_of(path, body)
        places = places_in(body)
        if self._config.truncate_prompt != "error" and not places:
            self._truncate(path, body)
        may_stay = self._rules.fetches_links and path not in SPEECH_URLS
        media = take_links(places, fetches_links=may_stay)
        if self._reader.path == COMPLETIONS_URL and self._rules.max_model_len:
            # The API gives a completion 16 tokens by default; a row of columns gets all that the model has room for.
            body.setdefault("max_tokens", self._rules.max_model_len)
        if seed_of is not None and self._is_sampled(path, body):
            body["seed"] = seed_of(row.key[1])
        found = msgspec.structs.replace(row, path=path, media=media, draft=body, best_of=best)
        return found if media else _with_call(found)

    def _known(self, path: str) -> frozenset[str]:
        """Return the fields that bodies of a path may get from the run."""
        is_likely = path in (*_GENERATING, self._task_path)
        fields = {*self._config.body, "truncate_prompt_tokens"} if is_likely else set()
        others = _CHAT_ONLY if path == COMPLETIONS_URL else set()
        return self._rules.parameters(path) or frozenset(fields - others)

    def _make_fields(self, path: str) -> dict[str, Any]:
        """Return the run's fields for bodies of a path, in the form that they have there."""
        implied = _TASK_FIELDS.get(self._config.task, {}) if path == self._task_path else {}
        fields = {**implied, **self._config.body}
        if path == CHAT_URL and type(fields.get("logprobs")) is int:
            fields |= {"logprobs": True, "top_logprobs": fields["logprobs"]}
        if path in SPEECH_URLS and "max_tokens" in fields:
            fields["max_completion_tokens"] = fields.pop("max_tokens")
        if path == RESPONSES_URL:
            fields = _of_responses(fields)
        if self._reader.path or (path == RESPONSES_URL and not self._rules.parameters(path)):
            return fields
        known = self._known(path) | implied.keys() | {"best_of", "top_logprobs"}
        return {name: value for name, value in fields.items() if name in known}

    def _check_names(self) -> None:
        """Refuse fields of the run that the server knows for none of the paths.

        Raises:
            ConfigError: the message names the field.
        """
        own = self._reader.path
        paths = [own] if own else [CHAT_URL, COMPLETIONS_URL, self._task_path]
        known = frozenset[str]().union(*map(self._rules.parameters, paths))
        others = {"best_of", "max_tokens"}
        others |= set() if own else self._rules.parameters(RESPONSES_URL)
        for name in self._config.body if known else ():
            if name not in known | others:
                text = f"{name}: the server has no such parameter for {paths[0]}{near(name, known)}"
                raise ConfigError(text, hint="--sampling sets parameters by the server's names")

    def _check_length(self) -> None:
        """Refuse plain prompts without a length: answers would end early, and nobody would see it.

        Raises:
            ConfigError: the run states no length.
        """
        is_plain = self._reader.path == COMPLETIONS_URL and not self._rules.fills_length
        if is_plain and "max_tokens" not in self._config.body:
            text = f"--max-tokens: is missing; the API ends answers to plain prompts after {_API_MAX_TOKENS} tokens"
            hint = "say how long they may be, as in --max-tokens 512, or send chats (--as-chat, or without --plain)"
            raise ConfigError(text, hint=hint)

    def _truncate(self, path: str, body: dict[str, Any]) -> None:
        """Let the server cut a prompt so that the wanted answer fits as well, but not below half of the length."""
        name, length = "truncate_prompt_tokens", self._rules.max_model_len
        side = self._config.truncate_prompt
        if length is None or name in body or name not in self._known(path):
            return
        if path in _GENERATING:
            default = 1 if path == CHAT_URL or self._reader.path else _API_MAX_TOKENS
            wanted = body.get("max_completion_tokens") or body.get("max_tokens")
            room = length - (wanted if type(wanted) is int else default)
            body |= {name: max(min(room, length - 1), length // 2, 1), "truncation_side": side}
        else:  # without a side, the server's tokenizer cuts on the right and keeps its special tokens
            body |= {name: length, **({"truncation_side": side} if side == "left" else {})}

    def _is_sampled(self, path: str, body: dict[str, Any]) -> bool:
        """Whether the answer is drawn by chance, and the row has no seed of its own."""
        temperature = body.get("temperature", 0 if path in SPEECH_URLS else None)
        is_greedy = isinstance(temperature, int | float) and temperature <= 0
        takes_seeds = {"seed", "temperature"} <= self._rules.parameters(path)
        is_drawn = path in (*_GENERATING, *SPEECH_URLS) or takes_seeds
        return is_drawn and not is_greedy and body.get("seed") is None


def _of_responses(fields: dict[str, Any]) -> dict[str, Any]:
    """Return a run's fields by the names, and in the forms, that the Responses API has for them."""

    def flat(value: Any, name: str) -> Any:
        inner = value.get(name) if isinstance(value, dict) else None
        return {"type": name, **inner} if isinstance(inner, dict) else value

    found = {_RESPONSES_NAMES.get(name, name): value for name, value in fields.items()}
    if "response_format" in found:
        found["text"] = {"format": flat(found.pop("response_format"), "json_schema")}
    if effort := found.pop("reasoning_effort", None):
        found.setdefault("reasoning", {"effort": effort})
    if "tool_choice" in found:
        found["tool_choice"] = flat(found["tool_choice"], "function")
    if isinstance(found.get("tools"), list):
        found["tools"] = [flat(tool, "function") for tool in found["tools"]]
    return found


def _take_best_of(path: str, body: dict[str, Any]) -> BestOf | None:
    """Ask for all candidates of a request with `best_of` and for their log-probabilities.

    Raises:
        RowError: `best_of` is no number, or smaller than `n`.
    """
    best, n = body.pop("best_of", None), body.get("n") or 1
    if best is None or type(n) is not int:
        return None
    if type(best) is not int or best < n:
        message = f"best_of: {str(best)[:40]}, expected a whole number from n, which is {n}"
        raise RowError(Code.INVALID_PARAMETER, message, param="best_of")
    if best == n or body.get("temperature") == 0:  # all candidates are kept, or are the same
        return None
    body["n"] = best
    keeps = body.get("logprobs") not in (None, False)
    if not keeps:
        body["logprobs"] = True if path == CHAT_URL else 0
    return BestOf(n=n, asked=best, keeps_logprobs=keeps)


def finish_call(prepared: Prepared, contents: Sequence[bytes]) -> Prepared:
    """Put the fetched media of a row, in order, into its body, and return the row with its call."""
    try:
        for ref, content in zip(prepared.media, contents, strict=True):
            put_url(ref.holder, ref.field, data_url(content, ref.kind))
        return _with_call(prepared)
    except Exception as error:  # noqa: BLE001 -- a fault of any class must not concern other rows
        failure = internal_failure(error)
        return msgspec.structs.replace(prepared, failure=failure, draft=None, media=[])


def _with_call(prepared: Prepared) -> Prepared:
    """Return a row whose draft is complete with its call."""
    body, content_type = prepared.draft or {}, "application/json"
    if prepared.path in SPEECH_URLS:
        data, content_type = multipart(body)
    else:
        data = _encode(body)
    call = Call(key=prepared.key, path=prepared.path, body=data, content_type=content_type)
    return msgspec.structs.replace(prepared, call=call, draft=None, media=[])


def internal_failure(error: Exception) -> Failure:
    """Return the failure of a row with which this package itself failed, so that the other rows go on."""
    logger.debug("a fault of batchinfer", exc_info=error)
    place = traceback.extract_tb(error.__traceback__)[-1]
    where = f"{PurePath(place.filename).name}:{place.lineno}"
    message = f"{type(error).__name__}: {str(error)[:200]} ({where}); please report it"
    return Failure(code=Code.INTERNAL_ERROR.value, message=message, status=500)
