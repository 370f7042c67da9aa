"""Reads a file that torch.save wrote, and calls only functions that are known to be harmless.

A checkpoint of a training run is a pickle: a list of steps that call functions by name. Here only functions that make
plain values and tensors are called. A file that names a function that would run code is refused. Every other class or
function, such as a metric or a timestamp, is replaced by `Inert`, which takes whatever it is given and does nothing.
"""

from __future__ import annotations

import pickle  # every name that the file mentions is looked up in `_Unpickler.find_class`
import warnings
import zipfile
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

from batchinfer.core.errors import InputError

_CALLED = {
    "collections": {"OrderedDict", "defaultdict"},
    "builtins": {"set", "frozenset"},
    "torch": {"Size", "device"},
    "torch._utils": {"_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_parameter"},
    "torch.serialization": {"_get_layout"},
}  # fmt: skip
"""Functions and classes that are called as the file says, by module. They only make values."""

_RUNS_CODE = {
    *("os", "posix", "nt", "sys", "subprocess", "shutil", "socket", "runpy", "importlib", "imp", "pty", "commands"),
    *("ctypes", "_ctypes", "code", "codeop", "webbrowser", "pickle", "_pickle", "marshal", "cloudpickle", "dill"),
    *("pip", "ensurepip", "venv", "pdb", "bdb", "trace", "timeit", "cProfile", "profile", "doctest", "pydoc", "test"),
    *("pkgutil", "site", "signal", "asyncio", "multiprocessing", "http", "urllib", "httplib", "requests", "aiohttp"),
}  # fmt: skip
"""Modules with functions that start programs, load code, change files or open connections. A file that names anything
of these modules is refused."""
_RUNS_CODE_IN = {
    "builtins": {"eval", "exec", "execfile", "compile", "open", "__import__", "input", "breakpoint", "apply"},
    "types": {"CodeType", "FunctionType"},
    "io": {"open", "FileIO"},
    "_io": {"open", "FileIO"},
    "torch": {"load"},
    "torch.serialization": {"load"},
    "numpy": {"load"},
    "numpy.testing._private.utils": {"runstring"},
}  # fmt: skip
"""Further names that are refused, by module. Other names of these modules are not refused."""

_BLOCK_BYTES = 4 << 20
_KINDS = (
    (b"GGUF", "a GGUF file"),
    (b"\x89HDF", "an HDF5 file, as Keras writes"),
    (b"\x93NUMPY", "a numpy array"),
    (b"\x1f\x8b", "a gzip file"),
    (b"\x28\xb5\x2f\xfd", "a zstd file"),
    (b"7z\xbc\xaf", "a 7z file"),
    (b"\x80", "a bare pickle or a torch file from before torch 1.6"),
)


class Inert:
    """Stands in for an object of a class that is not called. It keeps nothing that it is given."""

    origin = ""
    """Module and name of what this object stands for."""

    def __new__(cls, *_arguments: Any, **_options: Any) -> Self:
        """Take any arguments."""
        return object.__new__(cls)

    def __init__(self, *_arguments: Any, **_options: Any) -> None: ...

    def __call__(self, *_arguments: Any, **_options: Any) -> Inert:
        """Take a call of something that this object stands for, such as a bound method."""
        return Inert()

    def __setstate__(self, _state: Any) -> None:
        """Take the object's attributes."""

    def __setitem__(self, _key: Any, _value: Any) -> None:
        """Take an item of a dictionary."""

    def append(self, _item: Any) -> None:
        """Take an item of a list."""

    def extend(self, _items: Any) -> None:
        """Take several items of a list."""

    def add(self, _item: Any) -> None:
        """Take an item of a set."""


class _RunsCode(Exception):
    """The file names a function that would run code."""


class _Unpickler(pickle.Unpickler):
    """Looks up each name that a pickle mentions."""

    def find_class(self, module: str, name: str) -> Any:
        """Return the function or class itself if it only makes values, else a stand-in.

        Raises:
            _RunsCode: The name is a function that would run code.
        """
        module, name = NAME_MAPPING.get((module, name), (module, name))
        module = IMPORT_MAPPING.get(module, module)
        if (module, name) == ("_codecs", "encode"):
            return _encode
        if name in _CALLED.get(module, ()) or _is_dtype(module, name):
            return super().find_class(module, name)
        root = module.partition(".")[0]
        if root in _RUNS_CODE or name.partition(".")[0] in _RUNS_CODE_IN.get(module, ()):
            raise _RunsCode(f"{module}.{name}")
        return type(name, (Inert,), {"origin": f"{module}.{name}"})


def _encode(text: str, encoding: str) -> bytes:
    """Return the bytes that pickle's protocol 2 has stored as a text."""
    if encoding != "latin1":
        raise _RunsCode(f"_codecs.encode with {encoding}")
    return text.encode("latin1")


def _is_dtype(module: str, name: str) -> bool:
    import torch

    return module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)


def _load(file: Any, **options: Any) -> Any:
    return _Unpickler(file, **options).load()


_PICKLE: Any = SimpleNamespace(Unpickler=_Unpickler, load=_load, __name__="pickle")
"""Object that torch uses in place of the module pickle."""


def read_checkpoint(path: Path, subject: str) -> Any:
    """Return the content of a torch file. Tensors are mapped from the file: they take memory only where they are read.

    `subject` is the file's name in messages.

    Raises:
        InputError: The file is no torch file, is cut short or damaged, or names a function that would run code.
    """
    import torch

    with path.open("rb") as file:
        head = file.read(16)
    if not head.startswith(b"PK"):
        raise InputError(
            f"{subject}: is {_kind(head)}, expected a checkpoint that torch.save wrote",
            hint="give the file that the training run saved, such as ep0-ba2000-rank0.pt",
        )
    if not zipfile.is_zipfile(path):
        raise InputError(
            f"{subject}: is cut short (its list of parts, which stands at the end, is missing)",
            hint="copy the file again and compare its size with the original's",
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = torch.load(
                str(path), map_location="cpu", mmap=True, weights_only=False, pickle_module=_PICKLE
            )
    except _RunsCode as error:
        raise InputError(
            f"{subject}: would run {error} when torch loads it; nothing was run",
            hint="do not load this file with anything else; ask where it comes from",
        ) from None
    except Exception as error:  # a damaged pickle raises whatever its last step raises
        raise InputError(
            f"{subject}: cannot be read as a torch checkpoint ({type(error).__name__}: {_first_line(error)})",
            hint="copy the file again and compare its size with the original's",
        ) from error
    _check_parts(path, subject)
    return found


def _check_parts(path: Path, subject: str) -> None:
    """Compare each part of a torch file with its checksum, which torch does not do for mapped tensors.

    Raises:
        InputError: A part is damaged.
    """
    with zipfile.ZipFile(path) as archive:
        for part in archive.infolist():
            if not part.CRC:
                continue  # torch can write files without checksums
            try:
                with archive.open(part) as file:
                    while file.read(_BLOCK_BYTES):
                        pass
            except (zipfile.BadZipFile, EOFError, NotImplementedError, RuntimeError) as error:
                raise InputError(
                    f"{subject}: is damaged ({error})",
                    hint="copy the file again from where it was written",
                ) from error


def _kind(head: bytes) -> str:
    if head[8:9] == b"{":
        return "a safetensors file"
    for start, kind in _KINDS:
        if head.startswith(start):
            return kind
    return "empty" if not head else "no torch file"


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0][:200]
