"""Real vLLM on the CPU: one server for all tests of a session that can share it; it loads in half a minute."""

import contextlib
import functools
import json
import os
import signal
import socket
import threading
import time
import urllib.request
from pathlib import Path

import pytest

from models import DEMO_MODEL, torchvision_copy, write_adapter
from vllm_forks import SERVE, Forks

SMALL = ["--kv-cache-memory-bytes", str(64 << 20), "--block-size", "32", "--max-num-seqs", "16"]
"""Options with which several servers fit beside each other."""


@pytest.fixture(scope="session")
def demo_adapters(tmp_path_factory):
    """Folders of two adapters for the demo's model, which `demo_url` serves too, by their names."""
    folder = tmp_path_factory.mktemp("adapters")
    return {
        name: str(write_adapter(folder / name, seed=seed, rank=seed + 3))
        for name, seed in (("first", 1), ("second", 2))
    }


@pytest.fixture(scope="session")
def demo_config(demo_adapters):
    """Options of the server behind `demo_url`: the demo's model of 256 tokens, two adapters, parsers of both kinds.

    The pages call the model by its path in a checkout.
    """
    from batchinfer.engines.engine_config import CONSTRAINTS, EngineConfig

    names = ["--served-model-name", str(DEMO_MODEL), "examples/demo-model"]
    parsers = ["--tool-call-parser", "hermes", "--reasoning-parser", "granite"]
    # Constraints hold from the first token on, although the server knows where reasoning ends.
    constraints = {**CONSTRAINTS, "enable_in_reasoning": True}
    parsers += ["--structured-outputs-config", json.dumps(constraints)]
    return EngineConfig(
        model=str(DEMO_MODEL),
        loras=demo_adapters,
        server_args=["--max-model-len", "256", *SMALL, *names, *parsers],
    )


@pytest.fixture(scope="session")
def forks(tmp_path_factory):
    """Starts programs that need vLLM."""
    from batchinfer.engines.server import _VARIABLES

    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # that of the whole run
    path = f"{torchvision_copy()}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    variables = {**_VARIABLES, "PYTHONPATH": path}
    with contextlib.closing(Forks(folder / "vllm", variables)) as made:
        yield made


VLLM_OPTIONS = """
from vllm.entrypoints.cli.serve import ServeSubcommand
from vllm.utils.argparse_utils import FlexibleArgumentParser

parser = ServeSubcommand().subparser_init(FlexibleArgumentParser().add_subparsers())
print(*(name for action in parser._actions for name in action.option_strings), sep="\\n")
"""


@pytest.fixture(scope="session")
def vllm_options(forks, tmp_path_factory):
    """The names of all options of `vllm serve`."""
    log = tmp_path_factory.mktemp("options") / "log"
    assert forks.run(VLLM_OPTIONS, [], log) == 0, log.read_text()
    names = {line for line in log.read_text().splitlines() if line.startswith("-")}
    assert len(names) > 300
    return names


@pytest.fixture(scope="session")
def served(forks):
    """Serves a model with the options of an `EngineConfig`, by its URL as for --base-url, in a `with` statement."""
    return functools.partial(_served, forks)


@contextlib.contextmanager
def _served(forks, config, folder):
    from batchinfer.engines.server import plan

    [launch] = plan(config, folder)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    place = launch.command.index("--uds")
    listen = ["--host", "127.0.0.1", "--port", str(port)]
    log = folder / "log"
    group = forks.start(SERVE, [*launch.command[3:place], *listen], log)
    try:
        while True:
            assert Path(f"/proc/{group}").exists(), log.read_text()
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health").close()
                break
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)


def ask(url, path, **request):
    """Send one request as curl would, by httpx, which vLLM brings along. Returns the answer's status and its JSON."""
    import httpx

    found = httpx.post(url.removesuffix("/v1") + path, timeout=600, **request)
    return found.status_code, found.json()


@pytest.fixture(scope="session")
def demo_url(served, demo_config, tmp_path_factory):
    """URL of a vLLM server with the demo's model."""
    with served(demo_config, tmp_path_factory.mktemp("server")) as url:
        yield url


@pytest.fixture(scope="session")
def demo_engine(demo_url):
    """An open engine behind which the server of `demo_url` is. Workers may close it; it stays open."""
    from batchinfer.engines import create_engine
    from batchinfer.engines.engine_config import EngineConfig

    config = EngineConfig(engine="openai", model=str(DEMO_MODEL), base_urls=[demo_url])
    with contextlib.closing(create_engine(config)) as engine, pytest.MonkeyPatch.context() as patch:
        info = engine.open(threading.Event())
        patch.setattr(engine, "open", lambda _: info)
        patch.setattr(engine, "close", lambda: None)
        yield engine


def replace_create_engine(monkeypatch, create) -> None:
    """Let workers of this process make their engines by `create`, until the test ends."""
    # These modules keep the function that they find at their import, so it must not be the first one in a test.
    import batchinfer.check.examination
    import batchinfer.pipeline.work_folder
    import batchinfer.playground.session  # noqa: F401

    monkeypatch.setattr("batchinfer.engines.create_engine", create)


@pytest.fixture
def workers_share_demo_engine(demo_engine, monkeypatch):
    """Workers that run in this process with --engine vllm use `demo_engine` instead of a server of their own."""
    replace_create_engine(monkeypatch, lambda _: demo_engine)
