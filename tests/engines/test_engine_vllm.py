"""Real vLLM. Every start costs seconds, so most tests share one engine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from pathlib import Path

import msgspec
import pytest

from batchinfer.core.errors import ConfigError, EngineDied, EngineLoadError, Interrupted
from batchinfer.core.records import Request, Sampling
from batchinfer.engines import create_engine
from batchinfer.engines.vllm_engine import VllmEngine
from batchinfer.prompts.constraint_host import broken_rule
from engine_contract import EngineContract, Flag, ListSource, drive, requests

pytestmark = pytest.mark.vllm


class TestVllmContract(EngineContract):
    @pytest.fixture
    def engine(self, vllm_engine):
        return vllm_engine


def ask(engine, **sampling):
    """One request's completion."""
    text = sampling.pop("text", "Once upon a time")
    request = Request(key=("c", 0), text=text, sampling=Sampling(**{"max_tokens": 8, **sampling}))
    return drive(engine, ListSource([request]))["c", 0]


@pytest.fixture(scope="module")
def reference(vllm_config):
    """vLLM's own LLM class over the same model, in this process."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
    import vllm

    llm = vllm.LLM(
        model=vllm_config.model,
        dtype="float32",
        enforce_eager=True,
        max_model_len=512,
        max_num_seqs=16,
        enable_chunked_prefill=False,
        **vllm_config.engine_args,
    )
    yield llm
    llm.llm_engine.engine_core.shutdown()


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.0},
        {"temperature": 0.9, "seed": 11, "top_p": 0.9, "repetition_penalty": 1.1},
    ],
    ids=["greedy", "seeded"],
)
def test_answers_equal_those_of_one_big_generate(vllm_engine, reference, sampling):
    import vllm

    rows = requests(40, max_tokens=24, **sampling)
    found = drive(vllm_engine, ListSource(rows))
    params = vllm.SamplingParams(max_tokens=24, **sampling)
    expected = reference.generate([row.text for row in rows], params, use_tqdm=False)
    for row, output in zip(rows, expected, strict=True):
        choice = found[row.key].choices[0]
        assert choice.text == output.outputs[0].text
        assert choice.num_tokens == len(output.outputs[0].token_ids)
        assert choice.finish_reason == output.outputs[0].finish_reason
        assert found[row.key].prompt_tokens == len(output.prompt_token_ids)


def test_messages_go_through_the_models_template(vllm_engine, reference):
    import vllm

    messages = [{"role": "user", "content": "hello"}]
    request = Request(
        key=("c", 0), messages=messages, sampling=Sampling(max_tokens=6, temperature=0.0)
    )
    found = drive(vllm_engine, ListSource([request]))["c", 0]
    params = vllm.SamplingParams(max_tokens=6, temperature=0.0)
    expected = reference.chat(messages, params, use_tqdm=False)[0]
    assert found.choices[0].text == expected.outputs[0].text
    assert found.prompt_tokens == len(expected.prompt_token_ids)


def test_several_choices_differ_and_repeat_with_their_seed(vllm_engine):
    first = ask(vllm_engine, n=3, temperature=1.0, seed=5, max_tokens=16)
    again = ask(vllm_engine, n=3, temperature=1.0, seed=5, max_tokens=16)
    texts = [choice.text for choice in first.choices]
    assert len(set(texts)) == 3
    assert texts == [choice.text for choice in again.choices]


def test_several_choices_at_temperature_0_are_equal(vllm_engine):
    found = ask(vllm_engine, n=2, temperature=0.0)
    assert found.failure is None
    assert found.choices[0].text == found.choices[1].text
    assert [choice.index for choice in found.choices] == [0, 1]


def test_best_of_keeps_the_likeliest_per_token(vllm_engine):
    sampling = {"temperature": 1.0, "seed": 3, "max_tokens": 12}
    every = ask(vllm_engine, n=5, logprobs=0, **sampling)
    best = ask(vllm_engine, n=2, best_of=5, **sampling)

    def mean(choice):
        return choice.cumulative_logprob / choice.num_tokens

    ranked = sorted(every.choices, key=mean, reverse=True)
    assert [choice.text for choice in best.choices] == [choice.text for choice in ranked[:2]]
    assert best.choices[0].logprobs is None
    assert best.completion_tokens == sum(choice.num_tokens for choice in every.choices)


def test_log_probabilities_carry_the_tokens_texts(vllm_engine):
    found = ask(vllm_engine, logprobs=3, prompt_logprobs=2, temperature=0.0, max_tokens=5)
    choice = found.choices[0]
    assert len(choice.logprobs) == 5
    for position in choice.logprobs:
        assert len(position.top) == 3
        assert position.top[0] == (position.token, position.logprob)
        assert position.token_id >= 0
    total = sum(position.logprob for position in choice.logprobs)
    assert choice.cumulative_logprob == pytest.approx(total, rel=1e-4)
    prompt = "".join(each.token for each in found.prompt_logprobs[1:])
    assert prompt == "nce upon a time"
    assert all(len(each.top) == 2 for each in found.prompt_logprobs[1:])


def test_stop_strings_end_the_answer(vllm_engine):
    whole = ask(vllm_engine, temperature=0.0, max_tokens=32).choices[0].text
    stop = whole[8:10]
    found = ask(vllm_engine, temperature=0.0, max_tokens=32, stop=[stop]).choices[0]
    assert found.finish_reason == "stop"
    assert found.stop_reason == stop
    assert found.text == whole[: whole.index(stop)]
    kept = ask(
        vllm_engine, temperature=0.0, max_tokens=32, stop=[stop], include_stop_str_in_output=True
    )
    assert kept.choices[0].text == whole[: whole.index(stop)] + stop


def test_bad_prompts_and_parameters_fail_alone_with_their_code(vllm_engine):
    good = Sampling(max_tokens=4)
    bad = {
        1: ({"text": "x" * 5000}, good, "prompt_too_long"),
        2: ({"text": ""}, good, "empty_prompt"),
        3: ({"token_ids": []}, good, "empty_prompt"),
        4: ({"token_ids": [5] * 512}, good, "prompt_too_long"),
        5: ({"token_ids": [999_999]}, good, "engine_rejected"),
        6: ({"text": "hi"}, Sampling(temperature=-1.0), "invalid_parameter"),
        7: ({"text": "hi"}, Sampling(top_p=2.0), "invalid_parameter"),
        8: ({"text": "hi"}, Sampling(extra={"no_such": 1}), "invalid_parameter"),
        9: ({"text": "hi"}, Sampling(extra={"allowed_token_ids": [10**6]}), "invalid_parameter"),
        10: ({"text": "hi"}, Sampling(logit_bias={"a": 1.0}), "invalid_parameter"),
        11: ({"text": "hi"}, Sampling(logprobs=5000), "invalid_parameter"),
        12: ({"text": "hi"}, Sampling(structured={"json": {"type": 7}}), "invalid_parameter"),
        13: ({"text": "hi"}, Sampling(structured={"yaml": 1}), "invalid_parameter"),
        14: ({"text": "hi"}, Sampling(n=3, best_of=2), "invalid_parameter"),
        15: ({"text": "hi \ud800"}, good, "engine_rejected"),
        16: ({"text": "hi"}, Sampling(max_tokens=0), "invalid_parameter"),
        17: ({"messages": [{"role": "user"}, 3]}, good, "engine_rejected"),
    }
    rows = []
    for index in range(20):
        prompt, sampling, _ = bad.get(index, ({"text": f"good {index}"}, good, None))
        rows.append(Request(key=("c", index), sampling=sampling, **prompt))
    found = drive(vllm_engine, ListSource(rows))
    codes = {
        index: found["c", index].failure.code for index in range(20) if found["c", index].failure
    }
    assert codes == {index: code for index, (_, _, code) in bad.items()}


def test_a_parameter_of_vllms_own_gets_through(vllm_engine):
    found = ask(vllm_engine, extra={"allowed_token_ids": [40]}, max_tokens=5, temperature=0.0)
    assert len(set(found.choices[0].text)) == 1
    biased = ask(vllm_engine, logit_bias={"41": 100.0}, max_tokens=5, temperature=0.0)
    assert len(set(biased.choices[0].text)) == 1


def test_structured_output_follows_its_schema(vllm_engine):
    schema = {
        "type": "object",
        "properties": {"kind": {"enum": ["good", "bad"]}, "sure": {"type": "boolean"}},
        "required": ["kind", "sure"],
        "additionalProperties": False,
    }
    structured = {"json": schema, "whitespace_pattern": ""}
    rows = requests(4, temperature=1.0, seed=1, max_tokens=200, structured=structured)
    for completion in drive(vllm_engine, ListSource(rows)).values():
        assert completion.failure is None, completion.failure
        if completion.choices[0].finish_reason == "stop":
            assert json.loads(completion.choices[0].text)["kind"] in {"good", "bad"}
    choice = ask(vllm_engine, structured={"choice": ["yes", "no"]}, max_tokens=20)
    assert choice.choices[0].text in {"yes", "no"}


SCHEMAS_WITH_RULES = [
    {"type": "integer", "multipleOf": 3},
    {"type": ["number", "null"], "multipleOf": 3},
    {"multipleOf": 3},
    {"type": "array", "uniqueItems": True},
    {"type": "array", "contains": {}},
    {"type": "string", "format": "email"},
    {"type": "string", "format": "phone"},
    {"type": "string", "pattern": "a+"},
    {"type": "string", "pattern": "a+", "maxLength": 3},
    {"type": "string", "maxLength": 3},
    {"type": "object", "propertyNames": {"pattern": "a"}},
    {"type": "object", "propertyNames": {"pattern": "a", "maxLength": 3}},
    {"type": "object", "propertyNames": {}, "properties": {"a": {}}},
    {"type": "object", "propertyNames": {}, "patternProperties": {"a": {}}},
    {"type": "object", "propertyNames": {}, "unevaluatedProperties": False},
    {"type": "object", "patternProperties": {"a": {}}},
    {"type": "object", "patternProperties": {"a": {}, "b": {}}},
    {"type": "object", "patternProperties": {"a": {}}, "properties": {"b": {}}},
    {"allOf": [{"type": "string"}]},
    {"allOf": [{"type": "string"}, {"minLength": 3}]},
    {"type": {"a": 1}},
    {"properties": {"a": {"anyOf": [{"type": "null"}, {"type": "array", "uniqueItems": True}]}}},
]


def test_rules_that_xgrammar_does_not_keep_are_those_that_vllm_refuses():
    from vllm.v1.structured_output.backend_xgrammar import has_xgrammar_unsupported_json_features

    found = [bool(broken_rule(schema)) for schema in SCHEMAS_WITH_RULES]
    assert found == list(map(has_xgrammar_unsupported_json_features, SCHEMAS_WITH_RULES))
    assert found.count(True) == 14


def test_times_and_counters_are_told(vllm_engine):
    before = vllm_engine.stats()
    found = ask(vllm_engine, max_tokens=12, ignore_eos=True)
    assert found.generation_seconds > 0
    assert found.queue_seconds >= 0
    after = vllm_engine.stats()
    assert after.steps - before.steps >= 12
    assert after.completion_tokens - before.completion_tokens == 12


def test_a_shared_prefix_is_computed_once(vllm_engine):
    text = "the same long beginning of every prompt " * 6
    ask(vllm_engine, text=text)
    found = ask(vllm_engine, text=text + "and then an end")
    assert found.cached_tokens >= 192


def opened(config, **changes):
    engine = create_engine(msgspec.structs.replace(config, **changes))
    info = engine.open(Flag())
    return engine, info


def test_two_replicas_share_the_stream_and_count_their_preemptions(vllm_config):
    # The cache holds two rows at full length, of the four that run at once. Without a prefix cache, since its counters
    # would tell of preemptions, too.
    small = {"kv_cache_memory_bytes": 9 << 16, "block_size": 32, "enable_prefix_caching": False}
    engine, info = opened(
        vllm_config, replicas=2, max_num_seqs=4, max_model_len=128, engine_args=small
    )
    try:
        assert (info.num_replicas, info.max_num_seqs, info.max_in_flight) == (2, 8, 12)
        assert 0 < info.import_seconds < info.load_seconds - info.model_seconds < info.load_seconds
        drive(engine, ListSource(requests(60)))
        tokens = [replica.stats.completion_tokens for replica in engine.replicas]
        # The replica with free slots gets the next rows. On a busy machine that is not half each, but never all.
        assert min(tokens) > 0.1 * sum(tokens)
        assert engine.stats().preemptions == 0
        long = requests(16, max_tokens=100, ignore_eos=True)
        found = drive(engine, ListSource(long))
        assert {each.completion_tokens for each in found.values()} == {100}
        assert engine.stats().preemptions > 0, "what does not fit is computed again, and counted"
    finally:
        engine.close()


def family_of(pid: int) -> list[int]:
    """Return a process and all its descendants."""
    pids = [pid]
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            pids += family_of(int(child))
    return pids


def wait_until_gone(pids, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while any(is_running(pid) for pid in pids):
        assert time.monotonic() < end, f"still there: {[pid for pid in pids if is_running(pid)]}"
        time.sleep(0.05)


def is_running(pid: int) -> bool:
    """Whether a process is alive and no zombie. An orphan may stay a zombie, as no parent waits for it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def core_of(pid: int, seconds: float = 60.0) -> int:
    """Return the process of the engine core that a host started."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for child in family_of(pid)[1:]:
            try:
                command = Path(f"/proc/{child}/comm").read_text()
            except OSError:
                continue
            if "EngineCor" in command:
                return child
        time.sleep(0.05)
    raise AssertionError("no engine core")


def test_an_engine_core_that_is_killed_ends_the_engine_with_a_reason(vllm_config, monkeypatch):
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    monkeypatch.setattr("batchinfer.engines.restarts.MAX_RESTARTS", 0)
    engine, _ = opened(vllm_config)
    try:
        pids = family_of(engine.replicas[0].pid)
        core = core_of(engine.replicas[0].pid)

        def kill_once_busy() -> None:
            source = ListSource(requests(500, max_tokens=200, ignore_eos=True))
            killed = False
            for _ in engine.generate(source, Flag()):
                if engine.stats().steps > 3 and not killed:
                    killed = True
                    os.kill(core, signal.SIGKILL)

        with pytest.raises(EngineDied, match="engine core's process ended") as caught:
            kill_once_busy()
        assert caught.value.in_flight
    finally:
        engine.close()
    wait_until_gone(pids)


@pytest.mark.slow  # tests/worker/test_worker_vllm.py sends a worker SIGTERM while it loads
def test_a_stop_while_vllm_loads_is_obeyed_at_once(vllm_config):
    engine = create_engine(vllm_config)
    stop = Flag()
    pids = []

    def set_once_importing() -> None:
        while not engine.replicas:
            time.sleep(0.01)
        time.sleep(2.0)
        pids.extend(family_of(engine.replicas[0].pid))
        stop.set()

    thread = threading.Thread(target=set_once_importing)
    thread.start()
    with pytest.raises(Interrupted):
        engine.open(stop)
    thread.join()
    wait_until_gone(pids)


@pytest.mark.slow  # tests/worker/test_worker_vllm.py gives a worker such options
def test_an_option_that_vllm_does_not_take_is_a_configuration_error(vllm_config):
    engine = create_engine(msgspec.structs.replace(vllm_config, dtype="float99"))
    with pytest.raises(ConfigError, match="float99") as caught:
        engine.open(Flag())
    assert caught.value.hint
    engine.close()


def test_a_key_value_cache_that_holds_no_sequence_is_said_in_vllms_words(vllm_config):
    arguments = {**vllm_config.engine_args, "kv_cache_memory_bytes": 1 << 16}
    # In this process, which has imported vLLM already; a pool passes on what its processes say.
    engine = VllmEngine(msgspec.structs.replace(vllm_config, engine_args=arguments))
    with pytest.raises(EngineLoadError, match="cache blocks"):
        engine.open(Flag())
    engine.close()


def test_a_model_that_does_not_exist_is_refused_before_vllm_is_started(vllm_config):
    engine = create_engine(msgspec.structs.replace(vllm_config, model="/no/such/model"))
    with pytest.raises(ConfigError, match="/no/such/model"):
        engine.open(Flag())


@pytest.mark.parametrize("is_lasting", [False, True])
def test_an_inspection_of_the_models_class_that_fails_is_tried_again(
    vllm_config, monkeypatch, is_lasting
):
    """Under a heavy load, vLLM's process that inspects the class may be killed."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.models import registry

    from batchinfer.engines.vllm_loading import create_config

    calls = []

    def killed(function):
        calls.append(function)
        if len(calls) > 1 and not is_lasting:
            return function()  # here, since a process would import vLLM once more
        cause = subprocess.CalledProcessError(-signal.SIGKILL, "python")
        raise RuntimeError("Error raised in subprocess:\n") from cause

    monkeypatch.setattr(registry, "_run_in_subprocess", killed)
    monkeypatch.setattr(
        registry._LazyRegisteredModel, "_load_modelinfo_from_cache", lambda *_: None
    )
    registry._try_inspect_model_cls.cache_clear()
    arguments = EngineArgs(model=vllm_config.model, max_model_len=512)
    try:
        if is_lasting:
            with pytest.raises(EngineLoadError, match="ended by itself") as caught:
                create_config(vllm_config, arguments.create_engine_config)
            assert caught.value.exit_status == 33
        else:
            found = create_config(vllm_config, arguments.create_engine_config)
            assert found.model_config.max_model_len == 512
        # What is found on disk is ignored here, so a new attempt at the configuration inspects once more.
        assert len(calls) == (2 if is_lasting else 3)
    finally:
        registry._try_inspect_model_cls.cache_clear()
