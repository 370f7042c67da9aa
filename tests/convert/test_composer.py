"""`convert composer-to-hf`: what a real checkpoint holds, what is refused, and that nothing half-written shows."""

import copy
import functools
import json
import os
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from batchinfer.cli.main import main
from models import DEMO_MODEL

pytestmark = pytest.mark.vllm  # needs torch and transformers, which the extra `cpu` brings


@pytest.fixture
def state():
    from composer_file import composer_content

    return composer_content(DEMO_MODEL)["state"]


def convert(*arguments: str | Path) -> int:
    return main(["convert", "composer-to-hf", *map(str, arguments)])


def saved(tmp_path: Path, state: Any) -> Path:
    import torch

    torch.save({"state": state, "rng": []}, tmp_path / "ep0-ba1-rank0.pt")
    return tmp_path / "ep0-ba1-rank0.pt"


def refused(capsys: pytest.CaptureFixture[str], source: str | Path, dest: Path) -> str:
    assert convert(source, dest) == 2
    error = capsys.readouterr().err
    assert "Traceback" not in error
    assert "hint: " in error
    assert not dest.exists()
    return error


def answers(folder: Path) -> list[int]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokens = AutoTokenizer.from_pretrained(folder)("What is this?", return_tensors="pt").input_ids
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    return loaded.generate(tokens, max_new_tokens=20, do_sample=False)[0].tolist()


def at(content: Any, *path: Any) -> Any:
    return functools.reduce(lambda part, name: part[name], path, content)


TOKENIZER = ("integrations", "huggingface", "tokenizer")
CONFIG = ("integrations", "huggingface", "model", "config", "content")
NORM = ("model", "model.model.norm.weight")


def test_it_answers_as_the_model_before(state, tmp_path):
    import torch
    from safetensors.torch import load_file

    assert convert(saved(tmp_path, state), tmp_path / "hf") == 0
    before, after = (
        load_file(each / "model.safetensors") for each in (DEMO_MODEL, tmp_path / "hf")
    )
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        files = ((each / name).read_text() for each in (DEMO_MODEL, tmp_path / "hf"))
        assert json.loads(next(files)) == json.loads(next(files))
    assert "_name_or_path" not in (tmp_path / "hf/config.json").read_text()
    assert answers(tmp_path / "hf") == answers(DEMO_MODEL)


def test_tied_weights_and_several_files_load_again(state, tmp_path, monkeypatch):
    save = functools.partial(huggingface_hub.save_torch_state_dict, max_shard_size=300_000)
    monkeypatch.setattr(huggingface_hub, "save_torch_state_dict", save)
    state["model"]["model.lm_head.weight"] = at(state, "model", "model.model.embed_tokens.weight")
    assert convert(saved(tmp_path, state), tmp_path / "hf") == 0
    index = json.loads((tmp_path / "hf/model.safetensors.index.json").read_text())
    # vLLM reads the embeddings, not the head, if the config ties them.
    assert "model.embed_tokens.weight" in index["weight_map"]
    assert len(list((tmp_path / "hf").glob("model-*.safetensors"))) > 1
    assert answers(tmp_path / "hf") == answers(DEMO_MODEL)


def test_dtype_converts_weights_and_config(state, tmp_path, capsys):
    import torch
    from safetensors.torch import load_file

    state["model"] = {name: tensor.float() for name, tensor in state["model"].items()}
    at(state, *NORM)[:2] = 1e6
    assert convert(saved(tmp_path, state), tmp_path / "hf", "--dtype", "fp16") == 0
    assert "model.norm.weight: 2 values are too large for fp16" in capsys.readouterr().err
    for name, tensor in load_file(tmp_path / "hf/model.safetensors").items():
        assert torch.equal(tensor, state["model"][f"model.{name}"].to(torch.float16))
    assert json.loads((tmp_path / "hf/config.json").read_text())["torch_dtype"] == "float16"


