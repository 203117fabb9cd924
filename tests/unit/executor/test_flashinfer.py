"""FlashInfer as it is pinned: our calls bound to its signatures; its own Python held to them where it is installed.

`pip install --no-deps flashinfer-python==VERSION apache-tvm-ffi nvidia-ml-py` is enough for that, on any machine: its
wrappers run up to their compiled kernels, whose place plain torch takes.
"""

from __future__ import annotations

import inspect
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from services.executor.model.flash_attention import FlashAttention
from tests.support import fake_flashinfer
from tests.support.fake_flashinfer import DECODE, PREFILL, SIGNATURES, VERSION, attend, signature_of
from tests.unit.executor.test_paged_attention import CONTEXT, STEPS, assert_same, make_cache, spans_of

ROOT = Path(__file__).resolve().parents[3]
installed = pytest.mark.skipif(find_spec("flashinfer") is None, reason="FlashInfer is not installed")


def test_the_version_is_pinned() -> None:
    assert f'"flashinfer-python=={VERSION}' in (ROOT / "pyproject.toml").read_text()


@pytest.mark.parametrize(
    ("method", "given", "named"),
    [
        ("__init__", (1, "NHD"), {"use_cuda_graphs": True}),
        ("plan", (1, 2, 3, 4, 5, 6, 7, "NONE"), {}),
        ("plan", (1, 2, 3, 4, 5, 6), {}),
        ("run", (1, 2), {"layer": 0}),
    ],
)
def test_a_call_that_the_library_does_not_know_is_refused(method: str, given: tuple, named: dict[str, Any]) -> None:
    with pytest.raises(TypeError):
        signature_of(DECODE, method).bind(*given, **named)


@installed
@pytest.mark.parametrize(("owner", "method"), SIGNATURES)
def test_the_signatures_are_the_librarys(owner: str, method: str) -> None:
    import flashinfer

    assert flashinfer.__version__ == VERSION
    wrapper = getattr(flashinfer, owner)
    real = inspect.signature(getattr(wrapper, method)).parameters
    if (owner, method) == (DECODE, "plan"):  # takes options as **kwargs and hands them on
        assert list(real)[1:8] == list(signature_of(owner, method).parameters)[:7]
        real = inspect.signature(wrapper._plan_impl).parameters
    known = {n: p for n, p in real.items() if n != "self" and p.kind is not inspect.Parameter.VAR_POSITIONAL}
    ours = signature_of(owner, method).parameters
    assert set(ours) == set(known)
    for name, parameter in ours.items():
        assert (parameter.default is inspect.Parameter.empty) == (known[name].default is inspect.Parameter.empty), name
    by_place = [n for n, p in ours.items() if p.kind is not inspect.Parameter.KEYWORD_ONLY]
    assert by_place == list(known)[: len(by_place)]


