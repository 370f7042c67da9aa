"""The part of the HTTP engine that runs in its event loop: it sends calls, and watches the servers that are ours.

A row that fails for a reason that may pass is sent again in here. Each server of ours has a watch, which ends it when
it hangs, hands back its rows when it is dead, and starts it again.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import random
import time
from collections.abc import Coroutine, Sequence
from typing import Any

from batchinfer.core.errors import EngineDied
from batchinfer.core.events import event
from batchinfer.core.records import Call, Reply, RowKey
from batchinfer.engines import lists
from batchinfer.engines.engine_config import EngineConfig
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
from batchinfer.engines.targets import Endpoint, OwnServer, Target

logger = logging.getLogger(__name__)

MOST_ATTEMPTS = 5
"""Attempts at a row whose failure the server's other answers do not share."""
MOST_RESTARTS = 3
"""Starts of a server after deaths in a row without an answered row."""
RESTART_PAUSE_SECONDS = 5.0
"""Seconds between the second such death and the next start; doubles. The memory of a GPU may be free only later."""
LONGEST_PAUSE_SECONDS = 60.0
FEW, FEWEST = 64, 3
"""Most rows that may be given up because they fail alone; see `Dispatcher.find_outage`."""
LOAD_LOOK_SECONDS = 0.2
"""Seconds between two looks at a server that loads."""
LOOK_SECONDS = 1.0
"""Seconds between two looks at a server that runs."""
# Most seconds that a server has to tell its counters when the last row has come.
_LAST_STATS_SECONDS = 2.0


