"""Media of rows on their way to the engine: where they may be, what is refused, and whole runs with them."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from batchinfer.core.records import Failure
from batchinfer.core.row_codes import Code
from batchinfer.ledger.runs import read_run
from batchinfer.prompts.types import MediaRef, RowProblem
from batchinfer.runs.verify import worker_command
from batchinfer.storage import web
from batchinfer.storage.opening import open_store
from batchinfer.storage.retrying import RetryPolicy
from batchinfer.worker.background import Background
from batchinfer.worker.command import command as worker
from batchinfer.worker.media_fetching import (
    MediaCache,
    MediaFetcher,
)
from batchinfer.worker.worker_config import Limits
from echo_server import fake_endpoint
from making import (
    make_job,
    output_lines,
    run_worker_here,
    said,
)
from pictures import as_data_url, as_hub, picture
from web_server import WebServer, in_turn, plain

RED, BLUE = picture("red"), picture("blue", 50, "JPEG")


@pytest.fixture
def server() -> Iterator[WebServer]:
    found = WebServer()
    yield found
    found.close()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    retries = RetryPolicy(attempts=2, first_pause_seconds=0.01, longest_pause_seconds=0.01)
    monkeypatch.setattr(web.fetch, "__defaults__", (retries,))


def fetcher(**limits: Any) -> MediaFetcher:
    return MediaFetcher(Limits(**{"allow_private_urls": True, **limits}), open_store, Background())


def fetched(place: str, **limits: Any) -> bytes:
    found = fetcher(**limits).fetch_now([MediaRef(place=place)])
    assert not isinstance(found, Failure), found
    return found[0]


def code_of(place: str, **limits: Any) -> str:
    found = fetcher(**limits).fetch_now([MediaRef(place=place)])
    assert isinstance(found, Failure)
    assert found.message.startswith("image: ")
    return found.code


# --------------------------------------------------------------------------- one place


def test_what_is_at_a_place_arrives_as_it_was(server: WebServer, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(RED)
    server.answers["/a.png"] = plain(200, RED)
    open_store("memory://pictures").create("deep/a.png", RED)
    for place in (
        f"{server.url}/a.png",
        "memory://pictures/deep/a.png",
        "a.png",
        str(tmp_path / "a.png"),
        f"file://{tmp_path}/a.png",
    ):
        found = fetched(place, media_root=str(tmp_path), max_media_bytes=len(RED))
        assert found == RED, place
    assert fetched("a.png", media_root=server.url) == RED
    assert fetched("a.png", media_root="memory://pictures/deep") == RED


def test_an_image_in_a_bucket() -> None:
    bucket = "memory://images"
    open_store(bucket).create("a.png", RED)
    assert fetched(f"{bucket}/a.png") == RED
    assert code_of(f"{bucket}/b.png") == "media_unavailable"
    assert code_of(f"{bucket}/a.png", max_media_bytes=10) == "media_too_large"


@pytest.mark.parametrize(
    ("place", "code"),
    [
        ("/etc/hostname", "media_forbidden"),
        ("file:///etc/hostname", "media_forbidden"),
        ("../a.png", "media_forbidden"),
        ("ftp://example.com/a.png", "media_forbidden"),
        ("memory://pictures/none.png", "media_unavailable"),
        ("memory://pictures/../none.png", "media_unavailable"),
        ("http://nosuchhost.invalid/a.png", "media_unavailable"),
    ],
)
def test_a_place_that_cannot_be_used_fails_its_row(
    place: str, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    nobody = Mock(side_effect=socket.gaierror(socket.EAI_NONAME, "no such name"))
    monkeypatch.setattr(socket, "getaddrinfo", nobody)
    assert code_of(place) == code


def test_a_path_does_not_leave_the_root(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    (tmp_path / "secret.png").write_bytes(RED)
    (root / "link.png").symlink_to(tmp_path / "secret.png")
    (root / "folder").mkdir()
    limits = {"media_root": str(root)}
    for place in ("../secret.png", str(tmp_path / "secret.png"), "link.png", "x/../../secret.png"):
        assert code_of(place, **limits) == "media_forbidden", place
    for place in ("none.png", "folder", "a\0b", "x" * 300):
        assert code_of(place, **limits) == "media_unavailable", place
    open_store("memory://below").create("a.png", RED)
    assert code_of("../a.png", media_root="memory://below/here") == "media_unavailable"


def test_a_web_server_that_fails(server: WebServer) -> None:
    server.answers["/error"] = plain(500)
    server.answers["/large"] = plain(200, RED)
    server.answers["/again"] = in_turn(plain(502), plain(200, RED))
    assert code_of(f"{server.url}/error") == "media_unavailable"
    assert code_of(f"{server.url}/none") == "media_unavailable"
    assert code_of(f"{server.url}/large", max_media_bytes=len(RED) - 1) == "media_too_large"
    assert code_of(f"{server.url}/large", allow_private_urls=False) == "media_forbidden"
    assert fetched(f"{server.url}/again") == RED


# --------------------------------------------------------------------------- the cache


def test_an_image_that_rows_share_is_fetched_once(server: WebServer) -> None:
    begun = threading.Barrier(8)
    server.answers["/a"] = plain(200, RED)
    each = fetcher()
    found: list[Any] = []

    def work() -> None:
        begun.wait()
        found.append(each.fetch_now([MediaRef(place=f"{server.url}/a")]))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert server.seen == ["/a"]
    assert found == [[RED]] * 8


def test_rows_of_one_dead_link_wait_for_one_request_and_keep_no_other_waiting() -> None:
    cache = MediaCache(1 << 20)
    asked: list[str] = []
    all_begun, is_over = threading.Barrier(9), threading.Event()

    def fail() -> bytes:
        asked.append("dead")
        is_over.wait(60)
        raise RowProblem(Code.MEDIA_UNAVAILABLE, "gone")

    def ask() -> bytes:
        all_begun.wait()
        return cache.get("dead", fail)

    with ThreadPoolExecutor(8) as pool:
        waiting = [pool.submit(ask) for _ in range(8)]
        all_begun.wait()
        time.sleep(0.2)
        begun = time.monotonic()
        for number in range(300):
            assert cache.get(f"good {number}", lambda: RED) == RED
        assert time.monotonic() - begun < 30
        is_over.set()
    assert all(isinstance(each.exception(), RowProblem) for each in waiting)
    assert asked == ["dead"]
    assert cache.get("dead", lambda: RED) == RED, "the next row asks again"


def test_the_cache_counts_what_it_keeps_and_forgets_what_was_used_least_lately() -> None:
    cache = MediaCache(18_000)
    for place in ("a", "b", "a", "d"):
        assert cache.get(place, lambda: b"x" * 7000) == b"x" * 7000
    assert list(cache._kept) == ["a", "d"]
    assert cache._num_bytes == 2 * 8001


def test_the_media_of_one_row_have_a_limit_together(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(RED)
    few = fetcher(max_row_memory=0, max_media_bytes=3 * len(RED), media_root=str(tmp_path))
    refs = [MediaRef(place="a.png")] * 4
    found = few.fetch_now(refs)
    assert isinstance(found, Failure)
    assert found.code == "media_too_large"
    assert found.message.startswith("the row's media have more than")
    assert few.fetch_now(refs[:3]) == [RED] * 3


def test_a_fault_of_our_own_fails_the_row_and_not_the_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(_: str) -> bytes:
        raise ZeroDivisionError("oh")

    faulty = fetcher()
    monkeypatch.setattr(faulty, "_on_the_web", fail)
    found = faulty.fetch_now([MediaRef(place="http://a/b")])
    assert isinstance(found, Failure)
    assert found.code == "internal_error"
    assert "ZeroDivisionError: oh (test_media.py:" in found.message


# --------------------------------------------------------------------------- whole runs


def option(root: Path) -> list[str]:
    return [
        *("--column", "image=image", "--as-chat", "--allow-private-urls"),
        *("--media-root", str(root)),
    ]


def test_places_that_cannot_be_had_fail_their_rows_alone(server: WebServer, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(RED)
    server.answers["/a.png"] = plain(200, RED)
    server.answers["/error"] = plain(500)
    bad: dict[int, tuple[Any, str]] = {
        3: (7, "invalid_media"),
        18: ("../x.png", "media_forbidden"),
        19: ("gopher://x/y", "media_forbidden"),
        31: (f"{server.url}/none", "media_unavailable"),
        32: (f"{server.url}/error", "media_unavailable"),
        44: ("none.png", "media_unavailable"),
        45: ({"path": None}, "invalid_media"),
    }
    good = [as_hub(BLUE), f"{server.url}/a.png", "a.png", as_data_url(RED), None]

    def row(index: int) -> dict[str, Any]:
        value = bad[index][0] if index in bad else good[index % 5]
        return {"prompt": f"row {index}", "image": value}

    make_job(tmp_path / "job", rows=50, per_chunk=10, make_row=row)
    result = run_worker_here(tmp_path / "job", tmp_path / "run", *option(tmp_path))
    assert (result["request_count"], result["error_count"]) == (50, len(bad))
    images = set()
    for index, line in enumerate(output_lines(tmp_path / "run")):
        if index in bad:
            assert line["error"]["code"] == bad[index][1], (index, line)
            continue
        text, _, image = said(line).partition(" [image:")
        assert text == f"row {index}"
        images.add((index % 5 not in (1, 2, 3), bool(image), image))
    assert len(images) == 3, (
        "of every place comes the same image, and of the column another, or none"
    )
    assert server.seen.count("/a.png") == 1


# --------------------------------------------------------------------------- options


def test_the_columns_are_part_of_the_run_and_the_places_are_recorded(tmp_path: Path) -> None:
    rows = {"prompt": "What?", "image": as_hub(RED)}
    make_job(tmp_path / "job", rows=2, per_chunk=2, make_row=lambda _: rows)
    run_worker_here(tmp_path / "job", tmp_path / "run", *option(tmp_path))
    run = json.loads((tmp_path / "run/run.json").read_text())
    assert run["config"]["prompt"]["columns"] == {"image": ["image"]}
    assert run["recorded"]["options"]["media_root"] == str(tmp_path)
    command = worker_command(read_run(open_store(str(tmp_path / "run"))), "RUN", "JOB")
    assert """--column 'image=["image"]'""" in command
    assert f"--media-root {tmp_path}" in command
    assert "--allow-private-urls" in command


def test_an_endpoint_gets_links_as_they_are_and_other_images_as_data_urls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-a1B2")
    link = "https://example.com/a.png"
    part = {"type": "image_url", "image_url": {"url": link, "detail": "low"}}
    rows = [
        {"m": [{"role": "user", "content": [part, {"type": "text", "text": "What?"}]}]},
        {"m": "What now?", "image": as_hub(BLUE)},
        {"m": "And now?", "image": "a.png"},
    ]
    with fake_endpoint() as endpoint:
        make_job(
            tmp_path / "job",
            rows=3,
            per_chunk=3,
            make_row=lambda index: {"image": None, **rows[index]},
        )
        worker.main(
            [
                *("--job", str(tmp_path / "job"), "--output", str(tmp_path / "run")),
                *("--engine", "openai", "--base-url", endpoint.url, "--model", "echo-model"),
                *("--messages-column", "m", "--column", "image=image"),
            ],
            standalone_mode=False,
        )
        contents = [body["messages"][0]["content"] for body in endpoint.bodies]
    assert [part, {"type": "text", "text": "What?"}] in contents
    data_url = as_data_url(BLUE, "image/jpeg")
    sent = {"type": "image_url", "image_url": {"url": data_url}}
    assert [sent, {"type": "text", "text": "What now?"}] in contents
    assert not any("And now?" in str(content) for content in contents)
    errors = [line.get("error", {}).get("code") for line in output_lines(tmp_path / "run")]
    assert errors == [None, None, "media_forbidden"]
