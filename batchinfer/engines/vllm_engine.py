"""vLLM, driven by one thread through ``LLMEngine.add_request`` and ``step``, in the calling process.

The worker does not use this module itself: `batchinfer.engines.pool` runs it in a child process (see
docs/decisions/0003). The engine holds about 1.5 times as many requests as can run at once. So when a request finishes,
another one usually waits in vLLM already and starts at the next step.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from typing import Any

from batchinfer.core.errors import EngineDied, RowError
from batchinfer.core.records import (
    Completion,
    EngineInfo,
    EngineStats,
    Failure,
    Request,
    RequestInput,
    TextPiece,
)
from batchinfer.core.tasks import is_pooling
from batchinfer.engines import RequestSource, Stop
from batchinfer.engines.config import EngineConfig
from batchinfer.engines.vllm_images import prompt_with_images
from batchinfer.engines.vllm_loading import last_line, load_adapters, load_engine, prepare_process
from batchinfer.engines.vllm_pooling import Gathering, Pooler
from batchinfer.engines.vllm_requests import (
    AnswerStream,
    client_errors,
    completion_of,
    first_line,
    sampling_params,
)

logger = logging.getLogger(__name__)

# Number of requests that vLLM holds, as a multiple of the number that can run at once.
IN_FLIGHT_FACTOR = 1.5
# The same for pooling models, which finish all requests of a step at once. What waits must fill the next step, and the
# one after it, while new requests are on their way.
POOLING_IN_FLIGHT_FACTOR = 3.0
# Message for a request that asks for log-probabilities of its prompt in a run with LoRA adapters on a CPU. It would end
# the engine, because vLLM's kernels then expect one token of each sequence, and not all tokens of the prompt.
_NO_PROMPT_LOGPROBS = (
    "prompt_logprobs: vLLM cannot compute them on a CPU in a run with LoRA adapters, "
    "nor `echo` with `logprobs`"
)
# Seconds between two checks that the engine core's process is alive.
WATCH_SECONDS = 0.2


class VllmEngine:
    """One vLLM engine. Implements Engine.

    Args:
        config: Configuration of the engine. `replicas` and `gpus` are ignored: `batchinfer.engines.pool` reads them.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.max_in_flight = 0
        self._engine: Any = None
        self._tokenizer: Any = None
        self._defaults: dict[str, Any] = {}
        self._max_model_len = 0
        self._in_flight: dict[str, Request] = {}
        """Requests in flight by vLLM's request id. A request to a pooling model has an id for each of its texts."""
        self._gatherings: dict[str, tuple[Gathering, int]] = {}
        """For the id of each text of a request to a pooling model: the request's outputs, and the text's index."""
        self._pooler: Pooler | None = None
        """What the model does, if it is a pooling model."""
        # Streamed requests in flight, by vLLM's request id.
        self._streams: dict[str, AnswerStream] = {}
        self._pieces: list[TextPiece] = []
        self._ids = itertools.count()
        self._adapters: dict[str, Any] = {}
        """vLLM's LoRARequest of each adapter, by its name."""
        self._lacks_prompt_logprobs = False
        self._closed = threading.Event()
        self._recorder = StepRecorder()
        self._steps = 0
        self._prompt_tokens = self._cached_tokens = self._completion_tokens = 0

    def open(self, stop: Stop) -> EngineInfo:  # noqa: ARG002 - the pool kills this process when stopped
        """Load the model. `stop` is ignored: to stop the loading, the pool kills this process."""
        start = time.monotonic()
        is_cpu = prepare_process()
        imported = time.monotonic()
        self._engine = load_engine(self.config, is_cpu=is_cpu)
        self._recorder = install(self._engine)
        self._adapters = load_adapters(self._engine, self.config)
        self._lacks_prompt_logprobs = is_cpu and bool(self._adapters)
        import vllm
        from vllm.platforms import current_platform

        vllm_config = self._engine.vllm_config
        model, scheduler = vllm_config.model_config, vllm_config.scheduler_config
        self._tokenizer = self._engine.get_tokenizer()
        if is_pooling(self.config.task):
            self._pooler = Pooler(self._engine, self.config)
        else:
            self._defaults = model.get_diff_sampling_param()
        self._max_model_len = int(model.max_model_len)
        factor = IN_FLIGHT_FACTOR if self._pooler is None else POOLING_IN_FLIGHT_FACTOR
        self.max_in_flight = math.ceil(scheduler.max_num_seqs * factor)
        self._closed.clear()
        self._watch_core()
        ready = time.monotonic()
        device = "cpu" if is_cpu else str(current_platform.get_device_name())
        return EngineInfo(
            name="vllm",
            version=str(vllm.__version__),
            model=self.config.model,
            max_model_len=self._max_model_len,
            max_num_seqs=int(scheduler.max_num_seqs),
            max_in_flight=self.max_in_flight,
            dtype=str(model.dtype).removeprefix("torch."),
            revision=str(model.revision or ""),
            quantization=str(model.quantization or ""),
            device=device,
            load_seconds=ready - start,
            import_seconds=imported - start,
            model_seconds=ready - imported,
            max_logprobs=getattr(model, "max_logprobs", None),
        )

    def _watch_core(self) -> None:
        """Start a thread that makes vLLM's `step` raise when the engine core's process has died.

        Without this thread, `step` would wait for the dead engine core for ever. If the engine core runs in this
        process, no thread is started.
        """
        core = self._engine.engine_core
        resources = getattr(core, "resources", None)
        outputs = getattr(core, "outputs_queue", None)
        if resources is None or outputs is None or not hasattr(resources, "engine_dead"):
            return

        def watch() -> None:
            while not self._closed.wait(WATCH_SECONDS):
                if resources.engine_dead:
                    outputs.put_nowait(RuntimeError("the engine core's process ended"))
                    return

        threading.Thread(target=watch, name="engine core watch", daemon=True).start()

    def close(self) -> None:
        """End vLLM's own processes. The memory of this process is freed only when this process ends."""
        self._closed.set()
        engine, self._engine = self._engine, None
        core = getattr(engine, "engine_core", None)
        if core is not None:
            with contextlib.suppress(Exception):
                core.shutdown()

    def take_pieces(self) -> list[TextPiece]:
        """See Engine.take_pieces."""
        pieces, self._pieces = self._pieces, []
        return pieces

    def stats(self) -> EngineStats:
        """Return the counters since `open`."""
        return EngineStats(
            steps=self._steps,
            preemptions=self._recorder.preemptions,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            completion_tokens=self._completion_tokens,
        )

    def generated_tokens(self) -> int:
        """Return the number of tokens generated so far, including those of unfinished requests.

        The worker's watchdog considers the engine to make progress while this number grows.
        """
        return self._completion_tokens + unfinished_tokens(self._engine)

    def generate(self, source: RequestSource, stop: Stop) -> Iterator[list[Completion]]:
        """See Engine.generate. On a slow CPU, more than a second may pass between two yields."""
        exhausted = False
        try:
            while not stop.is_set():
                finished: list[Completion] = []
                num_free = self.max_in_flight - len(self._in_flight)
                taken: list[Request] | None = []
                if not exhausted and num_free > 0:
                    taken = source.take(num_free)
                    exhausted = taken is None
                for request in taken or []:
                    failure = self._add(request)
                    if failure:
                        finished.append(Completion(key=request.key, failure=failure))
                if self._in_flight:
                    yield finished + self._step()
                elif finished:
                    yield finished
                elif exhausted:
                    return
                elif not taken:
                    yield []
                    source.wait(1.0)
        finally:
            self._abandon()

    def _step(self) -> list[Completion]:
        try:
            outputs = self._engine.step()
        except Exception as error:
            raise self._death(error) from error
        self._steps += 1
        self._recorder.note_step()
        finished: list[Completion] = []
        for output in outputs:
            stream = self._streams.get(output.request_id)
            if stream is not None:
                self._pieces += stream.add(output.outputs)
            if not output.finished:
                continue
            request = self._in_flight.pop(output.request_id, None)
            if request is None:
                continue
            if stream is not None:
                del self._streams[output.request_id]
                output.outputs = stream.all_outputs()
            completion = self._completion(request, output)
            if completion is None:
                continue
            self._prompt_tokens += completion.prompt_tokens
            self._cached_tokens += completion.cached_tokens
            self._completion_tokens += completion.completion_tokens
            finished.append(completion)
        return finished

    def _completion(self, request: Request, output: Any) -> Completion | None:
        """Return the completion of a finished request; None while other texts of it are not finished."""
        seconds = self._recorder.seconds_of(output.request_id)
        gathering, index = self._gatherings.pop(output.request_id, (None, 0))
        if gathering is None:
            return completion_of(request, output, seconds)
        return gathering.add(index, output, seconds)

    def _death(self, error: Exception) -> EngineDied:
        """Return an EngineDied for an exception that vLLM raised. The error lists the rows in flight."""
        resources = getattr(self._engine.engine_core, "resources", None)
        what = "the engine core's process ended" if getattr(resources, "engine_dead", False) else ""
        reason = what or f"{type(error).__name__}: {last_line(error)}"
        keys = list(dict.fromkeys(request.key for request in self._in_flight.values()))
        return EngineDied(f"vLLM: {reason}", in_flight=keys)

    def _abandon(self) -> None:
        self._streams.clear()
        self._pieces.clear()
        if not self._in_flight or self._engine is None:
            return
        ids = list(self._in_flight)
        self._in_flight.clear()
        self._gatherings.clear()
        self._recorder.forget_all()
        # If the engine core is dead, aborting raises. The error is ignored, since nothing is left to abort.
        with contextlib.suppress(Exception):
            self._engine.abort_request(ids)

    # ------------------------------------------------------------------ adding one request

    def _add(self, request: Request) -> Failure | None:
        """Give a request to vLLM. Returns a failure if vLLM refuses it."""
        if is_pooling(request.task) or self._pooler is not None:
            return self._add_texts(request)
        try:
            params = sampling_params(
                request.sampling, self._defaults, is_streamed=request.is_streamed
            )
            if self._lacks_prompt_logprobs and params.prompt_logprobs is not None:
                raise RowError("invalid_parameter", _NO_PROMPT_LOGPROBS)
            prompt = self._prompt(request)
            adapter = self._adapter(request.adapter)
        except RowError as error:
            return Failure(code=error.code, message=error.message)
        except Exception as error:  # noqa: BLE001 -- models' processors of images raise errors of any class
            return self._refusal_before_adding(request, error)
        request_id = str(next(self._ids))
        try:
            self._engine.add_request(
                request_id, prompt, params, lora_request=adapter, priority=request.priority
            )
        except client_errors() as error:
            return self._refusal(prompt, params, error)
        except Exception as error:
            raise self._death(error) from error
        self._in_flight[request_id] = request
        if request.is_streamed:
            self._streams[request_id] = AnswerStream(request)
        self._recorder.note_added(request_id, params.n)
        return None

    def _add_texts(self, request: Request) -> Failure | None:
        """Give the texts of a request for a pooling model to vLLM. Returns a failure if vLLM refuses one of them."""
        pooler = self._pooler
        if pooler is None or not is_pooling(request.task):
            message = f"this engine does not do the task {request.task!r}"
            return Failure(code="wrong_task", message=message)
        gathering = Gathering(request, pooler)
        added: list[str] = []
        try:
            adapter = self._adapter(request.adapter)
            texts = zip(request.prompts, pooler.params_of(request), strict=True)
            for index, (text, params) in enumerate(texts):
                prompt, request_id = self._prompt(text), str(next(self._ids))
                try:
                    self._engine.add_request(
                        request_id, prompt, params, lora_request=adapter, priority=request.priority
                    )
                except client_errors() as error:
                    self._drop(added)
                    return self._refusal(prompt, params, error)
                except Exception as error:
                    raise self._death(error) from error
                self._in_flight[request_id] = request
                self._gatherings[request_id] = (gathering, index)
                self._recorder.note_added(request_id, 1)
                added.append(request_id)
        except RowError as error:
            self._drop(added)
            return Failure(code=error.code, message=error.message)
        return None

    def _drop(self, ids: list[str]) -> None:
        """Take texts of a request back from vLLM."""
        if not ids:
            return
        self._engine.abort_request(ids)
        self._recorder.forget(ids)
        for request_id in ids:
            del self._in_flight[request_id], self._gatherings[request_id]

    def _prompt(self, request: Request | RequestInput) -> Any:
        """Return a request's prompt in the form that vLLM takes.

        Messages are rendered by the tokenizer's chat template and then tokenized.

        Raises:
            RowError: the chat template refuses the messages.
            Exception: of any class: vLLM refuses a prompt with images.
        """
        if isinstance(request, Request) and request.media:
            return prompt_with_images(self._engine, request)
        if request.token_ids is not None:
            return {"prompt_token_ids": request.token_ids}
        if request.text is not None:
            return request.text
        try:
            text = self._tokenizer.apply_chat_template(
                request.messages, tokenize=False, add_generation_prompt=self._pooler is None
            )
            ids = self._tokenizer.encode(text, add_special_tokens=False)
        except Exception as error:  # a chat template can raise an error of any class
            raise RowError("template_error", f"chat template: {first_line(error)}") from error
        return {"prompt_token_ids": ids}

    def _adapter(self, name: str | None) -> Any:
        if name is None:
            return None
        if name not in self._adapters:
            raise RowError("model_not_found", f"the engine has no adapter {name!r}")
        return self._adapters[name]

    def _refusal(self, prompt: Any, params: Any, error: Exception) -> Failure:
        """Return why vLLM refused a request.

        The reason is found by examining the request, because vLLM's messages differ between its versions.
        """
        message = first_line(error)
        length = self._length(prompt)
        if length == 0:
            return Failure(code="empty_prompt", message="the prompt has no token")
        most = self._max_model_len - (self._pooler is None)
        if length is not None and length > most:
            text = f"the prompt has {length} tokens or more, the model takes at most {most}"
            return Failure(code="prompt_too_long", message=text)
        if self._refuses_parameters(params):
            return Failure(code="invalid_parameter", message=message)
        return Failure(code="engine_rejected", message=message)

    def _refusal_before_adding(self, request: Request, error: Exception) -> Failure:
        """Return why a request was refused before vLLM's engine core knew of it, as prompts with images are."""
        message = first_line(error)
        contents = [each["content"] or "" for each in request.messages or []]
        parts = [[each] if isinstance(each, str) else each for each in contents]
        texts = [
            part if isinstance(part, str) else part.get("text", "")
            for each in parts
            for part in each
        ]
        text = request.text or "".join(texts)
        length = len(request.token_ids) if request.token_ids is not None else self._length(text)
        if length is not None and length >= self._max_model_len:
            return Failure(code="prompt_too_long", message=message)
        return Failure(code="engine_rejected", message=message)

    def _length(self, prompt: Any) -> int | None:
        """Return a prompt's number of tokens; None if it cannot be tokenized.

        For a prompt that is far too long, return a lower bound of the number, without tokenizing the prompt.
        """
        if isinstance(prompt, dict):
            return len(prompt["prompt_token_ids"])
        # No token has more than `longest` characters. So a prompt has at least its characters / `longest` tokens.
        longest = getattr(self._tokenizer, "max_chars_per_token", 0)
        if longest and len(prompt) > longest * self._max_model_len:
            return math.ceil(len(prompt) / longest)
        try:
            return len(self._tokenizer.encode(prompt))
        except Exception:
            logger.debug("a prompt cannot be tokenized", exc_info=True)
            return None

    def _refuses_parameters(self, params: Any) -> bool:
        """Whether vLLM refuses these sampling parameters even with a prompt of one token."""
        probe = str(next(self._ids))
        try:
            self._engine.add_request(probe, {"prompt_token_ids": [0]}, params.clone())
        except client_errors():
            return True
        self._engine.abort_request([probe])
        return False


