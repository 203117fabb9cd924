"""The registry's part in trust roots: it keeps the chain, lets it grow by the rules, and follows it like everybody."""

import threading

import structlog
from sqlalchemy import Connection

from loraport.trust.root import RootError
from services.registry.distrust import stop_ended
from services.registry.store import roots
from services.registry.store.database import Database, Transaction
from services.registry.store.roots import RootRow
from services.shared.config import ConfigError
from services.shared.errors import LoraportError
from services.shared.trust import TrustStore

log = structlog.get_logger()


class Roots:
    """The chain in the database, and the store of this process that follows it. Blocking; any thread."""

    def __init__(self, database: Database, trust: TrustStore) -> None:
        self._database = database
        self._trust = trust
        self._turn = threading.Lock()

    def prepare(self, *, now_us: int) -> None:
        """Brings the database's chain and the trust directory's together at start.

        Raises:
            ConfigError: they are two chains.
        """
        with self._database.write() as transaction:
            rows = roots.list_roots(transaction.connection)
            if not all(self._trust.offer(row.version, row.envelope) for row in rows):
                raise ConfigError("trust_dir: the database holds trust roots that do not follow those in trust_dir")
            newest = rows[-1].version if rows else 0
            for root, envelope in self._trust.chain:
                if root.version > newest:
                    roots.add_root(transaction, root.version, envelope, now_us=now_us)

    def submit(self, transaction: Transaction, envelope: bytes, *, now_us: int) -> tuple[RootRow, int]:
        """Adds the next root; returns it and how many revisions it stopped. `follow` comes after the commit.

        Raises:
            LoraportError: INVALID_TRUST_ROOT.
        """
        self.refresh(transaction.connection)
        newest = roots.list_roots(transaction.connection)[-1]
        if newest.envelope == envelope:
            return newest, 0
        old = self._trust.root
        try:
            new = self._trust.require_next(envelope)
        except RootError as error:
            log.critical("ALARM: trust root refused", code=error.code, why=error.detail)
            raise LoraportError(
                "INVALID_TRUST_ROOT", str(error), metadata={"code": error.code, "version": str(old.version)}
            ) from None
        row = roots.add_root(transaction, new.version, envelope, now_us=now_us)
        return row, stop_ended(transaction, old, new, now_us=now_us)

    def follow(self) -> None:
        """Accepts what has been committed. Raises LoraportError (REGISTRY_UNAVAILABLE)."""
        with self._database.read() as connection:
            self.refresh(connection)

    def refresh(self, connection: Connection) -> None:
        """As `follow`, over the caller's view: what is signed after a rotation is signed by the new key."""
        if roots.newest_version(connection) == self._trust.version:
            return
        with self._turn:
            for row in roots.list_roots(connection, after=(self._trust.version,)):
                if not self._trust.offer(row.version, row.envelope):
                    return
