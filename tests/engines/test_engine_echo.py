from __future__ import annotations

import importlib.resources

import pytest

from batchinfer.core.errors import ConfigError, EngineDied, EngineStalled, Interrupted
from batchinfer.core.records import Request, Sampling
from batchinfer.engines import create_engine
from batchinfer.engines.config import EngineConfig, worker_args
from batchinfer.engines.echo import EchoEngine, prompt_text
from batchinfer.engines.vllm_loading import engine_arguments
from engine_contract import EngineContract, Flag, ListSource, drive, requests


class FakeClock:
    def __init__(self) -> None:
        self.now = 1000.0
        self.num_sleeps = 0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds >= 0
        self.num_sleeps += 1
        self.now += seconds


def opened(clock=None, **options) -> EchoEngine:
    engine = EchoEngine(EngineConfig(engine="echo", **options), clock or FakeClock())
    engine.open(Flag())
    return engine


class TestEchoContract(EngineContract):
    @pytest.fixture(params=[0.0, 0.01], ids=["at once", "with latency"])
    def engine(self, request):
        engine = opened(max_model_len=512, max_num_seqs=16, echo_latency_seconds=request.param)
        yield engine
        engine.close()


def test_the_answer_is_the_prompt():
    found = drive(opened(), ListSource(requests(2, text="  row {index}\tsays\n so ", max_tokens=9)))
    choice = found["c", 1].choices[0]
    assert choice.text == "  row 1\tsays\n so "
    assert choice.finish_reason == "stop"
    assert found["c", 1].completion_tokens == found["c", 1].prompt_tokens == 6


def test_max_tokens_cuts_after_so_many_words():
    found = drive(opened(), ListSource(requests(1, text="a\tb c d", max_tokens=2)))
    choice = found["c", 0].choices[0]
    assert (choice.text, choice.finish_reason, choice.num_tokens) == ("a\tb c", "length", 2)


def test_messages_give_the_last_user_message():
    messages = [
        {"role": "user", "content": "first"},
        {"role": "assistant", "content": "no"},
        {"role": "user", "content": [{"type": "text", "text": "second"}]},
        {"role": "assistant", "content": None},
    ]
    assert prompt_text(Request(key=("c", 0), messages=messages, sampling=Sampling())) == "second"


def test_log_probabilities_join_to_the_answer():
    found = drive(opened(), ListSource(requests(1, text=" a  b c", logprobs=2)))
    choice = found["c", 0].choices[0]
    assert "".join(position.token for position in choice.logprobs) == choice.text


def test_latency_takes_the_time_that_its_distribution_says():
    clock = FakeClock()
    engine = opened(clock, echo_latency_seconds=2.0, max_num_seqs=50)
    drive(engine, ListSource(requests(1000)))
    # 1000 requests of 2 s each on 50 slots
    assert 40 * 0.85 < clock.now - 1000 < 40 * 1.35


def test_latency_of_a_row_depends_neither_on_order_nor_on_its_neighbours():
    engine = opened(echo_latency_seconds=2.0)
    alone = engine._latency(("c", 7))
    drive(engine, ListSource(requests(20)))
    assert engine._latency(("c", 7)) == alone
    other = opened(echo_latency_seconds=2.0, echo_seed=1)
    assert other._latency(("c", 7)) != alone


def test_random_token_counts_stay_within_their_bounds_and_repeat():
    first = drive(opened(echo_tokens=(3, 9)), ListSource(requests(200, max_tokens=None)))
    again = drive(opened(echo_tokens=(3, 9)), ListSource(requests(200, max_tokens=None)))
    counts = [first["c", index].completion_tokens for index in range(200)]
    assert set(counts) == set(range(3, 10))
    assert counts == [again["c", index].completion_tokens for index in range(200)]
    assert first["c", 4].choices[0].text.startswith("row 4 says")


def test_a_marked_prompt_is_refused_alone():
    rows = requests(3, text="row {index}")
    found = drive(opened(echo_fail_marker="row 1"), ListSource(rows))
    assert found["c", 1].failure.code == "engine_rejected"
    assert found["c", 0].failure is None


def test_a_prompt_that_kills_takes_what_is_in_flight_along():
    engine = opened(echo_kill_marker="row 3", echo_latency_seconds=5.0, max_num_seqs=4)
    with pytest.raises(EngineDied) as caught:
        drive(engine, ListSource(requests(20, text="row {index} ")))
    assert ("c", 3) in caught.value.in_flight
    assert len(caught.value.in_flight) <= engine.max_in_flight


