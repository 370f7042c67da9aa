"""Lists and fetches models, tokenizers and adapters in a bucket, as in ``--model s3://bucket/folder``.

Files are fetched once, to a cache that all processes of the machine share::

    CACHE/<name>-<hash of the URL>/files/     small files: config, tokenizer, chat template
                                  /weights/   weight files
                                  /<identity>/<name>/   links to the files of one version

A file in `files` or `weights` is named after its key, size and etag. It gets this name when it is there whole, so files
that a killed process has fetched are not fetched again. The folder of links appears last, by one rename, and only
this folder is ever loaded. A process that fetches holds a flock(2), which ends with it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import itertools
import logging
import os
import re
import shutil
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import NamedTuple

import msgspec

from batchinfer.core.errors import (
    ConfigError,
    Interrupted,
    ObjectNotFound,
    ScratchFull,
    StorageError,
)
from batchinfer.core.units import size
from batchinfer.engines import Stop
from batchinfer.engines.config import EngineConfig
from batchinfer.engines.weights import ANSWER_SUFFIXES, WEIGHT_SUFFIXES, weight_files
from batchinfer.storage import ObjectInfo, Store
from batchinfer.storage.opening import READ_ONLY_SCHEMES, local_path, open_store, split_url

logger = logging.getLogger(__name__)

FILES_AT_ONCE = 8
"""Number of files that are fetched at the same time."""
PROGRESS_SECONDS = 10.0
"""Seconds between two log lines about a fetch, or about the wait for another process's fetch."""
_POLL_SECONDS = 0.2
_ROOM = (
    "free space there (folders of models that nobody uses may be removed), "
    "or name another folder with --model-cache"
)
_SMALL = (*ANSWER_SUFFIXES, ".v1", ".v2", ".v3")
"""Endings of small files that are fetched. The versions end the names of Mistral's tokenizers (tokenizer.model.v3)."""
_PARTIAL = ".part"
_MD5 = re.compile(r'"?([0-9a-f]{32})"?')
_MODULE_FOLDER = re.compile(r"\d+_\w+/[^/]+")
"""Keys of the parts of a sentence-transformers model, such as 1_Pooling/config.json."""


class _NoStop:
    """A stop signal that is never set. Implements `engines.Stop`."""

    def is_set(self) -> bool:
        return False


class BucketModel(NamedTuple):
    """The files of a model in a bucket, as one listing shows them."""

    url: str
    small: tuple[ObjectInfo, ...]
    weights: tuple[ObjectInfo, ...]
    """Weight files of all formats; `weight_files` says which of them vLLM loads."""

    @property
    def name(self) -> str:
        """Last part of the URL."""
        return self.url.rpartition("/")[2]

    @property
    def loaded_weights(self) -> tuple[ObjectInfo, ...]:
        """The weight files of the format that vLLM prefers, and all in subfolders (sentence-transformers)."""
        chosen = weight_files({info.key: info.bytes for info in self.weights})
        return tuple(info for info in self.weights if info.key in chosen or "/" in info.key)

    @property
    def identity(self) -> str:
        """Hash of the names, sizes and etags of those files that may change the model's answers."""
        return _identity([*self.small, *self.loaded_weights])


def _identity(files: Iterable[ObjectInfo]) -> str:
    lines = sorted(f"{info.key}\0{info.bytes}\0{info.etag}\n" for info in files)
    return hashlib.sha256("".join(lines).encode()).hexdigest()[:40]


def is_in_bucket(name: str | None) -> bool:
    """Whether the name of a model, a tokenizer or an adapter is a URL, except file://.

    >>> is_in_bucket("s3://bucket/model"), is_in_bucket("Qwen/Qwen3-8B"), is_in_bucket("file:///m")
    (True, False, False)
    """
    return bool(name) and "://" in str(name) and not str(name).lower().startswith("file://")


def plain_path(name: str) -> Path:
    """Return a model's name as a local path; it may be a file:// URL."""
    return local_path(name) if name.lower().startswith("file://") else Path(name).expanduser()


def cache_folder(config: EngineConfig) -> Path:
    """Return the folder of fetched models: --model-cache, else a folder in HF_HOME or in the user's cache."""
    if config.model_cache:
        return Path(config.model_cache).expanduser()
    if home := os.environ.get("HF_HOME"):
        return Path(home).expanduser() / "batchinfer"
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "batchinfer" / "models"


