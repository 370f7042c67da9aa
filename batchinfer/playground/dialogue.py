"""A conversation with a model: its turns, its prompts, and the settings that a person may change."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from batchinfer.cli.run_options import fields_of, value_of
from batchinfer.core import codec
from batchinfer.core.errors import ConfigError, InputError
from batchinfer.core.records import Record, Request, Sampling
from batchinfer.engines import find_engine
from batchinfer.engines.config import EngineConfig
from batchinfer.playground.options import Choices
from batchinfer.prompts import PromptBuilder, PromptConfig, RawRow, Tokenizer, make_sampling
from batchinfer.prompts.parameters import ALIASES
from batchinfer.worker.config import check_together

ANSWER_TOKENS = 256
"""Tokens that a prompt with earlier turns leaves for the answer if `max_tokens` is not set. In a small context it
leaves fewer, because a prompt may always take half of the context."""
_CHUNK = "chat"

FORMATS_TEMPLATE = (
    "{{ formats.start }}"
    "{% for message in messages %}"
    "{{ formats[message.role][0] }}{{ message.content }}{{ formats[message.role][1] }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ formats.assistant[0] }}{% endif %}"
)
"""Chat template that puts each message into the format of its role."""


class Turn(Record, frozen=True, kw_only=True):
    """A person's message and the model's answer."""

    message: str
    answer: str
    is_cut: bool = False
    """Whether the person ended the answer with Ctrl-C."""


class ChatRequest(Record, frozen=True, kw_only=True):
    """The request that asks the person's next message."""

    request: Request
    prompt: Any
    """Prompt as a text, or the messages if the engine makes the prompt itself."""
    num_dropped: int
    """Number of turns, from the first on, that are left out of the prompt because the context is too small."""


class Formats(Record, frozen=True, kw_only=True):
    """Formats of messages in place of a chat template, as `--user-msg-fmt` and `--assistant-msg-fmt` give them."""

    user: str
    assistant: str

    @property
    def stops(self) -> list[str] | None:
        """Texts that end an answer: the end of the assistant's format and the beginning of the user's, unless blank."""
        texts = [self.assistant.split("{}")[1].strip(), self.user.split("{}")[0].strip()]
        return [text for text in texts if text] or None


def read_format(flag: str, text: str) -> str:
    r"""Return a format, with `\n` and `\t` replaced by a line break and a tab.

    Raises:
        ConfigError: the format does not hold {} exactly once.
    """
    text = text.replace("\\n", "\n").replace("\\t", "\t")
    if text.count("{}") != 1:
        raise ConfigError(
            f"{flag} {text!r}: expected {{}} exactly once, where the message goes",
            hint=f"e.g. {flag} 'user: {{}}\\n'",
        )
    return text


class Settings:
    """Settings of a chat. `/system` and `/set` change the system prompt and the sampling values.

    Args:
        options: All options of a run.
        chosen: The configuration that they make.
        formats: Formats in place of a chat template, or None.
    """

    def __init__(self, options: dict[str, Any], chosen: Choices, formats: Formats | None) -> None:
        self.engine: EngineConfig = chosen.engine
        self.prompt: PromptConfig = chosen.prompt
        self.sampling: Sampling = chosen.sampling
        self.adapter = chosen.adapter
        self.run_seed: int | None = value_of("seed", options)
        self.formats = formats
        self._fields = fields_of("Sampling", options)
        self._pairs: dict[str, Any] = value_of("sampling", options)
        _refuse_several(self.sampling)

    def set(self, pairs: dict[str, Any]) -> None:
        """Change sampling values; None stands for the model's default. If one is wrong, none is changed.

        Raises:
            ConfigError: a name or a value is wrong.
        """
        pairs = {ALIASES.get(name, name): value for name, value in pairs.items()}
        seed = pairs.pop("seed", self.run_seed)
        if seed is not None and type(seed) is not int:
            raise ConfigError(f"seed: is {seed!r}, expected a whole number or none")
        kept = {ALIASES.get(name, name): value for name, value in self._pairs.items()} | pairs
        fields = {name: value for name, value in self._fields.items() if name not in kept}
        sampling = make_sampling(
            fields, {n: value for n, value in kept.items() if value is not None}
        )
        unknown = [name for name in pairs if name not in Sampling.__struct_fields__]
        find_engine(self.engine.engine).check_parameters("/set", unknown)
        check_together(self.engine, self.prompt, sampling)
        _refuse_several(sampling)
        make_builder(self.prompt, sampling, seed, None)  # checks the values
        self._pairs, self.sampling, self.run_seed = kept, sampling, seed

    def set_system_prompt(self, text: str) -> None:
        """Change the system prompt; an empty text takes it away."""
        self.prompt = msgspec.structs.replace(self.prompt, system_prompt=text)

    def shown(self) -> dict[str, Any]:
        """Return the sampling values that are set, by name, and the seed."""
        values: dict[str, Any] = msgspec.to_builtins(self.sampling)
        values |= values.pop("extra", None) or {}
        return values | {"seed": self.run_seed}


def _refuse_several(sampling: Sampling) -> None:
    if sampling.n != 1:
        raise ConfigError(
            f"n: is {sampling.n}, expected 1: a conversation goes on from one answer",
            hint="batchinfer generate --n 2 shows several",
        )


