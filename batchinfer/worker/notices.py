"""Preemption notices: a cloud announces that it will take a spot machine away, half a minute to two minutes before.

The machine asks its cloud's metadata service for the notice. AWS gives it under spot/instance-action, to requests with
a session token (IMDSv2). Google gives it under instance/preempted. On other clouds no request is sent. A notice lets a
worker lose less work, but nothing relies on notices: a machine may vanish without a notice, and failed requests only
show in the debug log.

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
"""Failed requests after which the worker stops asking a service that has never answered."""
DMI = Path("/sys/class/dmi/id")

_TOKEN_SECONDS = 21600
_URLS = {AWS: "http://169.254.169.254", GCP: "http://metadata.google.internal"}
_VENDORS = {"amazon": AWS, "google": GCP}
_FAILURES = (OSError, http.client.HTTPException, ValueError)


class Service(Protocol):
    """One cloud's metadata service."""

    def notice(self) -> str | None:
        """Ask the service once. Return the notice as a sentence, None if the cloud announces nothing.

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
            self._token = ""  # get a new token next time: this one may have expired
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
    """Choose the metadata service of this machine's cloud; None outside AWS and Google. Sends no request.

    The cloud is the one that `host` names, if that is AWS or Google, else the machine's maker as the kernel shows it.

    Args:
        host: The machine's description, from `describe_host` in command.py.
        environment: Environment variables. BATCHINFER_METADATA_URL replaces the service's usual address.
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
    """Ask the service regularly in the background, and request a stop when it announces the machine's end.

    Args:
        service: The cloud's metadata service.
        background: Runs the requests on a separate thread. A request times out after a second.
        request: Called at most once, with the error that the worker must end with (`Stopper.request`).
        poll_seconds: Seconds between two requests to the service.
    """
    return background.every(poll_seconds, _Watcher(service, request).look)


class _Watcher:
    """Asks the service for a notice, until one has come or a service that never answered has failed too often."""

    def __init__(self, service: Service, request: Callable[[BatchinferError], None]) -> None:
        self._service = service
        self._request = request
        self._num_failures = 0
        self._has_answered = False
        self._is_over = False

    def look(self) -> None:
        """Ask the service once, and request a stop if it gives a notice. An unanswered request raises nothing."""
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
    # No proxy is used, because the service answers for the machine that asks. With a proxy that would be the proxy's
    # machine.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    question = urllib.request.Request(url, headers=headers, method=method)  # noqa: S310 - http(s), see find_service
    try:
        with opener.open(question, timeout=TIMEOUT_SECONDS) as answer:
            body: bytes = answer.read(4096)
    except urllib.error.HTTPError as error:
        error.close()  # the error keeps the connection open until it is closed
        raise
    return body.decode()
