"""Run many seeds, or one of them again with all that happened. Exit status 1 if a promise was broken."""

from __future__ import annotations

import argparse
import gc
import logging
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from functools import partial

from .injections import KINDS
from .scenario import Report, Scenario, simulate

_HASH_SEED = "PYTHONHASHSEED"
_SEEDS_A_TASK = 20
_TASKS_A_PROCESS = 5
"""Processes are replaced after so many tasks: that frees their memory faster than a collection of garbage would."""


@contextmanager
def logs_in_trace(scenario: Scenario) -> Iterator[None]:
    """Let the worker's own log lines appear among the events."""

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            scheduler = scenario.scheduler
            scheduler.log(
                scheduler.running, f"    {record.name.split('.')[-1]}: {record.getMessage()}"
            )

    handler = Handler()
    logger = logging.getLogger("batchinfer")
    logger.addHandler(handler)
    before = logger.level
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


def replay(
    seed: int, is_cleaned: bool | None = None, injected: Collection[str] | None = None
) -> Report:
    """Run one seed and keep its trace, with the worker's log."""
    scenario = Scenario(seed, keeps_trace=True, is_cleaned=is_cleaned, injected=injected)
    with logs_in_trace(scenario):
        return scenario.run()


def reports(
    seeds: Iterable[int], jobs: int, is_cleaned: bool | None, injected: Collection[str] | None
) -> Iterator[Report]:
    """Run seeds in `jobs` processes; reports come in the order in which they are done."""
    one = partial(simulate, is_cleaned=is_cleaned, injected=injected)
    pool = multiprocessing.get_context("fork").Pool(
        jobs, initializer=_prepare, maxtasksperchild=_TASKS_A_PROCESS
    )
    with pool:
        yield from pool.imap_unordered(one, seeds, chunksize=_SEEDS_A_TASK)


def _prepare() -> None:
    logging.disable(logging.CRITICAL)
    gc.disable()


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(prog="python -m simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000, metavar="N", help="how many")
    parser.add_argument("--start", type=int, default=0, metavar="S", help="the first one")
    parser.add_argument("--seed", type=int, metavar="X", help="only this one, with its trace")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), metavar="J", help="processes")
    parser.add_argument(
        "-v", "--verbose", action="store_true", help="print traces of failing seeds"
    )
    parser.add_argument(
        "--clean",
        action=argparse.BooleanOptionalAction,
        help="run `batchinfer clean` beside the workers in every seed, or in none (default: in a share)",
    )
    parser.add_argument(
        "--inject",
        action="append",
        choices=KINDS,
        help="inject this kind in every seed, and only the kinds that are named (default: each in a share)",
    )
    parser.add_argument("--no-inject", action="store_true", help="inject nothing")
    options = parser.parse_args()
    injected = [] if options.no_inject else options.inject
    if options.seed is not None:
        report = replay(options.seed, options.clean, injected)
        print("\n".join(report.trace))
        print(f"seed {report.seed}: {report.violation or 'sound'} (events {report.digest})")
        return int(bool(report.violation))
    began = time.monotonic()
    failing: list[Report] = []
    total: Counter[str] = Counter()
    seeds = range(options.start, options.start + options.seeds)
    for report in reports(seeds, options.jobs, options.clean, injected):
        total.update(
            seeds=1, starts=report.starts, kills=report.kills, freezes=report.freezes,
            cleanings=report.cleanings, strikes=report.strikes, virtual_hours=report.virtual_seconds / 3600,
        )  # fmt: skip
        if total["seeds"] % 2000 == 0:
            print(f"{total['seeds']} seeds", file=sys.stderr, flush=True)
        if report.violation:
            failing.append(report)
            print(f"seed {report.seed}: {report.violation}", flush=True)
            if options.verbose:
                print("\n".join(replay(report.seed, options.clean, injected).trace))
    seconds = time.monotonic() - began
    print(
        f"{total['seeds']} seeds in {seconds:.0f} s ({total['seeds'] / seconds:.1f} a second): "
        f"{total['starts']} starts of workers, {total['kills']} kills, {total['freezes']} freezes, "
        f"{total['cleanings']} cleanings, {total['strikes']} injections, {total['virtual_hours']:.1f} virtual hours; "
        f"{len(failing)} seeds broke a promise"
    )
    if failing:
        flag = {None: "", True: " --clean", False: " --no-clean"}[options.clean]
        flag += " --no-inject" if options.no_inject else ""
        flag += "".join(f" --inject {name}" for name in options.inject or ())
        print(f"replay with: python -m simulation --seed {failing[0].seed}{flag}")
    return int(bool(failing))


if __name__ == "__main__":
    if os.environ.get(_HASH_SEED) != "0":
        # The order of sets of texts must not differ between a run and its replay.
        os.environ[_HASH_SEED] = "0"
        os.execv(sys.executable, [sys.executable, "-m", "simulation", *sys.argv[1:]])
    sys.exit(main())
