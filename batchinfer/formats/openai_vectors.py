"""The response bodies of pooling models, as OpenAI's embeddings API and vLLM's server write them. Pure."""

from __future__ import annotations

from typing import Any

import msgspec

from batchinfer.core.records import Completion
from batchinfer.core.tasks import CLASSIFY, EMBED, SCORE, TOKEN_EMBED
from batchinfer.formats.lines import task_of
from batchinfer.formats.vectors import OutputVectors, Vector, numbers_of, shown_vectors
from batchinfer.prompts import Prepared

_PREFIXES = {EMBED: "embd", CLASSIFY: "classify", SCORE: "score"}


def pooled_body(
    prepared: Prepared,
    completion: Completion,
    *,
    digest: str,
    created: int,
    model: str,
    as_base64: bool,
) -> dict[str, Any]:
    """Return the response body of a row's request. Rows without a request have the body that theirs would have.

    Args:
        prepared: The row.
        completion: Its answer.
        digest: The row's part of the body's id.
        created: Time of the run, in Unix seconds.
        model: Name of the model.
        as_base64: Whether vectors are base64 if the request does not say it.
    """
    task, request = task_of(prepared), prepared.body or {}
    form = request.get("encoding_format")
    as_base64 = form == "base64" if form else as_base64
    usage = {
        "prompt_tokens": completion.prompt_tokens,
        "total_tokens": completion.prompt_tokens,
    }
    if prepared.url.endswith("rerank"):
        results = _ranking(request, [numbers_of(each.data)[0] for each in completion.pooled])
        return {"id": f"rerank-{digest}", "model": model, "usage": usage, "results": results}
    data = [
        {"index": index, **_datum(task, shown_vectors(each, task, as_base64=as_base64))}
        for index, each in enumerate(completion.pooled)
    ]
    return {
        "id": f"{_PREFIXES.get(task, 'pool')}-{digest}",
        "object": "list",
        "created": created,
        "model": model,
        "data": data,
        "usage": {**usage, "prompt_tokens_details": {"cached_tokens": completion.cached_tokens}},
    }


def _datum(task: str, found: OutputVectors) -> dict[str, Any]:
    if task == EMBED:
        return {"object": "embedding", "embedding": found.embedding}
    if task == CLASSIFY:
        probs = found.probs or []
        return {"label": found.label, "probs": probs, "num_classes": len(probs)}
    if task == SCORE:
        return {"object": "score", "score": found.score}
    if task == TOKEN_EMBED:
        return {"object": "pooling", "data": found.token_embeddings}
    if found.reward is not None:
        return {"object": "reward", "reward": found.reward}
    return {"object": "reward", "rewards": found.rewards}


def _ranking(request: dict[str, Any], scores: list[float]) -> list[dict[str, Any]]:
    documents = request.get("documents")
    texts = documents if isinstance(documents, list) else [documents]
    order = sorted(range(len(scores)), key=lambda index: -scores[index])
    return [
        {
            "index": index,
            "document": {"text": texts[index], "multi_modal": None},
            "relevance_score": scores[index],
        }
        for index in order[: request.get("top_n") or len(order)]
    ]


# --------------------------------------------------------------------------- reading


class _Datum(msgspec.Struct, gc=False):
    index: int = 0
    embedding: Vector | None = None
    score: float | None = None
    label: str | None = None
    probs: list[float | None] | None = None
    data: list[Vector] | None = None
    reward: float | None = None
    rewards: list[list[float]] | None = None


class _Ranked(msgspec.Struct, gc=False):
    index: int
    relevance_score: float


class PooledBody(msgspec.Struct, gc=False):
    """The part of a response body that pooling models write. Other bodies have neither of the fields."""

    data: list[_Datum] = []
    results: list[_Ranked] = []

    def vectors(self) -> list[OutputVectors]:
        """Return what the body says about each text, in the order of the request. Documents left out have no score."""
        if self.results:
            ranked = {each.index: each.relevance_score for each in self.results}
            return [OutputVectors(score=ranked.get(i)) for i in range(max(ranked) + 1)]
        return [
            OutputVectors(
                embedding=each.embedding,
                score=each.score,
                label=each.label,
                probs=each.probs,
                token_embeddings=each.data,
                reward=each.reward,
                rewards=each.rewards,
            )
            for each in sorted(self.data, key=lambda each: each.index)
        ]
