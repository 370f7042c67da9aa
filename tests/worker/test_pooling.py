"""Runs whose task is not to generate text: options, output lines and kills, with the echo engine."""

from __future__ import annotations

import base64
import json
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from batchinfer.check.memory import Memory, ask_for_memory
from batchinfer.cli.main import main
from batchinfer.core import layout
from batchinfer.core.errors import ConfigError, RunMismatch
from batchinfer.core.records import Pooled, Sampling
from batchinfer.engines.config import EngineConfig
from batchinfer.engines.models import describe_model
from batchinfer.formats.vectors import numbers_of, shown_vectors
from batchinfer.prompts import PromptBuilder, PromptConfig, RawRow
from batchinfer.storage.opening import open_store
from making import (
    finish_process,
    make_job,
    read_marker,
    run_worker_here,
    start_process,
    worker_arguments,
)
from tiny_model import write_model_stub


@pytest.fixture
def job(tmp_path: Path) -> Path:
    def make_row(index: int) -> dict[str, Any]:
        return {"prompt": f"text {index}", "query": "which?", "document": f"number {index}"}

    make_job(tmp_path / "job", rows=30, per_chunk=10, make_row=make_row)
    return tmp_path / "job"


def lines(run: Path) -> list[dict[str, Any]]:
    store = open_store(str(run))
    found: list[dict[str, Any]] = []
    for index in range(3):
        key = layout.output_key(read_marker(store, f"part-{index:05d}").output)
        found += map(json.loads, store.get(key).data.splitlines())
    return found


# --------------------------------------------------------------------------- output lines


@pytest.mark.parametrize(
    ("task", "fields"),
    [
        ("embed", {"embedding"}),
        ("token-embed", {"token_embeddings"}),
        ("classify", {"label", "probs"}),
        ("score", {"score"}),
        ("reward", {"reward"}),
    ],
)
def test_each_task_has_its_fields_and_no_text(job: Path, task: str, fields: set[str]) -> None:
    result = run_worker_here(job, job / "run", "--task", task)
    found = lines(job / "run")
    common = {"_row", "_id", "status", "choices", "usage", "error", "timing"}
    assert {frozenset(line) - common for line in found} == {frozenset(fields)}
    assert found[0]["choices"] == []
    assert (result["total_prompt_tokens"], result["total_tokens_generated"]) == (60, 0)
    marker = read_marker(open_store(str(job / "run")), "part-00000")
    assert (marker.rows_ok, marker.finish_reasons, marker.completion_lengths) == (10, {}, {})


def test_vectors_depend_on_the_text_alone_and_base64_holds_the_same(job: Path) -> None:
    run_worker_here(job, job / "lists", "--task", "embed", "--dimensions", "5")
    run_worker_here(
        job, job / "base64", "--task", "embed", "--dimensions", "5", "--embedding-format", "base64"
    )
    for one, other in zip(lines(job / "lists"), lines(job / "base64"), strict=True):
        numbers = struct.unpack("<5f", base64.b64decode(other["embedding"]))
        assert struct.pack("<5f", *one["embedding"]) == struct.pack("<5f", *numbers)
        assert sum(number**2 for number in numbers) == pytest.approx(1)
    assert len({line["embedding"] for line in lines(job / "base64")}) == 30


def test_numbers_have_as_few_digits_as_tell_float32_apart() -> None:
    wanted = [0.1, -3.5e-7, 1e30, 0.0, -0.0, 1.17549435e-38, 123456.789, 16777216.0]
    data = struct.pack(f"<{len(wanted)}f", *wanted)
    found = numbers_of(data)
    assert struct.pack(f"<{len(wanted)}f", *found) == data
    assert all(len(f"{number:.15g}") <= 16 for number in found)
    assert found[0] == 0.100000001


