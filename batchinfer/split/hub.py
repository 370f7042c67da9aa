"""Data sets of the Hugging Face Hub. Honours HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE, as huggingface_hub does."""

from __future__ import annotations

import re
from typing import NamedTuple
from urllib.parse import quote, unquote

from batchinfer.core.errors import InputError

CONVERTED = "refs/convert/parquet"
"""The branch where the Hub keeps a data set's conversion to parquet, as <config>/<split>/<number>.parquet."""

_URL = re.compile(
    r"^hf://datasets/(?P<repo>[^/@]+(?:/[^/@]+)?)"
    r"(?:@(?P<revision>refs/(?:convert|pr)/[^/]+|[^/]+))?(?:/(?P<path>.*))?$"
)


class Dataset(NamedTuple):
    """An hf:// address. `revision` is a branch, tag or commit ("": the main branch)."""

    repo: str
    revision: str
    path: str

    @property
    def is_converted(self) -> bool:
        """The address asks for the Hub's conversion itself."""
        return self.revision == CONVERTED

    def at(self, commit: str) -> str:
        """The same address at one commit."""
        return f"hf://datasets/{self.repo}@{quote(commit, safe='')}/{self.path}".rstrip("/")


def parse(url: str) -> Dataset:
    """Split hf://datasets/org/name[@revision][/path]; a revision with a slash is quoted (%2F), save refs/….

    Raises:
        InputError: The URL is none of these.
    """
    match = _URL.match(url)
    if match is None:
        raise InputError(
            f"{url}: not an address of a data set, expected hf://datasets/org/name[@revision][/path]",
            hint="models and spaces hold no data sets; download other files and pass their paths",
        )
    return Dataset(
        match["repo"], unquote(match["revision"] or ""), (match["path"] or "").strip("/")
    )


def resolve_commit(dataset: Dataset) -> str:
    """Ask the Hub which commit the revision is now. One request."""
    from huggingface_hub import HfApi

    commit: str | None = HfApi().dataset_info(dataset.repo, revision=dataset.revision or None).sha
    if not commit:
        raise InputError(f"{dataset.repo}: the Hub names no commit", hint="name one after @")
    return commit


def converted_commit(dataset: Dataset) -> str:
    """The commit of the Hub's conversion to parquet, or "" where there is none."""
    from huggingface_hub.errors import RevisionNotFoundError

    try:
        return resolve_commit(dataset._replace(revision=CONVERTED))
    except RevisionNotFoundError:
        return ""


def check_one_config(argument: str, paths: list[str]) -> None:
    """Refuse a converted data set with several configurations, whose rows often repeat each other.

    Args:
        argument: For the message.
        paths: Files relative to the data set's root.
    """
    converted = [
        path.split("/") for path in paths if re.search(r"/[^/]*/\d{4,}\.parquet$", f"/{path}")
    ]
    configs = sorted({parts[0] for parts in converted if len(parts) == 3})
    if len(configs) > 1:
        raise InputError(
            f"{argument}: has {len(configs)} configurations ({', '.join(configs[:10])}), expected one",
            hint=f"choose one by its folder: hf://datasets/…@{CONVERTED}/{configs[0]}",
        )
