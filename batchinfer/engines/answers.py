"""Takes finished answers apart: what of an answer's text is reasoning, what are calls of tools, and what is left.

Reasoning and calls that the model writes in its own way are found by vLLM's parsers, in another process
(parser_process.py). Answers wait for them outside of the engine, which goes on meanwhile. An answer that a constraint
holds to be a call is JSON; it is read here.
"""

from __future__ import annotations

import json
import logging
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from typing import Any

import msgspec

from batchinfer.core import codec
from batchinfer.core.errors import EngineError
from batchinfer.core.records import (
    AnswerForm,
    Choice,
    Completion,
    EngineInfo,
    EngineStats,
    Request,
    RowKey,
    TextPiece,
)
from batchinfer.engines import Engine, RequestSource, Stop
from batchinfer.engines.config import EngineConfig
from batchinfer.engines.parser_process import Facts, ParserProcess, Parts, Whole, parsers_of
from batchinfer.prompts.tools import names_of

logger = logging.getLogger(__name__)

MOST_AT_ONCE = 64
"""Most answers that the parsers get at once."""
MOST_WAITING = 2048
"""Number of answers that wait for the parsers, above which the engine gets no further requests."""
WAIT_SECONDS = 0.2


class AnswerReader:
    """An engine whose answers are taken apart before they are yielded. Implements Engine.

    Requests without a form pass through it untouched. A row counts as in the engine until its answer is taken apart.

    Args:
        engine: The engine that answers.
        config: Configuration with the names of the parsers.
    """

    def __init__(self, engine: Engine, config: EngineConfig) -> None:
        self._engine = engine
        self._parsers = parsers_of(config)
        self._finds_reasoning = bool(config.reasoning_parser)
        self._finds_calls = bool(config.tool_call_parser)

    def open(self, stop: Stop) -> EngineInfo:
        """See Engine.open. Before that, start the parsers, so that those that do not fit the model are refused."""
        if self._parsers is not None:
            self._parsers.start()
        return self._engine.open(stop)

    def generate(self, source: RequestSource, stop: Stop) -> Iterator[list[Completion]]:
        """See Engine.generate."""
        facts = Facts() if self._parsers is None else self._parsers.start()
        desk = _Desk(self._parsers)
        passing = _NotedRequests(source, desk, facts, self._asked)
        try:
            with closing(self._engine.generate(passing, stop)) as batches:  # type: ignore[type-var]
                for completions in batches:
                    yield [each for each in completions if not passing.hand_in(each)] + desk.done()
            while desk.num_waiting and not stop.is_set():
                yield desk.wait(WAIT_SECONDS)
        except EngineError:
            # These answers were complete before the engine ended.
            while desk.num_waiting and not stop.is_set():
                yield desk.wait(WAIT_SECONDS)
            raise
        finally:
            desk.close()

    def _asked(self, request: Request, form: AnswerForm) -> _Expected:
        has_calls = self._finds_calls and bool(form.tools) and form.tool_choice == "auto"
        has_parsers = self._parsers is not None
        return _Expected(
            form=form,
            is_parsed=has_parsers and (self._finds_reasoning or has_calls),
            counts_reasoning=has_parsers and self._finds_reasoning,
            returns_token_ids=request.returns_token_ids,
        )

    def take_pieces(self) -> list[TextPiece]:
        """See Engine.take_pieces. Pieces are parts of the whole text, before it is taken apart."""
        return self._engine.take_pieces()

    def stats(self) -> EngineStats:
        """See Engine.stats."""
        return self._engine.stats()

    def close(self) -> None:
        """See Engine.close."""
        self._engine.close()


class _Expected(msgspec.Struct, frozen=True, gc=False):
    """What is remembered of a request while the engine answers it."""

    form: AnswerForm
    is_parsed: bool
    """Whether the parsers read the answer."""
    counts_reasoning: bool
    returns_token_ids: bool