def make_builder(
    prompt: PromptConfig,
    sampling: Sampling,
    run_seed: int | None,
    tokenizer: Tokenizer | None,
    formats: Formats | None = None,
) -> PromptBuilder:
    """Make the builder of a conversation's prompts. The builder does not check their lengths.

    Raises:
        ConfigError: a sampling value cannot work, or there is no chat template.
    """
    if formats is not None:
        prompt = msgspec.structs.replace(
            prompt,
            chat_template=FORMATS_TEMPLATE,
            chat_template_kwargs={"formats": _template_values(formats, prompt, tokenizer)},
        )
        if sampling.stop is None:
            sampling = msgspec.structs.replace(sampling, stop=formats.stops)
    return PromptBuilder(prompt, sampling, run_seed, tokenizer, None, needs_prompt=True)


def _template_values(
    formats: Formats, prompt: PromptConfig, tokenizer: Tokenizer | None
) -> dict[str, Any]:
    return {
        "start": "" if tokenizer is None else _start_of(tokenizer),
        "system": ["", "" if prompt.system_prompt.endswith("\n") else "\n"],
        "user": formats.user.split("{}"),
        "assistant": formats.assistant.split("{}"),
    }


def _start_of(tokenizer: Tokenizer) -> str:
    """Return the text of the special tokens that the tokenizer puts before a text."""
    [plain], [marked] = (tokenizer.encode(["a"], add_special_tokens=each) for each in (False, True))
    for start in range(len(marked) - len(plain) + 1):
        if marked[start : start + len(plain)] == plain:
            return tokenizer.decode(marked[:start]) if start else ""
    return ""


class Dialogue:
    """The turns of a conversation so far, and the request that the next message makes.

    Args:
        settings: Settings, which may change between two messages.
        tokenizer: The model's tokenizer; None if the engine makes the prompts.
        max_model_len: Tokens of prompt and answer together; None if there is no limit.
    """

    def __init__(
        self, settings: Settings, tokenizer: Tokenizer | None, max_model_len: int | None
    ) -> None:
        self.settings = settings
        self.turns: list[Turn] = []
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len
        self._num_requests = 0

    def prepare(self, message: str) -> ChatRequest:
        """Make the request for the next message. The first turns are left out if the context is too small for all.

        Raises:
            ConfigError: there is no chat template.
            InputError: the message is empty or too long, or the chat template refuses the conversation.
        """
        settings = self.settings
        builder = make_builder(
            settings.prompt,
            settings.sampling,
            settings.run_seed,
            self._tokenizer,
            settings.formats,
        )
        self._num_requests += 1
        num_dropped = 0
        while True:
            messages = [*self.messages(self.turns[num_dropped:]), _message("user", message)]
            line = codec.encode({"messages": messages})
            [prepared] = builder.build(_CHUNK, 0, [RawRow(self._num_requests, line)])
            if prepared.failure is not None:
                raise InputError(prepared.failure.message)
            assert prepared.request is not None
            request = msgspec.structs.replace(prepared.request, adapter=settings.adapter)
            is_alone = num_dropped == len(self.turns)
            if self._fits(request, is_alone=is_alone):
                return ChatRequest(request=request, prompt=prepared.prompt, num_dropped=num_dropped)
            if is_alone:
                length = len(request.token_ids or [])
                raise InputError(
                    f"the message is too long: its prompt has {length} tokens, and the context holds "
                    f"{self._max_model_len} with the answer"
                )
            num_dropped += 1

    def _fits(self, request: Request, *, is_alone: bool) -> bool:
        if self._max_model_len is None or request.token_ids is None:
            return True
        length = len(request.token_ids)
        if is_alone:
            return length < self._max_model_len
        wanted = self.settings.sampling.max_tokens or ANSWER_TOKENS
        return length <= max(self._max_model_len - wanted, self._max_model_len // 2)

    def add(self, turn: Turn) -> None:
        """Append a turn. With formats, white space around its answer is removed: the formats bring their own."""
        if self.settings.formats is not None:
            turn = msgspec.structs.replace(turn, answer=turn.answer.strip())
        self.turns.append(turn)

    def take_back(self) -> Turn | None:
        """Remove the last turn, and return it; None if there is none."""
        return self.turns.pop() if self.turns else None

    def reset(self) -> None:
        """Forget all turns. The settings stay."""
        self.turns.clear()

    def messages(self, turns: Sequence[Turn] | None = None) -> list[dict[str, str]]:
        """Return turns as chat messages, without the system prompt. Default: all turns."""
        found = []
        for turn in self.turns if turns is None else turns:
            found += [_message("user", turn.message), _message("assistant", turn.answer)]
        return found

    def saved(self) -> bytes:
        """Return the whole conversation as a JSON line with a column `messages`, which `batchinfer run` reads."""
        system = self.settings.prompt.system_prompt
        first = [_message("system", system)] if system else []
        return codec.encode({"messages": [*first, *self.messages()]}) + b"\n"

    def tokens_of(self, ready: ChatRequest) -> list[tuple[int, str]]:
        """Return the id and the text of each token of a prompt; an empty list if the engine makes the prompts."""
        if self._tokenizer is None:
            return []
        decode = self._tokenizer.decode
        return [(token, decode([token])) for token in ready.request.token_ids or []]


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}
