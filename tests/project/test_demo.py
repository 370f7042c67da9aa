"""The demo's own checks find what they are there for, and its kill lands in the middle."""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
NUM_ROWS = 40
NUM_CHUNKS = 4


@pytest.fixture(scope="module", autouse=True)
def scripts_on_path():
    sys.path.insert(0, str(SCRIPTS))
    yield
    sys.path.remove(str(SCRIPTS))


@pytest.fixture
def demo():
    return importlib.import_module("demo")


@pytest.fixture
def check():
    return importlib.import_module("demo_check")


@pytest.fixture
def examples():
    data = importlib.import_module("demo_data")
    return list(data.draw_examples(NUM_ROWS, seed=data.DEFAULT_SEED, held_out=True))


def write_job(job, num_rows=NUM_ROWS, num_chunks=NUM_CHUNKS):
    """A job.json and manifests as `split` writes them; the chunks themselves are not needed."""
    size = num_rows // num_chunks
    chunks = [
        {
            "name": f"part-{i:05d}",
            "first_row": i * size,
            "rows": size,
            "bytes": 1,
            "sha256": f"chunk{i}",
        }
        for i in range(num_chunks)
    ]
    record = {
        "format_version": 1,
        "sources": [],
        "columns": ["conversation"],
        "rows": num_rows,
        "chunks": chunks,
        "num_workers": 2,
    }
    (job / "manifests").mkdir(parents=True)
    for worker in range(2):
        names = [chunk["name"] for chunk in chunks[worker::2]]
        text = "".join(f"chunks/{name}.jsonl\n" for name in names)
        (job / "manifests" / f"worker-{worker:05d}.txt").write_text(text)
    (job / "job.json").write_text(json.dumps(record))
    return chunks


def output_lines(chunk, examples):
    rows = range(chunk["first_row"], chunk["first_row"] + chunk["rows"])
    return [
        {
            "_row": row,
            "_id": str(row),
            "status": 200,
            "body": {"choices": [{"message": {"content": examples[row].answer}}]},
        }
        for row in rows
    ]


def publish(run, chunk, lines, *, generation=0, output=None, worker="w0", **changes):
    """Write an output and the marker that vouches for it."""
    outputs = run / "outputs"
    outputs.mkdir(parents=True, exist_ok=True)
    data = "".join(json.dumps(line) + "\n" for line in lines).encode()
    output = output or f"{chunk['name']}.jsonl"
    (outputs / output).write_bytes(data)
    marker = {
        "output": output,
        "output_bytes": len(data),
        "output_sha256": hashlib.sha256(data).hexdigest(),
        "chunk": chunk["name"],
        "chunk_sha256": chunk["sha256"],
        "generation": generation,
        "rows_ok": chunk["rows"],
        "rows_error": 0,
        "rows_resumed": 0,
        "fingerprint": "f",
        "worker": worker,
        "start": "2026-01-01T00:00:00+00:00",
        "end": "2026-01-01T00:00:10+00:00",
        "prompt_tokens": 90,
        "completion_tokens": 20,
        "nonce": "n",
    }
    suffix = f".{generation}" if generation else ""
    path = outputs / f"{chunk['name']}.succeed{suffix}"
    # Whole or absent, as the demo may be reading at this moment.
    hidden = run / f"{path.name}.{worker}.temp"
    hidden.write_text(json.dumps(marker | changes))
    hidden.replace(path)
    return outputs / output


@pytest.fixture
def finished(tmp_path, examples):
    """A run in which everything is right, of two workers: (job, run, chunks)."""
    job, run = tmp_path / "job", tmp_path / "job/runs/demo"
    chunks = write_job(job)
    for index, chunk in enumerate(chunks):
        resumed = 4 if index == 0 else 0
        publish(
            run, chunk, output_lines(chunk, examples), worker=f"w{index % 2}", rows_resumed=resumed
        )
    return job, run, chunks


def prompts_of(examples):
    return [example.prompt for example in examples]


def test_a_run_that_is_all_right_passes_and_adds_up(check, finished, examples):
    job, run, _ = finished
    findings = check.check_run(job, run, prompts_of(examples))
    assert findings.problems == []
    assert findings.passed
    assert set(findings.accuracy.values()) == {1.0}
    assert len(findings.accuracy) == 4
    assert (findings.total.chunks, findings.total.rows) == (4, NUM_ROWS)
    assert (findings.total.rows_resumed, findings.total.chunks_resumed) == (4, 1)
    assert {name: totals.rows for name, totals in findings.workers.items()} == {"w0": 20, "w1": 20}
    # 4 chunks x (90 + 20) tokens in 10 s.
    assert findings.total.tokens_per_second == pytest.approx(44.0)


