"""Tools that a model may call, as files and columns state them, in the form of the OpenAI API."""

from __future__ import annotations

from typing import Any

from batchinfer.core.errors import near
from batchinfer.prompts.json_lines import decode_text, json_type
from batchinfer.prompts.types import Unfit

WORDS = ("auto", "required", "none")
"""Values of `tool_choice` that name no tool."""


def read_tools(value: Any) -> list[dict[str, Any]]:
    """Return tools in the form of the OpenAI API. What their schemas hold is left to the server.

    Args:
        value: A list of tools, or JSON text of one. A tool may also be its function alone, as many data sets store it.

    Raises:
        Unfit: the value is no list of tools, or is empty.
    """
    if isinstance(value, str):
        value = decode_text(value)
    if not isinstance(value, list) or not value:
        raise Unfit(f"a JSON {json_type(value)}, expected a list of tools, not empty")
    return [_read_tool(item, index) for index, item in enumerate(value)]


def _read_tool(item: Any, index: int) -> dict[str, Any]:
    if isinstance(item, dict) and "function" not in item and isinstance(item.get("name"), str):
        item = {"function": {name: value for name, value in item.items() if name != "type"}}
    function = item.get("function") if isinstance(item, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise Unfit(f"tool {index}: expected an object with a function that has a name")
    return {"type": "function", **item}


def choice_of(choice: Any, tools: list[dict[str, Any]] | None) -> Any:
    """Return the value of `tool_choice` in a body.

    Args:
        choice: One of `WORDS`, the name of a tool, or such a value, which is returned as it is.
        tools: The tools that it chooses from; None if they are not known yet.

    Raises:
        Unfit: it names a tool that is not there.
    """
    name = choice["function"]["name"] if isinstance(choice, dict) else choice
    if name in WORDS:
        return name
    names = [tool["function"]["name"] for tool in tools or []]
    if tools is not None and name not in names:
        raise Unfit(f"no tool {name!r} among the tools{near(name, names)}")
    return {"type": "function", "function": {"name": name}}
