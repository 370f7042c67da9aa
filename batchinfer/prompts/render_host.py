"""The process that renders one template: ``python -m batchinfer.prompts.render_host``; see render_process.py."""

from __future__ import annotations

import os
import sys

import jinja2
import msgspec

from batchinfer.core import codec
from batchinfer.core.errors import ConfigError, RowError
from batchinfer.prompts.json_lines import ID_FIELD, ROW_FIELD, decode_object
from batchinfer.prompts.limited_process import (
    MEMORY_STATUS,
    limit_memory,
    prepare_timer,
    read_frame,
    restart_timer,
    write_frame,
)
from batchinfer.prompts.render_process import RenderedText, RenderReady, RenderSetup
from batchinfer.prompts.templates import PromptTemplate


def main() -> None:
    """Compile the template of the first frame, then answer frames of rows until the pipe is closed."""
    first = read_frame(sys.stdin.buffer)
    if first is None:
        return
    setup = codec.json_decoder(RenderSetup).decode(first)
    limit_memory(setup.memory_bytes)
    prepare_timer()
    try:
        serve(setup)
    except MemoryError:
        # Too little memory may be left for another row, so that row gets a new process.
        os._exit(MEMORY_STATUS)


def serve(setup: RenderSetup) -> None:
    """Compile the template and render rows."""
    restart_timer(setup.row_seconds)
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
    restart_timer(setup.row_seconds)
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


if __name__ == "__main__":
    main()
