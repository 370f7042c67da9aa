"""What the engine benchmarks share: a random model, requests of uneven length, S3 on loopback, processes."""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from batchinfer.core import codec, layout
from batchinfer.core.records import FORMAT_VERSION, Chunk, Job
from batchinfer.engines.config import EngineConfig
from batchinfer.storage.opening import open_store

ROOT = Path(__file__).resolve().parents[1]
MAX_MODEL_LEN = 512
MAX_NUM_SEQS = 64
# The same for every way. One thread, and no prompt split over two steps, which vLLM's CPU build cannot seed.
CPU_ENGINE = {
    "max_model_len": MAX_MODEL_LEN,
    "max_num_seqs": MAX_NUM_SEQS,
    "max_num_batched_tokens": 4096,
    "enforce_eager": True,
    "kv_cache_memory_bytes": 512 << 20,
    "enable_chunked_prefill": False,
    "block_size": 32,
}
# Stated where vLLM's defaults differ between offline use and serving, and where the worker would choose by GPUs.
GPU_ENGINE = {
    "max_model_len": 4096,
    "max_num_seqs": 256,
    "max_num_batched_tokens": 8192,
    "tensor_parallel_size": 1,
    "load_format": "dummy",
}
_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"

Request = dict[str, Any]


def make_words(rng: random.Random, count: int = 2000) -> list[str]:
    """Return made-up words of two to eight letters."""
    return [
        "".join(
            rng.choice("bcdfghklmnprst") + rng.choice("aeiou") for _ in range(rng.randint(1, 4))
        )
        for _ in range(count)
    ]


def make_requests(count: int, *, seed: int = 0, longest: int = 256) -> list[Request]:
    """Prompts of 6 to 30 words, answers of very different lengths (lognormal), a seed each.

    Lengths are fixed by `ignore_eos`: every way generates exactly the same number of tokens.
    """
    rng = random.Random(seed)
    words = make_words(rng)
    return [
        {
            "prompt": " ".join(rng.choices(words, k=rng.randint(6, 30))),
            "max_tokens": max(1, min(longest, round(rng.lognormvariate(2.77, 1.2)))),
            "temperature": 1.0,
            "seed": index,
            "ignore_eos": True,
        }
        for index in range(count)
    ]


def write_model(folder: Path, *, is_8b: bool = False) -> Path:
    """Write a Llama of 26 million random parameters, or the config alone of one of the shape of Llama 3.1 8B."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    vocabulary = 128_256 if is_8b else 1024
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1024, special_tokens=["<|end|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([" ".join(make_words(random.Random(0)))], trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|end|>",
        pad_token="<|end|>",
        chat_template=_TEMPLATE,
    )
    missing = vocabulary - len(fast)
    if missing:
        fast.add_tokens([f"<extra{index}>" for index in range(missing)])
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=4096 if is_8b else 512,
        intermediate_size=14_336 if is_8b else 1536,
        num_hidden_layers=32 if is_8b else 8,
        num_attention_heads=32 if is_8b else 8,
        num_key_value_heads=8,
        max_position_embeddings=8192,
        tie_word_embeddings=not is_8b,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
        torch_dtype="bfloat16",
        architectures=["LlamaForCausalLM"],
    )
    fast.save_pretrained(folder)
    if is_8b:
        config.save_pretrained(folder)
    else:
        import torch

        torch.manual_seed(0)
        LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


def write_job(url: str, requests: Sequence[Request], *, per_chunk: int) -> None:
    """Write a job of requests, as `batchinfer split` would."""
    store = open_store(url)
    chunks, keys = [], []
    num_chunks = -(-len(requests) // per_chunk)
    for index in range(num_chunks):
        first = index * per_chunk
        lines = [
            codec.encode({**request, "_row": row, "_id": str(row)}) + b"\n"
            for row, request in enumerate(requests[first : first + per_chunk], first)
        ]
        data = b"".join(lines)
        name = layout.chunk_name(index, num_chunks)
        keys.append(layout.chunk_file(name, "none"))
        store.create(keys[-1], data)
        digest = codec.sha256(data)
        chunks.append(
            Chunk(name=name, first_row=first, rows=len(lines), bytes=len(data), sha256=digest)
        )
    store.create(layout.ALL_MANIFEST, "".join(f"{key}\n" for key in keys).encode())
    job = Job(
        format_version=FORMAT_VERSION,
        sources=[],
        columns=[],
        rows=len(requests),
        chunks=chunks,
        num_workers=1,
    )
    store.create(layout.JOB_KEY, codec.encode_pretty(job))


def environment(**more: str) -> dict[str, str]:
    """The variables of every measured process: one thread, no network, one GPU at most."""
    # vLLM itself may be on the inherited path only.
    paths = [str(ROOT), str(ROOT / "benchmarks"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "TOKENIZERS_PARALLELISM": "false",
        "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0],
        "PYTHONPATH": os.pathsep.join(paths),
        **more,
    }


@contextlib.contextmanager
def s3_server() -> Iterator[str]:
    """An S3 server on 127.0.0.1, in memory; the environment points to it. Yields a bucket's URL."""
    import socket

    import boto3

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    endpoint = f"http://127.0.0.1:{port}"
    try:
        os.environ |= {
            "AWS_ACCESS_KEY_ID": "testing",
            "AWS_SECRET_ACCESS_KEY": "testing",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": endpoint,
            "AWS_EC2_METADATA_DISABLED": "true",
        }
        for _ in range(300):
            with contextlib.suppress(OSError):
                urllib.request.urlopen(endpoint).close()
                break
            time.sleep(0.1)
        boto3.client("s3", endpoint_url=endpoint).create_bucket(Bucket="benchmark")
        yield "s3://benchmark"
    finally:
        server.kill()
        server.wait()


