"""Compiles the Triton kernels for real GPUs on a machine that has none, and says what each takes of the chip.

`python -m tests.kernels.targets [--all] [--only WORDS]` prints one JSON line per kernel and exits 1 when one does not
compile, spills registers, or takes more shared memory than its chip has. It needs Triton, and no driver: the assembler
comes with it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.executor.kernels.variants import VARIANTS, Variant
from services.executor.kernels.work import GroupShape

# Shared memory that one program may take (vendors' tables), and the width of a warp.
TARGETS = {
    "sm_80": ("cuda", 80, 32, 163 * 1024),
    "sm_90": ("cuda", 90, 32, 227 * 1024),
    "sm_100": ("cuda", 100, 32, 227 * 1024),
    "gfx942": ("hip", "gfx942", 64, 64 * 1024),
}
DTYPES = ("fp16", "bf16")
PAGE = 8
# Llama-3-8B's q|k|v, and widths that nothing divides.
REPRESENTATIVE = (GroupShape(4096, (4096, 1024, 1024)), GroupShape(172, (96, 40, 40)))
ALL = (
    *REPRESENTATIVE,
    GroupShape(4096, (4096,)),
    GroupShape(4096, (14336, 14336)),
    GroupShape(14336, (4096,)),
    GroupShape(4096, (128256,)),
    GroupShape(576, (576, 192, 192)),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One kernel to compile: `half` is "shrink" or "expand"."""

    half: str
    variant: str
    shape: GroupShape
    dtype: str
    target: str

    @property
    def name(self) -> str:
        outs = "+".join(map(str, self.shape.out_features))
        return f"{self.half} {self.variant} {self.shape.in_features}->{outs} {self.dtype} {self.target}"


def backends() -> tuple[str, ...]:
    """Return the targets that the installed Triton can compile for."""
    from triton.backends import backends as found

    names = {"cuda": "nvidia", "hip": "amd"}
    return tuple(t for t, (kind, *_) in TARGETS.items() if names[kind] in found)


def jobs(*, everything: bool, targets: tuple[str, ...]) -> list[Job]:
    """Return every variant for every target and dtype and every shape; or a part that takes a minute.

    The part: every variant for every target, both dtypes on sm_90 and alternating ones elsewhere, of one real shape;
    and on sm_90 the odd shape, which asks whether masks and unaligned rows compile.
    """
    found = []
    for shape in ALL if everything else REPRESENTATIVE:
        for number, (target, dtype, variant) in enumerate(itertools.product(targets, DTYPES, VARIANTS)):
            odd, half_turn = shape is not REPRESENTATIVE[0], (number + number // len(VARIANTS)) % 2
            if not everything and ((target != "sm_90" and (odd or half_turn)) or (odd and dtype == "fp16")):
                continue
            for half in ("shrink", "expand"):
                found.append(Job(half=half, variant=variant, shape=shape, dtype=dtype, target=target))
    return found


def constants(half: str, variant: Variant, shape: GroupShape, *, page: int) -> dict[str, Any]:
    """Return the compile-time constants with which the launcher calls a kernel."""
    outs = (*shape.out_features, 0, 0)[:3]
    some: dict[str, Any] = {"SUBS": len(shape.out_features), "PAGE": page, "ROWS": variant.rows, "RANKS": variant.ranks}
    some["SPLITS"] = variant.splits(shape.in_features)
    if variant.kind == "prefill":
        some["UPCAST"] = False
    if half == "shrink":
        return some | {"IN": shape.in_features, "COLS": variant.in_cols}
    return some | {"OUT0": outs[0], "OUT1": outs[1], "OUT2": outs[2], "COLS": variant.out_cols}


def _compile(job: Job) -> Any:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from services.executor.kernels import triton_decode, triton_prefill

    variant = VARIANTS[job.variant]
    module = triton_decode if variant.kind == "decode" else triton_prefill
    kernel = getattr(module, f"{job.half}_{variant.kind}")
    fixed = constants(job.half, variant, job.shape, page=PAGE)
    kinds = {"h": "*fp32", "scale": "*fp32", "pages": "*i32", "records": "*i32", "counts": "*i32"}
    signature = {n: "constexpr" if n in fixed else kinds.get(n, f"*{job.dtype}") for n in kernel.arg_names}
    place = {name: (index,) for index, name in enumerate(kernel.arg_names)}
    aligned = {place[n]: [["tt.divisibility", 16]] for n, kind in signature.items() if kind != "constexpr"}
    source = ASTSource(kernel, signature, {place[n]: value for n, value in fixed.items()}, aligned)
    warps = variant.shrink_warps if job.half == "shrink" else variant.expand_warps
    kind, arch, width, _ = TARGETS[job.target]
    return triton.compile(
        source, target=GPUTarget(kind, arch, width), options={"num_warps": warps, "num_stages": variant.stages}
    )


def _resources(job: Job, compiled: Any) -> dict[str, int]:
    """Return registers per thread, bytes that spill to memory, and bytes of shared memory."""
    shared = compiled.metadata.shared
    if TARGETS[job.target][0] == "hip":
        text = compiled.asm["amdgcn"]
        found = {key: int(re.search(rf"\.{key}:\s*(\d+)", text)[1]) for key in ("vgpr_count", "vgpr_spill_count")}
        return {"registers": found["vgpr_count"], "spilled": found["vgpr_spill_count"], "shared": shared}
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        tool = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        text = subprocess.run(tool, capture_output=True, text=True, check=True).stdout
    found = {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}
    return {"registers": found["REG"], "spilled": found["STACK"] + found["LOCAL"], "shared": shared}


def run(job: Job) -> dict[str, Any]:
    """Compile one kernel. The result has `fault`, empty when the kernel is good."""
    started = time.monotonic()
    result: dict[str, Any] = {"name": job.name}
    try:
        result |= _resources(job, _compile(job))
    except Exception as error:  # whatever the compiler raises is the finding
        return result | {"fault": f"{type(error).__name__}: {str(error)[:300]}"}
    fault = "spills registers" if result["spilled"] else ""
    if result["shared"] > TARGETS[job.target][3]:
        fault = "takes more shared memory than the chip has"
    return result | {"seconds": round(time.monotonic() - started, 2), "fault": fault}


def run_all(todo: list[Job], *, workers: int) -> list[dict[str, Any]]:
    """Compile in `workers` processes, with a cache that lives as long as this call."""
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache
        with multiprocessing.get_context("spawn").Pool(workers) as pool:
            return pool.map(run, todo, chunksize=4)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--all", action="store_true", help="every shape, not only those that differ most")
    parser.add_argument("--only", default="", metavar="WORDS", help='kernels whose name has these words: "bf16 sm_90"')
    options = parser.parse_args()
    os.environ.pop("TRITON_INTERPRET", None)
    started = time.monotonic()
    todo = [job for job in jobs(everything=options.all, targets=backends()) if options.only in job.name]
    results = run_all(todo, workers=min(2, os.cpu_count() or 1))
    for result in results:
        print(json.dumps(result))
    bad = [r for r in results if r["fault"]]
    worst = {key: max(r.get(key, 0) for r in results) for key in ("registers", "shared")}
    print(
        f"{len(results)} kernels for {', '.join(backends())} in {time.monotonic() - started:.0f} s, {len(bad)} bad; "
        f"at most {worst['registers']} registers, {worst['shared']} B of shared memory",
        file=sys.stderr,
    )
    return 1 if bad else 0


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    sys.exit(main())
