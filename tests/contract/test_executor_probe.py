"""`Probe` on a running executor: the ticket's rules, a load when it is needed, PEFT's log-probabilities, clean ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch

from loraport.executor.v1 import executor_service_pb2 as pb
from services.shared.prefix_hash import tenant_salt
from tests.contract.executor_rig import Peers, Rig, next_id, running
from tests.loader_rig import reason, until
from tests.support.tiny import ALL, make_adapter, make_base, prompt_of, with_adapter

TOKENS = prompt_of(60)
PROMPT, REST = TOKENS[:33], TOKENS[33:]


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory):
    root = tmp_path_factory.mktemp("family")
    base = make_base(root / "base")
    (root / "base" / "tokenizer.json").write_text("{}")
    make_adapter(base, root / "pirate", seed=3, r=8, lora_alpha=16, target_modules=ALL)
    models = {"": base, "pirate": with_adapter(base, root / "pirate")}
    with torch.no_grad():
        logits = {name: m(input_ids=torch.tensor([TOKENS]), use_cache=False).logits[0] for name, m in models.items()}
    return root, {name: value[32:-1].log_softmax(-1) for name, value in logits.items()}


@pytest.fixture
async def rig(tmp_path: Path, family) -> AsyncIterator[Rig]:
    root, _ = family
    peers = Peers()
    peers.publish(root / "base", root / "pirate", tenant="acme")
    async with running(tmp_path, root / "base", peers) as rig:
        yield rig


def probe(rig: Rig, revision: str = "", *, ticket: bytes | None = None, timeout: float = 60, **changes: Any) -> Any:
    fields = {"prompt_token_ids": PROMPT, "continuation_token_ids": REST, "top_logprobs": 2, **changes}
    ticket = rig.ticket(revision) if ticket is None else ticket
    return rig.stub.Probe(
        pb.ProbeRequest(ticket=ticket, revision_id=revision, request_id=next_id(), **fields), timeout=timeout
    )


async def test_the_base_and_a_revision_that_is_not_there_yet(rig: Rig, family) -> None:
    pirate = next(iter(rig.peers.published))
    for name, revision in (("", ""), ("pirate", pirate)):
        answer, wanted = await probe(rig, revision), family[1][name]
        assert (answer.revision_id, answer.base_id) == (revision, rig.peers.base)
        assert (answer.load_ms > 0) == bool(revision)
        assert answer.kernel_path.startswith("cpu-" if revision else "base")
        assert (answer.usage.prompt_token_count, answer.usage.completion_token_count) == (33, 0)
        assert [p.chosen.token_id for p in answer.logprobs] == list(REST)
        for at, position in enumerate(answer.logprobs):
            assert abs(position.chosen.logprob - float(wanted[at, REST[at]])) < 2e-4
            assert [entry.token_id for entry in position.top] == wanted[at].topk(2).indices.tolist()
    again = await probe(rig, pirate)
    assert again.load_ms == 0
    assert again.usage.cached_token_count == 32
    assert rig.peers.served == {pirate: 1}


async def test_what_is_compared_with_the_reference_is_the_tenants_request_and_finds_no_prefix(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, asked = rig.service._device.engine, []
    submit = engine.submit
    monkeypatch.setattr(engine, "submit", lambda spec, *rest: asked.append(spec) or submit(spec, *rest))
    for reference in (False, True, True):
        answer = await probe(rig, reference=reference)
        assert answer.usage.cached_token_count == 0
    assert {spec.tenant for spec in asked} == {tenant_salt("acme")}
    assert len({spec.salt for spec in asked}) == 3


async def test_a_ticket_opens_only_its_own_revision(rig: Rig) -> None:
    pirate = next(iter(rig.peers.published))
    assert await reason(probe(rig, pirate, ticket=rig.ticket(""))) == "INVALID_TICKET"
    assert await reason(probe(rig, pirate, ticket=rig.ticket(pirate, tenant="globex"))) == "REVISION_NOT_ACTIVE"
    assert await reason(probe(rig, "", ticket=b"")) == "INVALID_TICKET"
    assert rig.peers.served == {}


async def test_bad_input_is_refused_before_anything_is_loaded(rig: Rig) -> None:
    pirate = next(iter(rig.peers.published))
    for changes in (
        {"prompt_token_ids": ()},
        {"continuation_token_ids": ()},
        {"continuation_token_ids": (999,)},
        {"top_logprobs": 21},
        {"top_logprobs": -1},
    ):
        assert await reason(probe(rig, pirate, **changes)) == "INVALID_REQUEST", changes
    assert await reason(probe(rig, pirate, continuation_token_ids=prompt_of(250))) == "PROMPT_TOO_LONG"
    assert rig.peers.served == {}


async def test_a_caller_that_leaves_or_is_late_leaves_nothing_behind(rig: Rig) -> None:
    pirate = next(iter(rig.peers.published))
    rig.peers.hold.clear()
    call = probe(rig, pirate)
    waiting = asyncio.create_task(reason(call))
    await until(lambda: rig.peers.served)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert await reason(probe(rig, pirate, timeout=0.2)) == "DEADLINE_EXCEEDED"
    rig.peers.hold.set()
    assert len((await probe(rig, pirate)).logprobs) == len(REST)
    state = rig.service._device.engine.state
    await until(lambda: not state().open_requests and not any(r.leases for r in state().residents))
