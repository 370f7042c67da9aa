"""Examples in docstrings are true."""

import doctest
import importlib
from pathlib import Path

import batchinfer

PACKAGE = Path(batchinfer.__file__).parent
MODULES = [path.relative_to(PACKAGE) for path in sorted(PACKAGE.rglob("*.py"))]


def test_examples_in_docstrings_are_true():
    """They are the only proof of some pure functions."""
    found = [path for path in MODULES if ">>> " in (PACKAGE / path).read_text()]
    for path in found:
        module = importlib.import_module(".".join(["batchinfer", *path.with_suffix("").parts]))
        assert doctest.testmod(module).failed == 0, path
    assert found
