"""Adapters to clusters: what they would submit, and what they make of their clients' answers."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import kubernetes_validate
import msgspec
import pytest
import yaml

from batchinfer.cli.shell import quote
from batchinfer.clusters import (
    CLUSTERS,
    STATES,
    OutcomeUnknown,
    Plan,
    check_cluster_options,
    find_cluster,
)
from batchinfer.clusters.kubernetes import job_name
from batchinfer.clusters.launches import find_launches, record_launch, record_submission
from batchinfer.core.errors import ConfigError
from batchinfer.runs.launched import cancel_launches
from batchinfer.storage.opening import open_store

ROOT = Path(__file__).parents[2]
HARD = (
    'Say "it\'s"\r\nin $HOME: \u3000$$5, $(HOME), ${HOME} ${NAME}\u00a0\U0001f469\u200d\U0001f680'
)
"""Text that bash, YAML and Kubernetes could each take for more than text. Some letters have no glyph of their own."""
PLAN = Plan(
    id="20261122-101112-ab12",
    name="label",
    workers=3,
    job="s3://bucket/my job",
    run="s3://bucket/my job/runs/a",
    model="org/model",
    words=f"--engine echo --system-prompt {quote(HARD)}",
    environment={"AWS_REGION": "eu-west-1", "GREETING": HARD},
)


def plan(**changes: Any) -> Plan:
    return msgspec.structs.replace(PLAN, **changes)


def fake_client(folder: Path, name: str, script: str) -> None:
    """Put a program on the PATH that keeps its arguments and standard input, and answers as `script` does."""
    path = folder / name
    path.write_text(
        f'#!/bin/bash\nprintf "%s\\n" "$*" >>{folder}/{name}.calls\n'
        f'case "$1" in --parsable | apply) cat >{folder}/{name}.stdin ;; esac\n{script}\n'
    )
    path.chmod(0o755)


@pytest.fixture
def clients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}/usr/bin{os.pathsep}/bin")
    monkeypatch.chdir(tmp_path)
    return folder


def words_of(script: str, tmp_path: Path) -> list[str]:
    """Run a bash script whose worker is a program that prints its arguments, and return these."""
    program = tmp_path / "printer"
    program.write_text('#!/bin/bash\nprintf "%s\\0" "$@"\n')
    program.chmod(0o755)
    done = subprocess.run(
        ["bash", "-c", script], capture_output=True, check=True, env={"PATH": "/usr/bin:/bin"}
    )
    return done.stdout.decode().split("\0")[:-1]


EXPECTED_WORDS = [
    "--job", "s3://bucket/my job", "--output", "s3://bucket/my job/runs/a", "--model", "org/model",
    "--engine", "echo", "--system-prompt", HARD,
]  # fmt: skip


@pytest.mark.parametrize("name", CLUSTERS)
def test_each_cluster_says_what_its_options_mean(name: str) -> None:
    cluster = find_cluster(name)
    assert all(cluster.options.values())
    check_cluster_options(name, dict.fromkeys(cluster.options, "x"))
    with pytest.raises(ConfigError, match="no such option"):
        check_cluster_options(name, {"colour": "red"})


@pytest.mark.parametrize("name", CLUSTERS)
def test_options_that_are_no_part_of_a_line_are_refused(name: str) -> None:
    option = next(iter(find_cluster(name).options))
    with pytest.raises(ConfigError, match="expected letters that can be printed"):
        check_cluster_options(name, {option: "a\nb"})


@pytest.mark.parametrize("name", ["local", "kubernetes", "skypilot", "ray"])
def test_options_that_are_too_long_to_start_a_worker_are_refused(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm alone takes more: its script is a file, and each word of the worker is one on its own."""
    monkeypatch.chdir(ROOT)
    asked = plan(words=f"--examples <(printf %s {'x' * 131_072})", options={"image": "i"})
    with pytest.raises(ConfigError, match="expected at most 120000"):
        find_cluster(name).check(asked)
    with pytest.raises(OSError, match="Argument list too long"):
        subprocess.run(["bash", "-c", f"exec true {asked.words}"], check=False)


@pytest.mark.parametrize(
    ("name", "handle", "command"),
    [
        ("slurm", {"job": "4711"}, "scancel 4711"),
        (
            "kubernetes",
            {"job": "a", "namespace": "b"},
            "kubectl delete job --ignore-not-found --wait=false --namespace b -- a",
        ),
        ("skypilot", {"jobs": [4, 5]}, "sky jobs cancel -y 4 5"),
        (
            "skypilot",
            {"jobs": [4], "made_pool": "warm"},
            "sky jobs cancel -y 4 && sky jobs pool down -y warm",
        ),
        (
            "ray",
            {"address": "http://h:8265", "job": "a-b"},
            "ray job stop --address http://h:8265 a-b",
        ),
        (
            "local",
            {"folder": "/my logs/20261122-101112-ab12"},
            f"{sys.executable} -m batchinfer.clusters.local --cancel '/my logs/20261122-101112-ab12'",
        ),
    ],
)
def test_users_are_told_how_to_cancel(name: str, handle: dict[str, Any], command: str) -> None:
    assert find_cluster(name).cancel_command(handle) == command


