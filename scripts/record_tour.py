"""Record the tour in docs/tour/: a real run in a real shell, one worker killed, as text, SVG and screenshots.

A bash on a pseudo terminal is given the commands that a user would type, a second one shows
`batchinfer status --watch` meanwhile, and what both print is kept as it came::

    python scripts/record_tour.py [--rows 20000] [--engine vllm] [--output docs/tour]

Nothing is made up: the session fails when a command does, and the recording is refused if it
holds a path of this machine. Needs bash and, for the screenshots, Playwright and a Chromium.
Exit status: 0 recorded; 1 the run went otherwise than the tour tells.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import pty
import re
import shutil
import signal
import struct
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from demo_data import write_dataset

REPOSITORY = Path(__file__).resolve().parent.parent
FOLDER = Path("/tmp/tour")
WIDTH, HEIGHT = 120, 50
PROMPT = "\x1c"
"""Marks a prompt in what bash prints; the reader of the recording sees a dollar sign."""
REDRAW = re.compile(r"\r?(?:\x1b\[2K|\x1b\[1?A){2,}")
"""How rich.live goes back to the first line of what it showed last."""
OVERWRITTEN = re.compile(r"[^\n]*\r(?!\r*\n)")
"""What a progress bar showed before it went back to the beginning of its line."""
NOT_STYLE = re.compile(r"\x1b\[(?![\d;]*m)[?\d;]*[A-Za-z]|\r")
STYLE = re.compile(r"\x1b\[[\d;]*m")
STATES = "loading|running|waiting|stalled|gone|done|stopped|failed"
WAIT_SECONDS = 600.0
SETTLE_SECONDS = 0.3
NUM_SAMPLES_SHOWN = 2
PRICE = "--price-per-hour 0.05"

SETTINGS = """\
output: job/runs/tour
model: demo-model
messages-column: conversation
turns: first
max-tokens: 64
temperature: 0
max-model-len: 256
max-num-seqs: 4        # few, so that this small run takes minutes
checkpoint-seconds: 5
lease-seconds: 30
"""
SHOW = """\
import pyarrow.parquet as pq
table = pq.read_table("answers", columns=["row", "conversation", "text", "completion_tokens", "error_code"])
for row in table.slice(length=3).to_pylist():
    row["conversation"] = row["conversation"][0]["content"]
    print(row)
"""


class TourFailed(Exception):
    """The run went otherwise than the tour tells."""


class Shell:
    """A bash on a pseudo terminal of its own; a thread keeps what it prints."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self._seen = ""
        self._begin = 0
        self._lock = threading.Lock()
        self.pid, self._file = pty.fork()
        if self.pid == 0:
            os.chdir(folder)
            os.execvpe("bash", ["bash", "--norc", "--noprofile", "--noediting", "-i"], environment)
        fcntl.ioctl(self._file, termios.TIOCSWINSZ, struct.pack("HHHH", HEIGHT, WIDTH, 0, 0))
        threading.Thread(target=self._read, daemon=True).start()
        wait_until(lambda: PROMPT in self.seen(), 10, "a shell")

    def _read(self) -> None:
        data = b""
        while True:
            try:
                data += os.read(self._file, 65536)
            except OSError:
                return
            with self._lock:
                self._seen = data.decode(errors="replace")

    def seen(self) -> str:
        """Everything that was printed so far."""
        with self._lock:
            return self._seen

    def start(self, command: str) -> int:
        """Type a command; return where in `seen` it begins."""
        begin = self._begin = len(self.seen())
        os.write(self._file, f"{command}\n".encode())
        return begin

    def run(self, command: str, timeout_seconds: float = WAIT_SECONDS) -> str:
        """Type a command, wait for the next prompt; return what was printed, without the command."""
        begin = self.start(command)
        wait_until(lambda: PROMPT in self.seen()[begin:], timeout_seconds, command)
        time.sleep(SETTLE_SECONDS)
        printed = self.seen()[begin:].partition("\n")[2]
        return printed.replace(PROMPT, "").removesuffix("$ ")

    def frame(self) -> str:
        """What a command that redraws its lines shows now."""
        shown = self.seen()[self._begin :].partition("\n")[2]
        return REDRAW.split(shown)[-1].replace(f"{PROMPT}$ ", "")

    def close(self) -> None:
        """Hang up, as closing a terminal's window does: bash ends its jobs."""
        os.kill(self.pid, signal.SIGHUP)
        os.waitpid(self.pid, 0)
        os.close(self._file)


