"""Output formats against the schemas in docs/format.md and the types of the `openai` package."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest
from openai.types import Completion as OpenAICompletion
from openai.types.chat import ChatCompletion

from batchinfer.check import command as check_command
from batchinfer.core.errors import ConfigError, InputError
from batchinfer.core.records import Choice, Completion, Failure, Sampling, TokenLogprob
from batchinfer.formats import FORMATS, OutputFormat, OutputLine, encoder_for, read_line
from batchinfer.formats.arrow_lines import can_read
from batchinfer.formats.columns import OutputBlock, shape_of
from batchinfer.formats.lines import OutputChoice
from batchinfer.prompts import (
    REQUEST_FORMATS,
    Code,
    Prepared,
    PromptBuilder,
    PromptConfig,
    RawRow,
)
from batchinfer.worker import command as worker_command
from making import make_job, run_worker_here
from samples import SCHEMAS

DOCS = (Path(__file__).resolve().parents[2] / "docs" / "format.md").read_text()
CHAT_LINE = {
    "custom_id": "r1",
    "method": "POST",
    "url": "/v1/chat/completions",
    "body": {"messages": [{"role": "user", "content": "hi"}], "logprobs": True, "top_logprobs": 1},
}
COMPLETION_LINE = {
    "custom_id": "r2",
    "method": "POST",
    "url": "/v1/completions",
    "body": {"prompt": "x", "logprobs": 1},
}
REQUEST = {"prompt": "ab cd", "max_tokens": 4, "engine": "gpt-j-6b"}
POSITIONS = [
    TokenLogprob(token=" north", logprob=-0.5, token_id=5, top=[(" north", -0.5), (" so", -2.0)]),
    TokenLogprob(token=" é", logprob=-math.inf, token_id=6, top=[(" e", -0.1), (" é", -math.inf)]),
]


def prepare(row: dict[str, Any], *, chunk: str = "c", **options: Any) -> Prepared:
    config = PromptConfig(**options)
    needs_prompt = FORMATS[config.output_format].repeats_request
    builder = PromptBuilder(config, Sampling(), None, None, None, needs_prompt=needs_prompt)
    return builder.build(chunk, 0, [RawRow(0, json.dumps(row).encode())])[0]


def answer(prepared: Prepared, *choices: Choice, **fields: Any) -> Completion:
    if not choices:
        choices = (
            Choice(
                index=0, text=" north é", finish_reason="length", logprobs=POSITIONS, num_tokens=2
            ),
        )
    return Completion(
        key=prepared.key,
        choices=list(choices),
        prompt_tokens=7,
        cached_tokens=3,
        completion_tokens=2,
        queue_seconds=0.25,
        generation_seconds=1.5,
        **fields,
    )


def encode(
    prepared: Prepared, completion: Completion | None, output_format: str, **options: Any
) -> Any:
    config = PromptConfig(output_format=output_format, **options)
    data = encoder_for(config, model="demo", created=1700000000).encode(prepared, completion)
    assert b"\n" not in data
    line = json.loads(data)
    jsonschema.validate(line, SCHEMAS[f"output-{output_format}"])
    return line


# ------------------------------------------------------------------ docs


def test_the_docs_have_a_schema_for_every_output_format():
    assert {f"output-{name}" for name in FORMATS} <= set(SCHEMAS)
    for schema in SCHEMAS.values():
        jsonschema.Draft202012Validator.check_schema(schema)


def test_the_docs_list_every_code_with_its_explanation():
    for code in Code:
        assert f"| `{code.value}` | {code.explanation} |" in DOCS


def test_the_docs_own_request_line_fits_its_schema():
    jsonschema.validate(CHAT_LINE, SCHEMAS["request-openai-batch"])


@pytest.mark.parametrize(
    ("option", "table"), [("output_format", FORMATS), ("request_format", REQUEST_FORMATS)]
)
def test_the_worker_and_check_offer_the_formats_of_the_table(option, table):
    for module in (worker_command, check_command):
        choices = {parameter.name: parameter.type for parameter in module.command.params}
        assert list(choices[option].choices) == list(table)


def test_a_worker_repeats_the_prompts_of_plain_rows_where_the_format_repeats_requests(tmp_path):
    job, run = str(tmp_path / "job"), str(tmp_path / "run")
    make_job(job, rows=3, per_chunk=3, make_row=lambda index: {"prompt": f"say {index}"})
    run_worker_here(job, run, "--output-format", "completions")
    lines = (tmp_path / "run" / "outputs" / "part-00000.jsonl").read_bytes().splitlines()
    assert [json.loads(line)["request"] for line in lines] == [
        {"prompt": f"say {index}"} for index in range(3)
    ]


def test_an_unknown_format_is_refused_with_its_nearest_match():
    with pytest.raises(ConfigError, match="did you mean 'native'"):
        encoder_for(PromptConfig(output_format="nativ"))


def test_a_format_in_the_table_is_known_to_writers_and_readers(monkeypatch):
    class Line(msgspec.Struct):
        answer: str | None

    class OneWord:
        def encode(self, prepared, completion=None):
            return msgspec.json.encode(
                Line(None if completion is None else completion.choices[0].text)
            )

    def convert(line):
        status = "error" if line.answer is None else "ok"
        return OutputLine(None, None, status, [OutputChoice(text=line.answer)])

    word = OutputFormat(
        name="word",
        make_encoder=lambda _config, _model, _created: OneWord(),
        decoder=msgspec.json.Decoder(Line),
        convert=convert,
    )
    monkeypatch.setitem(FORMATS, "word", word)
    prepared = prepare({"p": "x"}, prompt_column="p", output_format="word")
    encoder = encoder_for(PromptConfig(output_format="word"))
    data = encoder.encode(prepared, answer(prepared, Choice(index=0, text="a")))
    assert read_line(data, "word").texts == read_line(data).texts == ["a"]
    shape = shape_of({"prompt": {"output_format": "word"}}, explode=False)
    assert not can_read(shape)
    columns, _ = OutputBlock(data + b"\n", shape, 7).columns()
    assert (columns["row"], columns["id"], columns["text"]) == ([7], ["7"], ["a"])


# ------------------------------------------------------------------ native


def test_a_native_line_has_the_documented_fields():
    prepared = prepare({"p": "x", "k": 1}, prompt_column="p", keep=["k"], keep_prompt=True)
    line = encode(prepared, answer(prepared), "native")
    assert line == {
        "_row": 0,
        "_id": "0",
        "status": "ok",
        "choices": [
            {
                "index": 0,
                "text": " north é",
                "finish_reason": "length",
                "logprobs": [
                    {
                        "token": " north",
                        "logprob": -0.5,
                        "token_id": 5,
                        "top": [
                            {"token": " north", "logprob": -0.5},
                            {"token": " so", "logprob": -2.0},
                        ],
                    },
                    {
                        "token": " é",
                        "logprob": -9999.0,
                        "token_id": 6,
                        "top": [
                            {"token": " e", "logprob": -0.1},
                            {"token": " é", "logprob": -9999.0},
                        ],
                    },
                ],
            }
        ],
        "usage": {"prompt_tokens": 7, "completion_tokens": 2, "cached_tokens": 3},
        "timing": {"queue_seconds": 0.25, "generation_seconds": 1.5},
        "error": None,
        "prompt": "x",
        "source": {"k": 1},
    }


def test_several_choices_say_how_many_tokens_each_has():
    prepared = prepare({"p": "x"}, prompt_column="p")
    choices = [
        Choice(index=0, text="a", num_tokens=1),
        Choice(index=1, text="b", num_tokens=2, stop_reason="\n"),
    ]
    line = encode(prepared, answer(prepared, *choices), "native")
    assert line["choices"] == [
        {"index": 0, "text": "a", "finish_reason": "stop", "num_tokens": 1},
        {"index": 1, "text": "b", "finish_reason": "stop", "num_tokens": 2, "stop_reason": "\n"},
    ]


def test_prompt_logprobs_are_written_where_they_were_asked_for():
    prepared = prepare({"p": "x"}, prompt_column="p")
    completion = answer(prepared, prompt_logprobs=[None, POSITIONS[0]])
    line = encode(prepared, completion, "native")
    assert line["prompt_logprobs"][0] is None
    assert line["prompt_logprobs"][1]["token"] == " north"


RANKED = TokenLogprob(
    token=" a",
    logprob=-3.0,
    token_id=9,
    top=[(" b", -0.5), (" c", -math.inf)],
    rank=5,
    top_ids=[4, 7],
)
OF_PROMPT = {
    "prompt_logprobs": [
        None,
        {
            "9": {"logprob": -3.0, "rank": 5, "decoded_token": " a"},
            "4": {"logprob": -0.5, "rank": 1, "decoded_token": " b"},
            "7": {"logprob": -9999.0, "rank": 2, "decoded_token": " c"},
        },
    ],
    "prompt_token_ids": [8, 9],
}


@pytest.mark.parametrize(
    ("line", "output_format", "find"),
    [
        (CHAT_LINE, "openai-batch", lambda line: line["response"]["body"]),
        (COMPLETION_LINE, "openai-batch", lambda line: line["response"]["body"]["choices"][0]),
        (COMPLETION_LINE["body"], "completions", lambda line: line["result"]["choices"][0]),
    ],
)
def test_what_vllm_adds_about_the_prompt_is_where_its_server_writes_it(line, output_format, find):
    request_format = "completions" if output_format == "completions" else "openai-batch"
    prepared = prepare(line, request_format=request_format, output_format=output_format)
    choice = Choice(index=0, text="x", stop_reason="y", token_ids=[3])
    given = {"prompt_logprobs": [None, RANKED], "prompt_token_ids": [8, 9]}
    written = encode(prepared, answer(prepared, choice, **given), output_format)
    holder = find(written)
    assert {name: holder[name] for name in OF_PROMPT} == OF_PROMPT
    plain = encode(prepared, answer(prepared), output_format)
    assert not set(find(plain)) & {*OF_PROMPT, "token_ids", "stop_reason"}


def test_token_ids_are_in_native_lines_that_asked_for_them():
    prepared = prepare({"text": "x"}, prompt_column="text")
    choice = Choice(index=0, text="x", token_ids=[3, 4])
    line = encode(prepared, answer(prepared, choice, prompt_token_ids=[8, 9]), "native")
    assert (line["prompt_token_ids"], line["choices"][0]["token_ids"]) == ([8, 9], [3, 4])


def test_an_error_line_keeps_id_and_columns():
    prepared = prepare({"_id": "abc", "k": 1, "p": ""}, prompt_column="p", keep=["k"])
    line = encode(prepared, None, "native")
    assert line == {
        "_row": 0,
        "_id": "abc",
        "status": "error",
        "choices": [],
        "usage": {"prompt_tokens": 0, "completion_tokens": 0, "cached_tokens": 0},
        "error": {"code": "empty_prompt", "message": "the prompt is empty, expected text"},
        "source": {"k": 1},
    }


def test_without_timing_equal_answers_are_equal_bytes():
    prepared = prepare({"p": "x"}, prompt_column="p")
    encoder = encoder_for(PromptConfig(has_timing=False))
    slow = Completion(key=prepared.key, choices=[Choice(index=0, text="a")], generation_seconds=2.0)
    fast = Completion(key=prepared.key, choices=[Choice(index=0, text="a")], generation_seconds=1.0)
    assert encoder.encode(prepared, slow) == encoder.encode(prepared, fast)


@pytest.mark.parametrize("output_format", FORMATS)
def test_strip_removes_white_space_around_answers(output_format):
    prepared = prepare({"p": "x"}, prompt_column="p")
    completion = answer(prepared, Choice(index=0, text="\n a b \n"))
    line = encode(prepared, completion, output_format, strip=True)
    assert read_line(json.dumps(line).encode()).texts == ["a b"]


@pytest.mark.parametrize("output_format", FORMATS)
def test_a_lone_surrogate_from_an_engine_does_not_cost_the_row(output_format):
    prepared = prepare({"p": "x"}, prompt_column="p")
    completion = answer(prepared, Choice(index=0, text="a\ud800b\u2028"))
    line = encode(prepared, completion, output_format)
    assert read_line(json.dumps(line).encode()).texts == ["a\ufffdb\u2028"]


# ------------------------------------------------------------------ OpenAI batch


def test_a_chat_line_is_a_chat_completion_of_the_openai_package():
    prepared = prepare(CHAT_LINE, request_format="openai-batch")
    line = encode(prepared, answer(prepared), "openai-batch")
    assert line["custom_id"] == "r1"
    assert line["error"] is None
    assert line["response"]["status_code"] == 200
    body = ChatCompletion.model_validate(line["response"]["body"], strict=True)
    assert body.choices[0].message.content == " north é"
    assert body.choices[0].finish_reason == "length"
    assert body.choices[0].logprobs.content[1].bytes == list(" é".encode())
    assert body.choices[0].logprobs.content[0].top_logprobs[1].token == " so"
    assert body.usage.total_tokens == 9
    assert body.usage.prompt_tokens_details.cached_tokens == 3
    assert (body.model, body.created) == ("demo", 1700000000)


def test_a_completion_line_is_a_completion_of_the_openai_package():
    prepared = prepare(COMPLETION_LINE, request_format="openai-batch")
    line = encode(prepared, answer(prepared), "openai-batch")
    body = OpenAICompletion.model_validate(line["response"]["body"], strict=True)
    assert body.choices[0].text == " north é"
    assert body.choices[0].logprobs.text_offset == [0, 6]


@pytest.mark.parametrize(
    ("options", "row", "kind"),
    [
        ({"messages_column": "m"}, {"m": "hi"}, ChatCompletion),
        ({"prompt_column": "m"}, {"m": "hi"}, OpenAICompletion),
    ],
)
def test_plain_rows_can_be_answered_in_the_batch_form(options, row, kind):
    prepared = prepare(row, **options)
    line = encode(prepared, answer(prepared), "openai-batch")
    assert line["custom_id"] == "0"
    kind.model_validate(line["response"]["body"], strict=True)


def test_a_wrong_request_has_the_apis_error_object():
    wrong = {**CHAT_LINE, "body": {**CHAT_LINE["body"], "temperature": -3}}
    line = encode(prepare(wrong, request_format="openai-batch"), None, "openai-batch")
    assert line["custom_id"] == "r1"
    assert line["error"] is None
    assert line["response"]["status_code"] == 400
    assert line["response"]["body"]["error"] == {
        "message": "temperature: -3, expected a number from 0 to 2",
        "type": "invalid_request_error",
        "param": "temperature",
        "code": "invalid_parameter",
    }


def test_a_row_that_the_engine_lost_has_no_response():
    prepared = prepare(CHAT_LINE, request_format="openai-batch")
    failure = Failure(code="engine_crash", message="died")
    line = encode(prepared, Completion(key=prepared.key, failure=failure), "openai-batch")
    assert line["response"] is None
    assert line["error"] == {"code": "engine_crash", "message": "died"}


def test_ids_depend_on_the_row_alone():
    first = prepare(CHAT_LINE, request_format="openai-batch")
    other = prepare(CHAT_LINE, chunk="d", request_format="openai-batch")
    lines = [encode(item, answer(item), "openai-batch") for item in (first, first, other)]
    assert lines[0] == lines[1]
    assert lines[0]["id"] != lines[2]["id"]


# ------------------------------------------------------------------ completions


def test_the_documents_own_output_shape():
    prepared = prepare(REQUEST, request_format="completions")
    completion = answer(
        prepared,
        Choice(
            index=0,
            text=" north east",
            finish_reason="length",
            logprobs=[
                TokenLogprob(token=" north", logprob=-0.99, top=[(" north", -0.99)]),
                TokenLogprob(token=" east", logprob=-0.54, top=[(" east", -0.54)]),
            ],
        ),
    )
    assert encode(prepared, completion, "completions") == {
        "request": REQUEST,
        "result": {
            "choices": [
                {
                    "text": " north east",
                    "index": 0,
                    "logprobs": {
                        "tokens": [" north", " east"],
                        "token_logprobs": [-0.99, -0.54],
                        "top_logprobs": [{" north": -0.99}, {" east": -0.54}],
                        "text_offset": [0, 6],
                    },
                    "finish_reason": "length",
                }
            ],
            "request_time": {"batch_time": 1.75, "batch_size": 1},
        },
    }


def test_the_chunks_own_fields_are_not_part_of_the_request():
    prepared = prepare({**REQUEST, "_row": 0, "_id": "0"}, request_format="completions")
    assert encode(prepared, answer(prepared), "completions")["request"] == REQUEST


def test_plain_rows_show_their_prompt_as_the_request():
    prepared = prepare({"p": "x"}, prompt_column="p", output_format="completions")
    assert encode(prepared, answer(prepared), "completions")["request"] == {"prompt": "x"}


def test_a_wrong_request_is_repeated_with_its_error():
    wrong = {**REQUEST, "n": 0}
    line = encode(prepare(wrong, request_format="completions"), None, "completions")
    assert line["request"] == wrong
    assert line["result"] is None
    assert line["error"]["param"] == "n"


# ------------------------------------------------------------------ what a request wants to see


def test_echo_puts_the_prompt_and_its_logprobs_before_the_answer():
    prepared = prepare({**REQUEST, "echo": True, "logprobs": 1}, request_format="completions")
    completion = answer(
        prepared,
        prompt_logprobs=[None, TokenLogprob(token=" cd", logprob=-1.0, top=[(" cd", -1.0)])],
    )
    choice = encode(prepared, completion, "completions")["result"]["choices"][0]
    assert choice["text"] == "ab cd north é"
    assert choice["logprobs"]["tokens"] == ["ab", " cd", " north", " é"]
    assert choice["logprobs"]["token_logprobs"] == [None, -1.0, -0.5, -9999.0]
    assert choice["logprobs"]["top_logprobs"][0] is None
    assert choice["logprobs"]["text_offset"] == [0, 2, 5, 11]


def test_scoring_shows_the_prompt_alone():
    request = {**REQUEST, "echo": True, "logprobs": 0, "max_tokens": 0}
    prepared = prepare(request, request_format="completions")
    completion = answer(prepared, prompt_logprobs=[None, TokenLogprob(token=" cd", logprob=-1.0)])
    choice = encode(prepared, completion, "completions")["result"]["choices"][0]
    assert choice["text"] == "ab cd"
    assert choice["logprobs"]["tokens"] == ["ab", " cd"]
    assert encode(prepared, completion, "native")["usage"]["completion_tokens"] == 0


# ------------------------------------------------------------------ reading


@pytest.mark.parametrize("output_format", FORMATS)
def test_a_line_can_be_read_again(output_format):
    prepared = prepare(CHAT_LINE, request_format="openai-batch")
    encoder = encoder_for(PromptConfig(output_format=output_format))
    good = read_line(encoder.encode(prepared, answer(prepared)), output_format)
    assert (good.is_ok, good.texts, good.finish_reasons) == (True, [" north é"], ["length"])
    failure = Failure(code="engine_crash", message="died")
    for code in ("engine_crash", "engine_rejected"):
        failure = Failure(code=code, message="no")
        bad = read_line(encoder.encode(prepared, Completion(key=prepared.key, failure=failure)))
        assert (bad.is_ok, bad.code, bad.message) == (False, code, "no")
    if output_format != "completions":
        assert good.id == "r1"
        assert (
            good.usage.prompt_tokens,
            good.usage.cached_tokens,
            good.usage.completion_tokens,
        ) == (7, 3, 2)


def test_a_native_line_knows_its_row():
    prepared = prepare({"p": "x"}, prompt_column="p")
    assert read_line(encoder_for(PromptConfig()).encode(prepared, answer(prepared))).row == 0


@pytest.mark.parametrize(
    "data", [b"", b"[]", b"{}", b'{"status": "odd"}', b'{"status": 7}', b"\xff", b"[" * 10_000]
)
def test_what_is_no_output_line_is_refused(data):
    with pytest.raises(InputError, match="output line"):
        read_line(data)


def test_a_line_of_another_format_is_refused():
    prepared = prepare({"p": "x"}, prompt_column="p")
    data = encoder_for(PromptConfig()).encode(prepared, answer(prepared))
    with pytest.raises(InputError, match="expected completions"):
        read_line(data, "completions")


# ------------------------------------------------------------------ reasoning and calls of tools

CALL = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}
CALLING = Choice(
    index=0, text="", finish_reason="tool_calls", reasoning="hm", tool_calls=[CALL, CALL]
)


@pytest.mark.parametrize(
    ("output_format", "row", "options"),
    [
        ("native", {"q": "hi"}, {"prompt_column": "q"}),
        ("completions", REQUEST, {"request_format": "completions"}),
        ("openai-batch", CHAT_LINE, {"request_format": "openai-batch"}),
    ],
)
def test_every_format_has_reasoning_and_calls_with_repeatable_ids(output_format, row, options):
    prepared = prepare(row, output_format=output_format, **options)
    completion = answer(prepared, CALLING, reasoning_tokens=3)
    encoder = encoder_for(PromptConfig(output_format=output_format, **options), model="m")
    line = encoder.encode(prepared, completion)
    assert line == encoder.encode(prepared, completion)
    [choice] = read_line(line, output_format).choices
    assert choice.reasoning == "hm"
    calls = json.loads(bytes(choice.tool_calls))
    assert [{name: call[name] for name in CALL} for call in calls] == [CALL, CALL]
    ids = [call["id"] for call in calls]
    assert len({*ids}) == 2
    other = prepare(row, chunk="d", output_format=output_format, **options)
    assert ids[0].encode() not in encoder.encode(other, completion)
    if output_format != "completions":
        assert read_line(line, output_format).usage.reasoning_tokens == 3


def test_a_call_is_a_message_of_the_openai_api_without_content():
    prepared = prepare(CHAT_LINE, request_format="openai-batch", output_format="openai-batch")
    encoder = encoder_for(PromptConfig(output_format="openai-batch"), model="m")
    completion = answer(prepared, CALLING, reasoning_tokens=3)
    body = json.loads(encoder.encode(prepared, completion))["response"]["body"]
    found = ChatCompletion.model_validate(body)
    assert found.choices[0].message.content is None
    assert found.choices[0].message.tool_calls[1].function.name == "add"
    assert found.choices[0].finish_reason == "tool_calls"
    assert found.usage.completion_tokens_details.reasoning_tokens == 3


def test_a_call_that_has_an_id_keeps_it():
    prepared = prepare({"q": "hi"}, prompt_column="q")
    choice = msgspec.structs.replace(CALLING, tool_calls=[{"id": "its own", **CALL}])
    line = json.loads(encoder_for(PromptConfig()).encode(prepared, answer(prepared, choice)))
    assert line["choices"][0]["tool_calls"][0]["id"] == "its own"
    jsonschema.validate(line, SCHEMAS["output-native"])


def test_tables_have_a_column_of_calls_where_requests_or_options_have_tools():
    for prompt, has in [
        ({"request_format": "openai-batch"}, True),
        ({"prompt_column": "q", "tools": [CALL]}, True),
        ({"prompt_column": "q"}, False),
    ]:
        assert shape_of({"prompt": prompt}, explode=False).has_tool_calls is has
