"""The machines that run a share of a model for the worker on another machine (`batchinfer worker --headless`).

vLLM connects the nodes of a model itself, at --master-addr and --master-port. But no node notices there that another
one has gone. So node 0, which is the worker, listens at the port after --master-port, and every other node keeps a
connection to it open, which also breaks when a node is killed. Node 0 sends one line with the revision of the model
when the others may load it, and one with its exit status at its end, as far as its engine knows it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import select
import socket
import time
from typing import Any, BinaryIO

import msgspec

from batchinfer.core.errors import ConfigError, EngineDied, EngineLoadError, Interrupted
from batchinfer.engines import Stop, create_engine
from batchinfer.engines.engine_config import EngineConfig
from batchinfer.engines.server import OwnServer, plan
from batchinfer.storage.scratch import Scratch

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.5
_ERRORS = {2: ConfigError, 75: Interrupted}
"""Class of the error with which a node ends, by the exit status of node 0; EngineDied for others."""
# Seconds without a sign of life after which the kernel asks the machine at the other end, and between such questions.
_KEEPALIVE_SECONDS = 10


class Nodes:
    """Node 0's connections to the other nodes. Belongs to an event loop, which must turn."""

    def __init__(self) -> None:
        self.has_lost_one = False
        self.revision = ""
        """Revision of the model, which nodes are told when they come."""
        self._links: list[asyncio.StreamWriter] = []
        self._server: asyncio.Server | None = None

    async def listen(self, config: EngineConfig) -> None:
        """Let nodes in while the loop turns from now on.

        Raises:
            ConfigError: this machine does not have the address --master-addr, or another program uses the port.
        """

        async def let_in(reader: asyncio.StreamReader, link: asyncio.StreamWriter) -> None:
            _keep_alive(link.get_extra_info("socket"))
            self._links.append(link)
            link.write(f"{self.revision}\n".encode())
            with contextlib.suppress(OSError):
                await reader.read()  # a node sends nothing, so this is its end
            self.has_lost_one = True

        place = (config.master_addr, config.master_port + 1)
        try:
            self._server = await asyncio.start_server(let_in, *place)
        except (OSError, OverflowError) as error:
            message = f"--master-addr {place[0]}: cannot listen at port {place[1]} there ({error})"
            hint = "node 0 needs an address of its own, and the two ports from --master-port on"
            raise ConfigError(message, hint=hint) from error

    async def close(self, status: int) -> None:
        """Tell the nodes with which exit status they end, and close the connections."""
        if self._server is not None:
            for _ in range(10):  # lets nodes in that have called before the loop turned
                await asyncio.sleep(0.01)
            self._server.close()
        for link in self._links:
            link.write(f"{status}\n".encode())
            link.close()
            with contextlib.suppress(OSError):
                await link.wait_closed()


def _keep_alive(link: socket.socket) -> None:
    """Have the kernel notice that the machine at the other end is gone."""
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEPALIVE_SECONDS)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _KEEPALIVE_SECONDS)


def follow(config: EngineConfig, *, loading: Stop, stop: Stop) -> dict[str, Any]:
    """Run this node's share of the model (`vllm serve --headless`) until node 0 ends.

    Args:
        config: Configuration of the engine, as node 0 has it, with this node's rank.
        loading: Stop signal before node 0 is reached.
        stop: Stop signal from then on. It should leave node 0, which gets a signal too, time to finish rows.

    Returns:
        The result object, when node 0 has done its work.

    Raises:
        ConfigError: the options cannot work.
        EngineError: node 0 has gone or has failed, or vLLM's processes on this node ended.
        Interrupted: a stop signal was set.
    """
    if config.node_rank == 0:
        hint = "give --nnodes N --node-rank 1 to N-1 --master-addr ADDRESS on the other machines"
        raise ConfigError("--headless with --node-rank 0: node 0 is the worker itself", hint=hint)
    create_engine(config)  # refuses what cannot work
    with contextlib.ExitStack() as stack:
        link = stack.enter_context(_reach(config, loading))
        told = stack.enter_context(link.makefile("rb"))
        scratch = stack.enter_context(contextlib.closing(Scratch(config.scratch_dir)))
        revision = _receive(told, loading) or None
        config = msgspec.structs.replace(config, revision=config.revision or revision)
        [launch] = plan(config, scratch.folder, loading)
        launch.environment["VLLM_HOST_IP"] = str(link.getsockname()[0])
        server = OwnServer(launch, scratch.folder / "server.log")
        server.start()
        stack.callback(server.end)
        logger.info("node %d of %d: loading", config.node_rank, config.nnodes)
        status = int(_receive(told, stop, server))
    if status:
        raise _ERRORS.get(status, EngineDied)(f"node 0 ended with exit status {status}")
    return {"status": "SUCCESS", "node_rank": config.node_rank, "nnodes": config.nnodes}


def _reach(config: EngineConfig, stop: Stop) -> socket.socket:
    """Connect to node 0, which may start later than this node."""
    place = (config.master_addr, config.master_port + 1)
    end = time.monotonic() + config.load_timeout_seconds
    while not stop.is_set():
        try:
            link = socket.create_connection(place, timeout=5.0)
        except OSError as error:
            if time.monotonic() > end:
                message = f"node 0 does not answer at {place[0]}, port {place[1]} ({error})"
                hint = "node 0 is the worker without --headless; it listens after --master-port"
                raise EngineLoadError(message, hint=hint) from error
            time.sleep(POLL_SECONDS)
        else:
            _keep_alive(link)
            link.settimeout(None)
            return link
    raise Interrupted("stopped while it waited for node 0")


def _receive(told: BinaryIO, stop: Stop, server: OwnServer | None = None) -> str:
    """Wait for a line of node 0, while this node's server runs.

    Raises:
        EngineDied: node 0 has gone, or the server has ended.
        Interrupted: `stop` was set.
    """
    # A second line that came with the first one is not waited for: the end of the connection follows it.
    while not select.select([told], [], [], POLL_SECONDS)[0]:
        if stop.is_set():
            raise Interrupted("stopped by a signal")
        if server is not None and (why := server.look_at_process()):
            raise EngineDied(f"this node's server: {why}")
    with contextlib.suppress(OSError):
        if line := told.readline():
            return line.decode().strip()
    raise EngineDied("node 0 has gone")
