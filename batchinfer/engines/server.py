"""Servers of our own: the commands that start them, their processes, and whether they are well.

Each replica is one server, which listens on a unix socket in a folder that only its owner may enter, or at a port of
127.0.0.1 if it cannot do that. What it writes goes to a file beside the socket, and at debug level to our log. `guard`
ends it with the worker, whatever happens to either.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec

from batchinfer.core.errors import BatchinferError, ConfigError, EngineLoadError
from batchinfer.core.events import event
from batchinfer.core.printable import printable
from batchinfer.core.processes import child_environment, describe_exit
from batchinfer.core.records import Record
from batchinfer.engines import Stop, guard
from batchinfer.engines.adapters import check_fit, describe_adapters
from batchinfer.engines.engine_config import EngineConfig, without_parallel_options
from batchinfer.engines.gpus import choose_layout, device_variables, is_cpu_build, visible_gpus
from batchinfer.engines.model_files import local_copy
from batchinfer.engines.models import describe_model
from batchinfer.engines.parent_death import ENGINE_VARIABLE
from batchinfer.engines.targets import Target, slots_for
from batchinfer.engines.vllm_command import batch_sizes, write_vllm_command

logger = logging.getLogger(__name__)

MOST_RESTARTS = 3
"""Starts of a server after deaths in a row without an answered row."""
RESTART_PAUSE_SECONDS = 5.0
"""Seconds between the second such death and the next start; doubles. The memory of a GPU may be free only later."""
GRACE_SECONDS = 8.0
"""Seconds that a server has to end by itself when its engine is closed."""
_VARIABLES = {
    # A connection that a busy server closes while a call is on its way would cost the call another attempt.
    "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "3600",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "PYTHONUNBUFFERED": "1",
}
"""Environment variables of servers, where the user has not set them."""
_NAMES = {
    b"iteration_tokens_total": "steps",
    b"num_preemptions": "preemptions",
    b"prompt_tokens": "prompt_tokens",
    b"prefix_cache_hits": "cached_tokens",
    b"generation_tokens": "completion_tokens",
    b"num_requests_running": "rows",
    b"num_requests_waiting": "rows",
}
"""vLLM's counters and gauges behind the fields of `EngineStats`."""
_COUNTER = re.compile(rb"(?m)^vllm:(%b)(?:_total|_count)?\{.*\} ([\d.e+]+)" % b"|".join(_NAMES))
_LAST_BYTES = 1 << 16
_REASON_LINES = 6
_LONGEST_PATH = 105
"""Most characters of a socket's path: Linux takes 107, and those that vLLM makes in the folder above are two longer."""
_ERROR = re.compile(r"(?:Error|Exception|error)\b: ?\S")
"""Marks the lines of a log that say why something failed."""
_PREFIX = re.compile(
    r"^(?:\x1b\[[\d;]*m|\(\w[^)]* pid=\d+\) *|(?:ERROR|WARNING) [\d-]+ [\d:]+ \[[^\]]*\] ?)*"
)
_NO_MEMORY = re.compile(
    r"OutOfMemoryError|No available memory for the cache|larger than the available KV cache memory"
    r"|less than desired GPU memory utilization|can't allocate memory"
)
"""What vLLM and torch write when the model does not fit. A fresh start would not fit either."""
_MEMORY_ADVICE = (
    "try a smaller --max-model-len or --max-num-seqs, a larger --tensor-parallel-size, a quantized model, "
    "--cpu-offload-gb, or see with nvidia-smi who else uses the GPU"
)


class Launch(Record, frozen=True, kw_only=True):
    """A server to be started."""

    name: str
    command: list[str]
    environment: dict[str, str]
    slots: int
    """Number of calls that it should hold."""
    max_num_seqs: int | None = None
    socket: str = ""
    """Path of the unix socket at which it listens; empty if it listens at `port`."""
    port: int = 0
    device: str = "cpu"
    revision: str = ""


# --------------------------------------------------------------------------- what to start


