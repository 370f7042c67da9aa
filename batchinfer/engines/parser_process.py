"""Runs vLLM's parsers of reasoning and of calls of tools, in a process of its own (parser_host.py).

The parsers import most of vLLM, run for long on some texts, and must not hold up an engine's steps. So they run beside
the worker and beside its engines. An answer with which the process ends, or goes over its limits, keeps its text.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Sequence
from functools import cache

import msgspec

from batchinfer.core import codec
from batchinfer.core.errors import ConfigError
from batchinfer.core.processes import describe_exit
from batchinfer.core.records import AnswerForm
from batchinfer.engines import find_engine
from batchinfer.engines.bucket_models import with_local_files
from batchinfer.engines.config import EngineConfig
from batchinfer.prompts.limited_process import LimitedProcess

logger = logging.getLogger(__name__)

QUESTION_SECONDS = 20.0
"""Seconds of CPU time that the answers of one question may take."""
MEMORY_BYTES = 2 << 30
"""Bytes of memory that the process may have beyond what it has when it begins to parse."""


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """The first frame to the process."""

    model: str
    tokenizer: str
    revision: str = ""
    trust_remote_code: bool = False
    tool_call_parser: str = ""
    reasoning_parser: str = ""
    question_seconds: float = QUESTION_SECONDS
    memory_bytes: int = MEMORY_BYTES


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to the first frame."""

    problem: str = ""
    """Reason why the parsers cannot be used; empty if they can."""
    keeps_special: bool = False
    """Whether answers must be decoded with their special tokens."""
    keeps_special_for_calls: bool = False
    """The same for answers that may call tools."""
    reasoning_start: str = ""
    """Text with which reasoning begins; empty if the parser does not say."""
    reasoning_end: str = ""


class Whole(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One answer before it is taken apart. `form` is the index of its form in the question."""

    form: int
    text: str
    token_ids: list[int] = []
    prompt_token_ids: list[int] = []


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """A later frame to the process: some answers, and the forms that they may have."""

    forms: list[AnswerForm]
    answers: list[Whole]


class Parts(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One answer after it was taken apart."""

    text: str
    """Text without reasoning and calls."""
    whole_text: str = ""
    """Text without reasoning, but with calls as the model wrote them; only if there are calls."""
    reasoning: str | None = None
    num_reasoning: int = 0
    """Number of tokens of reasoning."""
    calls: list[tuple[str, str, str]] = []
    """Name, arguments and id of each call. The id is empty unless the model wrote it."""
    is_broken: bool = False
    """Whether the parser failed on the text, which is whole then."""


_facts_decoder = codec.msgpack_decoder(Facts)
_parts_decoder = codec.msgpack_decoder(list[Parts])


class ParserProcess:
    """The process, which starts with the first use, and again after its end. One thread at a time uses it."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self._facts: Facts | None = None
        self._process = LimitedProcess(
            "batchinfer.engines.parser_host",
            msgspec.msgpack.encode(setup),
            name="parsers of answers",
            question_seconds=setup.question_seconds,
            memory_bytes=setup.memory_bytes,
        )

    def start(self) -> Facts:
        """Start the process if it does not run, and wait until it is ready.

        Raises:
            ConfigError: a parser does not fit the tokenizer, or the process ends.
        """
        if self._facts is not None and self._process.is_running:
            return self._facts
        data = self._process.start()
        if data is None:
            ending = describe_exit(self._process.note_end())
            raise ConfigError(
                f"{self._options}: the process that reads answers {ending}",
                hint="the lines before this one say why",
            )
        facts = _facts_decoder.decode(data)
        if facts.problem:
            self._process.note_end()
            raise ConfigError(
                f"{self._options}: does not work with the tokenizer of {self.setup.model}: {facts.problem}",
                hint="the model's card names its parsers; docs/tools.md lists them by model",
            )
        self._facts = facts
        return facts

    @property
    def _options(self) -> str:
        parsers = {
            "--tool-call-parser": self.setup.tool_call_parser,
            "--reasoning-parser": self.setup.reasoning_parser,
        }
        return " and ".join(f"{flag} {name}" for flag, name in parsers.items() if name)

    def stop(self) -> None:
        """End the process. It is started again if it is used again."""
        self._process.stop()

    def read(self, forms: Sequence[AnswerForm], answers: Sequence[Whole]) -> list[Parts]:
        """Return the parts of each answer. Each answer with which the process ends keeps its text."""
        try:
            self.start()
        except ConfigError as error:
            logger.warning("%s; answers keep their text", error.message)
            return [Parts(text=each.text, is_broken=True) for each in answers]
        question = Question(forms=list(forms), answers=list(answers))
        # JSON, because schemas of tools may hold integers of more than 64 bits, which msgpack has not.
        data = self._process.ask(msgspec.json.encode(question))
        if data is not None:
            return _parts_decoder.decode(data)
        status = self._process.note_end()
        if len(answers) > 1:
            return [part for each in answers for part in self.read(forms, [each])]
        reason = self._process.limit_of(status) or describe_exit(status)
        logger.warning("an answer keeps its text: the process that reads answers %s", reason)
        return [Parts(text=each.text, is_broken=True) for each in answers]


def check_parsers(config: EngineConfig, *, has_budget: bool, keeps: bool = True) -> None:
    """Refuse parsers that do not fit the model's tokenizer, or cannot read whole texts. Takes seconds.

    Args:
        config: Configuration with the names of the parsers.
        has_budget: Whether the run limits the tokens of reasoning.
        keeps: Whether the process goes on running, for the answers of the run.

    Raises:
        ConfigError: the message names the option.
    """
    parsers = parsers_of(config)
    if parsers is None:
        return
    if importlib.util.find_spec("vllm") is None:
        logger.warning("parsers are not tried here: vllm is not installed")
        return
    facts = parsers.start()
    if not keeps:
        parsers.stop()
    if has_budget and config.reasoning_parser and not facts.reasoning_end:
        raise ConfigError(
            f"--thinking-budget with --reasoning-parser {config.reasoning_parser}: this parser does not say how "
            "reasoning ends, so that the engine could end it",
            hint="leave it out, or give --engine-arg reasoning_config with reasoning_start_str and reasoning_end_str",
        )


@cache
def _process_of(setup: bytes) -> ParserProcess:
    return ParserProcess(codec.msgpack_decoder(Setup).decode(setup))


def parsers_of(config: EngineConfig) -> ParserProcess | None:
    """Return the process with a configuration's parsers, the same for the same parsers; None if it has none.

    An engine that loads no model has no tokenizer, and its answers are not taken apart.
    """
    has_parsers = config.tool_call_parser or config.reasoning_parser
    if not has_parsers or not find_engine(config.engine).needs_model:
        return None
    local = with_local_files(config, with_weights=False)
    setup = Setup(
        model=config.model,
        tokenizer=local.tokenizer or local.model,
        revision="" if local.tokenizer else local.revision or "",
        trust_remote_code=config.trust_remote_code,
        tool_call_parser=config.tool_call_parser,
        reasoning_parser=config.reasoning_parser,
    )
    return _process_of(msgspec.msgpack.encode(setup))