# --------------------------------------------------------------------------- waiting times and preemptions


class StepRecorder:
    """Measures how long requests wait and run, and counts preemptions. Takes the place of vLLM's logger manager.

    vLLM's own statistics work per token and request, and would cost a tenth of the throughput of a small model. This
    class only uses the scheduler's counters and the requests' events, which vLLM returns at every step anyway.

    Requests start in the order in which they were added. So if the scheduler counts fewer requests as waiting than
    this class does, the oldest waiting requests have started. The scheduler also counts a preempted request as waiting,
    and takes requests with a priority in another order; the small errors from this are accepted.
    """

    def __init__(self) -> None:
        self.preemptions = 0
        self._num_waiting = 0
        # Id and number of sequences of each request that counts as waiting, oldest first.
        self._waiting: deque[tuple[str, int]] = deque()
        self._num_sequences = 0
        self._added: dict[str, float] = {}
        self._started: dict[str, float] = {}

    def record(self, scheduler_stats: Any = None, *_: Any, **__: Any) -> None:
        """Remember how many requests the scheduler counts as waiting. vLLM calls this once per step."""
        if scheduler_stats is None:
            return
        self._num_waiting = scheduler_stats.num_waiting_reqs

    def count_preemptions(self, outputs: Iterable[Any]) -> None:
        """Count the preemptions among the events in the engine core's outputs of one step."""
        for output in outputs:
            events = getattr(output, "events", None)
            if events:
                self.preemptions += sum(event.type.name == "PREEMPTED" for event in events)

    def log(self) -> None:
        """Do nothing. vLLM calls this every few seconds so that its logger manager logs a line."""

    def note_added(self, request_id: str, num_sequences: int) -> None:
        """Remember a request that was given to vLLM, and the present time."""
        self._added[request_id] = time.monotonic()
        self._waiting.append((request_id, num_sequences))
        self._num_sequences += num_sequences

    def note_step(self) -> None:
        """Remember at the end of a step which requests have started, and the present time."""
        now = time.monotonic()
        while self._waiting and self._num_sequences > self._num_waiting:
            request_id, num_sequences = self._waiting.popleft()
            self._num_sequences -= num_sequences
            self._started[request_id] = now

    def seconds_of(self, request_id: str) -> tuple[float, float]:
        """Return the seconds that a finished request waited, and the seconds that it ran. Forgets the request.

        The seconds may be wrong by about the duration of one step.
        """
        now = time.monotonic()
        added = self._added.pop(request_id, now)
        started = self._started.pop(request_id, now)
        return max(0.0, started - added), max(0.0, now - started)

    def forget(self, ids: Collection[str]) -> None:
        """Forget some requests, after they were aborted."""
        self._waiting = deque(each for each in self._waiting if each[0] not in ids)
        self._num_sequences = sum(count for _, count in self._waiting)
        for request_id in ids:
            self._added.pop(request_id, None)
            self._started.pop(request_id, None)

    def forget_all(self) -> None:
        """Forget all requests, after they were aborted."""
        self._waiting.clear()
        self._num_sequences = 0
        self._added.clear()
        self._started.clear()


def install(engine: Any) -> StepRecorder:
    """Make an LLMEngine report its steps to a new recorder, and switch off vLLM's own statistics."""
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
    """Return the number of tokens that were generated so far for unfinished requests."""
    states = getattr(engine.output_processor, "request_states", {}).values()
    detokenizers = (getattr(state, "detokenizer", None) for state in states)
    return sum(each.num_output_tokens() for each in detokenizers if each is not None)
