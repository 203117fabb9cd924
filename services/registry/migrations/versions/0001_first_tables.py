"""The first tables: tenants, keys, base models, adapters, revisions, aliases, audit events, request results."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

ROW_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
ID = sa.String(63).with_variant(sa.String(63, collation="C"), "postgresql")
DIGEST = sa.String(71)


def upgrade() -> None:
    _state()
    _tenants()
    _adapters()
    _revisions()
    _journals()


def _state() -> None:
    op.create_table(
        "catalog_state",
        sa.Column("id", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
    op.execute("INSERT INTO catalog_state (id, epoch) VALUES (1, 0)")


def _tenants() -> None:
    op.create_table(
        "tenants",
        sa.Column("tenant", ID, nullable=False),
        sa.Column("display_name", sa.String(length=256), nullable=False),
        sa.Column("weight", sa.Float(precision=53), nullable=False),
        sa.Column("base_allowed", sa.Boolean(), nullable=False),
        sa.Column("create_us", sa.BigInteger(), nullable=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("tenant"),
    )
    op.create_index("ix_tenants_epoch", "tenants", ["epoch"])
    op.create_table(
        "api_keys",
        sa.Column("key_id", ID, nullable=False),
        sa.Column("tenant", ID, nullable=False),
        sa.Column("secret_hmac", sa.LargeBinary(length=32), nullable=False),
        sa.Column("scopes", sa.JSON(), nullable=False),
        sa.Column("create_us", sa.BigInteger(), nullable=False),
        sa.Column("expire_us", sa.BigInteger(), nullable=True),
        sa.Column("revoke_us", sa.BigInteger(), nullable=True),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["tenant"], ["tenants.tenant"]),
        sa.PrimaryKeyConstraint("key_id"),
    )
    op.create_index("ix_api_keys_epoch", "api_keys", ["epoch"])
    op.create_index("ix_api_keys_tenant_create", "api_keys", ["tenant", "create_us", "key_id"])
    op.create_table(
        "signers",
        sa.Column("tenant", ID, nullable=False),
        sa.Column("signer", ID, nullable=False),
        sa.Column("key_id", sa.String(length=64), nullable=False),
        sa.Column("public_key_pem", sa.String(length=2048), nullable=False),
        sa.Column("create_us", sa.BigInteger(), nullable=False),
        sa.Column("revoke_us", sa.BigInteger(), nullable=True),
        sa.ForeignKeyConstraint(["tenant"], ["tenants.tenant"]),
        sa.PrimaryKeyConstraint("tenant", "signer"),
        sa.UniqueConstraint("tenant", "key_id", name="uq_signers_tenant_key"),
    )
    op.create_index("ix_signers_tenant_create", "signers", ["tenant", "create_us", "signer"])


def _adapters() -> None:
    op.create_table(
        "base_models",
        sa.Column("base_model", ID, nullable=False),
        sa.Column("base_id", DIGEST, nullable=False),
        sa.Column("create_us", sa.BigInteger(), nullable=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("spec_json", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("base_model"),
        sa.UniqueConstraint("base_id", name="uq_base_models_base_id"),
    )
    op.create_index("ix_base_models_epoch", "base_models", ["epoch"])
    op.create_table(
        "adapters",
        sa.Column("adapter_id", ROW_ID, autoincrement=True, nullable=False),
        sa.Column("tenant", ID, nullable=False),
        sa.Column("adapter", ID, nullable=False),
        sa.Column("base_model", ID, nullable=False),
        sa.Column("latest_version", sa.BigInteger(), nullable=False),
        sa.Column("shared_tenants", sa.JSON(), nullable=False),
        sa.Column("create_us", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["base_model"], ["base_models.base_model"]),
        sa.ForeignKeyConstraint(["tenant"], ["tenants.tenant"]),
        sa.PrimaryKeyConstraint("adapter_id"),
        sa.UniqueConstraint("tenant", "adapter", name="uq_adapters_name"),
    )
    op.create_table(
        "aliases",
        sa.Column("adapter_id", ROW_ID, autoincrement=False, nullable=False),
        sa.Column("alias", ID, nullable=False),
        sa.Column("tenant", ID, nullable=False),
        sa.Column("adapter", ID, nullable=False),
        sa.Column("revision_id", DIGEST, nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.Column("removed", sa.Boolean(), nullable=False),
        sa.Column("update_us", sa.BigInteger(), nullable=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["adapter_id"], ["adapters.adapter_id"]),
        sa.PrimaryKeyConstraint("adapter_id", "alias"),
    )
    op.create_index("ix_aliases_epoch", "aliases", ["epoch"])


def _revisions() -> None:
    op.create_table(
        "revisions",
        sa.Column("adapter_id", ROW_ID, nullable=False),
        sa.Column("version", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("tenant", ID, nullable=False),
        sa.Column("adapter", ID, nullable=False),
        sa.Column("revision_id", DIGEST, nullable=False),
        sa.Column("current", sa.Boolean(), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("base_model", ID, nullable=False),
        sa.Column("base_id", DIGEST, nullable=False),
        sa.Column("weights_digest", DIGEST, nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("config_digest", DIGEST, nullable=False),
        sa.Column("manifest_digest", DIGEST, nullable=False),
        sa.Column("max_rank", sa.Integer(), nullable=False),
        sa.Column("module_count", sa.Integer(), nullable=False),
        sa.Column("reasons", sa.JSON(), nullable=False),
        sa.Column("warnings", sa.JSON(), nullable=False),
        sa.Column("create_us", sa.BigInteger(), nullable=False),
        sa.Column("update_us", sa.BigInteger(), nullable=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("record_envelope", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(["adapter_id"], ["adapters.adapter_id"]),
        sa.ForeignKeyConstraint(["base_model"], ["base_models.base_model"]),
        sa.PrimaryKeyConstraint("adapter_id", "version"),
    )
    op.create_index("ix_revisions_epoch", "revisions", ["epoch"])
    op.create_index(
        "uq_revisions_current",
        "revisions",
        ["revision_id"],
        unique=True,
        sqlite_where=sa.text("current"),
        postgresql_where=sa.text("current"),
    )
    op.create_table(
        "revision_documents",
        sa.Column("adapter_id", ROW_ID, autoincrement=False, nullable=False),
        sa.Column("version", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("manifest_envelope", sa.LargeBinary(), nullable=False),
        sa.Column("verification_envelope", sa.LargeBinary(), nullable=True),
        sa.ForeignKeyConstraint(["adapter_id", "version"], ["revisions.adapter_id", "revisions.version"]),
        sa.PrimaryKeyConstraint("adapter_id", "version"),
    )


def _journals() -> None:
    op.create_table(
        "audit_events",
        sa.Column("sequence", ROW_ID, autoincrement=True, nullable=False),
        sa.Column("event_us", sa.BigInteger(), nullable=False),
        sa.Column("principal", sa.String(length=256), nullable=False),
        sa.Column("method", sa.String(length=128), nullable=False),
        sa.Column("tenant", ID, nullable=False),
        sa.Column("resource", sa.String(length=512), nullable=False),
        sa.Column("decision", sa.String(length=8), nullable=False),
        sa.Column("reason", sa.String(length=512), nullable=False),
        sa.Column("request_id", sa.String(length=64), nullable=False),
        sa.PrimaryKeyConstraint("sequence"),
    )
    op.create_index("ix_audit_events_tenant", "audit_events", ["tenant", "sequence"])
    op.create_table(
        "request_results",
        sa.Column("principal", sa.String(length=256), nullable=False),
        sa.Column("method", sa.String(length=128), nullable=False),
        sa.Column("request_id", sa.String(length=36), nullable=False),
        sa.Column("request_digest", DIGEST, nullable=False),
        sa.Column("create_us", sa.BigInteger(), nullable=False),
        sa.Column("response", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("principal", "method", "request_id"),
    )
    op.create_index("ix_request_results_create_us", "request_results", ["create_us"])


def downgrade() -> None:
    raise NotImplementedError("0001 has no way back: there is no release before the first tables")
