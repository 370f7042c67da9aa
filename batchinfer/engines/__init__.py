"""The interface of engines, the table of all engines, and the function that creates one.

`ENGINES` lists the engines, with what the rest of the package must know of each. To add an engine, write a module that
implements `Engine`, add an entry to `ENGINES`, and name it in the help of ``--engine``. Importing this module imports
neither vllm nor torch.
"""

from __future__ import annotations

import difflib
import importlib.util
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from batchinfer.core.errors import ConfigError
from batchinfer.core.records import (
    Completion,
    EngineInfo,
    EngineStats,
    Request,
    Sampling,
    TextPiece,
)
from batchinfer.core.tasks import PairForm, is_pooling
from batchinfer.engines import openai_options
from batchinfer.engines.config import EngineConfig, check_config

if TYPE_CHECKING:
    from batchinfer.engines.nodes import Leader

UNLIMITED_LENGTH = 2**31 - 1
"""Value of `EngineInfo.max_model_len` for an engine that has no longest sequence."""


class Stop(Protocol):
    """A stop signal, which tells an engine to drop its work and return."""

    def is_set(self) -> bool:
        """Whether to drop all work and return now."""
        ...


class RequestSource(Protocol):
    """The stream from which an engine takes its requests. Its methods never read or write storage."""

    def take(self, max_requests: int, free_slots: Sequence[int] = ()) -> list[Request] | None:
        """Return up to `max_requests` requests that are ready now. The list may be empty.

        The caller of `Engine.generate` prepares new requests each time that `generate` yields. So an engine that got
        an empty list yields before it calls `take` again.

        Args:
            max_requests: Most requests to return; at least 1.
            free_slots: Number of requests that each replica can take now; empty if there is only one replica. The
                first `free_slots[0]` requests go to the first replica, the next `free_slots[1]` to the second, and so
                on. A source may use this to send similar requests to the same replica.

        Returns:
            The requests, or None if the source will never have another request.
        """
        ...

    def wait(self, timeout_seconds: float) -> None:
        """Wait until a request may be ready, but at most `timeout_seconds`.

        An engine calls this only while it has no request in flight.
        """
        ...


class Engine(Protocol):
    """Turns requests into completions. The same thread opens, drives and closes it."""

    def open(self, stop: Stop) -> EngineInfo:
        """Load the model.

        Raises:
            EngineLoadError: loading failed; another start may help.
            ConfigError: the configuration cannot work.
            AccessDenied: a store, the Hub or an endpoint refuses access.
            StorageError: the files of a model in a bucket cannot be fetched.
            Interrupted: `stop` was set while the model was loading.
        """
        ...

    def generate(self, source: RequestSource, stop: Stop) -> Iterator[list[Completion]]:
        """Take requests whenever slots are free, and yield the completions that finished, in any order.

        The generator usually yields at least once a second, so that the caller can do other work in between. The list
        may be empty. A request that the engine refuses comes back as a completion with a failure. If an engine process
        ends and the engine goes on, with its other processes or a new one, each request that may be the cause comes
        back with a failure whose `is_engine_death` is true. The caller decides who tries it again, and when. The
        generator ends when the source has returned None and no request is in flight. It also ends soon after `stop` is
        set, and then drops the requests in flight.

        Raises:
            EngineDied: an engine process ended, and none is left. Only `close` may be called afterwards.
            EngineStalled: the engine made no progress for `stall_seconds`. Only `close` may be called afterwards.
        """
        ...

    def take_pieces(self) -> list[TextPiece]:
        """Return the pieces of streamed requests since the last call. Returns at once.

        Callers that stream call it each time that `generate` yields. The pieces of an answer come in order, all before
        or with the yield of the request's completion, and make up the answer's text. An answer may also have no piece:
        with `best_of`, the answers to keep are known only at the end, and at temperature 0 an engine may generate one
        answer for all. If the completion is a failure, the pieces before it are void.
        """
        ...

    def stats(self) -> EngineStats:
        """Return the engine's counters since `open`. Returns at once."""
        ...

    def close(self) -> None:
        """End all processes of the engine and free its memory. May be called twice, and after a failure."""
        ...


