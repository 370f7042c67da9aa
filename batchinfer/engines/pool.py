"""Replicas of an engine, each in a process of its own. All get their requests from one source.

The worker never imports vllm. So a crash of an engine does not end the worker, and an engine's memory and threads are
not the worker's. There is one child process per replica, that is, per group of GPUs. Each replica with free slots gets
requests. When a replica dies or stalls, the log names the replica, its rows are tried again, and it is started again
(`restarts`) while the other replicas go on. See docs/decisions/0003.
"""

from __future__ import annotations

import contextlib
import logging
import selectors
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import cast

import msgspec

from batchinfer.cli.logs import event
from batchinfer.core import errors, units
from batchinfer.core.errors import (
    EngineDied,
    EngineError,
    EngineLoadError,
    EngineStalled,
    Interrupted,
)
from batchinfer.core.records import (
    Completion,
    EngineInfo,
    EngineStats,
    Failure,
    Request,
    RowKey,
    TextPiece,
)
from batchinfer.engines import RequestSource, Stop, share_out
from batchinfer.engines.bucket_models import with_local_files
from batchinfer.engines.channel import (
    Abandon,
    Close,
    Closed,
    Done,
    Failed,
    Load,
    Ready,
    Work,
    pack_request,
)
from batchinfer.engines.config import EngineConfig
from batchinfer.engines.gpus import Placement, place
from batchinfer.engines.nodes import Leader
from batchinfer.engines.replica import Replica
from batchinfer.engines.restarts import Restarts
from batchinfer.engines.vllm_loading import MEMORY_ADVICE

logger = logging.getLogger(__name__)

# Seconds until `RequestSource.take` is called again if slots are free. The pause doubles after each call of `take` that
# returns no request.
POLL_SECONDS = 0.01
# Most seconds between two calls of `RequestSource.take` while slots are free, however often the pause has doubled.
SLOWEST_POLL_SECONDS = 0.1
# Most seconds that `generate` waits for replicas before it yields and the watchdog checks the replicas.
LONGEST_WAIT_SECONDS = 0.25
# Seconds between two checks that the replicas' processes still run. Usually the end of a process is noticed earlier,
# because its connection closes.
RUNNING_LOOK_SECONDS = 0.5
# Seconds that `close` waits for replicas to end by themselves before it kills them.
CLOSE_SECONDS = 8.0
# Seconds that `close` waits for replicas to end by themselves if the pool has failed.
CLOSE_AFTER_FAILURE_SECONDS = 3.0
# Seconds to wait, after a replica on several machines has ended, for the news that one of the machines has gone.
NODE_NEWS_SECONDS = 2.0
# If more seconds than this pass between two checks of the watchdog, this process itself was frozen, perhaps with its
# machine. The watchdog then does not count these seconds against the engines.
FROZEN_SECONDS = 5.0


