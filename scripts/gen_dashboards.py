"""Write Grafana's dashboards into deploy/observability, or check that they are fresh (`--check`).

A dashboard is a table of panels: title, unit, and queries with their legends. tests/unit/deploy/test_observability.py
holds every query against the metrics that services export.
"""

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "deploy" / "observability" / "grafana" / "dashboards"
WIDTH, HEIGHT, COLUMNS = 12, 8, 2


@dataclass(frozen=True)
class Panel:
    """One panel; `queries` are (PromQL, legend). `unit` is one of Grafana's: s, bytes, percentunit, short, reqps."""

    title: str
    unit: str
    queries: tuple[tuple[str, str], ...]


def rate(metric: str, by: str = "", window: str = "5m") -> str:
    """Returns the rate of a counter, summed."""
    return f"sum{f' by ({by})' if by else ''} (rate({metric}[{window}]))"


def quantile(part: float, histogram: str, by: str = "") -> str:
    """Returns a quantile of a histogram over all processes."""
    return f"histogram_quantile({part}, sum by (le{f', {by}' if by else ''}) (rate({histogram}_bucket[5m])))"


def mean(histogram: str) -> str:
    """Returns the mean of a histogram's values over all processes."""
    return f"{rate(f'{histogram}_sum')} / {rate(f'{histogram}_count')}"


RIGHT = 'loraport_router_answered_total{revision="right"}'
MET = 'loraport_router_accepted_total{verdict="met"}'
HIT = 'loraport_adapter_lookups_total{result="hit"}'

