"""Fetches files that rows of data sets name, from web servers that nobody has vetted.

Rows are written by strangers, and a worker may stand in a network with services that trust it. So a connection is made
only to an address of the public internet, which is checked after the name was resolved, for every redirect too, unless
the caller allows private addresses. Proxies of the environment are not used: a proxy would resolve names by itself.
"""

from __future__ import annotations

import contextlib
import functools
import http.client
import ipaddress
import logging
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from typing import Any, NamedTuple
from urllib.parse import quote, urljoin, urlsplit

from batchinfer import __version__
from batchinfer.core.errors import BatchinferError, ObjectNotFound
from batchinfer.storage.retrying import RetryPolicy, TransientError, retried

_MAX_REDIRECTS = 5
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_MAY_PASS = frozenset({408, 425, 429})
_BLOCK_BYTES = 256 << 10
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_NOT_PUBLIC = [
    ipaddress.ip_network("168.63.129.16/32"),  # Azure: the host's own services
    ipaddress.ip_network("192.0.0.0/24"),  # of protocols; Oracle's metadata are there
    ipaddress.ip_network("3fff::/20"),  # of documentation, since RFC 9637
    ipaddress.ip_network("64:ff9b:1::/48"),  # local translators to IPv4
]
"""What `ipaddress` calls global in some versions of Python, and is not."""
_RETRIES = RetryPolicy(
    attempts=4, total_seconds=60.0, first_pause_seconds=0.5, longest_pause_seconds=8.0
)


class Forbidden(BatchinferError):
    """The URL leads to an address of a private network, or is no http(s) URL."""


class TooLarge(BatchinferError):
    """The file has more bytes than the caller takes."""


class WebRules(NamedTuple):
    """What may be fetched. `seconds` bounds one attempt, redirects included."""

    max_bytes: int
    seconds: float
    allows_private: bool = False


def fetch(url: str, rules: WebRules, retries: RetryPolicy = _RETRIES) -> bytes:
    """Return the content of the file at an http(s) URL. An attempt that fails for a passing reason is repeated.

    Raises:
        Forbidden: the URL, or one that it redirects to, leads to a private address or is no http(s) URL.
        TooLarge: the file has more than `max_bytes` bytes.
        ObjectNotFound: the server says that there is no such file, or that it does not give it to us.
        StorageError: the last attempt failed, too: a time-out, a lost connection, a status of 500 or more.
    """
    return retried(retries, lambda: _fetch_once(url, rules), log_level=logging.DEBUG)


def is_private(address: str) -> bool:
    """Whether an IP address is none of the public internet, or stands for one that is not.

    >>> (
    ...     is_private("8.8.8.8"),
    ...     is_private("10.1.2.3"),
    ...     is_private("::ffff:127.0.0.1"),
    ...     is_private("64:ff9b::a00:1"),
    ... )
    (False, True, True, True)
    """
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        inner = ip.ipv4_mapped or ip.sixtofour or (ip.teredo or (None, None))[1]
        if ip in _NAT64:
            inner = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
        if inner is not None:
            return is_private(str(inner))
        if ip.is_site_local:
            return True
    is_listed = any(ip in network for network in _NOT_PUBLIC)
    return is_listed or not ip.is_global or ip.is_multicast or ip.is_reserved


def _fetch_once(url: str, rules: WebRules) -> bytes:
    until = time.monotonic() + rules.seconds
    for _ in range(_MAX_REDIRECTS + 1):
        target = _get(url, rules, until)
        if isinstance(target, bytes):
            return target
        with _failures(url):
            url = urljoin(url, target)
    raise ObjectNotFound(f"{url}: redirects more than {_MAX_REDIRECTS} times")


