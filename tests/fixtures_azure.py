"""Azure's blob storage on 127.0.0.1 for tests: Azurite, which npm installs into .cache/ of this checkout."""

import fcntl
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from web_server import announced

AZURITE = "azurite@3.37.0"
FOLDER = Path(__file__).resolve().parents[1] / ".cache" / AZURITE
ACCOUNT = "devstoreaccount1"
# Azurite's published key, the same everywhere.
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
# The server dies with the test process, however that ends (PR_SET_PDEATHSIG is 1).
_RUN = "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); os.execvp(sys.argv[1], sys.argv[1:])"


def azurite() -> Path:
    """Return the server's script. The first test process of a checkout installs it, in about half a minute."""
    if not (shutil.which("node") and shutil.which("npm")):
        pytest.fail(
            "tests of az:// need Node.js 20 or later with npm on PATH: apt-get install nodejs npm"
        )
    FOLDER.mkdir(parents=True, exist_ok=True)
    script = FOLDER / "node_modules/azurite/dist/src/blob/main.js"
    with (FOLDER / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (FOLDER / "installed").exists():
            command = ["npm", "install", "--no-audit", "--no-fund", "--no-save", "--prefix"]
            done = subprocess.run(
                [*command, str(FOLDER), AZURITE], capture_output=True, text=True, timeout=240
            )
            if done.returncode:
                pytest.fail(f"npm could not install {AZURITE}:\n{done.stderr[-2000:]}")
            (FOLDER / "installed").touch()
    return script


@pytest.fixture(scope="session")
def azure_endpoint(tmp_path_factory):
    """Address of the server, which holds everything in memory."""
    log = tmp_path_factory.mktemp("azurite") / "server.log"
    options = ["--blobHost", "127.0.0.1", "--blobPort", "0", "--inMemoryPersistence"]
    options += ["--skipApiVersionCheck", "--disableTelemetry"]
    command = [sys.executable, "-c", _RUN, "node", str(azurite()), *options]
    with announced(command, log, rb"listens on (http://127\.0\.0\.1:[0-9]+)") as url:
        yield f"{url}/{ACCOUNT}"


@pytest.fixture
def azure_url(azure_endpoint, monkeypatch):
    """Factory: `azure_url("job")` makes a container and returns a URL in it. The environment names the account."""
    import secrets

    from azure.storage.blob import BlobServiceClient

    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", ACCOUNT)
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", KEY)
    monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", azure_endpoint)

    def make(prefix: str = "", container: str = "") -> str:
        container = container or f"test-{secrets.token_hex(6)}"
        with BlobServiceClient(azure_endpoint, credential=KEY) as client:
            client.create_container(container)
        return f"az://{container}/{prefix}".rstrip("/")

    return make
