"""The rules of fetching, row by row."""

import ssl
from ipaddress import ip_address

import pytest

from services.loader.fetch.addresses import is_private_network, is_public, unwrap
from services.loader.fetch.config import HubSource, ImportSources, StoreSource
from services.loader.fetch.credentials import Credentials
from services.loader.fetch.faults import FAULTS, FetchFault
from services.loader.fetch.limits import Ask, Body, FetchLimits, Head, Pace, Redirect, judge
from services.loader.fetch.sources import (
    MAX_URL_CHARS,
    Allowed,
    AllowedStore,
    HttpsReference,
    HubReference,
    S3Reference,
    Target,
    files_of,
    parse_https,
)
from services.shared.clock import ManualClock
from services.shared.config import ConfigError, from_mapping
from services.shared.errors import REASONS

COMMIT = "0123456789abcdef0123456789abcdef01234567"
ALLOWED = Allowed(
    stores={
        "lake": AllowedStore(
            host="s3.example", port=9000, buckets=frozenset({"adapters"}), prefixes={"acme": "acme/", "whole": ""}
        )
    },
    hub_host="hub.example",
    hub_redirect_hosts=frozenset({"cdn.example"}),
    https_hosts=frozenset({"files.example"}),
)


def test_every_fault_has_a_reason() -> None:
    assert {reason for reason, _ in FAULTS.values()} <= set(REASONS)


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("https://files.example/a/b.json", Target("files.example", 443, "/a/b.json")),
        ("HTTPS://FILES.example:443/a?sig=%2F&x=/?", Target("files.example", 443, "/a?sig=%2F&x=/?")),
        ("https://xn--bcher-kva.example/", Target("xn--bcher-kva.example", 443, "/")),
        ("http://files.example/a", "SCHEME"),
        ("file:///etc/passwd", "SCHEME"),
        ("ftp://files.example/a", "SCHEME"),
        ("data:,x", "SCHEME"),
        ("//files.example/a", "SCHEME"),
        ("https:/files.example/a", "SCHEME"),
        ("https:\\\\files.example\\a", "CHARACTER"),
        ("git+https://files.example/a", "SCHEME"),
        ("\\\\server\\share", "CHARACTER"),
        (" https://files.example/a", "CHARACTER"),
        ("https://files.example/a\n", "CHARACTER"),
        ("https://files.ex\tample/a", "CHARACTER"),
        ("https://files.example\0/a", "CHARACTER"),
        ("https://evil.example\\@files.example/a", "CHARACTER"),
        ("https://files.example\\.evil.example/a", "CHARACTER"),
        ("https://user@files.example/a", "USERINFO"),
        ("https://files.example:x@evil.example/a", "USERINFO"),
        ("https://files.example%40evil.example/a", "HOST"),
        ("https://bücher.example/a", "CHARACTER"),
        ("https://files。example/a", "CHARACTER"),
        ("https://ﬁles.example/a", "CHARACTER"),
        ("https://files.example:80/a", "PORT"),
        ("https://files.example:/a", "PORT"),
        ("https://files.example:0443/a", "PORT"),
        ("https://files.example:443:443/a", "PORT"),
        ("https://127.0.0.1/a", "IP_LITERAL"),
        ("https://2130706433/a", "IP_LITERAL"),
        ("https://0x7f.1/a", "IP_LITERAL"),
        ("https://0x7f000001/a", "IP_LITERAL"),
        ("https://127.1./a", "IP_LITERAL"),
        ("https://0177.0.0.01/a", "IP_LITERAL"),
        ("https://[::1]/a", "IP_LITERAL"),
        ("https://[::ffff:7f00:1]:443/a", "IP_LITERAL"),
        ("https://localhost/a", "HOST"),
        ("https:///a", "HOST"),
        ("https://files.example./a", "HOST"),
        ("https://-files.example/a", "HOST"),
        ("https://files_x.example/a", "HOST"),
        ("https://files..example/a", "HOST"),
        (f"https://{'a' * 64}.example/a", "HOST"),
        (f"https://{'a.' * 130}example/a", "HOST"),
        ("https://files.example", "PATH"),
        ("https://files.example?x=/a", "PATH"),
        ("https://files.example/a/../b", "PATH"),
        ("https://files.example/a/%2e%2E/b", "PATH"),
        ("https://files.example/./b", "PATH"),
        ("https://files.example/%zz", "PATH"),
        ("https://files.example/a?%", "PATH"),
        ("https://files.example/a#b", "FRAGMENT"),
        ("https://files.example#@evil.example/a", "FRAGMENT"),
        ("https://files.example/" + "a" * MAX_URL_CHARS, "TOO_LONG"),
        ("", "SCHEME"),
    ],
)
def test_the_one_parser(url: str, expected: Target | str) -> None:
    if isinstance(expected, Target):
        assert parse_https(url) == expected
        return
    with pytest.raises(FetchFault) as caught:
        parse_https(url)
    assert caught.value.code == expected