def drop_row(lines):
    del lines[3]


def swap_rows(lines):
    lines[2], lines[3] = lines[3], lines[2]


def swap_answers(lines):
    lines[2]["body"], lines[3]["body"] = lines[3]["body"], lines[2]["body"]


def double_row(lines):
    lines[3] = lines[2]


def error_row(lines):
    lines[0] |= {"status": 400, "error": {"code": "prompt_too_long", "message": "m"}}


def wrong_id(lines):
    lines[0]["_id"] = "17x"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (drop_row, "has 9 rows, expected 10"),
        (swap_rows, "row 12: its place holds _row 13"),
        (double_row, "row 13: its place holds _row 12"),
        (error_row, "row 10: {'code': 'prompt_too_long'"),
        (wrong_id, "row 10: its place holds _row 10, _id '17x'"),
    ],
)
def test_a_damaged_row_is_named(check, finished, examples, damage, message):
    job, run, chunks = finished
    lines = output_lines(chunks[1], examples)
    damage(lines)
    publish(run, chunks[1], lines)
    findings = check.check_run(job, run, prompts_of(examples))
    assert not findings.passed
    assert findings.problems[0].find(message) >= 0


def test_answers_on_each_other_s_row_are_wrong_answers(check, finished, examples):
    job, run, chunks = finished
    lines = output_lines(chunks[1], examples)
    assert examples[12].answer != examples[13].answer
    swap_answers(lines)
    publish(run, chunks[1], lines)
    findings = check.check_run(job, run, prompts_of(examples))
    assert findings.problems == []
    assert findings.right.total() == NUM_ROWS - 2
    assert not findings.passed


def test_a_data_set_in_another_order_is_noticed(check, finished, examples):
    job, run, _ = finished
    reversed_prompts = prompts_of(examples)[::-1]
    assert not check.check_run(job, run, reversed_prompts).passed


def test_an_output_with_another_checksum_is_not_read(check, finished, examples):
    job, run, chunks = finished
    output = publish(run, chunks[1], output_lines(chunks[1], examples))
    output.write_bytes(output.read_bytes().replace(b"content", b"kontent"))
    findings = check.check_run(job, run, prompts_of(examples))
    assert findings.problems == [
        "output part-00001.jsonl is not what its marker vouches for (sha256)"
    ]
    assert findings.right.total() == NUM_ROWS - 10


def test_an_output_of_another_chunk_is_refused(check, finished, examples):
    job, run, chunks = finished
    publish(run, chunks[1], output_lines(chunks[1], examples), chunk_sha256="other")
    findings = check.check_run(job, run, prompts_of(examples))
    assert findings.problems == ["output part-00001.jsonl was made from another chunk (sha256)"]


def test_a_chunk_without_marker_is_missing_though_its_output_lies_there(check, finished, examples):
    job, run, _ = finished
    (run / "outputs/part-00002.succeed").unlink()
    findings = check.check_run(job, run, prompts_of(examples))
    assert findings.problems == ["chunk part-00002 has no marker"]
    assert not findings.passed


def test_a_marker_whose_output_is_gone_is_a_problem(check, finished, examples):
    job, run, _ = finished
    (run / "outputs/part-00002.jsonl").unlink()
    findings = check.check_run(job, run, prompts_of(examples))
    assert findings.problems == ["output part-00002.jsonl is gone, though its marker names it"]


@pytest.mark.parametrize("body", ["", "{}", '{"output": "part'])
def test_an_unreadable_marker_fails_the_check(check, finished, examples, body):
    job, run, _ = finished
    (run / "outputs/part-00002.succeed").write_text(body)
    findings = check.check_run(job, run, prompts_of(examples))
    assert "part-00002.succeed" in findings.problems[0]
    assert not findings.passed


def test_an_orphan_output_is_not_looked_at(check, finished, examples):
    job, run, _ = finished
    (run / "outputs/part-00001.3f2a.jsonl").write_text("half a li")
    assert check.check_run(job, run, prompts_of(examples)).passed


