"""Small images, good and bad, in the forms in which data sets hold them."""

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


def as_hub(data: bytes) -> dict[str, Any]:
    """The value of a Hub's image column, in a row of a chunk."""
    return {"bytes": as_base64(data), "path": "a.png"}


def clip(*colors: str) -> bytes:
    """The bytes of a video of 56 x 56 pixels with some frames of each colour, one after the other."""
    import av
    from PIL import Image

    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as file:
        stream = file.add_stream("mpeg4", rate=4)
        stream.width = stream.height = 56
        for color in colors:
            frame = av.VideoFrame.from_image(Image.new("RGB", (56, 56), color))
            for packet in [one for _ in range(4) for one in stream.encode(frame.reformat())]:
                file.mux(packet)
        file.mux(stream.encode())
    return buffer.getvalue()
