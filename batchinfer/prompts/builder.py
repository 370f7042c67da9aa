"""Turns the lines of a chunk into requests for the engine: one result for each line, in order."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from batchinfer.core import codec, units
from batchinfer.core.errors import ConfigError, RowError, near
from batchinfer.core.records import AnswerForm, Request, RequestInput, RowKey, Sampling
from batchinfer.core.tasks import PairForm, is_pooling
from batchinfer.prompts import conversation, from_columns, from_requests
from batchinfer.prompts.constraint_process import ConstraintChecker
from batchinfer.prompts.constraints import problem_of_column
from batchinfer.prompts.media import with_link_passed_on
from batchinfer.prompts.model_names import ANY_NAME, ModelNames
from batchinfer.prompts.parameters import RequestLimits, check_run_sampling
from batchinfer.prompts.pooling import check_task
from batchinfer.prompts.render_process import FEW_ROWS, RenderProcess
from batchinfer.prompts.tokens import PromptTokens
from batchinfer.prompts.tools import ToolProblem, as_parameters, constraint_of, is_forced
from batchinfer.prompts.types import (
    COMPLETIONS_URL,
    TRUNCATIONS,
    Code,
    Draft,
    EngineFacts,
    Prepared,
    PromptConfig,
    RawRow,
    RequestFormat,
    RowProblem,
    Tokenizer,
)

REQUEST_FORMATS: dict[str, RequestFormat] = {
    request_format.name: request_format
    for request_format in (
        from_columns.ROWS,
        from_requests.COMPLETIONS,
        from_requests.OPENAI_BATCH,
    )
}
"""Every request format by its name."""
DEFAULT_REQUEST_FORMAT = PromptConfig().request_format

_SAMPLE = [{"role": "user", "content": "Hello"}]
"""Conversation with which `PromptBuilder` tests ``--chat-template`` before it reads any row."""


def find_request_format(name: str) -> RequestFormat:
    """Look up a request format by its name; an empty name means the default format.

    Raises:
        ConfigError: there is no request format of this name.
    """
    found = REQUEST_FORMATS.get(name or DEFAULT_REQUEST_FORMAT)
    if found is None:
        raise ConfigError(
            f"request format {name}: not known, expected one of {', '.join(REQUEST_FORMATS)}"
            + near(name, REQUEST_FORMATS),
            hint=f"`--request-format {DEFAULT_REQUEST_FORMAT}` is the default; "
            "for a run of a later version upgrade batchinfer",
        )
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRules:
    """What a run's engine takes, as far as it decides what becomes of a row."""

    own_parameters: frozenset[str] = frozenset()
    """Names of request parameters that go to the engine unread."""
    checker: ConstraintChecker | None = None
    """Object that compiles the constraints that rows state themselves, so that none reaches the engine that does not
    compile. None leaves this to the engine."""
    pairs: PairForm = PairForm.APART
    """How the model reads a pair of texts."""
    max_images: int | None = None
    """Largest number of images that a row may have. None leaves this to the engine."""
    fetches_links: bool = False
    """Whether the engine fetches images at http(s) links itself."""
    finds_calls: bool = True
    """Whether calls of tools are found in answers that no constraint makes calls."""
    finds_reasoning: bool = False
    """Whether reasoning is taken out of answers."""
    own_names: Collection[str] = (ANY_NAME,)
    """Names by which rows may ask for the model, beside those in the prompt options."""


