"""`generate`: the grid, answers while they come, figures that add up, and refusals before anything is loaded."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from batchinfer.cli.main import main
from batchinfer.core.layout import chunk_name
from batchinfer.core.records import Choice, Completion, Failure, Sampling, TextPiece
from batchinfer.playground import results
from batchinfer.playground.grid import points, trials
from batchinfer.playground.options import with_defaults
from batchinfer.playground.session import Answered
from batchinfer.prompts import PromptBuilder, PromptConfig, RawRow
from making import start_process

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


class TestAnswers:
    def test_one_answer_stands_alone_on_stdout(self, capfd) -> None:
        ran = Ran(capfd, "--prompt", "hello  there\nfriend")
        assert (ran.status, ran.out) == (0, "hello  there\nfriend\n")

    def test_several_answers_come_in_order_each_under_its_prompt_and_values(self, capfd) -> None:
        ran = Ran(
            capfd, "-p", "a b c", "-p", "d", "--max-tokens", "1,2", "--echo-latency-seconds", "0.05"
        )
        assert ran.out.splitlines() == [
            "--- 1: a b c · max_tokens 1",
            "a",
            "--- 2: d · max_tokens 1",
            "d",
            "--- 1: a b c · max_tokens 2",
            "a b",
            "--- 2: d · max_tokens 2",
            "d",
        ]

    def test_an_answer_streams(self, tmp_path: Path) -> None:
        slow = ["--echo-latency-seconds", "30", "--echo-tokens", "900,900"]
        process = start_process(["generate", *ECHO, "--prompt", "one two", *slow])
        try:
            os.set_blocking(process.stdout.fileno(), False)
            seen, end = b"", time.monotonic() + 60
            while b"one two one" not in seen and time.monotonic() < end:
                seen += os.read(process.stdout.fileno(), 4096) if _is_ready(process) else b""
            assert b"one two one" in seen
            process.send_signal(signal.SIGINT)
            os.set_blocking(process.stdout.fileno(), True)
            _, err = process.communicate(timeout=60)
        finally:
            process.kill()
        assert process.returncode == 75
        assert "stopped after 0 of 1 requests" in err

    def test_control_characters_of_an_answer_do_not_reach_the_terminal(self, capfd) -> None:
        assert Ran(capfd, "-p", "a\x1b[2Jb").out == "a\\x1b[2Jb\n"

    def test_several_answers_to_a_prompt(self, capfd) -> None:
        ran = Ran(capfd, "-p", "a", "--n", "2")
        assert ran.out == "--- 1: a · answer 1 of 2\na\n--- 1: a · answer 2 of 2\na\n"


class TestJson:
    def test_one_object_with_every_combination(self, capfd) -> None:
        ran = Ran(
            capfd, "--json", "-p", "a b", "-p", "c", "--temperature", "0,0.7,1", "--top-p", "0.5,1"
        )  # fmt: skip
        results_ = ran.result["results"]
        assert [
            (each["prompt"], each["sampling"]["temperature"], each["sampling"]["top_p"])
            for each in results_
        ] == [(p, t, q) for t in (0.0, 0.7, 1.0) for q in (0.5, 1.0) for p in ("a b", "c")]
        assert ran.result["status"] == "SUCCESS"
        assert "12 of 12 requests" in ran.err

    def test_figures_add_up(self, capfd) -> None:
        ran = Ran(capfd, "--json", "-p", "a b", "-p", "c", "--echo-latency-seconds", "0.05")
        each, totals = ran.result["results"], ran.result["totals"]
        assert [one["input_tokens"] for one in each] == [2, 1]
        assert [one["output_tokens"] for one in each] == [2, 1]
        assert totals["input_tokens"] == totals["output_tokens"] == 3
        for one in each:
            assert 0 < one["first_token_seconds"] <= one["seconds"] <= totals["seconds"]
            rate = one["output_tokens"] / one["seconds"]
            assert one["output_tokens_per_second"] == pytest.approx(rate, rel=0.01)
        assert totals["output_tokens_per_second"] == pytest.approx(3 / totals["seconds"], rel=0.01)

    def test_together_is_shorter_than_the_sum_and_one_at_a_time_is_not(self, capfd) -> None:
        slow = ["--json", "-p", "a", "-p", "b", "-p", "c", "--echo-latency-seconds", "0.1"]
        together = Ran(capfd, *slow).result
        alone = Ran(capfd, *slow, "--one-at-a-time").result
        assert not together["is_one_at_a_time"]
        assert alone["is_one_at_a_time"]
        assert alone["totals"]["seconds"] >= sum(each["seconds"] for each in alone["results"])
        assert together["totals"]["seconds"] < sum(e["seconds"] for e in together["results"])

    def test_a_request_that_the_engine_refuses_is_a_gap_and_the_others_are_there(
        self, capfd
    ) -> None:
        ran = Ran(capfd, "--json", "-p", "a b c d", "-p", "e", "--max-model-len", "3")
        assert ran.status == 1
        assert ran.result["status"] == "PARTIAL"
        first, second = ran.result["results"]
        assert first["error"]["code"] == "prompt_too_long"
        assert second["answers"][0]["text"] == "e"
        assert "1 request without an answer" in ran.err

    def test_the_table_names_prompts_values_and_figures(self, capfd) -> None:
        ran = Ran(capfd, "--json", "-p", "[red]a b", "-p", "c", "--temperature", "0,0.5")
        rows = [line.split() for line in ran.err.splitlines()]
        assert ["1:", "[red]a", "b", "0", "2", "2"] in [row[:6] for row in rows]
        assert ["2:", "c", "0.5", "1", "1"] in [row[:5] for row in rows]
        assert ["all", "6", "6"] in [row[:3] for row in rows]


class TestPrompts:
    def test_a_file_is_one_prompt(self, capfd, tmp_path: Path) -> None:
        (tmp_path / "p.txt").write_text("two\nlines\n")
        ran = Ran(capfd, "--json", "-p", "first", "--prompt-file", str(tmp_path / "p.txt"))
        assert [each["prompt"] for each in ran.result["results"]] == ["first", "two\nlines"]

    def test_a_delimiter_stands_between_several(self, capfd, tmp_path: Path) -> None:
        (tmp_path / "p.txt").write_text("a\nb\n---\nc\n---\n")
        options = ["--prompt-delimiter", r"\n---\n", "--prompt-file", str(tmp_path / "p.txt")]
        prompts = [each["prompt"] for each in Ran(capfd, "--json", *options).result["results"]]
        assert prompts == ["a\nb", "c\n---"]

    def test_standard_input_is_a_file(self, capfd, monkeypatch) -> None:
        monkeypatch.setattr(sys, "stdin", io.StringIO("from a pipe\n"))
        assert Ran(capfd, "--prompt-file", "-").out == "from a pipe\n"

    def test_the_adapter_answers_every_prompt(self) -> None:
        options = with_defaults({"engine": "echo", "prompt_column": "prompt", "lora": ("a=/a",)})
        [trial] = trials(["p"], points(options | {"seed": ["0"]}), None, None)
        assert trial.request.adapter == "a"

    def test_a_request_is_the_one_that_a_run_makes_of_the_same_row(self) -> None:
        options = with_defaults({"engine": "echo", "prompt_column": "prompt", "as_chat": True})
        given = options | {"temperature": [0.7], "seed": ["3"], "max_tokens": [5]}
        _, second = trials(["a", "b"], points(given), None, None)
        builder = PromptBuilder(
            PromptConfig(prompt_column="prompt", as_chat=True),
            Sampling(temperature=0.7, max_tokens=5),
            3,
            None,
            None,
        )
        [prepared] = builder.build(chunk_name(0, 1), 0, [RawRow(1, b'{"prompt": "b"}')])
        assert second.request.sampling == prepared.request.sampling
        assert second.request.messages == prepared.request.messages


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no prompt: expected --prompt TEXT or --prompt-file FILE"),
        (["-p", ""], "prompt 1 of 1: the prompt is empty"),
        (["-p", "a\udcff"], "prompt 1 of 1: holds bytes that are no text"),
        (["-p", "a", "-p", " \n"], "prompt 2 of 2: the conversation has no user message with text"),
        (["--prompt-file", "nowhere.txt"], "nowhere.txt: cannot be read (No such file"),
        (["-p", "a", "--temperature", "hot"], "'hot' is not a valid float"),
        (["-p", "a", "--temperature", "0,,1"], "'0,,1' has an empty value"),
        (["-p", "a", "--temperature", "0,-1"], "temperature: -1.0, expected a number from 0 to 2"),
        (["-p", "a", "--top-p", "nan"], "top_p: nan, expected"),
        (["-p", "a", "--n", "0"], "0 is not in the range x>=1"),
        (["-p", "a", "--seed", "1,x"], "--seed: is 'x', expected a whole number or none"),
        (["-p", "a", "--sampling", "temprature=1"], "did you mean 'temperature'?"),
        (["-p", "a", "--engine", "vllm"], "--model: is missing"),
        (["-p", "a", "--engine", "vllm", "--model", "./nowhere"], "is no folder on this machine"),
    ],
)
def test_a_mistake_is_refused_with_a_sentence(capfd, arguments, message) -> None:
    ran = Ran(capfd, *arguments)
    assert ran.status == 2
    assert message in ran.err
    assert "Traceback" not in ran.err
    assert ran.out == ""


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
        "sampling: {max-tokens: 2, logprobs: 1}\nbehaviour: {lease-seconds: 60}\n"
    )
    ran = Ran(capfd, "-p", "a b c", "--config", str(tmp_path / "run.yaml"))
    assert ran.out == "a b\n"
    (tmp_path / "run.yaml").write_text("sampling: {max-tokns: 2}\n")
    ran = Ran(capfd, "-p", "a", "--config", str(tmp_path / "run.yaml"))
    assert "did you mean 'max_tokens'?" in ran.err


class TestLiveText:
    """Answers that finish in another order than they began are written in order."""

    @pytest.fixture
    def live(self):
        options = with_defaults({"engine": "echo", "prompt_column": "prompt"})
        given = options | {"seed": ["0"]}
        return results.LiveText(trials(["p", "q"], points(given), None, None), [])

    def answer(self, number: int, text: str, **fields) -> Answered:
        choices = [] if "failure" in fields else [Choice(index=0, text=text)]
        completion = Completion(key=("generate", number), choices=choices, **fields)
        return Answered(completion=completion, first_seconds=0.1, seconds=1.0)

    def piece(self, number: int, text: str) -> TextPiece:
        return TextPiece(key=("generate", number), text=text, num_tokens=1)

    def test_the_second_waits_for_the_first(self, live, capfd) -> None:
        live.add(self.piece(1, "second"))
        assert capfd.readouterr().out == ""
        live.finish(self.answer(1, "second one"))
        live.add(self.piece(0, "fir"))
        assert capfd.readouterr().out == "--- 1: p\nfir"
        live.finish(self.answer(0, "first"))
        assert capfd.readouterr().out == "st\n--- 2: q\nsecond one\n"

    def test_a_failure_voids_what_was_streamed(self, live, capfd) -> None:
        live.add(self.piece(0, "begin"))
        failure = Failure(code="engine_crash", message="it died", transient=True)
        live.finish(self.answer(0, "", failure=failure))
        shown = capfd.readouterr().out
        assert shown == "--- 1: p\nbegin\n[no answer: engine_crash: it died]\n"


class TestEndpoint:
    @pytest.fixture(autouse=True)
    def key(self, monkeypatch) -> None:
        pytest.importorskip("openai")
        monkeypatch.setenv("OPENAI_API_KEY", "sk-a")

    def test_a_chat_template_is_the_endpoints(self, capfd) -> None:
        options = ["--engine", "openai", "--base-url", "http://127.0.0.1:9", "--model", "m"]
        ran = Ran(capfd, *options, "-p", "a", "--chat-template", "{{ messages }}")
        assert ran.status == 2
        assert "the endpoint makes the prompt" in ran.err


def _is_ready(process) -> bool:
    import select

    return bool(select.select([process.stdout], [], [], 0.1)[0])
