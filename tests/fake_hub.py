"""A Hub on 127.0.0.1 with data sets from local folders: as much of its API as reading needs.

Each data set has revisions (a branch or a ref, at a made-up commit), each a folder of files. A gated one answers 401
without the token. Every request is kept in `requests` as (path, whether it carried the token).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from web_server import HttpServer

TOKEN = "hf_test"


class FakeHub:
    """Data sets by name: `add("org/name", "main", folder)`; then `serving()`."""

    def __init__(self) -> None:
        self.repos: dict[str, dict[str, Path]] = {}
        self.gated: set[str] = set()
        self.requests: list[tuple[str, bool]] = []

    def add(self, repo: str, revision: str, folder: Path) -> str:
        """Serve `folder` as this revision and return its commit."""
        self.repos.setdefault(repo, {})[revision] = folder
        return commit_of(repo, revision)

    def commit_of(self, repo: str, revision: str) -> str:
        """Return the hash of a revision's newest commit."""
        return commit_of(repo, revision)

    @contextmanager
    def serving(self) -> Iterator[str]:
        """Serve on a free port of 127.0.0.1; yields the endpoint's URL."""
        with contextlib.closing(HttpServer(Handler, state=self)) as server:
            yield server.url


def commit_of(repo: str, revision: str) -> str:
    return hashlib.sha1(f"{repo}@{revision}".encode()).hexdigest()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # a reply in one packet: two of them would wait for each other
    disable_nagle_algorithm = True

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        self.answer()

    do_HEAD = do_POST = do_PUT = do_DELETE = do_GET  # noqa: N815 - http.server's names

    def answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = unquote(urlsplit(self.path).path)
        has_token = self.headers.get("Authorization") == f"Bearer {TOKEN}"
        self.server.state.requests.append((path, has_token))
        match = re.match(
            r"^/(?:api/)?datasets/([^/]+/[^/]+)(?:/(revision|tree|paths-info|resolve)/(.*))?$", path
        )
        if match is None:
            return self.fail(404, "EntryNotFound")
        repo, verb, rest = match.groups()
        if repo not in self.server.state.repos:
            return self.fail(401, "RepoNotFound")
        if repo in self.server.state.gated and not has_token:
            return self.fail(401, "GatedRepo")
        revision, tail = self.split_revision(repo, rest or "main")
        if revision is None:
            return self.fail(404, "RevisionNotFound")
        folder = self.server.state.repos[repo][revision]
        commit = self.server.state.commit_of(repo, revision)
        if verb in (None, "revision"):
            return self.send({"id": repo, "sha": commit, "private": False, "siblings": []}, commit)
        if verb == "tree":
            if tail and not (folder / tail).exists():
                return self.fail(404, "EntryNotFound")
            deep = "recursive=true" in self.path.lower()
            found = (folder / tail).rglob("*") if deep else (folder / tail).glob("*")
            return self.send([self.entry(folder, item) for item in sorted(found)], commit)
        if verb == "paths-info":
            is_form = "urlencoded" in (self.headers.get("Content-Type") or "")
            paths = (parse_qs(body.decode()) if is_form else json.loads(body))["paths"]
            found = [folder / item for item in paths if item and (folder / item).exists()]
            return self.send([self.entry(folder, item) for item in found], commit)
        return self.send_file(folder / tail, commit)

    def split_revision(self, repo: str, rest: str) -> tuple[str | None, str]:
        for name in sorted(self.server.state.repos[repo], key=len, reverse=True):
            for spelling in (name, self.server.state.commit_of(repo, name)):
                if rest == spelling or rest.startswith(spelling + "/"):
                    return name, rest[len(spelling) :].strip("/")
        return None, ""

    def entry(self, folder: Path, item: Path) -> dict[str, Any]:
        name = item.relative_to(folder).as_posix()
        if item.is_dir():
            return {"type": "directory", "oid": "0" * 40, "size": 0, "path": name}
        data = item.read_bytes()
        return {
            "type": "file",
            "oid": hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest(),
            "size": len(data),
            "path": name,
        }

    def send_file(self, path: Path, commit: str) -> None:
        if not path.is_file():
            self.fail(404, "EntryNotFound")
            return
        data = path.read_bytes()
        headers = {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "Accept-Ranges": "bytes"}
        status, part = 200, data
        wanted = re.match(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        if wanted:
            start = int(wanted[1])
            stop = min(len(data), int(wanted[2]) + 1) if wanted[2] else len(data)
            status, part = 206, data[start:stop]
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(data)}"
        self.reply(status, part, {**headers, "X-Repo-Commit": commit})

    def send(self, value: Any, commit: str) -> None:
        self.reply(
            200,
            json.dumps(value).encode(),
            {"Content-Type": "application/json", "X-Repo-Commit": commit},
        )

    def fail(self, status: int, code: str) -> None:
        self.reply(status, b"{}", {"X-Error-Code": code, "X-Error-Message": code})

    def reply(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
