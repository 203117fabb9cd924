"""An engine under a manual clock, stepped by hand, with everything that its requests said."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from services.executor.engine.backend import Backend, cpu_backend
from services.executor.engine.build import EngineSizes, build_engine
from services.executor.engine.device_pool import POOL_DTYPE
from services.executor.engine.loads import Lease
from services.executor.engine.loop import Engine, EngineOptions
from services.executor.engine.staging import stage
from services.executor.intake import HostAdapter
from services.executor.kernels.cpu_step import CpuStep
from services.executor.model.interface import Decoder
from services.executor.model.native import load_native
from services.executor.request import Ended, Event, RequestSpec, Sampling, Score, Started, Tokens

BASE = "sha256:" + "b" * 64
SMALL = EngineSizes(kv_bytes=2**20, pool_bytes=2**22, max_rows=16, max_step_tokens=64, poison=True)


@dataclass
class Transcript:
    """What one request was told."""

    started: list[Started] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[object] = field(default_factory=list)
    ended: list[Ended] = field(default_factory=list)

    def sink(self, event: Event) -> None:
        assert not self.ended, "an event after the end"
        if isinstance(event, Started):
            self.started.append(event)
        elif isinstance(event, Tokens):
            assert self.started, "tokens before the start"
            self.tokens.extend(event.token_ids)
            self.logprobs.extend(event.logprobs)
        else:
            self.ended.append(event)


class World:
    """Steps an engine in the test's own thread."""

    def __init__(self, decoder: Decoder, sizes: EngineSizes = SMALL, backend: Backend | None = None) -> None:
        self.now = 0.0
        self.faults: list[BaseException] = []
        self.decoder = decoder
        self.engine: Engine = build_engine(
            decoder,
            base_digest=BASE,
            sizes=sizes,
            clock=lambda: self.now,
            options=EngineOptions(check_every_step=True),
            on_fault=self.faults.append,
            backend=backend,
        )
        self.transcripts: dict[str, Transcript] = {}
        self.pool_dtype = backend.pool_dtype if backend is not None else POOL_DTYPE

    def submit(
        self,
        request_id: str,
        prompt: tuple[int, ...],
        revision_id: str | None = None,
        *,
        sampling: Sampling | None = None,
        salt: bytes = b"",
        priority: int = 0,
        deadline: float | None = None,
        score: Score | None = None,
    ) -> Transcript:
        transcript = Transcript()
        spec = RequestSpec(
            request_id=request_id,
            prompt=prompt,
            sampling=sampling or Sampling(max_tokens=12),
            revision_id=revision_id,
            salt=salt,
            priority=priority,
            deadline=deadline,
            score=score,
        )
        self.engine.submit(spec, transcript.sink)
        self.transcripts[request_id] = transcript
        return transcript

    def load(self, adapter: HostAdapter, *, hold: bool = False) -> Lease | None:
        future = self.engine.load(stage(adapter, self.decoder.groups, dtype=self.pool_dtype))
        self.steps_until(future.done)
        lease = future.result()
        if hold:
            return lease
        lease.release()
        return None

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self.now += 0.001
            self.engine.step()
            assert not self.faults, self.faults

    def steps_until(self, done: Callable[[], bool], limit: int = 3000) -> None:
        for _ in range(limit):
            if done():
                return
            self.step()
        raise AssertionError("did not get there")

    def finish(self) -> None:
        self.steps_until(lambda: all(t.ended for t in self.transcripts.values()))

    def assert_idle(self) -> None:
        state = self.engine.state()
        assert state.open_requests == state.running == state.waiting == 0
        assert self.engine._scheduler.idle
        assert state.kv_free + state.kv_cached == state.kv_total
        assert all(r.leases == 0 for r in state.residents)


def open_world(
    folder: Path, sizes: EngineSizes = SMALL, dtype: torch.dtype = torch.float32, *,
    products: torch.dtype | None = None, step: CpuStep | None = None,
) -> World:  # fmt: skip
    return World(load_native(folder, dtype=dtype, products=products, step=step), sizes, cpu_backend(step))
