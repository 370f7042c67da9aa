"""The inputs and results of the prompt builder, and the error codes of rows that cannot become requests."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Sequence
from enum import StrEnum
from pathlib import PurePath
from typing import Any, Protocol, Self

import msgspec

from batchinfer.core.errors import RowError
from batchinfer.core.records import AnswerForm, Failure, Pooling, Record, Request, RowKey, Sampling
from batchinfer.core.tasks import GENERATE, PairForm

logger = logging.getLogger(__name__)

TRUNCATIONS = ("error", "left", "right", "middle")
"""Values of ``--truncate-prompt``. A prompt too long makes its row fail (``error``) or loses tokens at the
named place."""

CHAT_URL = "/v1/chat/completions"
COMPLETIONS_URL = "/v1/completions"


class Code(StrEnum):
    """Reasons to refuse a row or its request. The values are stable: users' scripts compare them."""

    explanation: str
    """Sentence that explains this code in docs/format.md."""

    def __new__(cls, value: str, explanation: str) -> Self:
        """Make a member from its code and its explanation."""
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
    INVALID_TOOLS = "invalid_tools", "The row's tools have no known form, or lack the chosen tool."
    UNKNOWN_ROLE = "unknown_role", "A message's role is missing or unknown."
    UNSUPPORTED_CONTENT = "unsupported_content", "A message holds parts other than text and images."
    NOTHING_TO_CONTINUE = "nothing_to_continue", "No answer's beginning to continue."
    INVALID_PROMPT = "invalid_prompt", "The prompt is neither text nor a list of token ids."
    EMPTY_PROMPT = "empty_prompt", "The prompt is empty."
    TEMPLATE_ERROR = "template_error", "The template failed on this row, or went over its limits."
    TOKENIZER_ERROR = "tokenizer_error", "The tokenizer refused the prompt."
    PROMPT_TOO_LONG = "prompt_too_long", "The prompt leaves the model no room for a token."
    INVALID_CONSTRAINT = (
        "invalid_constraint",
        "The row's constraint has no known form, or does not compile within its limits.",
    )
    # Images
    INVALID_MEDIA = (
        "invalid_media",
        "An image is broken, of an unknown kind, or named in no known form.",
    )
    MEDIA_FORBIDDEN = (
        "media_forbidden",
        "An image is at a place that rows must not name: a private address, a local path, another scheme.",
    )
    MEDIA_NOT_FOUND = (
        "media_not_found",
        "There is no image at its place, or access to it is refused.",
    )
    MEDIA_UNAVAILABLE = "media_unavailable", "An image could not be fetched, several times."
    MEDIA_TOO_LARGE = "media_too_large", "An image has too many bytes or pixels."
    MEDIA_MISMATCH = (
        "media_mismatch",
        "The prompt has fewer or more places for images than the row has images.",
    )
    TOO_MANY_MEDIA = "too_many_media", "The row has more images than the run allows."
    # The request
    MODEL_NOT_FOUND = "model_not_found", "The row asks for a model that the run does not have."
    INVALID_REQUEST = "invalid_request", "The request's frame is wrong: custom_id, method or body."
    UNKNOWN_URL = "unknown_url", "The request's url is none that can be answered."
    WRONG_TASK = "wrong_task", "The request's url belongs to another task than the run's."
    INVALID_PARAMETER = "invalid_parameter", "A parameter's value is wrong, or contradicts another."
    UNSUPPORTED_PARAMETER = "unsupported_parameter", "A parameter that is not supported."


