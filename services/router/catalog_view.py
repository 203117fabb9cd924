"""Which revision a caller means, and whether it may have it.

There is one way through here for everybody: an unknown, a foreign, a hidden and a malformed name all end in the same
`None`, which the caller turns into the same NOT_FOUND. Only a revision that its owner may see but not use is told
apart, for the owner alone. Nothing here ever falls back to the base model.
"""

from collections.abc import Callable
from dataclasses import dataclass

from services.shared.catalog import CatalogView, KeysByPlace, RevisionItem, RolloutItem, TenantItem, verified_record
from services.shared.errors import FaultList, LoraportError
from services.shared.statements import StatementError, TrustedKeys

DEFAULT_ALIAS = "prod"


@dataclass(frozen=True, slots=True)
class Target:
    """Which weights a request names: an adapter through an alias, one revision, or (both None) a base model.

    An adapter goes by its id, or by its full name `tenants/{tenant}/adapters/{adapter}` when another tenant shares it.
    An empty string is a name like any other, and names nothing.
    """

    adapter: str | None = None
    revision_id: str | None = None
    alias: str = ""
    base_model: str = ""

    @property
    def is_base(self) -> bool:
        """Whether the base model itself was asked for."""
        return self.adapter is None and self.revision_id is None


@dataclass(frozen=True, slots=True)
class AdapterSummary:
    """An adapter as its tenant sees it; `aliases` are (alias, revision id, version) in order of alias."""

    adapter: str
    base_model: str
    aliases: tuple[tuple[str, str, int], ...]


def not_found() -> LoraportError:
    """Returns the one answer to every name that the caller may not know about."""
    return LoraportError("ADAPTER_NOT_FOUND")


def check_target(target: Target, faults: FaultList) -> None:
    """Notes fields that contradict each other."""
    if target.adapter is None:
        faults.require(not target.alias, "target.alias", "goes with target.adapter only")
    if not target.is_base:
        faults.require(not target.base_model, "target.base_model", "goes without an adapter or revision only")


def resolve(view: CatalogView, tenant: str, target: Target) -> RevisionItem | None:
    """Returns the revision that `tenant` means and may see, else None. The revision may be in any state."""
    revision_id = target.revision_id
    if target.adapter is not None:
        alias = view.aliases.get((*_owned(tenant, target.adapter), target.alias or DEFAULT_ALIAS))
        revision_id = alias.revision_id if alias is not None else None
    item = view.revisions.get(revision_id or "")
    return item if item is not None and _may_see(item, tenant) else None


def rollout_of(view: CatalogView, target: Target, tenant: str) -> RolloutItem | None:
    """Returns the rollout that moves the alias that is meant, None when none runs."""
    if target.adapter is None:
        return None
    return view.rollouts.get((*_owned(tenant, target.adapter), target.alias or DEFAULT_ALIAS))


def _owned(tenant: str, adapter: str) -> tuple[str, str]:
    """Returns (owner, adapter's id) of an id, which is the caller's own, or of a full name. An id has no slash."""
    match adapter.split("/"):
        case ["tenants", owner, "adapters", name]:
            return owner, name
    return tenant, adapter


def _may_see(item: RevisionItem, tenant: str) -> bool:
    # An owner sees its revisions in every state; others, only what is shared with them and can serve.
    return item.tenant == tenant or (tenant in item.shared_tenants and item.state == "ACTIVE")


def inactive(item: RevisionItem, tenant: str) -> LoraportError:
    """Returns the answer for a visible revision that cannot serve: a reason for its owner, NOT_FOUND for others."""
    if item.tenant != tenant:
        return not_found()
    state = "not verified by this router" if item.state == "ACTIVE" else item.state
    return LoraportError("REVISION_NOT_ACTIVE", f"the revision is {state}", metadata={"state": item.state})


def resolve_base(tenant: TenantItem | None, wanted: str, served: tuple[str, ...]) -> str:
    """Returns the id of the base model that a tenant asks for without an adapter.

    Raises:
        LoraportError: ADAPTER_NOT_FOUND when the tenant may not use bases or there is none of that name;
            INVALID_REQUEST when none was named and there are several.
    """
    if tenant is None or not tenant.base_allowed or not served:
        raise not_found()
    if wanted:
        if wanted not in served:
            raise not_found()
        return wanted
    if len(served) > 1:
        faults = FaultList()
        faults.add("target.base_model", "must be set: there are several base models")
        faults.raise_if_any()
    return served[0]


class RecordChecker:
    """Whether the registry's signature stands behind an item; each record is checked once."""

    def __init__(self, trusted: TrustedKeys | KeysByPlace, *, on_refused: Callable[[RevisionItem, str], None]) -> None:
        self._trusted = trusted
        self._on_refused = on_refused
        self._checked: dict[str, tuple[RevisionItem, str, bool]] = {}

    def forget(self) -> None:
        """Drops what was checked by another trust root."""
        self._checked.clear()

    def is_active(self, view: CatalogView, item: RevisionItem) -> bool:
        """Returns whether the revision is ACTIVE by a valid record for the base that the catalog names."""
        base = view.bases.get(item.base_model)
        base_id = base.base_id if base is not None else ""
        known = self._checked.get(item.revision_id)
        if known is None or known[:2] != (item, base_id):
            known = (item, base_id, self._check(item, base_id))
            self._checked[item.revision_id] = known
        return known[2]

    def _check(self, item: RevisionItem, base_id: str) -> bool:
        if item.state != "ACTIVE":
            return False
        try:
            record = verified_record(item, self._trusted)
        except StatementError as error:
            self._on_refused(item, str(error))
            return False
        if record.base_id != base_id:
            self._on_refused(item, "the record names another base model")
            return False
        return True


def list_adapters(view: CatalogView, tenant: str, *, only: str | None = None) -> list[AdapterSummary]:
    """Returns the tenant's own adapters that can be asked for, or the one that is meant, in order of name.

    That is those with an alias or an ACTIVE revision; one whose every revision waits or is out of service is not
    listed on the user plane. It costs as much as the tenant has itself.
    """
    bases: dict[str, str] = {}
    aliases: dict[str, list[tuple[str, str, int]]] = {}
    for item in view.revisions_of(tenant):
        if item.state == "ACTIVE" and only in (None, item.adapter):
            bases[item.adapter] = item.base_model
    for alias in view.aliases_of(tenant):
        target = view.revisions.get(alias.revision_id)
        if target is not None and only in (None, alias.adapter):
            bases.setdefault(alias.adapter, target.base_model)
            aliases.setdefault(alias.adapter, []).append((alias.alias, alias.revision_id, target.version))
    return [AdapterSummary(name, bases[name], tuple(sorted(aliases.get(name, ())))) for name in sorted(bases)]
