"""The compiled step computes what torch computes, row by row, and is refused where it does not."""

from __future__ import annotations

import shutil
import subprocess

import pytest
import torch
from torch.nn.functional import rms_norm, silu

from services.executor.engine.backend import cpu_backend
from services.executor.kernels import compiled, cpu_step
from services.executor.kernels.compiled import SOURCE, CompilerMissing, load_step
from services.executor.kernels.cpu_step import THIN_ROWS, CpuStep, LoraStep
from services.executor.kernels.layout import make_layout
from services.executor.kernels.shrink_expand import Bank, CompiledRows
from services.executor.model import lora_linear
from services.executor.model.lora_linear import GroupBatch, LoraBatch
from services.executor.model.native import load_native
from services.executor.model.products import Linear
from services.executor.request import Sampling
from tests.support.compiled import compiled_step
from tests.support.harness import SMALL, World, open_world
from tests.support.tiny import ALL, make_adapter, make_base, prompt_of, read_bundle


@pytest.fixture
def step() -> CpuStep:
    return compiled_step()


@pytest.mark.parametrize("shape", [(1, 1), (24, 40), (577, 961), (64, 576)])
def test_thin_products_equal_plain_ones_whatever_the_neighbours(step: CpuStep, shape: tuple[int, int]) -> None:
    torch.manual_seed(shape[0])
    out, size = shape
    weight, bias = torch.randn(out, size).bfloat16(), torch.randn(out)
    x, total = torch.randn(THIN_ROWS, size), torch.randn(THIN_ROWS, out)
    product = x.double() @ weight.double().t()
    for rows in range(1, THIN_ROWS + 1):
        some = x[:rows]
        got = step.thin(some, weight, bias, total[:rows])
        expected = (product + bias.double() + total.double())[:rows].float()
        torch.testing.assert_close(got, expected, atol=2e-4, rtol=1e-5)
        torch.testing.assert_close(step.thin(some, weight, None, None), product[:rows].float(), atol=2e-4, rtol=1e-5)
        for row in range(rows):
            assert torch.equal(step.thin(x[row : row + 1], weight, bias, total[row : row + 1])[0], got[row])


@pytest.mark.parametrize("rows", [1, 3, 130])
@pytest.mark.parametrize("size", [2, 7, 40, 577])
def test_norm_gate_and_rotation_equal_torchs(step: CpuStep, rows: int, size: int) -> None:
    torch.manual_seed(rows * size)
    x, weight = torch.randn(rows, size), torch.randn(size)
    torch.testing.assert_close(step.norm(x, weight, 1e-6), rms_norm(x, (size,), weight, 1e-6), atol=1e-6, rtol=2e-6)
    both = torch.randn(rows, 2 * size) * 30
    torch.testing.assert_close(step.gated(both), silu(both[:, :size]) * both[:, size:], atol=1e-6, rtol=2e-6)
    half = size // 2 + 1
    heads, angle = torch.randn(rows, 5, 2 * half), torch.randn(rows, half)
    cos, sin = angle.cos(), angle.sin()
    a, b = heads[:, :3, :half], heads[:, :3, half:]
    turned = torch.cat((a * cos[:, None] - b * sin[:, None], b * cos[:, None] + a * sin[:, None]), dim=-1)
    torch.testing.assert_close(step.rotate(heads[:, :3], 3, cos[:, None], sin[:, None]), turned)


def test_the_gate_of_extreme_numbers(step: CpuStep) -> None:
    gate = torch.tensor([-1e30, -200.0, -89.0, -0.0, 0.0, 1e-30, 89.0, 200.0, 1e30, float("inf"), float("nan")])
    got = step.gated(torch.cat((gate, torch.ones_like(gate)))[None])[0]
    torch.testing.assert_close(got, silu(gate), equal_nan=True, atol=1e-30, rtol=1e-6)


