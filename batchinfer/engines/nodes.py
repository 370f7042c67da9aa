"""The connection between the machines ("nodes") that run one model together: who is there, and how it ended.

vLLM connects the nodes of a model itself, at --master-addr and --master-port, but no node notices there that another
one has gone. So node 0, which is the worker, listens at the port after --master-port, and every other node keeps one
connection to it open. A node that goes closes its connection, also if it is killed. Messages are lines of JSON:

    node -> node 0    {"node_rank": 1, "options": {...}}     hashes of its options, which must be node 0's
    node 0 -> node    {"revision": "..."}                    every node is there: load the model
    node -> node 0    {"ended": "..."}                       its engine has ended
    node 0 -> node    {"refused": "..."}                     the options differ
    node 0 -> node    {"status": 0}                          node 0 ends with this exit status
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import select
import socket
import time
from typing import Any

import msgspec

from batchinfer.core import codec
from batchinfer.core.errors import ConfigError, EngineDied, EngineLoadError, Interrupted
from batchinfer.engines import Stop
from batchinfer.engines.config import EngineConfig

logger = logging.getLogger(__name__)

# Fields of EngineConfig in which the nodes of a model may differ.
OWN_FIELDS = frozenset({"node_rank", "gpus", "model_cache", "revision"})
# Seconds between two attempts to reach node 0, and between two looks at the connections.
POLL_SECONDS = 0.2
# Exit statuses after which nothing is started again.
LAST_STATUSES = (0, 2, 3)
# Seconds that node 0, when it ends with one of these, waits for nodes that have not come yet, so that they end, too.
LAST_CALL_SECONDS = 30.0
# Seconds that a node has to say who it is, after it has connected.
HELLO_SECONDS = 5.0
# Seconds without a sign of life after which the kernel asks the machine at the other end, and between such questions.
KEEPALIVE_SECONDS = 10
# Unanswered questions of the kernel after which the machine at the other end counts as lost.
KEEPALIVE_PROBES = 3
MOST_LINE_BYTES = 1 << 20


def options_of(config: EngineConfig) -> dict[str, str]:
    """Return a hash of each option that must be the same for all nodes of a model; the values may hold secrets.

    Of the model only the last part of its name counts, and of adapters their names: nodes may keep them anywhere.
    """
    values: dict[str, Any] = msgspec.to_builtins(config)
    values |= {"model": config.model.rstrip("/").rpartition("/")[2], "loras": sorted(config.loras)}
    return {
        name: hashlib.sha256(codec.encode(value)).hexdigest()[:16]
        for name, value in values.items()
        if name not in OWN_FIELDS
    }


class NodeLink:
    """One connection, which carries lines of JSON."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._received = b""
        connection.setblocking(False)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in (
            ("TCP_KEEPIDLE", KEEPALIVE_SECONDS),
            ("TCP_KEEPINTVL", KEEPALIVE_SECONDS),
            ("TCP_KEEPCNT", KEEPALIVE_PROBES),
        ):
            if hasattr(socket, name):  # not every system has all of them
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    @property
    def own_address(self) -> str:
        """Address of this machine at its end of the connection."""
        return str(self._connection.getsockname()[0])

    def send(self, message: dict[str, Any]) -> None:
        """Send a short message. Raises OSError if the other end has gone."""
        self._connection.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, timeout_seconds: float) -> dict[str, Any] | None:
        """Return the next message; None if there is none before `timeout_seconds` are over.

        Raises:
            OSError: the other end has gone, or sends what is no message.
        """
        end = time.monotonic() + timeout_seconds
        while b"\n" not in self._received:
            left = max(0.0, end - time.monotonic())
            if not select.select([self._connection], [], [], left)[0]:
                return None
            data = self._connection.recv(1 << 16)
            if not data or len(self._received) > MOST_LINE_BYTES:
                raise ConnectionResetError("the connection was closed")
            self._received += data
        line, _, self._received = self._received.partition(b"\n")
        try:
            message = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ConnectionResetError("not a message of a node") from error
        if not isinstance(message, dict):
            raise ConnectionResetError("not a message of a node")
        return message

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


