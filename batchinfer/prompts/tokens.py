"""Renders the conversations of drafts, tokenizes their prompts, and cuts or refuses prompts that are too long."""

from __future__ import annotations

from batchinfer.core.errors import RowError
from batchinfer.core.records import Sampling
from batchinfer.core.tasks import is_pooling
from batchinfer.prompts.pooling import (
    encode_pair,
    fit_text,
    most_text_tokens,
    render_pair,
    too_long_text,
)
from batchinfer.prompts.types import Code, Draft, PromptConfig, RowProblem, Tokenizer


class PromptTokens:
    """Turns the prompts of drafts into tokens. Several threads may use it at once.

    Args:
        config: The prompt options.
        sampling: The run's sampling parameters.
        max_model_len: Largest number of tokens of prompt and answer together. With None no length is checked.
    """

    def __init__(self, config: PromptConfig, sampling: Sampling, max_model_len: int | None) -> None:
        self._config = config
        self._sampling = sampling
        self._max_model_len = max_model_len
        self._is_pooling = is_pooling(config.task)

    def fill(self, drafts: list[Draft], tokenizer: Tokenizer) -> None:
        """Give each draft its tokens. A draft whose prompt cannot have them fails."""
        for draft in drafts:
            if draft.messages is not None and draft.failure is None and not draft.media:
                self._render(draft, tokenizer)
            if draft.second is not None and draft.failure is None:
                self._join(draft, tokenizer)
        for special in (False, True):
            group = [
                draft
                for draft in drafts
                if draft.failure is None
                and draft.text is not None
                and draft.second is None
                and draft.add_special_tokens is special
                and not self._is_hopeless(draft, tokenizer)
            ]
            if group:
                _encode(group, tokenizer, add_special_tokens=special)
        if self._max_model_len is not None:
            for draft in drafts:
                if draft.failure is None and draft.token_ids is not None:
                    self._fit(draft, self._max_model_len, tokenizer)

    def _render(self, draft: Draft, tokenizer: Tokenizer) -> None:
        kwargs = self._config.chat_template_kwargs
        if draft.chat_template_kwargs:
            kwargs = {**kwargs, **draft.chat_template_kwargs}
        if draft.form is not None:
            kwargs = {**kwargs, "tools": draft.form.tools}
        try:
            draft.text = tokenizer.apply_chat_template(
                draft.messages or [],
                template=self._config.chat_template,
                continue_final=draft.continue_final,
                kwargs=kwargs,
                **({"is_whole": True} if self._is_pooling else {}),
            )
            draft.add_special_tokens = False
            if not draft.text:
                raise RowProblem(Code.EMPTY_PROMPT, "the chat template wrote nothing")
        except RowError as error:
            draft.fail(error)

    def _is_hopeless(self, draft: Draft, tokenizer: Tokenizer) -> bool:
        # Tokenizing a prompt of megabytes would delay all other rows. A prompt with more characters than the longest
        # allowed prompt can have is therefore refused without being tokenized.
        longest = tokenizer.longest_token
        is_cut = self._config.truncate_prompt != "error" or draft.most_prompt_tokens is not None
        if self._max_model_len is None or not longest or is_cut:
            return False
        num_chars = len(draft.text or "")
        if num_chars <= self._max_model_len * longest:
            return False
        make = too_long_text if self._is_pooling else _too_long
        draft.fail(make(f"{num_chars} characters, more than that many tokens", self._max_model_len))
        return True

    def _join(self, draft: Draft, tokenizer: Tokenizer) -> None:
        """Make a pair that the model reads together one prompt."""
        config, most = self._config, None
        if config.chat_template:
            render_pair(draft, tokenizer, config)
            return
        is_cut = config.truncate_prompt != "error" or draft.most_prompt_tokens is not None
        try:
            if is_cut and self._max_model_len is not None:
                most = most_text_tokens(draft, self._max_model_len)
            encode_pair(draft, tokenizer, most)
        except RowError as error:
            draft.fail(error)

    def _special_tokens(self, draft: Draft, tokenizer: Tokenizer) -> tuple[int, int]:
        """Return the numbers of special tokens at the beginning and the end of a prompt."""
        has_special = draft.add_special_tokens and draft.text is not None
        return tokenizer.special_tokens if has_special else (0, 0)

    def _fit(self, draft: Draft, max_model_len: int, tokenizer: Tokenizer) -> None:
        token_ids = draft.token_ids or []
        sampling = draft.sampling or self._sampling
        mode = "error" if draft.media else self._config.truncate_prompt
        try:
            if self._is_pooling:
                draft.token_ids = fit_text(
                    token_ids,
                    most_text_tokens(draft, max_model_len),
                    draft.truncation_side if draft.most_prompt_tokens is not None else mode,
                    self._special_tokens(draft, tokenizer),
                )
            else:
                draft.token_ids = fit_prompt(
                    cut_prompt(
                        token_ids,
                        draft.most_prompt_tokens,
                        max_model_len=max_model_len,
                        side=draft.truncation_side,
                    ),
                    max_model_len=max_model_len,
                    max_tokens=sampling.max_tokens,
                    mode=mode,
                )
        except RowError as error:
            draft.fail(error)
        draft.is_cut = draft.token_ids is not token_ids