@pytest.mark.parametrize("widths", [(20,), (12, 4, 4), (70, 70)])
def test_adapters_equal_their_products_and_touch_nothing_else(step: CpuStep, widths: tuple[int, ...]) -> None:
    torch.manual_seed(sum(widths))
    size, pool, subs, out = 23, 40, len(widths), sum(widths)
    a, b, scale = torch.randn(pool, subs, size), torch.randn(pool, out), torch.randn(pool, subs)
    order = torch.randperm(pool)
    ranks = [order[:1], order[1:18], order[18:21]]
    a[order[21:]], b[order[21:]], scale[order[21:]] = float("nan"), float("nan"), float("nan")
    rows = [range(1, 2), range(2, 7), range(8, 10), range(11, 69)]
    ranks.append(order[10:15])
    x, y = torch.randn(70, size), torch.randn(70, out)
    expected = y.double()
    for some, own in zip(rows, ranks, strict=True):
        for row in some:
            low = 0
            for sub, width in enumerate(widths):
                shrunk = (a[own, sub].double() @ x[row].double()) * scale[own, sub].double()
                expected[row, low : low + width] += shrunk @ b[own, low : low + width].double()
                low += width
    lora, seen = LoraStep((a[None], b[None], scale[None]), rows, ranks, widths), []
    for lora.threads in (1, 2, 5):
        got = y.clone()
        step.lora(x, got, lora, 0)
        torch.testing.assert_close(got, expected.float(), atol=1e-4, rtol=1e-4)
        assert all(torch.equal(got[row], y[row]) for row in (0, 7, 10, 69))
        seen.append(got)
    assert torch.equal(seen[0], seen[1])
    assert torch.equal(seen[0], seen[2])


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize(("size", "widths"), [(23, (7,)), (24, (64,)), (64, (300, 20))])
def test_an_adapters_rows_have_the_same_bits_whatever_rows_it_has_beside_them(
    step: CpuStep, size: int, widths: tuple[int, ...], threads: int
) -> None:
    torch.manual_seed(size)
    subs, out = len(widths), sum(widths)
    a, b, scale = torch.randn(9, subs, size), torch.randn(9, out), torch.randn(9, subs)
    x, y = torch.randn(130, size), torch.randn(130, out)
    ranks = torch.tensor([7, 0, 3, 8, 2])
    # Few rows, alone and shared by threads, many in one tile, tiles of all threads.
    seen = {}
    for rows in (*range(1, 20), 47, 48, 49, 97, 130):
        seen[rows] = y.clone()
        lora = LoraStep((a[None], b[None], scale[None]), [range(rows)], [ranks], widths)
        lora.threads = threads
        step.lora(x, seen[rows], lora, 0)
    for rows, got in seen.items():
        assert torch.equal(got[:rows], seen[130][:rows]), rows
        assert torch.equal(got[rows:], y[rows:]), rows


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("size", "widths"), [(23, (7,)), (64, (300, 20))])
def test_bfloat16_rows_are_added_to_in_float32_and_rounded_once(
    step: CpuStep, size: int, widths: tuple[int, ...], threads: int
) -> None:
    torch.manual_seed(size)
    subs, out = len(widths), sum(widths)
    a, b, scale = torch.randn(9, subs, size), torch.randn(9, out), torch.randn(9, subs)
    x, y = torch.randn(40, size).bfloat16(), torch.randn(40, out).bfloat16()
    y[3, 0], y[4, 1], y[5, 2], x[6, 0] = float("inf"), float("nan"), -0.0, float("nan")
    b[:, 2] = 0.0
    rows, ranks = [range(2, 5), range(5, 30)], [torch.tensor([1, 4]), torch.tensor([7, 0, 3])]
    lora = LoraStep((a[None], b[None], scale[None]), rows, ranks, widths)
    lora.threads = threads
    got, wide = y.clone(), y.float()
    step.lora(x, got, lora, 0)
    step.lora(x.float(), wide, lora, 0)
    assert torch.equal(got.isnan(), wide.isnan())
    assert torch.equal(got.nan_to_num(), wide.bfloat16().nan_to_num())
    own = [*range(2), *range(30, 40)]
    assert torch.equal(got[own], y[own])


@pytest.fixture
def tiles(step: CpuStep) -> CpuStep:
    if step.pool_dtype is torch.float32:
        pytest.skip("this machine has no matrix unit")
    return step


