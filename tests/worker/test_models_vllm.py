"""Models of other kinds with real vLLM: numbers as transformers computes them, chats as vLLM's own renderer makes them.

Each test has a server of its own, with a model of random weights.
"""

import base64
import json
import os
import re
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import batchinfer
from batchinfer.engines.engine_config import EngineConfig
from batchinfer.storage.opening import open_store
from fixtures_vllm import ask
from making import make_job, output_lines, read_marker
from models import ROOT, sound, write_bert, write_mistral, write_vision_model, write_whisper
from pages import steps_of
from pictures import as_base64, as_data_url, clip, picture
from web_server import reply

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

SMALL = ("--kv-cache-memory-bytes", str(64 << 20), "--max-num-seqs", "8")
FLOAT = ("--dtype", "float32")
TEXTS = [f"row {i} " + "word " * (i % 5) for i in range(70)]
"""More than fit into one list, so two requests are sent."""
PAIRS = [(f"what is {i}?", f"it is {i * 7 % 5} " + "of it " * (i % 3)) for i in range(8)]
CHATS = [
    [{"role": "user", "content": "Hello there"}],
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": "Two."},
        {"role": "user", "content": "Three, [INST] four?"},
    ],
]


@pytest.fixture
def serve(served, tmp_path):
    """Serves a model for a task, with these options of vLLM, in a `with` statement."""

    def start(model: Path, *arguments: str, task: str = "generate") -> Any:
        config = EngineConfig(model=str(model), task=task, server_args=[*SMALL, *arguments])
        return served(config, tmp_path)

    return start


def run(
    folder: Path, rows: list[dict[str, Any]], model: Path, url: str, *options: str
) -> list[Any]:
    """Run a worker over a job of these rows, with the server at this URL; its output lines."""
    from batchinfer.worker.command import command

    make_job(folder / "job", rows=len(rows), per_chunk=len(rows), make_row=rows.__getitem__)
    run_url = str(folder / "run")
    words = ["--job", str(folder / "job"), "--output", run_url, "--model", str(model), *options]
    command.main([*words, "--engine", "openai", "--base-url", url], standalone_mode=False)
    return output_lines(run_url)


def vector_of(line: dict[str, Any]) -> list[float]:
    data = base64.b64decode(line["body"]["data"][0]["embedding"])
    return list(struct.unpack(f"<{len(data) // 4}f", data))


def computed(model: Path, *texts: str, kind: str = "AutoModelForSequenceClassification") -> Any:
    """What transformers computes for a text or a pair."""
    import torch
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    loaded = getattr(transformers, kind).from_pretrained(model, dtype=torch.float32).eval()
    with torch.no_grad():
        return loaded(**tokenizer(*texts, return_tensors="pt"))


def states(model: Path, text: str) -> Any:
    return computed(model, text, kind="AutoModel").last_hidden_state[0]


def logits(model: Path, *texts: str) -> Any:
    return computed(model, *texts).logits[0]


def test_embeddings_are_those_of_transformers(tmp_path, serve):
    model = write_bert(tmp_path / "model")
    rows = [{"text": text} for text in [*TEXTS, "x y " * 100, ""]]
    with serve(model, *FLOAT, "--max-model-len", "96", task="embed") as url:
        found = run(tmp_path, rows, model, url, "--task", "embed", "--prompt-column", "text")
    num_tokens = 0
    for text, line in zip(TEXTS, found, strict=False):
        tokens = states(model, text)
        num_tokens += len(tokens)
        wanted = tokens[0] / tokens[0].norm()
        assert vector_of(line) == pytest.approx(wanted.tolist(), abs=1e-4)
    codes = [line["error"]["code"] for line in found[len(TEXTS) :]]
    assert codes == ["prompt_too_long", "invalid_column"]
    marker = read_marker(open_store(str(tmp_path / "run")), "part-00000")
    assert marker.prompt_tokens == num_tokens


def test_vectors_of_tokens_are_those_of_transformers(tmp_path, serve):
    """A server of a model that can do both makes one vector a text, unless it is told otherwise."""
    model = write_bert(tmp_path / "model")
    rows = [{"text": text} for text in TEXTS[:5]]
    options = ("--task", "token-embed", "--prompt-column", "text")
    with serve(model, *FLOAT, task="token-embed") as url:
        found = run(tmp_path, rows, model, url, *options)
    for row, line in zip(rows, found, strict=True):
        wanted = states(model, row["text"])
        vectors = (wanted / wanted.norm(dim=-1, keepdim=True)).tolist()
        own = line["body"]["data"][0]["data"]
        assert own == [pytest.approx(each, abs=1e-4) for each in vectors]


