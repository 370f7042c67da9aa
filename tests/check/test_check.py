"""`batchinfer check`: what is wrong is found before anything is paid for, all of it at once."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from batchinfer.cli.main import main
from batchinfer.storage.opening import open_store
from making import make_job, run_worker_here
from peft_adapter import write_adapter
from pictures import as_base64, picture

REPOSITORY = Path(__file__).resolve().parents[2]
MODEL = str(REPOSITORY / "examples" / "demo-model")
ECHO = ("--engine", "echo", "--prompt-column", "prompt")


class Checker:
    """Runs the command in this process."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *arguments: str) -> tuple[int, dict[str, Any], str]:
        status = main(["check", *arguments])
        captured = self._capsys.readouterr()
        return status, json.loads(captured.out.strip().splitlines()[-1]), captured.err


@pytest.fixture
def check(capsys: pytest.CaptureFixture[str]) -> Checker:
    return Checker(capsys)


@pytest.fixture
def job(tmp_path: Path) -> str:
    make_job(tmp_path / "job", rows=60, per_chunk=10, workers=2)
    return str(tmp_path / "job")


def messages(result: dict[str, Any], level: str = "error") -> list[str]:
    return [one["message"] for one in result["problems"] if one["level"] == level]


def test_the_jobs_own_place_is_no_place_for_a_run(check: Checker, job: str) -> None:
    status, result, _ = check("--job", job, "--output", job, *ECHO)
    assert status == 2
    assert messages(result) == [f"--output {job}: is a job's own place"]


def test_sound_job_is_ok_and_leaves_no_trace(check: Checker, job: str) -> None:
    run = f"{job}/runs/a"
    status, result, shown = check("--job", job, "--output", run, *ECHO, "--show", "1")
    assert (status, result["status"], result["problems"]) == (0, "OK", [])
    assert (result["rows"], result["chunks"]) == (60, 6)
    assert result["storage"]["is_safe"] is True
    assert result["prompts"][0]["prompt"].startswith("hello row 0")
    assert "hello row 0" in shown
    assert list(open_store(run).list("")) == []


def test_prompts_are_measured_with_the_model_s_own_tokenizer(check: Checker, job: str) -> None:
    options = ("--job", job, "--model", MODEL, "--messages-column", "prompt", "--gpu", "L4")
    status, result, shown = check(*options, "--max-model-len", "30", "--max-tokens", "20")
    assert status == 0
    assert result["model"]["architecture"] == "LlamaForCausalLM"
    assert result["memory"]["replicas"] == 1
    sample = result["sample"]
    assert sample["errors"]["prompt_too_long"] == sample["rows_error"] > 0
    assert sum(sample["lengths"]["histogram"].values()) == sample["rows"] - sample["rows_error"]
    found = " ".join(messages(result, "warning"))
    assert "prompt_too_long" in found
    assert "--max-tokens" in found
    assert "prompt tokens" in shown


def test_a_model_must_fit_each_of_several_gpus(check: Checker, job: str) -> None:
    options = ("--job", job, "--model", MODEL, "--prompt-column", "prompt", "--gpu")
    assert check(*options, "T4,L4")[0] == 0
    status, result, _ = check(*options, "L4,L44,L55")
    assert status == 2
    assert [message.partition(" is")[0] for message in messages(result)] == [
        "--gpu: 'L44'",
        "--gpu: 'L55'",
    ]


def test_more_workers_than_manifests_are_an_error(check: Checker, job: str) -> None:
    options = ("--job", job, "--engine", "echo", "--prompt-column", "prompt", "--workers")
    assert check(*options, "1")[0] == 0
    status, result, _ = check(*options, "9")
    assert status == 2
    assert "--workers 9: the job has" in messages(result)[0]


def test_a_length_beyond_the_models_is_an_error(check: Checker, job: str) -> None:
    options = ("--job", job, "--model", MODEL, "--prompt-column", "prompt")
    status, result, _ = check(*options, "--max-model-len", "100000")
    assert status == 2
    (problem,) = (one for one in result["problems"] if one["level"] == "error")
    assert problem["message"].startswith("--max-model-len 100000: the model takes ")
    assert result["model"]["architecture"] == "LlamaForCausalLM"


