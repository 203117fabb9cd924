"""Tokens of other issuers: what opens the door, and everything that does not."""

import asyncio
import base64
import hashlib
import hmac
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from joserfc import jws
from joserfc.jwk import ECKey, OctKey, OKPKey, RSAKey

from services.router.issuers import (
    FRESH_S,
    MAX_KEYS,
    MAX_SET_BYTES,
    RETRY_S,
    IssuerKeys,
    TokenIssuer,
    parse_keys,
    read_set,
)
from services.router.tokens import MAX_LIFE_S, MAX_TOKEN, SKEW_S, TokenChecker

NOW = 1_900_000_000.0
ISSUER = TokenIssuer("https://idp.example", "loraport", "keys.json")
KEYS = {
    "EdDSA": OKPKey.generate_key("Ed25519"),
    "ES256": ECKey.generate_key("P-256"),
    "RS256": RSAKey.generate_key(2048),
}
HEAD = {"alg": "EdDSA", "typ": "at+jwt", "kid": "EdDSA"}
OTHER = OKPKey.generate_key("Ed25519")


def public_set(**changes: Any) -> bytes:
    rows = [key.as_dict(private=False) | {"kid": name, "use": "sig"} | changes for name, key in KEYS.items()]
    return json.dumps({"keys": rows}).encode()


class Source:
    """A key set that counts how often it is asked for."""

    def __init__(self, data: bytes | None = None) -> None:
        self.data = public_set() if data is None else data
        self.asked = 0
        self.broken: Exception | None = None
        self.now = 0.0

    async def __call__(self, issuer: TokenIssuer) -> bytes:
        self.asked += 1
        await asyncio.sleep(0)
        if self.broken is not None:
            raise self.broken
        return self.data

    def keys(self, issuer: TokenIssuer = ISSUER) -> IssuerKeys:
        return IssuerKeys(issuer, now=lambda: self.now, fetch=self)


def part(value: Any) -> str:
    data = value if isinstance(value, bytes) else json.dumps(value).encode()
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def token(*, alg: str = "EdDSA", key: Any = None, header: dict | None = None, drop: str = "", **claims: Any) -> str:
    body = {
        "iss": ISSUER.issuer, "aud": "loraport", "sub": "someone", "client_id": "app", "jti": "1", "iat": NOW - 10,
        "exp": NOW + 300, "scope": "generate list", "tenant": "acme", **claims,
    }  # fmt: skip
    body.pop(drop, None)
    names = {"alg": alg, "typ": "at+jwt", "kid": "EdDSA" if alg == "Ed25519" else alg, **(header or {})}
    names = {name: value for name, value in names.items() if value is not None}
    registry = jws.JWSRegistry(strict_check_header=False, algorithms=[alg])
    return jws.serialize_compact(
        names, json.dumps(body), key or KEYS["EdDSA" if alg == "Ed25519" else alg], registry=registry
    )


def signed(header: dict | bytes) -> str:
    """A token whose header joserfc would not make, with a signature that is right."""
    text = f"{part(header)}.{token().split('.')[1]}"
    return f"{text}.{part(KEYS['EdDSA'].private_key.sign(text.encode()))}"


async def opens(text: str, *, now: float = NOW, issuer: TokenIssuer = ISSUER) -> Any:
    return await TokenChecker([Source().keys(issuer)]).check(text, now=now)


@pytest.mark.parametrize("alg", ["EdDSA", "Ed25519", "ES256", "RS256"])
async def test_a_token_speaks_for_the_tenant_that_is_signed(alg: str) -> None:
    principal = await opens(token(alg=alg))
    assert (principal.plane, principal.role, principal.scopes) == ("user", "acme", {"generate", "list"})
    assert principal.expires == NOW + 300 + SKEW_S
    assert principal.label.startswith("tenants/acme/subjects/")
    assert "someone" not in principal.label


@pytest.mark.parametrize(
    ("scope", "expected"),
    [("generate", {"generate"}), ("list admin", {"list"}), ("", set()), ("generate:all", set())],
)
async def test_scopes_are_those_of_the_scope_claim(scope: str, expected: set) -> None:
    assert (await opens(token(scope=scope))).scopes == expected
    assert (await opens(token(drop="scope"))).scopes == set()


