"""Every command on the pages runs as it stands there, and prints what the page shows.

The commands of a page run one after the other in a folder that has what its reader would have (`make_world`). Those of
the command line run in this process, so that all that ask the demo's model share one server; the others run in bash.
Where a page names another model, the engine echo answers: it stands in the environment, not in the command.
"""

import contextlib
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from zlib import crc32

import click
import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from batchinfer.cli.main import group, main
from batchinfer.cli.server_args import ServerCommand, divide
from batchinfer.engines import create_engine
from batchinfer.engines.engine_config import EngineConfig
from batchinfer.pipeline import launch
from echo_server import fake_endpoint
from fixtures_hub import TOKEN
from fixtures_vllm import replace_create_engine
from making import put_program, write_lines
from models import sound, write_adapter, write_model_stub
from pages import steps_of
from pictures import picture

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
MODEL = "examples/demo-model"
NOT_RUN = {
    r"^node\d\$": "two machines of 8 GPUs each: tests/worker/test_nodes_vllm.py",
    r"api\.openai\.com": "an account; the cookbook asks an endpoint that is here",
    r"^(aws|gcloud) ": "an account",
    r"^batchinfer convert ": "torch and checkpoints: tests/convert",
    r"^batchinfer chat ": "a terminal: tests/playground/test_chat.py",
    r"--server-command": "another server: tests/engines/test_servers.py",
    r"ray job submit": "a Ray cluster",
    r"^(python3 -m venv|pip|bash scripts/setup.sh)": "a new environment: test_setup_script.py",
}
"""Commands that are not run, and why. Their options are looked at."""
LEFT_OUT = {
    "check": "--job JOB --prompt-column text",
    "launch": "s3://my-bucket/job --run s3://my-bucket/job/runs/new --on skypilot --gpu L4 --model NAME "
    "--prompt-column text",
    "run": "--model Qwen/Qwen3-8B --prompt-column text --system-prompt 'Is the review positive or negative?' "
    "--max-tokens 8",
    "worker": "--job JOB --output ANOTHER --model NAME --prompt-column text --max-tokens 9",
}
"""What `…` stands for where a page leaves out options, by command."""
_LOG_LINE = re.compile(r"^\d\d:\d\d:\d\d [A-Z]+ ")


def is_ours(command: str) -> bool:
    """Whether a command is one of batchinfer alone."""
    return bool(re.match(r"batchinfer [^|;<>]*$", re.sub(r" +#.*", "", command)))


def with_all(command: str) -> str:
    """The command with what the page leaves out."""
    found, name, before = [], "", ""
    for word in re.split(r"(\s+)", command):
        is_gap = word == "…" and name in LEFT_OUT and not before.startswith("--")
        # Another run for each command: a run has one model.
        options = LEFT_OUT.get(name, "").replace("ANOTHER", f"run-{crc32(command.encode())}")
        found.append(options if is_gap else word)
        if word.strip():
            name, before = word if before == "batchinfer" else name, word
    return "".join(found)


def is_asked_of_the_model(command: str) -> bool:
    """Whether the demo's model answers. It would take minutes for all rows of a worker."""
    pattern = rf"batchinfer (run|generate) .*{MODEL}"
    return is_ours(command) and bool(re.match(pattern, command, re.DOTALL))


def units() -> Iterator[Any]:
    """Each page; of the cookbook each section."""
    for path in PAGES:
        parts = [path.read_text()]
        if path.stem == "cookbook":
            parts = re.split(r"^## ", parts[0], flags=re.MULTILINE)[1:]
        for part in parts:
            if steps_of(part):
                title = f"{path.stem}: {part.splitlines()[0]}" if len(parts) > 1 else path.stem
                commands = [step.command for step in steps_of(part)]
                is_heavy = any(map(is_asked_of_the_model, commands))
                marks = [pytest.mark.vllm] if is_heavy else []
                # The one shows pandas, the other asks for vLLM (`check --machine`).
                is_full = path.stem in ("cookbook", "when-it-goes-wrong")
                marks += [pytest.mark.full] if is_full else []
                yield pytest.param(steps_of(part), path.stem != "cookbook", id=title, marks=marks)


UNITS = list(units())
COMMANDS = [step.command for unit in UNITS for step in unit.values[0]]


def reason_for(command: str) -> str:
    return next((why for pattern, why in NOT_RUN.items() if re.search(pattern, command)), "")


def words_of(command: str) -> list[str]:
    """The words after `batchinfer`, with what the page leaves out."""
    line = os.path.expandvars(with_all(command).replace("\\\n", " "))
    return shlex.split(line, comments=True)[1:]


# --------------------------------------------------------------------------- what the reader has

