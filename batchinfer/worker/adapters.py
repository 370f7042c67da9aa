"""What a worker finds out about its model before it loads it: the adapters, and what requests call the model."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from itertools import islice

from batchinfer.core.errors import BatchinferError
from batchinfer.engines import find_engine, is_remote
from batchinfer.engines.config import EngineConfig
from batchinfer.ledger.jobs import Assignment, OpenStore, job_chunks
from batchinfer.prompts import ANY_NAME, PromptConfig, find_request_format, only_name
from batchinfer.storage.scratch import Scratch
from batchinfer.worker.config import WorkerConfig, own_names
from batchinfer.worker.preview import read_first_rows

logger = logging.getLogger(__name__)

_NUM_LINES = 100
_NUM_CHUNKS = 3


def identify_adapters(engine: EngineConfig) -> list[dict[str, str]]:
    """Check the run's adapters, and return the name and the identity of each. Those on the Hub are downloaded.

    Raises:
        ConfigError: an adapter is not there, is damaged, or does not fit the model; the message has its name.
        BatchinferError: the Hub or a bucket refuses access, or cannot be reached.
    """
    if not engine.loras:
        return []
    from batchinfer.engines.adapters import check_adapters
    from batchinfer.engines.models import describe_model

    model = describe_model(engine) if find_engine(engine.engine).needs_model else None
    return [
        {"name": adapter.name, "identity": adapter.identity}
        for adapter in check_adapters(engine, model)
    ]


def assumed_name(config: WorkerConfig, assignment: Assignment, open_store: OpenStore) -> str:
    """Return the name that requests give to the run's model, where no option says it; "" if there is none.

    It is the name that the first requests of the job give, if they all give the same. All workers of a job read the
    same requests. If no request can be read, every name means the model.
    """
    if not may_assume(config.engine, config.prompt):
        return ""
    chunks = list(assignment.chunks)
    if assignment.job is not None:
        chunks = list(job_chunks(assignment.job, assignment.job_url, config.limit).values())
    scratch = Scratch(config.scratch_dir)
    try:
        for chunk in islice(chunks, _NUM_CHUNKS):
            try:
                rows = read_first_rows(chunk, _NUM_LINES, open_store, scratch)
            except BatchinferError as error:
                logger.debug("%s: %s", chunk.name, error.message)
                continue
            return name_in([row.data for row in rows], config.engine)
    finally:
        scratch.close()
    return ANY_NAME


def may_assume(engine: EngineConfig, prompt: PromptConfig) -> bool:
    """Whether requests themselves may say what the model is called.

    If the run has adapters, they may not: a misspelled adapter would be answered by the model.
    """
    has_names = bool(engine.loras or prompt.served_model_name)
    is_request = find_request_format(prompt.request_format).has_own_parameters
    return is_request and not has_names and not is_remote(engine)


def name_in(lines: Iterable[bytes], engine: EngineConfig) -> str:
    """Return the name that all these requests give to the model, and log it; "" if they give several, or none."""
    name = only_name(lines)
    if name and name not in own_names(engine):
        logger.info(
            "the requests name the model %r, which is taken to mean %s; --served-model-name says so by itself",
            name,
            engine.model or engine.engine,
        )
    return name
