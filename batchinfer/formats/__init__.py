"""Turns the engine's completions into output lines, and reads output lines for other commands. Pure.

Each output format is one module with an object named `FORMAT`. The worker and every command that reads outputs find
it in the table `FORMATS`. A new format needs its module, its entry here, and its name among the choices of
``--output-format`` in batchinfer/cli/run_options.py (a test compares the two).
"""

from __future__ import annotations

from contextlib import suppress

from batchinfer.core.errors import ConfigError, InputError, near
from batchinfer.formats import completions, native, openai
from batchinfer.formats.lines import DECODE_ERRORS, Encoder, OutputFormat, OutputLine
from batchinfer.prompts import PromptConfig

FORMATS: dict[str, OutputFormat] = {
    output_format.name: output_format
    for output_format in (native.FORMAT, openai.FORMAT, completions.FORMAT)
}
"""Every output format by its name."""
DEFAULT_FORMAT = PromptConfig().output_format

__all__ = [
    "DEFAULT_FORMAT",
    "FORMATS",
    "Encoder",
    "OutputFormat",
    "OutputLine",
    "encoder_for",
    "find_format",
    "read_line",
]


def encoder_for(config: PromptConfig, *, model: str = "", created: int = 0) -> Encoder:
    """Return the encoder of a run's output format.

    Args:
        config: The prompt options. Only `output_format`, `strip` and `has_timing` are used.
        model: The run's model. The format `openai-batch` writes it into the response bodies of answered rows.
        created: Time for the response bodies of the format `openai-batch`, in Unix seconds. Every worker passes the
            time of the run, so that any worker writes the same bytes for a row.

    Raises:
        ConfigError: there is no output format of the configured name.
    """
    return find_format(config.output_format).make_encoder(config, model, created)


def find_format(name: str) -> OutputFormat:
    """Look up an output format by its name; an empty name means the default format.

    Raises:
        ConfigError: there is no output format of this name.
    """
    found = FORMATS.get(name or DEFAULT_FORMAT)
    if found is None:
        raise ConfigError(
            f"output format {name}: not known, expected one of {', '.join(FORMATS)}{near(name, FORMATS)}",
            hint=f"`--output-format {DEFAULT_FORMAT}` is the default; for a run of a later version upgrade batchinfer",
        )
    return found


def read_line(data: bytes, output_format: str = "") -> OutputLine:
    """Read one output line, of a given format or of any.

    Args:
        data: The line, without its newline.
        output_format: Name of the format that the line should have; empty accepts every format.

    Raises:
        InputError: the line is not an output line, or not one of the given format.
    """
    if output_format:
        return find_format(output_format).read_line(data)
    for candidate in FORMATS.values():
        with suppress(*DECODE_ERRORS):
            line = candidate.decoder.decode(data)
            return line if candidate.convert is None else candidate.convert(line)
    raise InputError(
        f"output line: not readable, expected one of {', '.join(FORMATS)}",
        hint="`batchinfer verify` checks a run's outputs against their markers",
    )
