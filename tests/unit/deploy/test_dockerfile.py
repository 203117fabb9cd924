"""deploy/Dockerfile, read: what it copies is there, what it is told it uses, what it starts exists, nothing runs as root.

No image of it can be pulled or built here; `make compose-test` builds its CPU targets where an engine is.
"""

import importlib.util
import re
import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[3]
PATH = ROOT / "deploy" / "Dockerfile"
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text())["services"]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SERVICES = ("registry", "loader", "router", "executor")


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage: what it begins from, and its instructions, (word, rest)."""

    base: str
    steps: tuple[tuple[str, str], ...]

    def all(self, word: str) -> list[str]:
        """Returns the rests of one instruction."""
        return [rest for found, rest in self.steps if found == word]


def read() -> tuple[list[str], dict[str, Stage]]:
    """Returns the arguments before the first stage, and the stages by name."""
    text = re.sub(r"(?m)^\s*#.*\n", "", PATH.read_text()).replace("\\\n", " ")
    lines = [re.sub(r"\s+", " ", line).strip() for line in text.splitlines() if line.strip()]
    before: list[str] = []
    found: dict[str, tuple[str, list[tuple[str, str]]]] = {}
    steps: list[tuple[str, str]] | None = None
    for line in lines:
        word, _, rest = line.partition(" ")
        if word == "FROM":
            base, name = re.fullmatch(r"(\S+) AS (\S+)", rest).groups()
            steps = []
            found[name] = (base, steps)
        elif steps is None:
            assert word == "ARG", line
            before.append(rest)
        else:
            steps.append((word, rest))
    return before, {name: Stage(base, tuple(made)) for name, (base, made) in found.items()}


BEFORE, STAGES = read()
RUNNING = (*SERVICES, "tools")


def ancestry(name: str) -> list[Stage]:
    """Returns a stage and those that it begins from, itself first."""
    chain = []
    while name in STAGES:
        chain.append(STAGES[name])
        name = STAGES[name].base
    return chain


def test_stages_begin_from_one_pinned_image_or_from_each_other() -> None:
    [(name, default)] = [tuple(each.split("=", 1)) for each in BEFORE]
    assert name == "BASE_IMAGE"
    assert re.fullmatch(r"python:3\.11\.\d+-slim-\w+", default)
    seen: set[str] = set()
    for name, stage in STAGES.items():
        assert stage.base == "${BASE_IMAGE}" or stage.base in seen, name
        seen.add(name)
    assert set(RUNNING) <= set(STAGES)


def test_whatever_is_copied_is_there() -> None:
    copied = []
    for stage in STAGES.values():
        assert not stage.all("ADD")
        for rest in stage.all("COPY"):
            *words, _ = rest.split()
            sources = [word for word in words if not word.startswith("--")]
            origin = next((word.removeprefix("--from=") for word in words if word.startswith("--from=")), None)
            if origin is None:
                copied += sources
            else:
                made = " ".join(step for each in ancestry(origin) for _, step in each.steps)
                assert all(source in made for source in sources), rest
    missing = [source for source in copied if not (ROOT / source).exists()]
    assert missing == []
    # A clone has them too: git keeps no empty folder.
    tracked = subprocess.run(
        ["git", "ls-files", "--", *copied], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.splitlines()
    if tracked:
        assert [source for source in copied if not any(path.startswith(source) for path in tracked)] == []


def test_every_argument_is_used_and_every_one_that_is_given_is_there() -> None:
    for name, stage in STAGES.items():
        for position, (word, rest) in enumerate(stage.steps):
            if word == "ARG":
                later = " ".join(step for _, step in stage.steps[position + 1 :])
                assert f"${{{rest.split('=')[0]}}}" in later, (name, rest)
    known = {rest.split("=")[0] for stage in STAGES.values() for rest in stage.all("ARG")} | {"BASE_IMAGE"}
    built = {name: service["build"] for name, service in COMPOSE.items() if "build" in service}
    assert set(built) == {"init", "registry", "loader", "router", "executor-0", "executor-gpu-0"}
    for name, build in built.items():
        assert build["dockerfile"] == "deploy/Dockerfile"
        assert (ROOT / "deploy" / build["context"]).resolve() == ROOT
        assert build["target"] in RUNNING, name
        assert set(build["args"]) <= known, name
    assert (built["executor-0"]["args"]["VARIANT"], built["executor-gpu-0"]["args"]["VARIANT"]) == ("cpu", "cuda")


def test_the_cuda_variant_differs_by_torch_and_a_compiler() -> None:
    [condition] = [rest for rest in STAGES["executor"].all("RUN") if "VARIANT" in rest]
    assert condition.startswith('if [ "${VARIANT}" = cuda ]; then')
    assert {"gcc", "libc6-dev"} <= set(condition.split())
    assert "rm -rf /var/lib/apt/lists/*" in condition
    [torch] = [rest for rest in STAGES["build-executor"].all("ARG") if rest.startswith("TORCH=")]
    pinned = torch.removeprefix("TORCH=")
    floor = next(each for each in PROJECT["optional-dependencies"]["executor"] if each.startswith("torch"))
    assert re.fullmatch(r"torch==\d+\.\d+\.\d+", pinned)
    assert release(pinned) >= release(floor)
    for name in ("executor-0", "executor-gpu-0"):
        assert COMPOSE[name]["build"]["args"]["TORCH"].endswith(f":-{pinned}}}"), name
    # What the pins of everything else leave to it.
    pins = (ROOT / "constraints.txt").read_text()
    assert not re.search(r"(?mi)^(torch|nvidia|cuda)[^=]*==", pins)


def release(requirement: str) -> tuple[int, ...]:
    return tuple(map(int, re.search(r"[\d.]+$", requirement)[0].split(".")))


def test_what_is_installed_is_an_extra_and_pinned_and_no_service_has_anothers() -> None:
    install = (ROOT / "deploy" / "install.sh").read_text()
    assert "-c /src/constraints.txt" in install
    assert '"loraport[$1] @ file://$wheel"' in install
    for name, stage in STAGES.items():
        for extras in re.findall(r'install\.sh "([^"]+)"', " ".join(stage.all("RUN"))):
            assert set(extras.split(",")) <= set(PROJECT["optional-dependencies"]), name
    for service in SERVICES:
        [run] = STAGES[f"build-{service}"].all("RUN")
        assert f'install.sh "{service}"' in run
        assert f"strip.sh {service}" in run


@pytest.mark.parametrize("name", RUNNING)
def test_an_image_runs_its_own_program_and_never_as_root(name: str) -> None:
    stages = ancestry(name)
    users = [user for stage in stages for user in reversed(stage.all("USER"))]
    assert users[0] == "10001:10001"
    stage = stages[0]
    assert stage.all("COPY") == [f"--from=build-{name} /opt/loraport /opt/loraport"]
    [entry] = stage.all("ENTRYPOINT")
    words = yaml.safe_load(entry)
    if name == "tools":
        assert words == ["/opt/loraport/bin/loraport"]
        assert "loraport" in PROJECT["scripts"]
    else:
        assert words[:-1] == ["/opt/loraport/bin/python", "-I", "-u", "-m"]
        assert importlib.util.find_spec(f"{words[-1]}.__main__") is not None
        assert words[-1] == f"services.{name}"
    volumes = [volume.split(":")[1] for volume in COMPOSE["init"]["volumes"] if "volumes/" in volume]
    if name == "tools":
        made = next(rest for rest in stage.all("RUN") if "install -d" in rest)
        assert {Path(path).name for path in volumes} == set(re.search(r"for name in (.+?); do", made)[1].split())


def test_the_linter_finds_nothing() -> None:
    hadolint = shutil.which("hadolint", path=str(Path(sys.executable).parent))
    if hadolint is None:
        pytest.skip("no hadolint here (a wheel for Linux on x86-64 only)")
    paths = [PATH, *sorted((ROOT / "tests" / "compose" / "images").glob("*/Dockerfile"))]
    done = subprocess.run([hadolint, "--no-color", *map(str, paths)], capture_output=True, text=True, check=False)
    # The compiler's version is the base image's, whose tag is pinned; `TOKENIZERS_PARALLELISM` is no token; root, for
    # the length of a step, is known everywhere.
    known = ("DL3008", "DL3064", "DL3066")
    assert [line for line in done.stdout.splitlines() if not any(code in line for code in known)] == []