def test_an_unknown_cluster_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError) as raised:
        find_cluster("slrum")
    assert "did you mean 'slurm'?" in raised.value.message


STRANGE = [
    ("slurm", {"job": "--me"}),
    ("slurm", {"job": ""}),
    ("slurm", {}),
    ("kubernetes", {"job": "--all", "namespace": "production"}),
    ("kubernetes", {"job": job_name(PLAN), "namespace": "--all-namespaces"}),
    ("kubernetes", {"job": ["--all"]}),
    ("skypilot", {"jobs": ["--all"], "name": f"label-{PLAN.id}"}),
    ("skypilot", {"jobs": 4, "name": f"label-{PLAN.id}"}),
    ("skypilot", {"jobs": [4], "name": "payroll"}),
    ("ray", {"job": "payroll", "address": "http://127.0.0.1:8265"}),
    ("ray", {"job": f"label-{PLAN.id}", "address": "http://elsewhere"}),
    ("local", {"folder": "/"}),
]


@pytest.mark.parametrize(("name", "handle"), STRANGE)
def test_a_record_names_nothing_but_the_jobs_of_its_own_launch(
    name: str, handle: dict[str, Any], tmp_path: Path
) -> None:
    """A record is data of whoever can write to the bucket; it was `kubectl delete job --all` once."""
    store = open_store(str(tmp_path))
    record_launch(store, name, PLAN, 0.0)
    record_submission(store, PLAN, handle, 0.0)
    found, (note,) = find_launches(store)
    assert found == []
    assert "jobs that it cannot have submitted" in note
    assert cancel_launches(store) == [note]


