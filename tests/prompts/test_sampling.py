"""Sampling parameters as people have them in their scripts."""

from __future__ import annotations

import logging

import pytest

from batchinfer.cli.values import read_pairs
from batchinfer.core.errors import ConfigError
from batchinfer.core.records import Sampling
from batchinfer.prompts.parameters import ALIASES, make_sampling

# The generation config of a batch guide for transformers, as it is.
COPIED = (
    "num_return_sequences=3,repetition_penalty=1.18,max_new_tokens=500,temperature=0.5,top_p=0.5,top_k=20,"
    "do_sample=true,use_cache=false,prepend_bos=true"
)


def sampling(*arguments: str, **options: object) -> Sampling:
    return make_sampling(options, read_pairs("--sampling", arguments))


def test_a_copied_generation_config_means_what_it_meant(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    logging.getLogger("batchinfer").propagate = True
    assert sampling(COPIED) == Sampling(
        n=3, repetition_penalty=1.18, max_tokens=500, temperature=0.5, top_p=0.5, top_k=20
    )
    told = " ".join(record.getMessage() for record in caplog.records)
    assert "use_cache" in told
    assert "prepend_bos" in told


def test_no_sampling_is_temperature_0_whatever_else_the_config_holds() -> None:
    assert sampling("do_sample=false,temperature=0.7").temperature == 0
    assert sampling("temperature=0.7,do_sample=true").temperature == 0.7
    with pytest.raises(ConfigError, match="true or false"):
        sampling("do_sample=perhaps")


def test_pairs_win_over_options_and_unknown_names_go_to_the_engine() -> None:
    found = sampling('top_k=3,bad_words=["x"]', top_k=20, top_p=0.5, stop=None, seed="7")
    assert found == Sampling(top_k=3, top_p=0.5, extra={"bad_words": ["x"]})


def test_single_values_of_lists_are_lists_of_one() -> None:
    assert sampling("stop=END,eos_token_id=2") == Sampling(stop=["END"], stop_token_ids=[2])


def test_every_alias_is_a_field() -> None:
    assert set(ALIASES.values()) <= set(Sampling.__struct_fields__)


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("max_new_tokens=5,max_tokens=6", "same parameter"),
        ("num_beams=4", "no equivalent"),
        ("prepend_bos=false", "no equivalent"),
        ("length_penalty=2.0", "no equivalent"),
        ("seed=1", "the run's"),
        ("top_k=many", "top_k"),
        ("n=1.5", "n"),
    ],
)
def test_what_cannot_be_done_is_refused_not_ignored(argument: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        sampling(argument)


def test_what_asks_for_nothing_is_taken() -> None:
    assert sampling("num_beams=1,length_penalty=1.0,early_stopping=true") == Sampling()