class Payload:
    """Pickled as a call of `function`."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


def evil_script(mark: str) -> Any:
    """Writes a file when torch.jit.load reads it, to which torch.load hands an archive of TorchScript."""
    import torch

    class Evil(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mark = mark

        @torch.jit.export
        def __getstate__(self):
            return (self.mark, self.training)

        @torch.jit.export
        def __setstate__(self, state: tuple[str, bool]):
            self.mark, self.training = state[0], state[1]
            torch.save([torch.ones(1)], self.mark)

    return torch.jit.script(Evil())


def test_it_is_never_run(state, tmp_path):
    mark = tmp_path / "was-run"
    for number, payload in enumerate((
        Payload(os.system, f"touch {mark}"), Payload(eval, f"open({str(mark)!r}, 'w')"),
        Payload(subprocess.Popen, ["touch", str(mark)]), Payload(Path.touch, mark),
        functools.partial(os.system, f"touch {mark}"), Payload(list, Payload(range, 10**14)),
    )):  # fmt: skip
        state["callbacks"]["evil"] = payload
        assert convert(saved(tmp_path, state), tmp_path / f"hf{number}") in (0, 2)
        assert not mark.exists()


@pytest.mark.filterwarnings("ignore")
def test_a_torchscript_archive_is_refused(tmp_path, capsys):
    import torch
    from transformers import MptConfig

    MptConfig(d_model=8, n_heads=2, n_layers=1, bos_token_id=0).save_pretrained(tmp_path / "m")
    evil, mark = tmp_path / "m/pytorch_model.bin", tmp_path / "was-run"
    evil_script(str(mark)).save(evil)
    assert "is a TorchScript archive" in refused(capsys, evil, tmp_path / "hf")
    assert main(["convert", "mpt-to-ft", str(evil.parent), str(tmp_path), "--gpus", "1"]) == 2
    assert "is a TorchScript archive" in capsys.readouterr().err
    assert not mark.exists()
    torch.jit.load(evil)
    assert mark.exists(), "the file would have done it"


@pytest.mark.parametrize("ending", [".py", ""])
def test_py_files_are_written_only_when_trusted(state, tmp_path, ending):
    at(state, *TOKENIZER)["evil.py"] = {"file_extension": ending, "content": "raise SystemExit"}
    assert convert(saved(tmp_path, state), tmp_path / "plain") == 0
    assert not (tmp_path / "plain/evil.py").exists()
    assert convert(saved(tmp_path, state), tmp_path / "own", "--trust-remote-code") == 0
    assert (tmp_path / "own/evil.py").read_text() == "raise SystemExit"


def malformed() -> list[tuple[tuple[str, ...], Any, str]]:
    """Places in a checkpoint, what stands there instead, and what the error says."""
    import torch

    return [
        (("model", "model.extra"), torch.ones(2), "unexpected_keys: extra"),
        (("model", "model.extra"), torch.ones(1).expand(10**9), "extra is no whole tensor"),
        (NORM, torch.ones(3), "mismatched_keys: ('model.norm.weight'"),
        (("model",), {}, "more weights than there are"),
        ((*CONFIG, "model_type"), "t5", "no causal language model"),
        ((*CONFIG, "num_labels"), 10**12, '"num_labels": 1000000000000'),
        (("integrations",), None, "no dictionary state/integrations/huggingface"),
        *(((*TOKENIZER, name), {"content": {}}, "is no name of a tokenizer's file")
          for name in ("../../evil.json", "config.json", "model.index.json", "a.so", "..")),
    ]  # fmt: skip


def test_an_error_says_what_is_wrong(state, tmp_path, capsys):
    for path, value, said in malformed():
        odd = copy.deepcopy(state)
        at(odd, *path[:-1])[path[-1]] = value
        assert said in refused(capsys, saved(tmp_path, odd), tmp_path / "hf")


def test_other_and_damaged_files(state, tmp_path, capsys):
    path, dest = saved(tmp_path, state), tmp_path / "hf"
    whole = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        part = max(archive.infolist(), key=lambda each: each.file_size)
    flipped = bytearray(whole)
    flipped[part.header_offset + part.file_size // 2] ^= 4
    for data in (b"", b"GGUF123", b"\x80\x02", whole[:999], whole[:-9], bytes(flipped)):
        path.write_bytes(data)
        assert "cannot be read" in refused(capsys, path, dest)
    assert "dcp_to_torch" in refused(capsys, tmp_path, dest)
