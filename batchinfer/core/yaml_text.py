"""Reads YAML that people write."""

from __future__ import annotations

import json
from typing import Any

from batchinfer.core.errors import ConfigError


def parse_yaml(text: str, name: str) -> Any:
    """Parse YAML whose values are all texts, numbers, truth values, lists and mappings.

    Raises:
        ConfigError: It is no YAML, or has other values, such as a date, `!!set` or `!!binary`. The message begins with
            `name`.
    """
    import yaml

    try:
        loaded = yaml.safe_load(text)
        json.dumps(loaded)
    except (yaml.YAMLError, RecursionError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{name}: not YAML of texts, numbers, lists and mappings ({error})"
        ) from error
    return loaded
