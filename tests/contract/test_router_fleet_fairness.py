"""Three router processes over one Valkey, and an executor that is always busy: two tenants that want all of it get equal
work of the whole fleet, though one of them asks at fewer routers.

The bound is about work between two exchanges, so the executor's time is theirs: it does so much, and waits for the next
one. How fast the machine is does not matter then, nor whether it stands still for a while."""

import asyncio
import contextlib
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from loraport import AsyncClient, UnavailableError
from loraport.executor.v1 import executor_service_pb2 as epb
from loraport.router.v1 import router_admin_service_pb2 as apb
from loraport.router.v1 import router_admin_service_pb2_grpc as admin_stubs
from loraport.types.v1 import types_pb2
from services.executor.many import Events
from services.router.exchange import decode
from services.router.prices import Prices
from services.router.shared_work import slack_ms
from services.shared.board import Board
from tests.contract.router_world import ADMIN_CA, SERVICE_CA, FakeExecutor, World, api_key, said
from tests.contract.test_router_exchange import start as start_valkey
from tests.support.ports import free_port

# Who waits at which router. At the last one `acme` is alone, so it gets all that this router lets go.
BACKLOGS = {"r0": ("acme", "globex"), "r1": ("acme", "globex"), "r2": ("acme",)}
CALLERS, PROMPT, TOKENS, RUNNING = 4, 40, 10, 2
# So much work for the whole fleet: without news of each other the routers would let `acme` have a third of it more.
WORK_MS = 4000.0
# Work between two rounds of news. A router may miss what was done since another one wrote its last word, and since it
# read that word itself: each of both ends within two rounds.
ROUND_MS = slack_ms(executors=1) / 4


class Rounds:
    """Counts work, and lets no more of it be done before every router has told the others what it charged."""

    def __init__(self, board: Board) -> None:
        self._board = board
        self._told: dict[str, float] = {}
        self._done_ms = 0.0

    async def take(self, work_ms: float) -> None:
        """Returns when so much may be done."""
        while self._done_ms + work_ms > ROUND_MS:
            words = {name: word for name, data in (await self._board.get_work()).items() if (word := decode(data))}
            told = {name: time for name, (time, _) in words.items()}
            if len(told) == len(BACKLOGS) and all(time != self._told.get(name) for name, time in told.items()):
                self._told, self._done_ms = told, 0.0
            else:
                await asyncio.sleep(0.02)
        self._done_ms += work_ms


@dataclass
class OneAtATime(FakeExecutor):
    """Does one request at a time. It holds `device` meanwhile: who holds it stops all work."""

    rounds: Rounds | None = None
    device: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def _answer(self, request: epb.ExecuteRequest, *_: object) -> AsyncIterator[Events]:
        assert self.rounds is not None
        prices = Prices()
        work_ms = prices.prefill_ms(PROMPT) + prices.decode_ms(tokens=TOKENS, context=0, adapter_mib=0, sharing=1)
        async with self.device:
            await self.rounds.take(work_ms)
        tokens = epb.ExecuteResponse.Tokens(token_ids=[50] * TOKENS, kernel_path="fake")
        yield said(tokens=tokens)
        usage = types_pb2.Usage(prompt_token_count=PROMPT, completion_token_count=TOKENS)
        reason = types_pb2.FINISH_REASON_LENGTH
        yield said(finished=epb.ExecuteResponse.Finished(finish_reason=reason, usage=usage))


