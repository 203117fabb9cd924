"""Before the transformers path serves: is this model made of parts that we know, and does running it packed change it?

`check_structure` looks at the modules, without weights. `record` runs the unchanged model on two short prompts, with
transformers' own eager attention; `compare` runs them again through the paged cache, in chunks and token by token,
mixed. What neither can explain (a mask of its own, positions that are counted elsewhere, a router of rows) shows there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from services.executor.model.attention import AttentionBatch, AttentionSpan, KvCache
from services.executor.model.config import SLIDING
from services.executor.model.interface import EMBEDDING_GROUP, Attention, Decoder, ModelInfo, ModelUnsupported, Packed

_LENGTHS = (21, 9)
_BLOCK = 4
# Each step's (prompt, start, end): chunks, both prompts at once, then one token at a time.
_STEPS = (
    ((0, 0, 8),),
    ((0, 8, 17), (1, 0, 7)),
    *(((0, at, at + 1), (1, at - 10, at - 9)) for at in (17, 18)),
    *(((0, at, at + 1),) for at in (19, 20)),
)
# Largest relative error of a row. Wrong masks or positions give errors near 1; rounding gives the rest.
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1}


def check_structure(model: Any) -> None:
    """Raises ModelUnsupported when a module holds matrices and is neither a plain linear, an embedding nor a norm, or
    when attention or the decoder inside cannot be replaced. Parameters may be on the meta device."""
    name = type(model).__name__
    if not getattr(model, "_supports_attention_backend", False):
        raise ModelUnsupported(f"{name} has its own attention, which cannot be replaced by the paged one")
    if not isinstance(getattr(model, model.base_model_prefix, None), nn.Module):
        raise ModelUnsupported(f"{name} has no decoder called {model.base_model_prefix!r} inside")
    for path, module in model.named_modules():
        kind = type(module)
        if kind is nn.Linear or isinstance(module, nn.Embedding) or "norm" in kind.__name__.lower():
            continue
        large = [key for key, parameter in module.named_parameters(recurse=False) if parameter.dim() > 1]
        if large:
            raise ModelUnsupported(f"{path} of {name} is a {kind.__name__} with weights ({large[0]}), no nn.Linear")


@dataclass(frozen=True, slots=True)
class Recorded:
    """What the unchanged model says: token ids, hidden states and logits of each prompt, [rows, features]."""

    tokens: tuple[torch.Tensor, ...]
    hidden: tuple[torch.Tensor, ...]
    logits: tuple[torch.Tensor, ...]
    windows: tuple[int | None, ...]


@torch.no_grad()
def record(model: Any, info: ModelInfo) -> Recorded:
    """Run the unchanged model on the probe's prompts, with eager attention and no cache."""
    model.set_attn_implementation("eager")
    inner = getattr(model, model.base_model_prefix)
    tokens, hidden, logits = [], [], []
    for salt, length in enumerate(_LENGTHS):
        ids = torch.tensor(
            [[(7919 * (i + 31 * salt + 1)) % info.vocab_size for i in range(length)]], device=model.device
        )
        tokens.append(ids[0])
        hidden.append(inner(input_ids=ids, use_cache=False).last_hidden_state[0])
        logits.append(model(input_ids=ids, use_cache=False).logits[0])
    return Recorded(tuple(tokens), tuple(hidden), tuple(logits), _windows(model.config, info.layers))


def _windows(config: Any, layers: int) -> tuple[int | None, ...]:
    """The windows that the config gives the layers."""
    window = getattr(config, "sliding_window", None)
    types = getattr(config, "layer_types", None)
    if types is not None:
        return tuple(window if kind == SLIDING else None for kind in types[:layers])
    return (window if getattr(config, "use_sliding_window", True) else None,) * layers


