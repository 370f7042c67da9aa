"""Reads a file that torch.save wrote, and runs no code of it.

A checkpoint of a training run is a pickle: a list of steps that call functions by name. torch's reader for weights
(`weights_only=True`) calls only functions that make plain values and tensors. It refuses a file with any other name.
Checkpoints hold many such names: metrics, timestamps, random state. Here each of them gets a stand-in, which takes
whatever it is given and does nothing.
"""

from __future__ import annotations

import re
import warnings
import zipfile
from pathlib import Path
from typing import Any, Self

from batchinfer.core.errors import InputError

_RUNS_CODE = re.compile(
    r"(os|posix|nt|sys|subprocess|commands|shutil|socket|pty|runpy|importlib|imp|ctypes|pickle|marshal|urllib)\..*"
    r"|(builtins|io|_io)\.(eval|exec|execfile|compile|open|__import__)"
)
"""Names that no honest checkpoint holds. Nothing that is not listed is called either, but people should learn what
they were given."""
_BLOCK_BYTES = 4 << 20
_COPY_AGAIN = "copy the file again, and compare its size with the original's"


class Inert:
    """Stands in for an object that is not made, and for a function that is not called. It keeps nothing."""

    origin = ""
    """Module and name of what this object stands for."""

    def __new__(cls, *_arguments: Any, **_options: Any) -> Self:
        """Take any arguments."""
        return object.__new__(cls)

    def __init__(self, *_arguments: Any, **_options: Any) -> None: ...

    def __setstate__(self, _state: Any) -> None:
        """Take the object's attributes."""


def read_checkpoint(path: Path, subject: str) -> Any:
    """Return the content of a torch file. Tensors are mapped from the file: they take memory only where they are read.

    `subject` is the file's name in messages.

    Raises:
        InputError: The file is no torch file, is cut short or damaged, or names a function that would run code.
    """
    import torch
    from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

    _check_parts(path, subject)
    try:
        names = sorted(get_unsafe_globals_in_checkpoint(str(path)))
        refused = next(filter(_RUNS_CODE.fullmatch, names), None)
        if refused is None:
            stand_ins = [(_stand_in(name), name) for name in names]
            with safe_globals(stand_ins), warnings.catch_warnings(action="ignore"):
                return torch.load(str(path), map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:  # a damaged pickle raises whatever its last step raises
        reason = (
            str(error).rpartition("WeightsUnpickler error:")[2].strip().partition("\n")[0][:200]
        )
        raise InputError(
            f"{subject}: cannot be read as a torch checkpoint ({type(error).__name__}: {reason})",
            hint=_COPY_AGAIN,
        ) from error
    raise InputError(
        f"{subject}: would run {refused} when torch loads it; nothing was run",
        hint="do not load this file with anything else; ask where it comes from",
    )


def _stand_in(name: str) -> Any:
    """Return what torch calls in place of the class or function of this name.

    The content of these two containers follows after the call, and torch adds it to plain lists and dictionaries only.
    """
    if name == "collections.deque":
        return lambda *_: []
    if name == "collections.defaultdict":
        return lambda *_: {}
    return type(name.rpartition(".")[2], (Inert,), {"origin": name})


def _check_parts(path: Path, subject: str) -> None:
    """Compare each part of a torch file with its checksum, which torch does not do for mapped tensors.

    Raises:
        InputError: The file is no torch file, or an archive of TorchScript, or a part is damaged.
    """
    if not zipfile.is_zipfile(path):
        with path.open("rb") as file:
            if file.read(2) == b"PK":
                raise InputError(f"{subject}: is cut short", hint=_COPY_AGAIN)
        raise InputError(
            f"{subject}: is no file that torch.save wrote (torch 1.6 or later)",
            hint="give the file that the training run saved, such as ep0-ba2000-rank0.pt",
        )
    try:
        with zipfile.ZipFile(path) as archive:
            for part in archive.infolist():
                # torch hands an archive with constants to the interpreter of TorchScript, which runs its code.
                top, _, name = part.filename.partition("/")
                if "constants.pkl" in (top, name) or name.startswith("code/"):
                    raise InputError(
                        f"{subject}: is a TorchScript archive, which is a program; nothing was run",
                        hint="give a checkpoint that torch.save wrote; do not load this file with anything else",
                    )
                if part.compress_type != zipfile.ZIP_STORED:
                    raise zipfile.BadZipFile(f"{part.filename} is compressed")
                if not part.CRC:
                    continue  # torch can write files without checksums
                with archive.open(part) as file:
                    while file.read(_BLOCK_BYTES):
                        pass
    except (zipfile.BadZipFile, EOFError, NotImplementedError, RuntimeError) as error:
        raise InputError(f"{subject}: is damaged ({error})", hint=_COPY_AGAIN) from error
