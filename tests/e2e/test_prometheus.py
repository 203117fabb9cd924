"""A real Prometheus, where one is installed, fetches from a running stack with the alert rules of a deployment."""

import json
import os
import shutil
import signal
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from loraport.dev.health import port_free
from tests.architecture.source import ROOT
from tests.e2e.harness import Stack, free_port_base, wait_until
from tests.unit.deploy.test_observability import queries

pytestmark = pytest.mark.e2e

OBSERVABILITY = ROOT / "deploy" / "observability"


@pytest.fixture(scope="module")
def prometheus(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of one that has fetched every service's page."""
    program = shutil.which("prometheus")
    if program is None or shutil.which("promtool") is None:
        pytest.skip("no prometheus and promtool here (Debian: prometheus)")
    folder = tmp_path_factory.mktemp("prometheus")
    config = yaml.safe_load((OBSERVABILITY / "prometheus.yml").read_text())
    endpoints = json.loads((stack.data / "endpoints.json").read_bytes())["metrics"]
    jobs = {name: name if name in ("router", "registry", "loader") else "executor" for name in endpoints}
    targets = [
        {"targets": [urllib.parse.urlsplit(url).netloc], "labels": {"job": f"loraport-{jobs[name]}"}}
        for name, url in endpoints.items()
    ]
    (folder / "targets.json").write_text(json.dumps(targets))
    # What a deployment says, but for the paths, the pace, and the collector that is not here.
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["rule_files"] = [str(OBSERVABILITY / "alerts.yaml")]
    [direct] = [job for job in config["scrape_configs"] if job["job_name"] == "direct"]
    direct["file_sd_configs"] = [{"files": [str(folder / "targets.json")]}]
    config["scrape_configs"] = [direct]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    port = next(port for port in range(free_port_base(), 60_000) if port_free(port))
    command = [
        program,
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--enable-feature=exemplar-storage",
    ]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    address = f"http://127.0.0.1:{port}"
    try:
        wait_until(lambda: up(address) == len(endpoints), within_s=120, what="a fetch from every service")
        yield address
    finally:
        os.kill(process.pid, signal.SIGTERM)
        process.wait(120)


def up(address: str) -> int:
    try:
        return len(value(address, "up == 1"))
    except OSError:
        return 0


def asked(address: str, path: str, **words: str) -> Any:
    with urllib.request.urlopen(f"{address}/api/v1/{path}?{urllib.parse.urlencode(words)}", timeout=60) as answer:
        return json.load(answer)["data"]


def value(address: str, query: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = asked(address, "query", query=query)["result"]
    return found


def test_the_rules_are_loaded_and_well_and_nothing_fires_on_a_good_fleet(prometheus: str) -> None:
    checked = subprocess.run(
        ["promtool", "check", "rules", str(OBSERVABILITY / "alerts.yaml")], capture_output=True, text=True, check=False
    )
    assert checked.returncode == 0, checked.stderr

    def rules() -> list[dict[str, Any]]:
        return [rule for group in asked(prometheus, "rules")["groups"] for rule in group["rules"]]

    wait_until(lambda: all(rule["health"] != "unknown" for rule in rules()), within_s=120, what="an evaluation")
    assert {rule["name"]: rule["lastError"] for rule in rules() if rule["health"] != "ok"} == {}

    def raised() -> set[str]:
        """Those that wait for their time, too."""
        return {alert["labels"]["alertname"] for alert in asked(prometheus, "alerts")["alerts"]}

    # Other tests break things on this stack, and what they did may fire. Not these, once all have been heard.
    quiet = {"ServiceMissing", "NoExecutorServes", "WrongRevisionAnswered", "FairnessBoundBroken"}
    wait_until(lambda: not raised() & quiet, within_s=120, what="quiet")


def test_prometheus_understands_every_query_of_alerts_and_dashboards(prometheus: str) -> None:
    for _, query in queries():
        value(prometheus, query)  # raises HTTPError for one that it does not take


def test_an_exemplar_leads_to_the_trace_of_a_request(prometheus: str, stack: Stack) -> None:
    made = stack.ok("generate", "a b c", "--tenant", "acme", "--base-model", "tiny", "--max-tokens", "4")
    trace = stack.ok("trace", made["request_id"])["trace_id"]

    def traces() -> set[str]:
        found = asked(
            prometheus, "query_exemplars", query="loraport_router_ttft_seconds_bucket", start="0", end="9999999999"
        )
        return {one["labels"]["trace_id"] for series in found for one in series["exemplars"]}

    wait_until(lambda: trace in traces(), within_s=120, what="the exemplar")
