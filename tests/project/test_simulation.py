"""The simulation holds the worker to its promises, and is itself held to noticing when they are broken."""

from __future__ import annotations

import gc
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import batchinfer
import simulation.scenario
from batchinfer.core.errors import StorageError
from batchinfer.ledger.inventory import Inventory
from batchinfer.runs import clean
from batchinfer.storage.bucket import BucketStore
from batchinfer.worker import start as worker_start
from simulation.cleaning import is_cleaned
from simulation.defects import DEFECTS
from simulation.injections import KINDS
from simulation.scenario import Report, simulate
from simulation.scenes import SCENES
from simulation.scheduler import Killed, Overrun, Process, Scheduler
from simulation.storage import Network, Server, SimClient, SimStore, Weather

TESTS = Path(__file__).resolve().parents[1]


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Logs are for replays. Garbage is collected between seeds, not at every few allocations."""
    logging.disable(logging.CRITICAL)
    gc.disable()
    yield
    gc.enable()
    logging.disable(logging.NOTSET)


def first_violation(
    seeds: range, *, watches_claims: bool = True, injected: list[str] | None = None
) -> Report | None:
    for seed in seeds:
        report = simulate(seed, watches_claims=watches_claims, injected=injected)
        if report.violation:
            return report
        if seed % 50 == 49:
            gc.collect()
    return None


class TestPromises:
    def test_some_seeds_break_no_promise(self) -> None:
        """A few; CI runs some thousand (.ci/run), `make simulate` as many as one likes."""
        report = first_violation(range(40))
        assert report is None, f"python -m simulation --seed {report.seed}: {report.violation}"

    @pytest.mark.slow
    def test_some_thousand_seeds_break_no_promise(self) -> None:
        report = first_violation(range(40, 4000))
        assert report is None, f"python -m simulation --seed {report.seed}: {report.violation}"

    def test_claims_only_save_work(self) -> None:
        """Were every claim to lapse at once, the markers would still keep every promise about the data."""
        with DEFECTS["claims_lapse_at_once"]():
            assert first_violation(range(40), watches_claims=False) is None


class TestNotices:
    # Where rare ones are looked for, so that the tests are quick. What a seed meets changes with the code: where the
    # search takes seconds again, another first seed is needed.
    FIRST_SEED = {
        "adopted_orphan": 26,
        "clean_goes_by_its_own_clock": 358,
        "clean_takes_every_orphan": 26,
        "lease_renewed_as_of_the_end": 46,
        "no_checkpoint_on_time": 58,
        "no_fence_of_starts": 70,
        "other_configuration_let_in": 39,
        "row_condemned_in_company": 74,
    }
    INJECTED = {
        "heart_beats_by_itself": ["hangs"],
        "replaced_run_is_not_noticed": ["runs"],
    }
    SEEDLESS = {*SCENES}
    """Defects that seeds meet too seldom: scenes show them, and one a test of the stream of rows (test_stream.py)."""

    def test_there_are_at_least_ten_defects(self) -> None:
        assert len(DEFECTS) >= 10

    @pytest.mark.parametrize("name", sorted(DEFECTS.keys() - SEEDLESS))
    def test_a_deliberate_defect_is_caught_within_a_thousand_seeds(self, name: str) -> None:
        first = self.FIRST_SEED.get(name, 0)
        with DEFECTS[name]():
            report = first_violation(range(first, first + 1000), injected=self.INJECTED.get(name))
        assert report is not None
        # That a defect crashes says nothing of the promise that it breaks.
        assert not report.violation.startswith("crash:"), report.violation

    @pytest.mark.parametrize("name", SCENES)
    def test_a_scene_shows_a_defect_that_seeds_seldom_meet(self, name: str) -> None:
        SCENES[name]()
        with DEFECTS[name](), pytest.raises(AssertionError):
            SCENES[name]()


class TestReplay:
    def test_a_seed_gives_the_same_events_twice(self) -> None:
        for seed in range(5):
            first, second = (simulate(seed, keeps_trace=True) for _ in range(2))
            assert len(first.trace) > 20
            assert first.trace == second.trace

    def test_a_seed_with_a_full_disk_gives_the_same_events_twice(self) -> None:
        """Its messages name a scratch folder, and such a folder has a random name."""
        first, second = (
            [simulate(seed, keeps_trace=True, injected=["disks"]).trace for seed in range(9)]
            for _ in range(2)
        )
        assert any("ScratchFull" in line for trace in first for line in trace)
        assert first == second

    def test_seeds_differ(self) -> None:
        assert len({simulate(seed, keeps_trace=True).digest for seed in range(5)}) == 5

    def test_another_process_replays_a_failing_seed(self) -> None:
        """With texts hashed in another order, and without what ran before it here."""
        with DEFECTS["no_fence"]():
            found = first_violation(range(1000))
            assert found is not None
            here = simulate(found.seed, keeps_trace=True)
        code = (
            "from simulation.defects import DEFECTS\n"
            "from simulation.scenario import simulate\n"
            "with DEFECTS['no_fence']():\n"
            f"    report = simulate({found.seed}, keeps_trace=True)\n"
            "print(report.digest)\nprint(report.violation)\n"
        )
        environment = {**os.environ, "PYTHONPATH": str(TESTS), "PYTHONHASHSEED": "77"}
        there = subprocess.run(
            [sys.executable, "-c", code],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        assert there.stdout.splitlines() == [here.digest, here.violation]

    def test_the_command_prints_what_happened(self) -> None:
        environment = {**os.environ, "PYTHONPATH": str(TESTS)}
        done = subprocess.run(
            [sys.executable, "-m", "simulation", "--seed", "3", "-v"],
            env=environment, capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert "put_object run/outputs/" in done.stdout
        assert "seed 3: sound" in done.stdout

    def test_the_command_counts_seeds(self) -> None:
        environment = {**os.environ, "PYTHONPATH": str(TESTS)}
        done = subprocess.run(
            [sys.executable, "-m", "simulation", "--seeds", "6", "--start", "2", "--jobs", "2"],
            env=environment, capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert done.stdout.startswith("6 seeds in ")

    def test_the_command_fails_when_a_promise_is_broken(self) -> None:
        """Else `make simulate`, and CI by it, would pass over what it found."""
        code = (
            "import sys\n"
            "from simulation.__main__ import main\n"
            "from simulation.defects import DEFECTS\n"
            "with DEFECTS['no_fence']():\n"
            "    sys.exit(main())\n"
        )
        environment = {**os.environ, "PYTHONPATH": str(TESTS)}
        done = subprocess.run(
            [sys.executable, "-c", code, "--seeds", "20", "--jobs", "2"],
            env=environment, capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 1, done.stderr
        assert "replay with: python -m simulation --seed" in done.stdout


class TestCleaning:
    def test_a_share_of_the_seeds_is_cleaned(self) -> None:
        assert 150 < sum(is_cleaned(seed) for seed in range(800)) < 250

    def test_it_removes_and_it_spares(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Things of both sides of the age come before it, while workers are alive."""
        real, removed, kept = clean.find_removals, set[str](), 0

        def find_removals(inventory: Inventory, config: clean.CleanConfig) -> list[clean.Removal]:
            nonlocal kept
            plan = list(real(inventory, config))
            if config.older_than_seconds and inventory.living():
                old = [each for each in plan if clean.is_old(inventory, each)]
                removed.update(each.what for each in old)
                kept += len(plan) - len(old)
            return plan

        monkeypatch.setattr(clean, "find_removals", find_removals)
        wanted = {"orphan outputs", "segments of done chunks", "claims of done chunks"}
        for seed in range(200):
            assert not simulate(seed, is_cleaned=True).violation
            if seed >= 20 and removed >= wanted and kept:
                return
        raise AssertionError(f"only {sorted(removed)} were removed, and {kept} kept for their age")

    def test_it_leaves_the_other_seeds_as_they_are(self) -> None:
        seeds = [seed for seed in range(20) if not is_cleaned(seed)][:4]
        lengths = [self._compare_with_cleaned(seed) for seed in seeds]
        assert max(lengths) > 100

    def _compare_with_cleaned(self, seed: int) -> int:
        """Compare a seed with and without cleaning, and return for how many lines of the trace the two are the same."""
        plain, other = (simulate(seed, keeps_trace=True, is_cleaned=it) for it in (None, False))
        assert plain.trace == other.trace
        cleaned = simulate(seed, keeps_trace=True, is_cleaned=True)
        assert cleaned.cleanings
        # Looking does nothing to the workers: their ways part where one is interrupted, a second day comes, or clean
        # changes something of theirs, such as the claim of a worker that is gone.
        same = []
        for line in cleaned.trace:
            has_changed = "clean#" in line and ("put_object" in line or "delete" in line)
            if "before its marker" in line or "==" in line:
                break
            if has_changed and "/probes/" not in line:
                break
            if "clean#" not in line:
                same.append(line)
        assert same == plain.trace[: len(same)]
        return len(same)


