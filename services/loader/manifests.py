"""Manifests as the loader reads them.

The loader holds no publishers' keys: the registry checked their signatures. What binds a manifest here is the
revision id, which the registry signed and which is the digest of the manifest's identity.
"""

from loraport.bundle.envelope import IN_TOTO_PAYLOAD_TYPE, EnvelopeError, claimed_payload
from loraport.bundle.manifest import Manifest, ManifestError, parse_manifest
from services.shared.errors import LoraportError


def read_manifest(envelope: bytes, *, revision_id: str, weights_digest: str, weights_size: int) -> Manifest:
    """Returns the manifest in `envelope`, which must be of this revision and of these weights.

    Raises:
        LoraportError: DIGEST_MISMATCH, it is not.
    """
    try:
        manifest = parse_manifest(claimed_payload(envelope, payload_type=IN_TOTO_PAYLOAD_TYPE))
    except (EnvelopeError, ManifestError):
        raise LoraportError("DIGEST_MISMATCH", "the stored manifest cannot be read") from None
    found = (manifest.revision_id, manifest.weights_digest, manifest.weights_size)
    if found != (revision_id, weights_digest, weights_size):
        raise LoraportError("DIGEST_MISMATCH", "the stored manifest is of another revision")
    return manifest
