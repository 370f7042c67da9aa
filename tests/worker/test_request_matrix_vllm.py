"""What a request asks for is what vLLM does when it is called directly: one by one there, mixed in one chunk here.

All runs of this module share one engine process. The reference is `direct_vllm.py`, in another process.
"""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from openai.types import Completion as OpenAICompletion
from openai.types.chat import ChatCompletion

from batchinfer.core import codec, layout
from batchinfer.core.errors import ConfigError
from batchinfer.core.records import Sampling
from batchinfer.engines.config import CONSTRAINTS, EngineConfig
from batchinfer.ledger.survey import finished_chunks
from batchinfer.prompts import PromptConfig
from batchinfer.split.command import SplitConfig, run_split
from batchinfer.storage.opening import open_store
from batchinfer.worker.config import WorkerConfig, real_environment
from batchinfer.worker.start import run_worker
from making import read_marker
from samples import SCHEMAS, SEED_REQUEST
from shared_engine import SharedEngine

pytestmark = [pytest.mark.vllm]

HERE = Path(__file__).resolve().parents[1]
MODEL = HERE.parent / "examples/demo-model"
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MODEL_LENGTH = 256
RUN_SEED = 5
ENGINE_ARGS = {"kv_cache_memory_bytes": 64 << 20, "block_size": 32}
DIRECT_ENGINE = {
    "model": str(MODEL),
    "max_model_len": MODEL_LENGTH,
    "max_num_seqs": 16,
    "enforce_eager": True,
    "enable_chunked_prefill": False,
    "max_num_batched_tokens": 2048,
    "structured_outputs_config": CONSTRAINTS,
    **ENGINE_ARGS,
}
LOGPROB_TOLERANCE = 0.02
"""bfloat16, and other rows in the same step."""

PROMPT = "Extract as JSON: Order 485: Karim Lopez wants"
"""A text that the demo model goes on from at length, and in many ways."""
ORDER = "Extract as JSON: Order 485: Karim Lopez wants 25 x scarf."
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "order": {"type": "integer", "minimum": 0, "maximum": 999},
    },
    "required": ["name", "order"],
    "additionalProperties": False,
}
SYSTEM = {"role": "system", "content": "Answer in one word."}
TALK = [
    {"role": "user", "content": "What is the capital of Germany?"},
    {"role": "assistant", "content": "Berlin"},
    {"role": "user", "content": "What is 57 plus 34?"},
]


@dataclasses.dataclass(frozen=True)
class Case:
    """A request, and how the same is said to vLLM."""

    name: str
    url: str
    body: dict[str, Any]
    params: dict[str, Any]
    structured: dict[str, Any] | None = None
    chat: dict[str, Any] = dataclasses.field(default_factory=dict)
    choices: Callable[[list[Any]], list[Any]] = lambda found: found
    """Which of vLLM's answers the request keeps."""
    is_seeded_by_run: bool = False


def completion(name: str, params: dict[str, Any], **fields: Any) -> Case:
    """A completions request whose parameters have the same names in vLLM."""
    extra = fields.pop("body", {})
    prompt = fields.pop("prompt", PROMPT)
    full = {"temperature": 0, "max_tokens": 12, **params}
    return Case(name, COMPLETIONS, {"prompt": prompt, **full, **extra}, full, **fields)


def chat(name: str, params: dict[str, Any], **fields: Any) -> Case:
    extra = fields.pop("body", {})
    messages = fields.pop("messages", TALK[:1])
    full = {"temperature": 0, "max_tokens": 12, **params}
    return Case(name, CHAT, {"messages": messages, **full, **extra}, full, **fields)


def best_two(found: list[Any]) -> list[Any]:
    return sorted(found, key=lambda each: each["mean_logprob"], reverse=True)[:2]


def schema_format(schema: dict[str, Any]) -> dict[str, Any]:
    wrapped = {"name": "order", "schema": schema}
    return {"response_format": {"type": "json_schema", "json_schema": wrapped}}