DASHBOARDS: dict[str, tuple[str, tuple[Panel, ...]]] = {
    "service": (
        "loraport: what users get",
        (
            Panel(
                "Requests by outcome", "reqps", ((rate("loraport_router_requests_total", "outcome"), "{{outcome}}"),)
            ),
            Panel(
                "Right revision",
                "percentunit",
                ((f"{rate(RIGHT)} / {rate('loraport_router_answered_total')}", "right"),),
            ),
            Panel(
                "Time to first token",
                "s",
                tuple(
                    (quantile(part, "loraport_router_ttft_seconds", "start"), f"p{part * 100:g} {{{{start}}}}")
                    for part in (0.5, 0.99)
                ),
            ),
            Panel(
                "Time per token",
                "s",
                tuple(
                    (
                        quantile(part, "loraport_router_tpot_seconds", "tenant_class"),
                        f"p{part * 100:g} {{{{tenant_class}}}}",
                    )
                    for part in (0.5, 0.99)
                ),
            ),
            Panel(
                "Queue residence by tenant class",
                "s",
                ((quantile(0.99, "loraport_router_queue_residence_seconds", "tenant_class"), "p99 {{tenant_class}}"),),
            ),
            Panel(
                "Waiting and running",
                "short",
                (
                    ("sum by (tenant_class) (loraport_router_queued)", "waiting {{tenant_class}}"),
                    ("sum by (tenant_class) (loraport_router_running)", "running {{tenant_class}}"),
                ),
            ),
            Panel(
                "Work by tenant class",
                "percentunit",
                (("sum by (tenant_class) (deriv(loraport_router_work_seconds[5m]))", "{{tenant_class}}"),),
            ),
            Panel("Fairness: spread over bound", "percentunit", (("max(loraport_router_fairness_spread)", "spread"),)),
            Panel("Accepted requests", "reqps", ((rate("loraport_router_accepted_total", "verdict"), "{{verdict}}"),)),
            Panel(
                "Device-seconds per accepted request",
                "s",
                (
                    (
                        f"{rate('loraport_executor_busy_seconds_total', window='15m')} / {rate(MET, window='15m')}",
                        "device-seconds",
                    ),
                ),
            ),
        ),
    ),
    "adapters": (
        "loraport: adapters and tiers",
        (
            Panel(
                "Hit rate per tier",
                "percentunit",
                ((f"{rate(HIT, 'tier')} / {rate('loraport_adapter_lookups_total', 'tier')}", "{{tier}}"),),
            ),
            Panel(
                "Cold load by stage, p95",
                "s",
                ((quantile(0.95, "loraport_adapter_load_duration_seconds", "stage"), "{{stage}}"),),
            ),
            Panel(
                "Working set and capacity",
                "bytes",
                (
                    ("max(loraport_adapter_working_set_bytes)", "in use"),
                    ("max(loraport_adapter_capacity_bytes)", "pools"),
                ),
            ),
            Panel(
                "Adapters",
                "short",
                (("max by (state) (loraport_adapter_known)", "{{state}}"), ("max(loraport_adapter_active)", "in use")),
            ),
            Panel(
                "Pool in use",
                "percentunit",
                (
                    (
                        'loraport_executor_pool_bytes{state="used"} / ignoring (state) sum without (state)'
                        " (loraport_executor_pool_bytes)",
                        "{{instance}}",
                    ),
                ),
            ),
            Panel("Revisions on devices", "short", (("sum by (state) (loraport_executor_residents)", "{{state}}"),)),
            Panel(
                "Evictions by reason", "short", ((rate("loraport_executor_evictions_total", "reason"), "{{reason}}"),)
            ),
            Panel(
                "Thrash",
                "percentunit",
                ((f"{rate('loraport_executor_thrash_total')} / {rate('loraport_executor_loads_total')}", "of loads"),),
            ),
            Panel("Loads under way", "short", (("sum by (job) (loraport_loads_open)", "{{job}}"),)),
            Panel("Bytes moved", "bytes", ((rate("loraport_adapter_moved_bytes_total", "tier"), "from {{tier}}"),)),
            Panel("Host memory", "bytes", (("sum by (state) (loraport_loader_host_bytes)", "{{state}}"),)),
            Panel("Refusals by code", "short", ((rate("loraport_loader_refusals_total", "code"), "{{code}}"),)),
        ),
    ),
    "fleet": (
        "loraport: the fleet",
        (
            Panel(
                "Step duration",
                "s",
                tuple(
                    (quantile(part, "loraport_executor_step_duration_seconds", "step"), f"p{part * 100:g} {{{{step}}}}")
                    for part in (0.5, 0.99)
                ),
            ),
            Panel(
                "Rows and adapters of a step, mean",
                "short",
                (
                    (
                        mean("loraport_executor_step_rows"),
                        "rows",
                    ),
                    (
                        mean("loraport_executor_step_adapters"),
                        "adapters",
                    ),
                ),
            ),
            Panel("Tokens", "short", ((rate("loraport_executor_tokens_total", "step"), "{{step}}"),)),
            Panel("Device busy", "percentunit", (("rate(loraport_executor_busy_seconds_total[5m])", "{{instance}}"),)),
            Panel("Key-value blocks", "short", (("sum by (state) (loraport_executor_kv_blocks)", "{{state}}"),)),
            Panel("Executor's queue", "s", ((quantile(0.99, "loraport_executor_queue_residence_seconds"), "p99"),)),
            Panel("Executors", "short", (("max by (state) (loraport_router_executors)", "{{state}}"),)),
            Panel(
                "Weights read by steps",
                "bytes",
                ((rate("loraport_executor_read_bytes_total", "weights"), "{{weights}}"),),
            ),
            Panel(
                "Calls by method, p99",
                "s",
                ((quantile(0.99, "loraport_rpc_duration_seconds", "method"), "{{method}}"),),
            ),
            Panel("Calls by code", "reqps", ((rate("loraport_rpc_duration_seconds_count", "code"), "{{code}}"),)),
            Panel("Checkpoint age", "s", (("max by (job) (loraport_checkpoint_age_seconds)", "{{job}}"),)),
            Panel("Catalog epoch", "short", (("min by (job) (loraport_catalog_epoch)", "{{job}}"),)),
            Panel("Rollouts", "short", (("max by (state) (loraport_registry_rollouts)", "{{state}}"),)),
            Panel("Event loop lag, p99", "s", ((quantile(0.99, "loraport_loop_lag_seconds", "job"), "{{job}}"),)),
            Panel(
                "Revisions and log",
                "short",
                (
                    ("max by (state) (loraport_registry_revisions)", "{{state}}"),
                    ("max(loraport_registry_log_leaves)", "leaves"),
                ),
            ),
        ),
    ),
}


def dashboard(name: str) -> str:
    """Returns a dashboard as Grafana's JSON."""
    title, panels = DASHBOARDS[name]
    return (
        json.dumps(
            {
                "uid": f"loraport-{name}",
                "title": title,
                "schemaVersion": 39,
                "refresh": "15s",
                "time": {"from": "now-1h", "to": "now"},
                "tags": ["loraport"],
                "panels": [_panel(number, panel) for number, panel in enumerate(panels)],
            },
            indent=1,
        )
        + "\n"
    )


def _panel(number: int, panel: Panel) -> dict[str, Any]:
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": panel.title,
        "datasource": {"type": "prometheus", "uid": "prometheus"},
        "gridPos": {"h": HEIGHT, "w": WIDTH, "x": number % COLUMNS * WIDTH, "y": number // COLUMNS * HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + index), "expr": query, "legendFormat": legend, "exemplar": "_bucket" in query}
            for index, (query, legend) in enumerate(panel.queries)
        ],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when a dashboard is stale")
    check, stale = parser.parse_args().check, 0
    for name in DASHBOARDS:
        path = FOLDER / f"{name}.json"
        if not check:
            path.write_text(dashboard(name))
        elif not path.exists() or path.read_text() != dashboard(name):
            print(f"{path.relative_to(ROOT)} is stale (run `python scripts/gen_dashboards.py`)", file=sys.stderr)
            stale = 1
    return stale


if __name__ == "__main__":
    sys.exit(main())
