"""How the worker's options are spelled, read and written."""

from __future__ import annotations

import pytest

from batchinfer.cli.options import read_pairs
from batchinfer.core.errors import ConfigError


@pytest.mark.parametrize(
    ("arguments", "pairs"),
    [
        (["a=1", "b=x"], {"a": 1, "b": "x"}),
        (["a=1, b = x y ,c=none"], {"a": 1, "b": "x y", "c": None}),
        (['a=["x,y=1", "z"],b=2'], {"a": ["x,y=1", "z"], "b": 2}),
        (['a={"k": [1, 2]},b=False'], {"a": {"k": [1, 2]}, "b": False}),
        (["stop=,"], {"stop": ","}),
        (["stop=a, b"], {"stop": "a, b"}),
        (["bad-words=[]"], {"bad_words": []}),
        (["a=1", "a=2"], {"a": 2}),
        (["a="], {"a": ""}),
        (["a=1e-3x,b=1"], {"a": "1e-3x", "b": 1}),
        (["url=http://x/?q=1"], {"url": "http://x/?q=1"}),
        (["a=1,"], {"a": 1}),
        ([""], {}),
    ],
)
def test_pairs_are_read_with_commas_between_and_inside(
    arguments: list[str], pairs: dict[str, object]
) -> None:
    assert read_pairs("--sampling", arguments) == pairs


@pytest.mark.parametrize("argument", ["top_k", "=3", "3=x", '"a"=1'])
def test_what_is_no_pair_is_refused_with_an_example(argument: str) -> None:
    with pytest.raises(ConfigError, match="expected NAME=VALUE") as caught:
        read_pairs("--sampling", [argument])
    assert "top_k=20" in caught.value.hint