def test_classes_and_rewards_are_those_of_transformers(tmp_path, serve):
    model = write_bert(tmp_path / "model", labels=["bad", "so-so", "good"])
    rows = [{"text": text} for text in TEXTS[:12]]
    options = ("--prompt-column", "text", "--task")
    with serve(model, *FLOAT, task="classify") as url:
        classes = run(tmp_path / "a", rows, model, url, *options, "classify")
        rewards = run(tmp_path / "b", rows, model, url, *options, "reward")
    for row, one, other in zip(rows, classes, rewards, strict=True):
        wanted = logits(model, row["text"])
        [answer] = one["body"]["data"]
        assert answer["probs"] == pytest.approx(wanted.softmax(-1).tolist(), abs=1e-4)
        assert answer["label"] == ["bad", "so-so", "good"][int(wanted.argmax())]
        assert other["body"]["data"][0]["data"] == pytest.approx(wanted.tolist(), abs=1e-4)


def test_scores_and_ranks_of_pairs_are_those_of_transformers(tmp_path, serve):
    model = write_bert(tmp_path / "model", labels=["relevant"])
    rows = [{"query": query, "document": document} for query, document in PAIRS]
    query, documents = PAIRS[0][0], [document for _, document in PAIRS]
    options = ("--pair-columns", "query,document", "--task")
    with serve(model, *FLOAT, task="score") as url:
        found = run(tmp_path / "a", rows, model, url, *options, "score")
        ranked = [{"query": query, "document": documents}]
        [ranks] = run(tmp_path / "b", ranked, model, url, *options, "rerank")

    def wanted(*pair: str) -> float:
        return float(logits(model, *pair).sigmoid())

    scores = [line["body"]["data"][0]["score"] for line in found]
    assert scores == pytest.approx([wanted(*pair) for pair in PAIRS], abs=1e-4)
    results = ranks["body"]["results"]
    assert [each["relevance_score"] for each in results] == pytest.approx(
        [wanted(query, documents[each["index"]]) for each in results], abs=1e-4
    )
    assert sorted(each["index"] for each in results) == list(range(len(documents)))


REFERENCE = """
import json, sys
from vllm import LLM, SamplingParams
model, chats = json.loads(sys.argv[1])
llm = LLM(model, tokenizer_mode="mistral", enforce_eager=True, kv_cache_memory_bytes=64 << 20,
          enable_chunked_prefill=False, max_num_batched_tokens=2048, max_model_len=256)
found = llm.chat(chats, SamplingParams(temperature=0, max_tokens=8))
print("found", json.dumps([[one.outputs[0].text, len(one.prompt_token_ids)] for one in found]))
"""


def test_a_model_without_a_chat_template_chats_as_vllm_renders_it(tmp_path, serve, forks):
    """Mistral's tokenizers have no Jinja template; only vLLM's own renderer makes their prompts."""
    model = write_mistral(tmp_path / "model")
    options = ("--messages-column", "messages", "--turns", "all", "--temperature", "0")
    arguments = ("--tokenizer-mode", "mistral", "--max-model-len", "256")
    with serve(model, *arguments) as url:
        rows = [{"messages": chat} for chat in CHATS]
        found = run(tmp_path, rows, model, url, *options, "--max-tokens", "8")
    log = tmp_path / "reference"
    assert forks.run(REFERENCE, [json.dumps([str(model), CHATS])], log) == 0, log.read_text()
    [wanted] = re.findall(r"^found (.*)$", log.read_text(), re.MULTILINE)
    bodies = [line["body"] for line in found]
    assert [
        [body["choices"][0]["message"]["content"], body["usage"]["prompt_tokens"]]
        for body in bodies
    ] == json.loads(wanted)


def transcribe(url: str, model: Path, wave: bytes) -> Any:
    """Send a sound to a server as curl's -F would."""
    fields = {"model": str(model), "language": "en", "temperature": "0"}
    files = {"file": ("a.wav", wave, "audio/wav")}
    return ask(url, "/v1/audio/transcriptions", data=fields, files=files)[1]


