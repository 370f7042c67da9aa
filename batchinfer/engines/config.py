"""The options that decide how an engine is started. What a body says (sampling and the like) is not among them.

Options of vLLM's server are not declared here. They stay in `EngineConfig.server_args` as they were typed, and vLLM's
own parser judges them.
"""

from __future__ import annotations

import importlib.resources
import re
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from functools import cache
from typing import Any, Literal

import msgspec

from batchinfer.core.errors import ConfigError
from batchinfer.core.records import Record
from batchinfer.core.tasks import GENERATE, is_pooling

CONSTRAINTS = {"backend": "xgrammar", "disable_any_whitespace": True}
"""Our default of vLLM's --structured-outputs-config.

vLLM's own default is the backend "auto": the first constrained request of a server decides the backend for all later
ones, so answers would depend on the order of the rows. Without `disable_any_whitespace`, models may fill JSON with
white space up to `max_tokens`.
"""
# An option in a command line: two dashes or one, and a letter. A negative number is none.
_OPTION = re.compile(r"--?[A-Za-z]")


class EchoOptions(Record, frozen=True, kw_only=True, omit_defaults=True):
    """Options of ``--engine echo``; `batchinfer.engines.echo` describes them."""

    latency_seconds: float = 0.0
    load_seconds: float = 0.0


class EngineConfig(Record, frozen=True, kw_only=True, omit_defaults=True):
    """The engine that a user asks for, with its options. A field that is None is left to the engine or the model."""

    engine: str = "vllm"
    task: str = GENERATE
    """One of `core.tasks.TASKS`."""
    model: str = ""
    revision: str | None = None
    model_cache: str | None = None
    """Folder in which models from buckets are kept; None for the default of `buckets.cache_folder`."""
    tensor_parallel_size: int | None = None
    pipeline_parallel_size: int = 1
    nnodes: int = 1
    """Number of machines ("nodes") that run the model together."""
    node_rank: int = 0
    """Number of this node. Node 0 is the worker, the others only compute."""
    master_addr: str = ""
    """Address of node 0."""
    master_port: int = 29501
    """Port of node 0 at which vLLM connects the nodes. `batchinfer.engines.headless` uses the next port."""
    replicas: int | Literal["auto"] = "auto"
    """Number of servers. With "auto", each server gets the fewest GPUs that serve the model well, and there are as many
    servers as the GPUs suffice for."""
    gpus: list[str] | None = None
    """GPUs to use, as indices or UUIDs like those in CUDA_VISIBLE_DEVICES; None means all visible GPUs."""
    loras: dict[str, str] = {}
    """Folder, URL or Hub name of each LoRA adapter, by the name by which rows ask for it."""
    server_command: str = ""
    """Command that starts another server in vLLM's place, with {model} and {port} or {socket} to be filled in."""
    server_args: list[str] = []
    """Further options of the server, as typed: ["--max-model-len", "8192", "--enforce-eager"]."""
    seed: int = 0
    stall_seconds: float = 300.0
    """Seconds without a token and without an answer, while calls are in flight, after which a server counts as hung.
    For endpoints: seconds that an outage may last."""
    load_timeout_seconds: float = 1800.0
    scratch_dir: str | None = None
    """Folder under which the servers' logs and sockets are; None for the system's folder of temporary files."""

    base_urls: list[str] = []
    """URLs of the endpoints. This field and the next four concern ``--engine openai``."""
    max_concurrency: int = 100
    """Calls under way at once at each endpoint, or at each server whose own limit we do not know."""
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    request_timeout_seconds: float = 600.0
    """Seconds that one attempt at a call to an endpoint may take."""

    echo: EchoOptions = EchoOptions()

    @property
    def is_pooling(self) -> bool:
        """Whether the task needs a pooling model."""
        return is_pooling(self.task)

    @property
    def server_options(self) -> dict[str, Any]:
        """The options in `server_args` by their names with underscores; see `parse_args`."""
        return parse_args(self.server_args)

    @property
    def answer_options(self) -> dict[str, Any]:
        """Those of `server_options` that may change answers. They must be the same for all workers of a run."""
        return {
            name: value
            for name, value in self.server_options.items()
            if not any(fnmatchcase(name.partition(".")[0], each) for each in worker_args())
        }

    @property
    def served_names(self) -> list[str]:
        """Names of the model at the server. The first is what bodies say in "model". Adapters have their own."""
        typed = self.server_options.get("served_model_name")
        if typed:
            return [str(name) for name in (typed if isinstance(typed, list) else [typed])]
        return ["echo"] if self.engine == "echo" else [self.model]


