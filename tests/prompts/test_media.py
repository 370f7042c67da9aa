"""Where rows have images, and what becomes of them in the prompt. Nothing is fetched here."""

from __future__ import annotations

import json
from typing import Any

import pytest

from batchinfer.core.errors import ConfigError, RowError
from batchinfer.core.records import Sampling
from batchinfer.prompts import EngineRules, MediaRef, Prepared, PromptBuilder, PromptConfig, RawRow
from batchinfer.prompts.media import read_images
from pictures import as_base64, as_data_url, as_hub, picture

RED = picture("red")
IMAGE = {"type": "image"}
AT_A = MediaRef(place="https://example.com/a.png")
AT_B = MediaRef(place="https://example.com/b.png")


def text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (None, []),
        ([], []),
        (AT_A.place, [AT_A]),
        ([AT_A.place, None, {"path": AT_B.place, "bytes": None}], [AT_A, AT_B]),
        ("s3://bucket/folder/a b.png", [MediaRef(place="s3://bucket/folder/a b.png")]),
        ("photos/a.png", [MediaRef(place="photos/a.png")]),
        ({"url": AT_A.place, "detail": "low"}, [AT_A]),
        (as_hub(RED), [MediaRef(base64=as_base64(RED))]),
        (as_base64(RED), [MediaRef(base64=as_base64(RED))]),
        (as_data_url(RED), [MediaRef(base64=as_base64(RED))]),
        ("DATA:image/png;name=a.png;base64,AAAA", [MediaRef(base64="AAAA")]),
        ({"bytes": None, "path": "/data/photos/a.png"}, [MediaRef(place="/data/photos/a.png")]),
    ],
    ids=lambda value: str(value)[:30],
)
def test_the_forms_of_an_image(value: Any, found: list[MediaRef]) -> None:
    assert read_images(value, "column") == found


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "BMP", "WEBP", "TIFF"])
def test_base64_of_an_image_is_told_from_a_path(kind: str) -> None:
    data = as_base64(picture("blue", 60, kind))
    assert read_images(data, "column") == [MediaRef(base64=data)]


@pytest.mark.parametrize(
    "value",
    [
        7,
        "",
        "  ",
        {},
        {"bytes": None, "path": None},
        "data:image/png,AAAA",
        "data:;base64,",
        "x! " * 2000,
    ],
)
def test_a_value_in_no_known_form_is_invalid(value: Any) -> None:
    with pytest.raises(RowError) as caught:
        read_images(value, "column 'image'")
    assert caught.value.code == "invalid_media"
    assert "column 'image'" in caught.value.message


def built(row: dict[str, Any], *, rules: EngineRules | None = None, **options: Any) -> Prepared:
    config = PromptConfig(image_columns=["image"], **options)
    builder = PromptBuilder(config, Sampling(), 0, None, None, rules=rules)
    return builder.build("part-00000", 0, [RawRow(0, json.dumps(row).encode())])[0]


def user(prepared: Prepared) -> Any:
    """The content of the first user message that the engine gets."""
    assert prepared.request is not None, prepared.failure
    messages = prepared.request.messages or []
    return next(each["content"] for each in messages if each["role"] == "user")


def test_images_of_a_column_stand_before_the_text() -> None:
    row = {"q": "What?", "image": [AT_A.place, AT_B.place]}
    prepared = built(row, prompt_column="q", as_chat=True, system_prompt="Be brief.")
    assert user(prepared) == [IMAGE, IMAGE, text("What?")]
    assert prepared.media == [AT_A, AT_B]


def test_parts_without_an_image_take_the_columns_images_in_order() -> None:
    # As the Hub's vision data sets store conversations: every part has every field.
    content = [
        {"index": None, "text": "First ", "type": "text"},
        {"index": 0, "text": None, "type": "image"},
        {"index": None, "text": " then ", "type": "text"},
        {"index": 1, "text": None, "type": "image"},
    ]
    row = {"m": [{"role": "user", "content": content}], "image": [AT_B.place, AT_A.place]}
    prepared = built(row, messages_column="m")
    assert user(prepared) == [text("First "), IMAGE, text(" then "), IMAGE]
    assert prepared.media == [AT_B, AT_A]


def test_marks_in_the_text_take_the_columns_images() -> None:
    # As LLaVA's data sets store conversations.
    conversation = [
        {"from": "human", "value": "<image>\nWhat is this, and <image>?"},
        {"from": "gpt", "value": "A cat."},
    ]
    row = {"m": conversation, "image": [AT_A.place, AT_B.place]}
    prepared = built(row, messages_column="m")
    assert user(prepared) == [IMAGE, text("What is this, and "), IMAGE, text("?")]


def test_a_row_without_an_image_is_a_row_of_text() -> None:
    prepared = built({"q": "What?", "image": None}, prompt_column="q", as_chat=True)
    assert user(prepared) == "What?"
    assert prepared.media is None


def test_several_columns_and_a_text_prompt() -> None:
    config = {"prompt_column": "q", "keep": ["id"]}
    options = PromptConfig(image_columns=["left", "right"], **config)
    row = {"q": "<|image|>?", "left": AT_A.place, "right": AT_B.place, "id": 3}
    builder = PromptBuilder(options, Sampling(), 0, None, None)
    [prepared] = builder.build("part-00000", 0, [RawRow(0, json.dumps(row).encode())])
    assert prepared.request is not None
    assert prepared.request.text == "<|image|>?"
    assert prepared.media == [AT_A, AT_B]
    assert prepared.source == {"id": 3}
    assert builder.needed_columns["--image-column"] == ["left", "right"]


