"""An OpenAI batch file with bad lines in it, given to vLLM's own run_batch and to batchinfer.

    python benchmarks/compare_run_batch.py                    # 2000 requests, about five minutes on two cores
    python benchmarks/compare_run_batch.py --only batchinfer --rows 400

Five runs with the committed demo model, on whatever device vLLM finds:

* run_batch with the file as it is;
* run_batch with the chat requests and the bad lines, since text completions are none of its endpoints;
* run_batch with the chat requests alone, none of them bad, killed with SIGKILL while it generates;
* batchinfer with the file as it is, killed with SIGKILL in the middle;
* the same batchinfer command again.

Prints each command with what came out, and one JSON object as the last line. Exit status 1: a request of batchinfer's
has no line, or more than one, or a wrong one.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness import ROOT, environment

sys.path.insert(0, str(ROOT / "scripts"))

from demo_data import Example, draw_examples, expected_answer

from batchinfer.core import layout
from batchinfer.core.errors import ObjectNotFound
from batchinfer.ledger.survey import newest_markers
from batchinfer.storage.opening import open_store

MODEL = "examples/demo-model"
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
BAD_ONE_IN = 40
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "item": {"type": "string", "maxLength": 20},
        "quantity": {"type": "integer", "minimum": 0, "maximum": 99},
        "order": {"type": "integer", "minimum": 0, "maximum": 999},
    },
    "required": ["name", "item", "quantity", "order"],
    "additionalProperties": False,
}
SIGKILLED = -signal.SIGKILL
KILL_SECONDS = 4.0
"""How long run_batch may generate before it is killed."""


# --------------------------------------------------------------------------- the file


def request(index: int, example: Example) -> dict[str, Any]:
    """Return a good request; eight kinds in turn, each with its own parameters."""
    user = {"role": "user", "content": example.prompt}
    chat: dict[str, Any] = {"model": MODEL, "messages": [user], "temperature": 0}
    if example.task == "extract":
        chat["response_format"] = {
            "type": "json_schema",
            "json_schema": {"name": "order", "schema": SCHEMA},
        }
    text = {"model": MODEL, "prompt": example.prompt, "max_tokens": 8}
    kinds: list[tuple[str, dict[str, Any]]] = [
        (CHAT, {**chat, "max_completion_tokens": 64}),
        (CHAT, {**chat, "max_tokens": 48, "logprobs": True, "top_logprobs": 2}),
        (CHAT, {**chat, "messages": [{"role": "system", "content": "Be short."}, user]}),
        (CHAT, {**chat, "temperature": 0.7, "seed": index, "n": 2, "max_tokens": 32}),
        (COMPLETIONS, {**text, "temperature": 1.0, "top_p": 0.9, "seed": index}),
        (CHAT, {**chat, "max_tokens": 64, "stop": ["\n"]}),
        (COMPLETIONS, {**text, "temperature": 0, "logprobs": 1, "echo": True}),
        (COMPLETIONS, {**text, "n": 2, "best_of": 3, "seed": index, "stop": ["."]}),
    ]
    url, body = kinds[index % len(kinds)]
    return {"custom_id": f"request-{index}", "method": "POST", "url": url, "body": body}


def bad_line(index: int) -> tuple[str, str]:
    """Return a line that has no answer, and batchinfer's error code for it; eleven kinds in turn."""
    messages = [{"role": "user", "content": "What is 2 plus 7?"}]
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nothing"}}}
    frames: list[tuple[dict[str, Any], str]] = [
        ({"url": "/v1/chat/complete"}, "unknown_url"),
        ({"url": "/v1/embeddings", "body": {"input": "x"}}, "unknown_url"),
        ({"body": ["not", "an", "object"]}, "invalid_request"),
        ({"body": {"messages": messages, "temperature": -1}}, "invalid_parameter"),
        ({"body": {"messages": messages, "tools": [{}]}}, "invalid_parameter"),
        ({"body": {"messages": []}}, "invalid_request"),
        ({"body": {"messages": [{"role": "user", "content": "word " * 9000}]}}, "prompt_too_long"),
        ({"body": {"messages": messages, "response_format": schema}}, "invalid_request"),
        ({"body": {"messages": messages, "top_p": 3}}, "invalid_parameter"),
        ({"url": COMPLETIONS, "body": {"prompt": [999999]}}, "invalid_request"),
    ]
    kind = index // BAD_ONE_IN % (len(frames) + 1)
    if kind == len(frames):
        return '{"custom_id": "cut off, "method"', "invalid_json"
    fields, code = frames[kind]
    frame = {"custom_id": f"request-{index}", "method": "POST", "url": CHAT, "body": {}}
    return json.dumps({**frame, **fields}), code


