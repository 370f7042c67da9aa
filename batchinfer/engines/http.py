"""The engine behind HTTP: servers of our own, and endpoints that run elsewhere.

A thread runs the event loop in which `dispatch` sends the calls; `generate` runs in the worker's main thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import time
from collections import Counter
from collections.abc import Coroutine, Iterator, Sequence
from typing import Any, TypeVar

from batchinfer.core.errors import EngineDied, EngineError, EngineLoadError, Interrupted
from batchinfer.core.records import Call, EngineInfo, EngineStats, Reply
from batchinfer.engines import RequestSource, Stop, is_remote, share_out
from batchinfer.engines.dispatch import LOAD_LOOK_SECONDS, Dispatcher, logger
from batchinfer.engines.echo import EchoTarget
from batchinfer.engines.engine_config import EngineConfig
from batchinfer.engines.headless import Nodes
from batchinfer.engines.server import ServerProcess, plan
from batchinfer.engines.targets import Endpoint, OwnServer, Target, read_parameters
from batchinfer.storage.scratch import Scratch

T = TypeVar("T")

# Seconds until `RequestSource.take` is called again if slots are free.
_POLL_SECONDS = 0.02
# Longest wait for a reply if no slot is free.
_LONGEST_WAIT_SECONDS = 0.25


class HttpEngine:
    """One or more HTTP servers. Implements Engine.

    Args:
        config: Configuration of the engine. It says whether the servers are ours, an endpoint's, or only imitated.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self._dispatcher = Dispatcher(config, [])
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._folders: list[Scratch] = []
        self._nodes: Nodes | None = None
        self._is_idle = False
        """Whether the source had no row ready when it was last asked, and slots are free."""
        self._description: bytes | None = None

    @property
    def targets(self) -> Sequence[Target]:
        """The servers."""
        return self._dispatcher.targets

    # ------------------------------------------------------------------ life

    def open(self, stop: Stop) -> EngineInfo:
        """Start the servers and wait until they have loaded, or reach the endpoints; see Engine.open."""
        start = time.monotonic()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="engine", daemon=True)
        self._thread.start()
        try:
            self._dispatcher = Dispatcher(self.config, self._targets(stop))
            for server in self._servers:
                server.start()
            while waiting := [each for each in self.targets if not each.is_ready]:
                for target in waiting:
                    reason = self._run(target.look(self.config))
                    if reason and (len(waiting) == len(self.targets) or self._servers):
                        raise target.load_error(reason)
                    if reason:
                        logger.warning("%s: %s; the others go on", target.name, reason)
                        target.is_ready = True
                self._check_nodes(EngineLoadError)
                if stop.is_set():
                    raise Interrupted("engine: stopped while it was loading")
                if not all(target.is_ready for target in self.targets):
                    time.sleep(LOAD_LOOK_SECONDS)
            self._run(self._dispatcher.begin_watches())
            return self._describe(time.monotonic() - start)
        except BaseException as error:
            self._dispatcher.failure = error
            self.close()
            raise

    def _targets(self, stop: Stop) -> Sequence[Target]:
        """Return the targets; servers of ours are not started."""
        config = self.config
        if is_remote(config):
            return [Endpoint(url, config) for url in config.base_urls]
        if config.engine == "echo":
            count = 1 if config.replicas == "auto" else config.replicas
            return [EchoTarget(f"echo {index}", config) for index in range(count)]
        # The path of a socket must be short, so sockets are in the system's own folder of temporary files.
        logs, sockets = self._folders = [Scratch(config.scratch_dir), Scratch()]
        if config.nnodes > 1:
            self._nodes = Nodes(config)
        servers = []
        for index, launch in enumerate(plan(config, sockets.folder, stop)):
            process = ServerProcess(launch, logs.folder / f"server-{index}.log")
            servers.append(OwnServer(process))
        return servers

    @property
    def _servers(self) -> list[OwnServer]:
        return self._dispatcher.servers

    def _check_nodes(self, kind: type[EngineError]) -> None:
        """Raise `kind` if another machine that runs the model has gone."""
        if self._nodes is not None:
            self._nodes.check(kind, self._servers[0].process.launch.revision)

    def _describe(self, load_seconds: float) -> EngineInfo:
        first = self.targets[0]
        version = self._run(first.get("/version")).field("version")
        models = self._run(first.get("/v1/models")).field("data")
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
        failure = self._dispatcher.failure
        self._run(self._dispatcher.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._loop = None
        if self._nodes is not None:
            self._nodes.close(getattr(failure, "exit_status", 33) if failure else 0)
        for folder in self._folders:
            folder.close()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run work in the event loop and wait for it."""
        assert self._loop is not None
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    # ------------------------------------------------------------------ work

    def generate(self, source: RequestSource, stop: Stop) -> Iterator[list[Reply]]:
        """See Engine.generate."""
        exhausted, num_in_flight = False, 0
        try:
            while not stop.is_set():
                self._check(num_in_flight)
                free = [target.free_slots for target in self.targets]
                taken: list[Call] | None = []
                if not exhausted and any(free):
                    taken = source.take(sum(free))
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
                found = self._collect(_POLL_SECONDS if is_hungry else _LONGEST_WAIT_SECONDS)
                num_in_flight -= len(found)
                yield found
        finally:
            self._abandon()

    def _abandon(self) -> None:
        """Drop all calls in flight, unless the engine is closed already."""
        if self._loop is not None:
            self._run(self._dispatcher.drop())
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
                self._loop.call_soon_threadsafe(self._dispatcher.begin, target, part)

    def _collect(self, timeout_seconds: float) -> list[Reply]:
        """Return the replies that are there, after waiting for the first one."""
        found: list[Reply] = []
        with contextlib.suppress(queue.Empty):
            target, reply = self._dispatcher.replies.get(timeout_seconds > 0, timeout_seconds)
            while True:
                target.held -= 1
                found.append(reply)
                target, reply = self._dispatcher.replies.get_nowait()
        return found

    def ask(self, call: Call, stop: Stop | None = None) -> Reply:
        """See Engine.ask."""
        source = _OneCall(call)
        found = [reply for batch in self.generate(source, stop or source) for reply in batch]
        if not found:
            raise Interrupted("engine: stopped before it answered")
        if found[0].is_engine_death:
            raise EngineDied(found[0].body.decode(), in_flight=[call.key])
        return found[0]

    def stream(self, call: Call) -> Iterator[bytes]:
        """See Engine.stream."""
        assert self._loop is not None
        target = next((each for each in self.targets if each.is_ready), self.targets[0])
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

    def parameters(self, path: str) -> frozenset[str]:
        """See Engine.parameters. The server is asked once."""
        if self._description is None:
            self._description = self._run(self.targets[0].get("/openapi.json"))[1]
        return read_parameters(self._description, path)

    def stats(self) -> EngineStats:
        """Return the sums of the counters of all servers, as they were about a second ago."""
        return EngineStats(
            **sum((server.counters for server in self._servers), Counter[str]()),
            replicas_lost=sum(server.is_lost for server in self._servers),
            restarts=self._dispatcher.num_restarts,
        )

    def _check(self, num_in_flight: int) -> None:
        """Raise the error that ends the engine, if there is one.

        The rows of a server that has died are handed back before.
        """
        dispatcher = self._dispatcher
        try:
            self._check_nodes(EngineDied)
        except EngineDied as error:
            dispatcher.failure = error
            raise
        if not self._servers and dispatcher.outage_since:
            self._run(dispatcher.find_outage(is_idle=self._is_idle))
        failure = dispatcher.failure
        if failure and not (self._servers and num_in_flight and isinstance(failure, EngineDied)):
            raise failure


class _OneCall:
    """A source of one call, and a stop signal that is never set."""

    def __init__(self, call: Call) -> None:
        self._left = [call]

    def take(self, max_calls: int) -> list[Call] | None:
        """See RequestSource.take."""
        del max_calls
        return [self._left.pop()] if self._left else None

    def wait(self, timeout_seconds: float) -> None:
        """See RequestSource.wait."""

    def is_set(self) -> bool:
        """See Stop.is_set."""
        return False
