"""Options of an engine before anything is started, the commands of servers, and what replies mean."""

import json

import pytest

from batchinfer.core.errors import ConfigError
from batchinfer.core.records import Reply
from batchinfer.engines import create_engine, vllm_command
from batchinfer.engines.engine_config import EngineConfig, parse_args
from batchinfer.engines.gpus import Gpu
from batchinfer.engines.models import ModelInfo
from batchinfer.engines.replies import failure_of
from batchinfer.engines.targets import read_parameters
from batchinfer.engines.vllm_command import batch_sizes, write_vllm_command


@pytest.mark.parametrize("missing", ["vllm", "soundfile"])
def test_a_package_that_is_missing_is_said_before_anything_is_started(missing, monkeypatch):
    """Without soundfile the server loads, and then calls every sound an invalid file."""
    find = lambda name: None if name == missing else name  # noqa: E731
    monkeypatch.setattr("importlib.util.find_spec", find)
    with pytest.raises(ConfigError, match=f"the package {missing}"):
        create_engine(EngineConfig(model="m", task="transcribe"))


def test_typed_options_are_read_as_a_server_reads_them():
    typed = ["--enforce-eager", "--served-model-name", "a", "b",
             "--limit-mm-per-prompt", '{"image": 2}', "--bias", "-1.5", "-O3",
             "--middleware", "m1", "--middleware", "m2", "--hf-overrides.rope.factor=4"]  # fmt: skip
    assert parse_args(typed) == {
        "enforce_eager": True,
        "served_model_name": ["a", "b"],
        "limit_mm_per_prompt": {"image": 2},
        "bias": -1.5,
        "O3": True,
        "middleware": ["m1", "m2"],
        "hf_overrides.rope.factor": 4,
    }


def test_options_that_fit_a_server_to_its_machine_are_not_the_runs():
    typed = ["--gpu-memory-utilization", "0.5", "--max-num-seqs", "4", "--dtype", "float16",
             "--compilation-config.mode", "3", "--uds", "x", "--api-key", "secret"]  # fmt: skip
    config = EngineConfig(model="m", server_args=typed)
    assert config.answer_options == {"dtype": "float16"}


# --------------------------------------------------------------------------- commands


def command(monkeypatch, *arguments, is_cpu=False, **options):
    monkeypatch.setattr(vllm_command, "is_cpu_build", lambda: is_cpu)
    config = EngineConfig(model="org/name", server_args=list(arguments), **options)
    return write_vllm_command(config, "/folder", [], 256, 8192)


def value_of(found, option):
    """Value of an option that vLLM's parser would take: the last."""
    places = [place for place, each in enumerate(found) if each == option]
    return found[places[-1] + 1] if places else None


def test_typed_options_win_over_our_defaults_and_lose_to_what_we_decide(monkeypatch):
    typed = ["--max-num-seqs", "4", "--uds", "x", "--seed", "7", "--tool-call-parser", "hermes"]
    found = command(monkeypatch, *typed)
    assert value_of(found, "--max-num-seqs") == "4"
    assert value_of(found, "--uds") == "{socket}"
    assert value_of(found, "--seed") == "0"
    assert value_of(found, "--served-model-name") == "org/name"
    assert "--enable-auto-tool-choice" in found
    assert json.loads(value_of(found, "--structured-outputs-config"))["backend"] == "xgrammar"
    assert "--enforce-eager" not in found
    typed = command(monkeypatch, "--structured-outputs-config.backend", "guidance")
    assert "--structured-outputs-config" not in typed


def test_on_a_cpu_it_takes_little_memory_and_splits_no_prompt(monkeypatch):
    found = command(monkeypatch, is_cpu=True)
    assert value_of(found, "--kv-cache-memory-bytes") == str(1 << 30)
    assert {"--no-enable-chunked-prefill", "--enforce-eager"} <= {*found}


def test_a_tokenizer_of_another_repository_is_not_looked_for_at_the_models_commit(monkeypatch):
    found = command(monkeypatch, "--tokenizer", "org/other", revision="abc")
    assert value_of(found, "--tokenizer-revision") == "main"
    assert value_of(command(monkeypatch, revision="abc"), "--tokenizer-revision") is None


H200 = Gpu(id="0", name="H200", total_bytes=140 << 30)
A100 = Gpu(id="0", name="NVIDIA A100", total_bytes=80 << 30)
L4 = Gpu(id="0", name="NVIDIA L4", total_bytes=24 << 30)


@pytest.mark.parametrize(
    ("gpu", "length", "options", "expected"),
    [
        (None, 8192, {}, (256, 8192)),
        (None, 8192, {"server_args": ["--max-num-seqs", "2", "--max-model-len", "9"]}, (2, 4096)),
        (H200, 8192, {}, (1024, 16384)),
        (A100, 8192, {}, (256, 8192)),
        (L4, 32768, {}, (256, 8192)),
        # A step has room for the longest prompt, if it may not be divided.
        (L4, 32768, {"task": "embed"}, (256, 0)),
        (L4, 32768, {"server_args": ["--no-enable-chunked-prefill"]}, (256, 0)),
    ],
)
def test_steps_are_as_large_as_those_of_one_big_generate(gpu, length, options, expected):
    model = ModelInfo(identity="", max_model_len=length)
    assert batch_sizes(EngineConfig(model="m", **options), model, gpu) == expected
    images = ModelInfo(identity="", max_model_len=length, is_multimodal=True)  # one may be longer
    assert batch_sizes(EngineConfig(model="m", **options), images, gpu) == (expected[0], 0)


def test_a_schema_that_holds_itself_has_its_fields():
    tree = {"properties": {"text": {}}, "anyOf": [{"$ref": "#/components/schemas/Tree"}]}
    body = {"content": {"application/json": {"schema": tree}}}
    schemas = {
        "paths": {"/x": {"post": {"requestBody": body}}},
        "components": {"schemas": {"Tree": tree}},
    }
    assert read_parameters(json.dumps(schemas).encode(), "/x") == {"text"}


# --------------------------------------------------------------------------- replies


def error(**fields):
    return {"error": {"message": "m", **fields}}


@pytest.mark.parametrize(
    ("status", "body", "code", "param"),
    [
        (0, "died", "engine_crash", None),
        (400, error(code="context_length_exceeded", param="x"), "prompt_too_long", "x"),
        (400, error(param="body.stop"), "invalid_parameter", "stop"),
        (400, {"error_code": "BAD_REQUEST", "message": "m"}, "invalid_request", None),
        (422, {"object": "error", "message": "old"}, "invalid_request", None),
        (501, error(), "invalid_request", None),
        (503, "", "server_error", None),
    ],
)
def test_a_refusal_has_a_code_by_its_status_and_fields(status, body, code, param):
    data = body if isinstance(body, str) else json.dumps(body)
    failure = failure_of(Reply(key=("c", 0), status=status, body=data.encode()))
    assert (failure.code, failure.param) == (code, param)
    assert (failure.message == f"the server answered with status {status}") is (body == "")
