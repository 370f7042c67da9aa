"""Embeddings, classes and scores with real vLLM and tiny random models, compared with transformers."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from batchinfer.cli.main import main
from batchinfer.core import layout
from batchinfer.core.errors import ConfigError
from batchinfer.core.records import EngineInfo, Pooling, Request, Sampling
from batchinfer.engines.config import EngineConfig
from batchinfer.formats.vectors import numbers_of
from batchinfer.prompts import PromptConfig
from batchinfer.storage.opening import open_store
from batchinfer.worker.config import WorkerConfig, real_environment
from batchinfer.worker.start import run_worker
from engine_contract import ListSource, drive
from making import finish_process, make_job, read_marker, start_process
from pooling_models import write_bert

pytestmark = pytest.mark.vllm

TEXTS = [f"row {i} " + "word " * (i % 5) for i in range(12)]
PAIRS = [(f"what is {i}?", f"it is {i * 7 % 5} " + "of it " * (i % 3)) for i in range(8)]
LONGEST = 96
"""Tokens of the longest text. The models have more positions."""


class Never:
    def is_set(self) -> bool:
        return False


@dataclasses.dataclass
class Loaded:
    """An open engine in this process; workers open and close it without any effect."""

    engine: Any
    info: EngineInfo
    config: EngineConfig

    def open(self, stop: Any) -> EngineInfo:
        return self.info

    def close(self) -> None:
        pass

    def generate(self, source: Any, stop: Any) -> Any:
        return self.engine.generate(source, stop)

    def stats(self) -> Any:
        return self.engine.stats()


@pytest.fixture(scope="module")
def load() -> Iterator[Callable[..., Loaded]]:
    """Function that loads a model. It unloads the one before, since two would share vLLM's global state."""
    from batchinfer.engines.vllm_engine import VllmEngine

    kept: dict[str, Loaded] = {}

    def load(model: Path, task: str, **options: Any) -> Loaded:
        key = f"{model} {task} {options}"
        if key not in kept:
            for other in kept.values():
                other.engine.close()
            kept.clear()
            arguments = {"kv_cache_memory_bytes": 64 << 20, **options.pop("engine_args", {})}
            config = EngineConfig(
                model=str(model),
                task=task,
                dtype="float32",
                max_model_len=LONGEST,
                max_num_seqs=8,
                engine_args=arguments,
                **options,
            )
            engine = VllmEngine(config)
            kept[key] = Loaded(engine, engine.open(Never()), config)
        return kept[key]

    yield load
    for each in kept.values():
        each.engine.close()


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose embeddings may be cut."""
    return write_bert(tmp_path_factory.mktemp("bert") / "embed", is_matryoshka=True)


@pytest.fixture(scope="module")
def cross_encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bert(tmp_path_factory.mktemp("cross") / "cross", labels=["relevant"])


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bert(tmp_path_factory.mktemp("three") / "three", labels=["bad", "so-so", "good"])


def run(folder: Path, rows: list[dict[str, Any]], loaded: Loaded, **prompt: Any) -> list[Any]:
    """Run a worker over a job of these rows; its output lines."""
    make_job(folder / "job", rows=len(rows), per_chunk=len(rows), make_row=rows.__getitem__)
    environment = dataclasses.replace(
        real_environment(grace_seconds=1, show_progress=lambda *_: None),
        create_engine=lambda _: loaded,
    )
    worker = WorkerConfig(
        manifests=[f"{folder}/job/manifests/all.txt"],
        output=str(folder / "run"),
        engine=loaded.config,
        prompt=PromptConfig(task=loaded.config.task, has_timing=False, **prompt),
        sampling=Sampling(),
        max_error_rate=1.0,
    )
    run_worker(worker, environment)
    store = open_store(str(folder / "run"))
    data = store.get(layout.output_key(read_marker(store, "part-00000").output)).data
    return [json.loads(line) for line in data.split(b"\n")[:-1]]


def states(model: Path, *texts: str) -> Any:
    """The last hidden states that transformers computes for a text or a pair."""
    import torch
    from transformers import AutoModel, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    encoder = AutoModel.from_pretrained(model, dtype=torch.float32).eval()
    with torch.no_grad():
        return encoder(**tokenizer(*texts, return_tensors="pt")).last_hidden_state[0]


def logits(model: Path, *texts: str) -> Any:
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    classifier = AutoModelForSequenceClassification.from_pretrained(model).eval()
    with torch.no_grad():
        return classifier(**tokenizer(*texts, return_tensors="pt")).logits[0]


def cosine(one: Any, other: Any) -> float:
    import torch

    return float(torch.nn.functional.cosine_similarity(torch.tensor(one), other, dim=-1))


# --------------------------------------------------------------------------- embeddings


def test_embeddings_of_an_encoder_are_those_of_transformers(
    tmp_path: Path, load: Callable[..., Loaded], bert: Path
) -> None:
    rows = [{"text": text} for text in [*TEXTS, "x" * (LONGEST - 2), "x" * (LONGEST - 1), ""]]
    found = run(tmp_path, rows, load(bert, "embed"), prompt_column="text")
    for text, line in zip(TEXTS, found, strict=False):
        assert cosine(line["embedding"], states(bert, text)[0]) >= 0.9999
        assert sum(number**2 for number in line["embedding"]) == pytest.approx(1)
        assert line["usage"]["completion_tokens"] == 0
    codes = [line["error"] and line["error"]["code"] for line in found[len(TEXTS) :]]
    assert codes == [None, "prompt_too_long", "empty_prompt"]
    assert found[len(TEXTS)]["usage"]["prompt_tokens"] == LONGEST


def test_a_long_text_keeps_its_special_tokens_when_it_is_cut(
    tmp_path: Path, load: Callable[..., Loaded], bert: Path
) -> None:
    long = "ab " * LONGEST
    [line] = run(
        tmp_path,
        [{"text": long}],
        load(bert, "embed"),
        prompt_column="text",
        truncate_prompt="right",
    )
    kept = "ab " * ((LONGEST - 2) // 2)
    assert cosine(line["embedding"], states(bert, kept)[0]) >= 0.9999


def test_embeddings_of_a_decoder_are_those_of_its_last_token(
    tmp_path: Path, load: Callable[..., Loaded], tiny_model: Path
) -> None:
    rows = [{"text": text.strip()} for text in TEXTS]
    found = run(tmp_path, rows, load(tiny_model, "embed"), prompt_column="text")
    for row, line in zip(rows, found, strict=True):
        assert cosine(line["embedding"], states(tiny_model, row["text"])[-1]) >= 0.9999


def ask(loaded: Loaded, task: str, text: str = TEXTS[1], **own: Any) -> Any:
    request = Request(key=("c", 0), text=text, sampling=Sampling(), task=task, **own)
    return drive(loaded.engine, ListSource([request]))["c", 0]


def test_a_request_chooses_its_dimensions_and_its_length(
    load: Callable[..., Loaded], bert: Path
) -> None:
    loaded = load(bert, "embed")
    whole = numbers_of(ask(loaded, "embed", pooling=Pooling(normalize=False)).pooled[0].data)
    first = numbers_of(ask(loaded, "embed", pooling=Pooling(dimensions=8)).pooled[0].data)
    assert whole == pytest.approx(states(bert, TEXTS[1])[0].tolist(), abs=1e-4)
    length = sum(number**2 for number in whole[:8]) ** 0.5
    assert first == pytest.approx([number / length for number in whole[:8]], abs=1e-4)
    refused = ask(loaded, "embed", pooling=Pooling(dimensions=65))
    assert refused.failure.code == "invalid_parameter"
    assert ask(loaded, "embed").failure is None


def test_token_embeddings_are_a_vector_for_each_token(
    load: Callable[..., Loaded], bert: Path
) -> None:
    [pooled] = ask(load(bert, "embed"), "token-embed").pooled
    wanted = states(bert, TEXTS[1])
    assert (pooled.width, len(pooled.data)) == (64, 4 * 64 * len(wanted))
    first = numbers_of(pooled.data[: 4 * 64])
    assert cosine(first, wanted[0]) >= 0.9999


def test_another_task_than_the_models_fails_its_row_alone(
    load: Callable[..., Loaded], bert: Path
) -> None:
    loaded = load(bert, "embed")
    for task in ("classify", "reward", "score", "generate"):
        assert ask(loaded, task).failure.code == "wrong_task"
    assert ask(loaded, "embed").failure is None


# --------------------------------------------------------------------------- classes and scores


def test_classes_are_those_of_transformers(
    tmp_path: Path, load: Callable[..., Loaded], classifier: Path
) -> None:
    rows = [{"text": text} for text in TEXTS]
    found = run(tmp_path, rows, load(classifier, "classify"), prompt_column="text")
    for text, line in zip(TEXTS, found, strict=True):
        wanted = logits(classifier, text).softmax(-1)
        assert line["probs"] == pytest.approx(wanted.tolist(), abs=1e-4)
        assert line["label"] == ["bad", "so-so", "good"][int(wanted.argmax())]


def test_scores_of_a_cross_encoder_are_those_of_transformers(
    tmp_path: Path, load: Callable[..., Loaded], cross_encoder: Path
) -> None:
    """Also its token types, which vLLM does not take from prompts."""
    rows = [{"query": query, "document": document} for query, document in PAIRS]
    loaded = load(cross_encoder, "score")
    found = run(tmp_path, rows, loaded, pair_columns=["query", "document"])
    wanted = [float(logits(cross_encoder, *pair).sigmoid()) for pair in PAIRS]
    assert [line["score"] for line in found] == pytest.approx(wanted, abs=1e-4)
    alone = run(
        tmp_path / "chained",
        [{"text": f"{query} {document}"} for query, document in PAIRS],
        loaded,
        prompt_column="text",
    )
    assert max(abs(a["score"] - b["score"]) for a, b in zip(found, alone, strict=True)) > 1e-3


def test_a_reward_is_the_raw_number(load: Callable[..., Loaded], cross_encoder: Path) -> None:
    loaded = load(cross_encoder, "score")
    [pooled] = ask(loaded, "reward").pooled
    assert numbers_of(pooled.data) == pytest.approx(
        logits(cross_encoder, TEXTS[1]).tolist(), abs=1e-4
    )


def test_scores_of_an_embedding_model_are_cosines(
    tmp_path: Path, load: Callable[..., Loaded], bert: Path
) -> None:
    rows = [{"query": query, "document": document} for query, document in PAIRS]
    found = run(tmp_path, rows, load(bert, "score"), pair_columns=["query", "document"])
    for (query, document), line in zip(PAIRS, found, strict=True):
        wanted = cosine(states(bert, query)[0].tolist(), states(bert, document)[0])
        assert line["score"] == pytest.approx(wanted, abs=1e-4)


def test_a_model_without_the_task_is_refused_when_it_is_loaded(
    load: Callable[..., Loaded], bert: Path
) -> None:
    """Also where no rule of ours knows the architecture's name."""
    with pytest.raises(ConfigError, match=r"--task classify: .* does not do it; vLLM's tasks"):
        load(bert, "classify")


