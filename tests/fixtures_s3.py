"""An S3 server on 127.0.0.1 for tests: moto, in a process of its own, so that subprocesses reach it too."""

import contextlib
import functools
import os
import secrets
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from web_server import announced

# The server dies with the test process, however that ends (PR_SET_PDEATHSIG is 1). moto checks a
# precondition and stores the object in two steps, between which another thread's request fits (with
# boto3 alone: two winners in about one of sixty races); a real store does both in one.
# For each request, moto lists its own folders, and for each key of a listing it parses the text of a time. Here, the
# results of both are kept, and requests are not logged.
_SERVE = """
import ctypes, functools, signal, threading
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
import moto.backends, moto.core.serialize
from moto.s3.responses import S3Response
from moto.server import main
from werkzeug.serving import WSGIRequestHandler

one_at_a_time = threading.RLock()

def locked(handle):
    @functools.wraps(handle)
    def handle_alone(*arguments, **options):
        with one_at_a_time:
            return handle(*arguments, **options)
    return handle_alone

for name in ("_key_response_put", "_key_response_post", "_key_response_delete"):
    setattr(S3Response, name, locked(getattr(S3Response, name)))
modules = frozenset(moto.backends.list_of_moto_modules())
moto.backends.list_of_moto_modules = lambda: modules
parse = functools.lru_cache(moto.core.serialize.parse_to_aware_datetime)
moto.core.serialize.parse_to_aware_datetime = parse
WSGIRequestHandler.log_request = lambda *_: None
main(["-H", "127.0.0.1", "-p", "0"])
"""


@pytest.fixture(scope="session")
def s3_endpoint(tmp_path_factory):
    """URL of the server; it holds everything in memory and takes any credentials."""
    with serving_s3(tmp_path_factory.mktemp("s3") / "server.log") as url:
        yield url


@contextlib.contextmanager
def serving_s3(log: Path) -> Iterator[str]:
    """Start a server and yield its URL. Its output goes to the file `log`."""
    pattern = rb"Running on (http://127\.0\.0\.1:[0-9]+)"
    with announced([sys.executable, "-c", _SERVE], log, pattern) as url:
        yield url


@pytest.fixture
def s3_environment(s3_endpoint, clean_environment, monkeypatch, tmp_path):
    """Credentials and endpoint in the environment, for this process and those that it starts."""
    for name in list(os.environ):
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)
    values = {
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": s3_endpoint,
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": str(tmp_path / "no-aws-config"),
        "AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "no-aws-credentials"),
    }
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    return s3_endpoint


@functools.cache
def s3_client(endpoint: str) -> Any:
    """Return boto3's client of a server. Making one takes more time than most requests."""
    import boto3

    return boto3.client(
        "s3",
        endpoint_url=endpoint,
        region_name="us-east-1",
        aws_access_key_id="testing",
        aws_secret_access_key="testing",
    )


@pytest.fixture
def s3_url(s3_environment):
    """Factory: `s3_url()` makes a bucket and returns its URL, `s3_url("job")` a URL inside a fresh bucket."""

    def make(prefix: str = "", bucket: str = "") -> str:
        bucket = bucket or f"test-{secrets.token_hex(6)}"
        s3_client(s3_environment).create_bucket(Bucket=bucket)
        return f"s3://{bucket}/{prefix}".rstrip("/")

    yield make
    # The server keeps all in memory.
    urllib.request.urlopen(f"{s3_environment}/moto-api/reset", data=b"").close()
