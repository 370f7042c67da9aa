"""Make the card of a data set: the README.md of its repository on the Hub, which says how the data was made."""

from __future__ import annotations

import importlib.resources
import json
from typing import Any

from batchinfer.core.records import Record, Run
from batchinfer.prompts import find_request_format

_SIZES = {10**3: "1K", 10**4: "10K", 10**5: "100K", 10**6: "1M", 10**7: "10M", 10**8: "100M", 10**9: "1B"}  # fmt: skip
_LONGEST = 2000
"""Largest number of characters that the card shows of one text."""


class CardFacts(Record, frozen=True, kw_only=True):
    """Facts for the card that are not in run.json.

    `lines` is the number of rows of the table, `rows` the number of rows of the job in it. Only --explode makes them
    differ.
    """

    name: str
    columns: dict[str, str]
    """Type of each column of the table, by the column's name."""
    lines: int
    rows: int
    rows_error: int
    rows_missing: int
    errors: dict[str, int]
    prompt_tokens: int
    completion_tokens: int
    sources: list[str]
    path: str
    """Glob pattern that matches the data files in the repository."""
    picked: str = ""
    """Which rows were taken, in words; empty if all were."""


def make_card(runs: dict[str, Run], facts: CardFacts) -> str:
    """Return the card as Markdown. The same arguments give the same card. `runs` are by the names in the column run.

    The card has a line for the licence, which the user fills in.
    """
    import jinja2

    prompts = {name: run.config.get("prompt") or {} for name, run in runs.items()}
    ends = {name: f": {name}" if len(runs) > 1 else "" for name in runs}
    template = (importlib.resources.files("batchinfer.collect") / "card.md.jinja").read_text()
    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=False,  # noqa: S701 - Markdown; `plain` and `code` escape it
    )
    environment.filters |= {"plain": _plain, "code": _code}
    return environment.from_string(template).render(
        facts=facts,
        title=facts.name.rpartition("/")[2],
        front_matter=_front_matter(list(runs.values()), facts),
        makings=[
            (f"How it was made{ends[name]}", _making(run, facts)) for name, run in runs.items()
        ],
        share=facts.rows_error / facts.rows if facts.rows else 0.0,
        templates={
            f"{title}{ends[name]}": prompt.get(key)
            for name, prompt in prompts.items()
            for title, key in (
                ("Prompt template", "prompt_template"),
                ("Chat template", "chat_template"),
            )
        },
    )


def _front_matter(runs: list[Run], facts: CardFacts) -> str:
    """The metadata at the top of the card, as YAML. The Hub reads it."""
    from huggingface_hub import DatasetCardData

    named = dict.fromkeys(str(run.config.get("model") or "") for run in runs)
    models = [
        model for model in named if model.count("/") == 1 and not model.startswith((".", "/", "~"))
    ]
    sources = [
        source.removeprefix("hf://datasets/").partition("@")[0]
        for source in facts.sources
        if source.startswith("hf://datasets/")
    ]
    data_files = [{"split": "train", "path": facts.path}]
    data = DatasetCardData(
        configs=[{"config_name": "default", "data_files": data_files}],
        size_categories=[_size(facts.lines)],
        source_datasets=["/".join(source.split("/")[:2]) for source in sources] or None,
        tags=["synthetic", "batchinfer"],
        base_model=(models if len(models) > 1 else models[0]) if models else None,
    )
    return str(data.to_yaml())


def _size(lines: int) -> str:
    """The Hub's name of the size class of a data set with `lines` rows.

    >>> _size(10), _size(1000), _size(10**10)
    ('n<1K', '1K<n<10K', 'n>1B')
    """
    least = ""
    for limit, name in _SIZES.items():
        if lines < limit:
            return f"{least}n<{name}"
        least = f"{name}<"
    return "n>1B"


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
        *(("source", source) for source in facts.sources),
        ("rows", facts.picked),
    ]
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


def _cut(text: str, mark: str) -> str:
    return text if len(text) <= _LONGEST else text[:_LONGEST] + mark


def _plain(value: object) -> str:
    """A value as text on one line, cut, and escaped so that Markdown shows its signs as they are."""
    cut = _cut(str(value), "…")
    for sign in "\\`*_[]<>|#":
        cut = cut.replace(sign, f"\\{sign}")
    return " ".join(cut.split())


def _code(text: str) -> str:
    """Text as an indented code block. A fenced block would be unsafe, because the text itself could close the fence."""
    return "\n".join(f"    {line}" for line in _cut(text, "\n…").splitlines())
