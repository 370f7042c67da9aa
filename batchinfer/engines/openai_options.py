"""Checks of the options and parameters of ``--engine openai``. Needs neither the package openai nor the endpoint."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from urllib.parse import urlsplit

from batchinfer.core.errors import ConfigError, near
from batchinfer.core.records import Sampling
from batchinfer.core.tasks import EMBED, GENERATE, SCORE
from batchinfer.engines.config import NAMED_ARGUMENTS, EngineConfig

logger = logging.getLogger(__name__)

KEY_VARIABLE = "OPENAI_API_KEY"
"""Environment variable with the endpoint's key. There is no other place for it."""
RESERVED_NAMES = frozenset({"messages", "model", "prompt", "stream", "stream_options"})
"""Request parameters that --sampling must not set, because the engine does."""
PASSED_NAMES = frozenset(
    {
        # of the OpenAI API
        "function_call",
        "functions",
        "parallel_tool_calls",
        "prediction",
        "reasoning_effort",
        "response_format",
        "suffix",
        "tool_choice",
        "tools",
        "verbosity",
        "web_search_options",
        # vLLM's additions to it
        "add_special_tokens",
        "allowed_token_ids",
        "bad_words",
        "cache_salt",
        "documents",
        "include_reasoning",
        "length_penalty",
        "mm_processor_kwargs",
        "priority",
        "repetition_detection",
        "return_token_ids",
        "spaces_between_special_tokens",
        "structured_outputs",
        "thinking_token_budget",
        "truncate_prompt_tokens",
        "truncation_side",
        "use_beam_search",
        "vllm_xargs",
    }
)
"""Request parameters that go to the endpoint as they are. The endpoint checks their values."""
_OF_THE_MODEL = (
    "pooling",
    "tokenizer",
    "revision",
    "hf_config_path",
    "dtype",
    "quantization",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "replicas",
    "gpus",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "gpu_memory_utilization",
    "cpu_offload_gb",
    "enforce_eager",
    "trust_remote_code",
    "engine_args",
    "loras",
    "tool_call_parser",
    "reasoning_parser",
)
"""Fields of EngineConfig that say how a model is loaded."""


def check_options(config: EngineConfig) -> None:
    """Check the options of a run on an endpoint. See `EngineKind.check_options`."""
    if not config.base_url:
        raise ConfigError(
            "--base-url: is missing, expected the URL of an endpoint that speaks the OpenAI API",
            hint="add --base-url http://127.0.0.1:8000/v1 for a vLLM server on this machine",
        )
    base_url_of(config.base_url)
    if not config.model:
        raise ConfigError(
            "--model: is missing, expected a name that the endpoint gives one of its models",
            hint="curl BASE_URL/models lists them",
        )
    if config.task not in (GENERATE, EMBED, SCORE):
        raise ConfigError(
            f"--task {config.task} with --engine openai: the OpenAI API knows texts and embeddings",
            hint="expected --task generate, embed or score (of pairs, by their embeddings)",
        )
    nothing = EngineConfig()
    for name in _OF_THE_MODEL:
        value = getattr(config, name)
        if value != getattr(nothing, name) and (name, value) != ("replicas", 1):
            named = [flag for each, flag in NAMED_ARGUMENTS.items() if each in config.engine_args]
            flags = {"engine_args": next(iter(named), "--engine-arg"), "loras": "--lora"}
            option = flags.get(name, f"--{name.replace('_', '-')}")
            raise ConfigError(
                f"{option} with --engine openai: the program behind --base-url loads the model, not this one",
                hint="leave it out; it is set where that program is started",
            )


def base_url_of(text: str) -> str:
    """Return the URL of an endpoint, to which paths such as ``/chat/completions`` are appended.

    A URL without a path gets ``/v1``.

    Raises:
        ConfigError: the URL is not one of an endpoint, or holds what may be a secret.

    >>> base_url_of("http://127.0.0.1:8000"), base_url_of("https://openrouter.ai/api/v1/")
    ('http://127.0.0.1:8000/v1', 'https://openrouter.ai/api/v1')
    """
    try:
        parts = urlsplit(text)
        has_host = bool(parts.hostname)
        parts.port  # noqa: B018 - raises if it is no number
    except ValueError:
        parts, has_host = urlsplit(""), False
    if parts.username or parts.password or parts.query or parts.fragment:
        raise ConfigError(
            "--base-url: holds a user, a password, a query or a fragment, which may be secret",
            hint=f"give the plain URL, and the key in the environment variable {KEY_VARIABLE}",
        )
    # What is no URL may still hold a password.
    shown = "" if any(mark in text for mark in "@?#") else f" {text}"
    if parts.scheme not in ("http", "https") or not has_host:
        raise ConfigError(
            f"--base-url{shown}: is no URL of an endpoint",
            hint="give it as in --base-url http://127.0.0.1:8000/v1",
        )
    path = parts.path.rstrip("/")
    for end in ("/chat/completions", "/completions", "/embeddings"):
        if path.endswith(end):
            raise ConfigError(
                f"--base-url{shown}: is the address of one kind of requests, expected that of the endpoint",
                hint=f"leave out {end} at its end",
            )
    return f"{parts.scheme}://{parts.netloc}{path or '/v1'}"


def read_key() -> str:
    """Return the key from the environment; empty if there is none.

    Raises:
        ConfigError: the key holds a space, or a character that is not printable ASCII.
    """
    key = os.environ.get(KEY_VARIABLE, "").strip()
    if not key.isascii() or not key.isprintable() or " " in key:
        raise ConfigError(
            f"{KEY_VARIABLE}: holds characters that no key has",
            hint="set it to the key alone, without line breaks and spaces",
        )
    return key


def check_parameters(option: str, names: Iterable[str]) -> None:
    """Check the names of request parameters that an option sets. See `EngineKind.check_parameters`.

    Providers have parameters of their own, so an unknown name is refused only if it is much like a known one.
    """
    for name in names:
        if name in RESERVED_NAMES:
            raise ConfigError(
                f"{option} {name}: is set from other options or the rows", hint="leave it out"
            )
        if name in PASSED_NAMES:
            continue
        if meant := near(name, sorted({*PASSED_NAMES, *Sampling.__struct_fields__})):
            raise ConfigError(
                f"{option} {name}: no endpoint is known to have such a parameter{meant}",
                hint=f"{option} takes NAME=VALUE pairs with the names of the endpoint's API",
            )
        logger.info("%s %s: not known here, so it goes to the endpoint as it is", option, name)
