"""`batchinfer collect hf://…`: a Hub that fails, and other people's commits. Readers see all or nothing."""

import contextlib
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

import collecting
from batchinfer.core.errors import AccessDenied, InputError, StorageError
from finished_run import finish_run
from fixtures_hub import TOKEN, Fault, Hub
from making import make_job, python, run_process

pytestmark = pytest.mark.filterwarnings(
    "ignore:Use .content=:DeprecationWarning"
)  # huggingface_hub uploads in an old way

ROWS = 10
REPO = "org/answers.csv"
"""Names of data sets may end as those of files do."""
DEST = f"hf://datasets/{REPO}"
CARD = "README.md"
RECORD = ".collected.json"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    job = str(tmp_path_factory.mktemp("hub") / "job")
    make_job(job, rows=ROWS, per_chunk=5)
    finish_run(job, f"{job}/runs/a")
    return f"{job}/runs/a"


def collect(run: str, dest: str = DEST, **options: Any) -> dict[str, Any]:
    return collecting.collect(run, dest, **{"shard_rows": 1, **options})


def undisturbed(run: str, folder: Path, **options: Any) -> dict[str, bytes]:
    """The files that a collection into a folder has."""
    collect(run, str(folder), **options)
    return {path.name: path.read_bytes() for path in folder.glob("part-*")}


def published(hub: Hub) -> dict[str, bytes]:
    """The data files that readers see."""
    files = hub.files(REPO)
    return {name[5:]: data for name, data in files.items() if name.startswith("data/")}


# --------------------------------------------------------------------------- one commit


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_files_are_uploaded_one_by_one_and_come_in_one_commit(hub, run, tmp_path, kind):
    scratch = tmp_path / "scratch"
    on_disk: list[int] = []
    look = lambda: on_disk.append(sum(path.is_file() for path in scratch.rglob("*-table")))  # noqa: E731
    hub.faults.append(Fault("POST", "/commit/", look))
    result = collect(run, format=kind, scratch_dir=str(scratch))
    assert on_disk == [0 if kind == "parquet" else ROWS]
    assert hub.commits == ["main"]
    assert published(hub) == undisturbed(run, tmp_path / "folder", format=kind)
    assert hub.num_uploads == (ROWS if kind == "parquet" else 0)
    assert result["commit"] == hub.branches[REPO]["main"]
    files = hub.files(REPO)
    assert json.loads(files[RECORD])["result"]["rows"] == ROWS
    assert b"path: data/part-*" in files[CARD]


def test_the_same_command_again_changes_nothing_and_another_is_refused(hub, run):
    first = collect(run)
    count = len(hub.commits)
    again = collect(run)
    assert (again["status"], again["commit"]) == ("UNCHANGED", first["commit"])
    with pytest.raises(InputError, match="other data"):
        collect(run, shard_rows=5)
    assert len(hub.commits) == count
    hub.put(REPO, "main", {name: hub.files(REPO)[name] for name in (RECORD, CARD)})
    assert collect(run, where="_row < 2")["status"] == "SUCCESS", "somebody has deleted the data"
    assert len(published(hub)) == 2
    assert b'"where": "_row < 2"' in hub.files(REPO)[CARD]
    hub.put(REPO, "main", {RECORD: hub.files(REPO)[RECORD]})
    assert collect(run, where="_row < 2")["status"] == "SUCCESS"
    assert len(published(hub)) == 2


def test_readers_see_the_old_collection_until_the_new_one_is_whole(hub, run, tmp_path):
    collect(run, shard_rows=2)
    collect(run, overwrite=True)
    collect(run, shard_rows=5, overwrite=True)
    assert [len(names) for names in hub.seen_by_readers] == [5, 10, 2]
    assert published(hub) == undisturbed(run, tmp_path / "folder", shard_rows=5)
    assert [*hub.branches[REPO]] == ["main"]


def test_a_branch_of_the_readers_is_made_and_the_main_one_stays(hub, run):
    collect(run, f"{DEST}@v2")
    assert sorted(hub.branches[REPO]) == ["main", "v2"]
    assert published(hub) == {}
    assert sum(name.startswith("data/") for name in hub.files(REPO, "v2")) == ROWS


# --------------------------------------------------------------------------- a Hub that fails

