"""Making the next root from the present one. Pure: the result is what is to be signed."""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from loraport.bundle.envelope import key_id
from loraport.trust.root import Ended, Role, RoleKeys, RootError, TrustRoot

LIFE_S = 365 * 86400
# What a replaced key signed and is in no log, such as the checkpoint of a moment ago, is taken for so long.
GRACE_S = 600


def first_root(
    keys: Mapping[Role, Iterable[bytes]], *, now: int, threshold: int = 1, life_s: int = LIFE_S
) -> TrustRoot:
    """Returns version 1 for role → public keys in PEM; `threshold` is that of the role root."""
    made = {role: tuple(of_role) for role, of_role in keys.items()}
    pems = {key_id(pem): pem.decode("ascii") for of_role in made.values() for pem in of_role}
    roles = {
        role: RoleKeys(
            key_ids=tuple(sorted({key_id(pem) for pem in made[role]})), threshold=threshold if role == Role.ROOT else 1
        )
        for role in Role
    }
    return TrustRoot(version=1, issued=now, expires=now + life_s, keys=pems, roles=roles)


def next_root(
    old: TrustRoot,
    *,
    now: int,
    role: Role | None = None,
    public_keys: Iterable[bytes] = (),
    keep: bool = False,
    threshold: int | None = None,
    since: int = 0,
    compromised: bool = False,
    reason: str = "",
    life_s: int = LIFE_S,
) -> TrustRoot:
    """Returns the version after `old`, in which `role` has these keys (with `keep`: besides those it has).

    Without a role only the times change. A key that goes ends at log index `since`; what it signed and is in no log
    counts for `GRACE_S` more, or not at all when it was compromised.

    Raises:
        RootError: MALFORMED, a key that has ended for the role would come back, or no key is left.
    """
    keys, roles, ended = dict(old.keys), dict(old.roles), list(old.ended)
    if role:
        new = {key_id(pem): pem.decode("ascii") for pem in public_keys}
        before = set(old.roles[role].key_ids)
        wanted = (before if keep else set()) | set(new)
        if not wanted:
            raise RootError("MALFORMED", f"the role {role} would have no key")
        if role != Role.ROOT:
            if back := [item.key_id for item in ended if item.role == role and item.key_id in new]:
                raise RootError("MALFORMED", f"key {back[0]} has ended for the role {role}")
            until = now if compromised else now + GRACE_S
            ended += [
                Ended(key_id=key, role=role, since=since, until=until, reason=reason) for key in sorted(before - wanted)
            ]
        keys |= new
        least = threshold or min(old.roles[role].threshold, len(wanted))
        roles[role] = RoleKeys(key_ids=tuple(sorted(wanted)), threshold=least)
    named = {key for of_role in roles.values() for key in of_role.key_ids} | {item.key_id for item in ended}
    return replace(
        old,
        version=old.version + 1,
        issued=max(now, old.issued),
        expires=max(now, old.issued) + life_s,
        keys={key: pem for key, pem in keys.items() if key in named},
        roles=roles,
        ended=tuple(ended),
    )


def leaked_earlier(old: TrustRoot, key: str, *, since: int, now: int, life_s: int = LIFE_S) -> TrustRoot:
    """Returns the version after `old`, in which a key that has ended counts up to log index `since` at most.

    It may have been replaced in peace, and turn out later to have been somebody else's as well.

    Raises:
        RootError: MALFORMED, `key` has not ended for any role.
    """
    if key not in {item.key_id for item in old.ended}:
        raise RootError("MALFORMED", f"key {key!r:.70} has not ended; give its role another key")
    ended = tuple(
        replace(item, since=min(item.since, since), until=min(item.until, now)) if item.key_id == key else item
        for item in old.ended
    )
    return replace(next_root(old, now=now, life_s=life_s), ended=ended)
