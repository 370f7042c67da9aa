"""The connection between the machines of one model. A program that sleeps stands for vLLM's share."""

import asyncio
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import pytest
from msgspec.structs import replace

from batchinfer.core.errors import ConfigError, EngineDied, EngineLoadError, Interrupted
from batchinfer.engines import create_engine, headless, http
from batchinfer.engines.engine_config import EngineConfig
from making import free_ports, wait_for
from models import write_model_stub


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.setattr(headless, "POLL_SECONDS", 0.05)
    return EngineConfig(
        model=str(write_model_stub(tmp_path / "model")),
        nnodes=2,
        master_addr="127.0.0.1",
        master_port=free_ports(),
        server_command=f"sh -c 'echo $$ > {tmp_path}/pid; sleep 600' {{port}}",
        load_timeout_seconds=120.0,
    )


def following(config, stop=None):
    node = replace(config, node_rank=1)
    return ThreadPoolExecutor(1).submit(
        headless.follow, node, loading=Event(), stop=stop or Event()
    )


def as_node_0(config, status, work):
    """Be node 0 while `work` runs, which gets its connections, and end with a status. Returns what `work` returns."""

    async def run():
        nodes = headless.Nodes()
        nodes.revision = "abc"
        await nodes.listen(config)
        found = await asyncio.to_thread(work, nodes)
        await nodes.close(status)
        return found

    return asyncio.run(run())


def loaded(tmp_path) -> int:
    """Wait until a node's share loads. Returns the process id of the share."""
    path = Path(tmp_path / "pid")
    wait_for(lambda: path.exists() and path.read_text())
    return int(path.read_text())


@pytest.mark.parametrize(
    ("status", "error"), [(0, None), (2, ConfigError), (75, Interrupted), (33, EngineDied)]
)
def test_a_node_ends_as_node_0_does(config, tmp_path, status, error):
    found = following(config)
    time.sleep(0.2)  # a node may come before node 0
    share = as_node_0(config, status, lambda _: loaded(tmp_path))
    if error is None:
        assert found.result(120)["status"] == "SUCCESS"
    else:
        with pytest.raises(error, match=str(status)):
            found.result(120)
    with pytest.raises(ProcessLookupError):
        os.kill(share, 0)


def test_each_side_notices_that_the_other_has_gone(config, tmp_path):
    found = following(config)

    def kill(nodes):
        os.kill(loaded(tmp_path), signal.SIGKILL)
        with pytest.raises(EngineDied, match="server: killed by SIGKILL"):
            found.result(120)
        wait_for(lambda: nodes.has_lost_one)

    as_node_0(config, 33, kill)
    (tmp_path / "pid").unlink()
    found = following(config)

    def vanish(nodes):
        loaded(tmp_path)
        nodes._server.get_loop().call_soon_threadsafe(nodes._links[0].close)
        with pytest.raises(EngineDied, match="node 0 has gone"):
            found.result(120)

    as_node_0(config, 33, vanish)


def test_a_stop_ends_a_node_and_node_0_that_never_comes_is_given_up(config, tmp_path):
    stop = Event()
    found = following(config, stop)

    def set_stop(_):
        loaded(tmp_path)
        stop.set()
        with pytest.raises(Interrupted):
            found.result(120)

    as_node_0(config, 75, set_stop)
    late = replace(config, load_timeout_seconds=0.1)
    with pytest.raises(EngineLoadError, match="node 0 does not answer"):
        following(late).result(120)


def test_an_address_of_another_machine_is_refused(config):
    with pytest.raises(ConfigError, match="cannot listen"):
        asyncio.run(headless.Nodes().listen(replace(config, master_addr="192.0.2.1")))
    with pytest.raises(ConfigError, match="--node-rank"):
        headless.follow(config, loading=Event(), stop=Event())


def test_a_node_hears_why_node_0_cannot_start(config, monkeypatch):
    has_called, reach = Event(), headless._reach

    def and_tell(*words):
        link = reach(*words)
        has_called.set()
        return link

    def fail(*_):
        has_called.wait(120)
        raise ConfigError("the adapter does not fit the model")

    monkeypatch.setattr(headless, "_reach", and_tell)
    monkeypatch.setattr(http, "plan", fail)
    node = following(config)
    with pytest.raises(ConfigError, match="does not fit"):
        create_engine(config).open(Event())
    with pytest.raises(ConfigError, match="node 0 ended with exit status 2"):
        node.result(120)
