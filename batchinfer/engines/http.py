"""The engine behind HTTP: servers of our own, and endpoints that run elsewhere.

A thread runs the event loop, which sends the calls; `generate` runs in the worker's main thread. A row that fails for a
reason that may pass is sent again in here. Each server of ours has a watch, which ends it when it hangs and starts it
again when it is dead.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import random
import shutil
import threading
import time
from collections.abc import Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from batchinfer.cli.logs import event
from batchinfer.core.errors import EngineDied, EngineLoadError, Interrupted
from batchinfer.core.records import Call, EngineInfo, EngineStats, Reply, RowKey
from batchinfer.core.tasks import CLASSIFY, GENERATE, RERANK, SCORE
from batchinfer.engines import RequestSource, Stop, find_engine, lists, share_out
from batchinfer.engines.config import EngineConfig
from batchinfer.engines.headless import Nodes
from batchinfer.engines.pace import Pace
from batchinfer.engines.replies import (
    DENIED,
    INVALID_STATUS,
    OVERLOADED,
    TRANSIENT,
    invalid_answer,
    is_answer,
    is_used_up,
)
from batchinfer.engines.server import ServerProcess, plan, socket_folder
from batchinfer.engines.targets import (
    Answer,
    Endpoint,
    OwnServer,
    Target,
    read_parameters,
)
from batchinfer.storage.scratch import Scratch

T = TypeVar("T")
logger = logging.getLogger(__name__)

MOST_ATTEMPTS = 5
"""Attempts at a row whose failure the server's other answers do not share."""
MOST_RESTARTS = 3
"""Starts of a server after deaths in a row without an answered row."""
RESTART_PAUSE_SECONDS = 5.0
"""Seconds between the second such death and the next start; doubles. The memory of a GPU may be free only later."""
LONGEST_PAUSE_SECONDS = 60.0
FEW, FEWEST = 64, 3
"""Most rows that may be given up because they fail alone; see `HttpEngine._find_outage`."""
# Seconds until `RequestSource.take` is called again if slots are free: at first, and after many calls without a row.
_POLL_SECONDS = 0.01
_SLOWEST_POLL_SECONDS = 0.1
# Longest wait for a reply if no slot is free.
_LONGEST_WAIT_SECONDS = 0.25
# Seconds between two looks at a server that runs, and at one that loads.
_LOOK_SECONDS = 1.0
_LOAD_LOOK_SECONDS = 0.2
# A gap between two looks above this means that this process itself was frozen, perhaps with its machine.
_FROZEN_SECONDS = 5.0
# Most seconds that a server has to tell its counters when the last row has come.
_LAST_STATS_SECONDS = 2.0
# Path to which most rows of a task go; /v1/embeddings if it is not here.
_PATHS = {
    GENERATE: "/v1/chat/completions",
    CLASSIFY: "/classify",
    SCORE: "/score",
    RERANK: "/rerank",
}


