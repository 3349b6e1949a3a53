"""Connects only to addresses that passed the allow-list of push targets.

Anyone with the scope `operate` can set a URL, but the gateway runs inside the network. Without the
list it could be made to call internal services (server-side request forgery). Internal addresses
are forbidden unless their network is listed. Host names prove nothing, so the check applies to the
IP address that a connection is about to use.

httpcore would resolve a host name again after the check, and the name could then resolve to an
internal address (DNS rebinding). Here, lookup, check and connection are therefore one step. TLS
still verifies the certificate against the host name.
"""

from __future__ import annotations

import asyncio
import errno
import fnmatch
import math
import re
import socket
import time
from collections.abc import Iterable, Iterator, Sequence
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Any, NamedTuple

import httpcore

from lisa.core.model.errors import ConfigError

_Address = IPv4Address | IPv6Address
_NAME = re.compile(r"[a-z0-9*?_-]+(\.[a-z0-9*?_-]+)*\Z")
_NAT64 = IPv6Network("64:ff9b::/96")
_SIX_TO_FOUR = IPv6Network("2002::/16")
_UNICAST = IPv6Network("2000::/3")
_AZURE = IPv4Address("168.63.129.16")
"""Azure's host services: a public address that is reachable only from inside Azure."""

MOST_TRIED = 4
"""Maximum number of a host's addresses to try before the push fails."""


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
        if not all(_is_public(form) for form in _forms(found)):
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


class GatewayFault(Exception):
    """This gateway cannot push at the moment, for a reason that is not the target's."""


_OWN_ERRNOS = {
    *(errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL),
    *(errno.ENETDOWN, errno.ENETUNREACH, errno.EPERM),
}
"""Errors of a connection attempt that are the machine's: files, memory, ports, network."""

_UNKNOWN_NAME = frozenset(
    getattr(socket, name, None) for name in ("EAI_NONAME", "EAI_NODATA", "EAI_ADDRFAMILY")
)
"""Errors of a lookup that are the name's; others are the resolver's or the machine's."""


class GuardedBackend(httpcore.AsyncNetworkBackend):
    """An httpcore network backend that resolves a host, checks its addresses, and connects."""

    def __init__(
        self, allowed: Allowed, network: httpcore.AsyncNetworkBackend | None = None
    ) -> None:
        self._allowed = allowed
        self._network = network or httpcore.AnyIOBackend()
        self._lookups: dict[tuple[str, int], asyncio.Task[list[str]]] = {}

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        """Connect to an allowed address of a host.

        Raises NotAllowed if there is none, and GatewayFault.
        """
        ends = time.monotonic() + (math.inf if timeout is None else timeout)
        permitted: list[str] = []
        refusal: NotAllowed | None = None
        for address in await self._addresses(host, port, timeout):
            try:
                permitted.append(self._allowed.check(host, address))
            except NotAllowed as error:
                refusal = error
        if refusal is not None and not permitted:
            raise refusal
        fault: Exception = NotAllowed(f"{host} has no address")
        are_own = True
        for i, address in enumerate(permitted[:MOST_TRIED]):
            left = max(0.1, ends - time.monotonic())
            share = left / (min(len(permitted), MOST_TRIED) - i)
            try:
                return await self._network.connect_tcp(
                    address, port, share, local_address, socket_options
                )
            except (httpcore.ConnectError, httpcore.ConnectTimeout) as error:
                fault = error
                are_own = are_own and not _OWN_ERRNOS.isdisjoint(_errnos(error))
        if permitted and are_own:
            raise GatewayFault(f"no connection to {host}: {fault}") from fault
        raise fault

    async def sleep(self, seconds: float) -> None:
        """Sleep; part of httpcore's interface."""
        await asyncio.sleep(seconds)

    async def _addresses(self, host: str, port: int, timeout: float | None) -> list[str]:
        """The host's addresses. Concurrent pushes to a host share one lookup (one thread)."""
        key = host, port
        lookup = self._lookups.get(key)
        if lookup is None:
            lookup = self._lookups[key] = asyncio.create_task(_look_up(host, port))
            lookup.add_done_callback(lambda done: self._looked_up(key, done))
        try:
            async with asyncio.timeout(timeout):
                return await asyncio.shield(lookup)
        except TimeoutError:
            raise GatewayFault(f"the DNS lookup of {host} timed out") from None

    def _looked_up(self, key: tuple[str, int], lookup: asyncio.Task[list[str]]) -> None:
        del self._lookups[key]
        if not lookup.cancelled():
            lookup.exception()  # mark as retrieved, even if the caller was cancelled


async def _look_up(host: str, port: int) -> list[str]:
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except UnicodeError as error:
        raise NotAllowed(f"{host} is not a host name: {error}") from None
    except (OSError, RuntimeError) as error:  # RuntimeError: no thread can be started
        kind = NotAllowed if getattr(error, "errno", None) in _UNKNOWN_NAME else GatewayFault
        raise kind(f"{host} cannot be resolved: {error}") from None
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


def _errnos(error: BaseException | None) -> set[int]:
    """The error numbers of an exception, its causes, and the members of groups."""
    found: set[int] = set()
    while error is not None:
        if isinstance(error, OSError) and error.errno is not None:
            found.add(error.errno)
        if isinstance(error, BaseExceptionGroup):
            found = found.union(*map(_errnos, error.exceptions))
        error = error.__cause__ or error.__context__
    return found
