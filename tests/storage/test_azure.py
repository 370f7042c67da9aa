"""A whole run on Azure: source, job, run and result in one container of Azurite."""

import json
import os

from batchinfer.storage import bucket
from batchinfer.storage.opening import open_store
from making import run_process


def test_a_data_set_on_azure_is_split_answered_verified_and_collected(
    azure_url,
):
    root = azure_url("")
    rows = [{"prompt": f"say {index}"} for index in range(20)]
    open_store(root).create(
        "rows.jsonl", b"".join(json.dumps(row).encode() + b"\n" for row in rows)
    )
    job, run = f"{root}/job", f"{root}/job/runs/a"
    worker = ["worker", "--job", job, "--output", run, "--engine", "echo"]
    for command in (
        ["split", f"{root}/rows.jsonl", "--output", job, "--num-chunks", "4"],
        [*worker, "--prompt-column", "prompt"],
        ["verify", run, "--deep"],
        ["collect", run, f"{root}/answers.jsonl"],
    ):
        finished = run_process(command)
        assert finished.status == 0, finished
    answers = open_store(root).get("answers.jsonl").data.splitlines()
    assert len(answers) == 20
    assert [json.loads(line)["_row"] for line in answers] == list(range(20))


def test_a_large_file_goes_up_in_parts(azure_url, tmp_path):
    store, file = open_store(azure_url("job")), tmp_path / "file"
    file.write_bytes(os.urandom(2 * bucket.PART_BYTES + 1))
    store.put_file("outputs/a", file)
    store.download("outputs/a", tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == file.read_bytes()