def test_the_highest_generation_counts_whatever_name_its_output_took(check, finished, examples):
    job, run, chunks = finished
    (run / "outputs/part-00001.jsonl").write_text("superseded")
    publish(
        run,
        chunks[1],
        output_lines(chunks[1], examples),
        generation=10,
        output="part-00001.3f2a.jsonl",
    )
    assert check.check_run(job, run, prompts_of(examples)).passed


def test_a_job_with_fewer_rows_than_the_data_set_fails(check, tmp_path, examples):
    job, run = tmp_path / "job", tmp_path / "run"
    for chunk in write_job(job, num_rows=36):
        publish(run, chunk, output_lines(chunk, examples))
    findings = check.check_run(job, run, prompts_of(examples))
    assert findings.problems == ["the job has 36 rows, expected 40"]


def test_a_run_without_any_output_fails(check, tmp_path, examples):
    write_job(tmp_path / "job")
    findings = check.check_run(tmp_path / "job", tmp_path / "run", prompts_of(examples))
    assert len(findings.problems) == NUM_CHUNKS
    assert not findings.passed


@pytest.mark.parametrize(
    ("published", "checkpointed", "due"),
    [(0, 0, False), (0, 3, False), (1, 0, False), (1, 1, True), (2, 0, False), (3, 0, True)],
)
def test_the_kill_waits_for_a_done_and_a_begun_chunk_or_for_half(
    demo, published, checkpointed, due
):
    assert demo.is_time_to_kill(published, checkpointed, 6) is due


def test_checkpoints_of_published_chunks_and_of_other_workers_do_not_count(demo, finished):
    _, run, _ = finished
    for name, segment in [
        ("part-00000", "w0.3f2a-000001.1.jsonl"),
        ("part-00007", "w1.3f2a-000001.1.jsonl"),
        ("part-00008", "w0.3f2a-000002.1.jsonl"),
        ("part-00009", "something-else"),
    ]:
        folder = run / "checkpoints" / name
        folder.mkdir(parents=True)
        (folder / segment).write_text("{}\n")
    assert demo.finished_by(run, "w0") == ({"part-00000", "part-00002"}, {"part-00008"})


def test_a_work_folder_of_somebody_else_is_left_alone(demo, tmp_path, capsys):
    (tmp_path / "thesis.txt").write_text("mine")
    assert demo.main(["--work-dir", str(tmp_path)]) == 2
    assert "pass another --work-dir" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_an_earlier_demo_s_work_folder_is_emptied(demo, tmp_path):
    work = tmp_path / "work"
    demo.prepare(work)
    (work / "old").write_text("x")
    demo.prepare(work)
    assert [path.name for path in work.iterdir()] == [demo.OURS]


def test_lost_checkpoints_and_surviving_processes_are_problems(demo, check):
    findings = check.Findings()
    demo.check_recovery(
        findings, demo.Kill(chunks_published=1, chunks_checkpointed=1, processes_left=2)
    )
    assert len(findings.problems) == 2


def test_killing_a_worker_counts_the_children_that_outlive_it(demo, tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "PROCESS_END_SECONDS", 0.2)
    settings = demo.parse_options(["--work-dir", str(tmp_path)])
    ready = tmp_path / "ready"
    code = (
        "import pathlib, subprocess, sys, time;"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']);"
        f"pathlib.Path({str(ready)!r}).write_text(str(child.pid)); time.sleep(60)"
    )
    monkeypatch.setattr(demo, "worker_command", lambda *_: [sys.executable, "-c", code])
    with demo.running_workers(settings) as workers:
        workers.start("w0")
        demo.wait_until(lambda: ready.exists() and ready.read_text() != "", 30, "the child")
        child = int(ready.read_text())
        assert workers.kill("w0") == 1
    os.kill(child, 9)


# A worker in thirty lines: publishes a chunk every 50 ms with a checkpoint before it, and after a
# restart skips what is published and resumes what is checkpointed.
FAKE_WORKER = """
import json, pathlib, sys, time
sys.path[:0] = sys.argv[5:]
import demo_data, test_demo
worker, job, run, rows = sys.argv[1], *map(pathlib.Path, sys.argv[2:4]), int(sys.argv[4])
examples = list(demo_data.draw_examples(rows, seed=demo_data.DEFAULT_SEED, held_out=True))
chunks = {c["name"]: c for c in json.loads((job / "job.json").read_text())["chunks"]}
manifest = job / f"manifests/worker-{int(worker[1:]):05d}.txt"
for line in manifest.read_text().split():
    chunk = chunks[pathlib.Path(line).stem]
    if (run / f"outputs/{chunk['name']}.succeed").exists():
        continue
    segment = run / f"checkpoints/{chunk['name']}/000001-{worker}.3f2a-000001.jsonl"
    resumed = 3 if segment.exists() else 0
    segment.parent.mkdir(parents=True, exist_ok=True)
    segment.write_text("x")
    time.sleep(0.05)
    lines = test_demo.output_lines(chunk, examples)
    test_demo.publish(run, chunk, lines, worker=worker, rows_resumed=resumed)
"""


