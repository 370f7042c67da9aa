"""Workers as processes of this machine, kept alive by one supervisor process that outlives the command.

The supervisor starts a worker again that was killed or ended with one of `RESTART_STATUSES`. Its folder holds the plan,
the states of the workers, and all logs.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from batchinfer.clusters import (
    CANCELLED,
    DONE,
    FAILED,
    RESTART_STATUSES,
    RUNNING,
    STARTING,
    WORKER,
    ClusterState,
    Plan,
    assignments,
    check_length,
    check_secrets_here,
    command_words,
    make_log_folder,
    strange_handle,
)
from batchinfer.core import codec
from batchinfer.core.errors import ConfigError
from batchinfer.core.processes import child_environment, describe_exit
from batchinfer.core.records import Record

_COMMANDS = frozenset((b"worker", b"split", b"collect"))
_MODULE, _CANCEL = "batchinfer.clusters.local", "--cancel"
_PLAN, _STATE = "plan.json", "state.json"
_POLL_SECONDS = 0.2
_PREFIX = ("setpriv", "--pdeathsig", "KILL", "--")
"""Words in front of a command. With them the kernel kills its process when the parent ends."""
_FIRST_DELAY_SECONDS, _LONGEST_DELAY_SECONDS = 1.0, 60.0
_MOST_STARTS_OF_RANKS = 20
"""Most starts of a rank of `split` or `collect`. Workers count their starts without progress themselves."""


class WorkerState(Record, frozen=True, kw_only=True):
    """State of one worker. `status` is the exit status of its last process that has ended; None if none has."""

    state: str
    pid: int = 0
    starts: int = 0
    status: int | None = None


class Local:
    """See `Cluster`."""

    is_remote = False
    jobs_of = "pgrep -af {id}"
    options = {"log-dir": "folder of logs and states (default: batchinfer-launches)"}

    def check(self, plan: Plan) -> None:
        """See `Cluster`."""
        check_secrets_here(plan)  # workers inherit this environment
        check_length(plan)
        _devices(plan)

    def describe(self, plan: Plan) -> str:
        """See `Cluster`."""
        lines = []
        for rank, devices in enumerate(_devices(plan)):
            variables = assignments(worker_variables(plan, rank, devices))
            # bash would expand the variable before it sets it for the command.
            command = _command(plan).replace('"$BATCHINFER_RANK"', str(rank))
            lines.append(f"{variables} {command}")
        return "\n".join(lines)

    def submit(self, plan: Plan) -> dict[str, Any]:
        """See `Cluster`."""
        folder = make_log_folder(plan)
        path = folder / "supervisor.log"
        try:
            (folder / _PLAN).touch(mode=0o600)  # variables may be secret
            (folder / _PLAN).write_bytes(msgspec.json.encode(plan))
            with path.open("wb") as log:
                subprocess.run(
                    [sys.executable, "-m", _MODULE, str(folder)],
                    env=child_environment({}),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                    check=True,
                )
        except (OSError, subprocess.SubprocessError) as error:
            raise ConfigError(
                f"local: the process that starts the workers cannot be started ({error})",
                hint=f"{path} may say more",
            ) from error
        return {"folder": str(folder), "host": socket.gethostname()}

    def look(self, handle: dict[str, Any], workers: int) -> dict[int, ClusterState]:
        """See `Cluster`."""
        del workers
        _refuse_other_host(handle)
        folder = Path(handle["folder"])
        try:
            data = (folder / _STATE).read_bytes()
        except OSError as error:
            raise ConfigError(f"{folder}: its state cannot be read here ({error})") from error
        states = codec.json_decoder(list[WorkerState]).decode(data)
        is_watched = bool(_supervisors(folder))
        return {rank: _seen(one, is_watched=is_watched) for rank, one in enumerate(states)}

    def cancel(self, handle: dict[str, Any]) -> None:
        """See `Cluster`."""
        _refuse_other_host(handle)
        folder = Path(handle["folder"])
        # A supervisor passes the signal on. Only if it is gone, the workers are sent it from here.
        for pid in _supervisors(folder) or _workers(folder.name):
            try:
                os.kill(pid, signal.SIGTERM)
            except ProcessLookupError:
                continue  # it has ended meanwhile
            except PermissionError as error:
                raise ConfigError(f"its process {pid} belongs to another user") from error

    def check_handle(self, plan: Plan, handle: dict[str, Any]) -> None:
        """See `Cluster`. Processes are found by the folder, which is named after the launch."""
        if Path(str(handle.get("folder"))).name != plan.id:
            raise strange_handle(plan)

    def cancel_command(self, handle: dict[str, Any]) -> str:
        """See `Cluster`. It runs `cancel`: a pattern for `pkill` would also match an editor of the launch's logs."""
        return shlex.join([sys.executable, "-m", _MODULE, _CANCEL, handle["folder"]])


