"""run.json, which gives each run one configuration (promise P6) and its fingerprint, and the search for a run's job.

The first worker creates run.json. Every later worker must have the same configuration.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping
from typing import Any

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
from batchinfer.ledger.jobs import OpenStore, is_beside, load_job, no_job
from batchinfer.storage import Store
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


def read_run(store: Store) -> Run | None:
    """Read run.json. Return None if it does not exist.

    Raises:
        InputError: run.json is damaged, has a newer format version, or was edited: its fingerprint does not fit its
            configuration, so it no longer says how the outputs were made.
    """
    name = f"{store.url}/{layout.RUN_KEY}"
    try:
        data = store.get(layout.RUN_KEY).data
    except ObjectNotFound:
        return None
    run = codec.decode(data, Run, name=name, hint=_PUT_BACK)
    codec.decode(data, Configuration, name=name, hint=_PUT_BACK)
    if (computed := codec.fingerprint(run.config)) != run.fingerprint:
        raise InputError(
            f"{name}: was edited: its configuration has the fingerprint {computed}, but {run.fingerprint} stands in it",
            hint=_PUT_BACK,
        )
    return run


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
        f"{store.url}: no run there: no run.json, which the first worker writes once its engine has loaded",
        hint="check the URL: it is what --output says, by default JOB/runs/default, of `batchinfer run -o DEST` "
        "DEST.batchinfer/run; where only run.json is gone, a worker with the run's options writes it again",
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
        InputError: run.json is damaged, was edited, or has a newer format version.
        StorageError: run.json was removed each time that it was written.
    """
    config = _plain(config)
    mine = Run(
        format_version=FORMAT_VERSION,
        fingerprint=codec.fingerprint(config),
        config=config,
        recorded=_plain(recorded),
        nonce=nonce,
    )
    for _ in range(WRITES):  # another worker may create it, or somebody remove it
        if (standing := read_run(store)) is not None:
            break
        refuse_foreign(marked or {}, mine.fingerprint, url=store.url)
        with contextlib.suppress(AlreadyExists):
            store.create(layout.RUN_KEY, codec.encode_pretty(mine))
    else:
        raise StorageError(
            f"{store.url}/{layout.RUN_KEY}: is removed as often as it is written",
            hint="find out what removes it, then start the same command again",
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
    differing = differing_keys(run.config, _plain(config))
    lines = "\n".join(
        f"  {key}: the run has {there}, this worker {here}{_MEANINGS.get(key, '')}"
        for key, there, here in differing
    )
    if lines:
        raise RunMismatch(
            f"{url}: the run was made with another configuration:\n{lines}",
            hint="use the run's values, or start another run with another --output",
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


def job_places(run: Run | None, run_url: str) -> list[str]:
    """Return the URLs where a run's job may be, the likeliest first.

    The folder above the run comes first, because a job that is moved usually takes its runs along. The URL in run.json
    comes second, and only if it is in the run's own bucket, or if both are local folders: people who can write run.json
    must not be able to send this program's requests elsewhere. Without a run.json the engine of `batchinfer run` may be
    loading.
    """
    recorded = layout.job_beside(run_url)
    if run is not None:
        recorded = str(run.recorded.get("job") or "").rstrip("/")
    beside = recorded if is_beside(recorded, run_url) else ""
    return list(dict.fromkeys(filter(None, (layout.job_above(run_url), beside))))


def find_job(
    run: Run | None, run_url: str, open_store: OpenStore, *, asked_url: str | None = None
) -> tuple[Job, str]:
    """Find the job that a run was made from, and its URL. Read-only.

    Args:
        run: The content of run.json; None if it does not exist yet.
        run_url: URL of the run.
        open_store: Opens the job's store from a URL.
        asked_url: The only URL to look at; by default the URLs of `job_places` are looked at.

    Raises:
        InputError: No place has a job.json, or one is damaged, or all are of other jobs than the run's.
    """
    others = []
    for url in [asked_url.rstrip("/")] if asked_url else job_places(run, run_url):
        if (loaded := load_job(url, open_store)) is not None:
            if run is None or loaded[1] == run.config.get("job_sha256"):
                return loaded[0], url
            others.append(url)
    if others:
        raise InputError(
            f"{others[0]}: is another job than the one that {run_url} was made from",
            hint="name the run's own job with --job",
        )
    if asked_url:
        raise no_job(asked_url)
    raise InputError(
        f"{run_url}: neither its place nor run.json tells where its job lies; one in another bucket is not looked for",
        hint="name it: --job JOB",
    )
