"""`convert mpt-to-ft`: the parts of all GPUs together are the source's weights; what does not fit is refused."""

import configparser
import itertools
import json
import re
from pathlib import Path

import numpy as np
import pytest

from batchinfer.cli.main import main

pytestmark = pytest.mark.vllm  # needs torch and transformers, which the extra `cpu` brings

WIDTH, INNER = 32, 128
BLOCK = {
    "norm_1": ("input_layernorm", None, (WIDTH,)),
    "norm_2": ("post_attention_layernorm", None, (WIDTH,)),
    "attn.Wqkv": ("attention.query_key_value", -1, (WIDTH, 3, WIDTH)),
    "attn.out_proj": ("attention.dense", 0, (WIDTH, WIDTH)),
    "ffn.up_proj": ("mlp.dense_h_to_4h", -1, (WIDTH, INNER)),
    "ffn.down_proj": ("mlp.dense_4h_to_h", 0, (INNER, WIDTH)),
}
"""FasterTransformer's name, the axis that GPUs share, and the whole array's shape there."""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    from transformers import MptConfig, MptForCausalLM

    folder = tmp_path_factory.mktemp("mpt")
    config = MptConfig(
        d_model=WIDTH, n_heads=4, n_layers=2, vocab_size=64, max_seq_len=48,
        bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    MptForCausalLM(config).save_pretrained(folder)
    return folder


def edited(model: Path, folder: Path, **values: object) -> Path:
    folder.mkdir()
    config = json.loads((model / "config.json").read_text()) | values
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").hardlink_to(model / "model.safetensors")
    return folder


def convert(*arguments: object) -> int:
    return main(["convert", "mpt-to-ft", *map(str, arguments)])


def joined(read: dict, name: str, axis: int | None, shape: tuple[int, ...]):
    """Put together what lies on all GPUs."""
    import torch

    if axis is None:
        return read[f"{name}.bin"]
    split = (-1, *shape[1:]) if axis == 0 else (*shape[:-1], -1)
    parts = [read[key].reshape(split) for key in sorted(read) if re.match(rf"{name}\.\d", key)]
    return torch.cat(parts, axis)


@pytest.mark.parametrize("gpus", [1, 2, 4])
@pytest.mark.parametrize("has_biases", [True, False])
def test_parts_equal_the_source(model, tmp_path, gpus, has_biases):
    import torch
    from safetensors.torch import load_file

    source, folder = load_file(model / "model.safetensors"), model
    biases = {
        name.replace("weight", "bias"): torch.rand(len(weight)) * has_biases
        for name, weight in source.items()
        if "wte" not in name
    }
    if has_biases:  # in a pickle of several types, with the head that is tied to the embeddings
        folder = edited(model, tmp_path / "mpt", no_bias=False)
        (folder / "model.safetensors").unlink()
        head = {"lm_head.weight": source["transformer.wte.weight"].bfloat16()}
        torch.save(source | biases | head, folder / "pytorch_model.bin")
    assert convert(folder, tmp_path / "ft", "--gpus", gpus) == 0
    made = tmp_path / f"ft/{gpus}-gpu"
    read = {path.name: torch.from_numpy(np.fromfile(path, "<f4")) for path in made.glob("*.bin")}
    for name, file in (("wte", "wte"), ("norm_f", "final_layernorm.weight")):
        expected = source[f"transformer.{name}.weight"].flatten()
        assert torch.equal(read[f"model.{file}.bin"], expected)
    for layer, (part, (ft_name, axis, shape)) in itertools.product("01", BLOCK.items()):
        stem, ft_stem = f"transformer.blocks.{layer}.{part}", f"model.layers.{layer}.{ft_name}"
        weight = joined(read, f"{ft_stem}.weight", axis, shape)
        bias = joined(read, f"{ft_stem}.bias", axis or None, shape[1:] or shape)
        expected = source[f"{stem}.weight"]
        assert torch.equal(weight.flatten(), expected.t().flatten())
        assert torch.equal(bias.flatten(), biases[f"{stem}.bias"])
    ini = configparser.ConfigParser()
    ini.read(made / "config.ini")
    found = {"head_num": "4", "inter_size": "128", "start_id": "1", "tensor_para_size": str(gpus)}
    assert found.items() <= ini["gpt"].items()


@pytest.mark.parametrize(
    ("values", "gpus", "said"),
    [
        ({"attn_config": {"clip_qkv": 8.0}}, 1, "clip_qkv"),
        ({}, 3, "--gpus 3 does not divide 4 heads"),
        ({"n_layers": 1}, 1, "is none of an MPT"),
        ({"no_bias": False}, 1, "transformer.norm_f.bias is missing"),
    ],
)
def test_what_does_not_fit_is_refused(model, tmp_path, capsys, values, gpus, said):
    assert convert(edited(model, tmp_path / "mpt", **values), tmp_path / "ft", "--gpus", gpus) == 2
    assert said in capsys.readouterr().err
    assert not list((tmp_path / "ft").rglob("*"))