class _NotedRequests:
    """The source of requests, which remembers the form of each that the engine takes. Implements RequestSource."""

    def __init__(
        self,
        source: RequestSource,
        desk: _Desk,
        facts: Facts,
        ask: Callable[[Request, AnswerForm], _Expected],
    ) -> None:
        self._source = source
        self._desk = desk
        self._facts = facts
        self._ask = ask
        self._asked: dict[RowKey, _Expected] = {}

    def take(self, max_requests: int, free_slots: Sequence[int] = ()) -> list[Request] | None:
        """See RequestSource.take."""
        if self._desk.num_waiting > MOST_WAITING:
            return []
        requests = self._source.take(max_requests, free_slots)
        return requests if requests is None else [self._noted(each) for each in requests]

    def _noted(self, request: Request) -> Request:
        form = request.form
        if form is None:
            return request
        asked = self._ask(request, form)
        self._asked[request.key] = asked
        # The prompt shows the tools already. The engine's process needs no copy of them with every row.
        changes: dict[str, Any] = {"form": None}
        if asked.is_parsed:
            changes["returns_token_ids"] = True
            keeps = self._facts.keeps_special_for_calls if form.tools else self._facts.keeps_special
            if keeps:
                changes["sampling"] = msgspec.structs.replace(
                    request.sampling, skip_special_tokens=False
                )
        return msgspec.structs.replace(request, **changes)

    def wait(self, timeout_seconds: float) -> None:
        """See RequestSource.wait. Also returns when an answer has been taken apart."""
        if not self._desk.num_waiting:
            self._source.wait(timeout_seconds)
        else:
            self._desk.pause(min(timeout_seconds, WAIT_SECONDS))

    def hand_in(self, completion: Completion) -> bool:
        """Give a completion to the desk if it is to be taken apart. Returns whether it is."""
        asked = self._asked.pop(completion.key, None)
        if asked is None or completion.failure is not None:
            return False
        self._desk.add(asked, completion)
        return True


