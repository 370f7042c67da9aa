"""The tasks of a run (``--task``): what the model makes of a row."""

from __future__ import annotations

from typing import Literal

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
OF_SOUNDS = ("transcribe", "translate")
"""Tasks whose rows are sounds."""


def is_pooling(task: str) -> bool:
    """Whether the task needs a pooling model: one that gives numbers for a text instead of more text."""
    return task in ("embed", "token-embed", "classify", "score", "rerank", "reward")
