"""The door of every service, on real connections: identity, policy, deadline, errors."""

import asyncio
from collections.abc import AsyncIterator, Callable

import grpc
import pytest
from cryptography import x509
from google.rpc import error_details_pb2, status_pb2

from loraport.dev.pki import make_ca, make_leaf
from loraport.executor.v1 import executor_service_pb2 as executor
from loraport.executor.v1 import executor_service_pb2_grpc as executor_stubs
from loraport.registry.v1 import tenant_service_pb2 as pb
from loraport.registry.v1 import tenant_service_pb2_grpc as stubs
from services.shared.errors import FaultList, LoraportError
from services.shared.rpc.guard import current_call
from services.shared.rpc.identity import CertificateAuthorities
from services.shared.rpc.server import Server
from services.shared.rpc.status import DETAILS_KEY

SERVICE_CA, ADMIN_CA, STRANGER_CA = make_ca("service"), make_ca("admin"), make_ca("stranger")
SECRET = "prompt of a tenant"
LONG_TEXTS = {
    "ascii": "a" * 300,
    "accents": "é" * 300,
    "emoji": "\U0001f600" * 300,
    "control": "\x01" * 300,
    "percent": "%" * 300,
}


class Tenants(stubs.TenantServiceServicer):
    async def GetTenant(self, request, context):
        if request.name == "bug":
            raise RuntimeError(SECRET)
        if request.name == "typed":
            raise LoraportError("TENANT_NOT_FOUND")
        if request.name in LONG_TEXTS:
            faults = FaultList()
            for index in range(1000):
                faults.add(f"messages[{index}].role", f"must be user, not {LONG_TEXTS[request.name]!r}")
            faults.raise_if_any()
        if request.name == "slow":
            await asyncio.sleep(30)
        return pb.Tenant(name=current_call().principal.label)


class Executor(executor_stubs.ExecutorServiceServicer):
    async def Execute(self, request, context) -> AsyncIterator[executor.ExecuteResponse]:
        yield executor.ExecuteResponse()
        raise LoraportError("NON_FINITE_LOGITS")


@pytest.fixture
async def address() -> AsyncIterator[str]:
    server = Server(CertificateAuthorities({"service": SERVICE_CA[0], "admin": ADMIN_CA[0]}))
    server.add(stubs.add_TenantServiceServicer_to_server, Tenants())
    server.add(executor_stubs.add_ExecutorServiceServicer_to_server, Executor())
    certificate, key = make_leaf(SERVICE_CA, uri="spiffe://loraport.local/service/registry")
    port = server.listen("127.0.0.1:0", key=key, certificate=certificate, clients=True)
    await server.start()
    yield f"127.0.0.1:{port}"
    await server.stop(0)


def channel(address: str, leaf: tuple[bytes, bytes] | None) -> grpc.aio.Channel:
    certificate, key = leaf or (None, None)
    credentials = grpc.ssl_channel_credentials(SERVICE_CA[0], key, certificate)
    return grpc.aio.secure_channel(address, credentials, options=[("grpc.use_local_subchannel_pool", 1)])


def admin(name: str = "ops") -> tuple[bytes, bytes]:
    return make_leaf(ADMIN_CA, uri=f"spiffe://loraport.local/admin/{name}")


def reason(error: grpc.RpcError) -> str:
    status = status_pb2.Status.FromString(dict(error.trailing_metadata())[DETAILS_KEY])
    infos = [error_details_pb2.ErrorInfo() for _ in status.details]
    return next(info.reason for info, detail in zip(infos, status.details, strict=True) if detail.Unpack(info))


async def get(address: str, leaf: tuple[bytes, bytes] | None, name: str = "x", timeout: float | None = 60) -> pb.Tenant:
    async with channel(address, leaf) as link:
        return await stubs.TenantServiceStub(link).GetTenant(pb.GetTenantRequest(name=name), timeout=timeout)


async def test_an_admin_is_known_by_its_spiffe_id(address: str) -> None:
    assert (await get(address, admin())).name == "spiffe://loraport.local/admin/ops"


WRONG: dict[str, Callable[[], tuple[bytes, bytes]]] = {
    "a peer on the admin plane": lambda: make_leaf(SERVICE_CA, uri="spiffe://loraport.local/service/router"),
    "an admin id from the service CA": lambda: make_leaf(SERVICE_CA, uri="spiffe://loraport.local/admin/ops"),
    "a service id from the admin CA": lambda: make_leaf(ADMIN_CA, uri="spiffe://loraport.local/service/loader"),
    "another trust domain": lambda: make_leaf(ADMIN_CA, uri="spiffe://evil.example/admin/ops"),
    "a URI that is no SPIFFE id": lambda: make_leaf(ADMIN_CA, uri="https://loraport.local/admin/ops"),
    "two SPIFFE ids": lambda: make_leaf(
        ADMIN_CA, uri=("spiffe://loraport.local/admin/ops", "spiffe://loraport.local/admin/two")
    ),
    "no URI at all": lambda: make_leaf(ADMIN_CA, uri=()),
}


