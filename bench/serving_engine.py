"""Our engine under the serving benchmark: built as the executor builds it, stepped in the benchmark's own thread."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.serving_work import Adapter, make_prompts
from services.executor.engine.build import Device, EngineSizes, open_device
from services.executor.engine.loads import Lease
from services.executor.engine.loop import EngineOptions
from services.executor.kernels.compiled import Compiled, load_step
from services.executor.model.products import Products
from services.executor.request import Ended, Event, RequestSpec, Sampling, Tokens

SIZES = EngineSizes(kv_bytes=768 << 20, pool_bytes=1 << 30, page_rows=1)


@dataclass(slots=True)
class Stream:
    """One request, and when its tokens came (seconds)."""

    arrival: float
    times: list[float] = field(default_factory=list)
    path: str = ""
    ended: bool = False

    def sink(self, event: Event) -> None:
        if isinstance(event, Tokens):
            self.times.append(time.perf_counter())
        elif isinstance(event, Ended):
            self.ended, self.path = True, event.kernel_path

    @property
    def gaps(self) -> list[float]:
        """Times between tokens, in milliseconds."""
        return [(b - a) * 1000 for a, b in zip(self.times, self.times[1:], strict=False)]


class EngineBench:
    """An engine of real sizes. `device.engine` is stepped by `steps`."""

    def __init__(
        self, base: Path, dtype: str, *, threads: int, products: Products = "auto", compiled: Compiled = "auto"
    ) -> None:
        self.device: Device = open_device(
            base,
            base_digest="sha256:" + "b" * 64,
            dtype=dtype,
            sizes=SIZES,
            clock=time.perf_counter,
            options=EngineOptions(),
            on_fault=_fail,
            threads=threads,
            cpu_products=products,
            compiled=compiled,
        )
        self.engine = self.device.engine
        self.compiled = compiled != "off" and load_step("auto") is not None
        self.runner: Any = self.engine._runner
        self.runner.settle()
        self.decoder = self.runner.decoder
        self._leases: dict[str, Lease] = {}
        self._count = 0

    def load(self, adapter: Adapter) -> None:
        """Bring an adapter to the device and keep it there."""
        waiting = self.engine.load(self.device.stage(adapter.host()))
        while not waiting.done():
            self.engine.step()
        self._leases[adapter.name] = waiting.result()

    def submit(self, prompt: tuple[int, ...], revision: str | None, new_tokens: int) -> Stream:
        """Add a request that makes exactly `new_tokens`."""
        self._count += 1
        stream = Stream(time.perf_counter())
        sampling = Sampling(max_tokens=new_tokens, ignore_eos=True)
        spec = RequestSpec(
            request_id=f"r{self._count}", prompt=prompt, sampling=sampling, revision_id=revision,
            salt=self._count.to_bytes(4, "big"),  # nothing is found in the prefix cache
        )  # fmt: skip
        self.engine.submit(spec, stream.sink)
        return stream

    def batch(
        self, owners: Sequence[str | None], *, prompt: int, new: int, seed: int = 1
    ) -> tuple[float, list[Stream]]:
        """Serve one request per owner at once; returns the seconds that all of them took."""
        prompts = make_prompts(len(owners), prompt, self.decoder.info.vocab_size, seed)
        started = time.perf_counter()
        streams = [self.submit(p, owner, new) for p, owner in zip(prompts, owners, strict=True)]
        while not all(stream.ended for stream in streams):
            self.engine.step()
        return time.perf_counter() - started, streams


def _fail(error: BaseException) -> None:
    raise error
