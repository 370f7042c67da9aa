"""A bucket's server in memory, and the real adapter of buckets talking to it over a bad line.

`SimStore` is `batchinfer.storage.bucket.BucketStore` with `SimClient` in obstore's place: how a create, a replace or a
delete is made of requests, and what a lost reply means, is the adapter's own code. Requests have S3's names.
"""

from __future__ import annotations

import bisect
import hashlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec
import obstore

from batchinfer.core import layout
from batchinfer.core.errors import BatchinferError, ObjectNotFound, PreconditionFailed, StorageError
from batchinfer.storage import Object
from batchinfer.storage.bucket import BucketStore
from batchinfer.storage.cloud_errors import Cloud
from batchinfer.storage.retrying import TransientError

from .scheduler import Process, Scheduler

T = TypeVar("T")

EPOCH = 1_700_000_000.0
"""Unix time at which every simulation begins."""
LONGEST_LAG_SECONDS = 100.0
_LAST = "\U0010ffff"
"""Comes after every character of a key."""
WRITES = ("put_object", "delete_objects")
CLOUD = Cloud("the simulation")


class _Moment(float):
    """Unix seconds that can be asked like a datetime."""

    def timestamp(self) -> float:
        return float(self)


def read_record(data: bytes) -> dict[str, Any] | None:
    """Decode a stored record; None if it is damaged."""
    try:
        record = msgspec.json.decode(data)
    except msgspec.DecodeError:
        return None
    return record if isinstance(record, dict) else None


class Held(NamedTuple):
    """One object. `modified`: virtual seconds since the beginning, as Unix time."""

    data: bytes
    etag: str
    modified: _Moment


class Unwatched:
    """In the place of a watcher: nobody looks."""

    def __getattr__(self, _name: str) -> Callable[..., None]:
        return lambda *_: None


