"""Which base models a stack serves: parsed from the command line, converted once, read and digested."""

import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from loraport.bundle.base import BaseSpec
from loraport.bundle.base_dir import BaseModelError, read_base_dir
from loraport.dev.layout import MAX_EXECUTORS, Layout, StackError
from loraport.dev.processes import last_line

DEFAULT_BASE = "smollm2"
CONVERTER = "services.executor.model.gguf_base"
_ID = re.compile(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?")
# Executor names are `<base>-<index>` and have 63 characters at most, like every id.
_MAX_BASE_IN_NAME = 60


@dataclass(frozen=True, slots=True)
class StackBase:
    """A base model of the stack: its id, its absolute directory, what admission knows of it."""

    name: str
    directory: Path
    spec: BaseSpec


@dataclass(frozen=True, slots=True)
class ExecutorPlan:
    """An executor of the stack and the id of the base that it serves."""

    name: str
    base: str


def parse_bases(arguments: Sequence[str]) -> dict[str, Path]:
    """Returns id → absolute directory of `[NAME=]DIR` arguments; a name defaults to the directory's, made legal.

    Raises:
        StackError: a name is not legal or given twice.
    """
    bases: dict[str, Path] = {}
    for argument in arguments:
        name, separator, directory = argument.partition("=")
        if not separator or "/" in name:
            name, directory = "", argument
        if not directory:
            raise StackError(f"--base {argument!r} names no directory")
        path = Path(directory).expanduser().absolute()
        name = name or _legal_id(path.resolve().name)
        if _ID.fullmatch(name) is None:
            raise StackError(f"--base {argument}: {name!r} is no legal name: lower-case letters, digits and hyphens")
        if name in bases:
            raise StackError(f"--base: two base models are called {name}; name them apart with --base NAME=DIR")
        bases[name] = path
    return bases


def plan_executors(bases: Sequence[str], *, per_base: int) -> tuple[ExecutorPlan, ...]:
    """Returns the executors of a stack, `per_base` for each base.

    Raises:
        StackError: fewer than one or more than seven in all.
    """
    plans = tuple(
        ExecutorPlan(f"{base[:_MAX_BASE_IN_NAME].rstrip('-')}-{index}", base)
        for base in bases
        for index in range(per_base)
    )
    if not 1 <= len(plans) <= MAX_EXECUTORS:
        raise StackError(f"a local stack has 1 to {MAX_EXECUTORS} executors, not {len(plans)}")
    return plans


def read_bases(directories: Mapping[str, Path], progress: Callable[[str], None]) -> tuple[StackBase, ...]:
    """Reads and digests the base models.

    Raises:
        StackError: a directory is not a base model.
    """
    bases = []
    for name, directory in directories.items():
        progress(f"base {name}: reading and digesting the checkpoint")
        try:
            bases.append(StackBase(name, directory, read_base_dir(directory)))
        except BaseModelError as error:
            raise StackError(f"--base {name}: {error}") from None
        except OSError as error:
            raise StackError(f"--base {name}: cannot read {directory}: {error.strerror}") from None
    return tuple(bases)


def ensure_default_base(layout: Layout, progress: Callable[[str], None]) -> Path:
    """Converts SmolLM2 to safetensors under the data directory, unless it is there, and returns the directory.

    Raises:
        StackError: the conversion failed.
        OSError: the data directory cannot be written.
    """
    target = layout.base(DEFAULT_BASE)
    if target.is_dir():
        return target
    progress(f"base {DEFAULT_BASE}: converting the checkpoint to safetensors (once)")
    target.parent.mkdir(parents=True, exist_ok=True)
    log = layout.log("convert")
    log.parent.mkdir(parents=True, exist_ok=True)
    # The converter gives the directory its name when it is complete, so a killed conversion is simply done again.
    code = _run([sys.executable, "-m", CONVERTER, str(target)], log, progress)
    if code != 0:
        reason = last_line(log) or f"exit code {code}"
        raise StackError(f"base {DEFAULT_BASE}: the conversion failed: {reason:.300}; see {log}")
    return target


def _run(command: Sequence[str], log: Path, progress: Callable[[str], None]) -> int:
    """Runs a command in its own session and shows its last line; ends it when this process is interrupted."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        while (code := process.poll()) is None:
            if line := last_line(log):
                progress(f"base {DEFAULT_BASE}: {line.removeprefix('gguf_base: ')}")
            time.sleep(0.1)
        return code
    except BaseException:
        process.kill()
        process.wait()
        raise


def _legal_id(text: str) -> str:
    name = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    if not name[:1].isalpha():
        name = f"base-{name}".strip("-")
    return name[:63].rstrip("-")