def test_what_is_on_the_lists_becomes_two_files() -> None:
    config, weights = files_of(HubReference("acme/pirate.v2", COMMIT), ALLOWED, tenant="acme")
    assert config.target == Target("hub.example", 443, f"/acme/pirate.v2/resolve/{COMMIT}/adapter_config.json")
    assert weights.target.path.endswith("/adapter_model.safetensors")
    assert (config.commit, config.redirect_hosts) == (COMMIT, {"hub.example", "cdn.example"})

    config, weights = files_of(S3Reference("lake", "adapters", "acme/a b.json", "acme/ü%2e"), ALLOWED, tenant="acme")
    assert config.target == Target("s3.example", 9000, "/adapters/acme/a%20b.json")
    assert weights.target.path == "/adapters/acme/%C3%BC%252e"
    assert (config.store, config.redirect_hosts) == ("lake", None)

    config, _ = files_of(HttpsReference("https://files.example/c", "https://files.example/w"), ALLOWED, tenant="acme")
    assert (config.target.path, config.redirect_hosts) == ("/c", {"files.example"})


@pytest.mark.parametrize(
    ("reference", "expected"),
    [
        (HubReference("acme/pirate", "main"), "COMMIT"),
        (HubReference("acme/pirate", COMMIT.upper()), "COMMIT"),
        (HubReference("acme/pirate", COMMIT + "\n"), "COMMIT"),
        (HubReference("pirate", COMMIT), "REPOSITORY"),
        (HubReference("acme/../pirate", COMMIT), "REPOSITORY"),
        (HubReference("acme/a..b", COMMIT), "REPOSITORY"),
        (HubReference("acme/pirate?x=", COMMIT), "REPOSITORY"),
        (HubReference("", ""), "REPOSITORY"),
        (S3Reference("other", "adapters", "acme/c", "acme/w"), "STORE_NOT_ALLOWED"),
        (S3Reference("lake", "adapters-2", "acme/c", "acme/w"), "STORE_NOT_ALLOWED"),
        (S3Reference("lake", "adapters/..", "acme/c", "acme/w"), "STORE_NOT_ALLOWED"),
        (S3Reference("lake", "adapters", "acme/c", "globex/w"), "STORE_NOT_ALLOWED"),
        (S3Reference("lake", "adapters", "acme", "acme/w"), "STORE_NOT_ALLOWED"),
        (S3Reference("lake", "adapters", "acme2/c", "acme/w"), "STORE_NOT_ALLOWED"),
        (S3Reference("lake", "adapters", "ACME/c", "acme/w"), "STORE_NOT_ALLOWED"),
        (S3Reference("lake", "adapters", "acme/../globex/c", "acme/w"), "KEY"),
        (S3Reference("lake", "adapters", "acme/./c", "acme/w"), "KEY"),
        (S3Reference("lake", "adapters", "../other/c", "acme/w"), "KEY"),
        (S3Reference("lake", "adapters", "acme/c", "/acme/w"), "KEY"),
        (S3Reference("lake", "adapters", "acme/c", "acme//w"), "KEY"),
        (S3Reference("lake", "adapters", "acme/", "acme/w"), "KEY"),
        (S3Reference("lake", "adapters", "", "acme/w"), "KEY"),
        (S3Reference("lake", "adapters", "acme/c\r\nHost: x", "acme/w"), "KEY"),
        (S3Reference("lake", "adapters", "acme/" + "c" * 1020, "acme/w"), "KEY"),
        (S3Reference("nowhere", "adapters", "", "w"), "KEY"),
        (HttpsReference("https://files.example/c", "https://evil.example/w"), "HOST_NOT_ALLOWED"),
        (HttpsReference("https://files.example.evil.example/c", "https://files.example/w"), "HOST_NOT_ALLOWED"),
        (HttpsReference("https://evilfiles.example/c", "https://files.example/w"), "HOST_NOT_ALLOWED"),
        (HttpsReference("https://a.files.example/c", "https://files.example/w"), "HOST_NOT_ALLOWED"),
        (HttpsReference("https://hub.example/c", "https://files.example/w"), "HOST_NOT_ALLOWED"),
    ],
)
def test_what_is_not_on_the_lists(reference: HubReference, expected: str) -> None:
    with pytest.raises(FetchFault) as caught:
        files_of(reference, ALLOWED, tenant="acme")
    assert (caught.value.code, caught.value.reason) == (expected, "SOURCE_NOT_ALLOWED")


