"""Clusters, which start the workers of a launch: SkyPilot, Slurm and Kubernetes.

Each has a module here with a template of what it submits, and three verbs: submit, look and cancel. A launch's jobs are
found by their name alone, which follows from the launch's id. So nothing else that a record in the bucket says comes to
a command line.
"""

from __future__ import annotations

import importlib
import re
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple, Protocol, cast

from batchinfer.core.errors import ConfigError, near
from batchinfer.core.records import Record
from batchinfer.core.shell import quote

RESTART_STATUSES = (33, 34, 75)
"""Exit statuses of a worker after which a new start may help: the engine failed, storage failed, or a signal came."""
FINAL_STATUSES = (2, 3)
"""Exit statuses of a worker after which a new start cannot help: wrong configuration, or a rule stopped it."""
CLUSTERS = ("skypilot", "slurm", "kubernetes")


class Plan(Record, frozen=True, kw_only=True):
    """Workers to start, and everything that their cluster must be told."""

    on: str
    """Name of the cluster."""
    job: str
    run: str
    model: str
    id: str = ""
    workers: int = 0
    words: str = ""
    """Options of the worker as words of bash, without --job, --output and --model."""
    env: list[str] = []
    """Further environment of the workers, as NAME=VALUE."""
    secret: list[str] = []
    """Names of secrets: environment variables here, or Secrets of Kubernetes."""
    gpu: str = ""
    """GPUs of one worker, as in "L4:1"; "none" for a machine without. Empty: what the template says."""
    template: str = ""
    """File in place of the cluster's own template."""
    sky_arg: list[str] = []
    sbatch_arg: list[str] = []
    image: str = ""
    namespace: str = ""

    @property
    def name(self) -> str:
        """Name of the launch's jobs in the cluster."""
        return name_of(self.id)

    @property
    def num_gpus(self) -> int:
        """Number of GPUs of one worker."""
        return 0 if self.gpu == "none" else int(self.gpu.partition(":")[2] or 1)

    @property
    def variables(self) -> list[str]:
        """The environment that all workers share, as NAME=VALUE. The rank, which differs, is not in it."""
        return [*self.env, f"BATCHINFER_LAUNCH={self.id}", f"BATCHINFER_NUM_WORKERS={self.workers}"]

    @property
    def command(self) -> str:
        """Command of every worker as words of bash, without the program. Its rank is in the environment."""
        model = f"--model {quote(self.model)} " if self.model else ""
        return f"worker --job {quote(self.job)} --output {quote(self.run)} {model}{self.words}"


class Fate(NamedTuple):
    """What becomes of one worker, and the cluster's own words for it.

    coming: it works, or will by itself. lost: it failed, and the cluster gave it up. ended: it is done, or cancelled.
    """

    kind: str
    text: str


class Cluster(Protocol):
    """The module of a cluster. Its functions raise ConfigError if the cluster's client fails, or is not here."""

    IS_REMOTE: bool
    """Whether workers run where a folder of this machine cannot be seen."""

    def page(self, plan: Plan) -> str:
        """Return what `submit` submits, ready to be run by hand. Needs no client, and shows no secret."""

    def submit(self, plan: Plan) -> None:
        """Submit the workers. After an error, `look` says whether the cluster has got them all the same."""

    def look(self, launch: str, workers: int, namespace: str, /) -> dict[int, Fate]:
        """Return what the cluster knows of each worker, by rank. Ranks of which it knows nothing are left out."""

    def cancel(self, launch: str, namespace: str, /) -> None:
        """Ask the cluster to end the workers of a launch and to start none of them again."""


def find_cluster(name: str) -> Cluster:
    """Return the module of a cluster.

    Raises:
        ConfigError: No cluster has this name.
    """
    if name not in CLUSTERS:
        known = ", ".join(CLUSTERS)
        raise ConfigError(f"--on {name!r}: expected one of {known}{near(name, CLUSTERS)}")
    return cast("Cluster", importlib.import_module(f"batchinfer.clusters.{name}"))


def name_of(launch: str) -> str:
    """Return the name of a launch's jobs, which is a valid one in every cluster."""
    return f"batchinfer-{launch}"


def run_client(*words: str, text: str = "", seconds: float = 60.0, folder: str = ".") -> str:
    """Run a cluster's client and return what it prints. On Linux it ends if this process is killed.

    Args:
        words: Its command line.
        text: Its standard input.
        seconds: Most seconds to wait for it.
        folder: Its working directory.

    Raises:
        ConfigError: It is not here, it failed, or it did not end in time.
    """
    if shutil.which(words[0]) is None:
        raise ConfigError(f"{words[0]}: is not on the PATH", hint="docs/launch.md says where it is")
    tie = ("setpriv", "--pdeathsig", "TERM", "--") if shutil.which("setpriv") else ()
    try:
        done = subprocess.run(  # noqa: PLW1510 - the exit status is looked at below
            [*tie, *words], input=text, capture_output=True, text=True, timeout=seconds, cwd=folder
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"{words[0]}: {str(error)[:500]}") from error
    if done.returncode:
        said = done.stderr.strip() or done.stdout.strip() or f"exit status {done.returncode}"
        raise ConfigError(f"{words[0]}: {said}")
    return done.stdout


def read_template(path: str | Path) -> str:
    """Return the text of a template.

    Raises:
        ConfigError: It cannot be read.
    """
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--template {path}: cannot be read ({error})") from error


def fill(template: str | Path, fields: dict[str, object]) -> str:
    """Return the text of a template with each {{ name }} replaced by the field of that name.

    Raises:
        ConfigError: The template cannot be read, names another field, or lacks {{ command }}.
    """
    place, text = re.compile(r"\{\{ (\w+) \}\}"), read_template(template)
    names = set(place.findall(text))
    if "command" not in names or names - fields.keys():
        known = ", ".join(f"{{{{ {name} }}}}" for name in fields)
        raise ConfigError(
            f"--template {template}: expected {{{{ command }}}}, others only of {known}"
        )
    return place.sub(lambda found: str(fields[found[1]]), text)


def indexes(text: str) -> set[int]:
    """Read a list of numbers as clusters write it.

    >>> sorted(indexes("1,3-5")), indexes("")
    ([1, 3, 4, 5], set())
    """
    found: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found
