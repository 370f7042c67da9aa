"""A Hub on 127.0.0.1, in memory: as much of its API as reading a data set and publishing one need, and faults.

A commit is the files that it holds, a branch the name of a commit. A fault is an entry of `faults`: the first request
that matches it is answered in its way.
"""

import base64
import contextlib
import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from types import SimpleNamespace
from typing import Any, NamedTuple
from urllib.parse import parse_qs, unquote

import pytest
from aiohttp import web

from fakes import QUICK
from web_server import HttpServer, raw

TOKEN = "hf_test"
_DATA_SET = re.compile(r"^/(?:api/)?datasets/([^/]+/[^/]+?)(?:\.git)?(?:/([a-z-]+)/(.*))?$")


class Fault(NamedTuple):
    """What happens to one request: a status, or None for a cut connection, or a call of a function before its effect.

    With `is_late`, the request has its effect, and no answer.
    """

    method: str
    path: str
    how: int | Callable[[], object] | None
    is_late: bool = False


class Refusal(Exception):
    """A status, and the code by which the client knows what it means."""

    def __init__(self, status: int, code: str = "", **value: str) -> None:
        super().__init__(status, code, value)


class Hub(HttpServer):
    """Data sets by name. Uploads need `TOKEN`, and so does reading those in `gated`."""

    def __init__(self) -> None:
        self.branches: dict[str, dict[str, str]] = {}
        """Commits by repository and branch."""
        self.trees: dict[str, dict[str, bytes]] = {}
        """Files by commit."""
        self.gated: set[str] = set()
        self.commits: list[str] = []
        """The branch of each commit that was made by the API."""
        self.created: list[dict[str, Any]] = []
        self.faults: list[Fault] = []
        self.objects: dict[str, bytes] = {}
        """Large files by checksum."""
        self.num_uploads = 0
        self.seen_by_readers: list[list[str]] = []
        """Data files of the main branch after each commit to it."""
        self.namespaces = {"org", "me"}
        self.has_rights = True
        super().__init__(self._answer)

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        found = Request(self, request, await request.read()).answer()
        return found or await raw(b"")(request)

    def put(self, repo: str, branch: str, files: dict[str, bytes]) -> str:
        """Make a branch's newest commit of these files; repository and branch may be new."""
        commit = hashlib.sha1(f"{repo} {len(self.trees)}".encode()).hexdigest()
        self.trees[commit] = files
        self.branches.setdefault(repo, {})[branch] = commit
        return commit

    def add(self, repo: str, branch: str, folder: Path) -> str:
        """As `put`, with the files of a folder."""
        paths = [path for path in folder.rglob("*") if path.is_file()]
        files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}
        return self.put(repo, branch, files)

    def make(self, repo: str) -> None:
        """Make an empty repository."""
        self.put(repo, "main", {".gitattributes": b"*.parquet filter=lfs\n"})

    def files(self, repo: str, branch: str = "main") -> dict[str, bytes]:
        """The files that readers of a branch see, by path."""
        return self.trees[self.branches[repo][branch]]

    def someone_commits(self, repo: str, path: str, data: bytes) -> None:
        """Change a file of the main branch, as another person does."""
        self.put(repo, "main", {**self.files(repo), path: data})


