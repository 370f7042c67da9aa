"""Clusters: what would be submitted, and what is made of their clients' answers."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from batchinfer import clusters
from batchinfer.clusters import Fate, Plan, find_cluster, find_launches, name_of, record_launch
from batchinfer.core.clock import Clock
from batchinfer.core.errors import (
    FINAL_STATUSES,
    RESTART_STATUSES,
    ConfigError,
    PreconditionFailed,
)
from batchinfer.core.shell import quote
from batchinfer.runs.launched import cancel_launches
from batchinfer.storage.opening import open_store
from engine_contract import are_gone
from making import put_program, wait_for

ROOT = Path(__file__).parents[2]
HARD = 'Say "it\'s"\r\nin $HOME: \u3000$$5, $(HOME), ${HOME} ${NAME} {{ command }}\u00a0\x7f\U0001f469\u200d\U0001f680'
"""Text that bash, YAML and Kubernetes could each take for more than text. Some letters have no glyph of their own."""
ID = "20261122-101112-ab12"
NAME = name_of(ID, "s3://bucket/my job/runs/a")
PLAN = Plan(
    on="slurm",
    id=ID,
    name=NAME,
    workers=3,
    job="s3://bucket/my job",
    run="s3://bucket/my job/runs/a",
    model="org/model",
    words=f"--engine echo --system-prompt {quote(HARD)}",
    env=["AWS_REGION=eu-west-1", f"GREETING={HARD}", f"BATCHINFER_LAUNCH={ID}"],
    image="registry/batchinfer:1",
)
WORDS = ["--engine", "echo", "--system-prompt", HARD]


def plan(**changes: Any) -> Plan:
    return msgspec.structs.replace(PLAN, **changes)


def fake_client(folder: Path, name: str, script: str) -> None:
    """Put a program on the PATH that keeps its arguments, folder and standard input, and answers as `script` does."""
    kept = 'printf "%s\\n" "$*" >>$0.calls; printf "%s\\0" "$@" >$0.words; pwd >$0.folder; cat >$0.stdin'
    put_program(folder / name, f"#!/bin/bash\n{kept}\n{script}\n")


@pytest.fixture
def clients(tmp_path, monkeypatch):
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}/usr/bin{os.pathsep}/bin")
    monkeypatch.chdir(tmp_path)
    return folder


def calls(folder: Path, name: str) -> list[str]:
    path = folder / f"{name}.calls"
    return path.read_text().splitlines() if path.exists() else []


@pytest.mark.parametrize("name", ["slurm", "kubernetes"])
def test_words_and_variables_reach_the_worker_as_they_are(name, tmp_path):
    text = '#!/bin/bash\nprintf "%s\\0" "$@" "$GREETING"\n'
    printer = put_program(tmp_path / "printer", text)
    script = find_cluster(name).page(plan(on=name))
    if name == "kubernetes":  # which replaces $$, and $(NAME) of a variable
        container = yaml.safe_load(script)["spec"]["template"]["spec"]["containers"][0]
        read = {"$$": "$", "$(HOME)": "/root"}
        script = re.sub(r"\$\$|\$\(HOME\)", lambda found: read[found[0]], container["command"][2])
    program = "batchinfer" if name == "kubernetes" else f"{sys.executable} -m batchinfer"
    script = f"SLURM_ARRAY_TASK_ID=1\n{script.replace(f'{program} worker', str(printer))}"
    variables = {"PATH": "/usr/bin:/bin"}
    done = subprocess.run(["bash", "-c", script], capture_output=True, check=True, env=variables)
    assert done.stdout.decode().split("\0")[:-1] == [*WORDS, HARD]


# --------------------------------------------------------------------------- records from a bucket


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("--all", {"id": "--all"}),
        (ID, {"id": "20200101-000000-abcd"}),
        (ID, {"on": "../kubernetes"}),
        (ID, {"workers": 10**12}),
    ],
)
def test_a_forged_record_is_a_note_and_reaches_no_client(name, changes, tmp_path, clients, call):
    """Whoever can write to the bucket could make `stop --cancel` run `kubectl delete job --all`, or end other runs."""
    for client in ("kubectl", "scancel", "squeue", "sky"):
        fake_client(clients, client, "")
    store = open_store(str(tmp_path))
    record_launch(store, PLAN)
    (path,) = tmp_path.glob("launches/*")
    assert not find_launches(store)[1]
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    path.rename(path.with_name(f"{name}.json"))
    assert "cannot be read, left out" in find_launches(store)[1][0]
    stopped = call("stop", str(tmp_path), "--cancel")
    assert (stopped.status, "cannot be read, left out" in stopped.err) == (1, True)
    assert not list(clients.glob("*.calls"))


def test_a_launch_has_one_name_for_who_makes_it_and_who_looks(monkeypatch):
    """The workers of a launch on r2:// were never found, and `stop --cancel` ended none of them."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", "https://account.r2.cloudflarestorage.com")
    for url in ("r2://bucket/job/runs/a", "s3://bucket/r2:/a"):
        assert name_of(ID, url) == name_of(ID, open_store(url).url)


