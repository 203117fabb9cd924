"""A whole engine on the device: random weights of Llama-3-8B's shapes, 64 rows of prompts and answers.

Needs what the executor needs beside torch (safetensors, structlog, numpy); without them `run.py` leaves the part out.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from bench.figures import Figure
from bench.gpu.bed import Device, mixed_ranks
from services.executor.engine.backend import Backend, Gpu, cuda_backend, torch_attention
from services.executor.engine.build import EngineSizes, build_engine
from services.executor.engine.device_link import CpuLink
from services.executor.engine.loop import Engine
from services.executor.engine.staging import Staged, StagedGroup
from services.executor.kernels.graphs import CaptureBudget
from services.executor.kernels.layout import GroupSpec
from services.executor.model.config import NativeConfig, Rope
from services.executor.model.native import NativeDecoder, _load_layer
from services.executor.request import Ended, RequestSpec, Sampling, Tokens

ROWS, ADAPTERS, PROMPT, ANSWER = 64, 16, 128, 64
COLD_MS, OVERHEAD = 6.0, 1.10


class RandomCheckpoint:
    """Stands in for a checkpoint: every tensor is small noise on the device."""

    def __init__(self, device: Device) -> None:
        self._where = {"device": device.torch_name, "dtype": torch.float32 if device.rehearse else torch.bfloat16}

    def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        if name.endswith("norm.weight"):
            return torch.ones(shape, **self._where)
        return torch.randn(shape, **self._where).mul_(0.02)


def shape_of(device: Device) -> NativeConfig:
    """Return Llama-3-8B's shapes, or a small one for a rehearsal."""
    small = device.rehearse
    heads, kv_heads, layers = (4, 2, 1) if small else (32, 8, 32)
    return NativeConfig(
        architecture="LlamaForCausalLM", vocab_size=256 if small else 128256, hidden_size=64 if small else 4096,
        intermediate_size=96 if small else 14336, layers=layers, heads=heads, kv_heads=kv_heads,
        head_dim=16 if small else 128, norm_eps=1e-5, rope=Rope(kind="default", theta=5e5, original_context=8192),
        rotary=(True,) * layers, windows=(None,) * layers, tied=False, qkv_bias=False, o_bias=False, mlp_bias=False,
        qk_norm=False, max_context=512, eos_ids=frozenset({0}),
    )  # fmt: skip


def make_decoder(device: Device) -> NativeDecoder:
    """Return a decoder of random weights."""
    config, checkpoint = shape_of(device), RandomCheckpoint(device)
    vocabulary = (config.vocab_size, config.hidden_size)
    return NativeDecoder(
        config, layers=tuple(_load_layer(checkpoint, config, i, None) for i in range(config.layers)),
        embedding=checkpoint.take("embedding", vocabulary), norm=checkpoint.take("norm.weight", vocabulary[1:]),
        head=checkpoint.take("head", vocabulary), max_context=config.max_context,
    )  # fmt: skip


def make_staged(name: str, groups: tuple[GroupSpec, ...], rank: int, dtype: torch.dtype, *, pinned: bool) -> Staged:
    """Return a random adapter of every layer's linears, arranged as staging arranges one."""
    parts = {}
    for group in groups:
        if group.layers == 1 and group.name in ("lm_head", "embed_tokens"):
            continue
        a = torch.randn(group.layers, rank, len(group.out_features), group.in_features).mul_(group.in_features**-0.5)
        b = torch.randn(group.layers, rank, sum(group.out_features)).mul_(0.01)
        scale = torch.ones(group.layers, rank, len(group.out_features))
        a, b = a.to(dtype), b.to(dtype)
        parts[group.name] = StagedGroup(rank, *((t.pin_memory() for t in (a, b, scale)) if pinned else (a, b, scale)))
    return Staged(name, rank, sum(p.a.nbytes + p.b.nbytes for p in parts.values()), parts)


@dataclass
class Asked:
    """One request's tokens, counted."""

    tokens: list[int] = field(default_factory=list)
    ended: bool = False

    def sink(self, event: object) -> None:
        if isinstance(event, Tokens):
            self.tokens.extend(event.token_ids)
        self.ended = self.ended or isinstance(event, Ended)


