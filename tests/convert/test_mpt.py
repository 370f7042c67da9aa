"""`convert mpt-to-ft`: parts put together equal the source; run from the files, the model answers as before."""

from __future__ import annotations

import configparser
import json
import math
from pathlib import Path

import numpy as np
import pytest

from batchinfer.cli.main import main

pytestmark = pytest.mark.vllm  # needs torch and transformers, which the extra `cpu` brings

WIDTH, HEADS, LAYERS, VOCABULARY = 32, 4, 2, 64
LINEAR = {
    "attention.query_key_value": ("attn.Wqkv", -1),
    "attention.dense": ("attn.out_proj", 0),
    "mlp.dense_h_to_4h": ("ffn.up_proj", -1),
    "mlp.dense_4h_to_h": ("ffn.down_proj", 0),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch
    from transformers import MptConfig, MptForCausalLM

    torch.manual_seed(5)
    folder = tmp_path_factory.mktemp("mpt")
    config = MptConfig(
        d_model=WIDTH, n_heads=HEADS, n_layers=LAYERS, vocab_size=VOCABULARY, max_seq_len=48,
        initializer_range=0.4, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    MptForCausalLM(config).save_pretrained(folder)
    return folder


def convert(*arguments: object) -> int:
    return main(["convert", "mpt-to-ft", *map(str, arguments)])


class FromFiles:
    """An MPT in numpy, read from FasterTransformer's files: embedding, ALiBi attention, gelu, no other library."""

    def __init__(self, folder: Path) -> None:
        ini = configparser.ConfigParser()
        ini.read(folder / "config.ini")
        self.config = ini["gpt"]
        self.folder = folder
        self.gpus = int(self.config["tensor_para_size"])
        self.width = int(self.config["head_num"]) * int(self.config["size_per_head"])

    def array(self, name: str, *shape: int) -> np.ndarray:
        kind = {"fp32": np.float32, "fp16": np.float16}[self.config["weight_data_type"]]
        found = np.fromfile(self.folder / f"model.{name}.bin", kind)
        return found.reshape(shape).astype(np.float32)

    def joined(self, name: str, axis: int, *shape: int) -> np.ndarray:
        """Put together what lies on all GPUs; -1 stands for the part's size along the divided axis."""
        parts = [self.array(f"{name}.{gpu}", *shape) for gpu in range(self.gpus)]
        return np.concatenate(parts, axis=axis)

    def norm(self, x: np.ndarray, name: str) -> np.ndarray:
        weight = self.array(f"{name}.weight", self.width)
        bias = self.array(f"{name}.bias", self.width)
        centred = x - x.mean(-1, keepdims=True)
        scale = np.sqrt((centred**2).mean(-1, keepdims=True) + float(self.config["layernorm_eps"]))
        return centred / scale * weight + bias

    def layer(self, x: np.ndarray, index: int) -> np.ndarray:
        name, d, heads = f"layers.{index}", self.width, int(self.config["head_num"])
        qkv = self.joined(f"{name}.attention.query_key_value.weight", -1, d, 3, -1)
        bias = self.joined(f"{name}.attention.query_key_value.bias", -1, 3, -1)
        h = self.norm(x, f"{name}.input_layernorm")
        q, k, v = np.einsum("td,dce->cte", h, qkv) + bias[:, None, :]
        q, k, v = (part.reshape(len(x), heads, -1).transpose(1, 0, 2) for part in (q, k, v))
        scores = q @ k.transpose(0, 2, 1) / math.sqrt(d // heads)
        place = np.arange(len(x))
        slopes = 2.0 ** (-8.0 * np.arange(1, heads + 1) / heads)
        scores += slopes[:, None, None] * (place[None, None, :] - place[-1])
        scores = np.where(place[None, :] > place[:, None], -np.inf, scores)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        attended = (weights @ v).transpose(1, 0, 2).reshape(len(x), d)
        dense = self.joined(f"{name}.attention.dense.weight", 0, -1, d)
        x = x + attended @ dense + self.array(f"{name}.attention.dense.bias", d)
        h = self.norm(x, f"{name}.post_attention_layernorm")
        up = self.joined(f"{name}.mlp.dense_h_to_4h.weight", -1, d, -1)
        h = h @ up + self.joined(f"{name}.mlp.dense_h_to_4h.bias", -1, -1)
        h = h * 0.5 * (1 + np.vectorize(math.erf)(h / math.sqrt(2)))
        down = self.joined(f"{name}.mlp.dense_4h_to_h.weight", 0, -1, d)
        return x + h @ down + self.array(f"{name}.mlp.dense_4h_to_h.bias", d)

    def next_token(self, tokens: list[int]) -> int:
        wte = self.array("wte", int(self.config["vocab_size"]), self.width)
        x = wte[tokens]
        for index in range(int(self.config["num_layer"])):
            x = self.layer(x, index)
        return int((self.norm(x, "final_layernorm")[-1] @ wte.T).argmax())


@pytest.mark.parametrize("gpus", [1, 2, 4])
@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_a_model_run_from_the_files_gives_the_same_next_tokens_as_transformers(
    model: Path, tmp_path: Path, gpus: int, dtype: str
) -> None:
    import torch
    from transformers import MptForCausalLM

    assert convert(model, tmp_path / "ft", "--gpus", gpus, "--dtype", dtype) == 0
    from_files = FromFiles(tmp_path / f"ft/{gpus}-gpu")
    before = MptForCausalLM.from_pretrained(model, dtype=torch.float32)
    prompts = np.random.default_rng(1).integers(0, VOCABULARY, (12, 7)).tolist()
    with torch.no_grad():
        expected = before(torch.tensor(prompts)).logits[:, -1].argmax(-1).tolist()
    assert len(set(expected)) > 6, "a model that says one thing only would prove nothing"
    assert [from_files.next_token(prompt) for prompt in prompts] == expected


@pytest.mark.parametrize("gpus", [1, 2, 4])
def test_parts_put_together_equal_the_source(model: Path, tmp_path: Path, gpus: int) -> None:
    from safetensors.numpy import load_file

    assert convert(model, tmp_path / "ft", "--gpus", gpus) == 0
    source = load_file(model / "model.safetensors")
    from_files = FromFiles(tmp_path / f"ft/{gpus}-gpu")
    for layer in range(LAYERS):
        for ft, (name, axis) in LINEAR.items():
            weight = source[f"transformer.blocks.{layer}.{name}.weight"]
            shape = (-1, weight.shape[0]) if axis == 0 else (weight.shape[1], -1)
            if name == "attn.Wqkv":
                shape = (WIDTH, 3, -1)
            parts = from_files.joined(f"layers.{layer}.{ft}.weight", axis, *shape)
            assert np.array_equal(parts.reshape(weight.T.shape), weight.T)
    written = {path.name for path in from_files.folder.iterdir()}
    assert len(written) == 1 + 3 + LAYERS * (4 + 2 * gpus * 2 + 2 * (gpus + 1))


def test_biases_are_divided_with_their_columns(tmp_path: Path) -> None:
    """The tool that set the layout wrote the bias of up_proj beside the folder."""
    from safetensors.numpy import load_file, save_file

    folder = tmp_path / "biased"
    folder.mkdir()
    rng = np.random.default_rng(0)
    shapes = {"norm_1": 8, "norm_2": 8, "attn.Wqkv": (24, 8), "attn.out_proj": (8, 8),
              "ffn.up_proj": (32, 8), "ffn.down_proj": (8, 32)}  # fmt: skip
    weights = {
        "transformer.wte.weight": rng.random((16, 8), np.float32),
        "transformer.norm_f.weight": rng.random(8, np.float32),
        "transformer.norm_f.bias": rng.random(8, np.float32),
    }
    for name, shape in shapes.items():
        weights[f"transformer.blocks.0.{name}.weight"] = rng.random(shape, np.float32)
        rows = shape if isinstance(shape, int) else shape[0]
        weights[f"transformer.blocks.0.{name}.bias"] = rng.random(rows, np.float32)
    save_file(weights, folder / "model.safetensors")
    config = {"model_type": "mpt", "d_model": 8, "n_heads": 2, "n_layers": 1, "vocab_size": 16,
              "max_seq_len": 8, "no_bias": False, "bos_token_id": 0, "eos_token_id": 0}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    assert convert(folder, tmp_path / "ft", "--gpus", 2) == 0
    from_files = FromFiles(tmp_path / "ft/2-gpu")
    source = load_file(folder / "model.safetensors")
    stem = "transformer.blocks.0"
    assert np.array_equal(
        from_files.joined("layers.0.mlp.dense_h_to_4h.bias", 0, -1),
        source[f"{stem}.ffn.up_proj.bias"],
    )
    assert np.array_equal(
        from_files.joined("layers.0.attention.query_key_value.bias", 1, 3, -1).reshape(-1),
        source[f"{stem}.attn.Wqkv.bias"],
    )
    assert np.array_equal(
        from_files.array("layers.0.attention.dense.bias", 8), source[f"{stem}.attn.out_proj.bias"]
    )
    assert sorted(path.name for path in (tmp_path / "ft").iterdir()) == ["2-gpu"]


def edited(model: Path, folder: Path, **values: object) -> Path:
    folder.mkdir()
    config = json.loads((model / "config.json").read_text()) | values
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").hardlink_to(model / "model.safetensors")
    return folder


@pytest.mark.parametrize("feature", [{"clip_qkv": 8.0}, {"qk_ln": True}])
def test_what_fastertransformer_ignores_is_refused_without_force(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], feature: dict[str, object]
) -> None:
    attention = json.loads((model / "config.json").read_text())["attn_config"] | feature
    folder = edited(model, tmp_path / "mpt", attn_config=attention)
    assert convert(folder, tmp_path / "ft", "--gpus", 1) == 2
    assert next(iter(feature)) in capsys.readouterr().err
    assert not (tmp_path / "ft/1-gpu").exists()
    assert convert(folder, tmp_path / "ft", "--gpus", 1, "--force") == 0


@pytest.mark.parametrize(
    ("values", "gpus", "said"),
    [
        ({}, 3, "does not divide the model's 4 heads"),
        ({"model_type": "llama"}, 1, "is a model of type 'llama', expected 'mpt'"),
        ({"d_model": "wide"}, 1, "lacks a size"),
        ({"n_layers": 3}, 1, "6 weights are missing, the first is transformer.blocks.2.norm_1.weight"),
        ({"expansion_ratio": 2}, 1, "has the shape"),
    ],
)  # fmt: skip
def test_a_model_that_does_not_fit_is_refused(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    values: dict[str, object], gpus: int, said: str,
) -> None:  # fmt: skip
    assert convert(edited(model, tmp_path / "mpt", **values), tmp_path / "ft", "--gpus", gpus) == 2
    error = capsys.readouterr().err
    assert said in error
    assert "Traceback" not in error
    assert not (tmp_path / "ft").exists() or not any((tmp_path / "ft").iterdir())
