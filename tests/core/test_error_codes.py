"""Codes of failed rows are an interface: each that any module can give is in docs/format.md, and no other."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from batchinfer.prompts import Code
from batchinfer.worker.tally import OTHER

ROOT = Path(__file__).resolve().parents[2]
TABLE = (ROOT / "docs" / "format.md").read_text(encoding="utf-8").split("## Error codes")[1]
DOCUMENTED = set(re.findall(r"^\| `([a-z_]+)` \|", TABLE, re.MULTILINE))


def calls() -> Iterator[tuple[str, ast.Call]]:
    """Every call in the package that makes a failure or raises a row's error."""
    for path in sorted((ROOT / "batchinfer").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
                name = node.func.id if isinstance(node.func, ast.Name) else name
                if name in ("Failure", "RowError", "RowProblem"):
                    yield f"{path.relative_to(ROOT)}:{node.lineno}", node


def code_of(call: ast.Call) -> ast.expr:
    named = [keyword.value for keyword in call.keywords if keyword.arg == "code"]
    return (named or call.args)[0]


def test_every_code_is_documented_and_every_documented_one_exists() -> None:
    written = {}
    for place, call in calls():
        code = code_of(call)
        if isinstance(code, ast.Constant):
            written[code.value] = place
        else:
            # A member of Code, or the code of another failure that is passed on.
            text = ast.unparse(code)
            passed_on = r"(self\.)?((error|rendered|part\.failure|kept\.found)\.)?code"
            assert re.fullmatch(rf"Code\.[A-Z_]+(\.value)?|{passed_on}", text), (place, text)
    assert {"engine_crash", "internal_error", "engine_error"} <= set(written)
    found = {**written, **{code.value: "batchinfer/prompts/types.py" for code in Code}}
    assert found.keys() <= DOCUMENTED, {
        code: found[code] for code in sorted(found.keys() - DOCUMENTED)
    }
    assert DOCUMENTED - found.keys() == {OTHER}


def test_codes_are_words_that_say_what_is_wrong_first() -> None:
    assert all(re.fullmatch(r"[a-z]+(_[a-z]+)*", code) for code in DOCUMENTED)
