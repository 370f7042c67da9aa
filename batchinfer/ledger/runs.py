"""run.json, which gives each run one configuration (promise P6) and its fingerprint, and the search for a run's job.

The first worker creates run.json. Every later worker must have the same configuration.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from batchinfer.core import codec, layout
from batchinfer.core.errors import (
    AlreadyExists,
    InputError,
    ObjectNotFound,
    RunMismatch,
    StorageError,
)
from batchinfer.core.records import FORMAT_VERSION, Job, Run
from batchinfer.core.shell import quote
from batchinfer.ledger.jobs import OpenStore, load_job, no_job
from batchinfer.storage import Store
from batchinfer.storage.opening import split_url
from batchinfer.storage.retrying import WRITES

logger = logging.getLogger(__name__)

UNKNOWN = "(not known before the engine has loaded)"
_SHOWN = 200
_SHOWN_CHUNKS = 3
"""Largest number of chunks that an error names."""
_MEANINGS = {
    "job_sha256": " (the run is of another job)",
    "model_identity": " (the model's files are not those with which the run began)",
}
"""Explanations of differences in the configuration, by key."""
_PUT_BACK = "put run.json back as the run's first worker wrote it, or start another run with another --output"


class _Config(msgspec.Struct):
    """Fields of run.json's `config` whose types are checked. All its other fields are only compared and shown."""

    job_sha256: str = ""
    limit: int | None = None
    seed: int | None = 0
    prompt: dict[str, Any] = {}


class _Recorded(msgspec.Struct):
    job: str = ""


class Configuration(msgspec.Struct):
    """The part of run.json whose types are checked. Error messages show this class's name."""

    config: _Config
    recorded: _Recorded


def read_run(store: Store, *, may_be_edited: bool = False) -> Run | None:
    """Read run.json. Return None if it does not exist.

    Raises:
        InputError: run.json is damaged, has a newer format version, or was edited (its fingerprint does not fit its
            configuration). With `may_be_edited` an edited run.json is no error.
    """
    name = f"{store.url}/{layout.RUN_KEY}"
    try:
        data = store.get(layout.RUN_KEY).data
    except ObjectNotFound:
        return None
    run = codec.decode(data, Run, name=name, hint=_PUT_BACK)
    codec.decode(data, Configuration, name=name, hint=_PUT_BACK)
    if not may_be_edited:
        refuse_edited(run, url=store.url)
    return run


def edit_of(run: Run) -> str:
    """Return a sentence that says that run.json was edited; "" if its fingerprint fits its configuration. Pure."""
    computed = codec.fingerprint(run.config)
    if computed == run.fingerprint:
        return ""
    return f"its configuration has the fingerprint {computed}, but {run.fingerprint} stands in it: it was edited"


def refuse_edited(run: Run, *, url: str) -> None:
    """Refuse a run whose run.json was edited, since it no longer says how the outputs were made.

    Raises:
        InputError: The fingerprint in run.json does not fit its configuration.
    """
    if problem := edit_of(run):
        raise InputError(f"{url}/{layout.RUN_KEY}: {problem}", hint=_PUT_BACK)


def no_run(store: Store) -> InputError:
    """Return the error for a URL that holds no run.

    Users often give the URL of a job, or of its runs/ folder, instead. The error then names the runs that it holds.
    """
    above = "" if store.url.endswith(f"/{layout.RUNS.rstrip('/')}") else layout.RUNS
    keys = (info.key.removeprefix(above).partition("/") for info in store.list(above))
    if names := sorted({name for name, slash, _ in keys if slash}):
        return InputError(
            f"{store.url}: holds runs, expected one of them ({', '.join(names)})",
            hint=f"give {store.url}/{above}{names[0]}",
        )
    return InputError(
        f"{store.url}: no run there (neither run.json nor workers nor outputs)",
        hint="start a worker first, or check the URL: it is what --output says, by default JOB/runs/default; "
        "of `batchinfer run -o DEST` it is DEST.batchinfer/run",
    )


def join_run(
    store: Store,
    config: dict[str, Any],
    recorded: dict[str, Any],
    *,
    nonce: str,
    marked: Mapping[str, str] | None = None,
) -> Run:
    """Create run.json, or check that the existing one has the same configuration.

    It is not created if there are markers of another configuration. `marked`: The fingerprints in markers, by chunk.

    Raises:
        RunMismatch: The run, or a chunk that is done, has another configuration. The message names each difference, or
            the first chunks.
        InputError: run.json is damaged, was edited, has a newer format version, or vanished meanwhile.
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
        refuse_foreign(marked or {}, mine.fingerprint, url=store.url)
        try:
            store.create(layout.RUN_KEY, codec.encode_pretty(mine))
            return mine
        except AlreadyExists:
            pass
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
    """Refuse a configuration that differs from the run's. Values that are still UNKNOWN are not compared.

    Raises:
        RunMismatch: The configurations differ. The message has one line for each difference.
    """
    if lines := _differences(run, config):
        raise RunMismatch(
            f"{url}: the run was made with another configuration:\n{lines}",
            hint="use the run's values, or start another run with another --output",
        )


def _differences(run: Run, config: dict[str, Any]) -> str:
    """Return one line for each key of a configuration whose value differs from the run's."""
    return "\n".join(
        f"  {key}: the run has {there}, this worker {here}{_MEANINGS.get(key, '')}"
        for key, there, here in differing_keys(run.config, _plain(config))
    )


