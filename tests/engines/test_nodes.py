"""The connection between the machines of one model: who may come, and how everybody learns of an end."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from batchinfer.cli.main import main
from batchinfer.core.errors import ConfigError, EngineDied, EngineLoadError, Interrupted
from batchinfer.engines import nodes
from batchinfer.engines.config import EngineConfig, check_config
from batchinfer.engines.gpus import Gpu, choose_parallelism, memory_per_gpu, place, whole_model
from batchinfer.engines.models import ModelInfo
from batchinfer.engines.nodes import Leader, NodeLink, differing, options_of, reach
from batchinfer.engines.vllm_loading import engine_arguments
from engine_contract import Flag
from making import free_ports, make_job
from tiny_model import DEMO_MODEL


@pytest.fixture(autouse=True)
def _all_connections_are_closed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    made: list[NodeLink] = []
    prepare = NodeLink.__init__

    def note(self: NodeLink, connection: socket.socket) -> None:
        prepare(self, connection)
        made.append(self)

    monkeypatch.setattr(NodeLink, "__init__", note)
    yield
    for link in made:
        link.close()


def config_of(port: int, rank: int = 0, **given: Any) -> EngineConfig:
    values = {"nnodes": 2, "load_timeout_seconds": 20.0, **given}
    return EngineConfig(
        model="m", node_rank=rank, master_addr="127.0.0.1", master_port=port, **values
    )


class Background(threading.Thread):
    """A call in a thread of its own, and what came of it."""

    def __init__(self, call: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self._call = call
        self.result: Any = None
        self.start()

    def run(self) -> None:
        try:
            self.result = self._call()
        except Exception as error:  # noqa: BLE001 - the test looks at it
            self.result = error

    def end(self) -> Any:
        self.join(30)
        assert not self.is_alive()
        return self.result


def pair(port: int, **given: Any) -> tuple[Leader, NodeLink]:
    """Node 0 and node 1, which have found each other."""
    leader = Leader(config_of(port))
    node = Background(lambda: reach(config_of(port, 1, **given), Flag()))
    leader.gather(config_of(port, revision="abc"), Flag())
    link = node.end()
    assert isinstance(link, NodeLink)
    return leader, link


def test_nodes_wait_for_each_other_and_load_the_same_revision() -> None:
    leader, link = pair(free_ports(), gpus=["3"], model_cache="/elsewhere")
    assert link.receive(5) == {"revision": "abc"}
    assert link.own_address == "127.0.0.1"
    leader.check()
    leader.tell(0)
    assert link.receive(5) == {"status": 0}


def test_a_node_may_start_long_before_node_0() -> None:
    port = free_ports()
    node = Background(lambda: reach(config_of(port, 1), Flag()))
    time.sleep(0.5)
    leader = Leader(config_of(port))
    leader.gather(config_of(port), Flag())
    assert node.end().receive(5) == {"revision": ""}
    leader.tell(75)


@pytest.mark.parametrize("status", [0, 33])
def test_a_node_that_comes_when_node_0_has_nothing_to_do_learns_its_status(status: int) -> None:
    port = free_ports()
    leader = Leader(config_of(port))
    link = reach(config_of(port, 1), Flag())
    leader.tell(status)
    assert link.receive(5) == {"status": status}


def test_other_options_end_both_sides_with_the_options_names() -> None:
    port = free_ports()
    leader = Leader(config_of(port))
    node = Background(
        lambda: reach(config_of(port, 1, dtype="float32", engine_args={"a": 1}), Flag())
    )
    with pytest.raises(ConfigError, match="--dtype, --engine-arg: node 1 has other values"):
        leader.gather(config_of(port), Flag())
    assert "--dtype, --engine-arg: differ" in node.end().receive(5)["refused"]
    leader.tell(2)


def test_only_hashes_of_options_are_sent_and_places_may_differ() -> None:
    one = EngineConfig(model="/a/m", loras={"x": "/a/x"}, engine_args={"hf_token": "secret-value"})
    other = msgspec.structs.replace(one, model="/b/m", loras={"x": "/b/x"}, gpus=["1"])
    assert options_of(one) == options_of(other)
    assert "secret-value" not in repr(options_of(one))
    changed = msgspec.structs.replace(one, engine_args={}, loras={"y": "/a/x"})
    assert differing(options_of(changed), options_of(one)) == "--engine-arg, --lora"
    assert differing(None, {"dtype": "x"}) == "--dtype"


def test_a_rank_that_is_taken_or_unknown_is_refused() -> None:
    port = free_ports()
    leader, link = pair(port)
    second = reach(config_of(port, 1), Flag())
    leader._accept(config_of(port), 1.0)
    assert "expected 1 to 1, each once" in second.receive(5)["refused"]
    leader.tell(0)
    link.close()


def test_what_is_no_node_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_ports()
    leader = Leader(config_of(port))
    with socket.create_connection(("127.0.0.1", port + 1)) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        node = Background(lambda: reach(config_of(port, 1), Flag()))
        leader.gather(config_of(port), Flag())
        assert node.end().receive(5) == {"revision": ""}
    leader.tell(75)


def test_a_node_that_goes_or_whose_engine_ends_is_noticed() -> None:
    leader, link = pair(free_ports())
    link.close()
    with pytest.raises(EngineDied, match="node 1 of 2 has gone"):
        leader.check(patience_seconds=5)
    leader.tell(33)
    leader, link = pair(free_ports())
    link.send({"ended": "out of memory"})
    with pytest.raises(EngineDied, match="node 1 of 2: out of memory"):
        leader.check(patience_seconds=5)
    leader.tell(33)


def test_node_0_that_goes_without_a_word_is_noticed() -> None:
    leader, link = pair(free_ports())
    assert link.receive(5) == {"revision": "abc"}
    for link_ in leader._links.values():
        link_.close()
    with pytest.raises(OSError, match="closed"):
        link.receive(5)
    leader.tell(33)


def test_nobody_waits_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_ports()
    with pytest.raises(EngineLoadError, match="node 0 does not answer"):
        reach(config_of(port, 1, load_timeout_seconds=0.3), Flag())
    leader = Leader(config_of(port))
    with pytest.raises(EngineLoadError, match=r"nodes \[1\] have not come"):
        leader.gather(config_of(port, load_timeout_seconds=0.3), Flag())
    stopped = Flag()
    stopped.set()
    with pytest.raises(Interrupted):
        leader.gather(config_of(port), stopped)
    monkeypatch.setattr(nodes, "LAST_CALL_SECONDS", 0.2)
    leader.tell(0)
    with pytest.raises(Interrupted):
        reach(config_of(port, 1), stopped)


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(ConfigError, match="cannot listen"):
        Leader(EngineConfig(nnodes=2, master_addr="192.0.2.1"))


# --------------------------------------------------------------------------- options and layout


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"node_rank": 1}, "--node-rank: is 1"),
        ({"nnodes": 2, "node_rank": 2, "master_addr": "h"}, "expected 0 to 1"),
        ({"nnodes": 2}, "without --master-addr"),
        ({"nnodes": 2, "master_addr": "h", "replicas": 2}, "--replicas with --nnodes"),
        ({"nnodes": 2, "master_addr": "h", "tensor_parallel_size": 3}, "multiple of --nnodes 2"),
    ],
)
def test_options_that_contradict_each_other_are_refused(
    given: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check_config(EngineConfig(**given))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--headless",), "--headless without --node-rank"),
        (("--node-rank", "1"), "without --headless"),
        (("--tensor-parallel-size", "3"), "multiple of --nnodes 2"),
        (("--engine", "openai", "--base-url", "http://127.0.0.1:1/v1"), "--nnodes with --engine openai"),
        (("--engine", "echo"), "--nnodes with --engine echo"),
    ],
)  # fmt: skip
def test_a_command_that_cannot_work_ends_with_2_before_anything_is_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, ...], message: str
) -> None:
    job = str(tmp_path / "job")
    make_job(job, rows=2, per_chunk=2)
    given = ("--job", job, "--model", str(DEMO_MODEL), "--prompt-column", "prompt")
    several = ("--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", str(free_ports()))
    assert main(["worker", *given, *several, *options]) == 2
    assert message in capsys.readouterr().err
    assert not Path(job, "runs").exists()


def test_several_nodes_run_one_replica_on_all_their_gpus() -> None:
    model = ModelInfo(
        name="m", identity="", num_heads=64, num_kv_heads=8, parameter_bytes=140 << 30
    )
    gpus = [Gpu(id=str(index), total_bytes=80 << 30) for index in range(2)]
    config = EngineConfig(model="m", nnodes=2, master_addr="h")
    plan = choose_parallelism(model, gpus * 2, whole_model(config, gpus))
    assert (plan.tensor_parallel_size, plan.replicas) == (4, 1)
    assert memory_per_gpu(model, config, 4, 0)[0] == 35 << 30
    halves = msgspec.structs.replace(config, pipeline_parallel_size=2)
    plan = choose_parallelism(model, gpus * 2, whole_model(halves, gpus))
    assert (plan.tensor_parallel_size, plan.replicas) == (2, 1)


def test_a_node_sees_its_own_gpus_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from batchinfer.engines import gpus

    found = [Gpu(id=str(index), total_bytes=80 << 30) for index in range(2)]
    monkeypatch.setattr(gpus, "visible_gpus", lambda _wanted: found)
    config = EngineConfig(model=str(DEMO_MODEL), nnodes=2, master_addr="h", tensor_parallel_size=4)
    [(_, environment)] = place(config).replicas
    assert environment["CUDA_VISIBLE_DEVICES"] == "0,1"
    arguments = engine_arguments(config, is_cpu=False)
    assert (arguments["nnodes"], arguments["node_rank"], arguments["master_addr"]) == (2, 0, "h")
    assert arguments["distributed_executor_backend"] == "mp"
    assert "nnodes" not in engine_arguments(EngineConfig(model="m"), is_cpu=False)
