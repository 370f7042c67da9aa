"""The benchmarks' scripts begin."""

import subprocess
import sys
from pathlib import Path

import pytest

from making import python

ROOT = Path(__file__).resolve().parents[2]


def test_every_script_finds_what_it_imports():
    """In a process of its own: modules of tests have such names, too."""
    scripts = sorted(path.stem for path in (ROOT / "benchmarks").glob("*.py"))
    python(f"import {', '.join(scripts)}", cwd=ROOT / "benchmarks")


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        "recovery.py --quick",
        "bookkeeping.py --quick --only claims",
        "bookkeeping.py --quick --only checkpoints",
        "large_job.py --chunks 30",
        "collect.py --rows 500 --repeat 1",
    ],
)
def test_scripts_that_need_no_vllm_run(command):
    """The first four had failed since the format of runs had changed."""
    script, *options = command.split()
    subprocess.run([sys.executable, ROOT / "benchmarks" / script, *options], check=True)