class TorchKernels:
    """What FlashInfer compiles, as its wrappers call it."""

    def __init__(self) -> None:
        self.plans = self.runs = 0

    def plan(self, *given: Any) -> list[int]:
        self.plans += 1
        return [self.plans]

    def paged_run(self, _floats: Any, _ints: Any, _plan: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
                  queries: torch.Tensor, bounds: torch.Tensor, pages: torch.Tensor, last: torch.Tensor,
                  out: torch.Tensor, _lse: Any, mask: int, layout: int, window: int, *rest: Any) -> None:  # fmt: skip
        cap, scale = rest[7], rest[8]
        assert mask == int(len(q) > len(last)), "causal for chunks, none for single tokens"
        self.answer(out, layout, q, (k, v), queries, bounds, pages, last, scale, window, cap)

    def run(self, _floats: Any, _ints: Any, _plan: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
            bounds: torch.Tensor, pages: torch.Tensor, last: torch.Tensor, out: torch.Tensor, _lse: Any, layout: int,
            window: int, _pdl: Any, _slopes: Any, cap: float, scale: float, *_: Any) -> None:  # fmt: skip
        self.answer(out, layout, q, (k, v), torch.arange(len(q) + 1), bounds, pages, last, scale, window, cap)

    def answer(self, out: torch.Tensor, layout: int, q: torch.Tensor, cache: Any, queries: Any, bounds: Any, pages: Any,
               last: Any, scale: float, window: int, cap: float) -> None:  # fmt: skip
        self.runs += 1
        assert layout == 0, "NHD"
        out.copy_(
            attend(
                q, cache, queries=queries, bounds=bounds, pages=pages, last=last, scale=scale, window=window, cap=cap
            )
        )


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The real wrappers over `TorchKernels`, on a CPU."""
    import flashinfer
    from flashinfer import decode, prefill

    kernels = TorchKernels()
    plain = SimpleNamespace(**{n: getattr(torch, n) for n in dir(torch) if not n.startswith("__")})
    plain.empty = lambda *size, pin_memory=False, **named: torch.empty(*size, **named)
    for module in (decode, prefill):
        monkeypatch.setattr(module, "torch", plain)
        monkeypatch.setattr(module, "determine_attention_backend", lambda *a, **k: "fa2")
        monkeypatch.setattr(module, "get_compute_capability", lambda device: (9, 0))
        for name in ("get_batch_prefill_module", "get_batch_decode_module"):
            monkeypatch.setattr(module, name, lambda *a: kernels, raising=False)
    monkeypatch.setattr(prefill, "_blackwell_paged_auto_cudnn", lambda *a: False)
    return SimpleNamespace(**{n: getattr(flashinfer, n) for n in (DECODE, PREFILL)}, kernels=kernels)


@installed
@pytest.mark.parametrize("step", [*STEPS, "fixed"], ids=str)
@pytest.mark.parametrize("heads", [(4, 2), (8, 2)], ids=str)
def test_the_librarys_own_python_takes_our_calls(library: SimpleNamespace, step: Any, heads: tuple[int, int]) -> None:
    """Up to the kernels: sizes, dtypes, tables and rules arrive as the oracle needs them; `heads` with tensor cores, too."""
    cache = make_cache()
    maker = FlashAttention(cache, q_heads=heads[0], kv_heads=heads[1], max_context=CONTEXT, library=library)
    if step == "fixed":
        fixed = maker.fixed(3)
        for spare in (2, 0, 1):
            spans = spans_of(((1, 0), (1, 7), (1, 16))[spare:], first_row=spare)
            fixed.fill(spans)
            assert_same(fixed, spans, make_cache_of(cache), spare=spare, heads=heads[0])
    else:
        assert_same(maker.step(spans_of(step)), spans_of(step), cache, heads=heads[0])
    assert library.kernels.runs >= 8


def make_cache_of(cache: Any) -> Any:
    """Put a used cache back to its first numbers."""
    fresh = make_cache()
    cache.k.copy_(fresh.k)
    cache.v.copy_(fresh.v)
    return cache


def test_the_stand_in_is_strict() -> None:
    """Each breaks a rule of the documents."""

    def plan(**changes: Any) -> None:
        wrapper = fake_flashinfer.BatchDecodeWithPagedKVCacheWrapper(torch.zeros(1024, dtype=torch.uint8), "NHD")
        bounds, pages, last = (torch.tensor(v, dtype=torch.int32) for v in ([0, 1, 3], [4, 2, 1], [1, 4]))
        given = {"indptr": bounds, "indices": pages, "last_page_len": last, "num_qo_heads": 4, "num_kv_heads": 2,
                 "head_dim": 64, "page_size": 4}  # fmt: skip
        wrapper.plan(**{**given, **changes})

    plan()
    for changes in (
        {"indptr": torch.tensor([0, 1, 3])},
        {"indptr": torch.tensor([0, 0, 3], dtype=torch.int32)},
        {"last_page_len": torch.tensor([1, 5], dtype=torch.int32)},
        {"num_qo_heads": 10},
        {"num_qo_heads": 5},
    ):
        with pytest.raises(AssertionError):
            plan(**changes)
