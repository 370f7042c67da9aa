"""Which engine arguments the workers of one run must agree on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from batchinfer.core.errors import ConfigError, RunMismatch
from batchinfer.split.command import command as split
from batchinfer.worker.command import command as worker
from making import make_job, run_worker_here


@pytest.fixture
def job(tmp_path: Path) -> str:
    make_job(tmp_path / "job", rows=6, per_chunk=3)
    return str(tmp_path / "job")


@pytest.mark.parametrize("given", ["model=other", "trust_remote_code=true", "dtype=float16"])
def test_an_option_by_the_name_of_its_engine_argument_is_refused_before_anything_is_made(
    job: str, given: str
) -> None:
    """A worker with another model by --engine-arg joined without a word, and answered with it."""
    with pytest.raises(ConfigError, match="has an option of its own"):
        run_worker_here(job, f"{job}/runs/a", "--engine-arg", given)
    assert not Path(job, "runs").exists()


def test_engine_arguments_are_of_the_run_unless_they_only_suit_a_machine(job: str) -> None:
    run = f"{job}/runs/a"
    run_worker_here(job, run, "--engine-arg", "kv_cache_memory_bytes=1,tokenizer_mode=slow")
    with pytest.raises(RunMismatch, match=r"engine_args\.code_revision"):
        run_worker_here(job, run, "--engine-arg", "tokenizer_mode=slow,code_revision=abc")
    with pytest.raises(RunMismatch, match=r"engine_args\.tokenizer_mode"):
        run_worker_here(job, run)
    run_worker_here(job, run, "--engine-arg", "kv_cache_memory_bytes=2,tokenizer_mode=slow")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--prompt-column", "promt"], "--prompt-column promt: .*did you mean 'prompt'"),
        (["--messages-column", "nope"], "--messages-column nope: in none of the rows"),
        (["--prompt-column", "prompt", "--id-column", "nope"], "--id-column nope: "),
        (["--template", "alpaca"], "--template alpaca: the column instruction: "),
        (["--prompt-template", "t.jinja"], "the variable promt: .*did you mean 'prompt'"),
        (["--request-format", "openai-batch"], "openai-batch: the field custom_id: "),
    ],
)
def test_a_column_that_the_job_does_not_have_is_refused_before_anything_is_made(
    tmp_path: Path, options: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker wrote an error row for every row and ended with SUCCESS."""
    monkeypatch.chdir(tmp_path)
    Path("t.jinja").write_text("{{ promt }}")
    Path("rows.jsonl").write_text('{"prompt": "x"}\n' * 6)
    split.main(["rows.jsonl", "--output", "job", "--num-chunks", "2"], standalone_mode=False)
    with pytest.raises(ConfigError, match=message):
        worker.main(
            ["--job", "job", "--output", "job/runs/a", "--engine", "echo", *options],
            standalone_mode=False,
        )
    assert not Path("job/runs").exists()


def test_the_models_own_code_is_trusted_by_all_workers_of_a_run_or_by_none(job: str) -> None:
    for name, options, others in (
        ("without", [], ["--trust-remote-code"]),
        ("with", ["--trust-remote-code"], []),
    ):
        run = f"{job}/runs/{name}"
        run_worker_here(job, run, *options)
        run_worker_here(job, run, *options)
        with pytest.raises(RunMismatch, match="trust_remote_code"):
            run_worker_here(job, run, *others)


@pytest.mark.parametrize("trusted", [True, False])
def test_a_run_from_before_trust_counted_stays_valid(job: str, trusted: bool) -> None:
    run = Path(job, "runs/a")
    run_worker_here(job, run)
    old = json.loads((run / "run.json").read_text())
    assert "trust_remote_code" not in old["config"]
    old["recorded"]["trust_remote_code"] = trusted
    (run / "run.json").write_text(json.dumps(old))
    same, other = [["--trust-remote-code"], []] if trusted else [[], ["--trust-remote-code"]]
    run_worker_here(job, run, *same)
    with pytest.raises(RunMismatch, match="trust_remote_code"):
        run_worker_here(job, run, *other)


def test_ids_that_repeat_are_mentioned_when_a_worker_starts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    request = {"method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}
    lines = [json.dumps({"custom_id": name, **request}) for name in ("a", "b", "a")]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    job = str(tmp_path / "job")
    split.main([str(tmp_path / "a.jsonl"), "--output", job], standalone_mode=False)
    caplog.clear()
    options = ["--job", job, "--engine", "echo", "--request-format", "openai-batch"]
    worker.main(options, standalone_mode=False)
    assert "1 row of the job with an _id (of OpenAI requests the custom_id)" in caplog.text
