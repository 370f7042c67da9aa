"""Compiles constraints as vLLM would, in a process of its own, before a row with one of them gets to the engine.

A constraint that cannot be compiled becomes an error, and so does one that takes too much time or memory: inside of an
engine it would hold up other rows, or end the engine. The process (constraint_host.py) has the limits of
limited_process.py. It compiles with xgrammar, vLLM's library for constraints, for a vocabulary of its own.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import logging
import threading
import time

import msgspec

from batchinfer.core.errors import ConfigError
from batchinfer.core.processes import describe_exit
from batchinfer.prompts.constraints import KINDS, OPTIONS, Constraint
from batchinfer.prompts.limited_process import LimitedProcess

logger = logging.getLogger(__name__)

BACKEND = "xgrammar"
"""Name of the only backend of vLLM's for which constraints are checked here."""
CONSTRAINT_SECONDS = 5.0
"""Seconds of CPU time that one constraint may take to compile."""
MEMORY_BYTES = 1 << 30
"""Bytes of memory that the process may have beyond what it has when it begins to compile."""
MOST_KNOWN = 10_000
"""Largest number of constraints whose results are remembered."""

SLOW_SECONDS = 0.5
"""Seconds above which a constraint counts as slow."""


class ConstraintSetup(msgspec.Struct, frozen=True, kw_only=True):
    """The first frame to the process: the limits."""

    constraint_seconds: float
    memory_bytes: int


class ConstraintChecker:
    """Finds out whether constraints compile. Threads take turns. The process starts with the first constraint."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[bytes, str] = {}
        setup = ConstraintSetup(constraint_seconds=CONSTRAINT_SECONDS, memory_bytes=MEMORY_BYTES)
        self._process = LimitedProcess(
            "batchinfer.prompts.constraint_host",
            msgspec.msgpack.encode(setup),
            name="constraints",
            question_seconds=setup.constraint_seconds,
            memory_bytes=setup.memory_bytes,
        )
        self._is_off = False
        self.is_slow = False
        """Whether the last new constraint took long, so that a caller should check few at once."""

    def problem_of(self, constraint: Constraint) -> str:
        """Return why a constraint cannot be used; "" if it can.

        If xgrammar is not installed on this machine, or the process ends at its start, nothing is checked any more, and
        a warning says so once.
        """
        with self._lock:
            question = json.dumps(constraint).encode()
            key = hashlib.blake2b(question, digest_size=16).digest()
            found = self._known.get(key)
            if found is None:
                started = time.monotonic()
                found = "" if self._is_off else self._ask(question)
                self.is_slow = time.monotonic() - started > SLOW_SECONDS
                if len(self._known) >= MOST_KNOWN:
                    self._known.clear()
                self._known[key] = found
            return found

    def _ask(self, question: bytes) -> str:
        if importlib.util.find_spec(BACKEND) is None:
            logger.warning("constraints are not checked here: %s is not installed", BACKEND)
            self._is_off = True
            return ""
        # A process that went over a limit ended because of the constraint. A process that ended in another way may have
        # been killed from outside, so the constraint is tried a second time.
        reason = ""
        for _ in range(2):
            if not self._process.is_running and self._process.start() is None:
                status = self._process.note_end()
                logger.warning(
                    "constraints are not checked here: the process that compiles them %s",
                    describe_exit(status),
                )
                self._is_off = True
                return ""
            answer = self._process.ask(question)
            if answer is not None:
                return answer.decode()
            status = self._process.note_end()
            reason = self._process.limit_of(status)
            if reason:
                return f"cannot be compiled: {reason}"
            reason = f"cannot be compiled: the process that tried it {describe_exit(status)}"
        return reason


def check_run_constraint(constraint: Constraint | None, checker: ConstraintChecker | None) -> None:
    """Refuse a run's constraint that does not compile. Without a checker, this is left to the engine.

    Raises:
        ConfigError: it does not compile, or takes too much time or memory to compile.
    """
    # --sampling can give vLLM's further fields beside the constraint, or a kind of a later version of vLLM.
    known = {kind: value for kind, value in (constraint or {}).items() if kind in KINDS}
    if len(known) != 1 or checker is None:
        return
    [kind] = known
    if problem := checker.problem_of(known):
        raise ConfigError(
            f"{OPTIONS.get(kind, '--sampling structured')}: the constraint {problem}",
            hint="docs/features.md says what constraints there are",
        )
