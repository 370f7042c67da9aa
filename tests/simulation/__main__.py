"""Run many seeds, or one of them again with all that happened. Exit status 1 if a promise was broken."""

import argparse
import gc
import logging
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Collection
from functools import partial

from .injections import KINDS
from .scenario import Report, Scenario, simulate

_SEEDS_A_TASK = 20
_TASKS_A_PROCESS = 5
"""Processes are replaced after so many tasks: that frees their memory faster than a collection of garbage would."""


def replay(seed: int, injected: Collection[str] | None = None) -> Report:
    """Run one seed and keep its trace, with the worker's own log lines among the events."""
    scenario = Scenario(seed, keeps_trace=True, injected=injected)
    scheduler = scenario.scheduler

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            name = record.name.split(".")[-1]
            scheduler.log(scheduler.running, f"    {name}: {record.getMessage()}")

    logger = logging.getLogger("batchinfer")
    logger.addHandler(Handler())
    logger.setLevel(logging.INFO)
    return scenario.run()


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
        "--inject",
        action="append",
        choices=KINDS,
        help="inject this kind in every seed, and only the kinds that are named (default: each in a share)",
    )
    options = parser.parse_args()
    if options.seed is not None:
        report = replay(options.seed, options.inject)
        print("\n".join(report.trace))
        print(f"seed {report.seed}: {report.violation or 'sound'}")
        return int(bool(report.violation))
    began = time.monotonic()
    failing: list[Report] = []
    total: Counter[str] = Counter()
    seeds = range(options.start, options.start + options.seeds)
    pool = multiprocessing.get_context("fork").Pool(
        options.jobs, initializer=_prepare, maxtasksperchild=_TASKS_A_PROCESS
    )
    with pool:
        one = partial(simulate, injected=options.inject)
        for report in pool.imap_unordered(one, seeds, chunksize=_SEEDS_A_TASK):
            total += Counter(seeds=1) + report.counts
            if total["seeds"] % 2000 == 0:
                print(f"{total['seeds']} seeds", file=sys.stderr, flush=True)
            if report.violation:
                failing.append(report)
                print(f"seed {report.seed}: {report.violation}", flush=True)
    seconds = time.monotonic() - began
    print(
        f"{total.pop('seeds')} seeds in {seconds:.0f} s ({len(seeds) / seconds:.1f} a second): "
        + ", ".join(f"{count:.0f} {name}" for name, count in total.items())
        + f"; {len(failing)} seeds broke a promise"
    )
    if failing:
        flags = "".join(f" --inject {name}" for name in options.inject or ())
        print(f'replay with: make simulate ARGS="--seed {failing[0].seed}{flags}"')
    return int(bool(failing))


if __name__ == "__main__":
    if os.environ.get("PYTHONHASHSEED") != "0":
        # The order of sets of texts must not differ between a run and its replay.
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, [sys.executable, "-m", "simulation", *sys.argv[1:]])
    sys.exit(main())
