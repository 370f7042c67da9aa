"""`batchinfer clean` removes what dead workers left, and keeps whatever a worker may still need."""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from batchinfer.core import codec, layout
from batchinfer.core.records import Claim
from batchinfer.runs.clean import CleanConfig, run_clean
from batchinfer.storage import Store
from batchinfer.storage.opening import open_store
from fakes import FakeClock, MemoryStore
from making import change_marker, make_job, overwrite, run_worker_here

CHUNK, UNDONE = "part-00001", "part-00002"
HOUR = 3600.0

ORPHAN, YOUNGER = (layout.output_key(layout.output_file(CHUNK, one)) for one in ("aaaa", "bbbb"))
SEGMENT = layout.segment_key(CHUNK, "gone", 1, 1)
CLAIM = layout.claim_key(CHUNK)
MARKER = layout.marker_key(CHUNK)
NOTE = f"{layout.COMPLETE}{32 * '0'}"
"""Says that a block of chunks is done."""
USELESS = {ORPHAN, SEGMENT, CLAIM}
NEEDED = {
    layout.output_key(layout.output_file(UNDONE, "aaaa")),
    layout.segment_key(UNDONE, "gone", 1, 1),
    layout.claim_key(UNDONE),
    NOTE,
}


@pytest.fixture
def run(memory_url):
    """A run with two of three chunks done, whose workers have ended."""
    make_job(memory_url, rows=30, per_chunk=10, workers=3)
    store = open_store(f"{memory_url}/runs/a")
    for index in (0, 1):
        run_worker_here(memory_url, store.url, "--worker-id", f"w{index}", only=index)
    return store


def keys(store: Store) -> set[str]:
    return {info.key for info in store.list("")}


def clean(store: Store, *, after_seconds: float = 2 * HOUR, **options: Any) -> dict[str, Any]:
    """Clean after some time has passed on the store's clock and on our own, which counts only in a dry run."""
    clock = FakeClock(time.time() + after_seconds)
    if store.url.startswith("memory://"):
        store = MemoryStore(store.url, clock=clock.now)
    return run_clean(
        CleanConfig(run=store.url, **{"yes": True} | options), store=store, clock=clock
    )


def leave(store: Store, worker: str = "gone") -> None:
    """Write the objects that a worker leaves when it is killed at the worst moments."""
    for key in USELESS | NEEDED:
        is_claim = key.startswith(layout.CLAIMS)
        store.create(key, codec.encode(Claim(worker=worker, nonce="n")) if is_claim else b"{}\n")


def leave_of_the_living(store: Store, nonce: str = "n") -> None:
    """The same of a worker whose record says that it runs."""
    leave(store, worker="w0")
    data, etag = store.get(layout.worker_key("w0"))
    record = json.loads(data) | {"state": "running", "nonce": nonce}
    store.replace(layout.worker_key("w0"), json.dumps(record).encode(), etag)


def begin_repair(store: Store) -> None:
    change_marker(store, CHUNK, rows_ok=9, rows_error=1)
    store.create(SEGMENT, b"{}\n")


def add_generation(store: Store) -> None:
    store.create(ORPHAN, b"{}\n")
    store.create(layout.marker_key(CHUNK, 1), store.get(MARKER).data)
    change_marker(store, CHUNK, 1, output=ORPHAN.removeprefix(layout.OUTPUTS), generation=1)


def skip_a_generation(store: Store) -> None:
    """Who fell asleep before it wrote marker 1 may wake up and name its output in it (seed 500244)."""
    store.create(ORPHAN, b"{}\n")
    change_marker(store, CHUNK, rows_ok=9, rows_error=1)
    store.create(layout.marker_key(CHUNK, 2), store.get(MARKER).data)
    change_marker(store, CHUNK, 2, generation=2)


def leave_around_a_repair(store: Store) -> None:
    """Error rows may be done again by a worker that has read their marker before it makes its own output."""
    change_marker(store, CHUNK, rows_ok=9, rows_error=1)
    for key, seconds in ((ORPHAN, -HOUR), (YOUNGER, HOUR)):
        MemoryStore(store.url, clock=FakeClock(time.time() + seconds).now).create(key, b"{}\n")


