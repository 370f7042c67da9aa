"""The Python interface: `run`, `split`, `open_run`, and the errors.

    import batchinfer

    answered = batchinfer.run("reviews.parquet", model="Qwen/Qwen3-8B", prompt_column="text", max_tokens=64)
    table = answered.to_arrow()

`run` and `split` start the command of the same name as a process of its own, so the engine shares no memory and no
signal handlers with the calling program. On Linux the command also ends when the calling program is killed.
"""

from __future__ import annotations

import glob
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from batchinfer.core import errors

if TYPE_CHECKING:
    import datasets
    import pandas as pd
    import pyarrow as pa

__all__ = ["RunHandle", "errors", "open_run", "run", "split"]

_LINES_KEPT = 200
_TABLE, _LINES = "source.parquet", "source.jsonl"
"""Names of the files to which a source in memory is written."""
_CHILD = """
import sys
from batchinfer.engines.parent_death import die_with_parent
die_with_parent(int(sys.argv.pop(1)))
from batchinfer.cli.main import run
run()
"""
"""Program of a command's process. On Linux the process does not outlive the calling program."""
_ERRORS: dict[int, type[errors.BatchinferError]] = {
    2: errors.UsageError,
    3: errors.PolicyStop,
    33: errors.EngineError,
    34: errors.StorageError,
    75: errors.Interrupted,
}
"""Class of the error that is raised, by the exit status of the command."""


def run(
    source: Any,
    *,
    output: str | Path | None = None,
    work: str | Path | None = None,
    quiet: bool = False,
    **options: Any,
) -> RunHandle:
    """Answer every row of a data set with a model on this machine. See docs/run.md.

    The call blocks until the command has ended. Log lines go to stderr; in a notebook and in a terminal there is a
    progress bar. After an interruption or a kill, the same call goes on where it was if `output` or `work` is given.

    Args:
        source: Path or URL, several of them, an Arrow table, a frame of pandas or polars, a `datasets.Dataset`, or an
            iterable of dictionaries.
        output: File or folder for the answers, as `-o` of `batchinfer run`. With None, none is written.
        work: Folder or URL for the job and the run. With None, it is a folder beside `output`. If `output` is None too,
            it is a temporary folder, which is removed when the result is not used any more.
        quiet: Show neither log lines nor a progress bar.
        options: Options of `batchinfer run` by their names, such as `model`, `max_tokens`, `temperature`, `limit`.

    Returns:
        The run, to read the answers from.

    Raises:
        errors.UsageError: An option, the source or the model is wrong.
        errors.PolicyStop: A rule stopped the run, such as `max_error_rate`.
        errors.EngineError: The engine failed.
        errors.StorageError: Storage failed.
        errors.Interrupted: A signal or a preemption notice ended it; the same call goes on.
    """
    from batchinfer.storage.opening import join_url, local_path, split_url

    with tempfile.TemporaryDirectory(prefix="batchinfer-") as scratch:
        folder = None
        if work is None and output is None:
            folder = tempfile.mkdtemp(prefix="batchinfer-run-")
            work = folder
        dest = output if output is not None else Path(scratch) / "answers.parquet"
        if str(dest) == "-":
            raise errors.ConfigError("output: '-' is for the command line", hint="give a path")
        arguments = ["--output", str(dest)]
        if work is not None:
            arguments += ["--work", str(work)]
        try:
            sources = _as_sources(source, Path(scratch))
            result = _call("run", sources, arguments, options, Path(scratch), quiet=quiet)
        except BaseException:
            if folder is not None:
                _remove(folder)
            raise
    is_partial = options.get("limit") is not None and result["status"] != "SUCCESS"
    there = str(result["work"])
    if split_url(there)[0] == "file":
        there = str(local_path(there).absolute())  # stays true when the program changes its folder
    found = RunHandle(join_url(there, "run"), result, is_partial=is_partial)
    if folder is not None:
        weakref.finalize(found, _remove, folder)
    return found


