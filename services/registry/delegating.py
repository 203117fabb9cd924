"""The registry's delegation to publishers: every change of a tenant's signers or threshold is signed and logged."""

from collections.abc import Callable

from sqlalchemy import Connection

from loraport.bundle.envelope import Signer
from loraport.trust.delegation import MAX_THRESHOLD, Delegation, Publisher, seal_delegation
from services.registry.store import delegations
from services.registry.store.database import Transaction
from services.registry.store.delegations import DelegationRow
from services.shared.errors import LoraportError


class Delegating:
    """Makes the next version of a tenant's delegation, signed by `key`.

    `refresh` makes `key` that of the newest trust root that a connection sees.
    """

    def __init__(self, key: Signer, *, refresh: Callable[[Connection], None]) -> None:
        self._key = key
        self._refresh = refresh

    def renew(
        self, transaction: Transaction, tenant: str, *, now_us: int, threshold: int | None = None
    ) -> DelegationRow:
        """Signs and logs how things are now; `threshold` is the new one, None leaves it.

        Raises:
            LoraportError: INVALID_REQUEST, fewer signers are valid than would be needed.
        """
        connection = transaction.connection
        before, signers = delegations.newest(connection, tenant), delegations.all_signers(connection, tenant)
        wanted = before.threshold if threshold is None else threshold
        valid = sum(row.revoke_us is None for row in signers)
        if threshold is not None and not 1 <= threshold <= min(MAX_THRESHOLD, max(valid, 1)):
            raise LoraportError(
                "INVALID_REQUEST",
                f"threshold must be in [1, {valid}], the number of valid signers",
                subject="threshold",
            )
        # What stands behind a rotation in the log must be signed by the new key, or every audit finds it.
        self._refresh(connection)
        statement = Delegation(
            tenant=tenant,
            version=before.version + 1,
            threshold=wanted,
            publishers=tuple(
                Publisher(signer=row.signer, key_id=row.key_id, valid=row.revoke_us is None, since=row.since_log_index)
                for row in signers
            ),
            issued=now_us // 1_000_000,
        )
        return delegations.add(transaction, statement, seal_delegation(statement, self._key), now_us=now_us)
