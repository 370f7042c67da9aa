"""Listing pages read without botocore: the same answer as botocore's own, or left to it."""

from __future__ import annotations

from typing import Any

import pytest
from botocore.parsers import RestXMLParser
from botocore.session import get_session

from batchinfer.storage.s3_listing import register, take_contents

PAGE = (
    '<?xml version="1.0"?><ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><Name>b</Name>{head}'
    "{objects}<IsTruncated>false</IsTruncated><KeyCount>2</KeyCount></ListBucketResult>"
)
FIRST = (
    "<Contents><Key>a%20b</Key><LastModified>2026-01-02T03:04:05.678Z</LastModified>"
    "<ETag>&quot;abc&quot;</ETag><Size>7</Size><StorageClass>STANDARD</StorageClass></Contents>"
)
SECOND = (  # another server's order of fields, and one more of them
    '\n<Contents><Size>0</Size><ETag>"d-2"</ETag><Owner><ID>x</ID></Owner>'
    "<LastModified>2026-01-02T03:04:05Z</LastModified><Key>c</Key></Contents>"
)


def by_botocore(body: bytes) -> dict[str, Any]:
    model = get_session().get_service_model("s3").operation_model("ListObjectsV2")
    answer = {"body": body, "headers": {}, "status_code": 200}
    parsed: dict[str, Any] = RestXMLParser().parse(answer, model.output_shape)
    return parsed


def by_us(body: bytes) -> tuple[bytes, dict[str, Any]]:
    answer, taken = {"body": body, "headers": {}, "status_code": 200}, {}
    take_contents(answer, taken, operation_model=None)
    return answer["body"], taken


def wanted(objects: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    return [
        (item["Key"], item["Size"], item["ETag"], item["LastModified"].timestamp())
        for item in objects
    ]


def test_objects_are_the_same_as_from_botocore() -> None:
    body = PAGE.format(head="", objects=FIRST + SECOND).encode()
    rest, taken = by_us(body)
    assert wanted(taken["Contents"]) == wanted(by_botocore(body)["Contents"])
    assert len(taken["Contents"]) == 2
    assert by_botocore(rest)["IsTruncated"] is False


@pytest.mark.parametrize(
    ("head", "objects"),
    [
        ("", ""),
        ("", FIRST.replace("<Size>7</Size>", "")),
        ("", FIRST.replace("a%20b", "a&amp;b")),
        ("", FIRST + "<CommonPrefixes><Prefix>p/</Prefix></CommonPrefixes>" + SECOND),
        ("", FIRST.replace("2026-01-02T03:04:05.678Z", "yesterday")),
    ],
    ids=["empty", "no size", "entity", "prefixes between", "odd time"],
)
def test_an_odd_page_is_left_to_botocore(head: str, objects: str) -> None:
    body = PAGE.format(head=head, objects=objects).encode()
    assert by_us(body) == (body, {})


def test_a_page_that_was_cut_off_stays_broken() -> None:
    body = PAGE.format(head="", objects=FIRST + SECOND).encode()
    for length in range(body.index(b"<Contents>"), len(body)):
        rest, _ = by_us(body[:length])
        assert not rest.endswith(b"</ListBucketResult>")


def test_botocore_sees_a_page_without_its_objects() -> None:
    """Its check for errors in a 200 answer parsed every page whole, a quarter of a large job's start."""
    client = get_session().create_client("s3", region_name="us-east-1")
    seen: list[bytes] = []

    def first_of_botocore(response_dict: dict[str, Any], **_: Any) -> None:
        seen.append(response_dict["body"])

    client.meta.events.register_first("before-parse.s3.*", first_of_botocore)
    register(client)
    register(client)
    model = client.meta.service_model.operation_model("ListObjectsV2")
    answer = {
        "body": PAGE.format(head="", objects=FIRST + SECOND).encode(),
        "headers": {},
        "status_code": 200,
    }
    taken: dict[str, Any] = {}
    client.meta.events.emit(
        "before-parse.s3.ListObjectsV2",
        operation_model=model,
        response_dict=answer,
        customized_response_dict=taken,
    )
    assert len(taken["Contents"]) == 2
    assert b"<Contents>" not in seen[0]