@pytest.mark.parametrize("widths", [(20,), (12, 4, 4), (70, 300), (33,)])
@pytest.mark.parametrize("size", [23, 64, 97])
def test_adapters_by_the_matrix_unit_round_once_and_touch_nothing_else(
    tiles: CpuStep, size: int, widths: tuple[int, ...]
) -> None:
    torch.manual_seed(size + sum(widths))
    pool, subs, out = 300, len(widths), sum(widths)
    a, b = torch.randn(pool, subs, size).bfloat16(), torch.randn(pool, out).bfloat16()
    scale, order = torch.randn(pool, subs), torch.randperm(pool)
    # One rank row, some, just a tile, rows that lie together, more than two tiles; the rest of the pool is nobody's.
    ranks = [order[:1], order[1:18], order[18:34], torch.arange(40, 104), order[34:111]]
    used = torch.cat(ranks).unique()
    unused = torch.ones(pool, dtype=torch.bool)
    unused[used] = False
    a[unused], b[unused], scale[unused] = float("nan"), float("nan"), float("nan")
    scale[order[3]] = 0.0  # a module that is not touched: whatever its rank row has counts for nothing
    a[order[3]] = float("inf")
    rows = [range(1, 2), range(2, 7), range(8, 40), range(40, 130), range(131, 134)]
    x, y = torch.randn(140, size).bfloat16(), torch.randn(140, out).bfloat16()
    expected, most = y.double(), torch.zeros(140, out, dtype=torch.float64)
    for some, own in zip(rows, ranks, strict=True):
        at, low = slice(some.start, some.stop), 0
        for sub, width in enumerate(widths):
            shrink = torch.where(scale[own, sub, None] == 0, 0, a[own, sub].double())
            shrunk = (x[at].double() @ shrink.t()) * scale[own, sub].double()
            part = b[own, low : low + width].double()
            expected[at, low : low + width] += shrunk @ part
            most[at, low : low + width] = shrunk.abs() @ part.abs()
            low += width
    lora, seen = LoraStep((a[None], b[None], scale[None]), rows, ranks, widths), []
    for lora.threads in (1, 2, 5):
        got = y.clone()
        tiles.lora(x, got, lora, 0)
        seen.append(got)
    assert torch.equal(seen[0], seen[1])
    assert torch.equal(seen[0], seen[2])
    # Half of the last bit of what is stored, and sixteen bits of every shrunk number.
    bound = expected.abs() * 2.0**-8 + most * 2.0**-15
    assert ((seen[0].double() - expected).abs() <= bound).all()
    assert all(torch.equal(seen[0][row], y[row]) for row in (0, 7, 130, *range(134, 140)))


@pytest.mark.parametrize("rank", [5, 40])
def test_the_matrix_unit_gives_a_row_the_same_bits_whatever_rows_are_beside_it(tiles: CpuStep, rank: int) -> None:
    torch.manual_seed(rank)
    widths, size = (300, 20), 64
    a, b = torch.randn(50, 2, size).bfloat16(), torch.randn(50, sum(widths)).bfloat16()
    pool = (a[None], b[None], torch.randn(1, 50, 2))
    x, y, ranks = torch.randn(150, size).bfloat16(), torch.randn(150, sum(widths)).bfloat16(), torch.randperm(50)[:rank]
    whole = y.clone()
    tiles.lora(x, whole, LoraStep(pool, [range(150)], [ranks], widths), 0)
    for rows in (*range(1, 20), 31, 32, 33, 63, 64, 65, 129):
        got = y.clone()
        tiles.lora(x, got, LoraStep(pool, [range(rows)], [ranks], widths), 0)
        assert torch.equal(got[:rows], whole[:rows]), rows
        assert torch.equal(got[rows:], y[rows:]), rows


