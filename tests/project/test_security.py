"""Buckets that others write to, models from elsewhere, secrets in the environment: nothing leaks, nothing escapes."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from click.testing import CliRunner

import batchinfer
from batchinfer.core.errors import BatchinferError, InputError, RowError
from batchinfer.split.splitting import command as split
from batchinfer.storage.opening import open_store
from making import make_job, run_process, run_worker_here, worker_arguments
from web_server import WebServer, reply

PACKAGE = Path(batchinfer.__file__).parent
SECRETS = {
    "HF_TOKEN": "hf_SECRETSECRET",
    "AWS_SECRET_ACCESS_KEY": "aws/SECRETSECRET",
    "AWS_SESSION_TOKEN": "ses+SECRETSECRET",
}


def everything_below(folder: Path) -> bytes:
    """All bytes of all files."""
    return b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("is_mistake", [False, True])
def test_secrets_reach_neither_the_log_nor_the_run_nor_an_error(
    tmp_path: Path, is_mistake: bool
) -> None:
    make_job(tmp_path / "job", rows=5, per_chunk=5)
    options = ["--log-level", "debug", "--log-format", "json"]
    if is_mistake:
        options += ["--engine", "vllm", "--model", "/no/such/model"]
    arguments = worker_arguments(tmp_path / "job", tmp_path / "run", *options)
    done = run_process(arguments, environment=SECRETS)
    assert done.status == (2 if is_mistake else 0)
    assert "SECRETSECRET" not in done.stderr + json.dumps(done.result)
    assert b"SECRETSECRET" not in everything_below(tmp_path)


@pytest.mark.parametrize(
    "name", ["../../evil", "/etc/evil", "a/../../../evil", "..", "evil\x00", "chunks/../x"]
)
def test_a_job_whose_chunk_names_leave_it_is_refused(tmp_path: Path, name: str) -> None:
    """job.json lies in a bucket: who can write there must not choose where a worker reads or writes."""
    job = tmp_path / "deep/inside/job"
    make_job(job, rows=5, per_chunk=5)
    record: dict[str, Any] = json.loads((job / "job.json").read_bytes())
    record["chunks"][0]["name"] = name
    (job / "job.json").write_text(json.dumps(record))
    (job / "manifests/all.txt").write_text(f"chunks/{name}.jsonl\n")
    before = sorted(path for path in tmp_path.rglob("*") if path.is_file())
    with pytest.raises(InputError):
        run_worker_here(job, tmp_path / "run")
    assert sorted(path for path in tmp_path.rglob("*") if path.is_file()) == before


QUOTED = {"place", "flags", "redo", "plan.words", "FORMAT_VERSION"}
"""Values of messages that are quoted where they are made, or are numbers."""


def test_commands_in_messages_are_quoted() -> None:
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


# --------------------------------------------------------------------------- URLs with secrets in them


@pytest.fixture
def guarded(server: WebServer) -> str:
    """A server of ten rows, for those who bring the password and the token."""
    rows = b"".join(b'{"prompt": "%d"}\n' % row for row in range(10))

    async def answer(request: web.Request) -> web.StreamResponse:
        known = "Authorization" in request.headers
        return await (reply(200, rows) if known else reply(403))(request)

    server.answers["/x.jsonl?token=SECRET"] = answer
    return server.url.replace("//", "//user:SECRET@")


def test_a_source_is_read_with_its_secrets_and_recorded_without(
    tmp_path: Path, guarded: str
) -> None:
    job = tmp_path / "job"
    arguments = [f"{guarded}/x.jsonl?token=SECRET", "--output", str(job), "--num-chunks", "2"]
    done = CliRunner().invoke(split, arguments, catch_exceptions=False)
    assert done.exit_code == 0
    assert json.loads((job / "job.json").read_bytes())["rows"] == 10
    assert b"SECRET" not in everything_below(tmp_path)
    again = CliRunner().invoke(split, arguments, catch_exceptions=False, standalone_mode=False)
    assert again.return_value["status"] == "unchanged"


def test_errors_name_an_address_without_its_secrets(guarded: str) -> None:
    store = open_store(f"{guarded}/folder")
    for fail in (store.list, lambda: store.get("x"), lambda: store.create("x", b"")):
        with pytest.raises(BatchinferError) as caught:
            fail()
        assert "127.0.0.1" in caught.value.message
        assert "SECRET" not in f"{caught.value} {caught.value.message} {caught.value.hint}"


def test_an_error_row_shows_its_own_text_whole() -> None:
    error = RowError("invalid_request", "image http://h/x?size=2: not there")
    assert str(error) == error.message == "image http://h/x?size=2: not there"
