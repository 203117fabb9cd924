"""The slow twin of a whole request: log-probabilities of given tokens by the base's own products and plain matrices.

A probe compares a revision as it is served with the same revision computed here. Nothing that could be wrong about the
served one is used: the matrices are the sealed host bytes, read anew, not the device's pages; the scaling is the signed
table's; attention sees the keys and values of this call alone, no blocks and no prefix cache. What both share is the
base's weights, and the order of its layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from services.executor.intake import HostAdapter, HostModule, HostTensor
from services.executor.kernels.layout import GroupSpec
from services.executor.model.interface import Decoder, Packed

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# Numbers of one chunk of logits; see scoring.py.
CHUNK_LOGITS = 1 << 22


class PlainAdapter:
    """Stands where a step's adapters stand (`LoraBatch`), for rows that all use one revision, or none."""

    path = "reference"

    def __init__(self, adapter: HostAdapter | None, groups: Sequence[GroupSpec]) -> None:
        self._modules = {} if adapter is None else adapter.modules
        self._groups = {group.name: group for group in groups}

    def add(self, group: str, layer: int, y: torch.Tensor, x: torch.Tensor) -> None:
        """Add scaling * B (A x) of every module of the group's layer to y, in place.

        Shapes: y [rows, sum(out)], x [rows, in]. Products in float32; y of another dtype is rounded once.
        """
        spec = self._groups.get(group)
        if spec is None:  # A head that is the embedding is no module of its own.
            return
        column = 0
        for path, width in zip(spec.paths[layer], spec.out_features, strict=True):
            module = self._modules.get(path)
            if module is not None:
                part = y[:, column : column + width]
                part.copy_(part.float() + _delta(module, x.float()))
            column += width

    def add_embedding(self, y: torch.Tensor, tokens: torch.Tensor, *, gain: float = 1.0) -> None:
        """Add what the revision adds to the embeddings of `tokens`. Shapes: y [rows, hidden], tokens int64 [rows]."""
        for module in (m for m in self._modules.values() if m.kind == "embedding"):
            a, b = _matrix(module.a, y.device), _matrix(module.b, y.device)
            y.copy_(y.float() + (b @ a[:, tokens]).t() * (module.scaling * gain))


class PlainAttention:
    """Stands where a step's attention stands (`AttentionBatch`), for the rows of one request from its first token."""

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *,
        scale: float, window: int | None = None, softcap: float | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """See `AttentionBatch.attend`; nothing is kept. Scores and their softmax in float32."""
        rows, heads, _ = q.shape
        fold = heads // k.shape[1]
        keys, values = (t.float().repeat_interleave(fold, dim=1) for t in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q.float(), keys) * scale
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        query, key = torch.arange(rows, device=q.device)[:, None], torch.arange(rows, device=q.device)[None, :]
        seen = key <= query
        if window is not None:
            seen &= key > query - window
        weights = scores.masked_fill(~seen, float("-inf")).softmax(dim=-1)
        return torch.einsum("hqk,khd->qhd", weights, values).reshape(rows, -1).to(q.dtype)


@dataclass(frozen=True, slots=True)
class PlainPacked:
    """One request's rows. Has the fields of `Packed`."""

    tokens: torch.Tensor
    positions: torch.Tensor
    attention: PlainAttention
    lora: PlainAdapter


@torch.inference_mode()
def reference_logprobs(
    decoder: Decoder, adapter: HostAdapter | None, *, prompt: Sequence[int], continuation: Sequence[int]
) -> list[float]:
    """Return the log-probability of every token of `continuation` after `prompt`, NaN or infinite where it is.

    Runs on the device thread, as any step. `prompt` and `continuation` have at least one token each, all known.
    """
    tokens = torch.tensor([*prompt, *continuation[:-1]], device=decoder.info.device)
    lora = PlainAdapter(adapter, decoder.groups)
    packed = PlainPacked(tokens, torch.arange(len(tokens), device=tokens.device), PlainAttention(), lora)
    hidden = decoder.hidden(_as_packed(packed))
    found: list[float] = []
    size = max(1, CHUNK_LOGITS // decoder.info.vocab_size)
    for start in range(0, len(continuation), size):
        targets = continuation[start : start + size]
        first = len(prompt) - 1 + start
        rows = hidden[first : first + len(targets)]
        logits = decoder.logits(rows, lora).float()  # type: ignore[arg-type]
        chosen = logits.log_softmax(dim=-1).gather(1, torch.tensor(targets, device=logits.device)[:, None])
        found += chosen[:, 0].tolist()
    return found


def _as_packed(plain: PlainPacked) -> Packed:
    """A decoder asks of a step's attention and adapters only what their stand-ins have as well."""
    return plain  # type: ignore[return-value]


def _delta(module: HostModule, x: torch.Tensor) -> torch.Tensor:
    a, b = _matrix(module.a, x.device), _matrix(module.b, x.device)
    return (x @ a.t()) @ b.t() * module.scaling


def _matrix(host: HostTensor, device: torch.device) -> torch.Tensor:
    return torch.frombuffer(host.data, dtype=_DTYPES[host.dtype]).view(host.shape).to(device, torch.float32)
