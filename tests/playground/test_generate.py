"""`generate`: the grid, figures that add up, the requests of a run, and refusals."""

from batchinfer.cli.main import main

ECHO = ["generate", "--engine", "echo"]


def test_one_answer_stands_alone_on_stdout(call):
    ran = call(*ECHO, "--prompt", "hello  there\nfriend")
    assert (ran.status, ran.out) == (0, "hello  there\nfriend\n")


def test_several_answers_come_in_order_each_under_its_prompt_and_values(call):
    ran = call(*ECHO, "-p", "a b c", "-p", "d\x1b[2J", "--grid", "max_tokens=1,2")
    assert ran.out.splitlines() == [
        *("--- a b c · max_tokens 1", "a", "--- d\\x1b[2J · max_tokens 1", "d\\x1b[2J"),
        *("--- a b c · max_tokens 2", "a b", "--- d\\x1b[2J · max_tokens 2", "d\\x1b[2J"),
    ]
    rows = [line.split() for line in ran.err.splitlines()]
    assert ["a", "b", "c", "·", "max_tokens", "2", "3", "0", "2"] in [row[:9] for row in rows]
    assert "4 requests: 8 input and 5 output tokens in" in ran.err


def test_a_request_that_the_engine_refuses_is_a_gap_and_the_others_are_there(call):
    ran = call(*ECHO, "--json", "-p", "a b c d", "-p", "e", "--max-model-len", "3")
    assert (ran.status, ran.result["status"]) == (1, "PARTIAL")
    first, second = ran.result["results"]
    assert first["error"]["code"] == "prompt_too_long"
    assert second["answers"] == ["e"]
    assert "1 request without an answer" in ran.err


def test_a_request_is_the_one_that_a_run_makes_of_the_same_row(tmp_path, endpoint):
    (tmp_path / "rows.txt").write_text("a\n")
    sampling = ["--temperature", "0.7", "--seed", "3", "--max-tokens", "5"]
    options = ["--engine", "openai", "--base-url", endpoint.url, "--model", "echo-model"]
    assert main(["generate", *options, *sampling, "-p", "a"]) == 0
    dest = str(tmp_path / "a.jsonl")
    assert main(["run", str(tmp_path / "rows.txt"), "-o", dest, *options, *sampling]) == 0
    first, *rest = [body for body in endpoint.bodies if body["messages"][0]["content"] == "a"]
    assert rest == [first]
    assert {"seed", "max_tokens", "temperature"} <= first.keys()
