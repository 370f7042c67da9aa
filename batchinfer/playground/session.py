"""One server that answers one person, and the calls that ask it. Calls are made as a run makes them of its rows."""

from __future__ import annotations

from collections.abc import Callable
from threading import Event
from typing import Any

import click
import msgspec

from batchinfer.cli.logs import set_level
from batchinfer.cli.options import F, options, options_of, value_of
from batchinfer.cli.terminal import say
from batchinfer.core import codec, units
from batchinfer.core.errors import InputError
from batchinfer.core.records import EngineInfo
from batchinfer.engines import create_engine, identify_model, is_remote
from batchinfer.engines.engine_config import check_engine
from batchinfer.prompts.builder import PromptBuilder
from batchinfer.prompts.types import Prepared, RawRow
from batchinfer.worker.command import engine_config, prompt_config
from batchinfer.worker.worker_config import WorkerConfig, rules_of

_SECTIONS = ("model", "engine", "sampling", "endpoint", "rehearsal")
_PROMPT = ("system_prompt", "chat_template_kwargs", "tools")


def play_options(*without: str) -> Callable[[F], F]:
    """Return a decorator that adds a run's options about model, engine, prompt and sampling to a command."""
    wanted = [
        each.field
        for each in options_of(WorkerConfig)
        if each.section in _SECTIONS or each.field in _PROMPT
    ]
    # One server answers, with texts.
    return options(WorkerConfig, only=wanted, without=["replicas", "task", *without])


class Session:
    """An engine with one server, the configuration of its prompts, and the run's seed, made from a command's options.

    Raises:
        BatchinferError: an option is wrong, or the engine, the model or the endpoint is not there.
    """

    def __init__(self, given: dict[str, Any], **more: Any) -> None:
        # Log lines would stand between the answers.
        source = click.get_current_context().get_parameter_source("log_level")
        if source is click.core.ParameterSource.DEFAULT:
            set_level("warning")
        given = given | more
        config = engine_config(given)
        self.config = config if is_remote(config) else msgspec.structs.replace(config, replicas=1)
        self.prompt = prompt_config(given)
        self.seed: int | None = value_of(WorkerConfig, "run_seed", given)
        check_engine(self.config)
        identify_model(self.config)
        self.info: EngineInfo | None = None

    def open(self) -> EngineInfo:
        """Start the server, and tell the person. May be called again after `close`."""
        say(f"loading {self.config.model or self.config.engine} …")
        self.engine = create_engine(self.config)
        self.info = self.engine.open(Event())
        length = self.info.max_model_len
        context = "" if length is None else f", context {length:,} tokens"
        took = units.duration(self.info.load_seconds)
        say(f"ready after {took}: {self.info.name} {self.info.version}{context}")
        return self.info

    def close(self) -> None:
        """End the server, if it is open."""
        if self.info is not None:
            self.engine.close()
            self.info = None

    def prepare(self, first: int, rows: list[dict[str, Any]], **changes: Any) -> list[Prepared]:
        """Return the calls of some rows, numbered from `first` on. `changes` replace fields of the `PromptConfig`.

        Raises:
            InputError: a row cannot become a call.
        """
        assert self.info is not None
        try:
            raw = [RawRow(first + index, codec.encode(row)) for index, row in enumerate(rows)]
        except UnicodeEncodeError as error:
            raise InputError("the message holds bytes that are no text, expected UTF-8") from error
        rules = rules_of(self.config, opened=self.engine, info=self.info)
        prompt = msgspec.structs.replace(self.prompt, **changes)
        found = PromptBuilder(prompt, self.seed, rules=rules).build("part-00000", 0, raw)
        for number, prepared in enumerate(found, 1):
            if prepared.failure is not None:
                raise InputError(f"message {number} of {len(rows)}: {prepared.failure.message}")
        return found
