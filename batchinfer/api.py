"""The Python interface: `run`, `make_job`, `open_run`, and the errors.

    import batchinfer

    answered = batchinfer.run("reviews.parquet", model="Qwen/Qwen3-8B", prompt_column="text", max_tokens=64)
    table = answered.to_arrow()

`run` and `make_job` start the commands `run` and `split` as a process of its own, so the engine shares no memory and no
signal handlers with the calling program. On Linux the command also ends when the calling program is killed.
"""

from __future__ import annotations

import glob
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from batchinfer.core import errors

if TYPE_CHECKING:
    import datasets
    import pandas as pd
    import polars as pl
    import pyarrow as pa

__all__ = ["RunHandle", "errors", "make_job", "open_run", "run"]

_CHILD = (
    "from batchinfer.engines.parent_death import die_with_parent; die_with_parent();"
    "from batchinfer.cli.main import run; run()"
)
"""Program of a command's process. On Linux the kernel kills it when the thread that has started it ends."""
_ERRORS = {
    2: errors.UsageError,
    3: errors.PolicyStop,
    33: errors.EngineError,
    34: errors.StorageError,
    75: errors.Interrupted,
}
"""Class of the error that is raised, by the exit status of the command."""
_JSON_FILES = ("json_schema", "structural_tag", "tools")
"""Options that are files with JSON, for which values are written to files."""
_SHOWN_ROWS = 3
_ROWS_AT_ONCE = 1024
_FILES = (".parquet", ".jsonl", ".json", ".csv", ".txt", ".zst", ".gz")


def run(  # noqa: PLR0913 - an editor shows the common options by name
    data: Any,
    *,
    model: str | None = None,
    output: str | Path | None = None,
    work: str | Path | None = None,
    limit: int | None = None,
    prompt_column: str | None = None,
    messages_column: str | None = None,
    system_prompt: str | None = None,
    task: str | None = None,
    max_tokens: int | None = None,
    temperature: float | None = None,
    top_p: float | None = None,
    n: int | None = None,
    stop: str | Sequence[str] | None = None,
    seed: int | None = None,
    json_schema: Any = None,
    choices: Sequence[str] | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
    lora: Mapping[str, str] | None = None,
    engine: str | None = None,
    base_url: str | Sequence[str] | None = None,
    retry_errors: bool | None = None,
    quiet: bool = False,
    **vllm: Any,
) -> RunHandle:
    """Answer every row of some data with a model on this machine. See docs/python.md.

    The call blocks until the command has ended. Log lines go to stderr; in a notebook and in a terminal there is a
    progress bar. After an interruption or a kill, the same call goes on where it was if `output` or `work` is given.

    Args:
        data: Prompts, conversations (lists of messages) or dictionaries; a path or URL, or several; an Arrow table, a
            frame of pandas or polars, or a `datasets.Dataset`.
        model: A name on the Hub, a local folder, or a folder in a bucket.
        output: File or folder for the answers, as `-o` of `batchinfer run`. With None, none is written.
        work: Folder or URL for the job and the run. With None, it is beside `output`, or else a new folder, whose name
            is printed.
        limit: Only the first rows for now.
        prompt_column: Column with the prompt. Default: `prompt` or `text`.
        messages_column: Column with a conversation. Default: `messages` or `conversation`.
        system_prompt: System message of every conversation.
        task: generate, embed, classify, score or another task of `batchinfer run`.
        max_tokens: Longest answer.
        temperature: How freely tokens are drawn; 0: always the likeliest.
        top_p: Draw from the likeliest tokens that have this probability.
        n: Answers a row.
        stop: Text or texts that end an answer.
        seed: Seed of the run.
        json_schema: A JSON schema as a dictionary, a class of pydantic, or a file: every answer is JSON that fits it.
        choices: Every answer is one of these texts.
        tools: Tools that answers may call, as in a request of the OpenAI API.
        lora: Adapters: their folders, URLs or names on the Hub, by name.
        engine: vllm, openai (a running endpoint) or echo (a rehearsal without a model).
        base_url: URL of an endpoint, for the engine openai.
        retry_errors: Do the error rows of a finished run again.
        quiet: Show neither log lines nor a progress bar.
        vllm: Any further option of `batchinfer run` or of vLLM's server, such as `max_model_len=8192`.

    Returns:
        The run, to read the answers from.

    Raises:
        errors.UsageError: An option, the data or the model is wrong.
        errors.PolicyStop: A rule stopped the run, such as `max_error_rate`.
        errors.EngineError: The engine failed.
        errors.StorageError: Storage failed.
        errors.Interrupted: A signal ended it; the same call goes on.
    """
    given = {name: value for name, value in locals().items() if value is not None}
    options = {**given, **vllm}
    for name in ("data", "output", "work", "quiet", "vllm"):
        options.pop(name, None)
    if str(output) == "-":
        raise errors.ConfigError("output: '-' is for the command line", hint="give a path")
    kept = tempfile.mkdtemp(prefix="batchinfer-run-") if work is None and output is None else ""
    if not quiet:
        if importlib.util.find_spec("pandas") is None:
            _say(
                "pandas is not installed: read the answers with .rows(), .to_arrow() or .to_polars()"
            )
        if kept:
            _say(f"job and run are kept in {kept}; work={kept!r} goes on there")
    with _sources(data) as (sources, scratch):
        dest = output if output is not None else scratch / "answers.parquet"
        place = ["--work", str(work or kept)] if work or kept else []
        try:
            arguments = [*sources, "--output", str(dest), *place]
            result = _call("run", arguments, options, scratch, quiet=quiet)
        except errors.BatchinferError as error:
            if kept and any(Path(kept).iterdir()):
                error.hint = f"{error.hint}\nfinished rows are kept: work={kept!r} goes on".strip()
            raise
    folder = str(result["work"])
    if "://" not in folder:  # stays true when the program changes its folder
        folder = str(Path(folder).expanduser().absolute())
    is_partial = limit is not None and result["status"] != "SUCCESS"
    return RunHandle(f"{folder}/run", result, is_partial=is_partial)


