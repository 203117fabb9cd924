"""What an executor believes of a revision's record, when what it believes by changes meanwhile."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from services.executor import registry_client
from services.executor.registry_client import RegistryClient
from services.shared.catalog import RevisionItem
from services.shared.errors import LoraportError
from services.shared.statements import StatementError

ITEM = RevisionItem(
    revision_id="r", tenant="acme", adapter="pirate", version=1, state="ACTIVE", base_model="b", weights_digest="d",
    size_bytes=1, max_rank=1, record_envelope=b"record", shared_tenants=frozenset(), record_leaf=0,
)  # fmt: skip


class Proofs:
    """The log is asked, and answers when it is told to."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.answer = asyncio.Event()

    async def require_logged(self, item: RevisionItem) -> None:
        self.asked.set()
        await self.answer.wait()


async def test_a_record_that_is_being_proven_when_the_root_changes_is_checked_by_the_new_root(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trusted = {"old key": b""}

    def verified(item: RevisionItem, keys: Any) -> object:
        if "old key" not in keys:
            raise StatementError("nobody that counts has signed it")
        return object()

    monkeypatch.setattr(registry_client, "verified_record", verified)
    keeper: Any = SimpleNamespace(offer=None, require_alive=lambda: None)
    async with grpc.aio.insecure_channel("127.0.0.1:1") as channel:
        client = RegistryClient(
            channel, keeper, trusted=trusted, on_gone=lambda items: None, on_root=lambda version, envelope: None
        )
        proofs = Proofs()
        monkeypatch.setattr(client, "_proofs", proofs)
        monkeypatch.setattr(client, "_catalog", SimpleNamespace(view=SimpleNamespace(revisions={"r": ITEM})))
        waiting = asyncio.create_task(client.standing("r"))
        await proofs.asked.wait()
        trusted.clear()
        client.forget()
        proofs.answer.set()
        with pytest.raises(LoraportError) as caught:
            await waiting
        assert caught.value.reason == "REVISION_NOT_ACTIVE"
        assert not client._checked
        trusted["old key"] = b""
        assert await client.standing("r") is await client.standing("r"), "what is checked is kept"
