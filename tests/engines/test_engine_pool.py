from __future__ import annotations

import dataclasses
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import msgspec
import pytest

from batchinfer.core.clock import SystemClock
from batchinfer.core.errors import EngineDied, EngineLoadError, EngineStalled, Interrupted
from batchinfer.core.records import Request, Sampling
from batchinfer.engines import create_engine, host, share_out
from batchinfer.engines.config import EngineConfig
from batchinfer.engines.echo import EchoEngine
from batchinfer.engines.parent_death import is_alive
from batchinfer.engines.pool import ProcessPool
from batchinfer.prompts import PromptConfig
from batchinfer.runs.status import StatusConfig, run_status
from batchinfer.storage.opening import open_store
from batchinfer.worker.config import Limits, WorkerConfig, real_environment
from batchinfer.worker.start import run_worker
from engine_contract import EngineContract, Flag, ListSource, drive, requests
from making import make_job


def pool_config(**options) -> EngineConfig:
    return EngineConfig(**{"engine": "echo", "replicas": 2, "max_num_seqs": 16, **options})


@pytest.fixture
def make_pool():
    """Opens pools of echo engines, and checks that none of their processes is left at the end."""
    pools, pids = [], []

    def make(**options) -> ProcessPool:
        pool = ProcessPool(pool_config(**options))
        pools.append(pool)
        pool.open(Flag())
        pids.extend(replica.pid for replica in pool.replicas)
        return pool

    yield make
    for pool in pools:
        pool.close()
    assert not [pid for pid in pids if is_alive(pid)]


@pytest.fixture(autouse=True)
def no_pause(monkeypatch):
    monkeypatch.setattr("batchinfer.engines.restarts.PAUSE_SECONDS", 0.0)


class RetryingSource(ListSource):
    """Gives a request again whose engine died, as the worker does. Ends once every request is answered."""

    def __init__(self, requests) -> None:
        super().__init__(requests)
        self._requests = {request.key: request for request in requests}
        self.answered = {}
        self.deaths = []

    def take(self, max_requests, free_slots=()):
        if len(self.answered) == len(self._requests):
            return None
        return super().take(max_requests, free_slots) if self.left else []

    def note(self, completions) -> None:
        killed = [each.key for each in completions if each.failure and each.failure.is_engine_death]
        if killed:
            self.deaths.append(killed)
            self.left.extend(self._requests[key] for key in killed)
        for completion in completions:
            if completion.key not in killed:
                assert completion.key not in self.answered
                self.answered[completion.key] = completion


def answer_all(pool, source: RetryingSource) -> None:
    for batch in pool.generate(source, Flag()):
        source.note(batch)


