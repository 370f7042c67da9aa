"""Adapters and constraints with real vLLM and the demo model: one engine with two adapters answers all tests."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from batchinfer.collect.command import run_collect
from batchinfer.collect.table import CollectConfig
from batchinfer.core import layout
from batchinfer.core.clock import SystemClock
from batchinfer.core.errors import ConfigError
from batchinfer.core.records import Request, Sampling
from batchinfer.engines.config import EngineConfig
from batchinfer.engines.vllm_loading import adapter_arguments
from batchinfer.prompts import Code, PromptConfig
from batchinfer.storage.opening import open_store
from batchinfer.worker.config import WorkerConfig, real_environment
from batchinfer.worker.start import run_worker
from engine_contract import ListSource, drive
from making import make_job, read_marker
from mixed_requests import BAD, BY_SCHEMA, SCHEMA, TAG, bad_request, expected_code, good_request
from peft_adapter import write_adapter
from shared_engine import SharedEngine, opened
from tiny_model import DEMO_MODEL

pytestmark = pytest.mark.vllm

GREEDY = Sampling(temperature=0.0, max_tokens=12)
QUESTIONS = [
    f"What is the capital of {name}?" for name in ("France", "Italy", "Japan", "Spain", "Peru")
]


def config_with(loras: dict[str, str]) -> EngineConfig:
    arguments = {"kv_cache_memory_bytes": 64 << 20, "block_size": 32}
    return EngineConfig(
        model=str(DEMO_MODEL),
        max_model_len=256,
        max_num_seqs=16,
        loras=loras,
        engine_args=arguments,
    )


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    folder = tmp_path_factory.mktemp("adapters")
    every = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    return config_with(
        {
            "first": str(write_adapter(folder / "first", seed=1)),
            "second": str(write_adapter(folder / "second", seed=2, rank=16, targets=every)),
        }
    )


@pytest.fixture(scope="module")
def engine(config: EngineConfig) -> Iterator[SharedEngine]:
    with opened(config) as engine:
        yield engine


def ask(engine: Any, adapters: list[str | None]) -> list[Any]:
    """The answers of rows with these adapters, all in the engine at once. Every row of a question has one text."""
    requests = [
        Request(key=("c", index), text=question, sampling=GREEDY, adapter=adapter)
        for index, (question, adapter) in enumerate(
            (question, adapter) for question in QUESTIONS for adapter in adapters
        )
    ]
    found = drive(engine, ListSource(requests))
    return [found[request.key] for request in requests]


def texts(completions: list[Any]) -> list[str]:
    assert [one.failure for one in completions] == [None] * len(completions)
    return [one.choices[0].text for one in completions]


def test_each_row_is_answered_by_its_adapter_and_the_others_by_the_model(
    engine: SharedEngine,
) -> None:
    """On a CPU, vLLM gives rows without an adapter the one in its last slot: this slot must be empty."""
    base, first, second = (texts(ask(engine, [each])) for each in (None, "first", "second"))
    for one, other in ((base, first), (base, second), (first, second)):
        assert sum(a != b for a, b in zip(one, other, strict=True)) >= 3
    for mixture in (
        [None, "first"],
        [None, "second"],
        [None, "first", "second"],
        ["second", None, "first", None],
    ):
        answers = {None: base, "first": first, "second": second}
        wanted = [answers[each][i] for i in range(len(QUESTIONS)) for each in mixture]
        assert texts(ask(engine, mixture)) == wanted, mixture


def test_an_adapter_that_the_engine_does_not_have_fails_its_row_alone(engine: SharedEngine) -> None:
    found = ask(engine, [None, "nobody"])
    assert [one.failure.code if one.failure else "" for one in found] == ["", "model_not_found"] * 5


def test_too_few_slots_are_refused_on_a_cpu(config: EngineConfig) -> None:
    changed = config_with(config.loras)
    changed.engine_args["max_loras"] = 2
    with pytest.raises(ConfigError, match=r"max_loras: is 2, expected more than the 2 adapters"):
        adapter_arguments(changed, is_cpu=True)
    found = adapter_arguments(config, is_cpu=True)
    assert (found["max_loras"], found["max_lora_rank"]) == (3, 16)
    assert adapter_arguments(config, is_cpu=False)["max_loras"] == 2


# --------------------------------------------------------------------------- whole runs


def run(
    folder: Path,
    rows: list[dict[str, Any]],
    engine: SharedEngine,
    config: EngineConfig,
    **given: Any,
) -> list[dict[str, Any]]:
    """Run a worker over a job of these rows; its output lines."""
    sampling = given.pop("sampling", GREEDY)
    make_job(folder / "job", rows=len(rows), per_chunk=len(rows), make_row=rows.__getitem__)
    environment = dataclasses.replace(
        real_environment(grace_seconds=1, show_progress=lambda *_: None),
        create_engine=lambda _: engine,
    )
    worker = WorkerConfig(
        manifests=[f"{folder}/job/manifests/all.txt"],
        output=str(folder / "run"),
        engine=config,
        prompt=PromptConfig(adapters=sorted(config.loras), has_timing=False, **given),
        sampling=sampling,
        max_error_rate=1.0,
    )
    run_worker(worker, environment)
    store = open_store(str(folder / "run"))
    data = store.get(layout.output_key(read_marker(store, "part-00000").output)).data
    return [json.loads(line) for line in data.split(b"\n")[:-1]]


def chat(index: int, name: Any, **body: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": QUESTIONS[index % len(QUESTIONS)]}]
    body = {"model": name, "messages": messages, "temperature": 0, "max_tokens": 40, **body}
    return {
        "custom_id": f"r{index}",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": body,
    }


def test_a_file_of_good_and_bad_requests_of_many_kinds(
    tmp_path: Path, engine: SharedEngine, config: EngineConfig
) -> None:
    """Each bad request is its own error row; its neighbours are answered as they are without it."""
    good: list[tuple[Any, dict[str, Any]]] = [
        ("base", {}),
        ("first", {}),
        ("second", {}),
        ("first", {"response_format": BY_SCHEMA}),
        ("base", {"response_format": {"type": "json_object"}}),
        (None, {"structured_outputs": {"choice": ["yes", "no"]}}),
        ("second", {"structured_outputs": {"regex": "[A-C]{3}-[0-9]{2}"}}),
        ("base", {"structured_outputs": {"grammar": 'root ::= "x" ("a"|"b"){3}'}}),
        ("base", {"response_format": TAG}),
    ]
    bad: list[tuple[Any, dict[str, Any], str]] = [
        ("third", {}, "model_not_found"),
        (5, {}, "model_not_found"),
        ("base", {"response_format": {"type": "json_schema"}}, "invalid_parameter"),
        ("base", {"structured_outputs": {"regex": "("}}, "invalid_parameter"),
        ("first", {"structured_outputs": {"json": {"type": "nothing"}}}, "invalid_parameter"),
        ("first", {"structured_outputs": {"grammar": "root ::= root"}}, "invalid_parameter"),
        ("second", {"structured_outputs": {"choice": []}}, "invalid_parameter"),
        ("base", {"structured_outputs": {"structural_tag": "{}"}}, "invalid_parameter"),
        ("base", {"structured_outputs": {"regex": "a", "choice": ["b"]}}, "invalid_parameter"),
    ]
    lines = [chat(index, name, **body) for index, (name, body) in enumerate(good)]
    options = {"request_format": "openai-batch", "served_model_name": ["base"]}
    options |= {"output_format": "openai-batch"}
    alone = run(tmp_path / "alone", lines, engine, config, **options)
    mixed: list[dict[str, Any]] = []
    for index, line in enumerate(lines):
        name, body, _ = bad[index % len(bad)]
        mixed += [line, chat(100 + index, name, **body)]
    found = run(tmp_path / "mixed", mixed, engine, config, **options)
    bodies = [line["response"]["body"] for line in found]
    content = [[one["message"]["content"] for one in body["choices"]] for body in bodies[::2]]
    assert content == [
        [one["message"]["content"] for one in line["response"]["body"]["choices"]] for line in alone
    ]
    assert [body["model"] for body in bodies[::2]] == [name or "base" for name, _ in good]
    errors = [body["error"] for body in bodies[1::2]]
    assert [error["code"] for error in errors] == [code for _, _, code in bad]
    params = ["model"] * 2 + ["response_format"] + ["structured_outputs"] * 6
    assert [error["param"] for error in errors] == params
    assert set(json.loads(content[3][0])) == {"name", "n"}
    assert " " not in content[3][0].replace(json.loads(content[3][0])["name"], "")
    assert content[5][0] in ("yes", "no")
    assert content[7][0][0] == "x"
    assert content[8][0].startswith("<f>")


def test_rows_of_a_table_name_their_adapter_and_constraint(
    tmp_path: Path, engine: SharedEngine, config: EngineConfig
) -> None:
    rows = [
        {"q": QUESTIONS[0], "lora": "first", "c": None},
        {"q": QUESTIONS[0], "lora": "", "c": None},
        {"q": QUESTIONS[0], "lora": "nobody", "c": None},
        {"q": QUESTIONS[0], "lora": None, "c": json.dumps(["yes", "no"])},
        {"q": QUESTIONS[0], "lora": "second", "c": {"type": "nothing"}},
        {"q": QUESTIONS[0]},
    ]
    given = {"lora_column": "lora", "constraint_column": "c", "prompt_column": "q"}
    sampling = Sampling(temperature=0.0, max_tokens=60, structured={"json": SCHEMA})
    found = run(tmp_path, rows, engine, config, sampling=sampling, **given)
    codes = [line["error"]["code"] if line["error"] else "" for line in found]
    assert codes == ["", "", "model_not_found", "", "invalid_constraint", ""]
    model = str(DEMO_MODEL)
    assert [line.get("model") for line in found] == ["first", model, None, model, None, model]
    dest = tmp_path / "answers.parquet"
    run_collect(
        CollectConfig(run=str(tmp_path / "run"), dest=str(dest)),
        open_store=open_store,
        clock=SystemClock(),
    )
    from pyarrow import parquet

    table = parquet.read_table(dest).to_pylist()
    assert [row["model"] for row in table] == ["first", model, None, model, None, model]
    assert [row["answer_json"] is not None for row in table] == [
        True,
        True,
        False,
        False,
        False,
        True,
    ]
    assert found[1]["choices"] == found[5]["choices"]


def answer_of(line: dict[str, Any]) -> Any:
    """What a line answers: its choices and counts of tokens, without ids and what the prefix cache had."""
    body = line["response"]["body"]
    usage = [body["usage"][name] for name in ("prompt_tokens", "completion_tokens")]
    for choice in body["choices"]:
        choice.pop("logprobs")
        for call in choice.get("message", {}).get("tool_calls", []):
            call.pop("id")
    return body["choices"], body["model"], usage


def test_fifty_bad_requests_of_five_hundred_leave_the_others_as_they_are(
    tmp_path: Path, engine: SharedEngine, config: EngineConfig
) -> None:
    good = [good_request(index) for index in range(450)]
    bad = [bad_request(index) for index in range(50)]
    mixed: list[dict[str, Any]] = []
    for index, request in enumerate(bad):
        mixed += [*good[9 * index : 9 * index + 5], request, *good[9 * index + 5 : 9 * index + 9]]
    assert len(BAD) >= 20
    options = {"request_format": "openai-batch", "served_model_name": ["base"]}
    options |= {"output_format": "openai-batch"}
    alone = run(tmp_path / "alone", good, engine, config, sampling=Sampling(), **options)
    found = run(tmp_path / "mixed", mixed, engine, config, sampling=Sampling(), **options)
    codes = []
    for index in range(50):
        line = found.pop(9 * index + 5)
        error = line["error"] or line["response"]["body"].get("error", {"code": "answered"})
        codes.append(error["code"])
        assert error["code"] == expected_code(index), (bad[index], error)
        assert error["message"]
    assert set(codes) <= {code.value for code in Code} | {"engine_rejected"}
    assert [line["custom_id"] for line in found] == [request["custom_id"] for request in good]
    for line, wanted in zip(found, alone, strict=True):
        assert wanted["response"]["status_code"] == 200, wanted
        assert answer_of(line) == answer_of(wanted), line["custom_id"]
