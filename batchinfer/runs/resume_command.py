"""The command that goes on with a run: a worker with the options that run.json was made of. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from batchinfer.core.records import Run, Sampling
from batchinfer.engines import UNLIMITED_LENGTH
from batchinfer.engines.config import EngineConfig
from batchinfer.prompts import PromptConfig

_PROMPT_OPTIONS = {
    "request_format": "--request-format",
    "messages_column": "--messages-column",
    "turns": "--turns",
    "prompt_column": "--prompt-column",
    "template_name": "--template",
    "truncate_prompt": "--truncate-prompt",
    "output_format": "--output-format",
    "id_column": "--id-column",
}
_PROMPT_FLAGS = {"as_chat": "--as-chat", "keep_prompt": "--keep-prompt", "strip": "--strip"}
_PROMPT_LISTS = {"blank_columns": "--blank-columns", "keep": "--keep"}
_PROMPT_TEXTS = {"system_prompt": "--system-prompt", "chat_template": "--chat-template"}
"""Text, or @FILE."""
_TRUSTED = "# this run's workers ran code that comes with the model: add that option only if you trust it too"
_SAMPLING_OPTIONS = (
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "n",
    "logprobs",
)


def worker_command(run: Run, url: str, job_url: str, manifests: Sequence[str] = ()) -> str:
    """A worker that the run at `url` takes: the options that decide its answers, for bash.

    run.json lies in a bucket: whatever it holds is quoted, and that the run had --trust-remote-code is said behind the
    command, for the reader to decide. Other options (the machine's, and how often to checkpoint) are not in run.json
    and may differ from worker to worker. Texts that the worker reads from files are given as `<(printf …)`, since
    run.json has the text alone.
    """
    words = [f"--manifest {_quote(manifest)}" for manifest in manifests]
    if job_url:
        words.insert(0, f"--job {_quote(job_url)}")
    elif not manifests:
        words.append("--manifest LIST")
    words.append(f"--output {_quote(url)}")
    if run.config.get("limit") is not None:
        words.append(_option("--limit", run.config["limit"]))
    words += _engine(run)
    try:
        words += _prompt(msgspec.convert(run.config.get("prompt") or {}, PromptConfig))
        words += _sampling(msgspec.convert(run.config.get("sampling") or {}, Sampling))
    except msgspec.ValidationError:  # somebody edited run.json
        words.append("…")
    seed = run.config.get("seed", 0)
    if seed != 0:
        words.append(_option("--seed", "none" if seed is None else seed))
    if run.recorded.get("trust_remote_code"):
        words.append(_TRUSTED)
    return " ".join(["batchinfer worker", *words])


def _quote(text: str) -> str:
    """One word for bash, whatever is in it. What would move a terminal's cursor is shown, not sent."""
    if all(letter.isprintable() or letter == "\n" for letter in text):
        return shlex.quote(text)
    letters = (
        letter if letter.isprintable() and letter not in "\\'" else f"\\U{ord(letter):08x}"
        for letter in text
    )
    return f"$'{''.join(letters)}'"


def _option(name: str, value: Any) -> str:
    return f"{name} {_quote(str(value))}"


def _file(text: str) -> str:
    return f"<(printf %s {_quote(text)})"


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _engine(run: Run) -> Iterator[str]:
    config, recorded = run.config, run.recorded
    default = EngineConfig().engine
    engine = str(recorded.get("engine") or default)
    if engine != default:
        yield _option("--engine", engine)
    if config.get("model") not in (None, "", engine):
        yield _option("--model", config["model"])
    for name in ("tokenizer", "hf_config_path", "quantization"):
        if config.get(name):
            yield _option(f"--{name.replace('_', '-')}", config[name])
    # What the engine chose by itself is asked for: it might choose otherwise on another machine.
    if config.get("dtype") not in (None, "", "none"):
        yield _option("--dtype", config["dtype"])
    if config.get("max_model_len") not in (None, UNLIMITED_LENGTH):
        yield _option("--max-model-len", config["max_model_len"])
    if recorded.get("tensor_parallel_size"):
        yield _option("--tensor-parallel-size", recorded["tensor_parallel_size"])
    if recorded.get("pipeline_parallel_size", 1) != 1:
        yield _option("--pipeline-parallel-size", recorded["pipeline_parallel_size"])
    for name, value in (config.get("engine_args") or {}).items():
        if name == "trust_remote_code":  # no worker records it there
            continue
        yield _option("--engine-arg", f"{name}={_json(value)}")


def _prompt(prompt: PromptConfig) -> Iterator[str]:
    plain = PromptConfig()
    for field, option in _PROMPT_OPTIONS.items():
        value = getattr(prompt, field)
        if value != getattr(plain, field):
            yield _option(option, value)
    for field, option in _PROMPT_FLAGS.items():
        if getattr(prompt, field):
            yield option
    for field, option in _PROMPT_LISTS.items():
        if getattr(prompt, field):
            yield _option(option, ",".join(getattr(prompt, field)))
    for field, option in _PROMPT_TEXTS.items():
        text = getattr(prompt, field)
        if text.startswith("@"):
            yield f"{option} @{_file(text)}"
        elif text:
            yield _option(option, text)
    if prompt.prompt_template:
        yield f"--prompt-template {_file(prompt.prompt_template)}"
    if prompt.few_shot:
        yield f"--few-shot {_file(''.join(_json(row) + chr(10) for row in prompt.few_shot))}"
    if prompt.chat_template_kwargs:
        yield _option("--chat-template-kwargs", _json(prompt.chat_template_kwargs))
    if prompt.continue_final:
        continued = "row" if prompt.continue_final is True else prompt.continue_final
        yield _option("--continue-final", continued)
    if not prompt.has_timing:
        yield "--no-timing"


def _sampling(sampling: Sampling) -> Iterator[str]:
    given: dict[str, Any] = msgspec.to_builtins(sampling)  # holds what is not the default
    for name in _SAMPLING_OPTIONS:
        if name in given:
            yield _option(f"--{name.replace('_', '-')}", given.pop(name))
    for text in given.pop("stop", None) or ():
        yield _option("--stop", text)
    ids = given.pop("stop_token_ids", None)
    if ids:
        yield _option("--stop-token-ids", ",".join(map(str, ids)))
    extra = given.pop("extra", None) or {}
    for name, value in {**given, **extra}.items():
        yield _option("--sampling", f"{name}={_json(value)}")
