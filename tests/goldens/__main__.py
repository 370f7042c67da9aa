"""Record every scene anew: `cd tests && python -m goldens`."""

from __future__ import annotations

import tempfile
from pathlib import Path

from goldens import FOLDER, SCENES, record

for name in SCENES:
    with tempfile.TemporaryDirectory() as folder:
        (FOLDER / f"{name}.txt").write_text(record(name, Path(folder)), encoding="utf-8")
