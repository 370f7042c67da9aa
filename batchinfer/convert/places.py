"""Reads a conversion's source and puts its result at DEST, each of them a local path or a bucket.

A conversion writes its files to a local scratch folder. A local DEST then appears whole, by one rename. In a bucket the
files appear one after the other, and last the one without which no program takes the rest for a model.
"""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

from batchinfer.core.errors import InputError
from batchinfer.split.files import is_local
from batchinfer.storage import Store
from batchinfer.storage.hub import hub_errors
from batchinfer.storage.opening import local_path, open_store
from batchinfer.storage.scratch import Scratch, scratch_errors

logger = logging.getLogger(__name__)

_UPLOADED_LAST = ("config.json", "config.ini")
"""Names of the files that programs read first when they load a result."""
_MODEL_FILES = ["*.json", "*.safetensors", "*.bin", "*.txt", "*.model", "*.jinja"]


def fetch_file(source: str, scratch: Path) -> Path:
    """Return a local path of the file at `source`. A file in a bucket is downloaded to `scratch` first.

    Raises:
        ValueError: It is a folder, or absent.
        ObjectNotFound: There is no such object in the bucket.
    """
    if is_local(source):
        if not local_path(source).is_file():
            raise ValueError("there is no such file")
        return local_path(source)
    parent, _, name = source.rpartition("/")
    logger.info("fetching %s", source)
    open_store(parent).download(name, scratch / "source")
    return scratch / "source"


def fetch_model(source: str) -> Path:
    """Return a local folder of the model at `source`: a folder, or a name on the Hub.

    Raises:
        InputError: There is no such folder or model.
    """
    if is_local(source) and local_path(source).is_dir():
        return local_path(source)
    import huggingface_hub as hub

    with hub_errors(source):
        return Path(hub.snapshot_download(source, allow_patterns=_MODEL_FILES))


@contextmanager
def result_at(dest: str) -> Iterator[Path]:
    """Give an empty folder to write a result to, and put what it holds at the end at `dest`, if all went well.

    After a kill the same command begins anew; what the killed one has left in a bucket has to be removed first.

    Raises:
        InputError: `dest` holds something else, or cannot be made.
        AccessDenied: The place may not be written to. This is found out before the conversion.
    """
    with ExitStack() as stack:
        scratch = _scratch_beside(dest) if is_local(dest) else Scratch()
        stack.enter_context(closing(scratch))
        stack.enter_context(scratch_errors(scratch.folder))
        if not is_local(dest):
            _check_bucket(open_store(dest))
        folder = scratch.folder / "result"
        folder.mkdir()
        yield folder
        if is_local(dest):
            folder.rename(local_path(dest).resolve())  # replaces an empty folder, but no other
        else:
            _upload(open_store(dest), folder)


def _scratch_beside(dest: str) -> Scratch:
    target = local_path(dest).resolve()  # a link stays, and its folder is made
    try:
        if target.exists() and any(target.iterdir()):
            raise _taken(dest)
        if os.path.ismount(target):  # which no rename replaces
            raise InputError(f"{dest}: is a mounted folder", hint="name a folder in it")
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{dest}: cannot be made ({error})", hint="name another DEST") from error
    return Scratch(target.parent)


def _check_bucket(store: Store) -> None:
    """Refuse a DEST that holds something or may not be written to, before hours of work are lost."""
    if next(iter(store.list("")), None) is not None:
        raise _taken(store.url)
    probe = f"_probe-{secrets.token_hex(8)}"
    store.create(probe, b"batchinfer convert may write here")
    store.delete([probe])


def _upload(store: Store, folder: Path) -> None:
    names = {path.name for path in folder.iterdir()}
    for name in sorted(names, key=lambda name: (name in _UPLOADED_LAST, name)):
        logger.info("uploading %s", name)
        store.put_file(name, folder / name)


def _taken(dest: str) -> InputError:
    return InputError(f"{dest}: holds something already", hint="name another DEST, or remove it")
