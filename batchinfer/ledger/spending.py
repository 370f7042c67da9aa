"""What the machines of a run have cost, and for how long it has run, by the records of all its workers.

A worker's record says how long the worker has run and, if the worker knows its price, what that cost. Records stay when
a worker dies, so the cost of a dead start is not forgotten. What happens before a worker's process starts is not seen:
a machine that is being set up costs money, too.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from batchinfer.core import codec, layout
from batchinfer.core.clock import Clock
from batchinfer.core.errors import InputError, ObjectNotFound
from batchinfer.core.prices import Machine, Price, Prices, accelerator_count, accelerator_name
from batchinfer.core.records import Run, Worker
from batchinfer.ledger.claims import ENDED_STATES, has_lapsed
from batchinfer.storage import ObjectInfo, Store

logger = logging.getLogger(__name__)

CLOCK_TOLERANCE_SECONDS = 5.0
"""Seconds of offset up to which a worker's clock counts as right.

A small offset is no sign of a wrong clock, because a heartbeat takes a while to reach storage.
"""
_MOST_READ = 100
"""Largest number of known workers' records that one look reads, if it need not be exact. A thousand workers that all
read the records of all would send more requests than a bucket takes."""


def machine_of(record: Worker, run: Run | None = None, *, is_spot: bool | None = None) -> Machine:
    """Return the machine that a worker's record describes.

    `is_spot` says whether it is a spot machine. It is used only if the record does not say.
    """
    engine = record.engine
    recorded: dict[str, Any] = run.recorded if run is not None else {}
    gpus = whole(engine.get("num_replicas")) or 1
    for name in ("tensor_parallel_size", "pipeline_parallel_size"):
        gpus *= whole(recorded.get(name)) or 1
    return describe_machine(
        record.host, device=str(engine.get("device") or ""), num_gpus=gpus, is_spot=is_spot
    )


def describe_machine(
    host: dict[str, Any], *, device: str, num_gpus: int, is_spot: bool | None
) -> Machine:
    """Return a machine by the facts in a record's `host`. The other arguments are used where these say nothing.

    Args:
        host: The facts.
        device: Name of the GPU, as the driver gives it.
        num_gpus: Number of GPUs.
        is_spot: Whether it is a spot machine; None counts as no.
    """
    name = str(host.get("accelerator") or "")
    accelerator = accelerator_name(name or device)
    gpus = whole(host.get("gpus")) or accelerator_count(name) or num_gpus
    spot = host.get("spot") if isinstance(host.get("spot"), bool) else is_spot
    return Machine(
        cloud=str(host.get("cloud") or ""),
        region=str(host.get("region") or ""),
        accelerator=accelerator,
        gpus=gpus if accelerator else 0,
        is_spot=bool(spot),
    )


def whole(value: object) -> int:
    """Return a whole number that a record holds as a number or a text; 0 if it is none."""
    try:
        return int(str(value))
    except ValueError:
        return 0


def up_seconds_of(record: Worker) -> float:
    """Return the seconds for which a worker's processes have run. Records of earlier versions do not say it exactly."""
    return record.up_seconds or record.busy_seconds + record.load_seconds


def price_of(record: Worker, prices: Prices, machine: Machine) -> Price | None:
    """Return the price of a worker's machine: the user's, else the worker's own, else that of the lists."""
    money = record.money
    if prices.is_users or money is None or money.price_per_hour is None:
        return prices.price(machine)
    return Price(money.price_per_hour, money.price_source or "the worker's own price")


def cost_of(record: Worker, prices: Prices, price: Price | None) -> float | None:
    """Return the dollars that a worker has cost; None if no price is known. `price` is `price_of` the worker."""
    if record.money is not None and record.money.cost is not None and not prices.is_users:
        return record.money.cost
    return None if price is None else price.per_hour * up_seconds_of(record) / 3600


def offset_of(record: Worker, modified: float) -> float:
    """Return the seconds to add to a time by the worker's clock to get the time by storage's clock.

    The offset is 0 if the clocks differ by at most CLOCK_TOLERANCE_SECONDS, or if storage gives no times.

    Args:
        record: The worker's record.
        modified: Unix seconds at which storage received the record; 0 if unknown.
    """
    offset = modified - record.heartbeat if modified else 0.0
    return offset if abs(offset) > CLOCK_TOLERANCE_SECONDS else 0.0


def starts_of(record: Worker, offset: float) -> list[tuple[float, float]]:
    """Return begin and end of each start that a record lists. `offset` is the `offset_of` of the worker.

    The last start ends at the worker's last heartbeat.
    """
    ends = [end for end, _ in record.ends] + [record.heartbeat]
    starts = record.starts or [record.started]
    return [
        (begin + offset, max(begin, end) + offset)
        for begin, end in zip(starts, ends[-len(starts) :], strict=False)
    ]


def joined_seconds(spans: Iterable[tuple[float, float]]) -> float:
    """Return the seconds in which at least one of some spans of time lay.

    >>> joined_seconds([(0, 10), (5, 12), (20, 21)])
    13.0
    """
    total, until = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total


class _Tracked(NamedTuple):
    """A worker's record as last read.

    `etag`: version of the record. `beaten_at`: monotonic seconds of the heartbeat in the record.
    `offset`: seconds, by `offset_of`. `price_per_hour`: dollars.
    """

    record: Worker
    etag: str
    beaten_at: float
    offset: float
    price_per_hour: float


