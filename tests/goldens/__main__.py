"""Record every scene anew: `cd tests && python -m goldens`."""

import tempfile
from pathlib import Path

from goldens import FOLDER, SCENES, record
from goldens.refusals import TABLE, record_refusals

with tempfile.TemporaryDirectory() as folder:
    TABLE.write_text(record_refusals(Path(folder)), encoding="utf-8")
for name in SCENES:
    with tempfile.TemporaryDirectory() as folder:
        (FOLDER / f"{name}.txt").write_text(record(name, Path(folder)), encoding="utf-8")
