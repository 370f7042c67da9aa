"""Each run has one configuration (promise P6): run.json, which is created once, its fingerprint, and the run's job."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from batchinfer.core import codec, layout
from batchinfer.core.errors import (
    AlreadyExists,
    BatchinferError,
    InputError,
    ObjectNotFound,
    RunMismatch,
)
from batchinfer.core.records import FORMAT_VERSION, Job, Run
from batchinfer.ledger.jobs import OpenStore, load_job
from batchinfer.storage import Store
from batchinfer.storage.opening import split_url

logger = logging.getLogger(__name__)

UNKNOWN = "(not known before the engine has loaded)"
_SHOWN = 200
_ALIASES = {"s3a": "s3", "r2": "s3", "gcs": "gs"}
_PUT_BACK = "put run.json back as the run's first worker wrote it, or start another run with another --output"


class _Config(msgspec.Struct):
    """Fields of `config` whose types are checked; all others are only compared and shown."""

    job_sha256: str = ""
    limit: int | None = None
    seed: int | None = 0
    engine_args: dict[str, Any] = {}
    prompt: dict[str, Any] = {}
    sampling: dict[str, Any] = {}


class _Recorded(msgspec.Struct):
    job: str = ""


class Configuration(msgspec.Struct):
    """The part of run.json whose types are checked. Error messages show this class's name."""

    config: _Config
    recorded: _Recorded


def read_run(store: Store, *, may_be_edited: bool = False) -> Run | None:
    """Read run.json, None if there is none.

    Raises:
        InputError: it is damaged, of a newer format version, or unless `may_be_edited`, its fingerprint is not that of
            its configuration.
    """
    name = f"{store.url}/{layout.RUN_KEY}"
    try:
        data = store.get(layout.RUN_KEY).data
    except ObjectNotFound:
        return None
    run = codec.decode(data, Run, name=name, hint=_PUT_BACK)
    codec.check_version(data, name=name)
    codec.decode(data, Configuration, name=name, hint=_PUT_BACK)
    if not may_be_edited:
        refuse_edited(run, url=store.url)
    return run


def edit_of(run: Run) -> str:
    """Return a sentence if run.json was edited, so that its fingerprint is not that of its configuration; else "".

    Pure.
    """
    computed = codec.fingerprint(run.config)
    if computed == run.fingerprint:
        return ""
    return f"its configuration has the fingerprint {computed}, but {run.fingerprint} stands in it: it was edited"


def refuse_edited(run: Run, *, url: str) -> None:
    """Refuse a run whose run.json was edited, since it no longer says how the outputs were made.

    Raises:
        InputError: see `edit_of`.
    """
    if problem := edit_of(run):
        raise InputError(f"{url}/{layout.RUN_KEY}: {problem}", hint=_PUT_BACK)


def refuse_newer(store: Store) -> None:
    """Refuse a run of a newer format version. A run whose run.json is gone or damaged passes.

    Raises:
        InputError: it is newer.
    """
    try:
        data = store.get(layout.RUN_KEY).data
    except ObjectNotFound:
        return
    codec.check_version(data, name=f"{store.url}/{layout.RUN_KEY}")


def no_run(store: Store) -> InputError:
    """Return the error for a URL that holds no run. A job's URL is the likeliest mistake, so its runs are named."""
    url = store.url
    try:
        store.stat(layout.JOB_KEY)
    except ObjectNotFound:
        if url.endswith(f"/{layout.RUNS.rstrip('/')}"):
            keys = (info.key.split("/") for info in store.list())
            if names := sorted({parts[0] for parts in keys if len(parts) > 1}):
                return InputError(
                    f"{url}: holds runs, expected one of them ({', '.join(names)})",
                    hint=f"give {url}/{names[0]}",
                )
        return InputError(
            f"{url}: no run there (neither run.json nor workers nor outputs)",
            hint="check the URL; it is what the worker's --output says, by default JOB/runs/default",
        )
    keys = (info.key.split("/") for info in store.list(layout.RUNS))
    names = sorted({parts[1] for parts in keys if len(parts) > 2})
    if not names:
        return InputError(
            f"{url}: is a job without runs",
            hint="start a worker first, or give the URL that its --output names",
        )
    return InputError(
        f"{url}: is a job, expected one of its runs ({', '.join(names)})",
        hint=f"give {layout.run_url(url, names[0])}",
    )


def join_run(
    store: Store, config: dict[str, Any], recorded: dict[str, Any], *, nonce: str, is_safe: bool
) -> Run:
    """Create run.json, or check that the existing one has the same fingerprint.

    Without preconditions (`is_safe` false) two first workers may both write run.json. Each then reads it back to see
    which one stayed, which is only best effort.

    Raises:
        RunMismatch: the run has another configuration; the difference is in the message.
    """
    config = _plain(config)
    mine = Run(
        format_version=FORMAT_VERSION,
        fingerprint=codec.fingerprint(config),
        config=config,
        recorded=_plain(recorded),
        nonce=nonce,
    )
    standing = read_run(store)
    if standing is None:
        try:
            store.create(layout.RUN_KEY, codec.encode_pretty(mine))
        except AlreadyExists:
            pass
        else:
            if is_safe:
                return mine
        standing = read_run(store)
        if standing is None:
            raise InputError(
                f"{store.url}/{layout.RUN_KEY}: vanished",
                hint="somebody deletes the run; start again",
            )
    check_same(standing, config, url=store.url)
    for key in ("engine_version", "batchinfer_version"):
        here, there = mine.recorded.get(key), standing.recorded.get(key)
        if here != there:
            logger.warning(
                "%s: the run was started with %s, this is %s; results may differ", key, there, here
            )
    return standing


