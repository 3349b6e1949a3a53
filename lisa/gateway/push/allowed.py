"""The allow-list for push targets. Internal addresses are forbidden unless their network is listed.

Anyone with the scope `operate` can set a URL, but the gateway runs inside the network. Without this
check it could be made to call internal services (server-side request forgery). Host names prove
nothing, so the check applies to the IP address that a connection is about to use.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterator, Sequence
from ipaddress import (
    IPv4Address,
    IPv4Network,
    IPv6Address,
    IPv6Network,
    ip_address,
    ip_network,
)
from typing import NamedTuple

from lisa.core.model.errors import ConfigError

_Address = IPv4Address | IPv6Address
_NAME = re.compile(r"[a-z0-9*?_-]+(\.[a-z0-9*?_-]+)*\Z")
_NAT64 = IPv6Network("64:ff9b::/96")
_SIX_TO_FOUR = IPv6Network("2002::/16")
_UNICAST = IPv6Network("2000::/3")
_AZURE = IPv4Address("168.63.129.16")
"""Azure's host services: a public address that is reachable only from inside Azure."""


class NotAllowed(Exception):
    """The address of a push target is not allowed."""


class Allowed(NamedTuple):
    """An allow-list of host name patterns and networks. If both are empty, any public address."""

    names: tuple[str, ...] = ()
    networks: tuple[IPv4Network | IPv6Network, ...] = ()

    @classmethod
    def of(cls, entries: Sequence[str]) -> Allowed:
        """Parse the entries of `push-allow`. Raises ConfigError."""
        names: list[str] = []
        networks: list[IPv4Network | IPv6Network] = []
        for entry in entries:
            try:
                networks.append(ip_network(entry.strip("[]")))
            except ValueError as error:
                name = entry.lower().rstrip(".")
                if "/" in entry or ":" in entry or not _NAME.match(name):
                    raise ConfigError(
                        f"gateway-server.push-allow: {entry!r} is neither a host name such as "
                        f"*.example.com nor a network such as 10.1.0.0/16 ({error})"
                    ) from None
                names.append(name)
        return cls(tuple(names), tuple(networks))

    def check(self, host: str, address: str) -> str:
        """Return the address to connect to for a host. Raises NotAllowed."""
        try:
            found = _plain(ip_address(address))
        except ValueError:
            raise NotAllowed(f"{address!r} is not an IP address") from None
        if any(found in network for network in self.networks):
            return str(found)
        named = any(fnmatch.fnmatchcase(host.lower().rstrip("."), name) for name in self.names)
        if (self.names or self.networks) and not named:
            raise NotAllowed(f"{host} ({found}) is not in the gateway's push-allow list")
        if not all(_is_public(one) for one in _forms(found)):
            raise NotAllowed(
                f"{host} resolves to {found}, an internal address whose network is not in the "
                "gateway's push-allow list"
            )
        return str(found)

    def check_literal(self, host: str) -> None:
        """Check a host that is a literal address. Host names pass; they are checked on connecting.

        Raises NotAllowed.
        """
        try:
            address = ip_address(host.strip("[]"))
        except ValueError:
            return
        self.check(host, str(address))


def _plain(address: _Address) -> _Address:
    """The IPv4 address of an IPv4-mapped IPv6 address; other addresses unchanged."""
    mapped = getattr(address, "ipv4_mapped", None)
    return mapped or address


def _forms(address: _Address) -> Iterator[_Address]:
    """The address, and the IPv4 address embedded in it for 6to4 or NAT64."""
    yield address
    if isinstance(address, IPv6Address):
        if address.sixtofour is not None:
            yield address.sixtofour
        if address in _NAT64:
            yield IPv4Address(int(address) & 0xFFFF_FFFF)


def _is_public(address: _Address) -> bool:
    if isinstance(address, IPv6Address) and (address in _NAT64 or address in _SIX_TO_FOUR):
        return True  # the embedded IPv4 address is checked separately
    if isinstance(address, IPv6Address) and address not in _UNICAST:
        return False
    return (
        address.is_global
        and address != _AZURE
        and not (address.is_multicast or address.is_reserved or address.is_unspecified)
    )
