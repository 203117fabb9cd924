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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import structlog
import torch

log = structlog.get_logger()

Compiled = Literal["auto", "on", "off"]

SOURCE = Path(__file__).parent / "cpu" / "step.cpp"
# Rows up to which bfloat16 weights are read as they are: from 5 rows on packed float32 products are faster.
THIN_ROWS = 4


@dataclass(frozen=True, slots=True)
class Alone:
    """Below what a call stays on one thread (bench/results/serving.md)."""

    numbers: int  # that it reads and writes
    rank_numbers: int  # of rank rows that adapters read
    products: int  # that adapters compute


# Another thread begins after 2 to 4 µs if it waits awake, and after 30 to 100 if it sleeps. All calls of a step whose
# 32 rows share an adapter of rank 8 take 12 ms on one thread, 9 on two, and 20 on two of which one sleeps.
AWAKE = Alone(numbers=1 << 14, rank_numbers=1 << 15, products=1 << 18)
ASLEEP = Alone(numbers=1 << 16, rank_numbers=1 << 19, products=1 << 22)


def alone(environment: Mapping[str, str]) -> Alone:
    """Return what holds for OpenMP threads (libgomp's) that wait as these variables say; left to itself it spins."""
    spins = environment.get("GOMP_SPINCOUNT", "")
    asleep = spins == "0" if spins else environment.get("OMP_WAIT_POLICY", "").upper() == "PASSIVE"
    return ASLEEP if asleep else AWAKE


_ALONE = alone(os.environ)  # as libgomp does, which reads them once
_TIMEOUT_S = 120.0
_OPTIMIZE = "-O3"


class CompilerMissing(ValueError):
    """There is no compiled step on this machine; the message says why."""


