"""The run's options: refused if they contradict each other, and as fields of request bodies in the server's own names.

The forms of constraints and tools are here as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from batchinfer.core.errors import ConfigError
from batchinfer.prompts.json_lines import decode_text, reading, shown
from batchinfer.prompts.types import (
    COLUMN_KINDS,
    MEDIA_KINDS,
    SPEECH_URLS,
    TASK_PATHS,
    PromptConfig,
    Sampling,
    Unfit,
)

_FIELDS = ("max_tokens", "temperature", "top_p", "n", "stop", "chat_template_kwargs")
"""Options whose values go into bodies as they are."""
ALIASES = {
    "num_return_sequences": "n",
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "stop_strings": "stop",
    "eos_token_id": "stop_token_ids",
    "structured": "structured_outputs",
    "thinking_budget": "thinking_token_budget",
    "normalize": "use_activation",
}
"""Names that transformers' GenerationConfig, vLLM's engine or people use, each with the name of the same field here."""
_WITHOUT_EFFECT = ("use_cache", "pad_token_id", "early_stopping", "do_sample", "prepend_bos")
"""Parameters of generation scripts that servers do not have, and that change no answer here."""
_KINDS = ("json", "choice", "regex", "grammar", "structural_tag", "json_object")
"""Kinds of constraints, by vLLM's names."""
_RULES = {
    *("type", "enum", "const", "allOf", "anyOf", "oneOf", "not", "if", "$ref", "format", "pattern"),
    *("properties", "required", "additionalProperties", "items", "prefixItems", "contains"),
}
"""Keywords of JSON Schema. A schema with none of them is no schema, but, say, an example of an answer."""

Fields = dict[str, Any]


def make_body(options: Sampling) -> Fields:
    """Make the run's own fields of request bodies from its options. Further fields replace those of options.

    Raises:
        ConfigError: a value cannot work, or two options contradict each other.
    """
    default = Sampling()
    found = {x: getattr(options, x) for x in _FIELDS if getattr(options, x) != getattr(default, x)}
    extra, choices = _translated(options.sampling), options.choices
    own = extra.keys() & {"response_format", "structured_outputs"}
    if sum(map(bool, (options.json_schema, choices, own))) > 1:
        names = "--json-schema, --choices and --sampling"
        raise ConfigError(f"{names}: several constraints, expected one", hint="keep one of them")
    with reading("--json-schema", None):
        found |= read_constraint(options.json_schema)
    with reading("--choices", None):
        texts = choices[0].split(",") if len(choices) == 1 else choices
        found |= read_constraint([x.strip() for x in texts if x.strip()]) if choices else {}
    with reading("--tools", None):
        found |= {"tools": read_tools(options.tools)} if options.tools else {}
    return found | extra


def _translated(pairs: Mapping[str, Any]) -> Fields:
    """Return the fields that ``--sampling`` sets, by the server's names."""
    found: Fields = {}
    for name, value in pairs.items():
        field = ALIASES.get(name, name)
        if name == "seed":
            raise ConfigError("--sampling seed: is the run's", hint="use --seed")
        if field in found:
            raise ConfigError(f"--sampling {name}: sets {field}, which another name sets as well")
        if name not in _WITHOUT_EFFECT:
            is_single = field in ("stop", "stop_token_ids") and isinstance(value, str | int)
            found[field] = [value] if is_single else value
    if pairs.get("prepend_bos") is False:
        found["add_special_tokens"] = False
    if pairs.get("do_sample") is False:  # as in transformers, it outweighs a temperature
        found["temperature"] = 0.0
    return found


# --------------------------------------------------------------------------- constraints and tools


def read_constraint(value: Any) -> Fields:
    """Return the field of a body that states a constraint: OpenAI's own for JSON, else vLLM's.

    The value, or the JSON that it holds as text, is one of these: an object whose only field is one of `_KINDS`; a
    `response_format` of the OpenAI API; a JSON schema; a list of texts, the choices. Null, an empty text and a
    `response_format` of the type ``text`` state none. Whether it compiles is left to the server.

    Raises:
        Unfit: the value is none of these, or is empty.
    """
    if isinstance(value, str) and value:
        value = decode_text(value)
    if value is None or value == "":
        return {}
    kind = "choice" if isinstance(value, list) else "json"
    if isinstance(value, dict):
        given = {name: item for name, item in value.items() if item is not None}
        if value and not given:
            return {}
        if value.get("type") in ("text", "json_object", "json_schema", "structural_tag"):
            return {"response_format": given} if value["type"] != "text" else {}
        if len(given) == 1 and next(iter(given)) in _KINDS:  # columns of objects fill up with nulls
            [(kind, value)] = given.items()
    if kind == "json_object":
        return {"response_format": {"type": "json_object"}}
    if not value:
        raise Unfit(f"{kind} is {shown(value)}, expected one that is not empty")
    if kind != "json":
        return {"structured_outputs": {kind: value}}
    if not isinstance(value, dict) or not _RULES & value.keys():
        raise Unfit(f"{shown(value)}, expected a JSON schema, with type, properties or the like")
    schema = {"name": "answer", "schema": value}
    return {"response_format": {"type": "json_schema", "json_schema": schema}}