SAMPLED = {"temperature": 1.0, "seed": 11}
REGEX = {"regex": "[A-Z][a-z]{3,8}"}
CHOICE = {"choice": ["La Paz", "Sucre"]}
REPETITION = {"max_pattern_size": 2, "min_count": 3}
CUT_RIGHT = {"truncate_prompt_tokens": 9, "truncation_side": "right"}
CASES = [
    completion("greedy", {}),
    completion("one token", {"max_tokens": 1}),
    Case("defaults", COMPLETIONS, {"prompt": PROMPT, "temperature": 0}, {"temperature": 0, "max_tokens": 16}),
    completion("the run's seed", {"temperature": 1.0}, is_seeded_by_run=True),
    completion("seeded", SAMPLED),
    completion("another seed", {**SAMPLED, "seed": -3}),
    completion("warm", {**SAMPLED, "temperature": 1.7}),
    completion("top_p", {**SAMPLED, "top_p": 0.6}),
    completion("top_k", {**SAMPLED, "top_k": 3}),
    completion("min_p", {**SAMPLED, "min_p": 0.2}),
    completion("all cuts", {**SAMPLED, "top_p": 0.9, "top_k": 40, "min_p": 0.02}),
    completion("two answers", {**SAMPLED, "n": 2}),
    completion("two greedy answers", {}, body={"n": 2}, choices=lambda found: found * 2),
    completion("best of four", {**SAMPLED, "n": 4, "logprobs": 0}, choices=best_two,
               body={"n": 2, "best_of": 4, "logprobs": None}),
    completion("logprobs 0", {"logprobs": 0}),
    completion("logprobs 3", {**SAMPLED, "logprobs": 3}),
    completion("logprobs at the engine's most", {"logprobs": 20}),
    completion("echo", {}, body={"echo": True}),
    completion("echo with logprobs", {"logprobs": 2, "prompt_logprobs": 2}, body={"echo": True}),
    completion("scoring", {"max_tokens": 1, "prompt_logprobs": 1, "logprobs": 1},
               body={"echo": True, "max_tokens": 0}),
    completion("stop", {**SAMPLED, "max_tokens": 40, "stop": ["e", "1"]}),
    completion("stop kept", {**SAMPLED, "max_tokens": 40, "stop": ["e", "1"], "include_stop_str_in_output": True}),
    completion("stop as one text", {**SAMPLED, "max_tokens": 40, "stop": "a"}),
    completion("stop ids", {**SAMPLED, "max_tokens": 40, "stop_token_ids": list(range(40, 200))}),
    completion("presence", {"presence_penalty": 1.5, "ignore_eos": True}),
    completion("frequency", {"frequency_penalty": 1.5, "ignore_eos": True}),
    completion("repetition", {"repetition_penalty": 1.18, "ignore_eos": True}),
    completion("bias", {}, body={"logit_bias": {"70": 100, "2": -100}}),
    completion("least length", {"min_tokens": 9}),
    completion("no end", {"ignore_eos": True, "max_tokens": 30}),
    completion("special tokens shown", {"skip_special_tokens": False}),
    completion("token ids", {}, prompt=[77, 300, 5, 9]),
    completion("not ASCII", {}, prompt="Zażółć 🙂 \u0000 gęślą"),
    completion("long", {}, prompt="What is 2 plus 7? " * 20),
    completion("json_object", {"max_tokens": 30}, prompt=ORDER, structured={"json_object": True},
               body={"response_format": {"type": "json_object"}}),
    completion("regex", {}, structured=REGEX, body={"structured_outputs": REGEX}),
    completion("choice", {}, structured=CHOICE, body={"structured_outputs": CHOICE}),
    chat("chat", {}),
    chat("chat with a system message", {}, messages=[SYSTEM, *TALK[:1]]),
    chat("chat of several turns", SAMPLED, messages=TALK),
    chat("chat with parts", {}, messages=[{"role": "user", "content": [{"type": "text", "text": PROMPT}]}]),
    Case("chat without a length", CHAT, {"messages": TALK, "temperature": 0}, {"temperature": 0, "max_tokens": None}),
    chat("chat, two answers", {**SAMPLED, "n": 2}),
    chat("chat with logprobs", {"logprobs": 0}, body={"logprobs": True}),
    chat("chat with alternatives", {"logprobs": 4}, body={"logprobs": True, "top_logprobs": 4}),
    chat("chat without logprobs", {}, body={"logprobs": False, "max_tokens": None, "max_completion_tokens": 12}),
    chat("chat, stop", {"stop": ["u"]}),
    chat("chat, continued", {}, messages=[*TALK, {"role": "assistant", "content": "The answer"}],
         body={"continue_final_message": True, "add_generation_prompt": False},
         chat={"continue_final_message": True, "add_generation_prompt": False}),
    chat("chat by schema", {"max_tokens": 60}, messages=[{"role": "user", "content": ORDER}],
         structured={"json": SCHEMA}, body=schema_format(SCHEMA)),
    chat("chat, json_object", {"max_tokens": 60}, messages=[{"role": "user", "content": ORDER}],
         structured={"json_object": True}, body={"response_format": {"type": "json_object"}}),
    chat("chat, plain text", {}, body={"response_format": {"type": "text"}}),
    completion("bad words", {"bad_words": ["Lopez", " wants"]}, prompt=ORDER),
    completion("allowed tokens", {**SAMPLED, "allowed_token_ids": list(range(40, 60))}),
    completion("no spaces", {"spaces_between_special_tokens": False, "skip_special_tokens": False}),
    completion("repetition ends it", {"repetition_detection": REPETITION, "ignore_eos": True, "max_tokens": 60}),
    completion("extra arguments", {}, body={"vllm_xargs": {"a": 1, "b": ["x", 2.5]}}),
    completion("token ids returned", {**SAMPLED, "n": 2}, body={"return_token_ids": True}),
    completion("prompt logprobs", {"prompt_logprobs": 2}),
    completion("prompt logprobs without alternatives", {"prompt_logprobs": 0}),
    completion("prompt logprobs with echo", {"logprobs": 1, "prompt_logprobs": 3}, body={"echo": True}),
    completion("a weight of no beam search", {}, body={"length_penalty": 1.4, "use_beam_search": False}),
    completion("a priority", {}, body={"priority": 7}),
    chat("chat, bad words", {"bad_words": ["Berlin", "er"]}),
    chat("chat, token ids returned", SAMPLED, body={"return_token_ids": True}),
    chat("chat, prompt logprobs", {"prompt_logprobs": 1, "logprobs": 2},
         body={"logprobs": True, "top_logprobs": 2}),
    chat("chat, cut", {}, body={"truncate_prompt_tokens": 9, "return_token_ids": True},
         chat={"tokenization_kwargs": {"truncate_prompt_tokens": 9}}),
    chat("chat, cut at the end", {}, chat={"tokenization_kwargs": CUT_RIGHT}, body=CUT_RIGHT),
    chat("chat, cut to the model", {}, messages=[{"role": "user", "content": "What is 2 plus 7? " * 60}],
         body={"truncate_prompt_tokens": -1},
         chat={"tokenization_kwargs": {"truncate_prompt_tokens": MODEL_LENGTH - 1}}),
]  # fmt: skip

