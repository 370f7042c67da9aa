"""Servers of our own: how they are started, watched, started again and ended. An echo server stands for all."""

import asyncio
import contextlib
import errno
import json
import os
import shlex
import signal
import stat
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from threading import Event
from unittest.mock import AsyncMock, Mock

import msgspec
import pytest

import echo_server
from batchinfer.core.errors import ConfigError, EngineDied, EngineLoadError, Interrupted
from batchinfer.engines import create_engine, http
from batchinfer.engines.engine_config import EngineConfig
from batchinfer.engines.gpus import Gpu
from batchinfer.engines.server import Launch, OwnServer
from batchinfer.engines.targets import Answer
from batchinfer.storage.opening import open_store
from engine_contract import (
    EngineContract,
    ListSource,
    are_gone,
    call,
    calls,
    code_of,
    drive,
    drive_again,
    drive_once,
    is_running,
)
from models import write_model_stub

METRICS = b"""# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 7.0
vllm:num_requests_waiting{engine="0",model_name="m"} 2.0
vllm:generation_tokens_total{engine="0",model_name="m"} 1e+02
vllm:generation_tokens_created{engine="0",model_name="m"} 1.7e+09
vllm:iteration_tokens_total_bucket{engine="0",le="1.0",model_name="m"} 3.0
vllm:iteration_tokens_total_count{engine="0",model_name="m"} 41.0
vllm:request_prompt_tokens_count{engine="0",model_name="m"} 9.0
"""


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr("batchinfer.engines.server.RESTART_PAUSE_SECONDS", 0.05)
    monkeypatch.setattr(http, "LOOK_SECONDS", 0.1)


@pytest.fixture
def model(tmp_path):
    return write_model_stub(tmp_path / "model")


@pytest.fixture
def open_engine(tmp_path, model):
    """A function that opens an engine of two servers, by default echo's, with these options. All are closed."""

    def open_one(*, kill="", hang="", latency_seconds=0.0, **options):
        fields = {
            "server_command": echo_command("{socket}", kill, hang, latency_seconds=latency_seconds),
            "model": str(model),
            "replicas": 2,
            "max_concurrency": 12,
            "scratch_dir": str(tmp_path / "scratch"),
            **options,
        }
        engine = stack.enter_context(contextlib.closing(create_engine(EngineConfig(**fields))))
        engine.open(Event())
        return engine

    with contextlib.ExitStack() as stack:
        yield open_one


def command(tmp_path, script: str) -> str:
    """A --server-command that runs a Python script with the socket's path as its argument."""
    path = tmp_path / "server.py"
    path.write_text(textwrap.dedent(script))
    return f"{sys.executable} {path} {{socket}} {{model}}"


def app(*routes: str, before: str = "", rest: str = "") -> str:
    """A script with a healthy server and further routes; `before` is run first, `rest` defines what they call."""
    begin = "import asyncio, os, subprocess, sys, time\nfrom aiohttp import web\n"
    begin += textwrap.dedent(before) + "\nasync def health(_): return web.Response()\n"
    listed = ", ".join(['web.get("/health", health)', *routes])
    end = f"app = web.Application()\napp.add_routes([{listed}])\n"
    end += "web.run_app(app, path=sys.argv[1], print=None, handle_signals=False)"
    return begin + textwrap.dedent(rest) + end


def echo_command(place: str, *marks: str, latency_seconds: float = 0.0) -> str:
    """A --server-command that starts an echo server of 512 tokens."""
    length = ["--max-model-len", "512", "--max-num-seqs", "8"]
    options = {"server_args": length, "echo_latency_seconds": latency_seconds}
    given = msgspec.json.encode(EngineConfig(engine="echo", **options)).decode()
    return shlex.join([sys.executable, echo_server.__file__, given, place, *marks])


def own_server(tmp_path, *command: str) -> OwnServer:
    """A server that is not started yet."""
    launch = Launch(name="replica 0", command=[*command], environment={}, slots=1)
    return OwnServer(launch, tmp_path / "log")


