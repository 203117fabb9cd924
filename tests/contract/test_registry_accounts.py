"""Tenants, keys, signers and base models over a real connection."""

import hashlib
import hmac
import math
import re
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from google.protobuf.timestamp_pb2 import Timestamp

from loraport.bundle.base import base_id, to_json
from loraport.bundle.canonical import canonical
from loraport.bundle.envelope import SigningKey
from loraport.registry.v1 import base_model_service_pb2 as base_pb
from loraport.registry.v1 import key_service_pb2 as key_pb
from loraport.registry.v1 import tenant_service_pb2 as pb
from loraport.registry.v1.catalog_service_pb2 import WatchRequest
from tests.contract.registry_rig import PEPPER, TIMEOUT, Rig, base_spec, info_of, reason_of, serving, write_config


@pytest.fixture
async def rig(url: str, tmp_path: Path) -> AsyncIterator[Rig]:
    async with serving(write_config(tmp_path, database_url=url)) as rig:
        yield rig


async def test_a_tenant_has_defaults(rig: Rig) -> None:
    made = await rig.tenant("acme")
    assert (made.name, made.weight, made.base_allowed) == ("tenants/acme", 1.0, True)
    assert made.HasField("create_time")
    other = await rig.tenant("globex", weight=2.5, base_allowed=False, display_name="Globex, Inc.")
    assert (other.weight, other.base_allowed, other.display_name) == (2.5, False, "Globex, Inc.")
    got = await rig.tenants().GetTenant(pb.GetTenantRequest(name="tenants/globex"), timeout=TIMEOUT)
    got.ClearField("usage")
    assert got == other


@pytest.mark.parametrize("weight", [-1.0, 1000.5, math.inf, math.nan])
async def test_a_weight_is_in_range(rig: Rig, weight: float) -> None:
    request = pb.CreateTenantRequest(tenant_id="acme", tenant=pb.Tenant(weight=weight))
    assert await reason_of(rig.tenants().CreateTenant(request, timeout=TIMEOUT)) == "INVALID_REQUEST"


@pytest.mark.parametrize("tenant", ["", "-", "A", "a_b", "a/b", "a" * 64, "9a", "a-", "ä", "a\n"])
async def test_a_tenants_id_is_checked(rig: Rig, tenant: str) -> None:
    assert await reason_of(rig.tenant(tenant)) == "INVALID_NAME"


async def test_unknown_and_existing_tenants(rig: Rig) -> None:
    await rig.tenant("acme")
    assert await reason_of(rig.tenant("acme")) == "TENANT_EXISTS"
    get = pb.GetTenantRequest(name="tenants/nobody")
    assert await reason_of(rig.tenants().GetTenant(get, timeout=TIMEOUT)) == "TENANT_NOT_FOUND"
    for request, method in (
        (key_pb.CreateApiKeyRequest(parent="tenants/nobody"), rig.keys().CreateApiKey),
        (key_pb.ListApiKeysRequest(parent="tenants/nobody"), rig.keys().ListApiKeys),
        (key_pb.ListSignersRequest(parent="tenants/nobody"), rig.keys().ListSigners),
    ):
        assert await reason_of(method(request, timeout=TIMEOUT)) == "TENANT_NOT_FOUND"


async def test_a_request_id_is_answered_with_the_first_result(rig: Rig) -> None:
    def create(tenant: str, request_id: str) -> grpc.aio.UnaryUnaryCall:
        return rig.tenants().CreateTenant(
            pb.CreateTenantRequest(tenant_id=tenant, request_id=request_id), timeout=TIMEOUT
        )

    request_id = str(uuid.uuid4())
    first = await create("acme", request_id)
    assert await create("acme", request_id) == first
    assert await reason_of(create("globex", request_id)) == "INVALID_REQUEST"
    assert await reason_of(create("globex", "not a uuid")) == "INVALID_REQUEST"
    assert await reason_of(create("acme", str(uuid.uuid4()))) == "TENANT_EXISTS"


