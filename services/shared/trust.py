"""Which keys speak for which role: the newest trust root that this process has accepted, and its own signing key.

The first root is read from a directory that the operator wrote (`loraport.trust.files`). Newer ones come with the
registry's catalog; each is believed because the one before says so, never because the registry does. What was accepted
is kept on disk, so that neither the directory nor the registry can lead back to an older root. A root that is refused
changes nothing and is an alarm.
"""

import base64
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import structlog

from loraport.bundle.canonical import StrictJsonError, load_strict
from loraport.bundle.envelope import EnvelopeError, Signer, claimed_payload
from loraport.trust.files import TrustFileError, read_chain
from loraport.trust.root import (
    PAYLOAD_TYPE,
    Role,
    RootError,
    TrustRoot,
    accept,
    open_first,
    parse_root,
    require_current,
)
from loraport.trust.signers import open_signer
from loraport.whole_file import replace_file
from services.shared.clock import Clock, SystemClock

log = structlog.get_logger()

SCHEMA = "loraport.trust-state.v1"
MAX_STATE_BYTES = 64 << 20
DAY_S = 86400
# From so many days before its end on, every start says that the root should be signed anew.
WARN_DAYS = 30

Chain = list[tuple[TrustRoot, bytes]]


def state_file(floor_file: str) -> str:
    """Returns where the roots are kept that go with a floor of checkpoints: beside it; empty for none."""
    return str(Path(floor_file).with_suffix(".roots.json")) if floor_file else ""


class TrustError(ValueError):
    """Trust that cannot be used; one line."""


class RoleTrust(Mapping[str, bytes]):
    """The keys (id → PEM) that speak for a role now, as a view that follows the root. Empty once the root expired."""

    def __init__(self, store: "TrustStore", role: str) -> None:
        self._store = store
        self._role = role

    @property
    def version(self) -> int:
        """The root's version: what was checked by another one may have to be checked again."""
        return self._store.version

    def at(self, log_index: int) -> Mapping[str, bytes]:
        """Returns the keys that speak for what stands in the log at `log_index`."""
        return self._store.trusted(self._role, log_index)

    def __getitem__(self, key: str) -> bytes:
        return self._store.trusted(self._role)[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._store.trusted(self._role))

    def __len__(self) -> int:
        return len(self._store.trusted(self._role))


class TrustStore:
    """The chain of roots of this process. Reading is safe from any thread, `offer` belongs to one at a time."""

    def __init__(self, chain: Chain, *, clock: Clock | None = None, state_file: str = "") -> None:
        """`chain` is verified already; `state_file` (empty: none) hears of every root that is accepted."""
        self._chain = list(chain)
        self._clock = clock or SystemClock()
        self._state = Path(state_file) if state_file else None
        self._listeners: list[Callable[[], None]] = []
        self._said_expired = False

    @classmethod
    def load(cls, directory: str | Path, *, clock: Clock | None = None, state_file: str = "") -> "TrustStore":
        """Reads the directory, and what an earlier process accepted after it.

        Raises:
            TrustError: the directory holds no chain of roots, or not the one that was accepted before.
            OSError: a file cannot be read or written.
        """
        try:
            chain = read_chain(directory)
        except TrustFileError as error:
            raise TrustError(str(error)) from None
        store = cls(chain, clock=clock, state_file=state_file)
        if store._state is not None:
            store._resume(directory)
        store._warn()
        return store

    @property
    def root(self) -> TrustRoot:
        """The newest accepted root."""
        return self._chain[-1][0]

    @property
    def version(self) -> int:
        """Its version."""
        return self.root.version

    @property
    def chain(self) -> tuple[tuple[TrustRoot, bytes], ...]:
        """Every root from the operator's on, with its envelope."""
        return tuple(self._chain)

    def keys(self, role: str) -> RoleTrust:
        """Returns the keys of a role. Raises KeyError for an unknown role."""
        if role not in set(Role):
            raise KeyError(role)
        return RoleTrust(self, role)

    def trusted(self, role: str, log_index: int | None = None) -> dict[str, bytes]:
        """Returns what `keys(role)` gives now, or for a place in the log."""
        root, now = self.root, self._clock.now()
        try:
            require_current(root, now=now)
        except RootError as error:
            if not self._said_expired:
                self._said_expired = True
                log.critical("ALARM: nothing is believed any more", why=error.detail)
            return {}
        return root.trusted(role, log_index, now=now)

    def on_change(self, listener: Callable[[], None]) -> None:
        """Calls `listener` after every root that is accepted, in the thread that offered it."""
        self._listeners.append(listener)

    def offer(self, version: int, envelope: bytes) -> bool:
        """Takes a root that somebody shows; returns whether it is, or was already, one of this chain."""
        first = self._chain[0][0].version
        try:
            if version < first:
                return True
            if version <= self.version:
                self._require_known(version, envelope)
                return True
            self.require_next(envelope)
        except RootError as error:
            log.critical("ALARM: trust root refused", version=version, code=error.code, why=error.detail)
            return False
        return self.take(envelope)

    def require_next(self, envelope: bytes) -> TrustRoot:
        """Returns the root in `envelope`, which follows the newest one. Raises RootError."""
        return accept(self.root, envelope)

    def take(self, envelope: bytes) -> bool:
        """Accepts a root for which `require_next` was asked; False when it could not be kept on disk."""
        chain = [*self._chain, (self.require_next(envelope), envelope)]
        try:
            self._write(chain)
        except OSError as error:
            # Believing what cannot be remembered would let the next start be led back.
            log.error("trust root not accepted: it cannot be written", why=error.strerror)
            return False
        self._chain, self._said_expired = chain, False
        log.info("trust root accepted", version=self.version)
        for listener in self._listeners:
            listener()
        return True

    def _require_known(self, version: int, envelope: bytes) -> None:
        known = self._chain[version - self._chain[0][0].version][0]
        if _claimed(envelope).digest != known.digest:
            raise RootError("FORK", f"another version {version} than the one that was accepted")

    def _resume(self, directory: str | Path) -> None:
        """Goes on from what an earlier process accepted, unless the directory is newer."""
        assert self._state is not None
        try:
            kept = _read_state(self._state)
        except FileNotFoundError:
            self._write(self._chain)
            return
        here = {root.version: root for root, _ in self._chain}
        shared = [root for root, _ in kept if root.version in here]
        if not shared or any(here[root.version].digest != root.digest for root in shared):
            raise TrustError(
                f"{directory} does not hold the trust roots that were accepted before ({self._state}); restore them, "
                "or remove that file knowingly"
            )
        newest = kept[-1][0].version
        chain = [*kept, *(pair for pair in self._chain if pair[0].version > newest)]
        if chain[-1][0].version > newest:
            self._write(chain)
        self._chain = chain

    def _write(self, chain: Iterable[tuple[TrustRoot, bytes]]) -> None:
        if self._state is None:
            return
        self._state.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        roots = [base64.b64encode(envelope).decode() for _, envelope in chain]
        replace_file(self._state, [json.dumps({"schema": SCHEMA, "roots": roots}).encode()])

    def _warn(self) -> None:
        left = (self.root.expires - self._clock.now()) / DAY_S
        if left < WARN_DAYS:
            log.warning("the trust root expires soon; sign a new one: loraport trust rotate", days_left=round(left, 1))


