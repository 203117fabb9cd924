"""Which addresses a fetch may connect to.

An IPv6 address can carry an IPv4 one inside (mapped, NAT64, 6to4, Teredo, ISATAP); what counts is where the packets
end, so the inner addresses are judged. The tables are the special-purpose registries of IANA, written down here because
the answers of `ipaddress.is_global` differ between releases of Python and let multicast and NAT64 through.
"""

from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address

_SPECIAL_4 = tuple(
    map(
        IPv4Network,
        (
            "0.0.0.0/8",  # this network
            "10.0.0.0/8",  # private
            "100.64.0.0/10",  # shared between a provider and its customers
            "127.0.0.0/8",  # loopback
            "168.63.129.16/32",  # a cloud's platform endpoint on an address that looks public
            "169.254.0.0/16",  # link-local, and where clouds keep their metadata
            "172.16.0.0/12",  # private
            "192.0.0.0/24",  # protocol assignments
            "192.0.2.0/24",  # documentation
            "192.88.99.0/24",  # 6to4 relays, withdrawn
            "192.168.0.0/16",  # private
            "198.18.0.0/15",  # benchmarks
            "198.51.100.0/24",  # documentation
            "203.0.113.0/24",  # documentation
            "224.0.0.0/4",  # multicast
            "240.0.0.0/4",  # reserved, broadcast
        ),
    )
)
_GLOBAL_6 = IPv6Network("2000::/3")
# Within 2000::/3.
_SPECIAL_6 = tuple(map(IPv6Network, ("2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20")))
_PRIVATE_4 = tuple(map(IPv4Network, ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16")))
_PRIVATE_6 = IPv6Network("fc00::/7")
# Metadata services of clouds that lie inside private space.
_METADATA = (IPv6Network("fd00:ec2::/32"), IPv6Network("fd20:ce::/32"))

_MAPPED = IPv6Network("::ffff:0:0/96")
_NAT64 = IPv6Network("64:ff9b::/96")
_ISATAP = (0x00005EFE, 0x02005EFE)

Address = IPv4Address | IPv6Address


def unwrap(address: Address) -> tuple[Address, ...]:
    """Returns the addresses that packets to `address` reach or pass through; itself when it carries none."""
    if isinstance(address, IPv4Address):
        return (address,)
    value = int(address)
    if address in _MAPPED or address in _NAT64:
        return (IPv4Address(value & 0xFFFFFFFF),)
    if address.sixtofour is not None:
        return (address.sixtofour,)
    if address.teredo is not None:
        return address.teredo  # the server and the client
    if (value >> 32) & 0xFFFFFFFF in _ISATAP:
        return (address, IPv4Address(value & 0xFFFFFFFF))
    return (address,)


def is_public(text: str) -> bool:
    """Says whether an address, as a resolver gives it, lies on the open internet and nowhere else."""
    address = _parse(text)
    return address is not None and all(map(_is_public, unwrap(address)))


def is_private_network(text: str) -> bool:
    """Says whether it lies in an organisation's own network: never loopback, link-local or a metadata service."""
    address = _parse(text)
    return address is not None and all(_is_private(inner) for inner in unwrap(address))


def _parse(text: str) -> Address | None:
    try:
        address = ip_address(text)
    except ValueError:
        return None
    # A scope says on which link the address is meant, so it is not a public one.
    return None if getattr(address, "scope_id", None) else address


def _is_public(address: Address) -> bool:
    if isinstance(address, IPv4Address):
        return not any(address in network for network in _SPECIAL_4)
    return address in _GLOBAL_6 and not any(address in network for network in _SPECIAL_6)


def _is_private(address: Address) -> bool:
    if isinstance(address, IPv4Address):
        return any(address in network for network in _PRIVATE_4)
    return address in _PRIVATE_6 and not any(address in network for network in _METADATA)
