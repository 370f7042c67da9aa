"""What goes into the prompt builder and what comes out: its options, the lines of a chunk, and prepared rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from batchinfer.core.errors import RowError
from batchinfer.core.records import Call, Failure, Record, RowKey

MediaKind = Literal["image", "audio", "video"]
MEDIA_KINDS: tuple[MediaKind, ...] = ("image", "audio", "video")

CHAT_URL = "/v1/chat/completions"
COMPLETIONS_URL = "/v1/completions"
TRANSCRIPTIONS_URL = "/v1/audio/transcriptions"
TRANSLATIONS_URL = "/v1/audio/translations"
SPEECH_URLS = (TRANSCRIPTIONS_URL, TRANSLATIONS_URL)
TASK_PATHS = {
    "embed": "/v1/embeddings",
    "token-embed": "/pooling",
    "classify": "/classify",
    "score": "/score",
    "rerank": "/rerank",
    "reward": "/pooling",
    "transcribe": TRANSCRIPTIONS_URL,
    "translate": TRANSLATIONS_URL,
}
"""Path to which rows of columns go, by the run's task. With the task ``generate``, conversations go to `CHAT_URL`, and
plain prompts to `COMPLETIONS_URL`."""


class PromptConfig(Record, frozen=True, kw_only=True):
    """The options that say how rows become requests. If an option names a file, the field holds the file's content.

    With the request format ``rows``, one of `messages_column`, `prompt_column`, `prompt_template`, `template_name`,
    `pair_columns`, or (to transcribe and translate) `audio_columns` says what the prompt is.
    """

    request_format: str = "rows"
    """``rows`` of a data set, lines of an OpenAI batch file (``openai-batch``), or bodies of ``completions``."""
    task: str = "generate"
    """One of `core.tasks.TASKS`. It chooses the path for rows of columns; see `TASK_PATHS`."""
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
    """Whether the text of `prompt_column` or a template is sent as one user message."""
    system_prompt: str = ""
    """System message of every conversation, and the variable `system_prompt` of templates."""
    blank_columns: list[str] = []
    """Columns whose value the prompt template gets as an empty text."""
    pair_columns: list[str] = []
    """The two columns of a pair: for the task "score" two texts, for "rerank" a query and a list of documents."""
    image_columns: list[str] = []
    """Columns with the row's images."""
    audio_columns: list[str] = []
    """Columns with the row's sounds. To transcribe and translate, one column."""
    video_columns: list[str] = []
    """Columns with the row's videos."""
    tools_column: str = ""
    """Column with the row's own tools, in place of the run's (`body["tools"]`)."""
    constraint_column: str = ""
    """Column with the row's own constraint on its answer, in place of the run's."""
    adapters: list[str] = []
    """Names of the run's LoRA adapters. A single one answers every row of columns, unless `lora_column` is set."""
    lora_column: str = ""
    """Column with the name of the row's adapter; rows without a name are the model's."""
    id_column: str = ""
    """Column whose value is the row's id. If empty, the field `_id` of the line is the id."""
    truncate_prompt: str = "error"
    """``error``, ``left`` or ``right``. A prompt too long makes its row fail, or loses tokens on that side."""
    body: dict[str, Any] = {}
    """The run's own fields of request bodies, as `make_body` gives them. A row's own fields take precedence."""

    @property
    def is_chat(self) -> bool:
        """Whether rows of columns become conversations."""
        return bool(self.messages_column) or self.as_chat or self.template_name == "sharegpt"

    @property
    def media_columns(self) -> dict[str, list[str]]:
        """Columns with media, by their kind."""
        columns = (self.image_columns, self.audio_columns, self.video_columns)
        return dict(zip(MEDIA_KINDS, columns, strict=True))

    @property
    def optional_columns(self) -> dict[str, list[str]]:
        """Columns that the options name and that a row may lack. Keys are the options."""
        own = ("constraint_column", "lora_column", "tools_column")
        named = {"--" + field.replace("_", "-"): getattr(self, field) for field in own}
        found = {option: [name] for option, name in named.items() if name}
        return {"--blank-columns": self.blank_columns, **found}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRules:
    """What a run's engine takes, as far as it decides what becomes of a row."""

    model: str
    """Name by which bodies ask for the run's model."""
    adapters: tuple[str, ...] = ()
    """Names by which bodies ask for the run's adapters."""
    max_model_len: int | None = None
    """Most tokens of prompt and answer together; None if the engine does not say."""
    parameters: Callable[[str], frozenset[str]] = lambda _path: frozenset()
    """Names of the fields that bodies for a path may have. An empty set: unknown, no name is refused."""
    fetches_links: bool = False
    """Whether the server fetches media at http(s) links itself."""
    is_vllm: bool = True
    """Whether fields that only vLLM has may be added to bodies."""
    eos_token: str = ""
    """Text of the model's end-of-sequence token, which is removed from the end of plain prompts: a model generates
    nothing useful after it. Empty if unknown."""


class RawRow(msgspec.Struct, frozen=True, gc=False):
    """One line of a chunk. `line_index` counts from 0; `data` may end with the newline, which JSON ignores."""

    line_index: int
    data: bytes


class MediaRef(Record, frozen=True, kw_only=True, gc=False):
    """An image, sound or video that the worker has to fetch for a row."""

    place: str
    """URL or path at which it is."""
    kind: MediaKind = "image"


class BestOf(Record, frozen=True, kw_only=True, gc=False):
    """A request with `best_of`: the body asks for so many answers, of which the likeliest are kept when they come."""

    n: int
    """Number of answers to keep: those with the highest mean log-probability of their tokens."""
    keeps_logprobs: bool = False
    """Whether the row asked for log-probabilities itself. Otherwise they are taken out of the answer."""


class Prepared(Record, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """A row that `PromptBuilder` has read. It has either a call or a failure; before `finish_call`, neither.

    A row whose media have to be fetched first has `media` and `draft`. `finish_call` makes its call.
    """

    key: RowKey
    row: int
    """Number of the row in the job: the chunk's first row plus the line index."""
    id: str
    path: str = ""
    """Path at the server; empty if the row failed before it was known."""
    call: Call | None = None
    failure: Failure | None = None
    media: list[MediaRef] = []
    """Media to fetch, in the order in which the draft has their places."""
    draft: dict[str, Any] | None = None
    """Body without the media, whose places are empty texts."""
    best_of: BestOf | None = None


class Unfit(ValueError):
    """A value that is not what a column or an option needs. The message does not say which."""


class RowProblem(RowError):
    """The error of a bad row. `param` names the request parameter that is wrong, or is None."""

    def __init__(
        self, code: str, message: str, *, param: str | None = None, status: int = 400
    ) -> None:
        super().__init__(str(code), message)
        self.param = param
        self.status = status

    def as_failure(self) -> Failure:
        """Return the reason why the row has no answer, for its output line."""
        return Failure(code=self.code, message=self.message, status=self.status, param=self.param)