@pytest.fixture
def fake_worker(demo, tmp_path, monkeypatch):
    script = tmp_path / "fake_worker.py"
    script.write_text(FAKE_WORKER)

    def command(settings, worker_id):
        here = Path(__file__).resolve().parent
        places = [settings.job, settings.run, settings.rows, SCRIPTS, here, here.parent]
        return [sys.executable, str(script), worker_id, *map(str, places)]

    monkeypatch.setattr(demo, "worker_command", command)
    monkeypatch.setattr(demo, "split", lambda s: write_job(s.job, s.rows, s.num_chunks) and None)


@pytest.mark.usefixtures("fake_worker")
def test_the_demo_kills_resumes_and_passes(demo, tmp_path, capsys):
    options = ["--rows", "400", "--num-chunks", "40", "--timeout-seconds", "60"]
    assert demo.main(["--work-dir", str(tmp_path / "work"), *options]) == 0
    out = capsys.readouterr().out
    assert "PASSED" in out
    result = json.loads(out.splitlines()[-1])
    assert result["passed"] is True
    assert result["rows"] == 400
    assert 0 < result["chunks_skipped"] < 20
    assert result["chunks_resumed"] == 1
    assert result["rows_resumed"] == 3
    assert "taken over by w1: 0" in out


@pytest.mark.usefixtures("fake_worker")
def test_the_demo_fails_when_a_row_is_lost(demo, tmp_path, monkeypatch, capsys):
    check_run = demo.check_run

    def lose_a_row(job, run, prompts):
        output = run / "outputs/part-00003.jsonl"
        output.write_bytes(output.read_bytes().split(b"\n", 1)[1])
        return check_run(job, run, prompts)

    monkeypatch.setattr(demo, "check_run", lose_a_row)
    options = ["--rows", "400", "--num-chunks", "40", "--timeout-seconds", "60"]
    assert demo.main(["--work-dir", str(tmp_path / "work"), *options]) == 1
    assert "PROBLEM output part-00003.jsonl is not what" in capsys.readouterr().out


def test_a_worker_that_ends_before_the_kill_fails_the_demo(demo, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(demo, "split", lambda s: write_job(s.job, s.rows, s.num_chunks) and None)
    monkeypatch.setattr(demo, "worker_command", lambda *_: [sys.executable, "-c", "exit(33)"])
    assert demo.main(["--work-dir", str(tmp_path / "work"), "--rows", "400"]) == 1
    assert "worker w0 ended with 33 before it could be killed" in capsys.readouterr().err


def test_a_failing_split_ends_the_demo(demo, tmp_path, monkeypatch, capsys):
    failed = subprocess.CompletedProcess([], 2)
    monkeypatch.setattr(demo.subprocess, "run", lambda *_args, **_options: failed)
    assert demo.main(["--work-dir", str(tmp_path / "work"), "--rows", "40"]) == 1
    assert "batchinfer split: exit status 2" in capsys.readouterr().err


def test_no_worker_outlives_a_demo_that_breaks_off(demo, tmp_path, monkeypatch):
    settings = demo.parse_options(["--work-dir", str(tmp_path)])
    sleeper = [sys.executable, "-c", "import time; time.sleep(60)"]
    monkeypatch.setattr(demo, "worker_command", lambda *_: sleeper)

    def break_off():
        with demo.running_workers(settings) as workers:
            workers.start("w0")
            pids.append(workers.pid("w0"))
            raise KeyboardInterrupt

    pids = []
    with pytest.raises(KeyboardInterrupt):
        break_off()
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)


def test_waiting_ends_with_what_was_waited_for(demo):
    with pytest.raises(demo.DemoFailed, match="for the moon"):
        demo.wait_until(lambda: False, 0.0, "the moon")
