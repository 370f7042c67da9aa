"""Small images, good and bad, in the forms in which data sets hold them."""

from __future__ import annotations

import base64
import io
from typing import Any


def picture(color: str = "red", size: int = 40, kind: str = "PNG") -> bytes:
    """The bytes of an image file of one colour."""
    from PIL import Image

    buffer = io.BytesIO()
    Image.new("RGB", (size, size), color).save(buffer, kind)
    return buffer.getvalue()


def as_base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def as_data_url(data: bytes, mime: str = "image/png") -> str:
    return f"data:{mime};base64,{as_base64(data)}"


def as_hub(data: bytes, path: str | None = "a.png") -> dict[str, Any]:
    """The value of a Hub's image column, in a row of a chunk."""
    return {"bytes": as_base64(data), "path": path}