def test_requests_of_several_kinds_are_answered_by_one_model(
    tmp_path: Path, load: Callable[..., Loaded], cross_encoder: Path
) -> None:
    query, documents = "what is it?", ["it is this", "that one", "it?" * 60]
    cut = documents[2][: (LONGEST - len("whatisit?") - 3)]
    rows = [
        {"custom_id": str(index), "method": "POST", "url": url, "body": {"model": "cross", **body}}
        for index, (url, body) in enumerate(
            [
                (
                    "/v1/rerank",
                    {"query": query, "documents": documents, "truncate_prompt_tokens": -1},
                ),
                ("/v1/score", {"text_1": query, "text_2": documents}),
                ("/v1/classify", {"input": ["it is this"]}),
                ("/v1/embeddings", {"input": "it is this"}),
            ]
        )
    ]
    found = run(
        tmp_path,
        rows,
        load(cross_encoder, "score"),
        request_format="openai-batch",
        output_format="openai-batch",
    )
    ranked = found[0]["response"]["body"]["results"]
    wanted = [float(logits(cross_encoder, query, text).sigmoid()) for text in [*documents[:2], cut]]
    assert sorted((each["index"], each["relevance_score"]) for each in ranked) == [
        (index, pytest.approx(score, abs=1e-4)) for index, score in enumerate(wanted)
    ]
    codes = [line["response"]["body"].get("error", {}).get("code") for line in found]
    assert codes == [None, "prompt_too_long", None, "wrong_task"]
    [classified] = found[2]["response"]["body"]["data"]
    own = float(logits(cross_encoder, "it is this").sigmoid())
    assert classified["probs"] == [pytest.approx(own, abs=1e-4)]


