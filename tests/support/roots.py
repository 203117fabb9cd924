"""Trust roots for tests: made in a moment from keys by role, written where services read them."""

from collections.abc import Mapping
from pathlib import Path

from loraport.bundle.envelope import Signer, SigningKey, sign_envelope
from loraport.trust.edit import first_root
from loraport.trust.root import PAYLOAD_TYPE, Role, TrustRoot
from services.shared.clock import Clock
from services.shared.trust import TrustStore

NOW = 1_800_000_000
# Most tests need no root key of their own.
ROOT_KEY = SigningKey.generate()


def make_root(keys: Mapping[str, Signer], *, now: int = NOW, life_s: int = 365 * 86400) -> TrustRoot:
    """Version 1: `keys` by role; who has none gets the registry's (timestamp) or one of its own."""
    keys = {"root": ROOT_KEY, "timestamp": keys.get("registry", ROOT_KEY), **keys}
    pems = {role: [keys[role].public_pem if role in keys else SigningKey.generate().public_pem] for role in Role}
    return first_root(pems, now=now, life_s=life_s)


def sealed(root: TrustRoot, *signers: Signer) -> bytes:
    """The envelope of a root, signed by the tests' root key unless others are given."""
    return sign_envelope(PAYLOAD_TYPE, root.body(), signers or (ROOT_KEY,))


def trusting(key: Signer, *, clock: Clock) -> TrustStore:
    """The trust of a peer whose only root has `key` as the registry's, of its records and of its checkpoints."""
    root = make_root({"registry": key}, now=int(clock.now()) - 1)
    return TrustStore([(root, sealed(root))], clock=clock)


def write_root(folder: Path, keys: Mapping[str, Signer], *, root_key: Signer = ROOT_KEY) -> TrustRoot:
    """Writes `1.root.json` into a trust directory, in place of any that is there."""
    import time

    root = make_root({"root": root_key, **keys}, now=int(time.time()) - 1)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "1.root.json").write_bytes(sealed(root, root_key))
    return root
