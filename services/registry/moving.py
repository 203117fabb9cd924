"""How a rollout's move is written: position, story, leaf of the log, alias and audit event, all of it or nothing."""

from loraport.bundle.canonical import canonical
from loraport.bundle.digest import sha256_digest
from loraport.log.leaf import Kind
from services.registry.lifecycle import State
from services.registry.records import RolloutRow
from services.registry.rollout import machine
from services.registry.rollout.machine import Move
from services.registry.store import adapters, journal, log, revisions, rollouts
from services.registry.store.database import Transaction
from services.shared.errors import LoraportError

REGISTRY = "registry"
SCHEMA = "loraport.rollout-move.v1"


def begin(transaction: Transaction, row: RolloutRow, *, actor: str, sentence: str) -> RolloutRow:
    """Writes a new rollout."""
    row = rollouts.add(transaction, row)
    _tell(transaction, row, actor=actor, sentence=sentence, now_us=row.create_us)
    return row


def write(transaction: Transaction, row: RolloutRow, move: Move, *, actor: str, now_us: int) -> RolloutRow:
    """Writes a move; returns the rollout as it is then. The audit event of a person's own call is the call's."""
    if move.forget:
        rollouts.forget_step(transaction, row, row.position.step)
    row = rollouts.put_position(transaction, row, move.position, now_us=now_us)
    _tell(transaction, row, actor=actor, sentence=move.sentence, now_us=now_us)
    if move.pointing:
        _point(transaction, row, move, now_us=now_us)
    if actor == REGISTRY:
        journal.add_event(
            transaction,
            now_us=now_us,
            principal=REGISTRY,
            method="rollout",
            resource=row.name,
            decision="allowed",
            reason=move.sentence,
            request_id="",
        )
    return row


def advance(transaction: Transaction, row: RolloutRow, *, now_us: int) -> RolloutRow:
    """Writes the one move that follows from what is known now, if there is one; returns the rollout as it is then."""
    move = machine.decide(row.position, row.settings, rollouts.evidence(transaction.connection, row), now_us=now_us)
    return row if move is None else write(transaction, row, move, actor=REGISTRY, now_us=now_us)


def require_free(transaction: Transaction, adapter_id: int, alias: str) -> None:
    """Raises LoraportError (ROLLOUT_RUNNING) when a rollout moves this alias."""
    running = rollouts.running_of(transaction.connection, adapter_id)
    if running is not None and running.alias == alias:
        raise _running(running, f"{running.name} moves the alias {alias}; end it first")


def require_unneeded(transaction: Transaction, revision_id: str) -> None:
    """Raises LoraportError (ROLLOUT_RUNNING) when a rollout needs a revision."""
    for row in rollouts.needing(transaction.connection, revision_id):
        raise _running(row, f"{row.name} needs the revision; end it, or say that it is a security matter")


def release(transaction: Transaction, revision_id: str, why: str, *, now_us: int) -> None:
    """Ends the rollouts that need a revision, before it goes out of service."""
    for row in rollouts.needing(transaction.connection, revision_id):
        which: machine.Pointing = "new" if row.to_revision_id == revision_id else "old"
        move = machine.lose(row.position, which, why, now_us=now_us)
        write(transaction, row, move, actor=REGISTRY, now_us=now_us)


def _running(row: RolloutRow, message: str) -> LoraportError:
    return LoraportError("ROLLOUT_RUNNING", message, metadata={"rollout": row.name, "state": row.position.state})


def _point(transaction: Transaction, row: RolloutRow, move: Move, *, now_us: int) -> None:
    connection = transaction.connection
    adapter = adapters.require_adapter(connection, row.adapter_name)
    wanted = row.to_revision_id if move.pointing == "new" else row.from_revision_id
    target = revisions.require(revisions.find_current(connection, wanted))
    if target.state is not State.ACTIVE:
        # Revisions that a rollout needs leave service only after it has ended.
        raise LoraportError("REVISION_NOT_ACTIVE", f"{target.name} is {target.state}, not ACTIVE")
    adapters.put_alias(transaction, adapter, row.alias, target, now_us)


def _tell(transaction: Transaction, row: RolloutRow, *, actor: str, sentence: str, now_us: int) -> None:
    rollouts.add_line(transaction, row, now_us=now_us, actor=actor, sentence=sentence)
    said = {
        "schema": SCHEMA,
        "rollout": row.name,
        "generation": row.generation,
        "state": str(row.position.state),
        "step": row.position.step,
        "share_basis_points": row.share,
        "alias": row.alias,
        "from": row.from_revision_id,
        "to": row.to_revision_id,
        "actor": actor,
        "sentence": sentence,
    }
    digest = sha256_digest(canonical(said))
    log.append(transaction, Kind.ROLLOUT, resource=row.name, digest=digest, now_us=now_us)