class Server:
    """Objects of one bucket. Every request takes effect at one instant; a listing of several pages at several.

    Args:
        page_keys: Keys on a listing's page.
        has_content_etags: Equal bytes have equal etags, as on S3; else every write gives a new one, as on GCS.
    """

    def __init__(self, *, page_keys: int, has_content_etags: bool) -> None:
        self.objects: dict[str, Held] = {}
        self.watcher: Any = Unwatched()
        """Sees every change at the instant it takes effect; see oracle.Oracle."""
        self.clock: Callable[[], float] = lambda: 0.0
        self.lag_seconds = 0.0
        """How old listings are."""
        self.has_lagged = False
        self._changes: deque[tuple[float, str, Held | None]] = deque()
        """Of the last minutes: when, which key, and what it held before."""
        self._shown: dict[tuple[str, str], list[str]] = {}
        """By process and prefix: keys on the pages of the listing that it has had so far."""
        self._page_keys = page_keys
        self._has_content_etags = has_content_etags
        self._version = 0
        self._order: list[str] = []
        """All keys, in order."""

    def put(self, key: str, data: bytes, process: Process | None = None) -> str:
        """Store an object, over any that exists."""
        self._version += 1
        etag = f'"{self._version}"'
        if self._has_content_etags:
            etag = f'"{hashlib.md5(data, usedforsecurity=False).hexdigest()}"'
        before = self.objects.get(key)
        if before is None:
            bisect.insort(self._order, key)
        self._note_change(key, before)
        self.objects[key] = Held(data, etag, _Moment(EPOCH + self.clock()))
        self.watcher.stored(key, data, None if before is None else before.data, process)
        return etag

    def keys(self, prefix: str, after: str | None = None, most: int | None = None) -> list[str]:
        """Keys below a prefix, in order. `after`: only those behind this one; `most`: so many of them."""
        order = self._order
        start = bisect.bisect_right(order, after) if after else bisect.bisect_left(order, prefix)
        end = bisect.bisect_left(order, prefix + _LAST)
        return order[start : end if most is None else min(end, start + most)]

    def handle(self, process: Process, method: str, *arguments: Any) -> Any:
        """Answer one request. Raises what the adapter makes of an error response."""
        return getattr(self, f"_{method}")(process, *arguments)

    def _put_object(
        self, process: Process, key: str, data: bytes, condition: str | None
    ) -> dict[str, Any]:
        """`condition`: "create", or the etag that the object must have; None to store it whatever is there."""
        held = self.objects.get(key)
        if condition == "create" and held is not None:
            raise PreconditionFailed(f"{key}: exists")
        if condition not in (None, "create") and self._require(key).etag != condition:
            raise PreconditionFailed(f"{key}: is another version")
        return {"e_tag": self.put(key, data, process), "version": None}

    def _get_object(self, process: Process, key: str) -> Held:
        held = self._require(key)
        self.watcher.read(key, held.data, process)
        return held

    def _head_object(self, _process: Process, key: str) -> dict[str, Any]:
        return _meta(key, self._require(key))

    def _list_objects_v2(self, process: Process, prefix: str, after: str | None) -> Page:
        objects = self._as_listed()
        keys = self.keys(prefix, after)
        if objects is not self.objects:
            keys = sorted(key for key in objects if key.startswith(prefix) and key > (after or ""))
        page = keys[: self._page_keys]
        # A listing of several pages shows the bucket as it is at each of them.
        before = self._shown.get((process.name, prefix), [])
        # Of a page whose reply was lost, the process has seen nothing: it asks for the same one again.
        shown = self._shown[process.name, prefix] = [key for key in before if key <= (after or "")]
        self.watcher.listed(prefix, shown + keys, process)
        shown += page
        return [_meta(key, objects[key]) for key in page], len(page) < len(keys)

    def _delete_objects(self, process: Process, keys: Sequence[str]) -> None:
        for key in keys:
            self.delete(key, process)

    def delete(self, key: str, process: Process | None = None) -> None:
        """Remove an object, if it is there."""
        held = self.objects.pop(key, None)
        if held is not None:
            del self._order[bisect.bisect_left(self._order, key)]
            self._note_change(key, held)
            self.watcher.deleted(key, held.data, process)

    def _note_change(self, key: str, before: Held | None) -> None:
        now = self.clock()
        self._changes.append((now, key, before))
        while self._changes[0][0] < now - LONGEST_LAG_SECONDS:
            self._changes.popleft()

    def _as_listed(self) -> dict[str, Held]:
        """All objects as a listing shows them, which may lag behind."""
        if not self.lag_seconds:
            return self.objects
        self.has_lagged = True
        objects = dict(self.objects)
        for when, key, before in reversed(self._changes):
            if when <= self.clock() - self.lag_seconds:
                break
            if before is None:
                objects.pop(key, None)
            else:
                objects[key] = before
        return objects

    def _require(self, key: str) -> Held:
        if key not in self.objects:
            raise ObjectNotFound(f"{key}: no such object")
        return self.objects[key]


Page = tuple[list[dict[str, Any]], bool]
"""Objects of a page of a listing, as obstore's ObjectMeta, and whether there is another page."""


def _meta(key: str, held: Held) -> dict[str, Any]:
    return {
        "path": key,
        "size": len(held.data),
        "e_tag": held.etag,
        "version": None,
        "last_modified": held.modified,
    }


@dataclass(slots=True, kw_only=True)
class Weather:
    """Probabilities of what may happen to a request. All 0 is a calm day."""

    refused: float = 0.0
    """Fails and has no effect."""
    lost: float = 0.0
    """Takes effect, but its reply does not arrive."""
    late: float = 0.0
    """Times out, and takes effect some time later all the same."""
    late_seconds: float = 30.0
    slow: float = 0.0
    """Takes up to `slow_seconds`."""
    slow_seconds: float = 10.0
    partly: float = 0.0
    """A deletion of many stops half way, with an error."""
    dies_before: float = 0.0
    dies_after: float = 0.0
    """The process that sent a write is killed right before, right after it takes effect."""
    latency_seconds: float = 0.02
    outages: tuple[tuple[float, float], ...] = ()
    """From, to: nothing gets through."""


Hook = Callable[[int, str, str, Process], "str | float | None"]


