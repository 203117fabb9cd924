"""A large registry for `bench/registry.py`: many times the rows of one sample that the service itself has written.

The sample is one tenant with a key, a signer, an adapter, an ACTIVE revision and an alias. Every bulk row is a copy of
the sample's with other names, digests and numbers; every envelope is signed anew by the key that would have signed it;
leaves and hashes of the transparency log and the audit chain go on from the sample's. `check_fill` opens a part of the
result with the code that peers use.
"""

import base64
import hashlib
import itertools
import json
import sqlite3
from dataclasses import dataclass, field
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from loraport.bundle.canonical import canonical
from loraport.bundle.envelope import IN_TOTO_PAYLOAD_TYPE, SigningKey, verify_envelope
from loraport.bundle.manifest import parse_manifest
from loraport.log import merkle
from loraport.log.events import SCHEMA, Event, verify_chain
from loraport.log.leaf import Kind, Leaf
from services.registry.store.tables import METADATA
from services.shared.statements import Record, Verification, open_statement

CHUNK = 2000
EVENTS_CHECKED = 20000
EPOCHS_PER_REVISION = 3  # announced, verified, approved


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """How much there is."""

    tenants: int = 5000
    adapters: int = 4
    versions: int = 5

    @property
    def revisions(self) -> int:
        return self.tenants * self.adapters * self.versions


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """What the service wrote: table → the sample's row, and the names that stand in it."""

    tenant: str
    adapter: str
    version: int
    rows: dict[str, dict[str, Any]]


@dataclass(slots=True)
class Filled:
    """What was written, for the measurements to ask for. `signers` are the tenants' private keys."""

    revision_ids: list[str] = field(default_factory=list)
    adapters: list[str] = field(default_factory=list)
    signers: dict[str, SigningKey] = field(default_factory=dict)


class Text:
    """A canonical JSON document with some values left open; filling it in is one string operation."""

    def __init__(self, document: Any, **texts: str) -> None:
        """`texts` maps names to the values of `document` that they stand for; numbers are marked by `number`."""
        text = canonical(document).decode().replace("%", "%%")
        for name, value in texts.items():
            text = text.replace(value, f"%({name})s")
        self._text = text.replace('"@', "%(").replace('@"', ")s")

    @staticmethod
    def number(name: str) -> str:
        """Returns what to put into a document where the number `name` will stand."""
        return f"@{name}@"

    def fill(self, **values: str | int) -> bytes:
        return (self._text % values).encode()


class Signer:
    """Signs DSSE envelopes; the bytes are those of `loraport.bundle.envelope.sign_envelope`."""

    def __init__(self, key: SigningKey) -> None:
        self._private: Ed25519PrivateKey = key.private
        self._key_id = key.key_id

    def seal(self, payload_type: str, payload: bytes) -> bytes:
        kind = payload_type.encode()
        signature = self._private.sign(b"DSSEv1 %d %b %d %b" % (len(kind), kind, len(payload), payload))
        return b'{"payload":"%b","payloadType":"%b","signatures":[{"keyid":"%b","sig":"%b"}]}' % (
            base64.b64encode(payload), kind, self._key_id.encode(), base64.b64encode(signature),
        )  # fmt: skip


def payload_of(envelope: bytes) -> tuple[str, Any]:
    """Returns the payload type and the document of an envelope."""
    value = json.loads(envelope)
    return value["payloadType"], json.loads(base64.b64decode(value["payload"]))


def read_sample(connection: sqlite3.Connection, *, tenant: str, adapter: str, version: int) -> Sample:
    """Reads the newest row of every table that the sample has rows in."""
    connection.row_factory = sqlite3.Row
    tables = (
        "tenants", "api_keys", "signers", "adapters", "revisions", "revision_documents", "aliases", "audit_events",
    )  # fmt: skip
    newest = {name: connection.execute(f"SELECT * FROM {name} ORDER BY rowid DESC LIMIT 1") for name in tables}  # noqa: S608
    rows = {name: dict(cursor.fetchone()) for name, cursor in newest.items()}
    connection.row_factory = None
    return Sample(tenant=tenant, adapter=adapter, version=version, rows=rows)


