"""Images, sounds and videos of rows: found in columns and in the parts of messages, and put into bodies as data URLs.

Nothing is fetched here. Until a medium is fetched, its place in the body is an empty text, and a `MediaRef` says what
belongs there. A part ``{"type": "image"}`` without more, as data sets have it, stands for the next image of the row's
columns.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from batchinfer.core.row_codes import Code
from batchinfer.prompts.json_lines import reading, shown
from batchinfer.prompts.types import MEDIA_KINDS, MediaKind, MediaRef, RowError, Unfit

SOUND = "file"
"""Field of a body for a sound to transcribe or to translate."""
_URL_FIELDS: dict[str, MediaKind] = {f"{kind}_url": kind for kind in MEDIA_KINDS}
_NO_CONTENT = frozenset({"tools", "response_format", "structured_outputs", "text", "metadata"})
"""Fields of a body in which a server looks for no media."""
_LINK = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_FORMAT = re.compile(
    rb"(?P<png>\x89PNG)|(?P<jpeg>\xff\xd8\xff)|(?P<gif>GIF8)|(?P<bmp>BM)|(?P<tiff>II\*\0|MM\0\*)"
    rb"|RIFF....(?:(?P<webp>WEBP)|(?P<wav>WAVE)|(?P<avi>AVI ))|(?P<flac>fLaC)|(?P<ogg>OggS)"
    rb"|(?P<mp3>ID3|\xff[\xfb\xf3\xf2])|(?P<mp4>....ftyp)|(?P<webm>\x1aE\xdf\xa3)",
    re.DOTALL,
)
"""Formats, by the bytes with which their files begin."""
_LONGEST_PATH = 1024
_SHORTEST_FILE = 100
"""Characters from which a text that looks like base64 of a known format is no path."""

Message = dict[str, Any]


# --------------------------------------------------------------------------- what a row says


def read_media(value: Any, kind: str) -> list[str]:
    """Return the media that a column's value stands for: data URLs, or places at which they are.

    Args:
        value: A URL, a path, a data URL or base64; an object with `bytes` (base64), `path` or `url`; a list of these;
            or null, which stands for none.
        kind: One of `MEDIA_KINDS`.

    Raises:
        Unfit: the value has another form.
    """
    if value is None:
        return []
    if isinstance(value, list):
        return [each for item in value for each in read_media(item, kind)]
    text = value
    if isinstance(value, dict):
        content = next((value[name] for name in ("bytes", "base64", "data") if value.get(name)), "")
        if isinstance(content, str) and content:
            return [data_url(content, kind)]
        text = value.get("url") or value.get("path")
    text = text.strip() if isinstance(text, str) else ""
    if re.match(r"data:[^,]*;base64,.", text, re.IGNORECASE):
        return ["data:" + text[5:]]
    if not text or text[:5].lower() == "data:":
        expected = "a URL, a path, base64, or an object with bytes, path or url"
        raise Unfit(f"{shown(value)}, expected {expected}")
    has_format = len(text) > _SHORTEST_FILE and bool(_format_of(text))
    is_file = has_format or len(text) > _LONGEST_PATH
    return [data_url(text, kind) if is_file and not _LINK.match(text) else text]


def data_url(content: str | bytes, kind: str) -> str:
    """Return the data URL of a medium, from its bytes or their base64."""
    if isinstance(content, bytes):
        content = base64.b64encode(content).decode()
    content = "".join(content.split())
    return f"data:{kind}/{_format_of(content) or 'unknown'};base64,{content}"


def _format_of(content: str) -> str:
    """Return the format of a file by its base64; "" for an unknown one."""
    try:
        found = _FORMAT.match(base64.b64decode(content[:24]))
    except ValueError:
        return ""
    return (found and found.lastgroup) or ""


def read_part(part: Mapping[str, Any], subject: str) -> list[dict[str, Any]]:
    """Return the parts of a message, in the form of the API, that stand for a part with media.

    Raises:
        Unfit: the part is in no known form.
    """
    named = str(part.get("type", next(filter(part.__contains__, _URL_FIELDS), "")))
    kind = named.removeprefix("input_").removesuffix("_url")
    if kind not in MEDIA_KINDS:
        raise Unfit(f"{subject}: a part of type {named[:40]!r}, expected text or {MEDIA_KINDS}")
    names = (f"{kind}_url", kind, f"input_{kind}")
    value = next((part[name] for name in names if part.get(name)), None)
    if value is None:  # the part itself may say it; if not, a column does
        value = {name: item for name, item in part.items() if name in ("bytes", "path", "url")}
    parts = [_part(kind, url) for url in read_media(value or None, kind)]
    detail = part.get("detail") or (value.get("detail") if isinstance(value, dict) else None)
    for each in parts if detail else ():
        each[f"{kind}_url"]["detail"] = detail
    return parts or [{"type": kind}]


def _part(kind: str, url: str) -> dict[str, Any]:
    return {"type": f"{kind}_url", f"{kind}_url": {"url": url}}


# --------------------------------------------------------------------------- media of columns in conversations


def add_media(messages: list[Message], kind: str, urls: Sequence[str]) -> None:
    """Put the media of columns into their places in messages, which are changed. Contents are lists of parts.

    They take the place of parts that only name their kind; if there is none, of the marks ``<image>`` (``<audio>``,
    ``<video>``) in the texts of user messages; and if there is none either, they stand before the text of the first
    user message.

    Raises:
        RowError: there are more places than media, or more media than places.
    """
    asking = [message for message in messages if message["role"] == "user"]
    if urls and not _open_parts(messages, kind):
        for message in asking:
            _open_marks(message, kind)
        if asking and not _open_parts(messages, kind):
            asking[0]["content"] = [{"type": kind} for _ in urls] + asking[0]["content"]
    places = _open_parts(messages, kind)
    if len(places) != len(urls):
        said = f"{len(places)} places in the conversation and {len(urls)} media (--column {kind})"
        raise RowError(Code.INVALID_MEDIA, said)
    for place, url in zip(places, urls, strict=True):
        place.update(_part(kind, url))


def _open_parts(messages: list[Message], kind: str) -> list[dict[str, Any]]:
    return [part for each in messages for part in each["content"] if part["type"] == kind]


def _open_marks(message: Message, kind: str) -> None:
    parts: list[dict[str, Any]] = []
    for part in message["content"]:
        # The mark stands on a line of its own in most data sets; the line break belongs to the mark.
        pieces = re.split(f"(\n?<{kind}>\n?)", part["text"]) if part["type"] == "text" else []
        shown = [{"type": "text", "text": piece} for piece in pieces]
        shown[1::2] = [{"type": kind} for _ in shown[1::2]]
        parts += [each for each in shown if each != {"type": "text", "text": ""}] or [part]
    if {"type": kind} in parts:
        message["content"] = parts


# --------------------------------------------------------------------------- media in bodies


Place = tuple[dict[str, Any], str]
"""An object in a body that names a medium by URL, and its field for the URL."""


def places_in(value: Any, *, is_body: bool = True) -> list[Place]:
    """Return the places in a body, or in a part of one, that name a medium by URL, in order."""
    if isinstance(value, list):  # perhaps of thousands of token ids
        parts = (each for each in value if isinstance(each, (dict, list)))
        return [place for part in parts for place in places_in(part, is_body=False)]
    found: list[Place] = []
    for name, item in value.items():
        is_medium = name in _URL_FIELDS or (is_body and name == SOUND)
        if is_medium and isinstance(_url_of(item), str):
            found.append((value, name))
        elif isinstance(item, (dict, list)) and not (is_body and name in _NO_CONTENT):
            found += places_in(item, is_body=False)
    return found


def take_links(places: Sequence[Place], *, fetches_links: bool) -> list[MediaRef]:
    """Empty the places in a body whose media the worker has to fetch, and return what they named, in order.

    Args:
        places: The places, whose objects are changed.
        fetches_links: Whether the server fetches http(s) links itself. Then these stay.

    Raises:
        RowError: a place names a medium in no known form.
    """
    found: list[MediaRef] = []
    for holder, name in places:
        with reading(name, Code.INVALID_MEDIA):
            [url] = read_media(_url_of(holder[name]), kind := _URL_FIELDS.get(name, "audio"))
        is_link = url.lower().startswith(("http://", "https://"))
        if not url.startswith("data:") and not (is_link and fetches_links):
            found.append(MediaRef(place=url, kind=kind, holder=holder, field=name))
            url = ""
        put_url(holder, name, url)
    return found


def _url_of(value: Any) -> Any:
    return value.get("url") if isinstance(value, dict) else value


def put_url(holder: dict[str, Any], name: str, url: str) -> None:
    """Set the URL of a part. Sounds get the form that all servers know, which has no URL."""
    if name == "audio_url" and url.startswith("data:"):
        head, _, content = url.partition(";base64,")
        sound = {"data": content, "format": re.split("[/;]", head)[-1]}
        del holder[name]
        holder |= {"type": "input_audio", "input_audio": sound}
    else:
        is_object = isinstance(holder[name], dict)
        holder[name] = {**holder[name], "url": url} if is_object else url


# --------------------------------------------------------------------------- speech


def multipart(body: dict[str, Any]) -> tuple[bytes, str]:
    """Return a body with a sound as a form, and its content type. Equal bodies give equal bytes.

    Raises:
        RowError: the data URL of the sound holds no base64.
    """
    try:
        content = "".join(body[SOUND].partition(",")[2].split())
        sound = base64.b64decode(content, validate=True)
    except ValueError as error:
        raise RowError(Code.INVALID_MEDIA, f"the sound is not base64 ({error})") from error
    mark = hashlib.sha256(sound).hexdigest()
    parts = [(f'file"; filename="audio.{_format_of(content) or "bin"}', sound)]
    for field, value in body.items():
        if field == SOUND:
            continue
        values = value if isinstance(value, list) else [value]
        texts = [x if isinstance(x, str) else json.dumps(x) for x in values if x is not None]
        name = re.sub(r'["\r\n]', "_", field)
        shown = f"{name.removesuffix('[]')}[]" if isinstance(value, list) else name
        parts += [(shown, text.encode()) for text in texts]
    head = '--{}\r\nContent-Disposition: form-data; name="{}"\r\n\r\n'
    pieces = [head.format(mark, name).encode() + content for name, content in parts]
    data = b"\r\n".join([*pieces, f"--{mark}--\r\n".encode()])
    return data, f"multipart/form-data; boundary={mark}"