# --------------------------------------------------------------------------- the table of engines


def _accept(*_: object) -> None:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineKind:
    """The description of an engine, which the rest of the package uses without importing the engine's module."""

    name: str
    """Value of ``--engine``."""
    needs_model: bool
    """Whether the engine loads a model. If so, the model's files decide its identity in the run, its tokenizer, its
    longest sequence, and the number of GPUs per replica. If not, the engine takes texts and conversations without a
    tokenizer, gets no GPU, and its name is the identity."""
    is_rehearsal: bool
    """Whether the engine only imitates a real engine. If so, a single replica runs inside the worker's process. Several
    replicas run in a process each; when such a replica raises EngineDied, its process kills itself by SIGKILL, so that
    the worker sees what it would see in a real crash."""
    create: Callable[[EngineConfig], Engine]
    """Function that creates an engine in the calling process, without opening it. The engine's module is imported only
    when this function runs."""
    is_remote: bool = False
    """Whether another program, reached by ``--base-url``, runs the model. If so, that program renders conversations and
    tokenizes prompts. The engine needs the model's name but none of its files, and runs in the worker's process."""
    own_parameters: frozenset[str] = frozenset()
    """Names of request parameters that go to the engine unread."""
    check_installed: Callable[[], None] = _accept
    """Function that raises ConfigError if the engine's package is not installed. It does not import the package."""
    check_parameters: Callable[[str, Iterable[str]], None] = _accept
    """Function that raises ConfigError if one of the names is not a sampling parameter of the engine. The first
    argument is the option that the names were given to, for the message. It does not import the engine's package."""
    check_arguments: Callable[[Mapping[str, Any]], None] = _accept
    """Function that raises ConfigError if one of the names is no engine argument, or has a wrong value."""
    check_options: Callable[[EngineConfig], None] = _accept
    """Function that raises ConfigError if an option does not fit the engine. Starts nothing, and asks no other
    machine."""
    look: Callable[[EngineConfig], None] = _accept
    """Function that raises UsageError if the program that runs the model cannot be reached, or refuses the model."""


def _create_vllm(config: EngineConfig) -> Engine:
    from batchinfer.engines.vllm_engine import VllmEngine

    return VllmEngine(config)


def _create_echo(config: EngineConfig) -> Engine:
    from batchinfer.engines.echo import EchoEngine

    return EchoEngine(config)


def _create_openai(config: EngineConfig) -> Engine:
    from batchinfer.engines.openai_engine import OpenAIEngine

    return OpenAIEngine(config)


def _require_openai() -> None:
    if importlib.util.find_spec("openai") is None:
        raise ConfigError(
            "--engine openai: the package openai is not installed in this environment",
            hint="pip install openai, or in batchinfer's checkout: pip install '.[openai]'",
        )


def _look_openai(config: EngineConfig) -> None:
    from batchinfer.engines.openai_engine import look

    _require_openai()
    look(config)


def _require_vllm() -> None:
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError(
            "--engine vllm: the package vllm is not installed in this environment",
            hint="in batchinfer's checkout: pip install '.[vllm]' on a machine with GPUs, `bash scripts/setup.sh "
            "--extras cpu` on one without; --engine echo needs neither",
        )


def _check_parameters(option: str, names: Iterable[str]) -> None:
    from batchinfer.engines.vllm_names import SAMPLING, check_names
    from batchinfer.prompts.parameters import ALIASES

    check_names(option, SAMPLING, names, others={*Sampling.__struct_fields__, *ALIASES})


def _check_arguments(arguments: Mapping[str, Any]) -> None:
    from batchinfer.engines.vllm_names import ARGUMENTS, SPECULATION, check_names

    check_names("--engine-arg", ARGUMENTS, arguments)
    speculation = arguments.get("speculative_config")
    if isinstance(speculation, dict):
        check_names("--speculative-config", SPECULATION, speculation)


