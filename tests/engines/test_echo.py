"""The echo engine, which answers in the worker's process."""

from __future__ import annotations

import base64
import json
import struct
import threading

import pytest

from batchinfer.core.errors import Interrupted
from batchinfer.engines import create_engine
from batchinfer.engines.config import EchoOptions, EngineConfig
from batchinfer.engines.echo import answer
from engine_contract import (
    CHAT,
    EngineContract,
    Flag,
    body_of,
    call,
    code_of,
)

LENGTH = ["--max-model-len", "512", "--max-num-seqs", "16"]


def config(**options):
    fields = {"engine": "echo", "server_args": LENGTH}
    echo = {
        name: options.pop(name) for name in list(options) if name in EchoOptions.__struct_fields__
    }
    return EngineConfig(**{**fields, **options}, echo=EchoOptions(**echo))


class Shared(EngineContract):
    @pytest.fixture(scope="class")
    @classmethod
    def opened(cls):
        engine = create_engine(cls.config)
        yield engine, engine.open(threading.Event())
        engine.close()

    @pytest.fixture
    def engine(self, opened):
        return opened[0]

    @pytest.fixture
    def info(self, opened):
        return opened[1]


class TestAtOnce(Shared):
    config = config()


class TestWithLatency(Shared):
    config = config(latency_seconds=0.002)


class TestReplicas(Shared):
    config = config(replicas=2)

    def test_they_say_what_they_are(self, engine, info):
        assert (info.name, info.model, info.num_replicas) == ("echo", "echo", 2)
        assert (info.max_model_len, info.max_in_flight) == (512, 48)
        assert info.version


@pytest.mark.parametrize(
    ("path", "body", "read"),
    [
        ("/v1/completions", {"prompt": [5, 6]}, lambda b: b["choices"][0]["text"] == "5 6"),
        ("/v1/completions", {"prompt": ["a", "b"]}, lambda b: len(b["choices"]) == 2),
        (
            "/v1/responses",
            {"input": "a b"},
            lambda b: b["output"][0]["content"][0]["text"] == "a b",
        ),
        ("/v1/embeddings", {"input": ["a", "b"]}, lambda b: len(b["data"][1]["embedding"]) == 16),
        ("/classify", {"input": "a"}, lambda b: b["data"][0]["label"] in ("yes", "no")),
        ("/pooling", {"input": "a b"}, lambda b: len(b["data"][0]["data"]) == 2),
        (
            "/pooling",
            {"input": "a", "task": "classify"},
            lambda b: 0 <= b["data"][0]["data"][0] <= 1,
        ),
        ("/score", {"text_1": "q", "text_2": ["a", "q"]}, lambda b: b["data"][1]["score"] > 0.99),
        (
            "/rerank",
            {"query": "q", "documents": ["a", "q"]},
            lambda b: b["results"][0]["index"] == 1,
        ),
    ],
)
def test_every_path_is_answered_in_the_servers_shape(path, body, read):
    assert read(body_of(answer(call(0, path, **body), config())))


def test_a_vector_as_base64_is_the_same_vector():
    numbers, packed = (
        body_of(answer(call(0, "/v1/embeddings", input="a", encoding_format=form), config()))
        for form in ("float", "base64")
    )
    found = struct.unpack("<16f", base64.b64decode(packed["data"][0]["embedding"]))
    assert list(found) == numbers["data"][0]["embedding"]


def test_the_last_message_of_a_user_is_the_prompt_with_a_word_for_each_image():
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    parts = [{"type": "text", "text": "what is it"}, image]
    messages = [{"role": "user", "content": parts}, {"role": "assistant", "content": "ha"}]
    text = body_of(answer(call(0, messages=messages), config()))["choices"][0]["message"]["content"]
    assert text.startswith("what is it [image:")


def test_a_body_that_is_no_request_is_refused():
    for body in (b"nope", b"[]", json.dumps({"messages": []}).encode(), b"{}"):
        reply = answer(call(0, CHAT), config())
        reply = answer(type(call(0))(key=("c", 0), path=CHAT, body=body), config())
        assert code_of(reply) in ("invalid_request", "invalid_parameter")


def test_a_stop_ends_the_loading():
    stop = Flag()
    stop.set()
    with pytest.raises(Interrupted):
        create_engine(config(load_seconds=60)).open(stop)
