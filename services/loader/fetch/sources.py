"""What may be fetched: text in, typed targets on the allow-list out, and nothing between.

There is one parser, and requests are built from the parts that it returned; the text is never looked at again. It
takes far less than the URL standards allow. What it does not know it refuses: two readers of one address that disagree
about the host are how allow-lists are passed.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import quote

from loraport.bundle.manifest import CONFIG_NAME, WEIGHTS_NAME
from services.loader.fetch.faults import FetchFault

HTTPS_PORT = 443
# Hubs redirect to signed addresses of almost 2000 characters; servers take request lines of 8 KiB.
MAX_URL_CHARS = 8000
MAX_KEY_BYTES = 1024

_LABEL = r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?"
# The last label begins with a letter: 1.2.3.4, 0x7f.1 and 2130706433 are numbers in other readers' eyes.
_HOST = re.compile(rf"(?:{_LABEL}\.)+[a-z](?:[a-z0-9-]{{0,61}}[a-z0-9])?")
_NUMERIC = re.compile(r"(?:.*\.)?(?:0x[0-9a-f]*|[0-9]+)\.?")
_PATH = re.compile(r"(?:[A-Za-z0-9._~!$&'()*+,;=:@/-]|%[0-9A-Fa-f]{2})*")
_QUERY = re.compile(r"(?:[A-Za-z0-9._~!$&'()*+,;=:@/?-]|%[0-9A-Fa-f]{2})*")
_DOTS = re.compile(r"(?:\.|%2e){1,2}", re.IGNORECASE)
_REPOSITORY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")


@dataclass(frozen=True, slots=True)
class Target:
    """One https resource. `path` is sent as it is, query included."""

    host: str
    port: int
    path: str


@dataclass(frozen=True, slots=True)
class S3Reference:
    """Two objects of a bucket, at the endpoint that the configuration calls `endpoint`."""

    endpoint: str
    bucket: str
    config_key: str
    weights_key: str


@dataclass(frozen=True, slots=True)
class HubReference:
    """A commit of a model hub's repository."""

    repository: str
    commit: str


@dataclass(frozen=True, slots=True)
class HttpsReference:
    """Two addresses."""

    config_url: str
    weights_url: str


Reference = S3Reference | HubReference | HttpsReference


@dataclass(frozen=True, slots=True, kw_only=True)
class AllowedStore:
    """An object store from which bundles may come. `private` admits addresses of the organisation's own network.

    `prefixes` has what each tenant's keys begin with; the store's credentials are the loader's, so nobody else's keys
    are asked for at all.
    """

    host: str
    port: int
    buckets: frozenset[str]
    prefixes: Mapping[str, str] = field(default_factory=dict)
    private: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowed:
    """The allow-lists. Empty: nothing may be fetched."""

    stores: Mapping[str, AllowedStore] = field(default_factory=dict)
    hub_host: str | None = None
    hub_redirect_hosts: frozenset[str] = frozenset()
    https_hosts: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteFile:
    """One file, and where its fetch may lead.

    `redirect_hosts` are the hosts that a redirect may name; None: no redirect is followed. `commit`: what the first
    answer must state. `store`: the endpoint whose credentials and authority count.
    """

    target: Target
    redirect_hosts: frozenset[str] | None = None
    commit: str = ""
    store: str = ""
    private: bool = False


def is_host(text: str) -> bool:
    """Says whether `text` is a fully qualified name in lower case."""
    return len(text) <= 253 and _HOST.fullmatch(text) is not None


def is_bucket(text: str) -> bool:
    """Says whether `text` can be a bucket's name."""
    return _BUCKET.fullmatch(text) is not None


def parse_https(text: str) -> Target:
    """Returns what an https address names.

    Raises:
        FetchFault: it is not one, or says more than host and path.
    """
    if len(text) > MAX_URL_CHARS:
        raise FetchFault("TOO_LONG")
    if any(not "!" <= letter <= "~" or letter in '\\"<>^`{|}' for letter in text):
        raise FetchFault("CHARACTER")
    if text[:8].lower() != "https://":
        raise FetchFault("SCHEME")
    end = next((at for at, letter in enumerate(text) if at >= 8 and letter in "/?#"), len(text))
    return Target(*_authority(text[8:end]), _path(text[end:]))