def test_a_record_that_changes_meanwhile_leaves_no_other_launch_uncancelled(
    tmp_path, clients, monkeypatch
):
    for client in ("scancel", "squeue"):
        fake_client(clients, client, "")
    store, other = open_store(str(tmp_path)), ID.replace("ab12", "cd34")
    for identity in (ID, other):
        record_launch(store, plan(id=identity))

    def replace(key: str, *_: object) -> None:
        raise PreconditionFailed(f"{key}: is not the version that was read")

    monkeypatch.setattr(store, "replace", replace)
    left = cancel_launches(store, Clock())
    assert [line.partition(": launches/")[0] for line in left] == [
        f"launch {identity}: not recorded as cancelled" for identity in (ID, other)
    ]
    assert len(calls(clients, "scancel")) == 2


@pytest.mark.parametrize("name", ["skypilot", "slurm", "kubernetes"])
def test_a_record_decides_neither_where_nor_which_jobs_are_cancelled(name, tmp_path, clients):
    """Its id alone is heeded; the jobs of a name belong to one run, so a copy of another run's record ends nothing."""
    store = open_store(str(tmp_path))
    own = plan(on=name, name=name_of(ID, store.url), namespace="production", job="--all")
    assert own.name != NAME
    running = {"status": "RUNNING", "end_at": None}
    jobs = [
        {"job_id": 3, "job_name": NAME, **running},
        {"job_id": 4, "job_name": own.name, **running},
        {"job_id": 5, "job_name": own.name, "status": "SUCCEEDED", "end_at": 1.5},
    ]
    fake_client(clients, "sky", f"echo hint; echo {shlex.quote(json.dumps(jobs, indent=2))}")
    for client in ("kubectl", "scancel", "squeue", "sacct"):
        fake_client(clients, client, '[ "$1" != get ] || echo \'{"items": []}\'')
    record_launch(store, own)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("batchinfer.runs.launched.ENDING_SECONDS", 0.0)
        left = cancel_launches(store, Clock(), namespace="batch")
    words = {path.name: path.read_text() for path in clients.glob("*.calls")}
    job = "delete job --ignore-not-found --wait=false --namespace=batch --"
    client, wanted = {
        "slurm": ("scancel", f"--name={own.name}"),
        "kubernetes": ("kubectl", f"{job} {own.name}"),
        "skypilot": ("sky", "jobs cancel -y -- 4"),
    }[name]
    assert wanted in words[f"{client}.calls"].splitlines()
    assert "production" not in "".join(words.values())
    assert "--all\n" not in words.get("kubectl.calls", "")
    assert bool(left) == (name != "slurm")


# --------------------------------------------------------------------------- clients


