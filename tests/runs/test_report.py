"""`batchinfer report`: one page, whatever the state of the run and whatever its rows say."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree as ET

import msgspec
import pytest

from batchinfer.cli import main
from batchinfer.core import codec, layout
from batchinfer.core.errors import ConfigError, InputError
from batchinfer.core.records import Marker, Money
from batchinfer.runs.report import ReportConfig, run_report
from batchinfer.storage import Store
from batchinfer.storage.memory import MemoryStore
from big_run import HOSTILE, Shape, make_run, make_workers, write_big_run
from fakes import FakeClock, worker_record
from making import output_key, overwrite, read_marker

NOW = 1_790_000_000.0
SMALL = Shape(num_chunks=20, rows_per_chunk=10, num_workers=3, now=NOW, text=HOSTILE)
SECTIONS = {
    "throughput",
    "progress",
    "timeline",
    "prompt-lengths",
    "answer-lengths",
    "finish",
    "cost",
    "errors",
    "workers",
    "samples",
    "settings",
}


class Page(HTMLParser):
    """What a page holds: tags with their attributes, ids, and visible text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        return "".join(self.words)

    @property
    def ids(self) -> set[str]:
        return {attrs["id"] or "" for _, attrs in self.tags if "id" in attrs}


def drawings(text: str) -> list[ET.Element]:
    """Every SVG of a page, which must be well-formed XML."""
    found, depth, begin = [], 0, 0
    for tag in re.finditer(r"<svg |</svg>", text):
        begin = tag.start() if not depth else begin
        depth += 1 if tag[0] == "<svg " else -1
        if not depth:
            found.append(ET.fromstring(text[begin : tag.end()]))
    return found


@pytest.fixture
def root(request: pytest.FixtureRequest) -> str:
    return f"memory://{request.node.name}"


def opener() -> Callable[[str], Store]:
    return lambda url: MemoryStore(url, clock=lambda: NOW)


def write(root: str, shape: Shape = SMALL) -> str:
    run = f"{root}/runs/a"
    write_big_run(opener()(root), opener()(run), shape)
    return run


def make(run: str, **values: object) -> str:
    config = ReportConfig(run=run, output=f"{run}/pages/report.html", **values)  # type: ignore[arg-type]
    run_report(config, open_store=opener(), clock=FakeClock(NOW))
    return opener()(run).get("pages/report.html").data.decode()


def test_the_page_has_every_section(root: str) -> None:
    page = Page(make(write(root)))
    assert page.ids >= SECTIONS
    for word in ("sky-2026-000", "prompt_too_long", "sampling.temperature", "stop", "kill"):
        assert word in page.text


def test_cost_and_hours_stand_beside_their_limits(root: str) -> None:
    run = write(root)
    assert "--max-cost" not in Page(make(run)).text
    store = opener()(run)
    record = worker_record(
        id="the-last",
        state="stopped",
        started=NOW - 3600,
        starts=[NOW - 1800],
        heartbeat=NOW,
        up_seconds=1800.0,
        money=Money(
            price_per_hour=4.0, price_source="its own", cost=2.0, max_cost=40.0, max_hours=9.0
        ),
    )
    store.create("workers/the-last.json", codec.encode(record))
    text = Page(make(run)).text
    assert "of $40.00 (--max-cost)" in text
    assert "of 9 (--max-hours)" in text


def test_the_page_asks_for_nothing_and_runs_nothing(root: str) -> None:
    text = make(write(root))
    page = Page(text)
    names = {tag for tag, _ in page.tags}
    assert not names & {
        "script",
        "link",
        "img",
        "iframe",
        "object",
        "embed",
        "a",
        "form",
        "base",
        "audio",
        "video",
    }
    for tag, attrs in page.tags:
        assert not any(
            name.startswith("on") or name in ("src", "href", "style") for name in attrs
        ), tag
    assert not re.search(r"url\(|@import", text)
    policy = next(
        attrs["content"]
        for tag, attrs in page.tags
        if attrs.get("http-equiv") == "Content-Security-Policy"
    )
    assert policy is not None
    assert policy.startswith("default-src 'none'; style-src 'sha256-")
    assert "unsafe" not in policy


