"""`Import` on a running loader: real TLS, a real S3 server, a hub and a web server that do what the test says."""

import asyncio
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from loraport.admin import AdminClient
from loraport.dev.pki import make_ca, make_leaf
from loraport.errors import PermissionDeniedError
from loraport.loader.v1 import loader_service_pb2 as pb
from loraport.types.v1 import types_pb2
from services.loader.fetch.faults import FAULTS
from services.loader.fetch.http import Transport
from services.shared.errors import LoraportError
from services.shared.rpc.status import from_rpc_error
from services.shared.statements import seal
from tests.loader_rig import ACCESS, SECRET, Bundle, Rig, State, reason, running, stored, until
from tests.security.hostile import PATIENT, PUBLIC, Request, Wire, World, hostile_world
from tests.support.ports import free_port

COMMIT = "c" * 40
IMPORTS = {
    "hub": {"host": "hub.example", "redirect_hosts": ["cdn.example"]},
    "https_hosts": ["files.example"],
}
HTTPS = pb.HttpsSource(config_url="https://files.example/c", weights_url="https://files.example/w?sig=secret")
HUB = pb.HubSource(repository="acme/pirate", commit=COMMIT)
STAGES = [
    types_pb2.LOAD_STAGE_RESOLVE,
    types_pb2.LOAD_STAGE_FETCH,
    types_pb2.LOAD_STAGE_VERIFY,
]


@pytest.fixture
def world() -> Iterator[World]:
    with hostile_world() as world:
        yield world


@pytest.fixture
async def rig(tmp_path: Path, address: str, folder: Path, world: World) -> AsyncIterator[Rig]:
    async with running(tmp_path, address, folder, transport=world.transport(), imports=IMPORTS) as rig:
        yield rig
        await until(lambda: stored(folder, "quarantine") == [])


def start(rig: Rig, bundle: Bundle, **source: Any) -> Any:
    session = seal(bundle.session, rig.registry.key)
    return rig.uploads.Import(pb.ImportRequest(session=session, **source), timeout=60)


async def result(call: Any) -> tuple[list[int], Any]:
    """Returns the stages and the result, which is last."""
    events = [event async for event in call]
    assert [event.WhichOneof("event") for event in events[:-1]] == ["stage"] * (len(events) - 1)
    return [event.stage.stage for event in events[:-1]], events[-1].result


async def failure(call: Any) -> LoraportError:
    with pytest.raises(grpc.RpcError) as caught:
        await result(call)
    return from_rpc_error(caught.value, unavailable="INTERNAL")


async def fault(call: Any) -> tuple[str, str]:
    """Returns the reason of a failure and what is wrong with the source."""
    error = await failure(call)
    return error.reason, error.metadata.get("fault", "")


def serving(bundle: Bundle, *, weights: bytes | None = None, **headers: str) -> Any:
    """A web server with the two files, whatever they are called."""

    def script(request: Request, wire: Wire) -> None:
        name = request.path.split("?")[0]
        is_config = name.endswith(("/c", "/adapter_config.json"))
        content = bundle.config if is_config else bundle.weights if weights is None else weights
        wire.file(content, ETag='"1"', **headers)

    return script


async def test_https_bundle_goes_the_way_of_an_upload(rig: Rig, world: World) -> None:
    bundle = rig.registry.register()
    world.script = serving(bundle)
    stages, answer = await result(start(rig, bundle, https=HTTPS))
    assert stages == STAGES
    assert (answer.admitted, answer.revision_id) == (True, bundle.revision_id)
    assert rig.stored_path(bundle).read_bytes() == bundle.weights
    [statement] = rig.registry.admitted
    assert statement.admitted
    assert [request.path for request in world.requests] == ["/c", "/w?sig=secret"]
    # Judged already: nothing is fetched again, and the answer is the same.
    assert await result(start(rig, bundle, https=HTTPS)) == ([], answer)
    assert len(world.requests) == 2