ASKED = ("text", "review", "letter", "question", "query", "prompt")
ROWS = [
    {
        **dict.fromkeys(ASKED, f"What is {n}?"),
        "document": f"It is {n}.",
        "adapter": "sql",
        "conversation": [{"role": "user", "content": f"Count to {n}."}],
    }
    for n in range(20)
]
REQUEST = {"method": "POST", "url": "/v1/chat/completions"}
PROGRAMS = {
    # SkyPilot of one machine, which does the work of all workers of a launch before `sky` returns.
    "sky": """
[ "$2" = queue ] && echo "[]"
for word; do
  case $word in --env=*) export "${word#--env=}" ;; *.yaml) [ -e "$word" ] || exit 9 ;; esac
done
[ -z "$WORKER_WORDS" ] || eval "BATCHINFER_RANK=0 batchinfer worker $WORKER_WORDS"
""",
    "ssh": "",
    "sbatch": "bash -n",
    "kubectl": 'python -c \'import sys, yaml; assert yaml.safe_load(sys.stdin)["kind"] == "Job"\'',
}
"""Programs that only readers have."""


def write_files() -> None:
    """What commands on the pages name, in the current folder."""
    media = {
        "image": {"bytes": picture(), "path": "a.png"},
        "sound": {"bytes": sound(440), "path": "a.wav"},
    }
    table = pa.Table.from_pylist([row | media for row in ROWS])
    for name in ("reviews", "questions", "photos", "calls"):
        pq.write_table(table, f"{name}.parquet")
    pq.write_table(table.slice(0, 3), "more.parquet")
    for name in ("letters", "docs", "pairs"):
        write_lines(Path(f"{name}.jsonl"), ROWS)
    body = {"model": "NAME", "messages": ROWS[0]["conversation"]}
    write_lines(Path("requests.jsonl"), [REQUEST | {"custom_id": "a", "body": body}])
    Path("questions.txt").write_text("What is 1?\n")
    Path("order.json").write_text('{"type": "object"}')
    Path("tools.json").write_text('[{"type": "function", "function": {"name": "f"}}]')
    settings = {"job": "s3://my-bucket/job", "model": "NAME", "prompt_column": "text"}
    Path("run.yaml").write_text(yaml.safe_dump(settings))


def make(words: str) -> None:
    assert main(shlex.split(words)) == 0, words


def write_jobs(text: str) -> None:
    """Jobs that commands name and do not split themselves, and runs that they read and do not make."""
    runs = {
        run: run.partition("/runs")[0]
        for run in re.findall(r"(?:collect|--rate-from) (s3://\S+)", text)
    }
    if re.search(r"\bRUN\b", text) and "--output RUN" not in text:
        runs["RUN"] = "JOB"
    jobs = re.findall(r"(?:--job|launch|--on skypilot) (s3:\S+|[\w/]+)", text)
    for job in {*jobs, *runs.values()}:
        if f"--output {job} " not in text.replace("\n", " "):
            make(f"split reviews.parquet --output {job} --num-chunks 16 --num-workers 16")
    for run, job in runs.items():
        make(f"worker --job {job} --output {run} --prompt-column text --max-tokens 2")


@pytest.fixture
def reader(tmp_path, monkeypatch):
    """Where the pages' reader is, with a server behind $ENDPOINT."""
    for name in ("here", "bin"):
        (tmp_path / name).mkdir()
    for name in ("examples", "scripts", "worker.yaml", "dev.yaml"):
        (tmp_path / "here" / name).symlink_to(ROOT / name)
    for name, script in PROGRAMS.items():
        put_program(tmp_path / "bin" / name, f"#!/bin/bash\n{script}\n")
    for name in ("sky", "here/sky_workdir/.venv"):  # below HOME, and on the other machine
        (tmp_path / name / "bin").mkdir(parents=True)
        (tmp_path / name / "bin/activate").touch()
    for name in ("CHAT", "CHECK", "GENERATE", "LAUNCH", "RUN", "WORKER"):
        monkeypatch.setenv(f"BATCHINFER_{name}_ENGINE", "echo")
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(launch, "WATCH_SECONDS", 0.1)
    with fake_endpoint() as endpoint:
        for name, value in {
            "COLUMNS": "100",
            "PATH": f"{tmp_path}/bin:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "HF_TOKEN": TOKEN,
            "RUN": "RUN",
            "BATCHINFER_ACCELERATOR": "L4",
            "ENDPOINT": endpoint.url,
        }.items():
            monkeypatch.setenv(name, value)
        yield tmp_path / "here"


