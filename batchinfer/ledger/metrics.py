"""The figures of workers and runs as metrics for Prometheus. A worker serves its own, and `status` prints those of all.

Both make them from the same record, so the names and what they count are the same. docs/monitoring.md lists them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from batchinfer.core.printable import error_code, one_line
from batchinfer.core.records import Worker

if TYPE_CHECKING:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily


class Metric(NamedTuple):
    """One metric: its name, and what it counts.

    `read` returns its value by a worker's record, or its values by the value of `label`; None if it is not known. A
    metric whose name ends with _total only grows, over all starts of the worker.
    """

    name: str
    help: str
    read: Callable[[Worker], float | dict[str, int] | None]
    label: str = ""

    @property
    def is_counter(self) -> bool:
        """Whether it only grows."""
        return self.name.endswith("_total")


def _checkpoint_age(worker: Worker) -> float | None:
    if not worker.checkpointed:
        return None
    return max(0.0, worker.heartbeat - worker.checkpointed)


_TABLE: list[tuple[str, str, Callable[[Worker], float | dict[str, int] | None]]] = [
    ("rows_total", "Rows finished, failed ones included.", lambda w: w.rows_done),
    (
        "rows_failed_total",
        "Rows that became error lines, by code.",
        lambda w: w.with_codes(error_code).errors,
    ),
    (
        "rows_resumed_total",
        "Rows taken over from checkpoints instead of being generated again.",
        lambda w: w.rows_resumed,
    ),
    ("prompt_tokens_total", "Tokens of prompts.", lambda w: w.prompt_tokens),
    (
        "cached_prompt_tokens_total",
        "Tokens of prompts that came from the prefix cache.",
        lambda w: w.cached_tokens,
    ),
    ("completion_tokens_total", "Tokens of answers.", lambda w: w.completion_tokens),
    (
        "reasoning_tokens_total",
        "Those tokens of answers that are reasoning.",
        lambda w: w.reasoning_tokens,
    ),
    ("rows_in_engine", "Rows in the engine.", lambda w: w.rows_in_engine),
    ("chunks_done_total", "Chunks published.", lambda w: w.chunks_done),
    ("chunks_open", "Chunks under way.", lambda w: len(w.open_chunks)),
    (
        "checkpoint_age_seconds",
        "Seconds from when all finished rows were safe on storage to the last heartbeat.",
        _checkpoint_age,
    ),
    (
        "engine_restarts_total",
        "Engine processes (replicas) that were started again within the worker.",
        lambda w: w.engine_restarts,
    ),
    (
        "replicas_lost",
        "Replicas that have failed for good since the worker's last start.",
        lambda w: w.replicas_lost,
    ),
    (
        "model_load_seconds",
        "Seconds that the last load of the engine took.",
        lambda w: w.engine_load_seconds,
    ),
    ("starts_total", "Starts of the worker.", lambda w: len(w.starts)),
    (
        "up_seconds_total",
        "Seconds that the worker's processes have run.",
        lambda w: w.up_seconds,
    ),
    (
        "cost_dollars_total",
        "Dollars for the worker's machine. Missing where no price is known.",
        lambda w: w.money.cost if w.money else None,
    ),
    (
        "price_dollars_per_hour",
        "Dollars an hour for the worker's machine. Missing where no price is known.",
        lambda w: w.money.price_per_hour if w.money else None,
    ),
    (
        "max_cost_dollars",
        "The limit --max-cost of the worker. Missing without one.",
        lambda w: w.money.max_cost if w.money else None,
    ),
    ("worker_state", "1 for the state that the worker is in.", lambda w: {w.state: 1}),
]
_LABELS = {"rows_failed_total": "code", "worker_state": "state"}
METRICS = [
    Metric(f"batchinfer_{name}", text, read, _LABELS.get(name, "")) for name, text, read in _TABLE
]
"""Metrics with the labels run and worker, and one more where `label` names it."""

RUN_METRICS = {
    "batchinfer_run_rows": "Rows of the run.",
    "batchinfer_run_rows_done": "Rows of finished chunks, and finished rows of open ones.",
    "batchinfer_run_chunks": "Chunks of the run.",
    "batchinfer_run_chunks_done": "Chunks with a marker.",
}
"""Metrics of `status --prometheus` alone, with the label run."""


def families_of(
    run: str, workers: Iterable[Worker]
) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
    """Yield all metrics of workers, as prometheus_client takes them. `run` is the run's URL."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    taken = list(workers)
    for metric in METRICS:
        labels = ["run", "worker", *([metric.label] if metric.label else [])]
        kind = CounterMetricFamily if metric.is_counter else GaugeMetricFamily
        family = kind(metric.name, metric.help, labels=labels)
        for worker in taken:
            found = metric.read(worker)
            values = found if isinstance(found, dict) else {} if found is None else {"": found}
            for value, number in values.items():
                more = [value] if metric.label else []
                family.add_metric([one_line(run), one_line(worker.id), *more], number)
        yield family


def run_families(run: str, figures: dict[str, int]) -> Iterator[GaugeMetricFamily]:
    """Yield the metrics of a run. `figures` are their values by name."""
    from prometheus_client.core import GaugeMetricFamily

    for name, text in RUN_METRICS.items():
        family = GaugeMetricFamily(name, text, labels=["run"])
        family.add_metric([one_line(run)], figures[name])
        yield family
