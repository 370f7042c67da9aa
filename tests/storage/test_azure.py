"""What Azure alone shows, beside the contract of all stores: Azurite takes a large file in parts."""

import os

from batchinfer.storage import bucket
from batchinfer.storage.opening import open_store


def test_a_large_file_goes_up_in_parts(azure_url, tmp_path):
    store, file = open_store(azure_url("job")), tmp_path / "file"
    file.write_bytes(os.urandom(2 * bucket.PART_BYTES + 1))
    store.put_file("outputs/a", file)
    store.download("outputs/a", tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == file.read_bytes()