class CpuStep:
    """Functions of step.cpp on torch tensors, contiguous and on the CPU. Owned by one thread.

    Where nothing else is said, tensors of a call are all float32, or all bfloat16: those are computed in float32 and
    rounded once.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._thin, self._norm, self._rotate = library.loraport_thin, library.loraport_norm, library.loraport_rotate
        self._gated, self._attend, self._lora = library.loraport_gated, library.loraport_attend, library.loraport_lora
        pointer, whole, number, threads = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_int
        self._thin.argtypes = [pointer] * 5 + [whole] * 3 + [threads]
        self._norm.argtypes = [threads, *[pointer] * 3] + [whole] * 2 + [number, threads]
        self._rotate.argtypes = [threads, *[pointer] * 4] + [whole] * 4 + [threads]
        self._gated.argtypes = [threads, *[pointer] * 2] + [whole] * 2 + [threads]
        self._attend.argtypes = [threads, *[pointer] * 7] + [whole] * 7 + [number, number, threads]
        self._lora.argtypes = [pointer] * 13 + [whole] * 4 + [threads]
        self._wide_rows, self._wide = library.loraport_wide_rows, torch.empty(0)
        self._wide_rows.argtypes, self._wide_rows.restype = [threads], whole
        self._tiles = getattr(library, "loraport_tiles", None)
        if self._tiles is not None:
            self._tiles.argtypes, self._tiles.restype = [pointer] * 10 + [whole] * 4 + [threads], None
            self._tiles = self._tiles if library.loraport_may_use_tiles() else None
        for function in (self._thin, self._norm, self._rotate, self._gated, self._attend, self._lora):
            function.restype = None

    @property
    def pool_dtype(self) -> torch.dtype:
        """What a pool holds so that adapters are computed fastest beside a bfloat16 base."""
        return torch.float32 if self._tiles is None else torch.bfloat16

    def thin(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, add: torch.Tensor | None
    ) -> torch.Tensor:
        """Return x @ weight.T + bias + add. Shapes: x [1 to 4, in]; weight bfloat16 [out, in]; add [rows, out];
        all but the weight float32.

        Bytes moved: 2 * in * out.
        """
        (rows, size), out = x.shape, weight.shape[0]
        y = x.new_empty(rows, out)
        self._thin(
            x.data_ptr(), weight.data_ptr(), _pointer(bias), _pointer(add), y.data_ptr(), rows, size, out,
            _threads(size * out),
        )  # fmt: skip
        return y

    def norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Return x * weight / sqrt(mean(x**2) + eps). Shapes: x [rows, size], weight [size]."""
        y = torch.empty_like(x)
        rows, size = x.shape
        self._norm(_half(x), x.data_ptr(), weight.data_ptr(), y.data_ptr(), rows, size, eps, _threads(2 * x.numel()))
        return y

    def rotate(self, x: torch.Tensor, heads: int, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Return the first heads, rotated. Shapes: x [rows, all heads, size]; cos, sin [rows, size / 2]."""
        rows, _, size = x.shape
        out = x.new_empty(rows, heads, size)
        self._rotate(
            _half(x), x.data_ptr(), cos.data_ptr(), sin.data_ptr(), out.data_ptr(), rows, heads, size, x.stride(0),
            _threads(2 * out.numel()),
        )  # fmt: skip
        return out

    def gated(self, x: torch.Tensor) -> torch.Tensor:
        """Return silu(gate) * up for x [rows, gate | up]."""
        rows, both = x.shape
        out = x.new_empty(rows, both // 2)
        self._gated(_half(x), x.data_ptr(), out.data_ptr(), rows, both // 2, _threads(2 * x.numel()))
        return out

    def attend(
        self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, table: torch.Tensor, begins: torch.Tensor,
        ends: torch.Tensor, *, scale: float, softcap: float | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Attention of one query per request over the paged cache.

        Semantics: out[r] = softmax(cap(scale * q[r] · K)) V over the positions [begins[r], ends[r]) of the block table;
            cap(s) = softcap * tanh(s / softcap), s itself without softcap.
        Shapes: q [rows, q_heads, size], whose rows may be apart; keys, values [blocks, block, kv_heads, size]; table
            int32 [rows, width]; begins, ends int32 [rows]; returns [rows, q_heads * size].
        Bytes moved: 8 * kv_heads * size per position that is seen.
        """
        rows, heads, size = q.shape
        block, kv_heads = keys.shape[1], keys.shape[2]
        out = q.new_empty(rows, heads * size)
        self._attend(
            _half(q), q.data_ptr(), keys.data_ptr(), values.data_ptr(), table.data_ptr(), begins.data_ptr(),
            ends.data_ptr(), out.data_ptr(), rows, heads, kv_heads, size, block, table.shape[1], q.stride(0), scale,
            softcap or 0.0,
            _threads(2 * rows * table.shape[1] * block * kv_heads * size),
        )  # fmt: skip
        return out

    def lora(self, x: torch.Tensor, y: torch.Tensor, step: LoraStep, layer: int) -> None:
        """Add every row's own adapter to y, in place; see `reference.py` for the semantics.

        Shapes: x [rows, in], y [rows, out]; both float32, or both bfloat16: then y is added to in float32 and rounded
        once, in the rows that have an adapter. With a pool in bfloat16 they are bfloat16.
        Bytes moved: (in * subs + out) numbers of the pool's per rank row of the step.
        """
        if step.halves:
            assert self._tiles is not None
            self._tiles(x.data_ptr(), *step.layers[layer], y.data_ptr(), *step.sizes, step.threads)
            return
        wide = None if y.dtype is torch.float32 else self._wide_of(step)
        self._lora(x.data_ptr(), *step.layers[layer], y.data_ptr(), wide, *step.sizes, step.threads)

    def _wide_of(self, step: LoraStep) -> int:
        """Return where there is room for what a step has of x and y in float32 at a time."""
        size = self._wide_rows(step.threads) * (step.sizes[2] + step.sizes[3])
        if len(self._wide) < size:
            self._wide = torch.empty(size)
        return self._wide.data_ptr()


class LoraStep:
    """Which rows of a step have which rank rows of the pool, in one group.

    `rows[i]` are the rows of adapter i, `ranks[i]` its pool rows; `widths` what each sub adds to. Shapes of the pool: a
    [layers, pool rows, subs, in], b [layers, pool rows, out], scale [layers, pool rows, subs]; `a` and `b` are both
    float32, or both bfloat16 (`halves`). `layers[i]` are the addresses that a call for layer i takes.
    """

    __slots__ = ("_kept", "halves", "layers", "sizes", "threads")

    def __init__(
        self,
        pool: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        rows: Sequence[Sequence[int]],
        ranks: Sequence[torch.Tensor],
        widths: Sequence[int],
    ) -> None:
        counts = torch.tensor([len(r) for r in ranks])
        pairs = counts * torch.tensor([len(r) for r in rows]) * len(widths)
        arrays = [
            torch.cat(list(ranks)).to(torch.int64),
            _starts(counts),
            torch.tensor([row for some in rows for row in some]),
            _starts(torch.tensor([len(some) for some in rows])),
            _starts(torch.tensor(list(widths))),
        ]
        if pool[0].dtype is torch.float32:
            arrays += [_starts(pairs), torch.empty(int(pairs.sum()))]
        self._kept = (*pool, *arrays)
        self.halves = pool[0].dtype is torch.bfloat16
        # Addresses, not views: three views a call took longer than a small adapter.
        starts = [(tensor.data_ptr(), tensor.itemsize * tensor.stride(0)) for tensor in pool]
        pointers = [array.data_ptr() for array in arrays]
        self.layers = tuple((*(at + i * apart for at, apart in starts), *pointers) for i in range(len(pool[0])))
        subs, size, out = pool[0].shape[2], pool[0].shape[3], pool[1].shape[2]
        self.sizes = (len(rows), subs, size, out)
        width = size * subs + out
        read, computed = int(counts.sum()) * width, int(pairs.sum()) // subs * width
        self.threads = max(_threads(read, _ALONE.rank_numbers), _threads(computed, _ALONE.products))


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
    _check(step)
    return step


def _check(step: CpuStep) -> None:
    """Hold the functions against torch, with odd sizes. Raises CompilerMissing."""
    numbers = torch.Generator().manual_seed(0)

    def some(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=numbers)

    x, weight, add = some(3, 37), some(29, 37).bfloat16(), some(3, 29)
    pairs = [(step.thin(x, weight, weight[:, 0].float(), add), x @ weight.float().t() + weight[:, 0].float() + add)]
    small = x * 1e-2
    pairs.append((step.norm(small, x[0], 1e-4), torch.nn.functional.rms_norm(small, (37,), x[0], 1e-4)))
    both = some(3, 2 * 19) * 20
    pairs.append((step.gated(both), torch.nn.functional.silu(both[:, :19]) * both[:, 19:]))
    keys, values, q = some(4, 8, 2, 92), some(4, 8, 2, 92), some(2, 6, 92)
    table, ends = torch.tensor([[2, 1], [3, 0]], dtype=torch.int32), torch.tensor([13, 5], dtype=torch.int32)
    begins = torch.tensor([4, 0], dtype=torch.int32)

    def attend(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return step.attend(q, keys, values, table, begins, ends, scale=0.1, softcap=2.0)

    seen = attend(q, keys, values)
    for row, (blocks, begin, end) in enumerate((([2, 1], 4, 13), ([3, 0], 0, 5))):
        k, v = (t[blocks].flatten(0, 1)[begin:end].repeat_interleave(3, dim=1) for t in (keys, values))
        scores = torch.einsum("hd,phd->hp", q[row], k).mul(0.1 / 2.0).tanh().mul(2.0).softmax(dim=-1)
        pairs.append((seen[row], torch.einsum("hp,phd->hd", scores, v).flatten()))
    heads, cos, sin = some(3, 5, 10), some(3, 5), some(3, 5)
    a, b = heads[:, :4, :5], heads[:, :4, 5:]
    turned = (a * cos[:, None] - b * sin[:, None], b * cos[:, None] + a * sin[:, None])
    pairs.append((step.rotate(heads, 4, cos, sin), torch.cat(turned, dim=-1)))
    pairs += [_lora_pair(step, some, size, threads) for size in (37, 40) for threads in (1, 2)]
    pairs.append(_half_pair(step, some))
    pairs.append(_rounded(lambda x, weight: step.norm(x, weight, 1e-4), small, x[0]))
    pairs.append(_rounded(step.gated, both))
    pairs.append(_rounded(attend, q, keys, values))
    pairs.append(_rounded(lambda heads, cos, sin: step.rotate(heads, 4, cos, sin), heads, cos, sin))
    alike = all(torch.allclose(got, want, rtol=1e-4, atol=1e-5) for got, want in pairs)
    if step.pool_dtype is torch.bfloat16:
        for size, threads in ((37, 1), (64, 2)):
            got, want = _lora_pair(step, some, size, threads, torch.bfloat16)
            alike &= torch.allclose(got.float(), want, rtol=2**-8, atol=1e-3)
    if not alike:
        raise CompilerMissing("the compiled step computes something else than torch does")


def _rounded(function: Callable[..., torch.Tensor], *given: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what a function makes of bfloat16 numbers, and what is rounded of the same numbers in float32."""
    halves = [tensor.bfloat16() for tensor in given]
    return function(*halves).float(), function(*(tensor.float() for tensor in halves)).bfloat16().float()


def _lora_pair(
    step: CpuStep, some: Callable[..., torch.Tensor], size: int, threads: int, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what the adapters of some rows come to, and what torch says: adapters of one, few, some and many rows."""
    widths = (18, 141)
    a, b, scale = some(2, 6, 2, size).to(dtype), some(2, 6, sum(widths)).to(dtype), some(2, 6, 2)
    x, y = some(30, size).to(dtype), some(30, sum(widths)).to(dtype)
    rows = [range(1), range(1, 3), range(3, 9), range(9, 30)]
    ranks = [torch.tensor(own) for own in ([5, 2, 1, 3], [4, 1, 5], [2, 3, 1, 0, 5], [0, 4, 5, 3, 2])]
    expected = y.float().clone()
    for at, own in zip(rows, ranks, strict=True):
        shrunk = torch.einsum("ri,ksi->rks", x[at.start : at.stop].float(), a[1, own].float()) * scale[1, own]
        parts = [shrunk[:, :, sub] @ part.float() for sub, part in enumerate(b[1, own].split(widths, dim=1))]
        expected[at.start : at.stop] += torch.cat(parts, dim=1)
    lora = LoraStep((a, b, scale), rows, ranks, widths)
    lora.threads = threads  # one computes everything from x to y, several share an adapter
    step.lora(x, y, lora, 1)
    return y, expected


def _half_pair(step: CpuStep, some: Callable[..., torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what bfloat16 rows get, and what the same step rounds of float32 rows."""
    x, y = some(5, 37).bfloat16(), some(5, 29).bfloat16()
    pool = (some(1, 3, 1, 37), some(1, 3, 29), some(1, 3, 1))
    lora, wide = LoraStep(pool, [range(5)], [torch.tensor([2, 0])], (29,)), y.float()
    step.lora(x, y, lora, 0)
    step.lora(x.float(), wide, lora, 0)
    return y.float(), wide.bfloat16().float()


def _starts(counts: torch.Tensor) -> torch.Tensor:
    return torch.cat((torch.zeros(1, dtype=torch.int64), counts.cumsum(0)))


def _half(tensor: torch.Tensor) -> int:
    return int(tensor.dtype is torch.bfloat16)


def _pointer(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _threads(numbers: int, least: int = _ALONE.numbers) -> int:
    return 1 if numbers < least else torch.get_num_threads()
