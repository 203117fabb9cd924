"""Tensor parallelism: which part of an adapter each rank of a group holds, from transformers' own plan. Pure.

The base's linear decides. y = x W^T with W [out, in]; the adapter adds s (x A^T) B^T, A [r, in], B [out, r].
 - colwise: a rank holds rows of W, so whole outputs. It needs all of A, and its rows of B. Nothing is communicated.
 - rowwise: a rank holds columns of W and of x; the ranks' partial outputs are summed. It needs its columns of A, and
   all of B: the partial deltas (x_i A_i^T) B^T are summed by the very same reduction.
 - replicated: every rank holds everything.
So an adapter costs no communication of its own. The price is a replicated A (colwise) or B (rowwise) on each rank.

Heads are never cut: outputs of q, k and v come in units of one head. Where there are fewer key/value heads than ranks,
several ranks hold the same head. All ranks or none: what cannot be cut is refused before anything is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class Style(StrEnum):
    """How the base's linear is cut."""

    COLWISE = "colwise"
    ROWWISE = "rowwise"
    REPLICATED = "replicated"


# transformers' words for styles. What gathers or scatters at its edges cuts the weight in the same way.
_STYLES: Mapping[str, Style] = {
    "colwise": Style.COLWISE,
    "colwise_rep": Style.COLWISE,
    "colwise_gather_output": Style.COLWISE,
    "rowwise": Style.ROWWISE,
    "rowwise_rep": Style.ROWWISE,
    "rowwise_split_input": Style.ROWWISE,
    "replicated": Style.REPLICATED,
    "replicated_with_grad_allreduce": Style.REPLICATED,
}


class NotShardable(ValueError):
    """A linear cannot be cut for this number of ranks, or the plan cuts it in a way that adapters do not follow."""


@dataclass(frozen=True, slots=True)
class Span:
    """Half-open range of features."""

    start: int
    end: int

    @property
    def size(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's part of a linear and its adapter: columns `inputs` of A (and of x), rows `outputs` of B (and of y).

    `summed`: the ranks' outputs are partial sums of the whole output; otherwise they are parts of it.
    """

    inputs: Span
    outputs: Span
    summed: bool

    @property
    def values_per_rank(self) -> int:
        """Numbers that one rank row of the adapter takes here, A and B together."""
        return self.inputs.size + self.outputs.size


def style_of(path: str, plan: Mapping[str, str]) -> Style:
    """Return how `plan` cuts the module at `path`; a module that no pattern names is replicated.

    Patterns are transformers': module paths in which `*` stands for a layer's number. They may lack the prefix
    "model." of PEFT's paths.

    Raises:
        NotShardable: the plan has a style for it that adapters do not follow (experts, packed columns).
    """
    generic = ".".join("*" if part.isdigit() else part for part in path.split("."))
    for name in (generic, generic.removeprefix("model."), path):
        if name in plan:
            style = _STYLES.get(plan[name])
            if style is None:
                raise NotShardable(f"{path}: the base is cut {plan[name]!r}")
            return style
    return Style.REPLICATED


def shard(path: str, *, style: Style, in_features: int, out_features: int, unit: int, rank: int, ranks: int) -> Shard:
    """Return rank `rank`'s part of `ranks`. `unit` is the features that stay together on the cut side (a head, or 1).

    Raises:
        NotShardable: the cut side is not a whole number of units, or units do not divide evenly among the ranks or
            the ranks among the units.
    """
    whole_in, whole_out = Span(0, in_features), Span(0, out_features)
    if style is Style.REPLICATED or ranks == 1:
        return Shard(whole_in, whole_out, False)
    features = out_features if style is Style.COLWISE else in_features
    units, rest = divmod(features, unit)
    if rest:
        raise NotShardable(f"{path}: {features} features are not whole units of {unit}")
    if units % ranks == 0:
        first, count = rank * (units // ranks), units // ranks
    elif style is Style.COLWISE and units < ranks and ranks % units == 0:
        first, count = rank // (ranks // units), 1
    else:
        raise NotShardable(f"{path}: {units} units of {unit} features do not divide among {ranks} ranks")
    own = Span(first * unit, (first + count) * unit)
    return Shard(whole_in, own, False) if style is Style.COLWISE else Shard(own, whole_out, True)


@dataclass(frozen=True, slots=True)
class Linear:
    """A base's linear: PEFT's module path, its sizes, and the features of its cut side that stay together."""

    path: str
    in_features: int
    out_features: int
    unit: int = 1


def shard_plan(linears: tuple[Linear, ...], plan: Mapping[str, str], *, ranks: int) -> dict[str, tuple[Shard, ...]]:
    """Return every linear's shard on every rank, by path.

    Raises:
        NotShardable: some linear cannot be cut; the message names all of them.
    """
    shards: dict[str, tuple[Shard, ...]] = {}
    faults = []
    for linear in linears:
        try:
            style = style_of(linear.path, plan)
            shards[linear.path] = tuple(
                shard(
                    linear.path,
                    style=style,
                    in_features=linear.in_features,
                    out_features=linear.out_features,
                    unit=linear.unit,
                    rank=rank,
                    ranks=ranks,
                )
                for rank in range(ranks)
            )
        except NotShardable as fault:
            faults.append(str(fault))
    if faults:
        raise NotShardable("; ".join(faults))
    return shards