def test_a_store_is_open_to_the_tenants_that_it_lists_and_to_each_below_its_prefix() -> None:
    reference = S3Reference("lake", "adapters", "acme/c", "acme/w")
    for tenant in ("acme", "whole"):
        assert files_of(reference, ALLOWED, tenant=tenant)[0].target.path == "/adapters/acme/c"
    nowhere = S3Reference("nowhere", "none", "acme/c", "acme/w")
    told = set()
    for asked, tenant in ((reference, "globex"), (nowhere, "acme"), (reference, "Acme"), (nowhere, "globex")):
        with pytest.raises(FetchFault) as caught:
            files_of(asked, ALLOWED, tenant=tenant)
        told.add(str(caught.value))
    assert len(told) == 1, "what is listed for others looks like what is not listed"


@pytest.mark.parametrize(
    "reference",
    [
        HubReference("acme/pirate", COMMIT),
        S3Reference("lake", "adapters", "c", "w"),
        HttpsReference("https://files.example/c", "https://files.example/w"),
    ],
    ids=lambda reference: type(reference).__name__,
)
def test_by_default_nothing_is_allowed(reference: HubReference) -> None:
    with pytest.raises(FetchFault):
        files_of(reference, ImportSources().allowed(), tenant="acme")


def test_a_store_without_tenants_is_closed() -> None:
    sources = ImportSources(s3={"lake": StoreSource(address="s3.example", buckets=("adapters",))})
    with pytest.raises(FetchFault, match="STORE_NOT_ALLOWED"):
        files_of(S3Reference("lake", "adapters", "c", "w"), sources.allowed(), tenant="acme")


@pytest.mark.parametrize(
    ("address", "public"),
    [
        *((address, True) for address in ("8.8.8.8", "93.184.216.34", "1.1.1.1", "172.32.0.1", "100.128.0.1")),
        *(
            (address, True)
            for address in ("2606:2800:220:1::1", "::ffff:8.8.8.8", "64:ff9b::808:808", "2002:808:808::")
        ),
        *((address, False) for address in ("0.0.0.0", "10.0.0.1", "127.0.0.1", "127.255.255.255", "169.254.169.254")),
        *(
            (address, False)
            for address in ("172.16.0.1", "172.31.255.255", "192.168.1.1", "100.64.0.1", "100.100.100.200")
        ),
        *((address, False) for address in ("192.0.0.192", "192.0.2.1", "198.18.0.1", "198.51.100.1", "203.0.113.1")),
        *(
            (address, False)
            for address in ("192.88.99.1", "224.0.0.1", "240.0.0.1", "255.255.255.255", "168.63.129.16")
        ),
        *(
            (address, False)
            for address in ("::", "::1", "::8.8.8.8", "fe80::1", "fe80::1%eth0", "2606::1%1", "fc00::1")
        ),
        *(
            (address, False)
            for address in ("fd00:ec2::254", "fd20:ce::254", "fec0::1", "ff02::1", "2001:db8::1", "3fff::1")
        ),
        *(
            (address, False)
            for address in ("::ffff:127.0.0.1", "::ffff:10.0.0.1", "::ffff:0:8.8.8.8", "100::1", "5f00::1")
        ),
        *((address, False) for address in ("64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe", "64:ff9b:1::808:808")),
        *(
            (address, False)
            for address in ("2002:7f00:1::", "2002:a9fe:a9fe::1", "2002:c0a8:101::1", "2001:2::1", "2001:20::1")
        ),
        # Teredo: server 8.8.8.8 with client 127.0.0.1, and the other way round; clients are stored inverted.
        ("2001:0:808:808::80ff:fffe", False),
        ("2001:0:7f00:1::f7f7:f7f7", False),
        ("2001:0:808:808::f7f7:f7f7", True),
        ("2606:2800::5efe:10.0.0.1", False),
        ("2606:2800::200:5efe:127.0.0.1", False),
        *((address, False) for address in ("", "localhost", "127.1", "0x7f.0.0.1", "8.8.8.8/32", "[::1]", " 8.8.8.8")),
    ],
)
def test_public_addresses(address: str, public: bool) -> None:
    assert is_public(address) is public


