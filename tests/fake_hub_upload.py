"""The fake Hub with as much of the API as publishing a data set needs: branches, large files, commits, and faults.

Branches are folders; each commit also leaves a copy of its branch's folder, to be read by its hash. Commits are kept in
`commits`. A fault is an entry of `faults`: the first request that matches it is answered in its way.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import re
import shutil
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

from fake_hub import TOKEN, FakeHub, Handler
from web_server import HttpServer

_WRITES = re.compile(r"^/api/datasets/([^/]+/[^/]+)/(preupload|commit|branch)/(.+)$")
_BATCH = re.compile(r"^/datasets/([^/]+/[^/]+)\.git/info/lfs/objects/batch$")
_OBJECT = re.compile(r"^/objects/([0-9a-f]{64})$")


class Fault(NamedTuple):
    """What happens to one request: a status, or None for a cut connection, or a call of a function.

    After a function that returns something true, the connection is cut. With `is_late`, the request has had its effect
    before.
    """

    method: str
    path: str
    how: int | Callable[[], object] | None
    is_late: bool = False


class UploadHub(FakeHub):
    """Repositories that exist are those in `repos`; uploads need the token."""

    def __init__(self) -> None:
        super().__init__()
        self.commits: list[dict[str, Any]] = []
        self.created: list[dict[str, Any]] = []
        self.faults: list[Fault] = []
        self.objects: dict[str, bytes] = {}
        self.num_uploads = 0
        self.seen_by_readers: list[list[str]] = []
        """Data files of the main branch after each commit to it."""
        self.namespaces = {"org", "me"}
        self.has_rights = True
        self.lock = threading.RLock()
        self._heads: dict[tuple[str, str], str] = {}
        self._folder = Path(tempfile.mkdtemp(prefix="fake-hub-"))

    @contextmanager
    def serving(self) -> Iterator[str]:
        with closing(HttpServer(UploadHandler, state=self)) as server:
            yield server.url
        shutil.rmtree(self._folder, ignore_errors=True)

    def make(self, repo: str) -> Path:
        """Make an empty repository and return the folder of its main branch."""
        folder = self._folder / repo / "branches" / "main"
        folder.mkdir(parents=True)
        (folder / ".gitattributes").write_text("*.parquet filter=lfs\n")
        self.add(repo, "main", folder)
        self.keep(repo, "main")
        return folder

    def branch(self, repo: str, name: str, start: str) -> None:
        """Make a branch."""
        folder = self._folder / repo / "branches" / name
        shutil.copytree(self.repos[repo][start], folder)
        self.add(repo, name, folder)
        self._heads[repo, name] = self.commit_of(repo, start)

    def keep(self, repo: str, branch: str) -> str:
        """Make the present files of a branch its newest commit, and return the commit."""
        commit = hashlib.sha1(f"{repo} {len(self._heads)} {len(self.commits)}".encode()).hexdigest()
        copy = self._folder / repo / "commits" / commit
        shutil.copytree(self.repos[repo][branch], copy)
        self.repos[repo][commit] = copy
        self._heads[repo, branch] = commit
        return commit

    def commit_of(self, repo: str, revision: str) -> str:
        return self._heads.get((repo, revision), revision)

    def someone_commits(self, repo: str, path: str, data: bytes) -> None:
        """Change a file of the main branch, as another person does."""
        with self.lock:
            target = self.repos[repo]["main"] / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data)
            self.commits.append({"repo": repo, "branch": "main", "files": [path], "deleted": []})
            self.keep(repo, "main")

    def branches(self, repo: str) -> list[str]:
        return [name for owner, name in self._heads if owner == repo]

    def drop(self, repo: str, branch: str) -> None:
        shutil.rmtree(self.repos[repo].pop(branch))
        del self._heads[repo, branch]


class UploadHandler(Handler):
    def answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        found = next(
            (
                fault
                for fault in self.server.state.faults
                if fault.method == self.command and re.search(fault.path, path)
            ),
            None,
        )
        if found is None:
            return self.serve(path)
        self.server.state.faults.remove(found)
        if found.is_late:
            wfile, self.wfile = self.wfile, io.BytesIO()
            self.serve(path)
            self.wfile = wfile
        if callable(found.how):
            is_over = found.how()
            if not is_over and not found.is_late:
                return self.serve(path)
        if isinstance(found.how, int):
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            return self.fail(found.how, "")
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)
        return None

    def serve(self, path: str) -> None:
        has_token = self.headers.get("Authorization") == f"Bearer {TOKEN}"
        write, batch, large = _WRITES.match(path), _BATCH.match(path), _OBJECT.match(path)
        is_ours = write or batch or large or path in ("/api/repos/create", "/api/validate-yaml")
        if self.command == "GET" or not is_ours:
            return super().answer()
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.server.state.requests.append((path, has_token))
        with self.server.state.lock:
            if path == "/api/validate-yaml":
                return self.send({"errors": [], "warnings": []}, "")
            if large:
                assert hashlib.sha256(body).hexdigest() == large[1]
                self.server.state.objects[large[1]] = body
                self.server.state.num_uploads += 1
                return self.send({}, "")
            if not has_token:
                return self.fail(401, "")
            if not self.server.state.has_rights:
                return self.fail(403, "")
            if path == "/api/repos/create":
                return self.create(json.loads(body))
            repo = (write or batch)[1]  # type: ignore[index]
            if repo not in self.server.state.repos:
                return self.fail(401, "RepoNotFound")
            if batch:
                return self.send(
                    {"objects": [self.action(item) for item in json.loads(body)["objects"]]}, ""
                )
            assert write is not None
            return self.write(repo, write[2], write[3], body)

    def create(self, asked: dict[str, Any]) -> None:
        name = f"{asked.get('organization') or 'me'}/{asked['name']}"
        found = {"url": f"http://127.0.0.1/datasets/{name}", "id": name}
        if name.partition("/")[0] not in self.server.state.namespaces:
            return self.fail(404, "")
        if name in self.server.state.repos:
            return self.reply(409, json.dumps(found).encode(), {})
        self.server.state.created.append({**asked, "repo": name})
        self.server.state.make(name)
        return self.send(found, "")

    def action(self, item: dict[str, Any]) -> dict[str, Any]:
        """What an upload of a large file needs: nothing if its content is there."""
        if item["oid"] in self.server.state.objects:
            return item
        href = f"http://{self.headers['Host']}/objects/{item['oid']}"
        return {**item, "actions": {"upload": {"href": href}}}

    def write(self, repo: str, verb: str, branch: str, body: bytes) -> None:
        branches = self.server.state.branches(repo)
        if verb == "branch" and self.command == "POST":
            if branch in branches:
                return self.fail(409, "")
            self.server.state.branch(repo, branch, json.loads(body).get("startingPoint") or "main")
            return self.send({}, "")
        if branch not in branches:
            return self.fail(404, "RevisionNotFound")
        if verb == "branch":
            self.server.state.drop(repo, branch)
            return self.send({}, "")
        if verb == "preupload":
            files = [
                {
                    "path": item["path"],
                    "uploadMode": "lfs" if item["path"].endswith(".parquet") else "regular",
                    "shouldIgnore": False,
                }
                for item in json.loads(body)["files"]
            ]
            return self.send({"files": files}, "")
        return self.commit(repo, branch, body)

    def commit(self, repo: str, branch: str, body: bytes) -> None:
        folder = self.server.state.repos[repo][branch]
        found: dict[str, Any] = {"repo": repo, "branch": branch, "files": [], "deleted": []}
        for line in body.splitlines():
            item = json.loads(line)
            value = item["value"]
            if item["key"] == "header":
                found["summary"] = value["summary"]
                parent = value.get("parentCommit")
                if parent not in (None, self.server.state.commit_of(repo, branch)):
                    return self.fail(412, "")
            elif item["key"] in ("file", "lfsFile"):
                is_large = item["key"] == "lfsFile"
                target = folder / value["path"]
                target.parent.mkdir(parents=True, exist_ok=True)
                data = self.server.state.objects[value["oid"]] if is_large else value["content"]
                target.write_bytes(data if is_large else base64.b64decode(data))
                found["files"].append(value["path"])
            elif item["key"] == "deletedFile":
                (folder / value["path"]).unlink()
                found["deleted"].append(value["path"])
        self.server.state.commits.append(found)
        commit = self.server.state.keep(repo, branch)
        if branch == "main":
            data_files = sorted(path.name for path in folder.rglob("part-*"))
            self.server.state.seen_by_readers.append(data_files)
        return self.send(
            {"commitUrl": f"http://127.0.0.1/datasets/{repo}/commit/{commit}", "commitOid": commit},
            commit,
        )

    def entry(self, folder: Path, item: Path) -> dict[str, Any]:
        found = super().entry(folder, item)
        if not item.is_file():
            return found
        data = item.read_bytes()
        digest = hashlib.sha256(data).hexdigest()
        if item.suffix == ".parquet" and digest in self.server.state.objects:
            found["lfs"] = {"oid": digest, "size": len(data), "pointerSize": 130}
        return found
