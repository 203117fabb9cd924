"""What the registry must show, if it shows what its log says. Pure.

The log is replayed into a flat table, resource name → what it is: a revision's state, an alias's target, a signer's
key, whether an API key is revoked, a base model's id, whom an adapter is shared with, a tenant's newest delegation. The
same table made from what the registry shows today must be equal; a row of its database that was changed behind its back
is a difference.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from loraport.bundle.canonical import canonical
from loraport.bundle.digest import sha256_digest
from loraport.log.audit import Finding
from loraport.log.leaf import Kind, Leaf

_STATES = {
    Kind.ANNOUNCED: "PENDING",
    Kind.VERIFIED: "VERIFIED",
    Kind.QUARANTINED: "QUARANTINED",
    Kind.RECORD: "ACTIVE",
    Kind.REVOKED: "REVOKED",
    Kind.API_KEY_CREATED: "valid",
    Kind.API_KEY_REVOKED: "revoked",
}


def signer_text(key_id: str, *, revoked: bool) -> str:
    """Returns what a signer is."""
    return f"key {key_id}, {'revoked' if revoked else 'valid'}"


def shared_digest(tenants: Iterable[str]) -> str:
    """Returns what an adapter is that is shared with these tenants; one shared with nobody is not in the table."""
    return sha256_digest(canonical(sorted(tenants)))


# That of an adapter which is shared with nobody.
NOBODY = shared_digest(())


@dataclass(frozen=True, slots=True)
class Said:
    """What the log says of a resource last, and in which row."""

    text: str
    index: int


class Replay:
    """The table, as far as leaves were taken."""

    def __init__(self) -> None:
        self.said: dict[str, Said] = {}
        self._delegated: dict[str, str] = {}

    def take(self, leaf: Leaf) -> None:
        """Takes the next leaf; one of a kind that is not compared changes nothing."""
        match leaf.kind:
            case Kind.ALIAS_DELETED:
                self.said.pop(leaf.resource, None)
            case Kind.ALIAS_SET | Kind.BASE_MODEL:
                self.said[leaf.resource] = Said(leaf.digest, leaf.index)
            case Kind.SHARED:
                self.said.pop(leaf.resource, None)
                if leaf.digest != NOBODY:
                    self.said[leaf.resource] = Said(leaf.digest, leaf.index)
            case Kind.DELEGATED:
                # The newest version alone holds.
                tenant = leaf.resource.rpartition("/")[0]
                self.said.pop(self._delegated.get(tenant, ""), None)
                self._delegated[tenant] = leaf.resource
                self.said[leaf.resource] = Said(leaf.digest, leaf.index)
            case Kind.SIGNER_CREATED | Kind.SIGNER_REVOKED:
                text = signer_text(leaf.digest.removeprefix("sha256:"), revoked=leaf.kind == Kind.SIGNER_REVOKED)
                self.said[leaf.resource] = Said(text, leaf.index)
            case _ if leaf.kind in _STATES and not self._ended(leaf):
                self.said[leaf.resource] = Said(_STATES[Kind(leaf.kind)], leaf.index)

    def _ended(self, leaf: Leaf) -> bool:
        """Says whether what a leaf is about has ended, so that no such leaf can make it go on: nobody wrote one there
        who keeps to the rules."""
        said = self.said.get(leaf.resource, Said("", 0)).text
        return said in ("REVOKED", "revoked") or (said == "QUARANTINED" and leaf.kind != Kind.REVOKED)

    def compare(self, shown: Mapping[str, str], *, size: int) -> Finding | None:
        """Returns the first difference, in the order of the log; `size` is the log's, for what is not in it at all."""
        differences = [
            (said.index, f"{resource} is shown as {shown.get(resource, 'missing')}, the log says {said.text}")
            for resource, said in self.said.items()
            if shown.get(resource) != said.text
        ]
        differences += [
            (size, f"{resource} is shown as {text}, the log does not know it")
            for resource, text in shown.items()
            if resource not in self.said
        ]
        if not differences:
            return None
        index, detail = min(differences)
        more = f"; and {len(differences) - 1} more" if len(differences) > 1 else ""
        return Finding(code="CATALOG", index=index, detail=detail + more)