def _check_options(config: EngineConfig) -> None:
    from batchinfer.engines.vllm_names import (
        CALL_PARSERS,
        REASONING_PARSERS,
        check_parser,
        check_quantization,
    )

    check_quantization("--quantization", config.quantization or "")
    check_parser("--tool-call-parser", CALL_PARSERS, config.tool_call_parser)
    check_parser("--reasoning-parser", REASONING_PARSERS, config.reasoning_parser)


ENGINES = {
    kind.name: kind
    for kind in (
        EngineKind(
            name="vllm",
            needs_model=True,
            is_rehearsal=False,
            create=_create_vllm,
            check_installed=_require_vllm,
            check_parameters=_check_parameters,
            check_arguments=_check_arguments,
            check_options=_check_options,
        ),
        EngineKind(
            name="echo",
            needs_model=False,
            is_rehearsal=True,
            create=_create_echo,
            # A rehearsal refuses the names that the real run would refuse.
            check_parameters=_check_parameters,
            check_arguments=_check_arguments,
            check_options=_check_options,
        ),
        EngineKind(
            name="openai",
            needs_model=False,
            is_rehearsal=False,
            create=_create_openai,
            is_remote=True,
            own_parameters=openai_options.PASSED_NAMES,
            check_installed=_require_openai,
            check_parameters=openai_options.check_parameters,
            check_options=openai_options.check_options,
            look=_look_openai,
        ),
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
    """Refuse an unknown engine, and a configuration that it could not run. Loads nothing.

    Returns:
        The engine's entry in `ENGINES`.

    Raises:
        ConfigError: the message names the option that is wrong.
    """
    kind = find_engine(config.engine)
    check_config(config)
    if config.nnodes > 1 and not kind.needs_model:
        raise ConfigError(
            f"--nnodes with --engine {kind.name}: this engine runs on one machine",
            hint="leave --nnodes out",
        )
    kind.check_options(config)
    if config.engine_args:
        kind.check_arguments(config.engine_args)
    if kind.needs_model and not config.model:
        rehearsal = next(each.name for each in ENGINES.values() if each.is_rehearsal)
        raise ConfigError(
            "--model: is missing, expected a model's folder or its name on the Hub",
            hint=f"add --model Qwen/Qwen3-0.6B, or --engine {rehearsal} to rehearse without a model",
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


def pair_form_of(config: EngineConfig) -> PairForm:
    """Return how the model reads a pair of texts. Reads the model's config if the task needs a pooling model."""
    if not is_pooling(config.task) or not has_model(config):
        return PairForm.APART
    from batchinfer.engines.models import describe_model

    return describe_model(config).pairs


def own_parameters_of(config: EngineConfig) -> frozenset[str]:
    """Return `EngineKind.own_parameters` of the configuration's engine. An unknown engine has none."""
    kind = ENGINES.get(config.engine)
    return frozenset() if kind is None else kind.own_parameters


def create_engine(config: EngineConfig, nodes: Leader | None = None) -> Engine:
    """Create an engine without opening it. Starts no process, and imports neither vllm nor torch.

    Args:
        config: The engine's configuration.
        nodes: Connections to the other machines that run the model, if there are any.

    Raises:
        ConfigError: the engine is unknown, its package is not installed, or the configuration cannot work.
    """
    kind = check_engine(config)
    kind.check_installed()
    if kind.is_remote or (
        kind.is_rehearsal and (config.in_process or config.replicas in {1, "auto"})
    ):
        return kind.create(config)
    from batchinfer.engines.pool import ProcessPool

    return ProcessPool(config, nodes)


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
    if config.max_model_len is not None or not find_engine(config.engine).needs_model:
        return config.max_model_len
    from batchinfer.engines.models import describe_model

    return describe_model(config).max_model_len or None


# --------------------------------------------------------------------------- several replicas


def share_out(held: Sequence[int], free_slots: Sequence[int], count: int) -> list[int]:
    """Divide `count` requests among replicas so that all hold about equally many. Pure.

    Args:
        held: Number of requests that each replica holds already.
        free_slots: Number of requests that each replica can take.
        count: Number of requests to divide.

    Returns:
        Number of requests for each replica. The sum is smaller than `count` if there are too few free slots.

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