def open_engine(device: Device, decoder: NativeDecoder, *, seconds: float) -> Engine:
    """Return an engine of 64 rows, its graphs captured within `seconds`; stepped by hand."""
    if device.rehearse:
        backend = Backend(
            device=torch.device("cpu"), pool_dtype=torch.float32, link=CpuLink(), attention=torch_attention,
            gpu=Gpu(device.name, device.multiprocessors),
        )  # fmt: skip
        sizes = EngineSizes(kv_bytes=2**20, pool_bytes=2**20, max_rows=2, max_step_tokens=32)
    else:
        backend = cuda_backend(torch.bfloat16, budget=CaptureBudget(seconds=seconds))
        sizes = EngineSizes(kv_bytes=8 << 30, pool_bytes=8 << 30, max_rows=ROWS, max_step_tokens=2048)
    return build_engine(
        decoder, base_digest="sha256:" + "0" * 64, sizes=sizes, clock=time.perf_counter, backend=backend
    )  # fmt: skip


def answer(engine: Engine, revisions: list[str | None], *, prompt: int, tokens: int, name: str) -> tuple[float, float]:
    """Answer one request per entry of `revisions`; return tokens per second and the median decode step in ms."""
    asked = [Asked() for _ in revisions]
    for i, (revision, one) in enumerate(zip(revisions, asked, strict=True)):
        spec = RequestSpec(
            request_id=f"{name}-{i}", prompt=tuple(3 + (7 * i + 5 * j) % 250 for j in range(prompt)),
            sampling=Sampling(max_tokens=tokens, ignore_eos=True), revision_id=revision,
        )  # fmt: skip
        engine.submit(spec, one.sink)
    engine.meter.take()
    started = time.perf_counter()
    while not all(one.ended for one in asked):
        engine.step()
    took = time.perf_counter() - started
    decode = sorted(note.took_s for note in engine.meter.take() if note.kind == "decode" and note.rows == len(asked))
    return sum(len(one.tokens) for one in asked) / took, 1e3 * decode[len(decode) // 2] if decode else float("nan")


def engine(device: Device) -> Iterator[Figure]:
    """Cold loads by the engine's own link, decode steps with and without adapters, tokens per second."""
    rows, adapters, prompt, tokens = (2, 1, 4, 2) if device.rehearse else (ROWS, ADAPTERS, PROMPT, ANSWER)
    decoder = make_decoder(device)
    run = open_engine(device, decoder, seconds=60.0)
    graphs = run._runner._graphs
    if graphs is not None:
        report = graphs.report
        yield Figure(name="graphs captured in", value=report.seconds, baseline=60.0, target=60.0, unit="s")
        yield Figure(name="graphs' memory", value=report.size_bytes / 2**30, baseline=1.0, target=1.0, unit="GiB")
        yield Figure(name="graphs unlike eager", value=len(report.unequal), baseline=0, target=0, unit="")
    dtype = torch.float32 if device.rehearse else torch.bfloat16
    names: list[str] = []
    took: list[float] = []
    for i, rank in enumerate([16] * 3 + mixed_ranks(adapters) if not device.rehearse else [3]):
        name = "sha256:" + f"{i:064x}"
        staged = make_staged(name, decoder.groups, rank, dtype, pinned=not device.rehearse)
        device.sync()
        started = time.perf_counter()
        future = run.load(staged)
        while not future.done():
            run.step()
        took.append((time.perf_counter() - started) * 1e3)
        future.result().release()
        names.append(name)
    yield Figure(name="rank 16, HOST to READY", value=sorted(took[:3])[len(took[:3]) // 2], baseline=COLD_MS,
                 target=COLD_MS, unit="ms")  # fmt: skip
    names = names[-adapters:]
    mixed = [names[i * adapters // rows] for i in range(rows)]
    answer(run, [None] * rows, prompt=prompt, tokens=2, name="warm")
    plain_rate, plain_ms = answer(run, [None] * rows, prompt=prompt, tokens=tokens, name="base")
    rate, ms = answer(run, mixed, prompt=prompt, tokens=tokens, name="mixed")
    yield Figure(name=f"decode step {rows}r {adapters}a / base", value=ms / plain_ms, baseline=1.0, target=OVERHEAD,
                 unit="x")  # fmt: skip
    yield Figure(name=f"tokens/s {rows}r base", value=plain_rate, baseline=plain_rate, target=0, unit="/s",
                 at_most=False)  # fmt: skip
    yield Figure(name=f"tokens/s {rows}r {adapters}a", value=rate, baseline=plain_rate, target=plain_rate / OVERHEAD,
                 unit="/s", at_most=False)  # fmt: skip
