"""The options that decide how an engine is started. What a body says (sampling and the like) is not among them.

Options of vLLM's server are not declared here. They stay in `EngineConfig.server_args` as they were typed, and vLLM's
own parser judges them.
"""

from __future__ import annotations

import contextlib
import importlib.resources
import re
import shlex
from collections.abc import Sequence
from fnmatch import fnmatchcase
from functools import cache
from typing import Annotated, Any, ClassVar, Literal
from urllib.parse import urlsplit

import msgspec

from batchinfer.core.errors import ConfigError
from batchinfer.core.option_help import NO_OPTION, RECORDED, Count, NotNegative, Opt, Positive
from batchinfer.core.records import Record
from batchinfer.core.tasks import GENERATE, Task, is_pooling

CONSTRAINTS = {"backend": "xgrammar", "disable_any_whitespace": True}
"""Our default of vLLM's --structured-outputs-config.

vLLM's own default is the backend "auto": the first constrained request of a server decides the backend for all later
ones, so answers would depend on the order of the rows. Without `disable_any_whitespace`, models may fill JSON with
white space up to `max_tokens`.
"""
NODE_OPTIONS = ("--nnodes", "--node-rank", "--master-addr", "--master-port", "--headless")
"""The server's options for a model that several machines run together."""
_PARALLEL = ("tensor_parallel_size", "pipeline_parallel_size", "nnodes", "node_rank", "master_port")
OPTION = re.compile(r"--?[A-Za-z]")
"""An option in a command line: two dashes or one, and a letter. A negative number is none."""


