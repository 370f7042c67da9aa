"""The weight files of a model: which ones vLLM loads, whether they are whole, and a hash of them.

Only parts of large weight files are read. A safetensors file says in its header how long it must be, so a download that
was cut short is found before an engine is loaded.
"""

from __future__ import annotations

import hashlib
import json
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import msgspec

from batchinfer.core import codec
from batchinfer.core.errors import ConfigError

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".gguf")
"""Endings of weight files, in the order in which vLLM prefers them."""
ANSWER_SUFFIXES = (".json", ".jinja", ".model", ".txt", ".py", ".tiktoken")
"""Endings of small files that may change a model's answers: config, tokenizer, chat template, the model's own code."""
# Bytes that are read at each end of a weight file for its hash.
SAMPLE_BYTES = 1 << 20

_MAX_HEADER_BYTES = 100_000_000
"""Largest header that the safetensors library itself accepts."""
_Size = Annotated[int, msgspec.Meta(ge=0)]
_SHARD = re.compile(r"(.*)-(\d+)-of-(\d+)(\.\w+)")
_ZIP_BEGIN = b"PK\x03\x04"
_POINTER_BEGIN = b"version https://git-lfs"
_HINT = "download the model again; `hf download NAME` goes on with files that are cut short"


def weight_files(sizes: Mapping[str, int]) -> dict[str, int]:
    """Return the weight files that vLLM would load, with their sizes in bytes.

    If there are files of several formats, vLLM loads only one format: safetensors if possible, else .bin, and so on.
    """
    for suffix in WEIGHT_SUFFIXES:
        chosen = {name: size for name, size in sizes.items() if name.endswith(suffix)}
        # Mistral's repositories hold the same weights twice; the names of the second copy contain "consolidated".
        without_copy = {name: size for name, size in chosen.items() if "consolidated" not in name}
        if chosen:
            return without_copy or chosen
    return {}


def check_shards(subject: str, names: list[str]) -> None:
    """Refuse weights of which a part is missing, as the numbers in their names tell. Pure.

    Args:
        subject: The model, for the message.
        names: Names of the weight files.

    Raises:
        ConfigError: the message names the first missing file.
    """
    for name in names:
        if shard := _SHARD.fullmatch(name):
            stem, number, total, suffix = shard.groups()
            for index in range(1, min(int(total), 100_000) + 1):
                other = f"{stem}-{index:0{len(number)}d}-of-{total}{suffix}"
                if other not in names:
                    raise ConfigError(f"{subject} lacks the weights file {other}", hint=_HINT)


def check_weights(subject: str, folder: Mapping[str, Path], names: list[str]) -> None:
    """Refuse weight files in a folder that are cut short, and a folder that lacks some of them.

    Args:
        subject: The model, for the message.
        folder: All files of the folder by name.
        names: Names of the weight files that vLLM would load.

    Raises:
        ConfigError: the message names the file.
    """
    check_shards(subject, names)
    for name, path in folder.items():
        if name.endswith(".index.json") and name.removesuffix(".index.json").endswith(
            tuple({Path(each).suffix for each in names})
        ):
            for listed in _listed_files(path):
                if listed not in folder:
                    raise ConfigError(
                        f"{subject} lacks the weights file {listed}, which {name} lists", hint=_HINT
                    )
    for name in names:
        if problem := _problem_of(folder[name]):
            raise ConfigError(f"{subject}: the weights file {name} {problem}", hint=_HINT)


def _listed_files(path: Path) -> list[str]:
    """Return the files that an index of weights lists."""
    try:
        files = json.loads(path.read_bytes())["weight_map"].values()
        return sorted({str(file) for file in files})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{path}: is no index of weights ({type(error).__name__}: {error})", hint=_HINT
        ) from error


def _problem_of(path: Path) -> str:
    """Return what is wrong with a weight file, or "" if nothing is found. Its content is not checked."""
    size = path.stat().st_size
    with path.open("rb") as file:
        begin = file.read(len(_POINTER_BEGIN))
        if begin == _POINTER_BEGIN:
            return "is a pointer of Git LFS, not the file itself (`git lfs pull` fetches it)"
        if path.suffix == ".safetensors":
            length = int.from_bytes(begin[:8], "little")
            if size < 8 or 8 + length > size:
                return f"is cut short: it has {size} bytes, and ends in its header"
            file.seek(8)
            tensors = _tensors_of(file.read(length)) if length <= _MAX_HEADER_BYTES else None
            if tensors is None:
                return "is no safetensors file, or damaged: its header cannot be read"
            expected = max((tensor.data_offsets[1] for tensor in tensors.values()), default=0)
            if size != 8 + length + expected:
                how = "is cut short" if size < 8 + length + expected else "is too long"
                return f"{how}: it has {size} bytes, and its header says {8 + length + expected}"
            return ""
    if size == 0 or (begin.startswith(_ZIP_BEGIN) and not zipfile.is_zipfile(path)):
        return f"is cut short: it has {size} bytes, and its end is missing"
    return ""


class _Tensor(msgspec.Struct):
    """A tensor in the header of a safetensors file."""

    shape: list[_Size]
    data_offsets: tuple[_Size, _Size]


_tensor_decoder = codec.json_decoder(_Tensor)


def read_header(path: Path) -> dict[str, list[int]]:
    """Return the shape of each tensor of a safetensors file that `check_weights` has accepted."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        tensors = _tensors_of(file.read(length))
    assert tensors is not None, "check_weights refuses such a header"
    return {name: tensor.shape for name, tensor in tensors.items()}


def _tensors_of(header: bytes) -> dict[str, _Tensor] | None:
    """Return the tensors that the header of a safetensors file lists, by name; None if this is no such header."""
    try:
        entries = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
        entries.pop("__metadata__", None)
        return {name: _tensor_decoder.decode(entry) for name, entry in entries.items()}
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def hash_weights(files: Mapping[str, Path]) -> str:
    """Return a hash of the size and both ends of each weight file. Reading whole weight files would take too long."""
    digest = hashlib.sha256()
    for name, path in sorted(files.items()):
        size = path.stat().st_size
        digest.update(f"{name}\0{size}\n".encode())
        with path.open("rb") as file:
            digest.update(file.read(SAMPLE_BYTES))
            file.seek(max(0, size - SAMPLE_BYTES))
            digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()[:40]
