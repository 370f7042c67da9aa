"""Reading pages of S3 listings at the speed of the XML parser.

botocore builds every field of every object in Python, and dates with dateutil: 85 ms a page, 17 s of CPU for a run of
100,000 chunks. This takes the objects out of a page before botocore sees it, through the hook that botocore has for that.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any
from xml.etree import ElementTree as ET

EVENT = "before-parse.s3.ListObjectsV2"


def register(client: Any) -> None:
    """Have this client's listings read here. Idempotent."""
    client.meta.events.register(EVENT, take_contents, unique_id="batchinfer-listing")


def take_contents(
    response_dict: dict[str, Any], customized_response_dict: dict[str, Any], **_: Any
) -> None:
    """Move the objects of a page from its XML to the parsed answer; botocore reads what is left.

    Objects have the fields that listings need: Key (still encoded, which botocore undoes), Size, ETag, LastModified.
    A page of another shape is left to botocore as it is.
    """
    if response_dict.get("status_code") != 200:
        return
    try:
        root = ET.fromstring(response_dict["body"])  # noqa: S314 - expat expands no external entity; botocore parses so too
    except ET.ParseError:
        return
    name = root.tag.removesuffix("ListBucketResult")
    if name == root.tag:
        return
    found = root.findall(f"{name}Contents")
    try:
        contents = [_read(element, len(name)) for element in found]
    except (KeyError, ValueError):
        return
    for element in found:
        root.remove(element)
    response_dict["body"] = ET.tostring(root)
    customized_response_dict["Contents"] = contents


def _read(element: ET.Element, start: int) -> dict[str, Any]:
    fields = {child.tag[start:]: child.text or "" for child in element}
    return {
        "Key": fields["Key"],
        "Size": int(fields["Size"]),
        "ETag": fields["ETag"],
        "LastModified": datetime.fromisoformat(fields["LastModified"]),
    }
