"""The functions of cpu/step.cpp on torch tensors, called through ctypes. `compiled.py` builds and checks them."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

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


# Whether the operator says that this process has the machine to itself.
_OWN_MACHINE = os.environ.get("GOMP_SPINCOUNT", "") not in ("", "0")
_SETTLED_CPUS = 1024  # that a fixed set of glibc's counts
_ALONE = alone(os.environ)  # as libgomp does, which reads them once


class CpuStep:
    """Functions of step.cpp on torch tensors, contiguous and on the CPU. Owned by one thread.

    Where nothing else is said, tensors of a call are all float32, or all bfloat16: those are computed in float32 and
    rounded once.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._thin, self._norm, self._rotate = library.loraport_thin, library.loraport_norm, library.loraport_rotate
        self._gated, self._attend, self._lora = library.loraport_gated, library.loraport_attend, library.loraport_lora
        self._largest = library.loraport_largest
        pointer, whole, number, threads = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_int
        self._settle = library.loraport_settle
        self._settle.argtypes, self._settle.restype = [pointer, threads], None
        self._thin.argtypes = [pointer] * 5 + [whole] * 3 + [threads]
        self._norm.argtypes = [threads, *[pointer] * 3] + [whole] * 2 + [number, threads]
        self._rotate.argtypes = [threads, *[pointer] * 4] + [whole] * 4 + [threads]
        self._gated.argtypes = [threads, *[pointer] * 2] + [whole] * 2 + [threads]
        self._attend.argtypes = [threads, *[pointer] * 12] + [whole] * 9 + [number, number, threads]
        self._largest.argtypes = [threads, *[pointer] * 2] + [whole] * 2 + [threads]
        self._lora.argtypes = [pointer] * 13 + [whole] * 4 + [threads]
        self._wide_rows, self._wide = library.loraport_wide_rows, torch.empty(0)
        self._wide_rows.argtypes, self._wide_rows.restype = [threads], whole
        self._tiles = getattr(library, "loraport_tiles", None)
        if self._tiles is not None:
            self._tiles.argtypes, self._tiles.restype = [pointer] * 10 + [whole] * 4 + [threads], None
            self._tiles = self._tiles if library.loraport_may_use_tiles() else None
        for function in (
            self._thin, self._norm, self._rotate, self._gated, self._largest, self._attend, self._lora,
        ):  # fmt: skip
            function.restype = None

    @property
    def pool_dtype(self) -> torch.dtype:
        """What a pool holds so that adapters are computed fastest beside a bfloat16 base."""
        return torch.float32 if self._tiles is None else torch.bfloat16

    def settle(self) -> bool:
        """Keep the calling thread and each of its workers on a CPU of its own, for as long as they live; returns
        whether they are.

        Only where GOMP_SPINCOUNT is set, and there are as many threads as CPUs: when a third thread runs for a moment,
        the kernel puts two threads that wait awake on one CPU, and leaves them there for 10 to 20 ms.
        """
        cpus = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
        if not _OWN_MACHINE or len(cpus) != torch.get_num_threads() or max(cpus) >= _SETTLED_CPUS:
            return False
        self._settle((ctypes.c_int * len(cpus))(*cpus), len(cpus))
        return os.sched_getaffinity(0) == {cpus[0]}

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

    def largest(self, x: torch.Tensor) -> torch.Tensor:
        """Return where the first of the largest numbers of each row is, int64 [rows]; -1 where one is not finite.

        Shapes: x [rows, size].
        """
        rows, size = x.shape
        places = torch.empty(rows, dtype=torch.int64)
        self._largest(_half(x), x.data_ptr(), places.data_ptr(), rows, size, _threads(x.numel()))
        return places

    def attend(
        self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, table: torch.Tensor, begins: torch.Tensor,
        ends: torch.Tensor, *, scale: float, softcap: float | None = None,
        fresh: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
        turn: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Attention of query rows over the paged cache.

        Semantics: out[r] = softmax(cap(scale * q[r] · K)) V over the positions [begins[r], ends[r]) of the block table;
            cap(s) = softcap * tanh(s / softcap), s itself without softcap. `fresh`, k, v and slots, is written to the
            cache before: row r to slot slots[r]. With `turn`, cos and sin, q and k are rotated first, and rounded, as
            by `rotate`.
        Shapes: q [rows, q_heads, size] and k, v [rows, kv_heads, size], whose rows may be apart; slots int64 [rows];
            cos, sin [at least rows, size / 2], or [.., 1, size / 2]; keys, values [blocks, block, kv_heads,
            size]; table int32 [rows, width]; begins, ends int32 [rows]; returns [rows, q_heads * size].
        Bytes moved: two numbers for kv_heads * size and each position that is seen.
        """
        rows, heads, size = q.shape
        block, kv_heads = keys.shape[1], keys.shape[2]
        out = q.new_empty(rows, heads * size)
        q = _dense(q)
        k, v, slots = (_dense(fresh[0]), _dense(fresh[1]), fresh[2]) if fresh else (None, None, None)
        cos, sin = turn or (None, None)
        self._attend(
            _half(q), q.data_ptr(), _pointer(k), _pointer(v), _pointer(cos), _pointer(sin), _pointer(slots),
            keys.data_ptr(), values.data_ptr(), table.data_ptr(), begins.data_ptr(), ends.data_ptr(), out.data_ptr(),
            rows, heads, kv_heads, size, block, table.shape[1], q.stride(0), _apart(k), _apart(v), scale,
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


def _starts(counts: torch.Tensor) -> torch.Tensor:
    return torch.cat((torch.zeros(1, dtype=torch.int64), counts.cumsum(0)))


def _half(tensor: torch.Tensor) -> int:
    return int(tensor.dtype is torch.bfloat16)


def _dense(heads: torch.Tensor) -> torch.Tensor:
    """Return heads [rows, heads, size] whose heads lie one after the other; those of a partial rotary do not."""
    return heads if heads.stride()[1:] == (heads.shape[2], 1) else heads.contiguous()


def _apart(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.stride(0)


def _pointer(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _threads(numbers: int, least: int = _ALONE.numbers) -> int:
    return 1 if numbers < least else torch.get_num_threads()