class PromptBuilder:
    """Turns rows into requests. Several threads may use it at once.

    Args:
        config: The options that say how rows become prompts. The constructor checks them.
        sampling: The run's sampling parameters. A parameter that a request sets itself replaces the run's.
        run_seed: The run's seed. The seed of a row is computed from it and the row's key. With None, rows get no
            computed seeds.
        tokenizer: The model's tokenizer. With None nothing is tokenized here, and the engine renders conversations and
            tokenizes prompts.
        max_model_len: Largest number of tokens of prompt and answer together. With None the builder does not check
            lengths and leaves this to the engine.
        needs_prompt: Whether the output format needs each row's prompt. Then prompts are kept even without
            ``--keep-prompt``.
        rules: What the run's engine takes.

    Raises:
        ConfigError: options contradict each other, or one of them has a value that cannot work.
    """

    def __init__(
        self,
        config: PromptConfig,
        sampling: Sampling,
        run_seed: int | None,
        tokenizer: Tokenizer | None,
        max_model_len: int | None,
        *,
        needs_prompt: bool = False,
        rules: EngineRules | None = None,
    ) -> None:
        _check_values(config)
        check_task(config, sampling, run_seed)
        try:
            check_run_sampling(
                sampling, RequestLimits(max_n=config.max_n, max_logprobs=config.max_logprobs)
            )
        except RowProblem as error:
            raise ConfigError(
                f"sampling options: {error.message} ({_flags_of(error.param)})",
                hint="see the sampling options in docs/cli.md",
            ) from error
        self._config = config
        self._sampling = sampling
        self._run_seed = run_seed
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len
        self._tokens = PromptTokens(config, sampling, max_model_len)
        self._has_prompt = config.keep_prompt or needs_prompt
        rules = rules or EngineRules()
        self._is_pooling = is_pooling(config.task)
        # A pooling model reads the end of its text, also if that is an end-of-sequence token.
        is_end_removed = tokenizer is not None and not self._is_pooling
        facts = EngineFacts(
            eos_token=tokenizer.eos_token if tokenizer is not None and is_end_removed else "",
            pairs=rules.pairs,
            own_parameters=rules.own_parameters,
            finds_calls=rules.finds_calls,
        )
        self._is_remote = "tools" in rules.own_parameters
        self._checker = rules.checker
        self._rules = rules
        self._finds_reasoning = rules.finds_reasoning
        self._plain_form = AnswerForm(template_kwargs=config.chat_template_kwargs or None)
        """Form of answers that may have reasoning and no calls."""
        self._names = ModelNames(config, rules.own_names)
        self._reader = find_request_format(config.request_format).make_reader(
            config, sampling, facts
        )
        if self._reader.is_chat:
            self._check_chat()

    @property
    def needed_columns(self) -> dict[str, list[str]]:
        """Columns that every row needs to become the request that the options ask for. Keys name the options."""
        return self._reader.needed_columns

    @property
    def rows_at_once(self) -> int:
        """Most rows that `build` should get at once for now; few if each of them may take seconds."""
        is_slow = self._checker is not None and self._checker.is_slow
        return FEW_ROWS if is_slow else self._reader.rows_at_once

    def build(self, chunk: str, first_row: int, rows: Sequence[RawRow]) -> list[Prepared]:
        """Return one result for each row, in the order of `rows`. The result of a bad row holds a failure.

        Args:
            chunk: Name of the chunk. The key of a row is this name and the row's line index.
            first_row: Number of the chunk's first row in the job; 0 for a chunk that `split` did not make.
            rows: Some lines of this chunk, in any order.
        """
        drafts = [Draft(first_row + row.line_index) for row in rows]
        self._reader.fill(drafts, [row.data for row in rows])
        self._offer_tools(drafts)
        self._constrain(drafts)
        self._find_adapters(drafts)
        self._check_images(drafts)
        for draft in drafts:
            if not draft.id:
                draft.id = str(draft.row)
        parts = [part for draft in drafts for part in draft.parts]
        if self._tokenizer is not None:
            whole = [draft for draft in drafts if not draft.parts] if parts else drafts
            self._tokens.fill(whole + parts, self._tokenizer)
        for draft in drafts:
            draft.fail_with_parts()
        seed_of = None if self._run_seed is None else codec.row_seeds(self._run_seed, chunk)
        return [
            self._finish((chunk, row.line_index), draft, seed_of)
            for row, draft in zip(rows, drafts, strict=True)
        ]

    def _finish(self, key: RowKey, draft: Draft, seed_of: Callable[[int], int] | None) -> Prepared:
        if draft.failure is not None:
            return Prepared(
                key=key,
                row=draft.row,
                id=draft.id,
                failure=draft.failure,
                source=draft.source,
                body=draft.body,
                url=draft.url,
                is_chat=draft.messages is not None,
                param=draft.param,
            )
        text, token_ids, messages = _content(draft)
        prompt = None
        view = draft.view
        if self._has_prompt or (view is not None and view.echo):
            prompt = self._prompt_of(draft)
        return Prepared(
            key=key,
            row=draft.row,
            id=draft.id,
            request=Request(
                key=key,
                sampling=self._sampling_of(key[1], draft, seed_of),
                text=text,
                token_ids=token_ids,
                messages=messages,
                adapter=draft.adapter,
                task=draft.task or self._config.task,
                chat_options=None if messages is None else self._chat_options(draft),
                returns_token_ids=draft.returns_token_ids,
                priority=draft.priority,
                inputs=list(map(_input_of, draft.parts)),
                num_queries=draft.num_queries,
                pooling=draft.pooling,
                form=self._form_of(draft),
            ),
            source=draft.source,
            body=draft.body,
            prompt=prompt,
            url=draft.url,
            is_chat=draft.messages is not None,
            view=view,
            media=draft.media,
            is_repeatable=self._is_pooling or is_repeatable(draft.sampling or self._sampling),
        )

    def _chat_options(self, draft: Draft) -> dict[str, Any] | None:
        """Return how the engine should render a conversation, by the names of vLLM's chat requests."""
        options: dict[str, Any] = {}
        if self._config.chat_template:
            options["chat_template"] = self._config.chat_template
        kwargs = {**self._config.chat_template_kwargs, **(draft.chat_template_kwargs or {})}
        if draft.form is not None:
            kwargs["tools"] = draft.form.tools
        if kwargs:
            options["chat_template_kwargs"] = kwargs
        if draft.continue_final:
            options |= {"continue_final_message": True, "add_generation_prompt": False}
        return options or None

    def _form_of(self, draft: Draft) -> AnswerForm | None:
        """Return what the answer may hold beside its text, with all that a parser of answers has to know."""
        is_read = not self._is_pooling and draft.url != COMPLETIONS_URL
        may_reason = self._finds_reasoning and is_read
        if draft.form is None and not may_reason:
            return None
        form, own = draft.form or self._plain_form, draft.chat_template_kwargs
        changes: dict[str, Any] = {}
        if own or (draft.form is not None and self._plain_form.template_kwargs):
            changes["template_kwargs"] = {**self._config.chat_template_kwargs, **(own or {})}
        if not draft.includes_reasoning:
            changes["hides_reasoning"] = True
        return msgspec.structs.replace(form, **changes) if changes else form

    def _find_adapters(self, drafts: list[Draft]) -> None:
        column, only = self._config.lora_column, self._config.adapter_of_all
        subject, param = (f"column {column!r}", None) if column else ("model", "model")
        for draft in drafts:
            draft.adapter = only
            if draft.model is None or draft.failure is not None:
                continue
            try:
                draft.adapter = self._names.adapter_of(draft.model, subject=subject, param=param)
            except RowProblem as error:
                draft.fail(error)

    def _check_images(self, drafts: list[Draft]) -> None:
        most = self._rules.max_images
        for draft in drafts:
            if not draft.media or draft.failure is not None:
                continue
            if self._is_pooling:
                problem = "the row has images, expected texts: the run's task takes no images"
                draft.fail(RowProblem(Code.UNSUPPORTED_CONTENT, problem))
            elif draft.most_prompt_tokens is not None:
                name = "truncate_prompt_tokens"
                problem = f"{name}: a prompt with images cannot be cut"
                draft.fail(RowProblem(Code.INVALID_PARAMETER, problem, param=name))
            elif most is not None and len(draft.media) > most:
                has = f"the row has {units.many(len(draft.media), 'image')}"
                problem = f"{has}, expected at most {most} (--limit-mm-per-prompt)"
                draft.fail(RowProblem(Code.TOO_MANY_MEDIA, problem))
            elif self._rules.fetches_links:
                draft.media = [with_link_passed_on(each) for each in draft.media]

    def _offer_tools(self, drafts: list[Draft]) -> None:
        """Let a constraint make an answer the calls that its row's choice of tools asks for.

        An engine that takes tools as parameters of requests gets them so, and does the rest.
        """
        for draft in drafts:
            form = draft.form
            if form is None or draft.failure is not None:
                continue
            if self._is_remote:
                sampling = draft.sampling or self._sampling
                extra = {**(sampling.extra or {}), **as_parameters(form)}
                draft.sampling = msgspec.structs.replace(sampling, extra=extra)
                draft.form = None
            elif is_forced(form):
                try:
                    draft.constraint, draft.constraint_param = constraint_of(form), "tools"
                except ToolProblem as problem:
                    draft.fail(
                        RowProblem(Code.INVALID_PARAMETER, f"tools: {problem}", param="tools")
                    )

    def _constrain(self, drafts: list[Draft]) -> None:
        """Put rows' own constraints in place of the run's. A row whose constraint does not compile fails."""
        for draft in drafts:
            constraint = draft.constraint
            if constraint is None or draft.failure is not None:
                continue
            problem = self._checker.problem_of(constraint) if self._checker is not None else ""
            if not problem:
                sampling = draft.sampling or self._sampling
                draft.sampling = msgspec.structs.replace(sampling, structured=constraint)
            elif draft.constraint_param == "tools" and self._config.tools_column:
                message = f"column {self._config.tools_column!r}: a schema of parameters {problem}"
                draft.fail(RowProblem(Code.INVALID_TOOLS, message))
            elif draft.constraint_param is None:
                draft.fail(problem_of_column(str(self._config.constraint_column), problem))
            else:
                name = draft.constraint_param
                draft.fail(RowProblem(Code.INVALID_PARAMETER, f"{name}: {problem}", param=name))

    def _sampling_of(
        self, line_index: int, draft: Draft, seed_of: Callable[[int], int] | None
    ) -> Sampling:
        sampling = draft.sampling or self._sampling
        # Only the engine knows how many tokens images take.
        has_length = draft.token_ids is not None and not draft.media
        if draft.is_open_ended and has_length and self._max_model_len is not None:
            room = self._max_model_len - len(draft.token_ids or ())
            sampling = msgspec.structs.replace(sampling, max_tokens=max(room, 1))
        if seed_of is None or sampling.seed is not None or self._is_pooling:
            return sampling
        # At temperature 0 a seed changes nothing, so the row gets none. With temperature None the engine samples at its
        # default temperature, so the row gets a seed.
        if sampling.temperature is not None and sampling.temperature <= 0:
            return sampling
        return msgspec.structs.replace(sampling, seed=seed_of(line_index))

    def _prompt_of(self, draft: Draft) -> Any:
        if draft.is_cut and self._tokenizer is not None and draft.token_ids is not None:
            return self._tokenizer.decode(draft.token_ids)
        if draft.parts:
            prompts = [self._prompt_of(part) for part in draft.parts]
            return prompts if len(prompts) > 1 else prompts[0]
        if draft.second is not None:
            return [draft.text, draft.second]
        if draft.text is not None:
            return draft.text
        if draft.token_ids is not None:
            if draft.view is not None and draft.view.echo and self._tokenizer is not None:
                return self._tokenizer.decode(draft.token_ids)
            return draft.token_ids
        if draft.media and self._tokenizer is not None:
            return self._shown(draft, self._tokenizer)
        return draft.messages

    def _shown(self, draft: Draft, tokenizer: Tokenizer) -> Any:
        """Return a conversation with images as text, for people; its messages if the template cannot write it.

        The engine renders such a conversation itself.
        """
        kwargs = {**self._config.chat_template_kwargs, **(draft.chat_template_kwargs or {})}
        try:
            return tokenizer.apply_chat_template(
                draft.messages or [],
                template=self._config.chat_template,
                continue_final=draft.continue_final,
                kwargs=kwargs,
            )
        except RowError:
            return draft.messages

    # ------------------------------------------------------------------ checks

    def _check_chat(self) -> None:
        template = self._config.chat_template
        if template:
            values = {
                "messages": _SAMPLE,
                "add_generation_prompt": True,
                "bos_token": "",
                "eos_token": "",
                "tools": self._config.tools or None,
                **self._config.chat_template_kwargs,
            }
            process = RenderProcess(
                template, name="--chat-template", values=values, is_strict=False
            )
            [rendered] = process.render([b"{}"])
            if rendered.text is None:
                raise ConfigError(
                    f"--chat-template fails on a conversation of one user message: {rendered.message}",
                    hint="the template gets `messages` and `add_generation_prompt`",
                )
        elif (
            self._tokenizer is not None
            and not self._tokenizer.has_chat_template
            and not self._config.image_columns  # the engine finds the template of the model's processor
        ):
            raise ConfigError(
                "the model's tokenizer has no chat template, expected one for a messages column",
                hint="pass --chat-template @FILE, or make plain text prompts with --prompt-template",
            )


