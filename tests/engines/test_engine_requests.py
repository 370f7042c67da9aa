"""The pure functions of the vLLM engine, which run without vLLM."""

from __future__ import annotations

import errno
import subprocess
from types import SimpleNamespace

import pytest

from batchinfer.core.errors import ConfigError, RowError
from batchinfer.core.records import Request, Sampling
from batchinfer.engines.config import EngineConfig
from batchinfer.engines.vllm_engine import StepRecorder, install
from batchinfer.engines.vllm_loading import engine_arguments, failed_inspection, refused_config
from batchinfer.engines.vllm_requests import completion_of, sampling_kwargs


def output(texts, *, finish_reason="stop", logprob=-1.0):
    """A finished RequestOutput with one answer per text, each of as many tokens as characters."""
    answers = [
        SimpleNamespace(
            text=text,
            token_ids=list(range(len(text))),
            finish_reason=finish_reason,
            stop_reason=None,
            cumulative_logprob=logprob * (index + 1),
            logprobs=None,
        )
        for index, text in enumerate(texts)
    ]
    return SimpleNamespace(
        outputs=answers,
        prompt_token_ids=[1, 2, 3],
        prompt_logprobs=None,
        num_cached_tokens=None,
    )


def completed(raw, **sampling):
    return completion_of(
        Request(key=("c", 1), text="x", sampling=Sampling(**sampling)), raw, (0.5, 2.0)
    )


def test_what_a_request_leaves_open_comes_from_the_model():
    defaults = {"temperature": 0.6, "top_k": 20}
    kwargs = sampling_kwargs(Sampling(temperature=0.1), defaults)
    assert (kwargs["temperature"], kwargs["top_k"], kwargs["max_tokens"]) == (0.1, 20, None)
    assert "top_p" not in kwargs
    assert defaults == {"temperature": 0.6, "top_k": 20}


def test_extra_parameters_come_last_but_not_those_that_the_adapter_decides():
    assert sampling_kwargs(Sampling(extra={"bad_words": ["x"]}), {})["bad_words"] == ["x"]
    for name in ("n", "output_kind", "_eos_token_id"):
        with pytest.raises(RowError, match=name):
            sampling_kwargs(Sampling(extra={name: 1}), {})


def test_best_of_generates_more_with_what_ranking_needs():
    kwargs = sampling_kwargs(Sampling(n=2, best_of=4, temperature=1.0), {})
    assert (kwargs["n"], kwargs["logprobs"]) == (4, 0)
    assert "logprobs" not in sampling_kwargs(Sampling(n=4, best_of=4, temperature=1.0), {})


def test_best_of_ranks_by_log_probability_per_token():
    # mean log-probabilities -1/1, -2/8, -3/3: the second answer is the best, the first and third are equal
    raw = output(["a", "bbbbbbbb", "ccc"])
    found = completed(raw, n=1, best_of=3)
    assert [choice.text for choice in found.choices] == ["bbbbbbbb"]
    assert found.choices[0].index == 0
    assert found.completion_tokens == 12


def test_an_answer_that_the_engine_broke_off_is_a_transient_failure():
    found = completed(output(["a"], finish_reason="abort"))
    assert found.failure.transient
    assert found.failure.code == "engine_error"
    assert found.choices == []


def step_stats(waiting: int):
    """The counters of one step, as vLLM's scheduler reports them."""
    return SimpleNamespace(num_waiting_reqs=waiting)


def test_times_follow_from_how_many_requests_wait(monkeypatch):
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr("time.monotonic", lambda: clock.now)
    recorder = StepRecorder()
    for request_id, num_sequences in (("a", 1), ("b", 2), ("c", 1)):
        recorder.note_added(request_id, num_sequences)
    clock.now = 1.0
    recorder.record(step_stats(waiting=1))  # a and both sequences of b run, c waits
    recorder.note_step()
    clock.now = 3.0
    recorder.record(step_stats(waiting=0), None, mm_cache_stats=None)
    recorder.note_step()
    clock.now = 7.0
    assert [recorder.seconds_of(name) for name in "abc"] == [(1.0, 6.0), (1.0, 6.0), (3.0, 4.0)]


def core_output(*events: str):
    """The engine core's output for one request in one step."""
    named = [SimpleNamespace(type=SimpleNamespace(name=name)) for name in events]
    return SimpleNamespace(events=named or None)


def test_preemptions_are_counted_in_every_requests_events_and_its_outputs_go_on():
    processor = SimpleNamespace(process_outputs=lambda outputs, **_: outputs, log_stats=True)
    recorder = install(SimpleNamespace(output_processor=processor))
    first = [core_output("QUEUED", "SCHEDULED"), core_output(), SimpleNamespace()]
    assert processor.process_outputs(first, iteration_stats=None) is first
    assert recorder.preemptions == 0
    processor.process_outputs([core_output("PREEMPTED", "SCHEDULED", "PREEMPTED"), core_output()])
    processor.process_outputs([core_output("PREEMPTED")])
    assert recorder.preemptions == 3


def test_a_cpu_gets_its_defaults_and_the_users_arguments_win():
    config = EngineConfig(model="m", engine_args={"enable_chunked_prefill": True})
    on_cpu = engine_arguments(config, is_cpu=True)
    assert on_cpu["kv_cache_memory_bytes"] == 1 << 30
    assert on_cpu["enforce_eager"] is True
    assert on_cpu["enable_chunked_prefill"] is True
    on_gpu = engine_arguments(config, is_cpu=False)
    assert not {"kv_cache_memory_bytes", "enforce_eager", "max_num_seqs"} & set(on_gpu)


def test_the_tokenizer_of_another_model_is_not_asked_for_this_ones_revision():
    config = EngineConfig(model="m", revision="abc")
    assert engine_arguments(config, is_cpu=True)["tokenizer_revision"] == "abc"
    other = EngineConfig(model="m", revision="abc", tokenizer="t")
    assert "tokenizer_revision" not in engine_arguments(other, is_cpu=True)


def test_files_that_transformers_misses_are_a_configuration_error_with_the_options():
    found = refused_config(EngineConfig(model="m"), OSError("no tokenizer\nfound"))
    assert isinstance(found, ConfigError)
    assert "--tokenizer" in found.hint
    assert "no tokenizer found" in found.message


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ValueError("max_model_len is too large"), 2),
        (FileNotFoundError(errno.ENOENT, "no such file"), 2),
        (OSError("no config there"), 2),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), 33),
        (BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"), 33),
        (OSError(errno.ENOSPC, "No space left on device"), 33),
        (MemoryError(), 33),
    ],
)
def test_a_fault_of_the_machine_is_no_mistake_of_the_user(error, status):
    assert refused_config(EngineConfig(model="m"), error).exit_status == status


@pytest.mark.parametrize(("returncode", "status"), [(1, 2), (-9, 33)])
def test_a_class_that_cannot_be_imported_is_told_from_an_inspection_that_was_killed(
    returncode, status
):
    error = RuntimeError("Error raised in subprocess:\nTraceback\nImportError: no timm\n")
    error.__cause__ = subprocess.CalledProcessError(returncode, "python")
    found = failed_inspection(EngineConfig(model="m"), error)
    assert found.exit_status == status
    assert found.message.endswith("ImportError: no timm")
    assert failed_inspection(EngineConfig(model="m"), OSError("no process")).exit_status == 33
