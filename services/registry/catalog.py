"""The rules of publishing: given what is known, what may be written. No I/O, no clock.

Announcing. A revision id is the digest of its content, so it does not depend on a name or a version. For each id there
is one current row, and these rules, in this order, decide what an announcement does to it:

1. the same manifest again while PENDING: nothing changes, a new upload session is issued;
2. the same content that is VERIFIED, ACTIVE or REVOKED: REVISION_EXISTS. Verified content needs no second proof, and
   revoked content stays revoked whatever number it is given;
3. a version that is not above every earlier one of the adapter, the quarantined ones included: VERSION_NOT_RISING; or
   that is 2^32 or more above: VERSION_TOO_FAR, for whoever steals a publisher's key could use all versions up by one;
4. the same content that is PENDING or QUARANTINED under an earlier announcement: that row is superseded (it stays as
   history, QUARANTINED) and the new announcement becomes the current one.

Rule 4 is why nobody can block a publisher for good. A quarantined row says that the *uploaded bytes* failed, not that
the content is bad: whoever spoils an upload costs the publisher one version number, and whoever holds one up costs it a
new session (rule 1), under which the loader ends what it still receives under an older one. It is safe because only a
signature of the tenant announces, and because verification is a function of the bytes: content that is really bad is
quarantined again.

When a signer is revoked since a place in the log, what it announced from there on counts as earlier no longer; the
numbers that it used up are not given again.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from loraport.bundle.base import BaseSpec
from loraport.bundle.manifest import Manifest
from loraport.bundle.verdict import ModuleEntry
from services.registry.lifecycle import Event, IllegalMove, State, after
from services.registry.records import AdapterRow, AliasRow, Findings, RevisionRow, TenantRow, etag_of
from services.shared.errors import FaultList, LoraportError
from services.shared.quotas import quota_exceeded
from services.shared.statements import CLOCK_SKEW_S, Verification

MAX_REASON = 512
MAX_SHARED = 1000
# Room for days (YYYYMMDD) and for seconds since the epoch, not for minutes (YYYYMMDDhhmm) or milliseconds; the versions
# there are last for two million such steps.
MAX_STEP = 1 << 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Announcement:
    """What to write for an announcement: nothing (RENEW), or a new row that may take the place of `superseded`."""

    action: Literal["RENEW", "CREATE"]
    superseded: RevisionRow | None = None


def check_manifest(manifest: Manifest, *, tenant: str, max_weights_bytes: int, max_rank: int) -> None:
    """Checks what a manifest says against the request and the limits.

    Raises:
        LoraportError: INVALID_MANIFEST with every fault.
    """
    faults = FaultList()
    faults.require(manifest.tenant == tenant, "identity.tenant", f"is not the tenant asked for, {tenant}")
    faults.require(
        manifest.weights_size <= max_weights_bytes,
        "identity.weights.size_bytes",
        f"{manifest.weights_size} is above the limit of {max_weights_bytes}",
    )
    for module in manifest.modules:
        if module.rank > max_rank:
            faults.add(module.path, f"rank {module.rank} is above the limit of {max_rank}", "RANK_LIMIT")
    faults.raise_if_any("INVALID_MANIFEST")


def check_modules(modules: Iterable[ModuleEntry], base: BaseSpec) -> None:
    """Checks the signed module table against the base's.

    Raises:
        LoraportError: INVALID_MANIFEST with every fault.
    """
    known = {module.path: module for module in base.modules}
    faults = FaultList()
    for module in modules:
        target = known.get(module.path)
        if target is None:
            faults.add(module.path, "the base has no such module", "UNKNOWN_TENSOR")
        elif (module.in_features, module.out_features) != (target.in_features, target.out_features):
            shape = f"{target.in_features} to {target.out_features}"
            faults.add(module.path, f"the base's module maps {shape} features", "SHAPE_MISMATCH")
    faults.raise_if_any("INVALID_MANIFEST")


def announce(
    manifest: Manifest, *, manifest_digest: str, adapter: AdapterRow | None, same: RevisionRow | None, taken: bool
) -> Announcement:
    """Decides on an announcement; see the module's text. `same` is the current row of the manifest's revision id;
    `taken` says whether the adapter has a row of its version.

    Raises:
        LoraportError: REVISION_EXISTS, VERSION_NOT_RISING or VERSION_TOO_FAR.
    """
    if same is not None:
        if same.state == State.PENDING and same.manifest_digest == manifest_digest:
            return Announcement(action="RENEW")
        if same.state not in (State.PENDING, State.QUARANTINED):
            raise LoraportError(
                "REVISION_EXISTS",
                f"the same content is registered as {same.name} and is {same.state}",
                metadata={"name": same.name, "version": str(same.version), "state": same.state},
            )
    latest = adapter.latest_version if adapter is not None else 0
    if manifest.version <= latest:
        raise LoraportError(
            "VERSION_NOT_RISING",
            f"version {manifest.version} is not above {latest}, the latest of {adapter.name if adapter else ''}",
            metadata={"latest_version": str(latest)},
        )
    if taken:
        raise LoraportError(
            "VERSION_NOT_RISING",
            f"version {manifest.version} was announced by a signer that is revoked; {latest} is the latest that counts",
            metadata={"latest_version": str(latest)},
        )
    if manifest.version - latest >= MAX_STEP:
        raise LoraportError(
            "VERSION_TOO_FAR",
            f"version {manifest.version} is {MAX_STEP} or more above {latest}, the latest",
            metadata={"latest_version": str(latest)},
        )
    return Announcement(action="CREATE", superseded=same)


def check_quota(
    owner: TenantRow, used: tuple[int, int], *, new_adapter: bool, row: RevisionRow, superseded: RevisionRow | None
) -> None:
    """Checks what a tenant would keep after an announcement; `used` is its adapters and its bytes before it.

    Raises:
        LoraportError: QUOTA_EXCEEDED. Waiting does not help, so there is no delay in it.
    """
    adapters, stored = used
    freed = superseded.size_bytes if superseded is not None and superseded.state != State.QUARANTINED else 0
    for name, limit, after_it in (
        ("adapter_count", owner.quota.adapter_count, adapters + 1 if new_adapter else 0),
        ("stored_bytes", owner.quota.stored_bytes, stored - freed + row.size_bytes),
    ):
        if limit is not None and after_it > limit:
            raise quota_exceeded(owner.tenant, name, limit)


def superseded_reasons(row: RevisionRow, version: int) -> Findings:
    """Returns the reasons of a row whose content was announced again as `version`."""
    return (*row.reasons, ("SUPERSEDED", f"the same content was announced again as v{version}", ""))


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """A new state of a revision; `changed` is false when there is nothing to write."""

    state: State
    changed: bool
    reasons: Findings = ()
    warnings: Findings = ()


def admit(row: RevisionRow, verification: Verification) -> Move:
    """Decides on the loader's word about a current revision.

    A refusal needs to name the revision only: the digest of the bytes that came may well be the fault. An admission
    must agree with the registered revision in everything.

    Raises:
        LoraportError: INVALID_VERIFICATION with every fault, or INVALID_STATE.
    """
    faults = FaultList()
    faults.require(verification.tenant == row.tenant, "tenant", "is not the revision's")
    faults.require(
        verification.verified_time + CLOCK_SKEW_S >= row.create_us // 1_000_000,
        "verified_time",
        "is before the revision was announced",
    )
    if verification.admitted:
        for field, said, registered in (
            ("base_id", verification.base_id, row.base_id),
            ("weights_digest", verification.weights_digest, row.weights_digest),
            ("weights_size", verification.weights_size, row.size_bytes),
        ):
            faults.require(said == registered, field, "is not what was registered")
        faults.require(not verification.violations, "violations", "an admitted revision has none")
    else:
        faults.require(bool(verification.violations), "violations", "a refused revision has at least one")
    faults.raise_if_any("INVALID_VERIFICATION")
    state = _move(row, Event.VERIFY if verification.admitted else Event.REFUSE)
    return Move(
        state=state, changed=state != row.state, reasons=verification.violations, warnings=verification.warnings
    )


def approve(row: RevisionRow, *, etag: str) -> Move:
    """Decides on an approval. Raises LoraportError (STALE_ETAG, INVALID_STATE)."""
    check_etag(etag, row.etag, row.name)
    state = _move(row, Event.APPROVE)
    return Move(state=state, changed=state != row.state, warnings=row.warnings)


def revoke(row: RevisionRow, *, etag: str, reason: str) -> Move:
    """Decides on a revocation.

    Only the current announcement of some content can be revoked, so that what is revoked is never still served under
    a newer number.

    Raises:
        LoraportError: INVALID_REQUEST, STALE_ETAG, or INVALID_STATE for a superseded announcement.
    """
    check_reason(reason)
    check_etag(etag, row.etag, row.name)
    if not row.current:
        raise LoraportError(
            "INVALID_STATE",
            f"{row.name} was superseded; revoke {row.revision_id}",
            metadata={"state": row.state, "revision_id": row.revision_id},
        )
    state = _move(row, Event.REVOKE)
    return Move(
        state=state,
        changed=state != row.state,
        reasons=(*row.reasons, ("REVOKED", reason, "")),
        warnings=row.warnings,
    )


def set_alias(
    adapter: AdapterRow,
    target: RevisionRow | None,
    existing: AliasRow | None,
    *,
    etag: str,
    now: bool,
    reason: str,
) -> bool:
    """Decides on pointing an alias at `target`; returns whether there is something to write.

    An alias that exists serves, so moving it needs `now` and a reason; a removed one counts as not existing.

    Raises:
        LoraportError: STALE_ETAG, REVISION_NOT_FOUND, REVISION_NOT_ACTIVE, ALIAS_LIVE or INVALID_REQUEST.
    """
    live = existing if existing is not None and not existing.removed else None
    check_etag(etag, live.etag if live else "", "the alias")
    if reason:
        check_reason(reason)
    if target is None or target.adapter_id != adapter.adapter_id:
        raise LoraportError("REVISION_NOT_FOUND", f"{adapter.name} has no such revision", subject="revision_id")
    if target.state != State.ACTIVE:
        raise LoraportError(
            "REVISION_NOT_ACTIVE", f"{target.name} is {target.state}, not ACTIVE", metadata={"state": target.state}
        )
    if live is None:
        return True
    if live.revision_id == target.revision_id:
        return False
    if not (now and reason):
        raise LoraportError(
            "ALIAS_LIVE",
            f"{live.name} serves v{live.version}; use a rollout, or set now and a reason",
            metadata={"version": str(live.version)},
        )
    return True


def share(adapter: AdapterRow, tenants: Iterable[str]) -> tuple[str, ...] | None:
    """Decides on who may use an adapter besides its owner; returns the sorted tenants, None when nothing changes.

    Raises:
        LoraportError: INVALID_REQUEST, the owner is among them or they are too many.
    """
    wanted = tuple(sorted(set(tenants)))
    faults = FaultList()
    faults.require(adapter.tenant not in wanted, "shared_tenants", f"tenants/{adapter.tenant} owns the adapter")
    faults.require(len(wanted) <= MAX_SHARED, "shared_tenants", f"must be at most {MAX_SHARED}")
    faults.raise_if_any()
    return wanted if wanted != adapter.shared_tenants else None


def check_etag(given: str, actual: str, what: str) -> None:
    """Raises LoraportError (STALE_ETAG) when an etag was given and is not the present one."""
    if given and given != actual:
        raise LoraportError("STALE_ETAG", f"{what} changed since it was read", metadata={"etag": actual})


def check_reason(reason: str) -> None:
    """Raises LoraportError (INVALID_REQUEST) unless `reason` has 1 to 512 characters."""
    if not 1 <= len(reason) <= MAX_REASON:
        raise LoraportError("INVALID_REQUEST", f"reason must have 1 to {MAX_REASON} characters", subject="reason")


def base_digests(manifest: Manifest) -> Mapping[str, str]:
    """Returns the three digests that name a manifest's base."""
    return {
        "weights": manifest.base_weights_digest,
        "config": manifest.base_config_digest,
        "tokenizer": manifest.base_tokenizer_digest,
    }


def _move(row: RevisionRow, event: Event) -> State:
    try:
        return after(row.state, event)
    except IllegalMove as error:
        raise LoraportError(
            "INVALID_STATE", f"{row.name}: {error}", metadata={"state": row.state, "etag": etag_of(row.epoch)}
        ) from None
