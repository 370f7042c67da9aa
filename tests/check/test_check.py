"""`batchinfer check`: what is wrong is found before anything is paid for, all of it at once."""

import json
import shutil
from functools import partial
from typing import Any

import msgspec
import pytest

from batchinfer.check import estimate
from batchinfer.check.machine import Machine, problems_of
from batchinfer.check.model import has_chat_template, memory_on
from batchinfer.core.errors import ConfigError
from batchinfer.engines.engine_config import EngineConfig
from batchinfer.engines.gpus import Gpu
from batchinfer.engines.models import ModelInfo
from batchinfer.storage.opening import open_store
from echo_server import fake_endpoint
from making import ECHO, make_job, run_worker_here
from models import DEMO_MODEL

MODEL = str(DEMO_MODEL)
LLAMA_8B = ModelInfo(
    identity="",
    max_model_len=8192,
    parameter_bytes=16 << 30,
    kv_bytes_per_token=131_072,
    num_heads=32,
    num_kv_heads=8,
)


@pytest.fixture
def check(call):
    return partial(call, "check")


@pytest.fixture
def job(tmp_path):
    make_job(tmp_path / "job", rows=60, per_chunk=10, workers=2)
    return str(tmp_path / "job")


def messages(result: dict[str, Any], level: str = "error") -> list[str]:
    return [one["message"] for one in result["problems"] if one["level"] == level]


def test_a_sound_rehearsal_is_ok_leaves_no_trace_and_says_what_it_did_not_check(check, job):
    run = f"{job}/runs/a"
    done = check("--job", job, "--output", run, *ECHO, "--show", "1")
    assert (done.status, done.result["status"], done.result["problems"]) == (0, "OK", [])
    assert (done.result["rows"], done.result["chunks"]) == (60, 6)
    assert done.result["storage"] == {"url": run}
    assert json.loads(done.result["requests"][0])["prompt"].startswith("hello row 0")
    assert len(done.result["requests"]) == 1
    assert done.result["lengths"]["is_estimate"]
    for said in ("hello row 0", "that the model is there", "fit the model's length", "estimated"):
        assert said in done.err
    assert list(open_store(run).list("")) == []


@pytest.mark.full
def test_prompts_are_measured_with_the_model_s_own_tokenizer(check, job):
    options = ("--job", job, "--model", MODEL, "--prompt-column", "prompt", "--gpu", "L4:2,T4")
    done = check(*options, "--max-model-len", "30", "--max-tokens", "20")
    assert done.status == 0
    assert done.result["memory"]["replicas"] == 1, "that of the smaller kind"
    assert done.result["memory"]["rows_at_once"] > 1
    assert not done.result["lengths"]["is_estimate"]
    assert done.result["lengths"]["longest"] > done.result["lengths"]["mean"] > 5
    assert "exceed the model's 30 tokens" in messages(done.result, "warning")[0]
    assert "prompt tokens" in done.err
    assert "not checked" not in done.err


def test_some_bad_rows_are_a_warning_and_bad_rows_alone_an_error(check, tmp_path):
    source = tmp_path / "rows.jsonl"
    source.write_text('{"prompt": "a"}\n' * 9 + '{"other": 1}\n')
    done = check(str(source), *ECHO)
    assert done.status == 0
    assert "1 of 10 sample rows" in messages(done.result, "warning")[0]
    source.write_text('{"prompt": null}\n')
    assert check(str(source), *ECHO).status == 2


def test_an_estimate_counts_the_load_of_the_model_that_was_measured(monkeypatch):
    measured = {"rate": 1.0, "load_seconds": 1200.0, "accelerator": "L4", "gpus": 1}
    monkeypatch.setattr(estimate, "measure_run", lambda _: measured)
    found = estimate.estimate(3600, {"rate_from": "run", "workers": 2})["estimate"]
    assert found["worker_hours"] == pytest.approx(1 + 2 * (estimate.START_SECONDS + 1200) / 3600)


@pytest.mark.full
def test_rows_that_the_model_s_chat_template_refuses_are_a_problem_in_its_words(check, tmp_path):
    model, source = tmp_path / "model", tmp_path / "rows.jsonl"
    shutil.copytree(MODEL, model)
    (model / "chat_template.jinja").write_text(
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
        "{{ messages[0].content }}{{ x.y }}"
    )
    source.write_text('{"prompt": "a"}\n')
    options = (str(source), "--model", str(model), "--prompt-column", "prompt", "--as-chat")
    assert check(*options).status == 0, "other failures of a template are not the server's"
    refused = check(*(options := (*options, "--system-prompt", "Be brief.")))
    (found,) = messages(refused.result)
    assert found == "1 of 1 sample rows would be invalid_request; row 0: no system role"
    another = check(*options, "--", "--chat-template", "{{ messages }}")
    assert another.status == 0, "the server uses another template"