@pytest.mark.parametrize(
    ("row", "code"),
    [
        ({"m": "What?"}, "missing_column"),
        ({"m": "What?", "image": 3}, "invalid_media"),
        ({"m": [{"role": "user", "content": [IMAGE, text("?")]}], "image": None}, "media_mismatch"),
        (
            {"m": [{"role": "user", "content": [IMAGE, text("?")]}], "image": ["a", "b"]},
            "media_mismatch",
        ),
        ({"m": "What?", "image": ["a", "b", "c"]}, "too_many_media"),
        (
            {"m": [{"role": "user", "content": [{"type": "video_url"}]}], "image": "a"},
            "unsupported_content",
        ),
    ],
)
def test_a_row_whose_images_do_not_fit_fails(row: dict[str, Any], code: str) -> None:
    prepared = built(row, messages_column="m", rules=EngineRules(max_images=2))
    assert prepared.failure is not None
    assert prepared.failure.code == code
    assert prepared.request is None


def batch_line(content: Any) -> bytes:
    body = {"messages": [{"role": "user", "content": content}]}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}
    return json.dumps(line).encode()


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": AT_A.place}},
        {"type": "image_url", "image_url": AT_A.place},
        {"type": "input_image", "image_url": AT_A.place},
        {"image_url": {"url": AT_A.place}},
        {"type": "image", "image": AT_A.place},
        {"type": "image", "url": AT_A.place},
    ],
)
def test_the_forms_of_an_image_part(part: dict[str, Any]) -> None:
    config = PromptConfig(request_format="openai-batch")
    builder = PromptBuilder(config, Sampling(), 0, None, None)
    line = batch_line([text("What?"), part])
    [prepared] = builder.build("part-00000", 0, [RawRow(0, line)])
    assert user(prepared) == [text("What?"), IMAGE]
    assert prepared.media == [AT_A]


def test_a_prompt_with_images_is_not_cut() -> None:
    builder = PromptBuilder(PromptConfig(request_format="openai-batch"), Sampling(), 0, None, None)
    line = json.loads(batch_line([text("What?"), {"type": "image", "url": AT_A.place}]))
    line["body"]["truncate_prompt_tokens"] = 5
    [prepared] = builder.build("part-00000", 0, [RawRow(0, json.dumps(line).encode())])
    assert prepared.failure is not None
    assert prepared.failure.code == "invalid_parameter"
    assert prepared.param == "truncate_prompt_tokens"


def test_links_are_passed_on_to_an_engine_that_fetches_them() -> None:
    row = {"q": "What?", "image": [AT_A.place, as_base64(RED), "s3://b/c.png"]}
    rules = EngineRules(fetches_links=True)
    prepared = built(row, prompt_column="q", as_chat=True, rules=rules)
    assert [each.is_passed_on for each in prepared.media or []] == [True, False, False]


def test_worked_examples_have_no_images() -> None:
    example = {"m": [{"role": "user", "content": [{"type": "image", "url": AT_A.place}]}]}
    with pytest.raises(ConfigError, match="holds an image"):
        built({}, messages_column="m", few_shot=[example])


@pytest.mark.parametrize("kind", ["transcriptions", "translations"])
def test_a_request_for_a_transcription_is_told_that_audio_is_not_taken(kind: str) -> None:
    builder = PromptBuilder(PromptConfig(request_format="openai-batch"), Sampling(), 0, None, None)
    line = {"custom_id": "a", "method": "POST", "url": f"/v1/audio/{kind}", "body": {}}
    [prepared] = builder.build("part-00000", 0, [RawRow(0, json.dumps(line).encode())])
    assert prepared.failure is not None
    assert prepared.failure.code == "wrong_task"
    assert "audio is not taken" in prepared.failure.message


@pytest.mark.parametrize(("marks", "images"), [(2, 1), (1, 2), (3, 2)])
def test_marks_that_are_more_or_fewer_than_the_images_fail_the_row(marks: int, images: int) -> None:
    row = {"m": "<image>" * marks + "?", "image": ["a.png"] * images}
    prepared = built(row, messages_column="m")
    assert prepared.failure is not None
    assert prepared.failure.code == "media_mismatch"
    assert f"{marks} places for images, and the row {images} images" in prepared.failure.message


@pytest.mark.parametrize("kind", [["text"], {"a": 1}, 5, None])
def test_a_part_whose_type_is_no_text_fails_its_row(kind: Any) -> None:
    builder = PromptBuilder(PromptConfig(request_format="openai-batch"), Sampling(), 0, None, None)
    line = batch_line([{"type": kind, "text": "What?"}])
    [prepared] = builder.build("part-00000", 0, [RawRow(0, line)])
    assert prepared.failure is not None
    assert prepared.failure.code == "unsupported_content"


def test_white_space_around_a_place_does_not_count() -> None:
    assert read_images(f" {AT_A.place}\n", "column") == [AT_A]
    assert read_images(" data:;base64,AAAA", "column") == [MediaRef(base64="AAAA")]


def test_long_texts_that_are_no_images_are_refused_at_once() -> None:
    # Read with an expression that backtracks, the first would take hours.
    for value in ("/9j/" + " " * 2_000_000 + "!", "https://" + "a" * 20_000):
        with pytest.raises(RowError) as caught:
            read_images(value, "column")
        assert caught.value.code == "invalid_media"
        assert len(caught.value.message) < 200
