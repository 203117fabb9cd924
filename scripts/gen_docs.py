"""Write docs/errors.md and docs/metrics.md from their tables, or check that they are fresh (`--check`)."""

import argparse
import sys
from pathlib import Path

from loraport.bundle.codes import VIOLATIONS, WARNINGS
from services.loader.examine import INTAKE_VIOLATIONS
from services.shared.errors import DOMAIN, REASONS
from services.shared.metrics import METRICS

ROOT = Path(__file__).resolve().parent.parent
# A label with more values is shown by what they are: docs/errors.md lists reasons and violation codes.
MOST_VALUES = 14
LARGE = {
    "method": "every method",
    "code": "every status code, or every violation code",
    "outcome": "OK, CANCELLED, or a reason",
    "path": "every kernel path (`services/executor/kernels/dispatch.py`)",
    "reason": "every reason",
}


def errors_page() -> str:
    """Returns the page of errors and verdicts."""
    lines = [
        "# Errors and verdicts",
        "",
        "Made by `scripts/gen_docs.py`; do not edit.",
        "",
        "## Errors",
        "",
        f"Every failed call carries one `google.rpc.ErrorInfo` with the domain `{DOMAIN}` and one of these reasons.",
        "The pair never changes its meaning; the message may. `UNAVAILABLE` may be retried after the delay in",
        "`RetryInfo`; `RESOURCE_EXHAUSTED` may not be retried at once.",
        "",
        "| reason | code | meaning |",
        "| --- | --- | --- |",
        *[f"| `{reason}` | {code.name} | {meaning} |" for reason, (code, meaning) in REASONS.items()],
        "",
        "## Verdict codes",
        "",
        "A bundle is refused with every violation it has; a warning does not stop it. `loraport adapter verify`,",
        "`loraport adapter register` and the state of a quarantined revision use these codes.",
        "",
        "| code | meaning |",
        "| --- | --- |",
        *[f"| `{code}` | {meaning} |" for code, meaning in (VIOLATIONS | INTAKE_VIOLATIONS).items()],
        "",
        "| warning | meaning |",
        "| --- | --- |",
        *[f"| `{code}` | {meaning} |" for code, meaning in WARNINGS.items()],
        "",
    ]
    return "\n".join(lines)


def metrics_page() -> str:
    """Returns the page of metrics."""
    lines = [
        "# Metrics",
        "",
        "Made by `scripts/gen_docs.py` from `services/shared/metrics.py`; do not edit.",
        "",
        "Every service shows its metrics at the Prometheus endpoint of its configuration (`telemetry.metrics_listen`,",
        "on loopback unless told otherwise) and sends them, and traces, over OTLP when `telemetry.otlp_endpoint` names",
        "a collector. Over OTLP a metric has its first name. Histograms carry exemplars, the newest trace in a bucket:",
        "over OTLP, and at the endpoint for whoever accepts `application/openmetrics-text`, as Prometheus does.",
        "Labels come from closed sets, and what is not in one is `other`: no tenant, adapter or caller ever becomes a",
        "series. A tenant's class is `standard` at weight 1, else `low` or `high`.",
        "",
        "A histogram named `x` is seen by Prometheus as `x_bucket`, `x_sum` and `x_count`.",
        "",
        "| metric | at the endpoint | kind | services | labels | meaning |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for metric in METRICS.values():
        labels = "<br>".join(_label(name, values) for name, values in metric.labels.items())
        lines.append(
            f"| `{metric.name}` | `{metric.prometheus}` | {metric.kind} | {', '.join(metric.services)} | {labels} "
            f"| {metric.help} |"
        )
    return "\n".join([*lines, ""])


def _label(name: str, values: frozenset[str]) -> str:
    if len(values) > MOST_VALUES:
        return f"{name}: {LARGE[name]}"
    return f"{name}: {', '.join(sorted(value for value in values if value))}"


PAGES = {ROOT / "docs" / "errors.md": errors_page, ROOT / "docs" / "metrics.md": metrics_page}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when the page is stale")
    check, stale = parser.parse_args().check, 0
    for path, page in PAGES.items():
        if not check:
            path.write_text(page())
        elif not path.exists() or path.read_text() != page():
            print(f"{path.relative_to(ROOT)} is stale (run `python scripts/gen_docs.py`)", file=sys.stderr)
            stale = 1
    return stale


if __name__ == "__main__":
    sys.exit(main())
