"""The tasks of a run (``--task``): what the model makes of a row."""

from __future__ import annotations

from enum import StrEnum

GENERATE = "generate"
EMBED = "embed"
TOKEN_EMBED = "token-embed"  # noqa: S105 - no password
CLASSIFY = "classify"
SCORE = "score"
RERANK = "rerank"
REWARD = "reward"
TRANSCRIBE = "transcribe"
TRANSLATE = "translate"

_POOLING = (EMBED, TOKEN_EMBED, CLASSIFY, SCORE, RERANK, REWARD)
TASKS = (GENERATE, *_POOLING, TRANSCRIBE, TRANSLATE)
"""All tasks."""
POOLINGS = ("cls", "last", "mean", "all", "step")
"""Values of ``--pooling``, which are vLLM's. The last two keep a vector for each token, or for each step."""


def is_pooling(task: str) -> bool:
    """Whether the task needs a pooling model: one that gives numbers for a text instead of more text."""
    return task in _POOLING


class PairForm(StrEnum):
    """How a model that scores pairs of texts reads them."""

    APART = "apart"
    """Each text by itself (a bi-encoder). The score is the cosine of their embeddings."""
    JOINED = "joined"
    """Both together, as the tokenizer joins pairs (a cross-encoder)."""
    CHAINED = "chained"
    """Both together, the second right after the first, as language models that were made scorers do."""
