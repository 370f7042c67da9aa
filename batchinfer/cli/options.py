"""The options of `batchinfer worker`, in the groups that its help and settings files have."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import click

from batchinfer.core.errors import ConfigError
from batchinfer.prompts import REQUEST_FORMATS, TRUNCATIONS

F = TypeVar("F", bound=Callable[..., Any])


def _group(*options: Callable[[F], F]) -> Callable[[F], F]:
    def decorate(function: F) -> F:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


input_options = _group(
    click.option(
        "--manifest",
        "manifests",
        multiple=True,
        envvar=["BATCHINFER_WORKER_MANIFEST", "DATA_METADATA"],
        help="Manifest to work through: path or URL; may be repeated. Default: by rank, see --job.",
    ),
    click.option(
        "--job",
        metavar="URL",
        help="The job that manifest lines are relative to. Needed without --manifest.",
    ),
    click.option(
        "--output",
        metavar="RUN",
        help="Where the run lies: path or URL. Default: JOB/runs/default.",
    ),
    click.option(
        "--allow-absolute",
        is_flag=True,
        help="Take absolute paths and URLs from a remote manifest.",
    ),
    click.option("--limit", type=click.IntRange(1), help="Only the first N rows of the job."),
)

engine_options = _group(
    click.option(
        "--engine",
        default="vllm",
        show_default=True,
        help="vllm, or echo to rehearse without a model.",
    ),
    click.option("--model", default="", help="Model: a name on the Hub or a local folder."),
    click.option(
        "--revision",
        help="Commit, tag or branch of the model. Default: the run's, else the latest.",
    ),
    click.option("--tokenizer", help="Tokenizer, where it is not the model's own."),
    click.option("--hf-config-path", help="Where config.json lies, if not with the model."),
    click.option(
        "--tensor-parallel-size",
        type=click.IntRange(1),
        help="GPUs a replica. Default: the fewest that fit.",
    ),
    click.option("--pipeline-parallel-size", type=click.IntRange(1), default=1, show_default=True),
    click.option(
        "--replicas",
        default="auto",
        show_default=True,
        help="Engine processes, or auto: as many as fit.",
    ),
    click.option("--gpus", help="GPUs to use, e.g. 2,5. Default: all that are visible."),
    click.option("--dtype", default="auto", show_default=True),
    click.option("--quantization"),
    click.option(
        "--max-model-len", type=click.IntRange(1), help="Longest prompt plus answer, in tokens."
    ),
    click.option(
        "--max-num-seqs", type=click.IntRange(1), help="Rows that the engine runs at once."
    ),
    click.option(
        "--max-num-batched-tokens",
        type=click.IntRange(1),
        help="Tokens that the engine takes in a step.",
    ),
    click.option(
        "--gpu-memory-utilization", type=float, help="Share of GPU memory that the engine may use."
    ),
    click.option("--cpu-offload-gb", type=float, default=0.0, show_default=True),
    click.option(
        "--enforce-eager/--no-enforce-eager",
        default=None,
        help="Run without CUDA graphs and compilation.",
    ),
    click.option(
        "--trust-remote-code",
        is_flag=True,
        help="Run code that comes with the model. Recorded in run.json.",
    ),
    click.option(
        "--engine-arg",
        "engine_args",
        multiple=True,
        metavar="KEY=VALUE",
        help="Any other vLLM engine argument.",
    ),
    click.option(
        "--stall-seconds",
        type=float,
        default=300.0,
        show_default=True,
        help="Without progress for so long, the engine counts as hung.",
    ),
    click.option("--load-timeout-seconds", type=float, default=1800.0, show_default=True),
    click.option(
        "--echo-latency-seconds", type=float, default=0.0, help="echo: mean latency of a row."
    ),
    click.option(
        "--echo-tokens", metavar="LEAST,MOST", help="echo: random number of answer tokens."
    ),
    click.option("--echo-seed", type=int, default=0),
    click.option("--echo-load-seconds", type=float, default=0.0),
)

prompt_options = _group(
    click.option(
        "--request-format", type=click.Choice(REQUEST_FORMATS), default="rows", show_default=True
    ),
    click.option(
        "--messages-column",
        default="",
        help="Column with a conversation; goes through the chat template.",
    ),
    click.option(
        "--turns", default="first", show_default=True, help="first, all, or how many user turns."
    ),
    click.option("--prompt-column", default="", help="Column with the prompt: text or token ids."),
    click.option(
        "--prompt-template",
        type=click.Path(path_type=Path),
        help="Jinja file over the row's columns.",
    ),
    click.option(
        "--template", "template_name", default="", help="A named template; `list` shows them."
    ),
    click.option(
        "--as-chat",
        is_flag=True,
        help="Send the prompt as one user message through the chat template.",
    ),
    click.option("--system-prompt", default="", help="Text, or @FILE."),
    click.option(
        "--chat-template", default="", help="Jinja text or @FILE in place of the model's own."
    ),
    click.option(
        "--chat-template-kwargs",
        default="{}",
        metavar="JSON",
        help='E.g. {"enable_thinking": false}.',
    ),
    click.option(
        "--continue-final",
        default=None,
        help="Text that every answer starts with; `row` continues the row's own last answer.",
    ),
    click.option(
        "--blank-columns",
        default="",
        metavar="A,B",
        help="Columns to empty before the template sees them.",
    ),
    click.option(
        "--few-shot", type=click.Path(path_type=Path), help="JSON Lines file with example rows."
    ),
    click.option(
        "--truncate-prompt",
        type=click.Choice(TRUNCATIONS),
        default="error",
        show_default=True,
        help="What to do with prompts longer than the model takes.",
    ),
)

sampling_options = _group(
    click.option(
        "--max-tokens",
        type=click.IntRange(1),
        help="Longest answer. Default: what the model has room for.",
    ),
    click.option("--temperature", type=float),
    click.option("--top-p", type=float),
    click.option("--top-k", type=int),
    click.option("--min-p", type=float),
    click.option("--repetition-penalty", type=float),
    click.option("--presence-penalty", type=float),
    click.option("--frequency-penalty", type=float),
    click.option("--stop", multiple=True, help="Text that ends an answer; may be repeated."),
    click.option("--stop-token-ids", metavar="A,B", help="Token ids that end an answer."),
    click.option(
        "--n", type=click.IntRange(1), default=1, show_default=True, help="Answers a row."
    ),
    click.option(
        "--logprobs",
        type=click.IntRange(0),
        help="Log-probability of every token, and of so many alternatives.",
    ),
    click.option(
        "--seed",
        default="0",
        show_default=True,
        help="Seed of the run, or `none`: faster on a GPU, not repeatable.",
    ),
    click.option(
        "--sampling",
        multiple=True,
        metavar="KEY=VALUE",
        help="Any other sampling parameter, by its name in vLLM or in transformers' GenerationConfig; "
        "several with commas: top_k=20,num_return_sequences=3.",
    ),
)

output_options = _group(
    click.option(
        "--output-format",
        type=click.Choice(["native", "openai-batch", "completions"]),
        default="native",
        show_default=True,
    ),
    click.option(
        "--keep", default="", metavar="A,B", help="Columns to repeat in the output; * for all."
    ),
    click.option(
        "--id-column",
        default="",
        help="Column whose value is each row's _id, for chunks that split did not make.",
    ),
    click.option(
        "--timing/--no-timing",
        "has_timing",
        default=True,
        show_default=True,
        help="Write each row's seconds. Without them equal answers are equal bytes.",
    ),
    click.option("--keep-prompt", is_flag=True, help="Repeat the prompt in the output."),
    click.option("--strip", is_flag=True, help="Remove white space around every answer."),
)

behaviour_options = _group(
    click.option(
        "--worker-id",
        envvar=["BATCHINFER_WORKER_WORKER_ID"],
        help="Stable name of this worker. Default: SkyPilot's task id and node rank, else random.",
    ),
    click.option(
        "--checkpoint-seconds",
        type=click.FloatRange(0, min_open=True),
        default=30.0,
        show_default=True,
        help="Seconds between checkpoints of open chunks.",
    ),
    click.option(
        "--checkpoint-rows",
        type=click.IntRange(1),
        help="Checkpoint also after so many finished rows.",
    ),
    click.option(
        "--lease-seconds",
        type=click.FloatRange(0, min_open=True),
        default=120.0,
        show_default=True,
        help="Without a heartbeat for so long, others take a worker's chunks.",
    ),
    click.option(
        "--claims/--no-claims",
        default=True,
        show_default=True,
        help="Whether to agree with other workers on who does what.",
    ),
    click.option(
        "--steal/--no-steal",
        default=True,
        show_default=True,
        help="Help others once the own chunks are done.",
    ),
    click.option(
        "--grace-seconds",
        type=click.FloatRange(0),
        default=20.0,
        show_default=True,
        help="Time to finish rows after SIGTERM or SIGINT.",
    ),
    click.option(
        "--notices/--no-notices",
        default=True,
        show_default=True,
        help="Ask AWS or Google for preemption notices, on their machines only.",
    ),
    click.option(
        "--max-error-rate",
        type=click.FloatRange(0, 1),
        help="Stop (exit 3) when a larger share of rows fails.",
    ),
    click.option(
        "--min-errors",
        type=click.IntRange(1),
        default=20,
        show_default=True,
        help="Errors before --max-error-rate counts.",
    ),
    click.option(
        "--max-attempts",
        type=click.IntRange(1),
        default=5,
        show_default=True,
        help="Starts without a new finished row before the worker gives up (exit 3).",
    ),
    click.option(
        "--retry-errors",
        is_flag=True,
        help="Do the error rows of a finished run again. A repair that was begun is ended first.",
    ),
    click.option(
        "--scratch-dir",
        type=click.Path(path_type=Path),
        help="Local folder for chunks and outputs under way.",
    ),
    click.option(
        "--max-open-chunks",
        type=click.IntRange(1),
        default=64,
        show_default=True,
        help="Chunks under way at once. Exceeded where chunks are so small that the engine would wait for rows.",
    ),
    click.option(
        "--prefix-window",
        type=click.IntRange(0),
        default=0,
        metavar="ROWS",
        help="Run rows whose prompts begin alike next to each other, within so many; 0: in input order.",
    ),
)

# --------------------------------------------------------------------------- values

_NAME = re.compile(r"\s*([A-Za-z_][A-Za-z0-9_.-]*)\s*=\s*")
_NEXT = re.compile(r"\s*,(?=\s*[A-Za-z_][A-Za-z0-9_.-]*\s*=)")
_WORDS: dict[str, Any] = {"true": True, "false": False, "none": None}
_decode_json = json.JSONDecoder().raw_decode


def read_pairs(option: str, arguments: Iterable[str]) -> dict[str, Any]:
    """Read NAME=VALUE pairs; an argument may hold several, with commas between. Pure.

    A value is JSON where it can be (commas inside belong to it), else text up to the next pair. Of equal names the
    last one counts.

    Raises:
        ConfigError: an argument that does not begin with NAME=.

    >>> read_pairs("--sampling", ['top_k=20,do_sample=true,bad_words=["a,b=c", "d"]', "stop=,"])
    {'top_k': 20, 'do_sample': True, 'bad_words': ['a,b=c', 'd'], 'stop': ','}
    """
    found: dict[str, Any] = {}
    for argument in arguments:
        position = 0
        while position < len(argument):
            match = _NAME.match(argument, position)
            if match is None:
                raise ConfigError(
                    f"{option} {argument[position:]!r}: expected NAME=VALUE",
                    hint=f"several pairs have commas between them: {option} top_k=20,min_p=0.1",
                )
            value, position = _read_value(argument, match.end())
            found[match[1].replace("-", "_")] = value
    return found


def _read_value(text: str, start: int) -> tuple[Any, int]:
    """The value that begins at `start`, and where the next pair begins."""
    try:
        value, end = _decode_json(text, start)
    except ValueError:
        pass
    else:
        after = _NEXT.match(text, end)
        if after is not None:
            return value, after.end()
        if text[end:].strip() in ("", ","):
            return value, len(text)
    after = _NEXT.search(text, start)
    end, position = (after.start(), after.end()) if after else (len(text), len(text))
    word = text[start:end]
    return _WORDS.get(word.lower(), word), position
