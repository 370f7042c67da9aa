"""DEST of a conversion in a bucket: rights, kills while uploading, and other conversions into the same place."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from batchinfer.cli.main import main
from batchinfer.convert.places import conversion
from batchinfer.core.errors import InputError
from batchinfer.engines.buckets import UNFINISHED
from batchinfer.storage import Store
from batchinfer.storage.opening import open_store
from fixtures_s3 import serving_s3

FILE_BYTES = 50_000


def names_of(num_shards: int) -> list[str]:
    shards = [f"model-{index:05d}-of-{num_shards:05d}.safetensors" for index in range(num_shards)]
    return ["config.json", "tokenizer.json", *shards]


def convert(dest: str, num_shards: int, scratch: Path) -> None:
    """A conversion whose result has files of other names for each `num_shards`."""
    with conversion(dest, scratch_dir=scratch) as work:
        for name in names_of(num_shards):
            (work.folder / name).write_bytes(f"{name} {num_shards}".encode() * (FILE_BYTES // 30))
        work.publish()


def keys(store: Store) -> set[str]:
    return {info.key for info in store.list("")}


# --------------------------------------------------------------------------- rights

READ = ["s3:ListBucket", "s3:GetObject"]
RIGHTS = {
    "none": [],
    "reading": READ,
    "no reading": ["s3:PutObject", "s3:DeleteObject"],
    "no deleting": [*READ, "s3:PutObject"],
}


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], dict[str, str]]]:
    """A server that asks for rights. The function returns the environment of a user with `RIGHTS`, or "all"."""
    import boto3

    log = tmp_path_factory.mktemp("guarded") / "server.log"
    with serving_s3(log) as url:

        def client(service: str) -> object:
            return boto3.client(
                service, endpoint_url=url, region_name="us-east-1",
                aws_access_key_id="testing", aws_secret_access_key="testing",
            )  # fmt: skip

        s3, iam = client("s3"), client("iam")
        s3.create_bucket(Bucket="models")  # type: ignore[attr-defined]
        environments = {}
        for name, rights in {**RIGHTS, "all": ["s3:*"]}.items():
            user = name.replace(" ", "-")
            iam.create_user(UserName=user)  # type: ignore[attr-defined]
            statements = [{"Effect": "Allow", "Action": rights or ["s3:None"], "Resource": "*"}]
            iam.put_user_policy(  # type: ignore[attr-defined]
                UserName=user,
                PolicyName="rights",
                PolicyDocument=json.dumps({"Version": "2012-10-17", "Statement": statements}),
            )
            made = iam.create_access_key(UserName=user)["AccessKey"]  # type: ignore[attr-defined]
            environments[name] = {
                "AWS_ACCESS_KEY_ID": made["AccessKeyId"],
                "AWS_SECRET_ACCESS_KEY": made["SecretAccessKey"],
                "AWS_DEFAULT_REGION": "us-east-1",
                "AWS_ENDPOINT_URL": url,
                "AWS_EC2_METADATA_DISABLED": "true",
            }
        reset = urllib.request.Request(
            f"{url}/moto-api/reset-auth", data=b"0", headers={"Content-Type": "text/plain"}
        )
        urllib.request.urlopen(reset, timeout=10).close()
        yield environments.__getitem__


@pytest.mark.s3
@pytest.mark.parametrize("rights", RIGHTS)
def test_a_bucket_without_rights_is_refused_before_the_conversion(
    rights: str,
    guarded: Callable[[str], dict[str, str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in guarded(rights).items():
        monkeypatch.setenv(name, value)
    source = tmp_path / "no checkpoint.pt"  # never looked at
    arguments = ["convert", "composer-to-hf", str(source), "s3://models/hf"]
    assert main([*arguments, "--scratch-dir", str(tmp_path / "scratch")]) == 2
    said = capsys.readouterr().err
    assert "error: DEST s3://models/hf: may not be written to (" in said
    assert "AccessDenied" in said
    assert "PutObject" in said
    assert "Traceback" not in said
    assert list((tmp_path / "scratch").iterdir()) == []
    for name, value in guarded("all").items():
        monkeypatch.setenv(name, value)
    assert not keys(open_store("s3://models/hf"))


# --------------------------------------------------------------------------- kills

_CONVERT = """
import sys
from pathlib import Path
from batchinfer.convert.places import conversion
dest, scratch, *names = sys.argv[1:]
with conversion(dest, scratch_dir=Path(scratch)) as work:
    for name in names:
        (work.folder / name).write_bytes(name.encode() * 2000)
    work.publish()
