"""Find out whether a store keeps its word about preconditions. Some accept the header and overwrite all the same."""

from __future__ import annotations

import logging
import secrets

from batchinfer.core import layout
from batchinfer.core.errors import AccessDenied, AlreadyExists, PreconditionFailed
from batchinfer.storage import Preconditions, Store
from batchinfer.storage.retrying import NotSupported

logger = logging.getLogger(__name__)


def probe(store: Store, prefix: str = layout.PROBES) -> Preconditions:
    """Try a second create and a replace with an outdated etag on an object of its own, which is removed again.

    About six requests. A process killed half way leaves one small object below `prefix`.

    Raises:
        AccessDenied: The store is read-only, or its credentials do not allow writing.
        StorageError: The store failed after its retries.
    """
    key = f"{prefix}{secrets.token_hex(8)}"
    try:
        creates = _refuses_second_create(store, key)
        return Preconditions(create=creates, replace=_compares_etags(store, key))
    finally:
        try:
            store.delete([key])
        except AccessDenied as error:
            logger.warning("cannot remove the probe %s: %s", key, error)


def _refuses_second_create(store: Store, key: str) -> bool:
    # Different bytes: the same bytes again count as the reply to the first try that got lost.
    try:
        store.create(key, b"probe: first create\n")
        store.create(key, b"probe: second create\n")
    except AlreadyExists:
        return store.get(key).data == b"probe: first create\n"
    except NotSupported:
        return False
    return False


def _compares_etags(store: Store, key: str) -> bool:
    try:
        seen = store.stat(key).etag
        current = store.replace(key, b"probe: replaced with the current etag\n", seen)
        if current == seen:
            return False
        try:
            store.replace(key, b"probe: replaced with an outdated etag\n", seen)
        except PreconditionFailed:
            return store.get(key).etag == current
    except (PreconditionFailed, NotSupported):
        return False
    return False
