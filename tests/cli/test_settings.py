"""Options: command line over environment over settings file over default; the settings files of the examples."""

import re
from pathlib import Path

import click
import pytest
import yaml

from batchinfer.cli.main import group
from batchinfer.cli.server_args import ServerCommand
from batchinfer.cli.settings import read_settings
from batchinfer.core.redaction import without_secrets
from batchinfer.split.splitting import command as split
from making import ECHO

CONTEXT = click.Context(group)
COMMANDS = {name: found for name in group.commands if (found := group.get_command(CONTEXT, name))}
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def test_each_value_comes_from_where_it_wins_and_no_secret_is_shown(call, tmp_path, monkeypatch):
    path = tmp_path / "run.yaml"
    path.write_text(
        "sampling: {max_tokens: 9, n: 3, top_p: 0.1, temperature: null, stop: ['###', END]}\n"
        "split: {num_chunks: 4}\nprompt: {blank-columns: [a, 'b, c '], column: {image: photo}}\n"
        "vllm: {hf_token: hf_abc}\n"
    )
    monkeypatch.setenv("BATCHINFER_CONFIG", str(path))
    monkeypatch.setenv("BATCHINFER_WORKER_TOP_P", "0.5")
    monkeypatch.setenv("BATCHINFER_WORKER_SEED", str(2**32 + 7))
    monkeypatch.setenv("BATCHINFER_WORKER_SAMPLING", "min_tokens=1,x=1")
    done = call("worker", "--job", "s3://nowhere/job", *ECHO, "--n", "4", "--show-config")
    assert done.status == 0, done.err
    found = done.result
    options = found["options"]
    assert options["n"] == {"value": 4, "from": "command line"}
    assert options["top-p"] == {"value": 0.5, "from": "environment"}
    assert options["seed"] == {"value": "4294967303", "from": "environment"}
    assert found["resolved"]["engine"]["seed"] == 7, "vLLM's own, which has 32 bits"
    assert options["sampling"]["value"] == ["min_tokens=1,x=1"]
    assert options["max-tokens"] == {"value": 9, "from": "settings file"}
    assert options["temperature"] == {"value": None, "from": "default"}
    prompt = found["resolved"]["prompt"]
    assert (prompt["body"]["stop"], prompt["blank_columns"]) == (["###", "END"], ["a", "b, c "])
    assert prompt["columns"] == {"image": ["photo"]}
    assert found["resolved"]["engine"]["server_args"] == ["--hf-token", "(secret)"]
    assert "hf_abc" not in done.out + done.err
    assert read_settings(path, split) == {"num_chunks": "4"}, "the run's sections are not its"


@pytest.mark.parametrize(
    ("option", "text", "values"),
    [
        ("stop", "END OF ANSWER", ["END OF ANSWER"]),
        ("stop", '["END OF", "\\n", 3]', ["END OF", "\n", "3"]),
        ("choices", "very positive,negative", ["very positive,negative"]),
        ("manifest", "/my dir/w.txt", ["/my dir/w.txt"]),
    ],
)
def test_a_variable_is_one_value_of_an_option_that_may_be_repeated_and_a_json_list_several(
    option, text, values, call, monkeypatch
):
    """They were divided at blanks, and every answer was cut at the first of three words."""
    name = {"manifest": "DATA_METADATA"}.get(option, f"BATCHINFER_WORKER_{option.upper()}")
    monkeypatch.setenv(name, text)
    found = call("worker", *ECHO, "--show-config").result["options"]
    assert found[option] == {"value": values, "from": "environment"}


@pytest.mark.parametrize(
    ("name", "text", "read"),
    [
        ("run", "input: {job: j, limit: 20, output: o}", {"limit": "20"}),
        ("launch", "behaviour: {price_per_hour: 2}", {"price_per_hour": "2"}),
        ("check", "behaviour: {price_per_hour: 2}", {"price_per_hour": "2"}),
    ],
)
def test_a_key_of_the_worker_that_a_command_declares_anew_is_its_own(name, text, read, tmp_path):
    (tmp_path / "run.yaml").write_text(text)
    assert read_settings(tmp_path / "run.yaml", COMMANDS[name]) == read


ARGUMENTS = {
    "run": ["-"],
    "generate": ["-p", "a"],
    "launch": ["job", "--run", "r", "--on", "slurm"],
}


SERVERS = [name for name, command in COMMANDS.items() if isinstance(command, ServerCommand)]


@pytest.mark.parametrize("name", SERVERS)
def test_show_config_of_every_command_that_starts_a_server_starts_nothing(
    name, call, tmp_path, monkeypatch
):
    """It was taken for an option of vLLM's server, and `launch` submitted workers."""
    monkeypatch.chdir(tmp_path)
    done = call(name, *ARGUMENTS.get(name, ()), *ECHO[:2], "--show-config", "--max-model-len", "9")
    assert done.status == 0, done.err
    assert done.result["options"]["engine"] == {"value": "echo", "from": "command line"}
    assert done.result["resolved"]["engine"]["server_args"] == ["--max-model-len", "9"]
    assert not list(tmp_path.iterdir())


def test_secrets_in_words_are_not_shown():
    words = ["HF_TOKEN=x", "--api-key=x", "--name", "a=b"]
    assert without_secrets(words) == ["HF_TOKEN=(secret)", "--api-key=(secret)", "--name", "a=b"]


@pytest.mark.parametrize("name", ["axolotl-guide", "completions-requests", "openai-batch"])
def test_example_settings_are_read(name, call):
    found = call("worker", "--config", EXAMPLES / f"{name}.yaml", "--show-config").result
    assert found["options"]["model"]["from"] == "settings file"


def test_every_line_of_the_full_example_is_an_option(call, tmp_path):
    text = (EXAMPLES / "run.yaml").read_text()
    for name in ("prompt.jinja", "system.txt", "tools.json"):
        (tmp_path / name).write_text('[{"name": "f"}]')
        text = text.replace(name, str(tmp_path / name))
    (tmp_path / "run.yaml").write_text(text := re.sub(r"(?m)^  #(?=\w)", "  ", text))
    found = call("worker", "--config", tmp_path / "run.yaml", "--show-config").result
    sections = yaml.safe_load(text)
    servers = [f"--{name.replace('_', '-')}" for name in sections.pop("vllm")]
    assert set(servers) <= set(found["resolved"]["engine"]["server_args"])
    names = [name.replace("_", "-") for section in sections.values() for name in section]
    assert len(names) > 30
    assert {found["options"][name]["from"] for name in names} == {"settings file"}
