"""The house rules that no other tool checks: who decodes, who changes an object."""

import ast
import doctest
import functools
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import batchinfer

PACKAGE = Path(batchinfer.__file__).parent
MODULES = [path.relative_to(PACKAGE) for path in sorted(PACKAGE.rglob("*.py"))]
QUIET = {"worker", "ledger"}
# What msgspec decodes without a class of its own.
PLAIN = {"Any", "None", "Raw", "bool", "bytes", "dict", "float", "int", "list", "msgspec", "str", "tuple"}  # fmt: skip
DECODING = re.compile(r"msgspec\.(?:convert|(?:json|msgpack)\.(?:decode|Decoder))")


@functools.cache
def tree_of(path: Path) -> ast.AST:
    """Syntax tree of a module. Every process of the test run imports this file, so nothing is parsed at its import."""
    return ast.parse((PACKAGE / path).read_text())


def decoded_types(tree: ast.AST) -> Iterator[ast.expr]:
    """The types that msgspec is asked for directly."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and DECODING.fullmatch(name := ast.unparse(node.func)):
            yield from node.args[0 if name.endswith("Decoder") else 1 :]
            yield from (keyword.value for keyword in node.keywords if keyword.arg == "type")


def test_classes_are_decoded_through_codec():
    """Elsewhere two threads could meet a class at once, which msgspec does not survive."""
    found = [
        f"{path}:{kind.lineno}: {ast.unparse(kind)}"
        for path in MODULES
        if str(path) != "core/codec.py"
        for kind in decoded_types(tree_of(path))
        if not PLAIN.issuperset(re.findall(r"\w+", ast.unparse(kind)))
    ]
    assert found == []


def test_examples_in_docstrings_are_true():
    """They are the only proof of some pure functions."""
    found = [path for path in MODULES if ">>> " in (PACKAGE / path).read_text()]
    for path in found:
        module = importlib.import_module(".".join(["batchinfer", *path.with_suffix("").parts]))
        assert doctest.testmod(module).failed == 0, path
    assert found


@pytest.mark.parametrize("path", [path for path in MODULES if path.parts[0] in QUIET], ids=str)
def test_objects_of_worker_and_ledger_change_themselves(path):
    """An attribute is assigned by its own object: who changes what is then seen in one class."""
    found = [
        f"line {node.lineno}: {ast.unparse(target)}"
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign)
        for target in getattr(node, "targets", None) or [node.target]
        if isinstance(target, ast.Attribute)
        and not (isinstance(target.value, ast.Name) and target.value.id in {"self", "cls"})
        and not ast.unparse(target).startswith("self._bar.")  # tqdm's own way
    ]
    assert found == []
