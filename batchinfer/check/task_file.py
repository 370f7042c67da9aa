"""Find mistakes in SkyPilot task files, many of which SkyPilot itself accepts silently.

The task file is read, and files that it names on this machine are looked for. Nothing is changed. SkyPilot's rules are
those of version 0.14.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from batchinfer.clusters import RESTART_STATUSES
from batchinfer.core.records import Record

ERROR, WARNING = "error", "warning"
TOP_LEVEL = frozenset(
    {
        "name",
        "workdir",
        "num_nodes",
        "resources",
        "file_mounts",
        "volumes",
        "volume_mounts",
        "setup",
        "run",
        "envs",
        "secrets",
        "managed_secrets",
        "service",
        "pool",
        "config",
        "api_server_access",
        "event_callback",
        "inputs",
        "outputs",
    }
)
RECOVERY = ("strategy", "max_restarts_on_errors", "recover_on_exit_codes")
STRATEGIES = ("EAGER_NEXT_REGION", "FAILOVER", "NONE")
_HOPELESS_CODES = {
    0: "the worker is done",
    2: "the configuration is wrong, which no restart changes",
    3: "a rule stopped the worker on purpose",
    137: "an out-of-memory kill would come back for ever",
}
_VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")
_SECRET = re.compile(r"(TOKEN|SECRET|PASSWORD|PASSWD|API_KEY|ACCESS_KEY|CREDENTIAL)", re.IGNORECASE)


class Problem(Record, frozen=True, kw_only=True):
    """One problem that `check` has found.

    A problem of level "error" makes `check` fail, and one of level "warning" does not.
    """

    level: str
    area: str
    """What the problem is about: config, yaml, storage, model, data, memory or estimate."""
    message: str
    hint: str = ""


def check_task_file(path: Path, accelerators: Iterable[str] = ()) -> list[Problem]:
    """Check a task file or pool file of SkyPilot, and return the problems found.

    Args:
        path: The file. Relative paths in it are looked up from the current working directory, as SkyPilot does.
        accelerators: Known names of accelerators. Another name gets a warning. If empty, names are not checked.
    """
    import yaml

    try:
        task = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        return [_error(f"{path}: not readable as YAML ({error})")]
    if not isinstance(task, dict):
        return [_error(f"{path}: holds no mapping, expected a task")]
    found = [
        *_top_level(task),
        *_variables(task),
        *_secrets(task),
        *_mounts(task),
        *_resources(task, list(accelerators)),
        *_nodes(task),
    ]
    return [
        Problem(level=one.level, area="yaml", message=f"{path}: {one.message}", hint=one.hint)
        for one in found
    ]


def _error(message: str, hint: str = "") -> Problem:
    return Problem(level=ERROR, area="yaml", message=message, hint=hint)


def _warning(message: str, hint: str = "") -> Problem:
    return Problem(level=WARNING, area="yaml", message=message, hint=hint)


def _did_you_mean(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"did you mean {near[0]}?" if near else ""


def _mapping(value: Any) -> dict[str, Any]:
    return {str(key): item for key, item in value.items()} if isinstance(value, dict) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _top_level(task: dict[str, Any]) -> Iterator[Problem]:
    for name in map(str, task):
        if name not in TOP_LEVEL:
            yield _error(f"unknown field {name!r}", _did_you_mean(name, TOP_LEVEL))
    if "pool" in task and "run" in task:
        yield _error("`run` in a pool's file is left out by SkyPilot", "put it into the job's file")
    if "pool" in task and "service" in task:
        yield _error("`pool` and `service` exclude each other")
    if "pool" not in task and not task.get("run"):
        yield _warning("has no `run`, so the job does nothing after its set-up")


# --------------------------------------------------------------------------- variables and secrets


def _declared(task: dict[str, Any]) -> dict[str, Any]:
    return {**_mapping(task.get("secrets")), **_mapping(task.get("envs"))}


def _variables(task: dict[str, Any]) -> Iterator[Problem]:
    """Find variables like $NAME that SkyPilot will leave as text: undeclared ones, and all in `resources`."""
    declared = _declared(task)
    for field in ("file_mounts", "workdir", "volumes", "service"):
        for name in sorted(set(_names_in(task.get(field)))):
            if name not in declared:
                yield _error(
                    f"{field}: ${name} is not declared in `envs`, so it stays as literal text",
                    _did_you_mean(name, declared) or f"add `{name}:` to `envs`",
                )
    for name in sorted(set(_names_in(task.get("resources")))):
        yield _error(
            f"resources: ${name} is not substituted there",
            "write the value, or give it on the command line (--gpus, --infra)",
        )


def _names_in(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield from (match[1] or match[2] for match in _VARIABLE.finditer(value))
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _names_in(str(key))
            yield from _names_in(item)
    elif isinstance(value, list):
        for item in value:
            yield from _names_in(item)


def _secrets(task: dict[str, Any]) -> Iterator[Problem]:
    for name in _mapping(task.get("envs")):
        if _SECRET.search(name):
            yield _error(
                f"envs.{name}: a secret there is shown in the dashboard and in logs",
                f"move it to `secrets` and launch with --secret {name}",
            )
    for name, value in _mapping(task.get("secrets")).items():
        if value is None:
            yield _warning(
                f"secrets.{name}: has no value, and SkyPilot does not complain when none is given",
                f"launch with --secret {name}",
            )
        elif value:
            yield _error(
                f"secrets.{name}: its value stands in the file",
                f"leave it empty and launch with --secret {name}",
            )


# --------------------------------------------------------------------------- mounts


def _mounts(task: dict[str, Any]) -> Iterator[Problem]:
    variables = _declared(task)
    workdir = task.get("workdir")
    if isinstance(workdir, str):
        yield from _local_source("workdir", workdir, variables)
    for target, mount in _mapping(task.get("file_mounts")).items():
        entry = mount if isinstance(mount, dict) else {"source": mount}
        source = entry.get("source")
        for one in source if isinstance(source, list) else [source]:
            if isinstance(one, str):
                yield from _local_source(f"file_mounts.{target}", one, variables)
        yield from _cached(target, entry)


def _local_source(where: str, source: str, variables: dict[str, Any]) -> Iterator[Problem]:
    names = set(_names_in(source))
    if any(variables.get(name) is None for name in names):
        return  # The variable gets its value at launch, or it is not declared, which `_variables` reports.
    text = _VARIABLE.sub(lambda match: str(variables[match[1] or match[2]]), source)
    if "://" in text:
        return
    if not text:
        yield _error(
            f"{where}: its source is empty, for which SkyPilot copies the whole working directory",
            "name a file as the variable's default",
        )
    elif not Path(text).expanduser().exists():
        yield _error(f"{where}: {text} does not exist on this machine")


def _cached(target: str, entry: dict[str, Any]) -> Iterator[Problem]:
    if str(entry.get("mode") or "").upper() != "MOUNT_CACHED":
        return
    options = _mapping(_mapping(entry.get("config")).get("mount_cached"))
    if options.get("read_only") is True:
        return
    hint = "let the worker write to the bucket itself: --output s3://bucket/run"
    transfers = options.get("transfers")
    if isinstance(transfers, int) and transfers > 1:
        yield _error(
            f"file_mounts.{target}: MOUNT_CACHED with {transfers} transfers may upload a marker before its output",
            hint,
        )
    else:
        yield _warning(
            f"file_mounts.{target}: MOUNT_CACHED uploads later; what a preempted machine had not uploaded is lost",
            hint,
        )


# --------------------------------------------------------------------------- resources


def _resources(task: dict[str, Any], known: list[str]) -> Iterator[Problem]:
    resources = _mapping(task.get("resources"))
    choices = [
        _mapping(one) for one in _list(resources.get("any_of")) + _list(resources.get("ordered"))
    ]
    if "any_of" in resources and "ordered" in resources:
        yield _error("resources: `any_of` and `ordered` exclude each other")
    for place, entry in [
        ("resources", resources),
        *((f"resources.any_of[{i}]", c) for i, c in enumerate(choices)),
    ]:
        yield from _recovery(place, entry.get("job_recovery"))
        yield from _accelerators(place, entry.get("accelerators"), known)
    own = [one.get("job_recovery", resources.get("job_recovery")) for one in choices]
    if any(one != own[0] for one in own[1:]):
        yield _error(
            "resources.any_of: `job_recovery` differs between the candidates",
            "state it once, beside `any_of`",
        )


def _recovery(place: str, recovery: Any) -> Iterator[Problem]:
    where = f"{place}.job_recovery"
    strategy: Any = recovery
    if isinstance(recovery, dict):
        strategy = recovery.get("strategy")
        for name in map(str, recovery):
            if name not in RECOVERY:
                yield _error(f"{where}: unknown field {name!r}", _did_you_mean(name, RECOVERY))
        yield from _codes(where, recovery)
    if strategy is not None and str(strategy).upper() not in STRATEGIES:
        yield _error(
            f"{where}: unknown strategy {strategy!r}",
            _did_you_mean(str(strategy).upper(), STRATEGIES),
        )


def _codes(where: str, recovery: dict[str, Any]) -> Iterator[Problem]:
    codes = recovery.get("recover_on_exit_codes")
    if codes is None:
        yield _warning(
            f"{where}: no recover_on_exit_codes, so an engine's or a storage failure may end the job",
            f"recover_on_exit_codes: {list(RESTART_STATUSES)}",
        )
        return
    listed = codes if isinstance(codes, list) else [codes]
    for code in listed:
        if code in _HOPELESS_CODES:
            yield _error(f"{where}: recovers on exit code {code}, but {_HOPELESS_CODES[code]}")
    lacking = [code for code in RESTART_STATUSES if code not in listed]
    if lacking:
        yield _warning(
            f"{where}: recover_on_exit_codes lacks {', '.join(map(str, lacking))}",
            f"recover_on_exit_codes: {list(RESTART_STATUSES)}",
        )


def _nodes(task: dict[str, Any]) -> Iterator[Problem]:
    """Find a `num_nodes` that is no whole number from 1, and a command that makes no one worker of several machines."""
    count = task.get("num_nodes", 1)
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        yield _error(f"num_nodes: {count!r}, expected a whole number from 1")
        return
    run = str(task.get("run") or "").lower()
    is_together = any(name in run for name in ("skypilot_worker.sh", "--nnodes", "worker_nnodes"))
    if count > 1 and "run" in task and not is_together:
        yield _warning(
            f"num_nodes: {count}, but `run` starts the same worker on each machine",
            "give --nnodes $SKYPILOT_NUM_NODES --node-rank $SKYPILOT_NODE_RANK --master-addr, and --headless on all "
            "but the first, as scripts/skypilot_worker.sh does; or num_nodes: 1 and --num-jobs for more workers",
        )


def accelerator_names(value: Any) -> list[str]:
    """Names of accelerators in a value of `accelerators`, which may be a text, a mapping, a list or a set.

    >>> accelerator_names({"L4:1": None, "H100": 8}), accelerator_names("A100-80GB:2")
    (['L4', 'H100'], ['A100-80GB'])
    """
    if isinstance(value, str):
        return [value.partition(":")[0].strip()]
    if isinstance(value, dict | list | set):
        return [str(item).partition(":")[0].strip() for item in value]
    return []


def _accelerators(place: str, value: Any, known: list[str]) -> Iterator[Problem]:
    for name in accelerator_names(value):
        if known and "$" not in name and name.lower() not in {one.lower() for one in known}:
            yield _warning(
                f"{place}.accelerators: {name!r} is not in the price table",
                _did_you_mean(name, known) or "check the name with `sky gpus list`",
            )
