"""Make the card of a data set: the README.md of its repository on the Hub, which says how the data was made."""

from __future__ import annotations

import importlib.resources
from typing import Any

from batchinfer.core import codec
from batchinfer.core.records import Job, Run

_LONGEST = 2000
"""Largest number of characters that the card shows of one text."""
_LONGEST_CODE = 20_000
_MADE = ("model", "revision", "source", "engine", "engine_version", "batchinfer_version")


def make_card(run: Run, job: Job, url: str, path: str, facts: dict[str, Any]) -> str:
    """Return the card as Markdown, with a line for the licence, which the user fills in.

    Of local sources it has the last parts of their URLs only. The same arguments give the same card.

    Args:
        run: The run.
        job: The job.
        url: URL of the data set.
        path: Glob pattern that matches the data files in the repository.
        facts: What is known of the rows, by names; None is left out.
    """
    import jinja2
    from huggingface_hub import DatasetCardData

    sources = [source.url for source in job.sources]
    hub = [each.removeprefix("hf://datasets/") for each in sources if each.startswith("hf://")]
    model = str(run.config.get("model") or "")
    front_matter = DatasetCardData(
        configs=[{"config_name": "default", "data_files": [{"split": "train", "path": path}]}],
        source_datasets=["/".join(each.partition("@")[0].split("/")[:2]) for each in hub] or None,
        tags=["synthetic", "batchinfer"],
        base_model=model if model.count("/") == 1 and model[0] not in "./~" else None,
    )
    public = ("hf://", "https://")
    named = [each if each.startswith(public) else each.rpartition("/")[2] for each in sources]
    made = {"model": model, "source": ", ".join(named), **run.recorded}
    rows = {name: made.get(name) for name in _MADE} | {"fingerprint": run.fingerprint} | facts
    options = codec.encode_pretty(run.config.get("prompt") or {}).decode()[:_LONGEST_CODE]
    text = (importlib.resources.files("batchinfer.collect") / "card.md.jinja").read_text()
    card: str = jinja2.Template(text, trim_blocks=True, lstrip_blocks=True).render(
        title=_plain(url.partition("@")[0].rpartition("/")[2]),
        front_matter=front_matter.to_yaml(),
        rows=[(name, _plain(value)) for name, value in rows.items() if value is not None],
        # An indented block, because the text itself could close a fenced one.
        options="\n".join(f"    {line}" for line in options.splitlines()),
    )
    return card


def _plain(value: object) -> str:
    """A value as text on one line, cut, and escaped so that Markdown shows its signs as they are."""
    cut = str(value) if len(str(value)) <= _LONGEST else f"{str(value)[:_LONGEST]}…"
    for sign in "\\`*_[]<>|#":
        cut = cut.replace(sign, f"\\{sign}")
    return " ".join(cut.split())
