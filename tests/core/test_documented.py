"""What users see by name is on the pages: every code of failed rows, every field of markers, every task."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

from batchinfer.collect.answers import _OPTIONAL, _SEVERAL
from batchinfer.core.counts import OTHER
from batchinfer.core.records import Marker
from batchinfer.core.row_codes import Code
from batchinfer.core.tasks import GENERATE, Task
from batchinfer.playground.chat import Chat
from batchinfer.prompts.types import TASK_PATHS

ROOT = Path(__file__).resolve().parents[2]
FORMAT = (ROOT / "docs" / "format.md").read_text(encoding="utf-8")
DOCUMENTED = dict(
    re.findall(r"^\| `([a-z_]+)` \| (.*) \|$", FORMAT.split("## Error codes")[1], re.MULTILINE)
)


def codes_of_failures() -> Iterator[tuple[str, ast.expr]]:
    """The code of every failure that the package makes, and of every error of a row that it raises."""
    for path in sorted((ROOT / "batchinfer").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
                name = node.func.id if isinstance(node.func, ast.Name) else name
                if name in ("Failure", "RowError"):
                    named = [each.value for each in node.keywords if each.arg == "code"]
                    yield f"{path.relative_to(ROOT)}:{node.lineno}", (named or node.args)[0]


def test_every_code_is_documented_and_every_documented_one_exists():
    assert DOCUMENTED.pop(OTHER)
    assert list(Code) == list(DOCUMENTED)


def test_failures_have_codes_of_the_table():
    for place, code in codes_of_failures():
        assert not isinstance(code, ast.Constant), place


def test_every_field_of_a_marker_is_documented():
    section = FORMAT.split("### Markers")[1].split("### ")[0]
    first_cells = "".join(re.findall(r"^\| (`.*?`) \|", section, re.MULTILINE))
    assert set(re.findall(r"`(\w+)`", first_cells)) == set(Marker.__struct_fields__)


def test_every_column_of_tables_is_documented():
    section = FORMAT.split("### Tables")[1].split("### ")[0]
    first_cells = "".join(re.findall(r"^\| (`.*?) \|", section, re.MULTILINE))
    assert {*_SEVERAL, *_OPTIONAL} <= set(re.findall(r"`(\w+)`", first_cells))


def test_every_command_of_chat_is_on_its_page():
    page = (ROOT / "docs/generate-and-chat.md").read_text(encoding="utf-8")
    for name in (name for name in vars(Chat) if name.startswith("do_")):
        assert f"\n| `/{name.removeprefix('do_')}" in page, name


def test_every_task_has_a_path_and_is_in_the_table():
    assert set(get_args(Task)) - {GENERATE} == set(TASK_PATHS)
    for task, path in TASK_PATHS.items():
        assert re.search(rf"^\| .*`{task}`.* \| .*`{path}`.* \|", FORMAT, re.MULTILINE), task