"""


def is_model(found: set[str]) -> bool:
    """Whether a program that knows nothing of `UNFINISHED` would take the objects for a model."""
    return "config.json" in found


@pytest.mark.s3
def test_kills_while_uploading_leave_nothing_that_loads_and_the_same_command_finishes(
    s3_url: Callable[..., str], tmp_path: Path
) -> None:
    store = open_store(s3_url("hf"))
    num_kills = 0
    for num_shards, after in ((12, 4), (5, 2), (9, 8)):
        arguments = [store.url, str(tmp_path), *names_of(num_shards)]
        process = subprocess.Popen([sys.executable, "-c", _CONVERT, *arguments])
        deadline = time.monotonic() + 60
        while process.poll() is None and time.monotonic() < deadline:
            if len(keys(store) & set(names_of(num_shards))) >= after:
                process.kill()
                break
        num_kills += process.wait() == -9
        found = keys(store)
        if process.returncode == 0:
            assert found == set(names_of(num_shards))
            store.delete(found)
            continue
        assert UNFINISHED in found
        assert not is_model(found) or found == {UNFINISHED, *names_of(num_shards)}
        listed = set(json.loads(store.get(UNFINISHED).data)["files"])
        assert found - {UNFINISHED} <= listed
    assert num_kills >= 2
    convert(store.url, 7, tmp_path)
    assert keys(store) == set(names_of(7))
    assert store.get("config.json").data.startswith(b"config.json 7")


def test_a_killed_conversion_whose_files_were_all_there_is_begun_anew(tmp_path: Path) -> None:
    url = "memory://begun-anew/hf"
    convert(url, 3, tmp_path)
    store = open_store(url)
    store.create(UNFINISHED, json.dumps({"nonce": "x", "files": names_of(3)}).encode())
    seen: list[set[str]] = []
    with conversion(url, scratch_dir=tmp_path) as work:
        for name in names_of(2):
            (work.folder / name).write_bytes(b"new")
        seen.append(keys(store))
        work.publish()
    assert seen == [{UNFINISHED, *names_of(3)}]
    assert keys(store) == set(names_of(2))
    assert store.get("config.json").data == b"new"


def test_an_object_that_no_conversion_listed_stays(tmp_path: Path) -> None:
    url = "memory://not-listed/hf"
    store = open_store(url)
    store.create(UNFINISHED, json.dumps({"nonce": "x", "files": ["config.json"]}).encode())
    store.create("notes.txt", b"mine")
    convert(url, 1, tmp_path)
    assert keys(store) == {"notes.txt", *names_of(1)}


# --------------------------------------------------------------------------- failures and others


def test_a_conversion_that_fails_leaves_nothing_in_the_bucket(tmp_path: Path) -> None:
    url = "memory://fails/hf"
    seen: list[set[str]] = []

    def fail() -> None:
        with conversion(url, scratch_dir=tmp_path) as work:
            seen.append(keys(open_store(url)))
            (work.folder / "config.json").write_bytes(b"{}")
            raise InputError("bad checkpoint")

    with pytest.raises(InputError, match="bad"):
        fail()
    assert seen == [{UNFINISHED}]
    assert keys(open_store(url)) == set()


def test_a_conversion_that_fails_keeps_the_list_of_what_a_killed_one_left(tmp_path: Path) -> None:
    url = "memory://keeps/hf"
    store = open_store(url)
    store.create(UNFINISHED, json.dumps({"nonce": "x", "files": ["a", "b"]}).encode())
    store.create("a", b"left")
    with pytest.raises(InputError, match="bad"), conversion(url, scratch_dir=tmp_path):
        raise InputError("bad checkpoint")
    assert json.loads(store.get(UNFINISHED).data)["files"] == ["a"]


def test_two_conversions_into_one_place_do_not_mix(tmp_path: Path) -> None:
    url = "memory://two/hf"

    def both() -> None:
        with conversion(url, scratch_dir=tmp_path) as work:
            (work.folder / "config.json").write_bytes(b"first")
            convert(url, 2, tmp_path)
            work.publish()

    with pytest.raises(InputError, match="another conversion writes there"):
        both()
    assert keys(open_store(url)) == set(names_of(2))
    assert open_store(url).get("config.json").data != b"first"
    assert list(tmp_path.iterdir()) == []