class TestInjections:
    @pytest.mark.parametrize("name", KINDS)
    def test_every_kind_strikes(self, name: str) -> None:
        assert sum(simulate(seed, injected=[name]).strikes for seed in range(5))

    def test_a_seed_without_any_goes_as_if_there_were_none(self) -> None:
        seed = next(s for s in range(100) if not any(kind.is_drawn(s) for kind in KINDS.values()))
        plain, other = (simulate(seed, keeps_trace=True, injected=it) for it in (None, []))
        assert plain.trace == other.trace

    @pytest.mark.parametrize("name", KINDS)
    def test_nothing_changes_before_the_first_strike(self, name: str) -> None:
        seed = next(seed for seed in range(20) if simulate(seed, injected=[name]).strikes)
        plain = simulate(seed, keeps_trace=True, injected=[])
        struck = simulate(seed, keeps_trace=True, injected=[name])
        [first, *_] = [at for at, line in enumerate(struck.trace) if "  outside " in line]
        assert first > 20
        assert struck.trace[:first] == plain.trace[:first]


class TestRunsTheRealWorker:
    """No copy, no shortcut: what is simulated is the world, never the worker."""

    WORKER = (
        "worker/start",
        "worker/joining",
        "worker/heartbeat",
        "worker/stream",
        "worker/open_chunks",
        "worker/chunk_life",
        "worker/chunk",
        "worker/chunk_opening",
        "ledger/chunk_files",
        "worker/ring",
        "ledger/claims",
        "ledger/publishing",
        "ledger/checkpoints",
        "ledger/jobs",
        "ledger/runs",
        "storage/scratch",
        "worker/background",
        "worker/telemetry",
        "core/codec",
        "core/layout",
        "storage/bucket",
        "storage/opening",
        "prompts/builder",
        "formats/lines",
    )

    def test_code_of_every_part_of_the_worker_runs(self) -> None:
        folder = Path(batchinfer.__file__).parent
        ran: set[str] = set()

        def note(frame: object, event: str, _argument: object) -> None:
            if event == "call":
                ran.add(frame.f_code.co_filename)  # type: ignore[attr-defined]

        sys.setprofile(note)
        try:
            # Greenlets keep the profile function of the one that switches to them.
            for seed in range(12):
                simulate(seed)
        finally:
            sys.setprofile(None)
        missing = [name for name in self.WORKER if str(folder / f"{name}.py") not in ran]
        assert not missing

    def test_workers_are_started_by_run_worker(self, monkeypatch: pytest.MonkeyPatch) -> None:
        real, configs = worker_start.run_worker, []

        def count(
            config: worker_start.WorkerConfig, environment: worker_start.Environment
        ) -> object:
            configs.append(config)
            return real(config, environment)

        monkeypatch.setattr(worker_start, "run_worker", count)
        report = simulate(0)
        assert simulation.scenario.worker_start is worker_start
        assert len(configs) >= report.starts - report.kills
        assert configs

    def test_the_store_is_the_adapter_of_buckets_but_for_obstores_functions(self) -> None:
        changed = {name for name in vars(SimStore) if callable(getattr(SimStore, name))}
        only_tells = {"get", "create", "put_file", "replace"}
        assert changed == {"__init__", "_retry", *only_tells}
        assert issubclass(SimStore, BucketStore)
        assert set(vars(SimClient)) >= {"get", "head", "list", "put", "delete"}