@dataclass
class Recording:
    """What is shown, in order, with the terminal's styles in it."""

    parts: list[str] = field(default_factory=list)
    begin: float = field(default_factory=time.monotonic)

    def say(self, text: str) -> None:
        """Add a remark of the tour's own."""
        print(f"tour: {text}", file=sys.stderr)
        self.parts.append(f"\x1b[2m# {text}\x1b[0m\n")

    def run(self, shell: Shell, command: str) -> str:
        """Run a command in the shell and record both."""
        print(f"$ {command}", file=sys.stderr)
        printed = shell.run(command)
        print(printed, file=sys.stderr)
        self.parts.append(f"\x1b[1;32m$\x1b[0m \x1b[1m{command}\x1b[0m\n{printed.rstrip()}\n\n")
        return printed

    def show(self, frame: str) -> None:
        """Record what the second terminal shows."""
        seconds = int(time.monotonic() - self.begin)
        self.say(f"the second terminal, {seconds // 60}:{seconds % 60:02} after the start")
        print(frame, file=sys.stderr)
        self.parts.append(frame.strip("\n") + "\n\n")

    def text(self) -> str:
        """Everything, without the controls that are no styles, and without blanks at the ends of lines."""
        whole = NOT_STYLE.sub("", OVERWRITTEN.sub("", "".join(self.parts)))
        return "\n".join(line.rstrip() for line in whole.split("\n")).rstrip() + "\n"


def wait_until(condition: Callable[[], bool], timeout_seconds: float, what: str) -> None:
    """Poll until a condition holds.

    Raises:
        TourFailed: It did not in time.
    """
    deadline = time.monotonic() + timeout_seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TourFailed(f"waited {timeout_seconds:.0f} s for {what}")
        time.sleep(0.1)


def prepare(folder: Path, *, rows: int, engine: str) -> dict[str, str]:
    """Lay out the data, the model and the settings; return the environment of the shells."""
    write_dataset(folder / "data", num_rows=rows)
    add_bad_rows(folder / "data")
    shutil.copytree(REPOSITORY / "examples" / "demo-model", folder / "demo-model")
    extra = (
        ""
        if engine == "vllm"
        else f"engine: {engine}\necho-load-seconds: 4\necho-latency-seconds: 0.05\n"
    )
    (folder / "tour.yaml").write_text(SETTINGS + extra)
    (folder / "show.py").write_text(SHOW)
    commands = folder / ".bin"
    commands.mkdir()
    for name, arguments in (("batchinfer", "-m batchinfer"), ("python", "")):
        path = commands / name
        path.write_text(f'#!/bin/sh\nexec "{sys.executable}" {arguments} "$@"\n')
        path.chmod(0o755)
    return dict(os.environ) | {
        "PATH": f"{commands}:{os.environ['PATH']}",
        "PS1": f"{PROMPT}$ ",
        "TERM": "xterm-256color",
        "LC_ALL": "C.UTF-8",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }


def add_bad_rows(folder: Path) -> None:
    """Add a file with three rows that cannot be answered: too long, no turn, a turn of nobody."""
    import pyarrow.parquet as pq

    last = max(folder.glob("*.parquet"))
    table = pq.read_table(last)
    rows = table.slice(length=3).to_pylist()
    rows[0]["conversation"][0]["content"] = "Add 1 and 1. " * 500
    rows[1]["conversation"] = []
    rows[2]["conversation"][0]["role"] = "narrator"
    pq.write_table(type(table).from_pylist(rows, schema=table.schema), folder / "unusual.parquet")


