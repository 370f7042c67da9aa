"""The echo engine, which answers in the worker's process."""

import threading

import pytest
from msgspec.structs import replace

from batchinfer.engines import create_engine
from batchinfer.engines.engine_config import EngineConfig
from engine_contract import EngineContract

LENGTH = ["--max-model-len", "512", "--max-num-seqs", "16"]
ECHO = EngineConfig(engine="echo", server_args=LENGTH)


class TestContract(EngineContract):
    @pytest.fixture(scope="class", params=[{}, {"echo_latency_seconds": 0.002, "replicas": 2}])
    @classmethod
    def opened(cls, request):
        engine = create_engine(replace(ECHO, **request.param))
        yield engine, engine.open(threading.Event())
        engine.close()
