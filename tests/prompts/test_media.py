"""Where rows have images, sounds and videos, and what becomes of them in bodies. Nothing is fetched here."""

import json
from email import message_from_bytes
from typing import Any

import pytest

from batchinfer.prompts.builder import finish_call
from batchinfer.prompts.media import read_media
from batchinfer.prompts.types import EngineRules, Prepared
from pictures import as_base64, as_data_url, as_hub, picture
from prompt_rows import code, prepare, request, sent

RED = picture("red")
INLINE = {"type": "image_url", "image_url": {"url": as_data_url(RED)}}
WAVE = b"RIFF\x24\0\0\0WAVEfmt \x10\0\0\0"
A, B = "https://example.com/a.png", "https://example.com/b.png"
FETCHES = EngineRules(model="m", fetches_links=True)


def text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


def link(place: str, kind: str = "image") -> dict[str, Any]:
    return {"type": f"{kind}_url", f"{kind}_url": {"url": place}}


def asking(*parts: Any) -> list[dict[str, Any]]:
    """A conversation of one message, of these parts."""
    return [{"role": "user", "content": [*parts]}]


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (None, []),
        ([A, None, {"path": B, "bytes": None}], [A, B]),
        (" s3://bucket/folder/a b.png\n", ["s3://bucket/folder/a b.png"]),
        ({"bytes": None, "path": "/data/photos/a.png"}, ["/data/photos/a.png"]),
        ({"url": A, "detail": "low"}, [A]),
        (as_hub(RED), [as_data_url(RED)]),
        (as_base64(RED), [as_data_url(RED)]),
        ("DATA:image/png;name=a.png;base64,AAAA", ["data:image/png;name=a.png;base64,AAAA"]),
    ],
)
def test_the_forms_of_a_medium(value, found):
    assert read_media(value, "image") == found


# ------------------------------------------------------------------ columns


def built(row: dict[str, Any], rules: EngineRules = FETCHES, **options: Any) -> Prepared:
    return prepare(row, rules, **{"columns": {"image": ["image"]}} | options)


def named(prepared: Prepared) -> list[tuple[str, str]]:
    """The media that the worker has to fetch."""
    return [(ref.place, ref.kind) for ref in prepared.media]


def user(prepared: Prepared) -> Any:
    """The content of the first user message that the server gets."""
    return next(each["content"] for each in sent(prepared)["messages"] if each["role"] == "user")


def test_media_of_columns_stand_before_the_text():
    row: dict[str, Any] = {"q": "What?", "image": [A, as_base64(RED)], "sound": "https://x/a.wav"}
    options: dict[str, Any] = {"prompt_column": "q", "as_chat": True, "system_prompt": "Be brief."}
    found = built(row, columns={"image": ["image"], "audio": ["sound"]}, **options)
    assert user(found) == [link(A), INLINE, link(row["sound"], "audio"), text("What?")]
    assert user(built({"q": "What?", "image": None}, **options)) == "What?"


def test_parts_without_an_image_take_the_columns_images_in_order():
    # As the Hub's vision data sets store conversations: every part has every field.
    content = [
        {"index": None, "text": "First ", "type": "text"},
        {"index": 0, "text": None, "type": "image"},
        {"index": None, "text": " then ", "type": "text"},
        {"index": 1, "text": None, "type": "image"},
    ]
    row = {"m": asking(*content), "image": [B, A]}
    wanted = [text("First "), link(B), text(" then "), link(A)]
    assert user(built(row, messages_column="m")) == wanted


def test_marks_in_the_text_take_the_columns_images():
    # As LLaVA's data sets store conversations.
    conversation = [
        {"from": "human", "value": "<image>\nWhat is this, and <image>?"},
        {"from": "gpt", "value": "A <image>."},
    ]
    row = {"m": conversation, "image": [A, B]}
    parts = [link(A), text("What is this, and "), link(B), text("?")]
    assert user(built(row, messages_column="m")) == parts
    assert user(built({"m": "<image>", "image": A}, messages_column="m")) == [link(A)]


@pytest.mark.parametrize(
    ("row", "found"),
    [
        ({"m": "What?"}, "missing_column"),
        ({"m": "What?", "image": 3}, "invalid_media"),
        ({"m": "What?", "image": {"bytes": None, "path": None}}, "invalid_media"),
        ({"m": "What?", "image": "data:image/png,A"}, "invalid_media"),
        ({"m": "What?", "image": "data:;base64,"}, "invalid_media"),
        ({"m": "<image>" * 2, "image": ["a"]}, "invalid_media"),
        ({"m": asking({"type": "image"}), "image": None}, "invalid_media"),
        ({"m": asking({"type": "file"}), "image": "a"}, "invalid_column"),
    ],
)
def test_a_row_whose_media_do_not_fit_fails(row, found):
    assert code(built(row, messages_column="m")) == found


