"""Buckets that others write to, models from elsewhere, secrets in the environment: nothing leaks, nothing escapes."""

import ast
import re
from pathlib import Path

import pytest

import batchinfer
from making import make_job, run_process, worker_arguments

PACKAGE = Path(batchinfer.__file__).parent
SECRETS = {
    "HF_TOKEN": "hf_SECRETSECRET",
    "AWS_SECRET_ACCESS_KEY": "aws/SECRETSECRET",
    "AWS_SESSION_TOKEN": "ses+SECRETSECRET",
}


@pytest.mark.parametrize("is_mistake", [False, True])
def test_secrets_reach_neither_the_log_nor_the_run_nor_an_error(tmp_path, is_mistake):
    make_job(tmp_path / "job", rows=5, per_chunk=5)
    options = ["--log-level", "debug", "--log-format", "json"]
    if is_mistake:
        options += ["--engine", "vllm", "--model", "/no/such/model"]
    arguments = worker_arguments(tmp_path / "job", tmp_path / "run", *options)
    done = run_process(arguments, environment=SECRETS)
    assert done.status == (2 if is_mistake else 0)
    assert "SECRETSECRET" not in done.out + done.err
    files = filter(Path.is_file, tmp_path.rglob("*"))
    assert not any(b"SECRETSECRET" in path.read_bytes() for path in files)


QUOTED = {"place", "flags", "redo", "plan.words", "FORMAT_VERSION"}
"""Values of messages that are quoted where they are made, or are numbers."""


def test_commands_in_messages_are_quoted():
    """People paste them into a shell, and a bucket's or a chunk's name may be anybody's."""
    bare = []
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            is_command = False
            for part in node.values if isinstance(node, ast.JoinedStr) else ():
                if isinstance(part, ast.Constant):
                    is_command |= bool(re.search(r"\bbatchinfer [a-z-]+ ", str(part.value)))
                elif is_command and isinstance(part, ast.FormattedValue):
                    text = ast.unparse(part.value)
                    if not text.startswith("quote(") and text not in QUOTED:
                        bare.append(f"{path}:{node.lineno}: {text}")
    assert not bare