@lru_cache(maxsize=16)
def list_model(url: str, option: str) -> BucketModel:
    """List a model's files. A process lists a model only once, so that all its parts use the same version.

    Args:
        url: The folder.
        option: The option that names it, for messages.

    Raises:
        ConfigError: the URL is not of a bucket, or no model's files are there.
        InputError: there is no such bucket.
        AccessDenied: the store refuses access.
        StorageError: the store failed after its retries.
    """
    subject = f"{option}: {url}"
    scheme, rest = split_url(url)
    if scheme in READ_ONLY_SCHEMES:
        hint = (
            f"{option} {rest} is the model of this name on the Hub"
            if scheme == "hf"
            else "give a local folder, a name on the Hub, or a folder in s3:// or gs://"
        )
        raise ConfigError(f"{subject} cannot be listed as a folder of a bucket", hint=hint)
    there = [info for info in open_store(url).list("") if _is_needed(info.key)]
    if not there:
        raise ConfigError(
            f"{subject} has no model: there is no such folder, or none of its files is a model's",
            hint="give the URL of the folder that holds config.json, or an adapter's adapter_config.json",
        )
    weights = [info for info in there if info.key.endswith(WEIGHT_SUFFIXES)]
    small = [info for info in there if info not in weights]
    return BucketModel(url.rstrip("/"), tuple(small), tuple(weights))


def _is_needed(key: str) -> bool:
    if "/" in key and not _MODULE_FOLDER.fullmatch(key):
        return False
    return key.endswith((*_SMALL, *WEIGHT_SUFFIXES))


def with_local_files(
    config: EngineConfig, *, with_weights: bool, stop: Stop | None = None
) -> EngineConfig:
    """Return the configuration with local folders in place of the model's and the tokenizer's URLs.

    Files in a bucket that the local folder lacks are fetched.

    Args:
        config: The configuration that names the model and the tokenizer.
        with_weights: Whether the model's weights are needed. If not, and there is another tokenizer, the model's own
            files are not fetched either.
        stop: Ends the fetch.

    Raises:
        ConfigError: as in `list_model`, or the cache folder cannot be written or is full.
        InputError: there is no such bucket.
        AccessDenied: the store refuses access.
        StorageError: the store failed after its retries, or an object has changed since it was listed.
        Interrupted: `stop` was set.
    """
    changes: dict[str, str] = {}
    wanted = {"tokenizer": config.tokenizer}
    if with_weights or not config.tokenizer:
        wanted["model"] = config.model
    for field, name in wanted.items():
        if name and is_in_bucket(name):
            model = list_model(name, f"--{field}")
            weights = _weights_of(model, config) if with_weights and field == "model" else ()
            changes[field] = str(fetch(model, weights, cache_folder(config), stop))
        elif name and name.lower().startswith("file://"):
            changes[field] = str(plain_path(name))
    return msgspec.structs.replace(config, **changes)


def _weights_of(model: BucketModel, config: EngineConfig) -> tuple[ObjectInfo, ...]:
    load_format = config.engine_args.get("load_format", "auto")
    if load_format == "dummy":
        return ()
    return model.loaded_weights if load_format in ("auto", "hf", "safetensors") else model.weights


# --------------------------------------------------------------------------- fetching


def fetch(
    model: BucketModel, weights: Sequence[ObjectInfo], cache: Path, stop: Stop | None = None
) -> Path:
    """Bring a model's small files and these of its weight files to this machine, and return the folder with them.

    If all are there, the store gets no request. A kill at any point leaves the files that were fetched whole for the
    next fetch. See `with_local_files` for the errors.
    """
    stop = stop or _NoStop()
    files = [*model.small, *weights]
    short = hashlib.sha256(model.url.encode()).hexdigest()[:12]
    home = cache.absolute() / f"{model.name}-{short}"
    folder = home / _identity(files)[:20] / model.name
    if _is_whole(folder, files):
        return folder
    with _cache_errors(cache):
        _tell_changes(model, home)
        for kind, part in (("files", model.small), ("weights", weights)):
            with _locked(home / kind, f"{kind} of {model.url}", stop):
                _fetch_missing(model, part, home / kind, stop)
        _link(folder, home, model, weights)
    return folder