def pids(engine) -> list[int]:
    """Process ids of the servers, which are the only children of their guards."""
    guards = [server.guard.pid for server in engine.targets]
    return [int(Path(f"/proc/{pid}/task/{pid}/children").read_text()) for pid in guards]


class TestAnyServer(EngineContract):
    """A server that --server-command starts, at a port."""

    @pytest.fixture(scope="class")
    @classmethod
    def opened(cls, tmp_path_factory):
        folder = write_model_stub(tmp_path_factory.mktemp("any") / "echo")
        config = EngineConfig(model=str(folder), server_command=echo_command("{port}"))
        engine = create_engine(config)
        yield engine, engine.open(Event())
        engine.close()


def test_a_server_listens_where_only_its_owner_may_enter(open_engine):
    engine = open_engine()
    for server in engine.targets:
        folder = Path(server.launch.socket).parent
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    found = pids(engine)
    assert {os.getsid(pid) for pid in found} == {os.getsid(0)}
    assert os.getpgrp() not in {os.getpgid(pid) for pid in found}
    engine.close()
    assert are_gone(found)
    assert not folder.exists()


def test_a_dead_server_is_started_again_while_the_others_go_on(open_engine, caplog):
    engine = open_engine(kill="row 30 says", latency_seconds=0.01)
    rows = calls(100)
    found, deaths = drive_once(engine, ListSource(rows))
    assert ("c", 30) in [each.key for each in deaths]
    assert len(deaths) <= 12
    assert b"SIGKILL" in deaths[0].body
    assert len(found) + len(deaths) == 100
    left = [row for row in rows if row.key not in found and row.key[1] != 30]
    assert len(found | drive(engine, ListSource(left))) == 99
    assert engine.stats().restarts == 1
    assert any(getattr(each, "event", "") == "replica_restarted" for each in caplog.records)


@pytest.mark.parametrize("how", ["hangs", "stopped"])
def test_a_server_that_hangs_is_killed_and_started_again(open_engine, how):
    marker = "row 30 says" if how == "hangs" else ""
    engine = open_engine(hang=marker, stall_seconds=2.0, latency_seconds=0.01)
    if how == "stopped":
        [stopped, _] = pids(engine)
        os.kill(stopped, signal.SIGSTOP)
    found, deaths = drive_once(engine, ListSource(calls(60)))
    assert 0 < len(deaths) <= 24
    assert b"no token and no answer for 2 s" in deaths[0].body
    assert len(found) + len(deaths) == 60
    if how == "stopped":
        assert are_gone([stopped])


def test_an_idle_server_never_hangs(open_engine):
    engine = open_engine(stall_seconds=3.0)
    source = ListSource(calls(4))
    begin = time.monotonic()
    source.take = lambda *_, take=source.take: [] if time.monotonic() < begin + 3.5 else take(*_)
    assert len(drive(engine, source)) == 4
    assert engine.stats().restarts == 0


def test_time_in_which_nobody_looked_makes_no_server_hang(open_engine, monkeypatch):
    monkeypatch.setattr(http, "LOOK_SECONDS", 30.0)  # only this test looks
    engine = open_engine(stall_seconds=60.0, replicas=1)
    [server] = engine.targets
    assert engine._run(server.look(engine.config)) == ""
    server._looked, server._moved = server._looked - 100, server._moved - 100  # as long ago
    server.in_flight[call(99).key] = None  # rows come just before the next look
    found = engine._run(server.look(engine.config))
    server._moved -= 100  # and now somebody has looked
    last = engine._run(server.look(engine.config))
    server.in_flight.clear()
    assert found == ""
    assert "no token and no answer" in last


def test_servers_that_die_without_an_answer_are_given_up_after_three_starts(open_engine):
    engine = open_engine(kill="KILL", replicas=2)
    rows = [call(index, prompt="KILL") for index in range(200)]
    with pytest.raises(EngineDied, match="SIGKILL") as died:
        drive_again(engine, rows)
    assert "start the same command again" in died.value.hint
    assert engine.stats().replicas_lost == 2
    assert engine.stats().restarts == 6
    with pytest.raises(EngineDied):
        drive(engine, ListSource(calls(1)))


