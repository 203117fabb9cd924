"""Puts an engine together: a loaded decoder, budgets in bytes, one engine."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from services.executor.adapter_pool import AdapterPool
from services.executor.engine.backend import Backend, StepSizes, cpu_backend, cuda_backend, prepare
from services.executor.engine.device_pool import DevicePool, page_bytes
from services.executor.engine.loop import Engine, EngineOptions
from services.executor.engine.runner import Runner
from services.executor.engine.staging import Staged, Stager
from services.executor.eviction import make_policy
from services.executor.intake import HostAdapter
from services.executor.kernels.compiled import Compiled, load_step
from services.executor.kernels.graphs import CaptureBudget
from services.executor.kv_blocks import BlockPool
from services.executor.model.attention import KvCache
from services.executor.model.families import Wanted
from services.executor.model.interface import Decoder, ModelInfo
from services.executor.model.load import load_decoder
from services.executor.model.products import Products, product_dtype
from services.executor.plan import SchedulerLimits
from services.executor.scheduler import Scheduler

# Adapters of the token embedding may take one part in so many of the pool's bytes, beside its pages.
BESIDE_PART = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSizes:
    """What the engine may take.

    `kv_bytes` and `pool_bytes` are budgets of the device's memory, and a quarter of `pool_bytes` more for embeddings;
    `block_size` is tokens per KV block, `page_rows` rank rows per adapter page. `poison` fills freed blocks and pages
    with NaN (tests).
    """

    kv_bytes: int = 256 * 2**20
    pool_bytes: int = 512 * 2**20
    block_size: int = 16
    page_rows: int = 8
    max_rows: int = 64
    max_step_tokens: int = 512
    max_waiting: int = 1024
    eviction: str = "gdsf-d"
    poison: bool = False


def build_engine(
    decoder: Decoder,
    *,
    base_digest: str,
    sizes: EngineSizes,
    clock: Callable[[], float],
    options: EngineOptions | None = None,
    on_fault: Callable[[BaseException], None] = lambda error: None,
    backend: Backend | None = None,
) -> Engine:
    """Return an engine that has not started, on `backend` (by default the CPU). The decoder is on its device.

    Raises:
        ValueError: a budget that does not hold one block or one page, or a limit below 1.
    """
    info, backend = decoder.info, backend or cpu_backend()
    block_bytes = 2 * info.layers * sizes.block_size * info.kv_heads * info.head_dim * info.dtype.itemsize
    block_count = sizes.kv_bytes // block_bytes
    one_page = page_bytes(decoder.groups, rows_per_page=sizes.page_rows, dtype=backend.pool_dtype)
    page_count = sizes.pool_bytes // one_page
    if block_count < 2 or page_count < 1:
        raise ValueError(
            f"the budgets hold {block_count} blocks of {block_bytes} B, {page_count} pages of {one_page} B"
        )
    limits = SchedulerLimits(
        max_rows=sizes.max_rows,
        max_step_tokens=max(sizes.max_step_tokens, sizes.max_rows),
        max_context=info.max_context,
        max_waiting=sizes.max_waiting,
    )
    scheduler = Scheduler(
        limits,
        BlockPool(block_count, block_size=sizes.block_size),
        base_digest=base_digest,
        vocab_size=info.vocab_size,
        eos_ids=info.eos_ids,
    )
    adapters = AdapterPool(
        page_count,
        page_rows=sizes.page_rows,
        page_bytes=one_page,
        policy=make_policy(sizes.eviction),
        beside_bytes=sizes.pool_bytes // BESIDE_PART,
    )
    step = StepSizes(rows=sizes.max_rows, tokens=limits.max_step_tokens, blocks=block_count, pages=page_count)
    runner = _make_runner(decoder, backend, sizes, step=step, clock=clock)
    return Engine(
        runner=runner, scheduler=scheduler, adapters=adapters, clock=clock, options=options, on_fault=on_fault
    )


def _make_runner(
    decoder: Decoder, backend: Backend, sizes: EngineSizes, *, step: StepSizes, clock: Callable[[], float]
) -> Runner:
    info = decoder.info
    cache = KvCache(
        layers=info.layers,
        blocks=step.blocks,
        block_size=sizes.block_size,
        kv_heads=info.kv_heads,
        head_dim=info.head_dim,
        dtype=info.dtype,
        device=backend.device,
        spare=backend.gpu is not None,
        poison=sizes.poison,
        step=backend.step,
    )
    pool = DevicePool(
        decoder.groups,
        page_count=step.pages,
        rows_per_page=sizes.page_rows,
        dtype=backend.pool_dtype,
        device=backend.device,
        link=backend.link,
        poison=sizes.poison,
        step=backend.step,
    )
    attention, graphs = prepare(backend, decoder, pool, cache, sizes=step, clock=clock)
    return Runner(decoder, pool=pool, cache=cache, attention=attention, graphs=graphs)


@dataclass(frozen=True, slots=True)
class Device:
    """An engine, and how a revision's host arrays are arranged for it (off the device thread)."""

    engine: Engine
    model: ModelInfo
    stage: Callable[[HostAdapter], Staged]
    max_rank: int
    decoder: Decoder


def open_device(
    directory: Path,
    *,
    base_digest: str,
    dtype: str,
    sizes: EngineSizes,
    clock: Callable[[], float],
    options: EngineOptions,
    on_fault: Callable[[BaseException], None],
    max_context: int | None = None,
    model_path: Wanted = "auto",
    cpu_products: Products = "auto",
    compiled: Compiled = "auto",
    threads: int = 0,
    device: Literal["cpu", "cuda"] = "cpu",
    graphs: CaptureBudget | None = None,
) -> Device:
    """Load the base in `directory` as `dtype` (float16 on a GPU only) and return a device whose engine has not started.

    `model_path` forces one of the decoders of model/families.py; `cpu_products` is explained in model/products.py,
    `compiled` in kernels/compiled.py.
    `device` is where it computes; `graphs` bounds what capturing decode graphs takes there.
    `threads` bounds the process's compute threads; 0 leaves torch's choice. Takes seconds.

    Raises:
        ModelUnsupported: the base cannot be computed exactly.
        ValueError: the sizes do not hold it, or there is no such device.
        CompilerMissing: the compiled step must be `on`, and there is none.
    """
    if threads:
        torch.set_num_threads(threads)
    # Host bytes may be the loader's sealed memory, which nobody can write to; staging only reads them.
    warnings.filterwarnings("ignore", message="The given buffer is not writable")
    warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta state")
    kind = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[dtype]
    if device == "cpu":
        backend = cpu_backend(load_step(compiled), products=product_dtype(kind, cpu_products))
    else:
        backend = cuda_backend(kind, budget=graphs or CaptureBudget())
    decoder = load_decoder(
        directory,
        dtype=kind,
        max_context=max_context,
        wanted=model_path,
        cpu_products=cpu_products,
        device=backend.device,
        step=backend.step,
    )
    engine = build_engine(
        decoder,
        base_digest=base_digest,
        sizes=sizes,
        clock=clock,
        options=options,
        on_fault=on_fault,
        backend=backend,
    )
    pages = engine.state().page_count
    stager = Stager(decoder.groups, dtype=backend.pool_dtype, pinned=backend.link.pinned, turn=engine.turn)
    return Device(engine, decoder.info, stager, pages * sizes.page_rows, decoder)
