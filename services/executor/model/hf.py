"""Any decoder whose linears are nn.Linear, through Hugging Face transformers' own modelling code.

The model runs packed: one row with the tokens of all requests, their positions beside them. Attention goes through the
paged cache by a registered attention function; transformers makes no mask, since the paged attention knows which
keys a row sees. Linears are swapped in place for ones that add their adapters. Nothing is renamed: module paths are
those that PEFT sees. Before it serves, `hf_check.py` compares the packed path with the unchanged model.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.modeling_utils import AttentionInterface
from transformers.utils.logging import disable_progress_bar

from services.executor.kernels.layout import GroupSpec
from services.executor.model.config import ConfigUnsupported, context_limit, count, eos_ids
from services.executor.model.families import TRANSFORMERS, refuse_foreign
from services.executor.model.hf_check import check_structure, compare, record
from services.executor.model.interface import (
    EMBEDDING_GROUP,
    HEAD_GROUP,
    Adapters,
    ModelInfo,
    ModelUnsupported,
    Packed,
)

ATTENTION = "loraport_paged"
_STEP = "loraport_attention"  # the keyword by which a step's attention travels through the modelling code


def _attend(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: None, *,
    scaling: float | None = None, sliding_window: int | None = None, softcap: float | None = None, **kwargs: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """transformers' attention function: query, key and value are [1, heads, rows, head_dim]; returns rows first."""
    attention = kwargs.get(_STEP)
    if attention is None:
        raise ModelUnsupported(f"{type(module).__name__} does not get the keywords that its model is called with")
    rows = [t[0].transpose(0, 1) for t in (query, key, value)]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out = attention.attend(module.layer_idx, *rows, scale=scale, window=sliding_window, softcap=softcap)
    return out.view(1, query.shape[2], query.shape[1], -1), None


def _no_mask(*args: Any, **kwargs: Any) -> None:
    """transformers' mask function."""


class _Step:
    """The adapters of the call in progress; modelling code has no way to hand them to a linear."""

    __slots__ = ("lora",)

    def __init__(self) -> None:
        self.lora: Adapters | None = None


class LoraLinear(nn.Linear):
    """A linear that adds the adapters of its group's `index`-th layer. It has the parameters of the one it replaces."""

    def __init__(self, plain: nn.Linear, *, step: _Step, group: str, index: int) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = plain.in_features, plain.out_features
        self.weight, self.bias = plain.weight, plain.bias
        self._step, self._group, self._index = step, group, index

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        out = super().forward(input)
        if self._step.lora is not None:
            rows = input.reshape(-1, self.in_features)
            self._step.lora.add(self._group, self._index, out.view(-1, self.out_features), rows)
        return out


class _GivenHidden(nn.Module):
    """Stands where the decoder hung in the causal model: that model then computes logits of given hidden states."""

    def forward(self, *args: Any, inputs_embeds: torch.Tensor, **kwargs: Any) -> BaseModelOutputWithPast:
        return BaseModelOutputWithPast(last_hidden_state=inputs_embeds)


class TransformersDecoder:
    """Implements `Decoder`. Build with `load_transformers`."""

    def __init__(self, model: Any, *, info: ModelInfo) -> None:
        self._info = info
        self._step = _Step()
        self._groups = tuple(_groups(model))
        self._weights = {}
        for group in self._groups:
            for index, (path,) in enumerate(group.paths):
                if group.kind == "embedding":
                    embedding = model.get_submodule(path)
                    embedding.register_forward_hook(self._adapt_embedding)
                    self._weights[path] = embedding.weight.data
                    continue
                swapped = LoraLinear(model.get_submodule(path), step=self._step, group=group.name, index=index)
                model.set_submodule(path, swapped)
                self._weights[path] = swapped.weight.data
        model.set_attn_implementation(ATTENTION)
        self._inner = getattr(model, model.base_model_prefix)
        setattr(model, model.base_model_prefix, _GivenHidden())
        self._head = model

    @property
    def info(self) -> ModelInfo:
        return self._info

    @property
    def groups(self) -> tuple[GroupSpec, ...]:
        return self._groups

    def weight(self, path: str) -> torch.Tensor:
        """See `Decoder.weight`."""
        return self._weights[path]

    def _adapt_embedding(self, module: nn.Module, given: tuple[torch.Tensor], out: torch.Tensor) -> None:
        """A hook, since families scale embeddings in classes of their own; PEFT scales the adapter's part likewise."""
        if self._step.lora is not None:
            gain = float(getattr(module, "embed_scale", 1.0))
            self._step.lora.add_embedding(out.view(-1, out.shape[-1]), given[0].view(-1), gain=gain)

    def hidden(self, packed: Packed) -> torch.Tensor:
        """See `Decoder.hidden`."""
        self._step.lora = packed.lora
        try:
            out = self._inner(
                input_ids=packed.tokens[None],
                position_ids=packed.positions[None],
                use_cache=False,
                **{_STEP: packed.attention},
            )
        finally:
            self._step.lora = None
        hidden: torch.Tensor = out.last_hidden_state[0]
        return hidden

    def logits(self, hidden: torch.Tensor, lora: Adapters) -> torch.Tensor:
        """See `Decoder.logits`."""
        self._step.lora = lora
        try:
            logits: torch.Tensor = self._head(inputs_embeds=hidden[None], use_cache=False).logits[0]
        finally:
            self._step.lora = None
        return logits


