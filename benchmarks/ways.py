"""One plain way to use vLLM, timed without its loading; `throughput.py` runs each way in a process of its own.

    python benchmarks/ways.py WAY REQUESTS.jsonl MODEL ENGINE_ARGUMENTS_JSON

WAY is generate (one `LLM.generate` over all requests), chunks (one for each 200 requests) or run_batch (vLLM's own
batch runner, whose engine has processes of its own). The last line is one JSON object.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

ROWS_PER_CHUNK = 200


def main() -> None:
    """Load, run, report."""
    way, path, model, arguments = sys.argv[1:]
    if way == "run_batch":
        run_batch(Path(path), model, json.loads(arguments))
        return
    requests = [json.loads(line) for line in Path(path).read_bytes().splitlines()]
    begin = time.monotonic()
    from vllm import LLM, SamplingParams

    llm = LLM(model=model, **json.loads(arguments))
    load_seconds = time.monotonic() - begin
    steps = count_steps(llm.llm_engine)
    prompts = [each.pop("prompt") for each in requests]
    params = [SamplingParams(**each) for each in requests]
    size = len(prompts) if way == "generate" else ROWS_PER_CHUNK
    cpu, begin = time.process_time(), time.monotonic()
    for start in range(0, len(prompts), size):
        part = slice(start, start + size)
        llm.generate(prompts[part], params[part], use_tqdm=False)
    report(time.monotonic() - begin, load_seconds, len(prompts), len(steps), cpu)


def report(wall: float, load: float, requests: int, steps: int, cpu_before: float) -> None:
    """Print the figures of a way."""
    result = {
        "load_seconds": load,
        "wall_seconds": wall,
        "cpu_seconds": time.process_time() - cpu_before,
        "steps": steps,
        "requests": requests,
    }
    print(json.dumps(result), flush=True)


def count_steps(engine: Any) -> list[None]:
    """Return a list that grows by one with every step."""
    steps: list[None] = []
    step = engine.step

    def counted() -> Any:
        steps.append(None)
        return step()

    engine.step = counted
    return steps


def run_batch(path: Path, model: str, engine: dict[str, Any]) -> None:
    """Run vLLM's own batch runner. Time counts once the engine is loaded."""
    from vllm.entrypoints.launchers import run_batch as runner

    begin = time.monotonic()
    num_requests = len(path.read_bytes().splitlines())
    work = runner.run_batch

    async def timed(*arguments: Any, **options: Any) -> None:
        cpu, start = time.process_time(), time.monotonic()
        await work(*arguments, **options)
        report(time.monotonic() - start, start - begin, num_requests, 0, cpu)

    runner.run_batch = timed
    sys.argv = ["run_batch", "-i", str(path), "-o", str(path.with_suffix(".out")), "--model", model]
    sys.argv += ["--served-model-name", "m"]
    for name, value in engine.items():
        option = f"--{name.replace('_', '-')}"
        if isinstance(value, bool):
            sys.argv.append(option if value else option.replace("--", "--no-", 1))
        else:
            sys.argv += [option, str(value)]
    asyncio.run(runner.main(runner.parse_args()))


if __name__ == "__main__":
    main()