def plan(config: EngineConfig, folder: Path, stop: Stop | None = None) -> list[Launch]:
    """Decide which servers to start on which GPUs. Fetches a model and adapters that are in a bucket.

    Args:
        config: The configuration.
        folder: Folder for the servers' sockets, which only its owner may enter.
        stop: Ends the fetch.

    Raises:
        ConfigError: the configuration cannot work.
        InputError, AccessDenied, StorageError, EngineLoadError: as in `models.describe_model`.
        Interrupted: `stop` was set.
    """
    info = describe_model(config)
    gpus = visible_gpus(config.gpus)
    layout = choose_layout(info, gpus, config)
    logger.info("%s", layout.explanation)
    config = msgspec.structs.replace(config, tensor_parallel_size=layout.tensor_parallel_size)
    # A server that is started again loads the same commit. vLLM would look for it in the repository of a config, too.
    if info.revision and "hf_config_path" not in config.server_options:
        config = msgspec.structs.replace(config, revision=info.revision)
    model = str(local_copy(config.model, stop) or config.model)
    adapters = describe_adapters(config)
    check_fit(adapters, model, info.revision)
    size = layout.tensor_parallel_size * config.pipeline_parallel_size // config.nnodes
    if idle := max(0, len(gpus) - layout.replicas * size):
        logger.warning("%d of %d GPUs stay idle", idle, len(gpus))
    seqs = None
    if config.server_command:
        # Braces that are no place of ours stay, as in JSON.
        places = {"{model}": model, "{name}": config.served_names[0], "{gpus}": str(size)}
        command = _filled(shlex.split(config.server_command), places)
        command += without_parallel_options(config.server_args)
    else:
        gpu = None if is_cpu_build() or not gpus else gpus[0]
        seqs, tokens = batch_sizes(config, info, gpu)
        command = write_vllm_command(config, model, adapters, seqs, tokens)
    launches = []
    for index in range(layout.replicas):
        group = gpus[index * size : (index + 1) * size]
        listed = f" (GPU {','.join(gpu.id for gpu in group)})" if group else ""
        place, port = str(folder / f"{index}.sock"), 0
        if not any("{socket}" in part for part in command):
            with socket.create_server(("127.0.0.1", 0)) as free:
                place, port = "", free.getsockname()[1]
        if len(place) > _LONGEST_PATH:
            raise ConfigError(
                f"{folder.parent}: its path is too long for sockets in it, expected some 70 characters at most",
                hint="set TMPDIR=/tmp; --scratch-dir names the folder for chunks",
            )
        launch = Launch(
            name=f"replica {index}{listed}",
            command=_filled(command, {"{socket}": place, "{port}": str(port)}),
            environment=device_variables(group, config.gpus),
            slots=slots_for(seqs) if seqs else config.max_concurrency,
            max_num_seqs=seqs,
            socket=place,
            port=port,
            device=group[0].name if group else "cpu",
            revision=info.revision,
        )
        launches.append(launch)
    return launches


def _filled(command: list[str], places: dict[str, str]) -> list[str]:
    """Return a command with values in their places."""
    for place, value in places.items():
        command = [part.replace(place, value) for part in command]
    return command


# --------------------------------------------------------------------------- a server that runs


