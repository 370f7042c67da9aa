"""Virtual time and processes. One greenlet runs at a time; a seeded generator decides who is next."""

import random
from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

import greenlet

Ticket = tuple[Any, int]
"""Names one wait of a greenlet, by the greenlet and its number."""


class Killed(greenlet.GreenletExit):
    """Thrown into what a killed process was doing, and out of whatever it still tries to do."""


class Overrun(Exception):
    """The simulation did not come to its end in the time or the steps that it has."""


class Scheduler:
    """Events in the order of their virtual time; those of one instant in a random order.

    Args:
        seed: Of everything that is left to chance.
        max_events: After so many the simulation counts as a livelock.
    """

    def __init__(self, seed: int, *, max_events: int = 500_000) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        self.hub = greenlet.getcurrent()
        self.trace: list[str] | None = None
        self.running = ""
        """Name of the process that ran last."""
        self.num_events = 0
        self.processes: list[Process] = []
        self._max_events = max_events
        self._events: list[tuple[float, float, int, Callable[..., object], Ticket | None]] = []

    def at(
        self,
        when: float,
        action: Callable[..., object],
        chance: random.Random | None = None,
        ticket: Ticket | None = None,
    ) -> None:
        """Run `action` in the hub once time has come to `when`. `chance` orders the events of one instant.

        `ticket`: is given to the action, if there is one.
        """
        self.num_events += 1
        place = (chance or self.random).random()
        when = max(when, self.now)
        heappush(self._events, (when, place, self.num_events, action, ticket))

    def after(
        self, seconds: float, action: Callable[[], object], chance: random.Random | None = None
    ) -> None:
        """Run `action` so many seconds from now."""
        self.at(self.now + seconds, action, chance)

    def run(self, until: float, is_over: Callable[[], bool] = lambda: False) -> None:
        """Let time pass up to `until`, or until `is_over`, or until nothing is left to happen."""
        events = self._events
        while events and events[0][0] <= until and not is_over():
            self.now, _, _, action, ticket = heappop(events)
            if self.num_events > self._max_events:
                raise Overrun(f"{self.num_events} events by {self.now:.3f} s: a livelock")
            if ticket is None:
                action()
            else:
                action(ticket)
        if not is_over() and until != float("inf"):
            self.now = max(self.now, until)

    def log(self, who: str, text: str) -> None:
        """Add a line to the trace, if one is kept."""
        if self.trace is not None:
            self.trace.append(f"{self.now:9.4f}  {who:<10} {text}")


class Process:
    """One worker process: its greenlets stand for its threads, and die and freeze together.

    `chance`: draws what befalls it. One of its own leaves what the others draw as it is.
    """

    def __init__(
        self, scheduler: Scheduler, name: str, chance: random.Random | None = None
    ) -> None:
        self.scheduler = scheduler
        scheduler.processes.append(self)
        self.name = name
        self.chance = chance or scheduler.random
        self.is_dead = False
        self.thawed_at = 0.0
        self.frozen_seconds = 0.0
        """Of the freezes in which this machine's monotonic clock stood still too."""
        self.num_faults = 0
        """Storage errors that it was given after all retries, and operations that took very long."""
        self.has_been_frozen = False
        self.troubled_at = float("-inf")
        """When a request of it last failed or took long, or a freeze of it ended."""
        self.hung_until = 0.0
        """When its main loop, which has hung since it was told to, goes on; infinite for never."""
        self.on_exit: list[Callable[[], object]] = []
        self.on_crash: Callable[[Exception], object] | None = None
        """Told of an exception that a greenlet ends with; nobody else would be."""
        self._greenlets: dict[Any, int] = {}

    def spawn(self, work: Callable[[], object], *, delay: float = 0.0) -> None:
        """Start `work` beside the others."""

        self.check()

        def body() -> None:
            try:
                work()
            except Killed:
                pass
            except Exception as error:
                if self.on_crash is None:
                    raise
                self.on_crash(error)
            self._greenlets.pop(thread, None)

        thread = greenlet.greenlet(body, parent=self.scheduler.hub)
        self._greenlets[thread] = 0
        self.wake((thread, 0), delay)

    def sleep(self, seconds: float) -> None:
        """Let the calling greenlet wait."""
        self.wake(self.ticket(), seconds)
        self.block()

    def ticket(self) -> Ticket:
        """Name this very wait of the calling greenlet, for `wake`."""
        self.check()
        thread = greenlet.getcurrent()
        number = self._greenlets[thread] = self._greenlets[thread] + 1
        return thread, number

    def wake(self, ticket: Ticket, delay: float = 0.0) -> None:
        """End the wait that `ticket` names, unless it has ended by then."""
        scheduler = self.scheduler
        scheduler.at(scheduler.now + delay, self._resume, self.chance, ticket)

    def block(self) -> None:
        """Wait until woken."""
        self.scheduler.hub.switch()
        self.check()

    def check(self) -> None:
        """Raise Killed in what is left of a dead process."""
        if self.is_dead:
            raise Killed

    def kill(self) -> None:
        """SIGKILL: no code of this process has any effect from now on. What it has sent is on its way."""
        self.is_dead = True
        me = greenlet.getcurrent()
        for thread in list(self._greenlets):
            if thread is not me and not thread.dead:
                thread.throw(Killed)
        self._greenlets.clear()
        for action in self.on_exit:
            action()
        self.on_exit.clear()

    def freeze(self, seconds: float, *, stops_clock: bool) -> None:
        """SIGSTOP and SIGCONT, or a machine paused as a whole: its own clock then stands still as well."""
        frozen_until = max(self.thawed_at, self.scheduler.now)
        self.thawed_at = max(frozen_until, self.scheduler.now + seconds)
        self.has_been_frozen = True
        self.troubled_at = max(self.troubled_at, self.thawed_at)
        if stops_clock:
            self.frozen_seconds += self.thawed_at - frozen_until

    def trouble(self, until: float) -> None:
        """Note that something has failed or takes long, for which nobody blames the process, up to this time."""
        self.num_faults += 1
        self.troubled_at = max(self.troubled_at, until)

    def hang(self, seconds: float) -> None:
        """Let the main loop hang as soon as it is in the engine; see `in_engine`. All other threads go on."""
        self.hung_until = self.scheduler.now + seconds
        self.troubled_at = max(self.troubled_at, self.hung_until)

    def in_engine(self) -> None:
        """Hang, if the main loop was told to. Called by the engine on the main loop's greenlet."""
        if self.hung_until == float("inf"):
            self.block()
        elif self.hung_until > self.scheduler.now:
            self.sleep(self.hung_until - self.scheduler.now)

    def _resume(self, ticket: Ticket) -> None:
        thread, number = ticket
        if self.is_dead or self._greenlets.get(thread) != number:
            return
        scheduler = self.scheduler
        if scheduler.now < self.thawed_at:
            late = self.chance.random() * 0.01
            scheduler.at(self.thawed_at + late, self._resume, self.chance, ticket)
            return
        scheduler.running = self.name
        thread.switch()