def test_all_problems_come_at_once(check: Checker, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    status, result, shown = check(
        *("--job", str(tmp_path / "nothing"), "--output", str(tmp_path / "file" / "run")),
        *("--model", "./nowhere", "--gpu", "L44", "--seed", "x"),
        *("--chat-template-kwargs", "[", "--sampling", "temperature=cold"),
    )
    assert (status, result["status"]) == (2, "PROBLEMS")
    found = messages(result)
    for part in (
        *("./nowhere", "L44", "--seed", "--chat-template-kwargs"),
        *("temperature", "nothing", str(tmp_path / "file")),
    ):
        assert any(part in message for message in found), (part, found)
        assert part in shown
    assert result["errors"] == len(found)


def test_wrong_column_is_an_error_and_some_bad_rows_are_a_warning(
    check: Checker, tmp_path: Path, job: str
) -> None:
    status, result, _ = check("--job", job, "--engine", "echo", "--prompt-column", "promt")
    assert status == 2
    assert "40 of 40 sample rows would be missing_column" in messages(result)[0]
    source = tmp_path / "rows.jsonl"
    source.write_text('{"prompt": "a"}\n' * 9 + '{"other": 1}\n')
    status, result, _ = check(str(source), *ECHO)
    assert status == 0
    assert "1 of 10 sample rows" in messages(result, "warning")[0]


@pytest.mark.parametrize(
    ("option", "more"),
    [
        ("--constraint-column", []),
        ("--lora-column", ["--lora", "a=ADAPTER"]),
        ("--tools-column", ["--tool-choice", "required", "--as-chat"]),
    ],
)
def test_a_column_of_the_rows_own_choice_that_no_row_has_is_an_error(
    option: str, more: list[str], check: Checker, tmp_path: Path
) -> None:
    """A row may lack it, so all rows would be answered as if the option had not been given."""
    adapter = write_adapter(tmp_path / "adapter")
    options = [*ECHO, *(word.replace("ADAPTER", str(adapter)) for word in more), option]
    source, late = tmp_path / "rows.jsonl", tmp_path / "late.jsonl"
    source.write_text('{"prompt": "a"}\n' * 2000)
    late.write_text('{"prompt": "a"}\n' * 2000 + '{"prompt": "a", "mine": null}\n')
    status, result, _ = check(str(source), *options, "mine")
    assert status == 2
    [found] = messages(result)
    assert f"rows.jsonl: has no column 'mine' (from {option})" in found
    assert check(str(source), str(late), *options, "mine")[0] == 0


def test_source_is_checked_before_it_is_split(check: Checker, tmp_path: Path) -> None:
    source = tmp_path / "rows.jsonl"
    source.write_text("".join(f'{{"prompt": "row {row}"}}\n' for row in range(1000)))
    status, result, _ = check(
        *(str(source), *ECHO, "--sample-rows", "20", "--rate", "0.5", "--price-per-hour", "2"),
        *("--hours", "1"),
    )
    assert status == 0
    assert (result["rows"], result["sample"]["rows"]) == (1000, 20)
    assert result["workers_advised"] == 1
    assert result["estimate"]["cost"] == pytest.approx((2000 + 600) / 3600 * 2)
    assert any("--chunk-rows" in line for line in result["advice"])


@pytest.mark.parametrize(
    "options",
    [
        ("--prompt-column", "q"),
        ("--messages-column", "m"),
        ("--template", "alpaca"),
        ("--request-format", "completions"),
        ("--request-format", "openai-batch"),
    ],
)
def test_synthetic_rows_need_no_data(check: Checker, options: tuple[str, ...]) -> None:
    status, result, _ = check("--synthetic", "5000", "--engine", "echo", *options)
    assert (status, result["rows"]) == (0, 5000), result["problems"]
    assert result["sample"] == {"rows": 200, "rows_error": 0, "errors": {}, "lengths": None}


def test_rate_comes_from_an_earlier_run(check: Checker, job: str, tmp_path: Path) -> None:
    run_worker_here(job, f"{job}/runs/a")
    status, result, _ = check("--job", job, *ECHO, "--rate-from", f"{job}/runs/a", "--gpu", "L4:2")
    assert status == 0
    assert result["measured"]["rows"] == 60
    assert result["estimate"]["rate"] == result["measured"]["rate"] > 0
    assert result["estimate"]["price_source"]
    status, result, _ = check("--job", job, *ECHO, "--rate-from", str(tmp_path / "none"))
    assert status == 2
    assert "no run" in messages(result)[0]


def test_run_of_another_configuration_is_found_before_the_worker_is(
    check: Checker, job: str
) -> None:
    run_worker_here(job, f"{job}/runs/a", "--temperature", "0")
    options = ("--job", job, "--output", f"{job}/runs/a", *ECHO)
    assert check(*options, "--temperature", "0")[0] == 0
    status, result, _ = check(*options, "--temperature", "1", "--seed", "7")
    assert status == 2
    text = " ".join(messages(result))
    assert "seed" in text
    assert "sampling.temperature" in text


@pytest.mark.parametrize(
    ("there", "here"), [((), ("--trust-remote-code",)), (("--trust-remote-code",), ())]
)
def test_remote_code_that_only_one_of_them_trusts_is_found(
    there: tuple[str, ...], here: tuple[str, ...], check: Checker, job: str
) -> None:
    run_worker_here(job, f"{job}/runs/a", *there)
    options = ("--job", job, "--output", f"{job}/runs/a", *ECHO)
    assert check(*options, *there)[0] == 0
    status, result, _ = check(*options, *here)
    assert status == 2
    assert "made with another trust_remote_code: " in " ".join(messages(result))


@pytest.mark.s3
def test_write_access_is_tried_on_the_real_bucket(
    check: Checker, job: str, s3_url: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = s3_url("runs/a")
    status, result, _ = check("--job", job, "--output", url, *ECHO)
    assert (status, result["storage"]["is_safe"]) == (0, True)
    assert list(open_store(url).list("")) == []
    status, result, _ = check("--job", job, "--output", "s3://no-such-bucket-here/run", *ECHO)
    assert status == 2
    assert "no-such-bucket-here" in messages(result)[0]


def test_nothing_to_check_is_said(check: Checker) -> None:
    status, result, _ = check(*ECHO)
    assert status == 2
    assert "no SOURCE" in messages(result)[0]


def test_an_estimate_above_a_limit_is_a_warning(check: Checker, job: str) -> None:
    """60 rows at 0.001 rows a second are 16.7 hours, and the start of a machine takes some minutes."""
    rate = ("--rate", "0.001", "--price-per-hour", "2")
    status, result, _ = check("--job", job, *ECHO, *rate, "--max-cost", "20", "--max-hours", "5")
    assert status == 0
    cost, hours = messages(result, "warning")
    assert cost.startswith("--max-cost $20.00 is below the estimate of $33.67")
    assert "59% of it" in cost
    assert hours.startswith("--max-hours 5 h is below the estimate of 16.8 h")
    status, result, _ = check("--job", job, *ECHO, *rate, "--max-cost", "40", "--max-hours", "17")
    assert not messages(result, "warning")


def test_images_for_a_model_that_seems_to_take_none_are_a_warning(
    check: Checker, tmp_path: Path
) -> None:
    def warnings(model: str) -> list[str]:
        options = ("--image-column", "image", "--prompt-column", "q", "--as-chat", "--show", "0")
        _, result, _ = check(str(path), "--model", model, *options)
        return [each for each in messages(result, "warning") if "have images" in each]

    path = tmp_path / "rows.jsonl"
    rows = [{"q": "What?", "image": as_base64(picture("red"))}, {"q": "What?", "image": None}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    [found] = warnings(MODEL)
    assert found.startswith("1 of 2 sample rows have images, and nothing in the model's config")
    shutil.copytree(MODEL, tmp_path / "seeing")
    config = json.loads((tmp_path / "seeing/config.json").read_text()) | {"vision_config": {}}
    (tmp_path / "seeing/config.json").write_text(json.dumps(config))
    assert warnings(str(tmp_path / "seeing")) == []
