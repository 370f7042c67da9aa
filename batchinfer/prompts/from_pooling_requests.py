"""Requests of an OpenAI batch file to pooling models: embeddings, classes, scores and rankings.

The fields are those of vLLM's server, which answers `/score`, `/rerank` and `/classify` beside OpenAI's
`/v1/embeddings`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from batchinfer.core.errors import near
from batchinfer.core.records import Pooling
from batchinfer.core.tasks import CLASSIFY, EMBED, SCORE, PairForm
from batchinfer.prompts import conversation
from batchinfer.prompts.from_columns import set_pairs, token_ids
from batchinfer.prompts.json_lines import json_type
from batchinfer.prompts.media import take_images
from batchinfer.prompts.parameters import HARMLESS
from batchinfer.prompts.types import Code, Draft, EngineFacts, RowProblem

TASKS = {
    "/v1/embeddings": EMBED,
    "/v1/classify": CLASSIFY,
    "/classify": CLASSIFY,
    "/v1/score": SCORE,
    "/score": SCORE,
    "/v1/rerank": SCORE,
    "/v2/rerank": SCORE,
    "/rerank": SCORE,
}
"""Task of each endpoint."""
RERANK = "rerank"
"""Last part of the endpoints that rank documents."""

_PAIRS = (
    ("text_1", "text_2"),
    ("queries", "documents"),
    ("queries", "items"),
    ("data_1", "data_2"),
)
"""Names under which a request to score holds the first texts and the second ones."""
_OF_TOKENS = ("truncate_prompt_tokens", "truncation_side", "add_special_tokens")
"""Parameters that go to an endpoint unread, because only the endpoint has the tokenizer."""
_MOST_TEXTS = 10_000
"""Largest number of texts in one request. All of them are in the engine at once."""


def tasks_of(task: str, pairs: PairForm) -> frozenset[str]:
    """Return the tasks whose requests a run can answer.

    Args:
        task: Task of the run.
        pairs: How the run's model reads pairs of texts.
    """
    if task not in (EMBED, CLASSIFY, SCORE):
        return frozenset({task})
    return frozenset({SCORE, EMBED if task != CLASSIFY and pairs is PairForm.APART else CLASSIFY})


def fill_request(draft: Draft, url: str, body: dict[str, Any], facts: EngineFacts) -> None:
    """Read a request to one of the endpoints of `TASKS`.

    Raises:
        RowProblem: the request has no text, or a parameter that is unknown or wrong.
    """
    draft.model = body.get("model")
    draft.task = task = TASKS[url]
    pairs = facts.pairs
    left = {name: value for name, value in body.items() if value is not None}
    for name in HARMLESS:
        left.pop(name, None)
    if url.endswith(RERANK):
        _fill_rerank(draft, left, pairs)
    elif task == SCORE:
        _fill_score(draft, left, pairs)
    else:
        _fill_inputs(draft, left)
    extra = {
        name: left.pop(name) for name in _OF_TOKENS if name in left and name in facts.own_parameters
    }
    _fill_parameters(draft, left, task, extra or None)
    if left:
        name = next(iter(left))
        hint = "; use use_activation" if name == "normalize" else near(name, _KNOWN)
        raise RowProblem(
            Code.UNSUPPORTED_PARAMETER,
            f"{name}: not supported, expected the request without it{hint}",
            param=name,
        )


# --------------------------------------------------------------------------- texts


def _fill_inputs(draft: Draft, left: dict[str, Any]) -> None:
    name = "messages" if "messages" in left else "input"
    value = left.pop(name, None)
    is_chat = name == "messages" or _is_conversation(value)
    if not is_chat and isinstance(value, list) and value and isinstance(value[0], list):
        is_chat = _is_conversation(value[0])
    kwargs = _optional(left, "chat_template_kwargs", _object) if is_chat else None
    if is_chat:
        _optional(left, "add_generation_prompt", _must_be(False))
        _optional(left, "continue_final_message", _must_be(False))
    several = _several(value)
    draft.parts = [Draft(draft.row) for _ in several or ()]
    try:
        for part, each in zip(
            draft.parts or [draft], [value] if several is None else several, strict=True
        ):
            _fill_text(part, each)
            part.chat_template_kwargs = kwargs
    except RowProblem as error:
        error.param = name
        raise


def _several(value: Any) -> list[Any] | None:
    """Return the texts of an `input` that holds several, or None if it is one text."""
    if not isinstance(value, list) or not value:
        return None
    is_one = _is_conversation(value) or all(type(item) is int for item in value)
    if not is_one and len(value) > _MOST_TEXTS:
        raise RowProblem(
            Code.INVALID_PARAMETER,
            f"input: {len(value)} texts, expected at most {_MOST_TEXTS}",
            param="input",
        )
    return None if is_one else value


def _fill_text(draft: Draft, value: Any) -> None:
    if isinstance(value, str):
        if not value:
            raise RowProblem(Code.EMPTY_PROMPT, "input is empty, expected text")
        draft.text = value
    elif _is_conversation(value):
        draft.messages, images = take_images(conversation.read_conversation(value))
        if images:
            raise RowProblem(Code.UNSUPPORTED_CONTENT, "a message has an image, expected text")
    else:
        draft.token_ids = token_ids(value, "input")


def _is_conversation(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict)


def _fill_rerank(draft: Draft, left: dict[str, Any], pairs: PairForm) -> None:
    queries = _texts(left.pop("query", None), "query")
    if len(queries) != 1:
        raise _invalid("query", f"{len(queries)} texts, expected one")
    documents = _texts(left.pop("documents", None), "documents")
    _optional(left, "top_n", _whole(0))
    set_pairs(draft, [(queries[0], document) for document in documents], form=pairs)


def _fill_score(draft: Draft, left: dict[str, Any], pairs: PairForm) -> None:
    first, second = next(
        (names for names in _PAIRS if names[0] in left and names[1] in left), ("", "")
    )
    if not first:
        shown = ", or ".join(" and ".join(names) for names in _PAIRS)
        raise RowProblem(Code.INVALID_REQUEST, f"body: has no pair of texts, expected {shown}")
    firsts, seconds = (_texts(left.pop(name), name) for name in (first, second))
    if len(firsts) not in (1, len(seconds)):
        raise _invalid(
            first, f"{len(firsts)} texts with {len(seconds)} in {second}, expected one or as many"
        )
    if len(firsts) == 1:
        firsts *= len(seconds)
    set_pairs(draft, list(zip(firsts, seconds, strict=True)), form=pairs)


def _texts(value: Any, name: str) -> list[str]:
    """Return the texts of a parameter that holds one or several."""
    values = value if isinstance(value, list) else [value]
    if not values:
        raise RowProblem(Code.EMPTY_PROMPT, f"{name} is empty, expected a text", param=name)
    if len(values) > _MOST_TEXTS:
        raise _invalid(name, f"{len(values)} texts, expected at most {_MOST_TEXTS}")
    for each in values:
        if isinstance(each, dict):
            raise RowProblem(
                Code.UNSUPPORTED_CONTENT, f"{name} holds parts other than text", param=name
            )
        if not isinstance(each, str):
            raise RowProblem(
                Code.INVALID_PROMPT,
                f"{name} holds a JSON {json_type(each)}, expected text",
                param=name,
            )
        if not each:
            raise RowProblem(Code.EMPTY_PROMPT, f"{name} holds an empty text", param=name)
    return values


# --------------------------------------------------------------------------- parameters

_KNOWN = [
    *("input", "messages", "encoding_format", "dimensions", "use_activation", "query", "documents"),
    *("truncate_prompt_tokens", "truncation_side", "add_special_tokens", "priority", "top_n"),
    *(name for names in _PAIRS for name in names),
]


def _fill_parameters(
    draft: Draft, left: dict[str, Any], task: str, extra: dict[str, Any] | None
) -> None:
    pooling = Pooling(
        dimensions=_optional(left, "dimensions", _whole(1)) if task == EMBED else None,
        normalize=_optional(left, "use_activation", _boolean),
        extra=extra,
    )
    draft.pooling = pooling if pooling != Pooling() else None
    if task == EMBED:
        _optional(left, "encoding_format", _one_of("float", "base64"))
    _optional(left, "padding", _one_of("do_not_pad"))
    draft.priority = _optional(left, "priority", _whole(-(2**63))) or 0
    most = _optional(left, "truncate_prompt_tokens", _whole(-1))
    side = _optional(left, "truncation_side", _one_of("left", "right"))
    special = _optional(left, "add_special_tokens", _boolean)
    for part in draft.parts or [draft]:
        part.most_prompt_tokens = most
        part.truncation_side = side or "right"
        if special is not None:
            part.add_special_tokens = special


def _optional(left: dict[str, Any], name: str, read: Callable[[str, Any], Any]) -> Any:
    """Take a parameter out of those that are left to read. Returns None if it is not there."""
    return read(name, left.pop(name)) if name in left else None


def _boolean(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise _invalid(name, f"{_shown(value)}, expected true or false")
    return value


def _object(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _invalid(name, f"a JSON {json_type(value)}, expected an object")
    return value


def _whole(least: int) -> Callable[[str, Any], int]:
    def read(name: str, value: Any) -> int:
        if type(value) is not int or not least <= value < 2**63:
            to = f" to {2**63 - 1}" if least < -1 else ""
            raise _invalid(name, f"{_shown(value)}, expected a whole number from {least}{to}")
        return value

    return read


def _one_of(*known: str) -> Callable[[str, Any], str]:
    def read(name: str, value: Any) -> str:
        if value not in known:
            raise _invalid(name, f"{_shown(value)}, expected {' or '.join(known)}")
        return str(value)

    return read


def _must_be(wanted: bool) -> Callable[[str, Any], None]:
    def read(name: str, value: Any) -> None:
        if value is not wanted:
            raise _invalid(name, f"{_shown(value)}, expected {str(wanted).lower()}")

    return read


def _invalid(name: str, finding: str) -> RowProblem:
    return RowProblem(Code.INVALID_PARAMETER, f"{name}: {finding}", param=name)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:60] + "…"