class EngineConfig(Record, frozen=True, kw_only=True, omit_defaults=True):
    """The engine that a user asks for, with its options. A field that is None is left to the engine or the model."""

    SECTION: ClassVar[str] = "engine"

    engine: Annotated[Literal["vllm", "openai", "echo"], RECORDED] = "vllm"
    """vllm; openai, a running endpoint; or echo, to rehearse without a model."""
    model: Annotated[str, Opt(section="model", is_first=True, is_recorded=True)] = ""
    """Name on the Hub, or folder, here or in a bucket."""
    task: Annotated[Task, Opt(section="model", metavar="TASK", is_recorded=True)] = GENERATE
    """What the model makes of a row: a text (generate), a vector (embed, token-embed), the probabilities of classes
    (classify), a number (score, reward), an order (rerank), or the text of a sound (transcribe, translate); see
    docs/features.md."""
    revision: Annotated[str | None, Opt(section="model")] = None
    """Commit, tag or branch of the model. Default: the run's, else the latest."""
    loras: Annotated[
        dict[str, str],
        Opt(form="adapters", flag="--lora", section="model", metavar="NAME=PATH", is_recorded=True),
    ] = {}
    """LoRA adapter: its name for rows, and its folder, URL or name on the Hub; may be repeated."""
    replicas: Annotated[Count | Literal["auto"], Opt(form="auto")] = "auto"
    """Servers, each on its own GPUs, or auto: the fewest GPUs that serve the model well for each, on all GPUs."""
    gpus: Annotated[list[str] | None, Opt(form="names")] = None
    """GPUs to use, as numbers or UUIDs, e.g. 2,5. Default: all that are visible."""
    server_command: Annotated[str, Opt(metavar="COMMAND", is_recorded=True)] = ""
    """Start another server in vLLM's place, with {model} and {socket} or {port} where it takes them; see
    docs/engine.md."""
    stall_seconds: Positive = 300.0
    """Without a token and an answer for so long, while rows are in flight, a server counts as hung. An endpoint counts
    as down so long after the first attempt that failed, or took --request-timeout-seconds."""
    load_timeout_seconds: Positive = 1800.0
    """Longest time that the model may take to load."""

    base_urls: Annotated[
        list[str], Opt(flag="--base-url", section="endpoint", metavar="URL", is_recorded=True)
    ] = []
    """With --engine openai: URL of an endpoint that speaks the OpenAI API, e.g. http://127.0.0.1:8000/v1; may be
    repeated, to share the rows. Its key comes from OPENAI_API_KEY."""
    max_concurrency: Annotated[Count, Opt(section="endpoint")] = 100
    """Requests under way at once, at each endpoint, and at each server whose own limit is not known."""
    requests_per_minute: Annotated[Count | None, Opt(section="endpoint")] = None
    """Most requests that are sent in a minute."""
    tokens_per_minute: Annotated[Count | None, Opt(section="endpoint")] = None
    """Most tokens, of prompts and answers together, in a minute."""
    request_timeout_seconds: Annotated[Positive, Opt(section="endpoint")] = 600.0
    """Longest time that one attempt at a request may take."""

    echo_latency_seconds: Annotated[NotNegative, Opt(section="rehearsal")] = 0.0
    """Mean latency of a row."""

    server_args: Annotated[list[str], NO_OPTION] = []
    """Further options of the server, as typed: ["--max-model-len", "8192", "--enforce-eager"]."""
    tensor_parallel_size: Annotated[int | None, NO_OPTION] = None
    """Number of GPUs that share each layer in a replica; None for the fewest that fit. This field and the next five are
    read from `server_args`."""
    pipeline_parallel_size: Annotated[int, NO_OPTION] = 1
    nnodes: Annotated[int, NO_OPTION] = 1
    """Number of machines ("nodes") that run the model together."""
    node_rank: Annotated[int, NO_OPTION] = 0
    """Number of this node. Node 0 is the worker, the others only compute."""
    master_addr: Annotated[str, NO_OPTION] = ""
    """Address of node 0."""
    master_port: Annotated[int, NO_OPTION] = 29501
    """Port of node 0 at which vLLM connects the nodes. `batchinfer.engines.headless` uses the next port."""
    seed: Annotated[int, NO_OPTION] = 0
    scratch_dir: Annotated[str | None, NO_OPTION] = None
    """Folder under which the servers' logs and sockets are; None for the system's folder of temporary files."""

    @property
    def is_pooling(self) -> bool:
        """Whether the task needs a pooling model."""
        return is_pooling(self.task)

    @property
    def server_options(self) -> dict[str, Any]:
        """The options in `server_args` by their names with underscores; see `parse_args`."""
        return parse_args(self.server_args)

    def typed_number(self, name: str) -> int | None:
        """Return the value of one of `server_options` that is a whole number, also as in 8k and 8K; None without one.

        vLLM's parser takes more, such as -1 and auto, and refuses what is no value. Of several it takes the last.
        """
        value = self.server_options.get(name)
        value = value[-1] if isinstance(value, list) else value
        if isinstance(value, str) and (found := re.fullmatch(r"(\d+(?:\.\d+)?)([kKmM])", value)):
            scale = {"k": 1000, "K": 1 << 10, "m": 10**6, "M": 1 << 20}[found[2]]
            value = int(float(found[1]) * scale)
        return value if type(value) is int and value > 0 else None

    @property
    def tokenizer(self) -> tuple[str, str | None]:
        """Name and revision of the tokenizer. The model's revision is none of another repository."""
        typed = self.server_options
        name = str(typed.get("tokenizer") or self.model)
        own = self.revision if name == self.model else None
        revision = typed.get("tokenizer_revision", own)
        return name, revision and str(revision)

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


def parallel_options(server_args: Sequence[str]) -> dict[str, Any]:
    """Return the options in `server_args` that say how GPUs and machines share a model, as fields of `EngineConfig`.

    A value that cannot be is left out; the server's parser refuses it.
    """
    typed = parse_args(server_args)
    found = {name: typed[name] for name in _PARALLEL if type(typed.get(name)) is int}
    found = {name: value for name, value in found.items() if value >= (name != "node_rank")}
    return found | {"master_addr": str(typed.get("master_addr", ""))}


def without_parallel_options(server_args: Sequence[str]) -> list[str]:
    """Return the options that go to a server in vLLM's place, which gets what is parallel by {gpus}.

    >>> without_parallel_options(["--tensor-parallel-size", "2", "--more=1"])
    ['--more=1']
    """
    taken = {"--" + name.replace("_", "-") for name in (*_PARALLEL, "master_addr")}
    kept = [pair for pair in grouped(server_args) if pair[0].partition("=")[0] not in taken]
    return [part for option, values in kept for part in (option, *values)]


