"""The engine behind HTTP: servers of our own, and endpoints that run elsewhere.

Everything happens in an event loop that turns while the caller waits in one of the engine's methods. A row that fails
for a reason that may pass is sent again in here. Each server of ours has a watch, which ends it when it hangs, hands
back its rows when it is dead, and starts it again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import random
import threading
import time
from collections import Counter
from collections.abc import Coroutine, Generator, Iterator, Sequence
from typing import Any, TypeVar

from batchinfer.core.errors import EngineDied, Interrupted
from batchinfer.core.records import Call, EngineInfo, EngineStats, Reply
from batchinfer.engines import Calls, RequestSource, Stop, is_remote, lists
from batchinfer.engines.echo import EchoTarget
from batchinfer.engines.endpoints import MOST_ATTEMPTS, Endpoint, Outage, Pace
from batchinfer.engines.engine_config import EngineConfig
from batchinfer.engines.headless import Nodes
from batchinfer.engines.replies import judge
from batchinfer.engines.server import OwnServer, plan
from batchinfer.engines.targets import Answer, Target, length_of, pause_seconds, read_parameters
from batchinfer.storage.scratch import Scratch

T = TypeVar("T")
logger = logging.getLogger(__name__)

LOAD_LOOK_SECONDS = 0.2
"""Seconds between two looks at a server that loads."""
LOOK_SECONDS = 1.0
"""Seconds between two looks at a server that runs."""
# Seconds until `RequestSource.take` is called again if slots are free.
_POLL_SECONDS = 0.02
# Longest wait for a reply if no slot is free.
_LONGEST_WAIT_SECONDS = 0.25


class HttpEngine:
    """One or more HTTP servers, all of one kind. Implements Engine.

    Args:
        config: Configuration of the engine. It says whether the servers are ours, an endpoint's, or only imitated.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.targets: Sequence[Target] = []
        self._runner: asyncio.Runner | None = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        """The loop; None when the engine is closed."""
        self._lock = threading.RLock()
        """Held while the loop turns: a worker that is stopped closes the engine while another thread waits in `ask`."""
        self._is_closing = False
        self._folders: list[Scratch] = []
        self._nodes = Nodes()
        self._description = b""
        self._pace = Pace(config)
        self._watches: list[asyncio.Task[None]] = []
        self._replies: list[Reply] = []
        self._has_news = asyncio.Event()
        self._failure: BaseException | None = None
        """Why the engine cannot go on."""
        self._is_open = False
        self._outage = Outage(config)

    def open(self, stop: Stop) -> EngineInfo:
        """Start the servers and wait until they have loaded, or reach the endpoints; see Engine.open."""
        start = time.monotonic()
        try:
            self.targets = self._make_targets(stop)
            for server in self._servers:
                server.start()
            self._watches = [self._spawn(self._watch(target)) for target in self.targets]
            while not all(target.is_ready for target in self.targets):
                self._turn(LOAD_LOOK_SECONDS)
                self._check(is_idle=False)
                if stop.is_set():
                    raise Interrupted("engine: stopped while it was loading")
            self._is_open = True
            return self._describe(time.monotonic() - start)
        except BaseException as error:
            self._failure = error
            self.close()
            raise

    def _make_targets(self, stop: Stop) -> Sequence[Target]:
        """Return the targets; servers of ours are not started."""
        config = self.config
        if is_remote(config):
            return [Endpoint(url, config) for url in config.base_urls]
        if config.engine == "echo":
            count = 1 if config.replicas == "auto" else config.replicas
            return [EchoTarget(f"echo {index}", config) for index in range(count)]
        # The path of a socket must be short, so sockets are in the system's own folder of temporary files.
        logs, sockets = self._folders = [Scratch(config.scratch_dir), Scratch()]
        if config.nnodes > 1:  # at once, so that nodes hear of a failure from here on
            self._run(self._nodes.listen(config))
        launches = plan(config, sockets.folder, stop)
        self._nodes.revision = launches[0].revision
        return [OwnServer(one, logs.folder / f"server-{n}.log") for n, one in enumerate(launches)]

    @property
    def _servers(self) -> list[OwnServer]:
        return [target for target in self.targets if isinstance(target, OwnServer)]

    def _describe(self, load_seconds: float) -> EngineInfo:
        asked = ((each, self._run(each.get("/v1/models"))) for each in self.targets)
        found = (pair for pair in asked if pair[1].status == 200)  # an endpoint may be down
        target, listed = next(found, (self.targets[0], Answer(0, b"")))
        version = self._run(target.get("/version")).field("version")
        self._description = self._run(target.get("/openapi.json")).body
        launches = [server.launch for server in self._servers]
        return EngineInfo(
            name=self.config.engine,
            version=version if isinstance(version, str) else "",
            model=self.config.model or self.config.served_names[0],
            max_in_flight=sum(target.slots for target in self.targets),
            max_model_len=length_of(listed, self.config.served_names[0]),
            max_num_seqs=sum(launch.max_num_seqs or 0 for launch in launches) or None,
            revision=launches[0].revision if launches else "",
            num_replicas=len(self.targets),
            device=launches[0].device if launches else "",
            load_seconds=load_seconds,
        )

    def close(self) -> None:
        """See Engine.close. Servers get some seconds to end by themselves, unless the engine has failed."""
        self._is_closing = True
        with self._lock:
            if self._runner is not None:
                self._run(self._close())
                self._runner.close()
                self._runner = None
        for folder in self._folders:
            folder.close()

    async def _close(self) -> None:
        for watch in self._watches:
            watch.cancel()
        await self._drop()
        for target in self.targets:
            await target.close()
        is_kill = self._failure is not None
        ends = [asyncio.to_thread(server.end, is_kill=is_kill) for server in self._servers]
        await asyncio.gather(*self._watches, *ends, return_exceptions=True)
        await self._nodes.close(getattr(self._failure, "exit_status", 33) if is_kill else 0)

    def generate(self, source: RequestSource, stop: Stop) -> Generator[list[Reply]]:
        """See Engine.generate."""
        has_more, is_idle = True, False
        try:
            while not stop.is_set():
                self._check(is_idle=is_idle)
                free = [target.free_slots for target in self.targets]
                calls: list[Call] = []
                if has_more and any(free):
                    taken = source.take(sum(free))
                    has_more, calls = taken is not None, taken or []
                is_idle = any(free) and not calls
                self._give(calls, free)
                if not self._replies and not any(target.in_flight for target in self.targets):
                    if not has_more:
                        return
                    yield []
                    if any(free):
                        source.wait(0.5)
                is_hungry = has_more and sum(free) > len(calls)
                yield self._turn(_POLL_SECONDS if is_hungry else _LONGEST_WAIT_SECONDS)
        finally:
            if self._runner is not None:
                self._run(self._drop())

    def _check(self, *, is_idle: bool) -> None:
        """Raise the error that ends the engine, if there is one."""
        if self._is_closing:
            raise Interrupted("engine: closed")
        if self._nodes.has_lost_one and self._failure is None:
            self._failure = EngineDied("a node that runs a share of the model has gone")
        if self._failure is not None:
            raise self._failure
        for target, reply in self._outage.given_up(self.targets, is_idle=is_idle):
            target.in_flight[reply.key].cancel()
            self._deliver(target, reply)

    def _give(self, calls: list[Call], free: list[int]) -> None:
        """Give each target calls that follow each other, so that prompts which begin alike meet in one cache."""
        left = sum(free)
        for room, target in sorted(zip(free, self.targets, strict=True), key=lambda each: -each[0]):
            share = math.ceil(len(calls) * room / (left or 1))
            for group in lists.group(calls[:share]):
                self._begin(target, group)
            calls, left = calls[share:], left - room

    def _turn(self, seconds: float) -> list[Reply]:
        """Let the loop turn until there is news of a call or a target, or the time is up. Returns the replies."""

        async def wait() -> None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):  # 3.11's wait_for may lose a Ctrl-C
                    await self._has_news.wait()

        self._run(wait())
        self._has_news.clear()
        found, self._replies = self._replies, []
        return found

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        """Let the loop turn until some work in it is done. An interruption cancels the work."""
        with self._lock:
            if self._runner is None:
                work.close()  # Python warns of work that nobody awaits
                raise Interrupted("engine: closed")
            loop = self._runner.get_loop()
            try:
                return self._runner.run(work)
            except (KeyboardInterrupt, SystemExit):
                # It broke off a turn, whose end may still be in the queue and would end the next turn.
                loop.call_soon(loop.stop)
                loop.run_forever()
                for task in asyncio.all_tasks(loop):
                    if task.get_coro() is work:
                        task.cancel()
                        loop.run_until_complete(asyncio.wait([task]))
                raise
            except asyncio.CancelledError:
                # Python's Runner forgets a Ctrl-C that comes before the first step.
                raise KeyboardInterrupt from None

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run work beside the rest. An error in it ends the engine."""

        def note_end(task: asyncio.Task[None]) -> None:
            error = None if task.cancelled() else task.exception()
            if isinstance(error, Exception):  # a Ctrl-C that came just then ends no engine
                self._failure = error

        assert self._runner is not None
        task = self._runner.get_loop().create_task(work)
        task.add_done_callback(note_end)
        return task

    def ask(self, call: Call, stop: Stop | None = None) -> Reply:
        """See Engine.ask."""
        batches = self.generate(Calls([call]), stop or threading.Event())
        reply = next((reply for batch in batches for reply in batch), None)
        batches.close()  # a server that died is not waited for
        if reply is None:
            raise Interrupted("engine: stopped before it answered")
        if reply.is_engine_death:
            raise EngineDied(reply.body.decode())
        return reply

    def stream(self, call: Call) -> Iterator[bytes]:
        """See Engine.stream."""
        target = next((each for each in self.targets if each.is_ready), self.targets[0])
        events = target.events(call)
        try:
            with contextlib.suppress(StopAsyncIteration):
                while True:
                    yield self._run(anext(events))
        except ConnectionError as error:
            raise EngineDied(f"{target.name}: {error}") from error
        finally:
            if self._runner is not None:
                self._run(events.aclose())

    def parameters(self, path: str) -> frozenset[str]:
        """See Engine.parameters."""
        return read_parameters(self._description, path)

    def stats(self) -> EngineStats:
        """Return the sums of the counters of all servers, as they were about a second ago."""
        return EngineStats(
            **sum((server.counters for server in self._servers), Counter[str]()),
            replicas_lost=sum(server.is_lost for server in self._servers),
            restarts=sum(max(0, server.num_starts - 1) for server in self._servers),
        )

    def _begin(self, target: Target, calls: Sequence[Call]) -> None:
        task = self._spawn(self._answer(target, calls))
        target.in_flight.update(dict.fromkeys((call.key for call in calls), task))

    async def _answer(self, target: Target, calls: Sequence[Call]) -> None:
        """Have one request answered, and deliver the replies to its calls."""
        reply = await self._send(target, lists.merge(calls), is_list=len(calls) > 1)
        if replies := lists.split(calls, reply):
            for each in replies:
                self._deliver(target, each)
        else:  # one text may be why all are refused, so each is sent by itself
            for call in calls:
                self._begin(target, [call])

    def _deliver(self, target: Target, reply: Reply) -> None:
        if target.in_flight.pop(reply.key, None) is not None:
            self._outage.last_replies.pop(reply.key, None)
            self._replies.append(reply)
            self._has_news.set()

    async def _send(self, target: Target, call: Call, *, is_list: bool) -> Reply:
        """Send a call until it has an answer, or has failed so often that the row must be at fault: a list twice.

        Raises:
            AccessDenied: an endpoint refuses the key, or the account has nothing left.
        """
        num_failed = num_faults = 0
        answered = dict[Target, int]()
        while True:
            await self._pace.wait(call)
            if isinstance(target, Endpoint) and (num_failed or target.pause_seconds):
                target = min(self.targets, key=lambda each: (each.pause_seconds, each.num_pauses))
            if pause := target.pause_seconds:
                await asyncio.sleep(pause * random.uniform(1.0, 1.2))
                continue
            answered_before = answered.setdefault(target, target.num_answered)
            found = await target.post(call)
            reply, verdict = judge(call, found.status, found.body, target.masked)
            if verdict == "denied" and isinstance(target, Endpoint):
                raise target.denied(reply)
            if verdict == "final" and self._outage.has_lost(call, reply):
                verdict = "failed"
            if verdict in ("final", "denied"):
                self._outage.note_answer(call, reply)
                target.num_pauses = 0
                target.num_answered += 1
                return reply
            is_busy = verdict == "busy" or (found.wait_seconds is not None and found.status != 500)
            num_failed += not is_busy
            counted = 0 if is_busy or not found.status else num_failed
            self._outage.note_failure(target, found.status, reply, counted)
            if is_busy:
                target.pause(found.wait_seconds)
                continue
            if isinstance(target, OwnServer):
                num_faults += await target.is_healthy()
            elif target.num_answered > answered_before:
                num_faults, answered[target] = num_faults + 1, target.num_answered
            elif len(self.targets) > 1:
                target.pause()  # another endpoint may be well
            if num_faults >= MOST_ATTEMPTS or (is_list and found.status and num_failed > 1):
                return reply
            await asyncio.sleep(max(found.wait_seconds or 0.0, pause_seconds(num_failed)))

    async def _drop(self) -> None:
        """Cancel all calls in flight. Servers end the work on them, since their connections close."""
        tasks = {task for target in self.targets for task in target.in_flight.values()}
        for target in self.targets:
            target.in_flight.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._replies.clear()
        self._outage.last_replies.clear()
        self._outage.since = 0.0
        await asyncio.gather(*(each.read_counters() for each in self._servers if each.is_ready))

    async def _watch(self, target: Target) -> None:
        """Wait until a target is ready. One of ours is watched on, and started again when it is dead.

        Raises:
            BatchinferError: the target is not there when the engine opens.
        """
        while not target.is_ready or isinstance(target, OwnServer):
            reason = await target.look(self.config)
            self._has_news.set()
            if not reason:
                await asyncio.sleep(LOOK_SECONDS if target.is_ready else LOAD_LOOK_SECONDS)
            elif isinstance(target, OwnServer) and self._is_open:
                await self._restart(target, reason)
                if target.is_lost:
                    return
            elif isinstance(target, Endpoint) and any(each.is_ready for each in self.targets):
                logger.warning("%s: %s; the others go on", target.name, reason)
                target.is_ready = True
            else:
                raise target.load_error(reason)

    async def _restart(self, server: OwnServer, reason: str) -> None:
        """End a server that hangs or is dead, hand back its rows, and start it again unless it has died too often."""
        server.is_ready = False
        await asyncio.to_thread(server.end, is_kill=True)
        pause = server.note_death(reason, may_start=self.config.nnodes == 1)
        message = f"{server.name}: {reason}"
        for key, task in list(server.in_flight.items()):
            task.cancel()
            self._deliver(server, Reply(key=key, status=0, body=message.encode()))
        if all(each.is_lost for each in self._servers):
            self._failure = EngineDied(message)  # is raised when those rows have been taken
        await server.close()
        if not server.is_lost:
            await asyncio.sleep(pause)
            server.start()
