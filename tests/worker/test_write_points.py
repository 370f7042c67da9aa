"""Every storage request of one chunk's life fails, is lost, comes late, or is the last thing that its worker does.

Whatever happened, the next start ends with the same answers: P1 to P5 at every single point.
"""

import json
from typing import Any

import pytest

from simulation.stage import Stage

PROMPTS = [[f"say {index}" for index in range(6)]]
FATES = ("dies_before", "dies_after", "lost", "refused", "late")
OPTIONS: dict[str, Any] = {"checkpoint_seconds": 0.5}
MINE = ("worker", "nonce", "start", "end", "rows_resumed", "output")


def settled(stage: Stage) -> tuple[bytes, dict[str, Any]]:
    """The output that the one marker names, and what the marker says but for names and times."""
    found = stage.objects("outputs/")
    (marker,) = [json.loads(data) for key, data in found.items() if ".succeed" in key]
    output = found["outputs/" + marker["output"]]
    return output, {key: value for key, value in marker.items() if key not in MINE}


def undisturbed() -> tuple[tuple[bytes, dict[str, Any]], list[str]]:
    """What a run without mishaps leaves, and its requests in order."""
    requests: list[str] = []

    def note(_number, method, key, _process):
        requests.append(f"{method} {key}")

    with Stage(PROMPTS) as stage:
        assert stage.run(hook=note, **OPTIONS).is_success
        return settled(stage), requests


def test_a_life_has_every_kind_of_write():
    kinds = ("workers/", "claims/", "run.json", "checkpoints/", "outputs/part-00000.", ".succeed")
    writes = [
        each for each in undisturbed()[1] if each.startswith(("put_object", "delete_objects"))
    ]
    assert [kind for kind in kinds if not any(kind in write for write in writes)] == []


@pytest.mark.parametrize("successor", ["w0", "w1"])
@pytest.mark.parametrize("fate", FATES)
def test_after_a_mishap_at_any_request_the_next_start_ends_with_the_same(fate, successor):
    wanted, requests = undisturbed()
    for target in range(len(requests)):
        with Stage(PROMPTS) as stage:
            # One attempt: a request that fails has failed for good.
            stage.network.attempts = 3 if fate == "lost" else 1
            stage.network.weather.late_seconds = 4.0

            def hook(number, _method, _key, _process, target=target):
                return fate if number == target else None

            first = stage.run(hook=hook, **OPTIONS)
            assert first.is_killed == fate.startswith("dies"), requests[target]
            assert first.error is None or first.error.exit_status == 34, requests[target]
            second = stage.run(successor, **OPTIONS)
            assert second.is_success, (requests[target], second.error)
            stage.scheduler.run(float("inf"))
            assert settled(stage) == wanted, requests[target]
