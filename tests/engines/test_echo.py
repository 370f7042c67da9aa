"""The echo engine, which answers in the worker's process."""

import json
import threading

import pytest
from msgspec.structs import replace

from batchinfer.engines import create_engine
from batchinfer.engines.echo import answer
from batchinfer.engines.engine_config import EngineConfig
from engine_contract import CHAT, EngineContract, body_of, call, code_of

LENGTH = ["--max-model-len", "512", "--max-num-seqs", "16"]
ECHO = EngineConfig(engine="echo", server_args=LENGTH)


class TestContract(EngineContract):
    @pytest.fixture(scope="class", params=[{}, {"echo_latency_seconds": 0.002, "replicas": 2}])
    @classmethod
    def opened(cls, request):
        engine = create_engine(replace(ECHO, **request.param))
        yield engine, engine.open(threading.Event())
        engine.close()

    def test_it_says_what_it_is(self, engine, info):
        assert (info.name, info.model, info.max_model_len) == ("echo", "echo", 512)
        assert info.max_in_flight == 24 * info.num_replicas
        assert info.version


def test_each_prompt_of_a_completion_has_a_choice_and_each_token_a_vector():
    found = body_of(answer(call(0, "/v1/completions", prompt=[[5, 6], "b"]), ECHO))
    assert [each["text"] for each in found["choices"]] == ["5 6", "b"]
    pooled = body_of(answer(call(0, "/pooling", input="a b"), ECHO))
    assert len(pooled["data"][0]["data"]) == 2


def test_the_last_message_of_a_user_is_the_prompt_with_a_word_for_each_image():
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    parts = [{"type": "text", "text": "what is it"}, image]
    messages = [{"role": "user", "content": parts}, {"role": "assistant", "content": "ha"}]
    text = body_of(answer(call(0, messages=messages), ECHO))["choices"][0]["message"]["content"]
    assert text.startswith("what is it [image:")


def test_a_body_that_is_no_request_is_refused():
    for body in (b"nope", b"[]", json.dumps({"messages": []}).encode(), b"{}"):
        reply = answer(type(call(0))(key=("c", 0), path=CHAT, body=body), ECHO)
        assert code_of(reply) in ("invalid_request", "invalid_parameter")