async def test_an_api_keys_secret_is_shown_once_and_hashed(rig: Rig) -> None:
    await rig.tenant("acme")
    made = await rig.keys().CreateApiKey(key_pb.CreateApiKeyRequest(parent="tenants/acme"), timeout=TIMEOUT)
    match = re.fullmatch(r"lk_([a-z0-9]{10})_([A-Za-z0-9]{43})", made.secret)
    assert match
    assert made.api_key.name == f"tenants/acme/keys/{match[1]}"
    assert list(made.api_key.scopes) == ["generate", "list"]
    listed = await rig.keys().ListApiKeys(key_pb.ListApiKeysRequest(parent="tenants/acme"), timeout=TIMEOUT)
    assert list(listed.api_keys) == [made.api_key]
    keys = []
    async for part in rig.catalog().Watch(WatchRequest(), timeout=TIMEOUT):
        keys += [item.key for item in part.items if item.HasField("key")]
        if part.synced:
            break
    assert keys[0].secret_hmac == hmac.digest(PEPPER, made.secret.encode(), hashlib.sha256)
    database = Path(rig.service._config.database_url.removeprefix("sqlite:///"))
    kept = b"".join(path.read_bytes() for path in database.parent.glob("registry.db*"))
    assert match[2].encode() not in kept


async def test_an_api_key_ends_and_is_revoked(rig: Rig) -> None:
    await rig.tenant("acme")
    late = Timestamp(seconds=4_000_000_000, nanos=5000)
    request = key_pb.CreateApiKeyRequest(
        parent="tenants/acme", api_key=key_pb.ApiKey(scopes=["list", "list"], expire_time=late)
    )
    made = (await rig.keys().CreateApiKey(request, timeout=TIMEOUT)).api_key
    assert (list(made.scopes), made.expire_time) == (["list"], late)
    revoke = key_pb.RevokeApiKeyRequest(name=made.name)
    revoked = await rig.keys().RevokeApiKey(revoke, timeout=TIMEOUT)
    assert revoked.HasField("revoke_time")
    assert await rig.keys().RevokeApiKey(revoke, timeout=TIMEOUT) == revoked
    await rig.tenant("globex")
    foreign = made.name.replace("acme", "globex")
    for name in ("tenants/acme/keys/0000000000", foreign):
        call = rig.keys().RevokeApiKey(key_pb.RevokeApiKeyRequest(name=name), timeout=TIMEOUT)
        assert await reason_of(call) == "KEY_NOT_FOUND"


@pytest.mark.parametrize(
    "settings", [{"scopes": ["admin"]}, {"expire_time": Timestamp(seconds=1)}, {"expire_time": Timestamp(seconds=-5)}]
)
async def test_an_api_keys_settings_are_checked(rig: Rig, settings: dict) -> None:
    await rig.tenant("acme")
    request = key_pb.CreateApiKeyRequest(parent="tenants/acme", api_key=key_pb.ApiKey(**settings))
    assert await reason_of(rig.keys().CreateApiKey(request, timeout=TIMEOUT)) == "INVALID_REQUEST"


async def test_a_signers_key_is_used_once_per_tenant_even_after_revocation(rig: Rig) -> None:
    await rig.tenant("acme")

    def create(signer: str, pem: str, tenant: str = "acme") -> grpc.aio.UnaryUnaryCall:
        request = key_pb.CreateSignerRequest(
            parent=f"tenants/{tenant}", signer_id=signer, signer=key_pb.Signer(public_key_pem=pem)
        )
        return rig.keys().CreateSigner(request, timeout=TIMEOUT)

    key = SigningKey.generate()
    pem = key.public_pem.decode()
    made = await create("laptop", pem)
    assert (made.name, made.key_id) == ("tenants/acme/signers/laptop", key.key_id)
    assert await reason_of(create("laptop", SigningKey.generate().public_pem.decode())) == "SIGNER_EXISTS"
    assert await reason_of(create("other", pem)) == "SIGNER_EXISTS"
    revoked = await rig.keys().RevokeSigner(key_pb.RevokeSignerRequest(name=made.name), timeout=TIMEOUT)
    assert revoked.HasField("revoke_time")
    assert await reason_of(create("other", pem)) == "SIGNER_EXISTS"
    await rig.tenant("globex")
    assert (await create("laptop", pem, "globex")).key_id == key.key_id
    for bad in ("", "junk", key.public_pem.decode()[:-40], "x" * 5000):
        assert await reason_of(create("bad", bad)) == "INVALID_KEY"
    missing = key_pb.RevokeSignerRequest(name="tenants/acme/signers/nobody")
    assert await reason_of(rig.keys().RevokeSigner(missing, timeout=TIMEOUT)) == "SIGNER_NOT_FOUND"


