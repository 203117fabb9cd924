"""Where an engine computes, and with what: a CPU, or a GPU with its link, kernels, attention and graphs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec

import structlog
import torch

from services.executor.engine.decode_graphs import DecodeGraphs
from services.executor.engine.device_link import CpuLink, CudaLink, DeviceLink
from services.executor.engine.device_pool import POOL_DTYPE, DevicePool
from services.executor.engine.graph_device import CudaGraphs, GraphDevice
from services.executor.kernels.cpu_step import CpuStep
from services.executor.kernels.gpu_lora import GpuLora
from services.executor.kernels.graphs import CaptureBudget
from services.executor.kernels.layout import RowLayout
from services.executor.kernels.work import WorkLimits
from services.executor.model.attention import AttentionSpan, KvCache
from services.executor.model.families import NATIVE
from services.executor.model.flash_attention import FlashAttention, fits
from services.executor.model.interface import Decoder, ModelInfo, Packed
from services.executor.model.lora_linear import base_batch
from services.executor.model.paged_attention import AttentionMaker, TorchAttention

log = structlog.get_logger()

MAX_RANK = 256  # of one module: what the verifier admits, and what a GPU's scratch is made for


@dataclass(frozen=True, slots=True)
class Gpu:
    """The facts of a GPU that choose kernels."""

    name: str
    multiprocessors: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """`pool_dtype` is what adapters are kept in. Without `gpu` torch's CPU paths compute them, without `graphs` every
    step runs eagerly. `budget` bounds what capturing graphs takes. `step` is a CPU's compiled step, if there is one."""

    device: torch.device
    pool_dtype: torch.dtype
    link: DeviceLink
    attention: Callable[[KvCache, ModelInfo], AttentionMaker]
    gpu: Gpu | None = None
    graphs: GraphDevice | None = None
    budget: CaptureBudget = field(default_factory=CaptureBudget)
    step: CpuStep | None = None


def cpu_backend(step: CpuStep | None = None, *, products: torch.dtype = torch.float32) -> Backend:
    """Return what runs everywhere, for a base that computes in `products`."""
    return Backend(
        device=torch.device("cpu"),
        pool_dtype=step.pool_dtype if step is not None and products is torch.bfloat16 else POOL_DTYPE,
        link=CpuLink(),
        attention=torch_attention,
        step=step,
    )


def cuda_backend(dtype: torch.dtype, *, budget: CaptureBudget) -> Backend:
    """Return the backend of this process's first GPU, for a base of `dtype`.

    Raises:
        ValueError: there is no GPU, or this torch cannot use it.
    """
    if not torch.cuda.is_available():
        raise ValueError("no GPU that this torch can use")
    device = torch.device("cuda", 0)
    facts = torch.cuda.get_device_properties(device)
    return Backend(
        device=device,
        pool_dtype=dtype,
        link=CudaLink(device),
        attention=gpu_attention,
        gpu=Gpu(facts.name, facts.multi_processor_count),
        graphs=CudaGraphs(device) if budget.seconds and budget.bytes else None,
        budget=budget,
    )


def torch_attention(cache: KvCache, info: ModelInfo) -> AttentionMaker:
    """Return attention by torch's own products."""
    return TorchAttention(cache, q_heads=info.heads, kv_heads=info.kv_heads, max_context=info.max_context)


def gpu_attention(cache: KvCache, info: ModelInfo) -> AttentionMaker:
    """Return attention by FlashInfer where it is installed and has kernels for the model, else by torch's products."""
    if find_spec("flashinfer") is None or not fits(dtype=info.dtype, head_dim=info.head_dim):
        return torch_attention(cache, info)
    sizes = {"q_heads": info.heads, "kv_heads": info.kv_heads, "max_context": info.max_context}
    return FlashAttention(cache, **sizes, library=import_module("flashinfer"))


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSizes:
    """The largest step that there will be, and what it may touch: blocks of keys and values, pages of adapters."""

    rows: int
    tokens: int
    blocks: int
    pages: int


def prepare(
    backend: Backend, decoder: Decoder, pool: DevicePool, cache: KvCache, *, sizes: StepSizes,
    clock: Callable[[], float],
) -> tuple[AttentionMaker, DecodeGraphs | None]:  # fmt: skip
    """Give the pool its kernels, compile everything that a step may need, capture the decode graphs; takes seconds.

    Returns the attention, and the graphs where there are some. On a CPU there is nothing to prepare.
    """
    attention = backend.attention(cache, decoder.info)
    if backend.gpu is None:
        return attention, None
    kernels = GpuLora(
        pool.groups,
        pool.banks,
        rows_per_page=pool.rows_per_page,
        limits=WorkLimits(rows=sizes.tokens, adapters=sizes.rows, rank=MAX_RANK, pages=sizes.pages),
        gpu=backend.gpu.name,
        multiprocessors=backend.gpu.multiprocessors,
    )
    pool.kernels = kernels
    began = clock()
    variants = kernels.compile()
    _warm(decoder, attention, cache)
    log.info("kernels compiled", gpu=backend.gpu.name, variants=variants, attention=attention.name,
             seconds=round(clock() - began, 1), size_bytes=kernels.memory_bytes)  # fmt: skip
    # transformers' modelling code may ask the device for values on its way, which a capture forbids.
    capturable = kernels.can_be_captured and decoder.info.path == NATIVE and can_be_captured(attention, backend.device)
    if backend.graphs is None or not capturable:
        return attention, None
    graphs = DecodeGraphs(decoder, pool, kernels, attention, device=backend.graphs, where=backend.device)
    report = graphs.capture(max_rows=sizes.rows, max_adapters=sizes.rows, budget=backend.budget, clock=clock)
    log.info("graphs captured", captured=report.captured, seconds=round(report.seconds, 1),
             size_bytes=report.size_bytes, over_budget=len(report.over_budget))  # fmt: skip
    if report.unequal:
        log.error("graphs that do not replay what they recorded are not used", buckets=[str(b) for b in report.unequal])
    return attention, graphs


def can_be_captured(attention: AttentionMaker, device: torch.device) -> bool:
    """Say whether decode steps are worth a graph: on a GPU torch's fixed attention reads the longest context always."""
    return device.type == "cpu" or attention.name != TorchAttention.name


@torch.inference_mode()
def _warm(decoder: Decoder, attention: AttentionMaker, cache: KvCache) -> None:
    """Run a prompt and a decode step of the base over the spare block: libraries compile what they compile lazily."""
    assert cache.spare_block is not None
    for count in (min(2, cache.block_size), 1):
        lora = base_batch(RowLayout(count, count, ()))
        tokens = torch.zeros(count, dtype=torch.int64, device=cache.k.device)
        positions = torch.arange(count, device=cache.k.device)
        step = attention.step([AttentionSpan(0, count, 0, (cache.spare_block,))])
        decoder.logits(decoder.hidden(Packed(tokens, positions, step, lora)), lora)