class Network:
    """The line between processes and the server. `weather` may be changed at any time.

    `hook` decides the fate of a request instead of the weather: it gets the number of the request from 0, its method
    and its key, and returns what happens (one of Weather's fields), a number of seconds that it takes, or None.
    """

    def __init__(self, scheduler: Scheduler, server: Server) -> None:
        self.scheduler = scheduler
        self.server = server
        server.clock = lambda: scheduler.now
        self.weather = Weather()
        self.hook: Hook | None = None
        self.refuse: Callable[[str, str], BatchinferError | None] = lambda _method, _key: None
        """Returns the error with which a request is answered before it has any effect."""
        self.num_requests = 0
        self.attempts = 3
        self.pause_seconds = 0.3

    def request(self, process: Process, method: str, *arguments: Any) -> Any:
        """Send one request and wait for its reply."""
        process.check()
        scheduler, weather, chance = self.scheduler, self.weather, process.chance
        subject = subject_of(*arguments)
        refusal = self.refuse(method, subject)
        if refusal is not None:
            process.trouble(scheduler.now)
            process.sleep(weather.latency_seconds)
            scheduler.log(process.name, f"  {refusal.message}")
            raise refusal
        fate = self._fate(process, method, subject)
        outcome: list[tuple[Any, BatchinferError | None]] = []
        ticket = process.ticket()
        latency = weather.latency_seconds * (0.2 + 1.6 * chance.random())
        is_slow = False
        if isinstance(fate, float):
            latency = fate
        elif is_slow := bool(weather.slow) and chance.random() < weather.slow:
            latency += weather.slow_seconds * chance.random()
            process.trouble(scheduler.now + latency)
        if isinstance(fate, str) and self._delays_saving(method, subject):
            process.troubled_at = max(process.troubled_at, scheduler.now)

        def land() -> None:
            if fate == "dies_before":
                scheduler.log(process.name, "-- killed before --")
                process.kill()
                return
            if fate != "refused":
                outcome.append(self._effect(process, method, list(arguments), fate))
            if fate in ("lost", "late"):
                self.server.watcher.unanswered(subject)
            if fate == "dies_after":
                scheduler.log(process.name, "-- killed after --")
                process.kill()
                return
            if fate != "late":
                way_back = latency * chance.random()
                process.wake(ticket, way_back)
                if is_slow:
                    process.troubled_at = max(process.troubled_at, scheduler.now + way_back)

        if fate == "late":
            scheduler.after(latency + chance.random() * weather.late_seconds, land, chance)
            process.wake(ticket, latency)
        else:
            scheduler.after(latency, land, chance)
        process.block()
        if fate in ("refused", "lost", "late", "partly"):
            raise TransientError(f"{subject}: no answer")
        answer, error = outcome[0]
        if error is not None:
            raise error
        return answer

    def _effect(
        self, process: Process, method: str, arguments: list[Any], fate: str | float | None
    ) -> tuple[Any, BatchinferError | None]:
        """Let a request take effect. Returns its answer or error."""
        if fate == "partly":
            [keys] = arguments
            arguments = [keys[: process.chance.randrange(len(keys) + 1)]]
        self._log(process, method, arguments, fate)
        try:
            return self.server.handle(process, method, *arguments), None
        except BatchinferError as error:
            self.scheduler.log(process.name, f"    {type(error).__name__}")
            return None, error

    def _fate(self, process: Process, method: str, subject: str) -> str | float | None:
        weather, chance, now = self.weather, process.chance, self.scheduler.now
        if self.hook is not None:
            number, self.num_requests = self.num_requests, self.num_requests + 1
            return self.hook(number, method, subject, process)
        for start, end in weather.outages:
            if start <= now < end:
                return "refused"
        fates = ["refused", "lost"]
        fates += ["late", "dies_before", "dies_after"] * (method in WRITES)
        fates += ["partly"] * (method == "delete_objects")
        for fate in fates:
            share = getattr(weather, fate)
            if share and chance.random() < share:
                return fate
        return None

    def _delays_saving(self, method: str, subject: str) -> bool:
        """Whether the failure of a request may delay a checkpoint or a marker by more than its repetition does.

        Reads count, too: after a lost reply a worker compares what is stored with what it has sent.
        """
        if any(start <= self.scheduler.now < end for start, end in self.weather.outages):
            return True
        is_listing = method == "list_objects_v2"
        return not is_listing and (layout.CHECKPOINTS in subject or layout.OUTPUTS in subject)

    def _log(
        self, process: Process, method: str, arguments: list[Any], fate: str | float | None
    ) -> None:
        if self.scheduler.trace is None:
            return
        words = [method, subject_of(*arguments)]
        if method == "put_object":
            _, body, condition = arguments
            digest = hashlib.md5(body, usedforsecurity=False).hexdigest()[:6]
            words += [condition or "", digest]
        self.scheduler.log(process.name, "  " + " ".join(filter(None, [*words, str(fate or "")])))


