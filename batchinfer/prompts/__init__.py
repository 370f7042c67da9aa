"""Rows to requests: request formats, templates, conversations, tokens. Pure."""

from __future__ import annotations

from batchinfer.prompts.builder import PromptBuilder
from batchinfer.prompts.parameters import make_sampling
from batchinfer.prompts.templates import NamedTemplate, list_templates
from batchinfer.prompts.types import (
    CHAT_URL,
    COMPLETIONS_URL,
    REQUEST_FORMATS,
    TRUNCATIONS,
    Code,
    Prepared,
    PromptConfig,
    RawRow,
    Tokenizer,
)

__all__ = [
    "CHAT_URL",
    "COMPLETIONS_URL",
    "REQUEST_FORMATS",
    "TRUNCATIONS",
    "Code",
    "NamedTemplate",
    "Prepared",
    "PromptBuilder",
    "PromptConfig",
    "RawRow",
    "Tokenizer",
    "list_templates",
    "make_sampling",
]
