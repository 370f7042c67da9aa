"""The request format `rows`: prompts are made from columns, and rows bring no sampling parameters of their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from batchinfer.core.errors import ConfigError
from batchinfer.core.json_text import flatten_deep
from batchinfer.core.records import Failure
from batchinfer.core.tasks import PairForm, is_pooling
from batchinfer.prompts import conversation, json_lines
from batchinfer.prompts.constraints import ConstraintProblem, problem_of_column, read_column
from batchinfer.prompts.json_lines import ID_FIELD, ROW_FIELD
from batchinfer.prompts.media import read_images, take_images
from batchinfer.prompts.render_process import MANY_ROWS, RenderProcess
from batchinfer.prompts.templates import examples_text, named_template
from batchinfer.prompts.tools import RowTools
from batchinfer.prompts.types import (
    Code,
    Draft,
    PromptConfig,
    RequestFormat,
    RowProblem,
    fill_each,
)

_UNSET = msgspec.UNSET
_MANY_TOKENS = 2**32
"""Every token id must be below this number, because engines get token ids as four bytes."""
_PROMPT_HINT = (
    "pass one of --messages-column, --prompt-column, --prompt-template FILE or --template NAME "
    "(`--template list` shows the names)"
)


class RowsReader:
    """The reader of the request format `rows`; see `RowReader`.

    Args:
        config: The prompt options.
        eos_token: Text of the end-of-sequence token. It is removed from the end of text prompts, because a model
            generates nothing useful after it.
        pairs: How the model reads the texts of --pair-columns.
        finds_calls: Whether calls of tools are found in answers that no constraint makes calls.

    Raises:
        ConfigError: options contradict each other, or a template or an example cannot be used.
    """

    def __init__(
        self,
        config: PromptConfig,
        *,
        eos_token: str,
        pairs: PairForm = PairForm.APART,
        finds_calls: bool = True,
    ) -> None:
        self._config = config
        self._eos_token = eos_token
        self._pair_form = pairs
        self._pair = config.pair_columns or []
        self._is_judged = is_pooling(config.task)
        self._messages_column = config.messages_column
        self._template: RenderProcess | None = None
        self._prefix = ""
        _check_choice(config)
        if config.template_name:
            named = named_template(config.template_name)
            self._messages_column = named.messages_column
            if named.source:
                self._prefix = examples_text(named, config.few_shot)
                self._template = RenderProcess(
                    named.source,
                    name=f"--template {named.name}",
                    values={},
                    blank_columns=config.blank_columns,
                )
        elif config.prompt_template:
            self._template = RenderProcess(
                config.prompt_template,
                name="--prompt-template",
                values={"examples": config.few_shot, "system_prompt": config.system_prompt},
                blank_columns=config.blank_columns,
            )
        self.is_chat = bool(self._messages_column) or config.as_chat
        self._prefill = config.continue_final if isinstance(config.continue_final, str) else ""
        self._turns = _turns(config.turns)
        self._num_user_turns = (
            self._turns if isinstance(self._turns, int) else int(self._turns == "first")
        )
        is_answer_sent = config.continue_final is True or self._is_judged
        self._is_first_only = self._num_user_turns == 1 and not is_answer_sent
        self._examples = self._example_messages() if self._messages_column else []
        self._check_chat_options()
        self._image_columns = list(config.image_columns or [])
        self._tools = None
        if config.tools or config.tools_column or config.tool_choice:
            self._tools = RowTools(config, finds_calls=finds_calls)
        self._keep = [] if config.keep == ["*"] else config.keep
        self._keep_all = config.keep == ["*"]
        self._column = self._messages_column or config.prompt_column
        self._project: Callable[[bytes], tuple[Any, ...]] | None = None
        if not self._keep_all:
            self._projected = [ROW_FIELD]
            self._id_position = self._position(config.id_column or ID_FIELD)
            # A template's process gets the whole line, so no column is decoded for it here.
            self._value_position = self._position(self._column or ROW_FIELD)
            own = (
                config.lora_column,
                config.constraint_column,
                config.tools_column,
                *self._image_columns,
            )
            self._own_positions = {name: self._position(name) for name in own if name}
            self._has_own = bool(self._own_positions) or self._tools is not None
            self._pair_positions = [self._position(name) for name in self._pair]
            self._kept_positions = {name: self._position(name) for name in self._keep}
            # Conversations can be long. If only the first turn is sent and --keep does not name the column,
            # the messages after the first turn need not be decoded.
            is_wanted_whole = not self._is_first_only or self._messages_column in self._keep
            lazy = [self._messages_column] if self._messages_column and not is_wanted_whole else []
            self._project = json_lines.projection(self._projected, lazy=lazy)

    def _position(self, column: str) -> int:
        # Returns the column's index in the decoded tuple. A column with two uses, for example as id and as kept column,
        # is decoded once.
        if column not in self._projected:
            self._projected.append(column)
        return self._projected.index(column)

    @property
    def needed_columns(self) -> dict[str, list[str]]:
        """See `RowReader.needed_columns`."""
        config = self._config
        needed = {
            "--prompt-column": [config.prompt_column],
            "--messages-column": [config.messages_column],
            "--pair-columns": list(self._pair),
            "--id-column": [config.id_column],
            "--image-column": self._image_columns,
        }
        if config.template_name:
            needed[f"--template {config.template_name}: the column"] = (
                [self._messages_column] if self._messages_column else self._template_columns
            )
        elif self._template is not None:
            needed["--prompt-template: the variable"] = self._template_columns
        return needed

    @property
    def _template_columns(self) -> list[str]:
        blank = self._config.blank_columns
        columns = self._template.needed_columns if self._template is not None else []
        return [name for name in columns if name not in blank]

    @property
    def rows_at_once(self) -> int:
        """See `RowReader.rows_at_once`."""
        return MANY_ROWS if self._template is None else self._template.rows_at_once

    def fill(self, drafts: Sequence[Draft], lines: Sequence[bytes]) -> None:
        """Read rows. See `RowReader.fill`."""
        fill_each(self._fill, drafts, lines)
        if self._template is not None:
            pairs = zip(drafts, lines, strict=True)
            self._render(
                self._template, [(draft, line) for draft, line in pairs if draft.failure is None]
            )

    def _render(self, template: RenderProcess, rows: list[tuple[Draft, bytes]]) -> None:
        texts = template.render([line for _, line in rows])
        for (draft, _), rendered in zip(rows, texts, strict=True):
            if rendered.text is None:
                draft.failure = Failure(code=rendered.code, message=rendered.message)
                continue
            try:
                self._fill_text(draft, self._prefix + rendered.text)
            except RowProblem as error:
                draft.fail(error)

    def _fill(self, draft: Draft, data: bytes) -> None:
        if self._project is not None:
            # A kept column goes into the output line. If it is nested too deep for readers, it becomes its JSON text.
            found = self._project(flatten_deep(data) if self._kept_positions else data)
            row, row_id, value = found[0], found[self._id_position], found[self._value_position]
            if row_id is not _UNSET and row_id is not None:
                draft.id = row_id if type(row_id) is str else json_lines.as_id(row_id)
            if self._kept_positions:
                draft.source = {
                    name: found[position]
                    for name, position in self._kept_positions.items()
                    if found[position] is not _UNSET
                }
            if row != draft.row:
                json_lines.check_place(draft, row)
            if self._has_own:
                own = {name: found[position] for name, position in self._own_positions.items()}
                self._fill_own(draft, own, data)
            pair = [found[position] for position in self._pair_positions]
            if type(value) is list and value and type(value[0]) is msgspec.Raw:
                first = [json_lines.decode_item(value[0], data)]
                messages = conversation.first_turn(first)
                if messages is not None:
                    self._send(draft, messages)
                    return
                value = first + [json_lines.decode_item(item, data) for item in value[1:]]
        else:
            columns = json_lines.decode_object(data)
            row, value = self._from_columns(draft, columns)
            json_lines.check_place(draft, row)
            self._fill_own(draft, columns, data)
            pair = [columns.get(name, _UNSET) for name in self._pair]
        if pair:
            self._fill_pair(draft, pair, data)
            return
        if self._template is not None:
            return
        if value is _UNSET:
            raise json_lines.missing_column(self._column, data)
        if self._messages_column:
            self._fill_messages(draft, value)
        else:
            self._fill_prompt(draft, value)

    def _fill_pair(self, draft: Draft, values: list[Any], data: bytes) -> None:
        for name, value in zip(self._pair, values, strict=True):
            if value is _UNSET:
                raise json_lines.missing_column(name, data)
            if not isinstance(value, str):
                raise RowProblem(
                    Code.INVALID_PROMPT,
                    f"column {name!r} holds a JSON {json_lines.json_type(value)}, expected a text",
                )
            if not value:
                raise RowProblem(Code.EMPTY_PROMPT, f"column {name!r} is empty, expected text")
        set_pairs(draft, [(values[0], values[1])], form=self._pair_form)

    def _fill_own(self, draft: Draft, columns: Mapping[str, Any], data: bytes) -> None:
        """Take what columns say about this row alone: its adapter, its constraint, its images."""
        config = self._config
        if config.lora_column:
            draft.model = columns.get(config.lora_column)
        if config.constraint_column:
            value = columns.get(config.constraint_column)
            try:
                draft.constraint = read_column(None if value is _UNSET else value)
            except ConstraintProblem as problem:
                raise problem_of_column(str(config.constraint_column), problem) from problem
        if self._tools is not None:
            tools = columns.get(config.tools_column) if config.tools_column else None
            draft.form = self._tools.form_of(None if tools is _UNSET else tools)
        for name in self._image_columns:
            value = columns.get(name, _UNSET)
            if value is _UNSET:
                raise json_lines.missing_column(name, data)
            if images := read_images(value, f"column {name!r}"):
                draft.media = [*(draft.media or []), *images]

    def _from_columns(self, draft: Draft, columns: dict[str, Any]) -> tuple[Any, Any]:
        row = columns.pop(ROW_FIELD, _UNSET)
        row_id = columns.pop(ID_FIELD, None)
        if self._config.id_column:
            row_id = columns.get(self._config.id_column)
        if row_id is not None:
            draft.id = json_lines.as_id(row_id)
        if self._keep_all:
            draft.source = dict(columns)
        elif self._keep:
            draft.source = {name: columns[name] for name in self._keep if name in columns}
        return row, columns.get(self._column, _UNSET)

    def _fill_messages(self, draft: Draft, value: Any) -> None:
        continue_own = self._config.continue_final is True
        if self._is_judged:
            whole = conversation.read_conversation(value)
            self._send(draft, conversation.with_answers(whole, self._turns))
            return
        messages = conversation.first_turn(value) if self._is_first_only else None
        if messages is None:
            messages = conversation.select_turns(
                conversation.read_conversation(
                    value, num_user_turns=self._num_user_turns, num_more=int(continue_own)
                ),
                self._turns,
                continue_final=continue_own,
            )
        self._send(draft, messages)
        if continue_own:
            draft.continue_final = True

    def _send(self, draft: Draft, messages: list[conversation.Message]) -> None:
        """Make these messages the prompt, and add images, and what the options say comes before and after them."""
        if draft.media or any(type(message["content"]) is not str for message in messages):
            messages, images = take_images(messages, draft.media or [])
            draft.media = images or None
        if self._config.system_prompt:
            messages = conversation.with_system(messages, self._config.system_prompt)
        if self._examples:
            messages = conversation.with_examples(messages, self._examples)
        if self._prefill:
            messages = [*messages, {"role": "assistant", "content": self._prefill}]
            draft.continue_final = True
        draft.messages = messages

    def _fill_prompt(self, draft: Draft, value: Any) -> None:
        if isinstance(value, str):
            self._fill_text(draft, value)
        else:
            if self._config.as_chat or self._prefill:
                raise RowProblem(
                    Code.INVALID_PROMPT,
                    f"column {self._column!r} holds a JSON {json_lines.json_type(value)}, expected a text",
                )
            draft.token_ids = token_ids(value, f"column {self._column!r}")

    def _fill_text(self, draft: Draft, text: str) -> None:
        if self._eos_token:
            end = len(text)
            while text.endswith(self._eos_token, 0, end):
                end -= len(self._eos_token)
            text = text[:end]
        if not text:
            raise RowProblem(Code.EMPTY_PROMPT, "the prompt is empty, expected text")
        if self._config.as_chat:
            self._fill_messages(draft, [{"role": "user", "content": text}])
        else:
            draft.text = text + self._prefill

    def _example_messages(self) -> list[conversation.Message]:
        messages: list[conversation.Message] = []
        for index, example in enumerate(self._config.few_shot):
            try:
                found = conversation.read_conversation(example.get(self._messages_column))
            except RowProblem as error:
                raise ConfigError(f"--few-shot example {index}: {error.message}") from error
            if any(conversation.has_images(message) for message in found):
                raise ConfigError(
                    f"--few-shot example {index}: holds an image, expected texts",
                    hint="put worked examples with images into each row's own conversation",
                )
            messages += [message for message in found if message["role"] != "system"]
        return messages

    def _check_chat_options(self) -> None:
        config = self._config
        if config.as_chat and self._messages_column:
            raise ConfigError(
                "--as-chat with a messages column: it is a chat already, expected one of the two",
                hint="leave out --as-chat",
            )
        if config.system_prompt and not self.is_chat:
            is_used = self._template is not None and "system_prompt" in self._template.variables
            if not is_used:
                raise ConfigError(
                    "--system-prompt: the prompt is plain text, expected a chat",
                    hint="add --as-chat, or write {{ system_prompt }} into the template",
                )
        if config.continue_final is True and not self._messages_column:
            raise ConfigError(
                "--continue-final without a text: needs answers in a messages column",
                hint="give the beginning of the answer: --continue-final 'Sure, '",
            )
        tools = "--tools-column" if config.tools_column else "--tools"
        if (config.tools or config.tools_column) and not self.is_chat:
            raise ConfigError(
                f"{tools}: the prompt is plain text, expected a chat, whose template shows tools to the model",
                hint="add --as-chat, or use --messages-column",
            )
        if config.tool_choice not in ("auto", "none", msgspec.UNSET) and config.constraint_column:
            raise ConfigError(
                f"--tool-choice {config.tool_choice} with --constraint-column: each decides the answer's form",
                hint="keep one of them",
            )
        if config.few_shot and config.prompt_column:
            raise ConfigError(
                "--few-shot with --prompt-column: a plain column has no answers to show",
                hint="use --template NAME, or a --prompt-template that loops over `examples`",
            )


def set_pairs(draft: Draft, pairs: list[tuple[str, str]], *, form: PairForm) -> None:
    """Make pairs of texts the prompts of a row that asks for a score of each.

    A model that reads each text by itself gets the first texts before the others, and only one first text if all pairs
    have the same.
    """
    if form is PairForm.JOINED:
        draft.parts = [Draft(draft.row, text=first, second=second) for first, second in pairs]
        return
    if form is PairForm.CHAINED:
        draft.parts = [Draft(draft.row, text=first + second) for first, second in pairs]
        return
    firsts = [first for first, _ in pairs]
    if len(set(firsts)) == 1:
        firsts = firsts[:1]
    draft.num_queries = len(firsts)
    seconds = [second for _, second in pairs]
    draft.parts = [Draft(draft.row, text=text) for text in [*firsts, *seconds]]


def token_ids(value: Any, subject: str) -> list[int]:
    """Return the value if it is a list of token ids. Whether the ids are in the vocabulary is left to the engine.

    Args:
        value: The prompt.
        subject: Name of the value in messages.

    Raises:
        RowProblem: the value is not a list of token ids, is empty, or holds a number that does not fit in four bytes.
    """
    if not isinstance(value, list) or not all(type(item) is int and item >= 0 for item in value):
        raise RowProblem(
            Code.INVALID_PROMPT,
            f"{subject} holds a JSON {json_lines.json_type(value)}, expected a text or a list of token ids",
        )
    if not value:
        raise RowProblem(Code.EMPTY_PROMPT, f"{subject} is empty, expected text or token ids")
    if (largest := max(value)) >= _MANY_TOKENS:
        raise RowProblem(
            Code.INVALID_PROMPT,
            f"{subject} holds {largest}, expected token ids below {_MANY_TOKENS}",
        )
    return value


ROWS = RequestFormat(
    name="rows",
    make_reader=lambda config, _sampling, facts: RowsReader(
        config, eos_token=facts.eos_token, pairs=facts.pairs, finds_calls=facts.finds_calls
    ),
    has_own_parameters=False,
)


def _turns(turns: str) -> str | int:
    try:
        return conversation.check_turns(turns)
    except ValueError as error:
        raise ConfigError(
            f"--turns {turns}: expected first, all or a number from 1",
            hint="`--turns all` answers the last user message of each conversation",
        ) from error


def _check_choice(config: PromptConfig) -> None:
    options = {
        "--messages-column": config.messages_column,
        "--prompt-column": config.prompt_column,
        "--prompt-template": config.prompt_template,
        "--template": config.template_name,
        "--pair-columns": config.pair_columns,
    }
    given = [name for name, value in options.items() if value]
    if len(given) > 1:
        raise ConfigError(
            f"{' and '.join(given)}: expected one way to make prompts", hint="keep one of them"
        )
    if not given:
        raise ConfigError(
            "no prompt option: nothing says how rows become prompts", hint=_PROMPT_HINT
        )
