"""Where pushes may go: the gateway's allow-list, and never an internal address unless listed.

A URL is written by whoever may operate a topic, yet the gateway stands inside the network: without
this check it could be made to reach what its writer cannot (server-side request forgery). A name
says nothing about that, so what is judged is the address that a connection is about to go to.
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

from lisa.core.errors import ConfigError

__all__ = ["Allowed", "NotAllowed"]

_Address = IPv4Address | IPv6Address
_NAME = re.compile(r"[a-z0-9*?_-]+(\.[a-z0-9*?_-]+)*\Z")
_NAT64 = IPv6Network("64:ff9b::/96")
_UNICAST = IPv6Network("2000::/3")
_AZURE = IPv4Address("168.63.129.16")
"""Azure's own services for its machines: reached from inside only, though the number is public."""


class NotAllowed(Exception):
    """A push would have gone where none may go."""


class Allowed(NamedTuple):
    """The allow-list: patterns of host names, and networks. Both empty: any public address."""

    names: tuple[str, ...] = ()
    networks: tuple[IPv4Network | IPv6Network, ...] = ()

    @classmethod
    def of(cls, entries: Sequence[str]) -> Allowed:
        """Read it. Raises ConfigError."""
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
        """The address to connect to for a host. Raises NotAllowed."""
        try:
            found = _plain(ip_address(address))
        except ValueError:
            raise NotAllowed(f"{address!r} is no address") from None
        if any(found in network for network in self.networks):
            return str(found)
        named = any(fnmatch.fnmatchcase(host.lower().rstrip("."), name) for name in self.names)
        if (self.names or self.networks) and not named:
            raise NotAllowed(f"{host} ({found}) is not on the gateway's push-allow list")
        if not all(_is_public(one) for one in _forms(found)):
            raise NotAllowed(
                f"{host} is at {found}, an internal address whose network the gateway's push-allow "
                "does not list"
            )
        return str(found)

    def check_literal(self, host: str) -> None:
        """The same for a host that is an address itself; names are judged when they connect."""
        try:
            address = ip_address(host.strip("[]"))
        except ValueError:
            return
        self.check(host, str(address))


def _plain(address: _Address) -> _Address:
    """An IPv4 address in its IPv6 clothes is that IPv4 address."""
    mapped = getattr(address, "ipv4_mapped", None)
    return mapped or address


def _forms(address: _Address) -> Iterator[_Address]:
    """The address, and the IPv4 address that a gateway of the network takes out of it."""
    yield address
    if isinstance(address, IPv6Address):
        if address.sixtofour is not None:
            yield address.sixtofour
        if address in _NAT64:
            yield IPv4Address(int(address) & 0xFFFF_FFFF)


def _is_public(address: _Address) -> bool:
    if isinstance(address, IPv6Address) and address in _NAT64:
        return True  # what stands inside of it is judged by itself
    if isinstance(address, IPv6Address) and address not in _UNICAST:
        return False
    return (
        address.is_global
        and address != _AZURE
        and not (address.is_multicast or address.is_reserved or address.is_unspecified)
    )