class ProcessPool:
    """One or more engine processes. Implements Engine.

    Args:
        config: Configuration of every replica. Its `replicas`, `gpus` and parallel sizes decide how many replicas
            there are.
        nodes: Connections to the other machines that run the model together with this one. None if there are none.
    """

    def __init__(self, config: EngineConfig, nodes: Leader | None = None) -> None:
        self.config = config
        self._nodes = nodes
        self.replicas: list[Replica] = []
        self._selector = selectors.DefaultSelector()
        self._round = 0
        self._loaded_config = config
        """Configuration that every replica's process gets."""
        self._restarts = Restarts()
        self._orphans: list[Request] = []
        self._pieces: list[TextPiece] = []
        self._lost_stats = EngineStats()
        self._failure: EngineError | None = None
        self._looked = time.monotonic()
        self._next_running_look = 0.0

    # ------------------------------------------------------------------ life

    def open(self, stop: Stop) -> EngineInfo:
        """Start all replicas and wait until they are loaded. If one fails to load, all processes are ended.

        A model or tokenizer in a bucket is fetched first.
        """
        self._failure = None
        config = with_local_files(self.config, with_weights=True, stop=stop)
        start = time.monotonic()
        try:
            placement = place(config)
            self._loaded_config = placement.config
            if self._nodes is not None:
                self._nodes.gather(self.config, stop)
            for name, environment in placement.replicas:
                self._start(name, environment)
            while any(not replica.info for replica in self.replicas):
                if stop.is_set():
                    raise Interrupted("engine: stopped while it was loading")
                if self._nodes is not None:
                    self._nodes.check(EngineLoadError)
                if time.monotonic() - start > self.config.load_timeout_seconds:
                    self._raise_not_ready()
                for replica, frames in self._received(0.05):
                    self._note_loaded(replica, frames)
        except BaseException:
            self._end_all(0.0)
            raise
        return self._info(placement, time.monotonic() - start)

    def _start(self, name: str, environment: Mapping[str, str]) -> None:
        """Start the process of a replica, and let it load the model."""
        replica = Replica(name, environment)
        self.replicas.append(replica)
        self._selector.register(replica.channel, selectors.EVENT_READ, replica)
        with contextlib.suppress(Closed):
            replica.channel.send(Load(config=self._loaded_config))

    def _raise_not_ready(self) -> None:
        waiting = next(replica for replica in self.replicas if not replica.info)
        self._end_all(0.0)
        raise EngineLoadError(
            f"{waiting.name}: not loaded after {self.config.load_timeout_seconds:g} s; {waiting.reason()}",
            hint="--load-timeout-seconds gives it longer",
        )

    def _note_loaded(self, replica: Replica, frames: Sequence[object] | None) -> None:
        if frames is None:
            raise EngineLoadError(f"{replica.name}: {replica.reason()}")
        for frame in frames:
            if isinstance(frame, Ready):
                replica.note_loaded(frame.info)
                logger.info("%s: loaded in %.1f s", replica.name, frame.info.load_seconds)
            elif isinstance(frame, Failed):
                raise load_error(replica, frame)

    def _info(self, placement: Placement, seconds: float) -> EngineInfo:
        infos = [replica.info for replica in self.replicas if replica.info]
        first = infos[0]
        slowest = max(infos, key=lambda info: info.load_seconds)
        return EngineInfo(
            name=first.name,
            version=first.version,
            model=self.config.model or first.model,
            max_model_len=min(info.max_model_len for info in infos),
            max_num_seqs=sum(info.max_num_seqs for info in infos),
            max_in_flight=self.max_in_flight,
            dtype=first.dtype,
            revision=first.revision or placement.revision,
            quantization=first.quantization,
            num_replicas=len(infos),
            device=first.device,
            load_seconds=seconds,
            import_seconds=slowest.import_seconds,
            model_seconds=slowest.model_seconds,
            max_logprobs=first.max_logprobs,
        )

    @property
    def max_in_flight(self) -> int:
        """Most requests that all loaded replicas together should have in flight."""
        return sum(replica.info.max_in_flight for replica in self.replicas if replica.info)

    def close(self) -> None:
        """End all processes within seconds, whatever their state."""
        self._end_all(CLOSE_AFTER_FAILURE_SECONDS if self._failure else CLOSE_SECONDS)

    def _end_all(self, grace_seconds: float) -> None:
        deadline = time.monotonic() + grace_seconds
        for replica in self.replicas:
            with contextlib.suppress(Closed):
                if grace_seconds:
                    replica.channel.send(Close())
        for replica in self.replicas:
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(replica.channel)
            replica.end(deadline - time.monotonic())
            self._lost_stats = add_stats([self._lost_stats, replica.stats])
        self.replicas = []
        self._restarts.clear()

    def take_pieces(self) -> list[TextPiece]:
        """See Engine.take_pieces."""
        pieces, self._pieces = self._pieces, []
        return pieces

    def stats(self) -> EngineStats:
        """Return the sums of the counters of all replicas, lost ones included.

        Replicas report their counters about every half second.
        """
        return add_stats([self._lost_stats, *(replica.stats for replica in self.replicas)])

    # ------------------------------------------------------------------ work

    def generate(self, source: RequestSource, stop: Stop) -> Iterator[list[Completion]]:
        """See Engine.generate. Completions of all replicas are yielded in the order in which they arrive."""
        if self._failure:
            raise self._failure
        exhausted = False
        self._looked = time.monotonic()
        poll_seconds = POLL_SECONDS
        try:
            while not stop.is_set():
                for name, environment in self._restarts.take_due():
                    self._start(name, environment)
                num_free = sum(self._free_slots) - len(self._orphans)
                taken: list[Request] | None = []
                if not exhausted and num_free > 0:
                    several = [self._free_slots] if len(self.replicas) > 1 else []
                    taken = source.take(num_free, *several)
                    exhausted = taken is None
                finished = self._send(taken or [])
                if not any(replica.in_flight for replica in self.replicas):
                    if finished:
                        yield finished
                    elif exhausted and not self._orphans:
                        return
                    elif not taken:
                        yield []
                        self._wait_idle(source)
                    self._looked = time.monotonic()
                    continue
                hungry = not exhausted and num_free > len(taken or [])
                # Near the end of the rows, slots stay free and the source has no more requests ready. So ask the source
                # less and less often.
                poll_seconds = (
                    POLL_SECONDS if taken else min(2 * poll_seconds, SLOWEST_POLL_SECONDS)
                )
                pause = 0.0 if finished else poll_seconds if hungry else LONGEST_WAIT_SECONDS
                finished += self._collect(pause)
                finished += self._check_stalls()
                self._check_nodes()
                yield finished
        finally:
            self._abandon()

    def _wait_idle(self, source: RequestSource) -> None:
        """Wait for a request, or until a replica is loaded that can take one. Called while no request is in flight."""
        if any(self._free_slots):
            source.wait(1.0)
            self._collect(0.0)  # notices a replica that has loaded or died meanwhile
        elif self.replicas:
            self._collect(LONGEST_WAIT_SECONDS)
        else:
            time.sleep(LONGEST_WAIT_SECONDS)  # all replicas wait for their restart
        self._check_stalls()
        self._check_nodes()

    def _check_nodes(self, *, patience_seconds: float = 0.0) -> None:
        """Raise EngineDied if another machine that runs the model has gone. No row in flight is to blame."""
        if self._nodes is None:
            return
        try:
            self._nodes.check(patience_seconds=patience_seconds)
        except EngineDied as error:
            self._failure = error
            raise

    def _send(self, requests: list[Request]) -> list[Completion]:
        """Give requests to the replicas that hold the fewest. Returns failures for requests that cannot be encoded."""
        refused: list[Completion] = []
        requests = self._orphans + requests
        self._orphans = []
        for replica, share in zip(self.replicas, self._shares(len(requests)), strict=True):
            part, requests = requests[:share], requests[share:]
            sent: list[Request] = []
            packed: list[msgspec.Raw] = []
            for request in part:
                data = pack_request(request)
                if isinstance(data, Completion):
                    refused.append(data)
                else:
                    sent.append(request)
                    packed.append(data)
            replica.note_sent(sent)
            if packed:
                # If the replica has died, the requests still count as in flight there. `_collect` notices the death
                # later, and then other replicas get these requests.
                with contextlib.suppress(Closed):
                    replica.channel.send(Work(requests=packed))
        self._orphans = requests
        return refused

    def _shares(self, count: int) -> list[int]:
        """Return how many of the next `count` requests each replica gets.

        Each replica gets requests that follow each other in the stream. Such requests often share a prefix, and the
        replica then computes the prefix only once. So a source that knows the free slots can decide which requests
        come to the same replica.
        """
        held = [len(replica.in_flight) for replica in self.replicas]
        return share_out(held, self._free_slots, count)

    @property
    def _free_slots(self) -> list[int]:
        return [replica.free_slots for replica in self.replicas]

    def _received(
        self, timeout_seconds: float
    ) -> Iterator[tuple[Replica, Sequence[object] | None]]:
        """Yield each replica from which frames have arrived, with the frames.

        A replica that has ended is yielded with None instead of frames.
        """
        for replica in self.replicas:
            want = selectors.EVENT_READ
            if replica.channel.has_unsent:
                want |= selectors.EVENT_WRITE
            if self._selector.get_key(replica.channel).events != want:
                self._selector.modify(replica.channel, want, replica)
        ready = self._selector.select(timeout_seconds)
        for key, events in ready:
            replica = key.data
            if events & selectors.EVENT_WRITE:
                with contextlib.suppress(Closed):
                    replica.channel.flush()
            try:
                # Read even if writing has failed, because the replica may have sent the reason before it ended.
                frames = replica.channel.receive()
            except Closed:
                yield replica, None
                continue
            if frames:
                yield replica, frames
        now = time.monotonic()
        if now < self._next_running_look:
            return
        self._next_running_look = now + RUNNING_LOOK_SECONDS
        # The connection of a dead replica may still be open in a process that vLLM started. So check the replicas'
        # processes as well.
        for replica in {*self.replicas}.difference(key.data for key, _ in ready):
            if not replica.is_running():
                with contextlib.suppress(Closed):
                    if frames := replica.channel.receive():
                        yield replica, frames
                        continue
                yield replica, None

    def _collect(self, timeout_seconds: float) -> list[Completion]:
        finished: list[Completion] = []
        for replica, frames in list(self._received(timeout_seconds)):
            if frames is None:
                finished += self._lose(replica, EngineDied, replica.reason())
                continue
            for frame in frames:
                if isinstance(frame, Ready):
                    self._note_restarted(replica, frame.info)
                elif isinstance(frame, Done):
                    finished += self._note_done(replica, frame)
                elif isinstance(frame, Failed):
                    replica.settle()
                    kind = EngineStalled if frame.kind == "EngineStalled" else EngineDied
                    lines = replica.last_lines() if kind is EngineDied else ""
                    finished += self._lose(replica, kind, frame.message + lines, frame.in_flight)
                    break
        return finished

    def _note_restarted(self, replica: Replica, info: EngineInfo) -> None:
        replica.note_loaded(info)
        logger.info("%s: loaded again in %.1f s", replica.name, info.load_seconds)
        if self._round:
            # The new process begins with round 0. Completions of another round than the pool's are ignored.
            with contextlib.suppress(Closed):
                replica.channel.send(Abandon(round=self._round))

    def _note_done(self, replica: Replica, frame: Done) -> list[Completion]:
        finished = frame.completions if frame.round == self._round else []
        if frame.round == self._round:
            self._pieces += frame.pieces
        replica.note_progress(frame.stats, frame.tokens, len(finished))
        return [completion for completion in finished if replica.note_finished(completion.key)]

    def _check_stalls(self) -> list[Completion]:
        """End the replicas that make no progress, or that load for too long. Returns their rows; see `_lose`."""
        lost: list[Completion] = []
        now = time.monotonic()
        gap, self._looked = now - self._looked, now
        if gap > FROZEN_SECONDS:
            # This process itself was frozen, perhaps with its machine. So the gap does not show that an engine stalled.
            for replica in self.replicas:
                replica.forgive(gap)
        for replica in list(self.replicas):
            limit = self.config.load_timeout_seconds
            if not replica.info and now - replica.started > limit:
                lost += self._lose(replica, EngineStalled, f"not loaded again after {limit:g} s")
            elif replica.stalled_seconds() > self.config.stall_seconds:
                waiting = f"{len(replica.in_flight)} requests in flight"
                reason = (
                    f"no step or no token for {self.config.stall_seconds:g} s with {waiting}, "
                    "see --stall-seconds"
                )
                lost += self._lose(replica, EngineStalled, reason)
        return lost

    def _lose(
        self,
        replica: Replica,
        kind: type[EngineError],
        reason: str,
        suspects: Iterable[RowKey] = (),
    ) -> list[Completion]:
        """End a replica's process, and have the replica started again unless its processes have ended too often.

        Args:
            replica: Replica that has died or stalled.
            kind: Class of the error that is raised if the pool cannot go on.
            reason: Text for the log or the error.
            suspects: Rows that the engine itself reported as in flight.

        Returns:
            A failure that is an engine's death for each row that may have caused it. Other rows of the replica go to
            the next replica with free slots.

        Raises:
            EngineError: no replica is left, and none will be started again. Its class is `kind`.
        """
        # If the engine reported the rows that it was working on, only these may have caused its death. Otherwise every
        # row in flight may have.
        self._check_nodes(patience_seconds=NODE_NEWS_SECONDS)
        rows = dict(replica.in_flight)
        killed = {key: rows[key] for key in suspects if key in rows} or rows
        self._selector.unregister(replica.channel)
        self.replicas.remove(replica)
        replica.end(0.0)
        # A replica on several machines is only started again together with them, by a new start of the worker.
        comes_back = self._nodes is None and self._restarts.ended(
            replica.name, replica.environment, num_finished=replica.num_finished
        )
        lost = EngineStats(replicas_lost=0 if comes_back else 1, restarts=1 if comes_back else 0)
        self._lost_stats = add_stats([self._lost_stats, replica.stats, lost])
        num_left = len(self.replicas) + self._restarts.num_waiting
        if not num_left:
            self._failure = kind(f"{replica.name}: {reason}", in_flight=list(killed))
            raise self._failure
        num_lost = self._lost_stats.replicas_lost
        fields = {
            "replica": replica.name,
            "reason": reason,
            "rows": len(rows),
            "replicas": num_left + num_lost,
            "lost": num_lost,
        }
        told = (replica.name, reason, units.many(len(rows), "row"))
        if comes_back:
            logger.error(
                "%s: %s; what it held (%s) is tried again, and it is started again",
                *told,
                extra=event("replica_restarted", **fields),
            )
        else:
            logger.error(
                "%s: %s; what it held (%s) is tried again, but it is not started again (replicas left: %d)",
                *told,
                num_left,
                extra=event("replica_lost", **fields),
            )
        self._orphans += [request for key, request in rows.items() if key not in killed]
        failure = Failure(code="engine_crash", message=f"{replica.name}: {reason}", transient=True)
        return [Completion(key=key, failure=failure) for key in killed]

    def _abandon(self) -> None:
        """Make all replicas drop the requests in flight.

        Completions of dropped requests that still arrive belong to an earlier round, and are ignored.
        """
        self._orphans = []
        self._pieces = []
        if not any(replica.in_flight for replica in self.replicas):
            return
        self._round += 1
        for replica in self.replicas:
            replica.note_abandoned()
            if replica.info:  # a replica that loads would take this for the signal to stop
                with contextlib.suppress(Closed):
                    replica.channel.send(Abandon(round=self._round))


