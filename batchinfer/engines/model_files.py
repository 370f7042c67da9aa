"""The files of models and adapters, in a folder of this machine, in a bucket or on the Hub: what is there, and a copy.

vLLM reads local folders and the Hub. So the files of a folder in a bucket, as in ``--model s3://bucket/folder``, are
fetched once, to a folder whose name has a hash of the listing (names, sizes and etags). They are fetched under another
name, which becomes the right one when all are there. So a folder that is there is whole, and a model that has changed
in the bucket gets another folder.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import math
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from pathlib import Path
from typing import NamedTuple

from batchinfer.core.errors import (
    BatchinferError,
    ConfigError,
    EngineLoadError,
    Interrupted,
    ScratchFull,
    StorageError,
)
from batchinfer.core.units import size
from batchinfer.engines import Stop
from batchinfer.storage.hub import hub_errors
from batchinfer.storage.opening import local_path, open_store
from batchinfer.storage.retrying import RetryPolicy, retried

logger = logging.getLogger(__name__)

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".gguf")
"""Endings of weight files, in the order in which vLLM prefers them."""
ANSWER_SUFFIXES = (".json", ".jinja", ".model", ".txt", ".py", ".tiktoken", ".v1", ".v2", ".v3")
"""Endings of small files that may change a model's answers: config, tokenizer, chat template, the model's own code."""
# Small files that are read of a model on the Hub; params.json is its config in Mistral's own format.
_SMALL_FILES = ("*config.json", "chat_template*", "params.json")
_SAMPLE_BYTES = 1 << 20
FILES_AT_ONCE = 8
_MODULE_FOLDER = re.compile(r"\d+_\w+/[^/]+")
"""Keys of the parts of a sentence-transformers model, such as 1_Pooling/config.json."""


class ModelFiles(NamedTuple):
    """The files of a model, wherever they are. Of those in a bucket only the ones that a server loads."""

    identity: str
    revision: str
    sizes: dict[str, int]
    """Bytes of each file by its name."""
    read: Callable[[str], bytes]


def model_files(name: str, revision: str | None = None) -> ModelFiles:
    """List a model's files; see `describe_model` for the errors."""
    if is_in_bucket(name):
        return list_model(name)
    path = local_path(name)
    if path.is_file():  # weights in GGUF's format
        return ModelFiles(hash_files([path]), "", {path.name: path.stat().st_size}, lambda _: b"")
    if path.is_dir():
        return _files_in(path)
    subject = f"--model: {name}" + (f" at --revision {revision}" if revision else "")
    return _files_on_hub(name, hub_folder(subject, name, _SMALL_FILES, revision))


def local_copy(name: str, stop: Stop | None = None) -> Path | None:
    """Return the place of a model or an adapter on this machine, fetched from its bucket; None for a name on the Hub.

    Raises:
        BatchinferError: as `fetch`.
    """
    if is_in_bucket(name):
        return fetch(name, stop)
    path = local_path(name)
    return path if path.exists() else None


def is_in_bucket(name: str) -> bool:
    """Whether the name of a model or an adapter is a URL.

    >>> is_in_bucket("s3://bucket/model"), is_in_bucket("Qwen/Qwen3-8B")
    (True, False)
    """
    return "://" in name and not name.lower().startswith("file://")


def weight_files(names: Iterable[str]) -> list[str]:
    """Return the weight files that vLLM would load: those of the format that it likes best.

    Mistral's repositories hold the same weights twice; the names of the second copy contain "consolidated".
    """
    listed = list(names)
    for suffix in WEIGHT_SUFFIXES:
        chosen = [name for name in listed if name.endswith(suffix)]
        if chosen:
            return [name for name in chosen if "consolidated" not in name] or chosen
    return []


@lru_cache(maxsize=16)
def list_model(url: str) -> ModelFiles:
    """List a model's files. A process lists a model only once, so that all its parts use the same version.

    Raises:
        ConfigError: the URL is not of a bucket, or no file is there.
        InputError: there is no such bucket.
        AccessDenied: the store refuses access.
        StorageError: the store failed after its retries.
    """
    store = open_store(url)
    there = {info.key: info for info in store.list("")}
    own = [name for name in there if "/" not in name]
    names = {*weight_files(own), *(name for name in own if name.endswith(ANSWER_SUFFIXES))}
    names |= {name for name in there if _MODULE_FOLDER.fullmatch(name)}
    if not names:
        hint = "give the URL of the folder that holds config.json, or adapter_config.json"
        raise ConfigError(f"{url}: there is no such folder with a model", hint=hint)
    lines = sorted(f"{name}\0{there[name].bytes}\0{there[name].etag}\n" for name in names)
    identity = hashlib.sha256("".join(lines).encode()).hexdigest()[:40]
    sizes = {name: there[name].bytes for name in names}
    return ModelFiles(identity, "", sizes, lambda name: store.get(name).data)


