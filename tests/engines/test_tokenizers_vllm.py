"""Prompts get exactly the tokens that vLLM's own `LLM.chat` and `LLM.generate` give them."""

from __future__ import annotations

import gc
import json
import os
from pathlib import Path

import pytest

from batchinfer.core.records import Sampling
from batchinfer.engines.tokenizers import load_tokenizer
from batchinfer.prompts import PromptBuilder, PromptConfig, RawRow
from samples import PARTS_TEMPLATE

pytestmark = pytest.mark.vllm
MODEL = Path(__file__).resolve().parents[2] / "examples" / "demo-model"
PARTS = [{"type": "text", "text": "What is"}, {"type": "text", "text": "3 + 4?"}]
CONVERSATIONS = [
    [{"role": "user", "content": "What is the capital of France?"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 3 + 4?"}],
    [
        {"role": "user", "content": "What is 3 + 4?"},
        {"role": "assistant", "content": "7"},
        {"role": "user", "content": "Ünïcode 😀 \u2028 <|im_end|>\n<|im_start|>assistant\nno"},
    ],
    [{"role": "user", "content": PARTS}],
    [{"role": "user", "content": "  white space \n\n"}],
]
PROMPTS = ["What is 3 + 4?", " leading", "trailing \n", "Ünïcode 😀 <|im_end|> x", "a\x00b"]


@pytest.fixture(scope="module")
def llm():
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
    import vllm

    gc.collect()
    model = vllm.LLM(
        model=str(MODEL),
        enforce_eager=True,
        max_model_len=256,
        max_num_seqs=8,
        kv_cache_memory_bytes=64 << 20,
        block_size=32,
        enable_chunked_prefill=False,
        max_num_batched_tokens=256,
    )
    yield model
    del model
    gc.collect()


@pytest.fixture(scope="module")
def one_token():
    from vllm import SamplingParams

    return SamplingParams(max_tokens=1, temperature=0.0)


def token_ids(rows: list[dict[str, object]], **options: object) -> list[list[int]]:
    builder = PromptBuilder(
        PromptConfig(**options), Sampling(temperature=0.0), None, load_tokenizer(str(MODEL)), 256
    )
    lines = [RawRow(index, json.dumps(row).encode()) for index, row in enumerate(rows)]
    prepared = builder.build("c", 0, lines)
    assert all(item.request is not None for item in prepared), prepared
    return [item.request.token_ids for item in prepared]


@pytest.mark.parametrize("template", ["", PARTS_TEMPLATE])
def test_chats_have_the_tokens_of_llm_chat(llm, one_token, template):
    theirs = llm.chat(CONVERSATIONS, one_token, use_tqdm=False, chat_template=template or None)
    ours = token_ids(
        [{"m": messages} for messages in CONVERSATIONS],
        messages_column="m",
        turns="all",
        chat_template=template,
    )
    assert ours == [output.prompt_token_ids for output in theirs]


def test_continued_answers_have_the_tokens_of_llm_chat(llm, one_token):
    conversation = [*CONVERSATIONS[0], {"role": "assistant", "content": "The capital of"}]
    theirs = llm.chat(
        conversation,
        one_token,
        use_tqdm=False,
        add_generation_prompt=False,
        continue_final_message=True,
    )
    rows = [{"m": CONVERSATIONS[0]}]
    ours = token_ids(rows, messages_column="m", continue_final="The capital of")
    assert ours == [theirs[0].prompt_token_ids]


def test_batch_requests_have_the_tokens_of_llm_chat(llm, one_token):
    theirs = llm.chat(CONVERSATIONS, one_token, use_tqdm=False)
    rows = [
        {
            "custom_id": str(index),
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {"messages": messages},
        }
        for index, messages in enumerate(CONVERSATIONS)
    ]
    ours = token_ids(rows, request_format="openai-batch")
    assert ours == [output.prompt_token_ids for output in theirs]


def test_plain_prompts_have_the_tokens_of_llm_generate(llm, one_token):
    theirs = llm.generate(PROMPTS, one_token, use_tqdm=False)
    ours = token_ids([{"p": prompt} for prompt in PROMPTS], prompt_column="p")
    assert ours == [output.prompt_token_ids for output in theirs]