@torch.no_grad()
def compare(decoder: Decoder, expected: Recorded, *, tolerance: float | None = None) -> None:
    """Raises ModelUnsupported when the packed path does not give what was recorded, or a linear that takes adapters is
    not applied exactly once to every token. `tolerance` is the largest relative error of a row, by default the dtype's.
    """
    info = decoder.info
    limit = _TOLERANCE[info.dtype] if tolerance is None else tolerance
    device = expected.tokens[0].device
    cache = KvCache(
        layers=info.layers,
        blocks=2 + sum(-(-length // _BLOCK) for length in _LENGTHS),
        block_size=_BLOCK,
        kv_heads=info.kv_heads,
        head_dim=info.head_dim,
        dtype=info.dtype,
        device=device,
    )
    for step in _STEPS:
        attention = _Watched(_attention(step, cache, info), info, expected.windows)
        tokens = torch.cat([expected.tokens[p][start:end] for p, start, end in step])
        positions = torch.cat([torch.arange(start, end, device=device) for _, start, end in step])
        uses = _Uses(len(tokens))
        hidden = decoder.hidden(Packed(tokens, positions, attention, uses))
        logits = decoder.logits(hidden, uses)
        uses.check(decoder)
        attention.check()
        for what, got, wanted in (("hidden states", hidden, expected.hidden), ("logits", logits, expected.logits)):
            error = _relative_error(got, torch.cat([wanted[p][start:end] for p, start, end in step]))
            if not error <= limit:
                raise ModelUnsupported(f"run packed, {what} differ from transformers' own by {error:.2g} of their size")


def _attention(step: Sequence[tuple[int, int, int]], cache: KvCache, info: ModelInfo) -> AttentionBatch:
    spans, row = [], 0
    for prompt, start, end in step:
        first = 1 + sum(-(-length // _BLOCK) for length in _LENGTHS[:prompt])
        blocks = tuple(range(first, first + -(-end // _BLOCK)))
        spans.append(AttentionSpan(row, end - start, start, blocks))
        row += end - start
    return AttentionBatch(spans, cache, q_heads=info.heads, kv_heads=info.kv_heads)


def _relative_error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    difference = (got.float() - wanted.float()).norm(dim=-1)
    return float((difference / wanted.float().norm(dim=-1).clamp_min(1e-6)).max())


class _Watched:
    """Attention that checks how it is called."""

    def __init__(self, inner: Attention, info: ModelInfo, windows: Sequence[int | None]) -> None:
        self._inner = inner
        self._info = info
        self._windows = windows
        self._calls: Counter[int] = Counter()

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **rule: Any
    ) -> torch.Tensor:  # fmt: skip
        info, heads = self._info, (q.shape[1], k.shape[1], v.shape[1])
        sizes = {t.shape[2] for t in (q, k, v)}
        if heads != (info.heads, info.kv_heads, info.kv_heads) or sizes != {info.head_dim}:
            raise ModelUnsupported(
                f"layer {layer} has {heads} heads of {sorted(sizes)} features, "
                f"the config says {info.heads} and {info.kv_heads} of {info.head_dim}"
            )
        if rule["window"] != self._windows[layer]:
            raise ModelUnsupported(f"layer {layer} asks for the window {rule['window']}, not {self._windows[layer]}")
        self._calls[layer] += 1
        return self._inner.attend(layer, q, k, v, **rule)

    def check(self) -> None:
        if self._calls != Counter(range(self._info.layers)):
            raise ModelUnsupported("a layer's attention does not go through the paged cache exactly once")


class _Uses:
    """Stands in for a step's adapters and notes which linears are applied to how many rows."""

    path = "none"

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._seen: Counter[tuple[str, int]] = Counter()

    def add(self, group: str, layer: int, y: torch.Tensor, x: torch.Tensor) -> None:
        self._seen[group, layer] += 1 if len(x) == len(y) == self._rows else 2

    def add_embedding(self, y: torch.Tensor, tokens: torch.Tensor, *, gain: float = 1.0) -> None:
        self.add(EMBEDDING_GROUP, 0, y, tokens)

    def check(self, decoder: Decoder) -> None:
        names: Mapping[tuple[str, int], str] = {
            (group.name, i): paths[0] for group in decoder.groups for i, paths in enumerate(group.paths)
        }
        wrong = [path for key, path in names.items() if self._seen[key] != 1]
        if wrong:
            raise ModelUnsupported(f"{wrong[0]} is not applied exactly once to every token")
