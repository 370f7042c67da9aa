"""A batch file of requests of every kind is answered as vLLM's server answers each of them by itself."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from fixtures_vllm import ask
from making import output_lines, split, write_lines
from mixed_requests import BAD, GOOD, bad_request, expected_code, good_request
from models import DEMO_MODEL

pytestmark = [pytest.mark.vllm]

NUM_GOOD = 8 * len(GOOD)
LOGPROB_TOLERANCE = 0.02
"""bfloat16, and other rows in the same step."""
VARYING = ("id", "created", "created_at", "system_fingerprint", "request_id")


def run(url: str, source: Path, folder: Path, *options: str) -> list[dict[str, Any]]:
    """Answer a file of requests by a worker, and return its output lines."""
    from batchinfer.worker.command import command as worker

    job, run_url = str(folder / "job"), str(folder / "run")
    split(source, job, num_chunks=2)
    engine = ["--engine", "openai", "--base-url", url, "--model", str(DEMO_MODEL)]
    worker.main(["--job", job, "--output", run_url, *engine, *options], standalone_mode=False)
    return output_lines(run_url)


def near(number: float) -> Any:
    return pytest.approx(number, abs=LOGPROB_TOLERANCE)


def settled(value: Any, number: Callable[[float], Any] = float, *, name: str = "") -> Any:
    """Return a body without what differs between two equal answers, and with what `number` makes of its fractions."""
    if isinstance(value, float):
        return number(value)
    if isinstance(value, dict):
        kept = {key: each for key, each in value.items() if key not in VARYING}
        if name == "usage":
            for details in ("prompt_tokens_details", "input_tokens_details"):
                kept.pop(details, None)
        return {key: settled(each, number, name=key) for key, each in kept.items()}
    return [settled(each, number) for each in value] if isinstance(value, list) else value


@pytest.fixture(scope="module")
def lines(demo_url, tmp_path_factory):
    """Output lines of good requests, each with a bad one after it."""
    folder = tmp_path_factory.mktemp("matrix")
    requests = [
        request
        for index in range(NUM_GOOD)
        for request in (good_request(index), bad_request(index))
    ]
    source = write_lines(folder / "requests.jsonl", requests)
    return run(demo_url, source, folder, "--request-format", "openai-batch")


def test_each_good_request_has_the_servers_own_answer(lines, demo_url):
    requests = [good_request(index) for index in range(NUM_GOOD)]

    def answer(request: dict[str, Any]) -> tuple[int, Any]:
        return ask(demo_url, request["url"], json={"model": str(DEMO_MODEL), **request["body"]})

    with ThreadPoolExecutor(8) as pool:
        wanted = list(pool.map(answer, requests))
    assert len(lines) == 2 * NUM_GOOD
    for request, line, (status, body) in zip(requests, lines[::2], wanted, strict=True):
        assert (line["_id"], line["status"], status) == (request["custom_id"], 200, 200), line
        assert settled(line["body"]) == settled(body, near), request


def test_each_bad_request_is_an_error_row_with_its_code(lines):
    found = [line.get("error", {}).get("code", "answered") for line in lines[1::2]]
    wanted = [expected_code(index) for index in range(NUM_GOOD)]
    assert {each for _, each in BAD} <= set(wanted)
    wrong = [
        (bad_request(index), code, lines[2 * index + 1].get("error"))
        for index, (code, right) in enumerate(zip(found, wanted, strict=True))
        if code != right
    ]
    assert not wrong, wrong[:5]


def test_calls_and_reasoning_are_found_as_the_server_finds_them(lines):
    choices = [line["body"]["choices"][0] for line in lines[::2] if "choices" in line["body"]]
    messages = [choice["message"] for choice in choices if "message" in choice]
    calls = [message["tool_calls"] for message in messages if message.get("tool_calls")]
    assert {call["function"]["name"] for each in calls for call in each} == {"f"}
    assert len({call["id"] for each in calls for call in each}) == sum(map(len, calls))
    assert any(message.get("reasoning") for message in messages)


def test_equal_runs_write_equal_bytes(demo_url, tmp_path):
    requests = [good_request(index) for index in range(len(GOOD)) if "logprobs" not in GOOD[index][1]]  # fmt: skip
    source = write_lines(tmp_path / "requests.jsonl", requests)
    first = run(demo_url, source, tmp_path / "a", "--request-format", "openai-batch")
    again = run(demo_url, source, tmp_path / "b", "--request-format", "openai-batch")
    assert first == again


@pytest.mark.parametrize(
    "options",
    [
        ["--sampling", 'structured_outputs={"json":{"type":"nothing"}}'],
        ["--sampling", 'logit_bias={"99999":1}'],
        ["--sampling", "no_such_parameter=1"],
    ],
    ids=str,
)
def test_a_runs_own_option_that_the_server_refuses_ends_it_with_2(demo_url, tmp_path, options):
    from batchinfer.core.errors import ConfigError

    source = tmp_path / "rows.jsonl"
    source.write_text('{"text": "What is 2 plus 3?"}\n')
    with pytest.raises(ConfigError):
        run(demo_url, source, tmp_path, "--prompt-column", "text", *options)
    assert not (tmp_path / "run" / "run.json").exists()