BAD_BODIES = [
    # (endpoint, body, code)
    (COMPLETIONS, {"prompt": PROMPT, "temperature": -1}, "invalid_parameter"),
    (COMPLETIONS, {"prompt": PROMPT, "top_p": 0}, "invalid_parameter"),
    (COMPLETIONS, {"prompt": PROMPT, "n": 0}, "invalid_parameter"),
    (COMPLETIONS, {"prompt": PROMPT, "n": 129}, "invalid_parameter"),
    (COMPLETIONS, {"prompt": PROMPT, "n": 3, "best_of": 2}, "invalid_parameter"),
    (COMPLETIONS, {"prompt": PROMPT, "logprobs": 21}, "invalid_parameter"),
    (COMPLETIONS, {"prompt": PROMPT, "min_tokens": 9, "max_tokens": 8}, "invalid_parameter"),
    (COMPLETIONS, {"prompt": PROMPT, "logit_bias": {"99999": 1}}, "invalid_parameter"),
    (COMPLETIONS, {"prompt": PROMPT, "stop_token_ids": [99999]}, "invalid_parameter"),
    (COMPLETIONS, {"prompt": PROMPT, "stop": [""]}, "invalid_parameter"),
    (COMPLETIONS, {"prompt": PROMPT, "suffix": "x"}, "unsupported_parameter"),
    (COMPLETIONS, {"prompt": PROMPT, "use_beam_search": True}, "unsupported_parameter"),
    (COMPLETIONS, {"prompt": PROMPT, "max_token": 8}, "unsupported_parameter"),
    (COMPLETIONS, {"prompt": PROMPT, "bad_words": "Paris"}, "invalid_parameter"),
    (COMPLETIONS, {"prompt": PROMPT, "bad_words": [""]}, "invalid_parameter"),
    (COMPLETIONS, {"prompt": PROMPT, "allowed_token_ids": []}, "invalid_parameter"),
    (COMPLETIONS, {"prompt": PROMPT, "allowed_token_ids": [99999]}, "invalid_parameter"),
    (COMPLETIONS, {"prompt": PROMPT, "repetition_detection": {"min_count": "two"}}, "invalid_parameter"),
    (COMPLETIONS, {"prompt": PROMPT, "repetition_detection": {"max_pattern_size": -1}}, "invalid_parameter"),
    (COMPLETIONS, {"prompt": PROMPT, "truncate_prompt_tokens": MODEL_LENGTH + 1}, "invalid_parameter"),
    (COMPLETIONS, {"prompt": PROMPT, "truncate_prompt_tokens": 0}, "empty_prompt"),
    (COMPLETIONS, {"prompt": [PROMPT, PROMPT]}, "unsupported_parameter"),
    (COMPLETIONS, {"prompt": [99999]}, "engine_rejected"),
    (COMPLETIONS, {"prompt": ""}, "empty_prompt"),
    (COMPLETIONS, {"prompt": []}, "empty_prompt"),
    (COMPLETIONS, {"prompt": 5}, "invalid_prompt"),
    (COMPLETIONS, {}, "invalid_prompt"),
    (COMPLETIONS, {"prompt": "word " * 5000}, "prompt_too_long"),
    (COMPLETIONS, {"prompt": PROMPT, "structured_outputs": {"regex": "(["}}, "invalid_parameter"),
    (COMPLETIONS, {"prompt": PROMPT, "structured_outputs": {"grammar": "root ::= ("}}, "invalid_parameter"),
    (COMPLETIONS, {"prompt": PROMPT, "structured_outputs": {"grammar": "root ::= root"}}, "invalid_parameter"),
    (CHAT, {"messages": []}, "empty_conversation"),
    (CHAT, {"messages": [{"role": "user"}]}, "missing_content"),
    (CHAT, {"messages": [{"content": "x"}]}, "unknown_role"),
    (CHAT, {"messages": TALK, "max_tokens": 5, "max_completion_tokens": 6}, "invalid_parameter"),
    (CHAT, {"messages": TALK, "top_logprobs": 3}, "invalid_parameter"),
    (CHAT, {"messages": TALK, "logprobs": True, "top_logprobs": 21}, "invalid_parameter"),
    (CHAT, {"messages": TALK, "tools": [{"type": "function"}]}, "invalid_parameter"),
    (CHAT, {"messages": TALK, "stream": True}, "unsupported_parameter"),
    (CHAT, {"messages": TALK, "echo": True}, "unsupported_parameter"),
    (CHAT, {"messages": TALK, "use_beam_search": True, "n": 2}, "unsupported_parameter"),
    (CHAT, {"messages": TALK, "priority": "high"}, "invalid_parameter"),
    *(
        (CHAT, {"messages": TALK, **schema_format(schema)}, code)
        for schema, code in [
            ({"type": "nothing"}, "invalid_parameter"),
            ({"$ref": "#/nowhere"}, "invalid_parameter"),
            ({"type": "string", "pattern": "(["}, "invalid_parameter"),
            ({"type": "array", "minItems": 5, "maxItems": 1}, "invalid_parameter"),
            ({"$ref": "#"}, "invalid_parameter"),
        ]
    ),
]  # fmt: skip
BAD_LINES = [
    # (line, code), of a batch file
    (b"{not JSON", "invalid_json"),
    (b"[1, 2]", "not_an_object"),
    (b'{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": [1]}', "invalid_request"),
    (b'{"custom_id": "b", "method": "GET", "url": "/v1/completions", "body": {"prompt": "x"}}', "invalid_request"),
    (b'{"method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}', "invalid_request"),
    (b'{"custom_id": "c", "method": "POST", "url": "/v1/complete", "body": {"prompt": "x"}}', "unknown_url"),
    (b'{"custom_id": "d", "method": "POST", "url": "/v1/embeddings", "body": {"input": "x"}}', "wrong_task"),
]  # fmt: skip


