"""The process that takes answers apart with vLLM's parsers: ``python -m batchinfer.engines.parser_host``.

parser_process.py starts it and says why it is a process of its own. Only this module knows vLLM's parsers.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from typing import Any

import msgspec

from batchinfer.core import codec
from batchinfer.core.processes import no_garbage_collection
from batchinfer.core.records import AnswerForm
from batchinfer.engines.parser_process import Facts, Parts, Question, Setup, Whole
from batchinfer.prompts.limited_process import (
    MEMORY_STATUS,
    limit_memory,
    prepare_timer,
    present_bytes,
    read_frame,
    restart_timer,
    write_frame,
)

_TRIAL = AnswerForm(tools=[{"type": "function", "function": {"name": "f", "parameters": {}}}])
"""Form of the text that is parsed at the start, to see whether the parsers work at all."""


def main() -> None:
    """Load the parsers. Then, until the pipe is closed, answer each frame, a list of answers, with their parts."""
    # vLLM prints to the standard output, which is the pipe.
    pipe = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    first = read_frame(sys.stdin.buffer)
    if first is None:
        return
    setup = codec.msgpack_decoder(Setup).decode(first)
    try:
        reader = VllmParsers(setup)
    except Exception as error:  # noqa: BLE001 -- parsers and tokenizers raise errors of any class
        problem = " ".join(str(error).split())[:500] or type(error).__name__
        write_frame(pipe, msgspec.msgpack.encode(Facts(problem=problem)))
        return
    limit_memory(present_bytes() + setup.memory_bytes)
    prepare_timer()
    write_frame(pipe, msgspec.msgpack.encode(reader.facts))
    questions = codec.json_decoder(Question)
    try:
        while (frame := read_frame(sys.stdin.buffer)) is not None:
            restart_timer(setup.question_seconds)
            parts = reader.read(questions.decode(frame))
            restart_timer(0)
            write_frame(pipe, msgspec.msgpack.encode(parts))
    except MemoryError:
        os._exit(MEMORY_STATUS)


class VllmParsers:
    """vLLM's parsers of one run.

    Args:
        setup: Names of the parsers, and the tokenizer.

    Raises:
        Exception: of any class, if a parser does not exist, does not fit the tokenizer, or cannot read whole texts.
    """

    def __init__(self, setup: Setup) -> None:
        os.environ |= {"VLLM_CONFIGURE_LOGGING": "0", "VLLM_NO_USAGE_STATS": "1"}
        # Parsers log a traceback for every call that they cannot read. Here it is an answer like any other.
        logging.disable(logging.CRITICAL)
        warnings.simplefilter("ignore")
        with no_garbage_collection():
            from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
            from vllm.parser import ParserManager
            from vllm.tokenizers import get_tokenizer

        self._make_request = ChatCompletionRequest.model_validate
        self._tokenizer = get_tokenizer(
            setup.tokenizer,
            revision=setup.revision or None,
            trust_remote_code=setup.trust_remote_code,
        )
        self._has_calls = bool(setup.tool_call_parser)
        self._class: Any = ParserManager.get_parser(
            tool_parser_name=setup.tool_call_parser or None,
            reasoning_parser_name=setup.reasoning_parser or None,
            enable_auto_tools=self._has_calls,
            model_name=setup.model,
        )
        for form in (_TRIAL, AnswerForm()):
            request = self._request_of(form)
            self._parser_of(form, request).parse("Hello", request, enable_auto_tools=True)
        self.facts = Facts(
            keeps_special=self._keeps_special(AnswerForm()),
            keeps_special_for_calls=self._keeps_special(_TRIAL),
            **self._marks(),
        )

    def _keeps_special(self, form: AnswerForm) -> bool:
        """Whether a parser needs answers with their special tokens, among which are its marks."""
        request = self._request_of(form)
        parser = self._parser_of(form, request)
        names = ("reasoning_start_str", "reasoning_end_str")
        marks = {getattr(parser.reasoning_parser, name, None) for name in names}
        has_special_marks = bool(marks & set(self._tokenizer.all_special_tokens))
        return has_special_marks or not parser.adjust_request(request).skip_special_tokens

    def _marks(self) -> dict[str, str]:
        form = AnswerForm()
        parser = self._parser_of(form, self._request_of(form)).reasoning_parser
        return {
            "reasoning_start": getattr(parser, "reasoning_start_str", None) or "",
            "reasoning_end": getattr(parser, "reasoning_end_str", None) or "",
        }

    def _request_of(self, form: AnswerForm) -> Any:
        body: dict[str, Any] = {"model": "", "messages": [{"role": "user", "content": ""}]}
        if form.tools:
            body |= {"tools": form.tools, "tool_choice": "auto"}
        if form.template_kwargs:
            body["chat_template_kwargs"] = form.template_kwargs
        return self._make_request(body)

    def _parser_of(self, form: AnswerForm, request: Any) -> Any:
        # Parsers keep state, so each answer has its own, as in vLLM's server.
        return self._class(
            self._tokenizer, request.tools, chat_template_kwargs=form.template_kwargs or {}
        )

    def read(self, question: Question) -> list[Parts]:
        """Return the parts of each answer."""
        requests = [self._request_if_valid(form) for form in question.forms]
        return [
            self._parts_of(whole, question.forms[whole.form], requests[whole.form])
            for whole in question.answers
        ]

    def _request_if_valid(self, form: AnswerForm) -> Any:
        """Return vLLM's request for a form; None if vLLM refuses the form's tools."""
        try:
            return self._request_of(form)
        except ValueError:
            return None

    def _parts_of(self, whole: Whole, form: AnswerForm, request: Any) -> Parts:
        if request is None:
            return Parts(text=whole.text, is_broken=True)
        try:
            parser = self._parser_of(form, request)
            parser.set_prompt_token_ids(whole.prompt_token_ids)
            reasoning, content = parser.extract_reasoning(whole.text, request)
            num_reasoning = parser.count_reasoning_tokens(whole.token_ids) if reasoning else 0
            if reasoning and not num_reasoning:
                num_reasoning = self._count(reasoning, parser.reasoning_parser, whole.token_ids)
            calls, whole_text = None, content or ""
            if self._has_calls and form.tools and form.tool_choice == "auto":
                parser = self._parser_of(form, request)
                _, rest, calls = parser.parse(
                    whole.text,
                    request,
                    enable_auto_tools=True,
                    model_output_token_ids=whole.token_ids,
                )
                content = rest if calls else content
        except MemoryError:
            raise
        except Exception:  # noqa: BLE001 -- of any class: a text that a parser cannot read stays as it is
            return Parts(text=whole.text, is_broken=True)
        return Parts(
            text=content or "",
            whole_text=whole_text if calls else "",
            reasoning=reasoning or None,
            num_reasoning=num_reasoning,
            calls=[(call.name, call.arguments, _own_id(call.id)) for call in calls or ()],
        )

    def _count(self, reasoning: str, parser: Any, token_ids: list[int]) -> int:
        """Return the number of tokens of reasoning whose beginning is not marked, as when the prompt has the mark."""
        end = getattr(parser, "end_token_id", None)
        if end in token_ids:
            return token_ids.index(end)
        return min(len(self._tokenizer.encode(reasoning, add_special_tokens=False)), len(token_ids))


def _own_id(call_id: str | None) -> str:
    """Return the id that the model itself wrote, as Kimi K2 does; empty for one that vLLM has made up."""
    return call_id if call_id and call_id.startswith("functions.") else ""


if __name__ == "__main__":
    main()