def _encode(drafts: list[Draft], tokenizer: Tokenizer, *, add_special_tokens: bool) -> None:
    texts = [draft.text or "" for draft in drafts]
    try:
        encoded = tokenizer.encode(texts, add_special_tokens=add_special_tokens)
    except Exception as error:  # noqa: BLE001 -- tokenizers raise errors of any type
        if len(drafts) == 1:
            drafts[0].fail(RowProblem(Code.TOKENIZER_ERROR, f"{type(error).__name__}: {error}"))
            return
        for draft in drafts:
            _encode([draft], tokenizer, add_special_tokens=add_special_tokens)
        return
    for draft, token_ids in zip(drafts, encoded, strict=True):
        draft.token_ids = token_ids
        if not token_ids:
            draft.fail(RowProblem(Code.EMPTY_PROMPT, "the prompt has no token"))


def fit_prompt(
    token_ids: list[int], *, max_model_len: int, max_tokens: int | None, mode: str
) -> list[int]:
    """Return the prompt's tokens; a prompt that is too long loses some of them or is refused.

    With mode ``error`` a prompt may have at most `max_model_len` - 1 tokens, which leaves at least one for the answer.
    With the other modes it may have `max_model_len` - `max_tokens` tokens, or half of `max_model_len` if that is more.

    Args:
        token_ids: The prompt's tokens.
        max_model_len: Largest number of tokens of prompt and answer together.
        max_tokens: Number of tokens wanted for the answer; None counts as 1.
        mode: ``error`` to refuse a prompt that is too long, or the end of the prompt that loses tokens: ``left``,
            ``right`` or ``middle``.

    Raises:
        RowProblem: the prompt is too long and `mode` is ``error``.

    >>> fit_prompt([1, 2, 3, 4, 5, 6], max_model_len=5, max_tokens=1, mode="middle")
    [1, 2, 5, 6]
    """
    room = max_model_len - 1
    if mode == "error":
        if len(token_ids) > room:
            raise _too_long(f"{len(token_ids)} tokens", max_model_len)
        return token_ids
    room = max(max_model_len - max(max_tokens or 1, 1), max_model_len // 2, 1)
    if len(token_ids) <= room:
        return token_ids
    if mode == "left":
        return token_ids[-room:]
    if mode == "right":
        return token_ids[:room]
    head = (room + 1) // 2
    tail = room - head
    return token_ids[:head] + (token_ids[-tail:] if tail else [])


def cut_prompt(
    token_ids: list[int], most: int | None, *, max_model_len: int, side: str
) -> list[int]:
    """Return the prompt's tokens, cut as vLLM does by a request's `truncate_prompt_tokens`.

    Args:
        token_ids: The prompt's tokens.
        most: Number of tokens to keep; -1 for as many as leave room for one token of the answer, None for all.
        max_model_len: Largest number of tokens of prompt and answer together.
        side: Side that loses tokens: ``left`` or ``right``.

    Raises:
        RowProblem: more tokens are asked for than the model takes, or none.

    >>> (
    ...     cut_prompt([1, 2, 3], 2, max_model_len=5, side="left"),
    ...     cut_prompt([1, 2, 3], -1, max_model_len=3, side="right"),
    ... )
    ([2, 3], [1, 2])
    """
    if most is None:
        return token_ids
    name = "truncate_prompt_tokens"
    if most > max_model_len:
        finding = f"{name}: {most}, expected at most the model's {max_model_len}"
        raise RowProblem(Code.INVALID_PARAMETER, finding, param=name)
    kept = max_model_len - 1 if most < 0 else most
    if kept == 0:
        raise RowProblem(Code.EMPTY_PROMPT, f"{name}: 0 leaves no token", param=name)
    if len(token_ids) <= kept:
        return token_ids
    return token_ids[-kept:] if side == "left" else token_ids[:kept]


def _too_long(length: str, max_model_len: int) -> RowProblem:
    """Return the error for a prompt that is so long that the model has no token left for the answer."""
    return RowProblem(
        Code.PROMPT_TOO_LONG,
        f"the prompt has {length}, expected at most {max_model_len - 1} of the model's "
        f"{max_model_len} (--max-model-len, --truncate-prompt)",
    )
