"""From a loader's bytes to a revision's matrices: the manifest says what they are, the signed record which manifest."""

from __future__ import annotations

from loraport.bundle.envelope import IN_TOTO_PAYLOAD_TYPE, EnvelopeError, claimed_payload
from loraport.bundle.manifest import ManifestError, parse_manifest
from services.executor.intake import HostAdapter, SignedModule, take_in
from services.executor.ports import HostBytes
from services.shared.errors import LoraportError
from services.shared.statements import Record


def read_sealed(record: Record, host: HostBytes) -> HostAdapter:
    """Check the bytes against the signed record and module table, and return views of them. Hashes: run it in a thread.

    Raises:
        LoraportError: DIGEST_MISMATCH, another manifest.
        Refused: as `take_in`.
    """
    try:
        manifest = parse_manifest(claimed_payload(host.manifest_envelope, payload_type=IN_TOTO_PAYLOAD_TYPE))
    except (EnvelopeError, ManifestError):
        raise LoraportError("DIGEST_MISMATCH", "the loader's manifest cannot be read") from None
    # The registry signed the id, and the id is the digest of the identity: so the table is the signed one.
    if (manifest.revision_id, manifest.weights_digest) != (record.revision_id, record.weights_digest):
        raise LoraportError("DIGEST_MISMATCH", "the loader's manifest is of another revision")
    modules = [SignedModule(m.path, m.rank, m.scaling, m.in_features, m.out_features) for m in manifest.modules]
    return take_in(
        host.data,
        revision_id=record.revision_id,
        weights_digest=record.weights_digest,
        weights_size=record.weights_size,
        modules=modules,
    )