def make_job(data: Any, output: str | Path, **options: Any) -> dict[str, Any]:
    """Split data into a job at `output`, for any number of workers.

    Args:
        data: As in `run`.
        output: Folder or URL of the job.
        options: Options of `batchinfer split` by their names, such as `num_workers`, `num_chunks`.

    Returns:
        The result of the command: `job`, `rows`, `chunks` and more.

    Raises:
        errors.UsageError: An option or the data is wrong, or another job is there.
        errors.StorageError: Storage failed.
    """
    with _sources(data) as (sources, scratch):
        return _call("split", [*sources, "--output", str(output)], options, scratch, quiet=False)


def open_run(url: str | Path) -> RunHandle:
    """Return the run at a path or URL, finished or not. Reads nothing yet."""
    return RunHandle(str(url), {})


class RunHandle:
    """A run, from which answers can be read.

    Attributes:
        url: Path or URL of the run.
        result: JSON object that `batchinfer run` printed; empty after `open_run`.
    """

    def __init__(self, url: str, result: dict[str, Any], *, is_partial: bool = False) -> None:
        self.url = url
        self.result = result
        self._is_partial = is_partial

    def __repr__(self) -> str:
        """Show the counts and the first rows of a run that `run` has made; else the run's name."""
        name = f"batchinfer.open_run({self.url!r})"
        if not self.result:
            return name
        counts = f"{self.result['rows']} rows, {self.result.get('rows_error', 0)} failed"
        with self._collected() as file:
            rows = (
                next(file.iter_batches(_SHOWN_ROWS)).to_pylist() if file.metadata.num_rows else []
            )
        shown = [json.dumps(row, ensure_ascii=False, default=str)[:200] for row in rows]
        return "\n".join([f"{name}  # {counts}", *(f"  {line}" for line in shown)])

    def status(self) -> dict[str, Any]:
        """Return the figures of `batchinfer status --json`: state, rows, rates, errors, workers."""
        import msgspec

        from batchinfer.runs.status import StatusConfig, run_status

        found: dict[str, Any] = msgspec.to_builtins(
            run_status(StatusConfig(run=self.url), **_outside())
        )
        return found

    def verify(self, *, deep: bool = False) -> dict[str, Any]:
        """Check that the run is complete and undamaged, and return the result of `batchinfer verify`.

        Args:
            deep: Read every output, not only its marker.

        Raises:
            errors.RunUnsound: The run is incomplete or damaged; the error's `result` says how.
        """
        from batchinfer.runs.verify import VerifyConfig, run_verify

        verdict = run_verify(VerifyConfig(run=self.url, is_deep=deep), **_outside())
        if not verdict.is_sound:
            error = verdict.error()
            error.attach_result(verdict.result)
            raise error
        return verdict.result

    def rows(self, *, with_source: bool = False) -> Iterator[dict[str, Any]]:
        """Yield the verified answers in input order, a dictionary each, in bounded memory.

        Args:
            with_source: Join the source's columns.

        Raises:
            errors.RunUnsound: The run is damaged, or is unfinished and not the result of `run` with `limit`.
        """
        with self._collected(with_source=with_source) as file:
            for batch in file.iter_batches(_ROWS_AT_ONCE):
                yield from batch.to_pylist()

    def to_arrow(self, *, with_source: bool = False) -> pa.Table:
        """Return the verified answers as one table, in input order, with the columns of `batchinfer collect`.

        Raises as `rows`.
        """
        with self._collected(with_source=with_source) as file:
            return file.read()

    def to_polars(self, *, with_source: bool = False) -> pl.DataFrame:
        """As `to_arrow`, as a frame of polars."""
        import polars as pl

        frame = pl.from_arrow(self.to_arrow(with_source=with_source))
        assert isinstance(frame, pl.DataFrame)
        return frame

    def to_pandas(self, *, with_source: bool = False) -> pd.DataFrame:
        """As `to_arrow`, as a frame of pandas."""
        return self.to_arrow(with_source=with_source).to_pandas()

    def to_dataset(self, *, with_source: bool = False) -> datasets.Dataset:
        """As `to_arrow`, as a `datasets.Dataset`."""
        import datasets

        return datasets.Dataset(self.to_arrow(with_source=with_source))

    @contextmanager
    def _collected(self, *, with_source: bool = False) -> Iterator[Any]:
        """Collect the answers to a temporary parquet file, and give it."""
        import pyarrow.parquet as pq

        from batchinfer.collect.collecting import run_collect
        from batchinfer.collect.options import CollectConfig

        with tempfile.TemporaryDirectory(prefix="batchinfer-") as folder:
            path, partial = f"{folder}/answers.parquet", self._is_partial
            config = CollectConfig(
                run=self.url, dest=path, with_source=with_source, partial=partial
            )
            run_collect(config, **_outside())
            with pq.ParquetFile(path) as file:
                yield file


