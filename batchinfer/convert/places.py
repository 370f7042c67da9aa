"""Reads a conversion's source and puts its result at DEST, each of them a local path or a bucket.

A conversion writes its files to a local scratch folder. `Conversion.publish` then puts them at DEST. A local folder
appears whole, by one rename. In a bucket the files appear one after the other. See `BucketFolder`.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from batchinfer.convert.bucket_folder import BucketFolder, taken
from batchinfer.core.errors import (
    ConfigError,
    InputError,
    ObjectNotFound,
)
from batchinfer.core.units import size
from batchinfer.engines.models import looks_like_path
from batchinfer.storage.hub import hub_errors
from batchinfer.storage.opening import check_writable, local_path, open_store, split_url
from batchinfer.storage.scratch import Scratch, scratch_errors

logger = logging.getLogger(__name__)

_MODEL_FILES = (
    *("*.json", "*.safetensors", "*.bin", "*.txt"),
    *("*.model", "*.jinja", "*.py"),
)


class PlacedFiles(NamedTuple):
    """Number of a result's files, and their bytes together."""

    files: int
    bytes: int


class Conversion:
    """One conversion into `dest`. The result is written below `folder`, a local folder that is empty at first."""

    def __init__(self, dest: str, scratch: Scratch, bucket: BucketFolder | None) -> None:
        self.dest = dest
        self.folder = scratch.folder / "result"
        self.folder.mkdir()
        self._scratch = scratch
        self._bucket = bucket

    def fetch_file(self, source: str) -> Path:
        """Return a local path of the file at `source`; a file in a bucket is downloaded first.

        A local folder is returned as it is.

        Raises:
            InputError: Nothing is at `source`.
        """
        scheme, path = split_url(source)
        if scheme == "file":
            local = Path(path).expanduser()
            if not local.exists():
                raise InputError(f"{source}: no such file", hint="check the path")
            return local
        parent, _, name = source.rpartition("/")
        logger.info("fetching %s", source)
        copy = self._scratch.new_path(name or "source")
        try:
            open_store(parent).download(name, copy)
        except ObjectNotFound:
            raise InputError(f"{source}: no such object", hint="check the URL") from None
        return copy

    def fetch_model(self, source: str) -> Path:
        """Return a local folder of the model at `source`: a folder, a folder of a bucket, or a name on the Hub.

        Raises:
            InputError: There is no such folder or model, or the bucket's folder holds no file of a model.
        """
        scheme, path = split_url(source)
        local = Path(path).expanduser()
        if scheme == "file" and (local.exists() or looks_like_path(source)):
            if not local.is_dir():
                raise InputError(
                    f"{source}: is no folder of this machine",
                    hint="give a folder that holds config.json, or a name on the Hub",
                )
            return local
        if scheme != "file":
            return self._download_folder(source)
        import huggingface_hub as hub

        with hub_errors(source):
            return Path(hub.snapshot_download(source, allow_patterns=list(_MODEL_FILES)))

    def need_space(self, num_bytes: int) -> None:
        """Check that the scratch folder's disk has room for a result of `num_bytes` bytes.

        Raises:
            InputError: Fewer bytes are free.
        """
        free = shutil.disk_usage(self.folder).free
        if num_bytes > free:
            raise InputError(
                f"{self._scratch.folder.parent}: {size(free)} are free, the result takes {size(num_bytes)}",
                hint="free space there, or name another folder with --scratch-dir (for a DEST in a bucket)",
            )

    def publish(self) -> PlacedFiles:
        """Put the result's files at DEST.

        Raises:
            InputError: The local folder DEST cannot be made, for example because another program has made it meanwhile;
                or another conversion has begun in the bucket.
        """
        files = [path for path in self.folder.rglob("*") if path.is_file()]
        num_bytes = sum(path.stat().st_size for path in files)
        if self._bucket is None:
            self._rename()
        else:
            names = [path.relative_to(self.folder).as_posix() for path in files]
            self._bucket.upload(self.folder, names)
        return PlacedFiles(len(files), num_bytes)

    def _rename(self) -> None:
        target = local_path(self.dest).resolve()  # a link stays, and its folder is made
        try:
            self.folder.rename(target)  # replaces an empty folder, but no other folder
        except OSError as error:
            raise InputError(
                f"{self.dest}: cannot be made ({error.strerror})", hint="name another DEST"
            ) from error

    def _download_folder(self, source: str) -> Path:
        store = open_store(source)
        folder = self._scratch.new_path("model")
        folder.mkdir()
        for info in store.list(""):
            if any(Path(info.key).match(pattern) for pattern in _MODEL_FILES):
                target = folder / info.key
                target.parent.mkdir(parents=True, exist_ok=True)
                logger.info("fetching %s", info.key)
                store.download(info.key, target)
        if not any(folder.iterdir()):
            raise InputError(f"{source}: holds no file of a model", hint="check the URL")
        return folder


@contextmanager
def conversion(dest: str, *, scratch_dir: Path | None) -> Iterator[Conversion]:
    """Begin a conversion into `dest`. A place where an earlier conversion did not finish counts as free.

    Raises:
        ConfigError: `dest` is a place that can only be read, or `scratch_dir` is given for a local `dest`.
        InputError: `dest` is not free.
        AccessDenied: The bucket may not be written to. This is found out before the conversion.
    """
    check_writable(dest, option="DEST")
    bucket = None
    made: list[Path] = []
    if not dest:
        raise ConfigError("DEST is empty", hint="name a folder")
    if split_url(dest)[0] == "file":
        target = local_path(dest).resolve()
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise taken(dest)
        if scratch_dir is not None:
            raise ConfigError(
                "--scratch-dir: DEST is a local folder, beside which the result is built",
                hint="leave --scratch-dir out",
            )
        made = [folder for folder in target.parents if not folder.exists()]
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(
                f"{dest}: cannot be made ({error.strerror})", hint="name another DEST"
            ) from error
        scratch = Scratch(target.parent)
    else:
        scratch = Scratch(scratch_dir)
    try:
        if split_url(dest)[0] != "file":
            bucket = BucketFolder(open_store(dest))
        with scratch_errors(scratch.folder):
            yield Conversion(dest, scratch, bucket)
    except BaseException:
        if bucket is not None:
            bucket.release()
        raise
    finally:
        scratch.close()
        with suppress(OSError):  # after a failure, folders that were made for DEST go as well
            for folder in made:
                folder.rmdir()