class Request:
    """What a Hub makes of one request."""

    def __init__(self, hub: Hub, request: web.Request, body: bytes) -> None:
        self.hub, self.headers, self.body = hub, request.headers, body
        self.command, self.request = request.method, request
        self.path, _, self.query = unquote(request.raw_path).partition("?")

    def answer(self) -> web.Response | None:
        """Do what is asked, or what a fault makes of it. None cuts the connection."""
        for fault in self.hub.faults:
            if fault.method == self.command and re.search(fault.path, self.path):
                self.hub.faults.remove(fault)
                if callable(fault.how):
                    fault.how()
                    break
                if fault.is_late:
                    self.serve()
                return web.json_response({}, status=fault.how) if fault.how else None
        return self.serve()

    def serve(self) -> web.Response:
        try:
            value, commit = self.found(), ""
        except Refusal as refusal:
            status, code, value = refusal.args
            headers = {"X-Error-Code": code, "X-Error-Message": code}
            return web.json_response(value, status=status, headers=headers)
        if isinstance(value, tuple):
            value, commit = value
        headers = {"X-Repo-Commit": commit}
        if not isinstance(value, bytes):
            return web.json_response(value, headers=headers)
        headers |= {"ETag": f'"{hashlib.sha1(value).hexdigest()}"', "Accept-Ranges": "bytes"}
        if "Range" not in self.headers:
            return web.Response(body=value, headers=headers)
        first, last, _ = self.request.http_range.indices(len(value))
        headers["Content-Range"] = f"bytes {first}-{last - 1}/{len(value)}"
        return web.Response(status=206, body=value[first:last], headers=headers)

    def found(self) -> Any:
        """Do what is asked. Returns the answer, with a commit where it is of one."""
        if self.path == "/api/validate-yaml":
            return {"errors": [], "warnings": []}
        if self.path.startswith("/objects/"):
            digest = hashlib.sha256(self.body).hexdigest()
            assert self.path == f"/objects/{digest}"
            self.hub.objects[digest] = self.body
            self.hub.num_uploads += 1
            return {}
        has_token = self.headers.get("Authorization") == f"Bearer {TOKEN}"
        match = _DATA_SET.match(self.path)
        repo, verb, rest = match.groups() if match else ("", "create", "")
        write = getattr(self, f"write_{verb}", None)
        if write and not has_token:
            raise Refusal(401)
        if write and not self.hub.has_rights:
            raise Refusal(403)
        if self.path == "/api/repos/create":
            return self.write_create(**json.loads(self.body))
        if match is None:
            raise Refusal(404, "EntryNotFound")
        if repo not in self.hub.branches:
            raise Refusal(401, "RepoNotFound")
        if repo in self.hub.gated and not has_token:
            raise Refusal(401, "GatedRepo")
        return write(repo, rest) if write else self.read(repo, verb, rest or "main")

    # ------------------------------------------------------------------------- reading

    def read(self, repo: str, verb: str | None, rest: str) -> Any:
        names = {**{commit: commit for commit in self.hub.trees}, **self.hub.branches[repo]}
        fitting = [name for name in names if f"{rest}/".startswith(f"{name}/")]
        if not fitting:
            raise Refusal(404, "RevisionNotFound")
        revision = max(fitting, key=len)
        commit, path = names[revision], rest[len(revision) + 1 :].strip("/")
        files = self.hub.trees[commit]
        folders = {str(one) for name in files for one in PurePosixPath(name).parents} - {"."}
        if verb in (None, "revision"):
            return {"id": repo, "sha": commit, "private": False, "siblings": []}, commit
        if verb == "paths-info":
            asked = parse_qs(self.body.decode())["paths"]
            return [self.entry(files, name) for name in asked if name in {*files, *folders}], commit
        if path not in ({*folders, ""} if verb == "tree" else files):
            raise Refusal(404, "EntryNotFound")
        if verb == "resolve":
            return files[path], commit
        start = f"{path}/" if path else ""
        is_deep = "recursive=true" in self.query.lower()
        below = [name for name in sorted({*files, *folders}) if name.startswith(start)]
        shown = [name for name in below if is_deep or "/" not in name[len(start) :]]
        return [self.entry(files, name) for name in shown], commit

    def entry(self, files: dict[str, bytes], name: str) -> dict[str, Any]:
        if name not in files:
            return {"type": "directory", "oid": "0" * 40, "size": 0, "path": name}
        data = files[name]
        oid = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
        return {"type": "file", "oid": oid, "size": len(data), "path": name}

    # ------------------------------------------------------------------------- publishing

    def write_create(self, name: str, organization: str = "me", **asked: Any) -> Any:
        if organization not in self.hub.namespaces:
            raise Refusal(404)
        repo = f"{organization}/{name}"
        url = f"http://127.0.0.1/datasets/{repo}"
        if repo in self.hub.branches:
            raise Refusal(409, url=url)
        self.hub.created.append(asked)
        self.hub.make(repo)
        return {"url": url, "id": repo}

    def write_info(self, repo: str, rest: str) -> Any:
        """What uploads of large files need: nothing where the content is there."""
        found = json.loads(self.body)["objects"]
        for item in found:
            if item["oid"] not in self.hub.objects:
                href = f"http://{self.headers['Host']}/objects/{item['oid']}"
                item["actions"] = {"upload": {"href": href}}
        return {"objects": found}

    def write_branch(self, repo: str, branch: str) -> Any:
        branches = self.hub.branches[repo]
        if branch in branches:
            raise Refusal(409)
        branches[branch] = branches["main"]
        return {}

    def write_preupload(self, repo: str, branch: str) -> Any:
        self.head_of(repo, branch)
        paths = [item["path"] for item in json.loads(self.body)["files"]]
        modes = ["lfs" if path.endswith(".parquet") else "regular" for path in paths]
        files = zip(paths, modes, strict=True)
        return {
            "files": [{"path": p, "uploadMode": mode, "shouldIgnore": False} for p, mode in files]
        }

    def write_commit(self, repo: str, branch: str) -> Any:
        head = self.head_of(repo, branch)
        files = dict(self.hub.trees[head])
        for line in self.body.splitlines():
            kind, value = (item := json.loads(line))["key"], item["value"]
            if kind == "header" and value.get("parentCommit") not in (None, head):
                raise Refusal(412)
            if kind == "lfsFile":
                files[value["path"]] = self.hub.objects[value["oid"]]
            elif kind == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif kind == "deletedFile":
                del files[value["path"]]
        commit = self.hub.put(repo, branch, files)
        self.hub.commits.append(branch)
        if branch == "main":
            self.hub.seen_by_readers.append([name for name in files if "/part-" in name])
        return {"commitUrl": f"http://127.0.0.1/datasets/{repo}", "commitOid": commit}, commit

    def head_of(self, repo: str, branch: str) -> str:
        if branch not in self.hub.branches[repo]:
            raise Refusal(404, "RevisionNotFound")
        return self.hub.branches[repo][branch]


@pytest.fixture
def hub(monkeypatch):
    """A Hub that this process asks, without long pauses after a failure."""
    from huggingface_hub import constants
    from huggingface_hub.utils import _http
    from huggingface_hub.utils.tqdm import progress_bar_states

    with contextlib.closing(Hub()) as found:
        monkeypatch.setattr(constants, "ENDPOINT", found.url)
        template = found.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setitem(progress_bar_states, "_global", False)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        monkeypatch.setattr("batchinfer.collect.destinations.RetryPolicy", lambda: QUICK)
        monkeypatch.setattr(_http, "time", SimpleNamespace(sleep=lambda _: None))
        yield found
