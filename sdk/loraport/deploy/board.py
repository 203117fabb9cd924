"""What a notice board's server is told: nothing is kept on disk, and each service may do what it does and no more."""

import hashlib
from collections.abc import Mapping

BOARD_CONFIG = """\
port 6379
protected-mode no
save ""
appendonly no
maxmemory 64mb
maxmemory-policy volatile-ttl
aclfile {keys}/users.acl
"""

# A service's keys and commands. Nobody may run scripts, read the configuration or list keys.
_MAY = {
    "executor": "resetchannels ~loraport:residency:* -@all +@connection -@admin -@dangerous +set",
    "router": "resetchannels %R~loraport:residency:* ~loraport:work ~loraport:quotas ~loraport:gauges "
    "-@all +@connection -@admin -@dangerous +mget +hset +hgetall +hdel +expire",
    # For the container's own health check; it can tell that the server answers, and nothing else.
    "health": "resetchannels resetkeys -@all +ping",
}


def acl(passwords: Mapping[str, str]) -> str:
    """Returns the ACL file for the passwords of `router` and `executor`; it holds their hashes only."""
    lines = ["user default off resetkeys resetchannels -@all"]
    for user, rules in _MAY.items():
        password = passwords.get(user)
        secret = "nopass" if password is None else "#" + hashlib.sha256(password.encode()).hexdigest()
        lines.append(f"user {user} on {secret} {rules}")
    return "\n".join(lines) + "\n"