async def test_the_client_hears_of_every_stage(rig: Rig, world: World, tmp_path: Path) -> None:
    bundle = rig.registry.register(seed=11)
    world.script = serving(bundle)
    ca, loader = (tmp_path / "ca.pem").read_bytes(), f"127.0.0.1:{rig.service.upload_port}"
    key, certificate = (tmp_path / "loader.key").read_bytes(), (tmp_path / "loader.pem").read_bytes()
    session = seal(bundle.session, rig.registry.key)
    stages: list[int] = []

    def call(source: Any) -> Any:
        nowhere = "127.0.0.1:1"
        with AdminClient(
            registry=nowhere, router_admin=nowhere, loader_upload=loader, ca=ca, certificate=certificate, key=key
        ) as admin:
            request = pb.ImportRequest(session=session, https=source)
            return admin.import_bundle(request, observe=lambda report: stages.append(report.stage))

    with pytest.raises(PermissionDeniedError) as caught:
        await asyncio.to_thread(call, pb.HttpsSource(config_url="https://evil.example/c"))
    assert (caught.value.reason, caught.value.metadata["fault"]) == ("SOURCE_NOT_ALLOWED", "HOST_NOT_ALLOWED")
    assert (await asyncio.to_thread(call, HTTPS)).admitted
    assert stages == STAGES


async def test_hub_bundle_of_the_pinned_commit(rig: Rig, world: World) -> None:
    bundle = rig.registry.register(seed=1)
    world.script = serving(bundle, X_Repo_Commit=COMMIT)
    _, answer = await result(start(rig, bundle, hub=HUB))
    assert answer.admitted
    assert [(request.host, request.path) for request in world.requests] == [
        ("hub.example", f"/acme/pirate/resolve/{COMMIT}/adapter_config.json"),
        ("hub.example", f"/acme/pirate/resolve/{COMMIT}/adapter_model.safetensors"),
    ]


async def test_hub_that_answers_for_another_commit(rig: Rig, world: World) -> None:
    bundle = rig.registry.register(seed=2)
    world.script = serving(bundle, X_Repo_Commit="d" * 40)
    assert await fault(start(rig, bundle, hub=HUB)) == ("SOURCE_UNUSABLE", "WRONG_COMMIT")
    assert rig.registry.revisions[bundle.revision_id].state == State.STATE_PENDING


async def test_tokens_go_to_the_hub_of_their_tenant_only(
    tmp_path: Path, address: str, folder: Path, world: World
) -> None:
    (tmp_path / "token").write_text("hub-token")
    imports = {**IMPORTS, "hub": {**IMPORTS["hub"], "token_files": {"acme": str(tmp_path / "token")}}}
    async with running(tmp_path, address, folder, transport=world.transport(), imports=imports) as rig:
        for tenant, token in (("acme", "Bearer hub-token"), ("globex", None)):
            bundle = rig.registry.register(seed=3, tenant=tenant)
            plain = serving(bundle, X_Repo_Commit=COMMIT)

            def script(request: Request, wire: Wire, plain: Any = plain) -> None:
                if request.host == "hub.example" and request.path.endswith("safetensors"):
                    wire.head(302, {"Location": "https://cdn.example/blob", "X-Repo-Commit": COMMIT})
                else:
                    plain(request, wire)

            world.script = script
            world.requests.clear()
            assert (await result(start(rig, bundle, hub=HUB)))[1].admitted
            assert [(request.host, request.headers.get("authorization")) for request in world.requests] == [
                ("hub.example", token),
                ("hub.example", token),
                ("cdn.example", None),
            ]


async def test_bytes_that_were_not_signed_are_quarantined_like_an_upload(rig: Rig, world: World) -> None:
    bundle = rig.registry.register(seed=4)
    world.script = serving(bundle, weights=bundle.weights[:-4] + b"\0\0\x80\x3f")
    stages, answer = await result(start(rig, bundle, https=HTTPS))
    assert stages == STAGES
    assert not answer.admitted
    assert [violation.code for violation in answer.violations] == ["DIGEST_MISMATCH"]
    assert rig.registry.revisions[bundle.revision_id].state == State.STATE_QUARANTINED