class RoleSigner:
    """The signer of a role: the one of its key files that the newest root names, so it changes with the root.

    `reference` is a file `<role>.key`, beside which `<role>.*.key` may hold the next or an earlier one, or another
    signer of `loraport.trust.signers`. Nothing is signed by a key that the root does not name.
    """

    def __init__(self, reference: str, *, role: str, trust: TrustStore) -> None:
        self._reference = reference
        self._role = role
        self._trust = trust
        self._picked: tuple[int, Signer] | None = None

    def require(self) -> None:
        """Raises TrustError (one line) when there is no key that the newest root names."""
        try:
            self._picked = self._pick(self._trust.root)
        except OSError as error:
            raise TrustError(f"cannot read {error.filename or self._reference}: {error.strerror}") from None

    @property
    def key_id(self) -> str:
        return self._current().key_id

    @property
    def public_pem(self) -> bytes:
        return self._current().public_pem

    def sign(self, data: bytes) -> tuple[str, bytes]:
        return self._current().sign(data)

    def _current(self) -> Signer:
        picked, version = self._picked, self._trust.version
        if picked is None or picked[0] != version:
            try:
                self.require()
            except TrustError as error:
                log.critical("ALARM: this service cannot sign", role=self._role, why=str(error))
                raise EnvelopeError("SIGNER", str(error)) from None
            picked = self._picked
        assert picked is not None
        return picked[1]

    def _pick(self, root: TrustRoot) -> tuple[int, Signer]:
        named = root.roles[Role(self._role)].key_ids
        try:
            for reference in self._candidates():
                signer = open_signer(reference, public_pem=root.keys[named[0]].encode("ascii"))
                if signer.key_id in named:
                    return root.version, signer
        except EnvelopeError as error:
            raise TrustError(error.detail) from None
        raise TrustError(
            f"{self._reference} is not a key of the role {self._role} in trust root {root.version} (trust_dir); "
            f"add it with: loraport trust rotate --role {self._role}"
        )

    def _candidates(self) -> list[str | Path]:
        path = Path(self._reference)
        if path.suffix != ".key":
            return [self._reference]
        others = sorted(path.parent.glob(f"{path.stem}.*.key"), key=lambda other: other.stat().st_mtime, reverse=True)
        return [path, *others] if path.exists() or not others else list(others)


def _claimed(envelope: bytes) -> TrustRoot:
    try:
        return parse_root(claimed_payload(envelope, payload_type=PAYLOAD_TYPE))
    except EnvelopeError as error:
        raise RootError(error.code, error.detail) from None


def _read_state(path: Path) -> Chain:
    """Returns the chain on disk, verified again. Raises FileNotFoundError or TrustError."""
    try:
        value = load_strict(path.read_bytes(), max_bytes=MAX_STATE_BYTES, max_depth=2)
        if not isinstance(value, dict) or set(value) != {"schema", "roots"} or value["schema"] != SCHEMA:
            raise ValueError("fields")
        chain: Chain = []
        for text in value["roots"]:
            envelope = base64.b64decode(text, validate=True)
            chain.append((accept(chain[-1][0], envelope) if chain else open_first(envelope), envelope))
        if not chain:
            raise ValueError("no root")
    except FileNotFoundError:
        raise
    except OSError as error:
        raise TrustError(f"cannot read {path}: {error.strerror}") from None
    except (StrictJsonError, ValueError, TypeError):
        raise TrustError(f"{path} holds no chain of trust roots; restore it, or remove it knowingly") from None
    return chain
