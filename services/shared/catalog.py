"""A peer's view of the registry's catalog: plain values, replaced item by item.

A view is fed by `services.shared.catalog_client`. It is complete once `synced`; its epoch never goes back. What it
says about a revision is a hint until the record's signature has been checked (`verified_record`).
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields
from typing import Protocol, runtime_checkable

from services.shared.quotas import NO_QUOTA, Quota
from services.shared.statements import Record, StatementError, TrustedKeys, open_statement


@dataclass(frozen=True, slots=True)
class TenantItem:
    """A tenant. `weight` > 0 is its share under contention."""

    tenant: str
    weight: float
    base_allowed: bool
    quota: Quota = NO_QUOTA


@dataclass(frozen=True, slots=True)
class KeyItem:
    """An API key: only a keyed hash of its secret. `expires` is seconds since the epoch, None for never."""

    key_id: str
    tenant: str
    secret_hmac: bytes
    scopes: frozenset[str]
    expires: float | None
    revoked: bool


@dataclass(frozen=True, slots=True)
class BaseItem:
    """A base model by name and identity."""

    base_model: str
    base_id: str


@dataclass(frozen=True, slots=True)
class RevisionItem:
    """A revision. `state` is PENDING, VERIFIED, ACTIVE, QUARANTINED or REVOKED.

    `record_leaf` is where the registry says that the record is in its log; 0 is never a record's.
    """

    revision_id: str
    tenant: str
    adapter: str
    version: int
    state: str
    base_model: str
    weights_digest: str
    size_bytes: int
    max_rank: int
    record_envelope: bytes
    shared_tenants: frozenset[str]
    record_leaf: int = 0


@dataclass(frozen=True, slots=True)
class AliasItem:
    """An alias; an empty `revision_id` means that it was removed."""

    tenant: str
    adapter: str
    alias: str
    revision_id: str


@dataclass(frozen=True, slots=True)
class RootItem:
    """A trust root, for `services.shared.trust` to judge; it is no part of a view."""

    version: int
    envelope: bytes


@dataclass(frozen=True, slots=True)
class PromptItem:
    """A prompt of a rollout: text, or token ids where `text` is empty. Scored from its second token on."""

    text: str = ""
    token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutItem:
    """A rollout. `state` is PRELOADING, PROBING, SHADOWING, SPLITTING, PAUSED, RETAINING or one that `ended`.

    Shares are parts of ten thousand; conversations are asked in an order that `salt` decides. Prompts are there while
    it is PROBING or held in that, the shadow's share while it is SHADOWING. `generation` rises with every move.
    """

    name: str
    tenant: str
    adapter: str
    alias: str
    salt: bytes
    from_revision_id: str
    to_revision_id: str
    base_model: str
    state: str
    share_basis_points: int
    step_index: int
    shadow_basis_points: int
    generation: int
    ended: bool
    golden_prompts: tuple[PromptItem, ...] = ()
    eval_prompts: tuple[PromptItem, ...] = ()


Item = TenantItem | KeyItem | BaseItem | RevisionItem | AliasItem | RootItem | RolloutItem


@dataclass(slots=True)
class CatalogView:
    """The catalog as far as it has been received."""

    epoch: int = 0
    synced: bool = False
    tenants: dict[str, TenantItem] = field(default_factory=dict)
    keys: dict[str, KeyItem] = field(default_factory=dict)
    bases: dict[str, BaseItem] = field(default_factory=dict)
    revisions: dict[str, RevisionItem] = field(default_factory=dict)
    aliases: dict[tuple[str, str, str], AliasItem] = field(default_factory=dict)
    # Running ones only, by (tenant, adapter, alias): an adapter has at most one.
    rollouts: dict[tuple[str, str, str], RolloutItem] = field(default_factory=dict)
    # Where to look: names of revisions by tenant and by weights, of aliases by tenant. `apply` keeps them true.
    _of_tenant: dict[str, set[str]] = field(default_factory=dict)
    _of_weights: dict[str, tuple[str, ...]] = field(default_factory=dict)
    _aliases: dict[str, set[tuple[str, str, str]]] = field(default_factory=dict)

    def revisions_of(self, tenant: str) -> Iterator[RevisionItem]:
        """Yields a tenant's own revisions."""
        return map(self.revisions.__getitem__, self._of_tenant.get(tenant, ()))

    def aliases_of(self, tenant: str) -> Iterator[AliasItem]:
        """Yields the aliases of a tenant's own adapters."""
        return map(self.aliases.__getitem__, self._aliases.get(tenant, ()))

    def active_weights(self, digest: str) -> bool:
        """Says whether an ACTIVE revision has weights of this digest."""
        found = map(self.revisions.__getitem__, self._of_weights.get(digest, ()))
        return any(item.weights_digest == digest and item.state == "ACTIVE" for item in found)

    def quota_of(self, tenant: str) -> Quota:
        """Returns a tenant's quotas; one that is not known has none."""
        owner = self.tenants.get(tenant)
        return owner.quota if owner is not None else NO_QUOTA

    def apply(self, items: Iterable[Item], *, epoch: int, synced: bool) -> list[RevisionItem]:
        """Takes a part of the catalog; returns the revisions that are newly REVOKED by it, or ACTIVE no longer."""
        revoked = []
        for item in items:
            match item:
                case TenantItem():
                    self.tenants[item.tenant] = item
                case KeyItem():
                    self.keys[item.key_id] = item
                case BaseItem():
                    self.bases[item.base_model] = item
                case RevisionItem():
                    before = self.revisions.get(item.revision_id)
                    was = before.state if before is not None else ""
                    if was != item.state and (item.state == "REVOKED" or was == "ACTIVE"):
                        revoked.append(item)
                    self._keep(item, before)
                case AliasItem():
                    self._point(item)
                case RolloutItem():
                    self._follow(item)
        self.epoch = max(self.epoch, epoch)
        self.synced = self.synced or synced
        return revoked

    def replace(self, other: "CatalogView") -> list[RevisionItem]:
        """Takes over a complete view; returns the revisions that were usable here and are no longer."""
        gone = [
            item
            for item in self.revisions.values()
            if item.state == "ACTIVE"
            and (item.revision_id not in other.revisions or other.revisions[item.revision_id].state != "ACTIVE")
        ]
        if other.epoch < self.epoch:
            raise ValueError(f"the catalog went back from epoch {self.epoch} to {other.epoch}")
        for part in fields(self):
            setattr(self, part.name, getattr(other, part.name))
        return gone

    def _keep(self, item: RevisionItem, before: RevisionItem | None) -> None:
        self.revisions[item.revision_id] = item
        if before is None or before.weights_digest != item.weights_digest:
            names = self._of_weights.get(item.weights_digest, ())
            self._of_weights[item.weights_digest] = (*names, item.revision_id)
        if before is None or before.tenant != item.tenant:
            if before is not None:
                self._of_tenant[before.tenant].discard(item.revision_id)
            self._of_tenant.setdefault(item.tenant, set()).add(item.revision_id)

    def _point(self, item: AliasItem) -> None:
        key = (item.tenant, item.adapter, item.alias)
        if item.revision_id:
            self.aliases[key] = item
            self._aliases.setdefault(item.tenant, set()).add(key)
        elif self.aliases.pop(key, None) is not None:
            self._aliases[item.tenant].discard(key)

    def _follow(self, item: RolloutItem) -> None:
        key = (item.tenant, item.adapter, item.alias)
        if not item.ended:
            self.rollouts[key] = item
        elif key in self.rollouts and self.rollouts[key].name == item.name:
            # The end of an earlier one says nothing about the one that runs now.
            del self.rollouts[key]


@runtime_checkable
class KeysByPlace(Protocol):
    """Keys that depend on where in the log a record is; a plain mapping of keys holds for every place."""

    def at(self, log_index: int) -> TrustedKeys:
        """Returns the keys whose records at that place count."""


def verified_record(item: RevisionItem, trusted: TrustedKeys | KeysByPlace) -> Record:
    """Returns the registry's signed record of an ACTIVE revision, checked against the view's item.

    Where the key is one of an earlier root, the record's place in the log decides; who relies on it has that proven.

    Raises:
        StatementError: there is no valid record, or it speaks of something else.
    """
    keys = trusted.at(item.record_leaf) if isinstance(trusted, KeysByPlace) else trusted
    record = open_statement(Record, item.record_envelope, keys)
    claims = (record.revision_id, record.tenant, record.adapter, record.version, record.weights_digest)
    shown = (item.revision_id, item.tenant, item.adapter, item.version, item.weights_digest)
    if claims != shown or record.state != "ACTIVE" or item.state != "ACTIVE":
        raise StatementError("the record and the catalog disagree")
    return record
