"""What goes into the prompt builder and what comes out, and the codes of rows that cannot become requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Any, Protocol, Self

import msgspec

from batchinfer.core.errors import RowError
from batchinfer.core.records import Failure, Record, Request, RowKey, Sampling

TRUNCATIONS = ("error", "left", "right", "middle")

CHAT_URL = "/v1/chat/completions"
COMPLETIONS_URL = "/v1/completions"


class Code(StrEnum):
    """One way in which a row or its request can be bad; `explanation` is the line in docs/format.md.

    Stable: users' scripts compare these words.
    """

    explanation: str

    def __new__(cls, value: str, explanation: str) -> Self:
        """Make a member that is its code and carries its explanation."""
        member = str.__new__(cls, value)
        member._value_ = value
        member.explanation = explanation
        return member

    # The line
    INVALID_JSON = "invalid_json", "The line is not JSON (a blank line included)."
    INVALID_TEXT = "invalid_text", "The line holds bytes or escapes that are no Unicode text."
    NOT_AN_OBJECT = "not_an_object", "The line is JSON, but no object."
    ROW_MISMATCH = "row_mismatch", "The line's `_row` is not the number that its place gives."
    MISSING_COLUMN = "missing_column", "A column that the prompt needs is not in the row."
    # The prompt
    INVALID_MESSAGES = "invalid_messages", "The conversation has no known shape."
    EMPTY_CONVERSATION = "empty_conversation", "The conversation has no user message with text."
    MISSING_CONTENT = "missing_content", "A message has no content."
    UNKNOWN_ROLE = "unknown_role", "A message's role is missing or unknown."
    UNSUPPORTED_CONTENT = "unsupported_content", "A message holds parts other than text."
    NOTHING_TO_CONTINUE = "nothing_to_continue", "No answer's beginning to continue."
    INVALID_PROMPT = "invalid_prompt", "The prompt is neither text nor a list of token ids."
    EMPTY_PROMPT = "empty_prompt", "The prompt is empty."
    TEMPLATE_ERROR = "template_error", "The template failed on this row, or went over its limits."
    TOKENIZER_ERROR = "tokenizer_error", "The tokenizer refused the prompt."
    PROMPT_TOO_LONG = "prompt_too_long", "The prompt leaves the model no room for a token."
    # The request
    INVALID_REQUEST = "invalid_request", "The request's frame is wrong: custom_id, method or body."
    UNKNOWN_URL = "unknown_url", "The request's url is none that can be answered."
    WRONG_TASK = "wrong_task", "The request's url belongs to another task than the run's."
    INVALID_PARAMETER = "invalid_parameter", "A parameter's value is wrong, or contradicts another."
    UNSUPPORTED_PARAMETER = "unsupported_parameter", "A parameter that is not supported."


class PromptConfig(Record, frozen=True, kw_only=True):
    """How rows become prompts. Texts are texts here: whoever reads the command line reads the files.

    Exactly one of `messages_column`, `prompt_column`, `prompt_template` and `template_name` is set
    for the request format ``rows``, and none for the others.
    """

    request_format: str = "rows"
    messages_column: str = ""
    """Column with a conversation; a plain text there is one user message."""
    turns: str = "first"
    """``first``, ``all``, or how many user turns (see docs/format.md)."""
    prompt_column: str = ""
    """Column with text, or with a list of token ids."""
    prompt_template: str = ""
    """Jinja source over the row's columns."""
    template_name: str = ""
    as_chat: bool = False
    """Send the text of `prompt_column` or a template as one user message through the chat template."""
    system_prompt: str = ""
    chat_template: str = ""
    """Jinja source in place of the tokenizer's own chat template."""
    chat_template_kwargs: dict[str, Any] = {}
    continue_final: bool | str = False
    """True: continue the row's own answer; a text: every answer starts with it."""
    blank_columns: list[str] = []
    """Columns that are emptied before a template sees them."""
    few_shot: list[dict[str, Any]] = []
    """Example rows, answers included."""
    truncate_prompt: str = "error"
    keep: list[str] = []
    """Columns that the output line repeats; ``*`` is all of them."""
    keep_prompt: bool = False
    id_column: str = ""
    output_format: str = "native"
    strip: bool = False
    """Remove white space around every answer."""
    has_timing: bool = True
    """Write each row's seconds. Without them equal answers are equal bytes."""
    task: str = "generate"
    max_n: int = 128
    """Most answers that one request may ask for."""
    max_logprobs: int = 20
    """Most alternatives a token; the engine's own limit."""


