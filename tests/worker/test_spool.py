"""The spool: finished rows of one chunk, found again by line."""

from __future__ import annotations

from pathlib import Path

import pytest

from batchinfer.worker import chunk
from batchinfer.worker.chunk import Spool


def test_a_spool_gives_payloads_in_line_order_whatever_the_order_of_arrival(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "spool", 3)
    spool.append(b"<two><zero>", [(2, 1, 3), (0, 6, 4)])
    spool.append(b"<one>", [(1, 1, 3)])
    assert list(spool.payloads()) == [b"zero", b"one", b"two"]
    assert spool.read(0, spool.size_bytes) == b"<two><zero><one>"
    assert spool.read(11, 16) == b"<one>"
    spool.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("block_bytes", [1, 3, 100])
def test_a_spool_knows_where_its_records_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block_bytes: int
) -> None:
    monkeypatch.setattr(chunk, "_BLOCK_BYTES", block_bytes)
    spool = Spool(tmp_path / "spool", 1)
    spool.append(b"a\nlong\n\nxyz\n", [])
    ends = [spool.record_end(place) for place in range(1, 14)]
    assert ends == [2, 2, 7, 7, 7, 7, 7, 8, 12, 12, 12, 12, 12]
    spool.close()