def parse_args(arguments: Sequence[str]) -> dict[str, Any]:
    """Read typed options as a server's parser would, as far as that goes without knowing them.

    Numbers, JSON, true and false become such values. An option without a value is True, ``--no-x`` makes `x` False, and
    an option with several values, or that is repeated, has a list.

    >>> parse_args(["--max-model-len", "8192", "--no-enable-x", "--quantization=fp8"])
    {'max_model_len': 8192, 'enable_x': False, 'quantization': 'fp8'}
    """
    found: dict[str, Any] = {}
    for word, values in grouped(arguments):
        option, has_value, text = word.partition("=")
        name = option.lstrip("-").replace("-", "_")
        value: Any = [_value(each) for each in ([text] if has_value else []) + values]
        if not value:
            value = [not name.startswith("no_")]
            name = name.removeprefix("no_")
        if name in found:
            before = found[name]
            value = [*(before if isinstance(before, list) else [before]), *value]
        found[name] = value[0] if len(value) == 1 else value
    return found


def grouped(words: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Return each option with the values that follow it. Values before the first option are left out."""
    found: list[tuple[str, list[str]]] = []
    for word in words:
        if OPTION.match(word):
            found.append((word, []))
        elif found:
            found[-1][1].append(word)
    return found


def _value(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (ValueError, RecursionError):
        return {"True": True, "False": False}.get(text, text)


@cache
def worker_args() -> tuple[str, ...]:
    """Return name patterns of the server's options, from worker_args.txt, that may differ between workers of a run."""
    text = importlib.resources.files("batchinfer.engines").joinpath("worker_args.txt").read_text()
    return tuple(line for line in text.splitlines() if not line.startswith("#"))


def _is_endpoint(url: str) -> bool:
    """Whether a text is a URL to which paths can be appended, without a key in it."""
    with contextlib.suppress(ValueError):
        parts = urlsplit(url)
        is_reached = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        return bool(is_reached) and not re.search("//[^/]*@|[?#]", url)
    return False


def check_engine(config: EngineConfig) -> None:
    """Refuse a configuration that an engine could not run. Starts nothing, and asks no other machine. Pure.

    Raises:
        ConfigError: the message names the option that is wrong.
    """
    command = config.server_command
    if config.engine == "openai" and not config.base_urls:
        raise ConfigError("--engine openai: no --base-url", hint="as in http://127.0.0.1:8000/v1")
    if config.engine == "vllm" and config.base_urls:
        raise ConfigError("--base-url: is of no use to --engine vllm", hint="add --engine openai")
    if not all(map(_is_endpoint, config.base_urls)):
        hint = "as in http://127.0.0.1:8000/v1; a key belongs into OPENAI_API_KEY"
        raise ConfigError("--base-url: is no URL of an endpoint", hint=hint)
    if not config.model and config.engine != "echo":
        hint = "add --model Qwen/Qwen3-0.6B, or --engine echo to rehearse without a model"
        raise ConfigError("--model: is missing, expected a folder or a name on the Hub", hint=hint)
    if command and "{port}" not in command and "{socket}" not in command:
        hint = "put {port} (at 127.0.0.1) or {socket} (a unix socket) where the server takes it"
        raise ConfigError(f"--server-command {command}: says not where to listen", hint=hint)
    try:
        shlex.split(command)
    except ValueError as error:
        raise ConfigError(f"--server-command {command}: {error}") from error
    is_node = config.master_addr and 0 <= config.node_rank < config.nnodes
    if (config.nnodes > 1 or config.node_rank) and not is_node:
        message = f"--nnodes {config.nnodes}: expected --master-addr and --node-rank below --nnodes"
        raise ConfigError(message, hint="--master-addr is the address of node 0")
    if config.nnodes > 1 and config.replicas not in {1, "auto"}:
        raise ConfigError("--replicas with --nnodes: several nodes run one replica together")
