"""Refuses combinations of options with which no row, or no row as the user meant it, could become a request."""

from __future__ import annotations

from typing import Any

from batchinfer.core.errors import ConfigError, near
from batchinfer.prompts.conversation import check_turns
from batchinfer.prompts.types import (
    REQUEST_FORMATS,
    SPEECH_URLS,
    TASK_PATHS,
    TRUNCATIONS,
    PromptConfig,
)


def check_config(config: PromptConfig) -> None:
    """Check the options that need neither a template nor an engine.

    Raises:
        ConfigError: the message names the option.
    """
    for option, value, known in (
        ("--request-format", config.request_format, REQUEST_FORMATS),
        ("--truncate-prompt", config.truncate_prompt, TRUNCATIONS),
    ):
        if value not in known:
            raise ConfigError(
                f"{option} {value}: expected one of {', '.join(known)}{near(value, known)}",
                hint=f"`{option} {known[0]}` is the default",
            )
    for option, text in {
        "--system-prompt": config.system_prompt,
        "--continue-final": config.continue_final,
    }.items():
        try:
            str(text).encode()
        except UnicodeEncodeError as error:
            raise ConfigError(f"{option}: holds bytes that are no text, expected UTF-8") from error
    if config.request_format == "rows":
        _check_rows(config)
    elif option := _first_given(_prompts(config) | _of_rows(config)):
        raise ConfigError(
            f"{option} with --request-format {config.request_format}: such rows hold their prompts",
            hint=f"leave out {option}, or use --request-format rows",
        )


def _check_rows(config: PromptConfig) -> None:
    try:
        check_turns(config.turns)
    except ValueError as error:
        raise ConfigError(
            f"--turns {config.turns}: expected first, all or a number from 1",
            hint="`--turns all` answers the last user message of each conversation",
        ) from error
    given = [name for name, value in _prompts(config).items() if value]
    task = f"--task {config.task}"
    if TASK_PATHS.get(config.task) in SPEECH_URLS:
        if given or len(config.audio_columns) != 1:
            raise ConfigError(
                f"{' and '.join(given) or task}: expected one column with sounds, and no other prompt",
                hint="name it with --audio-column COLUMN",
            )
    elif len(given) != 1:
        raise ConfigError(
            f"{' and '.join(given) or 'no prompt option'}: expected one way to make prompts",
            hint="--messages-column, --prompt-column, --prompt-template FILE or --template NAME "
            "(`--template list` shows the names)",
        )
    is_pair_task = config.task in ("score", "rerank")
    if len(config.pair_columns) != (2 if is_pair_task else 0):
        raise ConfigError(
            f"--pair-columns with {task}: {len(config.pair_columns)} columns, expected two for the tasks score and "
            "rerank, and none for others",
            hint="as in --task score --pair-columns query,document",
        )
    _check_meaningless(config)


def _check_meaningless(config: PromptConfig) -> None:
    if config.task != "generate":
        of_texts = ("--continue-final", "--constraint-column", "--tools-column")
        option = _first_given({name: _of_rows(config)[name] for name in of_texts})
        if option:
            raise ConfigError(
                f"{option} with --task {config.task}: means nothing for this task",
                hint=f"leave {option} out",
            )
    if config.lora_column and not config.adapters:
        raise ConfigError("--lora-column: the run has no adapter", hint="add --lora NAME=PATH")
    if "tool_choice" in config.body and not (config.body.get("tools") or config.tools_column):
        raise ConfigError(
            "--tool-choice: the run has no tools", hint="add --tools FILE or --tools-column COLUMN"
        )
    if config.few_shot and config.prompt_column:
        raise ConfigError(
            "--few-shot with --prompt-column: a plain column has no answers to show",
            hint="use --template NAME, or a --prompt-template that loops over `examples`",
        )
    if config.pair_columns and config.truncate_prompt == "left":
        raise ConfigError(
            "--truncate-prompt left with --pair-columns: a pair can only lose the end of its texts",
            hint="use --truncate-prompt right",
        )


def _prompts(config: PromptConfig) -> dict[str, Any]:
    return {
        "--messages-column": config.messages_column,
        "--prompt-column": config.prompt_column,
        "--prompt-template": config.prompt_template,
        "--template": config.template_name,
        "--pair-columns": config.pair_columns,
    }


def _of_rows(config: PromptConfig) -> dict[str, Any]:
    """Return the other options that only rows of columns have."""
    return {
        "--as-chat": config.as_chat,
        "--system-prompt": config.system_prompt,
        "--continue-final": config.continue_final,
        "--blank-columns": config.blank_columns,
        "--few-shot": config.few_shot,
        "--constraint-column": config.constraint_column,
        "--lora-column": config.lora_column,
        "--tools-column": config.tools_column,
        **{f"--{kind}-column": names for kind, names in config.media_columns.items()},
    }


def _first_given(options: dict[str, Any]) -> str:
    return next((name for name, value in options.items() if value), "")