FAULTS = {
    "a commit fails": Fault("POST", "/commit/", 500),
    "somebody commits at the same instant": Fault("POST", "/commit/", 409),
    "a large file's upload fails": Fault("PUT", "/objects/", 500),
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_failure_that_passes_changes_nothing(hub, run, tmp_path, fault):
    hub.faults.append(fault)
    assert collect(run)["status"] == "SUCCESS"
    assert not hub.faults
    assert published(hub) == undisturbed(run, tmp_path / "folder")
    assert [len(names) for names in hub.seen_by_readers] == [ROWS]
    assert [*hub.branches[REPO]] == ["main"]


@pytest.mark.parametrize("place", [("PUT", "/objects/"), ("POST", "/commit/main")])
def test_a_failure_that_lasts_ends_it_and_the_same_command_goes_on(hub, run, tmp_path, place):
    hub.faults += [Fault(*place, 500)] * 99
    with pytest.raises(StorageError, match="500") as caught:
        collect(run)
    assert caught.value.exit_status == 34
    assert "run the same command again" in caught.value.hint
    assert published(hub) == {}
    hub.faults.clear()
    assert collect(run)["status"] == "SUCCESS"
    assert (hub.num_uploads, len(hub.commits)) == (ROWS, 1)
    assert published(hub) == undisturbed(run, tmp_path / "folder")


def test_a_lost_reply_to_the_commit_ends_it_and_the_same_command_finds_it_there(hub, run, tmp_path):
    hub.faults.append(Fault("POST", "/commit/", None, True))
    with pytest.raises(StorageError, match="another commit came in between") as caught:
        collect(run)
    assert "run the same command again" in caught.value.hint
    assert collect(run)["status"] == "UNCHANGED"
    assert published(hub) == undisturbed(run, tmp_path / "folder")
    assert len(hub.commits) == 1


# --------------------------------------------------------------------------- other people


def test_a_card_is_replaced_unless_somebody_has_changed_it(hub, run):
    for size in (5, 2):
        collect(run, shard_rows=size, overwrite=True, where=f"_row < {size}")
        assert f'    "where": "_row < {size}"'.encode() in hub.files(REPO)[CARD]
    hub.someone_commits(REPO, CARD, b"mine")
    for size in (5, 2):
        collect(run, shard_rows=size, overwrite=True)
        assert hub.files(REPO)[CARD] == b"mine"


def test_data_that_somebody_publishes_meanwhile_is_not_mixed_in(hub, run):
    write = lambda: hub.someone_commits(REPO, "data/part-00000.parquet", b"theirs")  # noqa: E731
    hub.faults.append(Fault("POST", "/commit/main", write))
    with pytest.raises(StorageError, match="another commit came in between"):
        collect(run)
    assert published(hub) == {"part-00000.parquet": b"theirs"}
    with pytest.raises(InputError, match="holds other data"):
        collect(run)


# --------------------------------------------------------------------------- who may write


@pytest.mark.parametrize("token", ["hf_wrong", TOKEN])
def test_a_token_that_may_not_write_is_refused_before_rows_are_read(hub, run, monkeypatch, token):
    hub.make(REPO)
    hub.has_rights = False
    monkeypatch.setenv("HF_TOKEN", token)
    monkeypatch.setattr("batchinfer.collect.collecting.Collection", None)  # a use of it would fail
    with pytest.raises(AccessDenied, match=re.escape(DEST)) as caught:
        collect(run)
    assert "HF_TOKEN" in caught.value.hint
    assert "'org'" in caught.value.hint
    assert hub.commits == []


# --------------------------------------------------------------------------- the command


@pytest.mark.full
def test_a_data_set_has_a_card_and_is_read_by_datasets(run, tmp_path):
    with contextlib.closing(Hub()) as hub:
        environment = {"HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN, "HF_HUB_DISABLE_XET": "1"}
        environment |= {"HF_HOME": str(tmp_path / "hf"), "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
        options = ["--shard-rows", "4", "--with-source"]
        done = run_process(["collect", run, DEST, *options], environment=environment)
        assert done.status == 0, done.err
        assert "private" in json.dumps(hub.created[0])
        card = hub.files(REPO)[CARD].decode()
        assert all(text in card for text in ("# license:", '"model": "tiny"', '"rows": 10,'))
        assert str(tmp_path) not in card
        script = (
            f"import datasets, json; found = datasets.load_dataset('{REPO}', split='train');"
            "print(json.dumps([found['_row'][:], found['text'][3]]))"
        )
        environment |= {**os.environ, **environment, "HF_HOME": str(tmp_path / "b")}
        read = python(script, env=environment)
        assert json.loads(read.splitlines()[-1]) == [list(range(ROWS)), "answer 3"]
