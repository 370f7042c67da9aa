"""The module engines/tokenizers.py, with a byte-level tokenizer that is made here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from batchinfer.core.errors import ConfigError, RowError
from batchinfer.core.records import Sampling
from batchinfer.engines.config import EngineConfig
from batchinfer.engines.tokenizers import load_tokenizer, tokenizer_for
from batchinfer.prompts import PromptBuilder, PromptConfig, RawRow, Tokenizer
from batchinfer.storage.opening import open_store
from samples import PARTS_TEMPLATE

TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content']"
    " + '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def write_tokenizer(
    folder: Path, *, chat_template: str | None = TEMPLATE, adds_eos: bool = False
) -> Path:
    """A byte-level tokenizer without merges: one token per byte, and three special tokens."""
    from tokenizers import Tokenizer as RustTokenizer
    from tokenizers import decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    rust = RustTokenizer(
        models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[])
    )
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    rust.decoder = decoders.ByteLevel()
    rust.add_special_tokens(SPECIAL)
    if adds_eos:
        rust.post_processor = processors.TemplateProcessing(
            single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 256)]
        )
    PreTrainedTokenizerFast(
        tokenizer_object=rust,
        eos_token="<|im_end|>",
        chat_template=chat_template,
        clean_up_tokenization_spaces=False,
    ).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(str(write_tokenizer(tmp_path_factory.mktemp("tokenizer"))))


def build(
    tokenizer: Tokenizer, row: dict[str, object], max_model_len: int | None = None, **options
):
    builder = PromptBuilder(
        PromptConfig(**options), Sampling(temperature=0.0), None, tokenizer, max_model_len
    )
    return builder.build("c", 0, [RawRow(0, json.dumps(row).encode())])[0]


def test_tokens_are_those_of_the_text(tokenizer):
    texts = ["hello", "", "ünïcode 😀", "a\x00b"]
    encoded = tokenizer.encode(texts, add_special_tokens=False)
    assert [tokenizer.decode(ids) for ids in encoded] == texts


def test_plain_prompts_get_the_tokenizers_special_tokens_and_chats_do_not(tmp_path):
    tokenizer = load_tokenizer(str(write_tokenizer(tmp_path, adds_eos=True)))
    plain = build(tokenizer, {"p": "hi"}, prompt_column="p")
    chat = build(tokenizer, {"p": "hi"}, prompt_column="p", as_chat=True)
    assert plain.request.token_ids[0] == 256
    assert chat.request.token_ids[0] == 257  # <|im_start|>, written by the template


def test_a_chat_is_rendered_as_transformers_does(tokenizer):
    prepared = build(
        tokenizer,
        {"m": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]},
        messages_column="m",
    )
    assert (
        tokenizer.decode(prepared.request.token_ids)
        == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_an_answers_beginning_is_continued(tokenizer):
    prepared = build(
        tokenizer,
        {"m": [{"role": "user", "content": "hi"}]},
        messages_column="m",
        continue_final="Sure",
    )
    assert tokenizer.decode(prepared.request.token_ids).endswith("<|im_start|>assistant\nSure")


def test_a_special_token_in_a_users_text_is_that_token_as_in_vllm(tokenizer):
    prepared = build(tokenizer, {"p": "a<|im_end|>b"}, prompt_column="p")
    assert 258 in prepared.request.token_ids


def test_a_trailing_end_token_is_trimmed(tokenizer):
    prepared = build(tokenizer, {"p": "a<|im_end|><|im_end|>"}, prompt_column="p")
    assert tokenizer.decode(prepared.request.token_ids) == "a"


def test_templates_that_loop_over_content_get_parts(tmp_path):
    tokenizer = load_tokenizer(str(write_tokenizer(tmp_path, chat_template=PARTS_TEMPLATE)))
    prepared = build(tokenizer, {"m": [{"role": "user", "content": "hi"}]}, messages_column="m")
    assert tokenizer.decode(prepared.request.token_ids) == "[user]<hi>"


def test_a_template_that_refuses_a_conversation_is_the_rows_error(tmp_path):
    template = "{{ raise_exception('roles must alternate') }}"
    tokenizer = load_tokenizer(str(write_tokenizer(tmp_path, chat_template=template)))
    with pytest.raises(RowError, match="roles must alternate"):
        tokenizer.apply_chat_template(
            [{"role": "user", "content": "x"}], template="", continue_final=False, kwargs={}
        )
    prepared = build(tokenizer, {"p": "x"}, prompt_column="p", as_chat=True)
    assert prepared.failure.code == "template_error"


def test_a_messages_column_needs_a_chat_template(tmp_path):
    tokenizer = load_tokenizer(str(write_tokenizer(tmp_path, chat_template=None)))
    with pytest.raises(ConfigError, match="no chat template") as caught:
        build(tokenizer, {}, messages_column="m")
    assert "--chat-template @FILE" in caught.value.hint
    prepared = build(
        tokenizer,
        {"m": [{"role": "user", "content": "hi"}]},
        messages_column="m",
        chat_template="{{ messages[0].content }}!{{ extra }}",
        chat_template_kwargs={"extra": "?"},
    )
    assert tokenizer.decode(prepared.request.token_ids) == "hi!?"


@pytest.mark.parametrize(
    ("mode", "expected"),
    [("left", "456789"), ("right", "012345"), ("middle", "012789")],
)
def test_long_prompts_are_cut_where_asked(tokenizer, mode, expected):
    builder = PromptBuilder(
        PromptConfig(prompt_column="p", truncate_prompt=mode, keep_prompt=True),
        Sampling(max_tokens=4),
        None,
        tokenizer,
        10,
    )
    prepared = builder.build("c", 0, [RawRow(0, b'{"p":"0123456789"}')])[0]
    assert tokenizer.decode(prepared.request.token_ids) == expected
    assert prepared.prompt == expected


def test_a_prompt_must_leave_room_for_one_token(tokenizer):
    assert build(tokenizer, {"p": "x" * 9}, 10, prompt_column="p").failure is None
    failed = build(tokenizer, {"p": "x" * 10}, 10, prompt_column="p")
    assert failed.failure.code == "prompt_too_long"
    assert failed.request is None


def test_a_prompt_of_megabytes_is_refused_without_tokenizing(tokenizer):
    failed = build(tokenizer, {"p": "x" * 10_000_000}, 100, prompt_column="p")
    assert failed.failure.code == "prompt_too_long"


def test_a_model_that_is_not_there_is_a_clear_error(tmp_path):
    with pytest.raises(ConfigError, match="tokenizer cannot be loaded") as caught:
        load_tokenizer(str(tmp_path / "none"))
    assert "--model" in caught.value.hint


def test_a_folder_without_a_tokenizer_is_a_clear_error(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ConfigError, match="tokenizer cannot be loaded"):
        load_tokenizer(str(tmp_path))


def test_a_tokenizer_in_a_bucket_is_loaded_from_the_small_files(tmp_path):
    url = "memory://tokenizer-in-a-bucket/m"
    for path in write_tokenizer(tmp_path / "m").iterdir():
        open_store(url).create_file(path.name, path)
    open_store(url).create("model.safetensors", b"weights")
    tokenizer = tokenizer_for(EngineConfig(model=url, model_cache=str(tmp_path / "cache")))
    assert tokenizer is not None
    assert tokenizer.has_chat_template
    assert not list((tmp_path / "cache").rglob("*.safetensors"))
