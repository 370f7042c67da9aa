"""vLLM called directly, without batchinfer: what its answers are compared with.

A process of its own: ``python direct_vllm.py`` reads one JSON object from stdin ({"engine": keyword arguments of LLM,
"jobs": [...]}) and writes one list to stdout. A job has `prompt` (text or token ids) or `messages`, `params` (keyword
arguments of SamplingParams), and perhaps `structured` and `chat` (keyword arguments of LLM.chat).
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any


def answer(output: Any) -> dict[str, Any]:
    """A RequestOutput as plain values."""
    return {
        "prompt": output.prompt,
        "prompt_tokens": len(output.prompt_token_ids),
        "prompt_logprobs": None
        if output.prompt_logprobs is None
        else positions(output.prompt_token_ids, output.prompt_logprobs),
        "prompt_token_ids": list(output.prompt_token_ids),
        "prompt_ranks": [
            None
            if each is None
            else {str(key): [one.rank, one.decoded_token] for key, one in each.items()}
            for each in output.prompt_logprobs or ()
        ],
        "choices": [
            {
                "text": choice.text,
                "finish_reason": choice.finish_reason,
                "stop_reason": choice.stop_reason,
                "num_tokens": len(choice.token_ids),
                "token_ids": list(choice.token_ids),
                "mean_logprob": (choice.cumulative_logprob or 0.0) / len(choice.token_ids),
                "logprobs": None
                if choice.logprobs is None
                else positions(choice.token_ids, choice.logprobs),
            }
            for choice in output.outputs
        ],
    }


def positions(token_ids: Any, logprobs: Any) -> list[Any]:
    """Of every position the chosen token and its log-probability, and all that came with it."""
    found: list[Any] = []
    for token_id, alternatives in zip(token_ids, logprobs, strict=False):
        if alternatives is None:
            found.append(None)
            continue
        chosen = alternatives[token_id]
        ranked = sorted(alternatives.values(), key=lambda each: each.rank)
        top = [[each.decoded_token, each.logprob] for each in ranked]
        found.append({"token": chosen.decoded_token, "logprob": chosen.logprob, "top": top})
    return found


def main() -> None:
    """Load the model once, and answer every job by a call of its own."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
    work = json.load(sys.stdin)
    from vllm import LLM, SamplingParams
    from vllm.sampling_params import RepetitionDetectionParams, StructuredOutputsParams

    llm = LLM(**work["engine"])
    answers = []
    for job in work["jobs"]:
        given_params = job["params"]
        if "logit_bias" in given_params:  # JSON has no numbers as keys
            bias = given_params["logit_bias"]
            given_params["logit_bias"] = {int(token): value for token, value in bias.items()}
        if "repetition_detection" in given_params:
            detection = RepetitionDetectionParams(**given_params["repetition_detection"])
            given_params["repetition_detection"] = detection
        params = SamplingParams(**given_params)
        if "structured" in job:
            params.structured_outputs = StructuredOutputsParams(**job["structured"])
        if "messages" in job:
            outputs = llm.chat(job["messages"], params, use_tqdm=False, **job.get("chat", {}))
        else:
            prompt = job["prompt"]
            given = prompt if isinstance(prompt, str) else {"prompt_token_ids": prompt}
            outputs = llm.generate([given], params, use_tqdm=False)
        answers.append(answer(outputs[0]))
    sys.stdout.write("\n" + json.dumps(answers) + "\n")


if __name__ == "__main__":
    main()
