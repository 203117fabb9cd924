"""A revision's host-master arrays, arranged as the device pool wants them. Runs off the device thread."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from services.executor.intake import HostAdapter, HostTensor
from services.executor.kernels.layout import GroupSpec
from services.executor.request import RefusalReason, Refused

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class StagedGroup:
    """One group's part. Shapes: a [layers, rank, subs, in]; b[sub] [layers, rank, out_sub]; scale [layers, rank, subs].

    `rank` is the largest rank of the adapter in this group; rows above a module's own rank are zero.
    """

    rank: int
    a: torch.Tensor
    b: tuple[torch.Tensor, ...]
    scale: torch.Tensor


@dataclass(frozen=True, slots=True)
class Staged:
    """A revision ready to be copied to pages. `rank` is its largest rank."""

    revision_id: str
    rank: int
    size_bytes: int
    groups: Mapping[str, StagedGroup]


def stage(adapter: HostAdapter, groups: Sequence[GroupSpec], *, dtype: torch.dtype) -> Staged:
    """Arrange `adapter` for the device in the serving dtype.

    Raises:
        Refused: ADAPTER_UNSUPPORTED (a module that the model has not, or other shapes), ADAPTER_NOT_FINITE (a value is
            NaN or infinite, or becomes so in the serving dtype).
    """
    known = {path for g in groups for layer in g.paths for path in layer}
    strange = sorted(set(adapter.modules) - known)
    if strange or not adapter.modules:
        names = ", ".join(strange) or "(no modules at all)"
        raise Refused(RefusalReason.ADAPTER_UNSUPPORTED, f"modules that the model has not: {names:.500}")
    staged = {}
    for group in groups:
        part = _stage_group(adapter, group, dtype)
        if part is not None:
            staged[group.name] = part
    size = sum(p.a.nbytes + sum(b.nbytes for b in p.b) for p in staged.values())
    return Staged(adapter.revision_id, max(p.rank for p in staged.values()), size, staged)


def _stage_group(adapter: HostAdapter, group: GroupSpec, dtype: torch.dtype) -> StagedGroup | None:
    used = [adapter.modules[path] for layer in group.paths for path in layer if path in adapter.modules]
    if not used:
        return None
    rank, subs = max(module.rank for module in used), len(group.out_features)
    a = torch.zeros(group.layers, rank, subs, group.in_features, dtype=dtype)
    b = tuple(torch.zeros(group.layers, rank, out, dtype=dtype) for out in group.out_features)
    scale = torch.zeros(group.layers, rank, subs, dtype=torch.float32)
    for layer, paths in enumerate(group.paths):
        for sub, path in enumerate(paths):
            module = adapter.modules.get(path)
            if module is None:
                continue
            out = group.out_features[sub]
            if module.a.shape != (module.rank, group.in_features) or module.b.shape != (out, module.rank):
                raise Refused(RefusalReason.ADAPTER_UNSUPPORTED, f"{path}: shapes do not fit the model")
            a[layer, : module.rank, sub] = _tensor(module.a)
            b[sub][layer, : module.rank] = _tensor(module.b).t()
            scale[layer, : module.rank, sub] = module.scaling
    for tensor in (a, *b):
        if not bool(torch.isfinite(tensor).all()):
            raise Refused(RefusalReason.ADAPTER_NOT_FINITE, f"group {group.name}: a value is not finite in {dtype}")
    return StagedGroup(rank, a, b, scale)


def _tensor(host: HostTensor) -> torch.Tensor:
    return torch.frombuffer(host.data, dtype=_DTYPES[host.dtype]).view(host.shape)
