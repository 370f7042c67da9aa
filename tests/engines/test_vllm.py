"""The real vLLM, on the CPU: what it says of itself, its refusals, and its errors of loading.

Its death: tests/worker/test_worker_vllm.py.
"""

import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from batchinfer.core.errors import ConfigError
from batchinfer.engines import create_engine
from batchinfer.engines.engine_config import EngineConfig
from batchinfer.engines.server import OwnServer, plan
from batchinfer.engines.vllm_command import write_vllm_command
from engine_contract import (
    EngineContract,
    ListSource,
    are_gone,
    body_of,
    call,
    descendants,
    drive,
)
from fixtures_vllm import SMALL
from models import DEMO_MODEL, write_adapter
from vllm_forks import SERVE

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1500)]


class TestShared(EngineContract):
    """What all engines must do, and what only vLLM can show. All tests of a session share this server."""

    @pytest.fixture
    def opened(self, demo_engine):
        return demo_engine, demo_engine.open(None)

    def test_its_length_is_known(self, info):
        assert info.max_model_len == 256


# --------------------------------------------------------------------------- loading


@pytest.fixture
def load_error(forks, tmp_path):
    """Starts a server in a fork, and gives the error with which an engine would not open."""

    def error_of(*server_args, **options):
        config = EngineConfig(model=str(DEMO_MODEL), server_args=list(server_args), **options)
        [launch] = plan(config, tmp_path)
        server = OwnServer(launch, tmp_path / "log")
        status = forks.run(SERVE, launch.command[3:], tmp_path / "log")
        server.guard, server._start_bytes = SimpleNamespace(poll=lambda: status), 0
        error = server.load_error(server.look_at_process())
        assert isinstance(error, ConfigError), error
        return error.message

    return error_of


def test_an_option_that_does_not_fit_the_model_is_the_users_fault(load_error):
    assert "max_model_len" in load_error(*SMALL, "--max-model-len", "99999")


@pytest.mark.parametrize("option", ["--no-such-option", "--tensor-parallel"])
def test_an_option_that_vllm_does_not_know_is_the_users_fault(load_error, option):
    dotted = ["--structured-outputs-config.backend", "xgrammar"]
    said = load_error(*dotted, option, "1")
    assert f"unrecognized arguments: {option} 1" in said


def test_a_cache_that_holds_no_sequence_is_the_users_fault(load_error):
    tiny = ["--kv-cache-memory-bytes", "65536", "--max-model-len", "512"]
    assert "does not fit into memory" in load_error(*tiny)


def test_an_adapter_that_vllm_refuses_is_the_users_fault(load_error, tmp_path):
    folder = write_adapter(tmp_path / "dora", use_dora=True)
    assert "DoRA" in load_error(*SMALL, loras={"odd": str(folder)})


@pytest.mark.slow
def test_another_server_from_pypi_runs_in_vllms_place():
    place = Path(sys.executable).with_name("transformers")
    listen = "--host 127.0.0.1 --port {port} --device cpu"
    command = f"{place} serve {{model}} {listen}"
    engine = create_engine(
        EngineConfig(model=str(DEMO_MODEL), server_command=command, max_concurrency=2)
    )
    engine.open(threading.Event())
    family = descendants(engine.targets[0].guard.pid)
    question = "What is the capital of Japan?"
    asked = call(0, messages=[{"role": "user", "content": question}], temperature=0)
    [answer] = drive(engine, ListSource([asked])).values()
    assert body_of(answer)["choices"][0]["message"]["content"] == "Tokyo"
    engine.close()
    assert are_gone(family)


FETCH = """
import sys
from vllm.engine.arg_utils import EngineArgs
from vllm.multimodal.media import MediaConnector
from vllm.utils.argparse_utils import FlexibleArgumentParser

parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
domains = parser.parse_known_args(sys.argv[1:])[0].allowed_media_domains
print("domains:", *domains)
MediaConnector(allowed_media_domains=domains).fetch_image("http://127.0.0.1:9/a.png")
"""


def test_a_link_that_a_body_hides_from_the_worker_is_not_fetched_by_the_server(forks, tmp_path):
    for typed in ([], ["--allowed-media-domains", "example.com"]):
        config = EngineConfig(model="m", server_args=typed)
        command = write_vllm_command(config, "m", [], 1, 0)
        assert forks.run(FETCH, command[4:], tmp_path / "log") == 1
    said = (tmp_path / "log").read_text()
    assert said.count("ValueError: The URL must be from one of the allowed domains") == 2
    assert "domains: example.com\n" in said
