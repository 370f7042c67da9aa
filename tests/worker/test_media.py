"""Images of rows on their way to the engine: where they may be, what is refused, and whole runs with them."""

from __future__ import annotations

import hashlib
import json
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from batchinfer.check.command import command as check
from batchinfer.cli.main import main
from batchinfer.core.errors import BatchinferError, ConfigError, RowError, RunMismatch
from batchinfer.core.records import Failure, Media
from batchinfer.ledger.runs import read_run
from batchinfer.ledger.survey import finished_chunks
from batchinfer.prompts import Code, MediaRef, PromptConfig
from batchinfer.prompts.media import read_images
from batchinfer.runs.resume_command import worker_command
from batchinfer.split.command import SplitConfig, run_split
from batchinfer.storage import web
from batchinfer.storage.opening import open_store
from batchinfer.storage.retrying import RetryPolicy
from batchinfer.worker.command import command as worker
from batchinfer.worker.config import Limits
from batchinfer.worker.media import (
    MAX_PIXELS,
    UNAVAILABLE_SECONDS,
    MediaCache,
    MediaFetcher,
    check_media,
    look_at_image,
    split_object,
)
from fake_endpoint import fake_endpoint, without_certificates
from making import (
    finish_process,
    make_job,
    run_process,
    run_worker_here,
    start_process,
    worker_arguments,
)
from pictures import as_base64, as_data_url, as_hub, bomb, picture
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
    return MediaFetcher(Limits(**{"allow_private_urls": True, **limits}), open_store)


def fetched(value: Any, **limits: Any) -> list[Media]:
    found = fetcher(**limits).fetch_now(read_images(value, "image"))
    assert not isinstance(found, Failure), found
    return found


def code_of(value: Any, **limits: Any) -> str:
    found = fetcher(**limits).fetch_now(read_images(value, "image"))
    assert isinstance(found, Failure)
    assert found.message.startswith("image 0: ")
    return found.code


def word(data: bytes, size: int) -> str:
    """How the echo engine tells an image."""
    return f"[image:{size}x{size}:{hashlib.sha256(data).hexdigest()[:12]}]"


# --------------------------------------------------------------------------- one image