def redirected(current: Target, location: str, hosts: frozenset[str]) -> Target:
    """Returns where a redirect leads: another path of the same host, or an https address of one of `hosts`.

    Raises:
        FetchFault: anywhere else.
    """
    if location.startswith("/") and not location.startswith("//"):
        if len(location) > MAX_URL_CHARS:
            raise FetchFault("TOO_LONG")
        return Target(current.host, current.port, _path(location))
    return _listed(parse_https(location), hosts)


def files_of(reference: Reference, allowed: Allowed, *, tenant: str) -> tuple[RemoteFile, RemoteFile]:
    """Returns config and weights of a reference.

    Raises:
        FetchFault: it is malformed, or not on the allow-lists for this tenant.
    """
    match reference:
        case S3Reference():
            return _store_file(reference, reference.config_key, allowed, tenant), _store_file(
                reference, reference.weights_key, allowed, tenant
            )
        case HubReference():
            return _hub_file(reference, CONFIG_NAME, allowed), _hub_file(reference, WEIGHTS_NAME, allowed)
        case HttpsReference():
            return _https_file(reference.config_url, allowed), _https_file(reference.weights_url, allowed)


def _https_file(url: str, allowed: Allowed) -> RemoteFile:
    return RemoteFile(target=_listed(parse_https(url), allowed.https_hosts), redirect_hosts=allowed.https_hosts)


def _hub_file(reference: HubReference, name: str, allowed: Allowed) -> RemoteFile:
    if allowed.hub_host is None:
        raise FetchFault("NO_HUB")
    if not _REPOSITORY.fullmatch(reference.repository) or ".." in reference.repository:
        raise FetchFault("REPOSITORY")
    if not _COMMIT.fullmatch(reference.commit):
        raise FetchFault("COMMIT")
    return RemoteFile(
        target=Target(allowed.hub_host, HTTPS_PORT, f"/{reference.repository}/resolve/{reference.commit}/{name}"),
        redirect_hosts=allowed.hub_redirect_hosts | {allowed.hub_host},
        commit=reference.commit,
    )


def is_key(key: str) -> bool:
    """Says whether `key` can be an object's key: no empty or dot segments, no control characters."""
    legal = key.isprintable() and not {"", ".", ".."} & set(key.split("/"))
    return legal and len(key.encode("utf-8", "replace")) <= MAX_KEY_BYTES


def _store_file(reference: S3Reference, key: str, allowed: Allowed, tenant: str) -> RemoteFile:
    """What is not for this tenant has one answer, whether it is there for others or for nobody."""
    if not is_key(key):
        raise FetchFault("KEY")
    store = allowed.stores.get(reference.endpoint)
    prefix = store.prefixes.get(tenant) if store is not None else None
    if store is None or prefix is None or reference.bucket not in store.buckets or not key.startswith(prefix):
        raise FetchFault("STORE_NOT_ALLOWED")
    path = f"/{reference.bucket}/{quote(key, safe='/-_.~')}"
    return RemoteFile(target=Target(store.host, store.port, path), store=reference.endpoint, private=store.private)


def _listed(target: Target, hosts: frozenset[str]) -> Target:
    if target.host not in hosts:
        raise FetchFault("HOST_NOT_ALLOWED", target.host)
    return target


def _authority(text: str) -> tuple[str, int]:
    if "@" in text:
        raise FetchFault("USERINFO")
    if "[" in text or "]" in text:
        raise FetchFault("IP_LITERAL")
    host, colon, port = text.partition(":")
    if colon and port != str(HTTPS_PORT):
        raise FetchFault("PORT")
    host = host.lower()
    if _NUMERIC.fullmatch(host):
        raise FetchFault("IP_LITERAL")
    if not is_host(host):
        raise FetchFault("HOST")
    return host, HTTPS_PORT


def _path(text: str) -> str:
    if "#" in text:
        raise FetchFault("FRAGMENT")
    path, _, query = text.partition("?")
    if not path.startswith("/") or not _PATH.fullmatch(path) or not _QUERY.fullmatch(query):
        raise FetchFault("PATH")
    if any(_DOTS.fullmatch(segment) for segment in path.split("/")):
        raise FetchFault("PATH")
    return text
