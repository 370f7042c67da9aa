"""The run's options as fields of bodies, also as people have them in their scripts."""

from typing import Any

import pytest

from batchinfer.prompts.prompt_config import make_body
from batchinfer.prompts.types import Sampling


def sampling(**pairs: Any) -> dict[str, Any]:
    return make_body(Sampling(sampling=pairs))


def test_a_copied_generation_config_means_what_it_meant():
    """That of a batch guide for transformers."""
    same = {"repetition_penalty": 1.18, "temperature": 0.5, "top_p": 0.5, "top_k": 20}
    unsaid = {"do_sample": True, "use_cache": False, "prepend_bos": True}
    found = sampling(num_return_sequences=3, max_new_tokens=500, **same, **unsaid)
    assert found == {"n": 3, "max_tokens": 500} | same


def test_options_become_fields_and_pairs_win():
    pairs = {"top_k": 3, "bad_words": ["x"], "stop": "END", "eos_token_id": 2}
    names = {"thinking_budget": 9, "normalize": False}
    options = Sampling(max_tokens=5, temperature=0.0, stop=["x"], sampling=pairs | names)
    assert make_body(options) == {"max_tokens": 5, "temperature": 0.0} | {
        "thinking_token_budget": 9,
        "use_activation": False,
    } | {"top_k": 3, "stop": ["END"], "bad_words": ["x"], "stop_token_ids": [2]}


def test_no_sampling_is_temperature_0_whatever_else_is_given():
    assert sampling(do_sample=False, early_stopping=True, temperature=0.7) == {"temperature": 0.0}
    assert sampling(prepend_bos=False) == {"add_special_tokens": False}


@pytest.mark.parametrize(
    ("options", "fields"),
    [
        ({"choices": ["yes, no"]}, {"structured_outputs": {"choice": ["yes", "no"]}}),
        ({"choices": ["a, b", "c"]}, {"structured_outputs": {"choice": ["a, b", "c"]}}),
        ({"sampling": {"structured": {"regex": "a"}}}, {"structured_outputs": {"regex": "a"}}),
    ],
)
def test_constraints_have_the_names_of_the_server(options, fields):
    assert make_body(Sampling(**options)) == fields
