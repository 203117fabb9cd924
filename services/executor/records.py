"""Which revisions may serve here: the catalog followed, each record's signature checked before it is believed."""

import structlog

from services.shared.catalog import RevisionItem, verified_record
from services.shared.catalog_client import CatalogClient
from services.shared.errors import LoraportError
from services.shared.statements import Record, StatementError, TrustedKeys

log = structlog.get_logger()

# A miss first makes the view as new as the registry; this is how long that may take.
CATCH_UP_S = 2.0


class Records:
    """The port `RecordsPort` over a catalog client."""

    def __init__(self, catalog: CatalogClient, trusted: TrustedKeys, *, base_id: str) -> None:
        self._catalog = catalog
        self._trusted = trusted
        self._base_id = base_id
        self._verified: dict[str, tuple[bytes, Record]] = {}

    async def active(self, revision_id: str, tenant: str | None) -> Record:
        item = self._catalog.view.revisions.get(revision_id)
        if item is None or item.state != "ACTIVE":
            fresh = await self._catalog.catch_up(CATCH_UP_S) and await self._catalog.wait_synced(CATCH_UP_S)
            item = self._catalog.view.revisions.get(revision_id)
            if not fresh and (item is None or item.state != "REVOKED"):
                raise LoraportError("REGISTRY_UNAVAILABLE", retry_after_s=1.0)
        if item is None or item.state != "ACTIVE":
            self._verified.pop(revision_id, None)
            raise LoraportError("REVISION_NOT_ACTIVE")
        record = self._record(item)
        if record.base_id != self._base_id:
            raise LoraportError("WRONG_BASE")
        if tenant is not None and tenant != record.tenant and tenant not in item.shared_tenants:
            raise LoraportError("INVALID_TICKET", "the revision is not one that this tenant may use")
        return record

    def _record(self, item: RevisionItem) -> Record:
        """Verifies a record once per envelope: the signature costs about 0.1 ms, a request should not pay it again."""
        known = self._verified.get(item.revision_id)
        if known is not None and known[0] == item.record_envelope:
            return known[1]
        try:
            record = verified_record(item, self._trusted)
        except StatementError as error:
            log.error("record refused", revision_id=item.revision_id, why=str(error))
            raise LoraportError("REVISION_NOT_ACTIVE", "the revision has no valid record") from None
        self._verified[item.revision_id] = (item.record_envelope, record)
        return record
