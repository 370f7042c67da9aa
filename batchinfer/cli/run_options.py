"""The options of a run, one row each. `batchinfer worker` has all of them; `run` and `check` have most.

To add an option, add a row here, and add a field for its value to the struct that the row names. --show-config prints
the options in the order of the rows; help orders them by section.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from batchinfer.cli.options import ENDPOINT, LOOK, REHEARSAL, F, Option, group
from batchinfer.cli.values import (
    ADAPTERS,
    FILE,
    FILE_OF_OBJECTS,
    FLAG,
    FLAG_OR_NONE,
    FOLDER,
    INTEGERS,
    JSON_OBJECT,
    NAMES,
    NAMES_OR_NONE,
    NUMBER,
    PAIRS,
    REPEATED,
    REPEATED_LIST,
    TEXT,
    TEXT_OR_FILE,
    WHOLE,
    at_least,
    number_from,
    one_of,
    whole_or,
)
from batchinfer.core.tasks import GENERATE, TASKS

TRUNCATIONS = ("error", "left", "right")

BODY_OPTIONS = (
    *("max_tokens", "temperature", "top_p", "top_k", "min_p", "stop", "n", "stop_token_ids"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty", "logprobs", "dimensions"),
    *("normalize", "thinking_budget", "chat_template_kwargs", "tools", "tool_choice", "sampling"),
    *("json_schema", "choices", "regex", "grammar", "structural_tag"),
)
"""Options that become fields of request bodies, by their parameters."""

OPTIONS: tuple[Option, ...] = (
    *group(
        "input",
        "WorkerConfig",
        Option(
            "--manifest",
            REPEATED,
            "Manifest to work through: path or URL; may be repeated. Default: by rank, see --job.",
            name="manifests",
            envvar=["BATCHINFER_WORKER_MANIFEST", "DATA_METADATA"],
        ),
        Option(
            "--job",
            TEXT,
            "The job that `batchinfer split` wrote: path or URL. Needed without --manifest, whose lines are relative "
            "to it.",
            metavar="URL",
            is_first=True,
        ),
        Option(
            "--output",
            TEXT,
            "Where the run lies: path or URL. Default: JOB/runs/default.",
            metavar="RUN",
            is_first=True,
        ),
        Option("--allow-absolute", FLAG, "Take absolute paths and URLs from a remote manifest."),
        Option("--limit", at_least(1), "Only the first N rows of the job.", recorded="config"),
    ),
    *group(
        "engine",
        "EngineConfig",
        Option(
            "--engine",
            TEXT,
            "vllm; openai, a running endpoint; or echo, to rehearse without a model.",
            default="vllm",
            recorded="recorded",
        ),
        Option(
            "--model",
            TEXT,
            "Model: a name on the Hub, a local folder, or a folder in s3:// or gs://.",
            default="",
            section="model",
            is_first=True,
            recorded="config",
        ),
        Option(
            "--task",
            one_of(*TASKS),
            "What the model makes of a row: a text (generate), a vector (embed, token-embed), the probabilities of "
            "classes (classify), a number (score, reward), an order (rerank), or the text of a sound (transcribe, "
            "translate); see docs/embeddings.md.",
            default=GENERATE,
            struct="",
            recorded="config",
            section="model",
            metavar="TASK",
        ),
        Option(
            "--dimensions",
            at_least(1),
            "Numbers to keep of each embedding, for models made for it (Matryoshka).",
            section="model",
            struct="",
        ),
        Option(
            "--normalize/--no-normalize",
            FLAG_OR_NONE,
            "Scale embeddings to length 1, and make classes and scores probabilities. Default: as the model says; raw "
            "numbers for rewards.",
            section="model",
            struct="",
        ),
        Option(
            "--revision",
            TEXT,
            "Commit, tag or branch of the model. Default: the run's, else the latest.",
            section="model",
        ),
        Option(
            "--model-cache",
            FOLDER,
            "Where this machine keeps models from s3:// and gs://. Default: in HF_HOME, else ~/.cache/batchinfer.",
            section="model",
        ),
        Option(
            "--lora",
            ADAPTERS,
            "LoRA adapter: its name for rows, and its folder, URL or name on the Hub; may be repeated.",
            field="loras",
            section="model",
            metavar="NAME=PATH",
            recorded="recorded",
        ),
        Option(
            "--tensor-parallel-size",
            at_least(1),
            "GPUs that share each layer in a replica. Default: the fewest that fit.",
            recorded="recorded",
        ),
        Option(
            "--pipeline-parallel-size",
            at_least(1),
            "Groups of GPUs in a replica that run the layers one after the other.",
            default=1,
            recorded="recorded",
        ),
        Option(
            "--nnodes",
            at_least(1),
            "Machines that run one model together; see docs/engine.md.",
            default=1,
        ),
        Option("--node-rank", at_least(0), "Number of this machine among them, from 0.", default=0),
        Option("--master-addr", TEXT, "Address of machine 0.", default=""),
        Option(
            "--master-port",
            at_least(1, 65_534),
            "Port of machine 0; the next one is used, too.",
            default=29_501,
        ),
        Option(
            "--headless",
            FLAG,
            "Run a share of the model for the worker on machine 0: with the same options, and --node-rank 1 or more.",
            struct="",
        ),
        Option(
            "--replicas",
            whole_or("auto", "auto"),
            "Servers, each on its own GPUs, or auto: as many as fit.",
            default="auto",
        ),
        Option(
            "--server-command",
            TEXT,
            "Start another server in vLLM's place, with {model} and {socket} or {port} where it takes them; see "
            "docs/engine.md.",
            default="",
            metavar="COMMAND",
            recorded="config",
        ),
        Option("--gpus", NAMES_OR_NONE, "GPUs to use, e.g. 2,5. Default: all that are visible."),
        Option(
            "--stall-seconds",
            number_from(0, is_open=True),
            "Without progress for so long, the engine counts as hung, or an endpoint as down.",
            default=300.0,
        ),
        Option(
            "--load-timeout-seconds",
            number_from(0, is_open=True),
            "Longest time that the model may take to load.",
            default=1800.0,
        ),
    ),
    *group(
        ENDPOINT,
        "EngineConfig",
        Option(
            "--base-url",
            REPEATED_LIST,
            "URL of an endpoint that speaks the OpenAI API, e.g. http://127.0.0.1:8000/v1; may be repeated, to share "
            "the rows. Its key comes from OPENAI_API_KEY.",
            name="base_urls",
            metavar="URL",
            recorded="recorded",
        ),
        Option(
            "--max-concurrency",
            at_least(1),
            "Requests under way at once, at each endpoint.",
            default=100,
        ),
        Option("--requests-per-minute", at_least(1), "Most requests that are sent in a minute."),
        Option(
            "--tokens-per-minute",
            at_least(1),
            "Most tokens, of prompts and answers together, in a minute.",
        ),
        Option(
            "--request-timeout-seconds",
            number_from(0, is_open=True),
            "Longest time that one attempt at a request may take.",
            default=600.0,
        ),
    ),
    *group(
        REHEARSAL,
        "EchoOptions",
        Option(
            "--echo-latency-seconds",
            number_from(0),
            "Mean latency of a row.",
            default=0.0,
            field="latency_seconds",
        ),
        Option(
            "--echo-load-seconds",
            number_from(0),
            "Seconds that loading takes.",
            default=0.0,
            field="load_seconds",
        ),
    ),
    *group(
        "prompt",
        "PromptConfig",
        Option(
            "--request-format",
            one_of("rows", "completions", "openai-batch"),
            "rows of a data set, or rows that are requests of the OpenAI API themselves.",
            default="rows",
        ),
        Option(
            "--messages-column",
            TEXT,
            "Column with a conversation; goes through the chat template. For a column of texts: --prompt-column.",
            default="",
            is_first=True,
        ),
        *(
            Option(
                f"--{kind}-column",
                REPEATED_LIST,
                text,
                name=f"{kind}_columns",
                section="media",
                metavar="COLUMN",
            )
            for kind, text in (
                (
                    "image",
                    "Column with the row's images: URLs, paths, base64, or the Hub's bytes and path; may be repeated.",
                ),
                ("audio", "Column with the row's sounds, in the same forms."),
                ("video", "Column with the row's videos, in the same forms."),
            )
        ),
        Option(
            "--lora-column",
            TEXT,
            "Column with the name of the row's adapter; empty: the model itself. Without this option a single --lora "
            "answers every row.",
            default="",
        ),
        Option("--turns", TEXT, "first, all, or how many user turns.", default="first"),
        Option("--prompt-column", TEXT, "Column with the prompt: text or token ids.", default=""),
        Option(
            "--pair-columns",
            NAMES,
            "Two columns: texts for --task score, a query and its documents for --task rerank.",
            default="",
            metavar="A,B",
        ),
        Option("--prompt-template", FILE, "Jinja file over the row's columns."),
        Option(
            "--template",
            TEXT,
            "A named template; `list` shows them.",
            default="",
            name="template_name",
        ),
        Option("--as-chat", FLAG, "Send the prompt as one user message through the chat template."),
        Option(
            "--system-prompt",
            TEXT_OR_FILE,
            "System message of every conversation, in place of its own: text, or @FILE.",
            default="",
        ),
        Option(
            "--chat-template-kwargs",
            JSON_OBJECT,
            'Variables of the chat template, e.g. {"enable_thinking": false}.',
            default="{}",
            struct="",
            metavar="JSON",
        ),
        Option(
            "--blank-columns",
            NAMES,
            "Columns to empty before the template sees them.",
            default="",
            metavar="A,B",
        ),
        Option(
            "--tools",
            FILE_OF_OBJECTS,
            "File with the tools that answers may call: a JSON list as in a request of the OpenAI API.",
            struct="",
        ),
        Option(
            "--tools-column",
            TEXT,
            "Column with the row's own tools, in place of the run's.",
            default="",
        ),
        Option(
            "--tool-choice",
            TEXT,
            "auto: the model decides whether to call; required: every answer is a call; none; or the tool that every "
            "answer calls.",
            default="",
            struct="",
            metavar="auto|required|none|NAME",
        ),
        Option(
            "--truncate-prompt",
            one_of(*TRUNCATIONS),
            "What to do with prompts longer than the model takes: make them error rows, or cut there.",
            default="error",
        ),
    ),
    *group(
        "sampling",
        "",
        Option(
            "--max-tokens",
            at_least(1),
            "Longest answer. Default: what the model has room for.",
            is_first=True,
        ),
        Option(
            "--temperature",
            NUMBER,
            "How freely tokens are drawn; 0: always the likeliest. Default: the engine's.",
        ),
        Option("--top-p", NUMBER, "Draw from the likeliest tokens that have this probability."),
        Option("--top-k", WHOLE, "Draw from so many of the likeliest tokens; -1: from all."),
        Option("--min-p", NUMBER, "Least probability, as a share of the likeliest token's."),
        Option("--repetition-penalty", NUMBER, "Above 1: tokens that were there are less likely."),
        Option("--presence-penalty", NUMBER, "Above 0: less likely once they were answered."),
        Option("--frequency-penalty", NUMBER, "Above 0: less likely each time they were answered."),
        Option("--stop", REPEATED, "Text that ends an answer; may be repeated."),
        Option("--stop-token-ids", INTEGERS, "Token ids that end an answer.", metavar="A,B"),
        Option("--n", at_least(1), "Answers a row.", default=1),
        Option(
            "--logprobs",
            at_least(0),
            "Log-probability of every token, and of so many alternatives.",
        ),
        Option(
            "--thinking-budget",
            at_least(0),
            "Most tokens of reasoning in an answer; needs vLLM's --reasoning-parser.",
            metavar="TOKENS",
        ),
        Option(
            "--json-schema", FILE, "File with a JSON schema; every answer is JSON that fits it."
        ),
        Option(
            "--choices",
            REPEATED,
            "Every answer is one of these texts: with commas between, or the option once for each.",
            metavar="A,B",
        ),
        Option("--regex", TEXT, "Every answer matches this regular expression.", default=""),
        Option(
            "--grammar",
            FILE,
            "File with a grammar in EBNF (GBNF) or Lark's notation; every answer follows it.",
        ),
        Option(
            "--structural-tag",
            FILE,
            "File with a structural tag of xgrammar's, as JSON: free text with constrained parts.",
        ),
        Option(
            "--constraint-column",
            TEXT,
            "Column with the row's own constraint, in place of the run's; see docs/engine.md.",
            default="",
            struct="PromptConfig",
        ),
        Option(
            "--seed",
            whole_or("none", None),
            "Seed of the run, or `none`: faster on a GPU, not repeatable.",
            default="0",
            struct="WorkerConfig",
            field="run_seed",
            recorded="config",
        ),
        Option(
            "--sampling",
            PAIRS,
            "Any other field of requests, by its name in the API or in transformers' GenerationConfig; several with "
            "commas: top_k=20,num_return_sequences=3.",
            recorded="body",
            metavar="KEY=VALUE",
        ),
    ),
    *group(
        "output",
        "PromptConfig",
        Option(
            "--id-column",
            TEXT,
            "Column whose value is each row's _id, for chunks that split did not make.",
            default="",
        ),
    ),
    *group(
        "behaviour",
        "WorkerConfig",
        Option(
            "--worker-id",
            TEXT,
            "Stable name of this worker. Default: SkyPilot's task id and node rank, else random.",
            envvar=["BATCHINFER_WORKER_WORKER_ID"],
        ),
        Option(
            "--checkpoint-seconds",
            number_from(0, is_open=True),
            "Seconds between checkpoints of open chunks.",
            default=30.0,
        ),
        Option("--checkpoint-rows", at_least(1), "Checkpoint also after so many finished rows."),
        Option(
            "--lease-seconds",
            number_from(0, is_open=True),
            "Without a heartbeat for so long, others take a worker's chunks.",
            default=120.0,
        ),
        Option(
            "--claims/--no-claims",
            FLAG,
            "Whether to agree with other workers on who does what.",
            default=True,
        ),
        Option(
            "--steal/--no-steal",
            FLAG,
            "Take others' chunks, too, once the own are taken.",
            default=True,
        ),
        Option(
            "--grace-seconds",
            number_from(0),
            "Time to finish rows after SIGTERM or SIGINT.",
            default=20.0,
        ),
        Option(
            "--max-error-rate",
            number_from(0, 1),
            "Stop (exit 3) when a larger share of rows fails. Default: when nearly all of the first 100 fail with one "
            "error, or every row of the run; 1 never stops.",
        ),
        Option("--min-errors", at_least(1), "Errors before --max-error-rate counts.", default=20),
        Option(
            "--max-attempts",
            at_least(1),
            "Starts without a new finished row before the worker gives up (exit 3).",
            default=5,
        ),
        Option(
            "--max-cost",
            number_from(0, 1e9, is_open=True),
            "Stop (exit 3) once this worker's machines have cost so many dollars, all its starts together. `launch` "
            "divides it among its workers.",
            metavar="DOLLARS",
        ),
        Option(
            "--max-hours",
            number_from(0, 1e9, is_open=True),
            "Stop (exit 3) once this worker was up for so many hours, all its starts together.",
            metavar="H",
        ),
        Option(
            "--price-per-hour",
            number_from(0, 1e6),
            "Dollars an hour for this worker's machine. Default, with --max-cost: SkyPilot's catalog if this machine "
            "has it, else list prices by GPU.",
            metavar="DOLLARS",
        ),
        Option(
            "--metrics-port",
            at_least(0, 65_535),
            "Serve metrics for Prometheus at this port; 0: at any free one, which the log names.",
            metavar="PORT",
        ),
        Option(
            "--metrics-host",
            TEXT,
            "Address at which metrics are served; 0.0.0.0: at all of this machine's.",
            default="127.0.0.1",
        ),
        Option(
            "--retry-errors",
            FLAG,
            "Do the error rows of a finished run again. A repair that was begun is ended first.",
        ),
        Option("--scratch-dir", FOLDER, "Local folder for chunks and outputs under way."),
        Option(
            "--max-open-chunks",
            at_least(1),
            "Chunks under way at once. Exceeded where chunks are so small that the engine would wait for rows.",
            default=64,
            struct="Limits",
        ),
        Option(
            "--max-row-memory",
            at_least(1),
            "Memory for rows that wait for the engine or are in it, for each replica. Only large rows reach it.",
            default=256,
            struct="Limits",
            metavar="MIB",
        ),
        Option(
            "--prefix-window",
            at_least(0),
            "Run rows whose prompts begin alike next to each other, within so many; 0: in input order.",
            default=0,
            struct="Limits",
            metavar="ROWS",
        ),
    ),
    *group(
        "media",
        "Limits",
        Option(
            "--media-root",
            TEXT,
            "Folder or URL that paths of media in rows count from. Without it, rows name media by URLs only.",
            default="",
            metavar="URL",
            recorded="recorded",
        ),
        Option(
            "--max-media-bytes",
            at_least(1),
            "Largest image, sound or video that is taken; rows with a larger one are error rows.",
            default=20 << 20,
            metavar="BYTES",
        ),
        Option(
            "--media-timeout-seconds",
            number_from(0, is_open=True),
            "Longest time that one attempt to fetch a link may take.",
            default=30.0,
        ),
        Option(
            "--allow-private-urls",
            FLAG,
            "Fetch links of rows from addresses of a private network, too.",
            recorded="recorded",
        ),
    ),
    *group(
        LOOK,
        "",
        Option(
            "--show-config",
            FLAG,
            "Show every option, where its value comes from, and stop; reads no storage.",
        ),
        Option(
            "--preview",
            at_least(1),
            "Show the first N requests and stop; loads no engine.",
            metavar="N",
        ),
    ),
)


def run_options(*, with_look: bool, without: Collection[str] = ()) -> Callable[[F], F]:
    """Return a decorator that adds the options of a run to a command.

    Args:
        with_look: Whether to add the options of the section `LOOK`, too: --show-config and --preview.
        without: Names of the parameters of options to leave out.
    """

    def decorate(function: F) -> F:
        for option in reversed(OPTIONS):
            is_wanted = with_look or option.section != LOOK
            if is_wanted and option.parameter not in without:
                function = option.decorate(function)
        return function

    return decorate


def fields_of(struct: str, given: dict[str, Any]) -> dict[str, Any]:
    """Return the values that options give to the fields of one struct, by field. Reads the files that options name.

    Args:
        struct: Name of the struct.
        given: Values that click has parsed, by the names of its parameters.

    Raises:
        ConfigError: a value cannot be read.
    """
    rows = (option for option in OPTIONS if option.struct == struct)
    return {option.target: option.read(given[option.parameter]) for option in rows}


def value_of(parameter: str, given: dict[str, Any]) -> Any:
    """Return the value that one option has in a configuration.

    Raises:
        ConfigError: the value cannot be read.
    """
    (option,) = (option for option in OPTIONS if option.parameter == parameter)
    return option.read(given[parameter])