class RawRow(msgspec.Struct, frozen=True, gc=False):
    """One line of a chunk; `line_index` counts from 0. Its newline may still be there: to JSON it is white space."""

    line_index: int
    data: bytes


class EchoView(Record, frozen=True, kw_only=True, omit_defaults=True):
    """What a request wants to see, where that is not simply the engine's answer."""

    echo: bool = False
    """The prompt stands before every answer."""
    is_prompt_only: bool = False
    """Scoring: the generated token is dropped."""


class Prepared(Record, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """One row on its way: a request, or the failure that keeps it from having one (never both).

    `row` is first_row + line index. `source` holds the columns of ``--keep``, `body` the request as
    the row gave it, `prompt` the text or token ids where the output needs them.
    """

    key: RowKey
    row: int
    id: str
    request: Request | None = None
    failure: Failure | None = None
    source: dict[str, Any] | None = None
    body: dict[str, Any] | None = None
    prompt: str | list[int] | list[dict[str, Any]] | None = None
    url: str = ""
    """The endpoint that the row's request names; empty for plain rows."""
    is_chat: bool = False
    """The prompt is a conversation."""
    param: str | None = None
    """The parameter that a failure is about."""
    view: EchoView | None = None


class Draft(msgspec.Struct, gc=False):
    """A row while it is being read: whatever was found out before it failed stays here."""

    row: int
    id: str = ""
    text: str | None = None
    token_ids: list[int] | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool = True
    continue_final: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    sampling: Sampling | None = None
    source: dict[str, Any] | None = None
    body: dict[str, Any] | None = None
    url: str = ""
    view: EchoView | None = None
    is_open_ended: bool = False
    """The answer may be as long as the model allows."""
    is_cut: bool = False
    failure: Failure | None = None
    param: str | None = None


class RowProblem(RowError):
    """A bad row, with the parameter that is at fault where there is one."""

    def __init__(self, code: Code, message: str, *, param: str | None = None) -> None:
        super().__init__(code.value, message)
        self.param = param


class RowReader(Protocol):
    """Reads the lines of one request format for one run."""

    @property
    def is_chat(self) -> bool:
        """Whether every row becomes a conversation, so that the run cannot do without a chat template."""
        ...

    def fill(self, draft: Draft, data: bytes) -> None:
        """Raise RowProblem for a bad row; what is already in `draft` is kept."""
        ...


class RequestFormat(Record, frozen=True, kw_only=True):
    """One request format: what the rows of a chunk hold. `REQUEST_FORMATS` has all of them."""

    name: str
    """Value of ``--request-format``."""
    make_reader: Callable[[PromptConfig, Sampling, str], RowReader]
    """Makes the reader of a run from its options, its sampling parameters and the end-of-sequence text."""
    has_own_parameters: bool = True
    """Each row brings sampling parameters of its own, so that what the run says holds for none for certain."""
    id_field: str = ""
    """Field that names a row before its `_id` does; empty where there is none."""
    make_row: Callable[[str, str], dict[str, Any]] | None = None
    """Makes the row that asks for an answer to a text, from an id and the text; None where the columns of rows are
    the data set's own."""


class Tokenizer(Protocol):
    """What prompts need of a model's tokenizer. Pure; safe to call from several threads."""

    @property
    def eos_token(self) -> str:
        """Text of the end-of-sequence token, or empty."""
        ...

    @property
    def has_chat_template(self) -> bool:
        """Whether the tokenizer brings a chat template of its own."""
        ...

    @property
    def longest_token(self) -> int:
        """Characters of the longest token; 0 when unknown."""
        ...

    def apply_chat_template(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        template: str,
        continue_final: bool,
        kwargs: dict[str, Any],
    ) -> str:
        """Render a conversation with `template`, or the model's own when empty.

        Raises:
            RowError: the template fails on these messages.
        """
        ...

    def encode(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[list[int]]:
        """Token ids of each text, in order."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids, special tokens included."""
        ...
