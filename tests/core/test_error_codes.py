"""Codes of failed rows are an interface: each that any module can give is in docs/format.md, and no other."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from batchinfer.core.counts import OTHER
from batchinfer.core.row_codes import Code

ROOT = Path(__file__).resolve().parents[2]
TABLE = (ROOT / "docs" / "format.md").read_text(encoding="utf-8").split("## Error codes")[1]
DOCUMENTED = dict(re.findall(r"^\| `([a-z_]+)` \| (.*) \|$", TABLE, re.MULTILINE))


def codes_of_failures() -> Iterator[tuple[str, ast.expr]]:
    """The code of every failure that the package makes, and of every error of a row that it raises."""
    for path in sorted((ROOT / "batchinfer").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
                name = node.func.id if isinstance(node.func, ast.Name) else name
                if name in ("Failure", "RowError", "RowProblem"):
                    named = [each.value for each in node.keywords if each.arg == "code"]
                    yield f"{path.relative_to(ROOT)}:{node.lineno}", (named or node.args)[0]


def test_every_code_is_documented_and_every_documented_one_exists() -> None:
    assert DOCUMENTED.pop(OTHER)
    assert list(Code) == list(DOCUMENTED)


def test_failures_have_codes_of_the_table() -> None:
    for place, code in codes_of_failures():
        assert not isinstance(code, ast.Constant), place


def test_codes_are_words_that_say_what_is_wrong_first() -> None:
    assert all(re.fullmatch(r"[a-z]+(_[a-z]+)*", code) for code in Code)