def test_what_an_address_carries() -> None:
    assert unwrap(ip_address("::ffff:10.0.0.1")) == (ip_address("10.0.0.1"),)
    assert unwrap(ip_address("2001:0:808:808::80ff:fffe")) == (ip_address("8.8.8.8"), ip_address("127.0.0.1"))
    assert unwrap(ip_address("8.8.8.8")) == (ip_address("8.8.8.8"),)


@pytest.mark.parametrize(
    ("address", "private"),
    [
        *((address, True) for address in ("10.0.0.1", "172.16.0.1", "192.168.0.1", "fd12::1", "::ffff:10.0.0.1")),
        *((address, False) for address in ("127.0.0.1", "169.254.169.254", "::1", "fe80::1", "100.64.0.1", "8.8.8.8")),
        *((address, False) for address in ("fd00:ec2::254", "fd20:ce::254", "0.0.0.0", "::ffff:127.0.0.1", "x")),
    ],
)
def test_networks_of_ones_own(address: str, private: bool) -> None:
    assert is_private_network(address) is private


def head(status: int = 200, **headers: str) -> Head:
    return Head(status, tuple((name.replace("_", "-").lower(), value) for name, value in headers.items()))


RESUME = Ask(max_bytes=100, size_bytes=10, start=4, etag='"x"')


@pytest.mark.parametrize(
    ("ask", "answer", "expected"),
    [
        (Ask(max_bytes=10), head(content_length="10", etag='"x"'), Body(0, 10, '"x"')),
        (Ask(max_bytes=10), head(content_length="10", etag='W/"x"'), Body(0, 10, None)),
        (Ask(max_bytes=10), head(content_length="10", content_encoding="Identity"), Body(0, 10, None)),
        (Ask(max_bytes=10), head(content_length="11"), "SIZE"),
        (Ask(max_bytes=10, size_bytes=9), head(content_length="10"), "SIZE"),
        (Ask(max_bytes=10), head(307, location="/x"), Redirect("/x")),
        (RESUME, head(206, content_length="6", content_range="bytes 4-9/10", etag='"x"'), Body(4, 10, '"x"')),
        (RESUME, head(206, content_length="6", content_range="bytes 4-9/10"), "CHANGED"),
        (RESUME, head(206, content_length="6", content_range="bytes 4-9/10", etag='"y"'), "CHANGED"),
        (RESUME, head(206, content_length="5", content_range="bytes 4-9/10", etag='"x"'), "RANGE"),
        (RESUME, head(206, content_length="5", content_range="bytes 4-8/10", etag='"x"'), "RANGE"),
        (RESUME, head(206, content_length="6", etag='"x"'), "RANGE"),
        (RESUME, head(200, content_length="10", etag='"y"'), Body(0, 10, '"y"')),
        (RESUME, head(416), "RANGE"),
        *((RESUME, head(status), "BUSY") for status in (408, 425, 429, 500, 503, 599)),
        *((RESUME, head(status), "STATUS") for status in (100, 204, 300, 304, 305, 400, 600, 999)),
    ],
    ids=str,
)
def test_answers(ask: Ask, answer: Head, expected: Body | Redirect | str) -> None:
    if isinstance(expected, str):
        with pytest.raises(FetchFault) as caught:
            judge(ask, answer)
        assert caught.value.code == expected
    else:
        assert judge(ask, answer) == expected


