"""Laws of fetching: whatever is written, it is one allowed target or one typed refusal, and nothing else is dialled."""

import ipaddress
import ssl
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from services.loader.fetch.addresses import is_public, unwrap
from services.loader.fetch.download import Download
from services.loader.fetch.faults import FAULTS, FetchFault
from services.loader.fetch.http import Transport
from services.loader.fetch.limits import Ask, Body, FetchLimits, Head, Redirect, judge
from services.loader.fetch.sources import Allowed, HttpsReference, Target, files_of, parse_https, redirected

HOSTS = frozenset({"files.example", "cdn.example"})
ALLOWED = Allowed(https_hosts=HOSTS)
GOOD = "https://files.example/w"
CONTEXT = ssl.create_default_context()

# Text that is nearly an address of ours.
pieces = st.sampled_from(
    [
        *(
            "https:",
            "HTTPS:",
            "http:",
            "//",
            "/",
            "\\",
            "@",
            ":",
            ":443",
            ":8443",
            "?",
            "#",
            "%2e",
            "%00",
            "%40",
            "..",
            ".",
        ),
        *(
            "files.example",
            "FILES.EXAMPLE",
            "cdn.example",
            "evil.example",
            "user",
            "[::1]",
            "127.0.0.1",
            "0x7f.1",
            "xn--",
            "é",
        ),
        *(
            "\t",
            "\n",
            " ",
            "\0",
            "。",
            "/a",
            "/b.json",
            "%",
            ";",
            "&",
            "files.example.evil.example",
            "evil.examplefiles.example",
        ),
    ]
)
nearly = st.lists(pieces, max_size=9).map("".join)
urls = st.one_of(nearly, nearly.map("https://files.example".__add__), nearly.map("https://".__add__), st.text())


def dialled(file: object) -> list[tuple[str, str]]:
    """Fetches, and returns (name asked for, name that the certificate is checked against) of every connection."""
    seen: list[str] = []
    names: list[str] = []

    class Context:
        def wrap_socket(self, wire: object, *, server_hostname: str) -> object:
            names.append(server_hostname)
            raise ssl.SSLError

    class Wire:
        def settimeout(self, timeout_s: float) -> None: ...

        def close(self) -> None: ...

    def resolve(host: str, port: int) -> list[str]:
        seen.append(host)
        return ["93.184.216.34"]

    transport = Transport(
        limits=FetchLimits(max_resumes=0), resolve=resolve, connect=lambda *_: Wire(), authorities=Context()
    )
    with pytest.raises(FetchFault):
        Download(transport, file, max_bytes=1).next_piece()
    return list(zip(seen, names, strict=True))


def attempt(work: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """Returns what the rules return, or the fault that they raise; anything else that is raised fails the test."""
    try:
        return work(*arguments, **named)
    except FetchFault as fault:
        return fault


@given(urls)
@example("https://files.example\\@evil.example/a")
@example("https://evil.example\\.files.example/a")
@example("https://files.example@evil.example/a")
@example("https://files.example:443@evil.example/a")
@example("https://files.example#@evil.example/a")
@example("https://files.example?@evil.example/a")
def test_any_text_is_an_allowed_target_or_a_typed_refusal(text: str) -> None:
    found = attempt(files_of, HttpsReference(text, GOOD), ALLOWED, tenant="acme")
    if isinstance(found, FetchFault):
        assert found.code in FAULTS
        assert found.reason == "SOURCE_NOT_ALLOWED"
        return
    target = found[0].target
    assert (target.host in HOSTS, target.port) == (True, 443)
    # Whatever passes, other readers of addresses read the same host from it.
    assert urlsplit(text).hostname == target.host
    assert urlsplit(text).port in (None, 443)
    assert urlsplit(text).username is None
    assert text.lower().startswith(f"https://{target.host}")
    assert target.path.isascii()
    assert target.path.isprintable()
    assert " " not in target.path
    assert dialled(found[0]) == [(target.host, target.host)]


@given(urls)
def test_parsing_what_was_parsed_gives_the_same(text: str) -> None:
    target = attempt(parse_https, text)
    if isinstance(target, FetchFault):
        return
    assert parse_https(f"https://{target.host}:{target.port}{target.path}") == target


@given(st.one_of(urls, nearly.map("/".__add__)))
def test_a_redirect_leads_to_the_same_host_or_a_listed_one(location: str) -> None:
    current = Target("files.example", 443, "/a")
    target = attempt(redirected, current, location, HOSTS)
    if isinstance(target, FetchFault):
        assert target.reason == "SOURCE_NOT_ALLOWED"
        return
    assert target.host in HOSTS
    assert target.port == 443
    if not location.lower().startswith("https://"):
        assert target == Target("files.example", 443, location)


@given(st.one_of(st.ip_addresses(v=4), st.ip_addresses(v=6)))
@example(ipaddress.ip_address("64:ff9b::a9fe:a9fe"))
@example(ipaddress.ip_address("2002:7f00:1::"))
def test_public_means_public_all_the_way_down(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> None:
    if not is_public(str(address)):
        return
    for inner in unwrap(address):
        assert inner.is_global
        assert not any((inner.is_multicast, inner.is_loopback, inner.is_link_local, inner.is_unspecified))
        if inner != address:
            assert is_public(str(inner))


@given(st.ip_addresses(v=4))
def test_a_wrapped_address_is_as_public_as_what_it_wraps(address: ipaddress.IPv4Address) -> None:
    value = int(address)
    mapped = ipaddress.IPv6Address((0xFFFF << 32) | value)
    nat64 = ipaddress.IPv6Address((0x64FF9B << 96) | value)
    sixtofour = ipaddress.IPv6Address((0x2002 << 112) | (value << 80) | 1)
    for wrapped in (mapped, nat64, sixtofour):
        assert is_public(str(wrapped)) == is_public(str(address))


header_values = st.one_of(
    st.text('0123456789-/* bytes"W', max_size=20), st.sampled_from(["10", "bytes 4-9/10", '"x"', "gzip"])
)
heads = st.builds(
    Head,
    st.integers(100, 999),
    st.lists(
        st.tuples(
            st.sampled_from(
                [
                    "content-length",
                    "content-range",
                    "etag",
                    "content-encoding",
                    "transfer-encoding",
                    "location",
                    "x-repo-commit",
                ]
            ),
            header_values,
        ),
        max_size=8,
    ).map(tuple),
)


@given(heads, st.sampled_from([0, 4]), st.sampled_from([None, 10]), st.sampled_from(["", "c" * 40]))
def test_an_answer_is_exactly_what_was_asked_or_a_typed_fault(
    head: Head, start: int, size: int | None, commit: str
) -> None:
    ask = Ask(max_bytes=64, size_bytes=size, start=start, etag='"x"' if start else None, commit=commit)
    meaning = attempt(judge, ask, head)
    if isinstance(meaning, FetchFault):
        assert meaning.code in FAULTS
        return
    if isinstance(meaning, Redirect):
        assert head.status in (301, 302, 303, 307, 308)
        return
    assert isinstance(meaning, Body)
    assert meaning.start in (0, start)
    assert meaning.start == 0 or meaning.etag == ask.etag
    assert meaning.start < meaning.size_bytes <= ask.max_bytes
    assert size in (None, meaning.size_bytes)
    assert [int(length) for length in head.all("content-length")] == [meaning.size_bytes - meaning.start]
    assert not head.all("transfer-encoding")
    assert not commit or head.all("x-repo-commit") == [commit]
