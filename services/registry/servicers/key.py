"""KeyService."""

from typing import Any

from loraport.bundle.envelope import EnvelopeError, key_id
from loraport.registry.v1 import key_service_pb2 as pb
from loraport.registry.v1 import key_service_pb2_grpc as stubs
from services.registry.api_keys import SCOPES, make_api_key
from services.registry.delegating import Delegating
from services.registry.desk import Desk, Note, page_of
from services.registry.distrust import stop_announced
from services.registry.ports import Randomness
from services.registry.records import ApiKeyRow, SignerRow
from services.registry.servicers import convert
from services.registry.store import accounts, delegations
from services.registry.store.database import Transaction
from services.shared.errors import FaultList, LoraportError
from services.shared.names import check_id, parse_owned, parse_tenant
from services.shared.paging import Key, PageTokens, page_size

MAX_PEM = 2048
MAX_OVERLAP_S = 30 * 24 * 3600


class KeyServicer(stubs.KeyServiceServicer):
    """Keeps API keys and signers. `pepper` keys the hashes of secrets."""

    def __init__(
        self, desk: Desk, tokens: PageTokens, randomness: Randomness, pepper: bytes, delegating: Delegating
    ) -> None:
        self._desk = desk
        self._tokens = tokens
        self._randomness = randomness
        self._pepper = pepper
        self._delegating = delegating

    async def CreateApiKey(self, request: pb.CreateApiKeyRequest, context: Any) -> pb.CreateApiKeyResponse:
        def work(transaction: Transaction, note: Note) -> pb.CreateApiKeyResponse:
            tenant = parse_tenant(request.parent)
            accounts.require_tenant(transaction.connection, tenant)
            now_us = self._desk.now_us()
            scopes, expire_us = _settings(request.api_key, now_us)
            made = make_api_key(self._randomness, self._pepper)
            row = ApiKeyRow(
                key_id=made.key_id,
                tenant=tenant,
                secret_hmac=made.secret_hmac,
                scopes=scopes,
                create_us=now_us,
                expire_us=expire_us,
                revoke_us=None,
                epoch=transaction.epoch(),
            )
            accounts.add_api_key(transaction, row)
            shown = convert.api_key(row)
            note.resource = shown.name
            return pb.CreateApiKeyResponse(api_key=shown, secret=made.text)

        # No request id: a remembered response would be a kept secret.
        return await self._desk.change(request, pb.CreateApiKeyResponse, work, resource=f"{request.parent}/keys/-")

    async def ListApiKeys(self, request: pb.ListApiKeysRequest, context: Any) -> pb.ListApiKeysResponse:
        tenant, limit, after, scope = self._list("keys", request)

        def read(view: Any) -> list[ApiKeyRow]:
            accounts.require_tenant(view, tenant)
            return accounts.list_api_keys(view, tenant, after=after, limit=limit)

        rows, token = page_of(
            await self._desk.read(read),
            limit,
            lambda row: self._tokens.seal((row.create_us, row.key_id), scope=scope),
        )
        return pb.ListApiKeysResponse(api_keys=map(convert.api_key, rows), next_page_token=token)

    async def RevokeApiKey(self, request: pb.RevokeApiKeyRequest, context: Any) -> pb.ApiKey:
        def work(transaction: Transaction, note: Note) -> pb.ApiKey:
            tenant, key = parse_owned(request.name, "keys")
            return convert.api_key(accounts.revoke_api_key(transaction, tenant, key, now_us=self._desk.now_us()))

        return await self._desk.change(request, pb.ApiKey, work, resource=request.name)

    async def RotateApiKey(self, request: pb.RotateApiKeyRequest, context: Any) -> pb.RotateApiKeyResponse:
        def work(transaction: Transaction, note: Note) -> pb.RotateApiKeyResponse:
            tenant, key = parse_owned(request.name, "keys")
            overlap_s, now_us = request.overlap.seconds, self._desk.now_us()
            if not 0 <= overlap_s <= MAX_OVERLAP_S or not 0 <= request.overlap.nanos < 10**9:
                raise LoraportError("INVALID_REQUEST", f"must be in [0, {MAX_OVERLAP_S}] s", subject="overlap")
            old = accounts.require_api_key(transaction.connection, tenant, key)
            if old.revoke_us is not None or (old.expire_us is not None and old.expire_us <= now_us):
                raise LoraportError("INVALID_STATE", "the key opens no more; create another one")
            made = make_api_key(self._randomness, self._pepper)
            new = old._replace(
                key_id=made.key_id, secret_hmac=made.secret_hmac, create_us=now_us, epoch=transaction.epoch()
            )
            ends_us = now_us + overlap_s * 1_000_000
            replaced = accounts.replace_api_key(transaction, old, new, ends_us=ends_us)
            shown = convert.api_key(new)
            note.reason = f"replaced by {made.key_id}, ends in {overlap_s} s"
            return pb.RotateApiKeyResponse(api_key=shown, secret=made.text, replaced=convert.api_key(replaced))

        # No request id, as for CreateApiKey.
        return await self._desk.change(request, pb.RotateApiKeyResponse, work, resource=request.name)

    async def CreateSigner(self, request: pb.CreateSignerRequest, context: Any) -> pb.Signer:
        def work(transaction: Transaction, note: Note) -> pb.Signer:
            tenant, signer = parse_tenant(request.parent), check_id(request.signer_id, "signer_id")
            accounts.require_tenant(transaction.connection, tenant)
            pem = request.signer.public_key_pem
            row = SignerRow(
                tenant=tenant,
                signer=signer,
                key_id=_key_id(pem),
                public_key_pem=pem,
                create_us=self._desk.now_us(),
                revoke_us=None,
                since_log_index=None,
            )
            accounts.add_signer(transaction, row)
            self._delegating.renew(transaction, tenant, now_us=row.create_us)
            return convert.signer(row)

        resource = f"{request.parent}/signers/{request.signer_id}"
        return await self._desk.change(request, pb.Signer, work, resource=resource, request_id=request.request_id)

    async def ListSigners(self, request: pb.ListSignersRequest, context: Any) -> pb.ListSignersResponse:
        tenant, limit, after, scope = self._list("signers", request)

        def read(view: Any) -> list[SignerRow]:
            accounts.require_tenant(view, tenant)
            return accounts.list_signers(view, tenant, after=after, limit=limit)

        rows, token = page_of(
            await self._desk.read(read),
            limit,
            lambda row: self._tokens.seal((row.create_us, row.signer), scope=scope),
        )
        return pb.ListSignersResponse(signers=map(convert.signer, rows), next_page_token=token)

    async def RevokeSigner(self, request: pb.RevokeSignerRequest, context: Any) -> pb.Signer:
        def work(transaction: Transaction, note: Note) -> pb.Signer:
            tenant, signer = parse_owned(request.name, "signers")
            since = request.since_log_index if request.HasField("since_log_index") else None
            if since is not None and since < 0:
                raise LoraportError("INVALID_REQUEST", "must not be negative", subject="since_log_index")
            now_us = self._desk.now_us()
            row, news = accounts.revoke_signer(transaction, tenant, signer, since=since, now_us=now_us)
            if news:
                self._delegating.renew(transaction, tenant, now_us=now_us)
            if news and since is not None:
                count = stop_announced(transaction, tenant, since=since, signer=signer, now_us=now_us)
                note.reason = f"since log index {since}; {count} revisions stopped"
            return convert.signer(row)

        return await self._desk.change(request, pb.Signer, work, resource=request.name)

    async def GetDelegation(self, request: pb.GetDelegationRequest, context: Any) -> pb.Delegation:
        tenant = parse_tenant(request.parent)

        def read(view: Any) -> pb.Delegation:
            accounts.require_tenant(view, tenant)
            return convert.delegation(delegations.newest(view, tenant))

        return await self._desk.read(read)

    async def SetSignerThreshold(self, request: pb.SetSignerThresholdRequest, context: Any) -> pb.Delegation:
        def work(transaction: Transaction, note: Note) -> pb.Delegation:
            tenant, threshold = parse_tenant(request.parent), request.threshold
            accounts.require_tenant(transaction.connection, tenant)
            note.reason = f"threshold {threshold}"
            before = delegations.newest(transaction.connection, tenant)
            if before.threshold == threshold:
                return convert.delegation(before)
            now_us = self._desk.now_us()
            row = self._delegating.renew(transaction, tenant, threshold=threshold, now_us=now_us)
            return convert.delegation(row)

        return await self._desk.change(request, pb.Delegation, work, resource=f"{request.parent}/delegations/-")

    def _list(
        self, collection: str, request: pb.ListApiKeysRequest | pb.ListSignersRequest
    ) -> tuple[str, int, Key | None, tuple[str, ...]]:
        tenant = parse_tenant(request.parent)
        scope = (collection, tenant)
        return (
            tenant,
            page_size(request.page_size),
            self._tokens.open(request.page_token, scope=scope, kinds=(int, str)),
            scope,
        )


def _settings(wanted: pb.ApiKey, now_us: int) -> tuple[tuple[str, ...], int | None]:
    """Returns scopes and end of a new key. Raises LoraportError (INVALID_REQUEST)."""
    faults = FaultList()
    unknown = sorted(set(wanted.scopes) - set(SCOPES))
    faults.require(not unknown, "api_key.scopes", f"must be of {', '.join(SCOPES)}, not {', '.join(unknown)[:80]}")
    expire_us = None
    if wanted.HasField("expire_time"):
        expire_us = wanted.expire_time.seconds * 1_000_000 + wanted.expire_time.nanos // 1000
        in_future = now_us < expire_us <= 253_402_300_799_999_999  # the end of the year 9999
        faults.require(in_future, "api_key.expire_time", "must be in the future")
    faults.raise_if_any()
    return tuple(sorted(set(wanted.scopes))) or SCOPES, expire_us


def _key_id(pem: str) -> str:
    if len(pem) > MAX_PEM:
        raise LoraportError("INVALID_KEY", subject="signer.public_key_pem")
    try:
        return key_id(pem)
    except EnvelopeError:
        raise LoraportError("INVALID_KEY", subject="signer.public_key_pem") from None