class Case(NamedTuple):
    """What is left, how it is cleaned, and what of it goes."""

    act: Callable[[Store], object]
    options: dict[str, Any] = {}
    gone: set[str] = set()


NOW = {"after_seconds": 0.0}
ANY_AGE = NOW | {"older_than_seconds": 0.0}
HALF = {"after_seconds": HOUR / 2}
CASES = {
    "what the dead left": Case(leave, {}, USELESS),
    "what is young": Case(leave, HALF),
    "what is old enough": Case(leave, HALF | {"older_than_seconds": 60}, USELESS),
    "what a live worker has in hand": Case(leave_of_the_living, ANY_AGE),
    "what an earlier start of a live worker left": Case(
        lambda store: leave_of_the_living(store, nonce="later"), ANY_AGE, USELESS
    ),
    "what a worker left that fell silent long ago": Case(leave_of_the_living, {}, USELESS),
    "checkpoints of a repair": Case(begin_repair),
    "an output that the next generation may name": Case(
        leave_around_a_repair, {"after_seconds": 999 * HOUR}, {ORPHAN}
    ),
    "an output that a later generation names": Case(add_generation),
    "an output that an earlier generation may name": Case(skip_a_generation),
    "an output whose marker cannot be read": Case(lambda store: overwrite(store, MARKER, b"")),
    "strangers and the stop request": Case(
        lambda store: [store.create(key, b"{}") for key in ("outputs/notes.txt", "stop.json")]
    ),
    "a chunk to do again": Case(leave, NOW | {"redo": [CHUNK]}, {MARKER, SEGMENT, NOTE}),
    "and what is old of it": Case(leave, {"redo": [CHUNK]}, {MARKER, SEGMENT, NOTE}),
}


@pytest.mark.parametrize("name", CASES)
def test_what_goes_and_what_stays(run, name):
    case = CASES[name]
    case.act(run)
    before = {info.key: info.etag for info in run.list("")}
    planned = clean(run, **case.options, yes=False)
    assert {info.key: info.etag for info in run.list("")} == before, "a dry run changes nothing"
    done = clean(run, **case.options)
    assert keys(run) == before.keys() - case.gone
    assert (done["removed"], sum(done["removed"].values())) == (planned["removed"], len(case.gone))
    if "redo" not in case.options:
        assert clean(run, **case.options)["removed"] == {}


def test_a_marker_goes_after_all_else_of_its_chunk(run, monkeypatch):
    """Killed before, the chunk still counts as done. Only notes go later: a worker may write them anew."""
    leave(run)
    doomed: list[str] = []
    monkeypatch.setattr(MemoryStore, "delete", lambda _, keys: doomed.extend(keys))
    clean(run, redo=[CHUNK])
    assert SEGMENT in doomed
    assert doomed[-2:] == [MARKER, NOTE]


def test_old_temporary_files_of_a_folder_go(tmp_path):
    make_job(tmp_path / "job", rows=10, per_chunk=10)
    run = open_store(str(tmp_path / "job/runs/a"))
    run_worker_here(tmp_path / "job", run.url, "--worker-id", "w0")
    old, young = (Path(run.url, "outputs", f".part.{name}.tmp") for name in ("old", "young"))
    for path in (old, young):
        path.write_bytes(b"x")
    (folder := old.with_name(".folder.tmp")).mkdir()
    for path in (old, folder):
        os.utime(path, (time.time() - 2 * HOUR,) * 2)
    assert clean(run, yes=False)["temps_removed"] == 1
    assert old.exists()
    clean(run)
    assert (old.exists(), young.exists()) == (False, True)
    assert clean(run, older_than_seconds=0.0, yes=False)["temps_removed"] == 1
    leave_of_the_living(run)  # it may write this file at the moment
    assert clean(run, older_than_seconds=0.0)["temps_removed"] == 0