class Leader:
    """Node 0's connections to the other nodes. Listens as soon as it is made.

    Raises:
        ConfigError: this machine does not have the address --master-addr, or another program uses the port.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._num_others = config.nnodes - 1
        self._links: dict[int, NodeLink] = {}
        """Connections to the nodes that are there, by their ranks."""
        self._refused: set[int] = set()
        """Ranks of the nodes that came with other options, and end for this reason."""
        place = (config.master_addr, config.master_port + 1)
        try:
            self._server = socket.create_server(place)
        except OSError as error:
            raise ConfigError(
                f"--master-addr {place[0]}: cannot listen at port {place[1]} there ({error.strerror or error})",
                hint="node 0 needs an address of its own machine, and the two ports from --master-port on",
            ) from error
        self._server.setblocking(False)

    def gather(self, config: EngineConfig, stop: Stop) -> None:
        """Wait until every other node is there, and let them load the model.

        Raises:
            ConfigError: a node has other options.
            EngineLoadError: a node has not come within --load-timeout-seconds, or has gone again.
            Interrupted: `stop` was set.
        """
        end = time.monotonic() + config.load_timeout_seconds
        logger.info("waiting for %d other nodes", self._num_others)
        while len(self._links) < self._num_others:
            if stop.is_set():
                raise Interrupted("engine: stopped while it waited for other nodes")
            if time.monotonic() > end:
                missing = set(range(1, self._num_others + 1)) - set(self._links)
                raise EngineLoadError(
                    f"nodes {sorted(missing)} have not come within {config.load_timeout_seconds:g} s",
                    hint="start them with the same options, --node-rank N and --headless",
                )
            self._accept(config, POLL_SECONDS)
            self.check(EngineLoadError)
        for rank, link in self._links.items():
            try:
                link.send({"revision": config.revision or ""})
            except OSError as error:
                raise EngineLoadError(f"node {rank} has gone") from error

    def _accept(self, config: EngineConfig | None, timeout_seconds: float) -> None:
        """Take one connection, if one comes in time. Without `config`, the node's options are not compared."""
        if not select.select([self._server], [], [], timeout_seconds)[0]:
            return
        try:
            link = NodeLink(self._server.accept()[0])
        except OSError:  # whoever it was has gone again
            return
        try:
            self._admit(link, config)
        except OSError:  # no node, or one that has gone again
            link.close()

    def _admit(self, link: NodeLink, config: EngineConfig | None) -> None:
        hello = link.receive(HELLO_SECONDS) or {}
        rank, options = hello.get("node_rank"), hello.get("options")
        if not isinstance(rank, int) or not 1 <= rank <= self._num_others or rank in self._links:
            wanted = f"expected 1 to {self._num_others}, each once"
            link.send({"refused": f"--node-rank {rank}: {wanted}"})
            link.close()
        elif config is not None and options != options_of(config):
            names = differing(options, options_of(config))
            link.send({"refused": f"{names}: differ from those of node 0"})
            link.close()
            self._refused.add(rank)
            raise ConfigError(
                f"{names}: node {rank} has other values",
                hint="give all nodes of a model the same options",
            )
        else:
            self._links[rank] = link

    def check(
        self,
        kind: type[EngineDied | EngineLoadError] = EngineDied,
        *,
        patience_seconds: float = 0.0,
    ) -> None:
        """Raise `kind` if a node has gone, or its engine has ended.

        Args:
            kind: Class of the error.
            patience_seconds: Longest time to wait for such news.
        """
        for rank, link in self._links.items():
            try:
                message = link.receive(patience_seconds)
            except OSError as error:
                raise kind(f"node {rank} of {self._num_others + 1} has gone") from error
            if message is not None:
                raise kind(f"node {rank} of {self._num_others + 1}: {message.get('ended')}")

    def tell(self, status: int) -> None:
        """Tell the nodes with which exit status node 0 ends, and close the connections."""
        end = time.monotonic() + (LAST_CALL_SECONDS if status in LAST_STATUSES else 0.0)
        while len(self._links) + len(self._refused) < self._num_others:
            self._accept(None, POLL_SECONDS)
            if time.monotonic() > end:
                break
        for link in self._links.values():
            with contextlib.suppress(OSError):
                link.send({"status": status})
            link.close()
        self._server.close()


def differing(given: Any, wanted: dict[str, str]) -> str:
    """Return the options in which a node differs from node 0, as on the command line."""
    mine = given if isinstance(given, dict) else {}
    names = sorted(name for name in {*mine, *wanted} if mine.get(name) != wanted.get(name))
    plural = {"engine_args": "engine-arg", "loras": "lora"}
    return ", ".join(f"--{plural.get(name, name.replace('_', '-'))}" for name in names)


def reach(config: EngineConfig, stop: Stop) -> NodeLink:
    """Connect to node 0, which may start later than this node.

    Raises:
        EngineLoadError: node 0 is not there within --load-timeout-seconds.
        Interrupted: `stop` was set.
    """
    end = time.monotonic() + config.load_timeout_seconds
    while True:
        if stop.is_set():
            raise Interrupted("engine: stopped while it waited for node 0")
        try:
            place = (config.master_addr, config.master_port + 1)
            link = NodeLink(socket.create_connection(place, timeout=5.0))
            link.send({"node_rank": config.node_rank, "options": options_of(config)})
        except OSError as error:
            if time.monotonic() > end:
                raise EngineLoadError(
                    f"node 0 does not answer at {config.master_addr}, port {config.master_port + 1} ({error})",
                    hint="node 0 is the worker with --node-rank 0; it listens at the port after --master-port",
                ) from error
            time.sleep(POLL_SECONDS)
        else:
            return link
