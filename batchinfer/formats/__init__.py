"""Completions to output lines, and back as far as other commands need them. Pure."""

from __future__ import annotations

from batchinfer.core.errors import ConfigError, near
from batchinfer.formats.answers import Encoder
from batchinfer.formats.completions import CompletionsEncoder
from batchinfer.formats.native import NativeEncoder
from batchinfer.formats.openai import OpenAIBatchEncoder
from batchinfer.formats.reading import OutputSummary, read_line
from batchinfer.prompts import PromptConfig

OUTPUT_FORMATS = ("native", "openai-batch", "completions")

__all__ = ["OUTPUT_FORMATS", "Encoder", "OutputSummary", "encoder_for", "read_line"]


def encoder_for(config: PromptConfig, *, model: str = "", created: int = 0) -> Encoder:
    """Return the encoder of a run's output format.

    Args:
        config: Reads `output_format`, `strip` and `has_timing`.
        model: The run's model, as OpenAI bodies name it.
        created: Unix seconds that OpenAI bodies carry; the run's, so that a row has the same bytes
            whoever makes it and whenever.

    Raises:
        ConfigError: no such format.
    """
    name = config.output_format
    if name == "native":
        return NativeEncoder(strip=config.strip, has_timing=config.has_timing)
    if name == "openai-batch":
        return OpenAIBatchEncoder(model=model, created=created, strip=config.strip)
    if name == "completions":
        return CompletionsEncoder(strip=config.strip, has_timing=config.has_timing)
    raise ConfigError(
        f"--output-format {name}: expected one of {', '.join(OUTPUT_FORMATS)}"
        + near(name, OUTPUT_FORMATS),
        hint="`--output-format native` is the default",
    )
