"""A compact decoder for the Llama family: Llama, SmolLM, Mistral, Qwen2, Qwen3, driven by the checkpoint's config.

Weights that share an input are packed into one matrix (q|k|v, gate|up), and so are their adapters' shrinks.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import rms_norm, silu

from services.executor.kernels.cpu_step import CpuStep
from services.executor.kernels.layout import GroupSpec
from services.executor.model.attention import AttentionBatch
from services.executor.model.config import ConfigUnsupported, NativeConfig, read_config
from services.executor.model.families import NATIVE
from services.executor.model.interface import (
    EMBEDDING_GROUP,
    HEAD_GROUP,
    Adapters,
    ModelInfo,
    ModelUnsupported,
    Packed,
)
from services.executor.model.products import Linear
from services.executor.model.rope import rope_tables
from services.executor.model.weights import Checkpoint


@dataclass(frozen=True, slots=True)
class _Layer:
    """Weights of one layer."""

    input_norm: torch.Tensor
    qkv: Linear
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    o: Linear
    post_norm: torch.Tensor
    gate_up: Linear
    down: Linear


class NativeDecoder:
    """Implements `Decoder`. Build with `load_native`."""

    def __init__(
        self,
        config: NativeConfig,
        *,
        layers: tuple[_Layer, ...],
        embedding: torch.Tensor,
        norm: torch.Tensor,
        head: torch.Tensor,
        max_context: int,
        step: CpuStep | None = None,
    ) -> None:
        self._config = config
        self._step = step
        self._layers = layers
        self._embedding = embedding
        self._norm = norm
        self._head = Linear(head, step=step)
        # A product with this column is the mean of the squares: several times faster than a reduction at few rows.
        self._mean = torch.full((config.hidden_size, 1), 1 / config.hidden_size, device=norm.device)
        tables = rope_tables(config.rope, head_dim=config.head_dim, length=max_context, dtype=embedding.dtype)
        self._cos, self._sin = (table.to(embedding.device) for table in tables)
        self._info = ModelInfo(
            path=NATIVE,
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            layers=config.layers,
            heads=config.heads,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            max_context=max_context,
            eos_ids=config.eos_ids,
            dtype=embedding.dtype,
            device=embedding.device,
        )
        self._groups = _groups(config)
        self._places = {
            path: (group, index, sub)
            for group in self._groups
            for index, paths in enumerate(group.paths)
            for sub, path in enumerate(paths)
        }
        self._thawed: list[Linear] = []

    @property
    def info(self) -> ModelInfo:
        return self._info

    @property
    def groups(self) -> tuple[GroupSpec, ...]:
        return self._groups

    def weight(self, path: str) -> torch.Tensor:
        """See `Decoder.weight`. The view is part of the model until the next step."""
        group, index, sub = self._places[path]
        if group.name == EMBEDDING_GROUP:
            return self._embedding
        product: Linear = self._head if group.name == HEAD_GROUP else getattr(self._layers[index], group.name)
        self._thawed.append(product)
        return product.thaw().split(group.out_features)[sub]

    def _freeze(self) -> None:
        while self._thawed:
            self._thawed.pop().freeze()

    def hidden(self, packed: Packed) -> torch.Tensor:
        """See `Decoder.hidden`."""
        self._freeze()
        x = self._embedding.index_select(0, packed.tokens)
        packed.lora.add_embedding(x, packed.tokens)
        cos = self._cos.index_select(0, packed.positions).unsqueeze(1)
        sin = self._sin.index_select(0, packed.positions).unsqueeze(1)
        turn = (cos, sin) if self._step is not None else (torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1))
        for index, layer in enumerate(self._layers):
            normed = self._norm_of(x, layer.input_norm)
            seen = self._attend(index, layer, normed, turn, packed)
            x = layer.o.add_to(x, seen)
            packed.lora.add("o", index, x, seen)
            normed = self._norm_of(x, layer.post_norm)
            middle = self._feed_forward(index, layer, normed, packed.lora)
            x = layer.down.add_to(x, middle)
            packed.lora.add("down", index, x, middle)
        return self._norm_of(x, self._norm)

    def _norm_of(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if self._step is not None:
            return self._step.norm(x, weight, self._config.norm_eps)
        if x.device.type != "cpu":
            return rms_norm(x, weight.shape, weight, self._config.norm_eps)
        wide = x.float()
        scale = torch.mm(wide * wide, self._mean).add_(self._config.norm_eps).rsqrt_()
        return (wide * weight).mul_(scale).to(x.dtype)

    def logits(self, hidden: torch.Tensor, lora: Adapters) -> torch.Tensor:
        """See `Decoder.logits`."""
        self._freeze()
        out = self._head(hidden)
        lora.add(HEAD_GROUP, 0, out, hidden)
        return out

    def _attend(
        self, index: int, layer: _Layer, x: torch.Tensor, turn: tuple[torch.Tensor, torch.Tensor], packed: Packed
    ) -> torch.Tensor:
        config = self._config
        qkv = layer.qkv(x)
        packed.lora.add("qkv", index, qkv, x)
        heads = qkv.view(x.shape[0], -1, config.head_dim)
        q, k, v = torch.split(heads, [config.heads, config.kv_heads, config.kv_heads], dim=1)
        if layer.q_norm is not None:
            q = rms_norm(q, (config.head_dim,), layer.q_norm, config.norm_eps)
            k = rms_norm(k, (config.head_dim,), layer.k_norm, config.norm_eps)
        rule: dict[str, Any] = {"scale": config.head_dim**-0.5, "window": config.windows[index]}
        attention, rotary = packed.attention, config.rotary[index]
        if rotary and self._step is not None and isinstance(attention, AttentionBatch) and attention.is_one_call:
            return attention.rotate_and_attend(index, q, k, v, turn, **rule)
        if rotary:
            qk = heads[:, : config.heads + config.kv_heads] if layer.q_norm is None else torch.cat((q, k), dim=1)
            qk = _rotate(qk, *turn) if self._step is None else self._step.rotate(qk, qk.shape[1], *turn)
            q, k = torch.split(qk, [config.heads, config.kv_heads], dim=1)
        return attention.attend(index, q, k, v, **rule)

    def _feed_forward(self, index: int, layer: _Layer, x: torch.Tensor, lora: Adapters) -> torch.Tensor:
        both = layer.gate_up(x)
        lora.add("gate_up", index, both, x)
        if self._step is not None:
            return self._step.gated(both)
        gate, up = torch.split(both, self._config.intermediate_size, dim=1)
        return silu(gate).mul_(up)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate pairs (i, i + head_dim / 2). x [rows, heads, head_dim]; cos, sin [rows, 1, head_dim], sin signed."""
    return torch.addcmul(x * cos, torch.roll(x, x.shape[2] // 2, dims=-1), sin)


def _groups(config: NativeConfig) -> tuple[GroupSpec, ...]:
    def paths(block: str, *names: str) -> tuple[tuple[str, ...], ...]:
        return tuple(tuple(f"model.layers.{i}.{block}.{n}" for n in names) for i in range(config.layers))

    q, kv, wide, hidden = (
        config.heads * config.head_dim,
        config.kv_heads * config.head_dim,
        config.intermediate_size,
        config.hidden_size,
    )
    groups = [
        GroupSpec(
            name="qkv",
            in_features=hidden,
            out_features=(q, kv, kv),
            paths=paths("self_attn", "q_proj", "k_proj", "v_proj"),
        ),
        GroupSpec(name="o", in_features=q, out_features=(hidden,), paths=paths("self_attn", "o_proj")),
        GroupSpec(
            name="gate_up", in_features=hidden, out_features=(wide, wide), paths=paths("mlp", "gate_proj", "up_proj")
        ),
        GroupSpec(name="down", in_features=wide, out_features=(hidden,), paths=paths("mlp", "down_proj")),
    ]
    groups.append(
        GroupSpec(
            name=EMBEDDING_GROUP,
            in_features=config.vocab_size,
            out_features=(hidden,),
            paths=(("model.embed_tokens",),),
            kind="embedding",
        )
    )
    if not config.tied:  # A tied head is the embedding itself; adapting it would be a different module.
        head = GroupSpec(name=HEAD_GROUP, in_features=hidden, out_features=(config.vocab_size,), paths=(("lm_head",),))
        groups.append(head)
    return tuple(groups)


def load_native(
    directory: Path,
    *,
    dtype: torch.dtype,
    max_context: int | None = None,
    products: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    step: CpuStep | None = None,
) -> NativeDecoder:
    """Load a local Hugging Face directory, rounded to `dtype` and computed in `products` (by default `dtype`).

    `max_context` caps the tokens of a request; by default the checkpoint's own limit. `step` may be given on a CPU.

    Raises:
        ModelUnsupported: the config or the weights ask for something that this decoder does not compute exactly.
    """
    try:
        raw = json.loads((directory / "config.json").read_text())
        config = read_config(_with_generation_eos(raw, directory))
    except (OSError, ValueError, ConfigUnsupported) as error:
        raise ModelUnsupported(f"{directory}: {error}") from error
    checkpoint = Checkpoint(directory, dtype=dtype, products=products, device=device)
    layers = tuple(_load_layer(checkpoint, config, i, step) for i in range(config.layers))
    embedding = checkpoint.take("model.embed_tokens.weight", (config.vocab_size, config.hidden_size))
    norm = checkpoint.take("model.norm.weight", (config.hidden_size,))
    head = embedding
    if not config.tied or checkpoint.has("lm_head.weight"):
        head = checkpoint.take("lm_head.weight", (config.vocab_size, config.hidden_size))
    if config.tied and not torch.equal(head, embedding):
        raise ModelUnsupported(f"{directory}: the config ties head and embedding, the weights differ")
    strange = checkpoint.unread(spare=lambda name: name.endswith("rotary_emb.inv_freq"))
    if strange:
        raise ModelUnsupported(f"{directory}: {len(strange)} tensors have no place in the model, first {strange[0]}")
    context = min(config.max_context, max_context or config.max_context)
    return NativeDecoder(
        config, layers=layers, embedding=embedding, norm=norm, head=head, max_context=context, step=step
    )


def _with_generation_eos(config: Mapping[str, Any], directory: Path) -> Mapping[str, Any]:
    """The ids that end an answer are those of generation_config.json where it names some."""
    path = directory / "generation_config.json"
    generation = json.loads(path.read_text()) if path.is_file() else {}
    eos = generation.get("eos_token_id")
    return config if eos is None else {**config, "eos_token_id": eos}


def _load_layer(checkpoint: Checkpoint, config: NativeConfig, index: int, step: CpuStep | None) -> _Layer:
    prefix = f"model.layers.{index}."
    hidden, wide = config.hidden_size, config.intermediate_size
    q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim

    def take(name: str, *shape: int) -> torch.Tensor:
        return checkpoint.take(f"{prefix}{name}", shape)

    def pack(parts: dict[str, int], size: int, biased: bool) -> Linear:
        weight = torch.cat([take(f"{name}.weight", out, size) for name, out in parts.items()])
        bias = torch.cat([take(f"{name}.bias", out) for name, out in parts.items()]) if biased else None
        return Linear(weight, bias, step)

    attention = {"self_attn.q_proj": q, "self_attn.k_proj": kv, "self_attn.v_proj": kv}
    return _Layer(
        input_norm=take("input_layernorm.weight", hidden),
        qkv=pack(attention, hidden, config.qkv_bias),
        q_norm=take("self_attn.q_norm.weight", config.head_dim) if config.qk_norm else None,
        k_norm=take("self_attn.k_norm.weight", config.head_dim) if config.qk_norm else None,
        o=pack({"self_attn.o_proj": hidden}, q, config.o_bias),
        post_norm=take("post_attention_layernorm.weight", hidden),
        gate_up=pack({"mlp.gate_proj": wide, "mlp.up_proj": wide}, hidden, config.mlp_bias),
        down=pack({"mlp.down_proj": hidden}, wide, config.mlp_bias),
    )
