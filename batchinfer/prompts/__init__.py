"""Turns the rows of a chunk into calls for the engine: a row becomes the body of a request, in the server's words."""

from __future__ import annotations

from batchinfer.prompts.builder import PromptBuilder, finish_call, internal_failure
from batchinfer.prompts.prompt_config import make_body
from batchinfer.prompts.templates import NAMED_TEMPLATES
from batchinfer.prompts.types import (
    BestOf,
    EngineRules,
    MediaRef,
    Prepared,
    PromptConfig,
    RawRow,
    RowProblem,
    Sampling,
)

__all__ = [
    "NAMED_TEMPLATES",
    "BestOf",
    "EngineRules",
    "MediaRef",
    "Prepared",
    "PromptBuilder",
    "PromptConfig",
    "RawRow",
    "RowProblem",
    "Sampling",
    "finish_call",
    "internal_failure",
    "make_body",
]
