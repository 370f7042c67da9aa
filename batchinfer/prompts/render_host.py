"""The process that renders one template: ``python -m batchinfer.prompts.render_host``; see render_process.py."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sys

import jinja2
import msgspec

from batchinfer.core.errors import ConfigError, RowError
from batchinfer.prompts.json_lines import ID_FIELD, ROW_FIELD, decode_object
from batchinfer.prompts.render_process import (
    MEMORY_STATUS,
    RenderedText,
    RenderReady,
    RenderSetup,
    read_frame,
    write_frame,
)
from batchinfer.prompts.templates import PromptTemplate


def main() -> None:
    """Compile the template of the first frame, then answer frames of rows until the pipe is closed."""
    first = read_frame(sys.stdin.buffer)
    if first is None:
        return
    setup = msgspec.json.decode(first, type=RenderSetup)
    limit_memory(setup.memory_bytes)
    prepare_timer()
    try:
        serve(setup)
    except MemoryError:
        # Too little memory may be left for another row, so that row gets a new process.
        os._exit(MEMORY_STATUS)


def serve(setup: RenderSetup) -> None:
    """Compile the template and render rows."""
    restart_timer(setup)
    undefined = jinja2.StrictUndefined if setup.is_strict else jinja2.Undefined
    try:
        template = PromptTemplate(
            setup.source, name=setup.name, values=setup.values, undefined=undefined
        )
    except ConfigError as error:
        answer = RenderReady(error=error.message, hint=error.hint)
        write_frame(sys.stdout.buffer, msgspec.json.encode(answer))
        return
    answer = RenderReady(variables=template.variables, needed_columns=template.needed_columns)
    write_frame(sys.stdout.buffer, msgspec.json.encode(answer))
    decode = msgspec.msgpack.Decoder(list[bytes]).decode
    while (frame := read_frame(sys.stdin.buffer)) is not None:
        texts = [render(setup, template, line) for line in decode(frame)]
        write_frame(sys.stdout.buffer, msgspec.msgpack.encode(texts))


def render(setup: RenderSetup, template: PromptTemplate, line: bytes) -> RenderedText:
    """Render one row. The CPU time of the row is counted from here."""
    restart_timer(setup)
    try:
        columns = decode_object(line)
        columns.pop(ROW_FIELD, None)
        columns.pop(ID_FIELD, None)
        for name in setup.blank_columns:
            columns[name] = ""
        return RenderedText(template.render(columns))
    except RowError as error:
        # A message may repeat a lone surrogate of the template, which no frame can carry.
        message = error.message.encode(errors="backslashreplace").decode()
        return RenderedText(None, error.code, message)


def limit_memory(memory_bytes: int) -> None:
    """Let the kernel refuse memory above the limit, where the system can, and write no core dumps."""
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    if hard != resource.RLIM_INFINITY:
        memory_bytes = min(memory_bytes, hard)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, hard))
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def prepare_timer() -> None:
    """Let the timer of `restart_timer` kill this process, even if the parent ignores or blocks the signal."""
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF})


def restart_timer(setup: RenderSetup) -> None:
    """Have the kernel kill this process when it has used the CPU for `row_seconds` from now on.

    RLIMIT_CPU would count whole seconds from the start of the process. This timer begins anew at every row, and costs
    less than a microsecond.
    """
    signal.setitimer(signal.ITIMER_PROF, setup.row_seconds)


if __name__ == "__main__":
    main()
