"""Preemption notices from the cloud's metadata service, which come half a minute to two minutes ahead.

AWS tells of the end of a spot machine under spot/instance-action (with a session token, IMDSv2), Google under
instance/preempted. Elsewhere no request is sent. A notice lets a worker lose even less work, but nothing relies on
notices: errors here are silent, and a machine may vanish without one.

Sources: "Spot Instance interruption notices" in Amazon's EC2 user guide; "Preemptible VM instances" in Google's
Compute Engine documentation.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import logging
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from batchinfer.core.errors import BatchinferError, Interrupted
from batchinfer.worker.background import Background, Repeating

logger = logging.getLogger(__name__)

AWS = "aws"
GCP = "gcp"
POLL_SECONDS = 2.0
TIMEOUT_SECONDS = 1.0
FAILURES_BEFORE_SILENCE = 10
"""Failed requests in a row, before any answer, after which the service counts as unreachable."""
DMI = Path("/sys/class/dmi/id")

_TOKEN_SECONDS = 21600
_URLS = {AWS: "http://169.254.169.254", GCP: "http://metadata.google.internal"}
_VENDORS = {"amazon": AWS, "google": GCP}
_FAILURES = (OSError, http.client.HTTPException, ValueError)


class Service(Protocol):
    """One cloud's metadata service."""

    def notice(self) -> str | None:
        """Return what the cloud announces, None if nothing.

        Raises:
            OSError, http.client.HTTPException, ValueError: the service did not answer, or gave an unexpected answer.
        """
        ...


class AwsService:
    """Amazon's metadata service, version 2 (IMDSv2): every request needs a token."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._token = ""

    def notice(self) -> str | None:
        """See `Service`."""
        if not self._token:
            lifetime = {"X-aws-ec2-metadata-token-ttl-seconds": str(_TOKEN_SECONDS)}
            self._token = _ask(f"{self._url}/latest/api/token", lifetime, method="PUT")
        try:
            text = _ask(
                f"{self._url}/latest/meta-data/spot/instance-action",
                {"X-aws-ec2-metadata-token": self._token},
            )
        except urllib.error.HTTPError as error:
            if error.code == 404:
                return None
            self._token = ""  # the token has expired, or the machine was resumed elsewhere
            raise
        found = json.loads(text)
        details = found if isinstance(found, dict) else {}
        action, time = details.get("action", "terminate"), details.get("time", "any moment")
        return f"AWS will {action} this machine at {time}"


class GcpService:
    """Google's metadata service."""

    def __init__(self, url: str) -> None:
        self._url = url

    def notice(self) -> str | None:
        """See `Service`."""
        text = _ask(
            f"{self._url}/computeMetadata/v1/instance/preempted", {"Metadata-Flavor": "Google"}
        )
        return "Google Cloud is preempting this machine" if text.strip().upper() == "TRUE" else None


def find_service(
    host: dict[str, Any], environment: dict[str, str], *, dmi: Path = DMI
) -> Service | None:
    """Choose the service by SkyPilot's variables, else by the machine's maker. None outside both clouds. Sends nothing.

    Args:
        host: As `worker.describe_host` gives it.
        environment: BATCHINFER_METADATA_URL replaces the service's well-known address.
        dmi: Folder in which the kernel shows the machine's maker.
    """
    cloud = str(host.get("cloud") or "").lower()
    if cloud not in _URLS:
        cloud = _vendor(dmi)
    if not cloud:
        return None
    url = (environment.get("BATCHINFER_METADATA_URL") or _URLS[cloud]).rstrip("/")
    if not url.startswith(("http://", "https://")):
        return None
    return AwsService(url) if cloud == AWS else GcpService(url)


def watch(
    service: Service,
    background: Background,
    request: Callable[[BatchinferError], None],
    *,
    poll_seconds: float = POLL_SECONDS,
) -> Repeating:
    """Ask the service regularly in the background, and request a stop once it announces the end.

    Args:
        service: The cloud's metadata service.
        background: Runs the requests on a thread of their own; each takes at most a second.
        request: Takes the stop request (`Stopper.request`). Called at most once.
        poll_seconds: Seconds between two questions.
    """
    return background.every(poll_seconds, _Watcher(service, request).look)


class _Watcher:
    """Asks until there is a notice, or until the service counts as unreachable."""

    def __init__(self, service: Service, request: Callable[[BatchinferError], None]) -> None:
        self._service = service
        self._request = request
        self._num_failures = 0
        self._has_answered = False
        self._is_over = False

    def look(self) -> None:
        """Ask once. Never raises."""
        if self._is_over:
            return
        try:
            notice = self._service.notice()
        except _FAILURES as error:
            self._num_failures += 1
            logger.debug("metadata service: %s", error)
            if not self._has_answered and self._num_failures >= FAILURES_BEFORE_SILENCE:
                self._is_over = True
            return
        self._has_answered = True
        if notice is not None:
            self._is_over = True
            self._request(
                Interrupted(
                    f"preemption notice: {notice}",
                    hint="start the same command again elsewhere: it goes on where this one stopped",
                )
            )


def _vendor(dmi: Path) -> str:
    for name in ("sys_vendor", "bios_vendor", "product_name"):
        with contextlib.suppress(OSError, UnicodeDecodeError):
            text = (dmi / name).read_text(encoding="utf-8").lower()
            for vendor, cloud in _VENDORS.items():
                if vendor in text:
                    return cloud
    return ""


def _ask(url: str, headers: dict[str, str], *, method: str = "GET") -> str:
    # No proxy is used, because the address is link-local: a proxy would answer for its own machine.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    question = urllib.request.Request(url, headers=headers, method=method)  # noqa: S310 - http(s), see find_service
    try:
        with opener.open(question, timeout=TIMEOUT_SECONDS) as answer:
            body: bytes = answer.read(4096)
    except urllib.error.HTTPError as error:
        error.close()  # because the error holds the connection
        raise
    return body.decode()
