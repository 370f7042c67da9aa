"""Fetching from web servers, against a server on 127.0.0.1 that misbehaves in every way."""

import asyncio

import pytest

from batchinfer.core.errors import ObjectNotFound, StorageError
from batchinfer.storage import web
from batchinfer.storage.retrying import RetryPolicy
from fakes import QUICK
from web_server import endless, raw, reply

LOCAL = web.WebRules(max_bytes=1000, seconds=5.0, allows_private=True)


def test_a_file_is_fetched_whole(server):
    server.answers["/a%20b.png?x=1"] = reply(200, b"image")
    assert web.fetch(f"{server.url}/a b.png?x=1", LOCAL, QUICK) == b"image"


def test_without_permission_no_connection_is_made_to_a_private_address(server):
    server.answers["/a"] = reply(200, b"secret")
    strict = LOCAL._replace(allows_private=False)
    port = server.url.rpartition(":")[2]
    for host in ("127.0.0.1", "localhost", "[::ffff:127.0.0.1]", "2130706433", "0x7f.1"):
        with pytest.raises((web.Forbidden, ObjectNotFound), match=r"private network|is no URL"):
            web.fetch(f"http://{host}:{port}/a", strict, QUICK)
    assert server.seen == []


PRIVATE = (
    *("0.0.0.0", "127.0.0.1", "10.0.0.1", "172.16.5.5", "192.168.1.1", "100.64.0.1"),
    *("198.18.0.1", "224.0.0.1", "240.0.0.1", "255.255.255.255"),
    # Where clouds give out credentials, Azure's host, Oracle's metadata.
    *("169.254.169.254", "100.100.100.200", "fd00:ec2::254"),
    *("168.63.129.16", "192.0.0.192", "192.0.0.9"),
    *("::", "::1", "fe80::1%eth0", "fec0::1", "fd00::1", "ff02::1", "ff0e::1", "5f00::1"),
    *("3fff::1", "3fff:fff:ffff::1"),  # documentation
    *("::127.0.0.1", "::7f00:1", "::ffff:127.0.0.1", "::ffff:169.254.169.254"),
    *("::ffff:168.63.129.16", "2002:7f00:1::", "2002:a9fe:a9fe::1"),
    *("64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe", "64:ff9b::a83f:8110"),
    *("64:ff9b:1::7f00:1", "64:ff9b:1::808:808"),  # a local translator to IPv4
)
PUBLIC = ("8.8.8.8", "168.63.129.17", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808")


@pytest.mark.parametrize("address", [*PRIVATE, *PUBLIC])
def test_addresses_that_are_not_of_the_public_internet_are_private(address):
    assert web.is_private(address) == (address in PRIVATE)


def test_a_redirect_into_the_private_network_is_refused(server, monkeypatch):
    """The first server counts as public, as an attacker's would be."""
    server.answers["/go"] = reply(302, Location=f"{server.url.replace('127.0.0.1', '127.0.0.2')}/a")
    server.answers["/a"] = reply(200, b"secret")
    monkeypatch.setattr(web, "is_private", lambda address: address != "127.0.0.1")
    strict = LOCAL._replace(allows_private=False)
    with pytest.raises(web.Forbidden, match=r"127\.0\.0\.2 is an address of a private network"):
        web.fetch(f"{server.url}/go", strict, QUICK)
    assert server.seen == ["/go"]


def test_a_redirect_is_followed_and_a_circle_of_them_ends(server):
    server.answers |= {
        "/1": reply(301, Location="/2"),
        "/2": reply(307, Location=f"{server.url}/3"),
        "/3": reply(200, b"here"),
        "/round": reply(302, Location="/round"),
    }
    assert web.fetch(f"{server.url}/1", LOCAL, QUICK) == b"here"
    with pytest.raises(ObjectNotFound, match="redirects more than"):
        web.fetch(f"{server.url}/round", LOCAL, QUICK)


def test_a_passing_failure_and_a_file_that_is_cut_off_are_tried_again(server):
    cut = raw(b"HTTP/1.1 200 OK\r\ncontent-length: 8\r\n\r\nhalf")
    for failures in ((reply(503), reply(429)), (cut,)):
        server.seen.clear()
        server.answers["/a"] = [*failures, reply(200, b"at last")]
        assert web.fetch(f"{server.url}/a", LOCAL, QUICK) == b"at last"
        assert len(server.seen) == len(failures) + 1


@pytest.mark.parametrize("status", [400, 401, 403, 404, 410])
def test_a_refusal_is_not_tried_again(server, status):
    server.answers["/a"] = reply(status)
    with pytest.raises(ObjectNotFound, match=str(status)):
        web.fetch(f"{server.url}/a", LOCAL, QUICK)
    assert len(server.seen) == 1


def test_a_file_that_is_too_large_is_not_read_to_its_end(server):
    server.answers["/untold"] = raw(b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * 1001)
    server.answers["/told"] = raw(b"HTTP/1.1 200 OK\r\ncontent-length: 1001\r\n\r\nx")
    server.answers["/endless"] = endless(b"x" * 1000)
    for path in ("/told", "/untold", "/endless"):
        with pytest.raises(web.TooLarge, match=r"1001 bytes|more than 1000"):
            web.fetch(f"{server.url}{path}", LOCAL, QUICK)


def test_a_server_that_drips_is_given_up(server):
    def drip(first):
        async def send(request):
            request.transport.write(first)
            while True:  # each byte comes in time, and the whole never ends
                await asyncio.sleep(0.02)
                request.transport.write(b"x")

        return send

    server.answers["/body"] = drip(b"HTTP/1.1 200 OK\r\ncontent-length: 900\r\n\r\n")
    server.answers["/header"] = drip(b"HTTP/1.1 200 OK\r\nx-slow: ")
    server.answers["/no-length"] = drip(b"HTTP/1.1 200 OK\r\n\r\n")
    once = RetryPolicy(attempts=1)
    for path in server.answers:
        with pytest.raises(StorageError):
            web.fetch(f"{server.url}{path}", LOCAL._replace(seconds=0.3), once)