def make_world(
    text: str, folder: Path, request: pytest.FixtureRequest, patch: pytest.MonkeyPatch
) -> None:
    """Make all that commands name."""
    write_files()
    if "s3://" in text:
        for name in ("my-bucket", "bucket"):
            request.getfixturevalue("s3_url")(bucket=name)
    if "data/*" in text:
        Path("data").mkdir()
        shutil.copy("reviews.parquet", "data")
    if "az://" in text:
        request.getfixturevalue("azure_url")(container="my-container")
    if "gs://" in text:
        request.getfixturevalue("gcs_url")
    if "hf://" in text:
        Path("lmsys").mkdir()
        pq.write_table(pa.Table.from_pylist(10 * ROWS), "lmsys/train.parquet")
        request.getfixturevalue("hub").add("lmsys/lmsys-chat-1m", "main", folder / "lmsys")
    if "logs/*" in text:
        make("split reviews.parquet --output LOGGED --num-chunks 4")
        Path("logs").mkdir()
        words = "--job LOGGED --output LOGGED/runs/a --prompt-column text --log-format json"
        run_in_bash(f"batchinfer worker {words} 2>logs/w0.jsonl")
    if "--lora" in text:
        write_adapter(folder / "sql-adapter")
    if "org/" in text:
        for name, write in (("poems", write_adapter), ("name", write_model_stub)):
            kept = folder / f"hub/models--org--{name}"
            (kept / "refs").mkdir(parents=True)
            (kept / "refs/main").write_text("1")
            (kept / "snapshots").mkdir()
            write(kept / "snapshots/1")
        patch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(folder / "hub"))
        patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    write_jobs(text)


# --------------------------------------------------------------------------- running


def run_in_bash(command: str) -> str:
    environment = os.environ | {"HOME": str(Path.cwd().parent)}
    words = ["bash", "-euc", with_all(command)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, f"{command}\n{done.stderr}"
    return done.stdout


def run_here(command: str) -> str:
    """Run a command as the page's reader would, and return what it prints, without what pages leave out."""
    printed = io.TextIOWrapper(io.BytesIO(), write_through=True)
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        status = main(words_of(command))
    text = printed.buffer.getvalue().decode()
    assert status == 0, f"{command}\n{text}"
    lines = [line for line in text.splitlines() if not _LOG_LINE.match(line)]
    return "\n".join(lines[:-1] if lines and lines[-1].startswith("{") else lines)


def neat(text: str, *, has_times: bool) -> str:
    """The lines that are not blank; with `has_times`, each number is 0, and each gap one blank."""
    text = re.sub(r"\d+(\.\d+)*", "0", text) if has_times else text
    lines = (" ".join(line.split()) if has_times else line.rstrip() for line in text.splitlines())
    return "\n".join(filter(None, lines))


@pytest.mark.filterwarnings("ignore:Use .content=:DeprecationWarning")
@pytest.mark.parametrize(("steps", "needs_files"), UNITS)
def test_the_commands_of_a_page_print_what_it_shows(
    steps, needs_files, reader, monkeypatch, request
):
    commands = [step.command for step in steps if not reason_for(step.command)]
    if needs_files:
        text = "\n".join(" ".join(words_of(each)) if is_ours(each) else each for each in commands)
        make_world(text, reader, request, monkeypatch)
    if any(map(is_asked_of_the_model, commands)):
        engine = request.getfixturevalue("demo_engine")
        info = msgspec.structs.replace(engine.open(None), name="vllm")
        monkeypatch.setattr(engine, "open", lambda _: info)

        def create(config: EngineConfig) -> Any:
            return engine if config.engine == "vllm" else create_engine(config)

        replace_create_engine(monkeypatch, create)
        monkeypatch.setattr("batchinfer.playground.session.create_engine", create)
    for command, shown in steps:
        if command not in commands:
            continue
        with monkeypatch.context() as patch:
            if is_asked_of_the_model(command):
                for name in ("RUN", "GENERATE"):
                    patch.delenv(f"BATCHINFER_{name}_ENGINE")
            printed = (run_here if is_ours(command) else run_in_bash)(command)
        if shown is not None:
            has_times = "tokens/s" in shown
            found = neat(printed.replace(f"{reader}/", ""), has_times=has_times)
            pattern = re.escape(neat(shown, has_times=has_times)).replace("…", ".*")
            said = f"{command}\nprints\n{printed}"
            assert re.fullmatch(pattern, found, re.DOTALL), said


@pytest.mark.vllm
def test_the_other_options_on_pages_are_options_of_vllm(vllm_options):
    found: set[str] = set()
    for command in COMMANDS:
        if command.startswith("batchinfer "):
            name, *words = words_of(command)
            parsed = group.get_command(click.Context(group), name)
            typed = divide(words, parsed.params)[1] if isinstance(parsed, ServerCommand) else []
            found |= {word.partition("=")[0] for word in typed if word.startswith("--")}
    assert {"--max-model-len", "--quantization"} <= found <= vllm_options
