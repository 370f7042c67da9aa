"""The request format `rows`: columns, conversations, ids, places, seeds."""

from __future__ import annotations

import json
from typing import Any

import pytest

from batchinfer.core import codec
from batchinfer.core.errors import ConfigError
from batchinfer.core.records import Sampling
from batchinfer.prompts import Prepared, PromptBuilder, PromptConfig, RawRow
from batchinfer.prompts.from_columns import RowsReader
from batchinfer.prompts.types import Draft


def make(
    row: Any, *, sampling: Sampling | None = None, seed: int | None = None, **options
) -> Prepared:
    data = row if isinstance(row, bytes) else json.dumps(row).encode()
    builder = PromptBuilder(PromptConfig(**options), sampling or Sampling(), seed, None, None)
    return builder.build("part-00000", 0, [RawRow(0, data)])[0]


def chat(*turns: str) -> list[dict[str, str]]:
    names = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}
    return [{"role": names[turn[0]], "content": turn} for turn in turns]


def contents(prepared: Prepared) -> list[str]:
    assert prepared.request is not None, prepared.failure
    return [message["content"] for message in prepared.request.messages]


# ------------------------------------------------------------------ lines


@pytest.mark.parametrize(
    ("line", "code"),
    [
        (b"", "invalid_json"),
        (b"  ", "invalid_json"),
        (b"{", "invalid_json"),
        (b'{"p": nan}', "invalid_json"),
        (b'{"p": "x"} trailing', "invalid_json"),
        (b'{"p": "x", "n": ' + b"[" * 100_000, "invalid_json"),
        (b"[" * 100_000, "invalid_json"),
        (b"[1]", "not_an_object"),
        (b'"text"', "not_an_object"),
        (b"null", "not_an_object"),
        (b'{"p": "a\xff"}', "invalid_text"),
        (b'{"p": "\\ud800"}', "invalid_text"),
        (b'{"p": "x", "other": "\\udc00 y"}', "invalid_text"),
        (b'{"q": "x"}', "missing_column"),
        (b'{"p": null}', "invalid_prompt"),
        (b'{"p": 7}', "invalid_prompt"),
        (b'{"p": [1, -2]}', "invalid_prompt"),
        (b'{"p": [1, true]}', "invalid_prompt"),
        (b'{"p": [4294967296, 2]}', "invalid_prompt"),
        (b'{"p": [1, 100000000000000000000000]}', "invalid_prompt"),
        (b'{"p": ""}', "empty_prompt"),
        (b'{"p": []}', "empty_prompt"),
        (b'{"p": "x", "_row": 5}', "row_mismatch"),
        (b'{"p": "x", "_row": "0"}', "row_mismatch"),
    ],
)
def test_a_bad_line_is_a_failure_with_a_code(line, code):
    prepared = make(line, prompt_column="p")
    assert prepared.failure is not None
    assert prepared.failure.code == code
    assert prepared.failure.message
    assert prepared.request is None


def test_a_bad_line_does_not_touch_its_neighbours():
    builder = PromptBuilder(PromptConfig(prompt_column="p"), Sampling(), None, None, None)
    lines = [b'{"p":"a"}', b"{", b'{"p":"b"}']
    prepared = builder.build("c", 100, [RawRow(i + 5, line) for i, line in enumerate(lines)])
    assert [item.key for item in prepared] == [("c", 5), ("c", 6), ("c", 7)]
    assert [item.row for item in prepared] == [105, 106, 107]
    assert [item.request.text if item.request else None for item in prepared] == ["a", None, "b"]
    assert all(item.request is None or item.request.key == item.key for item in prepared)


def test_unusual_text_goes_through_unchanged():
    text = "a\u2028b\u0085c\x00d\u200de😀"
    assert make({"p": text}, prompt_column="p").request.text == text


def test_a_text_of_ten_megabytes_goes_through():
    text = "x" * 10_000_000
    assert make({"p": text}, prompt_column="p").request.text == text


@pytest.mark.parametrize("column", ['say "hi"', "a\\b", "two\nlines", "\x1b[2J"])
def test_a_column_may_have_any_name(column):
    line = json.dumps({column: "hello"}).encode()
    assert make(line, prompt_column=column, keep=[column]).request.text == "hello"


def test_a_missing_column_is_named_with_its_nearest_match():
    failure = make({"promt": "x", "_row": 0}, prompt_column="prompt").failure
    assert failure.code == "missing_column"
    assert "did you mean 'promt'?" in failure.message


