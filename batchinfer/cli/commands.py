"""The commands, by name: where each lives and what it says about itself, without importing any."""

from __future__ import annotations

from typing import NamedTuple


class CommandEntry(NamedTuple):
    """Module with the click command `command`, and the line that `batchinfer --help` shows."""

    module: str
    help: str


COMMANDS: dict[str, CommandEntry] = {
    "split": CommandEntry(
        "batchinfer.split.command", "Split data sets into JSONL chunks and per-worker manifests."
    ),
    "worker": CommandEntry(
        "batchinfer.worker.command",
        "Run a model over the chunks of a manifest; resumes where it was stopped.",
    ),
    "status": CommandEntry(
        "batchinfer.runs.status", "Show how a run goes: progress, rates, time left, errors, cost."
    ),
    "verify": CommandEntry(
        "batchinfer.runs.verify", "Prove that a run is complete and sound, or say what mends it."
    ),
    "clean": CommandEntry("batchinfer.runs.clean", "Remove what dead workers left under a run."),
    "stop": CommandEntry("batchinfer.runs.stop", "Stop every worker of a run, or let it go on."),
    "report": CommandEntry(
        "batchinfer.runs.report",
        "Write a run as one HTML page that opens anywhere, finished or not.",
    ),
    "collect": CommandEntry(
        "batchinfer.collect.command",
        "Collect a run's verified answers into parquet, JSON Lines, CSV or the Hub.",
    ),
    "check": CommandEntry(
        "batchinfer.check.command",
        "Find out before paying: configuration, access, prompts, memory, time and cost.",
    ),
}
