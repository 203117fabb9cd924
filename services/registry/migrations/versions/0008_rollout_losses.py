"""Rollouts: executors that went away while they had work of the new revision."""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None

ROW_ID = sa.BigInteger().with_variant(sa.Integer, "sqlite")


def upgrade() -> None:
    owner = sa.ForeignKey("rollouts.rollout_row")
    op.create_table(
        "rollout_losses",
        sa.Column("rollout_row", ROW_ID, owner, primary_key=True, autoincrement=False),
        sa.Column("executor", sa.String(128), primary_key=True),
        sa.Column("epoch", sa.BigInteger, primary_key=True, autoincrement=False),
    )


def downgrade() -> None:
    op.drop_table("rollout_losses")
