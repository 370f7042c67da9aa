"""The report's page in a real browser: it shows what it should, asks for nothing, and nothing in it runs."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from batchinfer.runs.report import ReportConfig, run_report
from batchinfer.storage.opening import open_store
from big_run import HOSTILE, Shape, write_local
from fakes import FakeClock

NOW = 1_790_000_000.0
SMALL = Shape(num_chunks=20, rows_per_chunk=10, num_workers=3, now=NOW, text=HOSTILE)
CHROMIUMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--process-per-site",
)
WIDTHS = {"desktop": 1280, "tablet": 720, "phone": 360}

INJECTIONS = (
    "<script>window.hit = 1</script>",
    "</pre><script>window.hit = 1</script>",
    "<img src=x onerror='window.hit = 1'>",
    "<svg onload='window.hit = 1'>",
    "<iframe srcdoc='<script>parent.hit = 1</script>'></iframe>",
    "<a href='javascript:window.hit = 1' autofocus onfocus='window.hit = 1'>x</a>",
    "<style>body { display: none } @import 'http://127.0.0.1:9/x.css';</style>",
    "<link rel=stylesheet href='http://127.0.0.1:9/x.css'>",
    "<meta http-equiv=refresh content='0;url=http://127.0.0.1:9/'>",
    "<base href='http://127.0.0.1:9/'><form action=/x><input name=y autofocus></form>",
    "{{ 7 * 7 }} {% include 'x' %} ${7 * 7} \u2028 \u202e \x00 \x1b[31m",
    "]]><!-- --!> --> <!doctype html> </title></style></textarea></main>",
)


class Visit(NamedTuple):
    """An opened page, every address it asked for, and everything the browser complained about."""

    page: Any
    requests: list[str]
    complaints: list[str]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    path = next(filter(None, map(shutil.which, CHROMIUMS)), None)
    if path is None:
        pytest.fail(
            "these tests need a Chromium on PATH (Debian, Ubuntu: apt-get install chromium)"
        )
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=list(FLAGS))
        yield browser
        browser.close()


@functools.cache
def context_of(browser: Any, width: int, scheme: str, scripts: bool) -> Any:
    return browser.new_context(
        viewport={"width": width, "height": 900},
        color_scheme=scheme,
        java_script_enabled=scripts,
    )


def open_page(
    browser: Any, path: Path, *, width: int = 1280, scheme: str = "light", scripts: bool = True
) -> Visit:
    context = context_of(browser, width, scheme, scripts)
    page = context.new_page()
    seen = Visit(page, [], [])
    page.on("request", lambda request: seen.requests.append(request.url))
    page.on("console", lambda message: seen.complaints.append(message.text))
    page.on("pageerror", lambda error: seen.complaints.append(str(error)))
    page.on("dialog", lambda dialog: (seen.complaints.append(dialog.message), dialog.dismiss()))
    page.goto(path.as_uri())
    page.wait_for_load_state("networkidle")
    return seen


@pytest.fixture
def visit(browser: Any) -> Iterator[Callable[..., Visit]]:
    visits = []

    def visit(path: Path, **options: Any) -> Visit:
        visits.append(open_page(browser, path, **options))
        return visits[-1]

    yield visit
    for seen in visits:
        seen.page.close()


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a small run. Tests do not change it."""
    return report(tmp_path_factory.mktemp("small"))


@pytest.fixture(scope="module")
def look(browser: Any, small: Path) -> Callable[[str, str], Visit]:
    """Function that opens the small run's page once for each device and scheme. Tests only look at what it shows."""
    return functools.cache(
        lambda device, scheme: open_page(browser, small, width=WIDTHS[device], scheme=scheme)
    )


def report(folder: Path, shape: Shape = SMALL) -> Path:
    run = write_local(folder, shape)
    path = folder / "report.html"
    config = ReportConfig(run=str(run), output=str(path))
    run_report(config, open_store=open_store, clock=FakeClock(NOW))
    return path


def assert_quiet(seen: Visit, path: Path) -> None:
    assert seen.complaints == []
    assert seen.requests == [path.as_uri()]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("device", WIDTHS)
def test_the_page_shows_everything_and_asks_for_nothing(
    small: Path, look: Callable[[str, str], Visit], device: str, scheme: str
) -> None:
    seen = look(device, scheme)
    assert_quiet(seen, small)
    for section in (
        "throughput",
        "progress",
        "timeline",
        "cost",
        "errors",
        "workers",
        "samples",
        "settings",
    ):
        assert seen.page.locator(f"#{section}").is_visible(), section
    assert seen.page.locator("h1").inner_text().startswith("meta-llama/Llama-3.1-8B-Instruct")
    assert seen.page.locator("#samples .answer").first.inner_text().endswith(HOSTILE)