def check_same(run: Run, config: dict[str, Any], *, url: str) -> None:
    """Compare a configuration, or the part of it that is known so far, with the run's.

    Raises:
        RunMismatch: with every difference, one a line.
    """
    differences = differing_keys(run.config, _plain(config))
    if differences:
        lines = "\n".join(
            f"  {key}: the run has {there}, this worker {here}" for key, there, here in differences
        )
        raise RunMismatch(
            f"{url}: the run was made with another configuration:\n{lines}",
            hint="use the run's values, or start another run with another --output",
        )


def differing_keys(
    there: dict[str, Any], here: dict[str, Any], prefix: str = ""
) -> list[tuple[str, str, str]]:
    """Return dotted keys whose values differ, with both values cut to a readable length.

    UNKNOWN values are skipped. Pure.

    >>> differing_keys({"a": {"b": 1}, "c": 2}, {"a": {"b": 3}, "c": 2})
    [('a.b', '1', '3')]
    """
    found = []
    for key in sorted(there.keys() | here.keys()):
        left, right = there.get(key), here.get(key)
        if right in (UNKNOWN, left):
            continue
        if isinstance(left, dict) and isinstance(right, dict):
            found += differing_keys(left, right, f"{prefix}{key}.")
        else:
            found.append((prefix + key, _show(left), _show(right)))
    return found


def _show(value: object) -> str:
    text = codec.encode(value).decode()
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "…"


def _plain(config: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration as it looks after a round trip through JSON, since this form is stored and compared."""
    plain: dict[str, Any] = msgspec.json.decode(codec.encode(config))
    return plain


# --------------------------------------------------------------------------- the job that a run is of


def job_sha256_of(run: Run | None) -> str:
    """Return the sha256 of the run's job.json; empty if it is not known, or the run was made from a list."""
    return "" if run is None else str(run.config.get("job_sha256") or "")


def job_places(run: Run | None, run_url: str) -> list[str]:
    """Return the URLs where a run's job may be, the likeliest first: a job is usually moved together with its runs.

    Somebody who can write run.json must not choose where requests go. So the URL in run.json is used only if it is in
    the run's own bucket, or if both are local folders.
    """
    recorded = recorded_job(run)
    beside = recorded if is_beside(recorded, run_url) else ""
    return list(dict.fromkeys(filter(None, (layout.job_above(run_url), beside))))


def recorded_job(run: Run | None) -> str:
    """Return the URL that run.json records for the job, as of when the run was made; empty if there is none."""
    return "" if run is None else str(run.recorded.get("job") or "").rstrip("/")


def is_beside(url: str, run_url: str) -> bool:
    """Whether two URLs are of one bucket, or both of local folders."""
    return _bucket(url) == _bucket(run_url)


def _bucket(url: str) -> tuple[str, str]:
    scheme, rest = split_url(url)
    if scheme == "file":
        return scheme, ""
    depth = 3 if scheme == "hf" else 1  # datasets/org/name
    return _ALIASES.get(scheme, scheme), "/".join(rest.split("/")[:depth])


class FoundJob(NamedTuple):
    """A job, its URL, and the sha256 of its job.json."""

    job: Job
    url: str
    sha256: str


def find_job(
    run: Run | None,
    run_url: str,
    open_store: OpenStore,
    *,
    asked_url: str | None = None,
    on_error: Callable[[BatchinferError], None] | None = None,
) -> FoundJob | None:
    """Return a run's job, preferring one whose checksum is the run's to one whose checksum is not. Read-only.

    Args:
        run: run.json, None while there is none.
        run_url: URL of the run.
        open_store: Opens the job's store from a URL.
        asked_url: The only place to look in; by default those of `job_places`.
        on_error: Takes the error of a place that cannot be read, and the next place is tried; by default it is raised.

    Raises:
        InputError: there is no job.json at `asked_url`.
    """
    others: list[FoundJob] = []
    for url in [asked_url.rstrip("/")] if asked_url else job_places(run, run_url):
        try:
            loaded = load_job(url, open_store)
        except BatchinferError as error:
            if on_error is None:
                raise
            on_error(error)
            continue
        if loaded is None:
            continue
        found = FoundJob(loaded[0], url, loaded[1])
        if found.sha256 == job_sha256_of(run):
            return found
        others.append(found)
    if others:
        return others[0]
    if asked_url:
        raise InputError(
            f"{asked_url}: no job.json there", hint="pass the --job that `split` wrote to"
        )
    return None
