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


class WorkerSample(NamedTuple):
    """What the metrics of one worker are made from.

    `state`: state of the worker, as `status` shows it. `cost`: dollars, and `price_per_hour`: dollars an hour; None if
    no price is known. `age_seconds`: seconds since the heartbeat in the record.
    """

    record: Worker
    state: str
    cost: float | None
    price_per_hour: float | None
    age_seconds: float


class Metric(NamedTuple):
    """One metric: its name, and what it counts.

    `read` returns its value for one worker, or its values by the value of `label`; None if it is not known. A metric
    whose name ends with _total only grows, over all starts of the worker.
    """

    name: str
    help: str
    read: Callable[[WorkerSample], float | dict[str, int] | None]
    label: str = ""

    @property
    def is_counter(self) -> bool:
        """Whether it only grows."""
        return self.name.endswith("_total")


def _checkpoint_age(sample: WorkerSample) -> float | None:
    record = sample.record
    if not record.checkpointed:
        return None
    return max(0.0, record.heartbeat - record.checkpointed) + sample.age_seconds


_TABLE: list[tuple[str, str, Callable[[WorkerSample], float | dict[str, int] | None]]] = [
    ("rows_total", "Rows finished, failed ones included.", lambda s: s.record.rows_done),
    (
        "rows_failed_total",
        "Rows that became error lines, by code.",
        lambda s: s.record.with_codes(error_code).errors,
    ),
    (
        "rows_resumed_total",
        "Rows taken over from checkpoints instead of being generated again.",
        lambda s: s.record.rows_resumed,
    ),
    ("prompt_tokens_total", "Tokens of prompts.", lambda s: s.record.prompt_tokens),
    (
        "cached_prompt_tokens_total",
        "Tokens of prompts that came from the prefix cache.",
        lambda s: s.record.cached_tokens,
    ),
    ("completion_tokens_total", "Tokens of answers.", lambda s: s.record.completion_tokens),
    (
        "reasoning_tokens_total",
        "Those tokens of answers that are reasoning.",
        lambda s: s.record.reasoning_tokens,
    ),
    ("rows_in_engine", "Rows in the engine.", lambda s: s.record.rows_in_engine),
    ("chunks_done_total", "Chunks published.", lambda s: s.record.chunks_done),
    ("chunks_open", "Chunks under way.", lambda s: len(s.record.open_chunks)),
    (
        "checkpoint_age_seconds",
        "Seconds since all rows that were finished then were safe on storage.",
        _checkpoint_age,
    ),
    (
        "engine_restarts_total",
        "Engine processes (replicas) that were started again within the worker.",
        lambda s: s.record.engine_restarts,
    ),
    (
        "replicas_lost",
        "Replicas that have failed for good since the worker's last start.",
        lambda s: s.record.replicas_lost,
    ),
    (
        "model_load_seconds",
        "Seconds that the last load of the engine took.",
        lambda s: s.record.engine_load_seconds,
    ),
    ("starts_total", "Starts of the worker.", lambda s: len(s.record.starts)),
    (
        "up_seconds_total",
        "Seconds that the worker's processes have run.",
        lambda s: s.record.up_seconds,
    ),
    (
        "cost_dollars_total",
        "Dollars for the worker's machine. Missing where no price is known.",
        lambda s: s.cost,
    ),
    (
        "price_dollars_per_hour",
        "Dollars an hour for the worker's machine. Missing where no price is known.",
        lambda s: s.price_per_hour,
    ),
    (
        "max_cost_dollars",
        "The limit --max-cost of the worker. Missing without one.",
        lambda s: s.record.money.max_cost if s.record.money else None,
    ),
    ("worker_state", "1 for the state that the worker is in.", lambda s: {s.state: 1}),
]
_LABELS = {"rows_failed_total": "code", "worker_state": "state"}
METRICS = [
    Metric(f"batchinfer_{name}", text, read, _LABELS.get(name, "")) for name, text, read in _TABLE
]
"""Metrics with the labels run and worker, and one more where `label` names it."""

RUN_METRICS = {
    "batchinfer_run_rows": "Rows of the run. Missing where the job is not found.",
    "batchinfer_run_rows_done": "Rows of finished chunks, and finished rows of open ones.",
    "batchinfer_run_chunks": "Chunks of the run. Missing where the job is not found.",
    "batchinfer_run_chunks_done": "Chunks with a marker.",
}
"""Metrics of `status --prometheus` alone, with the label run."""


def families_of(
    run: str, samples: Iterable[WorkerSample]
) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
    """Yield all metrics of workers, as prometheus_client takes them. `run` is the run's URL."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    taken = list(samples)
    for metric in METRICS:
        labels = ["run", "worker", *([metric.label] if metric.label else [])]
        kind = CounterMetricFamily if metric.is_counter else GaugeMetricFamily
        family = kind(metric.name, metric.help, labels=labels)
        for sample in taken:
            found = metric.read(sample)
            values = found if isinstance(found, dict) else {} if found is None else {"": found}
            for value, number in values.items():
                more = [value] if metric.label else []
                family.add_metric([one_line(run), one_line(sample.record.id), *more], number)
        yield family


def run_families(run: str, figures: dict[str, float | None]) -> Iterator[GaugeMetricFamily]:
    """Yield the metrics of a run. `figures` are their values by name; None is left out."""
    from prometheus_client.core import GaugeMetricFamily

    for name, text in RUN_METRICS.items():
        family = GaugeMetricFamily(name, text, labels=["run"])
        value = figures[name]
        if value is not None:
            family.add_metric([one_line(run)], value)
        yield family