def read_tools(value: Any) -> list[dict[str, Any]]:
    """Return tools in the form of the OpenAI API. What they hold is left to the server.

    Args:
        value: A list of tools. A tool may also be its function alone, as many data sets store it.

    Raises:
        Unfit: the value is no list of objects, or is empty.
    """
    if not isinstance(value, list) or not value or not all(isinstance(x, dict) for x in value):
        raise Unfit(f"{shown(value)}, expected a list of tools, not empty")
    return [
        tool
        if "function" in tool or "name" not in tool
        else {"type": "function", "function": {x: y for x, y in tool.items() if x != "type"}}
        for tool in value
    ]


# --------------------------------------------------------------------------- what contradicts what

_PROMPTS = ("messages_column", "prompt_column", "prompt_template", "pair_columns")
"""Fields that say what the prompt of a row is."""
_OTHERS = ("system_prompt", "as_chat", "blank_columns")
"""The other fields that only rows of columns have."""
_VECTORS = {"embed_dtype": ("float32",), "endianness": ("little", "native")}
"""Fields that say how vectors are written, each with the values of vectors that can be read."""


def check_config(config: PromptConfig) -> None:
    """Check the options against each other.

    Raises:
        ConfigError: the message names the option.
    """
    for message, hint in _complaints(config):
        raise ConfigError(message, hint=hint)


def _vector_complaints(config: PromptConfig) -> Iterator[tuple[str, str]]:
    vectors = _VECTORS | ({"encoding_format": ("float",)} if config.task == "token-embed" else {})
    for name, readable in vectors.items():
        if (value := config.body.get(name)) not in (None, *readable):
            expected = " or ".join(readable)
            yield f"--sampling {name}: {shown(value)}, expected {expected}", "leave it out"


def _complaints(config: PromptConfig) -> Iterator[tuple[str, str]]:
    """Yield what is wrong, and what to do. Later complaints may follow from the first."""
    for kind, names in config.columns.items():
        if kind not in COLUMN_KINDS:
            known = ", ".join(COLUMN_KINDS)
            yield f"--column {kind}: expected one of {known}", "--column image=photo"
        if len(names) > 1 and kind not in MEDIA_KINDS:
            yield f"--column {kind}: {len(names)} columns, expected one", "give it once"
    yield from _vector_complaints(config)
    given = {x: f"--{x.replace('_', '-')}" for x in (*_PROMPTS, *_OTHERS) if getattr(config, x)}
    given |= {kind: f"--column {kind}" for kind in config.columns if kind != "id"}
    if config.request_format != "rows":
        such = f"rows of --request-format {config.request_format} hold their prompts"
        for option in given.values():
            yield f"{option}: {such}", "leave it out, or use --request-format rows"
        return
    task, prompts = f"--task {config.task}", [given[x] for x in _PROMPTS if x in given]
    is_speech, sounds = TASK_PATHS.get(config.task) in SPEECH_URLS, config.columns.get("audio", [])
    if is_speech and (prompts or len(sounds) != 1):
        found = " and ".join(prompts) or f"{len(sounds)} columns of sounds"
        yield f"{task}: {found}, expected one column of sounds", "name it: --column audio=NAME"
    elif not is_speech and len(prompts) != 1:
        found = " and ".join(prompts) or "no prompt option"
        hint = "--messages-column, --prompt-column, or --prompt-template FILE"
        yield f"{found}: expected one way to make prompts", hint
    num_columns = 2 if config.task in ("score", "rerank") else 0
    if len(config.pair_columns) != num_columns:
        found = f"{len(config.pair_columns)} columns, expected {num_columns}"
        yield f"--pair-columns with {task}: {found}", "as in --task score --pair-columns query,text"
    of_chats = {"image", "video", "tools"} | (set() if is_speech else {"audio"})
    if "system_prompt" not in config.prompt_template:
        of_chats.add("system_prompt")
    if "tools" in config.body:
        given.setdefault("tools", "--tools")
    for field in () if config.is_chat else sorted(of_chats & given.keys()):
        hint = "add --as-chat, or use --messages-column"
        yield f"{given[field]}: the prompt is plain text, expected a chat", hint
    if "lora" in given and not config.adapters:
        yield "--column lora: the run has no adapter", "add --lora NAME=PATH"
    if len(config.adapters) > 1 and "lora" not in given:
        yield "--lora: several adapters, and rows say none", "add --column lora=NAME"