def _outside() -> dict[str, Any]:
    """Return what the functions of commands take beside their options."""
    from batchinfer.core.clock import SystemClock
    from batchinfer.storage.opening import open_store

    return {"open_store": open_store, "clock": SystemClock()}


def _say(line: str) -> None:
    from batchinfer.cli.terminal import say

    say(line)


# --------------------------------------------------------------------------- data


@contextmanager
def _sources(data: Any) -> Iterator[tuple[list[str], Path]]:
    """Give the paths or URLs of data, and a scratch folder. Data in memory is written to a file there.

    Raises:
        errors.InputError: The data, or an item of it, is of a kind that cannot be read.
    """
    with tempfile.TemporaryDirectory(prefix="batchinfer-") as name:
        folder = Path(name)
        items = [data] if isinstance(data, str | Path) else data
        package = type(data).__module__.partition(".")[0]
        if isinstance(items, list | tuple) and items and all(map(_is_place, items)):
            yield (
                [f"./{item}" if str(item).startswith("-") else str(item) for item in items],
                folder,
            )
        elif package in ("pyarrow", "pandas", "polars", "datasets"):
            _write_table(data, package, folder / "data.parquet")
            yield [str(folder / "data.parquet")], folder
        elif isinstance(data, Iterable) and not isinstance(data, str | bytes | Mapping):
            _write_rows(data, folder / "data.jsonl")
            yield [str(folder / "data.jsonl")], folder
        else:
            raise errors.InputError(
                f"data: {data!r:.80} is no file, table, or list of prompts, conversations or dictionaries",
                hint="check the spelling of a path; give prompts as a list",
            )


def _is_place(item: Any) -> bool:
    """Whether an item is a path or URL. A text is one if it names something here, has a scheme, or ends like a file."""
    if not isinstance(item, str):
        return isinstance(item, Path)
    try:
        is_there = bool(glob.glob(str(Path(item).expanduser())))  # noqa: PTH207 - may be absolute
    except OSError:  # longer than a path may be
        is_there = False
    return is_there or "://" in item.partition(" ")[0] or item.endswith(_FILES)


def _write_table(data: Any, package: str, path: Path) -> None:
    if package == "pandas":
        data.to_parquet(path, index=False)
    elif package == "polars":
        data.lazy().sink_parquet(path)
    elif package == "datasets" and not hasattr(data, "to_parquet"):
        raise errors.InputError(f"data: has the splits {', '.join(map(str, data))}, expected one")
    elif package == "datasets":
        data.to_parquet(path)
    else:
        import pyarrow as pa
        import pyarrow.parquet as pq

        stream = pa.table(data) if isinstance(data, pa.RecordBatch) else data
        batches = pa.RecordBatchReader.from_stream(stream)
        with batches, pq.ParquetWriter(path, batches.schema) as writer:
            for batch in batches:
                writer.write_batch(batch)


def _write_rows(rows: Iterable[Any], path: Path) -> None:
    from batchinfer.core import codec

    with path.open("wb") as file:
        for index, item in enumerate(rows):
            row = {"prompt": item} if isinstance(item, str) else item
            row = {"messages": row} if isinstance(row, list | tuple) else row
            try:
                file.write(codec.encode(dict(row)) + b"\n")
            except (TypeError, ValueError) as error:
                raise errors.InputError(
                    f"data: item {index}, a {type(item).__name__}, cannot be a row ({error})",
                    hint="give texts, lists of messages, or dictionaries of what JSON can hold",
                ) from error


