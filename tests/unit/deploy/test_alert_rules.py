"""Every alert fires on the series that it is for, with the words that it is meant to say, and on no healthy fleet.

Prometheus' own `promtool` plays the series; where it is missing the test is skipped.
"""

import re
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.unit.deploy.test_observability import FOLDER, SERIES, alerts

RULES = FOLDER / "alerts.yaml"
STEPS = 65  # minutes
ROUTER, REGISTRY, LOADER, EXECUTOR = (
    f'job="loraport-{service}",instance="{service}-0"' for service in ("router", "registry", "loader", "executor")
)
TTFT, LOAD = "loraport_router_ttft_seconds_bucket", "loraport_adapter_load_duration_seconds_bucket"
LAG = "loraport_loop_lag_seconds_bucket"


def steady(value: float) -> str:
    return f"{value:g}x{STEPS}"


def rising(per_minute: float) -> str:
    return f"0+{per_minute:g}x{STEPS}"


def appears(at: int) -> str:
    """A counter that is not there before something has happened once."""
    return f"_x{at} 1x{STEPS - at}"


HEALTHY: dict[str, str] = {
    **{f"loraport_up{{{job}}}": steady(1) for job in (ROUTER, REGISTRY, LOADER, EXECUTOR)},
    f'loraport_router_answered_total{{{ROUTER},revision="right"}}': rising(60),
    f'loraport_router_executors{{{ROUTER},state="serving"}}': steady(2),
    f'loraport_router_executors{{{ROUTER},state="out"}}': steady(0),
    f'loraport_router_executors{{{ROUTER},state="drained"}}': steady(1),
    f'loraport_router_requests_total{{{ROUTER},outcome="OK"}}': rising(60),
    # The callers' own doing, however much of it there is.
    f'loraport_router_requests_total{{{ROUTER},outcome="QUOTA_EXCEEDED"}}': rising(30),
    f'{TTFT}{{{ROUTER},start="warm",le="5"}}': rising(60),
    f'{TTFT}{{{ROUTER},start="warm",le="10"}}': rising(60),
    f'{TTFT}{{{ROUTER},start="warm",le="+Inf"}}': rising(60),
    # Cold ones may take their time.
    f'{TTFT}{{{ROUTER},start="cold",le="5"}}': steady(0),
    f'{TTFT}{{{ROUTER},start="cold",le="10"}}': rising(60),
    f'{TTFT}{{{ROUTER},start="cold",le="+Inf"}}': rising(60),
    f"loraport_router_queue_oldest_seconds{{{ROUTER}}}": steady(3),
    f"loraport_router_fairness_spread{{{ROUTER}}}": steady(0.8),
    f"loraport_adapter_working_set_bytes{{{ROUTER}}}": steady(1e9),
    f"loraport_adapter_capacity_bytes{{{ROUTER}}}": steady(2e9),
    f"loraport_executor_thrash_total{{{EXECUTOR}}}": rising(0.5),
    f"loraport_executor_loads_total{{{EXECUTOR}}}": rising(5),
    f"loraport_executor_preemptions_total{{{EXECUTOR}}}": rising(1),
    f'{LOAD}{{{EXECUTOR},stage="READY",le="2.5"}}': rising(5),
    f'{LOAD}{{{EXECUTOR},stage="READY",le="5"}}': rising(5),
    f'{LOAD}{{{EXECUTOR},stage="READY",le="+Inf"}}': rising(5),
    f'loraport_loader_stage_duration_seconds_count{{{LOADER},outcome="OK"}}': rising(5),
    f"loraport_checkpoint_age_seconds{{{EXECUTOR}}}": steady(100),
    f"loraport_checkpoint_age_seconds{{{LOADER}}}": steady(100),
    # Something changes all the time, and others are two minutes behind.
    f"loraport_catalog_epoch{{{REGISTRY}}}": f"2+1x{STEPS}",
    **{f"loraport_catalog_epoch{{{job}}}": rising(1) for job in (ROUTER, LOADER, EXECUTOR)},
    f'loraport_registry_rollouts{{{REGISTRY},state="PAUSED"}}': steady(0),
    f'loraport_registry_rollouts{{{REGISTRY},state="SPLITTING"}}': steady(1),
    f'{LAG}{{{ROUTER},le="0.5"}}': rising(60),
    f'{LAG}{{{ROUTER},le="1"}}': rising(60),
    f'{LAG}{{{ROUTER},le="+Inf"}}': rising(60),
    f"loraport_loader_refusals_total{{{LOADER}}}": rising(0.5),
}


@dataclass(frozen=True, slots=True)
class Case:
    """What differs from a healthy fleet (None: is not there), and what the alert says after so many minutes."""

    changes: dict[str, str | None]
    summary: str
    labels: dict[str, str] = field(default_factory=dict)
    after: int = 26
    quiet: tuple[str, ...] = ()


