"""The interface of engines, the table of all engines, and the function that creates one.

An engine takes calls, which are requests to a server that speaks the OpenAI API, and gives replies. All engines but one
are such servers: those that the worker starts itself (vLLM by default, or any other by ``--server-command``), and
endpoints that run elsewhere. `http.HttpEngine` speaks to both. The echo engine without options that need a process runs
inside the worker. Importing this module imports neither an HTTP library nor vllm.
"""

from __future__ import annotations

import difflib
import heapq
import importlib.util
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from batchinfer.core.errors import ConfigError
from batchinfer.core.records import Call, EngineInfo, EngineStats, Reply
from batchinfer.engines.config import EngineConfig, check_config

__all__ = [
    "ENGINES",
    "Engine",
    "EngineKind",
    "RequestSource",
    "Stop",
    "check_engine",
    "create_engine",
    "find_engine",
    "has_model",
    "identify_model",
    "is_remote",
    "longest_sequence",
    "share_out",
]


class Stop(Protocol):
    """A stop signal, which tells an engine to drop its work and return."""

    def is_set(self) -> bool:
        """Whether to drop all work and return now."""
        ...


class RequestSource(Protocol):
    """The stream from which an engine takes its calls. Its methods never read or write storage."""

    def take(self, max_calls: int, free_slots: Sequence[int] = ()) -> list[Call] | None:
        """Return up to `max_calls` calls that are ready now. The list may be empty.

        The caller of `Engine.generate` prepares new calls each time that `generate` yields. So an engine that got an
        empty list yields before it calls `take` again.

        Args:
            max_calls: Most calls to return; at least 1.
            free_slots: Number of calls that each replica can take now; empty if there is only one replica. The first
                `free_slots[0]` calls go to the first replica, the next `free_slots[1]` to the second, and so on. A
                source may use this to send similar calls to the same replica.

        Returns:
            The calls, or None if the source will never have another one.
        """
        ...

    def wait(self, timeout_seconds: float) -> None:
        """Wait until a call may be ready, but at most `timeout_seconds`.

        An engine calls this only while it has no call in flight.
        """
        ...


class Engine(Protocol):
    """Turns calls into replies. The same thread opens, drives and closes it."""

    def open(self, stop: Stop) -> EngineInfo:
        """Start the servers and wait until they have loaded the model, or reach the endpoint.

        Raises:
            EngineLoadError: loading failed; another start may help.
            ConfigError: the configuration cannot work.
            AccessDenied: a store, the Hub or an endpoint refuses access.
            StorageError: the files of a model in a bucket cannot be fetched.
            Interrupted: `stop` was set while the model was loading.
        """
        ...

    def generate(self, source: RequestSource, stop: Stop) -> Iterator[list[Reply]]:
        """Take calls whenever slots are free, and yield the replies that came, in any order.

        The generator usually yields at least once a second, so that the caller can do other work in between. The list
        may be empty. Failures that may pass (no connection, 429, 5xx, an answer that is none) are tried again in here;
        a reply holds what the last attempt gave. If a server dies, or is ended because it hung, each of its calls in
        flight comes back with status 0, and the server is started again. The caller decides who tries these rows again,
        and when. The generator ends when the source has returned None and no call is in flight. It also ends soon after
        `stop` is set, and then drops the calls in flight.

        Raises:
            EngineDied: no server is left, or an endpoint answered nothing for `stall_seconds`. Only `close` may be
                called afterwards.
            EngineStalled: the engine in this process made no progress for `stall_seconds`. Only `close` may be called.
            AccessDenied: an endpoint refuses the key, or the account has nothing left.
        """
        ...

    def ask(self, call: Call, stop: Stop | None = None) -> Reply:
        """Send one call by itself and wait for its reply, with the same retries as `generate`. Not during `generate`.

        Raises:
            EngineDied: the server died, or the endpoint answered nothing for `stall_seconds`.
            AccessDenied: an endpoint refuses the key.
            Interrupted: `stop` was set.
        """
        ...

    def stream(self, call: Call) -> Iterator[bytes]:
        """Send one call whose body has ``"stream": true``, and yield the data of each server-sent event as it comes.

        A refusal is yielded as its body, alone. The final event ``[DONE]`` is not yielded.

        Raises:
            EngineDied: the connection broke.
        """
        ...

    def parameters(self, path: str) -> frozenset[str]:
        """Return the body fields that the server names for this path; empty if it does not say. After `open`."""
        ...

    def stats(self) -> EngineStats:
        """Return the engine's counters since `open`. Returns at once."""
        ...

    def close(self) -> None:
        """End all processes of the engine and free its memory. May be called twice, and after a failure."""
        ...


# --------------------------------------------------------------------------- the table of engines


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineKind:
    """The description of an engine, which the rest of the package uses without importing the engine's module."""

    name: str
    """Value of ``--engine``."""
    needs_model: bool = False
    """Whether the engine loads a model. If so, the model's files decide its identity in the run, its longest sequence,
    and the number of GPUs for each replica. If not, the engine gets no GPU, and its name is the identity."""
    is_rehearsal: bool = False
    """Whether the engine only imitates a real engine."""
    is_remote: bool = False
    """Whether a program that we do not start, reached by ``--base-url``, runs the model."""


ENGINES = {
    kind.name: kind
    for kind in (
        EngineKind(name="vllm", needs_model=True),
        EngineKind(name="echo", is_rehearsal=True),
        EngineKind(name="openai", is_remote=True),
    )
}
"""All engines by name. The default engine is the default of `EngineConfig.engine`."""