class Dispatcher:
    """Sends calls to servers until they are answered. Everything but the fields belongs to the event loop.

    Args:
        config: Configuration of the engine.
        targets: The servers, all of one kind.
    """

    def __init__(self, config: EngineConfig, targets: Sequence[Target]) -> None:
        self.config = config
        self.targets = targets
        self.servers = [target for target in targets if isinstance(target, OwnServer)]
        self.replies: queue.SimpleQueue[tuple[Target, Reply]] = queue.SimpleQueue()
        """Replies on their way to the thread that calls `generate`."""
        self.failure: BaseException | None = None
        """Why the engine cannot go on."""
        self.num_restarts = 0
        self._pace = Pace(config)
        self._watches: list[asyncio.Task[None]] = []
        self._has_answered = False
        self.outage_since: float | None = None
        """Time of the first failed attempt since an endpoint last answered."""
        self._last_replies: dict[RowKey, Reply] = {}
        """Replies of the last attempts at rows in flight that have failed `MOST_ATTEMPTS` times."""

    # ------------------------------------------------------------------ calls

    def begin(self, target: Target, calls: Sequence[Call]) -> None:
        """Send calls to a target, those for pooling in lists."""
        for group in lists.group(calls):
            task = self._spawn(self._answer(target, group))
            target.in_flight.update(dict.fromkeys((call.key for call in group), task))
        if isinstance(target, OwnServer) and target.is_lost:
            self._hand_back(target, f"{target.name}: is not started again")

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run work beside the rest. An error in it ends the engine."""

        def note_end(task: asyncio.Task[None]) -> None:
            if not task.cancelled() and (error := task.exception()) is not None:
                self.failure = error

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
            self.replies.put((target, reply))

    async def _send(self, target: Target, call: Call) -> Reply:
        """Send a call until it has an answer, or has failed so often that the row must be at fault."""
        num_failed = num_faults = 0
        while True:
            if not self.servers and (num_failed or target.pause_seconds):
                target = min(self.targets, key=lambda each: (each.pause_seconds, each.num_pauses))
            if pause := target.pause_seconds:
                await asyncio.sleep(pause * random.uniform(1.0, 1.2))
                continue
            await self._pace.wait(call)
            answered_before = target.num_answered
            found = await target.post(call)
            reply = Reply(key=call.key, status=found.status or 503, body=found.body)
            if isinstance(target, Endpoint) and (found.status in DENIED or is_used_up(reply)):
                self.failure = target.denied(found)
            elif found.status == 200 and not is_answer(call, found.body):
                reply = Reply(key=call.key, status=INVALID_STATUS, body=invalid_answer(found.body))
            elif found.status and found.status not in TRANSIENT:
                self._has_answered = True
                self.outage_since, target.num_pauses = None, 0
                target.num_answered += 1
                return reply
            self.outage_since = self.outage_since or time.monotonic()
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

    async def drop(self) -> None:
        """Cancel all calls in flight. Servers end the work on them, since their connections close."""
        tasks = {task for target in self.targets for task in target.in_flight.values()}
        for target in self.targets:
            target.in_flight.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._last_replies.clear()
        self.outage_since = None
        ready = [server for server in self.servers if server.is_ready]
        await asyncio.gather(*(server.read_counters(_LAST_STATS_SECONDS) for server in ready))

    async def close(self) -> None:
        """End everything, and the servers that are ours: within seconds, or at once if the engine has failed."""
        for watch in self._watches:
            watch.cancel()
        await self.drop()
        for target in self.targets:
            await target.close()
        is_kill = self.failure is not None
        ends = [asyncio.to_thread(each.process.end, is_kill=is_kill) for each in self.servers]
        await asyncio.gather(*ends)
        await asyncio.get_running_loop().shutdown_default_executor()

    # ------------------------------------------------------------------ outages of endpoints

    async def find_outage(self, *, is_idle: bool) -> None:
        """Note the failure of endpoints that have answered nothing for `stall_seconds`.

        A few rows alone that fail again and again are given up instead: at once if they are the last ones, others were
        answered, and each time the endpoint said that it failed itself (500). Otherwise such rows would end every start
        of the run's last worker.

        Args:
            is_idle: Whether the source had no further row when it was last asked.
        """
        since, seconds = self.outage_since, self.config.stall_seconds
        is_late = since is not None and time.monotonic() - since >= seconds
        left = [(target, key) for target in self.targets for key in target.in_flight]
        replies = [self._last_replies[key] for _, key in left if key in self._last_replies]
        is_own = is_idle and self._has_answered and len(left) <= FEW
        is_own = is_own and all(reply.status == 500 for reply in replies)
        if len(replies) == len(left) and (is_own or (is_late and len(left) <= FEWEST)):
            self.outage_since = None
            for target, key in left:
                target.in_flight[key].cancel()
                self._deliver(target, self._last_replies[key])
        elif is_late and left and self.failure is None:
            self.failure = EngineDied(
                f"{self.targets[0].name}: answered nothing for {seconds:g} s",
                hint="no row is lost; start the same command again when it answers",
            )

    # ------------------------------------------------------------------ deaths of servers

    async def begin_watches(self) -> None:
        """Watch all servers of ours from now on."""
        self._watches = [self._spawn(self._watch(server)) for server in self.servers]

    async def _watch(self, server: OwnServer) -> None:
        """End a server that hangs, hand back the rows of one that is dead, and start it again."""
        while True:
            await asyncio.sleep(LOOK_SECONDS if server.is_ready else LOAD_LOOK_SECONDS)
            was_ready = server.is_ready
            reason = await server.look(self.config)
            if server.is_ready and not was_ready:
                logger.info("%s: loaded again", server.name)
            if not reason:
                continue
            server.is_ready = False
            await asyncio.to_thread(server.process.end, is_kill=True)
            server.num_deaths = 1 if server.num_answered else server.num_deaths + 1
            may_restart = self._may_restart(server, f"{server.name}: {reason}")
            self._hand_back(server, f"{server.name}: {reason}")
            await server.close()
            if not may_restart:
                return
            if server.num_deaths > 1:
                await asyncio.sleep(RESTART_PAUSE_SECONDS * 2 ** (server.num_deaths - 2))
            server.start()

    def _hand_back(self, server: Target, message: str) -> None:
        """Tell of all rows in flight that the server died with them."""
        for key, task in list(server.in_flight.items()):
            task.cancel()
            self._deliver(server, Reply(key=key, status=0, body=message.encode()))

    def _may_restart(self, server: OwnServer, message: str) -> bool:
        """Decide whether a dead server is started again, and log it. One on several machines is not."""
        if server.num_deaths <= MOST_RESTARTS and self.config.nnodes == 1:
            self.num_restarts += 1
            count = len(server.in_flight)
            fields = event("replica_restarted", replica=server.name, rows=count)
            again = "it is started again, and its rows are tried again"
            logger.warning("%s; it held %d rows; %s", message, count, again, extra=fields)
            return True
        server.is_lost = True
        logger.error("%s", message, extra=event("replica_lost", replica=server.name))
        if all(each.is_lost for each in self.servers):
            self.failure = EngineDied(message)
        return False


def _pause(target: Target, wait_seconds: float | None) -> None:
    """Give a server no call for as long as it asks for, or for a growing pause."""
    target.num_pauses += not target.pause_seconds  # calls that fail together make one pause
    pause = pause_seconds(target.num_pauses) if wait_seconds is None else wait_seconds
    target.paused_until = max(target.paused_until, time.monotonic() + pause)


def pause_seconds(num_failed: int) -> float:
    """Return the seconds before the next attempt: half a second, and twice as long after each further failure."""
    return min(LONGEST_PAUSE_SECONDS, 2.0 ** (num_failed - 2)) * random.uniform(0.8, 1.2)