def test_only_deaths_in_a_row_make_a_server_lost_and_each_start_waits_longer(tmp_path):
    server, pauses = own_server(tmp_path), []
    for server.num_answered in (0, 0, 0, 7, 0, 0):
        pauses.append(server.note_death("killed", may_start=True))
        assert not server.is_lost
    assert pauses == [0, 0.05, 0.1, 0, 0.05, 0.1]
    server.note_death("killed", may_start=True)
    assert server.is_lost
    one_of_several_nodes = own_server(tmp_path)
    one_of_several_nodes.note_death("killed", may_start=False)
    assert one_of_several_nodes.is_lost


def test_a_server_that_the_machine_has_no_memory_for_is_told_as_such(tmp_path, monkeypatch):
    """The worker ended with 1 and a traceback, after which no cluster starts it again."""
    no_memory = Mock(side_effect=OSError(errno.ENOMEM, "Cannot allocate memory"))
    monkeypatch.setattr("subprocess.Popen", no_memory)
    with pytest.raises(EngineLoadError, match=r"cannot be started .*Cannot allocate memory"):
        own_server(tmp_path, "serve").start()


def test_every_row_of_the_last_death_comes_back_before_the_error(open_engine, monkeypatch):
    monkeypatch.setattr("batchinfer.engines.server.MOST_RESTARTS", 0)
    engine = open_engine(kill="row 3 says", replicas=1, latency_seconds=0.5)
    batches = engine.generate(ListSource(calls(8)), Event())
    found: list = []
    while len(found) < 8:
        found += next(batches)
    assert sorted(each.key[1] for each in found) == list(range(8))
    with pytest.raises(EngineDied):
        next(batches)


def test_a_death_ends_an_ask_with_its_reason_before_the_new_start(open_engine):
    engine = open_engine(kill="KILL", replicas=1, max_concurrency=1)
    with pytest.raises(EngineDied):
        list(engine.stream(call(0, prompt="KILL", stream=True)))
    with pytest.raises(EngineDied, match="SIGKILL"):
        engine.ask(call(0, prompt="KILL"))
    assert not engine.targets[0].is_ready


def test_each_server_gets_gpus_of_its_own_and_the_files_of_a_model_in_a_bucket(
    open_engine, model, tmp_path, monkeypatch
):
    """A machine with four GPUs, as far as the driver and the servers tell."""
    gpu = {"name": "NVIDIA L4", "total_bytes": 23034 << 20}
    gpus = [Gpu(id=str(number), uuid=f"GPU-{number}a", **gpu) for number in range(4)]
    monkeypatch.setattr("batchinfer.engines.gpus.query_nvidia", lambda: gpus)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    url, notes = f"memory://{tmp_path.name}/model", tmp_path / "notes"
    notes.mkdir()
    for path in model.iterdir():
        open_store(url).put_file(path.name, path)
    said = "[*sys.argv[3:], os.environ['CUDA_VISIBLE_DEVICES'], *sorted(os.listdir(sys.argv[2]))]"
    note = f"open('{notes}/' + str(os.getpid()), 'w').write(' '.join({said}))"
    script = command(tmp_path, app(before=note))
    open_engine(server_command=f"{script} {{gpus}}", model=url, tensor_parallel_size=2)
    files = " ".join(sorted(path.name for path in model.iterdir()))
    found = sorted(path.read_text() for path in notes.iterdir())
    assert found == [f"2 0,1 {files}", f"2 2,3 {files}"]


def test_what_a_server_counts_is_added_over_its_starts_but_for_the_rows_that_it_has(tmp_path):
    server = own_server(tmp_path, "true")
    server.get = AsyncMock(return_value=Answer(200, METRICS))
    asyncio.run(server.read_counters())
    assert server.counters == {"rows": 9, "completion_tokens": 100, "steps": 41}
    server.start()
    server.end()
    assert server.counters == {"completion_tokens": 100, "steps": 41}
    asyncio.run(server.read_counters())
    assert server.counters == {"rows": 9, "completion_tokens": 200, "steps": 82}


# --------------------------------------------------------------------------- servers that do not start


