"""Every store keeps the same promises: local, memory, S3 (moto), Azure (Azurite) and GCS (a fake with generations)."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from batchinfer.storage import Store
from batchinfer.storage.opening import open_store
from fake_gcs import BUCKET, serving_gcs
from store_contract import StoreContract


class TestLocal(StoreContract):
    @pytest.fixture
    def reopen(self, tmp_path: Path) -> Callable[[], Store]:
        return lambda: open_store(str(tmp_path / "new" / "root"))


class TestMemory(StoreContract):
    @pytest.fixture
    def reopen(self) -> Callable[[], Store]:
        url = f"memory://{secrets.token_hex(6)}/job"
        return lambda: open_store(url)


@pytest.mark.s3
class TestS3(StoreContract):
    @pytest.fixture
    def reopen(self, s3_url: Callable[[str], str]) -> Callable[[], Store]:
        url = s3_url("some/job")
        return lambda: open_store(url)


class TestAzure(StoreContract):
    @pytest.fixture
    def reopen(self, azure_url: Callable[[str], str]) -> Callable[[], Store]:
        url = azure_url("some/job")
        return lambda: open_store(url)


class TestGcs(StoreContract):
    @pytest.fixture
    def reopen(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], Store]]:
        with serving_gcs() as url:
            monkeypatch.setenv("GOOGLE_BASE_URL", url)
            monkeypatch.setenv("GOOGLE_BEARER_TOKEN", "testing")
            yield lambda: open_store(f"gs://{BUCKET}/some/job")
