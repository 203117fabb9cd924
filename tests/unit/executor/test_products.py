"""The base's products: packed or plain, thawed and frozen, and what a bfloat16 base is computed in."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from services.executor.engine import runner
from services.executor.engine.backend import cpu_backend
from services.executor.model import products
from services.executor.model.families import Wanted
from services.executor.model.load import load_decoder
from services.executor.model.native import load_native
from services.executor.model.products import Linear, full_rows, product_dtype
from services.executor.request import Sampling
from tests.support.compiled import compiled_step
from tests.support.harness import SMALL, World
from tests.support.tiny import ALL, make_adapter, make_base, prompt_of, read_bundle


@pytest.mark.parametrize("rows", [1, 3, 33, 200])
@pytest.mark.parametrize("shape", [(24, 40), (961, 577)])
@pytest.mark.parametrize("biased", [False, True])
def test_packed_products_equal_plain_ones(rows: int, shape: tuple[int, int], biased: bool) -> None:
    torch.manual_seed(rows)
    weight, bias = torch.randn(shape), torch.randn(shape[0]) if biased else None
    x, total = torch.randn(rows, shape[1]), torch.randn(rows, shape[0])
    product = Linear(weight.clone(), bias)
    expected = (x.double() @ weight.double().t() + (0 if bias is None else bias.double())).float()
    torch.testing.assert_close(product(x), expected, atol=1e-4, rtol=1e-4)
    before = total.clone()
    torch.testing.assert_close(product.add_to(total, x), total + expected, atol=1e-4, rtol=1e-4)
    assert torch.equal(total, before)


def test_a_thawed_matrix_is_the_matrix_and_may_be_written_to() -> None:
    torch.manual_seed(1)
    weight, x = torch.randn(32, 48), torch.randn(5, 48)
    product = Linear(weight.clone())
    assert torch.equal(product.thaw(), weight)
    product.thaw()[0] = 0.0
    for _ in range(2):
        assert (product(x)[:, 0] == 0).all()
        product.freeze()
    torch.testing.assert_close(product(x)[:, 1:], (x @ weight.t())[:, 1:], atol=1e-4, rtol=1e-4)


def test_rows_do_not_hear_of_each_others_bad_numbers() -> None:
    x = torch.randn(9, 40)
    x[4] = float("nan")
    assert Linear(torch.randn(24, 40))(x).isnan().any(dim=1).tolist() == [i == 4 for i in range(9)]


def test_bfloat16_is_computed_in_float32_where_it_would_be_emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    for able, expected in ((True, torch.bfloat16), (False, torch.float32)):
        monkeypatch.setattr(products, "has_bfloat16_products", lambda able=able: able)
        assert product_dtype(torch.bfloat16, "auto") is expected
        assert product_dtype(torch.bfloat16, "native") is torch.bfloat16
        assert product_dtype(torch.bfloat16, "float32") is torch.float32
        assert product_dtype(torch.float32, "auto") is torch.float32


def test_upcast_weights_are_the_bfloat16_models(tmp_path: Path) -> None:
    make_base(tmp_path / "base")
    path = "model.layers.1.mlp.up_proj"
    rounded = load_native(tmp_path / "base", dtype=torch.bfloat16).weight(path)
    decoder = load_decoder(tmp_path / "base", dtype=torch.bfloat16, cpu_products="float32")
    assert decoder.info.dtype is torch.float32
    assert torch.equal(decoder.weight(path), rounded.float())
    assert not torch.equal(rounded.float(), load_native(tmp_path / "base", dtype=torch.float32).weight(path))


def test_many_rows_are_filled_up_so_that_there_are_few_kernels() -> None:
    assert [full_rows(rows) for rows in (1, 33, 64, 65, 96, 97, 512)] == [1, 33, 64, 96, 96, 128, 512]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    ("decoder", "dtype"),
    [("native", torch.float32), ("native", torch.bfloat16), ("transformers", torch.float32)],
)
def test_rows_that_fill_a_step_up_change_no_answer(
    tmp_path, monkeypatch, decoder: Wanted, dtype: torch.dtype, compiled: bool
) -> None:
    base = make_base(tmp_path / "base", seed=3)
    make_adapter(base, tmp_path / "one", seed=4, r=5, lora_alpha=7, target_modules=ALL)
    adapter = read_bundle(base, tmp_path / "one")
    step = compiled_step() if compiled else None
    sizes = replace(SMALL, max_rows=80, max_step_tokens=300, pool_bytes=2**24, kv_bytes=2**24)
    answers, lengths = [], []
    for filled in (full_rows, lambda rows: rows):
        monkeypatch.setattr(runner, "full_rows", filled)
        model = load_decoder(tmp_path / "base", dtype=dtype, wanted=decoder, cpu_products="native", step=step)
        world = World(model, sizes, cpu_backend(step, products=dtype))
        pack, counts = world.engine._runner._pack, []

        def counted(rows, lora, pack=pack, counts=counts):
            packed = pack(rows, lora)
            counts.append((sum(len(row.tokens) for row in rows), len(packed.tokens), len(packed.positions)))
            return packed

        monkeypatch.setattr(world.engine._runner, "_pack", counted)
        world.load(adapter.host())
        for i in range(77):
            revision = adapter.revision_id if i % 3 else None
            world.submit(f"q{i}", prompt_of(2 + i % 9), revision, sampling=Sampling(max_tokens=4, ignore_eos=True))
        world.finish()
        world.assert_idle()
        answers.append([world.transcripts[f"q{i}"].tokens for i in range(77)])
        lengths.append(counts)
    assert all(packed == positions == full_rows(rows) for rows, packed, positions in lengths[0])
    assert any(packed > rows > 77 for rows, packed, _ in lengths[0]), "no step of prompts is filled up"
    assert any(packed > rows == 77 for rows, packed, _ in lengths[0]), "no step that only generates is filled up"
    assert lengths[1] == [(rows, rows, rows) for rows, _, _ in lengths[0]]
    # In bfloat16 another kernel for another number of rows may round a number, and so a near tie, the other way.
    alike = sum(filled == plain for filled, plain in zip(*answers, strict=True))
    assert alike == 77 if dtype is torch.float32 else alike >= 70
    assert all(len(tokens) == 4 for tokens in answers[0])
