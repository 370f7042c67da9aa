"""batchinfer: one completion for every row of a data set, on machines that may vanish.

Importing the package has no effect and loads nothing heavy; the command line is
`batchinfer --help`.
"""

from __future__ import annotations

__all__ = ["__version__"]

__version__ = "0.1.0"