def _content(
    draft: Draft,
) -> tuple[str | None, list[int] | None, list[dict[str, Any]] | None]:
    """Return the prompt of a request as its text, its token ids, or its messages; the other two are None."""
    if draft.token_ids is not None:
        return None, draft.token_ids, None
    if draft.messages is None:
        return draft.text, None, None
    return draft.text, None, conversation.with_texts(draft.messages)


def _input_of(part: Draft) -> RequestInput:
    text, token_ids, messages = _content(part)
    return RequestInput(
        text=text, token_ids=token_ids, messages=messages, second_start=part.second_start
    )


def is_repeatable(sampling: Sampling) -> bool:
    """Whether two requests with these parameters, before rows get seeds, must have the same answer."""
    is_greedy = sampling.temperature is not None and sampling.temperature <= 0
    return is_greedy or sampling.seed is not None


def _flags_of(parameter: str | None) -> str:
    """Return the options that may have set a sampling parameter."""
    from batchinfer.cli.run_options import OPTIONS

    own = [each.flag for each in OPTIONS if (each.struct, each.target) == ("Sampling", parameter)]
    return " or ".join([*own, "--sampling"])


def _check_values(config: PromptConfig) -> None:
    if (mode := config.truncate_prompt) not in TRUNCATIONS:
        raise ConfigError(
            f"--truncate-prompt {mode}: expected one of {', '.join(TRUNCATIONS)}{near(mode, TRUNCATIONS)}",
            hint=f"`--truncate-prompt {TRUNCATIONS[0]}` is the default",
        )
    if config.lora_column and not config.adapters:
        raise ConfigError("--lora-column: the run has no adapter", hint="add --lora NAME=PATH")
    texts = {
        "--system-prompt": config.system_prompt,
        "--continue-final": config.continue_final if isinstance(config.continue_final, str) else "",
    }
    for option, text in texts.items():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ConfigError(f"{option}: holds bytes that are no text, expected UTF-8") from error
