"""Reads a checkpoint's safetensors, single or sharded, one tensor at a time."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import safe_open

from services.executor.model.interface import ModelUnsupported

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"


class Checkpoint:
    """Named tensors of a directory. Every tensor must be taken or be known to be spare; see `unread`."""

    def __init__(
        self,
        directory: Path,
        *,
        dtype: torch.dtype,
        products: torch.dtype | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        """Raises ModelUnsupported when the directory has no readable safetensors."""
        self._dtype = dtype
        self._device = device
        self._products = products or dtype
        self._files: dict[str, Path] = {}
        self._taken: set[str] = set()
        try:
            for path in _files(directory):
                with safe_open(path, framework="pt") as file:
                    self._files.update(dict.fromkeys(file.keys(), path))
        except (OSError, ValueError, KeyError) as error:
            raise ModelUnsupported(f"{directory} has no readable weights: {error}") from error

    def has(self, name: str) -> bool:
        return name in self._files

    def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Return a tensor on the device, rounded to the serving dtype, as what products are computed in.

        Raises:
            ModelUnsupported: it is missing or has another shape.
        """
        path = self._files.get(name)
        if path is None:
            raise ModelUnsupported(f"the checkpoint has no tensor {name}")
        with safe_open(path, framework="pt") as file:
            tensor: torch.Tensor = file.get_tensor(name)
        if tuple(tensor.shape) != shape:
            raise ModelUnsupported(f"{name} has shape {tuple(tensor.shape)}, the config says {shape}")
        self._taken.add(name)
        return tensor.to(self._dtype).to(self._products).to(self._device)

    def unread(self, *, spare: Callable[[str], bool]) -> list[str]:
        """Return tensors that nobody took and that `spare` does not excuse: numbers the model would ignore."""
        return sorted(name for name in self._files if name not in self._taken and not spare(name))


def _files(directory: Path) -> list[Path]:
    index = directory / _INDEX
    if index.is_file():
        names = set(json.loads(index.read_text())["weight_map"].values())
        if any(Path(name).name != name for name in names):
            raise ValueError("the index names files outside the directory")
        return sorted(directory / name for name in names)
    single = directory / _SINGLE
    if not single.is_file():
        raise ValueError(f"neither {_SINGLE} nor {_INDEX}")
    return [single]