def write_requests(path: Path, num_rows: int) -> list[str]:
    """Write the batch file; returns each line's expected code, empty for a good one."""
    codes = []
    with path.open("w", encoding="utf-8") as file:
        for index, example in enumerate(draw_examples(num_rows, seed=5, held_out=True)):
            line, code = json.dumps(request(index, example)), ""
            if index % BAD_ONE_IN == BAD_ONE_IN // 4:
                line, code = bad_line(index)
            file.write(line + "\n")
            codes.append(code)
    return codes


# --------------------------------------------------------------------------- running commands


def show(command: list[str]) -> None:
    """Print a command as one would type it."""
    shown = ["python" if part == sys.executable else part for part in command]
    print("\n$", shlex.join(shown), flush=True)


def run(
    command: list[str], log: Path, kill_when: Callable[[], bool] | None = None
) -> tuple[int, float]:
    """Run a command in a session of its own, perhaps killing it; returns its exit status and seconds."""
    show(command)
    began = time.monotonic()
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=file, stderr=file, start_new_session=True,
            env=environment(VLLM_LOGGING_LEVEL=os.environ.get("VLLM_LOGGING_LEVEL", "INFO")),
        )  # fmt: skip
        try:
            while process.poll() is None:
                if kill_when is not None and kill_when():
                    process.kill()
                    process.wait()
                    break
                time.sleep(0.1)
        finally:
            # run_batch's engine processes outlive it.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    seconds = time.monotonic() - began
    status = process.returncode
    how = "killed (SIGKILL)" if status == SIGKILLED else f"exit status {status}"
    print(f"{how} after {seconds:.1f} s")
    return status, seconds


def num_lines(path: Path) -> int | None:
    """Return the number of lines of a file, None if there is no such file."""
    return len(path.read_bytes().splitlines()) if path.exists() else None


# --------------------------------------------------------------------------- run_batch


ENGINE = (
    "--max-model-len", "256", "--max-num-seqs", "16", "--kv-cache-memory-bytes", "67108864", "--block-size", "32",
    "--no-enable-chunked-prefill", "--max-num-batched-tokens", "2048", "--enforce-eager",
    "--structured-outputs-config", '{"backend": "xgrammar"}',
)  # fmt: skip
"""Options of one small engine, the same for both: batchinfer hands on those of vLLM."""


def run_batch(requests: Path, work: Path, name: str, *, kill: bool = False) -> dict[str, Any]:
    """Run vLLM's own tool over a file."""
    output, log = work / f"{name}.jsonl", work / f"{name}.log"
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.run_batch", "-i", str(requests), "-o", str(output),
        "--model", MODEL, *ENGINE,
    ]  # fmt: skip

    began: list[float] = []

    def is_under_way() -> bool:
        # The progress bar of run_batch shows 0 until all is done, so only its first appearance tells something.
        if not began and b"Running batch" in log.read_bytes():
            began.append(time.monotonic())
        return bool(began) and time.monotonic() - began[0] >= KILL_SECONDS

    status, seconds = run(command, log, is_under_way if kill else None)
    words = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    first = next((index for index, line in enumerate(words) if "validation error" in line), None)
    reason = words[first : first + 3] if first is not None else words[-3:]
    result = {
        "exit_status": status,
        "seconds": round(seconds, 1),
        "output_lines": num_lines(output),
        "reason": reason[0].strip()[:300] if status not in (0, SIGKILLED) else "",
    }
    written = result["output_lines"]
    print("output:", "no file" if written is None else f"{written} lines")
    if result["reason"]:
        print("\n".join(line[:110] for line in reason))
    return result


# --------------------------------------------------------------------------- batchinfer