async def test_of_bytes_that_were_not_signed_nothing_is_told(rig: Rig, world: World) -> None:
    """They may be somebody else's: neither their digest nor what a config holds is the caller's to know."""
    bundle = rig.registry.register(seed=12)
    foreign = b'{"peft_type": "LORA", "a_secret_key": "a secret", "init_lora_weights": "another secret"}'

    def script(request: Request, wire: Wire) -> None:
        wire.file(foreign if request.path == "/c" else b"\0" * len(bundle.weights), ETag='"1"')

    world.script = script
    _, answer = await result(start(rig, bundle, https=HTTPS))
    assert [(v.code, v.subject) for v in answer.violations] == [
        ("DIGEST_MISMATCH", "adapter_config.json"),
        ("DIGEST_MISMATCH", "adapter_model.safetensors"),
    ]
    assert not answer.warnings
    for told in (str(answer), str(rig.registry.admitted[-1].violations)):
        assert "secret" not in told
        assert "sha256:" not in told.replace(bundle.revision_id, "")


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ({"https": pb.HttpsSource(config_url="https://evil.example/c", weights_url="")}, "HOST_NOT_ALLOWED"),
        ({"https": pb.HttpsSource(config_url="https://files.example/c", weights_url="http://x/")}, "SCHEME"),
        ({"https": pb.HttpsSource(config_url="https://169.254.169.254/c")}, "IP_LITERAL"),
        ({"hub": pb.HubSource(repository="acme/pirate", commit="main")}, "COMMIT"),
        ({"s3": pb.S3Source(endpoint="lake", bucket="a", config_key="c", weights_key="w")}, "STORE_NOT_ALLOWED"),
    ],
    ids=str,
)
async def test_sources_off_the_lists_are_never_asked(
    rig: Rig, world: World, source: dict[str, Any], expected: str
) -> None:
    bundle = rig.registry.register(seed=5)
    assert await fault(start(rig, bundle, **source)) == ("SOURCE_NOT_ALLOWED", expected)
    assert world.resolved == []


async def test_a_request_without_source_and_one_without_session(rig: Rig, world: World) -> None:
    bundle = rig.registry.register(seed=6)
    assert await reason(start(rig, bundle)) == "INVALID_REQUEST"
    assert await reason(rig.uploads.Import(pb.ImportRequest(https=HTTPS), timeout=60)) == "INVALID_SESSION"
    # The session is looked at first: without one, nobody learns what is on the lists.
    bad = pb.HttpsSource(config_url="x")
    assert await reason(rig.uploads.Import(pb.ImportRequest(https=bad), timeout=60)) == "INVALID_SESSION"
    assert world.resolved == []


async def test_by_default_nothing_may_be_imported(tmp_path: Path, address: str, folder: Path, world: World) -> None:
    async with running(tmp_path, address, folder, transport=world.transport()) as rig:
        bundle = rig.registry.register()
        for source in ({"https": HTTPS}, {"hub": HUB}, {"s3": pb.S3Source(endpoint="lake")}):
            assert await reason(start(rig, bundle, **source)) == "SOURCE_NOT_ALLOWED"
    assert world.resolved == []


async def test_a_rebound_name_is_refused(rig: Rig, world: World) -> None:
    bundle = rig.registry.register(seed=7)
    world.script = serving(bundle)
    world.names["files.example"] = [[PUBLIC], ["127.0.0.1"]]
    assert await fault(start(rig, bundle, https=HTTPS)) == ("SOURCE_NOT_ALLOWED", "ADDRESS")
    assert [request.path for request in world.requests] == ["/c"]


async def test_a_caller_that_leaves_ends_the_fetch(rig: Rig, world: World) -> None:
    """And its turn is free again: an upload of the same revision passes."""
    bundle = rig.registry.register(seed=8)
    asked, released = threading.Event(), threading.Event()

    def script(request: Request, wire: Wire) -> None:
        asked.set()
        released.wait(60)

    world.script = script
    call = asyncio.create_task(result(start(rig, bundle, https=HTTPS)))
    await until(asked.is_set)
    call.cancel()
    try:
        assert (await asyncio.wait_for(rig.upload(bundle), 60)).admitted
    finally:
        released.set()


