"""A measurement as a line and as JSON: name, value, baseline, target, PASS or FAIL, and the machine."""

import json
import os
import platform
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One measurement. `at_most` says on which side of the target is good."""

    name: str
    value: float
    baseline: float
    target: float
    unit: str
    at_most: bool = True

    @property
    def passed(self) -> bool:
        return self.value <= self.target if self.at_most else self.value >= self.target

    def line(self) -> str:
        sign = "<=" if self.at_most else ">="
        numbers = f"{self.value:9.2f} {self.unit:<4} baseline {self.baseline:9.2f}   target {sign} {self.target:.4g}"
        return f"{self.name:<28}{numbers:<56}{'PASS' if self.passed else 'FAIL'}"


def report(path: Path, figures: Iterable[Figure], facts: dict[str, Any]) -> None:
    """Prints a line per figure, the facts and the machine, and writes the same as JSON to `path`."""
    figures = list(figures)
    for figure in figures:
        print(figure.line())
    for key, value in facts.items():
        print(f"{key}: {value}")
    document = {"machine": machine(), **facts, "figures": [asdict(item) | {"passed": item.passed} for item in figures]}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=2) + "\n")
    print(f"{document['machine']}\n{path}")


def machine() -> str:
    """Returns what the figures were measured on, the load of others included."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())
    system = f"{platform.system()} {platform.release()}, Python {platform.python_version()}"
    return f"{os.cpu_count()} x {model}, load {os.getloadavg()[0]:.1f}, {system}"
