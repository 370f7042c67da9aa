"""Helpers for child processes."""

from __future__ import annotations

import contextlib
import gc

from batchinfer.core.processes import no_garbage_collection


def test_garbage_collection_is_off_for_a_while_and_then_as_before() -> None:
    assert gc.isenabled()
    with no_garbage_collection():
        assert not gc.isenabled()
        with contextlib.suppress(ImportError), no_garbage_collection():
            raise ImportError
        assert not gc.isenabled()
    assert gc.isenabled()
    with contextlib.suppress(ImportError), no_garbage_collection():
        raise ImportError
    assert gc.isenabled()