@pytest.mark.parametrize("launch", ["--all", "20261122-101112-AB12", "20261122-101112-ab12 x"])
def test_a_record_whose_id_no_launch_would_have_is_left_out(launch: str, tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    record_launch(store, "slurm", plan(id=launch), 0.0)
    found, (note,) = find_launches(store)
    assert found == []
    assert "is not the record of a launch" in note


def test_jobs_of_skypilot_with_another_name_are_not_cancelled(
    fake_sky: Callable[[], list[list[Any]]],
) -> None:
    cluster = find_cluster("skypilot")
    cluster.submit(plan(name="payroll"))
    fake_sky()
    cluster.cancel({"jobs": [4, 5, 6], "name": f"label-{PLAN.id}"})
    assert fake_sky() == []


RANKS = plan(words="--output s3://bucket/job -- 's3://raw/a b.jsonl'", what="split", gpu="none")
RANK_WORDS = [
    "split", "--rank", "2", "--of", "3", "--output", "s3://bucket/job", "--", "s3://raw/a b.jsonl",
]  # fmt: skip


@pytest.mark.parametrize("name", ["local", "slurm", "kubernetes", "skypilot"])
def test_ranks_of_a_command_get_their_rank(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    shown = find_cluster(name).describe(RANKS)
    program = str(tmp_path / "printer")
    if name == "skypilot":
        task = yaml.safe_load(shown)
        assert task["envs"]["BATCHINFER_EXTRA"] == ""
        assert "accelerators" not in task["resources"]
        script = f"SKYPILOT_JOB_RANK=2\n{task['run'].replace('.venv/bin/batchinfer', program)}"
    elif name == "kubernetes":
        pod = yaml.safe_load(shown)["spec"]["template"]["spec"]
        text = as_kubernetes_reads(pod["containers"][0]["command"][2], {})
        script = f"export BATCHINFER_RANK=2\n{text.replace('exec batchinfer', program)}"
    else:
        script = shown.replace(f"{sys.executable} -m batchinfer", program)
        if name == "local":
            *_, script = re.split(r"^(?=AWS_REGION=)", script, flags=re.MULTILINE)
        else:
            script = f"SLURM_ARRAY_TASK_ID=2\n{script}"
    assert words_of(script, tmp_path) == RANK_WORDS


# --------------------------------------------------------------------------- Slurm


def test_a_slurm_script_hands_the_words_to_the_worker_as_they_are(
    clients: Path, tmp_path: Path
) -> None:
    script = find_cluster("slurm").describe(plan())
    script = script.replace(f"{sys.executable} -m batchinfer worker", str(tmp_path / "printer"))
    assert words_of(f"SLURM_ARRAY_TASK_ID=1\n{script}", tmp_path) == EXPECTED_WORDS


@pytest.mark.parametrize(
    ("status", "signal", "is_queued_again"),
    [(0, "", False), (33, "", True), (34, "", True), (75, "", False), (75, "USR1", True),
     (75, "TERM", False), (2, "", False), (3, "", False), (137, "", False)],
)  # fmt: skip
def test_slurm_queues_a_worker_again_if_that_may_help(
    status: int, signal: str, is_queued_again: bool, clients: Path, tmp_path: Path
) -> None:
    fake_client(clients, "scontrol", "")
    worker = tmp_path / "worker"
    waits = f"trap 'exit {status}' TERM; touch {tmp_path}/ready; while :; do sleep 0.05; done"
    worker.write_text(f"#!/bin/bash\n{waits if signal else f'exit {status}'}\n")
    worker.chmod(0o755)
    script = find_cluster("slurm").describe(plan())
    script = script.replace(f"{sys.executable} -m batchinfer worker", str(worker))
    variables = {**os.environ, "SLURM_ARRAY_TASK_ID": "2", "SLURM_ARRAY_JOB_ID": "77"}
    process = subprocess.Popen(["bash", "-c", script], env=variables)
    if signal:
        while not (tmp_path / "ready").exists():
            assert process.poll() is None
        subprocess.run(["kill", f"-{signal}", str(process.pid)], check=True)
    assert process.wait(timeout=20) == status
    calls = clients / "scontrol.calls"
    assert calls.exists() == is_queued_again
    if is_queued_again:
        assert calls.read_text() == "requeue 77_2\n"


def test_slurm_is_asked_and_cancelled_by_the_jobs_id(clients: Path, tmp_path: Path) -> None:
    fake_client(clients, "sbatch", "echo '4711;cluster'")
    fake_client(clients, "scancel", "")
    fake_client(clients, "sacct", "echo '4711_0|COMPLETED|0:0'; echo '4711_1|CANCELLED by 5|0:15'")
    fake_client(clients, "squeue", "echo '4711_[2]|PENDING|Resources'")
    cluster = find_cluster("slurm")
    asked = plan(gpu="L4:2", options={"partition": "gpu", "log-dir": str(tmp_path / "logs")})
    cluster.check(asked)
    handle = cluster.submit(asked)
    script = (clients / "sbatch.stdin").read_text()
    assert "#SBATCH --partition=gpu\n" in script
    assert "#SBATCH --gres=gpu:l4:2\n" in script
    assert "#SBATCH --array=0-2\n" in script
    assert handle["job"] == "4711"
    assert Path(handle["logs"]).is_dir()
    states = cluster.look(handle, 3)
    assert {rank: seen.state for rank, seen in states.items()} == {
        0: "done",
        1: "cancelled",
        2: "waiting",
    }
    cluster.cancel(handle)
    assert (clients / "scancel.calls").read_text() == "-- 4711\n"


def test_directives_of_slurm_may_hold_blanks_and_quotes(clients: Path, tmp_path: Path) -> None:
    options = {"log-dir": str(tmp_path / "my logs"), "mem": "4G"}
    script = find_cluster("slurm").describe(plan(name='it\'s "one" night', options=options))
    assert r'''#SBATCH "--job-name=it's \"one\" night"''' in script.splitlines()
    folder = tmp_path / "my logs" / PLAN.id
    assert f'#SBATCH "--output={folder}/worker-%a.log"' in script.splitlines()
    assert "#SBATCH --mem=4G" in script.splitlines()


@pytest.mark.parametrize(
    "script",
    ["sleep 5", "echo 'sbatch: error: Batch job submission failed: Socket timed out' >&2; exit 1"],
)
def test_a_client_that_lost_its_connection_leaves_the_outcome_open(
    script: str, clients: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from batchinfer import clusters

    fake_client(clients, "sbatch", script)
    with pytest.raises(clusters.OutcomeUnknown, match="sbatch: "):
        clusters.run_client(["sbatch", "--parsable"], seconds=0.5)
    fake_client(clients, "sbatch", "echo 'Invalid partition name specified' >&2; exit 1")
    with pytest.raises(ConfigError, match="Invalid partition") as raised:
        clusters.run_client(["sbatch", "--parsable"])
    assert not isinstance(raised.value, clusters.OutcomeUnknown)


def test_slurm_without_its_client_or_with_a_spot_market_is_refused(
    clients: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(clients))
    with pytest.raises(ConfigError, match="sbatch is not on the PATH"):
        find_cluster("slurm").check(plan())
    with pytest.raises(ConfigError, match="no spot market"):
        find_cluster("slurm").check(plan(is_spot=True))


def test_slurm_that_has_forgotten_a_job_is_told_from_one_that_does_not_answer(
    clients: Path,
) -> None:
    cluster = find_cluster("slurm")
    for name in ("sacct", "squeue"):
        fake_client(
            clients, name, "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1"
        )
    assert cluster.look({"job": "4711"}, 3) == {}
    fake_client(clients, "squeue", "echo 'Unable to contact slurm controller' >&2; exit 1")
    with pytest.raises(ConfigError, match="Unable to contact"):
        cluster.look({"job": "4711"}, 3)
    (clients / "squeue").unlink()
    with pytest.raises(ConfigError, match="squeue"):
        cluster.look({"job": "4711"}, 3)


@pytest.mark.parametrize("name", ["slurm", "kubernetes", "skypilot"])
def test_machines_without_gpus_are_asked_for_none(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    shown = find_cluster(name).describe(plan(gpu="none"))
    assert "gres" not in shown
    assert "nvidia.com/gpu" not in shown
    assert "accelerators:" not in shown


# --------------------------------------------------------------------------- Kubernetes

POD = plan(
    gpu="L4:2",
    secrets=["bucket-keys"],
    options={
        "image": "registry/batchinfer:1",
        "service-account": "writer",
        "node-selector": "a/b=c",
    },
)


@pytest.mark.parametrize("version", ["1.29", "1.33"])
@pytest.mark.parametrize("asked", [POD, plan(gpu="none", options={"image": "i"})])
def test_the_job_of_kubernetes_fits_the_published_schema(version: str, asked: Plan) -> None:
    manifest = yaml.safe_load(find_cluster("kubernetes").describe(asked))
    kubernetes_validate.validate(manifest, version, strict=True)
    manifest["spec"]["completion"] = 3
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(manifest, version, strict=True)


def test_the_job_of_kubernetes_says_which_ends_count(tmp_path: Path) -> None:
    spec = yaml.safe_load(find_cluster("kubernetes").describe(POD))["spec"]
    rules = {
        tuple(rule["onExitCodes"]["values"]): rule["action"]
        for rule in spec["podFailurePolicy"]["rules"]
        if "onExitCodes" in rule
    }
    assert rules == {(33, 34, 75): "Ignore", (2, 3): "FailIndex"}
    assert (spec["completions"], spec["parallelism"]) == (3, 3)
    container = spec["template"]["spec"]["containers"][0]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "2"}
    assert container["envFrom"] == [{"secretRef": {"name": "bucket-keys"}}]
    values = {entry["name"]: entry.get("value") for entry in container["env"]}
    assert values["BATCHINFER_LAUNCH"] == PLAN.id
    assert values["BATCHINFER_NUM_WORKERS"] == "3"
    assert as_kubernetes_reads(values["GREETING"], values) == HARD
    command = as_kubernetes_reads(container["command"][2], values)
    script = command.replace("batchinfer worker", str(tmp_path / "printer"))
    assert words_of(script, tmp_path) == EXPECTED_WORDS


def as_kubernetes_reads(text: str, variables: Mapping[str, str | None]) -> str:
    """Replace $(NAME) and $$ as Kubernetes does in commands and in values of variables."""

    def replace(found: re.Match[str]) -> str:
        return "$" if found[0] == "$$" else variables.get(found[1]) or found[0]

    return re.sub(r"\$\$|\$\(([^)]*)\)", replace, text)


def test_a_job_of_kubernetes_has_a_name_that_hosts_may_have() -> None:
    name = job_name(plan(name="Übersetzung_der_Welt " * 9))
    assert len(name) <= 56
    assert name.endswith(PLAN.id)
    assert name.replace("-", "").isalnum()
    assert name.isascii()


def test_kubernetes_is_asked_for_its_pods_and_the_newest_counts(clients: Path) -> None:
    def pod(index: int, at: str, status: dict[str, Any]) -> dict[str, Any]:
        annotations = {"batch.kubernetes.io/job-completion-index": str(index)}
        return {"metadata": {"creationTimestamp": at, "annotations": annotations}, "status": status}

    pull = {"state": {"waiting": {"reason": "ImagePullBackOff"}}}
    pods = [
        pod(0, "2026-01-02", {"phase": "Running"}),
        pod(0, "2026-01-01", {"phase": "Failed"}),
        pod(1, "2026-01-01", {"phase": "Pending", "containerStatuses": [pull]}),
    ]
    (clients / "pods.json").write_text(json.dumps({"items": pods}))
    cluster = find_cluster("kubernetes")
    asked = msgspec.structs.replace(POD, options={**POD.options, "namespace": "batch"})
    fake_client(clients, "kubectl", f'if [ "$1" = get ]; then cat {clients}/pods.json; fi')
    cluster.check(asked)
    handle = cluster.submit(asked)
    assert yaml.safe_load((clients / "kubectl.stdin").read_text())["kind"] == "Job"
    states = cluster.look(handle, 3)
    assert states[0].state == "running"
    assert states[1] == ("waiting", "Pending ImagePullBackOff")
    assert 2 not in states
    cluster.cancel(handle)
    assert all(
        "--namespace batch" in line for line in (clients / "kubectl.calls").read_text().splitlines()
    )


def test_kubernetes_without_an_image_is_refused() -> None:
    with pytest.raises(ConfigError) as raised:
        find_cluster("kubernetes").check(plan())
    assert "examples/docker/Dockerfile" in raised.value.hint


# --------------------------------------------------------------------------- SkyPilot


def test_the_task_of_skypilot_is_worker_yaml_with_the_plan_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    asked = plan(gpu="H100:8", is_spot=True, secrets=["MY_TOKEN"])
    text = find_cluster("skypilot").describe(asked)
    task = yaml.safe_load(text)
    template = yaml.safe_load((ROOT / "worker.yaml").read_text())
    assert task["resources"]["accelerators"] == "H100:8"
    assert task["resources"]["use_spot"] is True
    assert task["resources"]["job_recovery"] == template["resources"]["job_recovery"]
    assert task["run"] == template["run"]
    assert task["secrets"]["MY_TOKEN"] == "***"
    envs = task["envs"]
    assert (envs["DATA_BUCKET"], envs["OUTPUT_BUCKET"]) == (PLAN.job, PLAN.run)
    assert envs["BATCHINFER_LAUNCH"] == PLAN.id
    assert None not in envs.values()


def test_secrets_of_a_task_file_are_not_shown(tmp_path: Path) -> None:
    path = tmp_path / "task.yaml"
    path.write_text("envs: {A: b}\nsecrets: {HF_TOKEN: '', OTHER_TOKEN: hush}\n")
    shown = find_cluster("skypilot").describe(plan(options={"template": str(path)}))
    assert yaml.safe_load(shown)["secrets"] == {"HF_TOKEN": "", "OTHER_TOKEN": "***"}
    path.write_text("envs: {A: b}\nsecrets:\n")
    assert "hush" not in shown
    find_cluster("skypilot").describe(plan(options={"template": str(path)}))


def script_of_a_machine(folder: Path) -> Path:
    """Make a checkout as on a machine of SkyPilot, whose worker prints its arguments. Returns the worker's script."""
    (folder / "scripts").mkdir()
    script = folder / "scripts/skypilot_worker.sh"
    script.write_text((ROOT / "scripts/skypilot_worker.sh").read_text())
    (folder / ".venv/bin").mkdir(parents=True)
    program = folder / ".venv/bin/batchinfer"
    program.write_text('#!/bin/bash\nprintf "%s\\0" "$@"\n')
    program.chmod(0o755)
    return script


def test_a_machine_of_skypilot_hands_the_words_to_the_worker_as_they_are(tmp_path: Path) -> None:
    """The script that becomes the worker there, with a program in the worker's place that prints its arguments."""
    script = script_of_a_machine(tmp_path)
    asked = plan(words=f"{PLAN.words} --examples <(printf %s '{{}}')")
    variables = {
        "PATH": "/usr/bin:/bin", "MODEL_NAME": asked.model, "OUTPUT_BUCKET": asked.run,
        "DATA_BUCKET": asked.job, "WORKER_ARGS": "", "WORKER_WORDS": asked.words,
    }  # fmt: skip
    done = subprocess.run(["bash", script], env=variables, capture_output=True, check=True)
    words = done.stdout.decode().split("\0")[:-1]
    assert words[:3] == ["worker", "--model", "org/model"]
    assert words[-6:-2] == ["--engine", "echo", "--system-prompt", HARD]
    assert words[-2] == "--examples"
    assert words[-1].startswith("/dev/fd/")


@pytest.fixture
def fake_sky(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[list[Any]]]:
    """Put `fake_sky.py` in the place of SkyPilot's SDK. Returns a function that takes the calls since the last time."""
    from batchinfer.clusters import skypilot, skypilot_client

    (tmp_path / "sky.py").write_text((ROOT / "tests/fake_sky.py").read_text())
    client = tmp_path / "client.py"
    code = Path(skypilot_client.__file__).read_text()
    assert "= 300.0, 5.0" in code
    client.write_text(code.replace("= 300.0, 5.0", "= 5.0, 0.0"))
    monkeypatch.setattr(skypilot, "_CLIENT", client)
    monkeypatch.setattr(skypilot, "_python", lambda: sys.executable)
    monkeypatch.setenv("FAKE_SKY", str(tmp_path))
    monkeypatch.chdir(ROOT)

    def calls() -> list[list[Any]]:
        path = tmp_path / "state.json"
        state = json.loads(path.read_text())
        path.write_text(json.dumps({**state, "calls": []}))
        return list(state["calls"])

    return calls


def test_jobs_of_skypilot_are_submitted_seen_and_cancelled(
    fake_sky: Callable[[], list[list[Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_TOKEN", "hush")
    cluster, asked = find_cluster("skypilot"), plan(secrets=["MY_TOKEN"])
    cluster.check(asked)
    handle = cluster.submit(asked)
    assert handle["jobs"] == [4, 5, 6]
    name = f"{PLAN.name}-{PLAN.id}"
    assert fake_sky() == [["launch", name, None, 3, PLAN.id, [["MY_TOKEN", "hush"]]]]
    assert {seen.state for seen in cluster.look(handle, 3).values()} == {"running"}
    cluster.cancel(handle)
    assert fake_sky() == [["cancel", [4, 5, 6]]]
    assert {seen.state for seen in cluster.look(handle, 3).values()} == {"cancelled"}


def test_a_pool_of_skypilot_is_made_if_asked(
    fake_sky: Callable[[], list[list[Any]]],
) -> None:
    cluster = find_cluster("skypilot")
    asked = plan(gpu="H100:2", options={"pool": "warm", "pool-workers": "2"})
    cluster.check(asked)
    made, jobs = yaml.safe_load_all(cluster.describe(asked))
    template = yaml.safe_load((ROOT / "examples/skypilot/pool.yaml").read_text())
    assert made["pool"] == {"workers": 2}
    assert made["setup"] == template["setup"]
    assert made["resources"]["accelerators"] == jobs["resources"]["accelerators"] == "H100:2"
    handle = cluster.submit(asked)
    apply, launch = fake_sky()
    assert apply == ["pool_apply", "warm", {"workers": 2}, "H100:2"]
    assert launch[:4] == ["launch", f"{PLAN.name}-{PLAN.id}", "warm", 3]
    second = cluster.submit(asked)
    assert [call[0] for call in fake_sky()] == ["launch"]
    cluster.cancel(second)
    assert [call[0] for call in fake_sky()] == ["cancel"]
    with pytest.raises(ConfigError, match="stays up: sky jobs pool down -y -- warm"):
        cluster.cancel(handle)
    assert [call[0] for call in fake_sky()] == ["cancel"]


def test_a_pool_is_taken_down_again_if_its_jobs_are_refused(
    fake_sky: Callable[[], list[list[Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_FATE", "refused")
    asked = plan(gpu="L4", options={"pool": "warm", "pool-workers": "2"})
    with pytest.raises(ConfigError, match="launch failed: ValueError: no such GPU") as raised:
        find_cluster("skypilot").submit(asked)
    assert not isinstance(raised.value, OutcomeUnknown)
    assert [call[0] for call in fake_sky()] == ["pool_apply", "launch", "pool_down"]


def test_jobs_whose_submission_lost_its_answer_are_found_in_the_queue(
    fake_sky: Callable[[], list[list[Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_FATE", "lost")
    assert find_cluster("skypilot").submit(plan())["jobs"] == [4, 5, 6]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pool": "warm", "extra": "cpu"}, "a pool's machines are set up already"),
        ({"pool-workers": "2"}, "needs the pool's name"),
        ({"pool": "warm", "pool-workers": "two"}, "expected a number from 1"),
        ({"pool": "warm", "pool-template": "x.yaml"}, "needs --cluster-option pool-workers"),
        ({"pool": "warm", "pool-workers": "2", "pool-template": "worker.yaml"}, "has no pool"),
    ],
)
def test_options_of_pools_that_cannot_work_are_refused(
    options: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    with pytest.raises(ConfigError, match=message):
        find_cluster("skypilot").check(plan(options=options))


@pytest.mark.parametrize(
    ("rank", "count", "words"),
    [
        (0, 1, []),
        (0, 2, ["--nnodes", "2", "--node-rank", "0", "--master-addr", "10.0.0.7"]),
        (1, 2, ["--nnodes", "2", "--node-rank", "1", "--master-addr", "10.0.0.7", "--headless"]),
    ],
)
def test_machines_of_one_job_run_one_model(
    tmp_path: Path, rank: int, count: int, words: list[str]
) -> None:
    script = script_of_a_machine(tmp_path)
    variables = {
        "PATH": "/usr/bin:/bin", "MODEL_NAME": "m", "OUTPUT_BUCKET": "s3://b/run", "DATA_BUCKET": "s3://b/job",
        "SKYPILOT_NUM_NODES": str(count), "SKYPILOT_NODE_RANK": str(rank),
        "SKYPILOT_NODE_IPS": "10.0.0.7\n10.0.0.8\n",
    }  # fmt: skip
    done = subprocess.run(["bash", script], env=variables, capture_output=True, check=True)
    given = done.stdout.decode().split("\0")[:-1]
    assert given == [
        "worker",
        "--model",
        "m",
        "--output",
        "s3://b/run",
        "--job",
        "s3://b/job",
        *words,
    ]


def test_the_launching_script_is_the_command(clients: Path) -> None:
    program = clients / "batchinfer"
    program.write_text('#!/bin/bash\npwd\nprintf "%s\\n" "$@"\n')
    program.chmod(0o755)
    script = ROOT / "scripts/launch_workers.sh"
    words = ["--job", "s3://b/my job", "--run", "s3://b/run", "--workers", "2"]
    done = subprocess.run([script, *words], capture_output=True, check=True, text=True)
    assert done.stdout.splitlines() == [str(ROOT), "launch", "--on", "skypilot", *words]


def test_the_machine_to_work_on_has_a_variant_without_autostop() -> None:
    """The command stands in dev.yaml and in the documentation. It takes away that block, and nothing else."""
    command = "sed '/^  autostop:/,/wait_for:/d' dev.yaml"
    for name in ("dev.yaml", "docs/skypilot.md"):
        assert command in (ROOT / name).read_text()
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, check=True)
    variant = yaml.safe_load(done.stdout)
    whole = yaml.safe_load((ROOT / "dev.yaml").read_text())
    assert whole["resources"].pop("autostop")
    assert variant == whole


def test_skypilot_says_what_is_missing(clients: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(clients))
    cluster = find_cluster("skypilot")
    with pytest.raises(ConfigError, match=r"worker\.yaml cannot be read"):
        cluster.check(plan())
    monkeypatch.chdir(ROOT)
    with pytest.raises(ConfigError) as raised:
        cluster.check(plan())
    assert "pip install 'skypilot[aws]" in raised.value.hint
    monkeypatch.delenv("MY_TOKEN", raising=False)
    with pytest.raises(ConfigError, match="--secret MY_TOKEN: has no value"):
        cluster.check(plan(secrets=["MY_TOKEN"]))


def test_states_of_all_clusters_are_words_that_status_knows() -> None:
    from batchinfer.clusters import kubernetes, skypilot, slurm

    for table in (kubernetes._PODS, skypilot._STATES, slurm._STATES):
        assert set(table.values()) <= set(STATES)


# --------------------------------------------------------------------------- Ray


class FakeRay:
    """Stands in for Ray's JobSubmissionClient: keeps the job, and has the log of its driver."""

    log = 'starting\nbatchinfer states: {}\nbatchinfer states: {"0": ["done", ""]}\n'
    status = "RUNNING"
    stopped: ClassVar[list[str]] = []
    job: ClassVar[dict[str, Any]] = {}

    def __init__(self, address: str) -> None:
        if "dead" in address:
            raise ConnectionError("Failed to connect")
        self.address = address

    def submit_job(self, **job: Any) -> str:
        FakeRay.job = job
        return str(job["submission_id"])

    def get_job_status(self, _job: str) -> SimpleNamespace:
        return SimpleNamespace(value=self.status)

    def get_job_logs(self, _job: str) -> str:
        return self.log

    def stop_job(self, job: str) -> None:
        self.stopped.append(job)


@pytest.fixture
def fake_ray(monkeypatch: pytest.MonkeyPatch) -> type[FakeRay]:
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace())
    monkeypatch.setitem(
        sys.modules, "ray.job_submission", SimpleNamespace(JobSubmissionClient=FakeRay)
    )
    return FakeRay


def test_the_name_of_a_job_of_ray_is_one_part_of_a_url(fake_ray: type[FakeRay]) -> None:
    handle = find_cluster("ray").submit(plan(name="a/b c?"))
    assert handle["job"] == f"a-b-c--{PLAN.id}"


def test_a_job_of_ray_carries_the_plan_and_its_log_tells_the_states(
    fake_ray: type[FakeRay], monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = find_cluster("ray")
    cluster.check(plan())
    handle = cluster.submit(plan())
    variables = fake_ray.job["runtime_env"]["env_vars"]
    # What Ray makes of the value of a variable, by `update_envs` in its ray/_private/utils.py.
    text = re.sub(r"\$\{[A-Z0-9_]+\}", "", os.path.expandvars(variables["BATCHINFER_PLAN"]))
    assert msgspec.json.decode(text, type=Plan) == plan()
    assert json.loads(cluster.describe(plan())) == fake_ray.job
    states = cluster.look(handle, 3)
    assert states == {0: ("done", ""), 1: ("waiting", "RUNNING"), 2: ("waiting", "RUNNING")}
    monkeypatch.setattr(fake_ray, "status", "STOPPED")
    states = cluster.look(handle, 2)
    assert states == {0: ("done", ""), 1: ("cancelled", "STOPPED")}
    cluster.cancel(handle)
    assert fake_ray.stopped == [handle["job"]]


def test_what_ray_cannot_do_is_refused(fake_ray: type[FakeRay]) -> None:
    cluster = find_cluster("ray")
    with pytest.raises(ConfigError, match="no cluster answers at http://dead:1"):
        cluster.check(plan(options={"address": "http://dead:1"}))
    with pytest.raises(ConfigError, match="--secret KEY: Ray shows"):
        cluster.check(plan(secrets=["KEY"]))


def test_a_task_of_ray_that_failed_without_a_message_has_a_reason() -> None:
    from batchinfer.clusters.ray_driver import _ended

    def get(error: Exception) -> None:
        raise error

    ray = SimpleNamespace(get=get)
    assert _ended(ray, KeyError()) == ["failed", "KeyError"]
    assert _ended(ray, ValueError("first\nsecond")) == ["failed", "first"]


def test_without_ray_the_command_that_installs_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError) as raised:
        find_cluster("ray").check(plan())
    assert "pip install 'ray[default]'" in raised.value.hint


# --------------------------------------------------------------------------- this machine


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    from batchinfer.engines import gpus

    monkeypatch.setattr(gpus, "visible_gpus", lambda: [gpus.Gpu(id="0"), gpus.Gpu(id="1")])


def test_workers_share_the_gpus_of_this_machine_unless_they_want_none(two_gpus: None) -> None:
    cluster = find_cluster("local")

    def devices(asked: Plan) -> list[str]:
        lines = cluster.describe(asked).splitlines()
        return [
            word.partition("=")[2]
            for line in lines
            for word in shlex.split(line)
            if word.startswith("CUDA_VISIBLE_DEVICES=")
        ]

    assert devices(plan(workers=2)) == ["0", "1"]
    assert devices(plan(workers=1)) == ["0,1"]
    assert devices(plan(workers=3, gpu="none")) == ["", "", ""]
    with pytest.raises(ConfigError, match="this machine's 2 GPUs are too few") as raised:
        cluster.check(plan(workers=3))
    assert "--gpu none" in raised.value.hint


def test_processes_of_another_machine_are_not_taken_for_dead(tmp_path: Path) -> None:
    cluster = find_cluster("local")
    handle = {"folder": str(tmp_path), "host": "elsewhere"}
    for ask in (lambda: cluster.look(handle, 1), lambda: cluster.cancel(handle)):
        with pytest.raises(ConfigError, match="on the machine elsewhere"):
            ask()


@pytest.mark.parametrize(("what", "state"), [("split", "failed"), ("worker", "starting")])
def test_a_rank_that_fails_again_and_again_is_given_up(
    what: str, state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker is not: it counts its starts itself."""
    from batchinfer.clusters import local

    monkeypatch.setattr(local, "_command", lambda _plan: "bash -c 'kill -KILL $$'")
    monkeypatch.setattr(local, "_MOST_STARTS_OF_RANKS", 3)
    monkeypatch.setattr(local, "_FIRST_DELAY_SECONDS", 0.0)
    process = local.WorkerProcess(plan(what=what), {}, tmp_path / "log")
    until = time.monotonic() + 30
    while (process.state.starts, process.state.pid) != (3, 0) and time.monotonic() < until:
        process.tick(is_ending=False)
        time.sleep(0.01)
    assert (process.state.starts, process.state.state) == (3, state)
    assert process.state.status == -signal.SIGKILL


def test_workers_that_run_are_asked_to_end_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from batchinfer.clusters import local

    program = "trap 'echo asked; exit 75' TERM; echo ready; while :; do sleep 0.05; done"
    monkeypatch.setattr(local, "_command", lambda _plan: f"bash -c {shlex.quote(program)}")
    log = tmp_path / "log"
    process = local.WorkerProcess(plan(), {}, log)
    process.tick(is_ending=False)
    until = time.monotonic() + 30
    is_ending = False
    while not process.has_ended and time.monotonic() < until:
        is_ending = is_ending or log.read_text() == "ready\n"
        process.tick(is_ending=is_ending)
        time.sleep(0.01)
    assert (process.state.state, process.state.status) == ("cancelled", 75)
    assert log.read_text() == "ready\nasked\n"
