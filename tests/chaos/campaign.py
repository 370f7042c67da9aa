"""Workers over S3 on loopback, SIGKILL and SIGSTOP at random and while they publish, until enough was done.

    python -m chaos.campaign --kills 300 --freezes 50      (in tests/, or `make chaos KILLS=300 FREEZES=50`)

Every worker is restarted when it ends; some reach the store through a proxy that loses replies. At the end the workers
are left alone to finish, and the run must be complete and sound to the last byte. Bounded: a campaign ends after
`--seconds` at the latest; only processes that it started are ever signalled, by pid.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from fixtures_s3 import s3_client, serving_s3
from lossy_proxy import Proxy
from making import default_row, make_job, output_lines, run_process, said, worker_arguments

PUBLISHING = ("publish_output", "publish_marker", "publish_tidy")
LEASE_SECONDS = 3.0


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The settings of one campaign. `options` are further arguments of every worker."""

    kills: int
    freezes: int
    seconds: float
    seed: int = 0
    workers: int = 3
    rows: int = 4000
    per_chunk: int = 10
    loss_rate: float = 0.02
    options: tuple[str, ...] = (
        "--echo-latency-seconds", "0.2",
        "--max-num-seqs", "8",
        "--lease-seconds", str(LEASE_SECONDS),
        "--checkpoint-seconds", "0.2",
        "--grace-seconds", "1",
        "--max-attempts", "1000000",
    )  # fmt: skip


@dataclass
class Tally:
    """Counts of what happened in a campaign."""

    kills: Counter[str] = field(default_factory=Counter)
    """By the moment: an event while a chunk was published, or anywhere."""
    freezes: int = 0
    starts: int = 0
    statuses: Counter[int] = field(default_factory=Counter)
    """Exit statuses of those that ended by themselves."""
    lost_replies: int = 0
    tracebacks: list[str] = field(default_factory=list)
    runs: int = 0
    """Runs that were verified."""

    def line(self) -> str:
        """Return the counts as one JSON object."""
        return json.dumps(vars(self) | {"tracebacks": len(self.tracebacks)})


class RunningWorker:
    """One worker process and the thread that reads its log."""

    def __init__(self, arguments: list[str], endpoint: str) -> None:
        log = ["--log-format", "json", "--log-level", "debug"]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "batchinfer", *arguments, *log],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "AWS_ENDPOINT_URL": endpoint},
        )
        self.started = time.monotonic()
        self.is_frozen = False
        self.last_lines: list[str] = []
        self.doomed_event = ""
        """The log event at which this worker is killed, at once, by the thread that reads the log."""
        self.killed_at = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.last_lines = [*self.last_lines[-30:], line]
            if self.doomed_event and f'"event": "{self.doomed_event}"' in line:
                self.kill(self.doomed_event)

    def kill(self, moment: str = "anywhere") -> None:
        """SIGKILL."""
        if not self.killed_at:
            self.killed_at = moment
            self.process.kill()

    def freeze(self, seconds: float) -> None:
        """SIGSTOP, and some time later SIGCONT."""
        self.is_frozen = True
        self.process.send_signal(signal.SIGSTOP)
        thawing = threading.Timer(seconds, self.thaw)
        thawing.daemon = True
        thawing.start()

    def thaw(self) -> None:
        """SIGCONT."""
        self.is_frozen = False
        self.process.send_signal(signal.SIGCONT)

    def wait(self, timeout_seconds: float) -> int:
        """Wait for its end, and for the end of its log. Return its exit status."""
        status = self.process.wait(timeout_seconds)
        self._reader.join(10)
        assert self.process.stderr is not None
        self.process.stderr.close()
        return status


