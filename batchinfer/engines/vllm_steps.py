"""What is known about each step of vLLM, read from what its scheduler says anyway.

vLLM can keep statistics per token and request, which costs a tenth of the throughput of a small model. The
scheduler's counters come with every step, and a request's events (queued, scheduled, preempted) with its next
output; waiting times and preemptions follow from them.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from typing import Any


class StepRecorder:
    """Takes the place of vLLM's logger manager: `record` is called once a step.

    Requests start in the order in which they were added, so the first ones that the scheduler no longer counts
    as waiting have started; a preempted one counts as waiting again, which is neglected.
    """

    def __init__(self) -> None:
        self.preemptions = 0
        self._num_waiting = 0
        # Of each request that may be waiting: its id, and how many sequences it stands for.
        self._waiting: deque[tuple[str, int]] = deque()
        self._num_sequences = 0
        self._added: dict[str, float] = {}
        self._started: dict[str, float] = {}

    def record(self, scheduler_stats: Any = None, *_: Any, **__: Any) -> None:
        """One step's counters, from vLLM."""
        if scheduler_stats is None:
            return
        self._num_waiting = scheduler_stats.num_waiting_reqs

    def count_preemptions(self, outputs: Iterable[Any]) -> None:
        """Read one step's outputs of the engine core. The prefix cache's counters tell it only where there is one."""
        for output in outputs:
            events = getattr(output, "events", None)
            if events:
                self.preemptions += sum(event.type.name == "PREEMPTED" for event in events)

    def log(self) -> None:
        """Nothing: vLLM calls it every few seconds to write a line."""

    def note_added(self, request_id: str, num_sequences: int) -> None:
        """A request was given to vLLM."""
        self._added[request_id] = time.monotonic()
        self._waiting.append((request_id, num_sequences))
        self._num_sequences += num_sequences

    def note_step(self) -> None:
        """A step was made: who is not waiting any more has started."""
        now = time.monotonic()
        while self._waiting and self._num_sequences > self._num_waiting:
            request_id, num_sequences = self._waiting.popleft()
            self._num_sequences -= num_sequences
            self._started[request_id] = now

    def seconds_of(self, request_id: str) -> tuple[float, float]:
        """Forget a finished request; how long it waited and how long it ran, to about a step."""
        now = time.monotonic()
        added = self._added.pop(request_id, now)
        started = self._started.pop(request_id, now)
        return max(0.0, started - added), max(0.0, now - started)

    def forget_all(self) -> None:
        """After requests were abandoned."""
        self._waiting.clear()
        self._num_sequences = 0
        self._added.clear()
        self._started.clear()


def install(engine: Any) -> StepRecorder:
    """Have an LLMEngine report its steps to a recorder, and keep no statistics of its own."""
    recorder = StepRecorder()
    engine.logger_manager = recorder
    engine.log_stats = False
    processor = engine.output_processor
    processor.log_stats = False
    process_outputs = processor.process_outputs

    def counted(outputs: list[Any], *args: Any, **kwargs: Any) -> Any:
        recorder.count_preemptions(outputs)
        return process_outputs(outputs, *args, **kwargs)

    processor.process_outputs = counted
    return recorder


def unfinished_tokens(engine: Any) -> int:
    """Tokens that were generated for requests that are not finished."""
    states = getattr(engine.output_processor, "request_states", {}).values()
    detokenizers = (getattr(state, "detokenizer", None) for state in states)
    return sum(each.num_output_tokens() for each in detokenizers if each is not None)