class TestScheduler:
    def test_a_killed_process_does_nothing_more(self) -> None:
        scheduler = Scheduler(0)
        process = Process(scheduler, "p")
        done = []

        def work() -> None:
            try:
                process.sleep(1)
            finally:
                with pytest.raises(Killed):
                    process.sleep(1)
                done.append("left")

        process.spawn(work)
        scheduler.run(0.5)
        process.kill()
        assert done == ["left"]
        with pytest.raises(Killed):
            process.spawn(work)

    def test_a_frozen_process_goes_on_when_it_is_thawed(self) -> None:
        scheduler = Scheduler(0)
        process = Process(scheduler, "p")
        woke = []

        def work() -> None:
            process.sleep(1)
            woke.append(scheduler.now)

        process.spawn(work)
        scheduler.run(0.5)
        process.freeze(10, stops_clock=True)
        scheduler.run(100)
        assert 10.5 <= woke[0] < 10.6
        assert process.frozen_seconds == 10

    def test_a_livelock_ends(self) -> None:
        scheduler = Scheduler(0, max_events=1000)
        process = Process(scheduler, "p")

        def work() -> None:
            while True:
                process.sleep(0)

        process.spawn(work)
        with pytest.raises(Overrun):
            scheduler.run(1)
        process.kill()


