"""Fetching from web servers, against a server on 127.0.0.1 that misbehaves in every way."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from batchinfer.core.errors import ObjectNotFound, StorageError
from batchinfer.storage import web
from batchinfer.storage.retrying import RetryPolicy
from web_server import WebServer, in_turn, plain

LOCAL = web.WebRules(max_bytes=1000, seconds=5.0, allows_private=True)
QUICK = RetryPolicy(
    attempts=3, total_seconds=30, first_pause_seconds=0.01, longest_pause_seconds=0.01
)


@pytest.fixture
def server() -> Iterator[WebServer]:
    found = WebServer()
    yield found
    found.close()


def test_a_file_is_fetched_whole(server: WebServer) -> None:
    server.answers["/a%20b.png?x=1"] = plain(200, b"image")
    assert web.fetch(f"{server.url}/a b.png?x=1", LOCAL, QUICK) == b"image"


def test_without_permission_no_connection_is_made_to_a_private_address(server: WebServer) -> None:
    server.answers["/a"] = plain(200, b"secret")
    strict = LOCAL._replace(allows_private=False)
    port = server.url.rpartition(":")[2]
    for host in ("127.0.0.1", "localhost", "[::ffff:127.0.0.1]", "2130706433", "0x7f.1"):
        with pytest.raises((web.Forbidden, ObjectNotFound), match=r"private network|no such host"):
            web.fetch(f"http://{host}:{port}/a", strict, QUICK)
    assert server.seen == []


@pytest.mark.parametrize(
    "address",
    [
        "168.63.129.16",  # Azure's host
        "192.0.0.192",  # Oracle's metadata
        "192.0.0.9",
        "3fff::1",  # documentation
        "3fff:fff:ffff::1",
        "::ffff:168.63.129.16",
        "64:ff9b::a83f:8110",
        "64:ff9b:1::808:808",  # a local translator to IPv4
        "169.254.169.254",
        "100.100.100.200",
        "fd00:ec2::254",
        "255.255.255.255",
        "224.0.0.1",
        "ff0e::1",
        "fec0::1",
        "5f00::1",
        "::7f00:1",
        "2002:7f00:1::",
        "fe80::1%eth0",
    ],
)
def test_what_only_looks_public_is_private(address: str) -> None:
    assert web.is_private(address)


@pytest.mark.parametrize("address", ["8.8.8.8", "168.63.129.17", "2606:4700::1111"])
def test_what_is_public_is_not_private(address: str) -> None:
    assert not web.is_private(address)


def test_a_redirect_into_the_private_network_is_refused(
    server: WebServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.answers["/go"] = plain(302, Location=f"{server.url.replace('127.0.0.1', 'localhost')}/a")
    server.answers["/a"] = plain(200, b"secret")
    # Only the first name counts as public, as a server of an attacker would be.
    resolve = web._resolve
    public: list[str] = []

    def resolved(host: str, port: int) -> list[Any]:
        public.append(host)
        return resolve(host, port)

    is_private = web.is_private
    monkeypatch.setattr(web, "_resolve", resolved)
    monkeypatch.setattr(
        web, "is_private", lambda address: public[-1] != "127.0.0.1" and is_private(address)
    )
    strict = LOCAL._replace(allows_private=False)
    with pytest.raises(web.Forbidden, match="localhost"):
        web.fetch(f"{server.url}/go", strict, QUICK)
    assert server.seen == ["/go"]


@pytest.mark.parametrize("where", ["file:///etc/hostname", "ftp://example.com/a", "gopher://x/"])
def test_a_redirect_to_another_scheme_is_refused(server: WebServer, where: str) -> None:
    server.answers["/go"] = plain(302, Location=where)
    with pytest.raises(web.Forbidden, match="http"):
        web.fetch(f"{server.url}/go", LOCAL, QUICK)


def test_a_redirect_is_followed_and_a_circle_of_them_ends(server: WebServer) -> None:
    server.answers |= {
        "/1": plain(301, Location="/2"),
        "/2": plain(307, Location=f"{server.url}/3"),
        "/3": plain(200, b"here"),
        "/round": plain(302, Location="/round"),
    }
    assert web.fetch(f"{server.url}/1", LOCAL, QUICK) == b"here"
    with pytest.raises(ObjectNotFound, match="redirects more than"):
        web.fetch(f"{server.url}/round", LOCAL, QUICK)


def test_a_passing_failure_is_tried_again(server: WebServer) -> None:
    server.answers["/a"] = in_turn(plain(503), plain(429), plain(200, b"at last"))
    assert web.fetch(f"{server.url}/a", LOCAL, QUICK) == b"at last"
    assert len(server.seen) == 3


def test_a_lasting_failure_ends_after_the_attempts(server: WebServer) -> None:
    server.answers["/a"] = plain(500)
    with pytest.raises(StorageError, match=r"answers 500.*after 3 attempts"):
        web.fetch(f"{server.url}/a", LOCAL, QUICK)
    assert len(server.seen) == 3


@pytest.mark.parametrize("status", [400, 401, 403, 404, 410])
def test_a_refusal_is_not_tried_again(server: WebServer, status: int) -> None:
    server.answers["/a"] = plain(status)
    with pytest.raises(ObjectNotFound, match=str(status)):
        web.fetch(f"{server.url}/a", LOCAL, QUICK)
    assert len(server.seen) == 1


def endless(handler: Any) -> None:
    handler.send_response(200)
    handler.end_headers()
    while True:
        handler.wfile.write(b"x" * 1000)


def test_a_file_that_is_too_large_is_not_read_to_its_end(server: WebServer) -> None:
    server.answers["/told"] = plain(200, b"x", content_length="1001")
    server.answers["/endless"] = endless
    for path in ("/told", "/endless"):
        with pytest.raises(web.TooLarge, match=r"1001 bytes|more than 1000"):
            web.fetch(f"{server.url}{path}", LOCAL, QUICK)


def test_a_file_that_is_cut_off_counts_as_a_passing_failure(server: WebServer) -> None:
    server.answers["/a"] = in_turn(plain(200, b"half", content_length="8"), plain(200, b"whole"))
    assert web.fetch(f"{server.url}/a", LOCAL, QUICK) == b"whole"


def test_a_server_that_drips_is_given_up(server: WebServer) -> None:
    def drip(first: bytes) -> Callable[[Any], None]:
        def send(handler: Any) -> None:
            handler.wfile.write(first)
            # Each byte comes in time, and the whole never ends.
            while not server.is_closed.wait(0.02):
                handler.wfile.write(b"x")
                handler.wfile.flush()

        return send

    server.answers["/body"] = drip(b"HTTP/1.1 200 OK\r\ncontent-length: 900\r\n\r\n")
    server.answers["/header"] = drip(b"HTTP/1.1 200 OK\r\nx-slow: ")
    server.answers["/no-length"] = drip(b"HTTP/1.1 200 OK\r\n\r\n")
    once = QUICK.__class__(attempts=1)
    for path in server.answers:
        with pytest.raises(StorageError):
            web.fetch(f"{server.url}{path}", LOCAL._replace(seconds=0.3), once)


def test_nobody_listens() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        with pytest.raises(StorageError, match="after 3 attempts"):
            web.fetch(f"http://127.0.0.1:{port}/a", LOCAL, QUICK)


@pytest.mark.parametrize(
    "url", ["http://[::1", "http://host:99999/", "http://exa mple.com/", "http:///a", "http://a\n/"]
)
def test_what_is_no_url_is_not_found(url: str) -> None:
    with pytest.raises((ObjectNotFound, web.Forbidden)):
        web.fetch(url, LOCAL, QUICK)


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("8.8.8.8", False),
        ("2606:4700::1111", False),
        ("10.0.0.1", True),
        ("172.16.5.5", True),
        ("192.168.1.1", True),
        ("169.254.169.254", True),  # where clouds give out credentials
        ("100.64.0.1", True),
        ("0.0.0.0", True),
        ("224.0.0.1", True),
        ("255.255.255.255", True),
        ("::1", True),
        ("fe80::1%eth0", True),
        ("fd00::1", True),
        ("::ffff:169.254.169.254", True),
        ("::ffff:8.8.8.8", False),
        ("2002:a9fe:a9fe::1", True),
        ("64:ff9b::a9fe:a9fe", True),
        ("64:ff9b::808:808", False),
    ],
)
def test_private_addresses(address: str, expected: bool) -> None:
    assert web.is_private(address) is expected


@pytest.mark.parametrize(
    "where", ["http://[", "http://[::1", "http://a\x00b/", "http://.a/", "//[x"]
)
def test_a_redirect_to_what_is_no_url_is_a_missing_file(server: WebServer, where: str) -> None:
    server.answers["/go"] = plain(302, Location=where)
    with pytest.raises(ObjectNotFound):
        web.fetch(f"{server.url}/go", LOCAL, QUICK)


@pytest.mark.parametrize(
    "address",
    [
        *("0.0.0.0", "127.0.0.1", "10.0.0.1", "172.16.0.1", "192.168.1.1", "169.254.169.254"),
        *("100.64.0.1", "198.18.0.1", "224.0.0.1", "240.0.0.1", "255.255.255.255"),
        *("::", "::1", "::127.0.0.1", "::ffff:127.0.0.1", "::ffff:7f00:1", "fe80::1%lo", "fec0::1"),
        *("fd00:ec2::254", "ff02::1", "64:ff9b::7f00:1", "64:ff9b:1::7f00:1", "2002:7f00:1::"),
    ],
)
def test_addresses_that_are_not_of_the_public_internet(address: str) -> None:
    assert web.is_private(address)


def test_addresses_that_do_not_answer_leave_time_for_those_that_do(
    server: WebServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.answers["/a"] = plain(200, b"here")
    port = int(server.url.rpartition(":")[2])
    waited: list[float] = []
    connect = socket.socket.connect

    class Slow(socket.socket):
        def connect(self, address: Any) -> None:
            if address[0] == "127.0.0.9":
                waited.append(self.gettimeout() or 0.0)
                raise TimeoutError
            connect(self, address)

    addresses = [
        (socket.AF_INET, socket.SOCK_STREAM, 0, "", (host, port))
        for host in ("127.0.0.9",) * 3 + ("127.0.0.1",)
    ]
    monkeypatch.setattr(web, "_resolve", lambda *_: addresses)
    monkeypatch.setattr(web.socket, "socket", Slow)
    assert web.fetch(f"http://example.com:{port}/a", LOCAL, QUICK) == b"here"
    assert len(waited) == 3
    assert all(seconds < 2.6 for seconds in waited)  # of 5 seconds in all


def test_a_connection_has_all_the_time_that_is_left_and_not_its_addresss_share() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = (socket.AF_INET, socket.SOCK_STREAM, 0, "", server.getsockname())
        with web._open_socket([address] * 10, time.monotonic() + 1000) as found:
            assert (found.gettimeout() or 0) > 500
