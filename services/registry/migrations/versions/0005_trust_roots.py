"""Trust roots and delegations to publishers; a signer may be revoked since a leaf of the log."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

TABLES = ("trust_roots", "delegations")


def upgrade() -> None:
    op.create_table(
        "trust_roots",
        sa.Column("version", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("envelope", sa.LargeBinary(), nullable=False),
        sa.Column("log_index", sa.BigInteger(), nullable=False),
        sa.Column("create_us", sa.BigInteger(), nullable=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("version"),
    )
    op.create_index("ix_trust_roots_epoch", "trust_roots", ["epoch"])
    names = sa.String(length=63).with_variant(sa.String(length=63, collation="C"), "postgresql")
    op.create_table(
        "delegations",
        sa.Column("tenant", names, nullable=False),
        sa.Column("version", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("threshold", sa.Integer(), nullable=False),
        sa.Column("envelope", sa.LargeBinary(), nullable=False),
        sa.Column("log_index", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["tenant"], ["tenants.tenant"]),
        sa.PrimaryKeyConstraint("tenant", "version"),
    )
    op.add_column("signers", sa.Column("since_log_index", sa.BigInteger(), nullable=True))
    for table in TABLES:
        if op.get_bind().dialect.name == "postgresql":
            op.execute(
                f"CREATE TRIGGER {table}_append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON {table} "
                "FOR EACH STATEMENT EXECUTE FUNCTION loraport_append_only()"
            )
        else:
            for change in ("UPDATE", "DELETE"):
                op.execute(
                    f"CREATE TRIGGER {table}_no_{change.lower()} BEFORE {change} ON {table} "
                    f"BEGIN SELECT RAISE(ABORT, '{table} is append-only'); END"
                )


def downgrade() -> None:
    raise NotImplementedError(
        "0005 has no way back: a release without trust roots would believe keys that have been replaced"
    )