class PromptConfig(Record, frozen=True, kw_only=True):
    """The options that say how rows become prompts. If an option names a file, the field holds the file's content.

    With the request format ``rows``, exactly one of `messages_column`, `prompt_column`, `prompt_template`,
    `template_name` and `pair_columns` is set. With the other request formats, none of the five is set.
    """

    request_format: str = "rows"
    """Name of an entry of `REQUEST_FORMATS`."""
    messages_column: str = ""
    """Column with a conversation. A plain text in it counts as one user message."""
    turns: str = "first"
    """Part of a conversation that is sent: ``first``, ``all``, or a number of user turns (see docs/format.md)."""
    prompt_column: str = ""
    """Column with the prompt: a text or a list of token ids."""
    prompt_template: str = ""
    """Jinja source over the row's columns."""
    template_name: str = ""
    """Name of a template that ``--template list`` shows."""
    as_chat: bool = False
    """Whether the text of `prompt_column` or a template is sent as one user message, through the chat template."""
    system_prompt: str = ""
    """System message of every conversation, and the variable `system_prompt` of templates."""
    chat_template: str = ""
    """Jinja source that replaces the tokenizer's own chat template."""
    chat_template_kwargs: dict[str, Any] = {}
    """Variables that the chat template gets besides the messages."""
    continue_final: bool | str = False
    """True: the model continues the answer after the last chosen turn. A text: the model continues this text, as if it
    had begun its answer with it. False: the model writes whole answers."""
    blank_columns: list[str] = []
    """Columns whose value the prompt template gets as an empty text."""
    few_shot: list[dict[str, Any]] = []
    """Worked examples, which are shown before every prompt. Each is a row that has an answer."""
    truncate_prompt: str = "error"
    """One of `TRUNCATIONS`."""
    keep: list[str] = []
    """Columns that the output line repeats; ``*`` means all of them."""
    keep_prompt: bool = False
    """Whether the output line repeats the prompt."""
    id_column: str = ""
    """Column whose value is the row's id. If empty, the field `_id` of the line is the id."""
    adapters: list[str] | msgspec.UnsetType = msgspec.UNSET
    """Names of the run's LoRA adapters. Unset if it has none."""
    lora_column: str | msgspec.UnsetType = msgspec.UNSET
    """Column with the name of the row's adapter; rows without a name are the model's. Unset if there is none; see
    `adapter_of_all`."""
    served_model_name: list[str] | msgspec.UnsetType = msgspec.UNSET
    """Names by which requests mean the model; ``*`` means every name. Unset if there are none."""
    constraint_column: str | msgspec.UnsetType = msgspec.UNSET
    """Column with the row's own constraint on its answer. Unset if there is none."""
    image_columns: list[str] | msgspec.UnsetType = msgspec.UNSET
    """Columns with the row's images. Unset if there are none."""
    tools: list[dict[str, Any]] | msgspec.UnsetType = msgspec.UNSET
    """Tools that answers may call. Unset if there are none."""
    tools_column: str | msgspec.UnsetType = msgspec.UNSET
    """Column with the row's own tools, in place of the run's. Unset if there is none."""
    tool_choice: str | msgspec.UnsetType = msgspec.UNSET
    """``auto``, ``required``, ``none``, or the name of the tool that every answer calls. Unset means ``auto``."""
    output_format: str = "native"
    """Name of an entry of `batchinfer.formats.FORMATS`."""
    strip: bool = False
    """Whether white space around every answer is removed."""
    has_timing: bool = True
    """Whether output lines hold the seconds that each row took. Without them, equal answers give equal bytes."""
    task: str = GENERATE
    """One of `core.tasks.TASKS`. OpenAI requests for a task that does not go with it are refused."""
    pair_columns: list[str] | msgspec.UnsetType = msgspec.UNSET
    """The two columns with the texts of a pair, for the task "score". Unset if there are none."""
    embedding_format: str | msgspec.UnsetType = msgspec.UNSET
    """Form of vectors in output lines: ``float`` or ``base64``. Unset means ``float``."""
    max_n: int = 128
    """Largest number of answers that one request may ask for."""
    max_logprobs: int = 20
    """Largest number of alternative tokens that a request may ask for at each position (`logprobs`). The engine sets
    it."""

    @property
    def rows_say_adapter(self) -> bool:
        """Whether each row says which adapter answers it, in a column or as a request's model."""
        return bool(self.lora_column) or self.request_format != "rows"

    @property
    def adapter_of_all(self) -> str | None:
        """Adapter that answers every row, since the run has no other and rows say none; None if there is none."""
        adapters = self.adapters or []
        return adapters[0] if len(adapters) == 1 and not self.rows_say_adapter else None

    @property
    def optional_columns(self) -> dict[str, list[str]]:
        """Columns that the options name and that a row may lack. Keys are the options."""
        return {
            "--keep": self.keep,
            "--blank-columns": self.blank_columns,
            **self.own_columns,
        }

    @property
    def own_columns(self) -> dict[str, list[str]]:
        """Columns with a row's own constraint, adapter or tools. A row may lack them. Keys are the options."""
        return {
            "--constraint-column": [self.constraint_column] if self.constraint_column else [],
            "--lora-column": [self.lora_column] if self.lora_column else [],
            "--tools-column": [self.tools_column] if self.tools_column else [],
        }


