"""The figures of workers and runs as metrics for Prometheus. A worker serves its own, and `status` prints those of all.

Both make them from the same record, so the names and what they count are the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from batchinfer.core.printable import one_line
from batchinfer.core.records import Money, Worker

if TYPE_CHECKING:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily


METRICS = {
    "batchinfer_rows_total": "Rows finished, failed ones included.",
    "batchinfer_rows_failed_total": "Rows that became error lines, by code.",
    "batchinfer_rows_resumed_total": "Rows taken over from checkpoints instead of being generated again.",
    "batchinfer_prompt_tokens_total": "Tokens of prompts.",
    "batchinfer_cached_prompt_tokens_total": "Tokens of prompts that came from the prefix cache.",
    "batchinfer_completion_tokens_total": "Tokens of answers.",
    "batchinfer_reasoning_tokens_total": "Those tokens of answers that are reasoning.",
    "batchinfer_rows_in_engine": "Rows in the engine.",
    "batchinfer_chunks_done_total": "Chunks published.",
    "batchinfer_chunks_open": "Chunks under way.",
    "batchinfer_engine_restarts_total": "Engine processes (replicas) that were started again within the worker.",
    "batchinfer_replicas_lost": "Replicas that have failed for good since the worker's last start.",
    "batchinfer_model_load_seconds": "Seconds that the last load of the engine took.",
    "batchinfer_starts_total": "Starts of the worker.",
    "batchinfer_up_seconds_total": "Seconds that the worker's processes have run.",
    "batchinfer_cost_dollars_total": "Dollars for the worker's machine. Missing where no price is known.",
    "batchinfer_price_dollars_per_hour": "Dollars an hour for the worker's machine. Missing where no price is known.",
    "batchinfer_max_cost_dollars": "The limit --max-cost of the worker. Missing without one.",
    "batchinfer_worker_state": "1 for the state that the worker is in.",
}
"""What the metrics of workers count, by name. A metric whose name ends with _total only grows, over all starts."""
LABELS = {"batchinfer_rows_failed_total": "code", "batchinfer_worker_state": "state"}
"""Labels that metrics have beside run and worker, by the metric's name."""

RUN_METRICS = {
    "batchinfer_run_rows": "Rows of the run.",
    "batchinfer_run_rows_done": "Rows of finished chunks, and finished rows of open ones.",
    "batchinfer_run_chunks": "Chunks of the run.",
    "batchinfer_run_chunks_done": "Chunks with a marker.",
}
"""Metrics of `status --prometheus` alone, with the label run."""


def _values(worker: Worker) -> dict[str, float | dict[str, int] | None]:
    """Return the values of the metrics of a worker, those with a label by its values; None if one is not known."""
    money = worker.money or Money()
    return {
        "batchinfer_rows_total": worker.rows_done,
        "batchinfer_rows_failed_total": worker.errors,
        "batchinfer_rows_resumed_total": worker.rows_resumed,
        "batchinfer_prompt_tokens_total": worker.prompt_tokens,
        "batchinfer_cached_prompt_tokens_total": worker.cached_tokens,
        "batchinfer_completion_tokens_total": worker.completion_tokens,
        "batchinfer_reasoning_tokens_total": worker.reasoning_tokens,
        "batchinfer_rows_in_engine": worker.rows_in_engine,
        "batchinfer_chunks_done_total": worker.chunks_done,
        "batchinfer_chunks_open": len(worker.open_chunks),
        "batchinfer_engine_restarts_total": worker.engine_restarts,
        "batchinfer_replicas_lost": worker.replicas_lost,
        "batchinfer_model_load_seconds": worker.engine_load_seconds,
        "batchinfer_starts_total": worker.num_starts,
        "batchinfer_up_seconds_total": worker.up_seconds,
        "batchinfer_cost_dollars_total": money.cost,
        "batchinfer_price_dollars_per_hour": money.price_per_hour,
        "batchinfer_max_cost_dollars": money.max_cost,
        "batchinfer_worker_state": {worker.state: 1},
    }


def families_of(
    run: str, workers: Iterable[Worker]
) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
    """Yield all metrics of workers, as prometheus_client takes them. `run` is the run's URL."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    taken = [(worker, _values(worker)) for worker in workers]
    for name, text in METRICS.items():
        own = [LABELS[name]] if name in LABELS else []
        kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
        family = kind(name, text, labels=["run", "worker", *own])
        for worker, values in taken:
            found = values[name]
            by_label = found if isinstance(found, dict) else {} if found is None else {"": found}
            for value, number in by_label.items():
                more = [one_line(value)] if own else []
                family.add_metric([one_line(run), one_line(worker.id), *more], number)
        yield family


def run_families(run: str, figures: dict[str, int]) -> Iterator[GaugeMetricFamily]:
    """Yield the metrics of a run. `figures` are their values by name."""
    from prometheus_client.core import GaugeMetricFamily

    for name, text in RUN_METRICS.items():
        family = GaugeMetricFamily(name, text, labels=["run"])
        family.add_metric([one_line(run)], figures[name])
        yield family