def test_rows_that_lie_apart_are_rounded_once_too(tiles: CpuStep) -> None:
    torch.manual_seed(2)
    bank = Bank(torch.randn(1, 9, 1, 24).bfloat16(), torch.randn(1, 9, 40).bfloat16(), torch.randn(1, 9, 1), (40,))
    rows = CompiledRows(bank, [(range(2, 12), torch.tensor([7, 1, 4]))], tiles)
    batch = LoraBatch(make_layout([None, 0], [2, 10]), {"g": GroupBatch((), rows, None)}, "")
    x, wide = torch.randn(12, 24), torch.randn(12, 40) * 30
    for given in (x.bfloat16(), x):  # float32 rows beside it are rounded to what the pool takes
        y, apart = wide.bfloat16(), torch.zeros(12, 64, dtype=torch.bfloat16)[:, 10:50]
        apart.copy_(y)
        batch.add("g", 0, y, x.bfloat16())
        batch.add("g", 0, apart, given)
        assert torch.equal(apart, y)
    # float32 rows are not rounded themselves.
    got, added = wide.clone(), torch.zeros(12, 40, dtype=torch.bfloat16)
    batch.add("g", 0, got, x)
    batch.add("g", 0, added, x.bfloat16())
    assert torch.equal(got, wide + added)


@pytest.mark.parametrize("kind", ["llama", "qwen3", "mistral"])
def test_a_base_in_bfloat16_answers_as_one_without_the_step_does(tiles: CpuStep, tmp_path, kind: str) -> None:
    """As near as bfloat16 is: both round, and not at the same places."""
    base = make_base(tmp_path / "base", kind, seed=5)
    make_adapter(base, tmp_path / "one", seed=4, r=5, lora_alpha=7, target_modules=ALL)
    adapter, answers = read_bundle(base, tmp_path / "one"), []
    for chosen in (tiles, None):
        world = World(
            load_native(tmp_path / "base", dtype=torch.bfloat16, step=chosen),
            SMALL,
            cpu_backend(chosen, products=torch.bfloat16),
        )
        assert (world.pool_dtype is torch.bfloat16) == (chosen is not None)
        world.load(adapter.host())
        for i in range(6):
            revision = adapter.revision_id if i % 2 else None
            world.submit(f"q{i}", prompt_of(3 + 9 * i), revision, sampling=Sampling(max_tokens=1, logprobs=1))
        world.finish()
        world.assert_idle()
        answers.append([world.transcripts[f"q{i}"].logprobs[0].chosen for i in range(6)])
    torch.testing.assert_close(torch.tensor(answers[0]), torch.tensor(answers[1]), atol=0.05, rtol=0.02)


@pytest.mark.parametrize("size", [2, 24, 40, 92, 577])
def test_bfloat16_numbers_are_computed_in_float32_and_rounded_once(step: CpuStep, size: int) -> None:
    torch.manual_seed(size)

    def hold(function, *given: torch.Tensor) -> None:
        halves = [tensor.bfloat16() for tensor in given]
        got = function(*halves)
        assert got.dtype is torch.bfloat16
        assert torch.equal(got, function(*(tensor.float() for tensor in halves)).bfloat16())

    x, both = torch.randn(4, size), torch.randn(9, 2 * size) * 30
    hold(lambda x, weight: step.norm(x, weight, 1e-5), x, x[0])
    hold(step.gated, both)
    hold(lambda x, cos, sin: step.rotate(x, 3, cos, sin), torch.randn(7, 5, 2 * size), *torch.randn(2, 7, size))
    keys, values, q = (*torch.randn(2, 6, 16, 2, size).unbind(), torch.randn(5, 10, size))
    table = torch.randint(0, 6, (5, 3), dtype=torch.int32)
    ends, begins = (
        torch.tensor([1, 16, 17, 40, 48], dtype=torch.int32),
        torch.tensor([0, 0, 5, 39, 2], dtype=torch.int32),
    )
    for cap in (None, 3.0):
        hold(lambda *t, cap=cap: step.attend(*t, table, begins, ends, scale=0.2, softcap=cap), q, keys, values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 7, 16, 1023, 1024, 1025, 5000])
