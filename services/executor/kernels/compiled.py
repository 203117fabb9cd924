"""The compiled decode step: cpu/step.cpp, built on the machine that runs it and called through ctypes.

Optional and never required. It takes a C++ compiler two or three seconds; the library is built into a directory that
only this user may enter and is deleted as soon as it is loaded, so there is no cache that somebody could write to.
Before it is used its functions are held against their twins on torch; one that disagrees is a reason to do without all
of them.

What it is for: on two cores a step of one row spends more time on waking threads and on starting some 30 operations
per layer than on reading the weights, and torch has no product of bfloat16 weights with float32 rows.
"""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Literal

import structlog
import torch

from services.executor.kernels.cpu_step import CpuStep
from services.executor.kernels.step_check import computes_what_torch_does

log = structlog.get_logger()

Compiled = Literal["auto", "on", "off"]

SOURCE = Path(__file__).parent / "cpu" / "step.cpp"
_TIMEOUT_S = 120.0
_OPTIMIZE = "-O3"


class CompilerMissing(ValueError):
    """There is no compiled step on this machine; the message says why."""


def load_step(choice: Compiled) -> CpuStep | None:
    """Build and check the compiled step; None when it is `off`, or `auto` and there is none to be had.

    Raises:
        CompilerMissing: it must be `on` and there is none.
    """
    if choice == "off":
        return None
    try:
        step = _build()
    except CompilerMissing as error:
        if choice == "on":
            raise
        log.info("decode step not compiled", reason=str(error))
        return None
    log.info("decode step compiled")
    return step


@functools.cache  # a process builds it once
def _build() -> CpuStep:
    compiler = shutil.which(os.environ.get("CXX", "c++")) or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise CompilerMissing("there is no C++ compiler: install g++, or set model.compiled to off")
    with tempfile.TemporaryDirectory(prefix="loraport-step-") as directory:
        target = Path(directory) / "step.so"
        # torch's own OpenMP library: a second one would have threads of its own, which wait for the same cores.
        openmp = [str(path) for path in (Path(torch.__file__).parent / "lib").glob("libgomp*.so*")]
        flags = [_OPTIMIZE, "-march=native", "-ffp-contract=off", "-std=c++17", "-fPIC", "-shared", "-fopenmp"]
        command = [compiler, *flags, "-o", str(target)]
        try:
            done = subprocess.run(
                [*command, str(SOURCE), *openmp], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
            )
            if done.returncode != 0:
                raise CompilerMissing(f"{compiler} failed: {done.stderr.strip().splitlines()[-1:]}")
            step = CpuStep(ctypes.CDLL(str(target)))
        except (OSError, subprocess.TimeoutExpired) as error:
            raise CompilerMissing(f"{compiler}: {error}") from error
    if not computes_what_torch_does(step):
        raise CompilerMissing("the compiled step computes something else than torch does")
    return step
