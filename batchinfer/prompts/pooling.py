"""What tasks other than to generate text change about a run's options and rows."""

from __future__ import annotations

from batchinfer.core.errors import ConfigError, RowError
from batchinfer.core.records import Sampling
from batchinfer.core.tasks import CLASSIFY, EMBED, SCORE, TOKEN_EMBED, is_pooling
from batchinfer.prompts.types import Code, Draft, PromptConfig, RowProblem, Tokenizer

_FLAGS = {
    "structured": "--json-schema, --choices, --regex, --grammar or --structural-tag",
    "best_of": "--sampling best_of",
    "prompt_logprobs": "--sampling prompt_logprobs",
    "logit_bias": "--sampling logit_bias",
    "min_tokens": "--sampling min_tokens",
    "ignore_eos": "--sampling ignore_eos",
    "skip_special_tokens": "--sampling skip_special_tokens",
    "include_stop_str_in_output": "--sampling include_stop_str_in_output",
}
"""How the sampling parameters are spelled that have no option of their own name."""


def check_task(config: PromptConfig, sampling: Sampling, run_seed: int | None) -> None:
    """Refuse options that mean nothing for the run's task.

    Raises:
        ConfigError: the message names the option.
    """
    task = config.task
    if not is_pooling(task):
        for option, value in {
            "--pair-columns": config.pair_columns,
            "--embedding-format": config.embedding_format,
        }.items():
            if value:
                raise ConfigError(
                    f"{option} with --task {task}: this task makes texts",
                    hint="add --task embed or --task score; see docs/embeddings.md",
                )
        return
    unused = _sampling_options(sampling)
    # The default seed is 0. A seed that was asked for would change nothing.
    unused += ["--seed"] if run_seed != 0 else []
    unused += [
        option
        for option, value in {
            "--continue-final": config.continue_final,
            "--constraint-column": config.constraint_column,
            "--strip": config.strip,
            "--image-column": config.image_columns,
            "--tools": config.tools,
            "--tools-column": config.tools_column,
            "--tool-choice": config.tool_choice,
        }.items()
        if value
    ]
    if config.embedding_format and task not in (EMBED, TOKEN_EMBED):
        unused.append("--embedding-format")
    if config.pair_columns and task != SCORE:
        unused.append("--pair-columns")
    if task not in (EMBED, CLASSIFY, SCORE) and config.request_format == "openai-batch":
        unused.append("--request-format openai-batch")
    for option, value in {
        "--request-format completions": config.request_format,
        "--output-format completions": config.output_format,
    }.items():
        if value == "completions":
            unused.append(option)
    if unused:
        raise ConfigError(
            f"{unused[0]} with --task {task}: means nothing for this task",
            hint=f"leave {' and '.join(unused)} out",
        )
    if config.pair_columns and len(config.pair_columns) != 2:
        raise ConfigError(
            f"--pair-columns {','.join(config.pair_columns)}: expected two columns",
            hint="as in --pair-columns query,document",
        )
    if config.pair_columns and config.truncate_prompt in ("left", "middle"):
        raise ConfigError(
            f"--truncate-prompt {config.truncate_prompt} with --pair-columns: a pair can only lose the end of its "
            "second text",
            hint="use --truncate-prompt right",
        )


def _sampling_options(sampling: Sampling) -> list[str]:
    """Return the options that have set sampling parameters."""
    nothing = Sampling()
    found = []
    for name in Sampling.__struct_fields__:
        value = getattr(sampling, name)
        if value == getattr(nothing, name):
            continue
        if name == "extra":
            found += [f"--sampling {key}" for key in value]
        else:
            found.append(_FLAGS.get(name, "--" + name.replace("_", "-")))
    return found


# --------------------------------------------------------------------------- prompts


def render_pair(draft: Draft, tokenizer: Tokenizer, config: PromptConfig) -> None:
    """Make a pair one text by --chat-template, which gets a message of a `query` and one of a `document`."""
    pair = {"query": draft.text, "document": draft.second}
    try:
        draft.text = tokenizer.apply_chat_template(
            [{"role": role, "content": text} for role, text in pair.items()],
            template=config.chat_template,
            continue_final=False,
            kwargs=config.chat_template_kwargs,
            is_whole=True,
        )
        draft.second = None
    except RowError as error:
        draft.fail(error)


def encode_pair(draft: Draft, tokenizer: Tokenizer, most: int | None) -> None:
    """Tokenize a pair, whose second text is cut to `most` tokens in all; None cuts nothing."""
    try:
        draft.token_ids, draft.second_start = tokenizer.encode_pair(
            draft.text or "", draft.second or "", max_tokens=most
        )
    except RowError as error:
        draft.fail(error)
    except Exception as error:  # noqa: BLE001 -- tokenizers raise errors of any type
        draft.fail(RowProblem(Code.TOKENIZER_ERROR, f"{type(error).__name__}: {error}"))


def most_text_tokens(draft: Draft, max_model_len: int) -> int:
    """Return the most tokens that a text may have: the model's, or those to which the request itself cuts it.

    Raises:
        RowProblem: the request asks for more tokens than the model takes, or for none.
    """
    asked, name = draft.most_prompt_tokens, "truncate_prompt_tokens"
    if asked is None or asked < 0:
        return max_model_len
    if asked > max_model_len:
        finding = f"{name}: {asked}, expected at most the model's {max_model_len}"
        raise RowProblem(Code.INVALID_PARAMETER, finding, param=name)
    if asked == 0:
        raise RowProblem(Code.EMPTY_PROMPT, f"{name}: 0 leaves no token", param=name)
    return asked


def fit_text(token_ids: list[int], most: int, mode: str, num_special: tuple[int, int]) -> list[int]:
    """Return the tokens of a text for a pooling model, which needs no room for an answer.

    A text that is too long is refused, or loses tokens of its own, but none of its special tokens.

    Args:
        token_ids: The text's tokens.
        most: Largest number of tokens.
        mode: ``error`` to refuse a text that is too long, or the end that loses tokens: ``left``, ``right`` or
            ``middle``.
        num_special: Number of special tokens at the beginning and at the end.

    Raises:
        RowProblem: the text is too long and `mode` is ``error``.

    >>> (
    ...     fit_text([1, 11, 12, 13, 2], 4, "right", (1, 1)),
    ...     fit_text([1, 11, 12, 13, 2], 4, "left", (1, 1)),
    ... )
    ([1, 11, 12, 2], [1, 12, 13, 2])
    """
    if len(token_ids) <= most:
        return token_ids
    if mode == "error":
        raise too_long_text(f"{len(token_ids)} tokens", most)
    before, after = num_special
    room = most - before - after
    if room < 1:
        return token_ids[:most]
    own = token_ids[before : len(token_ids) - after]
    head = {"left": 0, "right": room}.get(mode, (room + 1) // 2)
    kept = own[:head] + own[len(own) - (room - head) :]
    return token_ids[:before] + kept + token_ids[len(token_ids) - after :]


def too_long_text(length: str, most: int) -> RowProblem:
    """Return the error for a text that is too long for a pooling model."""
    return RowProblem(
        Code.PROMPT_TOO_LONG,
        f"the text has {length}, expected at most the model's {most} (--max-model-len, --truncate-prompt)",
    )
