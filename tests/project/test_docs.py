"""Every relative link in the documents leads somewhere, and so does every place that an error's hint names."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from urllib.parse import unquote

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
CODE = sorted((ROOT / "batchinfer").rglob("*.py"))

_FENCE = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(\s*<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\s*\)")
_HEADING = re.compile(r"^#{1,6}\s+(.+?)\s*#*$", re.MULTILINE)
_NAMED = re.compile(r"\bdocs/[\w/-]+\.md(?:#[\w-]+)?")
_SECTION = re.compile(r"section on (\w+) in (docs/[\w/-]+\.md)")


def anchor(heading: str) -> str:
    """As GitHub makes it of a heading."""
    plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").replace("*", "")
    return re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")


@cache
def anchors(path: Path) -> list[str]:
    found: list[str] = []
    for heading in _HEADING.findall(_FENCE.sub("", path.read_text())):
        name = anchor(heading)
        again = sum(
            other == name or re.fullmatch(rf"{name}-\d+", other) is not None for other in found
        )
        found.append(f"{name}-{again}" if again else name)
    return found


def broken(target: str, base: Path) -> str:
    """What is wrong with a link, if anything."""
    place, _, fragment = unquote(target).partition("#")
    path = (base.parent / place).resolve() if place else base
    if not path.exists():
        return f"{target}: no such file"
    if fragment and path.suffix == ".md" and fragment not in anchors(path):
        return f"{target}: no such heading, expected one of {', '.join(anchors(path))}"
    return ""


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_relative_links_lead_somewhere(path: Path) -> None:
    text = re.sub(r"`[^`\n]*`", "", _FENCE.sub("", path.read_text()))
    targets = [link for link in _LINK.findall(text) if not re.match(r"[a-z]+:", link)]
    assert not [problem for link in targets if (problem := broken(link, path))]


def test_documents_that_the_code_names_are_there() -> None:
    problems = []
    for path in CODE:
        text = path.read_text()
        names = [(name, broken(name, ROOT / "x")) for name in _NAMED.findall(text)]
        names += [
            (name, broken(f"{document}#{anchor(name)}", ROOT / "x"))
            for name, document in _SECTION.findall(text)
        ]
        problems += [f"{path.name}: {problem}" for _, problem in names if problem]
    assert not problems


def test_the_checks_find_what_is_broken(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A `b` c, d\n\n```\n# no heading\n```\n## Twice\n## Twice\n")
    assert anchors(page) == ["a-b-c-d", "twice", "twice-1"]
    assert broken("page.md#twice-1", tmp_path / "x") == ""
    assert "no such heading" in broken("#no-heading", page)
    assert "no such file" in broken("other.md", page)
    assert _LINK.findall("[a](b.md#c) and [d](e)") == ["b.md#c", "e"]
