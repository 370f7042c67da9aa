"""Images, sounds and videos of rows: found in columns and in the parts of messages, and put into bodies as data URLs.

Nothing is fetched here. Until a medium is fetched, its place in the body is an empty text, and a `MediaRef` says where
it is. A part ``{"type": "image"}`` without more, as data sets have it, stands for the next image of the row's columns.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from batchinfer.core.row_codes import Code
from batchinfer.prompts.json_lines import json_type
from batchinfer.prompts.types import MEDIA_KINDS, MediaRef, RowProblem

_URL_FIELDS = {f"{kind}_url": kind for kind in MEDIA_KINDS}
_PART_TYPES = {
    **{kind: kind for kind in MEDIA_KINDS},
    **_URL_FIELDS,
    "input_image": "image",
    "input_audio": "audio",
}
_NO_CONTENT = frozenset({"tools", "response_format", "structured_outputs", "metadata"})
"""Fields of a body in which a server looks for no media."""
_LINK = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_BASE64 = re.compile(r"[A-Za-z0-9+/\s]+(=[=\s]*)?")
_MAGIC = (
    *((0, b"\x89PNG", "png"), (0, b"\xff\xd8\xff", "jpeg"), (0, b"GIF8", "gif"), (0, b"BM", "bmp")),
    *((8, b"WEBP", "webp"), (0, b"II*\0", "tiff"), (0, b"MM\0*", "tiff"), (8, b"WAVE", "wav")),
    *((0, b"fLaC", "flac"), (0, b"OggS", "ogg"), (0, b"ID3", "mp3"), (0, b"\xff\xfb", "mp3")),
    *((0, b"\xff\xf3", "mp3"), (0, b"\xff\xf2", "mp3"), (4, b"ftyp", "mp4"), (8, b"AVI ", "avi")),
    (0, b"\x1aE\xdf\xa3", "webm"),
)
"""Formats by the bytes that their files have at a place near the beginning."""
_LONGEST_PATH = 1024
_LONGEST_LINK = 8192
_SURELY_BASE64 = 100
"""Characters from which a text that looks like base64 of a known format is no path."""

Message = dict[str, Any]


# --------------------------------------------------------------------------- what a row says


def read_media(value: Any, kind: str) -> list[str]:
    """Return the media that a column's value stands for: data URLs, or places at which they are.

    Args:
        value: A URL, a path, a data URL or base64; an object with `bytes` (base64), `path` or `url`; a list of these; or
            null, which stands for none.
        kind: One of `MEDIA_KINDS`.

    Raises:
        ValueError: the value has another form.
    """
    if value is None:
        return []
    if isinstance(value, list):
        return [each for item in value for each in read_media(item, kind)]
    if isinstance(value, str):
        return [_read_text(value.strip(), kind)]
    if isinstance(value, dict):
        for name in ("bytes", "base64", "data"):
            if isinstance(value.get(name), str) and value[name]:
                return [data_url(value[name], kind)]
        for name in ("url", "path"):
            if value.get(name):
                return read_media(value[name], kind)
        raise ValueError("an object without bytes, path and url, expected one of these")
    raise ValueError(
        f"a JSON {json_type(value)}, expected a URL, a path, base64, or an object with bytes or path"
    )


def _read_text(text: str, kind: str) -> str:
    is_link = _LINK.match(text)
    if text[:5].lower() == "data:":
        head, comma, content = text.partition(",")
        if not head.endswith(";base64") or not content.strip():
            raise ValueError("a data URL without base64, expected data:…;base64,…")
        return "data:" + text[5:]
    if not text or len(text) > (_LONGEST_LINK if is_link else _LONGEST_PATH):
        if not text or is_link or not _BASE64.fullmatch(text):
            raise ValueError(
                f"a text of {len(text)} characters, expected a URL, a path or base64 of the medium"
            )
        return data_url(text, kind)
    is_long = len(text) > _SURELY_BASE64 and not is_link
    if is_long and _BASE64.fullmatch(text) and _format_of(_start_of(text)):
        return data_url(text, kind)
    return text


def data_url(content: str | bytes, kind: str) -> str:
    """Return the data URL of a medium: its bytes, or their base64."""
    is_text = isinstance(content, str)
    start = _start_of(content) if isinstance(content, str) else content[:16]
    text = "".join(content.split()) if is_text else base64.b64encode(content).decode()  # type: ignore[arg-type]
    return f"data:{kind}/{_format_of(start) or 'unknown'};base64,{text}"


def _start_of(text: str) -> bytes:
    try:
        return base64.b64decode(text[:24])
    except (binascii.Error, ValueError):
        return b""


def _format_of(start: bytes) -> str:
    matching = (name for place, mark, name in _MAGIC if start[place:].startswith(mark))
    return next(matching, "")


def read_part(part: Mapping[str, Any], subject: str) -> list[dict[str, Any]]:
    """Return the parts of a message, in the form of the API, that stand for a part with media.

    Raises:
        ValueError: the part is in no known form.
    """
    kind = _PART_TYPES.get(str(part.get("type", next(filter(part.__contains__, _URL_FIELDS), ""))))
    if kind is None:
        raise ValueError(
            f"{subject}: a part of type {str(part.get('type'))[:40]!r}, expected text, "
            + ", ".join(MEDIA_KINDS)
        )
    names = (f"{kind}_url", kind, f"input_{kind}")
    value = next((part[name] for name in names if part.get(name)), None)
    if value is None:  # the part itself may say it; if not, a column does
        value = {k: v for k, v in part.items() if k in ("bytes", "path", "url", "base64")} or None
    try:
        found = [_part(kind, url) for url in read_media(value, kind)]
    except ValueError as error:
        raise ValueError(f"{subject}: {error}") from error
    detail = value.get("detail") if isinstance(value, dict) else part.get("detail")
    for each in found if isinstance(detail, str) else []:
        each[f"{kind}_url"]["detail"] = detail
    return found or [{"type": kind}]


def _part(kind: str, url: str) -> dict[str, Any]:
    return {"type": f"{kind}_url", f"{kind}_url": {"url": url}}


# --------------------------------------------------------------------------- media of columns in conversations


def with_media(messages: list[Message], media: Mapping[str, Sequence[str]]) -> list[Message]:
    """Return the messages with the media of columns in their places.

    They take the place of parts that only name a kind; if there is none, of the marks ``<image>`` (``<audio>``,
    ``<video>``) in the texts of user messages; and if there is none either, they stand before the text of the first
    user message.

    Raises:
        RowProblem: there are more places than media, or more media than places.
    """
    for kind in MEDIA_KINDS:
        urls = media.get(kind) or ()
        if urls and not _num_open(messages, kind):
            messages = _with_open_parts(messages, kind, len(urls))
        if (num_open := _num_open(messages, kind)) != len(urls):
            raise RowProblem(
                Code.INVALID_MEDIA,
                f"the conversation has {num_open} places for media of the kind {kind}, and the row's columns "
                f"{len(urls)}; --{kind}-column names the column with them",
            )
        if urls:
            waiting = iter(urls)
            messages = [_filled(message, kind, waiting) for message in messages]
    return messages


def _num_open(messages: list[Message], kind: str) -> int:
    contents = (each["content"] for each in messages if isinstance(each["content"], list))
    return sum(part["type"] == kind for content in contents for part in content)


def _filled(message: Message, kind: str, waiting: Iterator[str]) -> Message:
    content = message["content"]
    if not isinstance(content, list):
        return message
    parts = [_part(kind, next(waiting)) if part["type"] == kind else part for part in content]
    return {**message, "content": parts}


def _with_open_parts(messages: list[Message], kind: str, number: int) -> list[Message]:
    mark, is_marked, opened = f"<{kind}>", False, []
    for message in messages:
        if message["role"] == "user":
            parts = message["content"] or []
            if isinstance(parts, str):
                parts = [{"type": "text", "text": parts}]
            split = [each for part in parts for each in _split_at_marks(part, mark, kind)]
            is_marked = is_marked or len(split) > len(parts)
            message = {**message, "content": split}
        opened.append(message)
    first = next((message for message in opened if message["role"] == "user"), None)
    if first is not None and not is_marked:
        first["content"] = [{"type": kind} for _ in range(number)] + first["content"]
    return opened


def _split_at_marks(part: dict[str, Any], mark: str, kind: str) -> list[dict[str, Any]]:
    pieces = part["text"].split(mark) if part["type"] == "text" else []
    if len(pieces) < 2:
        return [part]
    parts: list[dict[str, Any]] = []
    for index, piece in enumerate(pieces):
        if index:
            parts.append({"type": kind})
        # The mark stands on a line of its own in most data sets; the line break belongs to the mark.
        text = piece.removeprefix("\n") if index else piece
        text = text.removesuffix("\n") if index < len(pieces) - 1 else text
        if text:
            parts.append({"type": "text", "text": text})
    return parts


# --------------------------------------------------------------------------- media in bodies


def take_links(body: dict[str, Any], *, fetches_links: bool) -> list[MediaRef]:
    """Empty the places in a body whose media the worker has to fetch, and return what they named, in order.

    Args:
        body: Body of a request, which is changed.
        fetches_links: Whether the server fetches http(s) links itself. Then these stay.

    Raises:
        RowProblem: a place names a medium in no known form.
    """
    found: list[MediaRef] = []
    for holder, name in _places(body):
        kind = _URL_FIELDS[name]
        try:
            [url] = read_media(_url_of(holder, name), kind)
        except ValueError as error:
            raise RowProblem(Code.INVALID_MEDIA, f"{name}: {error}", param=name) from error
        is_link = url.lower().startswith(("http://", "https://"))
        if not url.startswith("data:") and not (is_link and fetches_links):
            found.append(MediaRef(place=url, kind=kind))
            url = ""
        _put(holder, name, url)
    return found


def put_contents(body: dict[str, Any], contents: Sequence[tuple[bytes | None, str]]) -> None:
    """Put fetched media into the places that `take_links` has emptied, or their links where the content is None."""
    waiting = iter(contents)
    for holder, name in list(_places(body)):
        if not _url_of(holder, name):
            content, place = next(waiting)
            url = place if content is None else data_url(content, _URL_FIELDS[name])
            _put(holder, name, url)


def _places(value: Any, *, is_top: bool = True) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield the objects in a body that name a medium by URL, each with its field for the URL."""
    if isinstance(value, list):
        for item in value:
            if isinstance(item, dict | list):
                yield from _places(item, is_top=False)
    elif isinstance(value, dict):
        for name, item in list(value.items()):
            if name in _URL_FIELDS and isinstance(_url_of(value, name), str):
                yield value, name
            elif isinstance(item, dict | list) and not (is_top and name in _NO_CONTENT):
                yield from _places(item, is_top=False)