@pytest.mark.parametrize("kind", ["constraint", "tools"])
def test_a_column_of_the_rows_own_choice_that_no_row_has_is_an_error(kind, check, tmp_path):
    """A row may lack it, so all rows would be answered as if the option had not been given."""
    source, late = tmp_path / "rows.jsonl", tmp_path / "late.jsonl"
    source.write_text('{"prompt": "a"}\n' * 2000)
    late.write_text('{"prompt": "a"}\n' * 2000 + '{"prompt": "a", "mine": null}\n')
    done = check(str(source), *ECHO, "--as-chat", "--column", f"{kind}=mine")
    assert done.status == 2
    [found] = messages(done.result)
    assert f"rows.jsonl: has no column 'mine' (from --column {kind})" in found
    assert check(str(source), str(late), *ECHO, "--as-chat", "--column", f"{kind}=mine").status == 0


def test_source_is_checked_before_it_is_split_and_its_time_and_cost_are_told(check, tmp_path):
    source = tmp_path / "rows.jsonl"
    source.write_text("".join(f'{{"prompt": "row {row}"}}\n' for row in range(1000)))
    asked = (str(source), *ECHO, "--sample-rows", "20", "--rate", "0.5", "--price-per-hour", "2")
    done = check(*asked, "--hours", "1", "--max-cost", "1", "--max-hours", "9", "--job", "other")
    assert done.status == 0
    assert (done.result["rows"], done.result["sample"]["rows"]) == (1000, 20)
    assert done.result["estimate"]["workers"] == 1
    assert done.result["estimate"]["cost"] == pytest.approx((2000 + 600) / 3600 * 2)
    [beside, found] = messages(done.result, "warning")
    assert beside == "--job, --manifest: are not looked at beside SOURCE"
    assert found == "--max-cost 1 is below the estimate of 1.444"


def test_rate_comes_from_an_earlier_run(check, job):
    run_worker_here(job, f"{job}/runs/a")
    result = check("--job", job, *ECHO, "--rate-from", f"{job}/runs/a", "--gpu", "L4:2").result
    assert (result["status"], result["measured"]["rows"]) == ("OK", 60)
    assert result["estimate"]["rate"] == result["measured"]["rate"] > 0
    assert result["estimate"]["price_source"]


def test_an_endpoint_is_asked_whether_it_is_there_and_has_the_model(check, job):
    with fake_endpoint() as endpoint:
        url = ("--engine", "openai", "--base-url", endpoint.url)
        remote = (*url, "--prompt-column", "prompt", "--as-chat")
        assert check("--job", job, *remote, "--model", "echo-model").status == 0
        done = check("--job", job, *remote, "--model", "other")
        assert done.status == 2
        assert "has no model 'other', but echo-model" in messages(done.result)[0]
    done = check("--job", job, *remote, "--model", "echo-model")
    assert done.status == 2
    assert "is not reached (no answer: ClientConnectorError" in messages(done.result)[0]


# --------------------------------------------------------------------------- models


@pytest.mark.parametrize(
    ("gpu", "typed", "length", "hint"),
    [
        ("T4", "--max-model-len 40000", 40_000, "more or larger GPUs, or a quantized model"),
        ("L4", "--max-model-len 40000", 40_000, "--max-model-len 22112, or more or larger GPUs"),
        ("V100", "--max-model-len 4K", 4096, ""),
        ("V100", "--max-model-len 2.5k", 2500, ""),
        ("V100", "--max-model-len auto", 8192, ""),
    ],
)
def test_memory_that_is_not_enough_is_said_by_options_as_vllm_reads_them(gpu, typed, length, hint):
    config = EngineConfig(model="m", server_args=typed.split())
    with pytest.raises(ConfigError, match=f"less than one row of {length:,}") as caught:
        memory_on(gpu, config, LLAMA_8B, None, 0)
    assert hint in caught.value.hint


def test_a_chat_template_is_found_among_the_model_s_files(tmp_path):
    assert has_chat_template(EngineConfig(model=MODEL))
    (tmp_path / "config.json").write_text("{}")
    assert not has_chat_template(EngineConfig(model=str(tmp_path)))
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    assert has_chat_template(EngineConfig(model=str(tmp_path)))
    assert has_chat_template(EngineConfig(engine="openai", model="m"))
    assert not has_chat_template(EngineConfig(engine="echo"))


SOUND = Machine(
    vllm="0.32.0", cuda="13.0", driver="580.95", gpus=[Gpu(id="0"), Gpu(id="1")], has_compiler=True,
    memory=1 << 40, shared_memory=1 << 34, free={"HF_HOME": 1 << 40, "TMPDIR": 1 << 40}, open_files=65536,
)  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({}, []),
        ({"cuda": ""}, [("warning", "this vLLM is for the CPU")]),
        ({"driver": "", "gpus": []}, [("error", "no NVIDIA driver answers")]),
        ({"driver": "575.1"}, [("error", "driver 575.1 is too old for CUDA 13.0")]),
        ({"free": {"HF_HOME": 1 << 30}}, [("warning", "1 GiB of disk are free")]),
    ],
)
def test_what_is_wrong_with_a_machine_is_named(changes, found):
    problems = problems_of(msgspec.structs.replace(SOUND, **changes))
    assert [(level, text) for level, text, _ in problems] == found