def subject_of(first: str | Sequence[str], *_more: Any) -> str:
    """The keys or the prefix that a request is about."""
    return first if isinstance(first, str) else " ".join(first)


class SimResult:
    """As obstore's GetResult."""

    def __init__(self, held: Held) -> None:
        self._data = held.data
        self.meta = {"e_tag": held.etag, "version": None}

    def bytes(self) -> bytes:
        return self._data

    def stream(self, *, min_chunk_size: int) -> Iterator[bytes]:
        for start in range(0, len(self._data), min_chunk_size):
            yield self._data[start : start + min_chunk_size]


class SimClient:
    """In the place of obstore's store: the same functions, results and errors, as far as BucketStore uses them.

    `line` sends a request and returns the server's answer, or raises what the server or the line makes of it.
    """

    def __init__(self, line: Callable[..., Any]) -> None:
        self._line = line

    def get(self, path: str) -> SimResult:
        return SimResult(self._ask("get_object", path))

    def head(self, path: str) -> dict[str, Any]:
        return self._ask("head_object", path)

    def list(self, folder: str | None, *, offset: str | None, **_: int) -> Iterator[list[Any]]:
        has_more = True
        while has_more:
            page, has_more = self._ask("list_objects_v2", f"{folder}/" if folder else "", offset)
            yield page
            offset = page[-1]["path"] if page else None

    def put(self, path: str, file: bytes | Path, *, mode: Any, **_: int) -> dict[str, Any]:
        body = file if isinstance(file, bytes) else file.read_bytes()
        condition = mode["e_tag"] if isinstance(mode, dict) else mode
        try:
            return self._ask("put_object", path, body, condition)
        except PreconditionFailed as error:
            if mode == "create":
                raise obstore.exceptions.AlreadyExistsError(str(error)) from error
            raise obstore.exceptions.PreconditionError(str(error)) from error

    def delete(self, paths: Sequence[str]) -> None:
        self._ask("delete_objects", paths)

    def _ask(self, method: str, *arguments: Any) -> Any:
        try:
            return self._line(method, *arguments)
        except ObjectNotFound as error:
            raise FileNotFoundError(str(error)) from error
        except TransientError as error:
            raise obstore.exceptions.GenericError(str(error)) from error


class SimStore(BucketStore):
    """BucketStore over a simulated line. Only obstore's functions are replaced; some verbs tell the watcher."""

    def __init__(self, url: str, network: Network, process: Process) -> None:
        super().__init__(url, SimClient(partial(network.request, process)), CLOUD)
        self._network = network
        self._process = process

    def get(self, key: str) -> Object:
        found = super().get(key)
        self._network.server.watcher.knows(self._process, key, found.data)
        return found

    def create(self, key: str, data: bytes) -> str:
        self._network.server.watcher.creating(key, self._process)
        return super().create(key, data)

    def put_file(self, key: str, path: Path) -> None:
        self._network.server.watcher.creating(key, self._process)
        super().put_file(key, path)

    def _retry(self, attempt: Callable[[], T]) -> T:
        """As `retrying.retried`, in virtual time."""
        network = self._network
        for number in range(1, network.attempts + 1):
            try:
                return attempt()
            except TransientError as error:
                if number == network.attempts:
                    self._process.num_faults += 1
                    network.scheduler.log(self._process.name, f"    {error.message}: given up")
                    raise StorageError(f"{error.message} (after {number} attempts)") from error
                pause = network.pause_seconds * number * (0.5 + self._process.chance.random())
                self._process.sleep(pause)
        raise AssertionError("unreachable")


class StillStore(BucketStore):
    """The same bucket while time stands still: for commands that look at a run afterwards, in threads or not."""

    def __init__(self, url: str, server: Server, process: Process) -> None:
        super().__init__(url, SimClient(partial(server.handle, process)), CLOUD)

    def _retry(self, attempt: Callable[[], T]) -> T:
        return attempt()