def _groups(model: Any) -> Iterator[GroupSpec]:
    """Linears of one name and shape in all layers are one group; every other linear is a group of its own."""
    by_name: dict[tuple[str, int, int], list[str]] = {}
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = head.weight is embedding.weight
    for path, module in model.named_modules():
        if module is embedding:
            vocab, hidden = module.weight.shape
            yield GroupSpec(
                name=EMBEDDING_GROUP, in_features=vocab, out_features=(hidden,), paths=((path,),), kind="embedding"
            )
        if not isinstance(module, nn.Linear):
            continue
        if module is head:
            if not tied:  # A tied head is the embedding itself; adapting it would be a different module.
                yield GroupSpec(
                    name=HEAD_GROUP,
                    in_features=module.in_features,
                    out_features=(module.out_features,),
                    paths=((path,),),
                )
            continue
        name = ".".join("*" if part.isdigit() else part for part in path.split("."))
        by_name.setdefault((name, module.in_features, module.out_features), []).append(path)
    for (name, wide, out), paths in by_name.items():
        unique = name if sum(key[0] == name for key in by_name) == 1 else f"{name}[{wide},{out}]"
        yield GroupSpec(name=unique, in_features=wide, out_features=(out,), paths=tuple((path,) for path in paths))


def load_transformers(
    directory: Path, *, dtype: torch.dtype, max_context: int | None = None, device: torch.device | str = "cpu"
) -> TransformersDecoder:
    """Load a local Hugging Face directory. `max_context` caps the tokens of a request.

    Raises:
        ModelUnsupported: this is no decoder of plain linears, its weights do not fit its config, or the packed path
            does not compute what the unchanged model computes.
    """
    AttentionInterface.register(ATTENTION, _attend)
    AttentionMaskInterface.register(ATTENTION, _no_mask)
    disable_progress_bar()
    try:
        return _load_checked(directory, dtype=dtype, max_context=max_context, device=device)
    except (ModelUnsupported, ConfigUnsupported) as error:
        raise ModelUnsupported(f"{directory}: {error}") from error
    except Exception as error:
        # Whatever transformers stumbles over before the first request is a model that it does not run for us.
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ModelUnsupported(f"{directory}: transformers cannot run it packed: {reason:.300}") from error


def _load_checked(
    directory: Path, *, dtype: torch.dtype, max_context: int | None, device: torch.device | str
) -> TransformersDecoder:
    refuse_foreign(json.loads((directory / "config.json").read_text()))
    config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    info = _info(config, directory, dtype, max_context)
    with torch.device("meta"):
        check_structure(AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False))
    model = _load(directory, dtype).to(device)  # before it is checked: what is checked is what serves
    expected = record(model, info)
    decoder = TransformersDecoder(model, info=replace(info, device=model.device))
    compare(decoder, expected)
    return decoder


def _load(directory: Path, dtype: torch.dtype) -> Any:
    """Load the weights; every one must have its place, and every place its weight."""
    model, report = AutoModelForCausalLM.from_pretrained(
        directory,
        dtype=dtype,
        attn_implementation="eager",
        local_files_only=True,
        trust_remote_code=False,
        use_safetensors=True,
        ignore_mismatched_sizes=True,  # they are reported, and refused below by name
        output_loading_info=True,
    )
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if report.get(kind):
            raise ModelUnsupported(f"{kind.replace('_', ' ')} in the checkpoint: {sorted(map(str, report[kind]))[0]}")
    model.requires_grad_(False)
    return model.eval()


def _info(config: Any, directory: Path, dtype: torch.dtype, max_context: int | None) -> ModelInfo:
    values = config.to_dict()
    heads = count(values, "num_attention_heads")
    hidden = count(values, "hidden_size")
    limit = _context(config, values)
    generation = directory / "generation_config.json"
    eos = json.loads(generation.read_text()).get("eos_token_id") if generation.is_file() else None
    return ModelInfo(
        path=TRANSFORMERS,
        vocab_size=count(values, "vocab_size"),
        hidden_size=hidden,
        layers=count(values, "num_hidden_layers"),
        heads=heads,
        kv_heads=int(values.get("num_key_value_heads") or heads),
        head_dim=int(values.get("head_dim") or hidden // heads),
        max_context=min(limit, max_context or limit),
        eos_ids=eos_ids(values.get("eos_token_id") if eos is None else eos),
        dtype=dtype,
    )


def _context(config: Any, values: Mapping[str, Any]) -> int:
    """The least of the contexts that the config's rotary embeddings allow; some families have one per kind of layer."""
    given = getattr(config, "rope_parameters", None) or {}
    ropes = [r for r in given.values() if isinstance(r, dict)] if "rope_type" not in given else [given]
    longest = count(values, "max_position_embeddings")
    limits = [
        context_limit(values, str(r.get("rope_type")), int(r.get("original_max_position_embeddings") or longest))
        for r in ropes
    ]
    return min([longest, *limits])
