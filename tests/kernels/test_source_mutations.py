"""Mistakes in the kernels' own text, each of which the comparison with the twin must notice: one expression at a time."""

from __future__ import annotations

import importlib.util
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
from triton.runtime.errors import InterpreterError

from services.executor.kernels.layout import make_layout
from services.executor.kernels.variants import VARIANTS
from tests.kernels.lanes import in_lanes
from tests.kernels.triton_rig import TOLERANCE, Rig, group_of, triton_lora

ROOT = Path(__file__).resolve().parents[2]
# Blocks small enough that few units cross every border there is: of rows, ranks, pages, columns, slices and subs.
VARIANT = {
    "decode": replace(VARIANTS["triton-decode-4x8"], rows=2, in_cols=16, out_cols=16, max_splits=2),
    "prefill": replace(VARIANTS["triton-prefill-16x16"], in_cols=16, out_cols=16, max_splits=2),
}
# What is wrong, the expression, what stands in its place, and which occurrence: the first is in shrink, the last in expand.
# Those in SUBS are seen where modules share a launch, the others where the input is cut into slices.
MUTATIONS = (
    ("shrink reads the first page only", "page_start + k // PAGE", "page_start + k // PAGE * 0", 0),
    ("expand reads the first page only", "page_start + k // PAGE", "page_start + k // PAGE * 0", -1),
    ("another row of the page", "k % PAGE", "(k + 1) % PAGE", 0),
    ("shrink drops the last rank", "own = k < rank", "own = k < rank - 1", 0),
    ("expand drops the last rank", "own = k < rank", "own = k < rank - 1", -1),
    ("expand stops after a block of ranks", "range(0, rank, RANKS)", "range(0, RANKS, RANKS)", 0),
    ("x of the segment's first rows", "(row0 + r).to", "(first + r).to", 0),
    ("y of the segment's first rows", "(row0 + r).to", "(first + r).to", -1),
    ("shrunk rows of the neighbour", "h_base * SUBS", "h_base", -1),
    ("a block's rows lie at the segment's start", "row0 - first + r", "r", -1),
    ("one row too many", "real = r < rows", "real = r < rows + 1", -1),
    ("the first sub's A for all", "(pool_row * SUBS + sub)", "(pool_row * SUBS)", 0),
    ("the first sub's scale for all", "* SUBS + sub", "* SUBS", -1),
    ("every slice is the first", "split * SPAN + step", "step", 0),
    ("only the first slice is summed", "mask=(real[:, None] & own[None, :])[:, :, None]",
     "mask=(real[:, None] & own[None, :])[:, :, None] & (tl.arange(0, SPLITS)[None, None, :] < 1)", 0),
    ("the last input column is left out", "wide = c < IN", "wide = c < IN - 1", 0),
    ("the last output column is left out", "wide = c < width", "wide = c < width - 1", 0),
    ("the third sub lies where the second does", "OUT0, OUT0 + OUT1))", "OUT0, OUT0))", 0),
    ("the last unit is not done", "tl.load(counts + 1) * BLOCKS", "tl.load(counts + 1) * BLOCKS - 1", 0),
)  # fmt: skip


SUBS = {"the first sub's A for all", "the first sub's scale for all", "shrunk rows of the neighbour",
        "the third sub lies where the second does"}  # fmt: skip


def load(text: str, folder: Path) -> ModuleType:
    """Import kernels from text; the interpreter reads a kernel's source from its file."""
    path = folder / f"mutant_{abs(hash(text))}.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("together", [False, True], ids=["one by one", "in lanes"])
@pytest.mark.parametrize("kind", VARIANT)
@pytest.mark.usefixtures("interpreter")
def test_a_mistake_in_the_kernels_is_noticed(
    kind: str, together: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = (ROOT / f"services/executor/kernels/triton_{kind}.py").read_text()
    variant = VARIANT[kind]
    layout = make_layout([None, 0, 1], [1, variant.rows + 1, 1])
    atol, rtol = TOLERANCE[torch.float32]
    cases = []
    for group in (group_of(33, (20,), layers=1), group_of(15, (8, 9, 17), layers=1)):
        rig = Rig(group, [variant.ranks + 1, 3], torch.float32)
        y, x = rig.inputs(layout)
        cases.append((rig, y, x, rig.expected(y, x, layout, 0)))

    def is_right(text: str, *, subs: bool) -> bool:
        module = load(text, tmp_path)
        for half in ("shrink", "expand"):
            monkeypatch.setattr(triton_lora, f"{half}_{kind}", getattr(module, f"{half}_{kind}"))
        rig, y, x, expected = cases[subs]
        try:
            with in_lanes(module) if together else nullcontext() as lanes:
                got = rig.run(variant, y, x, layout, 0, lanes=lanes)
        except AssertionError:  # the rig's: scratch that was not written, or rows around y that were
            return False
        except InterpreterError as error:
            if "the units that there are" not in str(error):
                raise
            return False
        return torch.allclose(got[1:], expected[1:], atol=atol, rtol=rtol) and bool(got[:1].isnan().all())

    assert is_right(source, subs=False)
    assert is_right(source, subs=True)
    survived = []
    for wrong, old, new, which in MUTATIONS:
        pieces = source.split(old)
        assert len(pieces) > 1, f"{wrong}: {old!r} is not in the kernels any more"
        at = 1 if which == 0 else len(pieces) - 1
        if is_right(old.join(pieces[:at]) + new + old.join(pieces[at:]), subs=wrong in SUBS):
            survived.append(wrong)
    assert survived == []
