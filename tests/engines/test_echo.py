"""The echo engine, which answers in the worker's process."""

import threading
from typing import get_args

import pytest
from msgspec.structs import replace

from batchinfer.core.records import Call
from batchinfer.core.tasks import GENERATE, Task
from batchinfer.engines import create_engine, echo
from batchinfer.engines.engine_config import EngineConfig
from batchinfer.prompts.types import TASK_PATHS
from engine_contract import EngineContract

ECHO = EngineConfig(engine="echo", server_args=["--max-model-len", "512", "--max-num-seqs", "16"])


class TestContract(EngineContract):
    @pytest.fixture(scope="class", params=[{}, {"echo_latency_seconds": 0.002, "replicas": 2}])
    @classmethod
    def opened(cls, request):
        engine = create_engine(replace(ECHO, **request.param))
        yield engine, engine.open(threading.Event())
        engine.close()


def test_every_task_has_a_path_that_is_answered():
    assert {GENERATE, *TASK_PATHS} == {*get_args(Task)}
    for path in TASK_PATHS.values():
        call = Call(key=("c", 0), path=path, body=b'{"input":["x"],"text_2":["y"]}')
        assert echo.answer(call, ECHO).status == 200, path
