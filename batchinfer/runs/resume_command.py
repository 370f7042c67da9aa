"""Make the command that resumes a run: `batchinfer worker` with the options from which run.json was made."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from batchinfer.cli.run_options import OPTIONS
from batchinfer.cli.shell import in_bash, quote
from batchinfer.core import codec
from batchinfer.core.records import Run, Sampling
from batchinfer.engines import UNLIMITED_LENGTH
from batchinfer.prompts import PromptConfig

_TRUSTED = "# this run's workers ran code that comes with the model: add that option only if you trust it too"


def worker_command(run: Run, url: str, job_url: str, manifests: Sequence[str] = ()) -> str:
    """Return a bash command that starts a worker for the run at `url`.

    The command has the options that decide answers. Other options (about the machine, or how often to checkpoint) are
    not in run.json and may differ from worker to worker. Some options take a file. run.json holds only the file's
    text, so the command passes the text as `<(printf …)`.

    Anybody who can write to the bucket can change run.json, so every value is quoted. If the run had
    --trust-remote-code, the command leaves this option out. A comment after the command says so, and the user decides.
    """
    words = [f"--manifest {quote(manifest)}" for manifest in manifests]
    if job_url:
        words.insert(0, f"--job {quote(job_url)}")
    elif not manifests:
        words.append("--manifest LIST")
    words.append(f"--output {quote(url)}")
    parts, is_readable = _parts_of(run)
    for option in OPTIONS:
        part = parts.get(option.part, {})
        if option.parameter in part:
            for flag, word in option.spell(part[option.parameter]):
                words.append(flag if word is None else f"{flag} {in_bash(word)}")
    if not is_readable:
        words.append("…")
    if run.recorded.get("trust_remote_code"):
        words.append(_TRUSTED)
    return " ".join(["batchinfer worker", *words])


def _parts_of(run: Run) -> tuple[dict[str, dict[str, Any]], bool]:
    """Return the parts of run.json, and whether all of it could be read.

    Each part is a dictionary of values by the name of their parameter.
    """
    is_readable = True
    parts = {"config": _without_the_engines_own(run), "recorded": run.recorded}
    try:
        prompt = codec.convert(run.config.get("prompt") or {}, PromptConfig)
        parts["PromptConfig"] = msgspec.structs.asdict(prompt)
        sampling = codec.convert(run.config.get("sampling") or {}, Sampling)
        rest = _without_option(sampling)
        parts["Sampling"] = {**msgspec.structs.asdict(sampling), "sampling": rest}
    except msgspec.ValidationError:  # somebody edited run.json
        is_readable = False
    return parts, is_readable


def _without_the_engines_own(run: Run) -> dict[str, Any]:
    """Return the configuration without values that the engine filled in and that no option gave.

    An engine without a model, like the echo engine, fills in its own name as model, "none" as dtype, and no limit of
    length.
    """
    config = dict(run.config)
    nothing = {
        "model": run.recorded.get("engine"),
        "dtype": "none",
        "max_model_len": UNLIMITED_LENGTH,
    }
    for name, value in nothing.items():
        if config.get(name) == value:
            config.pop(name, None)
    arguments = config.get("engine_args") or {}
    # No worker writes trust_remote_code into engine_args, because a worker refuses this engine argument. If it stands
    # there, somebody has edited run.json. The command must not run a model's code because of such an edit.
    config["engine_args"] = {
        name: value for name, value in arguments.items() if name != "trust_remote_code"
    }
    return config


def _without_option(sampling: Sampling) -> dict[str, Any]:
    """Return the sampling parameters that have no option of their own. They are given by --sampling."""
    given: dict[str, Any] = msgspec.to_builtins(
        sampling
    )  # leaves out parameters that have their default value
    extra = given.pop("extra", None) or {}
    known = {option.target for option in OPTIONS if option.struct == "Sampling"}
    return {name: value for name, value in given.items() if name not in known} | extra
