"""The worker's metrics: `status` has them all, and no text of a record breaks out of its label."""

import socket
from unittest.mock import Mock

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from batchinfer.ledger.metrics import families_of
from fakes import worker_record
from making import make_job, run_worker_here
from metrics_reader import NAMES, parse


@pytest.fixture
def job(tmp_path):
    rows = [{"prompt": f"hello row {row}" if row % 10 else None} for row in range(600)]
    make_job(tmp_path / "job", rows=600, per_chunk=100, make_row=rows.__getitem__)
    return tmp_path / "job"


def test_status_prints_the_same_names_and_the_last_figures(job, tmp_path, call):
    run = tmp_path / "run"
    limit = ("--worker-id", "w0", "--max-cost", "9", "--price-per-hour", "1")
    assert run_worker_here(job, run, *limit)["status"] == "SUCCESS"
    seen = parse(call("status", run, "--prometheus").out)
    assert {name for name, values in seen.items() if values} == NAMES
    labels = (("run", str(run)), ("worker", "w0"))
    assert seen["batchinfer_rows_total"][labels] == 600
    assert seen["batchinfer_rows_failed_total"][("code", "invalid_column"), *labels] == 60
    assert seen["batchinfer_rows_in_engine"][labels] == 0
    assert seen["batchinfer_chunks_done_total"][labels] == 6
    assert seen["batchinfer_run_rows_done"] == {labels[:1]: 600}
    assert seen["batchinfer_max_cost_dollars"] == {labels: 9}
    assert ("state", "done") in next(iter(seen["batchinfer_worker_state"]))
    cost = seen["batchinfer_cost_dollars_total"][labels]
    assert cost == pytest.approx(seen["batchinfer_up_seconds_total"][labels] / 3600)


def test_a_port_that_is_taken_is_a_warning_and_the_worker_does_its_work(job, tmp_path, caplog):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = run_worker_here(job, tmp_path / "run", "--metrics", port)
    assert done["status"] == "SUCCESS"
    assert f"--metrics 127.0.0.1:{port}: cannot listen there" in caplog.text


def test_hostile_texts_stay_within_their_labels():
    name = 'w"} 1\nbatchinfer_rows_total{worker="other\x1b[2J\\'
    record = worker_record(id=name, errors={'x"}\n\x1b': 1, "fine": 2, "also not fine": 3})

    registry = CollectorRegistry()
    found = families_of("s3://key:secret@bucket/run", [record])
    registry.register(Mock(spec=["collect"], collect=lambda: found))
    text = generate_latest(registry).decode()
    assert "secret" not in text
    assert "\x1b" not in text
    seen = parse(text)
    (labels,) = seen["batchinfer_rows_total"]
    assert len(labels) == 2
    codes = {
        dict(one)["code"]: value for one, value in seen["batchinfer_rows_failed_total"].items()
    }
    assert codes == {r'x"}\n\x1b': 1, "fine": 2, "also not fine": 3}
