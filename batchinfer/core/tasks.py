"""The tasks of a run (``--task``): what the model makes of a row."""

from __future__ import annotations

from typing import Literal, get_args

Task = Literal[
    "generate",
    "embed",
    "token-embed",
    "classify",
    "score",
    "rerank",
    "reward",
    "transcribe",
    "translate",
]
GENERATE: Literal["generate"] = "generate"
EMBED = "embed"
TOKEN_EMBED = "token-embed"  # noqa: S105 - no password
CLASSIFY = "classify"
SCORE = "score"
RERANK = "rerank"
REWARD = "reward"
TRANSCRIBE = "transcribe"
TRANSLATE = "translate"

_POOLING = (EMBED, TOKEN_EMBED, CLASSIFY, SCORE, RERANK, REWARD)
TASKS: tuple[str, ...] = get_args(Task)
"""All tasks."""


def is_pooling(task: str) -> bool:
    """Whether the task needs a pooling model: one that gives numbers for a text instead of more text."""
    return task in _POOLING
