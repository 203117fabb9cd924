"""From an announcement to a revision that may serve: reads what is known, lets the rules decide, writes, signs."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from sqlalchemy import Connection

from loraport.bundle.base import BaseSpec, base_id_of, from_json
from loraport.bundle.canonical import load_strict
from loraport.bundle.digest import is_digest, sha256_digest
from loraport.bundle.envelope import IN_TOTO_PAYLOAD_TYPE, EnvelopeError, Signer, verify_envelope
from loraport.bundle.manifest import Manifest, ManifestError, parse_manifest
from services.registry import catalog, moving
from services.registry.lifecycle import INITIAL, Event, after
from services.registry.ports import Randomness
from services.registry.records import AdapterRow, BaseRow, RevisionRow
from services.registry.rollout.control import printable
from services.registry.store import accounts, adapters, bases, delegations, revisions
from services.registry.store.database import Transaction
from services.shared.errors import Fault, LoraportError
from services.shared.names import AdapterName, parse_revision
from services.shared.quotas import NO_QUOTA
from services.shared.statements import Record, StatementError, UploadSession, Verification, open_statement, seal

MAX_SPEC_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What may be announced: bytes of weights, rank, and for how long (s) a session lets the upload begin."""

    max_weights_bytes: int
    max_rank: int
    session_life_s: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Announced:
    """A revision that awaits its bytes, and the session to send them with (empty when nothing was stored)."""

    revision: RevisionRow
    session: bytes
    expires: int


class Publishing:
    """The registry's part in a revision's life. `loaders` are the keys whose verifications count.

    `refresh` makes `key` and `loaders` those of the newest trust root that a connection sees.
    """

    def __init__(
        self,
        key: Signer,
        loaders: Mapping[str, bytes],
        randomness: Randomness,
        limits: Limits,
        *,
        refresh: Callable[[Connection], None] = lambda connection: None,
    ) -> None:
        self._key = key
        self._refresh = refresh
        self._loaders = loaders
        self._randomness = randomness
        self._limits = limits
        self._specs: dict[str, BaseSpec] = {}

    def announce(
        self, transaction: Transaction, tenant: str, envelope: bytes, *, now_us: int, validate_only: bool
    ) -> Announced:
        """Registers the manifest in `envelope`; see `services.registry.catalog` for the rules.

        Raises:
            LoraportError: as RegisterRevision says.
        """
        connection = transaction.connection
        owner = accounts.require_tenant(connection, tenant)
        threshold = delegations.newest(connection, tenant).threshold
        payload = _verified(envelope, accounts.active_signers(connection, tenant), threshold)
        manifest = _parsed(payload)
        catalog.check_manifest(
            manifest,
            tenant=tenant,
            max_weights_bytes=self._limits.max_weights_bytes,
            max_rank=self._limits.max_rank,
        )
        base = bases.find_base_by_id(connection, base_id_of(catalog.base_digests(manifest)))
        if base is None:
            raise LoraportError("BASE_MODEL_UNKNOWN", metadata=dict(catalog.base_digests(manifest)))
        catalog.check_modules(manifest.modules, self._spec(base))
        name = AdapterName(tenant, manifest.adapter)
        adapter = adapters.find_adapter(connection, name)
        same = revisions.find_current(connection, manifest.revision_id)
        digest = sha256_digest(payload)
        taken = revisions.find_version(connection, name, manifest.version) is not None
        decision = catalog.announce(manifest, manifest_digest=digest, adapter=adapter, same=same, taken=taken)
        if decision.action == "RENEW" and same is not None:
            row = same
        else:
            row = _new_row(manifest, base, digest, now_us=now_us)
            if owner.quota != NO_QUOTA:
                used = accounts.usage(connection, tenant)
                catalog.check_quota(owner, used, new_adapter=adapter is None, row=row, superseded=decision.superseded)
            if not validate_only:
                row = self._write(transaction, row, envelope, adapter, decision.superseded)
        return self._announced(row, now_us=now_us, validate_only=validate_only)

    @staticmethod
    def _write(
        transaction: Transaction, row: RevisionRow, envelope: bytes, adapter: AdapterRow | None, old: RevisionRow | None
    ) -> RevisionRow:
        if old is not None:
            revisions.supersede(
                transaction,
                old,
                state=after(old.state, Event.SUPERSEDE),
                reasons=catalog.superseded_reasons(old, row.version),
                now_us=row.create_us,
            )
        adapter_id = adapters.put_adapter(transaction, adapter, row)
        return revisions.add(transaction, row, adapter_id=adapter_id, envelope=envelope)

    def _announced(self, row: RevisionRow, *, now_us: int, validate_only: bool) -> Announced:
        expires = now_us // 1_000_000 + self._limits.session_life_s
        if validate_only:
            return Announced(revision=row, session=b"", expires=0)
        session = UploadSession(
            upload_id=self._randomness.text("0123456789abcdef", 32),
            tenant=row.tenant,
            revision_id=row.revision_id,
            base_model=row.base_model,
            weights_digest=row.weights_digest,
            weights_size=row.size_bytes,
            config_digest=row.config_digest,
            expires=expires,
        )
        return Announced(revision=row, session=seal(session, self._key), expires=expires)

    def open_verification(self, connection: Connection, envelope: bytes) -> Verification:
        """Returns a loader's verification result, signed by a key that stands in the newest trust root.

        Raises:
            LoraportError: UNTRUSTED_VERIFIER or INVALID_VERIFICATION.
        """
        # Else one that waited for its turn behind the rotation that ends its key would still get in.
        self._refresh(connection)
        try:
            return open_statement(Verification, envelope, self._loaders)
        except StatementError as error:
            reason = "UNTRUSTED_VERIFIER" if str(error) == "UNTRUSTED" else "INVALID_VERIFICATION"
            raise LoraportError(reason, faults=(Fault("verification_envelope", str(error)),)) from None

    def admit(
        self, transaction: Transaction, verification: Verification, envelope: bytes, *, now_us: int
    ) -> RevisionRow:
        """Takes a verification result that was opened. Raises LoraportError as AdmitRevision says."""
        row = revisions.require(revisions.find_current(transaction.connection, verification.revision_id))
        move = catalog.admit(row, verification)
        if not move.changed:
            return row
        revisions.keep_verification(transaction, row, envelope)
        return revisions.move(transaction, row, move, now_us=now_us, evidence=envelope)

    def approve(self, transaction: Transaction, row: RevisionRow, *, etag: str, now_us: int) -> RevisionRow:
        """Makes a revision ACTIVE and signs its record. Raises LoraportError as ApproveRevision says."""
        move = catalog.approve(row, etag=etag)
        if not move.changed:
            return row
        # What is signed after a rotation in the log must be signed by the new key: peers go by the place.
        self._refresh(transaction.connection)
        record = Record(
            revision_id=row.revision_id,
            tenant=row.tenant,
            adapter=row.adapter,
            version=row.version,
            base_id=row.base_id,
            weights_digest=row.weights_digest,
            weights_size=row.size_bytes,
            state=move.state,
            sequence=transaction.epoch(),
            issued_time=now_us // 1_000_000,
        )
        return revisions.move(transaction, row, move, now_us=now_us, evidence=seal(record, self._key))

    @staticmethod
    def revoke(
        transaction: Transaction, row: RevisionRow, *, etag: str, reason: str, security: bool, now_us: int
    ) -> RevisionRow:
        """Takes a revision out of service for ever. Raises LoraportError as RevokeRevision says."""
        move = catalog.revoke(row, etag=etag, reason=reason)
        if not move.changed:
            return row
        if security:
            moving.release(transaction, row.revision_id, f"{row.name} is revoked: {printable(reason)}", now_us=now_us)
        else:
            moving.require_unneeded(transaction, row.revision_id)
        return revisions.move(transaction, row, move, now_us=now_us)

    def _spec(self, base: BaseRow) -> BaseSpec:
        # A base model never changes, so its parsed form is kept; there are few of them.
        if base.base_id not in self._specs:
            self._specs[base.base_id] = parse_spec(base.spec_json)
        return self._specs[base.base_id]