async def test_a_source_that_breaks_is_asked_for_the_rest(rig: Rig, world: World) -> None:
    bundle = rig.registry.register(seed=9)
    plain, size = serving(bundle), len(bundle.weights)
    seen: list[str] = []

    def script(request: Request, wire: Wire) -> None:
        if not request.path.startswith("/w"):
            plain(request, wire)
            return
        asked = request.headers.get("range", "")
        seen.append(asked)
        start_at = int(asked.removeprefix("bytes=").removesuffix("-")) if asked else 0
        stated = {"ETag": '"1"', "Content-Length": str(size - start_at)}
        if asked:
            stated["Content-Range"] = f"bytes {start_at}-{size - 1}/{size}"
        wire.head(206 if asked else 200, stated)
        wire.send(bundle.weights[start_at : start_at + size // 2 + 1])

    world.script = script
    assert (await result(start(rig, bundle, https=HTTPS)))[1].admitted
    assert seen == ["", f"bytes={size // 2 + 1}-"]


async def test_a_bundle_from_a_real_object_store(tmp_path: Path, address: str, folder: Path) -> None:
    """rclone serves TLS under a certificate of an authority that only this endpoint's configuration names."""
    ca = make_ca("lake")
    leaf = make_leaf(ca, uri="spiffe://example/lake", dns=("lake.example",))
    for name, data in (("lake-ca", ca.certificate), ("lake-cert", leaf.certificate), ("lake-key", leaf.key)):
        (tmp_path / f"{name}.pem").write_bytes(data)
    (tmp_path / "lake-keys").write_text(f"{ACCESS}\n{SECRET}")
    lake = tmp_path / "lake"
    (lake / "adapters" / "acme").mkdir(parents=True)
    port = free_port()
    command = [
        *(str(Path(sys.executable).with_name("rclone")), "serve", "s3", "--addr", f"127.0.0.1:{port}"),
        *("--auth-key", f"{ACCESS},{SECRET}", "--config", ""),
        *("--cert", str(tmp_path / "lake-cert.pem"), "--key", str(tmp_path / "lake-key.pem"), str(lake)),
    ]

    def connect(where: str, its_port: int, timeout_s: float) -> Any:
        assert (where, its_port) == ("10.20.30.40", 9000)
        return socket.create_connection(("127.0.0.1", port), timeout_s)

    transport = Transport(limits=PATIENT, resolve=lambda host, _: ["10.20.30.40"], connect=connect)
    store = {
        "address": "lake.example:9000", "buckets": ["adapters"], "ca_file": str(tmp_path / "lake-ca.pem"),
        "tenants": {"acme": "acme/", "globex": "globex/"},
    }  # fmt: skip
    imports = {
        "s3": {
            "lake": {**store, "private": True, "credentials": str(tmp_path / "lake-keys")},
            "public": store,
            "anonymous": {**store, "private": True},
        }
    }
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        async with running(tmp_path, address, folder, transport=transport, imports=imports) as rig:
            bundle, foreign = rig.registry.register(seed=10), rig.registry.register(seed=10, tenant="globex")
            other = rig.registry.register(seed=10, tenant="initech")
            (lake / "adapters" / "acme" / "config v1.json").write_bytes(bundle.config)
            (lake / "adapters" / "acme" / "weights").write_bytes(bundle.weights)
            (lake / "adapters" / "acme" / "short").write_bytes(bundle.weights[:-1])

            def source(endpoint: str, asking: Bundle = bundle, bucket: str = "adapters", **changed: str) -> Any:
                keys = {"config_key": "acme/config v1.json", "weights_key": "acme/weights", **changed}
                return start(rig, asking, s3=pb.S3Source(endpoint=endpoint, bucket=bucket, **keys))

            await until(lambda: _listens(port))
            assert await fault(source("public")) == ("SOURCE_NOT_ALLOWED", "ADDRESS")
            assert (await fault(source("anonymous")))[1] in ("STATUS", "DENIED")  # rclone answers 400
            assert await fault(source("lake", weights_key="acme/none")) == ("SOURCE_UNUSABLE", "MISSING")
            # What is there for others, or for nobody, is one and the same; and no host of the operator's is named.
            refusals = [
                await failure(call)
                for call in (
                    source("lake", foreign), source("lake", other), source("lake", foreign, weights_key="none"),
                    source("lake", bucket="others"), source("pond"), source("lake", weights_key="globex/weights"),
                )
            ]  # fmt: skip
            assert {(error.reason, error.message) for error in refusals} == {
                ("SOURCE_NOT_ALLOWED", f"STORE_NOT_ALLOWED: {FAULTS['STORE_NOT_ALLOWED'][1]}")
            }
            for endpoint, key, code in (("public", "weights", "ADDRESS"), ("lake", "short", "SIZE")):
                error = await failure(source(endpoint, weights_key=f"acme/{key}"))
                assert error.message == f"{code}: {FAULTS[code][1]}"
            stages, answer = await result(source("lake"))
            assert stages == STAGES
            assert answer.admitted
            assert rig.stored_path(bundle).read_bytes() == bundle.weights
    finally:
        process.terminate()
        process.wait(60)


def _listens(port: int) -> bool:

    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
    except OSError:
        return False
    return True
