"""What goes into the prompt builder and what comes out: its options, the lines of a chunk, and prepared rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from batchinfer.core.errors import BatchinferError
from batchinfer.core.option_help import FIRST, NO_OPTION, Count, NotNegative, Opt
from batchinfer.core.records import Call, Failure, Record, RowKey

MediaKind = Literal["image", "audio", "video"]
MEDIA_KINDS: tuple[MediaKind, ...] = ("image", "audio", "video")
COLUMN_KINDS = (*MEDIA_KINDS, "tools", "constraint", "lora", "id")
"""What ``--column`` may say of a column. Of media there may be several columns, of the others one."""

CHAT_URL = "/v1/chat/completions"
COMPLETIONS_URL = "/v1/completions"
RESPONSES_URL = "/v1/responses"
SPEECH_URLS = ("/v1/audio/transcriptions", "/v1/audio/translations")
WITH_TOOLS = ("tool_choice", "parallel_tool_calls")
"""Fields that say how the tools of a body are called."""
TASK_PATHS = {
    "embed": "/v1/embeddings",
    "token-embed": "/pooling",
    "classify": "/classify",
    "score": "/score",
    "rerank": "/rerank",
    "reward": "/pooling",
    "transcribe": SPEECH_URLS[0],
    "translate": SPEECH_URLS[1],
}
"""Path to which rows of columns go, by the run's task. With the task ``generate``, conversations go to `CHAT_URL`, and
plain prompts to `COMPLETIONS_URL`."""


_MAY_LACK = ("constraint", "lora", "tools")
"""Kinds of columns that a row may lack."""


class Sampling(Record, frozen=True, kw_only=True):
    """The options that become fields of request bodies, by `make_body`."""

    SECTION: ClassVar[str] = "sampling"

    max_tokens: Annotated[Count | None, FIRST] = None
    """Longest answer. Default: what there is room for."""
    temperature: NotNegative | None = None
    """How freely tokens are drawn; 0: always the likeliest. Default: the engine's."""
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    """Draw from the likeliest tokens that have this probability."""
    n: Count = 1
    """Answers a row."""
    stop: list[str] = []
    """Text that ends an answer; may be repeated."""
    json_schema: Annotated[str, Opt(form="file")] = ""
    """File with a JSON schema; every answer is JSON that fits it."""
    choices: Annotated[list[str], Opt(metavar="A,B")] = []
    """Every answer is one of these texts: with commas between, or the option once for each."""
    sampling: Annotated[dict[str, Any], Opt(form="pairs", metavar="KEY=VALUE")] = {}
    """Any other field of requests, by its name in the API or in transformers' GenerationConfig; several with commas:
    top_k=20,min_p=0.1,logprobs=2."""
    tools: Annotated[list[dict[str, Any]], Opt(form="objects", section="prompt")] = []
    """File with the tools that answers may call: a JSON list as in a request of the OpenAI API."""
    chat_template_kwargs: Annotated[
        dict[str, Any], Opt(form="json", section="prompt", metavar="JSON")
    ] = {}
    """Variables of the chat template, e.g. {"enable_thinking": false}."""