def test_a_client_that_fails_hangs_or_is_not_there_is_an_error(clients, monkeypatch):
    fake_client(clients, "sbatch", "echo no such partition >&2; exit 1")
    with pytest.raises(ConfigError, match="sbatch: no such partition"):
        clusters.run_client("sbatch")
    fake_client(clients, "sbatch", r"printf 'caf\xe9'")
    assert clusters.run_client("sbatch") == "caf\ufffd", "it was a traceback"
    fake_client(clients, "sbatch", "exec sleep 60")
    with pytest.raises(ConfigError, match="timed out"):
        clusters.run_client("sbatch", seconds=0.3)
    with pytest.raises(ConfigError, match="Argument list too long"):
        clusters.run_client("sbatch", "x" * 140_000)


def test_a_client_ends_with_the_process_that_started_it(clients):
    """A killed `launch` left its client behind, which then submitted the workers."""
    fake_client(clients, "sky", f"echo $$ >{clients}/pid; exec sleep 600")
    program = "from batchinfer import clusters; clusters.run_client('sky')"
    parent = subprocess.Popen([sys.executable, "-c", program])
    (pid := clients / "pid").touch()
    wait_for(pid.read_text)
    parent.kill()
    parent.wait()
    assert are_gone([int(pid.read_text())])


# --------------------------------------------------------------------------- Slurm


@pytest.mark.parametrize(
    ("status", "signal", "is_queued_again"),
    [(0, "", False), (33, "", True), (34, "", True), (75, "", False), (75, "USR1", True),
     (75, "TERM", False), (75, "USR1 TERM", False), (75, "TERM USR1", False), (33, "TERM", False),
     (2, "", False), (3, "", False), (137, "", False)],
)  # fmt: skip
def test_slurm_queues_a_worker_again_if_that_may_help(
    status, signal, is_queued_again, clients, tmp_path
):
    fake_client(clients, "scontrol", "")
    ends = f"until [ -e {tmp_path}/sent ]; do sleep 0.05; done; exit {status}"
    waits = f"trap '{ends}' TERM; touch {tmp_path}/ready; while :; do sleep 0.05; done"
    text = f"#!/bin/bash\n{waits if signal else f'exit {status}'}\n"
    worker = put_program(tmp_path / "worker", text)
    script = find_cluster("slurm").page(PLAN)
    script = script.replace(f"{sys.executable} -m batchinfer worker", str(worker))
    variables = {**os.environ, "SLURM_ARRAY_TASK_ID": "2", "SLURM_ARRAY_JOB_ID": "77"}
    process = subprocess.Popen(["bash", "-c", script], env=variables, stdin=subprocess.DEVNULL)
    if signal:
        while not (tmp_path / "ready").exists():
            assert process.poll() is None
        for name in signal.split():
            subprocess.run(["kill", f"-{name}", str(process.pid)], check=True)
        (tmp_path / "sent").touch()
    assert process.wait(timeout=120) == status
    assert calls(clients, "scontrol") == (["requeue 77_2"] if is_queued_again else [])


def test_any_option_of_slurm_is_a_line_of_the_script_but_no_more_and_not_its_name():
    """With another name, `stop --cancel` left the workers, and `--watch` started them a second time."""
    others = ["--job-name=mine", "-J other", "--array=0-99"]
    options = ["--mem=64G", '--comment=it\'s "one"\ntouch x', *others]
    script = find_cluster("slurm").page(plan(gpu="L4:2", sbatch_arg=options))
    lines = [line for line in script.splitlines() if line.startswith("#SBATCH")]
    assert {"#SBATCH --cpus-per-task=4", "#SBATCH --gres=gpu:l4:2"} <= set(lines)
    assert lines.index('#SBATCH "--mem=64G"') > lines.index("#SBATCH --mem=16G")
    assert r'''#SBATCH "--comment=it's \"one\"\ntouch x"''' in lines
    assert lines[-2:] == [f"#SBATCH --job-name={NAME}", "#SBATCH --array=0-2"], "the last ones win"
    assert script.index("#SBATCH --array=0-2") < script.index("export")