def split(source: Any, output: str | Path, **options: Any) -> dict[str, Any]:
    """Split a data set into a job at `output`, for any number of workers.

    Args:
        source: As in `run`.
        output: Folder or URL of the job.
        options: Options of `batchinfer split` by their names, such as `num_workers`, `chunk_rows`.

    Returns:
        The result of the command: `job`, `rows`, `chunks` and more.

    Raises:
        errors.UsageError: An option or the source is wrong, or another job is there.
        errors.StorageError: Storage failed.
    """
    with tempfile.TemporaryDirectory(prefix="batchinfer-") as scratch:
        sources = _as_sources(source, Path(scratch))
        return _call("split", sources, ["--output", str(output)], options, Path(scratch))


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
        """Name the run."""
        return f"batchinfer.open_run({self.url!r})"

    def status(self) -> dict[str, Any]:
        """Return the figures of `batchinfer status --json`: state, rows, rates, errors, workers."""
        import msgspec

        from batchinfer.core.clock import SystemClock
        from batchinfer.runs.status import StatusConfig, run_status
        from batchinfer.storage.opening import open_store

        seen = run_status(StatusConfig(run=self.url), open_store=open_store, clock=SystemClock())
        found: dict[str, Any] = msgspec.to_builtins(seen)
        return found

    def verify(self, *, deep: bool = False) -> dict[str, Any]:
        """Check that the run is complete and undamaged, and return the result of `batchinfer verify`.

        Args:
            deep: Read every output, not only its marker.

        Raises:
            errors.RunUnsound: The run is incomplete or damaged; the error's `result` says how.
        """
        from batchinfer.core.clock import SystemClock
        from batchinfer.runs.verify import VerifyConfig, run_verify
        from batchinfer.storage.opening import open_store

        verdict = run_verify(
            VerifyConfig(run=self.url, is_deep=deep), open_store=open_store, clock=SystemClock()
        )
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
        import pyarrow.parquet as pq

        with tempfile.TemporaryDirectory(prefix="batchinfer-") as folder:
            for path in self._collect(folder, with_source=with_source):
                for batch in pq.ParquetFile(path).iter_batches(batch_size=1024):
                    yield from batch.to_pylist()

    def to_arrow(self, *, with_source: bool = False) -> pa.Table:
        """Return the verified answers as one table, in input order; the columns are those of `batchinfer collect`.

        Args:
            with_source: Join the source's columns.

        Raises:
            errors.RunUnsound: The run is damaged, or is unfinished and not the result of `run` with `limit`.
        """
        import pyarrow as pa
        import pyarrow.parquet as pq

        with tempfile.TemporaryDirectory(prefix="batchinfer-") as folder:
            paths = self._collect(folder, with_source=with_source)
            return pa.concat_tables([pq.read_table(path, memory_map=False) for path in paths])

    def to_pandas(self, *, with_source: bool = False) -> pd.DataFrame:
        """As `to_arrow`, as a frame of pandas."""
        return self.to_arrow(with_source=with_source).to_pandas()

    def to_dataset(self, *, with_source: bool = False) -> datasets.Dataset:
        """As `to_arrow`, as a `datasets.Dataset`."""
        import datasets

        return datasets.Dataset(self.to_arrow(with_source=with_source))

    def _collect(self, folder: str, *, with_source: bool) -> list[Path]:
        """Write the answers to parquet files in a folder, and return their paths in order."""
        from batchinfer.collect.command import run_collect
        from batchinfer.collect.table import CollectConfig
        from batchinfer.core.clock import SystemClock
        from batchinfer.storage.opening import open_store

        config = CollectConfig(
            run=self.url,
            dest=f"{folder}/table",
            with_source=with_source,
            partial=self._is_partial,
        )
        run_collect(config, open_store=open_store, clock=SystemClock())
        return sorted((Path(folder) / "table").glob("part-*.parquet"))


# --------------------------------------------------------------------------- sources


