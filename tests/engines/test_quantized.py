"""Quantized checkpoints and caches of few bits: what `check` says of their memory before anything is loaded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from batchinfer.cli.main import main
from batchinfer.core.errors import ConfigError
from batchinfer.engines import check_engine
from batchinfer.engines.config import KV_CACHE_BYTES, EngineConfig
from batchinfer.engines.gpus import memory_per_gpu
from batchinfer.engines.models import describe_model
from batchinfer.engines.weights import read_header
from making import make_job
from tiny_model import DEMO_MODEL, write_model_stub

pytest.importorskip("torch", reason="the checkpoints are packed with torch")
from quantized_model import KINDS, write_quantized

NAMES = {"int8": "compressed-tensors", "fp8": "compressed-tensors", "gptq": "gptq", "awq": "awq"}
BITS = {"int8": 8, "fp8": 8, "gptq": 4, "awq": 4}


@pytest.mark.parametrize("kind", KINDS)
def test_a_quantized_checkpoint_takes_its_own_bytes(
    tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The demo model's linear layers shrink to their bits, and scales; the rest keeps its 16 bits."""
    folder = write_quantized(kind, tmp_path / kind)
    shapes = read_header(DEMO_MODEL / "model.safetensors")
    linear = sum(shape[0] * shape[1] for name, shape in shapes.items() if "_proj." in name)
    rest = (DEMO_MODEL / "model.safetensors").stat().st_size - 2 * linear
    info = describe_model(EngineConfig(model=str(folder)))
    assert info.quantization == NAMES[kind]
    packed = info.parameter_bytes - rest
    assert 1.0 < packed / (linear * BITS[kind] / 8) < 1.15
    options = ("--gpu", "T4", "--as-chat", "--prompt-column", "text")
    status = main(["check", "--synthetic", "5", "--model", str(folder), *options])
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert status == 0, result["problems"]
    assert result["memory"]["weights_bytes_per_gpu"] == info.parameter_bytes
    assert result["model"]["quantization"] == NAMES[kind]


def tokens_that_fit(capsys: pytest.CaptureFixture[str], *options: str) -> int:
    given = ("check", "--synthetic", "5", "--model", str(DEMO_MODEL), "--gpu", "T4")
    assert main([*given, "--as-chat", "--prompt-column", "text", *options]) == 0
    found: int = json.loads(capsys.readouterr().out.splitlines()[-1])["memory"]["cache_tokens"]
    return found


def test_a_cache_of_fewer_bits_holds_more_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    plain = tokens_that_fit(capsys)
    assert tokens_that_fit(capsys, "--kv-cache-dtype", "fp8") == pytest.approx(2 * plain, rel=1e-6)
    assert tokens_that_fit(capsys, "--kv-cache-dtype", "auto") == plain
    four = tokens_that_fit(capsys, "--engine-arg", "kv_cache_dtype=int4_per_token_head")
    assert four == pytest.approx(4 * plain, rel=1e-6)


@pytest.mark.parametrize(
    ("settings", "share"),
    [
        ({"quant_method": "modelopt", "quantization": {"kv_cache_quant_algo": "FP8"}}, 0.5),
        (
            {"quant_method": "modelopt_fp4", "kv_cache_scheme": {"type": "float", "num_bits": 4}},
            0.28125,
        ),
        ({"quant_method": "modelopt", "kv_cache_quant_algo": None}, 1),
        (
            {
                "quant_method": "compressed-tensors",
                "kv_cache_scheme": {"type": "float", "num_bits": 8},
            },
            1,
        ),
    ],
)
def test_a_checkpoint_may_state_the_type_of_its_cache(
    tmp_path: Path, settings: dict[str, object], share: float
) -> None:
    stub = write_model_stub(tmp_path / "m", quantization_config=settings)
    plain = describe_model(EngineConfig(model=str(write_model_stub(tmp_path / "plain"))))
    found = describe_model(EngineConfig(model=str(stub))).kv_bytes_per_token
    assert found == plain.kv_bytes_per_token * share
    stated = EngineConfig(model=str(stub), engine_args={"kv_cache_dtype": "bfloat16"})
    assert describe_model(stated).kv_bytes_per_token == plain.kv_bytes_per_token


def test_the_types_of_caches_are_those_of_the_installed_vllm() -> None:
    import ast
    import importlib.util

    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        pytest.skip("compares with vLLM's source")
    tree = ast.parse((Path(spec.origin).parent / "config/cache.py").read_bytes())
    [names] = [
        {each.value for each in node.value.slice.elts}
        for node in tree.body
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "CacheDType"
    ]
    assert set(KV_CACHE_BYTES) == names


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kv_cache_dtype": "fp8_e4m4"}, "did you mean 'fp8_e4m3'"),
        ({"speculative_config": {"methd": "ngram"}}, "did you mean 'method'"),
        ({"speculative_config": {"model": "s3://b/draft"}}, "is a URL"),
    ],
)
def test_a_wrong_name_is_refused_before_anything_loads(
    arguments: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check_engine(EngineConfig(model=str(DEMO_MODEL), engine_args=arguments))


def test_a_draft_model_takes_memory_and_ngrams_take_none() -> None:
    def memory(speculation: dict[str, object] | None, size: int = 1) -> tuple[int, int]:
        arguments = {"speculative_config": speculation} if speculation else {}
        config = EngineConfig(
            model=str(DEMO_MODEL), pipeline_parallel_size=2, engine_args=arguments
        )
        return memory_per_gpu(describe_model(config), config, size, 64)

    plain, ngram = memory(None), memory({"method": "ngram", "prompt_lookup_max": 3})
    assert ngram == plain == memory({"model": "ngram"})
    # The stages of a pipeline share the model; the last holds the whole draft model.
    draft: dict[str, object] = {"model": str(DEMO_MODEL), "num_speculative_tokens": 2}
    assert memory(draft) == (3 * plain[0], 3 * plain[1])
    assert memory(draft, 2)[0] == 3 * memory(None, 2)[0]


def test_a_draft_model_that_is_not_there_is_named(tmp_path: Path) -> None:
    speculation = {"model": str(tmp_path / "draft"), "num_speculative_tokens": 2}
    config = EngineConfig(model=str(DEMO_MODEL), engine_args={"speculative_config": speculation})
    with pytest.raises(ConfigError, match=r"--speculative-config: the draft model .*/draft is no"):
        describe_model(config)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--min-p", "0.1"), "does not speculate with min_p"),
        (("--sampling", 'logit_bias={"5": 1}'), "does not speculate with logit_bias"),
        (("--engine-arg", "speculative_config={}"), "are the same"),
        (("--engine", "openai", "--base-url", "http://127.0.0.1:1/v1"), "--speculative-config with --engine openai"),
    ],
)  # fmt: skip
def test_what_does_not_go_with_speculation_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, ...], message: str
) -> None:
    (tmp_path / "ngram.json").write_text('{"method": "ngram", "num_speculative_tokens": 2}')
    speculation = ("--speculative-config", f"@{tmp_path / 'ngram.json'}")
    job = str(tmp_path / "job")
    make_job(job, rows=2, per_chunk=2)
    given = ("--job", job, "--model", str(DEMO_MODEL), "--prompt-column", "prompt", *speculation)
    assert main(["worker", *given, *options]) == 2
    assert message in capsys.readouterr().err
    assert not Path(job, "runs").exists()
