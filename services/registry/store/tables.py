"""The tables. Names and types here are what the migrations create; a test holds the two equal.

Every catalog table has `epoch`, the catalog epoch of the row's last change, with an index: what changed since an epoch
is one range scan per table. Lists page by key, never by offset, over an index that ends in a unique column.
Times are microseconds since the Unix epoch. Large envelopes stand in a table of their own, so that scanning revisions
does not read them.
"""

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    Float,
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    UniqueConstraint,
    text,
)

METADATA = MetaData()

# SQLite counts rows by itself only in a column of exactly the type INTEGER.
_ROW_ID = BigInteger().with_variant(Integer, "sqlite")
# PostgreSQL would order by the rules of a language; "C" orders by characters, as SQLite does.
_ID = String(63).with_variant(String(63, collation="C"), "postgresql")
_DIGEST = String(71)

catalog_state = Table(
    "catalog_state",
    METADATA,
    Column("id", Integer, primary_key=True, autoincrement=False),
    Column("epoch", BigInteger, nullable=False),
)

tenants = Table(
    "tenants",
    METADATA,
    Column("tenant", _ID, primary_key=True),
    Column("display_name", String(256), nullable=False),
    Column("weight", Float(53), nullable=False),
    Column("base_allowed", Boolean, nullable=False),
    # Name of a quota → its limit; what is not in it is not limited.
    Column("quota", JSON, nullable=False),
    Column("create_us", BigInteger, nullable=False),
    Column("epoch", BigInteger, nullable=False, index=True),
)

api_keys = Table(
    "api_keys",
    METADATA,
    Column("key_id", _ID, primary_key=True),
    Column("tenant", _ID, ForeignKey("tenants.tenant"), nullable=False),
    Column("secret_hmac", LargeBinary(32), nullable=False),
    Column("scopes", JSON, nullable=False),
    Column("create_us", BigInteger, nullable=False),
    Column("expire_us", BigInteger),
    Column("revoke_us", BigInteger),
    Column("epoch", BigInteger, nullable=False, index=True),
    Index("ix_api_keys_tenant_create", "tenant", "create_us", "key_id"),
)

signers = Table(
    "signers",
    METADATA,
    Column("tenant", _ID, ForeignKey("tenants.tenant"), primary_key=True),
    Column("signer", _ID, primary_key=True),
    Column("key_id", String(64), nullable=False),
    Column("public_key_pem", String(2048), nullable=False),
    Column("create_us", BigInteger, nullable=False),
    Column("revoke_us", BigInteger),
    # What it announced from this leaf of the log on does not count.
    Column("since_log_index", BigInteger),
    UniqueConstraint("tenant", "key_id", name="uq_signers_tenant_key"),
    Index("ix_signers_tenant_create", "tenant", "create_us", "signer"),
)

delegations = Table(
    "delegations",
    METADATA,
    Column("tenant", _ID, ForeignKey("tenants.tenant"), primary_key=True),
    Column("version", BigInteger, primary_key=True, autoincrement=False),
    Column("threshold", Integer, nullable=False),
    Column("envelope", LargeBinary, nullable=False),
    Column("log_index", BigInteger, nullable=False),
)

trust_roots = Table(
    "trust_roots",
    METADATA,
    Column("version", BigInteger, primary_key=True, autoincrement=False),
    Column("envelope", LargeBinary, nullable=False),
    Column("log_index", BigInteger, nullable=False),
    Column("create_us", BigInteger, nullable=False),
    Column("epoch", BigInteger, nullable=False, index=True),
)

base_models = Table(
    "base_models",
    METADATA,
    Column("base_model", _ID, primary_key=True),
    Column("base_id", _DIGEST, nullable=False),
    Column("create_us", BigInteger, nullable=False),
    Column("epoch", BigInteger, nullable=False, index=True),
    Column("spec_json", LargeBinary, nullable=False),
    UniqueConstraint("base_id", name="uq_base_models_base_id"),
)

adapters = Table(
    "adapters",
    METADATA,
    Column("adapter_id", _ROW_ID, primary_key=True, autoincrement=True),
    Column("tenant", _ID, ForeignKey("tenants.tenant"), nullable=False),
    Column("adapter", _ID, nullable=False),
    Column("base_model", _ID, ForeignKey("base_models.base_model"), nullable=False),
    Column("latest_version", BigInteger, nullable=False),
    Column("shared_tenants", JSON, nullable=False),
    Column("create_us", BigInteger, nullable=False),
    UniqueConstraint("tenant", "adapter", name="uq_adapters_name"),
)

