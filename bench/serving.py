"""Tokens per second of the engine beside transformers, PEFT and vLLM: `make bench-serving`.

One run, one machine, one thread count, one dtype. Prompts are random tokens, adapters random numbers on all linears
of the layers; what they say does not matter, what they cost does. Our cases take turns, each time in another order, and
a ratio is the median of the ratios within a turn, so that a machine that gets slower does so for all of them; what was
timed of our own cases while the host took CPU time away is timed again (`bench.host`), not so a step's parts nor what
the peers did. Our own cases run with the compiled step where there is a compiler, as an executor does. Exits 0 unless
something cannot be measured.
"""

from __future__ import annotations

import argparse
import logging
import os
import statistics
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import structlog
import torch

from bench.figures import RESULTS, Figure, report
from bench.host import Quiet
from bench.serving_ceilings import Breakdown, ceiling, measure_machine
from bench.serving_engine import EngineBench
from bench.serving_load import churn, cold_load, memory_per_rank, poisson
from bench.serving_peers import TransformersPeer, vllm_rates
from bench.serving_work import RANKS, make_adapter, make_prompts
from loraport.dev.bases import ensure_default_base
from loraport.dev.layout import Layout

ROWS, PROMPT, NEW = 32, 64, 64
LONG_ROWS, LONG_PROMPT = 8, 512
POISSON_ROUNDS = 3
# What says how threads wait and memory is mapped.
ENVIRONMENT = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "GLIBC_TUNABLES")
ODD_RANKS = (1, 3, 5, 12, 63)
# Seconds for measuring again, all in all, and the share of the CPU time that the host may take beside what counts.
SPARE_S, MOST_STOLEN = 400.0, 0.02
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Serving:
    """All measurements of one dtype. `figures` and `facts` grow as they are made."""

    def __init__(self, base: Path, dtype: str, *, threads: int, rounds: int, peer_s: float) -> None:
        self.base, self.dtype, self.threads, self.rounds, self.peer_s = base, dtype, threads, rounds, peer_s
        self.started = time.monotonic()
        self.quiet = Quiet(spare_s=SPARE_S, most=MOST_STOLEN)
        self.figures: list[Figure] = []
        self.facts: dict[str, Any] = {}
        self.eager = self.eager_base()
        self.engine = EngineBench(base, dtype, threads=threads)
        self.fact("decode step", "compiled" if self.engine.compiled else "eager: there is no C++ compiler here")
        groups = self.engine.decoder.groups
        self.adapters = [make_adapter(groups, i, RANKS[i % len(RANKS)], torch.bfloat16) for i in range(16)]
        names = [adapter.name for adapter in self.adapters]
        self.cases: dict[str, list[str | None]] = {
            "base": [None] * ROWS,
            "1 adapter": [names[0]] * ROWS,
            "4 adapters": [names[i % 4] for i in range(ROWS)],
            "16 adapters": [names[i % 16] for i in range(ROWS)],
        }

    def figure(
        self, name: str, value: float, baseline: float, target: float, unit: str, *, at_most: bool = False
    ) -> None:
        made = Figure(name=name, value=value, baseline=baseline, target=target, unit=unit, at_most=at_most)
        self.figures.append(made)
        print(f"{self.elapsed():5.0f} s  {made.line()}", flush=True)

    def fact(self, name: str, text: str) -> None:
        self.facts[name] = text
        print(f"{self.elapsed():5.0f} s  {name}: {text}", flush=True)

    def elapsed(self) -> float:
        return time.monotonic() - self.started

    def run(self) -> None:
        """Make all measurements, the shortest first, so that a fault shows early."""
        odd = [make_adapter(self.engine.decoder.groups, 300 + rank, rank, torch.bfloat16) for rank in ODD_RANKS]
        pages = max(memory_per_rank(self.engine, some) for some in (self.adapters, *([one] for one in odd)))
        for adapter in self.adapters:
            self.engine.load(adapter)
        self.engine.batch(self.cases["16 adapters"], prompt=PROMPT, new=4)  # warms up
        rates = self.closed_loop()
        self.single()
        self.prefill()
        self.where_time_goes()
        self.arrivals(rates["4 adapters"])
        self.fact("CPU time that the host took", self.quiet.said())
        self.memory(pages)
        self.peers(rates)

    def eager_base(self) -> float:
        """Tokens per second of 32 requests to the base without the compiled step."""
        engine = EngineBench(self.base, self.dtype, threads=self.threads, compiled="off")
        once = partial(engine.batch, [None] * ROWS, prompt=PROMPT, new=NEW)
        taken = [self.quiet.measure(partial(once, seed=turn))[0] for turn in range(self.rounds)]
        return ROWS * NEW / statistics.median(taken)

    def closed_loop(self) -> dict[str, float]:
        """32 requests at once, whole answers: tokens per second of each case, beside what a step must cost."""
        taken: dict[str, list[float]] = {name: [] for name in self.cases}
        step_ms: dict[str, list[float]] = {name: [] for name in self.cases}
        paths = {}
        names = list(self.cases)
        for turn in range(self.rounds):
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                once = partial(self.engine.batch, self.cases[name], prompt=PROMPT, new=NEW, seed=turn)
                seconds, streams = self.quiet.measure(once)
                taken[name].append(seconds)
                step_ms[name].append(statistics.median(gap for stream in streams for gap in stream.gaps))
                paths[name] = streams[-1].path
        rates = {name: ROWS * NEW / statistics.median(seconds) for name, seconds in taken.items()}
        machine = measure_machine()
        self.fact("machine", f"{machine.bytes_s / 1e9:.1f} GB/s read, {machine.flops_s / 1e9:.0f} GFLOP/s in float32")
        for name, owners in self.cases.items():
            least = ceiling(machine, self.engine.decoder, owners, self.adapters, context=PROMPT + NEW // 2)
            self.fact(
                f"step, {name}",
                f"{statistics.median(step_ms[name]):.1f} ms; memory bound {least.memory_ms:.1f} ms, arithmetic bound "
                f"{least.arithmetic_ms:.1f} ms; {rates[name]:.0f} tokens/s with prefill; {paths[name]}",
            )
        for name, target in (("1 adapter", 0.92), ("4 adapters", 0.75), ("16 adapters", 0.50)):
            self.figure(f"{name} / own base", _ratio(taken["base"], taken[name]), 1.0, target, "x")
        return rates

    def single(self) -> None:
        """One stream of the base, decode and prefill, and the same of transformers (measured with the peers)."""
        once = partial(self.engine.batch, [None], prompt=PROMPT, new=NEW)
        taken = [self.quiet.measure(partial(once, seed=turn))[0] for turn in range(self.rounds)]
        self._single = statistics.median(taken)

    def prefill(self) -> None:
        """8 prompts of 512 tokens, one token each: nothing but prefill."""
        owners = [adapter.name for adapter in self.adapters[:4]] * 2
        taken: dict[bool, list[float]] = {False: [], True: []}
        for turn in range(self.rounds):
            for adapted in (False, True) if turn % 2 else (True, False):
                some: Sequence[str | None] = owners if adapted else [None] * LONG_ROWS
                once = partial(self.engine.batch, some, prompt=LONG_PROMPT, new=1, seed=turn)
                taken[adapted].append(self.quiet.measure(once)[0])
        base, four = (LONG_ROWS * LONG_PROMPT / statistics.median(taken[kind]) for kind in (False, True))
        self.fact("prefill", f"base {base:.0f} tokens/s, 4 adapters {four:.0f} tokens/s")
        self.figure("prefill 4 adapters / own base", _ratio(taken[False], taken[True]), 1.0, 0.85, "x")

    def where_time_goes(self) -> None:
        """Parts of a decode step, base and 16 adapters, and what is spent outside the forward pass."""
        for name in ("base", "16 adapters"):
            breakdown = Breakdown(self.engine.engine)
            prompts = make_prompts(ROWS, PROMPT, self.engine.decoder.info.vocab_size, 7)
            streams = [self.engine.submit(p, o, 24) for p, o in zip(prompts, self.cases[name], strict=True)]
            while not all(len(stream.times) > 2 for stream in streams):
                self.engine.engine.step()
            with breakdown.watch():
                for _ in range(12):
                    self.engine.engine.step()
            while not all(stream.ended for stream in streams):
                self.engine.engine.step()
            parts = ", ".join(f"{part} {ms:.1f}" for part, ms in breakdown.parts().items())
            self.fact(f"breakdown, {name}, ms per step", parts)
            if name == "base":
                self.figure("outside the forward pass", breakdown.overhead, 0.0, 0.05, "x", at_most=True)

    def arrivals(self, saturated: float) -> None:
        """Poisson arrivals, then a cold load beside running streams."""
        owners = [None, *[adapter.name for adapter in self.adapters[:4]]]
        rate = 0.7 * saturated / NEW
        runs = [
            self.quiet.measure(partial(poisson, self.engine, owners, rate=rate, prompt=PROMPT, new=NEW, seed=turn))
            for turn in range(POISSON_ROUNDS)
        ]
        count, median = sum(run.requests for run in runs), statistics.median(run.median for run in runs)
        self.fact("poisson", f"{count} requests at 70 % of {saturated:.0f} tokens/s, base and 4 adapters mixed")
        spread = statistics.median(run.p99 / run.median for run in runs)
        self.figure("poisson p99 / median gap", spread, median, 3.0, "x", at_most=True)
        extra = make_adapter(self.engine.decoder.groups, 99, 64, torch.bfloat16)
        pairs = [self.quiet.measure(partial(cold_load, self.engine, extra, seed=turn)) for turn in range(self.rounds)]
        quiet, loud = (statistics.median(kind) for kind in zip(*pairs, strict=True))
        self.fact("cold load", f"p99 gap of 8 streams {quiet:.1f} ms without, {loud:.1f} ms with a load of rank 64")
        grown = statistics.median(loud / quiet for quiet, loud in pairs)
        self.figure("cold load p99 / without", grown, 1.0, 1.2, "x", at_most=True)

    def memory(self, pages: float) -> None:
        """What adapters cost, and whether loading and evicting leaks."""
        self.figure("adapter bytes / rank bytes", pages, 1.0, 1.05, "x", at_most=True)
        before, after = churn(self.engine, 1000)
        self.figure("RSS after 1,000 cycles", after / before, before, 1.02, "x", at_most=True)

    def peers(self, rates: dict[str, float]) -> None:
        """transformers, then PEFT on the same model object, with what is left of the engine's memory in place."""
        peer = TransformersPeer(self.base, DTYPES[self.dtype])
        prompts = make_prompts(ROWS, PROMPT, self.engine.decoder.info.vocab_size, 1)
        whole = peer.measure(prompts, self.cases["base"], NEW, budget_s=self.peer_s)
        one = peer.measure(prompts[:1], [None], NEW, budget_s=self.peer_s)
        peer.adapt(self.adapters)
        mixed = peer.measure(prompts, self.cases["16 adapters"], NEW, budget_s=self.peer_s)
        rate = ROWS * NEW / whole.seconds
        for name, took in (("transformers", whole), ("transformers, one stream", one), ("PEFT, 16 adapters", mixed)):
            rows = 1 if took is one else ROWS
            cut = "; decode steps extrapolated from the median one" if took.cut else ""
            self.fact(name, f"{rows * NEW / took.seconds:.1f} tokens/s, {took.rounds} rounds{cut}")
        self.figure("base, eager / transformers", self.eager / rate, rate, 1.5, "x")
        if self.engine.compiled:
            self.figure("base, compiled / transformers", rates["base"] / rate, rate, 1.9, "x")
        peft = ROWS * NEW / mixed.seconds
        self.figure("16 adapters / PEFT mixed", rates["16 adapters"] / peft, peft, 4.0, "x")
        self.figure("single stream / transformers", one.seconds / self._single, NEW / one.seconds, 1.2, "x")


def _ratio(base: Sequence[float], other: Sequence[float]) -> float:
    """Returns how fast the other was, the base being 1: the median over turns, of the seconds of both in each."""
    return statistics.median(own / its for own, its in zip(base, other, strict=True))


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure serving: throughput, latency, memory; peers beside it.")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="bfloat16")
    parser.add_argument(
        "--base", type=Path, help="a checkpoint; by default the local stack's SmolLM2-135M, converted once"
    )
    parser.add_argument("--data", type=Path, default=Path(".loraport"), help="where the local stack keeps its base")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--rounds", type=int, default=5, help="runs per figure, at least 3")
    parser.add_argument("--peer-seconds", type=float, default=45.0, help="time for each measurement of a peer")
    parser.add_argument("--peers", type=Path, metavar="ENV", help="a virtual environment with vLLM's CPU build")
    parser.add_argument("--out", type=Path, help="where the JSON goes")
    options = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    logging.getLogger("transformers").setLevel(logging.ERROR)
    try:
        base = options.base or ensure_default_base(Layout(options.data.absolute()), progress=print)
        serving = Serving(
            base, options.dtype, threads=options.threads, rounds=max(3, options.rounds), peer_s=options.peer_seconds
        )
        serving.run()
    except Exception as error:
        print(f"error: could not measure: {error!r}", file=sys.stderr)
        return 1
    facts = {
        "dtype": options.dtype, "threads": options.threads, "rounds": serving.rounds,
        "computed in": str(serving.engine.decoder.info.dtype).removeprefix("torch."),
        **{name: os.environ.get(name, "not set") for name in ENVIRONMENT}, **serving.facts,
    }  # fmt: skip
    if options.peers:
        rates = vllm_rates(options.peers, base, dtype=options.dtype, threads=options.threads, log=print)
        facts |= {f"vLLM, {name}": f"{rate:.1f} tokens/s" for name, rate in rates.items()}
    report(options.out or RESULTS / f"serving_{options.dtype}.json", serving.figures, facts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
