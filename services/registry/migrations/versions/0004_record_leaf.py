"""A revision knows which leaf of the log its record is, so that peers can have it proven."""

import json

import sqlalchemy as sa
from alembic import op

from loraport.bundle.digest import sha256_digest

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    # The default stays: SQLite could take it away only by making the table anew, under the eyes of its foreign keys.
    op.add_column("revisions", sa.Column("record_leaf", sa.BigInteger(), nullable=False, server_default="0"))
    _find()


def _find() -> None:
    """Finds the leaves of the records of earlier releases by the digests that stand in them."""
    connection = op.get_bind()
    leaves = {}
    for index, body in connection.execute(sa.text("SELECT leaf_index, body FROM log_leaves")):
        leaf = json.loads(bytes(body))
        if leaf["kind"] == "RECORD":
            leaves[leaf["digest"]] = index
    rows = connection.execute(sa.text("SELECT adapter_id, version, record_envelope FROM revisions")).all()
    for adapter_id, version, record in rows:
        index = leaves.get(sha256_digest(bytes(record))) if record else None
        if index is not None:
            connection.execute(
                sa.text("UPDATE revisions SET record_leaf = :leaf WHERE adapter_id = :adapter AND version = :version"),
                {"leaf": index, "adapter": adapter_id, "version": version},
            )


def downgrade() -> None:
    raise NotImplementedError("0004 has no way back: a release without it would serve records that are in no log")