def parse_args(arguments: Sequence[str]) -> dict[str, Any]:
    """Read typed options as a server's parser would, as far as that goes without knowing them.

    Numbers, JSON, true and false become such values. An option without a value is True, ``--no-x`` makes `x` False, and
    an option with several values, or that is repeated, has a list.

    >>> parse_args(["--max-model-len", "8192", "--no-enable-x", "--quantization=fp8"])
    {'max_model_len': 8192, 'enable_x': False, 'quantization': 'fp8'}
    """
    found: dict[str, Any] = {}
    for option, values in _grouped(arguments):
        name = option.lstrip("-").replace("-", "_")
        value: Any = [_value(each) for each in values]
        if not value:
            value = [not name.startswith("no_")]
            name = name.removeprefix("no_")
        if name in found:
            before = found[name]
            value = [*(before if isinstance(before, list) else [before]), *value]
        found[name] = value[0] if len(value) == 1 else value
    return found


def _grouped(arguments: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield each option with the values that follow it. Values before the first option are left out."""
    option, values = "", list[str]()
    for argument in arguments:
        if not _OPTION.match(argument):
            values.append(argument)
            continue
        if option:
            yield option, values
        option, _, value = argument.partition("=")
        values = [value] if "=" in argument else []
    if option:
        yield option, values


def _value(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        return {"True": True, "False": False}.get(text, text)


@cache
def worker_args() -> tuple[str, ...]:
    """Return name patterns of the server's options, from worker_args.txt, that may differ between workers of a run."""
    text = importlib.resources.files("batchinfer.engines").joinpath("worker_args.txt").read_text()
    return tuple(line for line in text.splitlines() if not line.startswith("#"))


def check_config(config: EngineConfig) -> None:
    """Refuse options that contradict each other, before anything is started. Pure.

    Raises:
        ConfigError: the message names them.
    """
    if config.replicas != "auto" and config.replicas < 1:
        raise ConfigError(f"--replicas: is {config.replicas}, expected at least 1")
    command = config.server_command
    if command and not any(place in command for place in ("{port}", "{socket}")):
        raise ConfigError(
            f"--server-command {command}: says nowhere where the server shall listen",
            hint="put {port} (at 127.0.0.1) or {socket} (a unix socket) where the server takes it, and {model}",
        )
    _check_nodes(config)


def _check_nodes(config: EngineConfig) -> None:
    """Refuse options of several nodes that contradict each other."""
    if not 0 <= config.node_rank < config.nnodes:
        raise ConfigError(
            f"--node-rank: is {config.node_rank}, expected 0 to {config.nnodes - 1}, below --nnodes"
        )
    if config.nnodes == 1:
        return
    if not config.master_addr:
        raise ConfigError(
            f"--nnodes {config.nnodes} without --master-addr: expected the address of node 0",
            hint="give it, and the same --master-port, to every node",
        )
    if config.replicas not in {1, "auto"}:
        raise ConfigError("--replicas with --nnodes: several nodes run one replica together")
    size = (config.tensor_parallel_size or config.nnodes) * config.pipeline_parallel_size
    if size % config.nnodes:
        raise ConfigError(
            f"--tensor-parallel-size x --pipeline-parallel-size: is {size}, expected a multiple of --nnodes "
            f"{config.nnodes}",
            hint="every node has the same number of GPUs",
        )
