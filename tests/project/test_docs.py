"""Every page that an error's hint names is there, and so is every proof that a promise names."""

import re
from pathlib import Path

import pytest

from simulation.defects import DEFECTS

ROOT = Path(__file__).resolve().parents[2]
CODE = sorted((ROOT / "batchinfer").rglob("*.py"))


def test_documents_that_the_code_names_are_there():
    named = {name for path in CODE for name in re.findall(r"\bdocs/[\w/-]+\.md", path.read_text())}
    assert named
    assert [name for name in named if not (ROOT / name).is_file()] == []


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md"])
def test_links_of_the_pages_beside_docs_lead_somewhere(name):
    """Those of docs/ are checked by `make check`."""
    places = re.findall(r"\]\((?!https:)([^)#]+)", (ROOT / name).read_text())
    assert places
    assert [place for place in places if not (ROOT / place).exists()] == []


def test_every_promise_names_proofs_that_exist():
    rows = re.findall(
        r"^\| (P\d) \|.*\| ([^|]+) \|$", (ROOT / "docs/promises.md").read_text(), re.MULTILINE
    )
    assert [name for name, _ in rows] == [f"P{number}" for number in range(1, 10)]
    for _, proofs in rows:
        names = re.findall(r"`([^`]+)`", proofs)
        assert len(names) >= 2
        assert all(name in DEFECTS or (ROOT / name).is_file() for name in names), names
