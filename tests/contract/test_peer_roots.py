"""A new trust root reaches loader and executor: what a leaked key signed since is used no longer, whatever the registry
shows; what it signed before is, and a root that does not follow changes nothing."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from loraport.bundle.envelope import SigningKey
from loraport.loader.v1 import loader_service_pb2 as pb
from loraport.trust.edit import next_root
from loraport.trust.root import Role
from services.shared.statements import seal
from services.shared.trust import TrustStore
from tests.contract import executor_rig
from tests.loader_rig import Rig, reason
from tests.support.roots import sealed
from tests.support.tiny import prompt_of

P = prompt_of(21)


def leak(trust: TrustStore, since: int, *signers: SigningKey) -> bool:
    """Offers a root, as the catalog does, by which the registry's key counts up to a place in the log."""
    key = SigningKey.generate()
    old = trust.root
    new = next_root(
        old, now=old.issued, role=Role.REGISTRY, public_keys=[key.public_pem], since=since, compromised=True
    )
    return trust.offer(new.version, sealed(new, *signers))


def chain_of(service: object) -> TrustStore:
    return service._registry._on_root.__self__  # type: ignore[attr-defined, no-any-return]


async def test_the_loader_goes_by_the_place_of_the_record(rig: Rig) -> None:
    first, second = await rig.admit(seed=71), await rig.admit(seed=72)
    for bundle in (first, second):
        await rig.ensure(bundle)
    place = rig.registry.leaves[second.revision_id]
    assert rig.registry.leaves[first.revision_id] < place
    assert not leak(chain_of(rig.service), place, SigningKey.generate()), "forged"
    await rig.ensure(second)
    assert leak(chain_of(rig.service), place)
    call = rig.executor("executor-0").EnsureHost(pb.EnsureHostRequest(revision_id=second.revision_id), timeout=60)
    assert await reason(call) == "REVISION_NOT_ACTIVE"
    await rig.ensure(first)
    # An upload session of the leaked key is none.
    session = seal(rig.registry.register(seed=73).session, rig.registry.key)
    assert await reason(rig.send([pb.UploadRequest(session=session)])) == "INVALID_SESSION"


@pytest.fixture
async def executor(tmp_path: Path) -> AsyncIterator[executor_rig.Rig]:
    executor_rig.two_adapters(tmp_path)
    peers = executor_rig.Peers()
    peers.publish_two(tmp_path)
    async with executor_rig.running(tmp_path, tmp_path / "base", peers) as rig:
        yield rig


async def test_the_executor_goes_by_the_place_of_the_record(executor: executor_rig.Rig) -> None:
    one, two = executor.peers.published
    for revision in (one, two):
        await executor.answer(P, revision)
    place = executor.peers.published[two].leaf
    trust = executor.service._trust
    assert not leak(trust, place, SigningKey.generate()), "forged"
    await executor.answer(P, two)
    assert leak(trust, place)
    assert await reason(executor.call(P, two)) == "REVISION_NOT_ACTIVE"
    await executor.answer(P, one)