def fetch(url: str, stop: Stop | None = None) -> Path:
    """Bring a model's files to this machine, and return the folder with them. If it is there, the store is not asked.

    Raises:
        ConfigError: the cache folder cannot be written, or is full; or as `list_model`.
        InputError, AccessDenied, StorageError: as `list_model`.
        Interrupted: `stop` was set.
    """
    files, name = list_model(url), url.rstrip("/").rpartition("/")[2]
    cache = Path(os.environ.get("HF_HOME") or "~/.cache/huggingface").expanduser() / "batchinfer"
    folder = cache.absolute() / files.identity[:20] / name
    if folder.is_dir():
        return folder
    building = folder.parent.with_name(f".{uuid.uuid4().hex}")
    store = open_store(url, retries=RetryPolicy(total_seconds=math.inf))  # shards may take minutes

    def download(key: str) -> None:
        if stop is not None and stop.is_set():
            raise Interrupted(f"{url}: stopped while it was fetched")
        path = building / name / key
        path.parent.mkdir(parents=True, exist_ok=True)
        store.download(key, path)
        if path.stat().st_size != files.sizes[key]:
            raise StorageError(f"{url}: {key} has changed while it was fetched")

    total = size(sum(files.sizes.values()))
    logger.info("fetching %s (%d files, %s)", url, len(files.sizes), total)
    largest_first = sorted(files.sizes, key=files.sizes.__getitem__, reverse=True)
    try:
        with ThreadPoolExecutor(FILES_AT_ONCE) as threads:
            list(threads.map(download, largest_first))
        try:
            building.rename(folder.parent)
        except OSError:
            if not folder.is_dir():  # else another process was quicker
                raise
    except (OSError, ScratchFull) as error:
        hint = "name another folder in HF_HOME"
        raise ConfigError(f"{cache}: cannot be used: {error}", hint=hint) from error
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return folder


# --------------------------------------------------------------------------- this machine and the Hub


def _files_in(folder: Path) -> ModelFiles:
    paths = {path.name: path for path in sorted(folder.iterdir()) if path.is_file()}
    weights = weight_files(paths)
    hashed = [path for name, path in paths.items() if name.endswith(ANSWER_SUFFIXES)]
    identity = hash_files([*hashed, *(paths[name] for name in weights)])
    sizes = {name: path.stat().st_size for name, path in paths.items()}
    return ModelFiles(identity, "", sizes, lambda name: paths[name].read_bytes())


def hash_files(paths: list[Path], *, is_sampled: bool = True) -> str:
    """Return a hash of names, sizes and content; if `is_sampled`, only of both ends of weights, which are large."""
    digest = hashlib.sha256()
    for path in paths:
        num_bytes = path.stat().st_size
        digest.update(f"{path.name}\0{num_bytes}\n".encode())
        with path.open("rb") as file:
            if is_sampled and path.suffix in WEIGHT_SUFFIXES:
                digest.update(file.read(_SAMPLE_BYTES))
                file.seek(max(0, num_bytes - _SAMPLE_BYTES))
            hashlib.file_digest(file, lambda: digest)
    return digest.hexdigest()[:40]


def hub_folder(subject: str, name: str, files: Sequence[str], revision: str | None = None) -> Path:
    """Fetch files from the Hub to its cache. If it cannot be reached, the cache's own copy is taken.

    Returns:
        The folder with the files, whose name is the commit.

    Raises:
        ConfigError: the name can only be a path, and there is nothing.
        InputError, AccessDenied: the Hub has no such repository, or refuses access.
        EngineLoadError: the Hub cannot be reached, and the cache has no copy.
    """
    import huggingface_hub as hub
    from huggingface_hub import constants, errors

    if name.startswith((".", "/", "~")) or name.count("/") > 1 or "\\" in name:
        hint = "give a folder, its URL in a bucket, or a name on the Hub as in Qwen/Qwen3-0.6B"
        raise ConfigError(f"{subject} is no folder on this machine", hint=hint)
    with hub_errors(subject):
        try:
            return Path(hub.snapshot_download(name, revision=revision, allow_patterns=[*files]))
        except errors.LocalEntryNotFoundError as error:
            kind = ConfigError if constants.HF_HUB_OFFLINE else EngineLoadError
            hint = "check the spelling, the network, and HF_HUB_OFFLINE"
            raise kind(f"{subject} is not here, and the Hub is not reached", hint=hint) from error


def _files_on_hub(name: str, folder: Path) -> ModelFiles:
    """Return the files of a model on the Hub whose small ones are in a folder."""
    import huggingface_hub as hub

    commit, local = folder.name, _files_in(folder)
    sizes = local.sizes
    ask = hub_errors(name)(partial(hub.HfApi().model_info, files_metadata=True, timeout=30.0))
    with contextlib.suppress(BatchinferError):
        # Few attempts: a machine without a network waits for them, too.
        info = retried(RetryPolicy(attempts=3), lambda: ask(name, revision=commit))
        found = {file.rfilename: file.size or 0 for file in info.siblings or []}
        sizes = {key: each for key, each in found.items() if "/" not in key}
    return ModelFiles(commit, commit, sizes, local.read)
