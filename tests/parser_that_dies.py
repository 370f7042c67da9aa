"""A process in place of batchinfer.engines.parser_host: it writes texts in capitals, and ends at the text "DIE"."""

from __future__ import annotations

import os
import sys

import msgspec

from batchinfer.engines.parser_process import Facts, Parts, Question
from batchinfer.prompts.limited_process import read_frame, write_frame

if __name__ == "__main__":
    read_frame(sys.stdin.buffer)
    write_frame(sys.stdout.buffer, msgspec.msgpack.encode(Facts()))
    while (frame := read_frame(sys.stdin.buffer)) is not None:
        texts = [each.text for each in msgspec.json.decode(frame, type=Question).answers]
        if "DIE" in texts:
            os._exit(7)
        parts = [Parts(text=text.upper()) for text in texts]
        write_frame(sys.stdout.buffer, msgspec.msgpack.encode(parts))