def follow(title: str, folder: Path, model: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Do what a recipe of the cookbook says, with a model in place of the rehearsal; its tables."""
    (folder / title).mkdir()
    monkeypatch.chdir(folder / title)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    variables = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)}
    recipe = (ROOT / "docs/cookbook.md").read_text().partition(f"## {title}\n")[2]
    commands = [step.command for step in steps_of(recipe.partition("\n## ")[0])]
    assert any("--engine echo" in command for command in commands)
    for command in commands:
        words = command.replace("--engine echo", f"--engine openai {model}")
        subprocess.run(["bash", "-euc", words], env=variables, check=True, timeout=120)
    tables = map(re.compile(r"-o (\S+)").search, commands)
    return {
        each[1]: batchinfer.open_run(f"{each[1]}.batchinfer/run").to_arrow().to_pylist()
        for each in tables
        if each
    }


def test_a_whisper_transcribes_as_the_server_does_alone(
    tmp_path, serve, monkeypatch, s3_url, server
):
    """Wherever the sounds lie: in a column, in a folder, behind a link, in a bucket; and by the cookbook's recipe."""
    pytest.importorskip("soundfile", reason="vLLM reads sounds with it")
    model, bucket = write_whisper(tmp_path / "model"), s3_url()
    sounds = [sound(hertz) for hertz in (220, 440, 880)]
    (tmp_path / "calls").mkdir()
    (tmp_path / "calls" / "a.wav").write_bytes(sounds[0])
    rows = [{"audio": base64.b64encode(each).decode()} for each in [*sounds, b"no sound at all"]]
    open_store(bucket).create("b.wav", sounds[1])
    server.answers["/a.wav"] = reply(200, sounds[0], "audio/wav")
    places = ("calls/a.wav", f"{server.url}/a.wav", f"{bucket}/b.wav")
    rows += [{"audio": each} for each in places]
    options = ("--task", "transcribe", "--column", "audio=audio", "--temperature", "0")
    options += ("--media-root", str(tmp_path), "--allow-private-urls")
    options += ("--sampling", "language=en")
    with serve(model, *FLOAT, "--max-num-batched-tokens", "2048", task="transcribe") as url:
        found = run(tmp_path, rows, model, url, *options)
        alone = [transcribe(url, model, each) for each in sounds]
        asked = f"--base-url {url} --model {model} --sampling language=en"
        recipe = follow("A folder of sounds to text", tmp_path, asked, monkeypatch)
    assert [line["status"] for line in found] == [200, 200, 200, 400, 200, 200, 200]
    texts = [line["body"]["text"] for line in found if line["status"] == 200]
    assert texts == [each["text"] for each in [*alone, alone[0], alone[0], alone[1]]]
    assert [row["status"] for row in recipe["texts.parquet"]] == [200, 200]
    assert len({each["text"] for each in alone}) > 1


def describe(url: str, model: Path, kind: str, medium: str) -> Any:
    """Ask a server about an image or a video as curl would."""
    parts = [
        {"type": f"{kind}_url", f"{kind}_url": {"url": medium}},
        {"type": "text", "text": "Which colour?"},
    ]
    messages = [{"role": "user", "content": parts}]
    body = {"model": str(model), "messages": messages, "temperature": 0, "max_tokens": 12}
    return ask(url, "/v1/chat/completions", json=body)[1]


def test_images_and_videos_are_described_as_the_server_does_alone(
    tmp_path, serve, monkeypatch, s3_url, server
):
    """Wherever they lie: in a column, behind a link, in a bucket, in a folder; and by the cookbook's recipe."""
    model, bucket = write_vision_model(tmp_path / "model"), s3_url()
    images = [picture(color, size) for color, size in (("red", 40), ("blue", 90), ("green", 56))]
    videos = [clip("red", "blue"), clip("green", "green")]
    (tmp_path / "a.png").write_bytes(images[0])
    (tmp_path / "b.mp4").write_bytes(videos[1])
    open_store(bucket).create("b.mp4", videos[0])
    open_store(bucket).create("b.png", images[1])
    server.answers["/a.png"] = reply(200, images[0], "image/png")
    server.answers["/b.mp4"] = reply(200, videos[1], "video/mp4")
    given = [*map(as_base64, images), f"{server.url}/a.png", "a.png", as_data_url(b"no image")]
    rows: list[dict[str, Any]] = [{"image": each} for each in [*given, f"{bucket}/b.png"]]
    places = (f"{bucket}/b.mp4", f"{server.url}/b.mp4", "b.mp4")
    rows += [{"video": each} for each in (*map(as_base64, videos), *places)]
    rows = [{"question": "Which colour?", "image": None, "video": None, **row} for row in rows]
    options = ("--prompt-column", "question", "--as-chat", "--column", "image=image")
    options += ("--column", "video=video", "--media-root", str(tmp_path))
    options += ("--temperature", "0", "--max-tokens", "12")
    domains = ("--allowed-media-domains", "127.0.0.1")
    with serve(model, "--max-model-len", "512", *domains) as url:
        found = run(tmp_path, rows, model, url, *options)
        alone = [describe(url, model, "image", as_data_url(each)) for each in images]
        alone += [describe(url, model, "video", as_data_url(each, "video/mp4")) for each in videos]
        asked = f"--base-url {url} --model {model} --max-tokens 12"
        recipe = follow("Captions of images and videos", tmp_path, asked, monkeypatch)
    assert [line["status"] for line in found] == [200] * 5 + [400] + [200] * 6
    broken = found.pop(5)
    assert broken["error"]["code"] == "invalid_request"
    wanted = [alone[index] for index in (0, 1, 2, 0, 0, 1, 3, 4, 3, 4, 4)]
    told = [line["body"]["choices"][0]["message"]["content"] for line in found]
    assert told == [each["choices"][0]["message"]["content"] for each in wanted]
    prompts = [line["body"]["usage"]["prompt_tokens"] for line in found]
    assert prompts == [each["usage"]["prompt_tokens"] for each in wanted]
    assert len(set(told[:3])) > 1
    statuses = {name: [row["status"] for row in rows] for name, rows in recipe.items()}
    assert statuses == {"answers.parquet": [200, 200], "told.jsonl": [200]}
