"""Which chunks are done again with --retry-errors, and with which generation."""

from unittest import mock

from batchinfer.core import codec, layout
from batchinfer.ledger.jobs import ChunkRef
from batchinfer.ledger.survey import newest_markers
from batchinfer.worker.own_markers import OwnMarkers, to_repair
from fakes import marker_record

OWN = [ChunkRef(name, "memory://job", f"chunks/{name}.jsonl") for name in "abcd"]


def goals(done: dict[str, int], failed: str, unread: str = "") -> dict[str, tuple[int, int | None]]:
    markers = {
        name: marker_record(rows_error=int(name in failed)) for name in done if name not in unread
    }
    return {ref.name: (ref.generation, ref.base) for ref in to_repair(OWN, done, markers)}


def test_a_repair_that_was_begun_is_brought_to_its_end_before_the_next():
    everything = dict.fromkeys("abcd", 0)
    assert goals(everything, "ab") == {"a": (1, 0), "b": (1, 0)}
    assert goals(everything | {"a": 1}, "ab") == {"b": (1, 0)}
    assert goals(everything | {"a": 1, "b": 1}, "a") == {"a": (2, 1)}
    assert goals(everything, "") == {}


def test_the_tenth_repair_is_later_than_the_ninth_though_its_name_is_listed_before(store):
    store.create(layout.output_key(layout.output_file("a", "n")), b"{}\n")
    for generation in (0, 2, 9, 10):
        store.create(layout.marker_key("a", generation), codec.encode(marker_record()))
    assert newest_markers(store) == {"a": 10}


def test_what_is_not_done_or_has_a_marker_that_cannot_be_read_is_done_from_the_start():
    assert goals({"a": 0, "b": 2, "c": 0}, "", unread="b") == {"b": (2, None), "d": (0, None)}


def test_a_worker_that_ends_lists_only_the_neighbours_of_its_chunks(store):
    """A thousand that ended together listed two hundred pages each: more than a bucket takes."""
    with mock.patch.object(store, "list", wraps=store.list) as listed:
        OwnMarkers(store, lambda work: work()).refuse_mixed("f", {}, ["part-04711", "part-04733"])
    listed.assert_called_once_with("outputs/part-047")
