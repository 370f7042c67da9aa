"""The card of a collected data set: how it was made, as README.md of a Hub repository. Pure."""

from __future__ import annotations

import json
from typing import Any

from batchinfer.core.records import Record, Run
from batchinfer.prompts import find_request_format

_SIZES = ((1_000, "n<1K"), (10_000, "1K<n<10K"), (100_000, "10K<n<100K"), (1_000_000, "100K<n<1M"))
_MORE_SIZES = ((10_000_000, "1M<n<10M"), (100_000_000, "10M<n<100M"), (10**9, "100M<n<1B"))
_LONGEST = 2000


class CardFacts(Record, frozen=True, kw_only=True):
    """What the card says beside the run's own configuration. `lines` are table rows, `rows` the job's."""

    name: str
    columns: dict[str, str]
    """Column to type."""
    lines: int
    rows: int
    rows_error: int
    rows_missing: int
    errors: dict[str, int]
    prompt_tokens: int
    completion_tokens: int
    sources: list[str]
    path: str
    """Glob of the data files in the repository."""


def make_card(run: Run, facts: CardFacts) -> str:
    """Write the card. Deterministic. The licence is left to the user, as a line to fill in."""
    title = facts.name.rpartition("/")[2]
    parts = [
        _front_matter(run, facts),
        f"# {_plain(title)}\n",
        "Generated offline, one answer (or the reason why there is none) for every row of the source.\n",
        _table("How it was made", _making(run, facts)),
        _table("Counts", _counts(facts)),
    ]
    if facts.errors:
        parts.append(_table("Failed rows by code", list(facts.errors.items())))
    parts.append(_table("Columns", list(facts.columns.items())))
    parts += _templates(run)
    parts.append(
        "## Before you publish\n\n"
        "Choose a licence in the first lines of this file: the terms of the model and of the source bind what was "
        "made with them. Model output may be wrong, offensive or personal; nobody has read all of it.\n"
    )
    return "\n".join(parts)


def _front_matter(run: Run, facts: CardFacts) -> str:
    import yaml

    model = str(run.config.get("model") or "")
    values: dict[str, Any] = {
        "configs": [
            {"config_name": "default", "data_files": [{"split": "train", "path": facts.path}]}
        ],
        "size_categories": [_size(facts.lines)],
        "tags": ["synthetic", "batchinfer"],
    }
    sources = [
        source.removeprefix("hf://datasets/").partition("@")[0]
        for source in facts.sources
        if source.startswith("hf://datasets/")
    ]
    if sources:
        values["source_datasets"] = ["/".join(source.split("/")[:2]) for source in sources]
    if model.count("/") == 1 and not model.startswith((".", "/", "~")):
        values["base_model"] = model
    text = yaml.safe_dump(values, sort_keys=True, allow_unicode=True)
    return f"---\n# license: name one here, see the end of this card\n{text}---\n"


def _size(lines: int) -> str:
    return next((name for limit, name in (*_SIZES, *_MORE_SIZES) if lines < limit), "n>1B")


def _making(run: Run, facts: CardFacts) -> list[tuple[str, Any]]:
    config, recorded = run.config, run.recorded
    prompt = config.get("prompt") or {}
    sampling = {
        name: value
        for name, value in (config.get("sampling") or {}).items()
        if value not in (None, False, [], {}) or name == "temperature"
    }
    rows: list[tuple[str, Any]] = [
        ("model", config.get("model")),
        ("revision", recorded.get("revision") or config.get("model_identity")),
        ("data type", config.get("dtype")),
        ("quantization", config.get("quantization")),
        ("longest prompt and answer", config.get("max_model_len")),
        ("prompt", _prompt_kind(prompt)),
        ("system prompt", prompt.get("system_prompt")),
        ("sampling", json.dumps(sampling, sort_keys=True, ensure_ascii=False)),
        ("seed", "none" if config.get("seed") is None else config["seed"]),
        ("engine", f"{recorded.get('engine', '')} {recorded.get('engine_version', '')}".strip()),
        ("batchinfer", recorded.get("batchinfer_version")),
        ("fingerprint", run.fingerprint),
    ]
    rows += [("source", source) for source in facts.sources]
    return [(name, value) for name, value in rows if value not in (None, "")]


def _prompt_kind(prompt: dict[str, Any]) -> str:
    request_format = find_request_format(prompt.get("request_format") or "")
    if request_format.has_own_parameters:
        return f"requests of their own ({request_format.name})"
    for key, text in (
        ("messages_column", "the conversation in the column"),
        ("prompt_column", "the text in the column"),
        ("template_name", "the named template"),
    ):
        if prompt.get(key):
            turns = f", turns: {prompt.get('turns')}" if key == "messages_column" else ""
            return f"{text} {prompt[key]}{turns}"
    return "a template (below)" if prompt.get("prompt_template") else ""


def _counts(facts: CardFacts) -> list[tuple[str, Any]]:
    share = facts.rows_error / facts.rows if facts.rows else 0.0
    rows: list[tuple[str, Any]] = [
        ("rows", f"{facts.rows:,}"),
        ("failed rows", f"{facts.rows_error:,} ({share:.2%})"),
        ("prompt tokens", f"{facts.prompt_tokens:,}"),
        ("completion tokens", f"{facts.completion_tokens:,}"),
    ]
    if facts.rows_missing:
        rows.append(("rows that are missing", f"{facts.rows_missing:,}"))
    return rows


def _templates(run: Run) -> list[str]:
    prompt = run.config.get("prompt") or {}
    found = []
    for title, key in (("Prompt template", "prompt_template"), ("Chat template", "chat_template")):
        text = str(prompt.get(key) or "")
        if text:
            cut = text if len(text) <= _LONGEST else text[:_LONGEST] + "\n…"
            # Indented code holds whatever the text is; a fence could be closed by it.
            body = "\n".join(f"    {line}" for line in cut.splitlines())
            found.append(f"## {title}\n\n{body}\n")
    return found


def _table(title: str, rows: list[tuple[str, Any]]) -> str:
    body = "".join(f"| {_plain(str(name))} | {_plain(str(value))} |\n" for name, value in rows)
    return f"## {title}\n\n| | |\n|---|---|\n{body}"


def _plain(text: str) -> str:
    """Text that Markdown shows as it is, in one line of a table."""
    cut = text if len(text) <= _LONGEST else text[:_LONGEST] + "…"
    for sign in "\\`*_[]<>|#":
        cut = cut.replace(sign, f"\\{sign}")
    return " ".join(cut.split())