def test_an_image_arrives_as_it_was(server: WebServer, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(RED)
    server.answers["/a.png"] = plain(200, RED)
    open_store("memory://pictures").create("deep/a.png", RED)
    expected = Media(
        data=RED,
        mime="image/png",
        width=40,
        height=40,
        digest=hashlib.sha256(RED).hexdigest(),
    )
    root = str(tmp_path)
    for value in (
        as_hub(RED),
        as_base64(RED),
        as_data_url(RED),
        f"{server.url}/a.png",
        "memory://pictures/deep/a.png",
        "a.png",
        str(tmp_path / "a.png"),
        f"file://{tmp_path}/a.png",
    ):
        assert fetched(value, media_root=root) == [expected], value
    assert fetched("a.png", media_root=server.url) == [expected]
    assert fetched("a.png", media_root="memory://pictures/deep") == [expected]
    assert [each.mime for each in fetched([as_hub(BLUE), as_hub(RED)])] == [
        "image/jpeg",
        "image/png",
    ]


@pytest.mark.s3
def test_an_image_in_a_bucket(s3_url: Any) -> None:
    bucket = s3_url("pictures")
    open_store(bucket).create("a.png", RED)
    assert fetched(f"{bucket}/a.png")[0].data == RED
    assert code_of(f"{bucket}/b.png") == "media_not_found"
    assert code_of(f"{bucket}/a.png", max_media_bytes=10) == "media_too_large"


@pytest.mark.parametrize(
    ("value", "code"),
    [
        (as_base64(RED)[:-40] + "!" * 40, "media_forbidden"),  # no base64, so it counts as a path
        ({"bytes": "!!!!"}, "invalid_media"),
        ({"bytes": as_base64(b"no image")}, "invalid_media"),
        ({"bytes": as_base64(RED[:60])}, "invalid_media"),
        ({"bytes": as_base64(picture("red", 200, "JPEG")[:700])}, "invalid_media"),
        (as_data_url(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n"), "invalid_media"),
        (as_hub(bomb()), "media_too_large"),
        ("/etc/hostname", "media_forbidden"),
        ("file:///etc/hostname", "media_forbidden"),
        ("../a.png", "media_forbidden"),
        ("ftp://example.com/a.png", "media_forbidden"),
        ("memory://pictures/none.png", "media_not_found"),
        ("memory://pictures/../none.png", "media_not_found"),
        ("http://nosuchhost.invalid/a.png", "media_not_found"),
    ],
)
def test_an_image_that_cannot_be_used_fails_its_row(
    value: Any, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nobody(host: str, _port: int) -> list[Any]:
        raise web.ObjectNotFound(f"{host}: no such host")

    monkeypatch.setattr(web, "_resolve", nobody)
    assert code_of(value) == code


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
        assert code_of(place, **limits) == "media_not_found", place
    open_store("memory://below").create("a.png", RED)
    assert code_of("../a.png", media_root="memory://below/here") == "media_not_found"


def test_a_web_server_that_fails(server: WebServer) -> None:
    server.answers["/error"] = plain(500)
    server.answers["/page"] = plain(200, b"<html>Sign in</html>")
    server.answers["/large"] = plain(200, RED)
    server.answers["/again"] = in_turn(plain(502), plain(200, RED))
    assert code_of(f"{server.url}/error") == "media_unavailable"
    assert code_of(f"{server.url}/none") == "media_not_found"
    assert code_of(f"{server.url}/page") == "invalid_media"
    assert code_of(f"{server.url}/large", max_media_bytes=len(RED) - 1) == "media_too_large"
    assert code_of(f"{server.url}/large", allow_private_urls=False) == "media_forbidden"
    assert fetched(f"{server.url}/again")[0].data == RED


def test_an_image_of_too_many_pixels_is_not_decoded() -> None:
    assert MAX_PIXELS < 100_000**2
    found = fetcher().fetch_now(read_images(as_hub(bomb()), "image"))
    assert isinstance(found, Failure)
    assert "10000000000 pixels" in found.message


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "BMP", "WEBP", "TIFF", "PPM"])
def test_kinds_of_images(kind: str) -> None:
    media = look_at_image(picture("green", 64, kind))
    assert (media.width, media.height) == (64, 64)
    assert media.mime.startswith("image/")


# --------------------------------------------------------------------------- the cache


def test_an_image_that_rows_share_is_fetched_once(server: WebServer) -> None:
    begun = threading.Barrier(8)
    server.answers["/a"] = plain(200, RED)
    server.answers["/b"] = plain(404)
    both = fetcher()
    found: list[Any] = []

    def work() -> None:
        begun.wait()
        places = [f"{server.url}/{path}" for path in "ab"]
        found.extend(both.fetch_now([MediaRef(place=place)]) for place in places)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(server.seen) == ["/a", "/b"]
    assert sum(isinstance(each, Failure) for each in found) == 8


def test_the_cache_drops_what_was_used_last_of_all() -> None:
    cache = MediaCache(3 * 2001)
    asked: list[str] = []

    def get(name: str) -> None:
        def fetch() -> Media:
            asked.append(name)
            return Media(data=b"x" * 1000)

        assert cache.get(name, fetch).data == b"x" * 1000

    for name in "abcabda":
        get(name)
    assert asked == ["a", "b", "c", "d"]
    get("c")
    assert asked[-1] == "c"


def test_an_image_that_could_not_be_fetched_is_asked_for_again_after_a_while() -> None:
    now = [0.0]
    cache = MediaCache(10**6, lambda: now[0])
    asked: list[str] = []

    def get(name: str, code: Code) -> None:
        def fetch() -> Media:
            asked.append(name)
            raise RowError(code.value, "no")

        with pytest.raises(RowError) as caught:
            cache.get(name, fetch)
        assert caught.value.code == code.value

    for seconds in (0.0, UNAVAILABLE_SECONDS - 1, UNAVAILABLE_SECONDS + 1, UNAVAILABLE_SECONDS + 2):
        now[0] = seconds
        get("away", Code.MEDIA_UNAVAILABLE)
        get("broken", Code.INVALID_MEDIA)
    assert asked == ["away", "broken", "away"]


def test_a_row_gets_its_image_once_the_server_is_well_again(
    server: WebServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.answers["/a"] = in_turn(plain(500), plain(500), plain(200, RED))
    rows = fetcher()
    [ref] = read_images(f"{server.url}/a", "image")
    assert isinstance(rows.fetch_now([ref]), Failure)
    assert isinstance(rows.fetch_now([ref]), Failure)
    assert len(server.seen) == 2
    monkeypatch.setattr(rows._cache, "_now", lambda: time.monotonic() + UNAVAILABLE_SECONDS + 1)
    assert isinstance(rows.fetch_now([ref]), list)


def test_the_cache_counts_long_places() -> None:
    cache = MediaCache(20_000)
    for index in range(100):
        with pytest.raises(RowError):
            cache.get(f"{index}" + "x" * 5000, broken)
    assert len(cache._kept) == 3


def broken() -> Media:
    raise RowError("invalid_media", "no image")


def test_the_images_of_one_row_have_a_limit_together() -> None:
    found = fetcher(max_row_memory=0, max_media_bytes=3 * len(RED)).fetch_now(
        read_images([as_hub(RED)] * 4, "image")
    )
    assert isinstance(found, Failure)
    assert found.code == "media_too_large"
    assert found.message.startswith("image 3: the row's images")
    assert len(fetched([as_hub(RED)] * 3, max_row_memory=0, max_media_bytes=3 * len(RED))) == 3


def test_a_fault_of_our_own_fails_the_row_and_not_the_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(_: bytes) -> Media:
        raise ZeroDivisionError("oh")

    monkeypatch.setattr("batchinfer.worker.media.look_at_image", fail)
    found = fetcher().fetch_now(read_images(as_hub(RED), "image"))
    assert isinstance(found, Failure)
    assert found.code == "internal_error"
    assert "ZeroDivisionError: oh (test_media.py:" in found.message


def test_rows_that_name_many_buckets_leave_few_of_them_open() -> None:
    found = fetcher()
    for index in range(200):
        assert isinstance(found.fetch_now([MediaRef(place=f"memory://b{index}/a")]), Failure)
    assert len(found._stores) <= 64


# --------------------------------------------------------------------------- whole runs


def answers(run: Path) -> list[dict[str, Any]]:
    store = open_store(str(run))
    found = []
    for name in sorted(finished_chunks(store)):
        data = store.get(f"outputs/{name}.jsonl").data
        found += [json.loads(line) for line in data.splitlines()]
    return found


def option(server: WebServer, root: Path) -> list[str]:
    return [
        *("--image-column", "image", "--as-chat", "--allow-private-urls", "--no-timing"),
        *("--media-root", str(root), "--limit-mm-per-prompt", "image=2"),
    ]


def test_bad_images_among_good_ones_fail_their_rows_alone(
    server: WebServer, tmp_path: Path
) -> None:
    (tmp_path / "a.png").write_bytes(RED)
    server.answers["/a.png"] = plain(200, RED)
    server.answers["/error"] = plain(500)
    bad: dict[int, tuple[Any, str]] = {
        3: (7, "invalid_media"),
        10: (as_hub(b"no image"), "invalid_media"),
        11: (as_hub(RED[:50]), "invalid_media"),
        17: (as_hub(bomb()), "media_too_large"),
        18: ("../x.png", "media_forbidden"),
        19: ("gopher://x/y", "media_forbidden"),
        25: ([as_hub(RED)] * 3, "too_many_media"),
        31: (f"{server.url}/none", "media_not_found"),
        32: (f"{server.url}/error", "media_unavailable"),
        44: ("none.png", "media_not_found"),
        45: ({"path": None}, "invalid_media"),
    }
    good = [as_hub(BLUE), f"{server.url}/a.png", "a.png", as_data_url(RED), None]

    def row(index: int) -> dict[str, Any]:
        value = bad[index][0] if index in bad else good[index % 5]
        return {"prompt": f"row {index}", "image": value}

    make_job(tmp_path / "job", rows=50, per_chunk=10, make_row=row)
    result = run_worker_here(tmp_path / "job", tmp_path / "run", *option(server, tmp_path))
    assert (result["request_count"], result["error_count"]) == (50, len(bad))
    words = [word(BLUE, 50), *[word(RED, 40)] * 3]
    for index, line in enumerate(answers(tmp_path / "run")):
        if index in bad:
            assert line["error"]["code"] == bad[index][1], (index, line)
            continue
        image = "" if index % 5 == 4 else f" {words[index % 5]}"
        assert line["choices"][0]["text"] == f"row {index}{image}"
    assert server.seen.count("/a.png") == 1


def test_equal_rows_with_other_images_are_not_equal(tmp_path: Path) -> None:
    images = [as_hub(RED), as_hub(BLUE)]
    make_job(
        tmp_path / "job",
        rows=8,
        per_chunk=4,
        make_row=lambda index: {"prompt": "What?", "image": images[index % 2]},
    )
    options = ["--image-column", "image", "--as-chat", "--dedupe", "--temperature", "0"]
    result = run_worker_here(tmp_path / "job", tmp_path / "run", *options)
    assert result["rows_copied"] == 6
    texts = [line["choices"][0]["text"] for line in answers(tmp_path / "run")]
    assert texts == [f"What? {word(RED, 40)}", f"What? {word(BLUE, 50)}"] * 4


def test_a_killed_worker_goes_on_and_the_answers_are_the_same(
    server: WebServer, tmp_path: Path
) -> None:
    pictures = [picture("red", 40 + index) for index in range(60)]
    for index, data in enumerate(pictures):
        server.answers[f"/{index}"] = plain(200, data)

    def row(index: int) -> dict[str, Any]:
        image = f"{server.url}/{index}" if index % 2 else as_hub(pictures[index])
        return {"prompt": f"row {index}", "image": image}

    job = tmp_path / "job"
    make_job(job, rows=60, per_chunk=20, make_row=row)
    more = option(server, tmp_path)
    slow = ["--echo-latency-seconds", "0.2", "--max-num-seqs", "4", "--checkpoint-seconds", "0.1"]
    process = start_process(worker_arguments(job, tmp_path / "killed", *more, *slow))
    checkpoints = tmp_path / "killed" / "checkpoints"
    try:
        while not list(checkpoints.rglob("*.jsonl")):
            assert process.poll() is None, process.communicate()
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
    finally:
        process.kill()
    assert finish_process(process).status == -signal.SIGKILL
    assert not list((tmp_path / "killed/outputs").glob("part-00002*"))
    assert run_worker_here(job, tmp_path / "killed", *more)["rows_resumed"] > 0
    run_worker_here(job, tmp_path / "whole", *more)
    assert answers(tmp_path / "killed") == answers(tmp_path / "whole")
    assert len(answers(tmp_path / "whole")) == 60


# --------------------------------------------------------------------------- options


def test_options_that_could_not_work_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no folder"):
        check_media(PromptConfig(), Limits(media_root=str(tmp_path / "none")))
    with pytest.raises(ConfigError, match="scheme"):
        check_media(PromptConfig(), Limits(media_root="ftp://a/b"))
    (tmp_path / "in.csv").write_text("prompt,image\nWhat?,a.png\n")
    config = SplitConfig(sources=[str(tmp_path / "in.csv")], output=str(tmp_path / "job"))
    run_split(config, store=open_store(str(tmp_path / "job")))
    with pytest.raises(BatchinferError, match="--image-column picture: no column"):
        run_worker_here(tmp_path / "job", tmp_path / "run", "--image-column", "picture")
    with pytest.raises(ConfigError, match="limit-mm-per-prompt"):
        run_worker_here(tmp_path / "job", tmp_path / "run", "--limit-mm-per-prompt", "image=many")


def test_a_worker_without_pillow_ends_and_fails_no_row_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is known before the start only of runs with columns of images: messages have images, too."""
    image = {"type": "image_url", "image_url": {"url": as_data_url(RED)}}
    plain_row = {"messages": [{"role": "user", "content": "What?"}]}
    rows = [plain_row, {"messages": [{"role": "user", "content": [image]}]}]
    make_job(tmp_path / "job", rows=2, per_chunk=2, make_row=rows.__getitem__)
    work = ["--job", f"{tmp_path}/job", "--output", f"{tmp_path}/run", "--engine", "echo"]
    work += ["--messages-column", "messages", "--no-timing"]
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "PIL", None)
        with pytest.raises(ConfigError, match="pillow"):
            check_media(PromptConfig(image_columns=["image"]), Limits())
        assert main(["worker", *work]) == 2
    assert "the package pillow is not installed" in capsys.readouterr().err
    assert answers(tmp_path / "run") == []
    assert main(["worker", *work]) == 0
    assert [line["status"] for line in answers(tmp_path / "run")] == ["ok", "ok"]


def test_the_columns_and_the_limit_decide_answers_and_are_part_of_the_run(tmp_path: Path) -> None:
    rows = {"prompt": "What?", "image": as_hub(RED)}
    make_job(tmp_path / "job", rows=2, per_chunk=2, make_row=lambda _: rows)
    base = ["--image-column", "image", "--as-chat", "--media-root", str(tmp_path)]
    run_worker_here(tmp_path / "job", tmp_path / "run", *base, "--limit-mm-per-prompt", "image=2")
    run = json.loads((tmp_path / "run/run.json").read_text())
    assert run["config"]["limit_mm_per_prompt"] == {"image": 2}
    assert run["config"]["prompt"]["image_columns"] == ["image"]
    assert run["recorded"]["media_root"] == str(tmp_path)
    command = worker_command(read_run(open_store(str(tmp_path / "run"))), "RUN", "JOB")
    assert "--image-column image" in command
    assert "--limit-mm-per-prompt image=2" in command
    assert f"--media-root {tmp_path}" in command
    with pytest.raises(RunMismatch, match="limit_mm_per_prompt"):
        run_worker_here(tmp_path / "job", tmp_path / "run", *base)


def test_places_of_buckets() -> None:
    assert split_object("s3://bucket/a/b.png") == ("s3://bucket", "a/b.png")
    assert split_object("hf://datasets/o/n/x/b.png") == ("hf://datasets/o/n", "x/b.png")


def test_tables_have_the_images_bytes_back(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [{"q": f"row {i}", "image": {"bytes": RED, "path": f"{i}.png"}} for i in range(3)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "in.parquet")
    done = run_process(
        [
            *("run", str(tmp_path / "in.parquet"), "-o", str(tmp_path / "out.parquet")),
            *("--engine", "echo", "--prompt-column", "q", "--as-chat", "--image-column", "image"),
            *("--with-source", "--log-level", "warning"),
        ]
    )
    assert done.status == 0, done.stderr
    found = pq.read_table(tmp_path / "out.parquet").to_pylist()
    assert [row["image"] for row in found] == [row["image"] for row in rows]
    assert found[1]["text"] == f"row 1 {word(RED, 40)}"


def test_preview_and_check_show_images_and_find_broken_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values = [as_hub(BLUE), [as_hub(RED), as_hub(BLUE)], as_hub(b"no image"), "a.png"]
    lines = [json.dumps({"prompt": f"row {i}", "image": value}) for i, value in enumerate(values)]
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    config = SplitConfig(sources=[str(tmp_path / "in.jsonl")], output=str(tmp_path / "job"))
    run_split(config, store=open_store(str(tmp_path / "job")))
    options = ["--image-column", "image", "--as-chat", "--preview", "4"]
    run_worker_here(tmp_path / "job", tmp_path / "run", *options)
    shown = capsys.readouterr().err
    assert f"image 1: 50 x 50 pixels, image/jpeg, {len(BLUE)} bytes" in shown
    assert "error row: invalid_media" in shown
    assert "error row: media_forbidden" in shown

    common = ["--engine", "echo", "--prompt-column", "prompt", "--image-column", "image"]
    found = check.main([str(tmp_path / "in.jsonl"), *common, "--as-chat"], standalone_mode=False)
    assert found["sample"]["errors"] == {"invalid_media": 1, "media_forbidden": 1}
    assert found["sample"]["images"]["mean"] == 1.5
    assert found["sample"]["images"]["largest"] == "50 x 50"
    assert "images: 1.5 a row" in capsys.readouterr().err


def test_an_endpoint_gets_links_as_they_are_and_other_images_as_data_urls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("openai")
    monkeypatch.setenv("OPENAI_API_KEY", "sk-a1B2")
    monkeypatch.setattr("openai.DefaultAsyncHttpxClient", without_certificates())
    link = "https://example.com/a.png"
    part = {"type": "image_url", "image_url": {"url": link, "detail": "low"}}
    rows = [
        {"m": [{"role": "user", "content": [part, {"type": "text", "text": "What?"}]}]},
        {"m": "What now?", "image": as_hub(BLUE)},
        {"m": "And now?", "image": as_hub(b"no image")},
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
                *("--messages-column", "m", "--image-column", "image"),
            ],
            standalone_mode=False,
        )
        contents = [body["messages"][0]["content"] for body in endpoint.bodies]
    assert [part, {"type": "text", "text": "What?"}] in contents
    data_url = as_data_url(BLUE, "image/jpeg")
    sent = {"type": "image_url", "image_url": {"url": data_url}}
    assert [sent, {"type": "text", "text": "What now?"}] in contents
    assert not any("And now?" in str(content) for content in contents)
    errors = [line["error"] and line["error"]["code"] for line in answers(tmp_path / "run")]
    assert errors == [None, None, "invalid_media"]
