"""What a rollout asks of a running executor: load and keep its revisions, compute a prompt in a second way."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch

from loraport.executor.v1 import executor_service_pb2 as pb
from loraport.registry.v1 import catalog_service_pb2 as catalog
from loraport.registry.v1 import rollout_service_pb2 as rollouts
from tests.contract.executor_rig import Peers, Rig, next_id, running
from tests.loader_rig import reason, until
from tests.support.tiny import ALL, make_adapter, make_base, prompt_of, with_adapter

TOKENS = prompt_of(60)
PROMPT, REST = TOKENS[:20], TOKENS[20:]
NAMES = ("old", "new", "c", "d", "e", "f")
RANK = 32
PAGE_ROWS = 8
# Of the tiny base: q|k|v, o, gate|up, down in both layers, the head once; the pool holds four of these adapters.
ROW_BYTES = 4 * (2 * ((3 * 64 + 128) + (64 + 64) + (2 * 64 + 256) + (128 + 64)) + (64 + 256))


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory):
    root = tmp_path_factory.mktemp("rollouts")
    base = make_base(root / "base")
    (root / "base" / "tokenizer.json").write_text("{}")
    for seed, name in enumerate(NAMES):
        make_adapter(base, root / name, seed=seed, r=RANK, lora_alpha=16, target_modules=ALL)
    model = with_adapter(base, root / "new")
    with torch.no_grad():
        rows = model(input_ids=torch.tensor([TOKENS]), use_cache=False).logits[0][len(PROMPT) - 1 : -1].log_softmax(-1)
    wanted = rows.gather(1, torch.tensor(REST)[:, None])[:, 0].tolist()
    return root, wanted, 4 * RANK * ROW_BYTES


@pytest.fixture
async def rig(tmp_path: Path, family) -> AsyncIterator[Rig]:
    root, _, pool_bytes = family
    peers = Peers()
    for name in NAMES:
        peers.publish(root / "base", root / name, tenant="acme")
    # By least recent use: what a load cost is measured, and by worth a first, slow one may outlive four later ones.
    settings = {"pool_bytes": pool_bytes, "page_rows": PAGE_ROWS, "eviction": "lru"}
    async with running(tmp_path, root / "base", peers, **settings) as rig:
        state = rig.service._device.engine.state()
        assert 4 <= state.page_count * PAGE_ROWS // RANK < 5
        yield rig


def ids(rig: Rig) -> dict[str, str]:
    return {p.name: p.revision_id for p in rig.peers.published.values()}


async def start(rig: Rig, old: str = "old", new: str = "new", *, ended: bool = False, name: str = "1") -> None:
    """Shows the executor a rollout."""
    known = ids(rig)
    rig.peers.rollouts.append(
        catalog.CatalogRollout(
            name=f"tenants/acme/adapters/{new}/rollouts/r{name}",
            tenant="acme",
            adapter=new,
            alias="prod",
            salt=bytes(16),
            from_revision_id=known[old],
            to_revision_id=known[new],
            base_model="tiny",
            state=rollouts.Rollout.STATE_PRELOADING,
            ended=ended,
        )
    )
    await rig.peers.tell()


def preload(rig: Rig, revision: str, **options: Any) -> Any:
    ticket = options.pop("ticket", None) or rig.ticket(revision)
    return rig.stub.Preload(pb.PreloadRequest(ticket=ticket, revision_id=revision), timeout=60)


def probe(rig: Rig, revision: str, **changes: Any) -> Any:
    fields = {"prompt_token_ids": PROMPT, "continuation_token_ids": REST, "reference": True, **changes}
    return rig.stub.Probe(
        pb.ProbeRequest(ticket=rig.ticket(revision), revision_id=revision, request_id=next_id(), **fields), timeout=60
    )


async def test_what_a_rollout_needs_is_loaded_and_stays_while_it_runs(rig: Rig) -> None:
    known = ids(rig)
    unheard = await preload(rig, known["new"])
    assert (unheard.revision_id, unheard.pinned) == (known["new"], False)
    assert unheard.load_ms > 0
    await start(rig)
    await until(lambda: rig.service._registry.needed())
    again = await preload(rig, known["new"])
    assert (again.load_ms, again.pinned) == (0, True)
    assert (await preload(rig, known["old"])).pinned
    for name in ("c", "d", "e", "f", "c", "d"):
        await rig.answer(PROMPT, known[name])
    resident = {r.revision_id for r in (await rig.state()).revisions}
    assert {known["old"], known["new"]} < resident
    assert rig.peers.served[known["new"]] == 1
    await start(rig, ended=True)
    await until(lambda: not rig.service._registry.needed())
    for name in ("c", "d", "e", "f", "c", "d"):
        await rig.answer(PROMPT, known[name])
    resident = {r.revision_id for r in (await rig.state()).revisions}
    assert not {known["old"], known["new"]} & resident


async def test_rollouts_keep_at_most_half_of_the_pool(rig: Rig) -> None:
    known = ids(rig)
    await start(rig)
    await start(rig, "c", "d", name="2")
    await until(lambda: len(rig.service._registry.needed()) == 4)
    results = [await reason(preload(rig, known[name])) for name in ("new", "old", "c", "d")]
    assert sorted(results) == ["", "", "PIN_BUDGET", "PIN_BUDGET"]
    # What would not be kept was not even asked for, and asking again pushes nothing out.
    before = (await rig.state()).load_count
    assert [await reason(preload(rig, known[name])) for name in ("c", "d")] == ["PIN_BUDGET"] * 2
    assert (await rig.state()).load_count == before == 2
    assert set(rig.peers.served) == {known["new"], known["old"]}


async def test_the_ticket_must_be_for_the_revision(rig: Rig) -> None:
    known = ids(rig)
    assert await reason(preload(rig, known["new"], ticket=rig.ticket(known["old"]))) == "INVALID_TICKET"
    assert (
        await reason(preload(rig, known["new"], ticket=rig.ticket(known["new"], tenant="globex")))
        == "REVISION_NOT_ACTIVE"
    )
    assert await reason(preload(rig, "sha256:short")) == "INVALID_REQUEST"
    assert rig.peers.served == {}


async def test_a_probe_computes_the_same_prompt_in_two_ways(rig: Rig, family) -> None:
    _, wanted, _ = family
    new = ids(rig)["new"]
    for _ in range(2):
        answer = await probe(rig, new)
        assert answer.usage.cached_token_count == 0, "what is compared is computed, not found"
        assert len(answer.reference_logprobs) == len(REST)
        for position, second, truth in zip(answer.logprobs, answer.reference_logprobs, wanted, strict=True):
            assert abs(position.chosen.logprob - truth) < 2e-4
            assert abs(second - truth) < 2e-4
    # Loaded once, and read anew for each reference.
    assert rig.peers.served[new] == 3
    await until(lambda: rig.peers.released.count(new) == 3)
    base = await probe(rig, "")
    assert len(base.reference_logprobs) == len(REST)
    assert not (await probe(rig, new, reference=False)).reference_logprobs


async def test_a_wrong_scale_on_the_device_shows(rig: Rig) -> None:
    new = ids(rig)["new"]
    device = rig.service._device
    staged = device.stage

    def mistaken(adapter: Any) -> Any:
        changed = {p: dataclasses.replace(m, scaling=m.scaling * 1.5) for p, m in adapter.modules.items()}
        return staged(dataclasses.replace(adapter, modules=changed))

    object.__setattr__(device, "stage", mistaken)
    answer = await probe(rig, new)
    differences = [abs(p.chosen.logprob - r) for p, r in zip(answer.logprobs, answer.reference_logprobs, strict=True)]
    assert sum(differences) / len(differences) > 0.02


async def test_bytes_that_cannot_be_read_again_are_a_reason(rig: Rig) -> None:
    new = ids(rig)["new"]
    await preload(rig, new)
    rig.peers.refuse = "STORE_UNAVAILABLE"
    assert await reason(probe(rig, new)) == "STORE_UNAVAILABLE"
    rig.peers.refuse = ""
    rig.peers.published[new] = dataclasses.replace(rig.peers.published[new], weights=b"x" * 10)
    assert await reason(probe(rig, new)) == "DIGEST_MISMATCH"
    assert await reason(probe(rig, new, continuation_token_ids=[5] * 2100)) == "PROMPT_TOO_LONG"
