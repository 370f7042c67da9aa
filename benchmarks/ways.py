"""One plain way to use vLLM, timed without its loading; `throughput.py` runs each way in a process of its own.

    python benchmarks/ways.py WAY REQUESTS.jsonl MODEL ENGINE_ARGUMENTS_JSON

WAY is all, chunks, batches, loop, run_batch, or ray (Ray Data LLM, for a Python that has both ray and vLLM; its time
includes the loading). The last line is one JSON object.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROWS_PER_CHUNK = 200
CHARACTERS_PER_BATCH = 2000
IN_FLIGHT_FACTOR = 1.5
RAY_BATCH_ROWS = 64


def main() -> None:
    """Load, run, report."""
    way, path, model, arguments = sys.argv[1:]
    if way == "run_batch":
        run_batch(Path(path), model, json.loads(arguments))
        return
    with Path(path).open("rb") as file:
        requests = [json.loads(line) for line in file]
    if way == "ray":
        print(json.dumps(run_ray(requests, model, json.loads(arguments))))
        return
    begin = time.monotonic()
    from vllm import LLM, SamplingParams

    llm = LLM(model=model, **json.loads(arguments))
    load_seconds = time.monotonic() - begin
    steps = count_steps(llm.llm_engine)
    prepared = [(each.pop("prompt"), SamplingParams(**each)) for each in requests]
    cpu, begin = time.process_time(), time.monotonic()
    tokens = WAYS[way](llm, prepared)
    result = {
        "load_seconds": load_seconds,
        "wall_seconds": time.monotonic() - begin,
        "cpu_seconds": time.process_time() - cpu,
        "steps": len(steps),
        "requests": len(prepared),
        "tokens": tokens,
    }
    print(json.dumps(result))


def count_steps(engine: Any) -> list[None]:
    """Return a list that grows by one with every step."""
    steps: list[None] = []
    step = engine.step

    def counted() -> Any:
        steps.append(None)
        return step()

    engine.step = counted
    return steps


def generate(llm: Any, prepared: list[tuple[str, Any]]) -> int:
    """Generate all answers with one call; return the number of tokens."""
    prompts, params = zip(*prepared, strict=True)
    outputs = llm.generate(list(prompts), list(params), use_tqdm=False)
    return sum(len(output.outputs[0].token_ids) for output in outputs)


def generate_chunks(llm: Any, prepared: list[tuple[str, Any]]) -> int:
    """Generate chunk by chunk, as a script does that reads and writes files."""
    starts = range(0, len(prepared), ROWS_PER_CHUNK)
    return sum(generate(llm, prepared[start : start + ROWS_PER_CHUNK]) for start in starts)


def generate_batches(llm: Any, prepared: list[tuple[str, Any]]) -> int:
    """Generate in batches by number of characters, as the example script in SkyPilot's guide does."""
    return sum(generate(llm, batch) for batch in batches(prepared))


def batches(prepared: list[tuple[str, Any]]) -> Iterator[list[tuple[str, Any]]]:
    """Yield batches; each ends with the prompt that brings it over CHARACTERS_PER_BATCH."""
    batch: list[tuple[str, Any]] = []
    size = 0
    for prompt, params in prepared:
        batch.append((prompt, params))
        size += len(prompt)
        if size > CHARACTERS_PER_BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def loop(llm: Any, prepared: list[tuple[str, Any]]) -> int:
    """Generate with a bare loop over add_request and step, with as many requests in flight as the worker keeps."""
    from vllm.sampling_params import RequestOutputKind

    engine = llm.llm_engine
    most = int(engine.vllm_config.scheduler_config.max_num_seqs * IN_FLIGHT_FACTOR)
    waiting = iter(enumerate(prepared))
    in_flight = tokens = 0
    has_more = True
    while True:
        while has_more and in_flight < most:
            found = next(waiting, None)
            if found is None:
                has_more = False
                break
            index, (prompt, params) = found
            params.output_kind = RequestOutputKind.FINAL_ONLY
            engine.add_request(str(index), prompt, params)
            in_flight += 1
        if not in_flight:
            return tokens
        for output in engine.step():
            if output.finished:
                in_flight -= 1
                tokens += len(output.outputs[0].token_ids)


def run_batch(path: Path, model: str, engine: dict[str, Any]) -> None:
    """Run vLLM's own batch runner, whose engine always has a process of its own. Time counts once that is loaded."""
    begin = time.monotonic()
    try:
        from vllm.entrypoints.launchers import run_batch as runner
    except ImportError:  # before 0.30 or so
        from vllm.entrypoints.openai import run_batch as runner

    num_requests = len(path.read_bytes().splitlines())
    work = runner.run_batch

    async def timed(*arguments: Any, **options: Any) -> None:
        cpu, start = time.process_time(), time.monotonic()
        await work(*arguments, **options)
        result = {
            "load_seconds": start - begin,
            "wall_seconds": time.monotonic() - start,
            "cpu_seconds": time.process_time() - cpu,
            "steps": 0,
            "requests": num_requests,
        }
        print(json.dumps(result), flush=True)

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


def run_ray(requests: list[dict[str, Any]], model: str, engine: dict[str, Any]) -> dict[str, Any]:
    """Run Ray Data LLM and return its figures."""
    begin = time.monotonic()
    import ray
    from ray.data.llm import build_processor, vLLMEngineProcessorConfig

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    ray.data.DataContext.get_current().enable_progress_bars = False
    config = vLLMEngineProcessorConfig(
        model_source=model,
        engine_kwargs=engine,
        batch_size=RAY_BATCH_ROWS,
        concurrency=1,
        chat_template_stage=False,
        tokenize_stage=False,
        detokenize_stage=False,
        accelerator_type=None,
        placement_group_config={"bundles": [{"CPU": 1}]},
    )
    rows = [{"prompt": each.pop("prompt"), "params": json.dumps(each)} for each in requests]
    processor = build_processor(
        config,
        preprocess=lambda row: {
            "prompt": row["prompt"],
            "sampling_params": json.loads(row["params"]),
        },
        postprocess=lambda row: {"num_tokens": row["num_generated_tokens"]},
    )
    answers = processor(ray.data.from_items(rows)).take_all()
    return {
        "wall_seconds": time.monotonic() - begin,
        "requests": len(answers),
        "tokens": sum(each["num_tokens"] for each in answers),
    }


WAYS: dict[str, Callable[[Any, list[tuple[str, Any]]], int]] = {
    "all": generate,
    "chunks": generate_chunks,
    "batches": generate_batches,
    "loop": loop,
}

if __name__ == "__main__":
    main()