class Router:
    """A router process, its callers, and its books as the admin plane shows them."""

    def __init__(self, world: World, name: str, valkey: Path) -> None:
        self._world, self._user, admin = world, free_port(), free_port()
        world.overrides = {
            "user_address": f"127.0.0.1:{self._user}", "admin_address": f"127.0.0.1:{admin}",
            "valkey_url": f"unix://{valkey}", "max_running": RUNNING, "executor_window": RUNNING, "reserved_places": 0,
        }  # fmt: skip
        path = world.folder / f"{name}.json"
        path.write_text(json.dumps(world.config()))
        command = [sys.executable, "-m", "services.router", "--config", str(path)]
        self._log = path.with_suffix(".log")
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        certificate, key = world.leaf("admin/ops")
        credentials = grpc.ssl_channel_credentials(SERVICE_CA[0], key, certificate)
        self.channel = grpc.aio.secure_channel(f"127.0.0.1:{admin}", credentials)
        self._stub = admin_stubs.RouterAdminServiceStub(self.channel)
        self.answered = 0

    async def lives(self) -> None:
        """Raises AssertionError when the process ends."""
        while self.process.poll() is None:
            await asyncio.sleep(0.2)
        raise AssertionError(f"a router ended with {self.process.returncode}: {self._log.read_text()[-2000:]}")

    async def ask(self, tenant: str) -> None:
        """Asks for the base model again and again."""
        ids = self._world.ids("the quick brown fox jumps over the lazy dog" * 9)[:PROMPT]
        async with AsyncClient(
            f"127.0.0.1:{self._user}", api_key=api_key(tenant), ca_certificate=self._world.folder / "ca.pem",
            timeout=600, tenant=tenant,
        ) as client:  # fmt: skip
            while True:
                try:
                    await client.generate(prompt_token_ids=ids, base_model="tiny", max_tokens=TOKENS)
                    self.answered += 1
                except UnavailableError:
                    await asyncio.sleep(0.1)

    async def books(self) -> apb.GetFairnessResponse:
        return await self._stub.GetFairness(apb.GetFairnessRequest(), timeout=600, wait_for_ready=True)


def own_work(books: list[apb.GetFairnessResponse]) -> dict[str, float]:
    """What the routers charged each tenant, each for what it let go itself."""
    total = {"tenants/acme": 0.0, "tenants/globex": 0.0}
    for one in books:
        for tenant in one.tenants:
            total[tenant.tenant] += tenant.prefill_ms + tenant.decode_ms + tenant.load_ms + tenant.hold_ms
    return total


async def measure(routers: list[Router], device: asyncio.Lock) -> list[apb.GetFairnessResponse]:
    """Returns the routers' books of one moment, once everybody was answered and `WORK_MS` were charged."""
    async with asyncio.timeout(600):
        while True:
            async with device:
                books = await asyncio.gather(*(router.books() for router in routers))
            if all(router.answered for router in routers) and sum(own_work(books).values()) >= WORK_MS:
                return books
            await asyncio.sleep(0.2)


async def load(world: World, valkey: Path, device: asyncio.Lock) -> list[apb.GetFairnessResponse]:
    """Has the routers work, and returns their books. A router or a caller that ends ends all."""
    routers = {name: Router(world, name, valkey) for name in BACKLOGS}
    try:
        async with asyncio.TaskGroup() as group:
            going = [group.create_task(router.lives()) for router in routers.values()]
            await asyncio.gather(*(router.books() for router in routers.values()))
            going += [
                group.create_task(routers[name].ask(tenant))
                for name, tenants in BACKLOGS.items()
                for tenant in tenants
                for _ in range(CALLERS)
            ]
            books = await measure(list(routers.values()), device)
            for task in going:
                task.cancel()
        return books
    finally:
        for router in routers.values():
            await router.channel.close()
            router.process.kill()
            router.process.wait()


async def test_three_routers_keep_the_bound_within_the_slack_of_their_exchange(tmp_path: Path) -> None:
    world, valkey = World(tmp_path), tmp_path / "v.sock"
    (tmp_path / "admin-ca.pem").write_bytes(ADMIN_CA[0])
    board = start_valkey(valkey)
    try:
        world.registry.items += [world.registry.base()]
        for tenant in ("acme", "globex"):
            world.registry.items += world.registry.tenant(tenant)
        await world.start_registry()
        executor = world.executors["e0"] = OneAtATime("e0", world.registry.base_id, {
            world.keys["router"].key_id: world.keys["router"].public_pem
        }, rounds=Rounds(Board(f"unix://{valkey}")))  # fmt: skip
        await world.start_executor("e0")
        books = await load(world, valkey, executor.device)
    finally:
        board.kill()
        board.wait()
        with contextlib.suppress(Exception):
            await world.stop()
    work, slack = own_work(books), slack_ms(executors=1)
    both = books[:2]  # the routers where both tenants waited
    bound = max(one.bound_ms for one in both)
    assert bound < slack  # else nothing would be shown
    assert abs(work["tenants/acme"] - work["tenants/globex"]) <= bound + slack, (work, bound)
    for one in both:
        acme, globex = (tenant.counter_ms for tenant in one.tenants)
        assert abs(acme - globex) <= one.bound_ms + slack, one
