"""Which model a row asks for: the run's own, or one of its LoRA adapters."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import msgspec

from batchinfer.core.errors import near
from batchinfer.prompts.json_lines import json_type
from batchinfer.prompts.types import Code, PromptConfig, RowProblem

ANY_NAME = "*"
"""Value of ``--served-model-name`` that makes every name mean the run's model."""


class ModelNames:
    """The names by which rows may ask for the run's model and for its adapters.

    Args:
        config: The prompt options, with the names of adapters and those of ``--served-model-name``.
        own: Further names of the model, such as the value of ``--model``.
    """

    def __init__(self, config: PromptConfig, own: Collection[str]) -> None:
        self._adapters = frozenset(config.adapters or ())
        self._own = {*own, *(config.served_model_name or ())}

    def adapter_of(self, name: Any, *, subject: str, param: str | None) -> str | None:
        """Return the adapter that a row asks for; None for the run's model.

        Args:
            name: The name in the row; UNSET, null and "" mean the model.
            subject: Where the name stands, for messages.
            param: Parameter of a request that holds the name; None if a column does.

        Raises:
            RowProblem: the name is unknown.
        """
        if name is msgspec.UNSET or name is None or name == "":
            return None
        if not isinstance(name, str):
            raise RowProblem(
                Code.MODEL_NOT_FOUND,
                f"{subject} is a JSON {json_type(name)}, expected a name",
                param=param,
            )
        if name in self._adapters:
            return name
        if name in self._own or ANY_NAME in self._own:
            return None
        known = sorted(self._adapters)
        listed = (
            f"none of the run's adapters ({', '.join(known[:10])})"
            if known
            else "no adapter of the run"
        )
        raise RowProblem(
            Code.MODEL_NOT_FOUND,
            f"{subject} {name[:80]!r}: is {listed}, and no name of the run's model (--served-model-name)"
            + near(name[:80], known),
            param=param,
        )


def only_name(lines: Iterable[bytes]) -> str:
    """Return the model's name that all these requests give; "" if they give several or none. Bad lines are skipped.

    >>> only_name([b'{"model": "a"}', b'{"body": {"model": "a"}}', b"no JSON"])
    'a'
    """
    found = set()
    for line in lines:
        try:
            request = msgspec.json.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            continue
        if isinstance(request, dict):
            body = request.get("body", request)
            name = body.get("model") if isinstance(body, dict) else None
            found.add(name if isinstance(name, str) else "")
    return found.pop() if len(found) == 1 else ""