def test_the_policy_names_the_style_that_is_there(root: str) -> None:
    text = make(write(root))
    style = text.split("<style>")[1].split("</style>")[0]
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert f"sha256-{digest}" in text


def test_hostile_answers_prompts_and_errors_are_text(root: str) -> None:
    page = Page(make(write(root)))
    # It stands in the answers, in the example of an error, and in the configuration.
    assert page.text.count(HOSTILE) >= 4


def test_charts_are_well_formed_and_escape_names_from_the_bucket(root: str) -> None:
    run = write(root)
    evil = "\"><script>alert(1)</script>&'"
    worker = make_workers(SMALL)[0]
    spans = [
        msgspec.structs.replace(worker.spans[0], chunk=evil, outcome=outcome)
        for outcome in (evil, "done")
    ]
    record = msgspec.structs.replace(worker, id=evil, spans=spans, finish_reasons={evil: 0})
    opener()(run).create("workers/evil.json", codec.encode(record))
    text = make(run)
    assert evil in Page(text).text
    assert "<script" not in text
    assert len(drawings(text)) > 10
    for drawing in drawings(text):
        assert not [element for element in drawing.iter() if "style" in element.attrib]


def test_a_progress_bar_never_leaves_its_track(root: str) -> None:
    text = make(write(root, SMALL._replace(rows_per_chunk=1)))
    bar = next(drawing for drawing in drawings(text) if drawing.attrib["class"] == "bar")
    widths = [float(rect.attrib["width"].rstrip("%")) for rect in bar]
    assert widths[0] == 100
    assert sum(widths[1:]) <= 100


def test_an_unfinished_run_is_reported_as_such(root: str) -> None:
    page = Page(make(write(root)))
    assert "running" in page.text
    assert "time left" in page.text


def test_a_finished_run_says_what_it_took(root: str) -> None:
    page = Page(make(write(root, SMALL._replace(done_share=1.0))))
    assert "took" in page.text
    assert "time left" not in page.text


def test_a_lost_replica_is_on_the_page(root: str) -> None:
    run = write(root)
    record = msgspec.structs.replace(
        make_workers(SMALL)[0], id="w9", engine={"num_replicas": 8}, replicas_lost=1
    )
    opener()(run).create("workers/w9.json", codec.encode(record))
    assert "worker w9: 1 of 8 replicas lost" in Page(make(run)).text


def test_an_empty_run_has_a_page(root: str) -> None:
    opener()(root).create(layout.RUN_KEY, codec.encode_pretty(make_run(b"")))
    page = Page(make(root))
    assert "empty" in page.text
    assert "timeline" not in page.ids


def test_no_run_is_an_error(root: str) -> None:
    with pytest.raises(InputError, match="no run there"):
        make(root)


def test_samples_show_prompts_and_a_failed_row(root: str) -> None:
    run = write(root)
    store = opener()(run)
    output = output_key(store, "part-00000")
    lines = store.get(output).data.split(b"\n")
    failed = {
        "_row": 2,
        "_id": "the failed one",
        "status": 400,
        "error": {"code": "bad", "message": "why"},
    }
    lines[2] = codec.encode(failed)
    store.delete([output, layout.marker_key("part-00000")])
    store.create(output, b"\n".join(lines))
    old = codec.decode(store.get(layout.marker_key("part-00001")).data, Marker, name="m")
    marker = msgspec.structs.replace(
        old,
        output=output.removeprefix(layout.OUTPUTS),
        chunk="chunks/part-00000.jsonl",
        rows_ok=4,
        rows_error=1,
    )
    store.create(layout.marker_key("part-00000"), codec.encode(marker))
    text = Page(make(run)).text
    assert "question 0" in text
    assert "the failed one" in text
    assert "bad: why" in text


def test_compressed_chunks_show_their_rows(root: str) -> None:
    import zstandard

    run = write(root)
    job = opener()(root)
    data, etag = job.get(layout.JOB_KEY)
    job_bytes = data.replace(b'"compression": "none"', b'"compression": "zstd"')
    assert job_bytes != data
    job.replace(layout.JOB_KEY, job_bytes, etag)
    store = opener()(run)
    _, run_etag = store.get(layout.RUN_KEY)
    store.replace(layout.RUN_KEY, codec.encode_pretty(make_run(job_bytes)), run_etag)
    rows = b"".join(b'{"prompt": "packed question %d"}\n' % index for index in range(5))
    job.create("chunks/part-00000.jsonl.zst", zstandard.compress(rows))
    assert "packed question 4" in Page(make(run)).text


