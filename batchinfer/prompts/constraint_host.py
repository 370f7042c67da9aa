"""The process that compiles constraints: ``python -m batchinfer.prompts.constraint_host``.

constraint_process.py starts it.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import string
import sys
from typing import Any

from batchinfer.core import codec
from batchinfer.core.processes import no_garbage_collection
from batchinfer.prompts.constraint_process import ConstraintSetup
from batchinfer.prompts.limited_process import (
    MEMORY_STATUS,
    limit_memory,
    prepare_timer,
    present_bytes,
    read_frame,
    restart_timer,
    write_frame,
)

MOST_LEVELS = 64
"""Most levels of objects and arrays within each other that vLLM takes in a JSON schema."""
FORMATS = frozenset(
    {
        *("date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "json-pointer"),
        *("relative-json-pointer", "time", "uri", "uri-reference", "uri-template", "uuid"),
    }
)
"""Values of `format` that xgrammar knows."""
NUM_TOKENS = 32_768
"""Size of the vocabulary for which constraints are compiled. Models have 32 000 to 260 000 tokens."""


def main() -> None:
    """Load xgrammar. Then, until the pipe is closed, answer each frame (a constraint as JSON) with its problem."""
    first = read_frame(sys.stdin.buffer)
    if first is None:
        return
    setup = codec.msgpack_decoder(ConstraintSetup).decode(first)
    compiler = Compiler()
    limit_memory(present_bytes() + setup.memory_bytes)
    prepare_timer()
    write_frame(sys.stdout.buffer, b"ready")
    try:
        while (frame := read_frame(sys.stdin.buffer)) is not None:
            restart_timer(setup.constraint_seconds)
            problem = compiler.problem_of(json.loads(frame))
            restart_timer(0)
            write_frame(sys.stdout.buffer, problem.encode(errors="replace"))
    except MemoryError:
        os._exit(MEMORY_STATUS)


class Compiler:
    """Compiles constraints as vLLM's backend xgrammar does, without white space between the parts of JSON."""

    def __init__(self) -> None:
        with no_garbage_collection():
            import xgrammar

        vocabulary = xgrammar.TokenizerInfo(
            made_up_tokens(), vocab_type=xgrammar.VocabType.RAW, stop_token_ids=[0]
        )
        self._compiler = xgrammar.GrammarCompiler(vocabulary, max_threads=1, cache_enabled=False)
        self._tag_item = xgrammar.StructuralTagItem
        self._matcher = xgrammar.GrammarMatcher
        self._mask = xgrammar.allocate_token_bitmask(1, NUM_TOKENS)

    def problem_of(self, constraint: dict[str, Any]) -> str:
        """Return why a constraint does not compile; "" if it does."""
        [(kind, value)] = constraint.items()
        try:
            problem, compiled = self._compile(kind, value)
            if compiled is not None and not self._has_beginning(compiled):
                return "no answer satisfies it"
            return problem
        except MemoryError:
            raise
        except RecursionError:
            return "does not compile: it is nested too deep"
        except Exception as error:
            if "bad_alloc" in str(error):
                raise MemoryError from error
            return f"does not compile: {_reason(error)}"

    def _has_beginning(self, compiled: Any) -> bool:
        """Whether there is a token with which an answer can begin."""
        self._matcher(compiled).fill_next_token_bitmask(self._mask, 0)
        return bool((self._mask != 0).any())

    def _compile(self, kind: str, value: Any) -> tuple[str, Any]:
        """Return the problem of a constraint, and the compiled constraint if it has none."""
        if kind == "json":
            return self._compile_schema(json.loads(value) if isinstance(value, str) else value)
        if kind == "regex":
            if "\0" in value:
                return "does not compile: holds a NUL character", None
            return "", self._compiler.compile_regex(value)
        if kind == "choice":
            return "", self._compiler.compile_grammar(choice_grammar(value))
        if kind == "grammar":
            is_lark = "::=" not in re.sub(r"(#|//).*$", "", value, flags=re.MULTILINE)
            compile_it = self._compiler.compile_lark if is_lark else self._compiler.compile_grammar
            return "", compile_it(value)
        if kind == "structural_tag":
            return "", self._compile_tag(value)
        return "", None

    def _compile_schema(self, schema: Any) -> tuple[str, Any]:
        if not isinstance(schema, dict):
            return "does not compile: the schema is no JSON object", None
        if _levels(schema) > MOST_LEVELS:
            return f"does not compile: the schema has more than {MOST_LEVELS} levels", None
        if rule := broken_rule(schema):
            return (
                f"has a rule that the backend xgrammar would not keep: {rule} (the backend guidance may: "
                '--engine-arg structured_outputs_config={"backend":"guidance","disable_any_whitespace":true})'
            ), None
        return "", self._compiler.compile_json_schema(
            json.dumps(schema), any_whitespace=False, separators=(",", ":")
        )

    def _compile_tag(self, text: str) -> Any:
        tag = json.loads(text)
        if "structures" not in tag:
            return self._compiler.compile_structural_tag(text)
        items = [
            self._tag_item(begin=one["begin"], schema=json.dumps(one["schema"]), end=one["end"])
            for one in tag["structures"]
        ]
        return self._compiler.compile_structural_tag(items, tag["triggers"])


