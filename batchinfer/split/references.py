"""`split --by-reference`: makes a job of JSON Lines that exist. Each file is a chunk, and nothing is copied."""

from __future__ import annotations

import contextlib
import itertools

from batchinfer.core import layout
from batchinfer.core.errors import InputError, ObjectNotFound
from batchinfer.core.records import FORMAT_VERSION, Chunk, Job, Source, SourceFile
from batchinfer.core.redaction import redact
from batchinfer.ledger.chunk_files import fetch
from batchinfer.ledger.jobs import ChunkRef, OpenStore, is_absolute, split_name
from batchinfer.split.text_lines import SAMPLE_LINES, sample_columns
from batchinfer.storage.opening import join_url
from batchinfer.storage.scratch import Scratch


def reference_job(url: str, open_store: OpenStore) -> Job:
    """Return the job whose chunks are the files of a list. Each is read once, for its rows and its sha256.

    Args:
        url: Path or URL of the list: a path or URL a line, relative to the list's folder.
        open_store: Opens the stores of the list and of the files.

    Raises:
        InputError: A file is missing, empty or no JSON Lines, or two files would have the same chunk name.
    """
    folder, name = split_name(url)
    store = open_store(folder)
    try:
        listed = store.get(name).data.decode()
    except ObjectNotFound as error:
        raise InputError(f"{url}: no such file", hint="check the spelling") from error
    places = [line.strip() for line in listed.split("\n") if line.strip()]
    chunks: dict[str, Chunk] = {}
    columns: dict[str, None] = {}
    row = 0
    with contextlib.closing(Scratch()) as scratch:
        for place in places:
            full = place if is_absolute(place) else join_url(store.url, place)
            root, key = split_name(full)
            stem = layout.stem(key)
            if not layout.is_chunk_name(stem) or stem in chunks:
                raise InputError(
                    f"{url}: {full} cannot be the chunk {stem!r}, expected a name of its own of letters, digits, . _ -",
                    hint="rename the file, or let `split` copy the rows: name the files as SOURCE",
                )
            local = fetch(open_store(root), ChunkRef(stem, root, key), scratch)
            with local.path.open("rb") as file:
                head = list(itertools.islice(file, SAMPLE_LINES))
            columns.update(dict.fromkeys(sample_columns(head, full)))
            local.path.unlink()
            chunks[stem] = Chunk(
                name=stem,
                first_row=row,
                rows=local.num_lines,
                bytes=local.stored_bytes or 0,
                sha256=local.sha256,
                file=full,
            )
            row += local.num_lines
    files = [
        SourceFile(
            url=redact(each.file or ""), bytes=each.bytes, rows=each.rows, digest=each.sha256
        )
        for each in chunks.values()
    ]
    return Job(
        format_version=FORMAT_VERSION,
        sources=[Source(url=redact(url), format="jsonl", files=files)],
        columns=list(columns),
        rows=row,
        chunks=list(chunks.values()),
        num_workers=1,
    )
