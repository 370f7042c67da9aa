"""What every test gets: a quiet, single-threaded, offline environment; and the order in which tests run.

Fixtures of a subject live in `tests/fixtures_<subject>.py`; add the module to
`pytest_plugins` below, or import it where only one test module needs it.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import hypothesis
import pytest

# Before anything imports torch or vllm: many test processes share few cores, and nothing may
# report usage or ask the Hub.
os.environ.update(
    {
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "SKYPILOT_DISABLE_USAGE_COLLECTION": "1",
    }
)

# A deadline would make a test depend on how busy the machine is.
hypothesis.settings.register_profile("batchinfer", deadline=None)
hypothesis.settings.load_profile("batchinfer")

# tests/fixtures_*.py are loaded as plugins wherever they exist.
pytest_plugins = sorted(
    path.stem
    for path in Path(__file__).parent.glob("fixtures_*.py")
    if importlib.util.find_spec(path.stem) is not None
)

# What a developer's shell may hold and a test must not see.
AMBIENT_PREFIXES = ("BATCHINFER_", "SKYPILOT_")
AMBIENT_NAMES = ("DATA_METADATA", "HF_TOKEN", "AWS_PROFILE", "AWS_ENDPOINT_URL")
KEPT_NAMES = ("SKYPILOT_DISABLE_USAGE_COLLECTION",)


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the caller's own settings: a test states the ones that it needs."""
    for name in list(os.environ):
        if name in KEPT_NAMES:
            continue
        if name.startswith(AMBIENT_PREFIXES) or name in AMBIENT_NAMES:
            monkeypatch.delenv(name)


# Modules whose tests share something costly: one process of the test run has all of them.
SHARED = (
    "test_tokenizers_vllm",
    "test_request_matrix_vllm",
    "test_skypilot",
    "test_report_browser",
)
# What takes longest comes first, so that no process ends with a minute of work of its own.
FIRST = ("test_skypilot", "test_simulation", "test_chaos", "test_slow_storage")


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Group tests for `--dist loadgroup`, and put the slow ones first."""

    def name(item: pytest.Item) -> str:
        return item.path.stem

    for item in items:
        if "vllm_engine" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.xdist_group("vllm_engine"))
        elif name(item) in SHARED:
            item.add_marker(pytest.mark.xdist_group(name(item)))
    items.sort(key=lambda item: (item.get_closest_marker("vllm") is None, name(item) not in FIRST))
