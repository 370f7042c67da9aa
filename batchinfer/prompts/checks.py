"""Refuses combinations of options with which no row, or no row as the user meant it, could become a request."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

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
_OF_CHATS = ("system_prompt", "image", "video", "tools")
_OTHERS = ("as_chat", "blank_columns", "lora", "audio", "constraint")
"""The other fields, and kinds of columns, that only rows of columns have."""


def _given(config: PromptConfig, fields: Iterable[str]) -> list[str]:
    """Return the options of those fields that are set, and of those kinds of columns that there are."""
    flags = {x: f"--column {x}" for x in COLUMN_KINDS}
    given = [
        x for x in fields if (x in config.columns if x in COLUMN_KINDS else getattr(config, x))
    ]
    return [flags.get(field, "--" + field.replace("_", "-")) for field in given]


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
    if config.request_format != "rows":
        for option in _given(config, [*_PROMPTS, *_OF_CHATS, *_OTHERS]):
            yield (
                f"{option} with --request-format {config.request_format}: such rows hold their prompts",
                f"leave out {option}, or use --request-format rows",
            )
        return
    task, given = f"--task {config.task}", _given(config, _PROMPTS)
    is_speech, sounds = TASK_PATHS.get(config.task) in SPEECH_URLS, config.media_columns["audio"]
    if is_speech and (given or len(sounds) != 1):
        found = " and ".join(given) or f"{len(sounds)} columns of sounds"
        yield f"{task}: {found}, expected one column of sounds", "name it: --column audio=NAME"
    elif not is_speech and len(given) != 1:
        yield (
            f"{' and '.join(given) or 'no prompt option'}: expected one way to make prompts",
            "--messages-column, --prompt-column, or --prompt-template FILE",
        )
    num_columns = 2 if config.task in ("score", "rerank") else 0
    if len(config.pair_columns) != num_columns:
        found = f"{len(config.pair_columns)} columns, expected {num_columns}"
        yield f"--pair-columns with {task}: {found}", "as in --task score --pair-columns query,text"
    of_chats = _given(config, [*_OF_CHATS, *(["audio"] if not is_speech else [])])
    for option in [*of_chats, *(["--tools"] if "tools" in config.body else [])]:
        is_used = option == "--system-prompt" and "system_prompt" in config.prompt_template
        if not config.is_chat and not is_used:
            hint = "add --as-chat, or use --messages-column"
            yield f"{option}: the prompt is plain text, expected a chat", hint
    if config.column("lora") and not config.adapters:
        yield "--column lora: the run has no adapter", "add --lora NAME=PATH"
    if len(config.adapters) > 1 and not config.column("lora"):
        yield "--lora: several adapters, and rows say none", "add --column lora=NAME"
