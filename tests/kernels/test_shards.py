"""Adapter shards on simulated ranks: put together they give exactly what one device gives (field bug E7)."""

from __future__ import annotations

import itertools

import pytest
import torch
from transformers import LlamaConfig, Qwen2Config, Qwen3Config

from services.executor.kernels.shards import Linear, NotShardable, Span, Style, shard, shard_plan, style_of

HEAD = 16


def linears_of(
    *, layers: int = 2, hidden: int = 128, wide: int = 192, heads: int = 8, kv_heads: int = 2
) -> tuple[Linear, ...]:
    found = []
    for i in range(layers):
        at = f"model.layers.{i}."
        found += [
            Linear(at + "self_attn.q_proj", hidden, heads * HEAD, HEAD),
            Linear(at + "self_attn.k_proj", hidden, kv_heads * HEAD, HEAD),
            Linear(at + "self_attn.v_proj", hidden, kv_heads * HEAD, HEAD),
            Linear(at + "self_attn.o_proj", heads * HEAD, hidden, HEAD),
            Linear(at + "mlp.gate_proj", hidden, wide),
            Linear(at + "mlp.up_proj", hidden, wide),
            Linear(at + "mlp.down_proj", wide, hidden),
        ]
    return (*found, Linear("lm_head", hidden, 512))


@pytest.mark.parametrize("config", [LlamaConfig, Qwen2Config, Qwen3Config])
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("r", [1, 6, 16])
def test_shards_put_together_equal_the_whole(config: type, ranks: int, r: int) -> None:
    """Base and adapter on every rank, outputs joined or summed as the base's are; integers, so equality is exact."""
    g = torch.Generator().manual_seed(r)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randint(-3, 4, shape, generator=g).double()

    linears = linears_of()
    plan = shard_plan(linears, config.base_model_tp_plan, ranks=ranks)
    for linear in linears:
        x, w = draw(5, linear.in_features), draw(linear.out_features, linear.in_features)
        a, b = draw(r, linear.in_features), draw(linear.out_features, r)
        whole = x @ w.t() + 0.5 * (x @ a.t()) @ b.t()
        total, covered = torch.zeros_like(whole), torch.zeros(linear.out_features, dtype=torch.bool)
        for part in plan[linear.path]:
            ins = slice(part.inputs.start, part.inputs.end)
            outs = slice(part.outputs.start, part.outputs.end)
            y = x[:, ins] @ w[outs, ins].t() + 0.5 * (x[:, ins] @ a[:, ins].t()) @ b[outs].t()
            if part.summed:
                total[:, outs] += y
            else:
                total[:, outs] = y
            covered[outs] = True
        assert covered.all()
        assert torch.equal(total, whole), linear.path


def test_the_plan_of_llama_is_followed() -> None:
    plan = LlamaConfig.base_model_tp_plan
    assert style_of("model.layers.13.self_attn.q_proj", plan) is Style.COLWISE
    assert style_of("model.layers.0.mlp.down_proj", plan) is Style.ROWWISE
    assert style_of("lm_head", plan) is Style.REPLICATED
    assert style_of("lm_head", {"lm_head": "colwise_gather_output"}) is Style.COLWISE


def test_few_key_value_heads_are_held_by_several_ranks() -> None:
    plan = shard_plan(linears_of(kv_heads=2), LlamaConfig.base_model_tp_plan, ranks=4)
    k = [part.outputs for part in plan["model.layers.0.self_attn.k_proj"]]
    assert k == [Span(0, 16), Span(0, 16), Span(16, 32), Span(16, 32)]
    q = [part.outputs for part in plan["model.layers.0.self_attn.q_proj"]]
    assert q == [Span(32 * i, 32 * i + 32) for i in range(4)]


def test_an_adapters_bytes_shrink_with_the_ranks() -> None:
    """Only the uncut side is held by all: on 4 ranks an adapter of this base takes less than two thirds on each."""
    linears = linears_of(kv_heads=8)
    sizes = [
        [sum(parts[i].values_per_rank for parts in shard_plan(linears, LlamaConfig.base_model_tp_plan, ranks=n).values()) for i in range(n)]
        for n in (1, 4)
    ]  # fmt: skip
    assert len(set(sizes[1])) == 1
    assert sizes[1][0] < sizes[0][0] * 2 / 3


def test_all_or_none() -> None:
    with pytest.raises(NotShardable) as caught:
        shard_plan(linears_of(wide=190, kv_heads=3), LlamaConfig.base_model_tp_plan, ranks=4)
    faults = str(caught.value).split("; ")
    modules = ("self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    assert {f.split(":")[0] for f in faults} == {
        f"model.layers.{i}.{name}" for i, name in itertools.product(range(2), modules)
    }


@pytest.mark.parametrize(
    ("style", "sizes", "unit", "ranks"),
    [
        (Style.COLWISE, (8, 24), 16, 2),  # half a head
        (Style.COLWISE, (8, 48), 16, 2),  # three heads for two ranks
        (Style.ROWWISE, (16, 8), 16, 2),  # an input of one head cannot be held twice: it would be counted twice
    ],
)
def test_what_cannot_be_cut_is_refused(style: Style, sizes: tuple[int, int], unit: int, ranks: int) -> None:
    with pytest.raises(NotShardable):
        shard("m", style=style, in_features=sizes[0], out_features=sizes[1], unit=unit, rank=0, ranks=ranks)


def test_a_style_that_adapters_do_not_follow_is_refused() -> None:
    with pytest.raises(NotShardable, match="packed_colwise"):
        style_of("model.layers.0.mlp.experts", {"layers.*.mlp.experts": "packed_colwise"})
