"""The options that `generate` and `chat` share with the other commands: model, engine, prompt and sampling."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection
from typing import Any

import click
import msgspec

from batchinfer.cli.logs import set_level
from batchinfer.cli.options import ENDPOINT, REHEARSAL, F, Option
from batchinfer.cli.run_options import OPTIONS
from batchinfer.core.errors import ConfigError
from batchinfer.core.records import Sampling
from batchinfer.engines import check_engine, find_engine, identify_model
from batchinfer.engines.config import EngineConfig
from batchinfer.prompts import PromptConfig
from batchinfer.worker.command import engine_config, prompt_config, sampling_config
from batchinfer.worker.config import check_together

_SECTIONS = ("model", "engine", "sampling", ENDPOINT, REHEARSAL)
_PROMPT = ("system_prompt", "chat_template", "chat_template_kwargs")
_NODES = ("nnodes", "node_rank", "master_addr", "master_port", "headless")
_LEFT_OUT = ("replicas", "logprobs", "task", "pooling", "dimensions", "normalize", *_NODES)
"""Options without a use here: a second replica would wait most of the time, log-probabilities are not shown, only texts
are generated, and the model runs on this machine."""
_HELP = {
    "revision": "Commit, tag or branch of the model. Default: the latest.",
    "trust_remote_code": "Run code that comes with the model.",
    "system_prompt": "System message: text, or @FILE.",
    "lora": "LoRA adapter that answers: a name for it, and its folder, URL or name on the Hub.",
    "n": "Answers to each request.",
    "seed": "Seed from which each request gets its own, as in a run; `none`: not repeatable.",
    "max_num_seqs": "Requests that the engine runs at once.",
}
"""Help texts that differ from those of a run."""
_LISTED = (
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
)
"""Parameters of the options for which `generate` takes lists."""


class ListOf(click.ParamType[list[Any]]):
    """Several values with commas between, each of an option's own type."""

    name = "list"

    def __init__(self, item: click.ParamType[Any]) -> None:
        self._item = item

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> list[Any]:
        """See click.ParamType."""
        if isinstance(value, list):
            return value
        parts = [part.strip() for part in str(value).split(",")]
        if not all(parts):
            self.fail(f"{value!r} has an empty value, expected e.g. 0,0.7,1", param, ctx)
        return [self._item.convert(part, param, ctx) for part in parts]


def _taken(without: Collection[str]) -> list[Option]:
    return [
        dataclasses.replace(option, help=_HELP.get(option.parameter, option.help))
        for option in OPTIONS
        if (option.section in _SECTIONS or option.parameter in _PROMPT)
        and option.parameter not in (*_LEFT_OUT, *without)
    ]


def play_options(*, has_lists: bool, without: Collection[str] = ()) -> Callable[[F], F]:
    """Return a decorator that adds these options to a command.

    Args:
        has_lists: Whether the options of `_LISTED` take several values with commas between.
        without: Names of the parameters of options to leave out.
    """

    def decorate(function: F) -> F:
        for option in reversed(_taken(without)):
            function = (_listed(option) if has_lists else option).decorate(function)
        return function

    return decorate


def _listed(option: Option) -> Option:
    if option.parameter not in _LISTED:
        return option
    item = click.types.convert_type(option.kind.click["type"])
    kind = option.kind._replace(click={**option.kind.click, "type": ListOf(item)})
    return dataclasses.replace(option, kind=kind, metavar="A,B,…")


def listed_values(given: dict[str, Any]) -> dict[str, list[Any]]:
    """Return the given values of the options of `_LISTED`, by parameter."""
    return {name: given[name] for name in _LISTED if given.get(name) is not None}


def with_defaults(given: dict[str, Any]) -> dict[str, Any]:
    """Return the options, and the defaults of those options of a worker that the command lacks."""
    return {option.parameter: option.value_if_not_given for option in OPTIONS} | given


class Choices(msgspec.Struct, frozen=True, kw_only=True):
    """Configuration of engine, prompts and sampling, made from options."""

    engine: EngineConfig
    prompt: PromptConfig
    sampling: Sampling

    @property
    def adapter(self) -> str | None:
        """Name of the adapter that answers every request; None for the model itself."""
        return next(iter(self.engine.loras), None)


def choices(given: dict[str, Any]) -> Choices:
    """Make the configuration from all options of a worker. An engine that loads a model gets one replica.

    Raises:
        ConfigError: a value is wrong, or the engine does not know one of the sampling parameters.
    """
    engine = engine_config(given)
    if find_engine(engine.engine).needs_model:
        engine = msgspec.structs.replace(engine, replicas=1)
    sampling = sampling_config(given)
    check_engine(engine)
    if len(engine.loras) > 1:
        raise ConfigError(
            f"--lora: is given {len(engine.loras)} times, expected one adapter, which answers everything",
            hint="batchinfer run takes several, and --lora-column",
        )
    prompt = prompt_config(given)
    check_together(engine, prompt, sampling)
    return Choices(engine=engine, prompt=prompt, sampling=sampling)


def check_model(config: EngineConfig) -> None:
    """Refuse, before anything is loaded, an engine that is not installed, and a model or endpoint that is not there.

    Raises:
        BatchinferError: the message says what is missing.
    """
    kind = find_engine(config.engine)
    kind.check_installed()
    identify_model(config)
    kind.look(config)


def refuse_template(config: EngineConfig, template: str) -> None:
    """Refuse a chat template if the engine is an endpoint, which makes the prompt itself.

    Args:
        config: Configuration of the engine.
        template: The option that was given, for the message; "" if none was.

    Raises:
        ConfigError: the engine is an endpoint, and the option was given.
    """
    if template and find_engine(config.engine).is_remote:
        raise ConfigError(
            f"{template} with --engine {config.engine}: the endpoint makes the prompt",
            hint="set the template where the endpoint is started",
        )


def quieten() -> None:
    """Log only warnings, unless --log-level was given: log lines would stand between the answers."""
    source = click.get_current_context().get_parameter_source("log_level")
    if source is click.core.ParameterSource.DEFAULT:
        set_level("warning")