def test_a_prompt_that_kills_does_so_while_requests_keep_coming():
    engine = opened(echo_kill_marker="row 0 ", max_num_seqs=4)
    source = ListSource(requests(500, text="row {index} "))
    with pytest.raises(EngineDied):
        drive(engine, source)
    assert source.given < 500


def test_a_prompt_that_hangs_counts_as_a_stall_once_all_others_are_done():
    clock = FakeClock()
    engine = opened(clock, echo_hang_marker="row 3 ", stall_seconds=30)
    with pytest.raises(EngineStalled) as caught:
        drive(engine, ListSource(requests(20, text="row {index} ")))
    assert caught.value.in_flight == [("c", 3)]
    assert clock.now >= 1030


def test_a_stop_while_it_loads_is_obeyed():
    stop = Flag()
    stop.set()
    with pytest.raises(Interrupted):
        EchoEngine(EngineConfig(engine="echo", echo_load_seconds=60), FakeClock()).open(stop)


def test_the_caller_gets_control_at_least_once_a_second():
    clock = FakeClock()
    engine = opened(clock, echo_latency_seconds=30.0)
    before, longest = clock.now, 0.0
    for _ in engine.generate(ListSource(requests(3)), Flag()):
        longest = max(longest, clock.now - before)
        before = clock.now
    assert longest <= 1.0


def test_an_unknown_engine_is_refused_with_the_nearest_name():
    with pytest.raises(ConfigError) as caught:
        create_engine(EngineConfig(engine="vlm", model="m"))
    assert "vllm" in caught.value.hint


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"tensor_parallel_size": 0}, "--tensor-parallel-size"),
        ({"replicas": -1}, "--replicas"),
        ({"gpu_memory_utilization": 1.5}, "--gpu-memory-utilization"),
        ({"stall_seconds": 0}, "--stall-seconds"),
        ({"model": ""}, "--model"),
        ({"cpu_offload_gb": -1}, "--cpu-offload-gb"),
    ],
)
def test_a_value_that_cannot_work_is_refused_before_anything_starts(options, named):
    with pytest.raises(ConfigError, match=named):
        create_engine(EngineConfig(**{"model": "m", **options}))


@pytest.mark.parametrize(
    ("name", "option"),
    [
        ("model", "--model"),
        ("tokenizer", "--tokenizer"),
        ("tokenizer_revision", "--tokenizer"),
        ("hf_config_path", "--hf-config-path"),
        ("trust_remote_code", "--trust-remote-code"),
        ("tensor_parallel_size", "--tensor-parallel-size"),
        ("seed", "--seed"),
        ("gpus", "--gpus"),
    ],
)
def test_an_engine_argument_that_has_an_option_is_refused_with_that_option(name, option):
    """It would win over the option, and run.json, which records only options, would be wrong."""
    with pytest.raises(ConfigError, match=f"--engine-arg {name}: ") as caught:
        create_engine(EngineConfig(model="m", engine_args={"block_size": 32, name: "x"}))
    assert option in caught.value.hint


def test_every_option_that_vllm_gets_is_refused_as_an_engine_argument():
    values = engine_arguments(EngineConfig(model="m", revision="r"), is_cpu=False)
    for name in values.keys() - {"structured_outputs_config"}:  # a default of ours, and no option
        with pytest.raises(ConfigError, match=f"--engine-arg {name}: "):
            create_engine(EngineConfig(model="m", engine_args={name: 1}))


def test_what_may_decide_answers_is_of_the_run_and_what_a_machine_needs_is_not():
    machine = {"kv_cache_memory_bytes": 1, "block_size": 32, "data_parallel_size": 2}
    run = {"tokenizer_mode": "slow", "override_generation_config": {}, "an_argument_of_2030": 1}
    config = EngineConfig(engine_args={**machine, **run, "hf_token": "secret", "lora_dtype": None})
    assert config.answer_arguments == run


def test_the_list_of_a_machines_engine_arguments_comes_with_the_package():
    text = importlib.resources.files("batchinfer.engines").joinpath("worker_args.txt").read_text()
    patterns = [line for line in text.splitlines() if not line.startswith("#")]
    assert patterns == sorted(set(patterns))
    assert len(patterns) == 116
    assert all(pattern.removesuffix("*").isidentifier() for pattern in patterns)
    assert worker_args() == tuple(patterns)


def test_vllm_that_is_not_installed_is_a_sentence_with_the_command(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError) as caught:
        create_engine(EngineConfig(model="m"))
    assert "pip install" in caught.value.hint
