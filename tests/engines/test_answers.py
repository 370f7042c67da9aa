"""Answers that are taken apart beside the engine: forced calls, and what vLLM's parsers find."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from batchinfer.core.errors import EngineDied
from batchinfer.core.records import AnswerForm, Choice, Completion, EngineInfo, Request, Sampling
from batchinfer.engines import answers, parser_process
from batchinfer.engines.answers import AnswerReader
from batchinfer.engines.config import EngineConfig
from batchinfer.engines.parser_process import Facts, ParserProcess, Parts, Setup
from engine_contract import ListSource, drive

ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
AUTO = AnswerForm(tools=[ADD])


class Never:
    def is_set(self) -> bool:
        return False


class Speaker:
    """An engine that answers each request with its prompt. It ends with `error` after the first answers."""

    def __init__(self, error: Exception | None = None, finish_reason: str = "stop") -> None:
        self.taken: list[Request] = []
        self._error = error
        self._finish_reason = finish_reason

    def open(self, stop: Any) -> EngineInfo:
        raise NotImplementedError

    def generate(self, source, stop):
        while (requests := source.take(4)) is not None:
            self.taken += requests
            yield [
                Completion(
                    key=each.key,
                    choices=[
                        Choice(
                            index=0,
                            text=each.text or "",
                            finish_reason=self._finish_reason,
                            token_ids=[1, 2] if each.returns_token_ids else None,
                        )
                    ],
                    completion_tokens=2,
                )
                for each in requests
            ]
            if self._error is not None:
                raise self._error

    def take_pieces(self):
        return []

    def stats(self):
        raise NotImplementedError

    def close(self) -> None:
        pass


class FakeParsers:
    """Takes "<t>…</t>" out as reasoning, and "CALL name arguments" out as a call. Waits for `gate`."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.sizes: list[int] = []

    def start(self) -> Facts:
        return Facts(keeps_special=False, keeps_special_for_calls=True)

    def read(self, forms, wholes):
        self.gate.wait(20)
        self.sizes.append(len(wholes))
        return [self._parts(each.text) for each in wholes]

    def _parts(self, text: str) -> Parts:
        head, _, rest = text.rpartition("</t>")
        before, call, words = rest.partition("CALL ")
        if not call:
            return Parts(text=rest, reasoning=head or None, num_reasoning=len(head))
        found = [(*each.split(" ", 1), "") for each in words.split(";")]
        return Parts(text=before, whole_text=rest, reasoning=head or None, calls=found)  # type: ignore[arg-type]


@pytest.fixture
def parsers(monkeypatch: pytest.MonkeyPatch) -> FakeParsers:
    found = FakeParsers()
    monkeypatch.setattr(answers, "parsers_of", lambda _: found)
    return found


BOTH = EngineConfig(model="m", tool_call_parser="hermes", reasoning_parser="qwen3")


def ask(
    *texts: str, form: AnswerForm | None = AUTO, config: EngineConfig = BOTH, **speaker: Any
) -> list[Completion]:
    requests = [
        Request(key=("c", index), text=text, sampling=Sampling(), form=form)
        for index, text in enumerate(texts)
    ]
    found = drive(AnswerReader(Speaker(**speaker), config), ListSource(requests))
    return [found[each.key] for each in requests]


def call(arguments: str, name: str = "add", **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}, **more}


# ------------------------------------------------------------------ forced calls, without a parser

NAMED = AnswerForm(tools=[ADD], tool_choice="named", tool_name="add")
REQUIRED = AnswerForm(tools=[ADD], tool_choice="required")
PLAIN = EngineConfig(model="m")


def test_a_named_tools_answer_is_its_arguments():
    [found] = ask(' {"a": 1} ', form=NAMED, config=PLAIN)
    [choice] = found.choices
    assert (choice.text, choice.tool_calls) == ("", [call('{"a": 1}')])
    assert choice.finish_reason == "stop", "as in the API"
    assert found.reasoning_tokens is None


def test_a_required_answer_is_a_list_of_calls_whose_numbers_stay_as_they_are():
    text = '[{"name":"add","parameters":{"a":123456789012345678901234567890,"b":1.50}}]'
    [choice] = ask(text, form=REQUIRED, config=PLAIN)[0].choices
    assert choice.tool_calls == [call('{"a":123456789012345678901234567890,"b":1.50}')]
    assert (choice.text, choice.finish_reason) == ("", "tool_calls")


@pytest.mark.parametrize("form", [NAMED, REQUIRED])
@pytest.mark.parametrize("text", ["", "{", "[", "3", '["a"]', '[{"name":"add"}]', "[]", "[" * 5000])
def test_a_forced_answer_that_is_no_call_keeps_its_text(form, text):
    [choice] = ask(text, form=form, config=PLAIN, finish_reason="length")[0].choices
    assert (choice.text, choice.tool_calls, choice.finish_reason) == (text, None, "length")


def test_answers_without_a_form_are_not_touched(parsers):
    [found] = ask("a</t>CALL add {}", form=None)
    assert found.choices[0].text == "a</t>CALL add {}"
    assert not parsers.sizes


# ------------------------------------------------------------------ what parsers find


@pytest.mark.usefixtures("parsers")
def test_reasoning_and_calls_leave_the_text():
    [found] = ask("hm</t>ok CALL add {}")
    [choice] = found.choices
    assert (choice.reasoning, choice.text) == ("hm", "ok ")
    assert choice.tool_calls == [call("{}")]
    assert choice.finish_reason == "tool_calls"
    assert choice.token_ids is None, "nobody asked for them"
    assert found.reasoning_tokens == 0
    assert ask("hm</t>4")[0].reasoning_tokens == 2