def _as_sources(source: Any, folder: Path) -> list[str]:
    """Return the paths or URLs of a source. A source in memory is written to a file in `folder`.

    Raises:
        errors.InputError: The source, or an item of it, is of a kind that cannot be read.
    """
    paths = [source] if isinstance(source, str | Path) else source
    if isinstance(paths, list | tuple) and paths and isinstance(paths[0], str | Path):
        for part in paths:
            if not isinstance(part, str | Path) or str(part) == "-":
                raise errors.InputError(
                    f"source: {part!r:.80} is no path or URL", hint="give rows or paths, not both"
                )
            _refuse_prompt(str(part))
        return [str(part) for part in paths]
    path = folder / _TABLE
    package = type(source).__module__.partition(".")[0]
    if package == "pyarrow" and hasattr(source, "schema"):
        _write_table(source, path)
    elif package == "pandas" and hasattr(source, "columns"):
        import pyarrow as pa

        _write_table(pa.Table.from_pandas(source, preserve_index=False), path)
    elif package == "polars" and hasattr(type(source), "columns"):
        frame = source.collect() if hasattr(source, "collect") else source
        _write_table(frame.to_arrow(), path)
    elif package == "datasets" and hasattr(source, "to_parquet"):
        source.to_parquet(str(path))
    elif package == "datasets":
        raise errors.InputError(
            f"source: is a {type(source).__name__} with the splits {', '.join(map(str, source))}",
            hint="give one of its splits",
        )
    elif isinstance(source, Iterable) and not isinstance(source, Mapping | bytes):
        path = folder / _LINES
        _write_rows(source, path)
    else:
        raise errors.InputError(
            f"source: is a {type(source).__name__}, expected a path, a table, a frame or an iterable of dictionaries"
        )
    return [str(path)]


def _refuse_prompt(path: str) -> None:
    """Raise InputError for a text that has spaces and names nothing on this machine: it may be a prompt."""
    if " " not in path or "://" in path:
        return
    path = str(Path(path).expanduser())
    try:
        found = glob.iglob(path, recursive=True)  # noqa: PTH207 - the pattern may be absolute
        is_there = Path(path).exists() or any(found)
    except OSError:  # the text is longer than a path may be
        is_there = False
    if not is_there:
        raise errors.InputError(
            f"source: no file, folder or pattern {path!r:.80}",
            hint="check the spelling; prompts are rows: [{'prompt': '…'}, {'prompt': '…'}]",
        )


