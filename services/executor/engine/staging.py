"""A revision's host-master arrays, arranged as the device pool wants them. Runs off the device thread."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import torch

from services.executor.intake import HostAdapter, HostTensor
from services.executor.kernels.layout import GroupSpec
from services.executor.kernels.threads import compute_with
from services.executor.request import RefusalReason, Refused

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_LOW_PRIORITY = 15  # of -20 (goes first) to 19; a compute thread at 0 takes 97 % of a core that it shares with it
# While requests run, work of so long is followed by a rest of so many times that. Priority is not enough: a step's
# threads wait for each other hundreds of times, and whoever gets a core meanwhile keeps it for a while. A step of 60 ms
# took 140 to 250 beside the arranging of one adapter. Where a step takes 22 ms, p99 gaps of 8 streams were 1.22 times
# those without a load after rests of 1, and 1.12 after rests of 3.
_PIECE_S, _REST = 0.001, 3.0


@dataclass(frozen=True, slots=True)
class StagedGroup:
    """One group's part. Shapes: a [layers, rank, subs, in]; b [layers, rank, sum(out)]; scale [layers, rank, subs].

    `rank` is the largest rank of the adapter in this group; rows above a module's own rank are zero.
    """

    rank: int
    a: torch.Tensor
    b: torch.Tensor
    scale: torch.Tensor


@dataclass(frozen=True, slots=True)
class StagedEmbedding:
    """The part of the token embedding. Shapes: a [vocab, rank], a row per token; b [rank, hidden]."""

    a: torch.Tensor
    b: torch.Tensor
    scaling: float

    @property
    def size_bytes(self) -> int:
        return self.a.nbytes + self.b.nbytes


@dataclass(frozen=True, slots=True)
class Staged:
    """A revision ready to be copied to pages.

    `rank` is how many rank rows of pages it takes, its largest rank, at least 1. Its embedding is kept beside the pages
    (in them it would make every page larger by the vocabulary) and takes `beside_bytes` there.
    """

    revision_id: str
    rank: int
    size_bytes: int
    groups: Mapping[str, StagedGroup]
    embedding: StagedEmbedding | None = None

    @property
    def beside_bytes(self) -> int:
        return self.embedding.size_bytes if self.embedding is not None else 0


def stage(
    adapter: HostAdapter,
    groups: Sequence[GroupSpec],
    *,
    dtype: torch.dtype,
    pinned: bool = False,
    rest: Callable[[], None] = lambda: None,
) -> Staged:
    """Arrange `adapter` for the device in the dtype of its pages. `pinned`: in memory that a GPU copies from by itself.
    `rest` is called after each layer.

    Raises:
        Refused: ADAPTER_UNSUPPORTED (a module that the model has not, or other shapes), ADAPTER_NOT_FINITE (a value is
            NaN or infinite, or becomes so in the serving dtype).
    """
    known = {path: group.kind for group in groups for layer in group.paths for path in layer}
    strange = sorted(path for path, module in adapter.modules.items() if known.get(path) != module.kind)
    if strange or not adapter.modules:
        names = ", ".join(strange) or "(no modules at all)"
        raise Refused(RefusalReason.ADAPTER_UNSUPPORTED, f"modules that the model has not: {names:.500}")
    staged, embedding = {}, None
    for group in groups:
        if group.kind == "embedding":
            embedding = _stage_embedding(adapter, group, dtype, pinned)
        elif (part := _stage_group(adapter, group, dtype, pinned, rest)) is not None:
            staged[group.name] = part
    size = sum(p.a.nbytes + p.b.nbytes for p in staged.values())
    size += embedding.size_bytes if embedding is not None else 0
    rank = max((p.rank for p in staged.values()), default=1)
    return Staged(adapter.revision_id, rank, size, staged, embedding)


def _stage_embedding(
    adapter: HostAdapter, group: GroupSpec, dtype: torch.dtype, pinned: bool
) -> StagedEmbedding | None:
    path, out = group.paths[0][0], group.out_features[0]
    module = adapter.modules.get(path)
    if module is None:
        return None
    if module.a.shape != (module.rank, group.in_features) or module.b.shape != (out, module.rank):
        raise Refused(RefusalReason.ADAPTER_UNSUPPORTED, f"{path}: shapes do not fit the model")
    a, b = (_tensor(t).to(dtype).t().contiguous() for t in (module.a, module.b))
    if not (is_finite(a) and is_finite(b)):
        raise Refused(RefusalReason.ADAPTER_NOT_FINITE, f"{path}: a value is not finite in {dtype}")
    if pinned:
        a, b = a.pin_memory(), b.pin_memory()
    return StagedEmbedding(a, b, module.scaling)


def is_finite(values: torch.Tensor) -> bool:
    """Say whether all values are finite, for a tensor that has some. Least and largest tell, NaN included, in one pass.

    A tenth of what asking each value takes, and that was most of arranging an adapter: 0.07 ms, not 0.74, for 200,000.
    """
    ends = torch.stack(torch.aminmax(values))
    return bool(torch.isfinite(ends).all())


class Stager:
    """Calls `stage` on threads that give way: arranging an adapter takes from running streams only what they leave.

    `turn` says which turn the device thread is in, None between turns. May be called from any thread; waits for the
    result.
    """

    def __init__(
        self,
        groups: Sequence[GroupSpec],
        *,
        dtype: torch.dtype,
        pinned: bool = False,
        threads: int = 2,
        turn: Callable[[], int | None] = lambda: None,
    ) -> None:
        self._groups = tuple(groups)
        self._dtype = dtype
        self._pinned = pinned
        self._turn = turn
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="loraport-stage", initializer=_give_way)

    def __call__(self, adapter: HostAdapter) -> Staged:
        """Raises Refused, as `stage`."""
        work = partial(stage, adapter, self._groups, dtype=self._dtype, pinned=self._pinned)
        # A GPU computes elsewhere.
        turn = (lambda: None) if self._pinned else self._turn
        return self._pool.submit(lambda: work(rest=_Rests(turn))).result()


class _Rests:
    """Sleeps now and then, in the thread that works, while the device thread is in a turn."""

    def __init__(self, turn: Callable[[], int | None]) -> None:
        self._turn = turn
        self._since = time.thread_time()

    def __call__(self) -> None:
        worked = time.thread_time() - self._since
        if worked < _PIECE_S:
            return
        if self._turn() is not None:
            time.sleep(_REST * worked)
        self._since = time.thread_time()


def _give_way() -> None:
    """Compute alone, at a lower priority. Only Linux has priorities of threads."""
    compute_with(1)
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOW_PRIORITY)


def _stage_group(
    adapter: HostAdapter, group: GroupSpec, dtype: torch.dtype, pinned: bool, rest: Callable[[], None]
) -> StagedGroup | None:
    used = [adapter.modules[path] for layer in group.paths for path in layer if path in adapter.modules]
    if not used:
        return None
    rank, subs = max(module.rank for module in used), len(group.out_features)
    a = torch.empty(group.layers, rank, subs, group.in_features, dtype=dtype, pin_memory=pinned)
    b = torch.empty(group.layers, rank, sum(group.out_features), dtype=dtype, pin_memory=pinned)
    scale = torch.zeros(group.layers, rank, subs, dtype=torch.float32, pin_memory=pinned)
    parts = b.split(group.out_features, dim=2)
    for layer, paths in enumerate(group.paths):
        a[layer].zero_()
        b[layer].zero_()
        for sub, path in enumerate(paths):
            module = adapter.modules.get(path)
            if module is None:
                continue
            out = group.out_features[sub]
            if module.a.shape != (module.rank, group.in_features) or module.b.shape != (out, module.rank):
                raise Refused(RefusalReason.ADAPTER_UNSUPPORTED, f"{path}: shapes do not fit the model")
            a[layer, : module.rank, sub] = _tensor(module.a)
            parts[sub][layer, : module.rank] = _tensor(module.b).t()
            scale[layer, : module.rank, sub] = module.scaling
        if not (is_finite(a[layer]) and is_finite(b[layer])):
            raise Refused(RefusalReason.ADAPTER_NOT_FINITE, f"group {group.name}: a value is not finite in {dtype}")
        rest()
    return StagedGroup(rank, a, b, scale)


def _tensor(host: HostTensor) -> torch.Tensor:
    return torch.frombuffer(host.data, dtype=_DTYPES[host.dtype]).view(host.shape)