CASES: dict[str, Case] = {
    "WrongRevisionAnswered": Case(
        {f'loraport_router_answered_total{{{ROUTER},revision="wrong"}}': appears(20)},
        "An executor began a request with other weights than were resolved. It was stopped.",
        after=25,
    ),
    "ServiceMissing": Case(
        {f"loraport_up{{{LOADER}}}": None},
        "No process of loraport-loader tells of itself.",
        {"job": "loraport-loader"},
        quiet=("NoExecutorServes",),
    ),
    "NoExecutorServes": Case(
        {
            f'loraport_router_executors{{{ROUTER},state="serving"}}': steady(0),
            f'loraport_router_executors{{{ROUTER},state="out"}}': steady(2),
            f"loraport_adapter_capacity_bytes{{{ROUTER}}}": steady(0),
        },
        "No router sees an executor that serves.",
        quiet=("ExecutorOut", "WorkingSetTooLarge"),
    ),
    "ExecutorOut": Case(
        {f'loraport_router_executors{{{ROUTER},state="out"}}': steady(1)},
        "1 executors do not answer, or answer that they do not serve.",
        quiet=("NoExecutorServes",),
    ),
    "RequestsFail": Case(
        {f'loraport_router_requests_total{{{ROUTER},outcome="INTERNAL"}}': rising(10)},
        "10% of requests fail for reasons of the fleet.",
    ),
    "FirstTokenSlow": Case(
        {f'{TTFT}{{{ROUTER},start="warm",le="5"}}': steady(0)},
        "First tokens of warm requests take 9.95s at the 99th percentile.",
    ),
    "QueueTooOld": Case(
        {f"loraport_router_queue_oldest_seconds{{{ROUTER}}}": steady(25)},
        "A request has waited 25s; at queue_residence_s it is refused.",
    ),
    "FairnessBoundBroken": Case(
        {f"loraport_router_fairness_spread{{{ROUTER}}}": steady(1.2)},
        "Two tenants that wait differ by more than the published bound.",
    ),
    "WorkingSetTooLarge": Case(
        {f"loraport_adapter_working_set_bytes{{{ROUTER}}}": steady(3e9)},
        "The adapters in use no longer fit the pools of the executors that serve.",
    ),
    "AdaptersThrash": Case(
        {f"loraport_executor_thrash_total{{{EXECUTOR}}}": rising(2)},
        "40% of loads are of what had just been evicted.",
    ),
    "KeyValueFull": Case(
        {f"loraport_executor_preemptions_total{{{EXECUTOR}}}": rising(60)},
        "executor-0 takes blocks from running requests.",
        {"job": "loraport-executor", "instance": "executor-0"},
    ),
    "ColdLoadsSlow": Case(
        {f'{LOAD}{{{EXECUTOR},stage="READY",le="2.5"}}': steady(0)},
        "Bringing an adapter to a device takes 4.875s at the 95th percentile.",
    ),
    "StoredBytesWrong": Case(
        {f'loraport_loader_stage_duration_seconds_count{{{LOADER},outcome="DIGEST_MISMATCH"}}': appears(20)},
        "The object store returned other bytes than were signed. They were not used.",
        after=30,
    ),
    "CheckpointStale": Case(
        {f"loraport_checkpoint_age_seconds{{{EXECUTOR}}}": steady(500)},
        "loraport-executor has no fresh checkpoint; at 600 s nothing new is loaded, 900 s later nothing serves.",
        {"job": "loraport-executor"},
    ),
    "CatalogBehind": Case(
        {f"loraport_catalog_epoch{{{ROUTER}}}": steady(3)},
        "loraport-router has not heard of changes for 5 minutes.",
        {"job": "loraport-router"},
    ),
    "RolloutHeld": Case(
        {f'loraport_registry_rollouts{{{REGISTRY},state="PAUSED"}}': steady(1)},
        "1 rollouts are held and go neither on nor back.",
        after=35,
    ),
    "EventLoopBlocked": Case(
        {f'{LAG}{{{ROUTER},le="0.5"}}': steady(0)},
        "loraport-router answers late: something holds its event loop.",
        {"job": "loraport-router"},
    ),
    "BundlesRefused": Case(
        {f"loraport_loader_refusals_total{{{LOADER}}}": rising(1)},
        "60 bundles were refused in an hour: a broken publisher, or an attacker.",
        after=62,
    ),
}


def series(changes: dict[str, str | None]) -> list[dict[str, str]]:
    """Returns a healthy fleet's series with changes, as promtool reads them."""
    found = {**HEALTHY, **changes}
    return [{"series": name, "values": values} for name, values in found.items() if values is not None]


def document() -> dict[str, Any]:
    """Returns the whole of promtool's test file."""
    severity = {rule["alert"]: rule["labels"]["severity"] for rule in alerts()}
    quiet = [
        {"eval_time": f"{minute}m", "alertname": name, "exp_alerts": []} for name in severity for minute in (5, 62)
    ]
    tests: list[dict[str, Any]] = [{"name": "a healthy fleet", "interval": "1m", "input_series": series({})}]
    tests[0]["alert_rule_test"] = quiet
    for name, case in CASES.items():
        said = {
            "exp_labels": {"severity": severity[name], **case.labels},
            "exp_annotations": {"summary": case.summary},
        }
        checks = [{"eval_time": f"{case.after}m", "alertname": name, "exp_alerts": [said]}]
        checks += [{"eval_time": f"{case.after}m", "alertname": other, "exp_alerts": []} for other in case.quiet]
        tests.append({"name": name, "interval": "1m", "input_series": series(case.changes), "alert_rule_test": checks})
    return {"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": tests}


def test_every_alert_is_played_with_series_that_services_export() -> None:
    assert set(CASES) == {rule["alert"] for rule in alerts()}
    for name in {name for case in CASES.values() for name in {**HEALTHY, **case.changes}}:
        metric = SERIES[name.partition("{")[0]]
        labels = dict(re.findall(r'(\w+)="([^"]*)"', name))
        assert metric.name.split(".")[1] in ("up", "adapter", "catalog", "checkpoint", "loop") or (
            labels["job"].removeprefix("loraport-") in metric.services
        ), name


def test_alerts_fire_on_what_they_are_for_and_on_nothing_else(tmp_path: Path) -> None:
    if shutil.which("promtool") is None:
        pytest.skip("no promtool here (Debian: prometheus)")
    path = tmp_path / "test.yaml"
    path.write_text(yaml.safe_dump(document()))
    done = subprocess.run(["promtool", "test", "rules", str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
