"""From a bundle's directory to a revision that may serve.

The publisher runs the very verification that the loader runs: a bundle that would be refused never leaves this
machine. What is signed is derived from the bytes that are then sent; the loader derives it again from the bytes that
arrived.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO

from loraport.admin import AdminClient
from loraport.bundle.base import BaseSpec
from loraport.bundle.bundle_dir import BundleFiles, read_bundle_dir
from loraport.bundle.envelope import IN_TOTO_PAYLOAD_TYPE, Signer, claimed_payload, sign_envelope
from loraport.bundle.manifest import build_manifest, parse_manifest
from loraport.bundle.verdict import Verdict, Violation
from loraport.bundle.verify import verify_bundle
from loraport.errors import LoraportError
from loraport.loader.v1.loader_service_pb2 import FileChunk, ImportRequest, UploadRequest
from loraport.registry.v1.adapter_service_pb2 import Revision
from loraport.sources import Source
from loraport.types.v1.types_pb2 import StageReport

CHUNK_BYTES = 256 * 1024
REFUSED = "REFUSED"

Observe = Callable[[StageReport], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Publication:
    """What became of a bundle.

    `state` is a revision's state, or REFUSED when the bundle was refused before anything was sent; `revision_id` is
    then None. `version` is the publisher's number. `reasons` and `warnings` are as verification gave them.
    """

    revision_id: str | None
    state: str
    version: int
    reasons: tuple[Violation, ...] = ()
    warnings: tuple[Violation, ...] = ()

    @property
    def accepted(self) -> bool:
        """True when the revision may be approved or serves already."""
        return self.state in ("VERIFIED", "ACTIVE")


def state_name(revision: Revision) -> str:
    """Returns a revision's state without its prefix, e.g. `ACTIVE`."""
    return Revision.State.Name(revision.state).removeprefix("STATE_")


def next_version(admin: AdminClient, tenant: str, adapter: str) -> int:
    """Returns the version after the highest one ever registered, 1 for a new adapter."""
    try:
        return int(admin.get_adapter(tenant, adapter).latest_version) + 1
    except LoraportError as error:
        if error.reason == "ADAPTER_NOT_FOUND":
            return 1
        raise


def publish(
    admin: AdminClient,
    directory: str | Path,
    *,
    tenant: str,
    adapter: str,
    base: str,
    signer: Signer | Sequence[Signer],
    version: int | None = None,
    approve: bool = False,
    alias: str | None = None,
    notes: str = "",
    source: Source | None = None,
    observe: Observe | None = None,
) -> Publication:
    """Verifies, signs, registers and uploads a bundle; on request approves it and points an alias at it.

    `base` is the id of a registered base model; `signer` is several where the tenant needs several. `version` defaults
    to the one after the latest. With `source` the loader fetches the bytes from there instead, and `observe` hears of
    its stages; what is signed are the bytes of `directory` all the same. Publishing the same bytes under the same
    adapter again changes nothing, takes up an interrupted upload, and still approves and sets the alias.

    Raises:
        LoraportError: a service refused a step.
        BundleDirError: `directory` cannot be read.
        OSError: a file cannot be read.
    """
    spec = admin.base_spec(base)
    with read_bundle_dir(directory) as files:
        verdict = verify_files(files, base=spec, tenant=tenant)
        number = version if version is not None else next_version(admin, tenant, adapter)
        if verdict.revision_id is None:
            faults, warnings = verdict.violations, verdict.warnings
            return Publication(revision_id=None, state=REFUSED, version=number, reasons=faults, warnings=warnings)
        known = _find_revision(admin, verdict, tenant, adapter, version)
        if known is None:
            origin = _origin(directory, source)
            envelope = sign_manifest(verdict, signer, adapter=adapter, version=number, source=origin, notes=notes)
        else:
            number, envelope = int(known.version), known.manifest_envelope
        if known is None or state_name(known) == "PENDING":
            session = admin.register_revision(tenant, envelope).upload_session
            state, reasons = (
                _upload(admin, session, files) if source is None else _fetch(admin, session, source, observe)
            )
        else:
            state, reasons = state_name(known), _violations(known.reasons)
    publication = Publication(
        revision_id=verdict.revision_id, state=state, version=number, reasons=reasons, warnings=verdict.warnings
    )
    return _put_into_service(admin, publication, tenant, adapter, approve=approve, alias=alias)