def batchinfer(requests: Path, work: Path, num_rows: int) -> dict[str, Any]:
    """Split the file, run a worker, kill it in the middle, run it again."""
    job, out = work / "job", work / "job/runs/default"
    module = [sys.executable, "-m", "batchinfer"]
    chunk_rows = max(20, num_rows // 4)
    shape = ["--num-chunks", str(-(-num_rows // chunk_rows))]
    run([*module, "split", str(requests), "--output", str(job), *shape], work / "split.log")
    split = json.loads((work / "split.log").read_text().splitlines()[-1])
    print("rows:", split["rows"], " custom_ids given twice:", split.get("duplicate_ids", 0))
    worker = [
        *module, "worker", "--job", str(job), "--model", MODEL, "--request-format", "openai-batch",
        "--checkpoint-seconds", "1", "--worker-id", "w0", *ENGINE,
    ]  # fmt: skip
    store = open_store(str(out))

    def num_kept() -> int:
        published = newest_markers(store)
        segments = [
            info.key for info in store.list(layout.CHECKPOINTS)
            if info.key.split("/")[1] not in published
        ]  # fmt: skip
        kept = 0
        for key in segments:
            with contextlib.suppress(ObjectNotFound):  # its chunk was published meanwhile
                kept += store.get(key).data.count(b"\n") - 1  # its first line is the chunk's sha256
        return kept + len(published) * chunk_rows

    status, seconds = run(worker, work / "first.log", lambda: num_kept() >= num_rows * 5 // 8)
    kept = num_kept()
    print(f"kept on storage: {kept} of {num_rows} rows")
    again_status, again_seconds = run(worker, work / "second.log")
    last = (work / "second.log").read_text().strip().splitlines()[-1]
    print(last)
    return {
        "first": {"exit_status": status, "seconds": round(seconds, 1), "rows_kept": kept},
        "second": {"exit_status": again_status, "seconds": round(again_seconds, 1), "result": json.loads(last)},
    }  # fmt: skip


def output_lines(out: Path) -> list[dict[str, Any]]:
    """Return every line that a marker vouches for, in order."""
    store = open_store(str(out))
    found: list[dict[str, Any]] = []
    for name, generation in sorted(newest_markers(store).items()):
        marker = json.loads(store.get(layout.marker_key(name, generation)).data)
        data = store.get(layout.output_key(marker["output"])).data
        found += map(json.loads, data.split(b"\n")[:-1])
    return found


def check(requests: Path, codes: list[str], found: list[dict[str, Any]]) -> dict[str, Any]:
    """Compare the output with the file, line by line."""
    lines = requests.read_text(encoding="utf-8").split("\n")[:-1]
    problems: list[str] = []
    statuses: collections.Counter[str] = collections.Counter()
    right = asked = 0
    if len(found) != len(lines):
        problems.append(f"{len(found)} output lines for {len(lines)} requests")
    for index, (line, code, answer) in enumerate(zip(lines, codes, found, strict=False)):
        statuses["answers" if answer["status"] == 200 else "errors"] += 1
        body = answer.get("body") or {}
        if answer.get("error", {}).get("code", "") != code:
            problems.append(f"line {index}: {str(answer)[:200]}, expected {code or 'an answer'}")
        if code:
            continue
        given = json.loads(line)
        if answer["_id"] != given["custom_id"]:
            problems.append(f"line {index}: {answer['_id']} instead of {given['custom_id']}")
        if given["url"] == CHAT and given["body"]["temperature"] == 0 and "choices" in body:
            text = body["choices"][0]["message"]["content"]
            asked += 1
            right += text.strip() == expected_answer(given["body"]["messages"][-1]["content"])
    return {
        "requests": len(lines),
        "answers": statuses["answers"],
        "errors": statuses["errors"],
        "greedy_chats": asked,
        "greedy_chats_right": right,
        "problems": problems[:20],
    }


def main() -> int:
    """Do all of it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--only", choices=["run_batch", "batchinfer"])
    parser.add_argument("--work-dir", type=Path, help="default: a temporary folder, removed")
    options = parser.parse_args()
    work = options.work_dir or Path(tempfile.mkdtemp(prefix="compare-"))
    work.mkdir(parents=True, exist_ok=True)
    result: dict[str, Any] = {}
    try:
        requests = work / "requests.jsonl"
        codes = write_requests(requests, options.rows)
        print(f"{options.rows} requests, {sum(map(bool, codes))} of them bad: {requests}")
        if options.only != "batchinfer":
            result["run_batch"] = run_batch(requests, work, "output")
            lines = requests.read_text(encoding="utf-8").splitlines(keepends=True)
            pairs = list(zip(lines, codes, strict=True))
            chats = [pair for pair in pairs if pair[1] or f'"{CHAT}"' in pair[0]]
            for name, chosen in (
                ("chats", chats),
                ("good-chats", [pair for pair in chats if not pair[1]]),
            ):
                path = work / f"{name}.jsonl"
                path.write_text("".join(line for line, _ in chosen), encoding="utf-8")
                done = run_batch(path, work, f"output-{name}", kill=name == "good-chats")
                result[f"run_batch_{name}"] = done
        if options.only != "run_batch":
            result["batchinfer"] = batchinfer(requests, work, options.rows)
            result["check"] = check(requests, codes, output_lines(work / "job/runs/default"))
            print(result["check"])
    finally:
        if options.work_dir is None:
            shutil.rmtree(work, ignore_errors=True)
    print(json.dumps(result))
    return 1 if result.get("check", {}).get("problems") else 0


if __name__ == "__main__":
    sys.exit(main())