def refuse_foreign(marked: Mapping[str, str], fingerprint: str, *, url: str) -> None:
    """Refuse a run in which chunks were done with another configuration. `marked`: The fingerprints in their markers.

    An empty fingerprint is not known, and is not compared.

    Raises:
        RunMismatch: A marker has another fingerprint than `fingerprint`.
    """
    foreign = sorted(name for name, each in marked.items() if each not in ("", fingerprint))
    if not foreign:
        return
    more = f" and {len(foreign) - _SHOWN_CHUNKS} more" if len(foreign) > _SHOWN_CHUNKS else ""
    redo = " ".join(f"--redo {quote(name)}" for name in foreign[:_SHOWN_CHUNKS]) + (
        " …" if more else ""
    )
    raise RunMismatch(
        f"{url}: was made with two configurations: the markers of {', '.join(foreign[:_SHOWN_CHUNKS])}{more} have the "
        f"fingerprint {marked[foreign[0]]}, run.json or this worker has {fingerprint}",
        hint=f"{_PUT_BACK}; or do these chunks again: batchinfer clean {quote(url)} {redo} --yes",
    )


def confirm_run(store: Store, run: Run) -> None:
    """Check that a run that this worker has joined still has its configuration. A run.json that is gone is put back.

    Raises:
        RunMismatch: run.json was replaced by one with another configuration.
        StorageError: run.json was removed each time that it was put back.
    """
    for _ in range(WRITES):
        if (standing := read_run(store)) is not None:
            break
        logger.warning("%s/%s: was removed; it is put back", store.url, layout.RUN_KEY)
        with contextlib.suppress(AlreadyExists):
            store.create(layout.RUN_KEY, codec.encode_pretty(run))
    else:
        raise StorageError(
            f"{store.url}/{layout.RUN_KEY}: is removed as often as it is put back",
            hint="find out what removes it, then start the same command again",
        )
    if lines := _differences(standing, run.config):
        raise RunMismatch(
            f"{store.url}/{layout.RUN_KEY}: was replaced while this worker ran, by one of another configuration:\n"
            f"{lines}",
            hint=f"{_PUT_BACK}; `batchinfer verify` tells which chunks are of which",
        )


def differing_keys(
    there: dict[str, Any], here: dict[str, Any], prefix: str = ""
) -> list[tuple[str, str, str]]:
    """Return a (dotted key, value in `there`, value in `here`) tuple for each key whose values differ.

    The values are texts, cut to a readable length. A key whose value in `here` is UNKNOWN is skipped. Pure.

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
    """Return the configuration encoded as JSON and decoded again, since run.json holds it in this form."""
    plain: dict[str, Any] = msgspec.json.decode(codec.encode(config))
    return plain


# --------------------------------------------------------------------------- finding the job that a run was made from


def job_sha256_of(run: Run | None) -> str:
    """Return the sha256 of the run's job.json; empty if there is no run.json."""
    return "" if run is None else str(run.config.get("job_sha256") or "")


def job_places(run: Run | None, run_url: str) -> list[str]:
    """Return the URLs where a run's job may be, the likeliest first.

    The folder above the run comes first, because a job that is moved usually takes its runs along. The URL in run.json
    comes second, and only if it is in the run's own bucket, or if both are local folders: people who can write run.json
    must not be able to send this program's requests elsewhere. Without a run.json the engine of `batchinfer run` may be
    loading.
    """
    recorded = layout.job_beside(run_url) if run is None else recorded_job(run)
    beside = recorded if is_beside(recorded, run_url) else ""
    return list(dict.fromkeys(filter(None, (layout.job_above(run_url), beside))))


def recorded_job(run: Run | None) -> str:
    """Return the URL that the job had when the run was made, as run.json records it; empty if none is recorded."""
    return "" if run is None else str(run.recorded.get("job") or "").rstrip("/")


def is_beside(url: str, run_url: str) -> bool:
    """Whether two URLs lie in the same bucket, or both name local folders."""
    return _bucket(url) == _bucket(run_url)


def _bucket(url: str) -> tuple[str, str]:
    scheme, rest = split_url(url)
    if scheme == "file":
        return scheme, ""
    depth = 3 if scheme == "hf" else 1  # datasets/org/name
    return {"r2": "s3"}.get(scheme, scheme), "/".join(rest.split("/")[:depth])


class FoundJob(NamedTuple):
    """A job, its URL, and the sha256 of its job.json."""

    job: Job
    url: str
    sha256: str


def find_job(
    run: Run | None, run_url: str, open_store: OpenStore, *, asked_url: str | None = None
) -> FoundJob:
    """Find the job that a run was made from. Read-only.

    The first job.json with the checksum that run.json records is returned. If no job.json has that checksum, the first
    job.json that was found is returned.

    Args:
        run: The content of run.json; None if it does not exist yet.
        run_url: URL of the run.
        open_store: Opens the job's store from a URL.
        asked_url: The only URL to look at; by default the URLs of `job_places` are looked at.

    Raises:
        InputError: No place has a job.json, or one is damaged.
    """
    others: list[FoundJob] = []
    for url in [asked_url.rstrip("/")] if asked_url else job_places(run, run_url):
        if (loaded := load_job(url, open_store)) is not None:
            found = FoundJob(loaded[0], url, loaded[1])
            if found.sha256 == job_sha256_of(run):
                return found
            others.append(found)
    if others:
        return others[0]
    if asked_url:
        raise no_job(asked_url)
    recorded, problem = recorded_job(run), "neither run.json nor its place tells where its job lies"
    if run is None:
        problem = "no engine has loaded yet, so there is no run.json to tell where its job lies"
    elif recorded and not is_beside(recorded, run_url):
        problem = f"run.json names the job {recorded!r}, which is not where the run is, so it is only read if asked for"
    raise InputError(f"{run_url}: {problem}", hint="name it: --job JOB")