def _get(url: str, rules: WebRules, until: float) -> bytes | str:
    """Send one request. Returns the content, or where the server redirects to."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ObjectNotFound(f"{url}: is no URL ({error})") from error
    if parts.scheme not in ("http", "https") or not host:
        raise Forbidden(f"{url}: expected a URL that begins with http:// or https://")
    target = quote(parts.path or "/", safe="/%:@!$&'()*+,;=~-._")
    if parts.query:
        target += "?" + quote(parts.query, safe="/%:@!$&'()*+,;=~-._?")
    connection = _connect(parts.scheme, host, port, rules, until)
    with contextlib.closing(connection), _failures(url), _deadline(connection.sock, until):
        if isinstance(connection.sock, ssl.SSLSocket):
            connection.sock.do_handshake()
        connection.request(
            "GET",
            target,
            headers={
                "User-Agent": f"batchinfer/{__version__} (+https://pypi.org/project/batchinfer)",
                "Accept": "image/*,*/*;q=0.5",
                "Accept-Encoding": "identity",
            },
        )
        with connection.getresponse() as answer:
            location = answer.headers.get("Location")
            if answer.status in _REDIRECTS and location:
                return location
            if answer.status >= 500 or answer.status in _MAY_PASS:
                raise TransientError(f"{url}: the server answers {answer.status} {answer.reason}")
            if answer.status != 200:
                raise ObjectNotFound(f"{url}: the server answers {answer.status} {answer.reason}")
            return _read(answer, url, rules, until)


def _read(answer: http.client.HTTPResponse, url: str, rules: WebRules, until: float) -> bytes:
    if (answer.length or 0) > rules.max_bytes:
        raise TooLarge(f"{url}: has {answer.length} bytes, expected at most {rules.max_bytes}")
    data = bytearray()
    while block := answer.read1(_BLOCK_BYTES):
        data += block
        if len(data) > rules.max_bytes:
            raise TooLarge(f"{url}: has more than {rules.max_bytes} bytes")
    if time.monotonic() > until:
        raise TransientError(f"{url}: is slower than {rules.seconds:g} s")
    if answer.length:
        raise TransientError(f"{url}: the connection was lost before its end")
    return bytes(data)


@functools.cache
def _tls() -> ssl.SSLContext:
    return ssl.create_default_context()


def _connect(
    scheme: str, host: str, port: int | None, rules: WebRules, until: float
) -> http.client.HTTPConnection:
    """Connect to the first address of a host that answers. Only addresses that are allowed are tried."""
    number = port or (443 if scheme == "https" else 80)
    url = f"{scheme}://{host}"
    with _failures(url):
        found = _resolve(host, number)
    allowed = [each for each in found if rules.allows_private or not is_private(each[4][0])]
    if not allowed:
        raise Forbidden(
            f"{url}: is at {found[0][4][0]}, an address of a private network (--allow-private-urls)"
        )
    with _failures(url):
        connection = http.client.HTTPConnection(host, number)
        connection.sock = open_socket = _open_socket(allowed, until)
        if scheme == "https":
            # The handshake comes later, within the time limit.
            connection.sock = _tls().wrap_socket(
                open_socket, server_hostname=host, do_handshake_on_connect=False
            )
            connection.default_port = 443
    return connection


def _resolve(host: str, port: int) -> list[tuple[Any, ...]]:
    try:
        return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        if error.errno in (socket.EAI_NONAME, getattr(socket, "EAI_NODATA", None)):
            raise ObjectNotFound(f"{host}: no such host") from error
        raise


def _open_socket(addresses: list[tuple[Any, ...]], until: float) -> socket.socket:
    """Connect to the first address that answers. Each gets an equal share of the time that is left until `until`."""
    problem: OSError = OSError("no address")
    for index, (family, kind, protocol, _, address) in enumerate(addresses):
        new = socket.socket(family, kind, protocol)
        try:
            share = (until - time.monotonic()) / (len(addresses) - index)
            new.settimeout(max(share, 0.001))
            new.connect(address)
        except OSError as error:
            new.close()
            problem = error
        else:
            new.settimeout(max(until - time.monotonic(), 0.001))
            return new
    raise problem


@contextlib.contextmanager
def _failures(url: str) -> Iterator[None]:
    """Turn failures of the network into TransientError, and those of the URL into ObjectNotFound."""
    try:
        yield
    except ssl.SSLCertVerificationError as error:
        raise ObjectNotFound(f"{url}: {error.verify_message} (its certificate)") from error
    except http.client.InvalidURL as error:
        raise ObjectNotFound(f"{url}: is no URL ({error})") from error
    except UnicodeError as error:
        raise ObjectNotFound(f"{url}: is no name of a host") from error
    except ValueError as error:
        raise ObjectNotFound(f"{url}: leads to what is no URL ({error})") from error
    except (OSError, http.client.HTTPException, EOFError) as error:
        reason = "no answer in time" if isinstance(error, TimeoutError) else str(error)
        raise TransientError(f"{url}: {reason or type(error).__name__}") from error


@contextlib.contextmanager
def _deadline(open_socket: socket.socket, until: float) -> Iterator[None]:
    """Shut a connection down at a time. A time-out of the socket alone would begin anew with every byte."""
    timer = threading.Timer(max(until - time.monotonic(), 0.0), _shut_down, args=(open_socket,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _shut_down(open_socket: socket.socket) -> None:
    with contextlib.suppress(OSError):
        # An SSLSocket's own `shutdown` would take away its encryption, which another thread is using.
        socket.socket.shutdown(open_socket, socket.SHUT_RDWR)