class _Desk:
    """Where finished answers are taken apart, in order. A thread of its own waits for the parsers."""

    def __init__(self, parsers: ParserProcess | None) -> None:
        self._parsers = parsers
        self._inbox: queue.SimpleQueue[tuple[_Expected, Completion] | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._done: list[Completion] = []
        self.num_waiting = 0
        """Number of answers that were added and that `done` has not returned yet."""
        self._thread: threading.Thread | None = None

    def add(self, asked: _Expected, completion: Completion) -> None:
        """Take an answer."""
        self.num_waiting += 1
        if not asked.is_parsed:
            with self._changed:
                self._done.append(_assembled(asked, completion, None))
            return
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._run, name="parsers of answers", daemon=True
            )
            self._thread.start()
        self._inbox.put((asked, completion))

    def done(self) -> list[Completion]:
        """Return the answers that have been taken apart since the last call."""
        with self._changed:
            done, self._done = self._done, []
        self.num_waiting -= len(done)
        return done

    def pause(self, seconds: float) -> None:
        """Wait until an answer has been taken apart, but at most so many seconds."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._done), seconds)

    def wait(self, seconds: float) -> list[Completion]:
        """Return as `done`, after a `pause`."""
        self.pause(seconds)
        return self.done()

    def close(self) -> None:
        """Drop the answers that wait, and end the thread. It may end later, if a parser has not come to an end."""
        while not self._inbox.empty():
            self._inbox.get_nowait()
        self._inbox.put(None)
        if self._thread is not None:
            self._thread.join(1.0)

    def _run(self) -> None:
        while (first := self._inbox.get()) is not None:
            batch, is_last = [first], False
            while len(batch) < MOST_AT_ONCE and not self._inbox.empty():
                item = self._inbox.get()
                if item is None:
                    is_last = True
                    break
                batch.append(item)
            try:
                done = self._read(batch)
            except Exception as error:  # noqa: BLE001 -- of any class: without this thread, answers would wait for ever
                logger.warning("%d answers keep their text: %r", len(batch), error)
                done = [_assembled(asked, each, _unread(each)) for asked, each in batch]
            with self._changed:
                self._done += done
                self._changed.notify_all()
            if is_last:
                return

    def _read(self, batch: list[tuple[_Expected, Completion]]) -> list[Completion]:
        assert self._parsers is not None
        forms: dict[int, tuple[int, AnswerForm]] = {}
        answers: list[Whole] = []
        for asked, completion in batch:
            index, _ = forms.setdefault(id(asked.form), (len(forms), asked.form))
            answers += [
                Whole(
                    form=index,
                    text=choice.text,
                    token_ids=choice.token_ids or [],
                    prompt_token_ids=completion.prompt_token_ids or [],
                )
                for choice in completion.choices
            ]
        parts = iter(self._parsers.read([form for _, form in forms.values()], answers))
        return [
            _assembled(asked, completion, [next(parts) for _ in completion.choices])
            for asked, completion in batch
        ]


# --------------------------------------------------------------------------- putting answers together


def _unread(completion: Completion) -> list[Parts]:
    """Return the parts of answers that no parser has read."""
    return [Parts(text=choice.text, is_broken=True) for choice in completion.choices]


def _assembled(asked: _Expected, completion: Completion, parts: list[Parts] | None) -> Completion:
    """Return a completion whose choices are taken apart. `parts` is what the parsers say of each choice."""
    form, choices, num_reasoning = asked.form, [], 0
    for index, choice in enumerate(completion.choices):
        # An answer that as a whole is the forced call has no reasoning. Some parsers take all text for reasoning that
        # does not say where reasoning ends.
        made = with_forced_calls(form, choice)
        if parts is not None and made.tool_calls is None:
            made = with_forced_calls(form, with_parts(form, choice, parts[index]))
            num_reasoning += parts[index].num_reasoning
        if asked.is_parsed and not asked.returns_token_ids:
            made = msgspec.structs.replace(made, token_ids=None)
        choices.append(made)
    changes: dict[str, Any] = {"choices": choices}
    if asked.is_parsed and not asked.returns_token_ids:
        changes["prompt_token_ids"] = None
    if asked.counts_reasoning:
        changes["reasoning_tokens"] = num_reasoning
    return msgspec.structs.replace(completion, **changes)


def with_parts(form: AnswerForm, choice: Choice, parts: Parts) -> Choice:
    """Return an answer with the reasoning and the calls that the parsers found.

    Calls stay text if the arguments of one are no JSON object, and if the answer was cut off, since the last one may be
    cut, too, although the parser has closed it.
    """
    reasoning = None if form.hides_reasoning else parts.reasoning
    text, finish_reason, calls = parts.text, choice.finish_reason, None
    if parts.calls:
        is_whole = finish_reason != "length" and all(is_object(each[1]) for each in parts.calls)
        if is_whole:
            offered = set(names_of(form.tools or []))
            calls = [call_of(*each, is_offered=each[0] in offered) for each in parts.calls]
            calls = calls if form.is_parallel else calls[:1]
            finish_reason = "tool_calls"
        else:
            text = parts.whole_text
    return msgspec.structs.replace(
        choice, text=text, reasoning=reasoning, tool_calls=calls, finish_reason=finish_reason
    )


class _ForcedCall(msgspec.Struct):
    name: str
    parameters: msgspec.Raw


_forced_decoder = codec.json_decoder(list[_ForcedCall])


def with_forced_calls(form: AnswerForm, choice: Choice) -> Choice:
    """Return an answer with the calls that its text is, if its form forces calls. Else, return it as it is.

    An answer that is no call, for example because it was cut off, keeps its text.
    """
    try:
        if form.tool_choice == "named":
            calls = [call_of(form.tool_name, choice.text.strip())]
        elif form.tool_choice == "required":
            found = _forced_decoder.decode(choice.text)
            calls = [call_of(each.name, bytes(each.parameters).decode()) for each in found]
        else:
            return choice
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return choice
    if not calls or not all(is_object(call["function"]["arguments"]) for call in calls):
        return choice
    # As in the OpenAI API, an answer that is the call of a named tool has the reason "stop".
    is_reason = form.tool_choice == "required" and choice.finish_reason == "stop"
    finish_reason = "tool_calls" if is_reason else choice.finish_reason
    return msgspec.structs.replace(choice, text="", tool_calls=calls, finish_reason=finish_reason)


def call_of(
    name: str, arguments: str, call_id: str = "", *, is_offered: bool = True
) -> dict[str, Any]:
    """Return a call in the form of the OpenAI API. A call of a tool that was not offered says so.

    A call without an id gets one when its output line is written.
    """
    call: dict[str, Any] = {"id": call_id} if call_id else {}
    call |= {"type": "function", "function": {"name": name, "arguments": arguments}}
    return call if is_offered else {**call, "offered": False}


def is_object(text: str) -> bool:
    """Whether a text is a JSON object."""
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False
