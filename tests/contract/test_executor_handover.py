"""An executor that is handed memory by a loader that may be wrong: right bytes serve, others never reach a page."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from services.executor import loader_client
from services.loader.handover import HandoverSocket, Tokens
from services.loader.sealed import Blob
from tests.contract.executor_rig import Peers, Rig, running
from tests.loader_rig import reason, until
from tests.support.tiny import ALL, greedy, make_adapter, make_base, prompt_of, with_adapter

P = prompt_of(33)


@dataclass
class Handing(Peers):
    """A loader that hands over what the test wants: `change` makes the memory out of the right bytes."""

    path: str = ""
    change: Any = None
    seal: bool = True
    tokens: Tokens = field(default_factory=Tokens)
    blobs: list[Blob] = field(default_factory=list)
    reads: int = 0

    def redeem(self, token: bytes, key: bytes) -> int | None:
        if self.tokens.redeem(token, key) is None:
            return None
        return os.dup(self.blobs[-1]._fd)

    async def EnsureHost(self, request: Any, context: Any) -> AsyncIterator[Any]:
        weights = self.published[request.revision_id].weights
        blob = Blob("test")
        blob.write(weights if self.change is None else self.change(weights))
        if self.seal:
            blob.seal()
        self.blobs.append(blob)
        async for response in super().EnsureHost(request, context):
            if response.WhichOneof("event") == "lease":
                response.lease.handover_token = self.tokens.issue(request.revision_id, "executor")
                response.lease.handover_socket = self.path
            yield response

    async def ReadBlob(self, request: Any, context: Any) -> AsyncIterator[Any]:
        self.reads += 1
        async for piece in super().ReadBlob(request, context):
            yield piece


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory):
    root = tmp_path_factory.mktemp("family")
    base = make_base(root / "base")
    (root / "base" / "tokenizer.json").write_text("{}")
    make_adapter(base, root / "pirate", seed=0, r=8, lora_alpha=16, target_modules=ALL)
    return root, greedy(with_adapter(base, root / "pirate"), P, 12)


@pytest.fixture
async def rig(tmp_path: Path, family, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Rig]:
    monkeypatch.setattr(loader_client, "take_over", partial(loader_client.take_over, patience_s=60.0))
    root, _ = family
    peers = Handing(path=str(tmp_path / "s"))
    peers.publish(root / "base", root / "pirate")
    served = HandoverSocket(peers.path, peers.redeem, patience_s=60.0)
    served.start()
    async with running(tmp_path, root / "base", peers) as rig:
        yield rig
        assert not rig.service._device.engine.state().failed
    await served.stop()
    for blob in peers.blobs:
        blob.close()


def only(rig: Rig) -> str:
    [revision_id] = rig.peers.published
    return revision_id


async def test_tokens_come_from_handed_over_memory(rig: Rig, family) -> None:
    _, expected = family
    answer = await rig.answer(P, only(rig))
    assert answer.tokens[0] == expected
    assert rig.peers.reads == 0
    await until(lambda: rig.peers.released == [only(rig)])


async def test_other_bytes_of_the_same_size_never_serve(rig: Rig) -> None:
    rig.peers.change = lambda data: data[:-1] + bytes([data[-1] ^ 1])
    assert await reason(rig.call(P, only(rig))) == "DIGEST_MISMATCH"
    assert rig.service._device.engine.state().residents == ()
    await until(lambda: rig.peers.released == [only(rig)])


@pytest.mark.parametrize("fault", ["unsealed", "longer", "shorter"])
async def test_what_is_not_sealed_or_not_of_the_size_is_read_instead(rig: Rig, family, fault: str) -> None:
    _, expected = family
    rig.peers.seal = fault != "unsealed"
    rig.peers.change = {"longer": lambda data: data + b"x", "shorter": lambda data: data[:-1]}.get(fault)
    answer = await rig.answer(P, only(rig))
    assert answer.tokens[0] == expected
    assert rig.peers.reads == 1
    await until(lambda: rig.peers.released == [only(rig)])


async def test_a_spent_token_means_reading(rig: Rig, family) -> None:
    _, expected = family
    issue = rig.peers.tokens.issue

    def spent(lease_id: str, holder: str) -> bytes:
        token = issue(lease_id, holder)
        rig.peers.tokens.drop(lease_id)
        return token

    rig.peers.tokens.issue = spent  # type: ignore[method-assign]
    assert (await rig.answer(P, only(rig))).tokens[0] == expected
    assert rig.peers.reads == 1
