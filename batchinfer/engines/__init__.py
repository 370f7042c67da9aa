"""The door of the room: what an engine is, which engines there are, and how to make one.

`ENGINES` is the only place that tells one engine from another. A new engine is a module that implements `Engine`, and
an entry in the table. Importing this module imports neither vllm nor torch.
"""

from __future__ import annotations

import difflib
import importlib.util
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from batchinfer.core.errors import ConfigError
from batchinfer.core.records import Completion, EngineInfo, EngineStats, Request
from batchinfer.engines.config import EngineConfig, check_config

UNLIMITED_LENGTH = 2**31 - 1
"""`EngineInfo.max_model_len` of an engine without a limit."""


class Stop(Protocol):
    """Read by whoever may wait: true once the worker should end now."""

    def is_set(self) -> bool:
        """Whether to abandon everything and return."""
        ...


class RequestSource(Protocol):
    """Where an engine takes its requests from. Never blocks on storage."""

    def take(self, max_requests: int, free_slots: Sequence[int] = ()) -> list[Request] | None:
        """Up to `max_requests` that are ready now, perhaps none; None once there will never be more.

        Args:
            max_requests: At least 1.
            free_slots: With several replicas, the number of requests that each can take now. The first `free_slots[0]`
                requests go to the first replica, and so on; a source may use this to bring requests together.
        """
        ...

    def wait(self, timeout_seconds: float) -> None:
        """Block until something may have become ready, or the time is up. Called only while nothing is in flight."""
        ...


class Engine(Protocol):
    """Turns requests into completions. One thread opens, drives and closes it."""

    def open(self, stop: Stop) -> EngineInfo:
        """Load the model. Raises EngineLoadError (33), ConfigError (2) for a user's mistake, Interrupted if stopped."""
        ...

    def generate(self, source: RequestSource, stop: Stop) -> Iterator[list[Completion]]:
        """Take requests as there is room and yield what finished, in any order, each with its request's key.

        Yields after every step, at least once a second, perhaps an empty list, so that the caller keeps control.
        A request that the engine refuses comes back as a completion with a failure. Ends when the source gave None
        and nothing is in flight, or soon after `stop` is set (what is in flight is abandoned).

        Raises:
            EngineDied: an engine process ended; the engine can only be closed afterwards.
            EngineStalled: no progress for the configured time.
        """
        ...

    def stats(self) -> EngineStats:
        """Counters since `open`. Cheap."""
        ...

    def close(self) -> None:
        """End every process and free what was held. Idempotent; also after a failure."""
        ...


# --------------------------------------------------------------------------- which engines there are


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineKind:
    """What the rest of the package needs to know of one engine without importing it."""

    name: str
    """Value of ``--engine``."""
    summary: str
    """Words for the help of ``--engine``; empty for the default engine."""
    needs_model: bool
    """Whether it loads a model. The model's files then say its identity, tokenizer and length, and how many GPUs a
    replica takes. An engine without a model takes texts and conversations as they are, sees no GPU, and has its own
    name for an identity."""
    is_rehearsal: bool
    """Whether it only plays an engine: one replica runs inside the worker, and where it has a process of its own, a
    rehearsed crash ends that process by SIGKILL as a real one would."""
    create: Callable[[EngineConfig], Engine]
    """Makes one that runs in the calling process; not open yet. The only function that imports the engine's module."""
    check_installed: Callable[[], None]
    """Raises ConfigError when the engine's package cannot be imported. Imports nothing."""
    check_parameters: Callable[[Iterable[str]], None]
    """Raises ConfigError for a name that is no sampling parameter of the engine. Imports nothing heavy."""


def _create_vllm(config: EngineConfig) -> Engine:
    from batchinfer.engines.vllm_engine import VllmEngine

    return VllmEngine(config)


def _create_echo(config: EngineConfig) -> Engine:
    from batchinfer.engines.echo import EchoEngine

    return EchoEngine(config)


def _require_vllm() -> None:
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError(
            "--engine vllm: the package vllm is not installed in this environment",
            hint="in batchinfer's checkout: pip install '.[vllm]' on a machine with GPUs, `bash scripts/setup.sh "
            "--extras cpu` on one without; --engine echo needs neither",
        )


