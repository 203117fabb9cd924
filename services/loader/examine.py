"""What quarantine holds: read back once, hashed, verified, compared with what was signed. Blocking.

The bytes that are verified are the ones read back, in a file of this process alone; these same bytes are promoted.
Whatever an upload contains, the answer is a list of violations, not an exception.
"""

import hashlib
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass
from typing import BinaryIO

from loraport.bundle.base import BaseSpec, base_id
from loraport.bundle.digest import PREFIX
from loraport.bundle.manifest import CONFIG_NAME, WEIGHTS_NAME, Manifest
from loraport.bundle.verdict import Limits, Verdict, Violation
from loraport.bundle.verify import verify_bundle
from services.loader.ports import ObjectMissing, ObjectStore
from services.loader.receive import MAX_CONFIG_BYTES, append, open_spool
from services.loader.store import verified_key
from services.shared.errors import LoraportError
from services.shared.statements import UploadSession, Verification

# Violations that only a comparison with the signed manifest can find; the others are in loraport.bundle.codes.
INTAKE_VIOLATIONS = {
    "DIGEST_MISMATCH": "the bytes of a file are not the ones that were signed",
    "IDENTITY_MISMATCH": "the bytes are well-formed, but mean something else than what was signed",
}
# A signed result fits its envelope of 256 KiB, base64 and quoting included.
MAX_ROWS_CHARS = 48_000
MAX_TEXT_CHARS = 600


@dataclass(frozen=True, slots=True)
class Findings:
    """What the bytes are. `weights` is a file of this process alone; the holder closes it."""

    weights: BinaryIO
    weights_digest: str
    weights_size: int
    violations: tuple[Violation, ...]
    warnings: tuple[Violation, ...]

    @property
    def admitted(self) -> bool:
        """Whether nothing is wrong."""
        return not self.violations


def examine(
    store: ObjectStore,
    *,
    config_key: str,
    weights_key: str,
    session: UploadSession,
    manifest: Manifest,
    base: BaseSpec,
    limits: Limits,
    spool_dir: str | None,
    fetched: bool = False,
) -> Findings:
    """Reads both files from quarantine and judges them. Bytes that the loader `fetched` and that are not the ones that
    were signed need not be the caller's to know: that they differ is all that is said of them.

    Raises:
        LoraportError: the store or the spool failed.
    """
    config = b"".join(_pieces(store, config_key, MAX_CONFIG_BYTES + 1))
    weights = open_spool(spool_dir)
    try:
        found, size = hashlib.sha256(), 0
        for piece in _pieces(store, weights_key, session.weights_size + 1):
            found.update(piece)
            size += len(piece)
            append(weights, piece)
        weights_digest = PREFIX + found.hexdigest()
        verdict = verify_bundle(
            config,
            weights,
            base=base,
            tenant=session.tenant,
            limits=limits,
            training=manifest.training,
        )
    except BaseException:
        weights.close()
        raise
    others = _digest_faults(session, verdict, weights_digest, told=not fetched)
    if fetched and others:
        return Findings(weights, weights_digest, size, tuple(others), ())
    violations = [*others, *verdict.violations]
    if verdict.admitted and verdict.revision_id != session.revision_id:
        violations.extend(_identity_faults(manifest, verdict, explained=bool(violations)))
    return Findings(weights, weights_digest, size, tuple(violations), verdict.warnings)


def promote(store: ObjectStore, findings: Findings) -> None:
    """Puts verified bytes under their digest and reads them back.

    Bytes that lie there already and are right stay as they are: a write that fails half-way could only harm them.

    Raises:
        LoraportError: STORE_UNAVAILABLE, STORAGE_FULL, or DIGEST_MISMATCH when the store does not keep what it takes.
    """
    key = verified_key(findings.weights_digest)
    if _stored_digest(store, key, findings.weights_size) == findings.weights_digest:
        return
    findings.weights.seek(0)
    store.put("verified", key, findings.weights, findings.weights_size)
    if _stored_digest(store, key, findings.weights_size) != findings.weights_digest:
        raise LoraportError("DIGEST_MISMATCH", "the store returned other bytes than were written")


def verification_of(
    session: UploadSession, base: BaseSpec, findings: Findings, *, verifier: str, now: float
) -> Verification:
    """Returns the statement about `findings`, for the loader to sign."""
    return Verification(
        revision_id=session.revision_id,
        tenant=session.tenant,
        base_id=base_id(base),
        weights_digest=findings.weights_digest,
        weights_size=findings.weights_size,
        admitted=findings.admitted,
        violations=_rows(findings.violations),
        warnings=_rows(findings.warnings),
        verifier=verifier,
        verified_time=int(now),
    )


def _digest_faults(session: UploadSession, verdict: Verdict, weights_digest: str, *, told: bool) -> list[Violation]:
    """Says which files have other bytes than were signed, and if `told` which digests they have."""
    pairs = (
        (CONFIG_NAME, session.config_digest, verdict.config_digest),
        (WEIGHTS_NAME, session.weights_digest, weights_digest),
    )
    return [
        Violation(
            "DIGEST_MISMATCH",
            f"the bytes of {name} are not the signed ones" + (f": {found}, signed was {signed}" if told else ""),
            name,
        )
        for name, signed, found in pairs
        if found != signed
    ]


def _identity_faults(manifest: Manifest, verdict: Verdict, *, explained: bool) -> list[Violation]:
    """Says which parts of the identity differ; `explained` when other digests of the weights do it already."""
    found = verdict.identity or {}
    parts = sorted(key for key in manifest.identity if key != "weights" and manifest.identity[key] != found.get(key))
    if explained and not parts:
        return []
    return [
        Violation("IDENTITY_MISMATCH", f"the bytes differ from the signed manifest in: {', '.join(parts) or 'weights'}")
    ]


def _pieces(store: ObjectStore, key: str, limit: int) -> Iterable[bytes]:
    """Yields at most `limit` bytes of a quarantined object; one that has vanished has none."""
    left = limit
    try:
        with closing(store.read("quarantine", key)) as pieces:
            for piece in pieces:
                yield piece[:left]
                left -= len(piece[:left])
                if left == 0:
                    return
    except ObjectMissing:
        raise LoraportError("STORE_UNAVAILABLE", "the store lost a file in quarantine", retry_after_s=1.0) from None


def _stored_digest(store: ObjectStore, key: str, size_bytes: int) -> str | None:
    """Returns the digest of a verified object, None when there is none or it has more than `size_bytes`."""
    found, size = hashlib.sha256(), 0
    try:
        with closing(store.read("verified", key)) as pieces:
            for piece in pieces:
                found.update(piece)
                size += len(piece)
                if size > size_bytes:
                    return None
    except ObjectMissing:
        return None
    return PREFIX + found.hexdigest()


def _rows(violations: Iterable[Violation]) -> tuple[tuple[str, str, str], ...]:
    """Returns rows of clean text, as many as fit a signed statement."""
    rows: list[tuple[str, str, str]] = []
    room = MAX_ROWS_CHARS
    left_out = 0
    for violation in violations:
        row = (violation.code, _text(violation.detail), _text(violation.subject))
        room -= sum(map(len, row)) + 12
        if room < 0:
            left_out += 1
        else:
            rows.append(row)
    if left_out:
        rows.append(("MORE_VIOLATIONS", f"{left_out} more are not listed", ""))
    return tuple(rows)


def _text(text: str) -> str:
    """Returns text that can be signed and shown: printable, without halves of surrogate pairs, of limited length."""
    return "".join(letter if letter.isprintable() else "�" for letter in text[:MAX_TEXT_CHARS])
