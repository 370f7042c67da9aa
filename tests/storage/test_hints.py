"""What a person is told when a bucket cannot be used: one message, what to do, and the exit status; and how soon.

Answers are scripted, so these tests hold what is made of an answer. That servers give such answers is documented by
them; moto and Azurite are asked where they do.
"""

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import botocore.session
import pytest
from botocore.exceptions import ClientError, CredentialRetrievalError

from batchinfer.core.errors import AccessDenied, ConfigError, InputError, StorageError
from batchinfer.storage import Store, clouds
from batchinfer.storage.opening import check_preconditions, open_store
from batchinfer.storage.retrying import TransientError
from fakes import QUICK
from fixtures_s3 import s3_client
from web_server import Answer, HttpServer, reply


class Scripted(HttpServer):
    """Gives these answers in turn, and 200 with an ETag when they are used up."""

    def __init__(self, *answers: Answer) -> None:
        self.answers, self.num_requests = list(answers), 0
        super().__init__(self._answer)

    async def _answer(self, request):
        self.num_requests += 1
        return await (self.answers.pop(0) if self.answers else reply(200, ETag='"e"'))(request)


def refusal(status: int, code: str) -> Answer:
    """An answer of S3."""
    text = f"<Error><Code>{code}</Code><Message>no</Message></Error>"
    return reply(status, text, "application/xml")


@pytest.fixture
def scripted(s3_environment, monkeypatch):
    with contextlib.ExitStack() as stack:

        def make(*answers: Answer) -> Scripted:
            server = stack.enter_context(contextlib.closing(Scripted(*answers)))
            monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
            return server

        yield make


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (409, "ConditionalRequestConflict"),
        (503, "SlowDown"),
        (403, "RequestTimeTooSkewed"),
        (429, "TooManyRequests"),
        (400, "RequestTimeout"),
    ],
)
def test_passing_trouble_is_tried_again(scripted, status, code):
    server = scripted(*[refusal(status, code)] * 2)
    assert open_store("s3://bucket/job", retries=QUICK).create("k", b"1") == '"e"'
    assert server.num_requests == 3


@pytest.mark.parametrize(
    ("status", "code", "expected", "hint"),
    [
        (403, "AccessDenied", AccessDenied, "s3:ListBucket"),
        (400, "ExpiredToken", AccessDenied, "AWS_ACCESS_KEY_ID"),
        (401, "Unauthorized", AccessDenied, "AWS_ACCESS_KEY_ID"),
        (400, "AuthorizationHeaderMalformed", ConfigError, "AWS_DEFAULT_REGION"),
        (404, "NoSuchBucket", InputError, "aws s3 mb s3://bucket"),
        (501, "NotImplemented", StorageError, ""),
        (400, "InvalidRequest", StorageError, ""),
    ],
)
def test_lasting_trouble_is_said_at_once(scripted, status, code, expected, hint):
    server = scripted(*[refusal(status, code)] * 9)
    with pytest.raises(expected, match="s3://bucket/job/k") as caught:
        open_store("s3://bucket/job", retries=QUICK).create("k", b"1")
    assert not isinstance(caught.value, TransientError)
    assert hint in caught.value.hint
    assert "\n" not in caught.value.message
    assert server.num_requests == 1


def test_a_store_that_lets_nobody_delete_says_so_at_once(scripted):
    """S3 refuses each key in an answer of status 200. It was taken for silence, and ended each worker's start."""
    error = b"<Error><Key>job/k</Key><Code>AccessDenied</Code><Message>no</Message></Error>"
    server = scripted(reply(200, b"<DeleteResult>" + error + b"</DeleteResult>"))
    with pytest.raises(AccessDenied, match="refused access"):
        open_store("s3://bucket/job", retries=QUICK).delete(["k"])
    assert server.num_requests == 1


NO_ANSWERS = {"an empty body": reply(200), "a web page": reply(200, "<html>x</html>", "text/html")}


@pytest.mark.parametrize("answer", NO_ANSWERS)
@pytest.mark.parametrize("verb", ["get", "stat", "download", "create", "replace", "delete"])
def test_an_answer_that_no_store_gives_is_no_answer(scripted, verb, answer, tmp_path):
    """A proxy's page is no deletion without failures, and no object; cuts are in test_faults.py."""
    scripted(*[NO_ANSWERS[answer]] * 9)
    with pytest.raises(StorageError, match="after 3 attempts") as caught:
        every_verb(open_store("s3://bucket/job", retries=QUICK), tmp_path / "file")[verb]()
    assert caught.value.hint


def every_verb(store: Store, file: Path) -> dict[str, Callable[[], object]]:
    return {
        "list": lambda: list(store.list()),
        "get": lambda: store.get("k"),
        "stat": lambda: store.stat("k"),
        "download": lambda: store.download("k", file.with_name("copy")),
        "create": lambda: store.create("k", b"1"),
        "put_file": lambda: store.put_file("k", file),
        "replace": lambda: store.replace("k", b"1", '"e";1'),
        "trial": lambda: check_preconditions(store),
        "delete": lambda: store.delete(["k"]),
    }


@pytest.fixture(
    params=[
        "s3 s3_url AWS_ENDPOINT_URL",
        "az azure_url AZURE_STORAGE_ENDPOINT",
        "gs gcs_url GOOGLE_BASE_URL",
    ]
)
def cloud(request):
    """The scheme of a cloud whose server runs, and the variable with the server's address."""
    scheme, fixture, variable = request.param.split()
    request.getfixturevalue(fixture)
    return scheme, variable


