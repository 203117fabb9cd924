"""A tenant may have quotas."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    # The default stays, as in 0004.
    op.add_column("tenants", sa.Column("quota", sa.JSON(), nullable=False, server_default="{}"))


def downgrade() -> None:
    op.drop_column("tenants", "quota")