@pytest.mark.usefixtures("parsers")
def test_a_call_of_a_tool_that_was_not_offered_is_marked():
    [choice] = ask("CALL sub {};add {}")[0].choices
    assert choice.tool_calls == [call("{}", "sub", offered=False), call("{}")]


@pytest.mark.usefixtures("parsers")
@pytest.mark.parametrize("arguments", ["{", "[]", "x"])
def test_a_call_whose_arguments_are_no_object_stays_text(arguments):
    text = f"hm</t>so CALL add {{}};add {arguments}"
    [choice] = ask(text)[0].choices
    assert (choice.text, choice.tool_calls) == (text.removeprefix("hm</t>"), None)
    assert (choice.reasoning, choice.finish_reason) == ("hm", "stop")


@pytest.mark.usefixtures("parsers")
def test_a_call_in_an_answer_that_was_cut_off_stays_text():
    [choice] = ask("CALL add {}", finish_reason="length")[0].choices
    assert (choice.text, choice.tool_calls, choice.finish_reason) == ("CALL add {}", None, "length")


@pytest.mark.usefixtures("parsers")
def test_a_request_may_have_one_call_and_no_reasoning():
    form = AnswerForm(tools=[ADD], is_parallel=False, hides_reasoning=True)
    [found] = ask("hm</t>CALL add {};add {}", form=form)
    assert found.choices[0].tool_calls == [call("{}")]
    assert found.choices[0].reasoning is None


@pytest.mark.usefixtures("parsers")
def test_a_forced_call_is_found_behind_reasoning_and_without_any():
    [behind] = ask('hm</t>{"a":1}', form=NAMED)
    assert behind.choices[0].reasoning == "hm"
    assert behind.choices[0].tool_calls == [call('{"a":1}')]
    [whole] = ask('{"a":"</t>"}', form=NAMED)
    assert whole.choices[0].tool_calls == [call('{"a":"</t>"}')]
    assert whole.choices[0].reasoning is None


@pytest.mark.usefixtures("parsers")
def test_the_engine_gets_no_tools_and_keeps_the_marks_of_calls():
    speaker = Speaker()
    source = ListSource([Request(key=("c", 0), text="x", sampling=Sampling(), form=AUTO)])
    drive(AnswerReader(speaker, BOTH), source)
    [taken] = speaker.taken
    assert taken.form is None
    assert taken.returns_token_ids
    assert taken.sampling.skip_special_tokens is False


def test_the_engine_goes_on_while_answers_wait_for_the_parsers(parsers):
    parsers.gate.clear()
    texts = [f"a</t>{index}" for index in range(40)]
    speaker = Speaker()
    requests = [
        Request(key=("c", index), text=text, sampling=Sampling(), form=AUTO)
        for index, text in enumerate(texts)
    ]
    found: list[Completion] = []
    for batch in AnswerReader(speaker, BOTH).generate(ListSource(requests), Never()):
        found += batch
        if len(speaker.taken) == 40:
            assert found or not parsers.gate.is_set()
            parsers.gate.set()
    assert sorted(each.key[1] for each in found) == list(range(40))
    assert max(parsers.sizes) > 1, "they read what has gathered at once"


@pytest.mark.usefixtures("parsers")
def test_answers_that_were_complete_when_the_engine_ended_are_not_lost():
    source = ListSource([Request(key=("c", 0), text="a</t>b", sampling=Sampling(), form=AUTO)])
    reader = AnswerReader(Speaker(EngineDied("gone", in_flight=[])), BOTH)
    found: list[Completion] = []
    with pytest.raises(EngineDied):
        found.extend(one for batch in reader.generate(source, Never()) for one in batch)
    assert [each.choices[0].text for each in found] == ["b"]


def test_answers_that_cannot_be_given_to_the_parsers_keep_their_text(parsers, monkeypatch, caplog):
    """The thread that gives them goes on, too; else they would wait for ever."""

    def fail(*_):
        raise OverflowError("too large")

    read = parsers.read
    monkeypatch.setattr(parsers, "read", fail)
    assert [each.choices[0].text for each in ask("a</t>b")] == ["a</t>b"]
    assert "answers keep their text" in caplog.text
    monkeypatch.setattr(parsers, "read", read)
    assert [each.choices[0].text for each in ask("a</t>b")] == ["b"]


# ------------------------------------------------------------------ the process


def test_tools_with_integers_of_any_size_reach_the_parsers(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    process = ParserProcess(Setup(model="m", tokenizer="t", tool_call_parser="x"))
    process._process._module = "parser_that_dies"
    schema = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 2**70}}}
    form = AnswerForm(tools=[{"type": "function", "function": {"name": "f", "parameters": schema}}])
    [found] = process.read([form], [parser_process.Whole(form=0, text="a")])
    assert (found.text, found.is_broken) == ("A", False)
    process.stop()


def test_a_process_that_ends_with_an_answer_costs_this_answer_its_parts(caplog, monkeypatch):
    """One answer of three ends the process; the others are asked for again, one by one."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    process = ParserProcess(Setup(model="m", tokenizer="t", tool_call_parser="x"))
    process._process._module = "parser_that_dies"
    found = process.read(
        [AUTO], [parser_process.Whole(form=0, text=text) for text in ("a", "DIE", "b")]
    )
    assert [(each.text, each.is_broken) for each in found] == [
        ("A", False),
        ("DIE", True),
        ("B", False),
    ]
    assert "an answer keeps its text" in caplog.text
    process.stop()
