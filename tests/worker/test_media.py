"""Media of rows on their way to the engine: where they may be, what is refused, and whole runs with them."""

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest.mock import Mock

import pytest

from batchinfer.core.records import Failure
from batchinfer.core.row_codes import Code
from batchinfer.prompts.types import MediaRef, RowError
from batchinfer.storage import web
from batchinfer.storage.opening import open_store
from batchinfer.worker.background import Background
from batchinfer.worker.media_fetching import MediaCache, MediaFetcher
from batchinfer.worker.worker_config import Limits
from fakes import QUICK
from making import make_job, output_lines, run_worker_here, said
from pictures import as_data_url, as_hub, picture
from web_server import reply

RED, BLUE = picture("red"), picture("blue", 50, "JPEG")


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(web.fetch, "__defaults__", (QUICK,))


def fetcher(**limits: Any) -> MediaFetcher:
    return MediaFetcher(Limits(**{"allow_private_urls": True, **limits}), open_store, Background())


def outcome(place: str, **limits: Any) -> bytes | str:
    """The bytes at a place, or the code of the row that names it."""
    found = fetcher(**limits).fetch_now([MediaRef(place=place)])
    if isinstance(found, Failure):
        assert found.message.startswith("image: ")
        return found.code
    return found[0]


# --------------------------------------------------------------------------- one place

FORBIDDEN, UNAVAILABLE, TOO_LARGE = "media_forbidden", "media_unavailable", "media_too_large"


@pytest.fixture
def root(tmp_path):
    """A folder with an image, a link that leaves it, and a secret beside it. A bucket has the image, too."""
    (tmp_path / "root" / "folder").mkdir(parents=True)
    (tmp_path / "root" / "a.png").write_bytes(RED)
    (tmp_path / "secret.png").write_bytes(RED)
    (tmp_path / "root" / "link.png").symlink_to(tmp_path / "secret.png")
    open_store("memory://pictures").delete(["deep/a.png"])
    open_store("memory://pictures").create("deep/a.png", RED)
    return tmp_path / "root"


@pytest.mark.parametrize(
    ("media_root", "place", "expected"),
    [
        ("{root}", "a.png", RED),
        ("{root}", "{root}/a.png", RED),
        ("{root}", "memory://pictures/deep/a.png", RED),
        ("memory://pictures/deep", "a.png", RED),
        ("", "{root}/a.png", FORBIDDEN),
        ("", "file://{root}/a.png", FORBIDDEN),
        ("", "ftp://example.com/a.png", FORBIDDEN),
        ("", "memory://pictures/none.png", UNAVAILABLE),
        ("", "http://nosuchhost.invalid/a.png", UNAVAILABLE),
        *(("{root}", place, FORBIDDEN) for place in ("../secret.png", "{root}/../secret.png")),
        *(("{root}", place, FORBIDDEN) for place in ("link.png", "x/../../secret.png")),
        *(("{root}", place, UNAVAILABLE) for place in ("b.png", "folder", "a\0b", "x" * 300)),
        ("memory://pictures/deep/here", "../a.png", FORBIDDEN),
        ("memory://pictures/deep", "/a.png", FORBIDDEN),
    ],
)
def test_what_is_at_a_place_arrives_as_it_was_and_a_path_does_not_leave_the_root(
    root, monkeypatch, media_root, place, expected
):
    nobody = Mock(side_effect=socket.gaierror(socket.EAI_NONAME, "no such name"))
    monkeypatch.setattr(socket, "getaddrinfo", nobody)
    limits = {"media_root": media_root.format(root=root), "max_media_bytes": len(RED)}
    assert outcome(place.format(root=root), **limits) == expected


def test_an_image_of_a_bucket_or_a_web_server_may_be_too_large_or_gone(server, root):
    server.answers |= {
        "/a.png": reply(200, RED),
        "/error": reply(500),
        "/again": [reply(502), reply(200, RED)],
    }
    for place in (f"{server.url}/a.png", "memory://pictures/deep/a.png", f"{server.url}/again"):
        assert outcome(place) == RED
    assert outcome("a.png", media_root=server.url) == RED
    server.answers["/a%231.png"] = reply(200, BLUE)
    assert outcome("a#1.png", media_root=server.url) == BLUE
    for place in (f"{server.url}/a.png", "memory://pictures/deep/a.png"):
        assert outcome(place, max_media_bytes=len(RED) - 1) == TOO_LARGE
    assert outcome(f"{server.url}/a.png", allow_private_urls=False) == FORBIDDEN
    assert outcome(f"{server.url}/error") == outcome(f"{server.url}/none") == UNAVAILABLE


