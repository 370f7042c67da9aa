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

    `values` returns its values for one worker, by the value of `label`; without a label the only key is "". No value
    means that it is not known. A metric whose name ends with _total only grows, over all starts of the worker.
    """

    name: str
    help: str
    values: Callable[[WorkerSample], dict[str, float]]
    label: str = ""

    @property
    def is_counter(self) -> bool:
        """Whether it only grows."""
        return self.name.endswith("_total")


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


def _of(read: Callable[[Worker], float]) -> Callable[[WorkerSample], dict[str, float]]:
    """Return a function for `Metric.values` that reads one number from the record."""
    return lambda sample: {"": read(sample.record)}


def _known(value: float | None) -> dict[str, float]:
    return {} if value is None else {"": value}


def _checkpoint_age(sample: WorkerSample) -> dict[str, float]:
    record = sample.record
    if not record.checkpointed:
        return {}
    return {"": max(0.0, record.heartbeat - record.checkpointed) + sample.age_seconds}


def _errors(sample: WorkerSample) -> dict[str, float]:
    found: dict[str, float] = {}
    for written, count in sample.record.errors.items():
        code = error_code(written)
        found[code] = found.get(code, 0) + count
    return found


METRICS = (
    Metric(
        "batchinfer_rows_total",
        "Rows finished, failed ones included.",
        _of(lambda w: w.rows_done),
    ),
    Metric(
        "batchinfer_rows_failed_total", "Rows that became error lines, by code.", _errors, "code"
    ),
    Metric(
        "batchinfer_rows_resumed_total",
        "Rows taken over from checkpoints instead of being generated again.",
        _of(lambda w: w.rows_resumed),
    ),
    Metric("batchinfer_prompt_tokens_total", "Tokens of prompts.", _of(lambda w: w.prompt_tokens)),
    Metric(
        "batchinfer_cached_prompt_tokens_total",
        "Tokens of prompts that came from the prefix cache.",
        _of(lambda w: w.cached_tokens),
    ),
    Metric(
        "batchinfer_completion_tokens_total",
        "Tokens of answers.",
        _of(lambda w: w.completion_tokens),
    ),
    Metric(
        "batchinfer_reasoning_tokens_total",
        "Those tokens of answers that are reasoning.",
        _of(lambda w: w.reasoning_tokens or 0),
    ),
    Metric("batchinfer_rows_in_engine", "Rows in the engine.", _of(lambda w: w.rows_in_engine)),
    Metric("batchinfer_chunks_done_total", "Chunks published.", _of(lambda w: w.chunks_done)),
    Metric("batchinfer_chunks_open", "Chunks under way.", _of(lambda w: len(w.open_chunks))),
    Metric(
        "batchinfer_checkpoint_age_seconds",
        "Seconds since all rows that were finished then were safe on storage.",
        _checkpoint_age,
    ),
    Metric(
        "batchinfer_engine_restarts_total",
        "Engine processes (replicas) that were started again within the worker.",
        _of(lambda w: w.engine_restarts),
    ),
    Metric(
        "batchinfer_replicas_lost",
        "Replicas that have failed for good since the worker's last start.",
        _of(lambda w: w.replicas_lost),
    ),
    Metric(
        "batchinfer_model_load_seconds",
        "Seconds that the last load of the engine took.",
        _of(lambda w: w.engine_load_seconds),
    ),
    Metric("batchinfer_starts_total", "Starts of the worker.", _of(lambda w: len(w.starts))),
    Metric(
        "batchinfer_up_seconds_total",
        "Seconds that the worker's processes have run.",
        _of(lambda w: w.up_seconds),
    ),
    Metric(
        "batchinfer_cost_dollars_total",
        "Dollars for the worker's machine. Missing where no price is known.",
        lambda sample: _known(sample.cost),
    ),
    Metric(
        "batchinfer_price_dollars_per_hour",
        "Dollars an hour for the worker's machine. Missing where no price is known.",
        lambda sample: _known(sample.price_per_hour),
    ),
    Metric(
        "batchinfer_max_cost_dollars",
        "The limit --max-cost of the worker. Missing without one.",
        lambda sample: _known(sample.record.money.max_cost if sample.record.money else None),
    ),
    Metric(
        "batchinfer_worker_state",
        "1 for the state that the worker is in.",
        lambda sample: {sample.state: 1},
        "state",
    ),
)
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
            for value, number in metric.values(sample).items():
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
