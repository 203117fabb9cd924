"""Rewrite constraints.txt from what is installed: `make lock`.

torch and Triton stay out of it: which build is right depends on the machine. What some extra asks for and this machine
has no use for (a GPU's attention) keeps the pin that it has.
"""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS = ROOT / "constraints.txt"
OF_THE_MACHINE = ("torch", "triton", "nvidia", "cuda")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_PIN = re.compile(r"[A-Za-z0-9._-]+==[^;, ]+")


def name_of(line: str) -> str:
    """Return the package of a requirement or a pin, as package indexes compare names."""
    found = _NAME.match(line)
    return re.sub(r"[-_.]+", "-", found[0]).lower() if found else ""


def wanted(project: dict) -> dict[str, str]:
    """Return every package that pyproject.toml asks for, in whichever extra, with its requirement; not our own."""
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    lines = {name_of(line): line for group in groups for line in group}
    return {name: line for name, line in lines.items() if name != name_of(project["name"])}


def lock(installed: str, before: str, project: dict) -> str:
    """Return the new constraints: the pins of `installed`; what is wanted and not installed as `before`, or as it is
    pinned where it is asked for."""
    asked = wanted(project)
    exact = {name: found[0] for name, line in asked.items() if (found := _PIN.match(line))}
    kept = {name_of(line): line for line in before.splitlines() if name_of(line) in asked}
    pins = {name_of(line): line for line in installed.splitlines() if "==" in line}
    lines = [line for name, line in {**kept, **exact, **pins}.items() if not name.startswith(OF_THE_MACHINE)]
    return "".join(f"{line}\n" for line in sorted(lines, key=name_of))


def main() -> int:
    freeze = [sys.executable, "-m", "pip", "--disable-pip-version-check", "freeze", "--exclude-editable"]
    installed = subprocess.run(freeze, capture_output=True, text=True, check=True).stdout
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    CONSTRAINTS.write_text(lock(installed, CONSTRAINTS.read_text(), project))
    return 0


if __name__ == "__main__":
    sys.exit(main())
