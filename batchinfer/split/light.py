"""Import pyarrow without numpy, where a process is known to need no more.

pyarrow imports numpy if it can, and works without it. For the splitter numpy is a twentieth of its CPU time and of no
use. Only a process that does nothing but split does this: a pyarrow that was imported so cannot make arrays of numpy
or frames of pandas afterwards.
"""

from __future__ import annotations

import importlib
import sys

is_alone = False
"""Set by the command line, whose process ends with the command."""


def import_pyarrow() -> None:
    """Import pyarrow, alone where that was asked for and neither of the two was imported before."""
    if not is_alone or "pyarrow" in sys.modules or "numpy" in sys.modules:
        return
    sys.modules["numpy"] = None  # type: ignore[assignment]  # what Python takes for "cannot be imported"
    try:
        for name in ("pyarrow", "pyarrow.compute", "pyarrow.parquet", "pyarrow.csv"):
            importlib.import_module(name)
    finally:
        del sys.modules["numpy"]
