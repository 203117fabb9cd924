"""How an alias is set: at once where nobody is served by it; else by a rollout that judges nothing but waits for the
quorum by digest, for as long as the caller does. Its settings say how long that is, so that any registry ends it then.
"""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from sqlalchemy import Connection

from loraport.registry.v1 import adapter_service_pb2 as pb
from services.registry import catalog, moving
from services.registry.desk import Desk, Note, uuid_of
from services.registry.lifecycle import State as Standing
from services.registry.ports import Randomness
from services.registry.records import RevisionRow, RolloutRow
from services.registry.rollout import machine
from services.registry.rollout.control import printable
from services.registry.rollout.settings import DAY_S, WHOLE, Settings
from services.registry.rollout.states import State
from services.registry.servicers import convert
from services.registry.starting import new_rollout, new_salt
from services.registry.store import adapters, revisions, rollouts
from services.registry.store.database import Transaction
from services.shared.errors import LoraportError
from services.shared.names import parse_alias
from services.shared.rpc.guard import current_call

# Everybody at once, nothing judged, nothing retained: what is left of a rollout is the quorum.
HASTE = Settings(steps=(WHOLE,), min_samples=0, min_step_s=0.0, retention_s=0.0)
POLL_S = 0.1
# The answer must still arrive.
MARGIN_S = 1.0


class Pointing:
    """See the module's text."""

    def __init__(self, desk: Desk, randomness: Randomness) -> None:
        self._desk = desk
        self._randomness = randomness

    async def set_alias(self, request: pb.SetAliasRequest, *, remaining_s: Callable[[], float]) -> pb.Alias:
        """Returns the alias as it is then.

        Raises:
            LoraportError: as SetAlias says.
        """
        started: RolloutRow | None = None
        actor = current_call().principal.label

        def work(transaction: Transaction, note: Note) -> pb.Alias:
            nonlocal started
            if request.request_id:
                uuid_of(request.request_id)
            name, alias = parse_alias(request.name)
            adapter = adapters.require_adapter(transaction.connection, name)
            target = revisions.find_current(transaction.connection, request.revision_id)
            existing = adapters.find_alias(transaction.connection, adapter.adapter_id, alias)
            changed = catalog.set_alias(
                adapter, target, existing, etag=request.etag, now=request.now, reason=request.reason
            )
            if changed and target is not None:
                moving.require_free(transaction, adapter.adapter_id, alias)
                live = existing is not None and not existing.removed
                if live and not request.force and _serves(transaction.connection, existing and existing.revision_id):
                    started = self._begin(transaction, request, target, actor, remaining_s())
                else:
                    existing = adapters.put_alias(transaction, adapter, alias, target, self._desk.now_us())
            assert existing is not None
            return convert.alias(existing)

        answer = await self._desk.change(
            request,
            pb.Alias,
            work,
            resource=request.name,
            reason=request.reason,
            # Whether it moves is not known yet, so there is no first result to be returned again.
            request_id="" if request.now and not request.force else request.request_id,
        )
        return answer if started is None else await self._wait(started, request, remaining_s)

    def _begin(
        self, transaction: Transaction, request: pb.SetAliasRequest, target: RevisionRow, actor: str, remaining_s: float
    ) -> RolloutRow:
        name, alias = parse_alias(request.name)
        now_us = self._desk.now_us()
        waits_s = min(max(remaining_s - MARGIN_S, 0.0), DAY_S)
        row = new_rollout(
            transaction.connection,
            name,
            alias=alias,
            to=target.revision_id,
            settings=replace(HASTE, until_us=now_us + int(waits_s * 1_000_000)),
            salt=new_salt(self._randomness),
            now_us=now_us,
        )
        why = printable(request.reason)
        sentence = f"{alias} is to move at once from v{row.from_version} to v{row.to_version}, unjudged: {why}"
        return moving.begin(transaction, row, actor=actor, sentence=sentence)

    async def _wait(self, row: RolloutRow, request: pb.SetAliasRequest, remaining_s: Callable[[], float]) -> pb.Alias:
        """Waits for the rollout, and calls it off when the caller's time is over, or the caller has gone."""
        try:
            while not _over(row) and remaining_s() > MARGIN_S:
                await asyncio.sleep(POLL_S)
                row = await self._desk.read(partial(_again, started=row))
            if not _over(row):
                row = await self._desk.take(partial(self._call_off, started=row))
        except asyncio.CancelledError:
            await asyncio.shield(self._desk.take(partial(self._call_off, started=row)))
            raise
        return await self._desk.read(lambda view: _result(view, row, request.name))

    def _call_off(self, transaction: Transaction, *, started: RolloutRow) -> RolloutRow:
        row = _again(transaction.connection, started=started)
        if _over(row):
            return row
        now_us = self._desk.now_us()
        move = machine.abort(row.position, machine.NOBODY_WAITS, now_us=now_us)
        return moving.write(transaction, row, move, actor=moving.REGISTRY, now_us=now_us)


def _serves(connection: Connection, revision_id: str | None) -> bool:
    row = revisions.find_current(connection, revision_id) if revision_id else None
    return row is not None and row.state is Standing.ACTIVE


def _again(connection: Connection, *, started: RolloutRow) -> RolloutRow:
    return rollouts.require(connection, started.adapter_name, started.number)


def _over(row: RolloutRow) -> bool:
    """Whether the alias has moved, or will not."""
    return row.position.ended or row.position.state is State.RETAINING


def _result(view: Connection, row: RolloutRow, name: str) -> pb.Alias:
    if row.position.state not in (State.RETAINING, State.SUCCEEDED):
        said = machine.quorum_sentence(row.settings, rollouts.evidence(view, row))
        last = rollouts.story(view, row)[-1].sentence
        raise LoraportError(
            "QUORUM_MISSING",
            f"{said}; {row.name} was {last}; to move without, force it",
            metadata={"rollout": row.name},
        )
    adapter = adapters.require_adapter(view, row.adapter_name)
    alias = adapters.find_alias(view, adapter.adapter_id, row.alias)
    if alias is None:
        raise LoraportError("ALIAS_NOT_FOUND", f"there is no alias {name}")
    return convert.alias(alias)
