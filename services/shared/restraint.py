"""What the restrictions of the log say about revisions and adapters, as far as they have come. Pure.

A revision that was REVOKED or QUARANTINED once never serves again: also a record that stands behind that in the log
does not count, since whoever writes to the database can put an old one there once more. An adapter is shared with
exactly the tenants of its newest SHARED leaf, with nobody if there is none.
"""

from dataclasses import dataclass, field
from functools import lru_cache

from loraport.log.leaf import Kind, Leaf
from loraport.log.replay import NOBODY, shared_digest
from loraport.log.restrictions import RestrictionError, Restrictions
from services.shared.errors import LoraportError
from services.shared.names import parse_adapter, parse_revision

# What a restriction is about: (tenant, adapter, version), version 0 for the adapter itself.
About = tuple[str, str, int]


@dataclass(slots=True)
class Restraint:
    """The list, and what it says."""

    restrictions: Restrictions = field(default_factory=Restrictions)
    _ended: dict[About, str] = field(default_factory=dict)
    _shared: dict[tuple[str, str], str] = field(default_factory=dict)

    def take(self, position: int, body: bytes) -> About | None:
        """Takes the next restriction; returns what it is about, None when that is no revision or adapter, or not new.

        Raises:
            RestrictionError: it cannot be the next one.
        """
        leaf = self.restrictions.take(position, body)
        if leaf is None or leaf.kind == Kind.TRUST_ROOT:
            return None
        about = tenant, adapter, version = _about(leaf)
        if version:
            self._ended[about] = leaf.kind
        else:
            self._shared[tenant, adapter] = leaf.digest
        return about

    def ended(self, tenant: str, adapter: str, version: int) -> str:
        """Returns the state in which a revision ended; empty when it has not."""
        return self._ended.get((tenant, adapter, version), "")

    def shares(self, tenant: str, adapter: str, tenants: frozenset[str]) -> bool:
        """Says whether an adapter is shared with exactly these tenants."""
        said = self._shared.get((tenant, adapter), NOBODY)
        return said == (_digest(tenants) if tenants else NOBODY)


@lru_cache(maxsize=64)
def _digest(tenants: frozenset[str]) -> str:
    """Kept, since each revision of an adapter names them all: 0.24 ms for a thousand."""
    return shared_digest(tenants)


def _about(leaf: Leaf) -> About:
    shared, resource = leaf.kind == Kind.SHARED, leaf.resource
    try:
        name, version = (parse_adapter(resource), 0) if shared else parse_revision(resource)
    except LoraportError:
        raise RestrictionError(f"leaf {leaf.index}, a {leaf.kind}, is about nothing that could be restricted") from None
    return name.tenant, name.adapter, version
