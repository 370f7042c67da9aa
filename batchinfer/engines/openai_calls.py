"""Asks an endpoint for the answers of rows. An outage makes no row fail, except a streamed one.

A request is sent again, with growing waits, until it has an answer. A row fails by its own fault: the endpoint refuses
its request, the request has more tokens than the endpoint takes in a minute, or its answers are late or not whole again
and again, although the endpoint answers a short request of ours (a probe). A probe is also sent after a status that may
concern one row or all of them (403, 404). Once pieces of a streamed row's answer were shown, the row cannot be sent
again, so it fails when its attempt does.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import msgspec

from batchinfer.core.errors import AccessDenied, ConfigError, RowError
from batchinfer.core.records import Completion, Failure, Request, TextPiece
from batchinfer.core.tasks import is_pooling
from batchinfer.engines.config import EngineConfig
from batchinfer.engines.openai_client import (
    CallError,
    Cut,
    Endpoint,
    Refusal,
    Reply,
    TooSlow,
    Unavailable,
)
from batchinfer.engines.openai_embeddings import (
    EMBEDDINGS_PATH,
    embeddings_body,
    read_vectors,
    vectors_completion,
)
from batchinfer.engines.openai_pace import LONGEST_HOLD_SECONDS, Pace
from batchinfer.engines.openai_requests import (
    CHAT_PATH,
    COMPLETIONS_PATH,
    BrokenAnswer,
    body_of,
    completion_of,
    num_tokens_asked,
    read_answer,
)
from batchinfer.engines.openai_stream import AnswerParts, parts_of

logger = logging.getLogger(__name__)

# Sum of the faults of a row's attempts at which the row may be given up.
MOST_FAULT = 10
# Fault of an attempt, by its error. An endpoint that takes no requests is not the row's fault.
_FAULTS: dict[type[CallError], int] = {Unavailable: 0, Cut: 1, TooSlow: 4, Refusal: MOST_FAULT}
# Most seconds to wait before the second attempt. The most doubles with each attempt, up to LONGEST_HOLD_SECONDS.
FIRST_WAIT_SECONDS = 0.5
# Most seconds for a probe.
PROBE_SECONDS = 60.0
# Seconds between two warnings that requests are sent again.
_WARNING_SECONDS = 15.0
_PROMPT_PARAMS = frozenset({"input_tokens", "input_text"})
"""Parameters that vLLM names if a prompt is too long."""
_SHORT: dict[str, dict[str, Any]] = {
    CHAT_PATH: {"messages": [{"role": "user", "content": "Hello"}]},
    COMPLETIONS_PATH: {"prompt": "Hello"},
    EMBEDDINGS_PATH: {"input": "Hello"},
}
"""Prompt of a probe, by its path."""
_OF_THE_PROMPT = ("messages", "prompt", "input", "add_generation_prompt", "continue_final_message")
# Most names of models in a message.
_SHOWN_MODELS = 10
# Largest number of different parameter sets for which it is remembered whether the endpoint takes them.
_MOST_ACCEPTED = 1000
# Tokens that an answer without a limit is expected to have, before any answer is known.
_ANSWER_TOKENS = 256.0


class _Call(NamedTuple):
    """One attempt at a request. `num_tokens` is about how many tokens prompt and answers have."""

    path: str
    body: dict[str, Any]
    timeout_seconds: float
    num_tokens: int
    parts: AnswerParts | None = None


class Calls:
    """The requests to one endpoint. All methods but `outage` are called in the event loop.

    Args:
        config: Configuration of the engine.
        endpoint: The endpoint.
        end: Function that ends the engine with an error.
        show: Function that takes the pieces of streamed requests.
    """

    def __init__(
        self,
        config: EngineConfig,
        endpoint: Endpoint,
        *,
        end: Callable[[Exception], None],
        show: Callable[[TextPiece], None],
    ) -> None:
        self._config = config
        self._endpoint = endpoint
        self._end = end
        self._show = show
        self._pace = Pace(
            config.max_concurrency,
            requests_per_minute=config.requests_per_minute,
            tokens_per_minute=config.tokens_per_minute,
        )
        self._probing = asyncio.Lock()
        self._probed: dict[str, tuple[float, CallError | None]] = {}
        """Time at which the latest probe was sent, and why it failed, by its path."""
        self._accepted: dict[tuple[str, bytes], bool] = {}
        """Whether the endpoint takes a set of parameters, by the path and the JSON of the set."""
        self._outage: tuple[float, str] | None = None
        self._warned = 0.0
        self._num_again = 0
        self._mean_answer = _ANSWER_TOKENS
        self._has_answered = False
        """Whether a row was answered."""
        self._limit_name = "max_tokens"
        """Name that chats have for the limit of an answer's tokens. Newer models of OpenAI want another one."""
        self.num_answers = 0
        self.prompt_tokens = self.cached_tokens = self.completion_tokens = 0

    @property
    def outage(self) -> tuple[float, str] | None:
        """Time of the first failed attempt since the latest answer, on the monotonic clock, and the latest reason.

        None if no attempt has failed since that answer. A slow answer within the time limit is no failure.
        """
        return self._outage

    async def answer(self, request: Request) -> Completion | None:
        """Return the answer to a request, or why it has none; None after calling `end`."""
        began = time.monotonic()
        fault, num_attempts, is_last = 0, 0, False
        try:
            path, body = self._body_of(request)
            parts = parts_of(request, self._show)
            while True:
                try:
                    return await self._answered_or_refused(request, path, body, began, parts)
                except (Unavailable, Cut, TooSlow) as error:
                    if hopeless := self._hopeless(request, error, parts):
                        return hopeless
                    fault += _FAULTS[type(error)]
                    is_own = fault >= MOST_FAULT and await self._probe(path) is None
                    if is_own and is_last:
                        return _failed(request, "engine_error", str(error))
                    is_last = is_own
                    if not is_own:
                        await asyncio.sleep(_wait_seconds(num_attempts))
                        num_attempts += 1
        except RowError as error:
            return _failed(request, error.code, error.message)
        except (AccessDenied, ConfigError) as error:
            self._end(error)
            return None

    def _body_of(self, request: Request) -> tuple[str, dict[str, Any]]:
        if is_pooling(request.task):
            return embeddings_body(request, self._config)
        return body_of(request, self._config.model)

    def _hopeless(
        self, request: Request, error: CallError, parts: AnswerParts | None
    ) -> Completion | None:
        """Return a failure if another attempt is impossible or of no use; else None."""
        if parts is not None and parts.has_shown:
            return _failed(request, "engine_error", str(error))
        limit = error.most_tokens if isinstance(error, Unavailable) else None
        num_asked = num_tokens_asked(request, self._mean_answer)
        # A header of 0, -1 or nan states no limit.
        if limit is None or not 0 < limit < num_asked:
            return None
        message = f"{error}; the request needs about {num_asked} tokens, the endpoint takes {limit:g} a minute"
        return _failed(request, "engine_rejected", message)

    async def _answered_or_refused(
        self,
        request: Request,
        path: str,
        body: dict[str, Any],
        began: float,
        parts: AnswerParts | None,
    ) -> Completion:
        attempt = partial(self._attempt, request, path, body, began, parts)
        try:
            try:
                return await attempt()
            except Refusal as error:
                if _may_concern_all(error):
                    await self._check_for_all(path, error)
                elif not self._renames(error, body):
                    raise
            # The endpoint answers a probe, or wants another name of a parameter.
            return await attempt()
        except Refusal as error:
            return await self._refused(request, path, body, error)

    async def _attempt(
        self,
        request: Request,
        path: str,
        body: dict[str, Any],
        began: float,
        parts: AnswerParts | None,
    ) -> Completion:
        num_asked = num_tokens_asked(request, self._mean_answer)
        async with self._pace.turn(num_asked):
            sent = time.monotonic()
            call = _Call(path, body, self._config.request_timeout_seconds, num_asked, parts)
            reply = await self._send(call, sent)
            seconds = time.monotonic() - sent
        try:
            read = vectors_completion if path == EMBEDDINGS_PATH else completion_of
            completion = read(request, reply.data, (sent - began, seconds))
        except BrokenAnswer as error:
            cut = Cut(str(error))
            self._note_failure(cut, sent)
            raise cut from error
        self._has_answered = True
        if parts is not None:
            completion = parts.settle(completion)
        num_tokens = completion.prompt_tokens + completion.completion_tokens
        self._note_answer(num_tokens, num_asked)
        self.prompt_tokens += completion.prompt_tokens
        self.cached_tokens += completion.cached_tokens
        self.completion_tokens += completion.completion_tokens
        if completion.completion_tokens:
            mean = completion.completion_tokens / request.sampling.n
            self._mean_answer += 0.05 * (mean - self._mean_answer)
        return completion

    async def _send(self, call: _Call, sent: float) -> Reply:
        path, body = call.path, call.body
        if path == CHAT_PATH and self._limit_name not in body and "max_tokens" in body:
            body = {**body, self._limit_name: body["max_tokens"]}
            del body["max_tokens"]
        try:
            if call.parts is None:
                reply = await self._endpoint.post(path, body, call.timeout_seconds)
            else:
                reply = Reply(
                    await self._read_parts(call.parts, path, body, call.timeout_seconds), {}
                )
        except Refusal as error:
            if not _may_concern_all(error):
                self._note_answer(0, call.num_tokens)
            raise
        except (Unavailable, Cut, TooSlow) as error:
            self._note_failure(error, sent)
            raise
        self._pace.note_headers(reply.headers, call.num_tokens)
        return reply

    async def _read_parts(
        self, parts: AnswerParts, path: str, body: dict[str, Any], timeout_seconds: float
    ) -> bytes:
        """Stream an answer and return its body.

        An answer is read to its end even if one of its parts is wrong. The official client leaves a stream that is not
        read to its end to the garbage collector, which may run in another thread while this thread uses the stream.
        """
        parts.restart()
        fault: Cut | None = None
        async with contextlib.aclosing(self._endpoint.stream(path, body, timeout_seconds)) as found:
            async for part in found:
                fault = fault or _fault_in(part, parts)
        if fault is not None:
            raise fault
        return parts.whole()

    def _note_answer(self, num_tokens: int, num_asked: int) -> None:
        self.num_answers += 1
        if self._outage is not None:
            seconds = time.monotonic() - self._outage[0]
            self._outage = None
            if seconds >= _WARNING_SECONDS:
                logger.info("endpoint %s: answers again, after %.0f s", self._endpoint.url, seconds)
        self._pace.note_answer(num_tokens, num_asked)

    def _note_failure(self, error: CallError, sent: float) -> None:
        now = time.monotonic()
        since = self._outage[0] if self._outage is not None else now
        self._outage = (since, str(error))
        if isinstance(error, Unavailable):
            self._pace.note_refusal(sent, error.seconds)
        self._num_again += 1
        if now - self._warned >= _WARNING_SECONDS:
            logger.warning(
                "endpoint %s: %s; such requests are sent again (%d so far)",
                self._endpoint.url,
                error,
                self._num_again,
            )
            self._warned = now

    # ------------------------------------------------------------------ whose fault it is

    async def _check_for_all(self, path: str, error: Refusal) -> None:
        """Find out whether the endpoint refuses every request, and not only one. Waits for it while it does not answer.

        Raises:
            AccessDenied, ConfigError: the endpoint refuses every request.
            Unavailable: as above, but the status is not 403, and a row was answered before. A proxy may have lost the
                server behind it.
        """
        probed = await self._probe(path)
        while isinstance(probed, Unavailable | Cut | TooSlow):
            await asyncio.sleep(_wait_seconds(3))
            probed = await self._probe(path)
        if not isinstance(probed, Refusal) or probed.status != error.status:
            return
        if self._has_answered and error.status != 403:
            lost = Unavailable(str(error))
            self._note_failure(lost, time.monotonic())
            raise lost
        raise self._error_for_all(error)

    async def _refused(
        self, request: Request, path: str, body: dict[str, Any], error: Refusal
    ) -> Completion:
        """Return the failure of a row whose request the endpoint refuses."""
        code = "engine_rejected"
        if error.code == "context_length_exceeded" or error.param in _PROMPT_PARAMS:
            code = "prompt_too_long"
        elif error.status in (400, 422) and await self._refuses_parameters(path, body):
            code = "invalid_parameter"
        return _failed(request, code, str(error))

    async def _refuses_parameters(self, path: str, body: dict[str, Any]) -> bool:
        """Whether the endpoint refuses the parameters of a request even with a short prompt.

        Waits while the endpoint does not answer. If only the short prompt with these parameters gets no answer, again
        and again, they do not count as refused.

        Raises:
            AccessDenied, ConfigError, Unavailable: as in `_check_for_all`.
        """
        parameters = {name: value for name, value in body.items() if name not in _OF_THE_PROMPT}
        key = (path, msgspec.json.encode(parameters))
        fault = num_attempts = 0
        while True:
            async with self._probing:
                if (found := self._accepted.get(key)) is not None:
                    return not found
                probed = await self._ask(path, parameters | _SHORT[path], num_tokens=8)
                fault += MOST_FAULT if probed is None else _FAULTS[type(probed)]
                if fault >= MOST_FAULT and not _may_concern_all(probed):
                    if len(self._accepted) >= _MOST_ACCEPTED:
                        self._accepted.clear()
                    self._accepted[key] = not isinstance(probed, Refusal)
                    return isinstance(probed, Refusal)
            if isinstance(probed, Refusal):
                await self._check_for_all(path, probed)
                return True
            await asyncio.sleep(_wait_seconds(num_attempts))
            num_attempts += 1

    def _error_for_all(self, error: Refusal) -> AccessDenied | ConfigError:
        """Return the error for an endpoint that refuses every request to the model."""
        if error.status == 403:
            return self._endpoint.denied(error)
        return ConfigError(
            f"endpoint {self._endpoint.url}: refuses requests to the model {self._config.model}: {error}",
            hint="check --model and --base-url; `batchinfer check` lists the endpoint's models",
        )

    def _renames(self, error: Refusal, body: dict[str, Any]) -> bool:
        """Whether the endpoint wants a newer name for `max_tokens` of this chat. Later chats use that name."""
        if error.code != "unsupported_parameter" or error.param != "max_tokens":
            return False
        self._limit_name = "max_completion_tokens"
        return "messages" in body

    async def _probe(self, path: str) -> CallError | None:
        """Send a probe, a short request. Returns why it has no answer, None if it has one.

        A refusal shows that the endpoint works, and is returned only for the statuses that may concern all requests.
        Requests that fail at the same time share a probe.
        """
        asked = time.monotonic()
        async with self._probing:
            if path not in self._probed or self._probed[path][0] <= asked:
                self._probed[path] = (time.monotonic(), await self._probe_now(path))
            return self._probed[path][1]

    async def _probe_now(self, path: str) -> CallError | None:
        body = {"model": self._config.model, **_SHORT[path]}
        if path != EMBEDDINGS_PATH:
            body["max_tokens"] = 1
        error = await self._ask(path, body, num_tokens=8)
        if isinstance(error, Refusal) and not _may_concern_all(error):
            return None
        return error

    async def _ask(self, path: str, body: dict[str, Any], *, num_tokens: int) -> CallError | None:
        timeout_seconds = min(PROBE_SECONDS, self._config.request_timeout_seconds)
        async with self._pace.turn(num_tokens):
            try:
                reply = await self._send(
                    _Call(path, body, timeout_seconds, num_tokens), time.monotonic()
                )
                (read_vectors if path == EMBEDDINGS_PATH else read_answer)(reply.data)
            except CallError as error:
                return error
            except BrokenAnswer as error:
                return Cut(str(error))
        self._note_answer(0, num_tokens)
        return None

    async def check_model(self, names: list[str] | None) -> None:
        """Find out whether the endpoint takes requests to the model.

        Some endpoints take more names than they list. So a name that is not in the list is tried by a short request.

        Args:
            names: The models that the endpoint lists; None if it has no list.

        Raises:
            AccessDenied, ConfigError: the endpoint refuses them.
        """
        if names is None or self._config.model in names:
            return
        is_embedding = is_pooling(self._config.task)
        probed = await self._probe_now(EMBEDDINGS_PATH if is_embedding else CHAT_PATH)
        if isinstance(probed, Refusal):
            error = self._error_for_all(probed)
            some = ", ".join(names[:_SHOWN_MODELS])
            more = ", …" if len(names) > _SHOWN_MODELS else ""
            error.hint = f"the endpoint's models are {some}{more}" if names else error.hint
            raise error


def _fault_in(part: dict[str, Any], parts: AnswerParts) -> Cut | None:
    """Add a part to an answer. Return an error if the part is not in the API's form."""
    try:
        parts.add(part)
    except (AttributeError, TypeError, ValueError) as error:
        return Cut(f"a part of an answer that is not in the API's form ({error})")
    return None


def _may_concern_all(error: CallError | None) -> bool:
    """Whether the endpoint may refuse every request, because of the key, the model, or its URL."""
    if not isinstance(error, Refusal):
        return False
    return error.status in (403, 404) or error.code == "model_not_found"


def _wait_seconds(num_attempts: int) -> float:
    doubled = FIRST_WAIT_SECONDS * 2.0 ** min(num_attempts, 20)
    return min(doubled, LONGEST_HOLD_SECONDS) * random.uniform(0.5, 1.0)


def _failed(request: Request, code: str, message: str) -> Completion:
    return Completion(key=request.key, failure=Failure(code=code, message=message))