# ------------------------------------------------------------------ requests


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": A},
        {"type": "image", "image": A},
        {"type": "image", "url": A},
        {"type": "input_image", "image_url": {"url": A, "detail": "low"}},
    ],
)
def test_the_forms_of_an_image_part(part):
    content = user(prepare({"m": asking(text("What?"), part)}, FETCHES, messages_column="m"))
    assert content[0] == text("What?")
    assert content[1]["image_url"]["url"] == A
    assert content[1]["image_url"].get("detail") == ("low" if "low" in str(part) else None)


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        ({"messages": asking(link("PLACE"))}, "image"),
        ({"messages": asking(link("PLACE", "video"))}, "video"),
        ({"input": asking({"type": "input_image", "image_url": "PLACE"})}, "image"),
        ({"query": {"content": [link("PLACE")]}, "documents": ["x"]}, "image"),
        ({"input": [[{"\u0069mage_url": "PLACE"}]]}, "image"),
    ],
)
@pytest.mark.parametrize(
    "place", ["http://10.0.0.1/a", "file:///etc/passwd", "HTTPS://x/a", "/etc/passwd"]
)
def test_no_place_that_a_row_names_reaches_the_server(body, kind, place):
    # The server would fetch it without the worker's guard against private addresses.
    data = json.dumps(body).replace("PLACE", place)
    prepared = request(json.loads(data))
    assert prepared.call is None
    assert named(prepared) == [(place, kind)]
    finished = finish_call(prepared, [RED])
    assert (finished.draft, finished.media) == (None, [])
    wanted = f"data:{kind}/png;base64,{as_base64(RED)}"
    assert sent(finished) == json.loads(data.replace(place, wanted))


def test_a_schema_names_no_media():
    tools = [{"type": "function", "function": {"name": "f", "parameters": link("http://x/y")}}]
    body = {"messages": [{"role": "user", "content": "hi"}], "tools": tools}
    assert sent(request(body)) == body
    answer = {"format": {"type": "json_schema", "name": "a", "schema": link("http://x/y")}}
    body = {"input": "hi", "text": answer}
    assert sent(request(body, "/v1/responses")) == body


def test_a_sound_has_the_form_that_every_server_knows():
    row = {"m": "What?", "sound": {"bytes": as_base64(WAVE), "path": None}}
    options: dict[str, Any] = {"messages_column": "m", "columns": {"audio": ["sound"]}}
    sound = {"type": "input_audio", "input_audio": {"data": as_base64(WAVE), "format": "wav"}}
    assert user(prepare(row, **options)) == [sound, text("What?")]
    fetched = finish_call(prepare({"m": "What?", "sound": "a.wav"}, **options), [WAVE])
    assert user(fetched) == [sound, text("What?")]


# ------------------------------------------------------------------ speech


def form_of(prepared: Prepared) -> dict[str, bytes]:
    """The fields of a multipart body, by their names."""
    head = f"Content-Type: {prepared.call.content_type}\r\n\r\n".encode()
    message: Any = message_from_bytes(head + prepared.call.body)
    return {
        part.get_param("name", header="content-disposition"): part.get_payload(decode=True)
        for part in message.get_payload()
    }


def test_a_column_of_sounds_is_transcribed():
    body = {"language": "en", "max_tokens": 5, "temperature": 0.5, "vllm_xargs": {"a": 1}}
    body["prompt"] = None  # is not the text null
    options: dict[str, Any] = {"task": "transcribe", "columns": {"audio": ["a"]}, "seed": 7}
    plain = prepare({"a": as_data_url(WAVE)}, **options)
    assert "seed" not in form_of(plain), "without a temperature nothing is drawn"
    options["body"] = body
    fetched = prepare({"a": "s3://b/a.wav"}, **options)
    assert named(fetched) == [("s3://b/a.wav", "audio")]
    linked = prepare({"a": "https://h/a.wav"}, rules=FETCHES, **options)
    assert named(linked) == [("https://h/a.wav", "audio")], "a form holds the sound itself"
    inline = prepare({"a": {"bytes": as_base64(WAVE)}}, **options)
    assert inline.path == "/v1/audio/transcriptions"
    assert finish_call(fetched, [WAVE]).call == inline.call
    form = form_of(inline)
    assert form.pop("seed").isdigit()
    assert form == {
        "file": WAVE,
        "model": b"m",
        "language": b"en",
        "temperature": b"0.5",
        "vllm_xargs": b'{"a": 1}',
        "max_completion_tokens": b"5",
    }
    for bad in ({"a": None}, {"a": ["x", "y"]}, {"a": "data:audio/wav;base64,***"}):
        assert code(prepare(bad, **options)) == "invalid_media"
