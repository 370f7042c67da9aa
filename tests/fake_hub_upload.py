"""The fake Hub with as much of the API as one upload of a data set needs. Commits are kept in `commits`."""

from __future__ import annotations

import base64
import json
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import unquote, urlsplit

from fake_hub import TOKEN, FakeHub, _Handler, commit_of


class UploadHub(FakeHub):
    """Repositories that exist are those in `repos`; uploads need the token."""

    def __init__(self) -> None:
        super().__init__()
        self.commits: list[dict[str, Any]] = []
        self.created: list[dict[str, Any]] = []
        self.fail_commits = 0
        """So many commits are answered with 500."""
        self._folder = Path(tempfile.mkdtemp(prefix="fake-hub-"))

    @contextmanager
    def serving(self) -> Iterator[str]:
        hub = self

        class Handler(_UploadHandler):
            state = hub

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        thread = Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            server.server_close()
            thread.join()
            shutil.rmtree(self._folder, ignore_errors=True)

    def make(self, repo: str) -> Path:
        """Make an empty repository and return its folder."""
        folder = self._folder / repo
        folder.mkdir(parents=True)
        self.add(repo, "main", folder)
        return folder


class _UploadHandler(_Handler):
    state: UploadHub

    def answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        has_token = self.headers.get("Authorization") == f"Bearer {TOKEN}"
        match = re.match(r"^/api/datasets/([^/]+/[^/]+)/(preupload|commit|branch)/([^/]+)$", path)
        is_ours = match or path in ("/api/repos/create", "/api/validate-yaml")
        if self.command != "POST" or not is_ours:
            return super().answer()
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.state.requests.append((path, has_token))
        if path == "/api/validate-yaml":
            return self.send({"errors": [], "warnings": []}, "")
        if not has_token:
            return self.fail(401, "")
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked.get('organization') or 'me'}/{asked['name']}"
            found = {"url": f"http://127.0.0.1/datasets/{name}", "id": name}
            if name in self.state.repos:
                return self.reply(409, json.dumps(found).encode(), {})
            self.state.created.append({**asked, "repo": name})
            self.state.make(name)
            return self.send(found, "")
        assert match is not None
        repo, verb, _ = match.groups()
        if repo not in self.state.repos:
            return self.fail(401, "RepoNotFound")
        if verb == "preupload":
            files = [
                {"path": item["path"], "uploadMode": "regular", "shouldIgnore": False}
                for item in json.loads(body)["files"]
            ]
            return self.send({"files": files}, "")
        if self.state.fail_commits:
            self.state.fail_commits -= 1
            return self.fail(500, "")
        return self.commit(repo, body)

    def commit(self, repo: str, body: bytes) -> None:
        folder = self.state.repos[repo]["main"]
        found: dict[str, Any] = {"repo": repo, "files": [], "deleted": []}
        for line in body.splitlines():
            item = json.loads(line)
            value = item["value"]
            if item["key"] == "header":
                found["summary"] = value["summary"]
            elif item["key"] == "file":
                target = folder / value["path"]
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(base64.b64decode(value["content"]))
                found["files"].append(value["path"])
            elif item["key"] == "deletedFile":
                (folder / value["path"]).unlink()
                found["deleted"].append(value["path"])
        self.state.commits.append(found)
        commit = commit_of(repo, "main")
        self.send(
            {"commitUrl": f"http://127.0.0.1/datasets/{repo}/commit/{commit}", "commitOid": commit},
            commit,
        )