def state_of(frame: str, worker: str) -> str:
    """State of a worker in a frame of `status`; empty if it is not there."""
    shown = STYLE.sub("", NOT_STYLE.sub("", frame))
    found = re.search(rf"^ *{worker} .*?\b({STATES})\b", shown, re.MULTILINE)
    return found[1] if found else ""


def percent_of(frame: str) -> float:
    """Share of rows that are done in a frame of `status`."""
    found = re.search(r"([\d.]+) ?%", STYLE.sub("", frame))
    return float(found[1]) if found else 0.0


def worker_command(name: str, index: int) -> str:
    """What starts a worker."""
    manifest = f"job/manifests/worker-{index:05}.txt"
    worker = f"batchinfer worker --config tour.yaml --manifest {manifest} --worker-id {name}"
    return f"{worker} > {name}.json 2>> {name}.log &"


def pid_of(printed: str) -> int:
    """Process id in bash's line about a job in the background."""
    found = re.search(r"\[\d+\] (\d+)", printed)
    if found is None:
        raise TourFailed(f"no process id in {printed!r}")
    return int(found[1])


def play(shell: Shell, second: Shell, recording: Recording) -> None:
    """Play the whole tour."""
    recording.run(shell, "ls data")
    recording.run(shell, "cat tour.yaml")
    recording.run(shell, "batchinfer split data --output job --num-chunks 40 --num-workers 2")
    recording.say("two workers, here as two processes; on a cluster, as two machines")
    victim = pid_of(recording.run(shell, worker_command("w0", 0)))
    recording.run(shell, worker_command("w1", 1))

    def watched(what: str, is_it: Callable[[str], bool]) -> None:
        wait_until(lambda: is_it(second.frame()), WAIT_SECONDS, what)
        time.sleep(SETTLE_SECONDS)
        recording.show(second.frame())

    watch = f"batchinfer status job/runs/tour --watch --refresh-seconds 2 {PRICE}"
    wait_until(
        lambda: "ok" in shell.run("test -e job/runs/tour/workers/w1.json && echo ok"), 60, "w1"
    )
    recording.say("in a second terminal, on any machine that sees the bucket:")
    recording.parts.append(f"\x1b[1;32m$\x1b[0m \x1b[1m{watch}\x1b[0m\n")
    second.start(watch)
    watched("both workers to load", lambda frame: state_of(frame, "w1") == "loading")
    watched("a quarter of the rows", lambda frame: percent_of(frame) >= 25)
    recording.say("back in the first: the machine of w0 is gone, without a word")
    recording.run(shell, f"kill -9 {victim}")
    watched("w0 to be gone", lambda frame: state_of(frame, "w0") == "gone")
    recording.say("the same command, on the machine that came in its place")
    recording.run(shell, worker_command("w0", 0))
    watched("w0 to run again", lambda frame: state_of(frame, "w0") == "running")
    watched("the end", lambda frame: '"state":"done"' in frame)
    recording.run(shell, "wait; tail -qn 1 w0.log w1.log")
    recording.say("what the checkpoints saved")
    recording.run(shell, "grep -hE 'was killed|taken over|[1-9][0-9]* resumed$' w0.log w1.log")
    recording.say("nothing lost, nothing doubled, nothing in another's place; every byte read")
    recording.run(shell, "batchinfer verify job/runs/tour --deep")
    recording.run(shell, f"batchinfer report job/runs/tour -o report.html {PRICE}")
    recording.run(shell, "batchinfer collect job/runs/tour answers --with-source")
    recording.run(shell, "ls answers")
    recording.run(shell, "python show.py")


def check(text: str) -> None:
    """Refuse a recording that tells of this machine, or of a failure.

    Raises:
        TourFailed: It does.
    """
    for name in {str(REPOSITORY), str(Path.home()), sys.prefix, os.uname().nodename}:
        if name in text:
            at = text.index(name)
            raise TourFailed(f"the recording holds {name!r}: {text[max(at - 200, 0) : at + 200]}")
    for word in ("Traceback", "error: "):
        if word in text:
            raise TourFailed(f"the recording holds {word!r}")


