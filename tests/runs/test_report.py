"""`batchinfer report`: one page, whatever the state of the run and whatever its rows say."""

import html
import re
import shutil
from typing import Any

import pytest

from batchinfer.core import codec, layout
from batchinfer.runs.report import ReportConfig, run_report
from batchinfer.runs.status import RunConfig
from big_run import HOSTILE, NOW, Shape, in_memory, make_workers, write_in_memory
from fakes import FakeClock
from making import change_marker, output_key, overwrite

SMALL = Shape(text=HOSTILE)
SECTIONS = {"drawings", "totals", "errors", "workers", "samples", "settings"}
CHROMIUMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
INJECTIONS = (
    "<script>window.hit = 1</script>",
    "</pre><script>window.hit = 1</script><img src=x onerror='window.hit = 1'>",
    "<iframe srcdoc='<script>parent.hit = 1</script>'></iframe><svg onload='window.hit = 1'>",
    "<style>body { display: none } @import 'http://127.0.0.1:9/x.css';</style>",
    "<meta http-equiv=refresh content='0;url=http://127.0.0.1:9/'><base href='http://127.0.0.1:9/'>",
    "{{ 7 * 7 }} {% include 'x' %} \u2028 \u202e \x00 \x1b[31m ]]><!-- --> </style></main>",
)


def make(run: str, **values: Any) -> str:
    look, output = RunConfig(run=run), f"{run}/pages/report.html"
    config = ReportConfig(look=look, output=output, **values)
    run_report(config, open_store=in_memory, clock=FakeClock(NOW))
    return in_memory(run).get("pages/report.html").data.decode()


def ids(page: str) -> set[str]:
    return set(re.findall(r'<section id="([a-z]+)"', page))


def text_of(page: str) -> str:
    return html.unescape(re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", page)))


def test_each_drawing_ends_at_the_sum_of_all_minutes(memory_url):
    page = make(write_in_memory(memory_url, SMALL))
    minutes = [minute for worker in make_workers(SMALL) for minute in worker.minutes]
    rows = sum(minute.rows for minute in minutes)
    tops = dict(re.findall(r"<h3>([\w ]+) \(top: ([\d.k]+)\)", page))
    assert tops["Finished rows"] == f"{rows / 1000:.3g}k"
    assert tops["Failed rows"] == str(sum(minute.errors for minute in minutes))
    paths = re.findall(r' d="M0 100(.*?)L1000 100Z"', page)
    assert len(paths) == 3
    numbers = [[float(y) for _, y in re.findall(r"L(\S+) ([\d.]+)", path)] for path in paths]
    assert all(0 <= y <= 100 for each in numbers for y in each)
    assert numbers[1][-1] == 0
    assert numbers[1] == sorted(numbers[1], reverse=True), "finished rows never become fewer"
    assert re.findall(r"<text [^>]*>2026-09-21 ([^<]*) UTC<", page) == ["08:13", "14:13"] * 3


# --------------------------------------------------------------------------- what is on the page


def test_the_page_has_every_section_and_sums_of_markers(memory_url):
    run = write_in_memory(memory_url, SMALL)
    page = make(run)
    assert ids(page) >= SECTIONS
    for word in ("sky-2026-000", "prompt_too_long", "running", "time left"):
        assert word in text_of(page)
    done = write_in_memory(f"{memory_url}/b", SMALL._replace(done_share=1.0))
    page = make(done)
    assert "time left" not in page
    store = in_memory(done)
    change_marker(store, "part-00003", completion_tokens=7 * 10**9)
    assert (tokens := "output tokens 7G") in text_of(make(done)), "what markers count"
    store.create("outputs/part-00020.0.jsonl", b"x")
    store.create(layout.marker_key("part-00020"), store.get(layout.marker_key("part-00003")).data)
    assert tokens in text_of(make(done)), "a marker of no chunk counts nothing"


def test_samples_show_rows_and_a_failed_one(memory_url):
    run = write_in_memory(memory_url, SMALL)
    store = in_memory(run)
    output = output_key(store, "part-00000")
    lines = store.get(output).data.split(b"\n")
    failed = {"_row": 2, "_id": "it", "status": 400, "error": {"code": "bad", "message": "why"}}
    lines[2] = codec.encode(failed)
    overwrite(store, output, b"\n".join(lines))
    text = text_of(make(run))
    assert "question 0" in text
    assert "bad: why" in text
    assert "question 0" not in make(run, num_samples=0)
    store.delete([output])
    assert ids(make(run)) >= SECTIONS - {"samples"}
    store.create("secret", b'{"_row":0,"_id":"0","status":200,"body":{"text":"secret words"}}\n')
    change_marker(store, "part-00000", output="../secret")
    assert "secret words" not in make(run), "a marker cannot point outside the outputs"


@pytest.fixture
def browser():
    from playwright.sync_api import sync_playwright

    path = next(filter(None, map(shutil.which, CHROMIUMS)), None)
    assert path, "needs a Chromium on PATH (Debian, Ubuntu: apt-get install chromium)"
    flags = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
    with sync_playwright() as playwright:
        yield playwright.chromium.launch(executable_path=path, args=flags)


@pytest.mark.full
def test_the_page_fits_any_window_and_hostile_text_on_it_neither_runs_nor_asks(
    browser, tmp_path, memory_url
):
    shape = SMALL._replace(text="\n".join(INJECTIONS))
    path = tmp_path / "report.html"
    path.write_text(make(write_in_memory(memory_url, shape)))
    for width, scheme in ((1280, "light"), (400, "dark")):
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        page, asked, complaints = context.new_page(), [], []
        page.on("request", lambda request, asked=asked: asked.append(request.url))
        page.on("console", lambda said, complaints=complaints: complaints.append(said.text))
        page.goto(path.as_uri())
        page.wait_for_load_state("networkidle")
        assert (complaints, asked) == ([], [path.as_uri()])
        assert page.evaluate("window.hit") is None
        assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
        for section in SECTIONS:
            assert page.locator(f"#{section}").is_visible(), section
        assert page.locator("#drawings path").count() == 3
        box = page.locator("#drawings path").first.bounding_box()
        assert box["width"] > 0.8 * (width - 120)
        assert page.locator("main script, main img, main a, main style, main iframe").count() == 0
        shown = page.locator("#samples .answer").first.inner_text()
        assert all(text.split()[0] in shown for text in INJECTIONS)
        colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert colour == {"light": "rgb(246, 246, 243)", "dark": "rgb(18, 18, 17)"}[scheme]
        context.close()
    # The policy protects the page even if the template had forgotten to escape a text.
    path.write_text(path.read_text().replace("</main>", "".join(INJECTIONS[:4]) + "</main>"))
    page = browser.new_page()
    page.goto(path.as_uri())
    assert page.evaluate("window.hit") is None
    assert page.locator("h1").is_visible()
    page.close()
