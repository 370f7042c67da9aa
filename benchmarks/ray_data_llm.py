"""The same requests through Ray Data LLM, loading included; for a Python that has both ray and vLLM.

    PYTHON benchmarks/ray_data_llm.py REQUESTS.jsonl MODEL ENGINE_ARGUMENTS_JSON

`throughput.py --ray-python PYTHON` runs it. The last line is one JSON object.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

BATCH_ROWS = 64


def main() -> None:
    """Run the requests of a file."""
    path, model, arguments = sys.argv[1:]
    requests = [json.loads(line) for line in Path(path).read_text().splitlines()]
    begin = time.monotonic()
    import ray
    from ray.data.llm import build_processor, vLLMEngineProcessorConfig

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    ray.data.DataContext.get_current().enable_progress_bars = False
    config = vLLMEngineProcessorConfig(
        model_source=model,
        engine_kwargs=json.loads(arguments),
        batch_size=BATCH_ROWS,
        concurrency=1,
        chat_template_stage=False,
        tokenize_stage=False,
        detokenize_stage=False,
        accelerator_type=None,
        placement_group_config={"bundles": [{"CPU": 1}]},
    )

    def to_request(row: dict[str, Any]) -> dict[str, Any]:
        params = json.loads(row["params"])
        return {"prompt": row["prompt"], "sampling_params": params}

    def to_answer(row: dict[str, Any]) -> dict[str, Any]:
        return {"num_tokens": row["num_generated_tokens"]}

    processor = build_processor(config, preprocess=to_request, postprocess=to_answer)
    rows = [
        {
            "prompt": each["prompt"],
            "params": json.dumps({name: each[name] for name in each if name != "prompt"}),
        }
        for each in requests
    ]
    answers = processor(ray.data.from_items(rows)).take_all()
    result = {
        "wall_seconds": time.monotonic() - begin,
        "requests": len(answers),
        "tokens": sum(each["num_tokens"] for each in answers),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
