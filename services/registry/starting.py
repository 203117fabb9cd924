"""Whether a rollout may begin: what it names must be there, serve, and fit together."""

from sqlalchemy import Connection

from services.registry.lifecycle import State
from services.registry.ports import Randomness
from services.registry.records import AdapterRow, RevisionRow, RolloutRow
from services.registry.rollout.machine import Position
from services.registry.rollout.settings import Settings, check
from services.registry.rollout.states import INITIAL
from services.registry.store import adapters, revisions, rollouts
from services.shared.errors import FaultList, LoraportError
from services.shared.names import AdapterName, check_id

SALT_BYTES = 16


def new_salt(randomness: Randomness) -> bytes:
    """Returns what a rollout's buckets are drawn by: nobody can choose a session for the arm that it falls into."""
    return bytes.fromhex(randomness.text("0123456789abcdef", 2 * SALT_BYTES))


def new_rollout(
    connection: Connection, name: AdapterName, *, alias: str, to: str, settings: Settings, salt: bytes, now_us: int
) -> RolloutRow:
    """Returns the rollout that would begin; it is not written.

    Raises:
        LoraportError: as StartRollout says.
    """
    faults = FaultList()
    check(settings, faults)
    faults.raise_if_any()
    adapter = adapters.require_adapter(connection, name)
    new = _target(connection, adapter, to)
    old = _pointed_at(connection, adapter, check_id(alias, "rollout.alias"))
    for which, row in (("new", new), ("old", old)):
        if row.state is not State.ACTIVE:
            raise LoraportError(
                "REVISION_NOT_ACTIVE",
                f"the {which} revision {row.name} is {row.state}, not ACTIVE",
                metadata={"state": row.state},
            )
    if old.revision_id == new.revision_id:
        raise LoraportError(
            "INVALID_REQUEST", f"{alias} points to {new.name} already", subject="rollout.to_revision_id"
        )
    if old.base_id != new.base_id:
        raise LoraportError("WRONG_BASE", f"{new.name} is of {new.base_model}, {old.name} of {old.base_model}")
    running = rollouts.running_of(connection, adapter.adapter_id)
    if running is not None:
        raise LoraportError(
            "ROLLOUT_RUNNING",
            f"{running.name} is {running.position.state}",
            metadata={"rollout": running.name, "state": running.position.state},
        )
    return RolloutRow(
        rollout_row=0,
        adapter_id=adapter.adapter_id,
        number=rollouts.next_number(connection, adapter.adapter_id),
        tenant=name.tenant,
        adapter=name.adapter,
        alias=alias,
        base_model=new.base_model,
        from_revision_id=old.revision_id,
        from_version=old.version,
        to_revision_id=new.revision_id,
        to_version=new.version,
        salt=salt,
        settings=settings,
        position=Position(state=INITIAL, entered_us=now_us),
        generation=1,
        running=True,
        create_us=now_us,
        update_us=now_us,
        epoch=0,
    )


def _target(connection: Connection, adapter: AdapterRow, revision_id: str) -> RevisionRow:
    row = revisions.find_current(connection, revision_id)
    if row is None or row.adapter_id != adapter.adapter_id:
        raise LoraportError(
            "REVISION_NOT_FOUND", f"{adapter.name} has no such revision", subject="rollout.to_revision_id"
        )
    return row


def _pointed_at(connection: Connection, adapter: AdapterRow, alias: str) -> RevisionRow:
    row = adapters.find_alias(connection, adapter.adapter_id, alias)
    if row is None or row.removed:
        raise LoraportError(
            "ALIAS_NOT_FOUND", f"{adapter.name} has no alias {alias}; without traffic, set it: nothing is to be judged"
        )
    return revisions.require(revisions.find_current(connection, row.revision_id))