@pytest.mark.parametrize("device", WIDTHS)
def test_the_page_is_never_wider_than_its_window(
    look: Callable[[str, str], Visit], device: str
) -> None:
    page = look(device, "light").page
    assert page.evaluate("document.documentElement.scrollWidth - window.innerWidth") <= 0


def test_a_path_is_broken_after_a_slash_alone(look: Callable[[str, str], Visit]) -> None:
    """Each text node of the title is one part of the path: none of them takes two lines."""
    title = look("phone", "light").page.locator("h1")
    parts = title.evaluate(
        """title => [...title.childNodes].filter(node => node.nodeType == 3).map(node => {
            const range = document.createRange()
            range.selectNode(node)
            return [node.data, range.getClientRects().length]
        })"""
    )
    assert [text for text, _ in parts][:2] == ["meta-llama/", "Llama-3.1-8B-Instruct"]
    assert max(lines for _, lines in parts) == 1


def test_text_is_large_enough_on_a_phone(look: Callable[[str, str], Visit]) -> None:
    page = look("phone", "light").page
    smallest = page.evaluate(
        "Math.min(...[...document.querySelectorAll('main *')].filter(e => e.textContent.trim())"
        ".map(e => parseFloat(getComputedStyle(e).fontSize)))"
    )
    assert smallest >= 10
    heights = page.evaluate(
        "[...document.querySelectorAll('#throughput text.tick')].map(e => e.getBoundingClientRect().height)"
    )
    assert min(heights) >= 10, "the labels of a chart do not shrink with it"


def test_the_style_sheet_is_let_through_and_dark_is_dark(
    look: Callable[[str, str], Visit],
) -> None:
    colours = {
        scheme: look("desktop", scheme).page.evaluate(
            "getComputedStyle(document.body).backgroundColor"
        )
        for scheme in ("light", "dark")
    }
    assert colours == {"light": "rgb(246, 246, 243)", "dark": "rgb(18, 18, 17)"}


def test_kills_resumes_and_chunks_are_drawn(tmp_path: Path, visit: Callable[..., Visit]) -> None:
    page = visit(report(tmp_path, SMALL._replace(num_workers=8, num_chunks=200))).page
    for mark in (".m-kill", ".m-resume", ".o-killed", ".o-done", ".o-open"):
        assert page.locator(f"#timeline {mark}").count() > 0, mark
    boxes = [page.locator("#timeline .lane svg").nth(index).bounding_box() for index in range(3)]
    assert all(box["width"] > 300 and box["height"] > 15 for box in boxes)


def test_charts_keep_inside_their_sections(look: Callable[[str, str], Visit]) -> None:
    page = look("phone", "light").page
    outside = page.evaluate(
        "[...document.querySelectorAll('section svg *')].filter(e => { const b = e.getBoundingClientRect(),"
        " s = e.closest('section').getBoundingClientRect();"
        " return b.width && !e.closest('.scroll') && (b.left < s.left - 1 || b.right > s.right + 1) })"
        ".map(e => e.outerHTML.slice(0, 120))"
    )
    assert outside == []


@pytest.mark.parametrize("text", INJECTIONS)
def test_nothing_that_a_model_says_runs_or_asks(
    tmp_path: Path, visit: Callable[..., Visit], text: str
) -> None:
    path = report(tmp_path, SMALL._replace(text=text))
    seen = visit(path)
    assert_quiet(seen, path)
    page = seen.page
    assert page.evaluate("window.hit") is None
    assert (
        page.locator(
            "main script, main img, main iframe, main a, main style, main form, main link"
        ).count()
        == 0
    )
    assert page.locator("footer").is_visible(), "the page goes on after it"
    shown = page.locator("#samples .answer").first.inner_text()
    visible = text.replace("\x00", "\ufffd").replace("\x1b", "")
    assert visible.split()[0] in shown.replace("\x1b", "")


def test_the_policy_stops_what_escaping_let_through(
    tmp_path: Path, visit: Callable[..., Visit]
) -> None:
    """The policy protects a page even if the template had forgotten to escape a text."""
    path = report(tmp_path)
    broken = path.read_text().replace(
        "</main>",
        "<script>window.hit = 1</script><img src=x onerror='window.hit = 1'>"
        "<style>body { display: none }</style></main>",
    )
    path.write_text(broken)
    seen = visit(path)
    assert seen.page.evaluate("window.hit") is None
    assert seen.page.locator("h1").is_visible()
    assert len(seen.complaints) >= 3, "the browser says what it refused"


def test_the_page_needs_no_script(small: Path, visit: Callable[..., Visit]) -> None:
    seen = visit(small, scripts=False)
    assert seen.page.locator("#timeline").is_visible()


def test_a_big_report_opens_quietly(tmp_path: Path, visit: Callable[..., Visit]) -> None:
    path = report(tmp_path, Shape(now=NOW))
    seen = visit(path, width=390)
    assert_quiet(seen, path)
    assert seen.page.locator("#timeline .lane").count() == 41
