"""Stands in for `batchinfer.engines.host`: an engine process that answers as echo does where it should load vLLM.

Into the folder ECHO_HOST_NOTES it writes a file named by its process id: the variables that say which GPUs it may use,
the sizes of its configuration, and at the end the number of its answers.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from batchinfer.core.records import Completion
from batchinfer.engines import ENGINES, RequestSource, Stop, host
from batchinfer.engines.config import EngineConfig
from batchinfer.engines.echo import EchoEngine


class NotingEngine(EchoEngine):
    """The echo engine, with its notes."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self._answers = 0

    def generate(self, source: RequestSource, stop: Stop) -> Iterator[list[Completion]]:
        for finished in super().generate(source, stop):
            self._answers += len(finished)
            yield finished

    def close(self) -> None:
        notes = {
            "gpus": os.environ.get("CUDA_VISIBLE_DEVICES"),
            "order": os.environ.get("CUDA_DEVICE_ORDER"),
            "tensor_parallel_size": self.config.tensor_parallel_size,
            "answers": self._answers,
        }
        path = Path(os.environ["ECHO_HOST_NOTES"]) / str(os.getpid())
        path.write_text(json.dumps(notes))
        super().close()


if __name__ == "__main__":
    ENGINES["vllm"] = replace(ENGINES["vllm"], create=NotingEngine)
    sys.exit(host.main(sys.argv[1:]))