async def test_a_base_model_is_its_digests(rig: Rig) -> None:
    made = await rig.base("base")
    assert (made.name, made.base_id) == ("baseModels/base", base_id(base_spec("base")))
    assert await rig.base("base") == made

    def create(name: str, spec: bytes) -> grpc.aio.UnaryUnaryCall:
        request = base_pb.CreateBaseModelRequest(base_model_id=name, base_model=base_pb.BaseModel(spec_json=spec))
        return rig.bases().CreateBaseModel(request, timeout=TIMEOUT)

    spec = canonical(to_json(base_spec("base")))
    assert await reason_of(create("base", canonical(to_json(base_spec("b"))))) == "BASE_MODEL_EXISTS"
    assert await reason_of(create("other", spec)) == "BASE_MODEL_EXISTS"
    for bad in (b"", b"{}", spec + b"\n", spec.replace(b'"linear"', b'"conv"'), b"[" * 2000):
        assert await reason_of(create("bad", bad)) == "INVALID_BASE_MODEL"
    for identity in ("admin", "router", "loader", "executor"):
        got = await rig.bases(identity).GetBaseModel(base_pb.GetBaseModelRequest(name=made.name), timeout=TIMEOUT)
        assert got == made
    missing = base_pb.GetBaseModelRequest(name="baseModels/none")
    assert await reason_of(rig.bases().GetBaseModel(missing, timeout=TIMEOUT)) == "BASE_MODEL_NOT_FOUND"
    listed = await rig.bases("loader").ListBaseModels(base_pb.ListBaseModelsRequest(), timeout=TIMEOUT)
    assert [(item.name, item.spec_json) for item in listed.base_models] == [("baseModels/base", b"")]


async def test_lists_page_in_order_and_tokens_belong_to_their_list(rig: Rig) -> None:
    for tenant in ("b", "a-1", "a", "a1", "c"):
        await rig.tenant(tenant)

    async def page(size: int, token: str = "") -> pb.ListTenantsResponse:
        return await rig.tenants().ListTenants(pb.ListTenantsRequest(page_size=size, page_token=token), timeout=TIMEOUT)

    names, token = [], ""
    while True:
        part = await page(2, token)
        assert len(part.tenants) <= 2
        names += [tenant.name for tenant in part.tenants]
        token = part.next_page_token
        if not token:
            break
    assert names == [f"tenants/{tenant}" for tenant in ("a", "a-1", "a1", "b", "c")]
    assert len((await page(0)).tenants) == 5
    assert (await page(5)).next_page_token == ""
    assert len((await page(10**6)).tenants) == 5
    assert await reason_of(page(-1)) == "INVALID_REQUEST"
    good = (await page(1)).next_page_token
    forged = good[:-2] + ("AA" if good[-2:] != "AA" else "BB")
    for bad in (forged, "junk", "ä", good * 99):
        assert await reason_of(page(1, bad)) == "INVALID_PAGE_TOKEN"
    for _ in range(2):
        await rig.keys().CreateApiKey(key_pb.CreateApiKeyRequest(parent="tenants/a"), timeout=TIMEOUT)
    keys = await rig.keys().ListApiKeys(key_pb.ListApiKeysRequest(parent="tenants/a", page_size=1), timeout=TIMEOUT)
    for parent, token in (("tenants/b", keys.next_page_token), ("tenants/a", good)):
        request = key_pb.ListApiKeysRequest(parent=parent, page_token=token)
        assert await reason_of(rig.keys().ListApiKeys(request, timeout=TIMEOUT)) == "INVALID_PAGE_TOKEN"


async def test_a_fault_names_its_field(rig: Rig) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await rig.tenant("acme", weight=-1.0, display_name="x" * 257)
    assert info_of(caught.value).domain == "loraport.dev"
    assert "tenant.weight" in caught.value.details()
    assert "tenant.display_name" in caught.value.details()