@pytest.mark.parametrize("who", WRONG)
async def test_other_identities_are_refused(address: str, who: str) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await get(address, WRONG[who]())
    assert caught.value.code() == grpc.StatusCode.PERMISSION_DENIED
    assert reason(caught.value) == "NOT_ALLOWED"


@pytest.mark.parametrize("leaf", [None, make_leaf(STRANGER_CA, uri="spiffe://loraport.local/admin/ops")])
async def test_without_a_certificate_of_the_fleet_there_is_no_connection(address: str, leaf) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await get(address, leaf)
    assert caught.value.code() == grpc.StatusCode.UNAVAILABLE


async def test_a_unary_call_needs_a_deadline(address: str) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await get(address, admin(), timeout=None)
    assert reason(caught.value) == "DEADLINE_REQUIRED"
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await get(address, admin(), "slow", timeout=0.2)
    assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED


async def test_errors_keep_their_reason_and_bugs_keep_their_secret(address: str) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await get(address, admin(), "typed")
    assert (caught.value.code(), reason(caught.value)) == (grpc.StatusCode.NOT_FOUND, "TENANT_NOT_FOUND")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await get(address, admin(), "bug")
    assert (caught.value.code(), reason(caught.value)) == (grpc.StatusCode.INTERNAL, "INTERNAL")
    assert SECRET not in caught.value.debug_error_string() + caught.value.details()
    assert "incident" in caught.value.details()


@pytest.mark.parametrize("text", LONG_TEXTS)
async def test_a_long_error_still_arrives_as_what_it_is(address: str, text: str) -> None:
    """A client takes 8 KiB of metadata for sure; beyond that, it may put its own status in the place of ours."""
    with pytest.raises(grpc.RpcError) as caught:
        await get(address, admin(), text)
    assert (caught.value.code(), reason(caught.value)) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST")
    status = status_pb2.Status.FromString(dict(caught.value.trailing_metadata())[DETAILS_KEY])
    assert status.message == caught.value.details()
    assert len(status.SerializeToString()) < 5 << 10


async def test_what_is_not_built_says_so(address: str) -> None:
    async with channel(address, admin()) as link:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stubs.TenantServiceStub(link).ListTenants(pb.ListTenantsRequest(), timeout=60)
    assert (caught.value.code(), reason(caught.value)) == (grpc.StatusCode.UNIMPLEMENTED, "NOT_IMPLEMENTED")


async def test_a_stream_fails_with_its_status_after_what_it_sent(address: str) -> None:
    router = make_leaf(SERVICE_CA, uri="spiffe://loraport.local/service/router")
    received = 0
    async with channel(address, router) as link:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in executor_stubs.ExecutorServiceStub(link).Execute(executor.ExecuteRequest(), timeout=60):
                received += 1
    assert received == 1
    assert reason(caught.value) == "NON_FINITE_LOGITS"


@pytest.mark.parametrize(
    "method",
    [
        "/loraport.registry.v1.TenantService/GetTenant/",
        "//loraport.registry.v1.TenantService/GetTenant",
        "/loraport.registry.v1.TenantService%2FGetTenant",
        "/loraport.registry.v1.TenantService/getTenant",
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
    ],
)
async def test_no_other_spelling_reaches_a_handler(address: str, method: str) -> None:
    async with channel(address, admin()) as link:
        call = link.unary_unary(method, request_serializer=bytes, response_deserializer=bytes)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(b"", timeout=60)
    assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED


async def test_a_taken_port_is_an_error(address: str) -> None:
    server = Server(CertificateAuthorities({"service": SERVICE_CA[0], "admin": ADMIN_CA[0]}))
    certificate, key = make_leaf(SERVICE_CA, uri="spiffe://loraport.local/service/registry")
    with pytest.raises(OSError, match="cannot listen"):
        server.listen(address, key=key, certificate=certificate, clients=True)


async def test_a_server_with_an_unlisted_method_does_not_start() -> None:
    server = Server(CertificateAuthorities({"service": SERVICE_CA[0], "admin": ADMIN_CA[0]}))
    handler = grpc.unary_unary_rpc_method_handler(Tenants().GetTenant)
    server.add(
        lambda _, door: door.add_registered_method_handlers(
            "loraport.registry.v1.TenantService", {"DropEverything": handler}
        ),
        None,
    )
    with pytest.raises(ValueError, match="DropEverything"):
        await server.start()


def test_test_certificates_are_what_they_say() -> None:
    leaf = x509.load_pem_x509_certificate(admin()[0])
    leaf.verify_directly_issued_by(x509.load_pem_x509_certificate(ADMIN_CA[0]))