# --------------------------------------------------------------------------- the engine and the worker


@pytest.fixture(scope="session")
def config(demo_config: EngineConfig) -> EngineConfig:
    return demo_config


@pytest.fixture(scope="session")
def engine(demo_engine: SharedEngine) -> SharedEngine:
    return demo_engine


@pytest.fixture(scope="module")
def direct() -> dict[str, dict[str, Any]]:
    """vLLM's own answers, by the name of the case."""
    jobs = []
    for index, case in enumerate(CASES):
        params = dict(case.params)
        if case.is_seeded_by_run:
            # The chunk and the line that the case has in the runs below.
            params["seed"] = codec.row_seed(RUN_SEED, "part-00000", line_of(index))
        if "logit_bias" in case.body:
            params["logit_bias"] = case.body["logit_bias"]
        job: dict[str, Any] = {"params": params, "chat": case.chat}
        job |= {key: case.body[key] for key in ("prompt", "messages") if key in case.body}
        if case.structured:
            job["structured"] = case.structured
        jobs.append(job)
    done = subprocess.run(
        [sys.executable, str(HERE / "direct_vllm.py")],
        input=json.dumps({"engine": DIRECT_ENGINE, "jobs": jobs}),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    answers = json.loads(done.stdout.strip().splitlines()[-1])
    return {case.name: found for case, found in zip(CASES, answers, strict=True)}


def line_of(index: int) -> int:
    """Good requests are every other line; a bad one follows each."""
    return 2 * index


def with_bad_ones(good: list[bytes], bad: list[tuple[bytes, str]]) -> list[bytes]:
    lines = []
    for index, line in enumerate(good):
        lines += [line, bad[index % len(bad)][0]]
    return lines


def run(
    tmp_path: Path,
    lines: list[bytes],
    engine: SharedEngine,
    config: EngineConfig,
    **prompt: Any,
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Split a file into one chunk, and run a worker over it; its output lines and its result."""
    source, job, out = tmp_path / "requests.jsonl", str(tmp_path / "job"), str(tmp_path / "run")
    source.write_bytes(b"".join(line + b"\n" for line in lines))
    run_split(SplitConfig(sources=[str(source)], output=job, num_chunks=1), store=open_store(job))
    environment = dataclasses.replace(
        real_environment(grace_seconds=1, show_progress=lambda *_: None),
        create_engine=lambda _: engine,
    )
    sampling = prompt.pop("sampling", Sampling())
    result = run_worker(
        WorkerConfig(
            manifests=[f"{job}/manifests/all.txt"],
            output=out,
            engine=config,
            prompt=PromptConfig(**prompt),
            sampling=sampling,
            run_seed=RUN_SEED,
        ),
        environment,
    )
    store = open_store(out)
    assert finished_chunks(store) == {"part-00000": 0}
    marker = read_marker(store, "part-00000")
    data = store.get(layout.output_key(marker.output)).data
    found = [json.loads(line) for line in data.split(b"\n")[:-1]]
    assert (len(found), marker.rows_ok + marker.rows_error) == (len(lines), len(lines))
    assert sum(marker.errors.values()) == marker.rows_error
    return found, result


# --------------------------------------------------------------------------- comparing


def assert_same(case: Case, direct: dict[str, Any], choices: list[Any], usage: Any = None) -> None:
    """A request's answers are vLLM's: texts to the letter, log-probabilities as far as arithmetic goes."""
    wanted = case.choices(direct["choices"])
    prefix = direct["prompt"] if case.body.get("echo") else ""
    is_scoring = case.body.get("max_tokens") == 0
    texts = [prefix + ("" if is_scoring else each["text"]) for each in wanted]
    assert [text_of(choice) for choice in choices] == texts, case.name
    assert [choice["index"] for choice in choices] == list(range(len(wanted))), case.name
    if not is_scoring:
        reasons = [each["finish_reason"] for each in wanted]
        # The API's own types do not know this reason, so batch lines have `stop` and vLLM's `stop_reason`.
        known = ["stop" if reason == "repetition" else reason for reason in reasons]
        assert [choice["finish_reason"] for choice in choices] in (reasons, known), case.name
    if usage is not None:
        assert usage["prompt_tokens"] == direct["prompt_tokens"], case.name
        generated = sum(each["num_tokens"] for each in case.choices(direct["choices"]))
        if case.choices is best_two:
            generated = sum(each["num_tokens"] for each in direct["choices"])
        assert usage["completion_tokens"] == (0 if is_scoring else generated), case.name
    for choice, each in zip(choices, wanted, strict=True):
        if case.body.get("logprobs", False) is False or case.body["logprobs"] is None:
            assert choice["logprobs"] is None, case.name
            continue
        positions = [] if is_scoring else each["logprobs"]
        most = case.params["logprobs"]
        if prefix and direct["prompt_logprobs"]:
            positions = [*direct["prompt_logprobs"], *positions]
        assert_same_logprobs(case.name, choice, positions, most)


def assert_additions(
    case: Case, direct: dict[str, Any], holders: list[dict[str, Any]], choices: list[Any]
) -> None:
    """What vLLM adds to the API is there if it was asked for, with vLLM's values.

    `holders` are the parts of the answer that tell of the prompt: the body of a chat, each choice of a completion.
    """
    wanted = case.choices(direct["choices"])
    ids = [each["token_ids"] for each in wanted] if "return_token_ids" in case.body else []
    assert [choice["token_ids"] for choice in choices if "token_ids" in choice] == ids, case.name
    for holder in holders:
        has_ids = "return_token_ids" in case.body
        assert holder.get("prompt_token_ids") == (direct["prompt_token_ids"] if has_ids else None)
        if "prompt_logprobs" not in case.body:
            assert "prompt_logprobs" not in holder, case.name
            continue
        found = [
            each and {key: [one["rank"], one["decoded_token"]] for key, one in each.items()}
            for each in holder["prompt_logprobs"]
        ]
        assert found == direct["prompt_ranks"], case.name
        for each, position in zip(
            holder["prompt_logprobs"], direct["prompt_logprobs"], strict=True
        ):
            if each is not None:
                first = next(iter(each.values()))
                assert first["logprob"] == pytest.approx(position["logprob"], abs=LOGPROB_TOLERANCE)


def assert_fields_of_vllm(body: dict[str, Any], url: str) -> None:
    """Every field of a body is one of vLLM's own answers, with a value of its type."""
    from vllm.entrypoints.openai.chat_completion import protocol as chats
    from vllm.entrypoints.openai.completion import protocol as completions

    if url == CHAT:
        whole, one = chats.ChatCompletionResponse, chats.ChatCompletionResponseChoice
    else:
        whole, one = completions.CompletionResponse, completions.CompletionResponseChoice
    whole.model_validate(body)
    assert set(body) <= set(whole.model_fields)
    for choice in body["choices"]:
        assert set(choice) <= set(one.model_fields)


def text_of(choice: dict[str, Any]) -> str:
    return str(choice["message"]["content"] if "message" in choice else choice["text"])


def assert_same_logprobs(
    name: str, choice: dict[str, Any], positions: list[Any], most: int
) -> None:
    given = choice["logprobs"]
    if "content" in given:
        rows = [
            (each["token"], each["logprob"], [top["logprob"] for top in each["top_logprobs"]])
            for each in given["content"]
        ]
    else:
        # In this form alternatives of one text are one, and the chosen token is among them.
        rows = [
            (token, logprob, None)
            for token, logprob in zip(given["tokens"], given["token_logprobs"], strict=True)
        ]
        assert len(given["top_logprobs"]) == len(given["text_offset"]) == len(rows)
        for top in given["top_logprobs"]:
            assert top is None or 1 <= len(top) <= most + 1, name
    assert len(rows) == len(positions), name
    for (token, logprob, top), wanted in zip(rows, positions, strict=True):
        if wanted is None:
            assert logprob is None, name
            continue
        assert token == wanted["token"], name
        assert logprob == pytest.approx(wanted["logprob"], abs=LOGPROB_TOLERANCE), name
        if top is not None:
            likeliest = [each[1] for each in wanted["top"]][:most]
            assert top == pytest.approx(likeliest, abs=LOGPROB_TOLERANCE), name


# --------------------------------------------------------------------------- tests


def test_a_batch_file_of_every_kind_answers_as_vllm_does(
    tmp_path: Path, engine: SharedEngine, config: EngineConfig, direct: dict[str, Any]
) -> None:
    good = [
        json.dumps({"custom_id": case.name, "method": "POST", "url": case.url, "body": case.body})
        for case in CASES
    ]
    bad = [
        *BAD_LINES,
        *(
            (json.dumps({"custom_id": f"bad-{index}", "method": "POST", "url": url, "body": body}).encode(), code)
            for index, (url, body, code) in enumerate(BAD_BODIES)
        ),
    ]  # fmt: skip
    assert len(bad) <= len(good)
    lines = with_bad_ones([line.encode() for line in good], bad)
    found, result = run(
        tmp_path, lines, engine, config, request_format="openai-batch", output_format="openai-batch"
    )
    for line in found:
        jsonschema.validate(line, SCHEMAS["output-openai-batch"])
    for index, case in enumerate(CASES):
        line = found[line_of(index)]
        assert line["custom_id"] == case.name
        assert line["response"] is not None, line
        assert line["response"]["status_code"] == 200, line
        body = line["response"]["body"]
        # The package's types know no token without a log-probability, which the API gives an echoed prompt's first.
        if not (case.body.get("echo") and case.body.get("logprobs") is not None):
            shape = ChatCompletion if case.url == CHAT else OpenAICompletion
            shape.model_validate(body, strict=True)
        assert_same(case, direct[case.name], body["choices"], body["usage"])
        holders = [body] if case.url == CHAT else body["choices"]
        assert_additions(case, direct[case.name], holders, body["choices"])
        assert_fields_of_vllm(body, case.url)
        reasons = [each["stop_reason"] for each in case.choices(direct[case.name]["choices"])]
        assert [choice.get("stop_reason") for choice in body["choices"]] == reasons, case.name
    for index in range(len(good)):
        line, code = found[line_of(index) + 1], bad[index % len(bad)][1]
        error = line["error"] or line["response"]["body"].get("error", {"code": "answered"})
        assert error["code"] == code, (bad[index % len(bad)], error)
        assert (line["response"] is None) == (code == "engine_error"), line
    assert result["response_count"] == len(CASES)
    assert sum(result["errors"].values()) == result["error_count"] == len(CASES)


def test_completions_requests_answer_as_vllm_does(
    tmp_path: Path, engine: SharedEngine, config: EngineConfig, direct: dict[str, Any]
) -> None:
    cases = [case for case in CASES if case.url == COMPLETIONS]
    good = [json.dumps({**case.body, "engine": "some-model"}).encode() for case in cases]
    bad = [
        (json.dumps(body).encode(), code) for url, body, code in BAD_BODIES if url == COMPLETIONS
    ]
    found, _ = run(
        tmp_path,
        with_bad_ones(good, bad),
        engine,
        config,
        request_format="completions",
        output_format="completions",
    )
    for line in found:
        jsonschema.validate(line, SCHEMAS["output-completions"])
    for index, case in enumerate(cases):
        line = found[line_of(index)]
        assert line["request"] == {**case.body, "engine": "some-model"}
        assert line["result"] is not None, line
        choices = line["result"]["choices"]
        assert_same(case, direct[case.name], choices)
        assert_additions(case, direct[case.name], choices, choices)
        assert line["result"]["request_time"]["batch_time"] > 0
        assert [found[line_of(index) + 1]["result"]] == [None]
        assert found[line_of(index) + 1]["error"]["code"] == bad[index % len(bad)][1]


def test_rows_have_real_times_and_counts(
    tmp_path: Path, engine: SharedEngine, config: EngineConfig, direct: dict[str, Any]
) -> None:
    """More rows than the engine runs at once: some of them wait. Equal beginnings come from the prefix cache."""
    prompt = "What is 2 plus 7? " * 20
    lines = [json.dumps({"text": prompt}).encode() for _ in range(48)]
    found, result = run(
        tmp_path, lines, engine, config, prompt_column="text", sampling=Sampling(temperature=0, max_tokens=12)
    )  # fmt: skip
    wanted = direct["long"]
    for line in found:
        jsonschema.validate(line, SCHEMAS["output-native"])
        assert line["choices"][0]["text"] == wanted["choices"][0]["text"]
        assert line["usage"]["prompt_tokens"] == wanted["prompt_tokens"]
        assert line["usage"]["completion_tokens"] == wanted["choices"][0]["num_tokens"]
        assert 0 < line["timing"]["generation_seconds"] < 300
        assert 0 <= line["timing"]["queue_seconds"] < 300
    assert max(line["timing"]["queue_seconds"] for line in found) > 0
    assert max(line["usage"]["cached_tokens"] for line in found) >= 32
    marker = read_marker(open_store(str(tmp_path / "run")), "part-00000")
    for name in ("prompt_tokens", "cached_tokens", "completion_tokens"):
        assert getattr(marker, name) == sum(line["usage"][name] for line in found)
    assert result["total_prompt_tokens"] == marker.prompt_tokens
    assert result["total_cached_tokens"] == marker.cached_tokens
    assert result["total_tokens_generated"] == marker.completion_tokens
    assert result["tokens_per_sec"]["output"] > 0
    assert result["engine_load_sec"] > 0
    assert (result["request_count"], result["response_count"]) == (48, 48)


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(structured={"json": {"type": "nothing"}}),
        Sampling(structured={"regex": "(["}),
        Sampling(logit_bias={"99999": 1.0}),
        Sampling(stop_token_ids=[99999]),
        Sampling(extra={"bad_words": 5}),
        Sampling(extra={"no_such_parameter": 1}),
    ],
    ids=str,
)
def test_a_runs_own_option_that_vllm_refuses_ends_it_with_2(
    tmp_path: Path, engine: SharedEngine, config: EngineConfig, sampling: Sampling
) -> None:
    lines = [json.dumps({"text": PROMPT}).encode() for _ in range(20)]
    with pytest.raises(
        ConfigError, match=r"sampling options|--json-schema|--regex|no such field"
    ) as caught:
        run(tmp_path, lines, engine, config, prompt_column="text", sampling=sampling)
    assert caught.value.exit_status == 2


