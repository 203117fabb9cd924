"""Audit events are hash-chained and append-only."""

import sqlalchemy as sa
from alembic import op

from loraport.log.events import FIRST, Event, event_hash

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

FIELDS = ("sequence", "principal", "method", "resource", "decision", "reason", "request_id")


def upgrade() -> None:
    op.add_column("audit_events", sa.Column("hash", sa.LargeBinary(length=32), nullable=True))
    _chain()
    with op.batch_alter_table("audit_events") as table:
        table.alter_column("hash", existing_type=sa.LargeBinary(length=32), nullable=False)
    if op.get_bind().dialect.name == "postgresql":
        op.execute(
            "CREATE TRIGGER audit_events_append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON audit_events "
            "FOR EACH STATEMENT EXECUTE FUNCTION loraport_append_only()"
        )
    else:
        for change in ("UPDATE", "DELETE"):
            op.execute(
                f"CREATE TRIGGER audit_events_no_{change.lower()} BEFORE {change} ON audit_events "
                "BEGIN SELECT RAISE(ABORT, 'audit_events is append-only'); END"
            )


def _chain() -> None:
    """Gives the events of earlier releases their hashes, and numbers without gaps: rolled-back ones left some."""
    connection, last = op.get_bind(), FIRST
    rows = connection.execute(sa.text("SELECT * FROM audit_events ORDER BY sequence")).mappings().all()
    for sequence, row in enumerate(rows, 1):
        event = Event(**{name: row[name] for name in FIELDS} | {"sequence": sequence, "time_us": row["event_us"]})
        last = event_hash(last, event)
        connection.execute(
            sa.text("UPDATE audit_events SET sequence = :new, hash = :hash WHERE sequence = :old"),
            {"new": sequence, "hash": last, "old": row["sequence"]},
        )


def downgrade() -> None:
    raise NotImplementedError(
        "0003 has no way back: a release that does not chain audit events would break their chain"
    )
