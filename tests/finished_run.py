"""Finished runs with any answers, written through the ledger's own functions and without a worker."""

import json
import tempfile
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from batchinfer.core.records import Failure, Reply
from batchinfer.formats.lines import encode_row
from batchinfer.ledger.jobs import job_chunks, load_job
from batchinfer.ledger.publishing import build_output, publish
from batchinfer.ledger.runs import join_run
from batchinfer.prompts.types import Prepared
from batchinfer.storage import Store
from batchinfer.storage.opening import open_store as open_any
from fakes import HeldLease, marker_record

Answer = bytes | dict[str, Any] | Failure
"""Body of the server's answer, or why there is none."""


def chat(text: str | None, **more: Any) -> dict[str, Any]:
    """The body of a chat's answer, as vLLM's server writes it. `more` are further fields of the message."""
    message = {"role": "assistant", "content": text, "refusal": None, "reasoning": None, **more}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}
    usage = {"prompt_tokens": 5, "total_tokens": 8, "completion_tokens": 3}
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1,
        "model": "tiny",
        "choices": [choice],
        "usage": usage,
    }


def finish_run(
    job_url: str | Path,
    run_url: str | Path,
    answer: Callable[[int], Answer] | None = None,
    *,
    prompt: Mapping[str, Any] | None = None,
    leave_out: Collection[int] = (),
    generation: int = 0,
    model: str = "tiny",
    open_store: Callable[[str], Store] = open_any,
) -> None:
    """Write a run's outputs and markers.

    Args:
        job_url: The job.
        run_url: The run; it may exist.
        answer: What becomes of the row of a number; by default a chat that names it.
        prompt: `prompt` of run.json's config.
        leave_out: Indices of the chunks that are not done.
        generation: Generation of the markers.
        model: `model` of run.json's config.
        open_store: How to open both.
    """
    answer = answer or (lambda row: chat(f"answer {row}"))
    job, sha256 = load_job(str(job_url), open_store)
    store = open_store(str(run_url))
    config = {"job_sha256": sha256, "limit": None, "model": model, "prompt": dict(prompt or {})}
    run = join_run(store, config, {"job": str(job_url)}, nonce="n")
    lease = HeldLease(f"n{generation}")
    with tempfile.TemporaryDirectory() as folder:
        for index, ref in enumerate(job_chunks(job, str(job_url)).values()):
            if index in leave_out:
                continue
            rows = []
            for line in range(ref.rows_to_do):
                key, row = (ref.name, line), ref.first_row + line
                given = answer(row)
                if not isinstance(given, Failure):
                    body = given if isinstance(given, bytes) else json.dumps(given).encode()
                    given = Reply(key=key, status=200, body=body)
                rows.append(encode_row(Prepared(key=key, row=row, id=f"id-{row}"), given)[0])
            built = build_output(Path(folder) / ref.name, [bytes(row.output) for row in rows])
            marker = marker_record(
                chunk=ref.key,
                chunk_sha256=ref.sha256 or "",
                generation=generation,
                rows_ok=sum(row.ok for row in rows),
                rows_error=sum(not row.ok for row in rows),
                fingerprint=run.fingerprint,
                prompt_tokens=sum(row.prompt_tokens for row in rows),
                completion_tokens=sum(row.completion_tokens for row in rows),
            )
            publish(store, lease, built, marker, chunk=ref.name, leftovers=())
