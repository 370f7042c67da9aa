"""Make the card of a data set: the README.md of its repository on the Hub, which says how the data was made."""

from __future__ import annotations

import importlib.resources
from typing import Any

from batchinfer.core import codec
from batchinfer.core.records import Run

_LONGEST = 2000
"""Largest number of characters that the card shows of one text."""
_LONGEST_CODE = 20_000


def make_card(
    run: Run, *, name: str, path: str, sources: list[str], tables: dict[str, dict[str, Any]]
) -> str:
    """Return the card as Markdown. The same arguments give the same card.

    The card has a line for the licence, which the user fills in.

    Args:
        run: The run.
        name: Name of the data set.
        path: Glob pattern that matches the data files in the repository.
        sources: URLs of the source.
        tables: What is known of the rows: names and values by the heading of each table; None is left out.
    """
    import jinja2

    text = (importlib.resources.files("batchinfer.collect") / "card.md.jinja").read_text()
    made = {"model": run.config.get("model"), "source": ", ".join(sources), **run.recorded}
    made = {name: made.get(name) for name in _MADE} | {"fingerprint": run.fingerprint}
    options = codec.encode_pretty(run.config.get("prompt") or {}).decode()
    template = jinja2.Template(text, trim_blocks=True, lstrip_blocks=True)
    card: str = template.render(
        title=_plain(name.rpartition("/")[2]),
        front_matter=_front_matter(run, path, sources),
        tables={
            heading: [(_plain(key), _plain(each)) for key, each in rows.items() if each is not None]
            for heading, rows in {"How it was made": made, **tables}.items()
        },
        options=_code(options),
    )
    return card


_MADE = ("model", "revision", "source", "engine", "engine_version", "batchinfer_version")


def _front_matter(run: Run, path: str, sources: list[str]) -> str:
    """The metadata at the top of the card, as YAML. The Hub reads it."""
    from huggingface_hub import DatasetCardData

    model = str(run.config.get("model") or "")
    hub = [
        url.removeprefix("hf://datasets/") for url in sources if url.startswith("hf://datasets/")
    ]
    data = DatasetCardData(
        configs=[{"config_name": "default", "data_files": [{"split": "train", "path": path}]}],
        source_datasets=["/".join(each.partition("@")[0].split("/")[:2]) for each in hub] or None,
        tags=["synthetic", "batchinfer"],
        base_model=model if model.count("/") == 1 and model[0] not in "./~" else None,
    )
    return str(data.to_yaml())


def _plain(value: object) -> str:
    """A value as text on one line, cut, and escaped so that Markdown shows its signs as they are."""
    cut = str(value) if len(str(value)) <= _LONGEST else f"{str(value)[:_LONGEST]}…"
    for sign in "\\`*_[]<>|#":
        cut = cut.replace(sign, f"\\{sign}")
    return " ".join(cut.split())


def _code(text: str) -> str:
    """Text as an indented code block. A fenced block would be unsafe, because the text itself could close the fence."""
    return "\n".join(f"    {line}" for line in text[:_LONGEST_CODE].splitlines())
