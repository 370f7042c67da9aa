"""The echo engine, which answers in the worker's process."""

from __future__ import annotations

import json
import threading

import pytest

from batchinfer.core.errors import Interrupted
from batchinfer.engines import create_engine
from batchinfer.engines.echo import answer
from batchinfer.engines.engine_config import EngineConfig
from engine_contract import CHAT, EngineContract, Flag, body_of, call, code_of

LENGTH = ["--max-model-len", "512", "--max-num-seqs", "16"]


def config(**options):
    return EngineConfig(**{"engine": "echo", "server_args": LENGTH, **options})


class TestContract(EngineContract):
    @pytest.fixture(
        scope="class",
        params=[{}, {"echo_latency_seconds": 0.002, "replicas": 2}],
        ids=["one", "two"],
    )
    @classmethod
    def opened(cls, request):
        engine = create_engine(config(**request.param))
        yield engine, engine.open(threading.Event())
        engine.close()

    @pytest.fixture
    def engine(self, opened):
        return opened[0]

    @pytest.fixture
    def info(self, opened):
        return opened[1]

    def test_it_says_what_it_is(self, engine, info):
        assert (info.name, info.model, info.max_model_len) == ("echo", "echo", 512)
        assert info.max_in_flight == 24 * info.num_replicas
        assert info.version


PATHS = {
    "/v1/completions": ({"prompt": [[5, 6], "b"]}, lambda b: [x["text"] for x in b["choices"]] == ["5 6", "b"]),
    "/v1/responses": ({"input": "a b"}, lambda b: b["output"][0]["content"][0]["text"] == "a b"),
    "/v1/embeddings": ({"input": ["a", "b"]}, lambda b: len(b["data"][1]["embedding"]) == 16),
    "/pooling": ({"input": "a b"}, lambda b: len(b["data"][0]["data"]) == 2),
}  # fmt: skip


@pytest.mark.parametrize("path", PATHS)
def test_every_path_is_answered_in_the_servers_shape(path):
    body, read = PATHS[path]
    assert read(body_of(answer(call(0, path, **body), config())))


def test_the_last_message_of_a_user_is_the_prompt_with_a_word_for_each_image():
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    parts = [{"type": "text", "text": "what is it"}, image]
    messages = [{"role": "user", "content": parts}, {"role": "assistant", "content": "ha"}]
    text = body_of(answer(call(0, messages=messages), config()))["choices"][0]["message"]["content"]
    assert text.startswith("what is it [image:")


def test_a_body_that_is_no_request_is_refused():
    for body in (b"nope", b"[]", json.dumps({"messages": []}).encode(), b"{}"):
        reply = answer(type(call(0))(key=("c", 0), path=CHAT, body=body), config())
        assert code_of(reply) in ("invalid_request", "invalid_parameter")


def test_a_stop_ends_the_loading(echo_never_loads):
    stop = Flag()
    stop.set()
    with pytest.raises(Interrupted):
        create_engine(config()).open(stop)
