"""Completions to output lines, and back as far as other commands need them. Pure."""

from __future__ import annotations

from batchinfer.errors import ConfigError
from batchinfer.formats.answers import Encoder
from batchinfer.formats.completions import CompletionsEncoder
from batchinfer.formats.native import NativeEncoder
from batchinfer.formats.openai import OpenAIBatchEncoder
from batchinfer.formats.reading import OutputSummary, read_line
from batchinfer.prompts.codes import near

OUTPUT_FORMATS = ("native", "openai-batch", "completions")

__all__ = ["OUTPUT_FORMATS", "Encoder", "OutputSummary", "encoder_for", "read_line"]


def encoder_for(
    output_format: str,
    *,
    model: str = "",
    created: int = 0,
    strip: bool = False,
    has_timing: bool = True,
) -> Encoder:
    """Return the encoder of an output format.

    Args:
        output_format: One of OUTPUT_FORMATS.
        model: The run's model, as OpenAI bodies name it.
        created: Unix seconds that OpenAI bodies carry; the run's, so that a row has the same bytes
            whoever makes it and whenever.
        strip: Remove white space around every answer.
        has_timing: Write each row's seconds, where the format has a place for them.

    Raises:
        ConfigError: no such format.
    """
    if output_format == "native":
        return NativeEncoder(strip=strip, has_timing=has_timing)
    if output_format == "openai-batch":
        return OpenAIBatchEncoder(model=model, created=created, strip=strip)
    if output_format == "completions":
        return CompletionsEncoder(strip=strip, has_timing=has_timing)
    raise ConfigError(
        f"--output-format {output_format}: expected one of {', '.join(OUTPUT_FORMATS)}"
        + near(output_format, OUTPUT_FORMATS),
        hint="`--output-format native` is the default",
    )
