"""Clusters, which start the workers of a launch: SkyPilot, Slurm and Kubernetes; and the records of launches.

Each has a module here with a template of what it submits, and three verbs: submit, look and cancel.

A run has a record of each launch, launches/<id>.json, written before anything is submitted. Whoever can write to the
bucket can write such a record, so only its id reaches a command line: a launch's jobs are found by their name, which
follows from the id and the run's place. So no record makes `stop --cancel` end the jobs of another run.
"""

from __future__ import annotations

import importlib
import re
import secrets
import shutil
import subprocess
import time
from pathlib import Path
from subprocess import PIPE
from typing import Annotated, Literal, NamedTuple, Protocol, cast

from msgspec import Meta, convert
from msgspec.structs import replace

from batchinfer.core import codec, layout
from batchinfer.core.errors import BatchinferError, ConfigError, InputError, ObjectNotFound
from batchinfer.core.option_help import FIRST, NO_OPTION, Opt
from batchinfer.core.records import FORMAT_VERSION, Record
from batchinfer.storage import Store

ClusterName = Literal["skypilot", "slurm", "kubernetes"]


class Plan(Record, frozen=True, kw_only=True):
    """Workers to start, and all that their cluster must be told. Its options are those of `launch` alone."""

    job: Annotated[str, NO_OPTION]
    model: Annotated[str, NO_OPTION]
    id: Annotated[str, NO_OPTION] = ""
    name: Annotated[str, NO_OPTION] = ""
    """Name of the launch's jobs in the cluster."""
    words: Annotated[str, NO_OPTION] = ""
    """Options of every worker as words of bash. Its rank is in the environment."""
    share: Annotated[float | None, NO_OPTION] = None
    """Dollars that each worker may cost; None: without a limit."""
    replaces: Annotated[list[str], NO_OPTION] = []
    """Ids of lost workers of earlier launches in whose place some of these are started."""
    run: Annotated[str, FIRST]
    """Place of the run, as in JOB/runs/llama."""
    on: Annotated[ClusterName, Opt(is_first=True, metavar="CLUSTER")]
    """One of skypilot, slurm, kubernetes."""
    workers: Annotated[int, Meta(ge=0, le=100_000), FIRST] = 0
    """Number of new workers."""
    gpu: Annotated[str, FIRST] = ""
    """GPUs of a worker, as in L4:2; none for a CPU."""
    template: Annotated[str, Opt(form="existing file")] = ""
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
    check: bool = True
    """Whether to run batchinfer check first."""
    dry_run: bool = False
    """Print what would be submitted, and stop."""
    watch: bool = False
    """Stay, and start again what is lost until the run has ended."""


class LaunchRecord(Record, frozen=True, kw_only=True):
    """Content of launches/<id>.json. Decoding checks how `id` is spelled, which reaches command lines."""

    format_version: int = FORMAT_VERSION
    id: Annotated[str, Meta(pattern=r"\A[0-9]{8}-[0-9]{6}-[0-9a-f]{4}\Z")]
    on: ClusterName
    namespace: str
    """Namespace of Kubernetes, for people: where to look, the options of those who look say."""
    workers: Annotated[int, Meta(ge=1, le=100_000)]
    share: float | None
    replaces: list[str]
    is_cancelled: bool = False
    """Whether somebody cancelled it. Clusters forget that they did."""


class Fate(NamedTuple):
    """What becomes of one worker, and the cluster's own words for it.

    coming: it works, or will by itself. lost: it failed, and the cluster gave it up. ended: it is done, or cancelled.
    """

    kind: str
    text: str


class Cluster(Protocol):
    """The module of a cluster. Its functions raise ConfigError if the cluster's client fails, or is not here."""

    def page(self, plan: Plan) -> str:
        """Return what `submit` submits, ready to be run by hand. Needs no client, and shows no secret."""

    def submit(self, plan: Plan) -> None:
        """Submit the workers. After an error, `look` says whether the cluster has got them all the same."""

    def look(self, name: str, namespace: str, /) -> dict[int, Fate]:
        """Return what the cluster knows of each worker, by rank. Ranks of which it knows nothing are left out."""

    def cancel(self, name: str, namespace: str, /) -> None:
        """Ask the cluster to end the workers of a launch and to start none of them again."""


def find_cluster(name: ClusterName) -> Cluster:
    """Return the module of a cluster."""
    return cast("Cluster", importlib.import_module(f"batchinfer.clusters.{name}"))


def new_id(now: float) -> str:
    """Return an id for a launch: the time in UTC and four random digits."""
    return f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime(now))}-{secrets.token_hex(2)}"


def name_of(launch: str, run: str) -> str:
    """Return the name of the jobs of a launch of a run, which is a valid one in every cluster.

    A store's own URL says s3:// for r2://.
    """
    place = re.sub("^r2:", "s3:", run) if "://" in run else str(Path(run).resolve())
    return f"batchinfer-{launch}-{codec.sha256(place.encode())[:12]}"


def record_launch(store: Store, plan: Plan) -> None:
    """Create the record of a launch, before anything is submitted."""
    record = convert(plan, LaunchRecord, from_attributes=True)
    store.create(layout.launch_key(plan.id), codec.encode_pretty(record))


def record_cancelled(store: Store, identity: str) -> None:
    """Note in the record of a launch that it was cancelled, so that none of its workers is started again."""
    key = layout.launch_key(identity)
    found = store.get(key)
    record = codec.decode(found.data, LaunchRecord, name=key)
    store.replace(key, codec.encode_pretty(replace(record, is_cancelled=True)), found.etag)


def find_launches(store: Store) -> tuple[dict[str, tuple[LaunchRecord, float]], list[str]]:
    """Return a run's launches by id, the oldest first, and notes about records that cannot be read.

    Each launch comes with the time at which it was recorded, in Unix seconds by storage's clock.
    """
    found: dict[str, tuple[LaunchRecord, float]] = {}
    notes = []
    for info in sorted(store.list(layout.LAUNCHES), key=lambda one: (one.modified, one.key)):
        try:
            record = codec.decode(store.get(info.key).data, LaunchRecord, name=info.key)
            if info.key != layout.launch_key(record.id):
                raise InputError(f"is not the record of {record.id}")
            found[record.id] = (record, info.modified)
        except ObjectNotFound:
            continue  # removed since it was listed
        except BatchinferError as error:
            notes.append(f"{info.key}: cannot be read, left out ({error.message})")
    return found, notes


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
        return subprocess.check_output(
            [*tie, *words], input=text, timeout=seconds, cwd=folder, stderr=PIPE, errors="replace"
        )
    except subprocess.CalledProcessError as error:
        said = error.stderr.strip() or error.stdout.strip() or str(error)
        raise ConfigError(f"{words[0]}: {said}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"{words[0]}: {str(error)[:500]}") from error


def fill(template: str | Path, fields: dict[str, object]) -> str:
    """Return the text of a template with each {{ name }} replaced by the field of that name.

    Raises:
        ConfigError: The template names another field, or lacks {{ command }}.
    """
    place = re.compile(r"\{\{ (\w+) \}\}")
    text = Path(template).read_text("utf-8", errors="replace")
    if not {"command"} <= set(place.findall(text)) <= fields.keys():
        known = ", ".join(f"{{{{ {name} }}}}" for name in fields)
        expected = f"expected {{{{ command }}}}, others only of {known}"
        raise ConfigError(f"--template {template}: {expected}")
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
