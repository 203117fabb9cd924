"""A peer's view of the registry's catalog: plain values, replaced item by item.

A view is fed by `services.shared.catalog_client`. It is complete once `synced`; its epoch never goes back. What it
says about a revision is a hint until the record's signature has been checked (`verified_record`).

It shows nothing that its own list of restrictions contradicts (`services.shared.restraint`), whatever it was told. That
the list is whole is what a checkpoint says (`services.shared.checkpoint`).
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields, replace
from itertools import chain
from typing import Protocol, runtime_checkable

from services.shared.quotas import NO_QUOTA, Quota
from services.shared.restraint import About, Restraint
from services.shared.statements import Record, StatementError, TrustedKeys, open_statement

# Of more contradictions at once only the number is kept: a hand on the database can make one of every row.
LINES = 10


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


@dataclass(frozen=True, slots=True)
class RestrictionItem:
    """A leaf of the log, at its place in the list of `loraport.log.restrictions`."""

    position: int
    body: bytes


Item = TenantItem | KeyItem | BaseItem | RevisionItem | AliasItem | RootItem | RolloutItem | RestrictionItem


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
    restraint: Restraint = field(default_factory=Restraint)
    # What was told and is not shown: how often, and a line each for the first. Whoever feeds the view raises an alarm
    # and starts both anew.
    contradicted: int = 0
    contradictions: list[str] = field(default_factory=list)
    # Where to look: names of revisions by tenant and adapter, and by weights; of aliases by tenant. `apply` keeps them.
    _of_tenant: dict[str, dict[str, set[str]]] = field(default_factory=dict)
    _of_weights: dict[str, tuple[str, ...]] = field(default_factory=dict)
    _aliases: dict[str, set[tuple[str, str, str]]] = field(default_factory=dict)

    def revisions_of(self, tenant: str) -> Iterator[RevisionItem]:
        """Yields a tenant's own revisions."""
        return map(self.revisions.__getitem__, chain.from_iterable(self._of_tenant.get(tenant, {}).values()))

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
        """Takes a part of the catalog, its restrictions first; returns the revisions that are newly REVOKED by it, or
        ACTIVE no longer.

        Raises:
            RestrictionError: a restriction does not follow those that came before. No revision was touched, so that
                whatever is ACTIVE no longer is told when a whole view takes the place of this one.
        """
        items = list(items)
        abouts = [self.restraint.take(item.position, item.body) for item in items if isinstance(item, RestrictionItem)]
        revoked = self._restrain({about for about in abouts if about is not None}) if self.synced else []
        for item in items:
            match item:
                case TenantItem():
                    self.tenants[item.tenant] = item
                case KeyItem():
                    self.keys[item.key_id] = item
                case BaseItem():
                    self.bases[item.base_model] = item
                case RevisionItem():
                    # Parts of a state that is not complete may be of different moments.
                    shown = self._allowed(item) if self.synced else item
                    before = self.revisions.get(item.revision_id)
                    was = before.state if before is not None else ""
                    if was != shown.state and (shown.state == "REVOKED" or was == "ACTIVE"):
                        revoked.append(shown)
                    self._keep(shown, before)
                case AliasItem():
                    self._point(item)
                case RolloutItem():
                    self._follow(item)
        self.epoch = max(self.epoch, epoch)
        if synced and not self.synced:
            self.revisions |= {name: self._allowed(item) for name, item in self.revisions.items()}
        self.synced = self.synced or synced
        return revoked

    def replace(self, other: "CatalogView", *, least: int | None = None) -> list[RevisionItem]:
        """Takes over a complete view; returns the revisions that were usable here and are no longer.

        `least` is the epoch that it must have reached, None for this one's.

        Raises:
            ValueError: it is older than this one.
        """
        gone = [
            item
            for item in self.revisions.values()
            if item.state == "ACTIVE"
            and (item.revision_id not in other.revisions or other.revisions[item.revision_id].state != "ACTIVE")
        ]
        least = self.epoch if least is None else least
        if other.epoch < least:
            raise ValueError(f"the catalog went back from epoch {least} to {other.epoch}")
        for part in fields(self):
            setattr(self, part.name, getattr(other, part.name))
        return gone

    def _allowed(self, item: RevisionItem, *, told: bool = True) -> RevisionItem:
        """Returns an item without what the restrictions rule out; where it was `told` so, that is a contradiction."""
        if item.state != "ACTIVE":
            return item
        shown, restraint = item, self.restraint
        state = restraint.ended(item.tenant, item.adapter, item.version)
        if state:
            shown = replace(item, state=state)
        elif not restraint.shares(item.tenant, item.adapter, item.shared_tenants):
            shown = replace(item, shared_tenants=frozenset())
        if shown is not item and told:
            self.contradicted += 1
            if self.contradicted <= LINES:
                what = f"ACTIVE, the log says {state}" if state else "shared otherwise than the log says"
                self.contradictions.append(f"{item.tenant}/{item.adapter} v{item.version} is shown as {what}")
        return shown

    def _restrain(self, abouts: set[About]) -> list[RevisionItem]:
        """Takes back what new restrictions are about; returns what may serve no longer. The items as they are after
        them follow, from whoever is honest."""
        gone = []
        for tenant, adapter in {about[:2] for about in abouts}:
            for item in map(self.revisions.__getitem__, self._of_tenant.get(tenant, {}).get(adapter, ())):
                if (tenant, adapter, 0) in abouts or (tenant, adapter, item.version) in abouts:
                    shown = self._allowed(item, told=False)
                    if shown.state != item.state:
                        gone.append(shown)
                    self.revisions[item.revision_id] = shown
        return gone

    def _keep(self, item: RevisionItem, before: RevisionItem | None) -> None:
        self.revisions[item.revision_id] = item
        if before is None or before.weights_digest != item.weights_digest:
            names = self._of_weights.get(item.weights_digest, ())
            self._of_weights[item.weights_digest] = (*names, item.revision_id)
        if before is None or (before.tenant, before.adapter) != (item.tenant, item.adapter):
            if before is not None:
                theirs = self._of_tenant[before.tenant]
                theirs[before.adapter].discard(item.revision_id)
                if not theirs[before.adapter]:
                    del theirs[before.adapter]
            self._of_tenant.setdefault(item.tenant, {}).setdefault(item.adapter, set()).add(item.revision_id)

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
