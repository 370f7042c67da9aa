"""A Hub on 127.0.0.1 that takes data sets."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from batchinfer.storage.retrying import RetryPolicy
from fake_hub import TOKEN
from fake_hub_upload import UploadHub

QUICK = RetryPolicy(attempts=4, first_pause_seconds=0.01, longest_pause_seconds=0.01)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[UploadHub]:
    """A Hub that this process asks, without long pauses after a failure."""
    from huggingface_hub import constants
    from huggingface_hub.utils import _http
    from huggingface_hub.utils.tqdm import progress_bar_states

    found = UploadHub()
    with found.serving() as endpoint:
        monkeypatch.setattr(constants, "ENDPOINT", endpoint)
        template = endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setitem(progress_bar_states, "_global", False)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        monkeypatch.setattr("batchinfer.collect.destinations.RetryPolicy", lambda: QUICK)
        monkeypatch.setattr(_http, "time", SimpleNamespace(sleep=lambda _: None))
        yield found