class _LookResult(NamedTuple):
    """What a look has found.

    `sighted`: records by their keys. `replaced`: records that were lost and begun anew by their worker, as they were
    before. `live`: the records of workers that are alive. `looked_at`: monotonic seconds. `spans_seconds`: seconds in
    which at least one worker was up.
    """

    sighted: dict[str, _Tracked]
    replaced: list[_Tracked]
    live: list[_Tracked]
    looked_at: float
    spans_seconds: float


class Spending:
    """Follows what a run costs and for how long it has run. Only `look` sends requests.

    Between two looks each live worker is assumed to go on, so its cost grows with time. A look that fails changes
    nothing. Other threads may ask for the cost during a look.

    Args:
        store: The run's store.
        clock: This machine's clock.
        price_per_hour: Price of this worker's machine. It also counts for workers whose own price is not known.
    """

    def __init__(self, store: Store, clock: Clock, price_per_hour: float | None) -> None:
        self._store = store
        self._clock = clock
        self._prices = Prices()
        self._own_price = price_per_hour or 0.0
        self._damaged: set[str] = set()
        self._seen = _LookResult({}, [], [], clock.monotonic(), 0.0)

    def look(self, *, is_exact: bool = True) -> None:
        """Read the records of all workers that have changed. Costs one listing and a request for each record.

        If not `is_exact`, at most `_MOST_READ` of the records that were read before are read again: those that were
        read longest ago. A record that is damaged or gone keeps its last known cost.

        Raises:
            StorageError: Storage cannot be read.
        """
        infos = [info for info in self._store.list(layout.WORKERS) if info.key.endswith(".json")]
        time, now = self._clock.now(), self._clock.monotonic()
        newest = max((info.modified for info in infos), default=0.0)
        sighted, replaced = dict(self._seen.sighted), list(self._seen.replaced)
        changed = {info.key: info for info in infos if self._has_changed(info)}
        again = [key for key in sighted if key in changed]  # the longest ago comes first
        skipped = set() if is_exact else set(again[_MOST_READ:])
        for key, info in changed.items():
            if key not in skipped:
                age = max(0.0, max(time, newest) - info.modified)
                if (before := self._read(info, age, sighted)) is not None:
                    replaced.append(before)
        # A record that has changed is of a live worker, even if it is read only later.
        live = [
            seen
            for key, seen in sighted.items()
            if seen.record.state not in ENDED_STATES
            and (key in skipped or not has_lapsed(now - seen.beaten_at, seen.record.lease_seconds))
        ]
        spans = _spans(sighted, replaced, live, now)
        self._seen = _LookResult(sighted, replaced, live, now, joined_seconds(spans))

    @property
    def cost(self) -> float:
        """Dollars that the run has cost until now."""
        now, last = self._clock.monotonic(), self._seen
        sum_read = sum(
            cost_of(seen.record, self._prices, Price(seen.price_per_hour, "")) or 0.0
            for seen in (*last.sighted.values(), *last.replaced)
        )
        since = sum((now - seen.beaten_at) * seen.price_per_hour for seen in last.live)
        return sum_read + since / 3600

    @property
    def cost_per_hour(self) -> float:
        """Dollars an hour for the workers that are alive. This worker counts even if it has no record yet."""
        return max(self._own_price, sum(seen.price_per_hour for seen in self._seen.live))

    @property
    def num_live(self) -> int:
        """Number of workers that are alive."""
        return len(self._seen.live)

    @property
    def hours(self) -> float:
        """Hours in which at least one worker was up, until now."""
        last = self._seen
        since = self._clock.monotonic() - last.looked_at if last.live else 0.0
        return (last.spans_seconds + since) / 3600

    @property
    def look_seconds(self) -> float:
        """Seconds since the last look."""
        return self._clock.monotonic() - self._seen.looked_at

    def _has_changed(self, info: ObjectInfo) -> bool:
        seen = self._seen.sighted.get(info.key)
        return seen is None or not info.etag or seen.etag != info.etag

    def _read(self, info: ObjectInfo, age: float, sighted: dict[str, _Tracked]) -> _Tracked | None:
        """Read a worker's record into `sighted`. It was written `age` seconds ago, by storage's clock.

        Returns the record as it was before, if the worker has begun it anew.
        """
        try:
            data, etag = self._store.get(info.key)
            record = codec.decode(data, Worker, name=info.key)
        except ObjectNotFound:
            return None
        except InputError as error:
            if info.key not in self._damaged:
                self._damaged.add(info.key)
                logger.warning("%s; what its worker has cost since is not counted", error)
            return None
        now, before = self._clock.monotonic(), sighted.pop(info.key, None)
        beaten_at = now - age if info.modified else now
        if before is not None:
            # The clocks of this machine and of storage may differ, and the record was changed after the last look.
            beaten_at = min(now, max(beaten_at, self._seen.looked_at))
        price = price_of(record, self._prices, machine_of(record))
        sighted[info.key] = _Tracked(
            record,
            etag,
            beaten_at,
            offset_of(record, info.modified),
            self._own_price if price is None else price.per_hour,
        )
        is_anew = before is not None and up_seconds_of(record) < up_seconds_of(before.record)
        return before if is_anew else None


def _spans(
    sighted: dict[str, _Tracked], replaced: list[_Tracked], live: list[_Tracked], looked_at: float
) -> Iterator[tuple[float, float]]:
    """Yield begin and end of all starts, in seconds by storage's clock.

    The last start of a live worker ends at the look, `looked_at` in monotonic seconds.
    """
    live_ids = {id(seen) for seen in live}
    for seen in (*sighted.values(), *replaced):
        spans = starts_of(seen.record, seen.offset)
        begin, end = spans.pop()
        yield from spans
        yield begin, end + (looked_at - seen.beaten_at if id(seen) in live_ids else 0.0)