class PromptConfig(Record, frozen=True, kw_only=True):
    """The options that say how rows become requests. If an option names a file, the field holds the file's content.

    With the request format ``rows``, one of `messages_column`, `prompt_column`, `prompt_template`, `pair_columns`, or
    (to transcribe and translate) a column of the kind ``audio`` says what the prompt is.
    """

    SECTION: ClassVar[str] = "prompt"

    request_format: Literal["rows", "completions", "openai-batch"] = "rows"
    """rows of a data set, or rows that are requests of the OpenAI API themselves."""
    task: Annotated[str, NO_OPTION] = "generate"
    """One of `core.tasks.Task`. It chooses the path for rows of columns; see `TASK_PATHS`."""
    messages_column: Annotated[str, FIRST] = ""
    """Column with a conversation; texts: --prompt-column."""
    turns: Annotated[int, Opt(form="turns")] = 1
    """Part of a conversation that is sent: first, all, or how many user turns."""
    prompt_column: str = ""
    """Column with the prompt: text or token ids."""
    pair_columns: Annotated[list[str], Opt(form="names", metavar="A,B")] = []
    """Two columns: texts for --task score, a query and its documents for --task rerank."""
    prompt_template: Annotated[str, Opt(form="template", metavar="FILE")] = ""
    """Jinja file over the row's columns, or the name of a template: alpaca, gpteacher, sharegpt, completion."""
    as_chat: bool = False
    """Send the prompt as one user message through the chat template."""
    system_prompt: Annotated[str, Opt(form="text")] = ""
    """System message of every conversation, in place of its own: text, or @FILE."""
    blank_columns: Annotated[list[str], Opt(form="names", metavar="A,B")] = []
    """Columns to empty before the template sees them."""
    truncate_prompt: Literal["error", "left", "right"] = "error"
    """What to do with prompts longer than the model takes: make them error rows, or cut there."""
    columns: Annotated[
        dict[str, list[str]], Opt(form="columns", flag="--column", metavar="KIND=NAME")
    ] = {}
    """Column with a row's image, audio or video (each may be repeated), its own tools, constraint or lora (name of an
    adapter), or its id (where split gave none), as in image=photo; see docs/features.md."""
    adapters: Annotated[list[str], NO_OPTION] = []
    """Names of the run's LoRA adapters. A single one answers every row of columns, unless a column of the kind ``lora``
    says which."""
    body: Annotated[dict[str, Any], NO_OPTION] = {}
    """The run's own fields of request bodies, as `make_body` gives them. A row's own fields take precedence."""

    @property
    def is_chat(self) -> bool:
        """Whether rows of columns become conversations."""
        return bool(self.messages_column) or self.as_chat or self.prompt_template == "sharegpt"

    def column(self, kind: str) -> str:
        """Return the column of a kind of which there may be one; "" if there is none."""
        return self.columns.get(kind, [""])[0]

    @property
    def optional_columns(self) -> dict[str, list[str]]:
        """Columns that the options name and that a row may lack. Keys are the options."""
        found = {f"--column {x}": self.columns[x] for x in _MAY_LACK if x in self.columns}
        return {"--blank-columns": self.blank_columns, **found}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRules:
    """What a run's engine takes, as far as it decides what becomes of a row."""

    model: str
    """Name by which bodies ask for the run's model."""
    max_model_len: int | None = None
    """Most tokens of prompt and answer together; None if the engine does not say."""
    parameters: Callable[[str], frozenset[str]] = lambda _path: frozenset()
    """Names of the fields that bodies for a path may have. An empty set: unknown, no name is refused."""
    fills_length: bool = True
    """Whether the server cuts a wish for longer answers down to what there is room for; most refuse it instead."""
    fetches_links: bool = False
    """Whether the server fetches media at http(s) links itself."""
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
    holder: dict[str, Any] = {}
    """The object in the row's body where it belongs."""
    field: str = ""
    """Field of that object for its URL."""


class BestOf(Record, frozen=True, kw_only=True, gc=False):
    """A request with `best_of`: the body asks for so many answers, of which the likeliest are kept when they come."""

    n: int
    """Number of answers to keep for each prompt: those with the highest mean log-probability of their tokens."""
    asked: int
    """Number of answers that the body asks for."""
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
    """Media to fetch, for places in the draft."""
    draft: dict[str, Any] | None = None
    """Body without the media, whose places are empty texts."""
    best_of: BestOf | None = None


class Unfit(ValueError):
    """A value that is not what a column or an option needs. The message does not say which."""


class RowError(BatchinferError):
    """One row is bad.

    `code` is one of the codes in docs/format.md, which do not change between versions. `param` names the request
    parameter that is wrong, or is None.
    """

    def __init__(self, code: str, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message  # secrets are not masked, since the row's author reads it
        self.args = (message,)
        self.code, self.param = str(code), param

    def as_failure(self) -> Failure:
        """Return the reason why the row has no answer, for its output line."""
        return Failure(code=self.code, message=self.message, param=self.param)
