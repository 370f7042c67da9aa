"""A machine that runs a share of a model for the worker on another machine (`batchinfer worker --headless`).

It reads no job and no run. It connects to node 0, the worker, loads its share when all nodes are there, and ends when
node 0 ends, with the same exit status.
"""

from __future__ import annotations

import contextlib
import logging
from typing import Any

import msgspec

from batchinfer.core.errors import (
    BatchinferError,
    ConfigError,
    EngineDied,
    Interrupted,
    PolicyStop,
    StorageError,
    UsageError,
)
from batchinfer.engines import Stop, check_engine
from batchinfer.engines.bucket_models import with_local_files
from batchinfer.engines.channel import Close, Closed, Load
from batchinfer.engines.config import EngineConfig
from batchinfer.engines.gpus import Placement, place
from batchinfer.engines.nodes import POLL_SECONDS, NodeLink, reach
from batchinfer.engines.replica import Replica

logger = logging.getLogger(__name__)

# Seconds that vLLM's processes on this node get to end by themselves.
CLOSE_SECONDS = 8.0
_ERRORS: dict[int, type[BatchinferError]] = {
    2: UsageError,
    3: PolicyStop,
    34: StorageError,
    75: Interrupted,
}
"""Class of the error with which this node ends, by the exit status of node 0. Others: EngineDied."""


def follow(config: EngineConfig, *, loading: Stop, stop: Stop) -> dict[str, Any]:
    """Run this node's share of the model until node 0 ends.

    Args:
        config: Configuration of the engine, as node 0 has it, with this node's rank.
        loading: Stop signal before all nodes are there.
        stop: Stop signal from then on. It should leave node 0, which gets a signal too, time to finish rows.

    Returns:
        The result object, if node 0 ended with 0.

    Raises:
        BatchinferError: node 0 ended with another exit status, which the error's class has, too.
        ConfigError: the options cannot work, or differ from those of node 0.
        EngineError: node 0 has gone, or vLLM's processes on this node ended.
        Interrupted: a stop signal was set.
    """
    if config.node_rank == 0:
        raise ConfigError(
            "--headless without --node-rank: node 0 is the worker itself",
            hint="give --nnodes N --node-rank 1 to N-1 --master-addr ADDRESS on the other machines",
        )
    check_engine(config).check_installed()
    line = reach(config, loading)
    with contextlib.closing(line):
        order = _first_order(line, loading)
        if "status" not in order:
            revision = config.revision or order.get("revision") or None
            config = msgspec.structs.replace(config, revision=revision)
            placement = place(with_local_files(config, with_weights=True, stop=loading))
            order = _run(placement, line, stop)
    _raise_for(order["status"])
    return {"status": "SUCCESS", "node_rank": config.node_rank, "nnodes": config.nnodes}


def _run(placement: Placement, line: NodeLink, stop: Stop) -> dict[str, Any]:
    """Load the model's share, and keep it until node 0 ends. Returns node 0's last message."""
    config = placement.config
    environment = {**placement.replicas[0][1], "VLLM_HOST_IP": line.own_address}
    replica = Replica(f"node {config.node_rank}", environment)
    try:
        with contextlib.suppress(Closed):
            replica.channel.send(Load(config=placement.config))
        logger.info("node %d of %d: loading", config.node_rank, config.nnodes)
        has_told = False
        while True:
            message = _receive(line, stop)
            if message is not None:
                return message
            if not has_told and not replica.is_running():
                # Node 0 may have closed its engine, and still publish outputs. So its word is waited for.
                replica.settle()
                logger.error("%s: %s", replica.name, replica.reason())
                with contextlib.suppress(OSError):
                    line.send({"ended": replica.reason()[-2000:]})
                has_told = True
    finally:
        with contextlib.suppress(Closed):
            replica.channel.send(Close())
        replica.end(CLOSE_SECONDS)


def _first_order(line: NodeLink, stop: Stop) -> dict[str, Any]:
    """Wait for node 0's first message, which comes when all nodes are there.

    Raises:
        ConfigError: node 0 refuses this node.
    """
    while (message := _receive(line, stop)) is None:
        pass
    if "refused" in message:
        raise ConfigError(
            f"node 0 refuses this node: {message['refused']}",
            hint="give all nodes of a model the same options",
        )
    return message


def _receive(line: NodeLink, stop: Stop) -> dict[str, Any] | None:
    if stop.is_set():
        raise Interrupted("stopped by a signal")
    try:
        return line.receive(POLL_SECONDS)
    except OSError as error:
        raise EngineDied("node 0 has gone") from error


def _raise_for(status: Any) -> None:
    if status != 0:
        number = status if isinstance(status, int) else 33
        raise _ERRORS.get(number, EngineDied)(f"node 0 ended with exit status {number}")
