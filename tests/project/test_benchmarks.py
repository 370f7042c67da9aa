"""The benchmarks' scripts begin."""

from pathlib import Path

from making import python

ROOT = Path(__file__).resolve().parents[2]


def test_every_script_finds_what_it_imports():
    """In a process of its own: modules of tests have such names, too."""
    scripts = sorted(path.stem for path in (ROOT / "benchmarks").glob("*.py"))
    python(f"import {', '.join(scripts)}", cwd=ROOT / "benchmarks")
