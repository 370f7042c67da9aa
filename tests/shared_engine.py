"""An open engine for the workers of several tests."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from batchinfer.core.records import EngineInfo
from batchinfer.engines import Engine, Stop, create_engine
from batchinfer.engines.engine_config import EngineConfig


class SharedEngine:
    """An engine that is open already, and stays so when a worker closes it."""

    def __init__(self, engine: Engine, info: EngineInfo) -> None:
        self._engine = engine
        self._info = info

    def open(self, stop: Stop) -> EngineInfo:
        return self._info

    def close(self) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


@contextmanager
def opened(config: EngineConfig) -> Iterator[SharedEngine]:
    """Open an engine until the end of the context."""
    engine = create_engine(config)
    try:
        yield SharedEngine(engine, engine.open(threading.Event()))
    finally:
        engine.close()
