"""What the benchmarks' figures rest on: turns, spreads, measured processes, jobs, tables, and the stub's counts."""

import importlib
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _scripts_on_path(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The benchmarks import each other by bare names; another test's module of such a name must not be in the way."""
    names = {path.stem for path in (ROOT / "benchmarks").glob("*.py")}
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    before = {name: sys.modules.pop(name) for name in names & set(sys.modules)}
    yield
    for name in names:
        sys.modules.pop(name, None)
    sys.modules.update(before)


@pytest.mark.parametrize("script", sorted(path.stem for path in (ROOT / "benchmarks").glob("*.py")))
def test_every_script_finds_what_it_imports(script: str) -> None:
    importlib.import_module(script)


def test_a_spread_shows_the_median_and_how_far_the_runs_lie_apart() -> None:
    from harness import spread

    found = spread([3.0, 1.0, 2.5])

    assert f"{found:.1f}" == "2.5 (1.0-3.0)"
    assert f"{found / 0.5:.0f}" == "5 (2-6)"
    assert f"{spread([4.0]):.1f}" == "4.0"
    assert found.entries("x") == {"x": 2.5, "x_min": 1.0, "x_max": 3.0}
    assert spread([4.0, 4.0]).entries("x") == {"x": 4.0}


def test_a_command_is_measured_with_its_children_and_ends_the_benchmark_when_it_fails() -> None:
    from harness import environment, run

    child = "import subprocess, sys; x = bytearray(2**27); print(sum(range(10**6)))"
    parent = (
        f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}], check=True)"
    )
    ended = run([sys.executable, "-c", parent + "; print('{\"a\": 1}')"])

    assert ended.last_object == {"a": 1}
    assert ended.usage.peak_bytes > 2**27
    assert ended.usage.cpu_seconds > 0
    assert ended.cpu == {}, "only counted from a line of the log on"
    watched = run(
        [sys.executable, "-c", "import sys, time; print('go', file=sys.stderr); time.sleep(0.3)"],
        is_ready=lambda line: line == "go\n",
    )
    assert list(watched.cpu) == ["driver"]
    with pytest.raises(SystemExit, match="exit 3\nwhy"):
        run([sys.executable, "-c", "import sys; print('why', file=sys.stderr); sys.exit(3)"])
    assert environment(MORE="1")["MORE"] == "1"


def test_a_job_of_the_benchmarks_is_as_split_writes_it(tmp_path: Path) -> None:
    from harness import as_line, write_job

    from batchinfer.core import codec
    from batchinfer.core.records import Job

    write_job(str(tmp_path), 7, lambda row: as_line({"x": row}, row), per_chunk=3, num_workers=2)

    job = codec.decode((tmp_path / "job.json").read_bytes(), Job, name="job.json")
    assert [(chunk.first_row, chunk.rows) for chunk in job.chunks] == [(0, 3), (3, 3), (6, 1)]
    for chunk in job.chunks:
        data = (tmp_path / f"chunks/{chunk.name}.jsonl").read_bytes()
        assert (len(data), codec.sha256(data)) == (chunk.bytes, chunk.sha256)
        rows = [json.loads(line)["_row"] for line in data.splitlines()]
        assert rows == list(range(chunk.first_row, chunk.first_row + chunk.rows))
    manifests = [(tmp_path / f"manifests/worker-0000{index}.txt").read_text() for index in (0, 1)]
    assert "".join(manifests) == (tmp_path / "manifests/all.txt").read_text()
    assert [len(each.splitlines()) for each in manifests] == [1, 2]


def test_throughput_reports_medians_per_1000_requests_and_ratios(
    capsys: pytest.CaptureFixture[str],
) -> None:
    from harness import spread
    from throughput import Measured, report

    def run(wall: float, steps: int) -> Measured:
        return Measured(wall, 9.0, 500, steps, driver_seconds=0.05, server_seconds=0.1)

    report(
        {
            "LLM.generate once": [run(10, 300), run(30, 300), run(12, 300)],
            "batchinfer": [run(11, 303), run(12, 303), run(40, 303)],
        },
        500,
        9000,
        spread([300.0]),
    )

    out = capsys.readouterr().out
    assert "24.00 (20.00-60.00)" in out
    found = json.loads(out.splitlines()[-1])
    assert (found["repeats"], found["own_us_a_request"]) == (3, 300)
    assert found["ways"]["batchinfer"]["wall_seconds"] == 24
    assert found["ways"]["batchinfer"]["wall_seconds_max"] == 80
    assert found["ways"]["batchinfer"]["driver_us"] == 100
    assert found["ways"]["batchinfer"]["server_us"] == 200
    assert found["ratios"] == {"steps_of_one_generate": 1.01, "wall_of_one_generate": 1.0}


def test_the_stub_counts_by_place_and_forgets_what_was_deleted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import s3_stub

    from batchinfer.core.errors import AlreadyExists
    from batchinfer.storage.opening import open_store

    with s3_stub.serving(2, 1) as endpoint:
        for name, value in s3_stub.variables(endpoint).items():
            monkeypatch.setenv(name, value)
        store = open_store("s3://stub/job/runs/default")
        store.create("claims/part-00001.json", b"{}")
        with pytest.raises(AlreadyExists):
            store.create("claims/part-00001.json", b"[]")
        store.delete(["claims/part-00001.json"])
        assert not list(store.list("claims/"))
        assert len(list(store.list("outputs/"))) == 2, "an output and its marker"
        assert open_store("s3://stub/job").get("chunks/part-00001.jsonl").data.count(b"\n") == 1
        came = s3_stub.read_counts(endpoint)

    assert came["PUT claims/"] == 2
    assert came["DELETE claims/"] == 1
    assert came["LIST claims/"] == came["LIST outputs/"] == 1
    assert came["GET chunks/"] == 1


def test_rows_of_the_stepped_worker_come_together() -> None:
    from stepped_worker import STEP_SECONDS, stepped_latency_of

    from batchinfer.core.records import Call
    from batchinfer.engines.engine_config import EngineConfig

    config = EngineConfig(engine="echo", echo_latency_seconds=1.0)
    for index in range(9):
        call = Call(key=("c", index), path="/v1/completions", body=b"%d" % index)
        before = time.monotonic()
        steps = (before + stepped_latency_of(call, config)) / STEP_SECONDS
        assert steps == pytest.approx(round(steps), abs=0.1)
        assert steps >= before / STEP_SECONDS