def test_a_rows_own_number_is_checked_against_its_place():
    builder = PromptBuilder(PromptConfig(prompt_column="p"), Sampling(), None, None, None)
    good = builder.build("c", 40, [RawRow(2, b'{"p":"x","_row":42}')])[0]
    bad = builder.build("c", 40, [RawRow(2, b'{"p":"x","_row":41}')])[0]
    assert good.request is not None
    assert bad.failure.code == "row_mismatch"


def test_ids_come_from_the_chunk_the_id_column_or_the_row_number():
    assert make({"p": "x", "_id": "abc"}, prompt_column="p").id == "abc"
    assert make({"p": "x"}, prompt_column="p").id == "0"
    assert make({"p": "x", "k": 7, "_id": "abc"}, prompt_column="p", id_column="k").id == "7"
    assert make({"p": "x", "_id": {"$oid": "1"}}, prompt_column="p").id == '{"$oid":"1"}'
    assert make({"p": "x"}, prompt_column="p", id_column="p", keep=["p"]).id == "x"


def test_a_failed_row_keeps_its_id_and_columns():
    prepared = make({"_id": "abc", "k": 1, "p": ""}, prompt_column="p", keep=["k"])
    assert prepared.failure is not None
    assert (prepared.id, prepared.source) == ("abc", {"k": 1})


def test_kept_columns_are_repeated_exactly():
    row = {"p": "x", "big": 2**70, "k": [1, {"a": None}], "_row": 0, "_id": "i"}
    assert make(row, prompt_column="p", keep=["k", "p", "none"]).source == {
        "k": row["k"],
        "p": "x",
    }
    assert make(row, prompt_column="p", keep=["*"]).source == {
        name: row[name] for name in ("p", "big", "k")
    }


def test_a_token_id_of_more_than_32_bits_is_named():
    failure = make({"p": [1, 2**32]}, prompt_column="p").failure
    assert "holds 4294967296, expected token ids below 4294967296" in failure.message


def test_token_ids_are_a_prompt():
    assert make({"p": [5, 6]}, prompt_column="p").request.token_ids == [5, 6]


# ------------------------------------------------------------------ conversations


@pytest.mark.parametrize(
    "value",
    [
        chat("s", "u1"),
        [{"from": "system", "value": "s"}, {"from": "human", "value": "u1"}],
        [{"from": "System", "value": "s"}, {"from": "Human", "value": "u1", "weight": 1}],
        json.dumps(chat("s", "u1")),
        {"messages": chat("s", "u1")},
        {"conversations": chat("s", "u1")},
        {"role": ["system", "user"], "content": ["s", "u1"]},
        {"from": ["system", "human"], "value": ["s", "u1"]},
        [
            {"role": "system", "content": [{"type": "text", "text": "s"}], "id": 1},
            {"role": "user", "content": ["u1"], "language": "English"},
        ],
    ],
)
def test_every_known_shape_of_a_conversation_is_read(value):
    prepared = make({"m": value}, messages_column="m")
    assert prepared.request.messages == chat("s", "u1")


def test_a_plain_text_is_one_user_message():
    assert make({"m": "hello"}, messages_column="m").request.messages == [
        {"role": "user", "content": "hello"}
    ]
    assert contents(make({"m": "[not json"}, messages_column="m")) == ["[not json"]
    assert contents(make({"m": '{"a": 1}'}, messages_column="m")) == ['{"a": 1}']


def test_text_parts_are_joined_by_line_breaks():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert contents(make({"m": [{"role": "user", "content": parts}]}, messages_column="m")) == [
        "a\nb"
    ]


def test_fields_that_templates_know_are_kept_and_others_dropped():
    message = {"role": "user", "content": "x", "name": "Ada", "language": "en", "tool_calls": None}
    assert make({"m": [message]}, messages_column="m").request.messages == [
        {"role": "user", "content": "x", "name": "Ada"}
    ]


