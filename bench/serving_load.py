"""Latency under load, and memory: the serving benchmark's measurements of an engine in motion."""

from __future__ import annotations

import os
import random
import statistics
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import NamedTuple

import torch

from bench.serving_engine import EngineBench, Stream
from bench.serving_work import Adapter, make_adapter, make_prompts
from services.executor.engine.loads import Lease

POISSON_S = 24.0
STREAMS, STREAM_NEW = 8, 112


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that `share` of them do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


class Arrivals(NamedTuple):
    """Gaps between tokens, in ms, of so many requests."""

    median: float
    p99: float
    requests: int


def poisson(
    bench: EngineBench, owners: Sequence[str | None], *, rate: float, prompt: int, new: int, seed: int
) -> Arrivals:
    """Let requests arrive at `rate` per second for a while, and be answered."""
    numbers = random.Random(seed)  # noqa: S311 - made-up arrivals
    due, now = [], 0.0
    while (now := now + numbers.expovariate(rate)) < POISSON_S:
        due.append(now)
    prompts = make_prompts(len(due), prompt, bench.decoder.info.vocab_size, 12)
    streams: list[Stream] = []
    started = time.perf_counter()
    while len(streams) < len(due) or not all(stream.ended for stream in streams):
        elapsed = time.perf_counter() - started
        while len(streams) < len(due) and due[len(streams)] <= elapsed:
            number = len(streams)
            streams.append(bench.submit(prompts[number], owners[number % len(owners)], new))
        if not bench.engine.step() and len(streams) < len(due):
            time.sleep(max(0.0, min(0.002, due[len(streams)] - (time.perf_counter() - started))))
    gaps = [gap for stream in streams for gap in stream.gaps]
    return Arrivals(statistics.median(gaps), percentile(gaps, 0.99), len(streams))


def cold_load(bench: EngineBench, adapter: Adapter, *, seed: int) -> tuple[float, float]:
    """Return the p99 gap, in ms, of 8 streams without and with a load of `adapter` in their middle."""
    return _streams(bench, None, seed), _streams(bench, adapter, seed)


def _streams(bench: EngineBench, adapter: Adapter | None, seed: int) -> float:
    prompts = make_prompts(STREAMS, 32, bench.decoder.info.vocab_size, seed)
    streams = [bench.submit(prompt, None, STREAM_NEW) for prompt in prompts]
    asked: list[Future[Lease]] = []
    loader: threading.Thread | None = None
    while not all(stream.ended for stream in streams):
        if adapter is not None and loader is None and len(streams[-1].times) > STREAM_NEW // 3:
            # As in the executor: arranged on a thread of its own, copied by the engine between steps.
            loader = threading.Thread(target=_ask, args=(bench, adapter, asked))
            loader.start()
        bench.engine.step()
    if loader is not None and adapter is not None:
        loader.join()
        while not asked[0].done():
            bench.engine.step()
        asked[0].result().release()
        _drop(bench, adapter.name)
    return percentile([gap for stream in streams for gap in stream.gaps[2:]], 0.99)


def _ask(bench: EngineBench, adapter: Adapter, asked: list[Future[Lease]]) -> None:
    asked.append(bench.engine.load(bench.device.stage(adapter.host())))


def _drop(bench: EngineBench, revision: str) -> None:
    gone = bench.engine.evict(revision)
    while not gone.done():
        bench.engine.step()
    bench.engine.step()


def churn(bench: EngineBench, cycles: int) -> tuple[float, float]:
    """Load and evict small adapters; return resident MiB after the first tenth, and at the end."""
    adapters = [make_adapter(bench.decoder.groups, 200 + i, 1 + i, torch.bfloat16) for i in range(3)]
    early = 0.0
    for cycle in range(cycles):
        adapter = adapters[cycle % len(adapters)]
        waiting = bench.engine.load(bench.device.stage(adapter.host()))
        while not waiting.done():
            bench.engine.step()
        waiting.result().release()
        _drop(bench, adapter.name)
        if cycle == cycles // 10:
            early = resident_mib()
    return early, resident_mib()


def resident_mib() -> float:
    """Return the memory that this process has in use, in MiB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def memory_per_rank(bench: EngineBench, adapters: Sequence[Adapter]) -> float:
    """Return the bytes of these adapters' pages over those of their own numbers in float32, as they are kept."""
    state = bench.engine.state()
    rows = bench.runner.pool.rows_per_page
    paged = sum(-(-adapter.rank // rows) for adapter in adapters) * state.page_bytes
    needed = sum(4 * (a.numel() + b.numel()) for adapter in adapters for a, b in adapter.modules.values())
    return paged / needed