def _held_name(info: ObjectInfo) -> str:
    """Return the name under which the cache holds an object."""
    return f"{_identity([info])[:24]}-{info.key.replace('/', '-')}"


def _is_whole(folder: Path, files: Sequence[ObjectInfo]) -> bool:
    try:
        return all((folder / info.key).stat().st_size == info.bytes for info in files)
    except OSError:
        return False


def _tell_changes(model: BucketModel, home: Path) -> None:
    """Log which files have changed since this machine fetched them."""
    held = {path.name for kind in ("files", "weights") for path in (home / kind).glob("*-*")}
    old = {name.partition("-")[2] for name in held if not name.endswith(_PARTIAL)}
    changed = [
        info.key
        for info in (*model.small, *model.loaded_weights)
        if info.key.replace("/", "-") in old and _held_name(info) not in held
    ]
    if changed:
        shown = ", ".join(changed[:5]) + (" …" if len(changed) > 5 else "")
        logger.warning("%s: changed since this machine fetched it: %s", model.url, shown)


def _fetch_missing(
    model: BucketModel, files: Sequence[ObjectInfo], folder: Path, stop: Stop
) -> None:
    """Fetch those files that the folder lacks. The caller holds the folder's lock."""
    for left in folder.glob(f"*{_PARTIAL}"):
        left.unlink(missing_ok=True)  # from a fetch that was stopped or killed
    missing = [info for info in files if not _is_held(folder, info)]
    if not missing:
        return
    needed, free = sum(info.bytes for info in missing), shutil.disk_usage(folder).free
    if needed > free:
        raise ConfigError(
            f"--model-cache: {folder.parent.parent} has {size(free)} free, and {model.url} takes {size(needed)}",
            hint=_ROOM,
        )
    if folder.name == "weights":
        logger.info("fetching %s (%d files, %s)", model.url, len(missing), size(needed))
    _Fetch(open_store(model.url), model.url, missing, folder).run(stop)


def _is_held(folder: Path, info: ObjectInfo) -> bool:
    try:
        return (folder / _held_name(info)).stat().st_size == info.bytes
    except OSError:
        return False


class _Fetch:
    """Fetches several files at a time, on threads that end with the process. `run` waits for them."""

    def __init__(self, store: Store, url: str, files: Sequence[ObjectInfo], folder: Path) -> None:
        self._store = store
        self._url = url
        self._folder = folder
        self._total_bytes = sum(info.bytes for info in files)
        self._num_files = len(files)
        self._left = deque(sorted(files, key=lambda info: -info.bytes))
        self._done: list[int] = []
        """Bytes of each fetched file."""
        self._under_way: dict[Path, None] = {}
        self._numbers = itertools.count()
        self._error: Exception | None = None

    def run(self, stop: Stop) -> None:
        """Fetch the files. After an error or a stop, files that are under way are given up."""
        threads = [
            threading.Thread(target=self._work, name="fetch-model", daemon=True)
            for _ in range(min(FILES_AT_ONCE, self._num_files))
        ]
        begin = last = time.monotonic()
        try:
            for thread in threads:
                thread.start()
            while any(thread.is_alive() for thread in threads) and self._error is None:
                if stop.is_set():
                    raise Interrupted(f"{self._url}: stopped while it was fetched")
                for thread in threads:
                    thread.join(_POLL_SECONDS / len(threads))
                if time.monotonic() - last >= PROGRESS_SECONDS:
                    last = time.monotonic()
                    self._log(last - begin)
        finally:
            self._left.clear()
        if self._error is not None:
            raise self._error
        if self._folder.name == "weights":
            self._log(time.monotonic() - begin)

    def _log(self, seconds: float) -> None:
        num_bytes = sum(self._done)
        for path in list(self._under_way):
            with contextlib.suppress(OSError):
                num_bytes += path.stat().st_size
        logger.info(
            "%s: fetched %s of %s (%d of %d files), %s/s",
            self._url,
            size(num_bytes),
            size(self._total_bytes),
            len(self._done),
            self._num_files,
            size(int(num_bytes / max(seconds, 1e-3))),
        )

    def _work(self) -> None:
        try:
            while self._error is None and self._left:
                with contextlib.suppress(IndexError):  # another thread may have taken the last one
                    self._fetch(self._left.popleft())
        except Exception as error:  # noqa: BLE001 - the thread that waits raises it
            self._error = error

    def _fetch(self, info: ObjectInfo) -> None:
        # A stopped fetch may have left threads that still write. The number keeps their names and this one apart.
        number = f"{os.getpid()}-{id(self):x}-{next(self._numbers)}"
        path = self._folder / f"{_held_name(info)}.{number}{_PARTIAL}"
        self._under_way[path] = None
        try:
            self._download(info, path)
            path.replace(self._folder / _held_name(info))
            self._done.append(info.bytes)
        finally:
            del self._under_way[path]
            path.unlink(missing_ok=True)

    def _download(self, info: ObjectInfo, path: Path) -> None:
        """Copy one object to `path`, and make sure that it arrived whole and is the version that was listed.

        A plain etag usually is the MD5 of the object. Etags of some encrypted objects look the same and are not, so a
        file with another MD5 is fetched once more, and taken if the same bytes arrive again.
        """
        arrived = self._copy(info, path)
        expected = _MD5.fullmatch(info.etag)
        if expected is not None and arrived != expected[1] and arrived != self._copy(info, path):
            raise StorageError(
                f"{self._url}/{info.key}: arrived damaged: it was fetched twice, with different bytes",
                hint="check the network",
            )
        path.chmod(0o444)

    def _copy(self, info: ObjectInfo, path: Path) -> str:
        """Copy one object to `path` and return the file's MD5. The file is on the disk, not only in memory."""
        url = f"{self._url}/{info.key}"
        try:
            self._store.download(info.key, path)
            now = self._store.stat(info.key)
        except ObjectNotFound as error:
            raise _changed(url) from error
        if (now.bytes, now.etag) != (info.bytes, info.etag):
            raise _changed(url)
        with path.open("rb") as file:
            num_bytes = os.fstat(file.fileno()).st_size
            if num_bytes != info.bytes:
                raise StorageError(f"{url}: {num_bytes} bytes arrived, expected {info.bytes}")
            os.fsync(file.fileno())
            return hashlib.file_digest(
                file, partial(hashlib.md5, usedforsecurity=False)
            ).hexdigest()


