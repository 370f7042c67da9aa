"""What a model's small files tell: whether it has a chat template, how long prompts are, how much memory it takes."""

from __future__ import annotations

import logging
from typing import Any

import msgspec

from batchinfer.core.errors import ConfigError, near
from batchinfer.core.records import Call
from batchinfer.core.row_codes import Code
from batchinfer.engines.engine_config import EngineConfig
from batchinfer.engines.gpus import GIB, OVERHEAD_BYTES, Gpu, choose_layout, memory_share
from batchinfer.engines.model_files import model_files
from batchinfer.engines.models import ModelInfo, tokenizer_config
from batchinfer.prompts.types import RowError

logger = logging.getLogger(__name__)

GPU_GIB = {
    "T4": 14.7,
    "L4": 22.5,
    "A10": 22.5,
    "A10G": 22.5,
    "V100": 15.8,
    "V100-32GB": 31.7,
    "RTX3090": 23.7,
    "RTX4090": 23.6,
    "RTX5090": 31.4,
    "RTX6000-Ada": 47.5,
    "A40": 44.9,
    "L40": 44.9,
    "L40S": 44.9,
    "A100": 39.5,
    "A100-80GB": 79.2,
    "H100": 79.6,
    "H100-NVL": 93.6,
    "H200": 139.8,
    "B200": 178.4,
}
"""Memory of GPUs as their driver reports it, by SkyPilot's names."""
_BYTES_PER_TOKEN = 3.5
"""UTF-8 bytes of a token in the estimate without a tokenizer: about 4 of English, fewer of code and other languages."""
_PROMPTS = ("messages", "prompt", "input")
_SIDES = ("text_1", "text_2", "query", "queries", "documents", "data_1", "data_2")
"""Members of bodies that hold the two sides of a score."""
_TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json", "tekken.json")


def has_chat_template(config: EngineConfig) -> bool:
    """Whether prompts should be sent as a user's messages: yes to endpoints, else if the model has a chat template.

    Raises:
        BatchinferError: the model's files cannot be read.
    """
    if config.engine != "vllm" or config.server_command or "chat_template" in config.server_options:
        return config.engine != "echo"
    files = model_files(*config.tokenizer)
    found = files.sizes.keys() & _TEMPLATE_FILES
    return bool(found or tokenizer_config(files).get("chat_template"))


class Counter:
    """Counts the tokens of prompts: with the model's tokenizer if transformers can load it, else by their bytes.

    Attributes:
        is_estimate: Whether it counts by bytes.
    """

    def __init__(self, config: EngineConfig | None) -> None:
        self._tokenizer: Any = None
        if config is not None:
            name, revision = config.tokenizer
            try:
                from transformers import AutoTokenizer

                self._tokenizer = AutoTokenizer.from_pretrained(name, revision=revision)
                if "chat_template" in config.server_options:  # the model's own is not used
                    self._tokenizer.chat_template = None
            # Loading fails for many reasons, such as a missing file or package, with an error of its own each.
            except Exception as error:  # noqa: BLE001
                reason = str(error).partition("\n")[0] or type(error).__name__
                logger.info("%s: no tokenizer here (%s), lengths are estimates", name, reason)
        self.is_estimate = self._tokenizer is None

    def count(self, call: Call) -> int:
        """Return the tokens of a call's prompt. Media are not counted.

        Raises:
            RowError: the model's chat template refuses the prompt, in its own words.
        """
        body = msgspec.json.decode(call.body)
        sides = [body[name] for name in _SIDES if name in body]
        prompt: Any = next((body[name] for name in _PROMPTS if name in body), sides)
        if num_ids := _num_ids(prompt):
            return num_ids
        try:
            if self._tokenizer is not None:
                return self._tokens(body, prompt)
        # Templates and tokenizers fail over unusual bodies with any error; the server may take these all the same.
        except Exception as error:
            if type(error).__name__ == "TemplateError":  # the template's own `raise_exception`
                raise RowError(Code.INVALID_REQUEST, str(error)) from error
        return round(sum(map(len, _texts(prompt))) / _BYTES_PER_TOKEN)

    def _tokens(self, body: dict[str, Any], prompt: Any) -> int:
        if "messages" in body and self._tokenizer.chat_template:
            kwargs = {"tools": body.get("tools"), **(body.get("chat_template_kwargs") or {})}
            texts = [{**each, "content": b"".join(_texts(each)).decode()} for each in prompt]
            chat = self._tokenizer.apply_chat_template(
                texts, add_generation_prompt=True, tokenize=False, **kwargs
            )
            return len(self._tokenizer.encode(chat, add_special_tokens=False))
        return sum(len(self._tokenizer.encode(text.decode())) for text in _texts(prompt))