NOT_STARTING = {
    "package": ("print(\"Error: No module named 'torchvision'\"); exit(2)", ConfigError, "package torchvision"),
    "memory": ("raise SystemError('torch.OutOfMemoryError: CUDA out of memory')", ConfigError, "not fit into memory"),
    "crash": ("import logging\nprint('noise')\nraise RuntimeError('the reason')", EngineLoadError, "the reason"),
    "killed": ("import os\nos.kill(os.getpid(), 9)", EngineLoadError, "SIGKILL"),
    "a status like a signal's": ("exit(255)", EngineLoadError, "ended with exit status 255"),
}  # fmt: skip


@pytest.mark.parametrize("name", NOT_STARTING)
def test_a_server_that_does_not_start_says_why(open_engine, tmp_path, name):
    script, error, said = NOT_STARTING[name]
    with pytest.raises(error) as caught:
        open_engine(server_command=command(tmp_path, script), replicas=1)
    assert said in caught.value.message + caught.value.hint


def test_a_command_that_is_not_there_is_the_users_fault(open_engine):
    with pytest.raises(ConfigError, match="nosuchprogram"):
        open_engine(server_command="nosuchprogram {port}")


def test_a_server_that_never_gets_ready_is_given_up(open_engine, tmp_path):
    idle = command(tmp_path, "import time; time.sleep(60)")
    with pytest.raises(EngineLoadError, match=r"not loaded after 0.5 s") as caught:
        open_engine(server_command=idle, load_timeout_seconds=0.5)
    assert "scratch" not in caught.value.hint, "where its log was"


def test_a_stop_while_it_loads_ends_every_process_at_once(model, tmp_path):
    script = f"import os, time; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    stop = Event()
    stop.is_set = lambda: (tmp_path / "pid").exists() and bool((tmp_path / "pid").read_text())
    config = EngineConfig(model=str(model), server_command=command(tmp_path, script))
    with pytest.raises(Interrupted):
        create_engine(config).open(stop)
    assert are_gone([int((tmp_path / "pid").read_text())])


# --------------------------------------------------------------------------- nothing is left

FAMILY = """
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    grandchild = "from subprocess import *; print(Popen(['sleep', '600'], stdout=DEVNULL).pid)"
    other = subprocess.run([sys.executable, "-c", grandchild], stdout=subprocess.PIPE).stdout
    async def pids(_): return web.json_response({"data": [os.getpid(), child.pid, int(other)]})
    """
WORKER = """
    import json, sys, threading, time
    import msgspec
    from batchinfer.engines import create_engine
    from batchinfer.engines.engine_config import EngineConfig
    engine = create_engine(msgspec.json.decode(sys.argv[1], type=EngineConfig))
    opened = threading.Thread(target=engine.open, args=(threading.Event(),))  # a thread that ends
    opened.start()
    opened.join()
    guard = engine.targets[0].guard.pid
    print(json.dumps([guard, *json.loads(engine._run(engine.targets[0].get("/pids"))[1])["data"]]), flush=True)
    time.sleep(600)
    """


@pytest.mark.parametrize("victim", ["worker", "server"])
def test_nothing_is_left_of_a_server_and_its_children(model, tmp_path, victim):
    family = app('web.get("/pids", pids)', rest=FAMILY)
    config = EngineConfig(model=str(model), server_command=command(tmp_path, family))
    given = msgspec.json.encode(config).decode()
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(WORKER), given], stdout=subprocess.PIPE
    ) as worker:
        [guard, *family] = json.loads(worker.stdout.readline())
        assert all(is_running(pid) for pid in family)
        os.kill(worker.pid if victim == "worker" else family[0], signal.SIGKILL)
        assert are_gone(family[1:])
        assert are_gone(family[:1] if victim == "worker" else [])
        with contextlib.suppress(ProcessLookupError):
            worker.kill()
    assert are_gone([guard, *family])


def test_a_killed_guard_takes_its_server_with_it(open_engine):
    engine = open_engine(replicas=1, kill="X")
    found = pids(engine)
    os.kill(engine.targets[0].guard.pid, signal.SIGKILL)
    assert are_gone(found)
    assert {code_of(each) for each in drive_again(engine, calls(5))[0].values()} == {""}
