"""Requests of OpenAI batch files for embeddings, scores and rankings: good and bad ones, and endpoints."""

from __future__ import annotations

import base64
import json
import struct
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from pyarrow import parquet

from batchinfer.cli.main import main
from batchinfer.core import layout
from batchinfer.core.records import Pooling, Request, RequestInput, Sampling
from batchinfer.core.tasks import PairForm
from batchinfer.engines.config import EngineConfig
from batchinfer.engines.echo import EchoEngine
from batchinfer.engines.openai_embeddings import vectors_completion
from batchinfer.engines.openai_requests import BrokenAnswer
from batchinfer.prompts import EngineRules, PromptBuilder, PromptConfig, RawRow
from batchinfer.storage.opening import open_store
from engine_contract import ListSource, drive
from fake_endpoint import fake_endpoint, refusal
from making import make_job, read_marker
from samples import SCHEMAS

EMBED, SCORE, RERANK = "/v1/embeddings", "/v1/score", "/v1/rerank"
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
HELLO = [{"role": "user", "content": "hello"}]


def request(url: str, **body: Any) -> dict[str, Any]:
    return {"custom_id": "r", "method": "POST", "url": url, "body": {"model": "m", **body}}


def run(folder: Path, rows: list[dict[str, Any]], *options: str) -> list[dict[str, Any]]:
    """The output lines of a run over these requests, with the echo engine unless options say otherwise."""
    job = folder / "job"
    make_job(job, rows=len(rows), per_chunk=len(rows), make_row=rows.__getitem__)
    engine = () if "--engine" in options else ("--engine", "echo")
    arguments = [
        *("worker", "--manifest", f"{job}/manifests/all.txt", "--output", str(folder / "run")),
        *("--request-format", "openai-batch", "--max-error-rate", "1", "--no-timing"),
    ]
    assert main([*arguments, *engine, *options]) == 0
    store = open_store(str(folder / "run"))
    data = store.get(layout.output_key(read_marker(store, "part-00000").output)).data
    return [json.loads(line) for line in data.splitlines()]


# --------------------------------------------------------------------------- answers


