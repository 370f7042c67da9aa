"""Secrets in URLs are masked, and nothing else is."""

import pytest

from batchinfer.core.errors import ConfigError
from batchinfer.core.redaction import has_user, redact


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("s3://AKIA:SE/CR+ET=@bucket/x@1", "s3://…@bucket/x@1"),
        ("'s3:/AKIA:SECRET@bucket/x': lacks a slash", "'s3:/…@bucket/x': lacks a slash"),
        ("S3://SECRET@bucket", "S3://…@bucket"),
        ("a http://me:SECRET@host:8080/x, b", "a http://…@host:8080/x, b"),
        ("https:/host/x?token=SECRET", "https:/host/x?token=…"),
        ("(https://host/x?SECRET)", "(https://host/x?…)"),
        ("HTTPS://host/x?token=SECRET", "HTTPS://host/x?token=…"),
        ('"https://host/x?"}],"max_tokens":5}', '"https://host/x?"}],"max_tokens":5}'),
        ('https://host/x?q="a"&sig=SECRET', "https://host/x?q=…&sig=…"),
        ('{"a":"https://host/x?k=SECRET","b":5}', '{"a":"https://host/x?k=…","b":5}'),
        ("http://proxy:SECRET@h https://h?a=SECRET&b=SECRET.", "http://…@h https://h?a=…&b=…."),
    ],
)
def test_secrets_of_urls_are_masked(text, shown):
    assert redact(text) == shown
    assert redact(shown) == shown


def test_neither_message_nor_hint_of_an_error_repeats_a_secret():
    error = ConfigError("s3://id:SECRET@b: no", hint="did you mean http://h?token=SECRET")
    assert (error.message, error.hint) == ("s3://…@b: no", "did you mean http://h?token=…")
    assert "SECRET" not in str(error) + "".join(error.__notes__)


@pytest.mark.parametrize(
    "text",
    [
        "me@example.org: no such column",
        "s3://bucket/a:b/c@d",
        "s3://arn:aws:s3:eu-west-1:1:accesspoint:name/data@v1/x",
        "http://host:80",
        "hf://datasets/org/name@refs%2Fpr%2F1/x@y",
        "file:///home/me@work/x",
        "/data/x:/y/z@1",
    ],
)
def test_other_texts_stay(text):
    assert redact(text) == text
    assert not has_user(text)