revisions = Table(
    "revisions",
    METADATA,
    Column("adapter_id", _ROW_ID, ForeignKey("adapters.adapter_id"), primary_key=True),
    Column("version", BigInteger, primary_key=True, autoincrement=False),
    Column("tenant", _ID, nullable=False),
    Column("adapter", _ID, nullable=False),
    Column("revision_id", _DIGEST, nullable=False),
    Column("current", Boolean, nullable=False),
    Column("state", String(16), nullable=False),
    Column("base_model", _ID, ForeignKey("base_models.base_model"), nullable=False),
    Column("base_id", _DIGEST, nullable=False),
    Column("weights_digest", _DIGEST, nullable=False),
    Column("size_bytes", BigInteger, nullable=False),
    Column("config_digest", _DIGEST, nullable=False),
    Column("manifest_digest", _DIGEST, nullable=False),
    Column("max_rank", Integer, nullable=False),
    Column("module_count", Integer, nullable=False),
    Column("reasons", JSON, nullable=False),
    Column("warnings", JSON, nullable=False),
    Column("create_us", BigInteger, nullable=False),
    Column("update_us", BigInteger, nullable=False),
    Column("epoch", BigInteger, nullable=False, index=True),
    Column("record_envelope", LargeBinary, nullable=False),
    Column("record_leaf", BigInteger, nullable=False),
    # The invariant of services.registry.catalog: one current row per content.
    Index(
        "uq_revisions_current",
        "revision_id",
        unique=True,
        sqlite_where=text("current"),
        postgresql_where=text("current"),
    ),
)

revision_documents = Table(
    "revision_documents",
    METADATA,
    Column("adapter_id", _ROW_ID, primary_key=True, autoincrement=False),
    Column("version", BigInteger, primary_key=True, autoincrement=False),
    Column("manifest_envelope", LargeBinary, nullable=False),
    Column("verification_envelope", LargeBinary),
    ForeignKeyConstraint(["adapter_id", "version"], ["revisions.adapter_id", "revisions.version"]),
)

aliases = Table(
    "aliases",
    METADATA,
    Column("adapter_id", _ROW_ID, ForeignKey("adapters.adapter_id"), primary_key=True, autoincrement=False),
    Column("alias", _ID, primary_key=True),
    Column("tenant", _ID, nullable=False),
    Column("adapter", _ID, nullable=False),
    Column("revision_id", _DIGEST, nullable=False),
    Column("version", BigInteger, nullable=False),
    Column("removed", Boolean, nullable=False),
    Column("update_us", BigInteger, nullable=False),
    Column("epoch", BigInteger, nullable=False, index=True),
)

rollouts = Table(
    "rollouts",
    METADATA,
    Column("rollout_row", _ROW_ID, primary_key=True, autoincrement=True),
    Column("adapter_id", _ROW_ID, ForeignKey("adapters.adapter_id"), nullable=False),
    # Counts an adapter's rollouts: `r1`, `r2`.
    Column("number", BigInteger, nullable=False),
    Column("tenant", _ID, nullable=False),
    Column("adapter", _ID, nullable=False),
    Column("alias", _ID, nullable=False),
    Column("base_model", _ID, nullable=False),
    Column("from_revision_id", _DIGEST, nullable=False),
    Column("from_version", BigInteger, nullable=False),
    Column("to_revision_id", _DIGEST, nullable=False),
    Column("to_version", BigInteger, nullable=False),
    Column("salt", LargeBinary(16), nullable=False),
    Column("settings", JSON, nullable=False),
    Column("prompts", JSON, nullable=False),
    # As services.registry.rollout.machine has it.
    Column("position", JSON, nullable=False),
    Column("generation", BigInteger, nullable=False),
    Column("running", Boolean, nullable=False),
    Column("create_us", BigInteger, nullable=False),
    Column("update_us", BigInteger, nullable=False),
    Column("epoch", BigInteger, nullable=False, index=True),
    UniqueConstraint("adapter_id", "number", name="uq_rollouts_number"),
    # Two rollouts of one adapter at once would fight over its alias.
    Index(
        "uq_rollouts_running", "adapter_id", unique=True, sqlite_where=text("running"), postgresql_where=text("running")
    ),
)