GOOD: dict[str, Callable[[], str]] = {
    "a header by hand": lambda: signed(HEAD),
    "audience among others": lambda: token(aud=["other", "loraport"]),
    "the long name of the type": lambda: token(header={"typ": "application/at+jwt"}),
    "clocks a minute apart": lambda: token(iat=NOW + SKEW_S - 1, exp=NOW + 300),
    "just over, within the skew": lambda: token(iat=NOW - 500, exp=NOW - SKEW_S + 1),
    "the longest life": lambda: token(iat=NOW - 1, exp=NOW - 1 + MAX_LIFE_S),
    "addresses in the header are ignored": lambda: token(header={"jku": "https://evil.example/keys"}),
}


@pytest.mark.parametrize("why", GOOD)
async def test_what_is_right_opens(why: str) -> None:
    assert await opens(GOOD[why]()) is not None


def _none() -> str:
    body = token().split(".")[1]
    return f"{part(HEAD | {'alg': 'none'})}.{body}."


def _hmac_with_the_public_key() -> str:
    text = f"{part(HEAD | {'alg': 'HS256', 'kid': 'RS256'})}.{token().split('.')[1]}"
    return f"{text}.{part(hmac.digest(KEYS['RS256'].as_pem(private=False), text.encode(), hashlib.sha256))}"


def _changed() -> str:
    head, body, seal = token().split(".")
    claims = json.loads(base64.urlsafe_b64decode(body + "=="))
    return f"{head}.{part(claims | {'tenant': 'globex'})}.{seal}"


def _own_key() -> str:
    return token(key=OTHER, header={"jwk": OTHER.as_dict(private=False)})


BAD: dict[str, Callable[[], str]] = {
    "nothing": lambda: "..",
    "no signature": _none,
    "the public key as a secret": _hmac_with_the_public_key,
    "another tenant after signing": _changed,
    "another key": lambda: token(key=OTHER),
    "a key that it brings along": _own_key,
    "a key of another algorithm": lambda: token(alg="ES256", header={"kid": "EdDSA"}),
    "an unknown key": lambda: token(header={"kid": "nobody"}),
    "no key id": lambda: token(header={"kid": None}),
    "a key id that is no text": lambda: signed(HEAD | {"kid": 7}),
    "an identity token": lambda: token(header={"typ": "JWT"}),
    "no type": lambda: token(header={"typ": None}),
    "critical extensions": lambda: signed(HEAD | {"crit": ["x"], "x": 1}),
    "unencoded payload": lambda: signed(HEAD | {"b64": False}),
    "a name twice": lambda: signed(b'{"alg":"EdDSA","typ":"JWT","typ":"at+jwt","kid":"EdDSA"}'),
    "another issuer": lambda: token(iss="https://idp.example/"),
    "issuer as a list": lambda: token(iss=[ISSUER.issuer]),
    "another audience": lambda: token(aud="loraport2"),
    "audience within a text": lambda: token(aud="xloraportx"),
    "no audience": lambda: token(drop="aud"),
    "over": lambda: token(iat=NOW - 600, exp=NOW - SKEW_S),
    "from the future": lambda: token(iat=NOW + SKEW_S + 1, exp=NOW + 300),
    "not yet": lambda: token(nbf=NOW + SKEW_S + 1),
    "too long a life": lambda: token(iat=NOW - 1, exp=NOW + MAX_LIFE_S),
    "a life backwards": lambda: token(iat=NOW, exp=NOW - 1),
    "times as text": lambda: token(exp=str(NOW + 300)),
    "times as truth": lambda: token(nbf=True),
    "a scope list": lambda: token(scope=["generate"]),
    "tenant as a list": lambda: token(tenant=["acme"]),
    "empty tenant": lambda: token(tenant=""),
    "a long subject": lambda: token(sub="s" * 257),
    "a megabyte": lambda: "a." * 3 + "x" * (1 << 20),
    "just too long": lambda: token(note="n" * MAX_TOKEN),
    "encrypted": lambda: token() + ".AAAA.BBBB",
    "not base64": lambda: "!!!." + token().split(".", 1)[1],
    "not ASCII": lambda: "é" + token(),
    **{f"without {name}": (lambda name=name: token(drop=name)) for name in ("iss", "sub", "client_id", "jti", "iat", "exp", "tenant")},
}  # fmt: skip