def test_slurm_is_asked_by_the_launchs_name(clients):
    fake_client(clients, "sacct", "echo '4711_0|COMPLETED|0:0'; echo '4711_1|RUNNING|0:0'")
    waiting, lost = "4711_[2,4-5%2]|PENDING|Resources", "4711_6|NODE_FAIL|None"
    now = "4711_1|CANCELLED by 5|0:15"  # sacct may still have an older state
    fake_client(clients, "squeue", f"echo '{waiting}'; echo '{lost}'; echo '{now}'")
    cluster = find_cluster("slurm")
    assert cluster.look(NAME, "") == {
        0: Fate("ended", "COMPLETED 0:0"),
        1: Fate("ended", "CANCELLED by 5 0:15"),
        **dict.fromkeys((2, 4, 5), Fate("coming", "PENDING Resources")),
        6: Fate("lost", "NODE_FAIL None"),
    }
    # Jobs of other users looked lost, and a long list of waiting ranks is cut without --array.
    for client, option in (("squeue", "--array"), ("sacct", "--allusers")):
        assert {f"--name={NAME}", option} <= set(calls(clients, client)[0].split())
    assert "--me" not in calls(clients, "squeue")[0]
    fake_client(clients, "sacct", "exit 1")
    assert set(cluster.look(NAME, "")) == {1, 2, 4, 5, 6}


# --------------------------------------------------------------------------- Kubernetes

JOBS = [
    plan(on="kubernetes", gpu="L4:2", secret=["bucket-keys"], namespace="batch"),
    plan(on="kubernetes", gpu="none", words=""),
    plan(on="kubernetes"),
]


@pytest.mark.full
@pytest.mark.parametrize("version", ["1.29", "1.33"])
@pytest.mark.parametrize("asked", JOBS)
def test_the_job_of_kubernetes_fits_the_published_schema(version, asked):
    import kubernetes_validate

    manifest = yaml.safe_load(find_cluster("kubernetes").page(asked))
    kubernetes_validate.validate(manifest, version, strict=True)


def test_the_job_of_kubernetes_says_which_ends_count():
    page = yaml.safe_load(find_cluster("kubernetes").page(JOBS[0]))
    spec = page["spec"]
    rules = {
        tuple(rule["onExitCodes"]["values"]): rule["action"]
        for rule in spec["podFailurePolicy"]["rules"]
        if "onExitCodes" in rule
    }
    assert rules == {RESTART_STATUSES: "Ignore", FINAL_STATUSES: "FailIndex"}
    assert (spec["completions"], spec["parallelism"], spec["maxFailedIndexes"]) == (3, 3, 3)
    assert (page["metadata"]["name"], page["metadata"]["namespace"]) == (NAME, "batch")
    for labels in (page["metadata"]["labels"], spec["template"]["metadata"]["labels"]):
        assert labels == {"batchinfer/launch": NAME}
    container = spec["template"]["spec"]["containers"][0]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "2"}
    assert container["envFrom"] == [{"secretRef": {"name": "bucket-keys"}}]
    rank = {entry["name"]: entry for entry in container["env"]}["BATCHINFER_RANK"]["valueFrom"]
    assert "job-completion-index" in rank["fieldRef"]["fieldPath"]


def pod(index: int, phase: str, at: str = "2026-01-01", **state: Any) -> dict[str, Any]:
    annotations = {"batch.kubernetes.io/job-completion-index": str(index)}
    metadata = {"creationTimestamp": at, "annotations": annotations}
    status = {"phase": phase, "containerStatuses": [{"state": state}]}
    return {"kind": "Pod", "metadata": metadata, "status": status}


