"""`batchinfer report`: one page, whatever the state of the run and whatever its rows say."""

import html
import re
from typing import Any

from batchinfer.core import codec, layout
from batchinfer.runs.report import ReportConfig, run_report
from batchinfer.runs.status import RunConfig
from big_run import HOSTILE, NOW, Shape, in_memory, write_in_memory
from fakes import FakeClock
from making import change_marker, output_key, overwrite

SMALL = Shape(text=HOSTILE)
SECTIONS = {"drawings", "totals", "errors", "workers", "samples", "settings"}
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


def test_hostile_text_makes_no_tags_and_the_policy_forbids_scripts_and_requests(memory_url):
    page = make(write_in_memory(memory_url, SMALL._replace(text="\n".join(INJECTIONS))))
    assert html.escape(INJECTIONS[0]) in page
    assert "{{ 7 * 7 }}" in page
    tags = re.findall(r"<([a-z]+)", page)
    assert not {"script", "img", "iframe", "base", "link", "a", "object"} & {*tags}
    assert (tags.count("style"), tags.count("meta")) == (1, 4)
    [policy] = re.findall(r'Content-Security-Policy" content="([^"]*)"', page)
    allowed = re.sub("'sha256-[^']*'", "OWN-STYLE", html.unescape(policy))
    assert allowed == "default-src 'none'; style-src OWN-STYLE; base-uri 'none'; form-action 'none'"
