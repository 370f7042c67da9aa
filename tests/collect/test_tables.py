"""Files of rows on a scratch disk that has no room for them."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple, Self

import pytest

from batchinfer.collect.files import LINES, ShardWriter
from batchinfer.core.errors import ScratchFull


class Lines(NamedTuple):
    """Rows as lines."""

    lines: list[bytes]

    @property
    def num_rows(self) -> int:
        return len(self.lines)

    def part(self, start: int, stop: int) -> Self:
        return self._replace(lines=self.lines[start:stop])


@pytest.mark.parametrize("num_bytes", [10, 1 << 20])
def test_a_full_disk_is_said_in_a_line(tmp_path: Path, num_bytes: int) -> None:
    """What was written and what is still to be flushed fail alike; the second failure does not hide the first."""
    (tmp_path / "table-00000.jsonl").symlink_to("/dev/full")
    blocks = [Lines([b"x" * num_bytes + b"\n"])]
    with (
        pytest.raises(ScratchFull, match="is full"),
        ShardWriter(LINES, None, tmp_path, None) as writer,
    ):
        list(writer.files(blocks, lambda block: {LINES: block.lines}))
