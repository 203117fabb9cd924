"""Rollouts, and what routers reported about them."""

import math
from dataclasses import asdict
from typing import Any

from sqlalchemy import Connection, Row, Table, delete, insert, or_, select, text, update

from services.registry.records import RolloutRow, StoryRow
from services.registry.rollout import arms, settings
from services.registry.rollout.arms import ArmStats, StepStats
from services.registry.rollout.machine import Evidence, Executor, Position, Probe
from services.registry.rollout.states import State
from services.registry.store.database import Transaction
from services.registry.store.rows import build_all, page
from services.registry.store.tables import (
    rollout_arms,
    rollout_executors,
    rollout_losses,
    rollout_routers,
    rollout_story,
    rollouts,
)
from services.shared.errors import LoraportError
from services.shared.names import AdapterName
from services.shared.paging import Key
from services.shared.split import Arm

_OWNER = rollouts.c.rollout_row
# The bare column, as the partial index has it.
_RUNNING = text("rollouts.running")


def find(connection: Connection, name: AdapterName, number: int) -> RolloutRow | None:
    """Returns a rollout, or None."""
    statement = select(rollouts).where(
        rollouts.c.tenant == name.tenant, rollouts.c.adapter == name.adapter, rollouts.c.number == number
    )
    return _optional(connection.execute(statement).first())


def require(connection: Connection, name: AdapterName, number: int) -> RolloutRow:
    """Returns a rollout. Raises LoraportError (ROLLOUT_NOT_FOUND)."""
    row = find(connection, name, number)
    if row is None:
        raise LoraportError("ROLLOUT_NOT_FOUND", f"there is no rollout r{number} of {name}")
    return row


def running_of(connection: Connection, adapter_id: int) -> RolloutRow | None:
    """Returns the rollout of an adapter that has not ended, or None."""
    statement = select(rollouts).where(rollouts.c.adapter_id == adapter_id, _RUNNING)
    return _optional(connection.execute(statement).first())


def running(connection: Connection) -> list[RolloutRow]:
    """Returns every rollout that has not ended."""
    return [rollout_row(row) for row in connection.execute(select(rollouts).where(_RUNNING))]


def needing(connection: Connection, revision_id: str) -> list[RolloutRow]:
    """Returns the rollouts that have not ended and need a revision."""
    either = or_(rollouts.c.from_revision_id == revision_id, rollouts.c.to_revision_id == revision_id)
    return [rollout_row(row) for row in connection.execute(select(rollouts).where(_RUNNING, either))]


def list_rollouts(connection: Connection, adapter_id: int | None, *, after: Key | None, limit: int) -> list[RolloutRow]:
    """Returns a page of rollouts, newest first, of an adapter or of all (None), and one more."""
    statement = select(rollouts)
    if adapter_id is not None:
        statement = statement.where(rollouts.c.adapter_id == adapter_id)
    ordered = page(statement, (_OWNER,), after=after, limit=limit, descending=True)
    return [rollout_row(row) for row in connection.execute(ordered)]


def next_number(connection: Connection, adapter_id: int) -> int:
    """Returns the number of an adapter's next rollout."""
    numbers = select(rollouts.c.number).where(rollouts.c.adapter_id == adapter_id)
    newest = connection.execute(numbers.order_by(rollouts.c.number.desc()).limit(1)).scalar()
    return int(newest or 0) + 1


def add(transaction: Transaction, row: RolloutRow) -> RolloutRow:
    """Adds a rollout; returns it with its row id and epoch."""
    values: dict[str, Any] = {
        name: getattr(row, name)
        for name in (
            "adapter_id", "number", "tenant", "adapter", "alias", "base_model", "from_revision_id", "from_version",
            "to_revision_id", "to_version", "salt", "generation", "running", "create_us", "update_us",
        )
    }  # fmt: skip
    values["settings"] = settings.to_json(row.settings)
    values["prompts"] = settings.prompts_to_json(row.settings)
    values |= {"position": _position_json(row.position), "epoch": transaction.epoch()}
    return rollout_row(transaction.connection.execute(insert(rollouts).values(values).returning(rollouts)).one())


