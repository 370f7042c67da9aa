"""From an engine's name to an engine, importing only what that one needs."""

from __future__ import annotations

import difflib
import importlib.util

from batchinfer.core.errors import ConfigError
from batchinfer.engines import Engine
from batchinfer.engines.config import EngineConfig, check_config

ENGINES = ("vllm", "echo")


def create_engine(config: EngineConfig) -> Engine:
    """Make an engine that is not open yet. Starts nothing, and imports neither vllm nor torch.

    Raises:
        ConfigError: no such engine, its package is not installed, or the configuration cannot work.
    """
    check_engine(config)
    if config.engine == "echo":
        if config.in_process or config.replicas in {1, "auto"}:
            from batchinfer.engines.echo import EchoEngine

            return EchoEngine(config)
    else:
        require_vllm()
    from batchinfer.engines.pool import ProcessPool

    return ProcessPool(config)


def check_engine(config: EngineConfig) -> None:
    """Refuse an engine that does not exist, and what no engine could run. Pure.

    Raises:
        ConfigError: the message names the option.
    """
    if config.engine not in ENGINES:
        near = difflib.get_close_matches(config.engine.lower(), ENGINES, n=1, cutoff=0.4)
        raise ConfigError(
            f"--engine: {config.engine!r} is not an engine, expected one of {', '.join(ENGINES)}",
            hint=f"did you mean --engine {near[0]}?" if near else "the default is --engine vllm",
        )
    check_config(config)


def require_vllm() -> None:
    """Check that vLLM could be imported, without importing it.

    Raises:
        ConfigError: it is not installed.
    """
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError(
            "--engine vllm: the package vllm is not installed in this environment",
            hint="in batchinfer's checkout: pip install '.[vllm]' on a machine with GPUs, `bash scripts/setup.sh "
            "--extras cpu` on one without; --engine echo needs neither",
        )
