"""Every relative link in the documents leads somewhere, and so does every place that an error's hint names."""

import re
from functools import cache
from pathlib import Path
from urllib.parse import unquote

import pytest
from markdown.extensions.toc import slugify, unique

from batchinfer.check.estimate import estimate
from simulation.defects import DEFECTS

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
CODE = sorted((ROOT / "batchinfer").rglob("*.py"))

_FENCE = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(\s*<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\s*\)")
_HEADING = re.compile(r"^#{1,6}\s+(.+?)\s*#*$", re.MULTILINE)
_NAMED = re.compile(r"\bdocs/[\w/-]+\.md(?:#[\w-]+)?")


@cache
def anchors(path: Path) -> set[str]:
    """As GitHub and the site make them of headings."""
    used: set[str] = set()
    for heading in _HEADING.findall(_FENCE.sub("", path.read_text())):
        plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading)
        unique(slugify(plain, "-"), used)
    return used


def broken(target: str, base: Path) -> str:
    """What is wrong with a link, if anything."""
    place, _, fragment = unquote(target).partition("#")
    path = (base.parent / place).resolve() if place else base
    if not path.exists():
        return f"{target}: no such file"
    if fragment and path.suffix == ".md" and fragment not in anchors(path):
        return f"{target}: no such heading, expected one of {sorted(anchors(path))}"
    return ""


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_relative_links_lead_somewhere(path):
    text = re.sub(r"`[^`\n]*`", "", _FENCE.sub("", path.read_text()))
    targets = [link for link in _LINK.findall(text) if not re.match(r"[a-z]+:", link)]
    assert not [problem for link in targets if (problem := broken(link, path))]


def test_documents_that_the_code_names_are_there():
    named = {name for path in CODE for name in _NAMED.findall(path.read_text())}
    assert named
    assert not [problem for name in named if (problem := broken(name, ROOT / "x"))]


def test_every_promise_names_proofs_that_exist():
    rows = re.findall(
        r"^\| (P\d) \|.*\| ([^|]+) \|$", (ROOT / "docs/promises.md").read_text(), re.MULTILINE
    )
    assert [name for name, _ in rows] == [f"P{number}" for number in range(1, 10)]
    for _, proofs in rows:
        names = re.findall(r"`([^`]+)`", proofs)
        assert len(names) >= 2
        assert all(name in DEFECTS or (ROOT / name).is_file() for name in names), names


def test_the_costs_of_a_million_rows_on_the_page_are_the_estimates():
    page = (ROOT / "docs/performance.md").read_text()
    rates = [float(rate) for rate in re.findall(r"(\d+) rows/s \|", page)]
    rows = re.findall(
        r"^\| ([\w-]+) \| \$([\d.]+) \| \$([\d.]+) \| \$([\d.]+) \|$", page, re.MULTILINE
    )
    assert [name for name, *_ in rows] == ["L4", "A100-80GB", "H100"]
    for gpu, *costs in rows:
        found = [
            estimate(1_000_000, {"rate": rate, "gpu": gpu})["estimate"]["cost"] for rate in rates
        ]
        assert [float(cost) for cost in costs] == pytest.approx(found, rel=0.03)
