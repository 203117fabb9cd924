"""An executor service over a base that transformers computes, in merged mode, and over a base that nothing computes."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import pytest
from transformers import GPT2Config, GPT2LMHeadModel

from loraport.executor.v1 import executor_service_pb2 as pb
from services.shared.config import ConfigError
from tests.contract.executor_rig import Peers, running
from tests.loader_rig import reason, until
from tests.support.families import linears, make_family
from tests.support.tiny import greedy, make_adapter, prompt_of, with_adapter

P = prompt_of(33, vocab=160)


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory):
    root = tmp_path_factory.mktemp("gemma")
    base = make_family(root / "base", "gemma3")
    (root / "base" / "tokenizer.json").write_text("{}")
    names = linears(base)
    make_adapter(base, root / "plain", seed=1, r=4, lora_alpha=8, target_modules=names)
    make_adapter(base, root / "words", seed=2, r=2, lora_alpha=4, target_modules=["embed_tokens", "q_proj"])
    answers = {name: greedy(with_adapter(base, root / name), P, 12) for name in ("plain", "words")}
    return root, answers | {None: greedy(base, P, 12)}


async def test_a_base_that_transformers_computes_serves_adapters_and_can_be_merged(tmp_path: Path, gemma) -> None:
    root, answers = gemma
    peers = Peers()
    ids = {name: peers.publish(root / "base", root / name).revision_id for name in ("plain", "words")}
    async with running(tmp_path, root / "base", peers, model={"dedicated": True}) as rig:
        got = await asyncio.gather(rig.answer(P), rig.answer(P, ids["plain"]), rig.answer(P, ids["words"]))
        assert [a.tokens[0] for a in got] == [answers[None], answers["plain"], answers["words"]]
        state = await rig.state()
        assert (state.decoder, state.mode, state.merged_revision_id) == ("transformers", "grouped", "")
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await rig.stub.SetMode(pb.SetModeRequest(revision_id=ids["plain"]), timeout=60)
        assert refusal.value.code() is grpc.StatusCode.PERMISSION_DENIED
        done = await rig.admin.SetMode(pb.SetModeRequest(revision_id=ids["plain"]), timeout=60)
        assert (done.mode, done.revision_id) == ("merged", ids["plain"])
        merged = await rig.answer(P, ids["plain"])
        assert merged.tokens[0] == answers["plain"]
        assert merged.finished[0].kernel_path == "merged"
        for other in ("", ids["words"]):
            assert await reason(rig.answer(P, other)) == "MERGED_MODE"
        done = await rig.admin.SetMode(pb.SetModeRequest(), timeout=60)
        assert (done.mode, done.revision_id) == ("grouped", "")
        assert (await rig.answer(P)).tokens[0] == answers[None]


async def test_who_leaves_while_the_mode_changes_takes_it_back(tmp_path: Path, gemma) -> None:
    root, answers = gemma
    peers = Peers()
    ids = {name: peers.publish(root / "base", root / name).revision_id for name in ("plain", "words")}
    async with running(tmp_path, root / "base", peers, model={"dedicated": True}) as rig:
        await rig.answer(P, ids["plain"])
        held, _ = await rig.service._berths.hold(ids["words"])
        change = rig.admin.SetMode(pb.SetModeRequest(revision_id=ids["plain"]), timeout=20)
        waiting = asyncio.ensure_future(reason(change))
        mode = rig.service._device.engine.state
        await until(lambda: mode().mode == "merging")
        change.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await until(lambda: mode().mode == "grouped")
        held.release()
        assert (await rig.answer(P)).tokens[0] == answers[None]


async def test_a_shared_executor_is_not_merged(tmp_path: Path, gemma) -> None:
    root, _ = gemma
    peers = Peers()
    plain = peers.publish(root / "base", root / "plain").revision_id
    async with running(tmp_path, root / "base", peers) as rig:
        ask = rig.admin.SetMode(pb.SetModeRequest(revision_id=plain), timeout=60)
        assert await reason(ask) == "SHARED_EXECUTOR"
        assert (await rig.admin.SetMode(pb.SetModeRequest(), timeout=60)).mode == "grouped"


async def test_a_base_that_nothing_computes_is_refused_at_start_in_one_line(tmp_path: Path) -> None:
    config = GPT2Config(vocab_size=64, n_embd=16, n_layer=1, n_head=2, n_positions=32)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "base")
    (tmp_path / "base" / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"the base model cannot be served: .*Conv1D") as refusal:
        async with running(tmp_path, tmp_path / "base", Peers()):
            pass
    assert "\n" not in str(refusal.value)
