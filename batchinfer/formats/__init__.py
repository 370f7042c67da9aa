"""Output lines: what the worker writes for a row, and how every other command reads it. Pure.

There is one format on disk; docs/format.md describes it. The server's body stays as the server wrote it, except for
what varies between two equal answers.
"""

from __future__ import annotations

from batchinfer.formats.lines import (
    Answer,
    EncodedRow,
    OutputLine,
    answer_of,
    encode_row,
    read_line,
)

__all__ = [
    "Answer",
    "EncodedRow",
    "OutputLine",
    "answer_of",
    "encode_row",
    "read_line",
]