def load_error(replica: Replica, frame: Failed) -> errors.BatchinferError:
    """Return the error with which the pool's `open` fails because a replica did not load.

    If the replica reported an error of batchinfer's, this is that error. Otherwise it is an EngineLoadError with the
    last lines that the replica wrote.
    """
    kind = getattr(errors, frame.kind, None)
    if kind is EngineLoadError:
        return EngineLoadError(f"{replica.name}: {frame.message}", hint=frame.hint)
    if kind is not None and kind is not EngineDied:
        return cast("errors.BatchinferError", kind(frame.message, hint=frame.hint))
    replica.settle()
    # If the engine core is a process of its own, its reason stands only in the traceback that it wrote.
    hint = MEMORY_ADVICE if replica.has_written("OutOfMemoryError") else frame.hint
    return EngineLoadError(f"{replica.name}: {frame.message}{replica.last_lines()}", hint=hint)


def add_stats(parts: Sequence[EngineStats]) -> EngineStats:
    """Return the sums of several replicas' counters."""
    return EngineStats(
        steps=sum(part.steps for part in parts),
        preemptions=sum(part.preemptions for part in parts),
        prompt_tokens=sum(part.prompt_tokens for part in parts),
        cached_tokens=sum(part.cached_tokens for part in parts),
        completion_tokens=sum(part.completion_tokens for part in parts),
        replicas_lost=sum(part.replicas_lost for part in parts),
        restarts=sum(part.restarts for part in parts),
    )