def test_a_killed_worker_leaves_the_vectors_of_an_undisturbed_one(
    tmp_path: Path,
    load: Callable[..., Loaded],
    bert: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """SIGKILL of a worker with a model in a process of its own, then the same worker again, in this process."""
    rows = [{"text": f"row {index} " + "word " * (index % 5)} for index in range(3000)]
    make_job(tmp_path / "job", rows=3000, per_chunk=1000, make_row=rows.__getitem__)
    arguments = [
        *("worker", "--job", str(tmp_path / "job"), "--output", str(tmp_path / "run")),
        *("--model", str(bert), "--task", "embed", "--prompt-column", "text", "--no-timing"),
        *("--dtype", "float32", "--max-model-len", str(LONGEST), "--worker-id", "w0"),
        *("--engine-arg", f"kv_cache_memory_bytes={64 << 20}", "--checkpoint-seconds", "0.3"),
    ]
    store = open_store(str(tmp_path / "run"))
    process = start_process([*arguments, "--max-num-seqs", "1"])
    deadline = time.monotonic() + 240
    while not any(True for _ in store.list(layout.CHECKPOINTS)):
        assert process.poll() is None, "it ended"
        assert time.monotonic() < deadline, "no checkpoint"
        time.sleep(0.05)
    process.kill()
    finish_process(process)
    monkeypatch.setattr("batchinfer.worker.config.create_engine", lambda _: load(bert, "embed"))
    assert main([*arguments, "--max-num-seqs", "8"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert 0 < result["rows_resumed"] < 3000
    found = []
    for index in range(3):
        key = layout.output_key(read_marker(store, f"part-{index:05d}").output)
        found += map(json.loads, store.get(key).data.splitlines())
    whole = run(tmp_path / "whole", rows, load(bert, "embed"), prompt_column="text")
    for one, other in zip(found, whole, strict=True):
        assert {**one, "embedding": None} == {**other, "embedding": None}
        assert one["embedding"] == pytest.approx(other["embedding"], abs=1e-5)