def _changed(url: str) -> StorageError:
    return StorageError(
        f"{url}: has changed since this start listed the model's files",
        hint="start the same command again once nobody writes there",
    )


def _link(folder: Path, home: Path, model: BucketModel, weights: Sequence[ObjectInfo]) -> None:
    """Make the folder of links to a model's fetched files. Another process may do the same at the same time."""
    version = folder.parent
    building = home / f".{version.name}-{os.getpid()}-{threading.get_ident()}"
    shutil.rmtree(building, ignore_errors=True)
    for kind, files in (("files", model.small), ("weights", weights)):
        for info in files:
            link = building / folder.name / info.key
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(Path("../" * (2 + info.key.count("/")), kind, _held_name(info)))
    everything = [*model.small, *weights]
    while not _is_whole(folder, everything):
        try:
            building.rename(version)
        except OSError:
            # The folder is there, but somebody removed a part of it.
            if not version.exists():
                raise
            if not _is_whole(folder, everything):
                shutil.rmtree(version)
    shutil.rmtree(building, ignore_errors=True)


# --------------------------------------------------------------------------- the cache folder


@contextlib.contextmanager
def _locked(folder: Path, what: str, stop: Stop) -> Iterator[None]:
    """Hold the folder's lock. While another process holds it, say so and wait."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("ab") as lock:
        told = float("-inf")
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if stop.is_set():
                    raise Interrupted(f"{what}: stopped while waiting for them") from None
                if time.monotonic() - told >= PROGRESS_SECONDS:
                    told = time.monotonic()
                    logger.info("the %s are being fetched already; waiting for that", what)
                time.sleep(_POLL_SECONDS)
        yield


@contextlib.contextmanager
def _cache_errors(cache: Path) -> Iterator[None]:
    """Turn an error of the cache folder into ConfigError, since a retry alone cannot help."""
    try:
        yield
    except ScratchFull as error:
        reason = error.message.partition(": ")[2]
        raise ConfigError(f"--model-cache: {cache} {reason}", hint=_ROOM) from error
    except OSError as error:
        named = f" ({error.filename})" if error.filename else ""
        raise ConfigError(
            f"--model-cache: {cache} cannot be used: {error.strerror or error}{named}", hint=_ROOM
        ) from error