def test_the_first_largest_number_is_found_and_rows_that_are_not_finite_are_told(
    step: CpuStep, size: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(size)
    x = torch.randint(-9, 9, (9, size)).to(dtype)  # many equals
    x[1], x[2] = -5.0, torch.finfo(dtype).min
    x[3, -1] = torch.finfo(dtype).max
    expected = x.float().argmax(dim=-1)
    for row, bad in ((4, "nan"), (5, "inf"), (6, "-inf")):
        x[row, size // 2] = float(bad)
        expected[row] = -1
    for rows in (1, 9):
        assert step.largest(x[:rows]).tolist() == expected[:rows].tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [6, 64])
@pytest.mark.parametrize("turned", [False, True])
def test_attention_writes_and_rotates_as_the_calls_of_its_parts_do(
    step: CpuStep, size: int, dtype: torch.dtype, turned: bool
) -> None:
    torch.manual_seed(size)
    keys, values = torch.randn(2, 9, 4, 2, size).to(dtype).unbind()
    packed = torch.randn(7, 10, size).to(dtype)
    cos, sin = torch.randn(2, 8, size // 2).to(dtype).unbind()
    # Row 0 has a prompt of its own; 1 to 4 are rows of one prompt, which see one another; 5 and 6 decode.
    table = torch.tensor([[1, 0], *[[2, 3]] * 4, [4, 5], [6, 7]], dtype=torch.int32)
    ends = torch.tensor([1, 3, 4, 5, 6, 8, 5], dtype=torch.int32)
    slots = torch.tensor([int(table[r, (end - 1) // 4]) * 4 + (end - 1) % 4 for r, end in enumerate(ends.tolist())])
    begins = torch.tensor([0, 0, 0, 2, 2, 0, 4], dtype=torch.int32)
    q, k, v = packed.split([6, 2, 2], dim=1)
    for rows in (1, 7):  # a row alone is shared by its heads
        there = [keys.clone(), values.clone()]
        some, given = packed[:rows], (table[:rows], begins[:rows], ends[:rows])
        got = step.attend(
            q[:rows], *there, *given, scale=0.3, fresh=(k[:rows], v[:rows], slots[:rows]),
            turn=(cos, sin) if turned else None,
        )  # fmt: skip
        qk = step.rotate(some, 8, cos, sin) if turned else some[:, :8]
        wanted = [keys.clone(), values.clone()]
        wanted[0].view(-1, 2, size).index_copy_(0, slots[:rows], qk[:, 6:])
        wanted[1].view(-1, 2, size).index_copy_(0, slots[:rows], some[:, 8:])
        assert torch.equal(got, step.attend(qk[:, :6], *wanted, *given, scale=0.3))
        assert torch.equal(there[0], wanted[0])
        assert torch.equal(there[1], wanted[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 2, 3, 7, 8, 40])
@pytest.mark.parametrize("written", [False, True])
def test_attention_has_the_same_bits_on_any_number_of_threads(
    step: CpuStep, monkeypatch, rows: int, dtype: torch.dtype, written: bool
) -> None:
    """Also where there are fewer rows than threads, which share a row's heads then; all but one row see one another's
    keys, which another thread may have written."""
    torch.manual_seed(rows)
    size, block, kv_heads = 20, 4, 3
    packed = torch.randn(rows, 12, size).to(dtype)
    q, k, v = packed.split([6, kv_heads, kv_heads], dim=1)
    turn = torch.randn(2, rows, size // 2).to(dtype).unbind()
    keys, values = torch.randn(2, 40, block, kv_heads, size).to(dtype).unbind()
    own = torch.randperm(39)[:20].to(torch.int32) + 1
    table = own.repeat(rows, 1)
    ends = torch.arange(1, rows + 1, dtype=torch.int32) + 35
    begins = (ends - torch.tensor([40, 9] * rows)[:rows]).clamp(min=0).to(torch.int32)
    places = ends.long() - 1
    slots = own.long()[places // block] * block + places % block
    seen = []
    for threads in (1, 2, 3, 8):
        monkeypatch.setattr(cpu_step, "_threads", lambda *_, threads=threads: threads)
        there = keys.clone(), values.clone()
        added = {"fresh": (k, v, slots), "turn": turn} if written else {}
        for _ in range(4 if threads > 1 else 1):  # who is first to a row is another thread each time
            seen.append((step.attend(q, *there, table, begins, ends, scale=0.3, **added), *there))
    for got in seen[1:]:
        assert all(torch.equal(a, b) for a, b in zip(got, seen[0], strict=True))


def test_a_matrix_that_bfloat16_does_not_hold_is_not_read_as_such(step: CpuStep) -> None:
    torch.manual_seed(1)
    weight, x = torch.randn(32, 48).bfloat16().float(), torch.randn(2, 48)
    product = Linear(weight.clone(), step=step)
    torch.testing.assert_close(product(x), x @ weight.t(), atol=1e-5, rtol=1e-5)
    product.thaw()[0, 0] += 1e-3  # as merging an adapter does
    product.freeze()
    weight[0, 0] += 1e-3
    torch.testing.assert_close(product(x), x @ weight.t(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["llama", "qwen3", "mistral"])
def test_a_bfloat16_base_answers_alike_with_and_without_it(step: CpuStep, tmp_path, kind: str) -> None:
    base = make_base(tmp_path / "base", kind, seed=5)
    make_adapter(base, tmp_path / "one", seed=4, r=5, lora_alpha=7, target_modules=ALL)
    adapter = read_bundle(base, tmp_path / "one")
    answers = []
    for chosen in (step, None):
        world = open_world(tmp_path / "base", dtype=torch.bfloat16, products=torch.float32, step=chosen)
        world.load(adapter.host())
        for i in range(6):
            revision = adapter.revision_id if i % 2 else None
            world.submit(f"q{i}", prompt_of(3 + 9 * i), revision, sampling=Sampling(max_tokens=6 + 4 * i, logprobs=1))
        world.finish()
        world.assert_idle()
        answers.append([(world.transcripts[f"q{i}"].tokens, world.transcripts[f"q{i}"].logprobs) for i in range(6)])
    assert [tokens for tokens, _ in answers[0]] == [tokens for tokens, _ in answers[1]]


class Copying(CompiledRows):
    """Makes what it is named after, and is none: so rows that are not float32 are copied for it."""

    def __new__(cls, *arguments: object) -> CompiledRows:
        return CompiledRows(*arguments)


@pytest.mark.parametrize("kind", ["llama", "qwen3", "mistral"])
def test_a_step_in_bfloat16_has_the_bits_of_copied_rows(step: CpuStep, tmp_path, monkeypatch, kind: str) -> None:
    base = make_base(tmp_path / "base", kind, seed=5)
    make_adapter(base, tmp_path / "one", seed=4, r=5, lora_alpha=7, target_modules=ALL)
    adapter, answers = read_bundle(base, tmp_path / "one"), []
    for rows in (CompiledRows, Copying):
        monkeypatch.setattr(lora_linear, "CompiledRows", rows)
        # The base's own products are torch's then, and only its adapters the compiled step's.
        world = World(load_native(tmp_path / "base", dtype=torch.bfloat16), SMALL, cpu_backend(step))
        world.load(adapter.host())
        for i in range(6):
            revision = adapter.revision_id if i % 2 else None
            world.submit(f"q{i}", prompt_of(3 + 9 * i), revision, sampling=Sampling(max_tokens=6 + 4 * i, logprobs=1))
        world.finish()
        answers.append([(world.transcripts[f"q{i}"].tokens, world.transcripts[f"q{i}"].logprobs) for i in range(6)])
    assert answers[0] == answers[1]


@pytest.mark.parametrize(
    ("file", "text", "instead"),
    [
        ("step.cpp", "if (bias) value += bias[o];", ""),
        ("step.cpp", "/ size + eps)", "/ size)"),
        ("attend.h", "f(h, h / fold * size, heads)", "f(h, 0, heads)"),
        ("attend.h", "std::fill(scores + count, scores + padded, -1e30f);", ""),
        ("step.cpp", "g / (exponential(Floats{} - g) + 1.0f) * u", "g"),
        ("attend.h", "b * cos + a * sin", "b * cos - a * sin"),
        ("attend.h", "weigh<kHeads, 1>(weights, apart, values, places, to, size, at, 0, ahead)", "at"),
        ("attend.h", "std::copy_n(fresh.v + r * fresh.v_stride + h * size, size, values + to);", ""),
        ("attend.h", "keys + to, half);", "keys + to, 0);"),
        ("attend.h", "&turned[h * size], half);", "&turned[h * size], 0);"),
        # Wrong in bfloat16 alone.
        ("attend.h", "size, size, values + to);", "size, sizeof(T) == 2 ? 1 : size, values + to);"),
        ("attend.h", "keys + to, half);", "keys + to, sizeof(T) == 2 ? 0 : half);"),
        ("attend.h", "&turned[h * size], half);", "&turned[h * size], sizeof(T) == 2 ? 0 : half);"),
        ("step.cpp", "if (top > best) {", "if (top >= best) {"),
        ("step.cpp", "*finite = total(strange) == 0.0f;", "*finite = total(strange) != 1.0f;"),
        ("adapters.h", "(mine.ranks[k + i] * pool.subs + u) * pool.in", "mine.ranks[k + i] * pool.subs * pool.in"),
        ("adapters.h", "{0, mine.own}, own)", "{1, mine.own}, own)"),
        ("adapters.h", "case 2: shrink_rows<2>", "case 2: shrink_rows<1>"),
        ("adapters.h", "edges[u + 1], columns_of(mine.count)", "edges[u] + kWide, columns_of(mine.count)"),
        ("adapters.h", "edges[u + 1], columns_of(count)", "edges[u] + kWide, columns_of(count)"),
        ("adapters.h", "case 4: along<1, 4>", "case 4: along<1, 3>"),
        ("adapters.h", "case 7: along<2, 3>", "case 7: along<2, 2>"),
        ("adapters.h", "copy_row(half->y + given[i] * out, tile_y + i * out, out);", ""),
        (
            "vectors.h",
            "Halves narrow(Floats value) {",
            "Halves narrow(Floats value) { if (value[0] > 1) return Halves{};",
        ),
        ("tiles.h", "if (!two) continue;\n        _tile_loadd(3", "if (true) continue;\n        _tile_loadd(3"),
        ("tiles.h", "if (own > kEdge) multiply", "if (false) multiply"),
        (
            "tiles.h",
            "for (int64_t c = 0; c < width; c += 2 * kEdge) {",
            "for (int64_t c = 0; c < kPairs; c += 2 * kEdge) {",
        ),
        ("tiles.h", "const int64_t most = std::min<int64_t>(each, kAtOnce);", "const int64_t most = each;"),
        ("tiles.h", "pool.in - t * kPairs) : __m512i{}", "kPairs) : __m512i{}"),
        ("tiles.h", "const __m512i low = spread(one + c, first - c)", "const __m512i low = spread(one + c, 1)"),
        ("tiles.h", "store(rest + r * apart, value - load(shrunk + r * apart));", "store(rest + r * apart, value);"),
        ("tiles.h", "store_part(to + kEdge, load_part(to + kEdge, rest) + second, rest);", ""),
    ],
)
def test_a_step_that_computes_something_else_is_refused(
    step: CpuStep, tmp_path, monkeypatch, file: str, text: str, instead: str
) -> None:
    if file == "tiles.h" and step.pool_dtype is torch.float32:
        pytest.skip("this machine has no matrix unit")
    shutil.copytree(SOURCE.parent, tmp_path / "cpu")
    source = (tmp_path / "cpu" / file).read_text()
    assert text in source
    (tmp_path / "cpu" / file).write_text(source.replace(text, instead))
    monkeypatch.setattr(compiled, "SOURCE", tmp_path / "cpu" / SOURCE.name)
    monkeypatch.setattr(compiled, "_OPTIMIZE", "-O0")  # what is wrong is wrong at once
    with pytest.raises(CompilerMissing, match="something else than torch"):
        compiled._build.__wrapped__()


def test_without_a_compiler_auto_does_without_and_on_refuses(monkeypatch) -> None:
    monkeypatch.setattr(compiled.shutil, "which", lambda name: None)
    monkeypatch.setattr(compiled, "_build", compiled._build.__wrapped__)
    assert load_step("auto") is None
    assert load_step("off") is None
    with pytest.raises(CompilerMissing, match="install g"):
        load_step("on")


def test_a_compiler_that_fails_or_hangs_is_a_reason_to_do_without(monkeypatch) -> None:
    def failing(*args, **kwargs):
        raise subprocess.TimeoutExpired("c++", 1)

    monkeypatch.setattr(compiled.shutil, "which", lambda name: "/usr/bin/false")
    monkeypatch.setattr(compiled, "_build", compiled._build.__wrapped__)
    assert load_step("auto") is None
    monkeypatch.setattr(compiled.subprocess, "run", failing)
    with pytest.raises(CompilerMissing):
        load_step("on")
