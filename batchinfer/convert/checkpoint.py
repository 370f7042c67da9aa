"""Reads a file that torch.save wrote, and runs no code of it.

A checkpoint of a training run is a pickle: a list of steps that call functions by name. torch's reader for weights
(`weights_only=True`) calls only functions that make plain values and tensors. It refuses a file with any other name.
Checkpoints hold many such names: metrics, timestamps, random state. Here each of them gets a stand-in, which takes
whatever it is given and does nothing.
"""

from __future__ import annotations

import errno
import warnings
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from batchinfer.core.errors import BatchinferError, InputError, ObjectNotFound


class Inert:
    """Stands in for an object that is not made, and for a function that is not called. It keeps nothing."""

    def __new__(cls, *_arguments: Any) -> Self:
        """Take any arguments."""
        return object.__new__(cls)

    def __setstate__(self, _state: Any) -> None:
        """Take the object's attributes."""


@contextmanager
def refused(what: str, hint: str) -> Iterator[None]:
    """Turn a ValueError of ours, and whatever a library raises over malformed input, into InputError.

    A full disk's error passes, since it is about the scratch folder.
    """
    try:
        yield
    except Exception as error:
        is_ours = isinstance(error, BatchinferError) and not isinstance(error, ObjectNotFound)
        code = getattr(error, "errno", None)
        if is_ours or code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        if code:
            hint = "see to the rights of the files, and to their disk"
        if isinstance(error, ModuleNotFoundError):
            hint = "pip install 'batchinfer[convert]'"
        text = str(error).rpartition("WeightsUnpickler error:")[2].strip().partition("\n")[0]
        kind = "" if type(error) is ValueError else f"{type(error).__name__}: "
        raise InputError(f"{what}: {kind}{text[:300]}", hint=hint) from error


def read_checkpoint(path: Path) -> Any:
    """Return the content of a torch file. Tensors are mapped from the file: they take memory only where they are read.

    Raises:
        ValueError: The file is an archive of TorchScript, or is damaged. Other files raise other errors.
    """
    import torch
    from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

    with zipfile.ZipFile(path) as archive:
        for part in archive.infolist():
            top, _, name = part.filename.partition("/")
            # torch hands an archive with constants to the interpreter of TorchScript, which runs its code.
            if "constants.pkl" in (top, name) or name.startswith("code/"):
                raise ValueError("it is a TorchScript archive, which is a program; nothing was run")
            if part.compress_type != zipfile.ZIP_STORED:
                raise ValueError(f"{part.filename} is compressed, which torch.save never does")
        if damaged := archive.testzip():  # torch compares no checksums of mapped tensors
            raise ValueError(f"{damaged} is damaged")
    names = get_unsafe_globals_in_checkpoint(str(path))
    stand_ins = [(type(name, (Inert,), {}), name) for name in names]
    with safe_globals(stand_ins), warnings.catch_warnings(action="ignore"):
        return torch.load(str(path), map_location="cpu", mmap=True, weights_only=True)