def test_the_engines_own_limit_of_logprobs_holds(
    tmp_path: Path, engine: SharedEngine, config: EngineConfig
) -> None:
    assert engine.open(threading.Event()).max_logprobs == 20
    too_many = Sampling(logprobs=21)
    with pytest.raises(ConfigError, match="at most 20"):
        run(tmp_path, [b'{"text": "x"}'], engine, config, prompt_column="text", sampling=too_many)


def test_a_template_that_runs_wild_costs_its_own_row_only(
    tmp_path: Path, engine: SharedEngine, config: EngineConfig
) -> None:
    template = (
        "{% for i in range(n) %}{% for j in range(n) %}{{ i }}{% endfor %}{% endfor %}{{ text }}"
    )
    counts = [1, 9000, 2, 10**9, 3, "many", 0]
    lines = [json.dumps({"text": PROMPT, "n": count}).encode() for count in counts]
    found, _ = run(
        tmp_path, lines, engine, config, prompt_template=template, sampling=Sampling(temperature=0, max_tokens=4)
    )  # fmt: skip
    codes = [line["error"]["code"] if line["error"] else None for line in found]
    assert codes == [None, "template_error", None, "template_error", None, "template_error", None]


def test_a_template_that_reaches_for_pythons_insides_ends_the_run_with_2(
    tmp_path: Path, engine: SharedEngine, config: EngineConfig
) -> None:
    with pytest.raises(ConfigError) as caught:
        run(tmp_path, [b'{"text": "x"}'], engine, config, prompt_template="{{ text.__class__.__mro__ }}")  # fmt: skip
    assert caught.value.exit_status == 2


