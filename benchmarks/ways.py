"""One plain way to use vLLM, timed without its loading; `throughput.py` runs each way in a process of its own.

    python benchmarks/ways.py WAY REQUESTS.jsonl MODEL ENGINE_ARGUMENTS_JSON

WAY is generate (one `LLM.generate` over all requests), chunks (one for each 200 requests), run_batch (vLLM's own batch
runner, whose engine has processes of its own) or ray (Ray Data LLM, whose engine is an actor's). The last line is one
JSON object.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

ROWS_PER_CHUNK = 200


def main() -> None:
    """Load, run, report."""
    way, path, model, arguments = sys.argv[1:]
    if way in ("run_batch", "ray"):
        run = run_batch if way == "run_batch" else run_ray
        run(Path(path), model, json.loads(arguments))
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
    try:
        from vllm.entrypoints.launchers import run_batch as runner
    except ImportError:  # older releases
        from vllm.entrypoints.openai import run_batch as runner

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


def run_ray(path: Path, model: str, engine: dict[str, Any]) -> None:
    """Run Ray Data LLM in a cluster of this machine. Time counts once the engine has the first request.

    The engine makes tokens of the texts, as in the other ways. Ray may plan with more CPUs than there are: each stage
    takes one, and with two none would be left for the last.
    """
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    import ray
    from ray.data.llm import build_processor, vLLMEngineProcessorConfig

    begin = time.time()
    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False)
    ray.data.DataContext.get_current().enable_progress_bars = False
    has_gpu = ray.cluster_resources().get("GPU", 0) > 0
    config = vLLMEngineProcessorConfig(
        model_source=model,
        engine_kwargs=engine | {"disable_log_stats": False},
        log_engine_metrics=False,
        chat_template_stage=False,
        tokenize_stage=False,
        detokenize_stage=False,
        placement_group_config=None if has_gpu else {"bundles": [{"CPU": 1}]},
    )
    processor = build_processor(
        config,
        preprocess=_ray_request,
        postprocess=lambda row: {
            "text": row["generated_text"],
            "tokens": row["num_generated_tokens"],
            "begun": row["metrics"]["arrival_time"],
        },
    )
    requests = [json.loads(line) for line in path.read_bytes().splitlines()]
    cpu = time.process_time()
    rows = processor(ray.data.from_items(requests)).take_all()
    end, first = time.time(), min(row["begun"] for row in rows)
    assert [len(rows), sum(row["tokens"] for row in rows)] == [
        len(requests),
        sum(each["max_tokens"] for each in requests),
    ]
    report(end - first, first - begin, len(rows), 0, cpu)


def _ray_request(row: dict[str, Any]) -> dict[str, Any]:
    params = {name: value for name, value in row.items() if name != "prompt"}
    return {"prompt": row["prompt"], "sampling_params": params}


if __name__ == "__main__":
    main()
