"""The worker's metrics for Prometheus, served over HTTP.

They are made when they are asked for, on a thread of the server, from the record that the worker makes anyway for its
heartbeats. So the worker's loop does not wait for them. While rows are generated, they are at most about two seconds
old.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable
from typing import Any, NamedTuple

from batchinfer.core.redaction import redact
from batchinfer.ledger.metrics import families_of
from batchinfer.worker.telemetry import Telemetry
from batchinfer.worker.worker_config import WorkerConfig

logger = logging.getLogger(__name__)


class WorkerCollector(NamedTuple):
    """Makes the metrics of one worker. Any thread may call `collect`; see prometheus_client.registry.Collector."""

    run: str
    telemetry: Telemetry

    def collect(self) -> Iterable[Any]:
        """Return all metrics, as they are now."""
        return families_of(self.run, [self.telemetry.up_to_date()])


def serve_metrics(
    config: WorkerConfig, run: str, telemetry: Telemetry, stack: contextlib.ExitStack
) -> None:
    """Serve the worker's metrics at --metrics until `stack` is left. `run` is the run's URL.

    Without the option nothing is done. If it cannot listen there, a warning says so, and the worker goes on without
    metrics: nobody should lose a run to its monitoring.
    """
    if not config.metrics:
        return
    from prometheus_client import CollectorRegistry, start_http_server

    registry = CollectorRegistry()
    registry.register(WorkerCollector(redact(run), telemetry))
    host, _, number = config.metrics.rpartition(":")
    host, port = host.strip("[]"), int(number)
    try:
        server, _ = start_http_server(port, addr=host, registry=registry)
    except (OSError, OverflowError, UnicodeError) as error:  # UnicodeError: no name of a host
        text = "--metrics %s: cannot listen there (%s), so there are none; workers on one machine need a port each"
        logger.warning(text, config.metrics, error)
        return
    stack.callback(server.server_close)
    stack.callback(server.shutdown)
    logger.info("metrics are at http://%s:%d/metrics", host, server.server_port)
