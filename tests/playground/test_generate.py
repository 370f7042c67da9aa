"""`generate`: the grid, figures that add up, the requests of a run, and refusals."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest

from batchinfer.cli.main import main
from fake_endpoint import fake_endpoint

ECHO = ["--engine", "echo"]


class Ran:
    """What a call of `generate` returned and printed."""

    def __init__(self, capfd, *arguments: str) -> None:
        self.status = main(["generate", *ECHO, *arguments])
        self.out, self.err = capfd.readouterr()

    @property
    def result(self) -> dict:
        assert self.out.count("\n") == 1
        return json.loads(self.out)


def test_one_answer_stands_alone_on_stdout(capfd) -> None:
    ran = Ran(capfd, "--prompt", "hello  there\nfriend")
    assert (ran.status, ran.out) == (0, "hello  there\nfriend\n")


def test_several_answers_come_in_order_each_under_its_prompt_and_values(capfd) -> None:
    ran = Ran(capfd, "-p", "a b c", "-p", "d\x1b[2J", "--grid", "max_tokens=1,2")
    assert ran.out.splitlines() == [
        *("--- a b c · max_tokens 1", "a", "--- d\\x1b[2J · max_tokens 1", "d\\x1b[2J"),
        *("--- a b c · max_tokens 2", "a b", "--- d\\x1b[2J · max_tokens 2", "d\\x1b[2J"),
    ]
    rows = [line.split() for line in ran.err.splitlines()]
    assert ["a", "b", "c", "·", "max_tokens", "2", "3", "0", "2"] in [row[:9] for row in rows]
    assert "4 requests: 8 input and 5 output tokens in" in ran.err


def test_several_answers_to_a_prompt(capfd) -> None:
    assert Ran(capfd, "-p", "a", "--n", "2").out == "--- a\na\n--- a\na\n"


def test_one_object_with_every_combination(capfd) -> None:
    ran = Ran(
        capfd, "--json", "-p", "a b", "-p", "c", "--grid", "temperature=0,0.7", "--grid", "top_p=0.5,1"
    )  # fmt: skip
    values = [(each["prompt"], *each["sampling"].values()) for each in ran.result["results"]]
    assert values == [(p, t, q) for t in (0, 0.7) for q in (0.5, 1) for p in ("a b", "c")]
    assert ran.result["status"] == "SUCCESS"


def test_figures_add_up_and_requests_run_together_unless_asked(capfd) -> None:
    slow = ["--json", "-p", "a b", "-p", "c", "-p", "d", "--echo-latency-seconds", "0.1"]
    together = Ran(capfd, *slow).result
    alone = Ran(capfd, *slow, "--one-at-a-time").result
    for found in (together, alone):
        each, totals = found["results"], found["totals"]
        assert [one["input_tokens"] for one in each] == [2, 1, 1]
        assert totals["input_tokens"] == totals["output_tokens"] == 4
        for one in each:
            rate = one["output_tokens"] / one["seconds"]
            assert one["tokens_per_second"] == pytest.approx(rate, rel=0.01)
    sums = [sum(each["seconds"] for each in found["results"]) for found in (together, alone)]
    assert together["totals"]["seconds"] < sums[0]
    assert alone["totals"]["seconds"] >= sums[1]


def test_a_request_that_the_engine_refuses_is_a_gap_and_the_others_are_there(capfd) -> None:
    ran = Ran(capfd, "--json", "-p", "a b c d", "-p", "e", "--max-model-len", "3")
    assert (ran.status, ran.result["status"]) == (1, "PARTIAL")
    first, second = ran.result["results"]
    assert first["error"]["code"] == "prompt_too_long"
    assert second["answers"] == ["e"]
    assert "1 request without an answer" in ran.err


def test_files_and_standard_input_are_prompts(capfd, tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "p.txt").write_text("two\nlines\n")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"from a pipe\n")))
    files = ["--prompt-file", str(tmp_path / "p.txt"), "--prompt-file", "-"]
    ran = Ran(capfd, "--json", "-p", "first", *files)
    prompts = [each["prompt"] for each in ran.result["results"]]
    assert prompts == ["first", "two\nlines", "from a pipe"]


def test_a_request_is_the_one_that_a_run_makes_of_the_same_row(tmp_path: Path) -> None:
    (tmp_path / "rows.txt").write_text("a\n")
    sampling = ["--temperature", "0.7", "--seed", "3", "--max-tokens", "5"]
    with fake_endpoint() as endpoint:
        options = ["--engine", "openai", "--base-url", endpoint.url, "--model", "echo-model"]
        assert main(["generate", *options, *sampling, "-p", "a"]) == 0
        dest = str(tmp_path / "a.jsonl")
        assert main(["run", str(tmp_path / "rows.txt"), "-o", dest, *options, *sampling]) == 0
    first, *rest = [body for body in endpoint.bodies if body["messages"][0]["content"] == "a"]
    assert rest == [first]
    assert {"seed", "max_tokens", "temperature"} <= first.keys()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no prompt: expected --prompt TEXT or --prompt-file FILE"),
        (["--prompt-file", "nowhere.txt"], "nowhere.txt"),
        (["-p", "a", "--temperature", "hot"], "'hot' is not a valid float"),
        (["-p", "a", "--grid", "temperature"], "--grid"),
        (["-p", "a", "--seed", "x"], "--seed: is 'x', expected a whole number or none"),
        (["-p", "a", "--engine", "vllm", "--model", "./nowhere"], "is no folder on this machine"),
    ],
)
def test_a_mistake_is_refused_with_a_sentence(capfd, arguments, message) -> None:
    ran = Ran(capfd, *arguments)
    assert (ran.status, ran.out) == (2, "")
    assert message in ran.err
    assert "Traceback" not in ran.err


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_a_full_disk_under_stdout_is_an_error_with_a_sentence(options) -> None:
    command = [sys.executable, "-m", "batchinfer", "generate", *ECHO, "-p", "a", *options]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=-1, text=True, timeout=120)
    assert done.returncode == 1
    assert "stdout: cannot take the " in done.stderr
    assert "Traceback" not in done.stderr


def test_a_settings_file_of_a_run_can_be_used(capfd, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(
        "input: {job: s3://bucket/job}\nengine: {engine: echo, replicas: 4}\n"
        "sampling: {max-tokens: 2, n: 1}\nbehaviour: {lease-seconds: 60}\n"
    )
    ran = Ran(capfd, "-p", "a b c", "--config", str(tmp_path / "run.yaml"))
    assert ran.out == "a b\n"
