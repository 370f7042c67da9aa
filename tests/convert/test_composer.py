"""`convert composer-to-hf`: what a real checkpoint holds, what is refused, and that nothing half-written shows."""

from __future__ import annotations

import functools
import json
import os
import resource
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from batchinfer.cli.main import main
from batchinfer.convert import composer
from batchinfer.storage.opening import open_store
from composer_file import composer_content, write_composer_file
from tiny_model import write_tiny_model

pytestmark = pytest.mark.vllm  # needs torch and transformers, which the extra `cpu` brings


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def checkpoint(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint") / "ep0-ba2000-rank0.pt"
    return write_composer_file(path, composer_content(model))


def convert(*arguments: str | Path) -> int:
    return main(["convert", "composer-to-hf", *map(str, arguments)])


def answers(folder: Path) -> list[list[int]]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    found = []
    for prompt in ("one two", "What is a bucket?"):
        tokens = tokenizer(prompt, return_tensors="pt").input_ids
        found.append(loaded.generate(tokens, max_new_tokens=12, do_sample=False)[0].tolist())
    return found


def saved(tmp_path: Path, content: Any) -> Path:
    path = tmp_path / "ep0-ba1-rank0.pt"
    torch.save(content, path)
    return path


class TestAWholeCheckpoint:
    def test_it_answers_as_the_model_before(
        self, checkpoint: Path, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert convert(checkpoint, tmp_path / "hf") == 0
        result = json.loads(capsys.readouterr().out)
        assert result["status"] == "SUCCESS"
        assert result["files"] == len(list((tmp_path / "hf").iterdir()))
        assert answers(tmp_path / "hf") == answers(model)
        before, after = (
            load_file(folder / "model.safetensors") for folder in (model, tmp_path / "hf")
        )
        assert set(after) == set(before)
        assert all(torch.equal(after[name], before[name]) for name in before)

    def test_its_tokenizer_is_the_same_to_the_byte_of_meaning(
        self, checkpoint: Path, model: Path, tmp_path: Path
    ) -> None:
        assert convert(checkpoint, tmp_path / "hf") == 0
        for name in ("tokenizer.json", "tokenizer_config.json"):
            assert json.loads((tmp_path / "hf" / name).read_text()) == json.loads(
                (model / name).read_text()
            )
        assert (tmp_path / "hf/chat_template.jinja").read_text() == (
            model / "chat_template.jinja"
        ).read_text()
        assert "_name_or_path" not in json.loads((tmp_path / "hf/config.json").read_text())

    def test_names_of_tokenizer_files_without_their_ending_are_those_of_older_versions(
        self, model: Path, tmp_path: Path
    ) -> None:
        content = composer_content(model)
        state = content["state"]["integrations"]["huggingface"]
        merges = {"file_extension": ".txt", "content": ["#version: 0.2", "a b", ""]}
        state["tokenizer"] = {
            name.removesuffix(file["file_extension"]): file
            for name, file in state["tokenizer"].items()
        } | {"merges": merges, "spiece": {"file_extension": ".model", "content": b"\x00\xff"}}
        assert convert(saved(tmp_path, content), tmp_path / "hf") == 0
        assert (tmp_path / "hf/merges.txt").read_text() == "#version: 0.2\na b\n"
        assert (tmp_path / "hf/spiece.model").read_bytes() == b"\x00\xff"
        assert (tmp_path / "hf/tokenizer.json").exists()

    def test_dtype_converts_weights_and_config(self, model: Path, tmp_path: Path) -> None:
        weights = {
            name: tensor.float() for name, tensor in load_file(model / "model.safetensors").items()
        }
        path = saved(tmp_path, composer_content(model, weights=weights))
        assert convert(path, tmp_path / "hf", "--dtype", "bf16") == 0
        after = load_file(tmp_path / "hf/model.safetensors")
        for name, tensor in weights.items():
            assert after[name].dtype == torch.bfloat16
            assert torch.equal(after[name], tensor.to(torch.bfloat16))
        assert json.loads((tmp_path / "hf/config.json").read_text())["torch_dtype"] == "bfloat16"

    def test_values_too_large_for_the_type_are_counted(
        self, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        weights = {
            name: tensor.float() for name, tensor in load_file(model / "model.safetensors").items()
        }
        weights["model.norm.weight"][:2] = 1e6
        path = saved(tmp_path, composer_content(model, weights=weights))
        assert convert(path, tmp_path / "hf", "--dtype", "fp16") == 0
        assert "model.norm.weight: 2 values are too large for fp16" in capsys.readouterr().err

    def test_large_weights_are_divided_into_files_with_an_index(
        self, checkpoint: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(composer, "SHARD_BYTES", 300_000)
        assert convert(checkpoint, tmp_path / "hf") == 0
        index = json.loads((tmp_path / "hf/model.safetensors.index.json").read_text())
        files = set(index["weight_map"].values())
        assert len(files) > 1
        assert files == {path.name for path in (tmp_path / "hf").glob("model-*.safetensors")}
        assert answers(tmp_path / "hf") == answers(model)

    def test_tied_weights_that_share_memory_are_written(self, model: Path, tmp_path: Path) -> None:
        weights = load_file(model / "model.safetensors")
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
        path = saved(tmp_path, composer_content(model, weights=weights))
        assert convert(path, tmp_path / "hf") == 0
        assert answers(tmp_path / "hf") == answers(model)


class TestAdapters:
    LORA = "base_model.model.model.layers.0.self_attn.q_proj"

    def adapter(self, content: dict) -> dict[str, torch.Tensor]:
        config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}
        content["state"]["integrations"]["huggingface"]["model"]["peft_config"] = {
            "file_extension": ".json",
            "content": config | {"base_model_name_or_path": "org/base", "inference_mode": False},
        }
        return {
            f"{self.LORA}.lora_A.default.weight": torch.ones(2, 128),
            f"{self.LORA}.lora_B.default.weight": torch.ones(128, 2),
        }

    def test_an_adapter_alone_becomes_an_adapter_folder(self, model: Path, tmp_path: Path) -> None:
        content = composer_content(model)
        adapter = self.adapter(content)
        content["state"]["model"] = {f"model.{name}": value for name, value in adapter.items()}
        assert convert(saved(tmp_path, content), tmp_path / "lora") == 0
        assert set(load_file(tmp_path / "lora/adapter_model.safetensors")) == {
            f"{self.LORA}.lora_A.weight",
            f"{self.LORA}.lora_B.weight",
        }
        config = json.loads((tmp_path / "lora/adapter_config.json").read_text())
        assert (config["r"], config["inference_mode"]) == (2, True)
        assert not (tmp_path / "lora/config.json").exists()

    def test_a_model_with_its_adapter_becomes_both(self, model: Path, tmp_path: Path) -> None:
        content = composer_content(model)
        adapter = self.adapter(content)
        base = {
            "model.base_model.model." + name.replace("q_proj.weight", "q_proj.base_layer.weight"): value
            for name, value in load_file(model / "model.safetensors").items()
        }  # fmt: skip
        content["state"]["model"] = base | {f"model.{key}": value for key, value in adapter.items()}
        assert convert(saved(tmp_path, content), tmp_path / "hf") == 0
        assert answers(tmp_path / "hf") == answers(model)
        assert len(load_file(tmp_path / "hf/adapter/adapter_model.safetensors")) == 2


class Payload:
    """Pickled as a call of `function`."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


TORCHSCRIPT = """
import sys, warnings
warnings.simplefilter("ignore")
import torch

class Evil(torch.nn.Module):
    def __init__(self, mark: str):
        super().__init__()
        self.mark = mark
        self.x = torch.ones(2)

    @torch.jit.export
    def __getstate__(self):
        return (self.mark, self.x, self.training)

    @torch.jit.export
    def __setstate__(self, state: tuple[str, torch.Tensor, bool]):
        self.mark, self.x, self.training = state[0], state[1], state[2]
        torch.save([self.x], self.mark)

    def forward(self):
        return self.x

torch.jit.save(torch.jit.script(Evil(sys.argv[2])), sys.argv[1])
"""
MPT = {"model_type": "mpt", "d_model": 8, "n_heads": 2, "n_layers": 1, "vocab_size": 16,
       "max_seq_len": 8, "bos_token_id": 0, "eos_token_id": 0}  # fmt: skip


class TestCodeInTheFile:
    @pytest.mark.parametrize(
        ("payload", "name"),
        [
            (lambda mark: Payload(os.system, f"touch {mark}"), "system"),
            (lambda mark: Payload(eval, f"open({str(mark)!r}, 'w')"), "builtins.eval"),
            (lambda mark: Payload(exec, f"open({str(mark)!r}, 'w')"), "builtins.exec"),
            (lambda mark: Payload(open, str(mark), "w"), "open"),
            (lambda mark: Payload(subprocess.Popen, ["touch", str(mark)]), "Popen"),
            (lambda mark: functools.partial(os.system, f"touch {mark}"), "posix.system"),
        ],
    )
    def test_it_is_refused_by_name_and_never_run(
        self, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], payload, name: str
    ) -> None:
        mark = tmp_path / "was-run"
        content = composer_content(model)
        content["state"]["callbacks"]["evil"] = payload(mark)
        assert convert(saved(tmp_path, content), tmp_path / "hf") == 2
        error = capsys.readouterr().err
        assert "would run" in error
        assert name in error
        assert not mark.exists()
        assert not (tmp_path / "hf").exists()

    def test_a_torchscript_archive_is_refused_before_torch_sees_it(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """torch.load hands such a file to torch.jit.load, whose `__setstate__` may write any file."""
        mark, script = tmp_path / "was-run", tmp_path / "make_evil.py"
        script.write_text(TORCHSCRIPT)
        subprocess.run([sys.executable, script, tmp_path / "evil.pt", mark], check=True)
        assert convert(tmp_path / "evil.pt", tmp_path / "hf") == 2
        assert "is a TorchScript archive, which is a program" in capsys.readouterr().err
        assert not mark.exists()
        model = tmp_path / "mpt"
        model.mkdir()
        (model / "config.json").write_text(json.dumps(MPT))
        (tmp_path / "evil.pt").rename(model / "pytorch_model.bin")
        command = ["convert", "mpt-to-ft", str(model), str(tmp_path / "ft"), "--gpus", "1"]
        assert main(command) == 2
        assert "is a TorchScript archive" in capsys.readouterr().err
        assert not mark.exists()

    def test_a_call_of_something_unknown_is_not_made_either(
        self, model: Path, tmp_path: Path
    ) -> None:
        mark = tmp_path / "was-run"
        content = composer_content(model)
        content["state"]["callbacks"]["odd"] = Payload(Path.touch, mark)
        assert convert(saved(tmp_path, content), tmp_path / "hf") == 2
        assert not mark.exists()

    def test_a_call_that_would_fill_the_memory_is_not_made(
        self, model: Path, tmp_path: Path
    ) -> None:
        content = composer_content(model)
        content["state"]["callbacks"] = {"a": Payload(list, Payload(range, 10**14)), "b": {1, 2}}
        assert convert(saved(tmp_path, content), tmp_path / "hf") == 0
        content["state"]["callbacks"] = {"a": Payload(bytearray, 10**14)}
        assert convert(saved(tmp_path, content), tmp_path / "more") == 2

    def test_py_files_are_written_only_when_trusted(self, model: Path, tmp_path: Path) -> None:
        content = composer_content(model)
        state = content["state"]["integrations"]["huggingface"]
        code = {"file_extension": ".py", "content": "raise SystemExit('was run')\n"}
        state["tokenizer"]["tokenization_own.py"] = code
        path = saved(tmp_path, content)
        assert convert(path, tmp_path / "plain") == 0
        assert not (tmp_path / "plain/tokenization_own.py").exists()
        assert convert(path, tmp_path / "trusted", "--trust-remote-code") == 0
        assert (tmp_path / "trusted/tokenization_own.py").read_text() == code["content"]

    def test_a_file_name_with_a_path_is_refused(
        self, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        content = composer_content(model)
        state = content["state"]["integrations"]["huggingface"]
        state["tokenizer"]["../../evil.json"] = {"file_extension": ".json", "content": {}}
        assert convert(saved(tmp_path, content), tmp_path / "hf") == 2
        assert "has a path" in capsys.readouterr().err


class TestWhatIsRefused:
    def refused(
        self, capsys: pytest.CaptureFixture[str], dest: Path, *arguments: str | Path
    ) -> str:
        assert convert(arguments[0], dest, *arguments[1:]) == 2
        error = capsys.readouterr().err
        assert "Traceback" not in error
        assert "hint: " in error
        assert not dest.exists()
        return error

    def test_files_of_other_kinds(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], model: Path
    ) -> None:
        dest = tmp_path / "hf"
        for head in (b"GGUF123", b"", b"hello world", b"\x89HDF\r\n", b"\x80\x02"):
            (tmp_path / "x.pt").write_bytes(head)
            assert "no file that torch.save" in self.refused(capsys, dest, tmp_path / "x.pt")
        safetensors = model / "model.safetensors"
        assert "no file that torch.save" in self.refused(capsys, dest, safetensors)
        assert "no such file" in self.refused(capsys, dest, tmp_path / "absent.pt")
        assert "bare state dict" in self.refused(
            capsys, dest, saved(tmp_path, {"a": torch.ones(2)})
        )
        assert "DeepSpeed" in self.refused(capsys, dest, saved(tmp_path, {"module": {}, "x": 1}))
        assert "no Composer checkpoint" in self.refused(capsys, dest, saved(tmp_path, [1, 2]))

    def test_a_file_with_a_flipped_bit_in_a_weight(
        self, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        source = saved(tmp_path, composer_content(model))
        data = bytearray(source.read_bytes())
        with zipfile.ZipFile(source) as archive:
            part = max(archive.infolist(), key=lambda each: each.file_size)
        data[part.header_offset + part.file_size // 2] ^= 4
        source.write_bytes(data)
        assert "is damaged (Bad CRC-32 for file" in self.refused(capsys, tmp_path / "hf", source)

    @pytest.mark.parametrize("part", [0.1, 0.5, 0.99])
    def test_a_file_that_is_cut_short(
        self, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], part: float
    ) -> None:
        data = checkpoint.read_bytes()
        (tmp_path / "cut.pt").write_bytes(data[: int(len(data) * part)])
        assert "is cut short" in self.refused(capsys, tmp_path / "hf", tmp_path / "cut.pt")

    def test_a_damaged_pickle(
        self, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        data = bytearray(checkpoint.read_bytes())
        place = data.index(b"integrations")
        data[place - 40 : place] = bytes(40)
        (tmp_path / "odd.pt").write_bytes(data)
        assert "is damaged (Bad CRC-32" in self.refused(
            capsys, tmp_path / "hf", tmp_path / "odd.pt"
        )

    def test_a_sharded_checkpoint_says_how_to_merge(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        folder = tmp_path / "ep0-ba1"
        folder.mkdir()
        (folder / "__0_0.distcp").touch()
        error = self.refused(capsys, tmp_path / "hf", folder)
        assert "sharded" in error
        assert "dcp_to_torch" in error

    def test_no_tokenizer_but_one_can_be_named(
        self, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        content = composer_content(model)
        content["state"]["integrations"]["huggingface"]["tokenizer"] = {}
        path = saved(tmp_path, content)
        assert "holds no tokenizer" in self.refused(capsys, tmp_path / "hf", path)
        assert convert(path, tmp_path / "hf", "--tokenizer", model) == 0
        assert answers(tmp_path / "hf") == answers(model)

    def test_an_architecture_that_transformers_does_not_know(
        self, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        content = composer_content(model)
        config = content["state"]["integrations"]["huggingface"]["model"]["config"]["content"]
        config["model_type"] = "novelty"
        assert "'novelty' is unknown" in self.refused(
            capsys, tmp_path / "hf", saved(tmp_path, content)
        )

    def test_a_model_without_config_and_one_without_a_weight(
        self, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        content = composer_content(model)
        del content["state"]["model"]["model.model.norm.weight"]
        error = self.refused(capsys, tmp_path / "hf", saved(tmp_path, content))
        assert "model.norm.weight is missing" in error
        content["state"]["integrations"] = {}
        assert "no model config" in self.refused(capsys, tmp_path / "hf", saved(tmp_path, content))

    def test_a_destination_that_holds_something(
        self, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (tmp_path / "hf").mkdir()
        (tmp_path / "hf/mine.txt").write_text("mine")
        assert convert(checkpoint, tmp_path / "hf") == 2
        assert "holds something already" in capsys.readouterr().err
        assert [path.name for path in (tmp_path / "hf").iterdir()] == ["mine.txt"]

    def test_a_destination_that_cannot_be_made(
        self, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (tmp_path / "file").touch()
        error = self.refused(capsys, tmp_path / "file/hf", checkpoint)
        assert "hf: cannot be made" in error
        assert "--scratch-dir" not in error

    def test_folders_made_for_a_destination_go_when_it_is_not_made(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        self.refused(capsys, tmp_path / "a/b/hf", tmp_path / "absent.pt")
        assert list(tmp_path.iterdir()) == []

    def test_a_destination_that_is_a_link(self, checkpoint: Path, tmp_path: Path) -> None:
        (tmp_path / "link").symlink_to("folder")
        assert convert(checkpoint, tmp_path / "link") == 0
        files = [path for path in (tmp_path / "folder").iterdir() if path.is_file()]
        assert tmp_path.joinpath("link").is_symlink()
        assert {path.stat().st_mode & 0o777 for path in files} == {
            (tmp_path / "folder").stat().st_mode & 0o666
        }

    def test_a_disk_that_is_too_small(
        self, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """RLIMIT_FSIZE refuses the write as a full disk does."""
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
        try:
            status = convert(checkpoint, tmp_path / "hf")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        shown = capsys.readouterr().err
        assert status in (2, 34), shown
        assert "Traceback" not in shown
        assert "scratch folder" in shown
        assert list(tmp_path.iterdir()) == []


# Each conversion is a process of its own. Their parent imports torch and transformers for them, which takes seconds.
KILLED = """
import os, pathlib, signal, sys
import safetensors.torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from batchinfer.cli.main import run

write = safetensors.torch.save_file

def kill(*_):
    os.kill(os.getpid(), signal.SIGKILL)

def write_half(weights, path, **options):
    write(weights, path, **options)
    os.truncate(path, os.path.getsize(path) // 2)
    kill()

for place, name, function in [
    (safetensors.torch, "save_file", write_half),
    (pathlib.Path, "rename", kill),
]:
    child = os.fork()
    if not child:
        setattr(place, name, function)
        run(sys.argv[1:])
    print(os.WTERMSIG(os.waitpid(child, 0)[1]), os.path.exists(sys.argv[-1]))
"""


class TestKills:
    def test_after_kills_nothing_half_written_shows_and_the_same_command_finishes(
        self, checkpoint: Path, model: Path, tmp_path: Path
    ) -> None:
        """SIGKILL when half of the weights are written, and just before the folder gets its name."""
        command = ["convert", "composer-to-hf", checkpoint, tmp_path / "hf"]
        killed = subprocess.run(
            [sys.executable, "-c", KILLED, *command], stdout=subprocess.PIPE, text=True
        )
        assert killed.stdout == "9 False\n9 False\n"
        [left] = tmp_path.iterdir()
        assert list(left.rglob("*.safetensors"))
        assert convert(checkpoint, tmp_path / "hf") == 0
        assert answers(tmp_path / "hf") == answers(model)
        assert [path.name for path in tmp_path.iterdir()] == ["hf"], "scratch folders are swept"


@pytest.mark.s3
class TestBuckets:
    def test_from_a_bucket_into_a_bucket(
        self, checkpoint: Path, model: Path, tmp_path: Path, s3_url
    ) -> None:
        url = s3_url()
        open_store(url).create_file("runs/ep0.pt", checkpoint)
        assert convert(f"{url}/runs/ep0.pt", f"{url}/hf", "--scratch-dir", tmp_path) == 0
        store = open_store(f"{url}/hf")
        names = {info.key for info in store.list("")}
        assert {"config.json", "model.safetensors", "tokenizer.json"} <= names
        assert "_UNFINISHED" not in names
        (tmp_path / "copy").mkdir()
        for name in names:
            store.download(name, tmp_path / "copy" / name)
        assert answers(tmp_path / "copy") == answers(model)

    def test_what_a_killed_conversion_left_is_replaced_and_other_data_is_not(
        self, checkpoint: Path, tmp_path: Path, s3_url, capsys: pytest.CaptureFixture[str]
    ) -> None:
        store = open_store(s3_url())
        store.create("model.safetensors", b"of something else")
        assert convert(checkpoint, store.url, "--scratch-dir", tmp_path) == 2
        assert "holds something already" in capsys.readouterr().err
        store.create("_UNFINISHED", b"a kill")
        assert convert(checkpoint, store.url, "--scratch-dir", tmp_path) == 0
        assert store.get("model.safetensors").data != b"of something else"

    def test_a_source_that_is_absent(
        self, tmp_path: Path, s3_url, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert convert(f"{s3_url()}/absent.pt", tmp_path / "hf") == 2
        assert "no such object" in capsys.readouterr().err
