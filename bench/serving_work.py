"""What is served in the serving benchmark: prompts of random tokens, random adapters on all linears. Seeded."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from services.executor.intake import HostAdapter, HostModule, HostTensor
from services.executor.kernels.layout import GroupSpec

RANKS = (8, 16, 32, 64)
NAMES = {torch.float32: "F32", torch.bfloat16: "BF16"}


@dataclass(frozen=True, slots=True)
class Adapter:
    """A made-up adapter: A [rank, in] and B [out, rank] by module path, in the dtype that it is published in."""

    name: str
    rank: int
    scaling: float
    modules: Mapping[str, tuple[torch.Tensor, torch.Tensor]]

    def host(self) -> HostAdapter:
        """Return it as the executor takes it in."""
        modules = {
            path: HostModule(self.rank, self.scaling, _host(a), _host(b)) for path, (a, b) in self.modules.items()
        }
        return HostAdapter(self.name, modules, sum(m.a.data.nbytes + m.b.data.nbytes for m in modules.values()))


def _host(tensor: torch.Tensor) -> HostTensor:
    data = memoryview(tensor.contiguous().view(torch.uint8).view(-1).numpy())
    return HostTensor(NAMES[tensor.dtype], (tensor.shape[0], tensor.shape[1]), data)


def make_adapter(groups: Sequence[GroupSpec], number: int, rank: int, dtype: torch.dtype) -> Adapter:
    """Return an adapter on every linear of the layers whose update is small beside the base's weights."""
    generator = torch.Generator().manual_seed(1000 + number)
    modules = {}
    for group in groups:
        if group.layers == 1:  # the head
            continue
        for paths in group.paths:
            for path, out in zip(paths, group.out_features, strict=True):
                a = torch.randn(rank, group.in_features, generator=generator) * group.in_features**-0.5
                b = torch.randn(out, rank, generator=generator) * 0.02 * rank**-0.5
                modules[path] = (a.to(dtype), b.to(dtype))
    return Adapter(f"sha256:{number:064x}", rank, 2.0, modules)


def make_prompts(count: int, length: int, vocab: int, seed: int) -> list[tuple[int, ...]]:
    """Return prompts of random tokens, no two of which share a block."""
    numbers = random.Random(seed)  # noqa: S311 - made-up prompts
    return [tuple(numbers.randrange(3, vocab) for _ in range(length)) for _ in range(count)]
