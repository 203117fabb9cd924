"""Write docs/errors.md from the tables of reasons and violation codes, or check that it is fresh (`--check`)."""

import argparse
import sys
from pathlib import Path

from loraport.bundle.codes import VIOLATIONS, WARNINGS
from services.loader.examine import INTAKE_VIOLATIONS
from services.shared.errors import DOMAIN, REASONS

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "errors.md"


def page() -> str:
    """Returns the whole page."""
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when the page is stale")
    if not parser.parse_args().check:
        PAGE.write_text(page())
        return 0
    if not PAGE.exists() or PAGE.read_text() != page():
        print("docs/errors.md is stale (run `python scripts/gen_docs.py`)", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
