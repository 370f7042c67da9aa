"""The negative control: a real S3 server that ignores If-Match and If-None-Match, as some gateways do."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from chaos.campaign import check_answers
from fixtures_s3 import _SERVE, _announced
from making import finish_process, make_job, run_process, start_process, worker_arguments

pytestmark = [pytest.mark.s3, pytest.mark.chaos]

_CARELESS = """
import moto.server
serve = moto.server.run_simple

def deaf(app):
    def handle(environ, start_response):
        environ.pop("HTTP_IF_MATCH", None)
        environ.pop("HTTP_IF_NONE_MATCH", None)
        return app(environ, start_response)
    return handle

moto.server.run_simple = lambda host, port, app, **options: serve(host, port, deaf(app), **options)
"""


@pytest.fixture
def careless_url(
    s3_environment: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[str]:
    """A bucket on a server that hears no preconditions."""
    import boto3

    log = tmp_path / "server.log"
    with log.open("wb") as output:
        server = subprocess.Popen(
            [sys.executable, "-c", _CARELESS + _SERVE], stdout=output, stderr=subprocess.STDOUT
        )
    try:
        endpoint = _announced(server, log)
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        client = boto3.client("s3", endpoint_url=endpoint)
        client.create_bucket(Bucket="careless")
        client.put_object(Bucket="careless", Key="x", Body=b"1", IfNoneMatch="*")
        client.put_object(
            Bucket="careless", Key="x", Body=b"2", IfNoneMatch="*"
        )  # a good store refuses this
        client.close()
        yield "s3://careless"
    finally:
        server.kill()
        server.wait()


@pytest.mark.timeout(240)
def test_a_store_that_ignores_preconditions_is_noticed_and_still_loses_nothing(
    careless_url: str,
) -> None:
    """Two workers on one manifest, one of them killed: no claims, each keeps to its manifest, every row once."""
    job, run = f"{careless_url}/job", f"{careless_url}/job/runs/a"
    make_job(job, rows=120, per_chunk=10)
    options = (
        "--echo-latency-seconds",
        "0.2",
        "--max-num-seqs",
        "4",
        "--checkpoint-seconds",
        "0.3",
    )
    workers = [
        start_process(worker_arguments(job, run, *options, "--worker-id", name)) for name in "ab"
    ]
    with pytest.raises(subprocess.TimeoutExpired):
        workers[0].wait(timeout=4)
    workers[0].kill()
    finish_process(workers[0])
    workers[0] = start_process(worker_arguments(job, run, *options, "--worker-id", "a"))
    done = [finish_process(worker, 200) for worker in workers]
    assert [finished.status for finished in done] == [0, 0], done
    assert all("ignores preconditions" in finished.stderr for finished in done)
    verified = run_process(["verify", run, "--job", job, "--deep"])
    assert verified.status == 0, verified
    check_answers(run, 120)
