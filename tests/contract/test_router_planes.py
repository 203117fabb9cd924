"""The router's two ports: what a user's port does not have, whom the admin's port does not know."""

from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.x509.oid import NameOID

from loraport.dev.pki import make_ca, make_leaf
from loraport.router.v1 import inference_service_pb2 as pb
from loraport.router.v1 import inference_service_pb2_grpc as stubs
from loraport.router.v1 import router_admin_service_pb2 as apb
from loraport.router.v1 import router_admin_service_pb2_grpc as admin_stubs
from tests.contract.router_world import ADMIN_CA, SERVICE_CA, World, api_key

OPS = "spiffe://loraport.local/admin/ops"
REQUESTS = {
    "ListQueues": apb.ListQueuesRequest(),
    "GetFairness": apb.GetFairnessRequest(),
    "GetCapacity": apb.GetCapacityRequest(),
    "ExplainPlacement": apb.ExplainPlacementRequest(base_model="baseModels/tiny"),
    "ListResidency": apb.ListResidencyRequest(),
    "DrainExecutor": apb.DrainExecutorRequest(executor="e0"),
    "GetQuotaUsage": apb.GetQuotaUsageRequest(tenant="tenants/acme"),
}


def named_like(uri: str) -> tuple[bytes, bytes]:
    """A leaf of the admin CA whose common name is a SPIFFE id, and which has no URI."""
    certificate, key = make_leaf(ADMIN_CA, uri=())
    leaf = x509.load_pem_x509_certificate(certificate)
    builder = x509.CertificateBuilder(
        subject_name=x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, uri)]),
        issuer_name=leaf.issuer,
        public_key=leaf.public_key(),
        serial_number=leaf.serial_number,
        not_valid_before=leaf.not_valid_before_utc,
        not_valid_after=leaf.not_valid_after_utc,
        extensions=list(leaf.extensions),
    )
    made = builder.sign(serialization.load_pem_private_key(ADMIN_CA[1], password=None), hashes.SHA256())
    return made.public_bytes(serialization.Encoding.PEM), key


STRANGERS = {
    "a service": lambda: make_leaf(SERVICE_CA, uri="spiffe://loraport.local/service/executor/e0"),
    "an admin of the services' CA": lambda: make_leaf(SERVICE_CA, uri=OPS),
    "two ids": lambda: make_leaf(ADMIN_CA, uri=(OPS, "spiffe://loraport.local/admin/two")),
    "no id": lambda: make_leaf(ADMIN_CA, uri=()),
    "a name like an id": lambda: named_like(OPS),
    "another trust domain": lambda: make_leaf(ADMIN_CA, uri="spiffe://evil.example/admin/ops"),
}


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    world = World(tmp_path)
    world.registry.items += [world.registry.base(), *world.registry.tenant("acme")]
    await world.start_registry()
    await world.start_executor("e0")
    await world.start_router()
    yield world
    await world.stop()


def link(port: int, leaf: tuple[bytes, bytes] | None) -> grpc.aio.Channel:
    certificate, key = leaf or (None, None)
    credentials = grpc.ssl_channel_credentials(SERVICE_CA[0], key, certificate)
    options = [("grpc.use_local_subchannel_pool", 1)]
    return grpc.aio.secure_channel(f"127.0.0.1:{port}", credentials, options=options)


async def code_of(call: grpc.aio.UnaryUnaryCall) -> grpc.StatusCode:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code()


@pytest.mark.parametrize("who", STRANGERS)
async def test_the_admin_port_answers_admins_only(world: World, who: str) -> None:
    # With a user's key beside the wrong certificate as well.
    metadata = (("authorization", f"Bearer {api_key('acme')}"),)
    async with link(world.router.admin_port, STRANGERS[who]()) as channel:
        stub = admin_stubs.RouterAdminServiceStub(channel)
        assert set(REQUESTS) == {name for name in dir(admin_stubs.RouterAdminServiceServicer) if name[0].isupper()}
        for name, request in REQUESTS.items():
            call = getattr(stub, name)(request, timeout=60, metadata=metadata)
            assert await code_of(call) == grpc.StatusCode.PERMISSION_DENIED, name


async def test_without_a_certificate_or_with_a_strangers_there_is_no_admin_port(world: World) -> None:
    for leaf in (None, make_leaf(make_ca("stranger"), uri=OPS)):
        async with link(world.router.admin_port, leaf) as channel:
            call = admin_stubs.RouterAdminServiceStub(channel).ListQueues(REQUESTS["ListQueues"], timeout=60)
            assert await code_of(call) == grpc.StatusCode.UNAVAILABLE


async def test_the_users_port_has_no_admin_and_the_admins_port_no_users(world: World) -> None:
    metadata = (("authorization", f"Bearer {api_key('acme')}"),)
    admin = make_leaf(ADMIN_CA, uri=OPS)
    async with link(world.router.user_port, admin) as channel:
        stub = admin_stubs.RouterAdminServiceStub(channel)
        for name, request in REQUESTS.items():
            assert (
                await code_of(getattr(stub, name)(request, timeout=60, metadata=metadata))
                == grpc.StatusCode.UNIMPLEMENTED
            )
        # A certificate is no user's credential.
        call = stubs.InferenceServiceStub(channel).ListAdapters(pb.ListAdaptersRequest(), timeout=60)
        assert await code_of(call) == grpc.StatusCode.UNAUTHENTICATED
    async with link(world.router.admin_port, admin) as channel:
        call = stubs.InferenceServiceStub(channel).ListAdapters(pb.ListAdaptersRequest(), timeout=60, metadata=metadata)
        assert await code_of(call) == grpc.StatusCode.UNIMPLEMENTED
        assert (
            await admin_stubs.RouterAdminServiceStub(channel).ListQueues(REQUESTS["ListQueues"], timeout=60) is not None
        )
