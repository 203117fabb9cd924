"""Which kernels a step takes: a roofline that follows the arithmetic, a measured table that overrules it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.executor.kernels.layout import make_layout
from services.executor.kernels.variants import (
    CHIPS,
    DEFAULT_CHIP,
    TABLE_SCHEMA,
    VARIANTS,
    Variant,
    chip_of,
    choose_variant,
    read_table,
    roofline_us,
)
from services.executor.kernels.work import GroupShape

LLAMA_8B = [
    GroupShape(4096, (4096, 1024, 1024), 32),
    GroupShape(4096, (4096,), 32),
    GroupShape(4096, (14336, 14336), 32),
    GroupShape(14336, (4096,), 32),
]
H200 = CHIPS["H200"]


def chosen(segments: list[tuple[int, int]], **kwargs: object) -> Variant:
    layout = make_layout(list(range(len(segments))), [rows for rows, _ in segments])
    ranks = [rank for _, rank in segments]
    return choose_variant(layout, ranks=ranks, shapes=LLAMA_8B, element_bytes=2, chip=H200, **kwargs)


@pytest.mark.parametrize(
    ("segments", "kind", "rows"),
    [
        ([(1, 16)] * 64, "decode", 1),
        ([(1, 8), (1, 128), (1, 64)], "decode", 1),
        ([(4, 16)] * 16, "decode", 4),
        ([(2, 64)] * 8, "decode", 4),
        ([(64, 16)], "prefill", 64),
        ([(16, 16)] * 4, "prefill", 16),
        ([(512, 16)], "prefill", 64),
        ([(8192, 64)], "prefill", 64),
    ],
)
def test_the_roofline_follows_the_rows_of_an_adapter(segments: list[tuple[int, int]], kind: str, rows: int) -> None:
    variant = chosen(segments)
    assert (variant.kind, variant.rows) == (kind, rows)


def test_wide_tiles_are_for_wide_ranks() -> None:
    assert chosen([(2048, 16)]).ranks == 16
    assert chosen([(2048, 64)]).ranks == 64
    assert chosen([(1, 16)]).ranks == 8


@given(
    st.lists(st.tuples(st.integers(1, 300), st.sampled_from([1, 8, 16, 63, 128])), min_size=1, max_size=8),
    st.sampled_from(sorted(CHIPS)),
)
def test_predictions_grow_with_the_work_and_shrink_with_the_chip(segments: list[tuple[int, int]], chip: str) -> None:
    layout = make_layout(list(range(len(segments))), [rows for rows, _ in segments])
    more = make_layout(list(range(len(segments))), [rows + 1 for rows, _ in segments])
    ranks = [rank for _, rank in segments]
    for variant in VARIANTS.values():

        def us(layout: object, ranks: list[int], chip: str, variant: Variant = variant) -> float:
            return roofline_us(variant, layout, ranks=ranks, shapes=LLAMA_8B, element_bytes=2, chip=CHIPS[chip])

        assert 0 < us(layout, ranks, chip) <= us(more, ranks, chip)
        assert us(layout, ranks, chip) <= us(layout, [r + 1 for r in ranks], chip)
        assert us(layout, ranks, "B200") <= us(layout, ranks, "A100")


def test_a_table_overrules_the_roofline_where_it_reaches() -> None:
    entries = [
        {"rows": 4, "rank": 64, "variant": "triton-prefill-16x16"},
        {"rows": 1, "rank": 16, "variant": "triton-decode-4x8"},
        {"rows": 9999, "rank": 256, "variant": "triton-decode-1x8"},
    ]
    table = read_table({"schema": TABLE_SCHEMA, "gpu": "NVIDIA H200", "entries": entries})
    assert chosen([(1, 16)], table=table).name == "triton-decode-4x8"
    assert chosen([(1, 17)], table=table).name == "triton-prefill-16x16"
    assert chosen([(3, 8), (1, 8)], table=table).name == "triton-prefill-16x16"
    assert chosen([(5, 8)], table=table).name == "triton-decode-1x8"
    assert chosen([(600, 8)], table=table).kind == "prefill"  # beyond the rows that the table's variant takes


@pytest.mark.parametrize(
    "document",
    [
        {},
        {"schema": "other/1", "gpu": "x", "entries": [{"rows": 1, "rank": 1, "variant": "triton-decode-1x8"}]},
        {"schema": TABLE_SCHEMA, "gpu": "x", "entries": []},
        {"schema": TABLE_SCHEMA, "gpu": "x", "entries": [{"rows": 1, "rank": 1, "variant": "triton-decode-3x8"}]},
        {"schema": TABLE_SCHEMA, "gpu": "x", "entries": [{"rows": 1}]},
        {"schema": TABLE_SCHEMA, "gpu": "x", "entries": [None]},
        {"schema": TABLE_SCHEMA, "gpu": "x", "entries": 5},
        {"schema": TABLE_SCHEMA, "gpu": 7, "entries": [{"rows": 1, "rank": 1, "variant": "triton-decode-1x8"}]},
        {"schema": TABLE_SCHEMA, "gpu": "x", "entries": [{"rows": 0, "rank": 1, "variant": "triton-decode-1x8"}]},
        {"schema": TABLE_SCHEMA, "gpu": "x", "entries": [{"rows": 1.5, "rank": 1, "variant": "triton-decode-1x8"}]},
        {"schema": TABLE_SCHEMA, "gpu": "x", "entries": [{"rows": True, "rank": 1, "variant": "triton-decode-1x8"}]},
        {"schema": TABLE_SCHEMA, "gpu": "x", "entries": [{"rows": 1, "rank": 1, "variant": ["triton-decode-1x8"]}]},
        {
            "schema": TABLE_SCHEMA,
            "gpu": "x",
            "entries": [{"rows": 1, "rank": 1, "variant": "triton-decode-1x8"}] * 5000,
        },
        ["schema"],
        {"schema": TABLE_SCHEMA, "gpu": "x", "entries": [{"rows": "a", "rank": 1, "variant": "triton-decode-1x8"}]},
    ],
)
def test_a_table_that_is_none_is_refused(document: dict[str, object]) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        read_table(document)


def test_a_gpu_is_known_by_its_name() -> None:
    assert chip_of("NVIDIA H200") is CHIPS["H200"]
    assert chip_of("NVIDIA A100-SXM4-80GB") is CHIPS["A100"]
    assert chip_of("AMD Instinct MI300X") is CHIPS["MI300X"]
    assert chip_of("NVIDIA L4") is DEFAULT_CHIP


def test_the_cut_of_the_input_depends_on_its_width_only() -> None:
    decode = VARIANTS["triton-decode-1x8"]
    assert [decode.splits(n) for n in (64, 576, 1024, 1536, 4096, 14336)] == [1, 1, 2, 2, 4, 4]
