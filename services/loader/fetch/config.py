"""What an operator allows to be fetched. The default allows nothing."""

from dataclasses import dataclass, field

from services.loader.fetch.sources import HTTPS_PORT, Allowed, AllowedStore, is_bucket, is_host, is_key
from services.shared.names import is_id


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSource:
    """One object store, spoken to by https only."""

    # `host` or `host:port`; the host is a fully qualified name.
    address: str
    # Buckets from which bundles may come.
    buckets: tuple[str, ...]
    # tenant: what the keys that it may name begin with, `adapters/acme/`. The credentials read for whoever is listed
    # here, so prefixes of tenants that must not know of each other's objects do not lie within one another; an empty
    # one is all of the buckets. Who is not listed imports nothing from here.
    tenants: dict[str, str] = field(default_factory=dict)
    # A file of two lines, access key and secret key; null asks without a signature.
    credentials: str | None = None
    region: str = "us-east-1"
    # Whether its addresses may be of the organisation's own network (10/8, 172.16/12, 192.168/16, fc00::/7). Loopback,
    # link-local addresses and metadata services stay refused.
    private: bool = False
    # Certificates (PEM) that it is checked against; null for those of the system.
    ca_file: str | None = None

    def __post_init__(self) -> None:
        host, port = self.place
        if not is_host(host) or not 1 <= port <= 65535:
            raise ValueError(
                f"address must be a fully qualified name, with a port or without, not {self.address!r:.80}"
            )
        if not self.buckets or not all(map(is_bucket, self.buckets)):
            raise ValueError("buckets must name at least one bucket, each in lower case")
        for tenant, prefix in self.tenants.items():
            if not is_id(tenant) or (prefix and not (prefix.endswith("/") and is_key(prefix[:-1]))):
                raise ValueError(
                    f"tenants must map ids to prefixes of keys that end with / or are empty, not {prefix!r:.80}"
                )

    @property
    def place(self) -> tuple[str, int]:
        """Host and port; port 0 when what is written there is none."""
        host, colon, port = self.address.partition(":")
        if not colon:
            return host, HTTPS_PORT
        return host, int(port) if port.isascii() and port.isdigit() and len(port) <= 5 else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class HubSource:
    """A model hub that serves `/{owner}/{name}/resolve/{commit}/{file}` and states the commit in `X-Repo-Commit`."""

    host: str
    # Hosts to which it may redirect a download.
    redirect_hosts: tuple[str, ...] = ()
    # tenant: file with that tenant's read-only token. Others ask without one.
    token_files: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _require_hosts("host", (self.host,))
        _require_hosts("redirect_hosts", self.redirect_hosts)


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportSources:
    """The allow-lists of `Import`."""

    # Object stores, under the names by which a request asks for them.
    s3: dict[str, StoreSource] = field(default_factory=dict)
    # The one hub; null for none.
    hub: HubSource | None = None
    # Hosts of https sources; also the only ones to which these may redirect.
    https_hosts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _require_hosts("https_hosts", self.https_hosts)

    def allowed(self) -> Allowed:
        """Returns the allow-lists as the rules read them."""
        stores = {
            name: AllowedStore(
                host=store.place[0],
                port=store.place[1],
                buckets=frozenset(store.buckets),
                prefixes=dict(store.tenants),
                private=store.private,
            )
            for name, store in self.s3.items()
        }
        return Allowed(
            stores=stores,
            hub_host=self.hub.host if self.hub else None,
            hub_redirect_hosts=frozenset(self.hub.redirect_hosts if self.hub else ()),
            https_hosts=frozenset(self.https_hosts),
        )


def _require_hosts(what: str, hosts: tuple[str, ...]) -> None:
    for host in hosts:
        if not is_host(host):
            raise ValueError(f"{what} must be fully qualified names in lower case, not {host!r:.80}")