def put_position(transaction: Transaction, row: RolloutRow, position: Position, *, now_us: int) -> RolloutRow:
    """Writes a new position; returns the rollout as it is then."""
    values = {
        "position": _position_json(position),
        "generation": row.generation + 1,
        "running": not position.ended,
        "update_us": now_us,
        "epoch": transaction.epoch(),
    }
    change = update(rollouts).where(rollouts.c.rollout_row == row.rollout_row).values(values).returning(rollouts)
    return rollout_row(transaction.connection.execute(change).one())


def add_line(transaction: Transaction, row: RolloutRow, *, now_us: int, actor: str, sentence: str) -> None:
    """Adds the line of the story that tells how a rollout came to be as it is."""
    values = {
        "rollout_row": row.rollout_row,
        "generation": row.generation,
        "event_us": now_us,
        "phase": str(row.position.state),
        "actor": actor[:256],
        "sentence": sentence[:1024],
    }
    transaction.connection.execute(insert(rollout_story).values(values))


def story(connection: Connection, row: RolloutRow) -> list[StoryRow]:
    """Returns the decisions about a rollout, oldest first."""
    columns = [column for column in rollout_story.columns if column.name != "rollout_row"]
    statement = select(*columns).where(rollout_story.c.rollout_row == row.rollout_row)
    return build_all(StoryRow, connection.execute(statement.order_by(rollout_story.c.generation)))


def evidence(connection: Connection, row: RolloutRow) -> Evidence:
    """Returns everything that was reported about a rollout."""
    executors = _of(connection, rollout_executors, row)
    routers = _of(connection, rollout_routers, row)
    newest = max(routers, key=lambda item: int(item.serving_us), default=None)
    steps: dict[int, StepStats] = {}
    for item in _of(connection, rollout_arms, row):
        steps.setdefault(item.step, StepStats()).arms[item.arm] = arms.from_json(item.stats)
    return Evidence(
        executors=tuple(
            Executor(
                name=item.executor,
                ready=item.ready,
                failure=item.failure,
                probe=_probe(item.probe) if item.probe else None,
            )
            for item in sorted(executors, key=lambda item: str(item.executor))
        ),
        serving=frozenset(newest.serving if newest is not None else ()),
        steps=steps,
        lost=tuple(sorted(str(item.executor) for item in _of(connection, rollout_losses, row))),
    )


def add_loss(transaction: Transaction, row: RolloutRow, executor: str, *, epoch: int) -> None:
    """Notes that a process of an executor went away with work of the new revision. Each counts once."""
    values = {"rollout_row": row.rollout_row, "executor": executor, "epoch": epoch}
    where = [rollout_losses.c[name] == value for name, value in values.items()]
    if transaction.connection.execute(select(rollout_losses).where(*where)).first() is None:
        transaction.connection.execute(insert(rollout_losses).values(values))


def put_readiness(transaction: Transaction, row: RolloutRow, executor: str, *, ready: bool, failure: str) -> None:
    """Keeps the newest word on an executor; what a probe said stays as long as it is READY."""
    values: dict[str, Any] = {"ready": ready, "failure": failure}
    if not ready:
        values["probe"] = {}
    _put(transaction, rollout_executors, row, {"executor": executor}, values, {"probe": {}})


def put_probe(transaction: Transaction, row: RolloutRow, executor: str, probe: Probe) -> None:
    """Keeps the newest result of probing an executor."""
    numbers = asdict(probe)
    # JSON has no NaN, and whatever is not finite is judged by that alone.
    if not all(math.isfinite(value) for value in numbers.values() if isinstance(value, float)):
        numbers = asdict(Probe(nonfinite=True))
    absent = {"ready": False, "failure": ""}
    _put(transaction, rollout_executors, row, {"executor": executor}, {"probe": numbers}, absent)


