"""Finds the images of rows: in columns (`--image-column`), and in the parts of messages. Fetches nothing.

A message that has images holds a part ``{"type": "image"}`` for each of them. What the parts stand for is a list of
`MediaRef`, in the order of the parts.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec

from batchinfer.prompts.json_lines import json_type
from batchinfer.prompts.types import Code, MediaRef, RowProblem

IMAGE_PART = "image"
IMAGE_KINDS = frozenset({"image", "image_url", "input_image"})
"""Types of a message's parts that are images: of the OpenAI APIs, of vLLM, and of the Hub's data sets."""
_OTHER_MEDIA = ("audio", "video", "file", "image_embeds")
_MARKER = "<image>"
_LINK = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_DATA_URL = re.compile(r"data:(?P<type>[\w.+/-]*)(;[\w.=+-]+)*;base64,", re.IGNORECASE)
_BASE64 = re.compile(r"[A-Za-z0-9+/\s]+(=[=\s]*)?")
_FIRST_LETTERS = ("/9j/", "iVBORw0KGgo", "R0lGOD", "UklGR", "Qk", "SUkq", "TU0A")
"""Base64 of the first bytes of JPEG, PNG, GIF, WebP, BMP and TIFF."""
_LONGEST_PATH = 1024
_LONGEST_LINK = 8192
_SURELY_BASE64 = 100
"""Characters from which a text that looks like base64 of an image is no path."""

Message = dict[str, Any]


def read_images(value: Any, subject: str) -> list[MediaRef]:
    """Return the images that a column's value, or a part of a message, stands for. Null stands for no image.

    Args:
        value: A URL, a path, a data URL or base64; an object with `bytes` (base64), `path` or `url`; or a list of
            these.
        subject: Name of the value in messages.

    Raises:
        RowProblem: the value has another form.
    """
    if value is None:
        return []
    if isinstance(value, list):
        return [each for item in value for each in read_images(item, subject)]
    if isinstance(value, str):
        return [_of_text(value, subject)]
    if isinstance(value, dict):
        if isinstance(value.get("bytes"), str) and value["bytes"]:
            return [MediaRef(base64=value["bytes"])]
        for name in ("url", "path", "image_url"):
            if value.get(name):
                return read_images(value[name], subject)
        raise RowProblem(
            Code.INVALID_MEDIA,
            f"{subject}: an object without bytes, path and url, expected one of these",
        )
    raise RowProblem(
        Code.INVALID_MEDIA,
        f"{subject}: a JSON {json_type(value)}, expected a URL, a path, base64, or an object with bytes or path",
    )


def _of_text(text: str, subject: str) -> MediaRef:
    text = text.strip()
    if text[:5].lower() == "data:":
        found = _DATA_URL.match(text, 0)
        if found is None:
            raise RowProblem(
                Code.INVALID_MEDIA,
                f"{subject}: a data URL without base64, expected data:…;base64,…",
            )
        kind = found["type"].partition("/")[0].lower()
        if kind in ("audio", "video"):
            raise _unsupported(f"{subject}: a data URL of type {found['type']}")
        if content := text[found.end() :].strip():
            return MediaRef(base64=content)
        text = ""
    if not text:
        raise RowProblem(Code.INVALID_MEDIA, f"{subject}: an empty text, expected an image")
    if _LINK.match(text):
        if len(text) > _LONGEST_LINK:
            raise RowProblem(
                Code.INVALID_MEDIA,
                f"{subject}: a URL of {len(text)} characters, expected at most {_LONGEST_LINK}",
            )
        return MediaRef(place=text)
    is_long = len(text) > _SURELY_BASE64 and text.startswith(_FIRST_LETTERS)
    if (is_long or len(text) > _LONGEST_PATH) and _BASE64.fullmatch(text):
        return MediaRef(base64=text)
    if len(text) > _LONGEST_PATH:
        raise RowProblem(
            Code.INVALID_MEDIA,
            f"{subject}: a text of {len(text)} characters that is neither base64 nor a path",
        )
    return MediaRef(place=text)


def read_part(part: dict[str, Any], kind: str, subject: str) -> Message:
    """Return a message's image part with what it says about its image as the value of "refs".

    The list is empty for a part that only marks the place of an image of ``--image-column``.

    Raises:
        RowProblem: the part is in no known form.
    """
    value = next((part[name] for name in (kind, "image_url", "image") if part.get(name)), None)
    if value is None:
        value = {name: part[name] for name in ("bytes", "path", "url", "base64") if part.get(name)}
        if "base64" in value:
            value = {"bytes": value["base64"]}
        value = value or None
    found = {"type": IMAGE_PART, "refs": read_images(value, subject)}
    detail = part.get("detail") or (value.get("detail") if isinstance(value, dict) else None)
    return {**found, "detail": detail} if isinstance(detail, str) else found


def refuse_part(kind: str, subject: str) -> RowProblem:
    """Return the error for a part of a message that is neither text nor an image."""
    if any(name in kind for name in _OTHER_MEDIA):
        return _unsupported(f"{subject}: a part of type {kind[:40]!r}")
    return RowProblem(
        Code.UNSUPPORTED_CONTENT,
        f"{subject}: a part of type {kind[:40]!r}, expected parts of text and images",
    )


def _unsupported(found: str) -> RowProblem:
    return RowProblem(
        Code.UNSUPPORTED_CONTENT,
        f"{found}: audio, video, files and embeddings are not taken, only text and images",
    )


def with_link_passed_on(ref: MediaRef) -> MediaRef:
    """Return the reference, marked for an engine that fetches http(s) links itself if it is such a link."""
    if not ref.place.lower().startswith(("http://", "https://")):
        return ref
    return msgspec.structs.replace(ref, is_passed_on=True)


def take_images(
    messages: list[Message], column_images: Sequence[MediaRef] = ()
) -> tuple[list[Message], list[MediaRef]]:
    """Return the messages with plain image parts, and the images of these parts in order.

    Images of columns take the place of image parts that say nothing about their image; if there is no such part, of the
    marks ``<image>`` in the texts of user messages; and if there is none either, they stand before the text of the
    first user message.

    Args:
        messages: Messages as `conversation.read_conversation` returns them. They are not changed.
        column_images: Images of ``--image-column``.

    Raises:
        RowProblem: there are more places than images, or more images than places.
    """
    num_open = sum(not part["refs"] for message in messages for part in _image_parts(message))
    if column_images and not num_open:
        messages = _with_open_parts(messages, len(column_images))
        num_open = sum(not part["refs"] for message in messages for part in _image_parts(message))
    if num_open != len(column_images):
        raise RowProblem(
            Code.MEDIA_MISMATCH,
            f"the conversation has {num_open} places for images, and the row {len(column_images)} images; "
            "--image-column names the column with them",
        )
    waiting = iter(column_images)
    found: list[MediaRef] = []
    plain: list[Message] = []
    for message in messages:
        if not _image_parts(message):
            plain.append(message)
            continue
        parts = []
        for part in message["content"]:
            if part["type"] != IMAGE_PART:
                parts.append(part)
                continue
            refs = part["refs"] or [next(waiting)]
            found += refs
            bare = {name: value for name, value in part.items() if name != "refs"}
            parts += [bare] * len(refs)
        plain.append({**message, "content": parts})
    return plain, found


def _image_parts(message: Message) -> list[Message]:
    content = message["content"]
    if not isinstance(content, list):  # a text, or nothing beside calls of tools
        return []
    return [part for part in content if part["type"] == IMAGE_PART]


def _with_open_parts(messages: list[Message], number: int) -> list[Message]:
    """Return the messages with `number` image parts whose images are not said."""
    users = [message for message in messages if message["role"] == "user"]
    num_marks = sum(_text_of(message).count(_MARKER) for message in users)
    if num_marks:
        return [
            _with_marks_replaced(message) if message["role"] == "user" else message
            for message in messages
        ]
    first = next(index for index, message in enumerate(messages) if message["role"] == "user")
    message = messages[first]
    content = message["content"]
    if isinstance(content, str):
        content = [{"type": "text", "text": content}] if content else []
    parts = [{"type": IMAGE_PART, "refs": []} for _ in range(number)]
    opened = {**message, "content": [*parts, *content]}
    return [*messages[:first], opened, *messages[first + 1 :]]


def _text_of(message: Message) -> str:
    content = message["content"]
    if not isinstance(content, list):
        return content or ""
    return "".join(part.get("text", "") for part in content)


def _with_marks_replaced(message: Message) -> Message:
    content = message["content"]
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    parts: list[Message] = []
    for part in content:
        pieces = part["text"].split(_MARKER) if part["type"] == "text" else []
        if len(pieces) < 2:
            parts.append(part)
            continue
        for index, piece in enumerate(pieces):
            if index:
                parts.append({"type": IMAGE_PART, "refs": []})
            # The mark stands on a line of its own in most data sets; the line break belongs to the mark.
            text = piece.removeprefix("\n") if index else piece
            text = text.removesuffix("\n") if index < len(pieces) - 1 else text
            if text:
                parts.append({"type": "text", "text": text})
    return {**message, "content": parts}