def test_a_range_is_asked_for_only_with_an_etag() -> None:
    assert {"Range": "bytes=4-", "If-Range": '"x"'}.items() <= RESUME.headers.items()
    assert "Range" not in Ask(max_bytes=10, start=4).headers


def test_the_pace_counts_only_waiting() -> None:
    limits = FetchLimits(min_rate=100, window_s=10)
    steady = Pace(limits)
    for _ in range(1000):
        steady.add(0.1, 11)
    with pytest.raises(FetchFault, match="SLOW"):
        for _ in range(200):
            steady.add(0.1, 5)
    # A fast start does not pay for a stall of a whole window.
    stalling = Pace(limits)
    stalling.add(0.1, 10**9)
    with pytest.raises(FetchFault, match="SLOW"):
        for _ in range(101):
            stalling.add(0.1, 0)
    fast = Pace(limits)
    for _ in range(10_000):
        fast.add(0.0, 1)


@pytest.mark.parametrize(
    "wrong",
    [
        {"https_hosts": ["*.example"]},
        {"https_hosts": ["Files.example"]},
        {"https_hosts": ["127.0.0.1"]},
        {"https_hosts": ["localhost"]},
        {"hub": {"host": "https://hub.example"}},
        {"hub": {"host": "hub.example", "redirect_hosts": ["cdn.example:8443"]}},
        {"s3": {"lake": {"address": "10.0.0.1:9000", "buckets": ["a-bucket"]}}},
        {"s3": {"lake": {"address": "s3.example:x", "buckets": ["a-bucket"]}}},
        {"s3": {"lake": {"address": "s3.example", "buckets": []}}},
        {"s3": {"lake": {"address": "s3.example", "buckets": ["a/b"]}}},
        {"s3": {"lake": {"address": "s3.example", "buckets": ["a-bucket"], "plain_http": True}}},
        *(
            {"s3": {"lake": {"address": "s3.example", "buckets": ["a-bucket"], "tenants": tenants}}}
            for tenants in (
                {"*": ""},
                {"Acme": "a/"},
                {"acme": "a"},
                {"acme": "/"},
                {"acme": "/a/"},
                {"acme": "../"},
                {"acme": "a//"},
                {"acme": 1},
                ["acme"],
            )
        ),
    ],
    ids=str,
)
def test_lists_that_cannot_be_meant_are_refused_at_the_start(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        from_mapping(ImportSources, wrong, where="test")


def test_secrets_are_for_their_tenant_and_their_store(tmp_path: object) -> None:
    (tmp_path / "token").write_text("hub-token\n")
    (tmp_path / "keys").write_text("access\nsecret-key\n")
    sources = ImportSources(
        s3={
            "lake": StoreSource(
                address="s3.example", buckets=("adapters",), credentials=str(tmp_path / "keys"), tenants={"acme": ""}
            ),
            "open": StoreSource(address="o.example", buckets=("adapters",), tenants={"acme": ""}),
        },
        hub=HubSource(host="hub.example", token_files={"acme": str(tmp_path / "token")}),
    )
    secrets = Credentials(sources, clock=ManualClock())

    def headers(reference: HubReference | S3Reference, tenant: str) -> dict[str, str]:
        file = files_of(reference, sources.allowed(), tenant=tenant)[0]
        assert secrets.authorities(file) is None or isinstance(secrets.authorities(file), ssl.SSLContext)
        return dict(secrets.headers(file, file.target, tenant=tenant))

    hub = HubReference("acme/pirate", COMMIT)
    assert headers(hub, "acme") == {"Authorization": "Bearer hub-token"}
    assert headers(hub, "other") == {}
    assert headers(S3Reference("open", "adapters", "c", "w"), "acme") == {}
    signed = headers(S3Reference("lake", "adapters", "c", "w"), "acme")
    assert signed["Authorization"].startswith("AWS4-HMAC-SHA256 Credential=access/")
    assert "secret-key" not in str(signed)
    (tmp_path / "token").write_text("two\nlines")
    with pytest.raises(OSError, match="one token"):
        Credentials(sources, clock=ManualClock())
