"""The names of vLLM's parameters, arguments, parsers and methods of quantization, without importing vLLM.

Importing vLLM takes seconds. The names are read from the source of the installed vLLM. A machine without vLLM, on which
jobs are split and checked, takes them from vllm_names.txt. Another version of vLLM may have more names, so without vLLM
a name is refused only if it is much like a known one.
"""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.resources
import importlib.util
import logging
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from batchinfer.core.errors import ConfigError, near

logger = logging.getLogger(__name__)

SAMPLING = "SamplingParams"
ARGUMENTS = "EngineArgs"
SPECULATION = "SpeculativeConfig"
CALL_PARSERS = "ToolParser"
REASONING_PARSERS = "ReasoningParser"
QUANTIZATIONS = "QuantizationMethods"
_FILES = {
    SAMPLING: "sampling_params.py",
    ARGUMENTS: "engine/arg_utils.py",
    SPECULATION: "config/speculative.py",
    CALL_PARSERS: "tool_parsers/__init__.py",
    REASONING_PARSERS: "reasoning/__init__.py",
    QUANTIZATIONS: "model_executor/layers/quantization/__init__.py",
}
_TABLES = {
    CALL_PARSERS: "_TOOL_PARSERS_TO_REGISTER",
    REASONING_PARSERS: "_REASONING_PARSERS_TO_REGISTER",
}
"""Dictionaries of vLLM whose keys are the names of its parsers."""
_PLUGINS = ("vllm.general_plugins", "vllm.platform_plugins")
"""Groups of entry points by which packages extend vLLM, with methods of quantization, say."""


@cache
def installed_names(kind: str) -> frozenset[str]:
    """Return the fields of a class of the installed vLLM, or the names of its parsers or methods of quantization.

    Returns:
        None of them if vLLM is not installed or its source cannot be read.
    """
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        return frozenset()
    try:
        tree = ast.parse((Path(spec.origin).parent / _FILES[kind]).read_bytes())
    except (OSError, SyntaxError):
        return frozenset()
    if kind in _TABLES:
        return _keys_of(tree, _TABLES[kind])
    if kind == QUANTIZATIONS:
        return _choices_of(tree, kind)
    return frozenset(
        field.target.id
        for node in tree.body
        if isinstance(node, ast.ClassDef) and node.name == kind
        for field in node.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
    )


def _keys_of(tree: ast.Module, table: str) -> frozenset[str]:
    """Return the keys of the dictionary that a module assigns to the name `table`."""
    for node in tree.body:
        if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Dict):
            continue
        if any(isinstance(each, ast.Name) and each.id == table for each in node.targets):
            keys = (key.value for key in node.value.keys if isinstance(key, ast.Constant))
            return frozenset(map(str, keys))
    return frozenset()


def _choices_of(tree: ast.Module, name: str) -> frozenset[str]:
    """Return the texts of the `Literal[...]` that a module assigns to `name`."""
    for node in tree.body:
        if (
            isinstance(node, ast.Assign)
            and any(isinstance(each, ast.Name) and each.id == name for each in node.targets)
            and isinstance(node.value, ast.Subscript)
            and isinstance(node.value.slice, ast.Tuple)
        ):
            choices = node.value.slice.elts
            return frozenset(str(each.value) for each in choices if isinstance(each, ast.Constant))
    return frozenset()


@cache
def listed_names(kind: str) -> frozenset[str]:
    """Return the names of the same kind in the version of vLLM that vllm_names.txt was made from."""
    text = importlib.resources.files("batchinfer.engines").joinpath("vllm_names.txt").read_text()
    pairs = (line.split() for line in text.splitlines() if not line.startswith("#"))
    return frozenset(name for owner, name in pairs if owner == kind)


def check_names(
    option: str, kind: str, names: Iterable[str], *, others: Iterable[str] = ()
) -> None:
    """Refuse names that vLLM does not have, before anything is loaded.

    Args:
        option: Option that the names were given to, for the message.
        kind: `SAMPLING`, `ARGUMENTS` or `SPECULATION`.
        names: The names.
        others: Further names that may be meant, such as aliases.

    Raises:
        ConfigError: vLLM has no such name. The message suggests the most similar name.
    """
    installed = installed_names(kind)
    known = installed or listed_names(kind)
    for name in names:
        if name in known:
            continue
        meant = near(name, sorted({*known, *others}))
        if installed or meant:
            raise ConfigError(
                f"{option} {name}: vLLM's {kind} has no such field{meant}",
                hint=f"{option} takes the names of vLLM's {kind}",
            )
        logger.warning("%s %s: not known here, and vLLM is not installed to ask", option, name)


def check_parser(option: str, kind: str, name: str) -> None:
    """Refuse the name of a parser that vLLM does not have, before anything is loaded.

    Args:
        option: Option that the name was given to.
        kind: `CALL_PARSERS` or `REASONING_PARSERS`.
        name: The name; empty for no parser.

    Raises:
        ConfigError: vLLM has no such parser. The message suggests the most similar name.
    """
    installed = installed_names(kind)
    known = installed or listed_names(kind)
    if not name or name in known:
        return
    meant = near(name, sorted(known))
    if installed or meant:
        raise ConfigError(
            f"{option} {name}: vLLM has no such parser{meant}",
            hint=f"it has {', '.join(sorted(known))}",
        )
    logger.warning("%s %s: not known here, and vLLM is not installed to ask", option, name)


def check_quantization(option: str, name: str) -> None:
    """Refuse a method of quantization that the installed vLLM does not have, before anything is loaded.

    Without vLLM no method is refused. Packages that extend vLLM may add methods, so if there is one, an unknown method
    only causes a warning.

    Args:
        option: Option that the name was given to.
        name: The name, in which vLLM does not distinguish upper case; empty for the model's own method.

    Raises:
        ConfigError: vLLM has no such method. The message suggests the most similar name.
    """
    known = installed_names(QUANTIZATIONS)
    if not name or not known or name.lower() in known:
        return
    if _is_extended():
        logger.warning("%s %s: not known here; an extension of vLLM may have it", option, name)
        return
    raise ConfigError(
        f"{option} {name}: vLLM has no such method{near(name.lower(), sorted(known))}",
        hint=f"it has {', '.join(sorted(known))}",
    )


def _is_extended() -> bool:
    """Whether another package than vLLM and this one extends vLLM."""
    points = (point for group in _PLUGINS for point in importlib.metadata.entry_points(group=group))
    return any(point.module.partition(".")[0] not in ("vllm", "batchinfer") for point in points)