def _check_vllm_parameters(names: Iterable[str]) -> None:
    from batchinfer.engines.vllm_requests import check_parameter_names

    check_parameter_names(names)


ENGINES = {
    kind.name: kind
    for kind in (
        EngineKind(
            name="vllm",
            summary="",
            needs_model=True,
            is_rehearsal=False,
            create=_create_vllm,
            check_installed=_require_vllm,
            check_parameters=_check_vllm_parameters,
        ),
        EngineKind(
            name="echo",
            summary="to rehearse without a model",
            needs_model=False,
            is_rehearsal=True,
            create=_create_echo,
            check_installed=lambda: None,
            check_parameters=lambda _: None,
        ),
    )
}
"""Every engine by its name. The default is that of `EngineConfig`."""


def find_engine(name: str) -> EngineKind:
    """Look an engine up by its name.

    Raises:
        ConfigError: there is none of that name; the message lists them all.
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
    """Refuse an engine that does not exist, and a configuration that no engine could run. Pure.

    Raises:
        ConfigError: the message names the option.
    """
    kind = find_engine(config.engine)
    check_config(config)
    if kind.needs_model and not config.model:
        rehearsal = next(each.name for each in ENGINES.values() if not each.needs_model)
        raise ConfigError(
            "--model: is missing, expected a model's folder or its name on the Hub",
            hint=f"add --model Qwen/Qwen3-0.6B, or --engine {rehearsal} to rehearse without a model",
        )
    return kind


def has_model(config: EngineConfig) -> bool:
    """Whether a model is named whose files can be looked at. An unknown engine may have one."""
    kind = ENGINES.get(config.engine)
    return bool(config.model) and (kind is None or kind.needs_model)


def create_engine(config: EngineConfig) -> Engine:
    """Make an engine that is not open yet. Starts nothing, and imports neither vllm nor torch.

    Raises:
        ConfigError: no such engine, its package is not installed, or the configuration cannot work.
    """
    kind = check_engine(config)
    kind.check_installed()
    if kind.is_rehearsal and (config.in_process or config.replicas in {1, "auto"}):
        return kind.create(config)
    from batchinfer.engines.pool import ProcessPool

    return ProcessPool(config)


def identify_model(config: EngineConfig) -> str:
    """A model's commit on the Hub, or a hash of its local folder. Reads its small files only.

    Raises:
        ConfigError: there is no such engine or model, or the configuration cannot work.
    """
    kind = check_engine(config)
    if not kind.needs_model:
        return kind.name
    from batchinfer.engines.models import describe_model

    return describe_model(config).identity


def longest_sequence(config: EngineConfig) -> int | None:
    """Tokens of prompt and answer together, as far as that is known without loading the model."""
    if config.max_model_len is not None or not find_engine(config.engine).needs_model:
        return config.max_model_len
    from batchinfer.engines.models import describe_model

    return describe_model(config).max_model_len or None


# --------------------------------------------------------------------------- several replicas


def share_out(held: Sequence[int], free_slots: Sequence[int], count: int) -> list[int]:
    """How many of `count` requests each replica gets, so that all hold as equally many as their free slots allow. Pure.

    >>> share_out([4, 0, 0], [9, 9, 9], 5)
    [0, 3, 2]
    >>> share_out([0, 0], [2, 9], 6)
    [2, 4]
    """
    shares = [0] * len(held)
    while count > 0:
        open_ones = [index for index in range(len(held)) if shares[index] < free_slots[index]]
        if not open_ones:
            break
        lowest = min(held[index] + shares[index] for index in open_ones)
        lowest_ones = [index for index in open_ones if held[index] + shares[index] == lowest]
        next_level = min(
            (
                held[index] + shares[index]
                for index in open_ones
                if held[index] + shares[index] > lowest
            ),
            default=lowest + count,
        )
        step = max(1, min(next_level - lowest, count // len(lowest_ones)))
        for index in lowest_ones:
            given = min(step, free_slots[index] - shares[index], count)
            shares[index] += given
            count -= given
    return shares