def _write_table(table: Any, path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    if isinstance(table, pa.RecordBatchReader):
        with pq.ParquetWriter(path, table.schema) as writer:
            for batch in table:
                writer.write_batch(batch)
        return
    pq.write_table(pa.table(table) if isinstance(table, pa.RecordBatch) else table, path)


def _write_rows(rows: Iterable[Any], path: Path) -> None:
    from batchinfer.core import codec

    with path.open("wb") as file:
        for index, row in enumerate(rows):
            if not isinstance(row, Mapping):
                raise errors.InputError(
                    f"source: item {index} is a {type(row).__name__}, expected a dictionary",
                    hint="give rows as {'prompt': '…'}",
                )
            try:
                file.write(codec.encode(dict(row)) + b"\n")
            except (TypeError, ValueError) as error:
                raise errors.InputError(
                    f"source: item {index} has a value that JSON cannot hold ({error})",
                    hint="give numbers, texts, lists and dictionaries; .item() or .tolist() turns numpy's into these",
                ) from error


# --------------------------------------------------------------------------- running a command


def _call(
    name: str,
    sources: Sequence[str],
    arguments: Sequence[str],
    options: Mapping[str, Any],
    folder: Path,
    *,
    quiet: bool = False,
) -> dict[str, Any]:
    """Run a command as a process, with its log and a progress bar on stderr, and return its result."""
    from batchinfer.worker.progress import MARKED_LINES, is_shown_to_people

    _check_names(name, options)
    has_bar = not quiet and is_shown_to_people(sys.stderr)
    settings = folder / "options.yaml"
    settings.write_text(_as_settings(name, options), encoding="utf-8")
    lines: deque[str] = deque(maxlen=_LINES_KEPT)
    with subprocess.Popen(
        [
            sys.executable,
            "-c",
            _CHILD,
            str(os.getpid()),
            name,
            *arguments,
            "--config",
            settings,
            "--",
            *sources,
        ],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        errors="replace",
        env=_variables(name) | ({MARKED_LINES: "1"} if has_bar else {}),
    ) as process:
        forwarding = threading.Thread(
            target=_forward, args=(process, lines, settings, quiet), daemon=True
        )
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
        _fail(status, list(lines), result, folder)
    return dict(result)


def _check_names(name: str, options: Mapping[str, Any]) -> None:
    import click

    from batchinfer.cli.main import group

    command = group.get_command(click.Context(group), name)
    assert command is not None
    known = {parameter.name for parameter in command.params if parameter.name}
    known |= {
        max(parameter.opts, key=len).lstrip("-").replace("-", "_") for parameter in command.params
    }
    known -= {
        "sources",
        "dest",
        "output",
        "work",
        "config",
        "config_file",
    }  # the function itself gives these
    for option in options:
        if option not in known:
            raise errors.ConfigError(
                f"{name}(): has no option {option!r}{errors.near(option, known)}",
                hint=f"see batchinfer {name} --help",
            )


def _as_settings(name: str, options: Mapping[str, Any]) -> str:
    """Return options as the text of a settings file. Scalars of numpy become plain values.

    Raises:
        ConfigError: A settings file cannot hold a value.
    """

    def plain(value: Any) -> Any:
        if isinstance(value, Path):
            return str(value)
        if hasattr(value, "dtype") and hasattr(value, "item"):
            return value.item()
        raise TypeError

    for option, value in options.items():
        try:
            json.dumps(value, default=plain)
        except (TypeError, ValueError):
            raise errors.ConfigError(
                f"{name}(): {option} is a {type(value).__name__}, expected a number, a text, a list or a dictionary",
                hint=f"see batchinfer {name} --help",
            ) from None
    return json.dumps(dict(options), default=plain)


def _variables(name: str) -> dict[str, str]:
    """Return the environment of the command, without the variables that set its options."""
    prefix = f"BATCHINFER_{name.upper()}_"
    return {key: value for key, value in os.environ.items() if not key.startswith(prefix)}


def _forward(
    process: subprocess.Popen[str], lines: deque[str], settings: Path, quiet: bool
) -> None:
    """Copy a process's stderr to ours, which may be a cell of a notebook, and keep the last lines.

    A hint that names `settings` is left out: the caller gave the values of that file as arguments.
    """
    from batchinfer.cli.terminal import say
    from batchinfer.worker.progress import BarOfLines

    assert process.stderr is not None
    bar = BarOfLines()
    for line in (text.rstrip("\n") for text in process.stderr):
        is_of_settings = line.startswith("hint: ") and str(settings) in line
        if bar.take(line) or is_of_settings:
            continue
        lines.append(line)
        if not quiet:
            say(line)
    bar.close()


def _fail(status: int, lines: list[str], result: dict[str, Any], folder: Path) -> NoReturn:
    """Raise the error that a command has printed. The file in `folder` that holds a source is called "source"."""
    found = {"error": "", "hint": ""}
    part = ""
    for line in lines:
        head, colon, rest = line.partition(": ")
        if colon and head.lower() in found:  # "Error: " is click's
            part = head.lower()
            found[part] = rest
        elif part and line.startswith("  "):  # `say` has indented the further lines of a message
            found[part] += "\n" + line
        else:
            part = ""
    message = found["error"] or (lines[-1] if lines else f"ended with exit status {status}")
    for name in (_TABLE, _LINES):
        message = message.replace(str(folder / name), "source")
    error = _ERRORS.get(status, errors.BatchinferError)(message, hint=found["hint"])
    error.attach_result(result)
    raise error


def _remove(folder: str) -> None:
    import shutil

    shutil.rmtree(folder, ignore_errors=True)
