"""The request format `rows`: prompts are made from columns, by the run's options."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from batchinfer.core.errors import ConfigError
from batchinfer.core.row_codes import Code
from batchinfer.core.tasks import is_pooling
from batchinfer.prompts import conversation
from batchinfer.prompts.json_lines import (
    ID_FIELD,
    ROW_FIELD,
    as_id,
    check_place,
    column,
    decode_object,
    invalid_column,
    json_type,
)
from batchinfer.prompts.media import read_media, with_media
from batchinfer.prompts.options import read_constraint
from batchinfer.prompts.templates import PromptTemplate, examples_text, named_template
from batchinfer.prompts.tools import choice_of, read_tools
from batchinfer.prompts.types import (
    CHAT_URL,
    COMPLETIONS_URL,
    SPEECH_URLS,
    TASK_PATHS,
    Draft,
    EngineRules,
    PromptConfig,
    RowProblem,
)

_CONTINUED = {"continue_final_message": True, "add_generation_prompt": False}


class RowsReader:
    """Reads rows whose columns hold data.

    Raises:
        ConfigError: a template or an example cannot be used.
    """

    def __init__(self, config: PromptConfig, rules: EngineRules) -> None:
        self._config = config
        self._rules = rules
        self._messages_column = config.messages_column
        self._template: PromptTemplate | None = None
        self._prefix = ""
        if config.template_name:
            named = named_template(config.template_name)
            self._messages_column = named.messages_column
            if named.source:
                self._prefix = examples_text(named, config.few_shot)
                self._template = PromptTemplate(named.source, name=f"--template {named.name}")
        elif config.prompt_template:
            self._template = PromptTemplate(
                config.prompt_template,
                name="--prompt-template",
                values={"examples": config.few_shot, "system_prompt": config.system_prompt},
            )
        self._is_chat = bool(self._messages_column) or config.as_chat
        self._is_judged = is_pooling(config.task)
        self._prefill = config.continue_final if isinstance(config.continue_final, str) else ""
        self._turns = conversation.check_turns(config.turns)
        self._adapters = {*config.adapters, *rules.adapters}
        self._examples = self._example_messages() if self._messages_column else []
        self.path = TASK_PATHS.get(config.task, CHAT_URL if self._is_chat else COMPLETIONS_URL)
        """Path to which all rows go."""
        self._check_chat_options()

    @property
    def needed_columns(self) -> dict[str, list[str]]:
        """Columns that every row needs. Keys name the options."""
        config = self._config
        needed = {
            "--prompt-column": [config.prompt_column],
            "--messages-column": [config.messages_column],
            "--pair-columns": config.pair_columns,
            "--id-column": [config.id_column],
            **{f"--{kind}-column": names for kind, names in config.media_columns.items()},
        }
        if self._template is not None:
            read = self._template.needed_columns
            name = (
                f"--template {config.template_name}"
                if config.template_name
                else "--prompt-template"
            )
            needed[f"{name}: the variable"] = [x for x in read if x not in config.blank_columns]
        elif config.template_name:
            needed[f"--template {config.template_name}: the column"] = [self._messages_column]
        return {option: names for option, names in needed.items() if any(names)}

    def read(self, draft: Draft, data: bytes) -> None:
        """Read a line into its draft. A bad row's draft keeps what was read before the fault.

        Raises:
            RowProblem: the row is bad.
        """
        columns = decode_object(data)
        row, row_id = columns.pop(ROW_FIELD, None), columns.pop(ID_FIELD, None)
        if self._config.id_column:
            row_id = columns.get(self._config.id_column)
        draft.id = as_id(row_id) if row_id is not None else ""
        check_place(row, draft.row)
        draft.path = self.path
        if self.path in SPEECH_URLS:
            [name] = self._config.audio_columns
            [draft.sound] = self._media(columns, "audio", [name], expected=1)
        else:
            draft.body = self._prompt(columns)
        draft.body |= self._own_fields(columns)

    # ------------------------------------------------------------------ the prompt

    def _prompt(self, columns: dict[str, Any]) -> dict[str, Any]:
        config = self._config
        if config.pair_columns:
            return self._pair(columns)
        if self._messages_column:
            name = self._messages_column
            return self._conversation(
                columns, _checked(name, self._selected, column(columns, name))
            )
        value: Any
        if self._template is not None:
            blanks = dict.fromkeys(config.blank_columns, "")
            value = self._prefix + self._template.render({**columns, **blanks})
        else:
            value = column(columns, config.prompt_column)
        if isinstance(value, str):
            value = self._without_end(value)
        is_ids = isinstance(value, list) and all(type(item) is int for item in value)
        if not value or not (isinstance(value, str) or (is_ids and not self._is_chat)):
            raise self._not_a_prompt(value)
        if self._is_chat:
            return self._conversation(columns, [{"role": "user", "content": value}])
        if self._prefill:
            if is_ids:
                raise self._not_a_prompt(value)
            value += self._prefill
        return {"input" if self._is_judged else "prompt": value}

    def _without_end(self, text: str) -> str:
        mark = self._rules.eos_token if not self._is_judged else ""
        end = len(text)
        while mark and text.endswith(mark, 0, end):
            end -= len(mark)
        return text[:end]

    def _not_a_prompt(self, value: Any) -> RowProblem:
        if self._template is not None:
            return RowProblem(Code.TEMPLATE_ERROR, "the template wrote nothing, expected a prompt")
        is_empty = value in ("", [])
        found = "is empty" if is_empty else f"a JSON {json_type(value)}"
        text_only = self._is_chat or self._prefill
        expected = "a text" if text_only else "a text or a list of token ids"
        return invalid_column(self._config.prompt_column, f"{found}, expected {expected}")

    def _pair(self, columns: dict[str, Any]) -> dict[str, Any]:
        is_rerank = self._config.task == "rerank"
        values = []
        for name, is_list in zip(self._config.pair_columns, (False, is_rerank), strict=True):
            value = column(columns, name)
            texts = value if is_list and isinstance(value, list) else [value]
            if not texts or not all(isinstance(text, str) and text for text in texts):
                expected = "a list of texts" if is_list else "a text"
                raise invalid_column(
                    name, f"a JSON {json_type(value)}, expected {expected}, not empty"
                )
            values.append(texts if is_list else value)
        return dict(
            zip(("query", "documents") if is_rerank else ("text_1", "text_2"), values, strict=True)
        )

    def _selected(self, value: Any) -> list[conversation.Message]:
        """Return the messages of a conversation that are sent.

        Raises:
            ValueError: the conversation has no known form, or nothing to answer.
        """
        if self._is_judged:
            return conversation.with_answers(conversation.read_conversation(value), self._turns)
        continue_own = self._config.continue_final is True
        wanted = self._turns if isinstance(self._turns, int) else int(self._turns == "first")
        messages = conversation.read_conversation(
            value, num_user_turns=wanted, num_more=int(continue_own)
        )
        return conversation.select_turns(messages, self._turns, continue_final=continue_own)

    def _conversation(
        self, columns: dict[str, Any], messages: list[conversation.Message]
    ) -> dict[str, Any]:
        """Add media, and what the options say comes before and after the messages."""
        media = {
            kind: self._media(columns, kind, names)
            for kind, names in self._config.media_columns.items()
        }
        messages = with_media(messages, media)
        if self._config.system_prompt:
            messages = conversation.with_system(messages, self._config.system_prompt)
        messages = conversation.with_examples(messages, self._examples)
        if self._prefill:
            messages = [*messages, {"role": "assistant", "content": self._prefill}]
        return {"messages": messages, **(_CONTINUED if self._config.continue_final else {})}

    def _media(
        self,
        columns: Mapping[str, Any],
        kind: str,
        names: list[str],
        *,
        expected: int | None = None,
    ) -> list[str]:
        found: list[str] = []
        for name in names:
            try:
                found += read_media(column(columns, name), kind)
            except ValueError as error:
                raise RowProblem(Code.INVALID_MEDIA, f"column {name!r}: {error}") from error
        if expected is not None and len(found) != expected:
            raise RowProblem(
                Code.INVALID_MEDIA, f"column {names[0]!r}: {len(found)} sounds, expected {expected}"
            )
        return found

    # ------------------------------------------------------------------ a row's own fields

    def _own_fields(self, columns: dict[str, Any]) -> dict[str, Any]:
        """Return what columns say about this row alone: its adapter, its constraint, its tools."""
        config = self._config
        fields: dict[str, Any] = {"model": self._model(columns)}
        if config.constraint_column:
            name = config.constraint_column
            try:
                fields |= read_constraint(columns.get(name))
            except ValueError as error:
                message = f"column {name!r}: {error}"
                raise RowProblem(Code.INVALID_CONSTRAINT, message) from error
        if config.tools_column and columns.get(config.tools_column):
            name = config.tools_column
            fields["tools"] = _checked(name, read_tools, columns[name])
            if "tool_choice" in config.body:
                choose = lambda choice: choice_of(choice, fields["tools"])  # noqa: E731
                fields["tool_choice"] = _checked(name, choose, config.body["tool_choice"])
        return fields

    def _model(self, columns: dict[str, Any]) -> str:
        config = self._config
        if not config.lora_column:
            only = sorted(self._adapters)
            return only[0] if len(only) == 1 else self._rules.model
        name = columns.get(config.lora_column)
        if name in (None, "", self._rules.model):
            return self._rules.model
        if not isinstance(name, str) or name not in self._adapters:
            known = ", ".join(sorted(self._adapters)[:10])
            raise RowProblem(
                Code.MODEL_NOT_FOUND,
                f"column {config.lora_column!r}: {str(name)[:80]!r} is none of the run's adapters ({known})",
                status=404,
            )
        return name

    # ------------------------------------------------------------------ checks

    def _example_messages(self) -> list[conversation.Message]:
        messages: list[conversation.Message] = []
        for index, example in enumerate(self._config.few_shot):
            try:
                found = conversation.read_conversation(example.get(self._messages_column))
            except ValueError as error:
                raise ConfigError(f"--few-shot example {index}: {error}") from error
            messages += [message for message in found if message["role"] != "system"]
        return messages

    def _check_chat_options(self) -> None:
        config = self._config
        uses = self._template is not None and self._template.uses_system_prompt
        for option, value in {
            "--system-prompt": config.system_prompt and not uses,
            "--tools": config.body.get("tools"),
            "--tools-column": config.tools_column,
            "--image-column": config.image_columns,
            "--video-column": config.video_columns,
            "--audio-column": config.audio_columns and self.path not in SPEECH_URLS,
        }.items():
            if value and not self._is_chat:
                raise ConfigError(
                    f"{option}: the prompt is plain text, expected a chat",
                    hint="add --as-chat, or use --messages-column",
                )
        if config.as_chat and self._messages_column:
            raise ConfigError(
                "--as-chat with a messages column: it is a chat already", hint="leave out --as-chat"
            )
        if config.continue_final is True and not self._messages_column:
            raise ConfigError(
                "--continue-final without a text: needs answers in a messages column",
                hint="give the beginning of the answer: --continue-final 'Sure, '",
            )


def _checked(name: str, read: Callable[[Any], Any], value: Any) -> Any:
    """Return what `read` makes of a column's value.

    Raises:
        RowProblem: `read` raised ValueError.
    """
    try:
        return read(value)
    except ValueError as error:
        raise invalid_column(name, error) from error
