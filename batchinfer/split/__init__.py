"""`batchinfer split`: turns data sets into JSON Lines chunks and writes one manifest for each worker."""

from __future__ import annotations

import importlib
import sys
import types
from typing import Any


class _CallableRoom(types.ModuleType):
    """Makes `batchinfer.split(...)` a call of `batchinfer.api.split`, although the name is this package's, too."""

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return importlib.import_module("batchinfer.api").split(*arguments, **options)


sys.modules[__name__].__class__ = _CallableRoom