class HttpEngine:
    """One or more HTTP servers. Implements Engine.

    Args:
        config: Configuration of the engine. It says whether the servers are ours or an endpoint's.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.targets: Sequence[Endpoint | OwnServer] = []
        self._servers: list[OwnServer] = []
        self._is_remote = find_engine(config.engine).is_remote
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._scratch: Scratch | None = None
        self._sockets: Path | None = None
        self._nodes: Nodes | None = None
        self._watches: list[asyncio.Task[None]] = []
        self._pace = Pace(config)
        self._replies: queue.SimpleQueue[tuple[Target, Reply]] = queue.SimpleQueue()
        self._failure: BaseException | None = None
        self._num_answered = 0
        self._is_idle = False
        """Whether the source had no row ready when it was last asked, and slots are free."""
        self._outage_since: float | None = None
        """Time of the first failed attempt since an endpoint last answered."""
        self._last_replies: dict[RowKey, Reply] = {}
        """Replies of the last attempts at rows in flight that have failed `MOST_ATTEMPTS` times."""
        self._num_restarts = 0
        self._description: bytes | None = None

    # ------------------------------------------------------------------ life

    def open(self, stop: Stop) -> EngineInfo:
        """Start the servers and wait until they have loaded, or reach the endpoints; see Engine.open."""
        start = time.monotonic()
        self._failure = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="engine", daemon=True)
        self._thread.start()
        try:
            if self._is_remote:
                path = _PATHS.get(self.config.task, "/v1/embeddings")
                urls = self.config.base_urls
                self.targets = [Endpoint(url, self.config, path) for url in urls]
            else:
                self.targets = self._servers = self._start_servers(stop)
            while waiting := [each for each in self.targets if not each.is_ready]:
                for target in waiting:
                    reason = self._run(target.look(self.config))
                    if reason and not (self._is_remote and len(waiting) < len(self.targets)):
                        raise target.load_error(reason)
                    if reason:
                        logger.warning("%s: %s; the others go on", target.name, reason)
                        target.is_ready = True
                if self._nodes is not None:
                    self._nodes.check(EngineLoadError, self._servers[0].process.launch.revision)
                if stop.is_set():
                    raise Interrupted("engine: stopped while it was loading")
                time.sleep(_LOAD_LOOK_SECONDS)
            self._loop.call_soon_threadsafe(self._begin_watches)
            return self._describe(time.monotonic() - start)
        except BaseException as error:
            self._failure = error
            self.close()
            raise

    def _start_servers(self, stop: Stop) -> list[OwnServer]:
        self._scratch = Scratch(self.config.scratch_dir)
        self._sockets = socket_folder(self._scratch.folder)
        if self.config.nnodes > 1:
            self._nodes = Nodes(self.config)
        launches = plan(self.config, self._sockets, stop)
        servers = []
        for index, launch in enumerate(launches):
            process = ServerProcess(launch, self._scratch.folder / f"server-{index}.log")
            servers.append(OwnServer(process, self.config))
            servers[-1].start()
        return servers

    def _describe(self, load_seconds: float) -> EngineInfo:
        first = self.targets[0]
        version = _field(self._run(first.get("/version")), "version")
        models = _field(self._run(first.get("/v1/models")), "data")
        length = models[0].get("max_model_len") if isinstance(models, list) and models else None
        launches = [server.process.launch for server in self._servers]
        seqs = [launch.max_num_seqs for launch in launches]
        return EngineInfo(
            name=self.config.engine,
            version=version if isinstance(version, str) else "",
            model=self.config.model or self.config.served_names[0],
            max_in_flight=sum(target.slots for target in self.targets),
            max_model_len=length if isinstance(length, int) else None,
            max_num_seqs=sum(each or 0 for each in seqs) or None,
            revision=launches[0].revision if launches else "",
            num_replicas=len(self.targets),
            device=launches[0].device if launches else "",
            load_seconds=load_seconds,
        )

    def close(self) -> None:
        """See Engine.close. Servers get some seconds to end by themselves, unless the engine has failed."""
        if self._loop is None or self._thread is None:
            return
        self._run(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._loop = None
        if self._nodes is not None:
            self._nodes.close(getattr(self._failure, "exit_status", 33) if self._failure else 0)
        if self._scratch is not None and self._sockets is not None:
            shutil.rmtree(self._sockets, ignore_errors=True)
            self._scratch.close()

    async def _close(self) -> None:
        for watch in self._watches:
            watch.cancel()
        await self._drop()
        for target in self.targets:
            await target.close()
        is_kill = self._failure is not None
        ends = [asyncio.to_thread(each.process.end, is_kill=is_kill) for each in self._servers]
        await asyncio.gather(*ends)
        await asyncio.get_running_loop().shutdown_default_executor()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run work in the event loop and wait for it."""
        assert self._loop is not None
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    # ------------------------------------------------------------------ work

    def generate(self, source: RequestSource, stop: Stop) -> Iterator[list[Reply]]:
        """See Engine.generate."""
        exhausted, num_in_flight, poll_seconds = False, 0, _POLL_SECONDS
        try:
            while not stop.is_set():
                self._check(num_in_flight)
                free = [target.free_slots for target in self.targets]
                taken: list[Call] | None = []
                if not exhausted and any(free):
                    taken = source.take(sum(free), *([free] if len(free) > 1 else []))
                    exhausted = taken is None
                taken = taken or []
                self._is_idle = any(free) and not taken
                num_in_flight += len(taken)
                self._give(taken, free)
                if not num_in_flight:
                    if exhausted:
                        return
                    yield []
                    if any(free):
                        source.wait(1.0)
                    else:
                        time.sleep(_LONGEST_WAIT_SECONDS)  # all servers are being started again
                    continue
                is_hungry = not exhausted and sum(free) > len(taken)
                poll_seconds = (
                    _POLL_SECONDS if taken else min(2 * poll_seconds, _SLOWEST_POLL_SECONDS)
                )
                found = self._collect(poll_seconds if is_hungry else _LONGEST_WAIT_SECONDS)
                num_in_flight -= len(found)
                yield found
        finally:
            self._abandon()

    def _abandon(self) -> None:
        """Drop all calls in flight, unless the engine is closed already."""
        if self._loop is not None:
            self._run(self._drop())
            self._collect(0.0)
            for target in self.targets:
                target.held = 0

    def _give(self, calls: list[Call], free: list[int]) -> None:
        """Give each target calls that follow each other, so that prompts which begin alike meet in one cache."""
        shares = share_out([target.held for target in self.targets], free, len(calls))
        begin = 0
        for target, share in zip(self.targets, shares, strict=True):
            part = calls[begin : begin + share]
            begin += share
            target.held += share
            if part and self._loop is not None:
                self._loop.call_soon_threadsafe(self._begin, target, part)

    def _collect(self, timeout_seconds: float) -> list[Reply]:
        """Return the replies that are there, after waiting for the first one."""
        found: list[Reply] = []
        with contextlib.suppress(queue.Empty):
            target, reply = self._replies.get(timeout_seconds > 0, timeout_seconds)
            while True:
                target.held -= 1
                found.append(reply)
                target, reply = self._replies.get_nowait()
        return found

    def ask(self, call: Call, stop: Stop | None = None) -> Reply:
        """See Engine.ask."""
        assert self._loop is not None
        self._is_idle = True
        self._loop.call_soon_threadsafe(self._begin, self._ready_target(), [call])
        try:
            while not (found := self._collect(_LONGEST_WAIT_SECONDS)):
                self._check(1)
                if stop is not None and stop.is_set():
                    raise Interrupted("engine: stopped before it answered")
        finally:
            self._abandon()
        if found[0].is_engine_death:
            raise EngineDied(found[0].body.decode(), in_flight=[call.key])
        return found[0]

    def stream(self, call: Call) -> Iterator[bytes]:
        """See Engine.stream."""
        assert self._loop is not None
        target = self._ready_target()
        events: queue.SimpleQueue[bytes | Exception | None] = queue.SimpleQueue()

        async def pump() -> None:
            try:
                async for data in target.events(call):
                    events.put(data)
                events.put(None)
            except ConnectionError as error:
                events.put(error)

        running = asyncio.run_coroutine_threadsafe(pump(), self._loop)
        try:
            while (found := events.get()) is not None:
                if isinstance(found, Exception):
                    raise EngineDied(f"{target.name}: {found}") from found
                yield found
        finally:
            running.cancel()

    def _ready_target(self) -> Target:
        return next((target for target in self.targets if target.is_ready), self.targets[0])

    def parameters(self, path: str) -> frozenset[str]:
        """See Engine.parameters. The server is asked once."""
        if self._description is None:
            self._description = self._run(self.targets[0].get("/openapi.json"))[1]
        return read_parameters(self._description, path)

    def stats(self) -> EngineStats:
        """Return the sums of the counters of all servers, as they were about a second ago."""
        all_stats = [server.stats for server in self._servers]
        names = ("steps", "preemptions", "prompt_tokens", "cached_tokens", "completion_tokens")
        return EngineStats(
            **{name: sum(getattr(each, name) for each in all_stats) for name in names},
            replicas_lost=sum(server.is_lost for server in self._servers),
            restarts=self._num_restarts,
        )

    # ------------------------------------------------------------------ one call, in the event loop

    def _begin(self, target: Target, calls: Sequence[Call]) -> None:
        """Send calls to a target, those for pooling in lists."""
        for group in lists.group(calls):
            task = self._spawn(self._answer(target, group))
            target.in_flight.update(dict.fromkeys((call.key for call in group), task))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run work beside the rest. An error in it ends the engine."""

        def note_end(task: asyncio.Task[None]) -> None:
            if not task.cancelled() and (error := task.exception()) is not None:
                self._failure = error

        task = asyncio.get_running_loop().create_task(work)
        task.add_done_callback(note_end)
        return task

    async def _answer(self, target: Target, calls: Sequence[Call]) -> None:
        reply = await self._send(target, lists.merge(calls))
        replies: Sequence[Reply] | None = [reply]
        if len(calls) > 1:
            replies = lists.split(calls, reply.body) if reply.status == 200 else None
        if replies is None:
            # One text may be why all are refused, so each is sent by itself.
            for call in calls:
                target.in_flight[call.key] = self._spawn(self._answer(target, [call]))
            return
        for each in replies:
            self._deliver(target, each)

    def _deliver(self, target: Target, reply: Reply) -> None:
        if target.in_flight.pop(reply.key, None) is not None:
            self._last_replies.pop(reply.key, None)
            self._replies.put((target, reply))

    async def _send(self, target: Target, call: Call) -> Reply:
        """Send a call until it has an answer, or has failed so often that the row must be at fault."""
        num_failed = num_faults = 0
        timeout = self.config.request_timeout_seconds if self._is_remote else None
        while True:
            if self._is_remote and (num_failed or target.pause_seconds):
                target = min(self.targets, key=lambda each: (each.pause_seconds, each.num_pauses))
            if pause := target.pause_seconds:
                await asyncio.sleep(pause * random.uniform(1.0, 1.2))
                continue
            await self._pace.wait(call)
            answered_before = target.num_answered
            found = await target.post(call, timeout)
            reply = Reply(key=call.key, status=found.status or 503, body=found.body)
            if isinstance(target, Endpoint) and (found.status in DENIED or is_used_up(reply)):
                self._failure = target.denied(found)
            elif found.status == 200 and not is_answer(call, found.body):
                reply = Reply(key=call.key, status=INVALID_STATUS, body=invalid_answer(found.body))
            elif found.status and found.status not in TRANSIENT:
                self._note_answer(target)
                return reply
            self._outage_since = self._outage_since or time.monotonic()
            if found.status in OVERLOADED or found.wait_seconds is not None:
                _pause(target, found.wait_seconds)
                continue
            num_failed += 1
            if found.status and num_failed >= MOST_ATTEMPTS:
                self._last_replies[call.key] = reply
            if isinstance(target, OwnServer):
                is_fault = await target.is_healthy()
            else:
                is_fault = target.num_answered > answered_before
                if not is_fault and len(self.targets) > 1:
                    _pause(target, None)  # another endpoint may be well
            num_faults += is_fault
            if num_faults >= MOST_ATTEMPTS:
                return reply
            await asyncio.sleep(pause_seconds(num_failed))

    def _note_answer(self, target: Target) -> None:
        self._num_answered += 1
        self._outage_since = None
        target.num_answered += 1
        target.num_pauses = 0

    async def _drop(self) -> None:
        """Cancel all calls in flight. Servers end the work on them, since their connections close."""
        tasks = {task for target in self.targets for task in target.in_flight.values()}
        for target in self.targets:
            target.in_flight.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._last_replies.clear()
        self._outage_since = None
        ready = [server for server in self._servers if server.is_ready]
        await asyncio.gather(*(server.read_stats(_LAST_STATS_SECONDS) for server in ready))

    # ------------------------------------------------------------------ outages and deaths

    def _check(self, num_in_flight: int) -> None:
        """Raise the error that ends the engine, if there is one.

        The rows of a server that has died are handed back before.
        """
        if self._nodes is not None:
            try:
                self._nodes.check(EngineDied, self._servers[0].process.launch.revision)
            except EngineDied as error:
                self._failure = error
                raise
        if self._is_remote and self._failure is None:
            self._find_outage()
        if self._failure is None:
            return
        if self._is_remote or not num_in_flight or not isinstance(self._failure, EngineDied):
            raise self._failure

    def _find_outage(self) -> None:
        """Note the failure of endpoints that have answered nothing for `stall_seconds`.

        A few rows alone that fail again and again are given up instead: at once if they are the last ones, others were
        answered, and each time the endpoint said that it failed itself (500). Otherwise such rows would end every start
        of the run's last worker.
        """
        if self._outage_since is None:
            return
        is_late = time.monotonic() - self._outage_since >= self.config.stall_seconds
        keys = [key for target in self.targets for key in list(target.in_flight)]
        replies = [self._last_replies[key] for key in keys if key in self._last_replies]
        if keys and len(replies) == len(keys):
            is_last = self._is_idle and self._num_answered and len(keys) <= FEW
            is_own = is_last and all(reply.status == 500 for reply in replies)
            if is_own or (is_late and len(keys) <= FEWEST):
                self._run(self._give_up())
                return
        if is_late:
            self._failure = EngineDied(
                f"{self.targets[0].name}: answered nothing for {self.config.stall_seconds:g} s",
                hint="no row is lost; start the same command again when it answers",
            )

    async def _give_up(self) -> None:
        for target in self.targets:
            for key, task in list(target.in_flight.items()):
                if key in self._last_replies:
                    task.cancel()
                    self._deliver(target, self._last_replies[key])
        self._outage_since = None

    def _begin_watches(self) -> None:
        self._watches = [self._spawn(self._watch(server)) for server in self._servers]

    async def _watch(self, server: OwnServer) -> None:
        """End a server that hangs, hand back the rows of one that is dead, and start it again."""
        while True:
            looked = time.monotonic()
            await asyncio.sleep(_LOOK_SECONDS if server.is_ready else _LOAD_LOOK_SECONDS)
            if (gap := time.monotonic() - looked) > _FROZEN_SECONDS:
                server.forgive(gap)
            was_ready = server.is_ready
            reason = await server.look(self.config)
            if server.is_ready and not was_ready:
                logger.info("%s: loaded again", server.name)
            if not reason:
                continue
            server.is_ready = False
            server.num_deaths = 1 if server.num_answered else server.num_deaths + 1
            lost, server.in_flight = server.in_flight, {}
            for task in lost.values():
                task.cancel()
            await server.close()
            await asyncio.to_thread(server.process.end, is_kill=True)
            message = f"{server.name}: {reason}"
            may_restart = self._may_restart(server, message, len(lost))
            for key in lost:
                self._replies.put((server, Reply(key=key, status=0, body=message.encode())))
            if not may_restart:
                return
            if server.num_deaths > 1:
                await asyncio.sleep(RESTART_PAUSE_SECONDS * 2 ** (server.num_deaths - 2))
            server.start()

    def _may_restart(self, server: OwnServer, message: str, num_lost: int) -> bool:
        """Decide whether a dead server is started again, and log it."""
        if server.num_deaths <= MOST_RESTARTS and self._nodes is None:
            self._num_restarts += 1
            fields = event("replica_restarted", replica=server.name, rows=num_lost)
            again = "it is started again, and its rows are tried again"
            logger.warning("%s; it held %d rows; %s", message, num_lost, again, extra=fields)
            return True
        server.is_lost = True
        logger.error("%s", message, extra=event("replica_lost", replica=server.name))
        if all(each.is_lost for each in self._servers):
            self._failure = EngineDied(message)
        return False


def _pause(target: Target, wait_seconds: float | None) -> None:
    """Give a server no call for as long as it asks for, or for a growing pause."""
    target.num_pauses += not target.pause_seconds  # calls that fail together make one pause
    pause = pause_seconds(target.num_pauses) if wait_seconds is None else wait_seconds
    target.paused_until = max(target.paused_until, time.monotonic() + pause)


def pause_seconds(num_failed: int) -> float:
    """Return the seconds before the next attempt: half a second, and twice as long after each further failure."""
    return min(LONGEST_PAUSE_SECONDS, 2.0 ** (num_failed - 2)) * random.uniform(0.8, 1.2)


def _field(found: Answer, name: str) -> Any:
    """Return a field of what a server answered to `Target.get`; None if there is none."""
    try:
        return msgspec.json.decode(found.body)[name] if found.status == 200 else None
    except (msgspec.DecodeError, UnicodeDecodeError, LookupError, TypeError):
        return None
