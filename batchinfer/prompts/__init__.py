"""Turns the rows of a chunk into requests for the engine: request formats, templates, conversations and tokens."""

from __future__ import annotations

from batchinfer.prompts.builder import (
    REQUEST_FORMATS,
    EngineRules,
    PromptBuilder,
    find_request_format,
    is_repeatable,
)
from batchinfer.prompts.constraint_process import BACKEND as CONSTRAINT_BACKEND
from batchinfer.prompts.constraint_process import ConstraintChecker, check_run_constraint
from batchinfer.prompts.model_names import ANY_NAME, only_name
from batchinfer.prompts.parameters import make_sampling
from batchinfer.prompts.templates import NamedTemplate, list_templates
from batchinfer.prompts.tools import check_run_tools
from batchinfer.prompts.types import (
    CHAT_URL,
    COMPLETIONS_URL,
    TRUNCATIONS,
    Code,
    MediaRef,
    Prepared,
    PromptConfig,
    RawRow,
    RequestFormat,
    Tokenizer,
)

__all__ = [
    "ANY_NAME",
    "CHAT_URL",
    "COMPLETIONS_URL",
    "CONSTRAINT_BACKEND",
    "REQUEST_FORMATS",
    "TRUNCATIONS",
    "Code",
    "ConstraintChecker",
    "EngineRules",
    "MediaRef",
    "NamedTemplate",
    "Prepared",
    "PromptBuilder",
    "PromptConfig",
    "RawRow",
    "RequestFormat",
    "Tokenizer",
    "check_run_constraint",
    "check_run_tools",
    "find_request_format",
    "is_repeatable",
    "list_templates",
    "make_sampling",
    "only_name",
]
