"""What users see by name is on the pages: every code of failed rows, every field of markers."""

import re
from pathlib import Path

from batchinfer.core.counts import OTHER
from batchinfer.core.records import Marker
from batchinfer.core.row_codes import Code

ROOT = Path(__file__).resolve().parents[2]
FORMAT = (ROOT / "docs" / "format.md").read_text(encoding="utf-8")
DOCUMENTED = dict(
    re.findall(r"^\| `([a-z_]+)` \| (.*) \|$", FORMAT.split("## Error codes")[1], re.MULTILINE)
)


def test_every_code_is_documented_and_every_documented_one_exists():
    assert DOCUMENTED.pop(OTHER)
    assert list(Code) == list(DOCUMENTED)


def test_every_field_of_a_marker_is_documented():
    section = FORMAT.split("### Markers")[1].split("### ")[0]
    first_cells = "".join(re.findall(r"^\| (`.*?`) \|", section, re.MULTILINE))
    assert set(re.findall(r"`(\w+)`", first_cells)) == set(Marker.__struct_fields__)