class Campaign:
    """Workers over `bucket` (an s3:// URL); `endpoint` is the server's."""

    def __init__(self, plan: Plan, bucket: str, endpoint: str) -> None:
        self.plan = plan
        self.tally = Tally()
        self._bucket = bucket
        self._endpoint = endpoint
        self._random = random.Random(plan.seed)
        self._deadline = time.monotonic() + plan.seconds
        self._proxy = Proxy(endpoint)
        self._proxy.loss_rate = plan.loss_rate
        self._workers: dict[int, RunningWorker] = {}
        """Those that nobody has seen end, by number."""

    def run(self) -> Tally:
        """Runs over fresh jobs until enough was killed and frozen, each finished in peace and verified."""
        try:
            while not self._is_enough():
                assert time.monotonic() < self._deadline, f"out of time after {self.tally}"
                plan, job = self.plan, f"{self._bucket}/job-{self.tally.runs}"
                make_job(job, rows=plan.rows, per_chunk=plan.per_chunk, workers=plan.workers)
                self._disturb(job)
                self._finish(job)
                self.tally.runs += 1
        finally:
            for worker in self._workers.values():
                worker.process.kill()
                worker.wait(60)
            self.tally.lost_replies = self._proxy.num_lost
            self._proxy.close()
        return self.tally

    def _is_enough(self) -> bool:
        # How many of the kills meet a worker that publishes depends on how fast the machine is.
        tally, plan = self.tally, self.plan
        num_publishing = sum(tally.kills[event] for event in PUBLISHING)
        has_killed = tally.kills.total() >= plan.kills and num_publishing >= plan.kills // 4
        return has_killed and tally.freezes >= plan.freezes

    def _start(self, job: str, index: int, *, is_doomed: bool) -> None:
        options = ("--worker-id", f"w{index}", *self.plan.options)
        # One of the workers always talks through the proxy that loses replies.
        endpoint = self._proxy.url if index == 0 else self._endpoint
        arguments = worker_arguments(job, f"{job}/run", *options, index=index)
        worker = self._workers[index] = RunningWorker(arguments, endpoint)
        if is_doomed and self._random.random() < 0.5:
            worker.doomed_event = self._random.choice(PUBLISHING)
        self.tally.starts += 1

    def _disturb(self, job: str) -> None:
        """Kill, freeze and restart until the job is done or enough was done."""
        for index in range(self.plan.workers):
            self._start(job, index, is_doomed=True)
        while self._workers and not self._is_enough():
            assert time.monotonic() < self._deadline, f"out of time after {self.tally}"
            time.sleep(0.02)
            for index, worker in list(self._workers.items()):
                if worker.process.poll() is None:
                    self._step(worker)
                elif not self._is_done(index):
                    self._start(job, index, is_doomed=True)

    def _step(self, worker: RunningWorker) -> None:
        # Several seconds of life on the average, so that work gets done in between.
        is_young = time.monotonic() - worker.started <= 1.0
        if not (worker.is_frozen or is_young) and self._random.random() < 0.01:
            if self.tally.freezes < self.plan.freezes and self._random.random() < 0.4:
                worker.freeze(self._random.uniform(0.5, 2.5) * LEASE_SECONDS)
                self.tally.freezes += 1
            elif not worker.doomed_event:
                worker.kill()

    def _is_done(self, index: int) -> bool:
        """Wait for the end of a worker, note how it came, and return whether it is done."""
        status = self._workers[index].wait(120)
        worker = self._workers.pop(index)
        if worker.killed_at:
            self.tally.kills[worker.killed_at] += 1
        else:
            self.tally.statuses[status] += 1
        if any("Traceback" in line for line in worker.last_lines):
            self.tally.tracebacks.append("".join(worker.last_lines))
        return status == 0

    def _finish(self, job: str) -> None:
        """Leave the workers alone until they are done, then prove the run."""
        for worker in self._workers.values():
            worker.doomed_event = ""
            worker.thaw()
        for index in list(self._workers):
            while not self._is_done(index):
                self._start(job, index, is_doomed=False)
        verified = run_process(["verify", f"{job}/run", "--job", job, "--deep"])
        assert verified.status == 0, verified
        check_answers(f"{job}/run", self.plan.rows)


def check_answers(run: str, rows: int) -> None:
    """The echo engine answers with the prompt: so every row must hold its own."""
    found = output_lines(run)
    assert [line["_row"] for line in found] == list(range(rows))
    assert all(said(line) == default_row(line["_row"])["prompt"] for line in found)


def main() -> None:
    """Run one campaign and print what was done as one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--freezes", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, serving_s3(Path(folder) / "log") as endpoint:
        os.environ |= {
            "AWS_ACCESS_KEY_ID": "testing",
            "AWS_SECRET_ACCESS_KEY": "testing",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": endpoint,
        }
        s3_client(endpoint).create_bucket(Bucket="chaos")
        tally = Campaign(Plan(**vars(arguments)), "s3://chaos", endpoint).run()
    print(tally.line())
    for traceback in tally.tracebacks[:3]:
        print(traceback, file=sys.stderr)
    sys.exit(bool(tally.tracebacks))


if __name__ == "__main__":
    main()
