"""Fetches files that rows of data sets name, from web servers that nobody has vetted.

Rows are written by strangers, and a worker may stand in a network with services that trust it. So every socket, also
one for a redirect, is made only for an address of the public internet, which is checked after the name was resolved,
unless the caller allows private addresses. Proxies of the environment are not used: they resolve names themselves.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
from typing import Any, NamedTuple

from batchinfer import __version__
from batchinfer.core.errors import BatchinferError, ObjectNotFound
from batchinfer.storage.retrying import RetryPolicy, TransientError, retried

_MAX_REDIRECTS = 5
_MAY_PASS = frozenset({408, 425, 429})
_BLOCK_BYTES = 256 << 10
_HEADERS = {
    "User-Agent": f"batchinfer/{__version__} (+https://pypi.org/project/batchinfer)",
    "Accept": "image/*,*/*;q=0.5",
    "Accept-Encoding": "identity",
}
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

    It cannot be called within an event loop.

    Raises:
        Forbidden: the URL, or one that it redirects to, leads to a private address or is no http(s) URL.
        TooLarge: the file has more than `max_bytes` bytes.
        ObjectNotFound: the server says that there is no such file, or that it does not give it to us.
        StorageError: the last attempt failed, too: a time-out, a lost connection, a status of 500 or more.
    """
    return retried(retries, lambda: asyncio.run(_attempt(url, rules)), log_level=logging.DEBUG)


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


class _PrivateAddress(OSError):
    """A connection to a private address was refused. All have the same text, so that aiohttp keeps the class."""


def _public_socket(target: Any) -> socket.socket:
    """Return a socket for an address that was found for a host: aiohttp makes each of its sockets here."""
    family, kind, protocol, _, address = target
    if is_private(address[0]):
        raise _PrivateAddress("is an address of a private network")
    return socket.socket(family, kind, protocol)


async def _attempt(url: str, rules: WebRules) -> bytes:
    import aiohttp

    try:
        connector = aiohttp.TCPConnector(
            resolver=aiohttp.ThreadedResolver(),
            socket_factory=None if rules.allows_private else _public_socket,
        )
        timeout = aiohttp.ClientTimeout(total=rules.seconds)
        async with (
            aiohttp.ClientSession(
                connector=connector, timeout=timeout, headers=_HEADERS
            ) as session,
            session.get(url, max_redirects=_MAX_REDIRECTS) as answer,
        ):
            return await _body(answer, url, rules)
    except aiohttp.NonHttpUrlClientError as error:
        raise Forbidden(f"{url}: expected http:// or https:// ({error})") from error
    except aiohttp.TooManyRedirects as error:
        raise ObjectNotFound(f"{url}: redirects more than {_MAX_REDIRECTS} times") from error
    except aiohttp.ClientConnectorCertificateError as error:
        raise ObjectNotFound(f"{url}: {error.certificate_error} (its certificate)") from error
    except aiohttp.ClientConnectorError as error:
        reason = error.os_error
        if isinstance(reason, _PrivateAddress):
            raise Forbidden(f"{url}: {error.host} {reason} (--allow-private-urls)") from error
        if reason.errno in (socket.EAI_NONAME, getattr(socket, "EAI_NODATA", None)):
            raise ObjectNotFound(f"{url}: no such host as {error.host}") from error
        raise TransientError(f"{url}: {reason.strerror or reason}") from error
    except ValueError as error:
        raise ObjectNotFound(f"{url}: is or leads to what is no URL ({error})") from error
    except TimeoutError as error:
        raise TransientError(f"{url}: is slower than {rules.seconds:g} s") from error
    except (aiohttp.ClientError, OSError) as error:
        raise TransientError(f"{url}: {str(error) or type(error).__name__}") from error


async def _body(answer: Any, url: str, rules: WebRules) -> bytes:
    if answer.status >= 500 or answer.status in _MAY_PASS:
        raise TransientError(f"{url}: the server answers {answer.status} {answer.reason}")
    if answer.status != 200:
        raise ObjectNotFound(f"{url}: the server answers {answer.status} {answer.reason}")
    if (answer.content_length or 0) > rules.max_bytes:
        raise TooLarge(
            f"{url}: has {answer.content_length} bytes, expected at most {rules.max_bytes}"
        )
    data = bytearray()
    async for block in answer.content.iter_chunked(_BLOCK_BYTES):
        data += block
        if len(data) > rules.max_bytes:
            raise TooLarge(f"{url}: has more than {rules.max_bytes} bytes")
    return bytes(data)
