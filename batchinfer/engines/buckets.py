"""Models and adapters in a bucket, as in ``--model s3://bucket/folder``: what is there, and a copy on this machine.

vLLM reads local folders and the Hub. So the files of a folder in a bucket are fetched once, to a folder whose name has
a hash of the listing (names, sizes and etags). They are fetched under another name, which becomes the right one when
all are there. So a folder that is there is whole, and a model that has changed in the bucket gets another folder.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from batchinfer.core.errors import ConfigError, Interrupted, ScratchFull, StorageError
from batchinfer.core.units import size
from batchinfer.engines import Stop
from batchinfer.storage.opening import open_store

logger = logging.getLogger(__name__)

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".gguf")
"""Endings of weight files, in the order in which vLLM prefers them."""
ANSWER_SUFFIXES = (".json", ".jinja", ".model", ".txt", ".py", ".tiktoken", ".v1", ".v2", ".v3")
"""Endings of small files that may change a model's answers: config, tokenizer, chat template, the model's own code."""
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
    weights = weight_files(name for name in there if "/" not in name)
    files = [
        info
        for name, info in there.items()
        if name in weights
        or (name.endswith(ANSWER_SUFFIXES) and "/" not in name)
        or _MODULE_FOLDER.fullmatch(name)
    ]
    if not files:
        raise ConfigError(
            f"{url}: has no model: there is no such folder",
            hint="give the URL of the folder that holds config.json, or an adapter's adapter_config.json",
        )
    lines = sorted(f"{info.key}\0{info.bytes}\0{info.etag}\n" for info in files)
    identity = hashlib.sha256("".join(lines).encode()).hexdigest()[:40]
    sizes = {info.key: info.bytes for info in files}
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
    building, store = folder.parent.with_name(f".{uuid.uuid4().hex}"), open_store(url)

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
        raise ConfigError(
            f"{cache}: cannot be used: {error}", hint="name another folder in HF_HOME"
        ) from error
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return folder
