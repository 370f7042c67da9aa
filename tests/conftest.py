"""What every test gets: a quiet, single-threaded, offline environment; and the order in which tests run.

Fixtures of a subject live in `tests/fixtures_<subject>.py`; add the module to
`pytest_plugins` below, or import it where only one test module needs it.
"""

import contextlib
import gc
import logging
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

# Before anything imports torch or vllm: many test processes share few cores, and nothing may
# report usage or ask the Hub.
os.environ.update(
    {
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # one GPU or CPU is the engine core's own
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "SKYPILOT_DISABLE_USAGE_COLLECTION": "1",
    }
)

# In the background of a script, the shell lets programs ignore Ctrl-C, and so would all that tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)
HANDLERS = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

# A deadline would make a test depend on how busy the machine is.
hypothesis.settings.register_profile("batchinfer", deadline=None)
hypothesis.settings.load_profile("batchinfer")

pytest_plugins = sorted(path.stem for path in Path(__file__).parent.glob("fixtures_*.py"))

# What a developer's shell may hold and a test must not see.
AMBIENT_PREFIXES = ("BATCHINFER_", "SKYPILOT_")
AMBIENT_NAMES = ("DATA_METADATA", "HF_TOKEN", "AWS_PROFILE", "AWS_ENDPOINT_URL")
KEPT_NAMES = ("SKYPILOT_DISABLE_USAGE_COLLECTION",)


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    """Hide the caller's own settings: a test states the ones that it needs."""
    for name in os.environ.keys() - KEPT_NAMES:
        if name.startswith(AMBIENT_PREFIXES) or name in AMBIENT_NAMES:
            monkeypatch.delenv(name)


@pytest.fixture
def call(capfd):
    """Run a command line in this process; the result is a `making.Called`."""
    from batchinfer.cli.main import main
    from making import Called

    return lambda *words: Called(main([str(word) for word in words]), *capfd.readouterr())


@pytest.fixture
def memory_url(request):
    """URL of a place in memory, the test's own."""
    from batchinfer.storage.opening import open_store

    url = f"memory://{request.node.name}"
    yield url
    store = open_store(url)
    store.delete([info.key for info in store.list()])


@pytest.fixture
def server():
    """A `WebServer`, whose answers the test writes."""
    from web_server import WebServer

    with contextlib.closing(WebServer()) as found:
        yield found


@pytest.fixture
def endpoint():
    """An endpoint of the OpenAI API, a `FakeEndpoint`."""
    from echo_server import fake_endpoint

    with fake_endpoint() as found:
        yield found


@pytest.fixture
def clock():
    """A `FakeClock`."""
    from fakes import FakeClock

    return FakeClock()


@pytest.fixture
def store(memory_url):
    """A store in memory of the test's own."""
    from fakes import MemoryStore

    return MemoryStore(memory_url)


@pytest.fixture
def scratch(tmp_path):
    """A `Scratch` of the test's own."""
    from batchinfer.storage.scratch import Scratch

    with contextlib.closing(Scratch(tmp_path / "scratch")) as made:
        yield made


@pytest.fixture(autouse=True)
def own_log():
    """Give each test the log as it is at import: a command called before it may have changed level and handlers."""
    logger = logging.getLogger("batchinfer")
    level, handlers, propagate = logger.level, list(logger.handlers), logger.propagate
    yield
    logger.setLevel(level)
    logger.handlers[:] = handlers
    logger.propagate = propagate


@pytest.fixture(autouse=True)
def own_signals():
    """Begin with the handlers of a new process: a worker in this one, of a module's fixture, may have set others."""
    for number, handler in HANDLERS.items():
        signal.signal(number, handler)


# Modules that take longest come first, so that no process of `make test` ends with minutes of work of its own.
LONGEST = (
    "test_request_matrix_vllm",
    "test_vllm",
    "test_kills",
    "test_python_examples",
    "test_chaos",
    "test_simulation",
    "test_launch",
    "test_api",
    "test_faults",
    "test_memory",
    "test_worker",
)

# Modules, and tests, that go to the process of another module, whose engine, servers or heavy packages they share.
TOGETHER = {
    "test_azure": "test_contract",
    "test_commands": "test_request_matrix_vllm",
    "test_demo": "test_request_matrix_vllm",
    "test_hints": "test_contract",
    "test_models_vllm": "test_request_matrix_vllm",
    "test_no_option_of_vllm_is_taken_for_a_misspelling_of_ours": "test_request_matrix_vllm",
    "test_playground_vllm": "test_request_matrix_vllm",
    "test_the_notebook_runs": "test_request_matrix_vllm",
    "test_mpt": "test_composer",
    "test_worker_vllm": "test_vllm",
}


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Keep what imports and the collection of tests make, which stays to the end, out of all garbage collections."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the longest modules first, and those that share an engine one after the other."""
    places = {name: place for place, name in enumerate(LONGEST)}

    def place_of(item: pytest.Item) -> int:
        return places.get(group_of(item.nodeid), len(LONGEST))

    items.sort(key=place_of)


def group_of(nodeid: str) -> str:
    """The name of the module in whose process a test runs."""
    path, *names = re.split(r"::|\[", nodeid)
    stem = Path(path).stem
    return next((TOGETHER[name] for name in (stem, *names) if name in TOGETHER), stem)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `--dist loadfile`, give modules to processes in the order above, those that share an engine to the same one.

    xdist itself begins with the modules of the most tests.
    """
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            group = group_of(nodeid)
            return group if group in TOGETHER.values() else str(super()._split_scope(nodeid))

    config.option.loadscopereorder = False
    return Scheduling(config, log)