def _url_of(holder: Mapping[str, Any], name: str) -> Any:
    value = holder[name]
    return value.get("url") if isinstance(value, dict) else value


def _put(holder: dict[str, Any], name: str, url: str) -> None:
    """Set the URL of a part. Sounds get the form that all servers know, which has no URL."""
    head, _, content = url.partition(";base64,")
    if name == "audio_url" and url.startswith("data:"):
        del holder[name]
        sound = {"data": content, "format": head.partition("/")[2].partition(";")[0]}
        holder |= {"type": "input_audio", "input_audio": sound}
    elif isinstance(holder[name], dict):
        holder[name] = {**holder[name], "url": url}
    else:
        holder[name] = url


# --------------------------------------------------------------------------- speech


def bytes_of(url: str) -> bytes:
    """Return the content of a data URL.

    Raises:
        RowProblem: it is not base64.
    """
    try:
        return base64.b64decode("".join(url.partition(",")[2].split()), validate=True)
    except ValueError as error:
        raise RowProblem(Code.INVALID_MEDIA, f"not base64 ({error})") from error


def multipart(fields: Mapping[str, Any], sound: bytes) -> tuple[bytes, str]:
    """Return the body of a request to transcribe or translate a sound, and its content type.

    Equal requests have equal bytes.
    """
    mark = hashlib.sha256(sound).hexdigest()
    pieces: list[bytes] = []

    def add(name: str, value: bytes, rest: str = "") -> None:
        name = re.sub(r'["\r\n]', "_", name)
        head = f'--{mark}\r\nContent-Disposition: form-data; name="{name}"{rest}\r\n\r\n'
        pieces.extend((head.encode(), value, b"\r\n"))

    kind = _format_of(sound[:16]) or "bin"
    add("file", sound, f'; filename="audio.{kind}"\r\nContent-Type: application/octet-stream')
    for name, value in fields.items():
        is_list = isinstance(value, list)
        for each in value if is_list else [value]:
            text = each if isinstance(each, str) else json.dumps(each)
            add(f"{name.removesuffix('[]')}[]" if is_list else name, text.encode())
    pieces.append(f"--{mark}--\r\n".encode())
    return b"".join(pieces), f"multipart/form-data; boundary={mark}"
