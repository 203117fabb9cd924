"""Tokens of a configured issuer at a real router: its keys over https, its tenants, streams that end with the token."""

import asyncio
import http.server
import json
import ssl
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from joserfc import jwt
from joserfc.jwk import ECKey

from loraport import AsyncClient, UnauthenticatedError
from loraport.router.v1 import inference_service_pb2 as pb
from loraport.router.v1 import inference_service_pb2_grpc as stubs
from services.router import issuers
from services.router.issuers import MAX_SET_BYTES, IssuerKeys, TokenIssuer
from services.router.tokens import SKEW_S
from tests.contract.router_world import SERVICE_CA, World, eventually

KEY = ECKey.generate_key("P-256")
ISSUER = "https://idp.example"


class KeyServer(http.server.BaseHTTPRequestHandler):
    """Answers by path; `asked` counts."""

    asked: list[str]

    def do_GET(self) -> None:
        self.asked.append(self.path)
        body = json.dumps({"keys": [KEY.as_dict(private=False) | {"kid": "k1"}]}).encode()
        if self.path == "/moved":
            self.send_response(302)
            self.send_header("Location", "/keys")
            self.end_headers()
            return
        if self.path == "/huge":
            body = b" " * (MAX_SET_BYTES + 1)
        self.send_response(200)
        self.end_headers()
        if self.path == "/slow":
            for _ in range(400):
                self.wfile.write(b" ")
                time.sleep(0.05)
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Says nothing."""


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server of keys that answers is waited for, unless a test says how long."""
    monkeypatch.setattr(issuers, "FETCH_S", 60.0)


@pytest.fixture
def key_server(tmp_path: Path) -> Iterator[tuple[str, list[str]]]:
    certificate, key = World.leaf("service/idp")
    (tmp_path / "idp.pem").write_bytes(certificate)
    (tmp_path / "idp.key").write_bytes(key)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "idp.pem", tmp_path / "idp.key")
    asked: list[str] = []
    handler = type("Handler", (KeyServer,), {"asked": asked})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    server.handle_error = lambda *_: None
    server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"https://127.0.0.1:{server.server_port}", asked
    server.shutdown()
    server.server_close()
    thread.join(60)


def token(tenant: str = "acme", *, life_s: float = 300.0, **claims: Any) -> str:
    now = int(time.time())
    header = {"alg": "ES256", "typ": "at+jwt", "kid": "k1"}
    body = {
        "iss": ISSUER, "aud": "loraport", "sub": "u", "client_id": "c", "jti": "j", "iat": now - 400,
        "exp": now + life_s, "scope": "generate list", "tenant": tenant, **claims,
    }  # fmt: skip
    return jwt.encode(header, body, KEY)


@pytest.fixture
async def world(tmp_path: Path, key_server: tuple[str, list[str]]) -> AsyncIterator[World]:
    world = World(tmp_path)
    world.registry.items += [
        world.registry.base(),
        *world.registry.tenant("acme"),
        *world.registry.adapter("acme", "pirate"),
    ]
    issuer = {
        "issuer": ISSUER,
        "audience": "loraport",
        "jwks": f"{key_server[0]}/keys",
        "ca_file": str(tmp_path / "ca.pem"),
    }
    world.overrides = {"token_issuers": [issuer]}
    await world.start_registry()
    await world.start_executor("e0")
    await world.start_router()
    await eventually(lambda: world.router._fleet.view().serves("tiny"))
    yield world
    await world.stop()


def client(world: World, credential: Any) -> AsyncClient:
    endpoint = f"127.0.0.1:{world.router.user_port}"
    return AsyncClient(endpoint, token=credential, ca_certificate=world.folder / "ca.pem", timeout=60)


async def test_a_token_opens_beside_the_keys(world: World, key_server: tuple[str, list[str]]) -> None:
    asked: list[str] = []

    def fresh() -> str:
        asked.append(token())
        return asked[-1]

    async with client(world, fresh) as tokens, world.client() as keys:
        assert (await tokens.generate("x", adapter="pirate")).token_ids
        assert (await keys.generate("x", adapter="pirate")).token_ids
        assert [adapter.adapter for adapter in await tokens.list_adapters()] == ["pirate"]
    assert len(asked) == 2  # the client asks for a token with every call
    assert key_server[1] == ["/keys"]
    async with client(world, token(scope="list")) as listing:
        with pytest.raises(Exception, match="NOT_ALLOWED"):
            await listing.generate("x", adapter="pirate")
    for bad in (token(aud="other"), token("nobody"), token()[:-8] + "AAAAAAAA", "a.b.c"):
        async with client(world, bad) as wrong:
            with pytest.raises(UnauthenticatedError) as caught:
                await wrong.generate("x", adapter="pirate")
            assert str(caught.value) == "INVALID_CREDENTIAL: The credential is missing, malformed, expired or revoked."
    # A tenant that was made a moment ago may come at once.
    await world.put(*world.registry.tenant("initech"))
    async with client(world, token("initech")) as new:
        assert await new.list_adapters() == []


async def test_a_stream_ends_with_its_token(world: World) -> None:
    executor = world.executors["e0"]
    executor.reply, executor.pause_s = [50] * 60, 0.1
    credentials = grpc.ssl_channel_credentials(SERVICE_CA[0])
    metadata = (("authorization", f"Bearer {token(life_s=1.0 - SKEW_S)}"),)
    async with grpc.aio.secure_channel(f"127.0.0.1:{world.router.user_port}", credentials) as channel:
        request = pb.GenerateRequest(target=pb.Target(adapter="pirate"), prompt="the")
        call = stubs.InferenceServiceStub(channel).Generate(request, metadata=metadata, timeout=60)
        with pytest.raises(grpc.RpcError) as ended:
            async for _ in call:
                pass
    assert ended.value.code() == grpc.StatusCode.UNAUTHENTICATED
    await eventually(lambda: executor.running == 0)


@pytest.mark.parametrize(("path", "opens"), [("/keys", True), ("/moved", False), ("/huge", False), ("/slow", False)])
async def test_key_sets_are_fetched_within_bounds(
    tmp_path: Path, key_server: tuple[str, list[str]], monkeypatch: pytest.MonkeyPatch, path: str, opens: bool
) -> None:
    if path == "/slow":
        monkeypatch.setattr(issuers, "FETCH_S", 3.0)  # in which the question itself has to get there
    (tmp_path / "ca.pem").write_bytes(SERVICE_CA[0])
    issuer = TokenIssuer(ISSUER, "loraport", key_server[0] + path, ca_file=str(tmp_path / "ca.pem"))
    keys = IssuerKeys(issuer, now=lambda: 0.0)
    async with asyncio.timeout(60):
        assert (await keys.find("k1", "ES256") is not None) == opens
    assert key_server[1] == [path]
    await keys.stop()


async def test_a_server_that_the_authorities_do_not_know_is_not_asked(key_server: tuple[str, list[str]]) -> None:
    keys = IssuerKeys(TokenIssuer(ISSUER, "loraport", f"{key_server[0]}/keys"), now=lambda: 0.0)
    assert await keys.find("k1", "ES256") is None
    assert key_server[1] == []
