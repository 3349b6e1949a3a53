"""Connects only to addresses that passed the allow-list.

httpcore would resolve a host name again after the check, and the name could then resolve to an
internal address (DNS rebinding). Here, lookup, check and connection are therefore one step. TLS
still verifies the certificate against the host name.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import time
from collections.abc import Iterable
from typing import Any

import httpcore

from lisa.gateway.push.allowed import Allowed, NotAllowed

MOST_TRIED = 4
"""Maximum number of a host's addresses to try before the push fails."""


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
        began = time.monotonic()
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
            left = None if timeout is None else max(0.1, timeout - (time.monotonic() - began))
            share = None if left is None else left / (min(len(permitted), MOST_TRIED) - i)
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