# --------------------------------------------------------------------------- other tools' commands


@pytest.fixture
def command(engine: SharedEngine, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """`batchinfer worker` with these arguments and the shared engine; returns its result."""
    from batchinfer.worker import background, command, config

    def shared_environment(**options: Any) -> Any:
        return dataclasses.replace(real_environment(**options), create_engine=lambda _: engine)

    monkeypatch.setattr(config, "real_environment", shared_environment)
    monkeypatch.setattr(background, "install_signal_handlers", lambda _: None)

    def run_command(*arguments: str) -> dict[str, Any]:
        options = ["--model", str(MODEL), "--max-model-len", str(MODEL_LENGTH), *arguments]
        result: dict[str, Any] = command.command.main(options, standalone_mode=False)
        return result

    return run_command


def split_rows(tmp_path: Path, rows: list[dict[str, Any]]) -> str:
    source, job = tmp_path / "rows.jsonl", str(tmp_path / "job")
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run_split(SplitConfig(sources=[str(source)], output=job, num_chunks=1), store=open_store(job))
    return job


def lines_of(job: str) -> list[dict[str, Any]]:
    data = open_store(f"{job}/runs/default").get("outputs/part-00000.jsonl").data
    return [json.loads(line) for line in data.split(b"\n")[:-1]]


def test_the_request_file_of_an_older_tool_gives_its_output_line(
    tmp_path: Path, command: Callable[..., dict[str, Any]]
) -> None:
    """Its example line as it is; the demo model is shorter than the prompt, so that is cut."""
    job = split_rows(tmp_path, [SEED_REQUEST])
    command(
        "--job", job, "--request-format", "completions", "--output-format", "completions", "--truncate-prompt", "left",
    )  # fmt: skip
    (line,) = lines_of(job)
    assert list(line) == ["request", "result"]
    assert line["request"] == SEED_REQUEST
    assert line["result"].keys() == {"choices", "request_time"}
    assert line["result"]["request_time"].keys() == {"batch_time", "batch_size"}
    (choice,) = line["result"]["choices"]
    assert list(choice) == ["text", "index", "logprobs", "finish_reason"]
    logprobs = choice["logprobs"]
    assert list(logprobs) == ["tokens", "token_logprobs", "top_logprobs", "text_offset"]
    assert len({len(column) for column in logprobs.values()}) == 1
    assert 1 <= len(logprobs["tokens"]) <= 2
    assert all(1 <= len(top) <= 2 for top in logprobs["top_logprobs"])


def test_the_batch_guides_command_has_its_equivalent(
    tmp_path: Path, command: Callable[..., dict[str, Any]]
) -> None:
    rows = [
        {"instruction": PROMPT, "input": "", "response": "never shown"},
        {"instruction": "Add the numbers.", "input": "2 and 7", "response": "never shown"},
    ]
    job = split_rows(tmp_path, rows)
    result = command(
        "--job", job, "--template", "gpteacher", "--blank-columns", "response", "--keep-prompt", "--strip",
        "--truncate-prompt", "left", "--seed", "10",
        "--sampling", "num_return_sequences=3,repetition_penalty=1.18,max_new_tokens=50,temperature=0.5,top_p=0.5,"
        "top_k=20,do_sample=true,use_cache=false,prepend_bos=true",
    )  # fmt: skip
    found = lines_of(job)
    assert [len(line["choices"]) for line in found] == [3, 3]
    for line in found:
        assert "never shown" not in line["prompt"]
        assert all(choice["text"] == choice["text"].strip() for choice in line["choices"])
        tokens = sum(choice["num_tokens"] for choice in line["choices"])
        assert line["usage"]["completion_tokens"] == tokens
    run_json = json.loads(open_store(f"{job}/runs/default").get(layout.RUN_KEY).data)
    sampling = run_json["config"]["sampling"]
    assert sampling == {
        "n": 3, "repetition_penalty": 1.18, "max_tokens": 50, "temperature": 0.5, "top_p": 0.5, "top_k": 20,
    }  # fmt: skip
    # The names that its last line had.
    assert result["status"] == "SUCCESS"
    assert re.fullmatch(r"\d{8}T\d{6}Z", result["run_id"])
    assert (result["request_count"], result["response_count"], result["seed"]) == (2, 2, 10)
    generated = sum(line["usage"]["completion_tokens"] for line in found)
    assert result["total_tokens_generated"] == generated > 0
    assert result["run_time_sec"] > 0
    assert result["tokens_per_sec"]["output"] > 0
