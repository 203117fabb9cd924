"""Rotary position embeddings: angular speeds and the tables made of them, with transformers' own order of operations.

The same float32 operations in the same order give the same bits; at position 100,000 one last bit of a speed is a
hundredth of a radian.
"""

from __future__ import annotations

import math

import torch

from services.executor.model.config import Rope


def rope_tables(rope: Rope, *, head_dim: int, length: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cos and sin of positions [0, length), each [length, head_dim / 2], in the serving dtype."""
    speeds, gain = angular_speeds(rope, head_dim)
    angles = torch.arange(length, dtype=torch.float32)[:, None] * speeds[None, :]
    return (angles.cos() * gain).to(dtype), (angles.sin() * gain).to(dtype)


def angular_speeds(rope: Rope, head_dim: int) -> tuple[torch.Tensor, float]:
    """Return head_dim / 2 speeds in radians per position, float32, and the factor on cosines and sines."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    if rope.kind == "longrope":
        # Only the short factors: contexts end where the long ones would begin (`context_limit`).
        short = torch.tensor(rope.short_factor, dtype=torch.float32)
        return 1.0 / (short * rope.theta**exponents), _longrope_gain(rope)
    plain = 1.0 / (rope.theta**exponents)
    if rope.kind == "linear":
        return plain / rope.factor, 1.0
    if rope.kind == "llama3":
        return _llama3(rope, plain), 1.0
    if rope.kind == "yarn":
        return _yarn(rope, head_dim, exponents), _yarn_gain(rope)
    return plain, 1.0  # "dynamic" too: within max_position_embeddings it changes nothing


def _llama3(rope: Rope, plain: torch.Tensor) -> torch.Tensor:
    """Long waves are slowed by the factor, short ones kept, those between are a mixture of both."""
    low, high, original = rope.low_freq_factor, rope.high_freq_factor, rope.original_context
    wavelength = 2 * math.pi / plain
    smooth = (original / wavelength - low) / (high - low)
    between = (1 - smooth) * plain / rope.factor + smooth * plain
    slowed = torch.where(wavelength > original / low, plain / rope.factor, between)
    return torch.where(wavelength < original / high, plain, slowed)


def _yarn(rope: Rope, head_dim: int, exponents: torch.Tensor) -> torch.Tensor:
    def dimension(rotations: float) -> float:
        turns = math.log(rope.original_context / (rotations * 2 * math.pi))
        return head_dim * turns / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp = torch.clamp((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low), 0, 1)
    keep = 1 - ramp
    powers = rope.theta**exponents
    return 1.0 / (rope.factor * powers) * (1 - keep) + 1.0 / powers * keep


def _yarn_gain(rope: Rope) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor

    def gain(scale: float) -> float:
        return 0.1 * scale * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0

    if rope.mscale and rope.mscale_all_dim:
        return gain(rope.mscale) / gain(rope.mscale_all_dim)
    return gain(1.0)


def _longrope_gain(rope: Rope) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor
    return 1.0 if rope.factor <= 1 else math.sqrt(1 + math.log(rope.factor) / math.log(rope.original_context))