@pytest.mark.parametrize("why", BAD)
async def test_what_is_wrong_opens_nothing(why: str) -> None:
    assert await opens(BAD[why]()) is None


async def test_only_the_issuers_algorithms() -> None:
    issuer = TokenIssuer(ISSUER.issuer, "loraport", "keys.json", algorithms=("ES256",))
    assert await opens(token(alg="ES256"), issuer=issuer) is not None
    assert await opens(token(), issuer=issuer) is None


async def test_a_flood_of_unknown_keys_is_one_fetch_a_minute() -> None:
    source = Source()
    keys = source.keys()
    assert await keys.find("EdDSA", "EdDSA") is not None
    for number in range(200):
        assert await keys.find(f"k{number}", "EdDSA") is None
    assert source.asked == 1
    source.now += RETRY_S
    await asyncio.gather(*(keys.find(f"k{number}", "EdDSA") for number in range(200)))
    assert source.asked == 2


async def test_keys_are_renewed_beside_the_calls_and_the_last_good_set_stays() -> None:
    source = Source()
    keys = source.keys()
    await keys.find("EdDSA", "EdDSA")
    for broken in (OSError("down"), None):
        source.now += FRESH_S
        source.broken, source.data = broken, b"junk" if broken is None else source.data
        assert await keys.find("EdDSA", "EdDSA") is not None
        await keys._renewal
        assert await keys.find("EdDSA", "EdDSA") is not None
    assert source.asked == 3
    source.now += FRESH_S
    source.data = json.dumps({"keys": [OTHER.as_dict(private=False) | {"kid": "new"}]}).encode()
    await keys.find("EdDSA", "EdDSA")
    await keys._renewal
    assert await keys.find("EdDSA", "EdDSA") is None
    assert await keys.find("new", "EdDSA") is not None


def test_sets_that_are_none_and_keys_that_do_not_verify() -> None:
    for bad in (
        b"",
        b"[]",
        b"{}",
        b'{"keys": 1}',
        json.dumps({"keys": [{}] * (MAX_KEYS + 1)}).encode(),
        b" " * (MAX_SET_BYTES + 1),
    ):
        with pytest.raises(ValueError, match=r"."):
            parse_keys(bad)
    twice = [KEYS["EdDSA"].as_dict(private=False) | {"kid": "a"}] * 2
    with pytest.raises(ValueError, match="twice"):
        parse_keys(json.dumps({"keys": twice}).encode())
    assert parse_keys(public_set(use="enc")) == {}
    assert len(parse_keys(public_set())) == 3
    small = RSAKey.generate_key(1024, auto_kid=False).as_dict(private=False)
    secret = OctKey.generate_key(256).as_dict()
    junk = {"kty": "OKP", "crv": "Ed25519", "x": "!", "kid": "j"}
    rows = [small | {"kid": "s"}, secret | {"kid": "o"}, junk, {"kty": "OKP"}, 7]
    assert parse_keys(json.dumps({"keys": rows}).encode()) == {}


async def test_a_file_is_read_and_a_plain_address_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    path.write_bytes(public_set())
    issuer = TokenIssuer(ISSUER.issuer, "loraport", str(path))
    keys = IssuerKeys(issuer, now=lambda: 0.0)
    assert await keys.find("ES256", "ES256") is not None
    path.write_bytes(b" " * (MAX_SET_BYTES + 10))
    assert len(await read_set(issuer)) == MAX_SET_BYTES + 1
    for bad in ("http://idp.example/keys", "ftp://x/y", "https://user@idp.example/", "https://", "file:///etc/passwd"):
        with pytest.raises(ValueError, match="https"):
            TokenIssuer(ISSUER.issuer, "loraport", bad)
    with pytest.raises(ValueError, match="algorithms"):
        TokenIssuer(ISSUER.issuer, "loraport", "f", algorithms=("HS256",))
    with pytest.raises(ValueError, match="needs"):
        TokenIssuer("", "loraport", "f")