def test_kubernetes_says_which_workers_come_back(clients):
    """A pod that failed is started again, unless the Job has given its index up."""
    killed = {"reason": "OOMKilled", "exitCode": 137}
    items = [
        pod(0, "Running", at="2026-01-02"),
        pod(0, "Failed"),
        pod(1, "Pending", waiting={"reason": "ImagePullBackOff"}),
        pod(2, "Failed", terminated=killed),
        pod(3, "Failed", terminated=killed),
        pod(4, "Succeeded"),
    ]
    status: dict[str, Any] = {"completedIndexes": "4", "failedIndexes": "3"}
    job = {"kind": "Job", "metadata": {"creationTimestamp": "2026-01-01"}, "status": status}
    fake_client(clients, "kubectl", f"cat {clients}/items.json")

    def look() -> dict[int, Fate]:
        (clients / "items.json").write_text(json.dumps({"items": [*items, job]}))
        return find_cluster("kubernetes").look(NAME, "batch")

    assert look() == {
        0: Fate("coming", "Running"),
        1: Fate("coming", "Pending ImagePullBackOff"),
        2: Fate("coming", "Failed OOMKilled exit status 137"),
        3: Fate("lost", "Failed OOMKilled exit status 137"),
        4: Fate("ended", "Succeeded"),
    }
    status["conditions"] = [{"type": "Failed", "status": "True"}]
    assert {rank for rank, one in look().items() if one.kind == "lost"} == {0, 1, 2, 3}
    assert calls(clients, "kubectl")[0] == (
        f"get jobs,pods --selector=batchinfer/launch={NAME} --output=json --namespace=batch"
    )
    find_cluster("kubernetes").submit(plan(on="kubernetes", namespace="batch"))
    assert calls(clients, "kubectl")[-1] == "create --filename=- --namespace=batch"
    assert yaml.safe_load((clients / "kubectl.stdin").read_text())["kind"] == "Job"


# --------------------------------------------------------------------------- SkyPilot


def test_the_printed_command_of_skypilot_is_what_is_submitted(clients):
    fake_client(clients, "sky", "")
    asked = plan(
        on="skypilot", gpu="H100:8", secret=["MY_TOKEN"], sky_arg=["--infra=aws", "--use-spot"]
    )
    find_cluster("skypilot").submit(asked)
    words = (clients / "sky.words").read_bytes()
    assert (clients / "sky.folder").read_text().strip() == str(ROOT)
    page = find_cluster("skypilot").page(asked)
    subprocess.run(["bash", "-c", page], check=True, stdin=subprocess.DEVNULL)
    assert (clients / "sky.words").read_bytes() == words
    assert (clients / "sky.folder").read_text().strip() == str(ROOT)
    given = words.decode().split("\0")[:-1]
    options = ["--gpus=H100:8", "--infra=aws", "--use-spot"]
    assert given[:7] == ["jobs", "launch", "-y", "-d", *options]
    assert given[7:9] == [f"--name={NAME}", "--num-jobs=3"], "they win over options of the user's"
    assert given[-2:] == ["--secret=MY_TOKEN", str(ROOT / "worker.yaml")]
    variables = {"GREETING": HARD, "BATCHINFER_LAUNCH": ID, "DATA_BUCKET": PLAN.job}
    assert {f"--env={name}={value}" for name, value in variables.items()} <= {*given}


def test_jobs_of_skypilot_are_found_by_their_whole_name(clients):
    jobs = [
        {"job_id": 9, "status": "FAILED_SETUP", "job_name": NAME, "failure_reason": "no disk"},
        {"job_id": 5, "status": "RUNNING", "job_name": f"{NAME}0"},
        {"job_id": 8, "status": "RECOVERING", "job_name": NAME, "failure_reason": None},
        {"job_id": 7, "status": "CANCELLED", "job_name": NAME},
    ]
    printed = shlex.quote(json.dumps(jobs, indent=2))
    fake_client(clients, "sky", f"echo '[hint]'; echo {printed}; echo A newer version is there.")
    assert find_cluster("skypilot").look(NAME, "") == {
        0: Fate("ended", "CANCELLED"),
        1: Fate("coming", "RECOVERING"),
        2: Fate("lost", "FAILED_SETUP no disk"),
    }
    assert "--all-users" in calls(clients, "sky")[0], "jobs of other users looked lost"
    fake_client(clients, "sky", "echo '[]'")
    assert find_cluster("skypilot").look(NAME, "") == {}
    fake_client(clients, "sky", "echo No jobs.")
    with pytest.raises(ConfigError, match="has not answered with a list"):
        find_cluster("skypilot").look(NAME, "")