# --------------------------------------------------------------------------- the cache


@pytest.mark.parametrize("is_dead", [False, True])
def test_rows_of_one_link_wait_for_one_request_and_keep_no_other_waiting(*, is_dead):
    cache = MediaCache(1 << 20)
    asked: list[str] = []
    all_begun, is_over = threading.Barrier(9), threading.Event()

    def fetch() -> bytes:
        asked.append("link")
        is_over.wait(60)
        if is_dead:
            raise RowError(Code.MEDIA_UNAVAILABLE, "gone")
        return RED

    def ask() -> bytes:
        all_begun.wait()
        return cache.get("link", fetch)

    with ThreadPoolExecutor(8) as pool:
        waiting = [pool.submit(ask) for _ in range(8)]
        all_begun.wait()
        time.sleep(0.2)
        begun = time.monotonic()
        for number in range(300):
            assert cache.get(f"good {number}", lambda: BLUE) == BLUE
        assert time.monotonic() - begun < 30
        is_over.set()
    found = [type(each.exception()) if is_dead else each.result() for each in waiting]
    assert found == [RowError if is_dead else RED] * 8
    assert asked == ["link"]
    # After a failure, the next row asks again.
    assert cache.get("link", lambda: BLUE) == (BLUE if is_dead else RED)


def test_the_cache_counts_what_it_keeps_and_forgets_what_was_used_least_lately():
    cache = MediaCache(18_000)
    for place in ("a", "b", "a", "d"):
        assert cache.get(place, lambda: b"x" * 7000) == b"x" * 7000
    assert list(cache._kept) == ["a", "d"]
    assert cache._num_bytes == 2 * 8001


def test_the_media_of_one_row_have_a_limit_together(tmp_path):
    (tmp_path / "a.png").write_bytes(RED)
    few = fetcher(max_row_memory=0, max_media_bytes=3 * len(RED), media_root=str(tmp_path))
    refs = [MediaRef(place="a.png")] * 4
    found = few.fetch_now(refs)
    assert isinstance(found, Failure)
    assert found.code == "media_too_large"
    assert found.message.startswith("the row's media have more than")
    assert few.fetch_now(refs[:3]) == [RED] * 3


def test_a_fault_of_our_own_fails_the_row_and_not_the_worker(monkeypatch):
    def fail(_: str) -> bytes:
        raise ZeroDivisionError("oh")

    faulty = fetcher()
    monkeypatch.setattr(faulty, "_on_the_web", fail)
    found = faulty.fetch_now([MediaRef(place="http://a/b")])
    assert isinstance(found, Failure)
    assert found.code == "internal_error"
    assert "ZeroDivisionError: oh (test_media.py:" in found.message


# --------------------------------------------------------------------------- whole runs


def test_places_that_cannot_be_had_fail_their_rows_alone(server, tmp_path):
    (tmp_path / "a.png").write_bytes(RED)
    server.answers["/a.png"] = reply(200, RED)
    link = f"{server.url}/a.png"
    places = [7, "../x.png", f"{server.url}/none", None, as_hub(BLUE), link, link, "a.png"]
    places.append(as_data_url(RED))
    row = lambda index: {"prompt": "say", "image": places[index]}  # noqa: E731
    make_job(tmp_path / "job", rows=9, per_chunk=3, make_row=row)
    options = ("--column", "image=image", "--as-chat", "--allow-private-urls", "--media-root")
    run_worker_here(tmp_path / "job", tmp_path / "run", *options, str(tmp_path))
    lines = output_lines(tmp_path / "run")
    codes = [line["error"]["code"] for line in lines[:3]]
    assert codes == ["invalid_media", "media_forbidden", "media_unavailable"]
    none, blue, *red = [said(line).removeprefix("say") for line in lines[3:]]
    assert (none, len(set(red))) == ("", 1)
    assert {each.partition(":")[0] for each in (blue, *red)} == {" [image"}
    assert blue != red[0]
    assert server.seen.count("/a.png") == 1
