"""Reads a worker's metrics as Prometheus does, and checks that they are what the code says of them."""

import re
import subprocess
import urllib.request

from prometheus_client.parser import text_string_to_metric_families

from batchinfer.ledger.metrics import METRICS, RUN_METRICS

Values = dict[str, dict[tuple[tuple[str, str], ...], float]]
KINDS = {name: "counter" if name.endswith("_total") else "gauge" for name in METRICS}
NAMES = {*KINDS, *RUN_METRICS}


def parse(text: str) -> Values:
    """Values by name and by labels. Checks that kind and help of each metric are those of the code."""
    found: Values = {}
    helps = METRICS | RUN_METRICS
    for family in text_string_to_metric_families(text):
        name = family.name + ("_total" if family.type == "counter" else "")
        assert family.type == KINDS.get(name, "gauge"), name
        assert family.documentation == helps[name]
        values = {tuple(sorted(one.labels.items())): one.value for one in family.samples}
        assert len(values) == len(family.samples), f"{name}: a sample twice"
        found[name] = values
    return found


def scrape(port: int) -> Values:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as reply:
        return parse(reply.read().decode())


def port_of(process: subprocess.Popen[str]) -> int:
    """Read the log until it names the port."""
    for line in process.stderr:
        found = re.search(r"metrics are at http://127\.0\.0\.1:(\d+)/metrics", line)
        if found:
            return int(found[1])
    raise AssertionError("the log does not name the port")