class TestNetwork:
    """What the store is made to do is what real ones do."""

    def write(self, weather: Weather, *, attempts: int = 1) -> tuple[str, Server]:
        scheduler = Scheduler(0)
        server = Server(page_keys=1000, has_content_etags=True)
        network = Network(scheduler, server)
        network.weather, network.attempts = weather, attempts
        process = Process(scheduler, "p")
        outcomes: list[str] = []

        def work() -> None:
            try:
                SimStore("s3://sim/run", network, process).create("key", b"mine")
                outcomes.append("created")
            except StorageError as error:
                outcomes.append(type(error).__name__)

        process.spawn(work)
        scheduler.run(1.0)
        self.at_return = bool(server.objects)
        scheduler.run(float("inf"))
        return outcomes[0] if outcomes else "killed", server

    def test_calm(self) -> None:
        assert self.write(Weather())[0] == "created"

    def test_refused(self) -> None:
        outcome, server = self.write(Weather(refused=1.0))
        assert (outcome, server.objects) == ("StorageError", {})

    def test_a_lost_reply_is_an_error_of_a_write_that_took_effect(self) -> None:
        outcome, server = self.write(Weather(lost=1.0))
        assert outcome == "StorageError"
        assert "run/key" in server.objects

    def test_a_lost_reply_is_settled_by_the_adapter(self) -> None:
        lucky = [self.write(Weather(lost=0.5), attempts=4)[0] for _ in range(1)]
        assert lucky == ["created"]

    def test_a_late_write_takes_effect_after_its_error(self) -> None:
        outcome, server = self.write(Weather(late=1.0, late_seconds=100.0))
        assert outcome == "StorageError"
        assert not self.at_return
        assert "run/key" in server.objects

    def test_a_sender_that_dies_before_or_after(self) -> None:
        assert self.write(Weather(dies_before=1.0))[1].objects == {}
        outcome, server = self.write(Weather(dies_after=1.0))
        assert outcome == "killed"
        assert "run/key" in server.objects

    def test_a_slow_request_is_trouble_until_its_reply_has_come(self) -> None:
        scheduler = Scheduler(0)
        network = Network(scheduler, Server(page_keys=1000, has_content_etags=True))
        network.weather = Weather(slow=1.0, slow_seconds=10.0)
        process = Process(scheduler, "p")
        returned: list[float] = []

        def work() -> None:
            SimStore("s3://sim/run", network, process).create("key", b"mine")
            returned.append(scheduler.now)

        process.spawn(work)
        scheduler.run(100)
        assert returned[0] > 0.1
        assert process.troubled_at == pytest.approx(returned[0])
