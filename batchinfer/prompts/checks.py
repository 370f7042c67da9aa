"""Refuses combinations of options with which no row, or no row as the user meant it, could become a request."""

from __future__ import annotations

from collections.abc import Iterator

from batchinfer.core.errors import ConfigError
from batchinfer.prompts.types import (
    COLUMN_KINDS,
    MEDIA_KINDS,
    SPEECH_URLS,
    TASK_PATHS,
    PromptConfig,
)

_PROMPTS = ("messages_column", "prompt_column", "prompt_template", "pair_columns")
"""Fields that say what the prompt of a row is."""
_OTHERS = ("system_prompt", "as_chat", "blank_columns")
"""The other fields that only rows of columns have."""


def check_config(config: PromptConfig) -> None:
    """Check the options against each other.

    Raises:
        ConfigError: the message names the option.
    """
    for message, hint in _complaints(config):
        raise ConfigError(message, hint=hint)


def _complaints(config: PromptConfig) -> Iterator[tuple[str, str]]:
    """Yield what is wrong, and what to do. Later complaints may follow from the first."""
    for kind, names in config.columns.items():
        if kind not in COLUMN_KINDS:
            known = ", ".join(COLUMN_KINDS)
            yield f"--column {kind}: expected one of {known}", "--column image=photo"
        if len(names) > 1 and kind not in MEDIA_KINDS:
            yield f"--column {kind}: {len(names)} columns, expected one", "give it once"
    given = {x: f"--{x.replace('_', '-')}" for x in (*_PROMPTS, *_OTHERS) if getattr(config, x)}
    given |= {kind: f"--column {kind}" for kind in config.columns if kind != "id"}
    if config.request_format != "rows":
        for option in given.values():
            yield (
                f"{option} with --request-format {config.request_format}: such rows hold their prompts",
                f"leave out {option}, or use --request-format rows",
            )
        return
    task, prompts = f"--task {config.task}", [given[x] for x in _PROMPTS if x in given]
    is_speech, sounds = TASK_PATHS.get(config.task) in SPEECH_URLS, config.media_columns["audio"]
    if is_speech and (prompts or len(sounds) != 1):
        found = " and ".join(prompts) or f"{len(sounds)} columns of sounds"
        yield f"{task}: {found}, expected one column of sounds", "name it: --column audio=NAME"
    elif not is_speech and len(prompts) != 1:
        yield (
            f"{' and '.join(prompts) or 'no prompt option'}: expected one way to make prompts",
            "--messages-column, --prompt-column, or --prompt-template FILE",
        )
    num_columns = 2 if config.task in ("score", "rerank") else 0
    if len(config.pair_columns) != num_columns:
        found = f"{len(config.pair_columns)} columns, expected {num_columns}"
        yield f"--pair-columns with {task}: {found}", "as in --task score --pair-columns query,text"
    of_chats = {"image", "video", "tools"} | (set() if is_speech else {"audio"})
    if "system_prompt" not in config.prompt_template:
        of_chats.add("system_prompt")
    if "tools" in config.body:
        given.setdefault("tools", "--tools")
    for field in () if config.is_chat else sorted(of_chats & given.keys()):
        hint = "add --as-chat, or use --messages-column"
        yield f"{given[field]}: the prompt is plain text, expected a chat", hint
    if "lora" in given and not config.adapters:
        yield "--column lora: the run has no adapter", "add --lora NAME=PATH"
    if len(config.adapters) > 1 and "lora" not in given:
        yield "--lora: several adapters, and rows say none", "add --column lora=NAME"