def verify_files(
    files: BundleFiles, *, base: BaseSpec, tenant: str, training: Mapping[str, str] | None = None
) -> Verdict:
    """Verifies an open bundle and leaves its weights at their beginning.

    `training` is provenance that the publisher declares; it is part of what the revision id covers.

    Raises:
        OSError: a file cannot be read.
    """
    verdict = verify_bundle(
        files.config,
        files.weights,
        base=base,
        tenant=tenant,
        other_files=files.ignored,
        file_violations=files.violations,
        training=training,
    )
    if files.weights is not None:
        files.weights.seek(0)
    return verdict


def sign_manifest(
    verdict: Verdict,
    signer: Signer | Sequence[Signer],
    *,
    adapter: str,
    version: int,
    source: str | tuple[str, str],
    notes: str = "",
) -> bytes:
    """Returns the signed manifest of an admitted bundle, created now, from the directory called `source`.

    Another source is a pair of kind and URI.

    Raises:
        ManifestError: the bundle was not admitted, or an argument is not legal.
    """
    kind, uri = ("directory", source) if isinstance(source, str) else source
    manifest = build_manifest(
        verdict,
        adapter=adapter,
        version=version,
        created_time=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        source={"kind": kind, "uri": uri or "bundle"},
        notes=notes,
    )
    return sign_envelope(IN_TOTO_PAYLOAD_TYPE, manifest, signer)


def upload_parts(session: bytes, config: bytes, weights: BinaryIO) -> Iterator[UploadRequest]:
    """Yields an upload: the session, the config, the weights in pieces. Reads `weights` from where it stands."""
    yield UploadRequest(session=session)
    yield UploadRequest(chunk=FileChunk(file=FileChunk.FILE_CONFIG, data=config))
    while piece := weights.read(CHUNK_BYTES):
        yield UploadRequest(chunk=FileChunk(file=FileChunk.FILE_WEIGHTS, data=piece))


def _find_revision(
    admin: AdminClient, verdict: Verdict, tenant: str, adapter: str, version: int | None
) -> Revision | None:
    """Returns the revision if these bytes are registered under this adapter (and version, where one is asked for).

    A quarantined announcement, or a pending one of another config, is none of these bytes: they are announced anew,
    under the next version. So an upload that was spoiled on its way costs a version number and nothing else.
    """
    assert verdict.revision_id is not None
    try:
        known = admin.get_revision(verdict.revision_id)
    except LoraportError as error:
        if error.reason == "REVISION_NOT_FOUND":
            return None
        raise
    same = known.name.startswith(f"tenants/{tenant}/adapters/{adapter}/revisions/")
    if same and (state_name(known) == "QUARANTINED" or (state_name(known) == "PENDING" and not _of(verdict, known))):
        return None
    # Anything else is for the registry to judge; it answers REVISION_EXISTS.
    return known if same and version in (None, known.version) else None


def _of(verdict: Verdict, known: Revision) -> bool:
    """Says whether an announcement was signed for the config that was verified now."""
    payload = claimed_payload(known.manifest_envelope, payload_type=IN_TOTO_PAYLOAD_TYPE)
    return parse_manifest(payload).config_digest == verdict.config_digest


def _upload(admin: AdminClient, session: bytes, files: BundleFiles) -> tuple[str, tuple[Violation, ...]]:
    """Sends an open bundle and returns the revision's new state and why it is that."""
    if files.config is None or files.weights is None:
        raise ValueError("only a complete bundle is uploaded")
    response = admin.upload(upload_parts(session, files.config, files.weights))
    return "VERIFIED" if response.admitted else "QUARANTINED", _violations(response.violations)


def _fetch(
    admin: AdminClient, session: bytes, source: Source, observe: Observe | None
) -> tuple[str, tuple[Violation, ...]]:
    """Has the loader fetch a bundle and returns the revision's new state and why it is that."""
    request = ImportRequest()
    request.CopyFrom(source.request)
    request.session = session
    response = admin.import_bundle(request, observe=observe)
    return "VERIFIED" if response.admitted else "QUARANTINED", _violations(response.violations)


def _origin(directory: str | Path, source: Source | None) -> str | tuple[str, str]:
    return Path(directory).absolute().name if source is None else (source.kind, source.uri)


def _put_into_service(
    admin: AdminClient, publication: Publication, tenant: str, adapter: str, *, approve: bool, alias: str | None
) -> Publication:
    revision_id, state = publication.revision_id, publication.state
    if revision_id is None or not publication.accepted:
        return publication
    if approve and state == "VERIFIED":
        state = state_name(admin.approve_revision(revision_id))
    if alias is not None:
        admin.set_alias(tenant, adapter, alias, revision_id)
    return replace(publication, state=state)


def _violations(items: Iterable[Any]) -> tuple[Violation, ...]:
    return tuple(Violation(item.code, item.detail, item.subject) for item in items)