@pytest.mark.parametrize(
    ("value", "code"),
    [
        (7, "invalid_messages"),
        (None, "invalid_messages"),
        ([7], "invalid_messages"),
        ([{"role": "user", "content": 7}], "invalid_messages"),
        ([], "empty_conversation"),
        ("", "empty_conversation"),
        ("[]", "empty_conversation"),
        (chat("s"), "empty_conversation"),
        (chat("a1"), "empty_conversation"),
        ([{"role": "user", "content": " \n"}], "empty_conversation"),
        ([{"role": "user", "content": ""}], "empty_conversation"),
        ([{"role": "user"}], "missing_content"),
        ([{"role": "user", "content": None}], "missing_content"),
        ([{"content": "x"}], "unknown_role"),
        ([{"from": "martian", "value": "x"}], "unknown_role"),
        ([{"from": None, "value": "x"}], "unknown_role"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
            "media_mismatch",
        ),
        (
            [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}],
            "unsupported_content",
        ),
    ],
)
def test_a_bad_conversation_is_a_failure_with_a_code(value, code):
    prepared = make({"m": value}, messages_column="m", turns="all")
    assert prepared.failure is not None
    assert prepared.failure.code == code


def test_a_message_that_only_calls_tools_needs_no_content():
    messages = [
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]},
        {"role": "tool", "content": "t", "tool_call_id": "1"},
    ]
    assert contents(make({"m": messages}, messages_column="m", turns="all")) == ["u", None, "t"]


@pytest.mark.parametrize(
    ("turns", "expected"),
    [
        ("first", ["s", "u1"]),
        ("1", ["s", "u1"]),
        ("2", ["s", "u1", "a1", "u2"]),
        ("9", ["s", "u1", "a1", "u2"]),
        ("all", ["s", "u1", "a1", "u2"]),
    ],
)
def test_turns_choose_how_much_of_a_conversation_is_sent(turns, expected):
    value = chat("s", "u1", "a1", "u2", "a2", "a3")
    assert contents(make({"m": value}, messages_column="m", turns=turns)) == expected


def test_what_follows_the_chosen_turn_is_not_even_read():
    value = [*chat("u1"), {"role": "assistant"}]
    assert contents(make({"m": value}, messages_column="m")) == ["u1"]


def test_an_answer_in_the_row_is_continued():
    value = chat("u1", "a1", "u2", "a2")
    assert contents(make({"m": value}, messages_column="m", continue_final=True)) == ["u1", "a1"]
    assert contents(make({"m": value}, messages_column="m", continue_final=True, turns="2")) == [
        "u1",
        "a1",
        "u2",
        "a2",
    ]
    assert contents(make({"m": value}, messages_column="m", continue_final=True, turns="all")) == [
        "u1",
        "a1",
        "u2",
        "a2",
    ]
    prepared = make({"m": chat("u1")}, messages_column="m", continue_final=True)
    assert prepared.failure.code == "nothing_to_continue"


def test_an_answers_beginning_can_be_given():
    prepared = make({"m": chat("u1")}, messages_column="m", continue_final="Sure")
    assert prepared.request.messages[-1] == {"role": "assistant", "content": "Sure"}
    assert make({"p": "x:"}, prompt_column="p", continue_final=" A").request.text == "x: A"


def test_a_system_prompt_is_added_or_replaces_the_conversations_own():
    options = {"messages_column": "m", "system_prompt": "new"}
    assert contents(make({"m": chat("u1")}, **options)) == ["new", "u1"]
    assert contents(make({"m": chat("s", "u1")}, **options)) == ["new", "u1"]


def test_examples_stand_between_system_message_and_conversation():
    prepared = make(
        {"m": chat("s", "u1")}, messages_column="m", few_shot=[{"m": chat("s2", "u0", "a0")}]
    )
    assert contents(prepared) == ["s", "u0", "a0", "u1"]


def test_a_prompt_column_can_be_sent_as_a_chat():
    prepared = make({"p": "x"}, prompt_column="p", as_chat=True, system_prompt="s")
    assert contents(prepared) == ["s", "x"]


def test_rows_are_not_changed_by_what_is_added_to_them():
    builder = PromptBuilder(
        PromptConfig(messages_column="m", system_prompt="s", keep=["m"]),
        Sampling(),
        None,
        None,
        None,
    )
    prepared = builder.build("c", 0, [RawRow(0, json.dumps({"m": chat("u")}).encode())])[0]
    assert prepared.source == {"m": chat("u")}


# ------------------------------------------------------------------ sampling and seeds


def test_rows_share_the_runs_sampling_where_no_seed_is_needed():
    builder = PromptBuilder(
        PromptConfig(prompt_column="p"), Sampling(temperature=0.0), 7, None, None
    )
    first, second = builder.build("c", 0, [RawRow(0, b'{"p":"a"}'), RawRow(1, b'{"p":"b"}')])
    assert first.request.sampling is second.request.sampling
    assert first.request.sampling.seed is None


