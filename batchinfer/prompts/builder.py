"""Turns the lines of a chunk into calls for the engine: one result for each line, in order."""

from __future__ import annotations

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
from batchinfer.core.tasks import is_pooling
from batchinfer.prompts.checks import check_config
from batchinfer.prompts.media import bytes_of, multipart, put_contents, take_links
from batchinfer.prompts.requests import RequestsReader
from batchinfer.prompts.rows import RowsReader
from batchinfer.prompts.types import (
    CHAT_URL,
    COMPLETIONS_URL,
    SPEECH_URLS,
    TASK_PATHS,
    BestOf,
    Draft,
    EngineRules,
    MediaRef,
    Prepared,
    PromptConfig,
    RawRow,
    RowProblem,
)

logger = logging.getLogger(__name__)

_TASK_FIELDS: dict[str, dict[str, Any]] = {
    "embed": {"encoding_format": "base64"},
    "token-embed": {"task": "token_embed", "encoding_format": "base64"},
    "reward": {"use_activation": False},
}
"""Fields of bodies that a task implies, unless a row or the run says otherwise."""
_EXCLUSIVE = (
    {"max_tokens", "max_completion_tokens", "max_output_tokens"},
    {"response_format", "structured_outputs"},
    {"logprobs", "top_logprobs"},
    {"tools", "tool_choice", "parallel_tool_calls"},
)
"""Fields that mean something together: if a row states one of them, it gets none of the run's."""
_CHAT_ONLY = ("tools", "tool_choice", "parallel_tool_calls", "chat_template_kwargs")
_API_MAX_TOKENS = 16
"""Length of an answer to a request for a completion that does not state it."""
_encode = msgspec.json.Encoder().encode


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

    rows_at_once = 1 << 30
    """Most rows that `build` should get at once."""

    def __init__(self, config: PromptConfig, run_seed: int | None, *, rules: EngineRules) -> None:
        check_config(config)
        self._config = config
        self._run_seed = run_seed
        self._rules = rules
        self._is_pooling = is_pooling(config.task)
        self._rows = RowsReader(config, rules) if config.request_format == "rows" else None
        self._reader = self._rows or RequestsReader(config, rules)
        self._fields: dict[str, dict[str, Any]] = {}
        self._check_names()

    @property
    def needed_columns(self) -> dict[str, list[str]]:
        """Columns that every row needs to become the request that the options ask for. Keys name the options."""
        return self._reader.needed_columns

    def build(self, chunk_name: str, first_row: int, rows: Sequence[RawRow]) -> list[Prepared]:
        """Return one result for each row, in the order of `rows`. The result of a bad row holds a failure.

        Args:
            chunk_name: Name of the chunk. The key of a row is this name and the row's line index.
            first_row: Number of the chunk's first row in the job; 0 for a chunk that `split` did not make.
            rows: Some lines of this chunk, in any order.

        Raises:
            ConfigError: prompts shall be cut, and the engine does not say to which length.
        """
        seed_of = None if self._run_seed is None else codec.row_seeds(self._run_seed, chunk_name)
        return [
            self._build((chunk_name, row.line_index), first_row + row.line_index, row.data, seed_of)
            for row in rows
        ]

    def probe(self) -> Call | None:
        """Return a tiny call with the run's own fields, whose refusal means that every row would be refused.

        None if the run has no fields, or if the rows themselves say what kind of requests they are.
        """
        if self._rows is None or not self._config.body or self._rows.path in SPEECH_URLS:
            return None
        path, text = self._rows.path, "Hello"
        prompts: dict[str, dict[str, Any]] = {
            CHAT_URL: {"messages": [{"role": "user", "content": text}]},
            COMPLETIONS_URL: {"prompt": text},
            TASK_PATHS["score"]: {"text_1": text, "text_2": text},
            TASK_PATHS["rerank"]: {"query": text, "documents": [text]},
        }
        draft = Draft(0, path=path, body={**prompts.get(path, {"input": text})})
        draft.body["model"] = self._rules.model
        prepared = self._finish(("", 0), draft, None)
        return prepared.call

    # ------------------------------------------------------------------ a row

    def _build(
        self, key: tuple[str, int], row: int, data: bytes, seed_of: Callable[[int], int] | None
    ) -> Prepared:
        draft = Draft(row)
        try:
            self._reader.read(draft, data)
            return self._finish(key, draft, seed_of)
        except RowProblem as problem:
            failure = problem.as_failure()
        except ConfigError:
            raise
        except Exception as error:  # noqa: BLE001 -- a fault of any class must not concern other rows
            failure = internal_failure(error)
        row_id = draft.id or str(row)
        return Prepared(key=key, row=row, id=row_id, path=draft.path, failure=failure)

    def _finish(
        self, key: tuple[str, int], draft: Draft, seed_of: Callable[[int], int] | None
    ) -> Prepared:
        path, body = draft.path, draft.body
        self._fill(path, body)
        best_of = _take_best_of(path, body)
        media: list[MediaRef] = []
        if path not in SPEECH_URLS:
            media = take_links(body, fetches_links=self._rules.fetches_links)
        elif not draft.sound.startswith("data:"):
            media = [MediaRef(place=draft.sound, kind="audio")]
        if self._config.truncate_prompt != "error" and not media:
            self._truncate(path, body)
        if seed_of is not None and self._is_sampled(path, body):
            body["seed"] = seed_of(key[1])
        prepared = Prepared(
            key=key,
            row=draft.row,
            id=draft.id or str(draft.row),
            path=path,
            media=media,
            draft=body,
            best_of=best_of,
        )
        return prepared if media else _with_call(prepared, draft.sound)

    def _fill(self, path: str, body: dict[str, Any]) -> None:
        """Add the run's fields that a body leaves open."""
        taken = {name for name, value in body.items() if value is not None}
        for group in _EXCLUSIVE:
            if taken & group:
                taken |= group
        body |= {name: x for name, x in self._fields_for(path).items() if name not in taken}
        if body.get("model") is None:
            body["model"] = self._rules.model

    def _fields_for(self, path: str) -> dict[str, Any]:
        """Return the run's fields for bodies of a path, in the form that they have there."""
        found = self._fields.get(path)
        if found is None:
            found = self._fields[path] = self._make_fields(path)
        return found

    def _make_fields(self, path: str) -> dict[str, Any]:
        config = self._config
        task_path = TASK_PATHS.get(config.task)
        fields = {**(_TASK_FIELDS.get(config.task, {}) if path == task_path else {}), **config.body}
        if path == CHAT_URL and type(fields.get("logprobs")) is int:
            fields |= {"logprobs": True, "top_logprobs": fields["logprobs"]}
        if path in SPEECH_URLS and "max_tokens" in fields:
            fields["max_completion_tokens"] = fields.pop("max_tokens")
        if self._rows is not None:
            # The API gives a completion 16 tokens by default; a row of columns gets all that the model has room for.
            return {"max_tokens": None, **fields} if path == COMPLETIONS_URL else fields
        known = self._rules.parameters(path) | {"best_of"}
        if len(known) > 1:
            return {name: value for name, value in fields.items() if name in known}
        if path == COMPLETIONS_URL:
            return {name: value for name, value in fields.items() if name not in _CHAT_ONLY}
        return fields if path in (CHAT_URL, task_path) else {}

    def _check_names(self) -> None:
        """Refuse fields of the run that the server does not know.

        Raises:
            ConfigError: the message names the field.
        """
        task_path = TASK_PATHS.get(self._config.task)
        paths = (
            [self._rows.path]
            if self._rows
            else [CHAT_URL, COMPLETIONS_URL, *filter(None, [task_path])]
        )
        known = [self._rules.parameters(path) for path in paths]
        if not all(known):
            return
        names = frozenset({"best_of"}).union(*known)
        if SPEECH_URLS[0] in paths or SPEECH_URLS[1] in paths:
            names |= {"max_tokens"}
        for name in self._config.body:
            if name not in names:
                raise ConfigError(
                    f"{name}: {' and '.join(paths)} of the server have no such parameter{near(name, names)}",
                    hint="leave the option out (--sampling sets fields by their names)",
                )

    def _truncate(self, path: str, body: dict[str, Any]) -> None:
        """Let the server cut a prompt so that the wanted answer fits as well, but not below half of the length."""
        known, name = self._rules.parameters(path), "truncate_prompt_tokens"
        is_known = name in known if known else path in (CHAT_URL, COMPLETIONS_URL)
        if not (is_known or (not known and self._is_pooling)) or name in body:
            return
        length = self._rules.max_model_len
        if length is None:
            raise ConfigError(
                "--truncate-prompt: the engine does not say how many tokens a prompt may have",
                hint="leave it out; prompts that are too long become error rows",
            )
        side = self._config.truncate_prompt
        if path in (CHAT_URL, COMPLETIONS_URL):
            default = _API_MAX_TOKENS if path == COMPLETIONS_URL and "max_tokens" not in body else 1
            wanted = body.get("max_completion_tokens") or body.get("max_tokens") or default
            room = length - wanted if type(wanted) is int else length - 1
            body |= {name: max(min(room, length - 1), length // 2, 1), "truncation_side": side}
        else:  # without a side, the server's tokenizer cuts on the right and keeps its special tokens
            body |= {name: length, **({"truncation_side": side} if side == "left" else {})}

    def _is_sampled(self, path: str, body: dict[str, Any]) -> bool:
        """Whether the answer is drawn by chance, and the row has no seed of its own."""
        if body.get("seed") is not None:
            return False
        temperature = body.get("temperature", 0 if path in SPEECH_URLS else None)
        if isinstance(temperature, int | float) and temperature <= 0:
            return False
        is_generating = path in (CHAT_URL, COMPLETIONS_URL, *SPEECH_URLS)
        return is_generating or {"seed", "temperature"} <= self._rules.parameters(path)


def _take_best_of(path: str, body: dict[str, Any]) -> BestOf | None:
    """Ask for all candidates of a request with `best_of` and for their log-probabilities.

    Raises:
        RowProblem: `best_of` is no number, or smaller than `n`.
    """
    best = body.pop("best_of", None)
    n = body.get("n") or 1
    if best is None or type(n) is not int:
        return None
    if type(best) is not int or best < n:
        message = f"best_of: {str(best)[:40]}, expected a whole number from n, which is {n}"
        raise RowProblem(Code.INVALID_PARAMETER, message, param="best_of")
    if best == n or body.get("temperature") == 0:  # all candidates are kept, or are the same
        return None
    body["n"] = best
    keeps = body.get("logprobs") not in (None, False)
    if not keeps:
        body["logprobs"] = True if path == CHAT_URL else 0
    return BestOf(n=n, keeps_logprobs=keeps)


def finish_call(prepared: Prepared, contents: Sequence[bytes | None]) -> Prepared:
    """Put the fetched media of a row into its body, and return the row with its call.

    Args:
        prepared: A row with `media`.
        contents: Content of each of its media, in order. None leaves the fetching of this one to the server.
    """
    assert prepared.draft is not None, "the row has its call already"
    try:
        if prepared.path not in SPEECH_URLS:
            places = [ref.place for ref in prepared.media]
            put_contents(prepared.draft, list(zip(contents, places, strict=True)))
            return _with_call(prepared, "")
        [content] = contents
        return _with_call(prepared, "", content or b"")
    except Exception as error:  # noqa: BLE001 -- as in `PromptBuilder.build`
        failure = internal_failure(error)
        return msgspec.structs.replace(prepared, failure=failure, draft=None, media=[])


def _with_call(prepared: Prepared, sound: str, content: bytes | None = None) -> Prepared:
    """Return a row with its call.

    Args:
        prepared: A row with a whole draft, in which only the sound may be missing.
        sound: Data URL of the sound to transcribe; empty if `content` is it, or if there is none.
        content: Content of the sound.
    """
    body, content_type = prepared.draft or {}, "application/json"
    if prepared.path in SPEECH_URLS:
        data, content_type = multipart(body, bytes_of(sound) if content is None else content)
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