def put_serving(transaction: Transaction, row: RolloutRow, router: str, serving: list[str], *, now_us: int) -> None:
    """Keeps which executors a router sees serving."""
    values = {"serving": serving, "serving_us": now_us}
    _put(transaction, rollout_routers, row, {"router": router}, values, {"start_us": 0, "sequence": 0})


def take_sequence(
    transaction: Transaction, row: RolloutRow, router: str, *, start_us: int, sequence: int
) -> tuple[bool, int]:
    """Says whether a report of a router is new, and the highest sequence that was taken from that process."""
    of_router = (rollout_routers.c.rollout_row == row.rollout_row) & (rollout_routers.c.router == router)
    found = transaction.connection.execute(select(rollout_routers).where(of_router)).first()
    if found is not None and (found.start_us, found.sequence) >= (start_us, sequence):
        return False, int(found.sequence) if found.start_us == start_us else sequence
    values = {"start_us": start_us, "sequence": sequence}
    _put(transaction, rollout_routers, row, {"router": router}, values, {"serving": [], "serving_us": 0})
    return True, sequence


def add_stats(transaction: Transaction, row: RolloutRow, step: int, more: dict[Arm, ArmStats]) -> None:
    """Adds what was seen of the arms in a step."""
    for arm, stats in more.items():
        of_arm = (
            (rollout_arms.c.rollout_row == row.rollout_row)
            & (rollout_arms.c.step == step)
            & (rollout_arms.c.arm == arm)
        )
        known = transaction.connection.execute(select(rollout_arms.c.stats).where(of_arm)).scalar()
        total = stats.merged(arms.from_json(known)) if known is not None else stats
        _put(transaction, rollout_arms, row, {"step": step, "arm": arm}, {"stats": arms.to_json(total)}, {})


def forget_step(transaction: Transaction, row: RolloutRow, step: int) -> None:
    """Drops what was seen in a step."""
    of_step = (rollout_arms.c.rollout_row == row.rollout_row) & (rollout_arms.c.step == step)
    transaction.connection.execute(delete(rollout_arms).where(of_step))


def _put(
    transaction: Transaction,
    table: Table,
    row: RolloutRow,
    key: dict[str, Any],
    values: dict[str, Any],
    absent: dict[str, Any],
) -> None:
    """Writes `values` into the row of a key; where there is none, a row with `absent` for the rest."""
    key = {"rollout_row": row.rollout_row, **key}
    where = [table.c[name] == value for name, value in key.items()]
    changed = transaction.connection.execute(update(table).where(*where).values(values))
    if not changed.rowcount:
        transaction.connection.execute(insert(table).values(absent | values | key))


def _of(connection: Connection, table: Table, row: RolloutRow) -> list[Row[Any]]:
    return list(connection.execute(select(table).where(table.c.rollout_row == row.rollout_row)).all())


def _probe(values: dict[str, Any]) -> Probe:
    return Probe(**values)


def _optional(row: Row[Any] | None) -> RolloutRow | None:
    return None if row is None else rollout_row(row)


def rollout_row(row: Row[Any]) -> RolloutRow:
    """Returns the rollout of a row of the table."""
    values = dict(row._mapping)
    prompts = values.pop("prompts")
    values |= {
        "salt": bytes(values["salt"]),
        "settings": settings.from_json(values["settings"], prompts),
        "position": _position(values["position"]),
    }
    return RolloutRow(**values)


def _position_json(position: Position) -> dict[str, Any]:
    return asdict(position) | {"waived": sorted(position.waived)}


def _position(values: dict[str, Any]) -> Position:
    held = values["held"]
    known = values | {
        "state": State(values["state"]),
        "held": State(held) if held is not None else None,
        "waived": frozenset(values["waived"]),
    }
    return Position(**known)
