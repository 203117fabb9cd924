"""What an engine needs of a decoder: packed tokens in, hidden states out, and the list of linears that take adapters.

Packed means: the tokens of all requests of a step in one row, no padding. Positions and key/value slots come with them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from services.executor.kernels.layout import GroupSpec

HEAD_GROUP, EMBEDDING_GROUP = "lm_head", "embed_tokens"


class ModelUnsupported(Exception):
    """The checkpoint asks for something that cannot be computed exactly. One line says what."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """Facts of a loaded decoder. `path` names the implementation, as in `families.py`; `max_context` counts tokens."""

    path: str
    vocab_size: int
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    max_context: int
    eos_ids: frozenset[int]
    dtype: torch.dtype
    device: torch.device | str = "cpu"


class Attention(Protocol):
    """The attention of one step. On a CPU `attention.AttentionBatch`, which is also the others' oracle."""

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *,
        scale: float, window: int | None = None, softcap: float | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Write keys and values, return the output: see `AttentionBatch.attend`."""


class Adapters(Protocol):
    """The adapters of one packed tensor of rows: `lora_linear.LoraBatch`, or `kernel_batch.KernelBatch` on a GPU."""

    @property
    def path(self) -> str:
        """The kernel path that computes them, as in `kernels/dispatch.py`."""

    def add(self, group: str, layer: int, y: torch.Tensor, x: torch.Tensor) -> None:
        """Add the adapters of `group` in `layer` to y [rows, sum(out)], in place; x [rows, in]."""

    def add_embedding(self, y: torch.Tensor, tokens: torch.Tensor, *, gain: float = 1.0) -> None:
        """Add the adapters of the token embedding, times `gain`, to y [rows, hidden], in place; tokens int64 [rows]."""


@dataclass(frozen=True, slots=True)
class Packed:
    """One step's input. tokens and positions are int64 [rows]; rows behind those of the attention's spans are padding,
    whose output means nothing."""

    tokens: torch.Tensor
    positions: torch.Tensor
    attention: Attention
    lora: Adapters


class Decoder(Protocol):
    """A causal language model over a paged key/value cache. All calls come from the device thread."""

    @property
    def info(self) -> ModelInfo: ...

    @property
    def groups(self) -> tuple[GroupSpec, ...]:
        """The modules that take adapters: linears by shared input, the head as HEAD_GROUP, the token embedding as
        EMBEDDING_GROUP."""

    def weight(self, path: str) -> torch.Tensor:
        """Return the weight [out, in] of a module in `groups`: writing to it before the next step changes the model.

        Raises:
            KeyError: there is no such module.
        """

    def hidden(self, packed: Packed) -> torch.Tensor:
        """Return the normed last hidden states [rows, hidden] and write the step's keys and values."""

    def logits(self, hidden: torch.Tensor, lora: Adapters) -> torch.Tensor:
        """Return logits [rows, vocab] of chosen rows; `lora` is laid out over those rows."""