class OwnServer(Target):
    """A server that we start, under its guard. May be started again after it has ended.

    Args:
        launch: What to start.
        log: File for what the server writes.
    """

    def __init__(self, launch: Launch, log: Path) -> None:
        url = "http://server" if launch.socket else f"http://127.0.0.1:{launch.port}"
        super().__init__(launch.name, url, launch.slots, socket=launch.socket)
        self.launch = launch
        self.is_lost = False
        """Whether it has died so often that it is not started again."""
        self.num_starts = 0
        self.num_deaths = 0
        """Deaths since it last answered a row."""
        self.guard: subprocess.Popen[bytes] | None = None
        self._log = log
        self._read_bytes = 0
        self._counters = self._counters_before = Counter[str]()

    @property
    def counters(self) -> Counter[str]:
        """Counters of all its processes, by the fields of `EngineStats`; of `rows`, those of the present one."""
        return self._counters_before + self._counters

    def start(self) -> None:
        """Start the process. Returns at once."""
        self.num_starts += 1
        self.num_answered = 0
        self._started = self._moved = self._looked = time.monotonic()
        self._progress: Any = None
        self._counters_before, self._counters = self.counters - Counter(rows=sys.maxsize), Counter()
        if self.launch.socket:
            Path(self.launch.socket).unlink(missing_ok=True)
        additions = {name: os.environ.get(name, value) for name, value in _VARIABLES.items()}
        additions |= {**self.launch.environment, ENGINE_VARIABLE: "1"}
        additions["VLLM_API_KEY"] = ""  # only the worker reaches the socket
        is_ours = self.launch.command[0] == sys.executable  # others have packages of their own
        guarded = [sys.executable, "-I", "-S", guard.__file__, str(GRACE_SECONDS)]
        try:
            with self._log.open("ab") as log:
                self._start_bytes = log.tell()
                self.guard = subprocess.Popen(
                    [*guarded, *self.launch.command],
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    # The signals of a terminal are for the worker. But the server stays in its session: where Linux
                    # shares the processor out by session, a core that spins in another one kept the worker asleep.
                    process_group=0,
                    env=child_environment(additions) if is_ours else {**os.environ, **additions},
                )
        except OSError as error:
            hint = "see to the machine's memory, processes and open files; then start it again"
            raise EngineLoadError(f"{self.name}: cannot be started ({error})", hint=hint) from error

    async def look(self, config: EngineConfig) -> str:
        """Look at the server once. Returns why it must be started again; "" while all is well."""
        if why := self.look_at_process():
            return why
        now = time.monotonic()
        if not self.is_ready:
            self.is_ready, self._moved, self._looked = await self.is_healthy(), now, now
            seconds = config.load_timeout_seconds
            if self.is_ready:
                logger.info("%s: loaded", self.name)
            elif now - self._started > seconds:
                return f"not loaded after {seconds:g} s{self._last_lines()}"
            return ""
        # The loop may have stood still since the last look, as after Ctrl-Z. One such time alone makes no stall.
        self._moved += max(0.0, now - self._looked - config.stall_seconds / 2)
        await self.read_counters(config.stall_seconds)
        self._looked = time.monotonic()
        tokens = (self._counters["prompt_tokens"], self._counters["completion_tokens"])
        if (self.num_answered, tokens) != self._progress or not self.in_flight:
            self._progress, self._moved = (self.num_answered, tokens), now
        if now - self._moved > config.stall_seconds:
            waiting = f"{len(self.in_flight)} calls in flight"
            return f"no token and no answer for {config.stall_seconds:g} s with {waiting}"
        return ""

    def look_at_process(self) -> str:
        """Copy the server's new log lines to our log. Returns how it ended, with the lines that say why, or ""."""
        if logger.isEnabledFor(logging.DEBUG):
            with self._log.open("rb") as log:
                log.seek(self._read_bytes)
                data = log.read()
            whole = data[: data.rfind(b"\n") + 1]
            self._read_bytes += len(whole)
            for line in whole.decode("utf-8", "replace").splitlines():
                logger.debug("%s: %s", self.name, line)
        status = self._exit_status()
        return "" if status is None else describe_exit(status) + self._last_lines()

    def _exit_status(self) -> int | None:
        """Return the server's exit status, negative for a signal; None while it runs."""
        status = self.guard.poll() if self.guard is not None else None
        return 128 - status if status and status - 128 in signal.valid_signals() else status

    async def is_healthy(self) -> bool:
        """Whether the server says that it is well. Some in vLLM's place have no /health, but a list of models."""
        status = (await self.get("/health")).status
        return (status if status != 404 else (await self.get("/v1/models")).status) == 200

    async def read_counters(self, most_seconds: float = 2.0) -> None:
        """Read the server's counters. Servers without any answer something else, which changes nothing."""
        found = Counter[str]()
        for name, value in _COUNTER.findall((await self.get("/metrics", most_seconds)).body):
            found[_NAMES[name]] += int(float(value))
        self._counters = found or self._counters

    def _last_lines(self) -> str:
        """Return the lines that say why the server failed, or its last ones, as a text to append."""
        lines = [_PREFIX.sub("", line).strip() for line in self._last().splitlines()]
        errors = list(dict.fromkeys(line for line in lines if _ERROR.search(line)))
        chosen = (errors or [line for line in lines if line])[-_REASON_LINES:]
        return "; its log says:\n  " + "\n  ".join(chosen) if chosen else ""

    def _last(self) -> str:
        with self._log.open("rb") as log:
            log.seek(max(self._start_bytes, self._log.stat().st_size - _LAST_BYTES))
            return printable(log.read().decode("utf-8", "replace"))

    def load_error(self, reason: str) -> BatchinferError:
        """Return the error for a server that ended, or is given up, before it was ready."""
        message, status = f"{self.name}: {reason}", self._exit_status()
        if status is None:
            return EngineLoadError(message, hint="--load-timeout-seconds gives it longer")
        what, hint, last = "the server does not start", "", self._last()
        if status in (2, 127):  # vLLM's own if options, the model or an adapter are wrong
            hint = "see the options after --model; fields of requests go by --sampling NAME=VALUE"
            if missing := re.search(r"No module named '(\w+)", last):
                hint = f"install the package {missing[1]}"
        elif _NO_MEMORY.search(last):
            what, hint = "the model does not fit into memory", _MEMORY_ADVICE
        elif "torchvision::nms" in last:
            hint = "they fit another torch: pip uninstall torchvision torchaudio torchcodec"
        if hint:
            return ConfigError(f"{what}: {message}", hint=hint)
        return EngineLoadError(message, hint="--log-level debug shows all of its log")

    def note_death(self, reason: str, *, may_start: bool) -> float:
        """Count a death, and decide whether the server is lost. Returns the seconds before it may be started again."""
        self.num_deaths = 1 if self.num_answered else self.num_deaths + 1
        self.is_lost = self.num_deaths > MOST_RESTARTS or not may_start
        rows = len(self.in_flight)
        if self.is_lost:
            lost = event("replica_lost", replica=self.name)
            logger.error("%s: %s", self.name, reason, extra=lost)
        else:
            again = f"it is started again, and its {rows} rows are tried again"
            fields = event("replica_restarted", replica=self.name, rows=rows)
            logger.warning("%s: %s; %s", self.name, reason, again, extra=fields)
        return RESTART_PAUSE_SECONDS * 2 ** (self.num_deaths - 2) if self.num_deaths > 1 else 0.0

    def end(self, *, is_kill: bool = False) -> None:
        """End the server and all that it has started, after `GRACE_SECONDS` or at once. Waits for it."""
        process, self.guard = self.guard, None
        if process is None or process.stdin is None:
            return
        with contextlib.suppress(OSError):
            if is_kill and process.poll() is None:
                process.stdin.write(b"k")
            process.stdin.close()
        process.wait()
        self.look_at_process()