class Filler:
    """Writes the bulk. Leaves and epochs go on from what is there."""

    def __init__(
        self, connection: sqlite3.Connection, sample: Sample, keys: dict[str, SigningKey], shape: Shape
    ) -> None:
        """`keys` are the registry's and the loader's."""
        self._connection = connection
        self._sample = sample
        self._shape = shape
        self._registry, self._loader = Signer(keys["registry"]), Signer(keys["loader"])
        self._epoch = int(connection.execute("SELECT epoch FROM catalog_state").fetchone()[0])
        self._size = int(connection.execute("SELECT max(leaf_index) + 1 FROM log_leaves").fetchone()[0])
        newest = "SELECT level, hash, max(node_index) FROM log_nodes GROUP BY level"
        self._newest = {level: value for level, value, _ in connection.execute(newest)}
        self._pending: dict[str, list[tuple[Any, ...]]] = {}
        self._templates()

    def fill(self) -> Filled:
        """Writes everything in one transaction."""
        filled = Filled()
        self._connection.execute("BEGIN")
        tenants = [f"tenant-{number:05d}" for number in range(self._shape.tenants)]
        for tenant in tenants:
            filled.signers[tenant] = self._tenant(tenant)
        signers = {tenant: Signer(key) for tenant, key in filled.signers.items()}
        first = int(self._sample.rows["adapters"]["adapter_id"]) + 1
        names = list(itertools.product(tenants, (f"adapter-{number}" for number in range(self._shape.adapters))))
        for adapter_id, (tenant, adapter) in enumerate(names, first):
            changes = {"adapter_id": adapter_id, "tenant": tenant, "adapter": adapter}
            self._add("adapters", changes | {"latest_version": self._shape.versions})
            filled.adapters.append(f"tenants/{tenant}/adapters/{adapter}")
        # All first versions, then all second ones: in a registry that has grown, neighbours are strangers.
        for version in range(1, self._shape.versions + 1):
            for adapter_id, (tenant, adapter) in enumerate(names, first):
                row = {"adapter_id": adapter_id, "tenant": tenant, "adapter": adapter, "version": version}
                filled.revision_ids.append(self._revision(row, signers[tenant]))
        for adapter_id, (tenant, adapter) in enumerate(names, first):
            self._alias(adapter_id, tenant, adapter, filled.revision_ids[adapter_id - first - len(names)])
        self._flush()
        self._connection.execute("UPDATE catalog_state SET epoch = ?", (self._epoch,))
        self._connection.execute("COMMIT")
        return filled

    def _templates(self) -> None:
        rows, sample = self._sample.rows, self._sample
        _, manifest = payload_of(rows["revision_documents"]["manifest_envelope"])
        weights = manifest["predicate"]["identity"]["weights"]["sha256"]
        texts = {"weights": weights, "tenant": sample.tenant, "adapter": sample.adapter}
        manifest["predicate"]["statement"]["version"] = Text.number("version")
        self._identity = Text(manifest["predicate"]["identity"], **texts)
        self._manifest = Text(manifest, **texts)
        texts["revision"] = rows["revisions"]["revision_id"]
        self._verification_type, verification = payload_of(rows["revision_documents"]["verification_envelope"])
        self._verification = Text(verification, **texts)
        self._record_type, record = payload_of(rows["revisions"]["record_envelope"])
        record |= {"version": Text.number("version"), "sequence": Text.number("sequence")}
        self._record = Text(record, **texts)
        leaf = json.loads(Leaf(index=0, time=0, kind="k", resource="r", digest="d", previous="p").body())
        leaf |= {"index": Text.number("index"), "kind": "K!", "resource": "R!", "digest": "D!", "previous": "P!"}
        leaf["time"] = int(rows["revisions"]["create_us"]) // 1_000_000
        self._leaf = Text(leaf, kind="K!", resource="R!", digest="D!", previous="P!")

        row = rows["audit_events"]
        event = {name: row[name] for name in ("principal", "decision", "reason", "request_id")}
        event |= {"schema": SCHEMA, "time_us": row["event_us"], "sequence": Text.number("sequence")}
        self._audit = Text(event | {"method": "M!", "resource": "R!"}, method="M!", resource="R!")

    def _tenant(self, tenant: str) -> SigningKey:
        key = SigningKey.generate()
        self._add("tenants", {"tenant": tenant, "epoch": self._next()})
        secret, key_id = hashlib.sha256(tenant.encode()).digest(), "k" + tenant.replace("tenant-", "0000")
        self._add("api_keys", {"tenant": tenant, "key_id": key_id, "secret_hmac": secret, "epoch": self._next()})
        self._log(Kind.API_KEY_CREATED, f"tenants/{tenant}/keys/{key_id}", _digest(secret))
        signer = {"tenant": tenant, "key_id": key.key_id, "public_key_pem": key.public_pem.decode()}
        self._add("signers", signer)
        self._next()
        self._log(
            Kind.SIGNER_CREATED,
            f"tenants/{tenant}/signers/{self._sample.rows['signers']['signer']}",
            f"sha256:{key.key_id}",
        )
        for method, resource in (
            ("TenantService/CreateTenant", f"tenants/{tenant}"),
            ("KeyService/CreateApiKey", f"tenants/{tenant}/keys/{key_id}"),
            ("KeyService/CreateSigner", f"tenants/{tenant}/signers/ci"),
        ):
            self._event(method, tenant, resource)
        return key

    def _revision(self, row: dict[str, Any], signer: Signer) -> str:
        tenant, version = row["tenant"], row["version"]
        name = f"tenants/{tenant}/adapters/{row['adapter']}/revisions/v{version}"
        values = {"tenant": tenant, "adapter": row["adapter"], "version": version}
        values["weights"] = hashlib.sha256(name.encode()).hexdigest()
        values["revision"] = revision_id = _digest(self._identity.fill(**values))
        manifest = self._manifest.fill(**values)
        envelope = signer.seal(IN_TOTO_PAYLOAD_TYPE, manifest)
        self._log(Kind.ANNOUNCED, name, _digest(envelope))
        verification = self._loader.seal(self._verification_type, self._verification.fill(**values))
        self._log(Kind.VERIFIED, name, _digest(verification))
        self._epoch += EPOCHS_PER_REVISION
        record = self._registry.seal(self._record_type, self._record.fill(**values, sequence=self._epoch))
        leaf = self._log(Kind.RECORD, name, _digest(record))
        stored = {
            "revision_id": revision_id,
            "weights_digest": "sha256:" + values["weights"],
            "manifest_digest": _digest(manifest),
            "record_envelope": record,
            "record_leaf": leaf,
            "epoch": self._epoch,
        }
        self._add("revisions", row | stored)
        key = {"adapter_id": row["adapter_id"], "version": version}
        self._add("revision_documents", key | {"manifest_envelope": envelope, "verification_envelope": verification})
        for method in ("RegisterRevision", "AdmitRevision", "ApproveRevision"):
            self._event(f"AdapterService/{method}", tenant, name)
        return revision_id

    def _alias(self, adapter_id: int, tenant: str, adapter: str, revision_id: str) -> None:
        key = {"adapter_id": adapter_id, "tenant": tenant, "adapter": adapter}
        name = f"tenants/{tenant}/adapters/{adapter}/aliases/{self._sample.rows['aliases']['alias']}"
        to = {"revision_id": revision_id, "version": self._shape.versions, "epoch": self._next()}
        self._add("aliases", key | to)
        self._log(Kind.ALIAS_SET, name, revision_id)
        self._event("AdapterService/SetAlias", tenant, name)

    def _next(self) -> int:
        self._epoch += 1
        return self._epoch

    def _log(self, kind: Kind, resource: str, digest: str) -> int:
        size, previous = self._size, self._newest[0].hex()
        body = self._leaf.fill(index=size, kind=kind, resource=resource, digest=digest, previous=previous)
        left = [self._newest[level] for level, _ in merkle.merged(size)]
        self._add("log_leaves", {"leaf_index": size, "revocation": 0, "body": body})
        for (level, index), value in merkle.new_nodes(size, merkle.leaf_hash(body), left):
            self._add("log_nodes", {"level": level, "node_index": index, "hash": value})
            self._newest[level] = value
        self._size += 1
        return size

    def _event(self, method: str, tenant: str, resource: str) -> None:
        row = self._sample.rows["audit_events"]
        method = f"/loraport.registry.v1.{method}"
        row["sequence"] += 1
        body = self._audit.fill(sequence=row["sequence"], method=method, resource=resource)
        row["hash"] = hashlib.sha256(row["hash"] + body).digest()
        self._add("audit_events", {"method": method, "tenant": tenant, "resource": resource})

    def _add(self, table: str, changes: dict[str, Any]) -> None:
        rows = self._pending.setdefault(table, [])
        row = self._sample.rows.get(table, {}) | changes
        rows.append(tuple(row[column.name] for column in METADATA.tables[table].columns))
        if len(rows) >= CHUNK:
            self._write(table)

    def _flush(self) -> None:
        for table in list(self._pending):
            self._write(table)

    def _write(self, table: str) -> None:
        rows = self._pending.pop(table, [])
        if rows:
            places = ",".join("?" * len(rows[0]))
            names = ",".join(column.name for column in METADATA.tables[table].columns)
            self._connection.executemany(f"INSERT INTO {table} ({names}) VALUES ({places})", rows)  # noqa: S608