# --------------------------------------------------------------------------- processes


class Ended(NamedTuple):
    """A process that ended well. `cpu` is by process: name, and CPU seconds since `mark` was called."""

    stdout: str
    wall_seconds: float
    cpu: dict[str, float]


class Watch:
    """CPU seconds of a process and of those below it, by name, looked up now and then while they live."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._seen: dict[int, tuple[str, float]] = {}
        self._marked: dict[int, float] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._loop, daemon=True)
        self._thread.start()

    def mark(self) -> None:
        """Count from here."""
        self._look()
        self._marked = {pid: seconds for pid, (_, seconds) in self._seen.items()}

    def end(self) -> dict[str, float]:
        """Stop looking; return the sums by name."""
        self._ended.set()
        self._thread.join()
        sums: dict[str, float] = {}
        for pid, (name, seconds) in self._seen.items():
            sums[name] = sums.get(name, 0.0) + seconds - self._marked.get(pid, 0.0)
        return sums

    def _loop(self) -> None:
        while not self._ended.wait(0.05):
            self._look()

    def _look(self) -> None:
        waiting = [self._pid]
        while waiting:
            pid = waiting.pop()
            folder = Path("/proc") / str(pid)
            with contextlib.suppress(OSError, ValueError, IndexError):
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
                command = (folder / "cmdline").read_bytes().decode().split("\0")
                seconds = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
                if any(command):  # one that is ending has none any more
                    self._seen[pid] = (_name(command), seconds)
                for task in (folder / "task").iterdir():
                    with contextlib.suppress(OSError):  # a thread may end meanwhile
                        waiting += map(int, (task / "children").read_text().split())


def _name(command: list[str]) -> str:
    text = " ".join(command)
    for part, name in (
        ("batchinfer.engines.host", "engine host"),
        ("batchinfer", "worker"),
        ("EngineCore", "engine core"),
        ("Worker", "engine worker"),
        ("spawn_main", "engine core"),
    ):
        if part in text:
            return name
    return "driver"


def run(
    command: Sequence[str],
    *,
    env: dict[str, str],
    is_ready: Callable[[str], bool] = lambda _: False,
) -> Ended:
    """Run a command to its end. `is_ready` tells by a line of its stderr from when on CPU seconds count."""
    begin = time.monotonic()
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env
    )
    assert process.stdout
    assert process.stderr
    watch = Watch(process.pid)
    lines: list[str] = []

    def read() -> None:
        assert process.stderr
        for line in process.stderr:
            lines.append(line)
            if is_ready(line):
                watch.mark()

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    stdout = process.stdout.read()
    status = process.wait()
    wall = time.monotonic() - begin
    reader.join(5)
    cpu = watch.end()
    if status:
        sys.exit(f"{' '.join(command)}: exit {status}\n{''.join(lines)[-4000:]}")
    return Ended(stdout, wall, cpu)


def last_object(text: str) -> dict[str, Any]:
    """The JSON object of the last line."""
    found: dict[str, Any] = json.loads(text.strip().splitlines()[-1])
    return found


def engine_options(engine: dict[str, Any]) -> list[str]:
    """The same engine arguments as options of the worker."""
    options: list[str] = []
    for name, value in engine.items():
        option = name.replace("_", "-")
        if isinstance(value, bool) and name in EngineConfig.__struct_fields__:
            options.append(f"--{option}" if value else f"--no-{option}")
        elif name in EngineConfig.__struct_fields__:
            options += [f"--{option}", str(value)]
        else:
            options += ["--engine-arg", f"{name}={json.dumps(value)}"]
    return options


def run_worker(
    job: str,
    output: str,
    model: Path,
    engine: dict[str, Any],
    *options: str,
    env: dict[str, str],
    program: Sequence[str] = ("-m", "batchinfer.worker"),
) -> tuple[dict[str, Any], Ended]:
    """Run a worker over a whole job; its result, and what its processes used from the first request on."""
    command = [sys.executable, *program, "--job", job, "--output", output]
    command += ["--model", str(model), "--log-format", "json", *engine_options(engine), *options]
    ended = run(command, env=env, is_ready=lambda line: '"engine_ready"' in line)
    result = last_object(ended.stdout)
    if result["status"] != "SUCCESS" or result["error_count"]:
        sys.exit(f"{output}: {result}")
    return result, ended