def test_a_missing_bucket_is_named_by_every_verb(cloud, tmp_path):
    (tmp_path / "file").write_bytes(b"x")
    store = open_store(f"{cloud[0]}://nowhere/job", retries=QUICK)
    verbs = every_verb(store, tmp_path / "file")
    for name in verbs.keys() - {"delete", "stat"}:
        with pytest.raises(InputError, match="nowhere") as caught:
            verbs[name]()
        assert "nowhere" in caught.value.hint, name


def test_an_address_where_nothing_answers_is_said_at_the_first_try(cloud, monkeypatch, caplog):
    scheme, variable = cloud
    monkeypatch.setenv(variable, "http://127.0.0.1:9")
    with pytest.raises(
        StorageError, match=r"no answer from the store .*after 3 attempts"
    ) as caught:
        open_store(f"{scheme}://bucket/job", retries=QUICK).get("job.json")
    assert caught.value.hint
    assert caught.value.exit_status == 34
    assert "no answer from the store" in caplog.records[0].message
    assert "attempt 1 of 3" in caplog.records[0].message


@pytest.fixture
def credentials(s3_environment, monkeypatch, tmp_path):
    """Put what AWS's two files say in the place of the keys that variables hold."""

    def put(config: str, keys: str) -> None:
        for name, text in (("AWS_CONFIG_FILE", config), ("AWS_SHARED_CREDENTIALS_FILE", keys)):
            (tmp_path / name).write_text(text)
            monkeypatch.setenv(name, str(tmp_path / name))
        monkeypatch.delenv("AWS_ACCESS_KEY_ID")
        monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")

    return put


def test_missing_credentials_are_access_denied(s3_environment, credentials):
    credentials("", "")
    with pytest.raises(AccessDenied, match="credentials are missing") as caught:
        open_store("s3://bucket/job", retries=QUICK).get("k")
    assert "AWS_PROFILE" in caught.value.hint


@pytest.mark.parametrize(
    "error",
    [
        CredentialRetrievalError(provider="custom-process", error_msg="it failed"),
        ClientError({"Error": {"Code": "Throttling"}}, "AssumeRole"),
    ],
)
def test_a_giver_of_credentials_that_is_away_is_asked_again(s3_url, monkeypatch, error):
    give = clouds._aws_credentials(botocore.session.get_session())
    away = Mock(give, side_effect=[error, error, give()])
    monkeypatch.setattr(clouds, "_aws_credentials", lambda _: away)
    assert open_store(s3_url("job"), retries=QUICK).create("k", b"1")


def test_endpoint_and_key_of_a_profile_are_used(s3_url, monkeypatch, credentials):
    url = s3_url("job")
    endpoint = open_store(url).create("k", b"1") and os.environ["AWS_ENDPOINT_URL"]
    credentials(
        f"[profile mine]\nendpoint_url = {endpoint}\nregion = us-east-1\n",
        "[mine]\naws_access_key_id = testing\naws_secret_access_key = testing\n",
    )
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    monkeypatch.delenv("AWS_DEFAULT_REGION")
    monkeypatch.setenv("AWS_PROFILE", "mine")
    assert open_store(url).get("k").data == b"1"
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    with pytest.raises(ConfigError, match="nobody"):
        open_store(url)


@pytest.mark.parametrize("endpoint", ["https://oss.example.com", "https://job.oss.example.com"])
def test_a_bucket_may_stand_in_the_name_of_the_host(credentials, monkeypatch, endpoint):
    """Only in the name: a request for s3://job/a/k went to the bucket a."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    monkeypatch.setenv("AWS_REGION", "eu-1")
    credentials("[default]\nregion = us-1\ns3 =\n  addressing_style = virtual\n", "")
    options, _ = clouds._aws_settings("s3://job/a")
    assert options["endpoint"] == "https://job.oss.example.com"
    assert options["region"] == "eu-1"


@pytest.mark.parametrize(
    ("url", "variable", "value", "said"),
    [
        ("s3://bucket/job", "AWS_ENDPOINT_URL", "localhost:9000", "is no URL"),
        ("s3://bucket/job", "AWS_CA_BUNDLE", "/nowhere.pem", "No such file"),
        ("gs://bucket/job", "GOOGLE_APPLICATION_CREDENTIALS", "/nowhere/key.json", "GCS"),
    ],
)
def test_a_configuration_that_cannot_work_is_refused_before_a_request(
    s3_environment, monkeypatch, url, variable, value, said
):
    monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigError, match=said) as caught:
        open_store(url)
    assert caught.value.exit_status == 2
    assert caught.value.hint


def test_a_listing_leaves_out_the_folders_of_web_consoles_and_names_a_key_that_is_no_path(
    s3_url, s3_environment
):
    """`a//b` is a key for S3."""
    url, client = s3_url("job"), s3_client(s3_environment)
    bucket = url.split("/")[2]
    for key in ("job/", "job/outputs/", "job/outputs/a"):
        client.put_object(Bucket=bucket, Key=key, Body=b"1" * key.endswith("a"))
    assert [info.key for info in open_store(url).list()] == ["outputs/a"]
    client.put_object(Bucket=bucket, Key="job/a//b", Body=b"1")
    with pytest.raises(InputError, match="a//b"):
        list(open_store(url).list())
