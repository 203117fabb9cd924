"""Rollouts: their settings, positions and stories, and what routers reported about them."""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

ROW_ID = sa.BigInteger().with_variant(sa.Integer, "sqlite")
ID = sa.String(63).with_variant(sa.String(63, collation="C"), "postgresql")
DIGEST = sa.String(71)


def upgrade() -> None:
    op.create_table(
        "rollouts",
        sa.Column("rollout_row", ROW_ID, primary_key=True, autoincrement=True),
        sa.Column("adapter_id", ROW_ID, sa.ForeignKey("adapters.adapter_id"), nullable=False),
        sa.Column("number", sa.BigInteger, nullable=False),
        sa.Column("tenant", ID, nullable=False),
        sa.Column("adapter", ID, nullable=False),
        sa.Column("alias", ID, nullable=False),
        sa.Column("base_model", ID, nullable=False),
        sa.Column("from_revision_id", DIGEST, nullable=False),
        sa.Column("from_version", sa.BigInteger, nullable=False),
        sa.Column("to_revision_id", DIGEST, nullable=False),
        sa.Column("to_version", sa.BigInteger, nullable=False),
        sa.Column("salt", sa.LargeBinary(16), nullable=False),
        sa.Column("settings", sa.JSON, nullable=False),
        sa.Column("prompts", sa.JSON, nullable=False),
        sa.Column("position", sa.JSON, nullable=False),
        sa.Column("generation", sa.BigInteger, nullable=False),
        sa.Column("running", sa.Boolean, nullable=False),
        sa.Column("create_us", sa.BigInteger, nullable=False),
        sa.Column("update_us", sa.BigInteger, nullable=False),
        sa.Column("epoch", sa.BigInteger, nullable=False),
        sa.UniqueConstraint("adapter_id", "number", name="uq_rollouts_number"),
    )
    op.create_index("ix_rollouts_epoch", "rollouts", ["epoch"])
    running = sa.text("running")
    op.create_index(
        "uq_rollouts_running", "rollouts", ["adapter_id"], unique=True, sqlite_where=running, postgresql_where=running
    )
    _create_reports()


def _create_reports() -> None:
    def owner() -> sa.Column[int]:
        reference = sa.ForeignKey("rollouts.rollout_row")
        return sa.Column("rollout_row", ROW_ID, reference, primary_key=True, autoincrement=False)

    op.create_table(
        "rollout_story",
        owner(),
        sa.Column("generation", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("event_us", sa.BigInteger, nullable=False),
        sa.Column("phase", sa.String(16), nullable=False),
        sa.Column("actor", sa.String(256), nullable=False),
        sa.Column("sentence", sa.String(1024), nullable=False),
    )
    op.create_table(
        "rollout_arms",
        owner(),
        sa.Column("step", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("arm", sa.String(8), primary_key=True),
        sa.Column("stats", sa.JSON, nullable=False),
    )
    op.create_table(
        "rollout_executors",
        owner(),
        sa.Column("executor", sa.String(128), primary_key=True),
        sa.Column("ready", sa.Boolean, nullable=False),
        sa.Column("failure", sa.String(63), nullable=False),
        sa.Column("probe", sa.JSON, nullable=False),
    )
    op.create_table(
        "rollout_routers",
        owner(),
        sa.Column("router", sa.String(128), primary_key=True),
        sa.Column("start_us", sa.BigInteger, nullable=False),
        sa.Column("sequence", sa.BigInteger, nullable=False),
        sa.Column("serving", sa.JSON, nullable=False),
        sa.Column("serving_us", sa.BigInteger, nullable=False),
    )


def downgrade() -> None:
    for table in ("rollout_routers", "rollout_executors", "rollout_arms", "rollout_story", "rollouts"):
        op.drop_table(table)