def find_engine(name: str) -> EngineKind:
    """Return the entry of `ENGINES` with this name.

    Raises:
        ConfigError: no engine has this name; the message lists all engines.
    """
    if name in ENGINES:
        return ENGINES[name]
    near = difflib.get_close_matches(name.lower(), ENGINES, n=1, cutoff=0.4)
    raise ConfigError(
        f"--engine: {name!r} is not an engine, expected one of {', '.join(ENGINES)}",
        hint=f"did you mean --engine {near[0]}?"
        if near
        else f"the default is --engine {EngineConfig().engine}",
    )


def check_engine(config: EngineConfig) -> EngineKind:
    """Refuse an unknown engine, and a configuration that it could not run. Loads nothing, and asks no other machine.

    Returns:
        The engine's entry in `ENGINES`.

    Raises:
        ConfigError: the message names the option that is wrong.
    """
    kind = find_engine(config.engine)
    check_config(config)
    if not kind.needs_model:
        for option, is_given in {
            "--nnodes": config.nnodes > 1,
            "--server-command": config.server_command,
        }.items():
            if is_given:
                raise ConfigError(
                    f"{option} with --engine {kind.name}: this engine starts no such server",
                    hint=f"leave {option} out",
                )
    if kind.is_remote and not config.base_urls:
        raise ConfigError(
            f"--engine {kind.name}: no --base-url says where the endpoint is",
            hint="add --base-url http://127.0.0.1:8000/v1, for example",
        )
    if not config.model and (kind.needs_model or kind.is_remote):
        raise ConfigError(
            "--model: is missing, expected a model's folder or its name on the Hub",
            hint="add --model Qwen/Qwen3-0.6B, or --engine echo to rehearse without a model",
        )
    return kind


def has_model(config: EngineConfig) -> bool:
    """Whether the configuration names a model, and its engine loads one. An unknown engine counts as one that does."""
    kind = ENGINES.get(config.engine)
    return bool(config.model) and (kind is None or kind.needs_model)


def is_remote(config: EngineConfig) -> bool:
    """Return `EngineKind.is_remote` of the configuration's engine; False if the engine is unknown."""
    kind = ENGINES.get(config.engine)
    return kind is not None and kind.is_remote


def check_installed(config: EngineConfig) -> None:
    """Refuse ``--engine vllm`` where vllm is not installed, unless ``--server-command`` names another server.

    Raises:
        ConfigError: vllm is missing.
    """
    if not find_engine(config.engine).needs_model or config.server_command:
        return
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError(
            "--engine vllm: the package vllm is not installed in this environment",
            hint="in batchinfer's checkout: pip install '.[vllm]' on a machine with GPUs, `bash scripts/setup.sh "
            "--extras cpu` on one without; --engine echo needs neither",
        )


def create_engine(config: EngineConfig) -> Engine:
    """Create an engine without opening it. Starts no process, and imports neither vllm nor torch.

    Raises:
        ConfigError: the engine is unknown, its package is not installed, or the configuration cannot work.
    """
    kind = check_engine(config)
    check_installed(config)
    if kind.is_rehearsal and config.replicas in {1, "auto"} and not config.echo.kill_marker:
        from batchinfer.engines.echo_engine import EchoEngine

        return EchoEngine(config)
    from batchinfer.engines.http import HttpEngine

    return HttpEngine(config)


def identify_model(config: EngineConfig) -> str:
    """Return the text that identifies the model: its commit on the Hub, or a hash that stands for its files.

    For an engine without a model, this is the engine's name. Downloads no weights.

    Raises:
        ConfigError: the engine or the model does not exist, or the configuration cannot work.
        InputError, AccessDenied, StorageError, EngineLoadError: as in `models.describe_model`.
    """
    kind = check_engine(config)
    if not kind.needs_model:
        return kind.name
    from batchinfer.engines.models import describe_model

    return describe_model(config).identity


def longest_sequence(config: EngineConfig) -> int | None:
    """Return the most tokens that prompt and answer may have together.

    Returns:
        None if the engine has no limit, or if the limit is known only after the model is loaded.
    """
    typed = config.server_options.get("max_model_len")
    if isinstance(typed, int) and typed > 0:
        return typed
    if not find_engine(config.engine).needs_model:
        return None
    from batchinfer.engines.models import describe_model

    return describe_model(config).max_model_len or None


# --------------------------------------------------------------------------- several replicas


def share_out(held: Sequence[int], free_slots: Sequence[int], count: int) -> list[int]:
    """Divide `count` calls among replicas so that all hold about equally many. Pure.

    Args:
        held: Number of calls that each replica holds already.
        free_slots: Number of calls that each replica can take.
        count: Number of calls to divide.

    Returns:
        Number of calls for each replica. The sum is smaller than `count` if there are too few free slots.

    >>> share_out([4, 0, 0], [9, 9, 9], 5)
    [0, 3, 2]
    >>> share_out([0, 0], [2, 9], 6)
    [2, 4]
    """
    shares = [0] * len(held)
    levels = [(held[index], index) for index, free in enumerate(free_slots) if free > 0]
    heapq.heapify(levels)
    for _ in range(count):
        if not levels:
            break
        level, index = levels[0]
        shares[index] += 1
        if shares[index] < free_slots[index]:
            heapq.heapreplace(levels, (level + 1, index))
        else:
            heapq.heappop(levels)
    return shares
