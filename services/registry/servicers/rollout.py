"""RolloutService."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

from sqlalchemy import Connection

from loraport.registry.v1 import rollout_service_pb2 as pb
from loraport.registry.v1 import rollout_service_pb2_grpc as stubs
from services.registry import moving
from services.registry.catalog import check_etag
from services.registry.desk import Desk, Note, page_of
from services.registry.ports import Randomness
from services.registry.records import RolloutRow
from services.registry.rollout.control import Action, control
from services.registry.rollout.plan import plan
from services.registry.rollout.states import ENDED
from services.registry.servicers import rollout_messages as messages
from services.registry.starting import new_rollout, new_salt
from services.registry.store import adapters, rollouts
from services.registry.store.database import Transaction
from services.shared.errors import FaultList, LoraportError
from services.shared.names import parse_adapter, parse_rollout
from services.shared.paging import PageTokens, page_size
from services.shared.rpc.guard import current_call
from services.shared.split import SHADOW_STEP

ALL = "tenants/-"
DEFAULT_ALIAS = "prod"
WATCH_S = 1.0


class RolloutServicer(stubs.RolloutServiceServicer):
    """Starts and moves rollouts, and takes what routers report about them."""

    def __init__(self, desk: Desk, tokens: PageTokens, randomness: Randomness) -> None:
        self._desk = desk
        self._tokens = tokens
        self._randomness = randomness

    async def StartRollout(self, request: pb.StartRolloutRequest, context: Any) -> pb.Rollout:
        actor = current_call().principal.label

        def made(connection: Connection) -> tuple[RolloutRow, list[str]]:
            row = new_rollout(
                connection,
                parse_adapter(request.parent, "parent"),
                alias=request.rollout.alias or DEFAULT_ALIAS,
                to=request.rollout.to_revision_id,
                settings=messages.read_settings(request.rollout),
                salt=new_salt(self._randomness),
                now_us=self._desk.now_us(),
            )
            return row, plan(row.settings, old=f"v{row.from_version}", new=f"v{row.to_version}", alias=row.alias)

        def planned(view: Connection) -> pb.Rollout:
            row, steps = made(view)
            message = messages.rollout(row)
            message.plan.extend(steps)
            return message

        def work(transaction: Transaction, note: Note) -> pb.Rollout:
            row, steps = made(transaction.connection)
            note.resource = row.name
            sentence = f"{row.alias} is to move from v{row.from_version} to v{row.to_version}; first, {steps[0]}"
            note.reason = sentence
            row = moving.begin(transaction, row, actor=actor, sentence=sentence)
            return messages.rollout(row, connection=transaction.connection)

        if request.validate_only:  # a question, and no event
            return await self._desk.read(planned)
        return await self._desk.change(
            request, pb.Rollout, work, resource=request.parent, request_id=request.request_id
        )

    async def GetRollout(self, request: pb.GetRolloutRequest, context: Any) -> pb.Rollout:
        return await self._desk.read(lambda view: _shown(view, request.name))

    async def ListRollouts(self, request: pb.ListRolloutsRequest, context: Any) -> pb.ListRolloutsResponse:
        name = None if request.parent == ALL else parse_adapter(request.parent, "parent")
        limit = page_size(request.page_size)
        scope = ("rollouts", request.parent)
        after = self._tokens.open(request.page_token, scope=scope, kinds=(int,))

        def read(view: Connection) -> pb.ListRolloutsResponse:
            owner = None if name is None else adapters.require_adapter(view, name).adapter_id
            found = rollouts.list_rollouts(view, owner, after=after, limit=limit)
            rows, token = page_of(found, limit, lambda row: self._tokens.seal((row.rollout_row,), scope=scope))
            return pb.ListRolloutsResponse(rollouts=map(messages.rollout, rows), next_page_token=token)

        return await self._desk.read(read)

    async def WatchRollout(self, request: pb.WatchRolloutRequest, context: Any) -> AsyncIterator[pb.Rollout]:
        last = None
        while True:
            found = await self._desk.read(lambda view: _shown(view, request.name))
            if found != last:
                yield found
                last = found
            if found.state in _ENDED:
                return
            await asyncio.sleep(WATCH_S)

    async def ControlRollout(self, request: pb.ControlRolloutRequest, context: Any) -> pb.Rollout:
        actor = current_call().principal.label

        def work(transaction: Transaction, note: Note) -> pb.Rollout:
            row = rollouts.require(transaction.connection, *parse_rollout(request.name))
            check_etag(request.etag, row.etag, row.name)
            evidence = rollouts.evidence(transaction.connection, row)
            now_us = self._desk.now_us()
            move = control(
                row.position, row.settings, evidence, _action(request.action), reason=request.reason, now_us=now_us
            )
            note.idle = move is None
            if move is not None:
                row = moving.write(transaction, row, move, actor=actor, now_us=now_us)
                note.reason = move.sentence
            return messages.rollout(row, connection=transaction.connection)

        return await self._desk.change(
            request, pb.Rollout, work, resource=request.name, reason=request.reason, request_id=request.request_id
        )

    async def ReportReadiness(self, request: pb.ReportReadinessRequest, context: Any) -> pb.ReportReadinessResponse:
        faults = FaultList()
        messages.check_names(faults, [("router", request.router), ("executor", request.executor)])
        messages.check_names(faults, [("serving_executors", name) for name in request.serving_executors])
        messages.check_reason(faults, request.failure_reason)
        faults.require(len(request.serving_executors) <= 1000, "serving_executors", "must be at most 1000")
        good = request.lost_epoch == 0 or (request.lost_epoch > 0 and not request.ready)
        faults.require(good, "lost_epoch", "must be positive, of an executor that is not ready")
        faults.raise_if_any()

        def keep(transaction: Transaction, row: RolloutRow) -> None:
            serving = sorted({*request.serving_executors, request.executor})
            if not request.lost_epoch:  # which says nothing of the others
                rollouts.put_serving(transaction, row, request.router, serving, now_us=self._desk.now_us())
            if request.revision_id == row.to_revision_id:
                rollouts.put_readiness(
                    transaction, row, request.executor, ready=request.ready, failure=request.failure_reason
                )
                if request.lost_epoch:
                    rollouts.add_loss(transaction, row, request.executor, epoch=request.lost_epoch)

        return pb.ReportReadinessResponse(state=await self._take(request.name, keep))

    async def ReportProbe(self, request: pb.ReportProbeRequest, context: Any) -> pb.ReportProbeResponse:
        faults = FaultList()
        messages.check_names(faults, [("router", request.router), ("executor", request.executor)])
        messages.check_reason(faults, request.failure_reason)
        faults.raise_if_any()

        def keep(transaction: Transaction, row: RolloutRow) -> None:
            if request.revision_id == row.to_revision_id:
                rollouts.put_probe(transaction, row, request.executor, messages.read_probe(request))

        return pb.ReportProbeResponse(state=await self._take(request.name, keep))

    async def ReportObservations(
        self, request: pb.ReportObservationsRequest, context: Any
    ) -> pb.ReportObservationsResponse:
        taken = 0

        def keep(transaction: Transaction, row: RolloutRow) -> None:
            nonlocal taken
            sums = messages.read_observations(request, row.settings)
            start_us = request.start_time.ToMicroseconds()
            fresh, taken = rollouts.take_sequence(
                transaction, row, request.router, start_us=start_us, sequence=request.sequence
            )
            if fresh and SHADOW_STEP <= request.step_index <= row.position.step:
                rollouts.add_stats(transaction, row, request.step_index, sums)

        state = await self._take(request.name, keep)
        return pb.ReportObservationsResponse(state=state, sequence=taken)

    async def _take(self, name: str, keep: Callable[[Transaction, RolloutRow], None]) -> str:
        """Keeps a report and makes the move that follows from it; returns the state then."""

        def work(transaction: Transaction) -> str:
            row = rollouts.require(transaction.connection, *parse_rollout(name))
            if row.running:
                keep(transaction, row)
                row = moving.advance(transaction, row, now_us=self._desk.now_us())
            return f"STATE_{row.position.state}"

        return await self._desk.take(work)


_ENDED = frozenset(pb.Rollout.State.Value(f"STATE_{state}") for state in ENDED)


def _shown(view: Connection, name: str) -> pb.Rollout:
    return messages.rollout(rollouts.require(view, *parse_rollout(name)), connection=view)


def _action(value: "pb.ControlRolloutRequest.Action") -> Action:
    known = {pb.ControlRolloutRequest.Action.Value(f"ACTION_{action}"): action for action in Action}
    if value not in known:
        raise LoraportError("INVALID_REQUEST", "action is missing or unknown", subject="action")
    return known[value]
