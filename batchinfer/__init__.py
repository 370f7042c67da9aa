"""batchinfer: one completion for every row of a data set, on machines that may vanish.

`run`, `make_job` and `open_run` are the Python interface (docs/python.md); the command line is `batchinfer --help`.
Importing the package imports none of its modules.
"""

from __future__ import annotations

TYPE_CHECKING = False  # `typing` would take longer than the rest of cli/entry.py
if TYPE_CHECKING:
    from typing import Any

    from batchinfer.api import RunHandle, errors, make_job, open_run, run

__all__ = ["RunHandle", "__version__", "errors", "make_job", "open_run", "run"]

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Load the Python interface when one of its names is used."""
    if name not in __all__:
        raise AttributeError(f"module 'batchinfer' has no attribute {name!r}")
    from batchinfer import api

    return getattr(api, name)


def __dir__() -> list[str]:
    """Return the names of this module and of the Python interface."""
    return sorted([*globals(), *__all__])