rollout_story = Table(
    "rollout_story",
    METADATA,
    Column("rollout_row", _ROW_ID, ForeignKey("rollouts.rollout_row"), primary_key=True, autoincrement=False),
    Column("generation", BigInteger, primary_key=True, autoincrement=False),
    Column("event_us", BigInteger, nullable=False),
    Column("phase", String(16), nullable=False),
    Column("actor", String(256), nullable=False),
    Column("sentence", String(1024), nullable=False),
)

# What routers reported: sums, never requests. None of it is part of the catalog, so it has no epoch.
rollout_arms = Table(
    "rollout_arms",
    METADATA,
    Column("rollout_row", _ROW_ID, ForeignKey("rollouts.rollout_row"), primary_key=True, autoincrement=False),
    Column("step", Integer, primary_key=True, autoincrement=False),
    Column("arm", String(8), primary_key=True),
    Column("stats", JSON, nullable=False),
)

rollout_executors = Table(
    "rollout_executors",
    METADATA,
    Column("rollout_row", _ROW_ID, ForeignKey("rollouts.rollout_row"), primary_key=True, autoincrement=False),
    Column("executor", String(128), primary_key=True),
    Column("ready", Boolean, nullable=False),
    Column("failure", String(63), nullable=False),
    Column("probe", JSON, nullable=False),
)

rollout_routers = Table(
    "rollout_routers",
    METADATA,
    Column("rollout_row", _ROW_ID, ForeignKey("rollouts.rollout_row"), primary_key=True, autoincrement=False),
    Column("router", String(128), primary_key=True),
    Column("start_us", BigInteger, nullable=False),
    Column("sequence", BigInteger, nullable=False),
    # The executors that it saw serving, and when it said so.
    Column("serving", JSON, nullable=False),
    Column("serving_us", BigInteger, nullable=False),
)

# Executors that went away while they had work of the new revision, by the epoch of the process that did.
rollout_losses = Table(
    "rollout_losses",
    METADATA,
    Column("rollout_row", _ROW_ID, ForeignKey("rollouts.rollout_row"), primary_key=True, autoincrement=False),
    Column("executor", String(128), primary_key=True),
    Column("epoch", BigInteger, primary_key=True, autoincrement=False),
)

audit_events = Table(
    "audit_events",
    METADATA,
    Column("sequence", _ROW_ID, primary_key=True, autoincrement=True),
    Column("event_us", BigInteger, nullable=False),
    Column("principal", String(256), nullable=False),
    Column("method", String(128), nullable=False),
    Column("tenant", _ID, nullable=False),
    Column("resource", String(512), nullable=False),
    Column("decision", String(8), nullable=False),
    Column("reason", String(512), nullable=False),
    Column("request_id", String(64), nullable=False),
    Column("hash", LargeBinary(32), nullable=False),
    Index("ix_audit_events_tenant", "tenant", "sequence"),
)

request_results = Table(
    "request_results",
    METADATA,
    Column("principal", String(256), primary_key=True),
    Column("method", String(128), primary_key=True),
    Column("request_id", String(36), primary_key=True),
    Column("request_digest", _DIGEST, nullable=False),
    Column("create_us", BigInteger, nullable=False, index=True),
    Column("response", LargeBinary, nullable=False),
)

# The transparency log and the audit events above. Triggers let rows be added and nothing else.
log_leaves = Table(
    "log_leaves",
    METADATA,
    Column("leaf_index", BigInteger, primary_key=True, autoincrement=False),
    Column("revocation", Boolean, nullable=False),
    Column("body", LargeBinary, nullable=False),
    Index(
        "ix_log_leaves_revocation",
        "leaf_index",
        sqlite_where=text("revocation"),
        postgresql_where=text("revocation"),
    ),
)

# Which leaves are in loraport.log.restrictions, with the list's hash up to each. Append-only, like what it is made of.
log_restrictions = Table(
    "log_restrictions",
    METADATA,
    Column("position", BigInteger, primary_key=True, autoincrement=False),
    Column("leaf_index", BigInteger, nullable=False, index=True, unique=True),
    Column("head", LargeBinary(32), nullable=False),
    Column("epoch", BigInteger, nullable=False, index=True),
)
# The database refuses a leaf that is to be in the list and is not there yet.
log_leaves.add_is_dependent_on(log_restrictions)

log_nodes = Table(
    "log_nodes",
    METADATA,
    Column("level", Integer, primary_key=True, autoincrement=False),
    Column("node_index", BigInteger, primary_key=True, autoincrement=False),
    Column("hash", LargeBinary(32), nullable=False),
)
