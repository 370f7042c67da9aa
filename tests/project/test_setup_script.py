"""scripts/setup.sh: what it asks of pip, by a Python that only writes down how it was called."""

import os
import re
import shutil
import subprocess
from pathlib import Path

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