def wait_until_gone(pids, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while any(is_alive(pid) for pid in pids):
        assert time.monotonic() < end, f"still alive: {[p for p in pids if is_alive(p)]}"
        time.sleep(0.02)


@pytest.fixture(scope="module")
def contract_pool():
    pool = ProcessPool(pool_config(max_model_len=512))
    pool.open(Flag())
    yield pool
    pool.close()


class TestPoolContract(EngineContract):
    @pytest.fixture
    def engine(self, contract_pool):
        return contract_pool


def test_echo_with_replicas_is_a_pool_of_processes():
    assert isinstance(create_engine(pool_config()), ProcessPool)


def test_engines_share_the_workers_session_and_not_its_group(make_pool):
    """With a session of its own, a busy engine took the processor from the worker, and then had no rows itself."""
    for replica in make_pool().replicas:
        assert os.getsid(replica.pid) == os.getsid(0)
        assert os.getpgid(replica.pid) == replica.pid


def test_both_replicas_are_kept_busy_on_uneven_work(make_pool):
    pool = make_pool(echo_latency_seconds=0.02)
    source = ListSource(requests(400))
    held = [
        [len(replica.in_flight) for replica in pool.replicas]
        for _ in pool.generate(source, Flag())
        if source.left
    ]
    assert pool.stats().completion_tokens == 4 * 400
    # as long as the source has more requests, no replica is idle
    both = [min(counts) > 0 for counts in held]
    assert sum(both) >= 0.9 * len(both)


def test_the_source_is_told_how_much_room_each_replica_has(make_pool):
    pool = make_pool(echo_latency_seconds=0.01)
    source = ListSource(requests(100))
    plain_take = source.take
    told = []

    def take(max_requests, free_slots):
        told.append(tuple(free_slots))
        return plain_take(max_requests, free_slots)

    source.take = take
    drive(pool, source)
    assert told[0] == (24, 24)
    assert {len(free_slots) for free_slots in told} == {2}


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_replica_that_is_killed_is_named_and_started_again(make_pool, caplog, replicas):
    """Once it was only named, and its GPUs idled until the worker's next start."""
    pool = make_pool(replicas=replicas, echo_latency_seconds=0.05)
    victim = pool.replicas[0].pid
    source = RetryingSource(requests(300))
    with caplog.at_level(logging.ERROR):
        for batch in pool.generate(source, Flag()):
            source.note(batch)
            if victim and len(source.answered) > 20:
                os.kill(victim, signal.SIGKILL)
                victim = 0
            if source.deaths and len(source.answered) == 300:
                assert len(pool.replicas) == replicas
    [killed] = source.deaths
    [record] = [
        each for each in caplog.records if getattr(each, "event", "") == "replica_restarted"
    ]
    fields = record.fields
    assert (fields["replica"], fields["replicas"], fields["lost"]) == ("replica 0", replicas, 0)
    assert "SIGKILL" in fields["reason"]
    assert fields["rows"] == len(killed) > 0
    assert pool.stats().replicas_lost == 0
    source = RetryingSource(requests(100))
    busy = set()
    for batch in pool.generate(source, Flag()):
        source.note(batch)
        busy.update(replica.name for replica in pool.replicas if replica.in_flight)
        if len(source.answered) == 100 and len(busy) < replicas:  # it still loads
            source = RetryingSource(requests(100))
    assert len(source.answered) == 100


def test_a_new_process_of_a_replica_answers_in_a_later_round(make_pool):
    """It counts rounds from 0, and its answers were taken for those of requests that were abandoned."""
    pool = make_pool(replicas=1, echo_latency_seconds=0.05)
    for _ in range(2):
        for _ in pool.generate(ListSource(requests(50)), Flag()):
            break  # abandons the others
    os.kill(pool.replicas[0].pid, signal.SIGKILL)
    source = RetryingSource(requests(50))
    answer_all(pool, source)
    assert len(source.answered) == 50


def test_a_replica_that_is_killed_with_one_row_is_said_to_have_held_1_row(make_pool, caplog):
    pool = make_pool(replicas=1, echo_latency_seconds=0.05)
    os.kill(pool.replicas[0].pid, signal.SIGKILL)
    answer_all(pool, RetryingSource(requests(1)))
    [message] = [each.message for each in caplog.records if each.levelno == logging.ERROR]
    assert "; what it held (1 row) is tried again, and it is started again" in message


def test_a_replica_that_never_finishes_a_request_is_lost_after_three_restarts(make_pool, caplog):
    pool = make_pool(echo_latency_seconds=0.02)
    source = RetryingSource(requests(100))
    killed = []
    with caplog.at_level(logging.ERROR):
        for batch in pool.generate(source, Flag()):
            source.note(batch)
            for replica in pool.replicas:
                if replica.name == "replica 0" and replica.pid not in killed:
                    killed.append(replica.pid)
                    os.kill(replica.pid, signal.SIGKILL)
            if len(source.answered) == 100 and not pool.stats().replicas_lost:
                source = RetryingSource(requests(100))
    errors = [each for each in caplog.records if each.levelno == logging.ERROR]
    events = [getattr(each, "event", "") for each in errors]
    assert events == ["replica_restarted"] * 3 + ["replica_lost"]
    assert len(killed) == 4
    assert pool.stats().replicas_lost == 1
    assert [replica.name for replica in pool.replicas] == ["replica 1"]
    assert drive(pool, ListSource(requests(5))), "the rest still works"
    pool.close()
    assert pool.stats().replicas_lost == 1, "an end in order is no loss"


class Wounded(ProcessPool):
    """A pool whose first replica is killed whenever it is seen, so that it is lost."""

    def generate(self, source, stop):
        killed = set()
        for batch in super().generate(source, stop):
            yield batch
            for replica in self.replicas:
                if replica.name == "replica 0" and replica.pid not in killed:
                    killed.add(replica.pid)
                    os.kill(replica.pid, signal.SIGKILL)


@pytest.mark.parametrize("window", [0, 64])
def test_a_lost_replica_shows_in_the_result_the_record_and_the_status(tmp_path, window):
    """Once only an error line told of the loss: worker record, status and result went on counting two replicas."""
    make_job(tmp_path / "job", rows=1000, per_chunk=50)
    job, run = str(tmp_path / "job"), str(tmp_path / "run")
    config = WorkerConfig(
        manifests=[f"{job}/manifests/all.txt"],
        output=run,
        engine=pool_config(echo_latency_seconds=0.05),
        prompt=PromptConfig(prompt_column="prompt"),
        sampling=Sampling(),
        worker_id="w0",
        limits=Limits(prefix_window=window),
    )
    environment = real_environment(grace_seconds=1.0, show_progress=lambda *_: None)
    result = run_worker(config, dataclasses.replace(environment, create_engine=Wounded))
    assert (result["response_count"], result["replicas"], result["replicas_lost"]) == (1000, 2, 1)
    assert json.loads((tmp_path / "run/workers/w0.json").read_text())["replicas_lost"] == 1
    config = StatusConfig(run=run)
    seen = run_status(config, open_store=open_store, clock=SystemClock())
    assert seen.warnings == ["worker w0: 1 of 2 replicas lost"]


class Doomed(ProcessPool):
    """A pool each of whose processes is killed as soon as it has rows."""

    def generate(self, source, stop):
        for batch in super().generate(source, stop):
            yield batch
            for replica in self.replicas:
                if replica.in_flight:
                    os.kill(replica.pid, signal.SIGKILL)


def test_a_worker_whose_engine_dies_every_time_ends_with_33_and_its_finished_rows(tmp_path):
    make_job(tmp_path / "job", rows=40, per_chunk=40)
    environment = real_environment(grace_seconds=1.0, show_progress=lambda *_: None)
    config = WorkerConfig(
        manifests=[f"{tmp_path}/job/manifests/all.txt"],
        output=str(tmp_path / "run"),
        engine=pool_config(replicas=1, echo_latency_seconds=0.2),
        prompt=PromptConfig(prompt_column="prompt"),
        sampling=Sampling(),
        worker_id="w0",
    )
    with pytest.raises(EngineDied) as caught:
        run_worker(config, dataclasses.replace(environment, create_engine=Doomed))
    assert caught.value.exit_status == 33
    notes = [
        json.loads(line)
        for path in (tmp_path / "run/checkpoints").rglob("*.jsonl")
        for line in path.read_text().splitlines()
        if "engine_deaths" in line
    ]
    assert {note["engine_deaths"] for note in notes} == {1}
    assert max(note["rows_in_flight"] for note in notes) <= 24


def test_the_last_replica_that_is_lost_is_an_error_that_names_the_rows(make_pool):
    pool = make_pool(replicas=1, echo_latency_seconds=5.0)
    source = RetryingSource(requests(10))

    def kill_once_busy() -> None:
        for batch in pool.generate(source, Flag()):
            source.note(batch)
            if pool.replicas and len(pool.replicas[0].in_flight) == 10 - len(source.answered):
                os.kill(pool.replicas[0].pid, signal.SIGKILL)

    with pytest.raises(EngineDied, match="replica 0: killed by SIGKILL") as caught:
        kill_once_busy()
    assert set(caught.value.in_flight) == {("c", index) for index in range(10)} - set(
        source.answered
    )
    with pytest.raises(EngineDied):
        drive(pool, ListSource(requests(1)))


def test_the_rows_of_each_death_come_back_together(make_pool):
    pool = make_pool(echo_kill_marker="row 7 ", echo_latency_seconds=0.2)
    source = RetryingSource(requests(60, text="row {index} "))
    with pytest.raises(EngineDied) as caught:
        answer_all(pool, source)
    assert all(("c", 7) in killed for killed in source.deaths)
    assert ("c", 7) in caught.value.in_flight


def test_a_frozen_replica_counts_as_stalled_and_leaves_no_process(make_pool):
    pool = make_pool(replicas=1, stall_seconds=1.5, echo_latency_seconds=0.1)
    frozen = []
    source = RetryingSource(requests(5000))

    def freeze_whenever_busy() -> None:
        for batch in pool.generate(source, Flag()):
            source.note(batch)
            for replica in pool.replicas:
                if replica.in_flight and replica.pid not in frozen:
                    frozen.append(replica.pid)
                    os.kill(replica.pid, signal.SIGSTOP)

    with pytest.raises(EngineStalled, match="replica 0: no step or no token") as caught:
        freeze_whenever_busy()
    assert caught.value.in_flight
    assert len(frozen) >= 4
    assert not [pid for pid in frozen if is_alive(pid)]


def test_a_request_that_hangs_is_a_stall_too(make_pool):
    pool = make_pool(replicas=1, stall_seconds=1.5, echo_hang_marker="row 3 ")
    source = RetryingSource(requests(20, text="row {index} "))
    with pytest.raises(EngineStalled) as caught:
        answer_all(pool, source)
    assert caught.value.in_flight == [("c", 3)]


def test_an_idle_engine_never_stalls(make_pool):
    pool = make_pool(replicas=1, stall_seconds=0.3)
    source = ListSource(requests(2))
    slept = False
    plain_take = source.take

    def take(count):
        nonlocal slept
        if source.given == 2 and not slept:
            slept = True
            time.sleep(0.6)
            return []
        return plain_take(count)

    source.take = take
    assert len(drive(pool, source)) == 2


def test_a_stall_after_a_wait_for_rows_is_seen_as_soon_as_any_other(make_pool, monkeypatch):
    """Once this wait was mistaken for a frozen machine, and the engine got the same time again."""
    monkeypatch.setattr("batchinfer.engines.pool.FROZEN_SECONDS", 3.0)
    monkeypatch.setattr("batchinfer.engines.restarts.MAX_RESTARTS", 0)
    pool = make_pool(replicas=1, stall_seconds=0.5)
    source = ListSource(requests(1))
    plain_take = source.take
    awake_at = time.monotonic() + 8.0

    def take(count):
        if time.monotonic() < awake_at:
            return []
        if not source.given:
            os.kill(pool.replicas[0].pid, signal.SIGSTOP)
        return plain_take(count)

    source.take = take
    with pytest.raises(EngineStalled):
        drive(pool, source)
    assert time.monotonic() < awake_at + 7.5


def test_text_that_cannot_be_encoded_fails_alone(make_pool):
    pool = make_pool()
    rows = requests(6)
    rows[2] = msgspec.structs.replace(rows[2], text="lone \ud800 surrogate")
    found = drive(pool, ListSource(rows))
    assert len(found) == 6
    assert found["c", 2].failure.code == "engine_rejected"
    assert sum(1 for completion in found.values() if completion.failure) == 1


def test_a_request_with_values_of_wrong_types_fails_alone(make_pool):
    pool = make_pool(replicas=1)
    rows = requests(6)
    rows[2] = Request(key=("c", 2), messages=[3], sampling=Sampling())
    rows[5] = Request(key=("c", 5), text="x", sampling=Sampling(extra={"big": 2**70}))
    found = drive(pool, ListSource(rows))
    failed = {key: each.failure.code for key, each in found.items() if each.failure}
    assert failed == {("c", 2): "engine_rejected", ("c", 5): "engine_rejected"}
    assert len(drive(pool, ListSource(rows[2:3]))) == 1, "and also when it comes alone"


def test_a_stop_while_it_loads_ends_every_process_at_once():
    pool = ProcessPool(pool_config(echo_load_seconds=60.0))
    stop = Flag()
    pids = []

    def set_once_started() -> None:
        while len(pool.replicas) < 2:
            time.sleep(0.01)
        pids.extend(replica.pid for replica in pool.replicas)
        stop.set()

    thread = threading.Thread(target=set_once_started)
    thread.start()
    with pytest.raises(Interrupted):
        pool.open(stop)
    thread.join()
    assert len(pids) == 2
    wait_until_gone(pids)
    pool.close()


@pytest.fixture
def held_open(monkeypatch):
    """Another process keeps every replica's end of its connection open, as a forked engine core might."""
    held = []
    plain = socket.socketpair

    def pair():
        ours, theirs = plain()
        held.append(theirs.dup())
        return ours, theirs

    monkeypatch.setattr("batchinfer.engines.replica.socket.socketpair", pair)
    yield
    for each in held:
        each.close()


def test_a_replica_that_died_is_seen_though_its_connection_is_held_open(held_open, make_pool):
    pool = make_pool(echo_latency_seconds=0.05)
    victim = pool.replicas[0].pid
    source = RetryingSource(requests(300))
    for batch in pool.generate(source, Flag()):
        source.note(batch)
        if victim and len(source.answered) > 20:
            os.kill(victim, signal.SIGKILL)
            victim = 0
    assert len(source.answered) == 300
    assert len(source.deaths) == 1


def test_a_replica_that_dies_loading_is_an_error_though_its_connection_is_held_open(held_open):
    pool = ProcessPool(pool_config(replicas=1, echo_load_seconds=60.0))

    def kill_once_started() -> None:
        while not pool.replicas:
            time.sleep(0.01)
        os.kill(pool.replicas[0].pid, signal.SIGKILL)

    thread = threading.Thread(target=kill_once_started)
    thread.start()
    with pytest.raises(EngineLoadError, match="replica 0: killed by SIGKILL"):
        pool.open(Flag())
    thread.join()


def test_an_engine_that_never_gets_ready_is_an_error():
    pool = ProcessPool(pool_config(echo_load_seconds=60.0, load_timeout_seconds=0.5))
    with pytest.raises(EngineLoadError, match=r"not loaded after 0\.5 s"):
        pool.open(Flag())
    assert pool.replicas == []


def test_closing_a_frozen_engine_ends_it(monkeypatch):
    monkeypatch.setattr("batchinfer.engines.pool.CLOSE_SECONDS", 0.3)
    pool = ProcessPool(pool_config(replicas=1))
    pool.open(Flag())
    pid = pool.replicas[0].pid
    os.kill(pid, signal.SIGSTOP)
    pool.close()
    wait_until_gone([pid])
    pool.close()


PARENT = """
import sys, time
from batchinfer.engines.config import EngineConfig
from batchinfer.engines.pool import ProcessPool
class Never:
    def is_set(self): return False
pool = ProcessPool(EngineConfig(engine="echo", replicas=2, max_num_seqs=4))
pool.open(Never())
print(*[replica.pid for replica in pool.replicas], flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_worker_that_is_killed_leaves_no_engine_process(number):
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE) as parent:
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 2
        parent.send_signal(number)
        parent.wait(10)
    wait_until_gone(pids)


def test_nothing_that_the_engine_prints_reaches_our_standard_output(capfd, make_pool):
    pool = make_pool()
    drive(pool, ListSource(requests(3)))
    pool.close()
    assert capfd.readouterr().out == ""


@pytest.mark.parametrize(
    ("held", "rooms", "count", "shares"),
    [
        ([0, 0], [9, 9], 5, [3, 2]),
        ([6, 0], [3, 9], 4, [0, 4]),
        ([6, 0], [3, 9], 10, [2, 8]),
        ([0, 0, 0], [1, 1, 1], 9, [1, 1, 1]),
        ([0, 0], [0, 5], 9, [0, 5]),
        ([], [], 3, []),
    ],
)
def test_requests_go_to_those_that_hold_least(held, rooms, count, shares):
    assert share_out(held, rooms, count) == shares


class SilentChannel:
    """A connection that records the frames which are sent."""

    has_unsent = False

    def __init__(self) -> None:
        self.sent = []

    def send(self, frame) -> None:
        self.sent.append(frame)


def test_an_idle_engine_process_does_not_send_the_same_counters_again(monkeypatch):
    monkeypatch.setattr(host, "STATS_SECONDS", 0.0)
    engine = EchoEngine()
    channel = SilentChannel()

    class Inbox(ListSource):
        round = 0

        def is_set(self) -> bool:
            return len(self.asked) > 20

        def take_rejected(self):
            return []

    host.answer(engine, channel, Inbox(requests(1), gaps=10))
    with_news = [frame for frame in channel.sent if frame.completions]
    assert len(with_news) == 1
    assert 1 <= len(channel.sent) - len(with_news) <= 2