def test_rows_that_are_wide_or_hard_to_decode_are_shown_truly(root: str) -> None:
    """Values are shown as they stand in the chunk, and columns beyond those that are shown are counted."""
    run = write(root)
    wide = ",".join(f'"c{number}": {number}' for number in range(30))
    deep = "[" * 100_000 + "]" * 100_000
    rows = [
        '{"big": 1e400, "half": "\\ud800"}',
        f'{{"deep": {deep}, {wide}}}',
        "[1e400",
        "{}",
        "{}",
    ]
    overwrite(
        opener()(root), "chunks/part-00000.jsonl", "".join(f"{row}\n" for row in rows).encode()
    )
    text = Page(make(run)).text
    assert "1e400" in text
    assert "Infinity" not in text
    assert '"\\ud800"' in text
    assert "[" * 2000 in text
    assert "11 more columns" in text
    assert "c18" in text
    assert "c19" not in text


def test_without_samples_no_output_is_read(root: str) -> None:
    page = Page(make(write(root), num_samples=0))
    assert "question 0" not in page.text
    assert "samples" not in page.ids


def test_a_marker_cannot_point_outside_the_outputs(root: str) -> None:
    run = write(root)
    store = opener()(run)
    line = b'{"_row":0,"_id":"0","status":200,"body":{"text":"secret words"}}\n'
    store.create("secret", line)
    key = layout.marker_key("part-00000")
    data, etag = store.get(key)
    output = read_marker(store, "part-00000").output.encode()
    store.replace(key, data.replace(output, b"../secret", 1), etag)
    assert "secret words" not in make(run)


def test_an_output_that_is_gone_costs_only_its_sample(root: str) -> None:
    run = write(root)
    store = opener()(run)
    store.delete([output_key(store, "part-00000")])
    assert Page(make(run)).ids >= SECTIONS - {"samples"}


def test_long_answers_are_cut(root: str) -> None:
    page = Page(make(write(root, SMALL._replace(text="word " * 100_000))))
    assert "more characters)" in page.text
    assert len(page.text) < 200_000


def test_a_second_report_replaces_the_first(root: str) -> None:
    run = write(root)
    first = make(run, price_per_hour=1.0)
    second = make(run, price_per_hour=2.0)
    assert first != second


def test_a_folder_is_no_report(root: str) -> None:
    run = write(root)
    with pytest.raises(ConfigError, match="names no file"):
        run_report(
            ReportConfig(run=run, output=f"{run}/x/"), open_store=opener(), clock=FakeClock(NOW)
        )


def test_a_big_run_makes_a_small_page(root: str) -> None:
    text = make(write(root, Shape(now=NOW)))
    assert len(text.encode()) < 5_000_000
    page = Page(text)
    assert sum(attrs.get("class") == "m-kill" for _, attrs in page.tags) == 8


def test_workers_with_full_records_make_a_small_page_too(root: str) -> None:
    """Forty workers with as many spans and minutes as a record holds."""
    run = write(
        root, Shape(now=NOW, num_chunks=40_000, rows_per_chunk=1, done_share=0.99, hours=23.0)
    )
    assert len(make(run).encode()) < 5_000_000


def test_the_command_writes_a_file_and_says_where(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from big_run import write_local

    run = write_local(tmp_path, SMALL)
    path = tmp_path / "pages" / "report.html"
    assert main.main(["report", str(run), "-o", str(path)]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["bytes"] == path.stat().st_size
    assert path.read_text().startswith("<!doctype html>")


def test_the_pages_parts_are_package_data() -> None:
    """A wheel without the template would break only after it was installed."""
    import importlib.resources

    files = importlib.resources.files("batchinfer")
    for name in (
        "runs/templates/report.html.jinja",
        "collect/answers.sql",
        "collect/compare.sql",
        "collect/card.md.jinja",
        "runs/templates/charts.jinja",
        "runs/templates/report.css",
        "core/prices.yaml",
    ):
        assert files.joinpath(name).is_file()
