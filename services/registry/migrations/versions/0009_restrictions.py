"""Which leaves of the log take something back, so that peers can have them all; only what is ACTIVE has a record."""

import json

import sqlalchemy as sa
from alembic import op

from loraport.log.restrictions import FIRST_HEAD, next_head

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None

TABLE = "log_restrictions"
KINDS = ("REVOKED", "QUARANTINED", "SHARED", "TRUST_ROOT")


def upgrade() -> None:
    if op.get_bind().dialect.name == "postgresql":
        # A registry of the release before may still write: it takes its turn before this or after it.
        op.execute("SELECT epoch FROM catalog_state FOR UPDATE")
    table = op.create_table(
        TABLE,
        sa.Column("position", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("leaf_index", sa.BigInteger, nullable=False),
        sa.Column("head", sa.LargeBinary(32), nullable=False),
        sa.Column("epoch", sa.BigInteger, nullable=False),
    )
    op.create_index("ix_log_restrictions_epoch", TABLE, ["epoch"])
    op.create_index("ix_log_restrictions_leaf_index", TABLE, ["leaf_index"], unique=True)
    _fill(table)
    if op.get_bind().dialect.name == "postgresql":
        op.execute(
            f"CREATE TRIGGER {TABLE}_append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON {TABLE} "
            "FOR EACH STATEMENT EXECUTE FUNCTION loraport_append_only()"
        )
    else:
        for change in ("UPDATE", "DELETE"):
            op.execute(
                f"CREATE TRIGGER {TABLE}_no_{change.lower()} BEFORE {change} ON {TABLE} "
                f"BEGIN SELECT RAISE(ABORT, '{TABLE} is append-only'); END"
            )
    _require_listed()
    cleared = sa.text("UPDATE revisions SET record_envelope = :none, record_leaf = 0 WHERE state <> 'ACTIVE'")
    op.execute(cleared.bindparams(sa.bindparam("none", b"", sa.LargeBinary)))


def _fill(table: sa.Table) -> None:
    """Makes the list of the leaves that there are."""
    connection, head = op.get_bind(), FIRST_HEAD
    rows = []
    leaves = sa.text("SELECT leaf_index, body FROM log_leaves ORDER BY leaf_index").execution_options(yield_per=1000)
    for index, body in connection.execute(leaves):
        if json.loads(bytes(body))["kind"] in KINDS:
            head = next_head(head, bytes(body))
            rows.append({"position": len(rows), "leaf_index": index, "head": head, "epoch": 0})
    if rows:
        connection.execute(sa.insert(table), rows)


def _require_listed() -> None:
    """Has the database refuse a leaf that is to be in the list and is not: what an earlier release would write after
    this, and fail at, would be a gap in the list for ever."""
    missing = f"NOT EXISTS (SELECT 1 FROM {TABLE} WHERE leaf_index = NEW.leaf_index)"  # noqa: S608
    if op.get_bind().dialect.name == "postgresql":
        listed = " OR ".join(f'position(\'"kind":"{kind}"\'::bytea in NEW.body) > 0' for kind in KINDS)
        op.execute(
            f"CREATE FUNCTION loraport_leaf_listed() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
            f"IF ({listed}) AND {missing} THEN "
            f"RAISE EXCEPTION 'leaf % is not in {TABLE}', NEW.leaf_index USING ERRCODE = 'restrict_violation'; "
            "END IF; RETURN NEW; END $$"
        )
        op.execute(
            "CREATE TRIGGER log_leaves_listed BEFORE INSERT ON log_leaves "
            "FOR EACH ROW EXECUTE FUNCTION loraport_leaf_listed()"
        )
    else:
        listed = " OR ".join(f'instr(NEW.body, CAST(\'"kind":"{kind}"\' AS BLOB)) > 0' for kind in KINDS)
        op.execute(
            f"CREATE TRIGGER log_leaves_listed BEFORE INSERT ON log_leaves WHEN ({listed}) AND {missing} "
            f"BEGIN SELECT RAISE(ABORT, 'the leaf is not in {TABLE}'); END"
        )


def downgrade() -> None:
    if op.get_bind().dialect.name == "postgresql":
        op.execute("DROP TRIGGER log_leaves_listed ON log_leaves")
        op.execute("DROP FUNCTION loraport_leaf_listed()")
    else:
        op.execute("DROP TRIGGER log_leaves_listed")
    # What is in it follows from the leaves.
    op.drop_table(TABLE)