def check_fill(connection: sqlite3.Connection, filled: Filled, keys: dict[str, SigningKey], *, every: int) -> bytes:
    """Opens every n-th bulk revision with the code that peers use, and returns the root of all leaves.

    Raises:
        AssertionError: a row is not what the service would have written.
        ValueError: an envelope or manifest is not good.
    """
    trusted = {name: {key.key_id: key.public_pem} for name, key in keys.items()}
    query = """SELECT tenant, adapter, version, r.revision_id, manifest_envelope, verification_envelope,
        record_envelope, r.epoch FROM revisions r JOIN revision_documents USING (adapter_id, version)
        WHERE revision_id = ?"""
    for revision_id in filled.revision_ids[::every]:
        row = connection.execute(query, (revision_id,)).fetchone()
        tenant, adapter, version, _, manifest, verification, record, epoch = row
        signer = filled.signers[tenant]
        known = {signer.key_id: signer.public_pem}
        parsed = parse_manifest(verify_envelope(manifest, payload_type=IN_TOTO_PAYLOAD_TYPE, trusted=known))
        assert (parsed.tenant, parsed.adapter, parsed.version) == (tenant, adapter, version)
        assert parsed.revision_id == revision_id
        assert open_statement(Verification, verification, trusted["loader"]).revision_id == revision_id
        opened = open_statement(Record, record, trusted["registry"])
        assert (opened.revision_id, opened.version, opened.sequence) == (revision_id, version, epoch)
    columns = "sequence, event_us, principal, method, resource, decision, reason, request_id, hash"
    events = connection.execute(f"SELECT {columns} FROM audit_events ORDER BY sequence LIMIT {EVENTS_CHECKED}")  # noqa: S608
    names = tuple(Event.__dataclass_fields__)
    chain = verify_chain((Event(**dict(zip(names, row, strict=False))), row[-1]) for row in events)
    assert not chain.fault, chain.fault
    assert connection.execute("PRAGMA foreign_key_check").fetchone() is None
    leaves = connection.execute("SELECT body FROM log_leaves ORDER BY leaf_index")
    return merkle.root(merkle.leaf_hash(body) for (body,) in leaves)


def _digest(data: bytes) -> str:
    return "sha256:" + hashlib.sha256(data).hexdigest()