CLUSTER = Local()


def _seen(one: WorkerState, *, is_watched: bool) -> ClusterState:
    text = "" if one.status is None else describe_exit(one.status)
    if one.state in (RUNNING, STARTING) and not is_watched:
        return ClusterState(FAILED, "its supervisor is gone")
    return ClusterState(one.state, text)


def _refuse_other_host(handle: dict[str, Any]) -> None:
    """Raise ConfigError on another machine than that of the launch. Handles of earlier versions name no machine."""
    host = handle.get("host", "")
    if host not in ("", socket.gethostname()):
        raise ConfigError(
            f"its processes are on the machine {host}", hint="run the same command there"
        )


def _devices(plan: Plan) -> list[str | None]:
    """Return the GPUs of each worker, written as in CUDA_VISIBLE_DEVICES; None for each if this machine has none.

    Raises:
        ConfigError: There are too few GPUs.
    """
    from batchinfer.engines.gpus import visible_gpus

    if plan.is_cpu_only:
        return [""] * plan.workers
    found = [gpu.id for gpu in visible_gpus()]
    if not found:
        return [None] * plan.workers
    wanted = int(plan.gpu.partition(":")[2] or 0) or max(1, len(found) // plan.workers)
    if wanted * plan.workers > len(found):
        raise ConfigError(
            f"--workers {plan.workers}: with {wanted} each, this machine's {len(found)} GPUs are too few",
            hint=f"start at most {len(found) // wanted}, or give --gpu none if the workers need no GPUs",
        )
    return [",".join(found[rank * wanted : (rank + 1) * wanted]) for rank in range(plan.workers)]


def worker_variables(plan: Plan, rank: int, devices: str | None) -> dict[str, str]:
    """Return the environment of the worker of one rank.

    `devices` are its GPUs as in CUDA_VISIBLE_DEVICES. If it is None, the worker sees the GPUs that this process sees.
    """
    variables = {**plan.variables(), "BATCHINFER_RANK": str(rank)}
    return variables if devices is None else {**variables, "CUDA_VISIBLE_DEVICES": devices}


def _command(plan: Plan) -> str:
    return f"{shlex.quote(sys.executable)} -m batchinfer {command_words(plan)}"


def _supervisors(folder: Path) -> list[int]:
    """Return the ids of the processes that `Local.submit` has started for a launch with this folder. Linux only."""
    ending = [b"-m", _MODULE.encode(), os.fsencode(folder)]
    return [pid for pid, words in _commands() if words[1:] == ending]


def _workers(launch: str) -> list[int]:
    """Return the ids of the processes of a launch that its supervisor has started. Linux only."""
    variable = f"BATCHINFER_LAUNCH={launch}".encode()
    found = []
    for pid, words in _commands():
        if words[1:3] == [b"-m", b"batchinfer"] and not _COMMANDS.isdisjoint(words[3:4]):
            with contextlib.suppress(OSError):
                if variable in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                    found.append(pid)
    return found


def _commands() -> Iterator[tuple[int, list[bytes]]]:
    """Yield the id and the words of the command line of each process of this machine."""
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            yield int(entry.name), (entry / "cmdline").read_bytes().split(b"\0")[:-1]


# --------------------------------------------------------------------------- the supervisor


class WorkerProcess:
    """One worker's process, which is started again as long as that may help.

    Args:
        plan: The launch.
        variables: Environment of the process, besides this process's own.
        log: File to which its output goes.
        dies_with_parent: Whether the process is killed when this process ends.
    """

    def __init__(
        self, plan: Plan, variables: dict[str, str], log: Path, *, dies_with_parent: bool = False
    ) -> None:
        self._plan = plan
        self._variables = variables
        self._prefix = _PREFIX if dies_with_parent else ()
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None
        self._due = 0.0
        self._delay = _FIRST_DELAY_SECONDS
        self._is_asked_to_end = False
        self.state = WorkerState(state=STARTING)

    def tick(self, *, is_ending: bool) -> None:
        """Start the process if it is due, or notice that it has ended. If `is_ending`, ask it to end instead.

        Its worker then saves what it has finished.
        """
        now = time.monotonic()
        if self._process is None:
            if self.state.state == STARTING and is_ending:
                self._set(state=CANCELLED)
            elif self.state.state == STARTING and now >= self._due:
                self._start()
            return
        status = self._process.poll()
        if status is None:
            if is_ending and not self._is_asked_to_end:
                self._is_asked_to_end = True
                self._process.send_signal(signal.SIGTERM)
            return
        self._process = None
        state = _state_after(status, is_ending=is_ending)
        is_rank = self._plan.what != WORKER
        if state == STARTING and is_rank and self.state.starts >= _MOST_STARTS_OF_RANKS:
            state = FAILED
        self._set(state=state, status=status, pid=0)
        if self.state.state == STARTING:
            self._due, self._delay = now + self._delay, min(2 * self._delay, _LONGEST_DELAY_SECONDS)

    @property
    def has_ended(self) -> bool:
        """Whether the worker has ended for good."""
        return self.state.state in (DONE, FAILED, CANCELLED)

    def _start(self) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [*self._prefix, "bash", "-c", f"exec {_command(self._plan)}"],
                env=child_environment(self._variables),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # a signal to this process's group does not reach it
            )
        self._set(state=RUNNING, pid=self._process.pid, starts=self.state.starts + 1)

    def _set(self, **fields: Any) -> None:
        self.state = msgspec.structs.replace(self.state, **fields)