class MediaRef(Record, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """What a row says about one of its images. Exactly one of `place` and `base64` is set."""

    place: str = ""
    """URL or path at which the image is."""
    base64: str = ""
    """Content of the image."""
    is_passed_on: bool = False
    """Whether the engine fetches the image itself."""


class RawRow(msgspec.Struct, frozen=True, gc=False):
    """One line of a chunk. `line_index` counts from 0; `data` may end with the newline, which JSON ignores."""

    line_index: int
    data: bytes


class EchoView(Record, frozen=True, kw_only=True, omit_defaults=True):
    """Changes that a request with ``echo`` wants in the answers that the output line shows."""

    echo: bool = False
    """Whether the output line shows the prompt before every answer."""
    is_prompt_only: bool = False
    """Whether the output line shows the prompt in place of the answer and leaves the generated token out (scoring)."""


class Prepared(Record, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """A row that `PromptBuilder` has read. It has either a request for the engine or a failure, never both."""

    key: RowKey
    row: int
    """Number of the row in the job: the chunk's first row plus the line index."""
    id: str
    request: Request | None = None
    failure: Failure | None = None
    source: dict[str, Any] | None = None
    """Values of the columns that ``--keep`` names, for the output line; None without ``--keep``."""
    body: dict[str, Any] | None = None
    """Body of the row's request; None if the row has none, as with the request format ``rows``."""
    prompt: str | list[int] | list[dict[str, Any]] | None = None
    """Prompt for the output line; None if the output line does not show it."""
    url: str = ""
    """Endpoint of the OpenAI API that the request is for; empty if there is none, as with the format ``rows``."""
    is_chat: bool = False
    """Whether the prompt is a conversation."""
    param: str | None = None
    """Request parameter that caused the failure; None if no parameter did."""
    view: EchoView | None = None
    media: list[MediaRef] | None = None
    """Images of the request, until they are fetched and become `Request.media`; None if it has none."""
    is_repeatable: bool = False
    """Whether an equal request of another row must have the same answer: it is at temperature 0, or has a seed that the
    row itself brought, not one that was computed from the row's place."""


class Draft(msgspec.Struct, gc=False):
    """A row that is being read. If reading fails, the id, source, body and url read so far still go into the output."""

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
    """Whether the answer may fill the rest of the model's length, because no `max_tokens` is set."""
    model: Any = None
    """Name of the model or adapter that the row asks for, unchecked; None if it asks for none."""
    adapter: str | None = None
    """Adapter that answers the row; None for the model itself."""
    constraint: dict[str, Any] | None = None
    """Constraint that the row itself states, in place of the run's."""
    constraint_param: str | None = None
    """Request parameter that states the constraint; None if a column does."""
    most_prompt_tokens: int | None = None
    """Number of tokens to which the request itself cuts a longer prompt; -1 for as many as the model takes."""
    truncation_side: str = "left"
    """Side at which a prompt loses tokens by `most_prompt_tokens`."""
    returns_token_ids: bool = False
    priority: int = 0
    media: list[MediaRef] | None = None
    """Images of the row, in the order in which the prompt has them; None if it has none."""
    includes_reasoning: bool = True
    form: AnswerForm | None = None
    """Tools that the row's answer may call, and its choice among them."""
    is_cut: bool = False
    """Whether the prompt lost tokens because it was too long."""
    second: str | None = None
    """Second text of a pair that the model reads together; `text` is the first one."""
    second_start: int | None = None
    """Index of the first token of the pair's second text, for models that tell the two texts apart; else None."""
    parts: list[Draft] = []
    """Texts of a request to a pooling model that has several. Each is a draft with a prompt and nothing else."""
    num_queries: int = 0
    """See the same field of `Request`."""
    task: str = ""
    """Task of the request; empty for the run's."""
    pooling: Pooling | None = None
    failure: Failure | None = None
    param: str | None = None

    def fail_with_parts(self) -> None:
        """Make this the draft of a bad row if one of its parts is bad."""
        for index, part in enumerate(self.parts):
            if part.failure is not None and self.failure is None:
                message = f"text {index}: {part.failure.message}" if len(self.parts) > 1 else ""
                self.failure = Failure(
                    code=part.failure.code, message=message or part.failure.message
                )

    def fail(self, error: RowError) -> None:
        """Make this the draft of a bad row."""
        self.failure = Failure(code=error.code, message=error.message)
        self.param = error.param if isinstance(error, RowProblem) else None


class RowProblem(RowError):
    """The error of a bad row. `param` names the request parameter that is wrong, or is None."""

    def __init__(self, code: Code, message: str, *, param: str | None = None) -> None:
        super().__init__(code.value, message)
        self.param = param


class RowReader(Protocol):
    """The interface of an object that reads a run's lines in one request format."""

    @property
    def is_chat(self) -> bool:
        """Whether every row becomes a conversation, so that the run needs a chat template."""
        ...

    @property
    def needed_columns(self) -> dict[str, list[str]]:
        """Columns that every row needs to become the request that the options ask for. Keys name the options."""
        ...

    @property
    def rows_at_once(self) -> int:
        """Most rows that `fill` should get at once for now; few if each of them may take seconds."""
        ...

    def fill(self, drafts: Sequence[Draft], lines: Sequence[bytes]) -> None:
        """Read each line into its draft. The draft of a bad row gets a failure and keeps what was filled before it."""
        ...


def fill_each(
    fill: Callable[[Draft, bytes], None], drafts: Sequence[Draft], lines: Sequence[bytes]
) -> None:
    """Read each line into its draft by `fill`, which raises RowError if the row is bad.

    Any other error is a fault of `fill`. It becomes an error row as well, because other rows are not concerned.
    """
    for draft, line in zip(drafts, lines, strict=True):
        try:
            fill(draft, line)
        except RowError as error:
            draft.fail(error)
        except Exception as error:  # noqa: BLE001 -- a fault of any class
            draft.failure = internal_failure(error)


def internal_failure(error: Exception) -> Failure:
    """Return the failure of a row with which this package itself failed, so that the other rows go on."""
    logger.debug("a fault of batchinfer", exc_info=error)
    place = traceback.extract_tb(error.__traceback__)[-1]
    where = f"{PurePath(place.filename).name}:{place.lineno}"
    message = f"{type(error).__name__}: {str(error)[:200]} ({where}); please report it"
    return Failure(code="internal_error", message=message)


class EngineFacts(Record, frozen=True, kw_only=True):
    """Facts about a run's engine that readers of rows use."""

    eos_token: str = ""
    """Text of the end-of-sequence token; empty if there is none, or if only the engine knows it."""
    own_parameters: frozenset[str] = frozenset()
    """Names of request parameters that go to the engine unread."""
    pairs: PairForm = PairForm.APART
    """How the model reads a pair of texts."""
    finds_calls: bool = True
    """Whether calls of tools are found in answers that no constraint makes calls."""


class RequestFormat(Record, frozen=True, kw_only=True):
    """A request format: what a row holds and how it is read. `REQUEST_FORMATS` is the table of all request formats."""

    name: str
    """Value of ``--request-format``."""
    make_reader: Callable[[PromptConfig, Sampling, EngineFacts], RowReader]
    """Function that makes a run's reader. Arguments: prompt options, sampling parameters, facts about the engine."""
    has_own_parameters: bool = True
    """Whether rows may bring sampling parameters of their own, which replace the run's."""
    has_own_tools: bool = False
    """Whether rows may bring tools of their own."""
    id_field: str = ""
    """Field of a row that holds its id and takes precedence over `_id`; empty if the format has no such field."""
    make_row: Callable[[str, str], dict[str, Any]] | None = None
    """Function that makes a row from an id and a prompt text. None for ``rows``, whose columns the options choose."""


class Tokenizer(Protocol):
    """The methods of a model's tokenizer that `PromptBuilder` uses. Several threads may call them at once."""

    @property
    def eos_token(self) -> str:
        """Text of the end-of-sequence token; empty if there is none."""
        ...

    @property
    def has_chat_template(self) -> bool:
        """Whether the tokenizer has a chat template."""
        ...

    @property
    def longest_token(self) -> int:
        """Number of characters of the longest token; 0 if unknown."""
        ...

    def apply_chat_template(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        template: str,
        continue_final: bool,
        kwargs: dict[str, Any],
        is_whole: bool = False,
    ) -> str:
        """Return a conversation as prompt text. `template` is the chat template; if empty, the model's own is used.

        With `is_whole` the text ends with the conversation, and not with the beginning of an answer to come.

        Raises:
            RowError: the template fails on these messages.
        """
        ...

    def encode(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[list[int]]:
        """Return the token ids of each text, in order."""
        ...

    def encode_pair(
        self, first: str, second: str, *, max_tokens: int | None
    ) -> tuple[list[int], int | None]:
        """Return the token ids of two texts that the model reads together.

        Args:
            first: The first text.
            second: The second text, which loses its end if both have more than `max_tokens` tokens.
            max_tokens: Most tokens; None for any number.

        Returns:
            The token ids, and the index of the first token of the second text; None in place of the index if the model
            does not tell the two texts apart.
        """
        ...

    @property
    def special_tokens(self) -> tuple[int, int]:
        """Number of special tokens that `encode` adds before a text and after it."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids, special tokens included."""
        ...