@pytest.mark.parametrize("temperature", [None, 0.7])
def test_the_seed_depends_on_the_run_and_the_rows_key_alone(temperature):
    builder = PromptBuilder(
        PromptConfig(prompt_column="p"), Sampling(temperature=temperature), 7, None, None
    )
    rows = [RawRow(index, b'{"p":"a"}') for index in range(4)]
    together = [item.request.sampling.seed for item in builder.build("c", 0, rows)]
    alone = [builder.build("c", 900, [row])[0].request.sampling.seed for row in reversed(rows)]
    assert together == alone[::-1] == [codec.row_seed(7, "c", index) for index in range(4)]
    assert len(set(together)) == 4


def test_a_seed_of_the_samplings_own_stays():
    assert (
        make({"p": "x"}, prompt_column="p", sampling=Sampling(seed=3), seed=7).request.sampling.seed
        == 3
    )
    assert make({"p": "x"}, prompt_column="p").request.sampling.seed is None


# ------------------------------------------------------------------ configuration


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "no prompt option"),
        ({"messages_column": "m", "prompt_column": "p"}, "--messages-column and --prompt-column"),
        ({"prompt_column": "p", "request_format": "row"}, "did you mean 'rows'"),
        ({"prompt_column": "p", "truncate_prompt": "lefft"}, "did you mean 'left'"),
        ({"messages_column": "m", "turns": "some"}, "--turns some"),
        ({"messages_column": "m", "turns": "0"}, "--turns 0"),
        ({"messages_column": "m", "as_chat": True}, "--as-chat"),
        ({"prompt_column": "p", "system_prompt": "s"}, "--system-prompt"),
        ({"messages_column": "m", "system_prompt": "\udc80"}, "no text"),
        ({"prompt_column": "p", "continue_final": True}, "--continue-final"),
        ({"prompt_column": "p", "few_shot": [{"p": "x"}]}, "--few-shot"),
        ({"messages_column": "m", "few_shot": [{"n": 1}]}, "example 0"),
        ({"template_name": "alpcaa"}, "did you mean 'alpaca'"),
        ({"prompt_template": "{% for %}"}, "--prompt-template"),
        ({"messages_column": "m", "chat_template": "{% if %}"}, "--chat-template"),
        ({"messages_column": "m", "chat_template": "{{ nothing.at.all }}"}, "--chat-template"),
        ({"request_format": "completions", "prompt_column": "p"}, "--prompt-column"),
        ({"request_format": "openai-batch", "system_prompt": "s"}, "--system-prompt"),
    ],
)
def test_options_that_cannot_work_are_refused_with_a_hint(options, message):
    with pytest.raises(ConfigError) as caught:
        PromptBuilder(PromptConfig(**options), Sampling(), None, None, None)
    assert message in caught.value.message
    assert caught.value.exit_status == 2


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(n=3, best_of=2),
        Sampling(n=0),
        Sampling(n=1000),
        Sampling(logprobs=21),
        Sampling(max_tokens=0),
        Sampling(max_tokens=4, min_tokens=5),
    ],
)
def test_sampling_options_that_contradict_each_other_are_refused(sampling):
    with pytest.raises(ConfigError, match="sampling options"):
        PromptBuilder(PromptConfig(prompt_column="p"), sampling, None, None, None)


def test_a_fault_of_our_own_fails_the_row_and_not_the_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(text: str, _subject: str) -> Any:
        if text == "bad":
            raise ZeroDivisionError("oh")
        return [1]

    monkeypatch.setattr(
        "batchinfer.prompts.from_columns.token_ids", lambda value, subject: fail(value[0], subject)
    )
    builder = PromptBuilder(PromptConfig(prompt_column="p"), Sampling(), None, None, None)
    lines = [b'{"p": ["good"]}', b'{"p": ["bad"]}', b'{"p": ["good"]}']
    rows = builder.build("part-00000", 0, [RawRow(i, line) for i, line in enumerate(lines)])
    assert [row.failure is None for row in rows] == [True, False, True]
    assert rows[1].failure is not None
    assert rows[1].failure.code == "internal_error"
    assert "ZeroDivisionError: oh (test_prompts_rows.py:" in rows[1].failure.message


def test_a_long_end_of_end_marks_is_removed_at_once() -> None:
    # Cut off mark by mark, it would take an hour.
    reader = RowsReader(PromptConfig(prompt_column="p"), eos_token="</s>")
    draft = Draft(0)
    reader._fill_text(draft, "x</s>y" + "</s>" * 3_000_000)
    assert draft.text == "x</s>y"