def find_revision(connection: Connection, reference: str) -> RevisionRow:
    """Returns a revision by resource name, or the current announcement of a revision id.

    Raises:
        LoraportError: INVALID_NAME or REVISION_NOT_FOUND.
    """
    if is_digest(reference):
        return revisions.require(revisions.find_current(connection, reference))
    name, version = parse_revision(reference)
    row = revisions.find_version(connection, name, version)
    if row is None:
        said = adapters.missing(connection, name) or f"{name.tenant}/{name.adapter} has no v{version}"
        raise LoraportError("REVISION_NOT_FOUND", said)
    return row


def parse_spec(spec_json: bytes) -> BaseSpec:
    """Reads a base model's specification.

    Raises:
        ValueError: it breaks the rules of `loraport.bundle.base`.
    """
    return from_json(load_strict(spec_json, max_bytes=MAX_SPEC_BYTES, max_depth=4))


def _verified(envelope: bytes, signers: Mapping[str, bytes], threshold: int) -> bytes:
    try:
        return verify_envelope(envelope, payload_type=IN_TOTO_PAYLOAD_TYPE, trusted=signers, threshold=threshold)
    except EnvelopeError as error:
        if error.code == "UNTRUSTED":
            raise LoraportError(
                "UNTRUSTED_SIGNER", f"fewer than {threshold} valid signers of the tenant signed"
            ) from None
        fault = Fault("manifest_envelope", error.detail, error.code)
        raise LoraportError(
            "INVALID_MANIFEST", f"the envelope is not usable: {error.detail}", faults=(fault,)
        ) from None


def _parsed(payload: bytes) -> Manifest:
    try:
        return parse_manifest(payload)
    except ManifestError as error:
        raise LoraportError("INVALID_MANIFEST", str(error), subject="manifest_envelope") from None


def _new_row(manifest: Manifest, base: BaseRow, manifest_digest: str, *, now_us: int) -> RevisionRow:
    """Returns the row of a new announcement; the adapter's row id and the epoch follow when it is stored."""
    return RevisionRow(
        adapter_id=0,
        tenant=manifest.tenant,
        adapter=manifest.adapter,
        version=manifest.version,
        revision_id=manifest.revision_id,
        current=True,
        state=INITIAL,
        base_model=base.base_model,
        base_id=base.base_id,
        weights_digest=manifest.weights_digest,
        size_bytes=manifest.weights_size,
        config_digest=manifest.config_digest,
        manifest_digest=manifest_digest,
        max_rank=max(module.rank for module in manifest.modules),
        module_count=len(manifest.modules),
        reasons=(),
        warnings=(),
        record_envelope=b"",
        record_leaf=0,
        create_us=now_us,
        update_us=now_us,
        epoch=0,
    )