def test_rewards_of_several_tokens_or_classes_are_lists() -> None:
    data = struct.pack("<4f", 1, 2, 3, 4)
    assert shown_vectors(Pooled(data=data, width=2), "reward", as_base64=False).rewards == [
        [1.0, 2.0],
        [3.0, 4.0],
    ]


def test_pairs_are_compared(job: Path) -> None:
    pair = ("--prompt-column", "", "--pair-columns", "query,document")
    run_worker_here(job, job / "run", "--task", "score", *pair)
    scores = [line["score"] for line in lines(job / "run")]
    assert len(set(scores)) == 30
    assert all(-1 <= score <= 1 for score in scores)


def build(row: Any, **options: Any) -> Any:
    config = PromptConfig(task="score", pair_columns=["query", "document"], **options)
    data = json.dumps(row).encode()
    return PromptBuilder(config, Sampling(), 0, None, None).build("c", 0, [RawRow(0, data)])[0]


@pytest.mark.parametrize(
    ("row", "code"),
    [
        ({"query": "a"}, "missing_column"),
        ({"query": "a", "document": None}, "invalid_prompt"),
        ({"query": "a", "document": ["b"]}, "invalid_prompt"),
        ({"query": "", "document": "b"}, "empty_prompt"),
    ],
)
def test_a_row_without_a_whole_pair_is_an_error_row(row: dict[str, Any], code: str) -> None:
    assert build({"_row": 0, **row}).failure.code == code


def test_a_conversation_is_sent_with_its_answers() -> None:
    turns = [
        {"role": role, "content": f"{role} {number}"}
        for number in (1, 2)
        for role in ("user", "assistant")
    ]
    row = json.dumps({"_row": 0, "chat": turns}).encode()
    for given, count in (("first", 2), ("all", 4), ("2", 4)):
        config = PromptConfig(task="reward", messages_column="chat", turns=given)
        [found] = PromptBuilder(config, Sampling(), 0, None, None).build("c", 0, [RawRow(0, row)])
        assert found.request is not None
        assert found.request.messages == turns[:count]


# --------------------------------------------------------------------------- options


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--task", "embed", "--max-tokens", "5"), "--max-tokens with --task embed"),
        (("--task", "classify", "--temperature", "0"), "--temperature with --task classify"),
        (("--task", "embed", "--choices", "a,b"), "--json-schema, --choices"),
        (("--task", "embed", "--sampling", "min_tokens=3"), "--sampling min_tokens"),
        (("--task", "embed", "--sampling", "bad_words=[]"), "--sampling bad_words"),
        (("--task", "embed", "--n", "2"), "--n with"),
        (("--task", "embed", "--seed", "7"), "--seed with"),
        (("--task", "embed", "--continue-final", "Sure"), "--continue-final with"),
        (("--task", "embed", "--strip"), "--strip with"),
        (("--task", "embed", "--output-format", "completions"), "--output-format completions with"),
        (("--task", "embed", "--tool-choice", "auto"), "--tool-choice with"),
        (("--task", "embed", "--reasoning-parser", "qwen3"), "--reasoning-parser with"),
        (("--task", "score", "--dimensions", "3"), "--dimensions with --task score"),
        (("--task", "score", "--embedding-format", "base64"), "--embedding-format with"),
        (("--task", "embed", "--pair-columns", "a,b"), "--pair-columns with --task embed"),
        (("--dimensions", "3"), "--dimensions with --task generate"),
        (("--no-normalize",), "--normalize with --task generate"),
        (("--pooling", "mean"), "--pooling with --task generate"),
        (("--embedding-format", "base64"), "--embedding-format with --task generate"),
        (("--task", "embed", "--engine-arg", "runner=generate"), "--engine-arg runner"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_options_that_mean_nothing_for_the_task_are_refused_by_name(
    job: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, ...], named: str
) -> None:
    assert main(worker_arguments(job, job / "run", *options)) == 2
    assert named in capsys.readouterr().err
    assert not (job / "run" / "run.json").exists()