# --------------------------------------------------------------------------- running a command


def _call(
    name: str, arguments: Sequence[str], options: Mapping[str, Any], folder: Path, *, quiet: bool
) -> dict[str, Any]:
    """Run a command as a process, with its log and a progress bar on stderr, and return its result."""
    from batchinfer.worker.progress import MARKED_LINES, is_shown_to_people

    settings = folder / "options.yaml"
    settings.write_text(_as_settings(name, options, folder), encoding="utf-8")
    prefix = f"BATCHINFER_{name.upper()}_"
    variables = {key: value for key, value in os.environ.items() if not key.startswith(prefix)}
    if not quiet and is_shown_to_people(sys.stderr):
        variables[MARKED_LINES] = "1"
    lines: deque[str] = deque(maxlen=200)
    with subprocess.Popen(
        [sys.executable, "-c", _CHILD, name, *arguments, "--config", str(settings)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        errors="replace",
        env=variables,
    ) as process:
        forwarding = threading.Thread(target=_forward, args=(process, lines, quiet), daemon=True)
        forwarding.start()
        try:
            assert process.stdout is not None
            output = process.stdout.read()
        except BaseException:
            process.send_signal(signal.SIGINT)  # so that it saves finished rows and ends
            raise
        finally:
            status = process.wait()
            forwarding.join()
    result = json.loads(output.splitlines()[-1]) if output.strip() else {}
    if status:
        _fail(status, [line.replace(f"{folder}/", "") for line in lines], result)
    return dict(result)


def _as_settings(command: str, options: Mapping[str, Any], folder: Path) -> str:
    """Return options as the text of a settings file; what is no option of `run` is vLLM's. Schemas and tools get files.

    Raises:
        ConfigError: A settings file cannot hold a value, or a name is nearly that of an option.
    """
    import click

    from batchinfer.cli.main import group
    from batchinfer.cli.server_args import check_name
    from batchinfer.cli.settings import SERVER_SECTION

    found = group.get_command(click.Context(group), command)
    assert found is not None
    flags = {flag: True for each in found.params for flag in each.opts}
    known = {flag.lstrip("-").replace("-", "_") for flag in flags}
    own: dict[str, Any] = {}
    server: dict[str, Any] = {}
    for name, value in options.items():
        try:
            plain = json.loads(json.dumps(value, default=_plain))
        except (TypeError, ValueError):
            raise errors.ConfigError(
                f"{name}: is a {type(value).__name__}, expected a number, a text, a list or a dictionary"
            ) from None
        if name in _JSON_FILES and not isinstance(plain, str):
            path = folder / f"{name}.json"
            path.write_text(json.dumps(plain), encoding="utf-8")
            plain = str(path)
        if name == "lora":
            plain = [f"{adapter}={place}" for adapter, place in value.items()]
        is_own = command != "run" or name in known
        if not is_own:
            check_name(f"--{name}", flags)
        (own if is_own else server)[name] = plain
    return json.dumps(own | ({SERVER_SECTION: server} if server else {}))


def _plain(value: Any) -> Any:
    if hasattr(value, "model_json_schema"):  # a class of pydantic
        return value.model_json_schema()
    if hasattr(value, "dtype") and hasattr(value, "item"):  # a number of numpy
        return value.item()
    return os.fspath(value)


def _forward(process: subprocess.Popen[str], lines: deque[str], quiet: bool) -> None:
    """Copy a process's log to our stderr, which may be a cell of a notebook, and keep its last lines.

    The error with which it ends is not copied, since it is raised.
    """
    from batchinfer.worker.progress import Bar

    assert process.stderr is not None
    bar, is_error = Bar(), False
    for line in (text.rstrip("\n") for text in process.stderr):
        if bar.take(line):
            continue
        is_error = is_error or line.lower().startswith("error: ")
        lines.append(line)
        if not quiet and not is_error:
            _say(line)
    bar.close()


def _fail(status: int, lines: list[str], result: dict[str, Any]) -> NoReturn:
    """Raise the error that a command has printed: its last lines are the message and the hints."""
    kept = [line for line in lines if not (line.startswith("hint: ") and "options.yaml" in line)]
    text = "\n".join(kept) or f"ended with exit status {status}"
    found = re.split(r"^(?:error|Error): ", text, flags=re.MULTILINE)
    message, _, hint = (found[-1] if len(found) > 1 else kept[-1]).partition("\nhint: ")
    error = _ERRORS.get(status, errors.BatchinferError)(message, hint=hint)
    error.attach_result(result)
    raise error