def draw(text: str) -> str:
    """Draw the recording as a terminal's window: SVG that asks for nothing from elsewhere."""
    from rich._export_format import CONSOLE_SVG_FORMAT
    from rich.console import Console
    from rich.text import Text

    with Path(os.devnull).open("w") as nowhere:
        console = Console(
            record=True, width=WIDTH, file=nowhere, force_terminal=True, color_system="truecolor"
        )
        console.print(Text.from_ansi(text), soft_wrap=False)
    # The format fetches its font; every system has a monospaced one, and the widths are set.
    plain = re.sub(r"\s*@font-face \{\{.*?\}\}", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
    plain = plain.replace("Fira Code", "ui-monospace, Menlo, Consolas, DejaVu Sans Mono")
    return console.export_svg(title="batchinfer", code_format=plain, unique_id="tour")


def take_screenshots(page: Path, output: Path) -> None:
    """Photograph the report as a desktop and a phone show it, light and dark."""
    from playwright.sync_api import sync_playwright

    path = shutil.which("chromium") or shutil.which("google-chrome")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=path, args=["--no-sandbox", "--disable-gpu"]
        )
        for device, width in (("desktop", 1200), ("phone", 390)):
            for scheme in ("light", "dark"):
                context = browser.new_context(
                    viewport={"width": width, "height": 900}, color_scheme=scheme
                )
                view = context.new_page()
                view.goto(page.as_uri())
                # The rest of the page are more rows and the settings.
                samples = view.locator(".sample").nth(NUM_SAMPLES_SHOWN).bounding_box()
                height = samples["y"] if samples else 3000
                view.screenshot(
                    path=output / f"report-{device}-{scheme}.png",
                    full_page=True,
                    clip={"x": 0, "y": 0, "width": width, "height": height},
                )
                context.close()
        browser.close()


@contextmanager
def shells(folder: Path, environment: dict[str, str]) -> Iterator[tuple[Shell, Shell]]:
    """Two terminals; both are hung up at the end."""
    opened: list[Shell] = []
    try:
        for _ in range(2):
            opened.append(Shell(folder, environment))  # noqa: PERF401 - the first, should the second fail
        yield opened[0], opened[1]
    finally:
        for shell in opened:
            shell.close()


@contextmanager
def work_folder() -> Iterator[Path]:
    """Make the folder in which everything happens, and remove it at the end.

    Its name is fixed, so that the paths that commands print tell nothing of a machine.

    Raises:
        FileExistsError: It is there already.
    """
    FOLDER.mkdir()
    try:
        yield FOLDER
    finally:
        shutil.rmtree(FOLDER)


def main() -> int:
    """Record the tour."""
    parser = argparse.ArgumentParser(description="Record the tour in docs/tour/.")
    parser.add_argument("--rows", type=int, default=16000)
    parser.add_argument("--engine", choices=["vllm", "echo"], default="vllm")
    parser.add_argument("--output", type=Path, default=REPOSITORY / "docs" / "tour")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    with work_folder() as folder:
        try:
            environment = prepare(folder, rows=options.rows, engine=options.engine)
            recording = Recording()
            with shells(folder, environment) as (shell, second):
                play(shell, second, recording)
            text = recording.text()
            check(text + (folder / "report.html").read_text())
        except TourFailed as error:
            for log in folder.glob("*.log"):
                print(f"--- {log.name}\n{log.read_text()[-2000:]}", file=sys.stderr)
            print(f"tour: FAILED: {error}", file=sys.stderr)
            return 1
        (options.output / "tour.txt").write_text(STYLE.sub("", text))
        (options.output / "tour.svg").write_text(draw(text))
        take_screenshots(folder / "report.html", options.output)
        shutil.copy(folder / "report.html", options.output / "report.html")
    return 0


if __name__ == "__main__":
    # SIGTERM ends the tour like Ctrl-C does, so that its workers and its folder go with it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    raise SystemExit(main())
