"""Requests, templates and schemas that tests of several rooms share."""

import json
import re
from pathlib import Path

DOCS = (Path(__file__).resolve().parents[1] / "docs" / "format.md").read_text()
SCHEMAS = {
    name: json.loads(text)
    for name, text in re.findall(r"```json schema=([a-z-]+)\n(.*?)```", DOCS, re.DOTALL)
}
"""JSON schemas of docs/format.md by name."""

# A request as batch files of completions hold it.
SEED_REQUEST = {
    "best_of": 1,
    "echo": False,
    "engine": "gpt-j-6b",
    "logprobs": 1,
    "max_tokens": 2,
    "n": 1,
    "prompt": "Question: How do you go from the bathroom to the hallway?\nAnswer:",
    "stop": ["\n"],
    "temperature": 0.0,
    "top_p": 1,
}