def test_a_worker_with_other_vectors_is_refused(job: Path) -> None:
    run_worker_here(job, job / "run", "--task", "embed", "--dimensions", "5")
    for other in (("--dimensions", "6"), ("--dimensions", "5", "--no-normalize"), ()):
        with pytest.raises(RunMismatch):
            run_worker_here(job, job / "run", "--task", "embed", *other)
    with pytest.raises(RunMismatch):
        run_worker_here(job, job / "run", "--task", "classify")


@pytest.mark.parametrize(
    ("architecture", "task", "values", "reason"),
    [
        ("LlamaForCausalLM", "classify", {}, "has no classes"),
        ("BertModel", "generate", {}, "writes no text"),
        ("BertModel", "classify", {}, "has no classes"),
        ("BertModel", "reward", {}, "is no reward model"),
        ("BertForSequenceClassification", "embed", {}, "gives classes and no embedding"),
        ("BertForTokenClassification", "classify", {}, "classifies tokens"),
        ("BertForSequenceClassification", "score", {"id2label": {"0": "a", "1": "b"}}, "2 classes"),
    ],
)
def test_a_task_that_the_model_does_not_do_is_refused_before_it_is_loaded(
    tmp_path: Path, architecture: str, task: str, values: dict[str, Any], reason: str
) -> None:
    folder = write_model_stub(tmp_path / "m", architectures=[architecture], **values)
    with pytest.raises(ConfigError, match=f"--task {task}: .*{reason}"):
        describe_model(EngineConfig(model=str(folder), task=task))


def test_dimensions_of_a_model_that_is_not_made_for_it_are_refused(tmp_path: Path) -> None:
    plain = write_model_stub(tmp_path / "plain", architectures=["BertModel"])
    config = EngineConfig(model=str(plain), task="embed", dimensions=8)
    with pytest.raises(ConfigError, match=r"--dimensions 8: .* \(Matryoshka\)"):
        describe_model(config)
    arguments = {"hf_overrides": {"is_matryoshka": True}}
    describe_model(
        EngineConfig(model=str(plain), task="embed", dimensions=8, engine_args=arguments)
    )
    some = write_model_stub(
        tmp_path / "some", architectures=["BertModel"], matryoshka_dimensions=[16, 32]
    )
    with pytest.raises(ConfigError, match="cut to 16, 32 numbers"):
        describe_model(EngineConfig(model=str(some), task="embed", dimensions=8))


def test_check_knows_that_encoders_keep_no_cache(tmp_path: Path) -> None:
    def memory(architecture: str, name: str) -> Memory:
        folder = write_model_stub(tmp_path / name, architectures=[architecture])
        engine = EngineConfig(model=str(folder), task="embed", max_num_seqs=64)
        return ask_for_memory("L4", describe_model(engine), engine, 100.0, 0)

    encoder, decoder = memory("BertModel", "bert"), memory("LlamaForCausalLM", "llama")
    assert (encoder.cache_tokens, encoder.rows_at_once) == (0, 64)
    assert decoder.cache_tokens > 1000
    assert decoder.rows_at_once == 64


# --------------------------------------------------------------------------- kills


def wait_for(appeared: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not appeared():
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.05)


def test_a_killed_run_leaves_the_bytes_of_an_undisturbed_one(job: Path) -> None:
    options = ("--task", "embed", "--no-timing", "--worker-id", "w0")
    slow = ("--echo-latency-seconds", "0.2", "--max-num-seqs", "1", "--checkpoint-rows", "1")
    store = open_store(str(job / "killed"))
    process = start_process(worker_arguments(job, job / "killed", *options, *slow))
    wait_for(lambda: any(True for _ in store.list(layout.CHECKPOINTS)))
    process.kill()
    finish_process(process)
    again = run_worker_here(job, job / "killed", *options)
    assert again["rows_resumed"] > 0
    run_worker_here(job, job / "whole", *options)
    assert lines(job / "killed") == lines(job / "whole")
