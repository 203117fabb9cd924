"""Which keys speak for which role, read from a directory of public keys.

`<dir>/<role>.pub` and `<dir>/<role>.*.pub` hold Ed25519 public keys in PEM; a key's id is computed from the key, so a
file's name decides the role and nothing else.
"""

from pathlib import Path
from types import MappingProxyType

from loraport.bundle.envelope import EnvelopeError, key_id

ROLES = ("registry", "loader", "router")


class TrustError(ValueError):
    """A trust directory that cannot be used; one line."""


class TrustStore:
    """The public keys of every role, fixed when it was read."""

    def __init__(self, keys: dict[str, dict[str, bytes]]) -> None:
        self._keys = {role: MappingProxyType(dict(of_role)) for role, of_role in keys.items()}

    @classmethod
    def load(cls, directory: str | Path) -> "TrustStore":
        """Reads every role's keys.

        Raises:
            TrustError: a role has no key, or a file is no Ed25519 public key.
        """
        keys: dict[str, dict[str, bytes]] = {}
        for role in ROLES:
            files = sorted({*Path(directory).glob(f"{role}.pub"), *Path(directory).glob(f"{role}.*.pub")})
            if not files:
                raise TrustError(f"{directory} holds no public key of the role {role}")
            keys[role] = {}
            for path in files:
                pem = path.read_bytes()
                try:
                    keys[role][key_id(pem)] = pem
                except EnvelopeError:
                    raise TrustError(f"{path.name} is not an Ed25519 public key in PEM") from None
        return cls(keys)

    def keys(self, role: str) -> MappingProxyType[str, bytes]:
        """Returns key id → PEM of a role. Raises KeyError for an unknown role."""
        return self._keys[role]
