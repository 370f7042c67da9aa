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
from typing import Annotated, ClassVar, Literal, NamedTuple, Protocol, cast

from msgspec import Meta

from batchinfer.core.errors import ConfigError
from batchinfer.core.option_help import FIRST, NO_OPTION, Opt
from batchinfer.core.records import Record
from batchinfer.core.shell import quote

RESTART_STATUSES = (33, 34, 75)
"""Exit statuses of a worker after which a new start may help: the engine failed, storage failed, or a signal came."""
FINAL_STATUSES = (2, 3)
"""Exit statuses of a worker after which a new start cannot help: wrong configuration, or a rule stopped it."""
ClusterName = Literal["skypilot", "slurm", "kubernetes"]


class Plan(Record, frozen=True, kw_only=True):
    """Workers to start, and all that their cluster must be told: the options of `launch` that are not the worker's."""

    SECTION: ClassVar[str] = "options"

    job: Annotated[str, NO_OPTION]
    model: Annotated[str, NO_OPTION]
    id: Annotated[str, NO_OPTION] = ""
    words: Annotated[str, NO_OPTION] = ""
    """Options of the worker as words of bash, without --job, --output and --model."""
    run: Annotated[str, FIRST]
    """Place of the run, as in JOB/runs/llama."""
    on: Annotated[ClusterName, Opt(is_first=True, metavar="CLUSTER")]
    """One of skypilot, slurm, kubernetes."""
    workers: Annotated[int, Meta(ge=0, le=100_000), FIRST] = 0
    """Number of new workers."""
    gpu: Annotated[str, FIRST] = ""
    """GPUs of a worker, as in L4:2; none for a CPU."""
    template: str = ""
    """File in place of the package's task, script or Job."""
    sky_arg: list[str] = []
    """Option of sky jobs launch, as in --infra=aws."""
    sbatch_arg: list[str] = []
    """Option of sbatch, as in --mem=64G."""
    image: str = ""
    """Image of the workers (kubernetes)."""
    namespace: str = ""
    """Default: that of kubectl's context (kubernetes)."""
    env: list[str] = []
    """NAME=VALUE in the environment of the workers."""
    secret: list[str] = []
    """Variable here, or Secret of Kubernetes, by its name."""

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


def find_cluster(name: ClusterName) -> Cluster:
    """Return the module of a cluster."""
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
