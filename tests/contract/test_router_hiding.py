"""What cannot be seen from outside: time tells nothing, and no log, error or refusal holds what is private."""

import asyncio
import math
import random
import statistics
import time
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
import structlog

from loraport.registry.v1 import catalog_service_pb2 as cpb
from loraport.registry.v1.tenant_service_pb2 import TenantQuota
from loraport.router.v1 import inference_service_pb2 as pb
from loraport.router.v1 import inference_service_pb2_grpc as stubs
from services.shared.errors import LoraportError
from tests.contract.router_world import SERVICE_CA, World, api_key, digest, eventually

CALLS = 2000
# A machine under load disturbs both kinds alike, but not in every run to the same degree; what tells does so in each.
TRIES = 8
PROMPT = "the quick brown secret of a tenant"


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    world = World(tmp_path)
    world.registry.items += [
        world.registry.base(),
        *world.registry.tenant("acme"),
        *world.registry.tenant("globex"),
        *world.registry.adapter("acme", "pirate"),
        *world.registry.adapter("globex", "hidden"),
    ]
    await world.start_registry()
    await world.start_executor("e0")
    await world.start_router()
    await eventually(lambda: world.router._fleet.view().serves("tiny"))
    yield world
    await world.stop()


def mann_whitney(first: list[float], second: list[float]) -> float:
    """Returns the two-sided p of both being of one distribution (normal approximation, ties share their ranks)."""
    rows = sorted([(value, 0) for value in first] + [(value, 1) for value in second])
    ranks, start = 0.0, 0
    while start < len(rows):
        end = start
        while end < len(rows) and rows[end][0] == rows[start][0]:
            end += 1
        ranks += (start + end + 1) / 2 * sum(1 for _, kind in rows[start:end] if kind == 0)
        start = end
    n, m = len(first), len(second)
    spread = math.sqrt(n * m * (n + m + 1) / 12)
    z = (ranks - n * (n + 1) / 2 - n * m / 2) / spread
    return math.erfc(abs(z) / math.sqrt(2))


def test_the_statistic_tells_what_it_should() -> None:
    source = random.Random(1)
    one, same = ([source.gauss(10, 1) for _ in range(1000)] for _ in range(2))
    slower = [value + 0.2 for value in same]
    assert mann_whitney(one, same) > 0.01
    assert mann_whitney(one, slower) < 0.01
    assert mann_whitney([1.0] * 50, [1.0] * 50) > 0.99


PAIRS = {
    "names": (pb.Target(adapter="tenants/acme/adapters/pirate"), pb.Target(adapter="tenants/acme/adapters/nobody")),
    "ids": (pb.Target(revision_id=digest("acme/pirate/1")), pb.Target(revision_id=digest("acme/nobody/1"))),
}


@pytest.mark.parametrize("pair", PAIRS)
async def test_time_does_not_tell_foreign_from_missing(world: World, pair: str) -> None:
    source = random.Random(7)
    credentials = grpc.ssl_channel_credentials(SERVICE_CA[0])
    metadata = (("authorization", f"Bearer {api_key('globex')}"),)
    async with grpc.aio.secure_channel(f"127.0.0.1:{world.router.user_port}", credentials) as channel:
        stub = stubs.InferenceServiceStub(channel)

        async def ask(target: pb.Target) -> float:
            request = pb.CountTokensRequest(target=target, prompt="x")
            began = time.perf_counter()
            try:
                await stub.CountTokens(request, timeout=60, metadata=metadata)
            except grpc.aio.AioRpcError as error:
                code = error.code()
            took = time.perf_counter() - began
            assert code == grpc.StatusCode.NOT_FOUND
            return took

        for _ in range(100):
            await ask(PAIRS[pair][0])
        seen = []
        for _ in range(TRIES):
            kinds = [index % 2 for index in range(CALLS)]
            source.shuffle(kinds)
            times: tuple[list[float], list[float]] = ([], [])
            for kind in kinds:
                times[kind].append(await ask(PAIRS[pair][kind]))
            medians = [statistics.median(part) for part in times]
            apart = abs(medians[0] - medians[1]) / min(medians)
            seen.append((mann_whitney(*times), apart))
            if seen[-1][0] > 0.01 and apart < 0.05:
                return
    raise AssertionError(f"(p, difference of medians) of every try: {seen}")


async def test_logs_and_errors_hold_nothing_private(world: World) -> None:
    """Prompts, credentials, other tenants' names: not in a line of the log, not in anything that a caller gets."""
    secret = api_key("acme")
    wrong = secret[:-1] + "T"
    told: list[str] = []
    credentials = grpc.ssl_channel_credentials(SERVICE_CA[0])

    def fail() -> None:
        raise LoraportError("NON_FINITE_LOGITS")

    def go() -> None:
        raise LoraportError("EXECUTOR_UNAVAILABLE")

    with structlog.testing.capture_logs() as lines:
        async with grpc.aio.secure_channel(f"127.0.0.1:{world.router.user_port}", credentials) as channel:
            stub = stubs.InferenceServiceStub(channel)

            async def ask(target: pb.Target, key: str = secret, prompt: str = PROMPT) -> None:
                metadata = (("authorization", f"Bearer {key}"),)
                try:
                    async for _ in stub.Generate(
                        pb.GenerateRequest(target=target, prompt=prompt), timeout=60, metadata=metadata
                    ):
                        pass
                except grpc.aio.AioRpcError as error:
                    told.append(f"{error.details()} {error.trailing_metadata()}")

            own = pb.Target(adapter="pirate")
            await ask(own)
            await ask(own, wrong)
            await ask(own, "a.b.c")
            await ask(pb.Target(adapter="tenants/globex/adapters/hidden"))
            await ask(pb.Target(revision_id=digest("globex/hidden/1")))
            await ask(own, prompt=PROMPT * 5000)
            for knob in (fail, go):
                world.executors["e0"].fail_before = knob
                await ask(own)
            world.executors["e0"].fail_before = lambda: None
            world.executors["e0"].began_with = "sha256:" + "0" * 64
            await eventually(lambda: world.router._fleet.view().serves("tiny"))
            await ask(own)
            item = cpb.CatalogTenant(tenant="acme", weight=1.0, base_allowed=True, quota=TenantQuota(queued_count=0))
            await world.put(cpb.CatalogItem(tenant=item))
            await ask(own)
            forged = cpb.CatalogItem(
                revision=world.registry.revision("globex", "forged", signed_by=world.keys["loader"])
            )
            await world.put(forged)
            await ask(pb.Target(revision_id=digest("globex/forged/1")))
        await asyncio.sleep(0.05)
    assert len(told) == 10, told
    assert lines
    text = "\n".join(map(repr, lines))
    for private in (PROMPT, "secret of", secret, wrong, "S" * 20, str(world.folder), "a.b.c"):
        assert private not in text
        assert private not in "\n".join(told)
    for foreign in ("globex", "hidden", "forged"):
        assert foreign not in "\n".join(told)