def test_bodies_are_those_of_openai_and_of_vllms_server(tmp_path: Path) -> None:
    found = run(
        tmp_path,
        [
            request(EMBED, input="hello"),
            request(EMBED, input=["hello", "there"], dimensions=2, encoding_format="base64"),
            request(EMBED, input=[1, 2, 3]),
            request(EMBED, input=[[1, 2, 3], [4]]),
            request(EMBED, messages=HELLO),
            request(EMBED, input=HELLO),
            request(SCORE, text_1="a", text_2=["b", "c"]),
            request("/score", queries=["a", "b"], items=["b", "c"]),
            request("/v2/rerank", query="a", documents=["b", "c", "d"], top_n=2),
        ],
        *("--task", "embed", "--dimensions", "3", "--output-format", "openai-batch"),
    )
    for line in found:
        jsonschema.validate(line, SCHEMAS["output-openai-batch"])
    bodies = [line["response"]["body"] for line in found]
    assert [body.get("object") for body in bodies] == ["list"] * 8 + [None]
    vectors = [[each["embedding"] for each in body["data"]] for body in bodies[:6]]
    assert [len(each) for each in vectors] == [1, 2, 1, 2, 1, 1]
    assert bodies[0]["data"][0]["object"] == "embedding"
    assert len(struct.unpack("<2f", base64.b64decode(vectors[1][0]))) == 2
    assert vectors[2][0] == vectors[3][0]
    assert vectors[0] == vectors[4] == vectors[5]
    assert bodies[0]["usage"] == {
        "prompt_tokens": 1,
        "total_tokens": 1,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    scores = [each["score"] for each in bodies[6]["data"]]
    assert [set(each) for each in bodies[6]["data"]] == [{"index", "object", "score"}] * 2
    assert bodies[7]["data"][0]["score"] == scores[0]
    ranked = bodies[8]["results"]
    by_index = {each["index"]: each["relevance_score"] for each in ranked}
    assert len(ranked) == 2
    assert all(by_index.get(index, score) == score for index, score in enumerate(scores))
    assert ranked[0]["relevance_score"] >= ranked[1]["relevance_score"]
    assert [each["document"]["text"] for each in ranked] == [
        "bcd"[each["index"]] for each in ranked
    ]


@pytest.mark.parametrize("output_format", ["native", "openai-batch"])
def test_a_table_has_lists_of_what_each_request_asked_for(
    tmp_path: Path, output_format: str
) -> None:
    rows = [
        request(EMBED, input=["a", "b"]),
        request(RERANK, query="a", documents=["b", "c", "d"]),
        request(EMBED, input=""),
    ]
    lines = run(
        tmp_path, rows, *("--task", "embed", "--dimensions", "4", "--output-format", output_format)
    )
    assert main(["collect", str(tmp_path / "run"), str(tmp_path / "out.parquet")]) == 0
    table = parquet.read_table(tmp_path / "out.parquet")
    kind = "list<element: fixed_size_list<element: float>[4]>"
    assert str(table.schema.field("embeddings").type) == kind
    assert [len(row) for row in table["embeddings"].to_pylist()] == [2, 0, 0]
    assert [len(row) for row in table["scores"].to_pylist()] == [0, 3, 0]
    if output_format == "native":
        wanted = [each["score"] for each in lines[1]["data"]]
        assert table["scores"][1].as_py() == pytest.approx(wanted)
    assert main(["collect", str(tmp_path / "run"), str(tmp_path / "x.parquet"), "--explode"]) == 0
    single = parquet.read_table(tmp_path / "x.parquet").to_pylist()
    assert [row["choice_index"] for row in single] == [0, 1, 0, 1, 2, None]
    assert [row["score"] is None for row in single] == [True, True, False, False, False, True]


# --------------------------------------------------------------------------- bad requests

BAD = [
    (request(EMBED, input=""), "empty_prompt", "input"),
    (request(EMBED, input=[]), "empty_prompt", "input"),
    (request(EMBED, input=["a", ""]), "empty_prompt", "input"),
    (request(EMBED), "invalid_prompt", "input"),
    (request(EMBED, input={"a": 1}), "invalid_prompt", "input"),
    (request(EMBED, input=["a", 3]), "invalid_prompt", "input"),
    (request(EMBED, input=[-1]), "invalid_prompt", "input"),
    (request(EMBED, messages=[{"role": "user"}]), "missing_content", "messages"),
    (request(EMBED, messages=HELLO, add_generation_prompt=True), "invalid_parameter", "add_generation_prompt"),
    (request(EMBED, messages=[{"role": "user", "content": [IMAGE]}]), "unsupported_content", "messages"),
    (request(EMBED, input="a", temperature=0), "unsupported_parameter", "temperature"),
    (request(EMBED, input="a", normalize=True), "unsupported_parameter", "normalize"),
    (request(EMBED, input="a", dimensions=0), "invalid_parameter", "dimensions"),
    (request(EMBED, input="a", encoding_format="bytes"), "invalid_parameter", "encoding_format"),
    (request(EMBED, input="a", use_activation=1), "invalid_parameter", "use_activation"),
    (request(EMBED, input="a", truncate_prompt_tokens=-2), "invalid_parameter", "truncate_prompt_tokens"),
    (request(EMBED, input=["a"] * 10_001), "invalid_parameter", "input"),
    (request(SCORE, text_1="a"), "invalid_request", None),
    (request(SCORE, text_1=["a", "b"], text_2=["c"]), "invalid_parameter", "text_1"),
    (request(SCORE, text_1="a", text_2="b", dimensions=3), "unsupported_parameter", "dimensions"),
    (request(SCORE, text_1="a", text_2={"content": []}), "unsupported_content", "text_2"),
    (request(RERANK, query=["a", "b"], documents=["c"]), "invalid_parameter", "query"),
    (request(RERANK, query="a", documents=[]), "empty_prompt", "documents"),
    (request(RERANK, query="a", documents=["b"], top_n=-1), "invalid_parameter", "top_n"),
    (request("/v1/chat/completions", messages=HELLO), "wrong_task", "url"),
    (request("/v1/classify", input="a"), "wrong_task", "url"),
    (request("/v1/moderations", input="a"), "wrong_task", "url"),
    (request("/v1/embedding", input="a"), "unknown_url", "url"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("row", "code", "param"), BAD, ids=[f"{i} {code}" for i, (_, code, _) in enumerate(BAD)]
)
def test_a_bad_request_is_an_error_row(row: dict[str, Any], code: str, param: str | None) -> None:
    config = PromptConfig(task="embed", request_format="openai-batch")
    data = [RawRow(0, json.dumps(row).encode())]
    [found] = PromptBuilder(config, Sampling(), 0, None, None).build("c", 0, data)
    assert found.failure is not None
    assert (found.failure.code, found.param) == (code, param)


@pytest.mark.parametrize(
    ("task", "own", "others"),
    [
        ("embed", "/v1/embeddings or /v1/score or /v1/rerank;", "/v1/classify"),
        ("generate", "/v1/chat/completions or /v1/completions;", "/v1/embeddings, /v1/score"),
    ],
)
def test_an_unknown_url_is_told_all_that_there_are(task: str, own: str, others: str) -> None:
    config = PromptConfig(task=task, request_format="openai-batch")
    data = [RawRow(0, json.dumps(request("/v1/embedding", input="a")).encode())]
    [found] = PromptBuilder(config, Sampling(), 0, None, None).build("c", 0, data)
    assert found.failure is not None
    assert own in found.failure.message
    assert others in found.failure.message
    assert "did you mean '/v1/embeddings'" in found.failure.message


def test_a_rehearsal_refuses_an_embedding_that_fills_the_memory() -> None:
    engine = EchoEngine(EngineConfig(engine="echo", task="embed"))
    requests = [
        Request(
            key=("c", index),
            text="a",
            task="embed",
            sampling=Sampling(),
            pooling=Pooling(dimensions=dimensions),
        )
        for index, dimensions in enumerate((3, 10**15))
    ]
    good, bad = drive(engine, ListSource(requests)).values()
    assert good.failure is None
    assert bad.failure is not None
    assert bad.failure.code == "invalid_parameter"


@pytest.mark.parametrize("vectors", [[[1e39], [1.0]], [[1.0, 2.0], [1.0]], ["AAA", "AAAA"]])
def test_numbers_of_an_endpoint_that_are_no_vectors_are_a_broken_answer(vectors: Any) -> None:
    asked = Request(
        key=("c", 0),
        sampling=Sampling(),
        task="score" if len(vectors[0]) == 2 else "embed",
        num_queries=1,
        inputs=[RequestInput(text="a"), RequestInput(text="b")],
    )
    data = [{"index": index, "embedding": each} for index, each in enumerate(vectors)]
    with pytest.raises(BrokenAnswer, match="a vector that is not in the API's form"):
        vectors_completion(asked, json.dumps({"data": data}).encode(), (0.0, 0.0))


@pytest.mark.parametrize(
    ("task", "pairs", "taken"),
    [
        ("embed", PairForm.APART, {EMBED, SCORE, RERANK}),
        ("score", PairForm.APART, {EMBED, SCORE, RERANK}),
        ("score", PairForm.JOINED, {"/v1/classify", SCORE, RERANK}),
        ("classify", PairForm.JOINED, {"/v1/classify", SCORE, RERANK}),
        ("generate", PairForm.APART, set()),
    ],
)
def test_a_run_takes_the_requests_that_its_model_can_answer(
    task: str, pairs: PairForm, taken: set[str]
) -> None:
    config = PromptConfig(task=task, request_format="openai-batch")
    rules = EngineRules(pairs=pairs)
    builder = PromptBuilder(config, Sampling(), 0, None, None, rules=rules)
    rows = {
        EMBED: request(EMBED, input="a"),
        "/v1/classify": request("/v1/classify", input="a"),
        SCORE: request(SCORE, text_1="a", text_2="b"),
        RERANK: request(RERANK, query="a", documents=["b"]),
    }
    raw = [RawRow(index, json.dumps(row).encode()) for index, row in enumerate(rows.values())]
    found = dict(zip(rows, builder.build("c", 0, raw), strict=True))
    assert {url for url, row in found.items() if row.failure is None} == taken
    codes = {row.failure.code for row in found.values() if row.failure is not None}
    assert codes <= {"wrong_task"}
    joined = [part.text for part in found[SCORE].request.inputs] if SCORE in taken else []
    assert len(joined) in (0, 1 if pairs is PairForm.JOINED else 2)


# --------------------------------------------------------------------------- endpoints


def test_an_endpoint_embeds_and_scores(tmp_path: Path) -> None:
    rows = [
        request(EMBED, input=["a", "b"]),
        request(EMBED, input=[1, 2], dimensions=4, truncate_prompt_tokens=1),
        request(EMBED, messages=HELLO),
        request(SCORE, text_1="a", text_2=["b", "c"]),
        request(EMBED, input="wrong"),
    ]
    with fake_endpoint() as endpoint:
        bad = refusal(400, "no", param="input")
        endpoint.rule = lambda text, _body: bad if text == "wrong" else None
        options = ("--engine", "openai", "--base-url", endpoint.url, "--model", "echo-model")
        found = run(tmp_path, rows, *options, "--task", "embed", "--dimensions", "6")
        assert {path for path in endpoint.paths if "models" not in path} == {"/v1/embeddings"}
        asked = next(body for body in endpoint.bodies if body.get("input") == [1, 2])
    assert (asked["truncate_prompt_tokens"], asked["dimensions"]) == (1, 4)
    here = run(tmp_path / "here", rows, "--task", "embed", "--dimensions", "6")
    for one, other in zip(found[:4], here[:4], strict=True):
        assert one["data"] == [
            {name: pytest.approx(value, abs=1e-6) for name, value in each.items()}
            for each in other["data"]
        ]
    assert found[4]["error"]["code"] == "engine_rejected"
    assert found[0]["usage"]["prompt_tokens"] == 2


def test_an_endpoint_classifies_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_job(tmp_path / "job", rows=1, per_chunk=1)
    status = main(
        [
            *("worker", "--job", str(tmp_path / "job"), "--task", "classify", "--engine", "openai"),
            *("--base-url", "http://127.0.0.1:1", "--model", "m", "--prompt-column", "prompt"),
        ]
    )
    assert status == 2
    assert "--task classify with --engine openai" in capsys.readouterr().err