def made_up_tokens() -> list[bytes]:
    """Return a vocabulary that is about as hard to compile for as a small model's: bytes, and pieces of words."""
    letters = string.ascii_letters + string.digits + ' {}[]":,.-_\n'
    pairs = ("".join(pair) for pair in itertools.product(letters, letters))
    pieces = (
        f"{left}{middle}{right}"
        for left in letters
        for middle in ("e", "in", "tio", " t")
        for right in letters
    )
    longer = (
        f"{left}ation{middle}{right}" for middle in letters for left in letters for right in letters
    )
    tokens = dict.fromkeys(bytes([byte]) for byte in range(256))
    for text in itertools.chain(pairs, pieces, longer):
        if len(tokens) >= NUM_TOKENS:
            break
        tokens[text.encode()] = None
    return list(tokens)


def choice_grammar(choices: list[str]) -> str:
    """Return the grammar of answers that are one of some texts."""
    return "root ::= " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)


def _levels(value: Any, level: int = 0) -> int:
    if level > MOST_LEVELS or not isinstance(value, dict | list):
        return level
    items = value.values() if isinstance(value, dict) else value
    return max((_levels(item, level + 1) for item in items), default=level + 1)


def _reason(error: Exception) -> str:
    """Return the first line of an error's message, without the time and the place in xgrammar's source."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return re.sub(r"^\[[0-9:]+\] \S+\.cc:\d+: ", "", lines[0])[:300]


def broken_rule(schema: Any) -> str:
    """Return a rule of a JSON schema that xgrammar would not keep; "" if there is none.

    vLLM refuses the same schemas for the backend xgrammar (`has_xgrammar_unsupported_json_features`).

    >>> broken_rule({"type": "array", "items": {"type": "integer", "multipleOf": 3}})
    'multipleOf'
    """
    if isinstance(schema, list):
        return next(filter(None, map(broken_rule, schema)), "")
    if not isinstance(schema, dict):
        return ""
    return _broken_here(schema) or next(filter(None, map(broken_rule, schema.values())), "")


def _broken_here(schema: dict[str, Any]) -> str:
    kind = schema.get("type")
    types = (
        set(filter(_is_text, kind))
        if isinstance(kind, list)
        else {kind}
        if _is_text(kind)
        else set()
    )
    if types & {"integer", "number"} and "multipleOf" in schema:
        return "multipleOf"
    if "array" in types:
        for name in ("uniqueItems", "contains", "minContains", "maxContains"):
            if name in schema:
                return name
    if "string" in types:
        if "format" in schema and str(schema["format"]) not in FORMATS:
            return f"format {str(schema['format'])[:60]}"
        if _has_pattern_and_length(schema):
            return "pattern or format beside a length"
    if "object" in types and (rule := _broken_in_object(schema)):
        return rule
    several = schema.get("allOf")
    return "several allOf" if isinstance(several, list) and len(several) > 1 else ""


def _broken_in_object(schema: dict[str, Any]) -> str:
    names, patterns = schema.get("propertyNames"), schema.get("patternProperties")
    if "propertyNames" in schema:
        is_bounded = isinstance(names, dict) and _has_pattern_and_length(names)
        has_others = "patternProperties" in schema or "properties" in schema
        if is_bounded or has_others or schema.get("unevaluatedProperties", True) is not True:
            return "propertyNames"
    if isinstance(patterns, dict) and ("properties" in schema or len(patterns) > 1):
        return "patternProperties"
    return ""


def _has_pattern_and_length(schema: dict[str, Any]) -> bool:
    return ("pattern" in schema or "format" in schema) and (
        "minLength" in schema or "maxLength" in schema
    )


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


if __name__ == "__main__":
    main()