def _state_after(status: int, *, is_ending: bool) -> str:
    if status == 0:
        return DONE
    if is_ending:
        return CANCELLED
    # A negative status means a signal, such as the kernel's SIGKILL when memory is short.
    return STARTING if status in RESTART_STATUSES or status < 0 else FAILED


def supervise(folder: Path) -> int:
    """Keep the workers of the plan in a folder running until all have ended. Return 1 if one failed, else 0.

    After SIGTERM or SIGINT it asks the workers to end, and starts none again.
    """
    plan = codec.json_decoder(Plan).decode((folder / _PLAN).read_bytes())
    processes = [
        WorkerProcess(
            plan, worker_variables(plan, rank, devices), folder / f"worker-{rank:05d}.log"
        )
        for rank, devices in enumerate(_devices(plan))
    ]
    is_ending = False

    def end(_number: int, _frame: object) -> None:
        nonlocal is_ending
        is_ending = True

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    written: list[WorkerState] = []
    while True:
        for process in processes:
            process.tick(is_ending=is_ending)
        states = [process.state for process in processes]
        if states != written:
            temporary = folder / f"{_STATE}.tmp"
            temporary.write_bytes(msgspec.json.encode(states))
            temporary.replace(folder / _STATE)
            written = states
        if all(process.has_ended for process in processes):
            return int(any(state.state == FAILED for state in states))
        time.sleep(_POLL_SECONDS)


if __name__ == "__main__":
    if sys.argv[1] == _CANCEL:  # as in `Local.cancel_command`
        CLUSTER.cancel({"folder": sys.argv[2]})
        sys.exit()
    if os.fork():
        os._exit(0)  # `Local.submit` waits for this process only; its child is the supervisor
    sys.exit(supervise(Path(sys.argv[1])))