def _num_ids(prompt: Any) -> int:
    """Return the number of tokens of a prompt, or of several, that are given by their ids."""
    return sum(map(_num_ids, prompt)) if isinstance(prompt, list) else isinstance(prompt, int)


def _texts(prompt: Any) -> list[bytes]:
    """Return the texts of a prompt in a body, without those of media."""
    if isinstance(prompt, str):
        return [prompt.encode()]
    if isinstance(prompt, dict):
        prompt = [prompt[name] for name in ("content", "text") if name in prompt]
    return [text for part in prompt for text in _texts(part)] if isinstance(prompt, list) else []


def parse_gpu(text: str) -> tuple[str, int]:
    """Read --gpu: a GPU's name and how many there are; "" and 0 for none.

    Raises:
        ConfigError: the name is not known, or the number is none.

    >>> parse_gpu("l4:2")
    ('L4', 2)
    """
    if text == "none":
        return "", 0
    name, _, count = text.partition(":")
    known = {each.lower(): each for each in GPU_GIB}
    if name.lower() not in known or not (count or "1").isdecimal() or count == "0":
        nearest = near(name.upper(), GPU_GIB)
        raise ConfigError(
            f"--gpu {text}: expected NAME or NAME:N, with a name of {', '.join(GPU_GIB)}{nearest}"
        )
    return known[name.lower()], int(count or 1)


def memory_on(
    gpu: str,
    config: EngineConfig,
    model: ModelInfo,
    prompt_tokens: float | None,
    answer_tokens: int,
) -> dict[str, Any]:
    """Compute the memory of a model by vLLM's rule of thumb: what weights and an overhead leave is the KV cache.

    Args:
        gpu: The GPUs of one worker, as `parse_gpu` reads them.
        config: The engine.
        model: Its model.
        prompt_tokens: Mean length of a prompt; None if it is not known.
        answer_tokens: Longest answer. On average over the time that a row runs, half of it is in the cache.

    Returns:
        The layout, the tokens that the KV cache of one replica holds, and the rows that fit there at once.

    Raises:
        ConfigError: the weights, or one row of full length, do not fit.
    """
    name, count = parse_gpu(gpu)
    total = round(GPU_GIB[name] * GIB)
    layout = choose_layout(model, [Gpu(id=str(n), total_bytes=total) for n in range(count)], config)
    size = layout.tensor_parallel_size
    usable = total * memory_share(config) - OVERHEAD_BYTES
    cache = usable * size * config.pipeline_parallel_size - model.parameter_bytes
    tokens = int(cache / model.kv_bytes_per_token) if model.kv_bytes_per_token else 0
    longest = config.typed_number("max_model_len") or model.max_model_len
    if cache <= 0 or 0 < tokens < longest:
        raise ConfigError(
            f"--gpu {gpu}: the KV cache holds {max(0, tokens):,} tokens, less than one row of {longest:,}",
            hint=f"--max-model-len {tokens // 16 * 16}, or more or larger GPUs"
            if tokens > 0
            else "more or larger GPUs, or a quantized model",
        )
    per_row = max(1.0, (prompt_tokens or 0) + answer_tokens / 2)
    return {
        "explanation": layout.explanation,
        "tensor_parallel_size": size,
        "replicas": layout.replicas,
        "cache_tokens": tokens,
        "rows_at_once": None if prompt_tokens is None else int(tokens / per_row),
    }
