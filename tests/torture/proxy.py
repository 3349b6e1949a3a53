"""A TCP proxy that cuts, delays, refuses and hangs connections, and loses replies.

Each kind of role has its own door, so that faults can affect one of them or all.
"""

from __future__ import annotations

import asyncio
import errno
import random
import re
import threading
from collections import Counter, deque
from enum import Enum
from typing import TYPE_CHECKING, Any, cast

import uvloop

from lisa.embedded.server import free_port

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

RECORD = re.compile(rb":reply:[^\r]+")
LOSES = 0.3
"""The share of losable replies that are lost: repeated calls eventually get one."""


class Trouble(Enum):
    """What a door does to its connections."""

    NONE = "none"
    DELAY = "delay"  # everything passes, later
    HANG = "hang"  # nothing passes until the fault is over: then all of it
    LOSE = "lose"  # requests pass; replies are dropped, and the connection is cut
    REFUSE = "refuse"  # no new connections, and the old ones are cut


class _Pipe(asyncio.Protocol):
    """One end of a connection; `peer` is the other."""

    def __init__(self, door: _Door, link: _Link, *, is_client: bool) -> None:
        self._door = door
        self._link = link
        self._is_client = is_client
        self.transport: asyncio.Transport | None = None
        self._held: deque[bytes] = deque()
        self._has_left = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports have no base class in asyncio.
        self.transport = cast("asyncio.Transport", transport)
        if self._is_client:
            self._link.opened()

    def data_received(self, data: bytes) -> None:
        trouble = self._door.trouble
        if self._is_client and self._door.chooses(data):
            self._link.loses_reply = True
        is_lost = self._link.loses_reply or (trouble is Trouble.LOSE and self._door.loses())
        if is_lost and not self._is_client:
            self._door.lost += 1
            self._link.cut()
        elif trouble is Trouble.HANG:
            self._held.append(data)
        elif trouble is Trouble.DELAY or self._held:
            # Each timer passes on the oldest held data: order is kept whatever the delays.
            self._held.append(data)
            asyncio.get_running_loop().call_later(self._door.delay_s, self._pass_on_oldest)
        else:
            self._link.write(data, to_server=self._is_client)

    def release(self) -> None:
        """Pass on all held data."""
        while self._held:
            self._pass_on_oldest()

    def _pass_on_oldest(self) -> None:
        if not self._held or self._door.trouble is Trouble.HANG:
            return
        self._link.write(self._held.popleft(), to_server=self._is_client)
        if self._has_left and not self._held:
            self._link.finish()

    def connection_lost(self, _error: Exception | None) -> None:
        # Data sent before the client gave up still arrives, late: the worst case on a network.
        self._has_left = True
        if not (self._is_client and self._held):
            self._link.cut()


class _Link:
    """A client's connection and its connection to the server."""

    def __init__(self, door: _Door, server_port: int) -> None:
        self._door = door
        self._server_port = server_port
        self._early: list[bytes] = []
        self._is_cut = False
        self.loses_reply = False
        self.client = _Pipe(door, self, is_client=True)
        self.server = _Pipe(door, self, is_client=False)

    def opened(self) -> None:
        self._door.links.add(self)
        self._connecting = asyncio.get_running_loop().create_task(self._connect())

    async def _connect(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            await loop.create_connection(lambda: self.server, "127.0.0.1", self._server_port)
        except OSError:
            self.cut()
            return
        if self._is_cut:
            self.cut()
        self.pass_on_early()

    def pass_on_early(self) -> None:
        """Send what arrived before the server's connection was open."""
        early, self._early = self._early, []
        for data in early:
            self.write(data, to_server=True)

    def write(self, data: bytes, *, to_server: bool) -> None:
        transport = (self.server if to_server else self.client).transport
        # The transport exists a little before `_connect` goes on: keep the order until then.
        if transport is None or (to_server and self._early):
            self._early.append(data)
        elif not transport.is_closing():
            transport.write(data)

    def finish(self) -> None:
        """The client has left: end as soon as all its data was forwarded."""
        self._door.links.discard(self)
        if self.server.transport is not None:
            self.server.transport.close()

    def cut(self) -> None:
        self._is_cut = True
        self._door.links.discard(self)
        for pipe in (self.client, self.server):
            if pipe.transport is not None:
                pipe.transport.abort()


class _Door:
    """The port for one kind of role."""

    def __init__(self, server_port: int) -> None:
        self.port = 0
        self.trouble = Trouble.NONE
        self.delay_s = 0.0
        self.lost = 0
        self.links: set[_Link] = set()
        self._server_port = server_port
        self._listener: asyncio.Server | None = None
        self._chance = random.Random()
        self._words: tuple[bytes, ...] = ()
        self._times = 0
        self._chosen: Counter[bytes] = Counter()

    async def choose(self, words: tuple[bytes, ...], times: int) -> None:
        self._words, self._times = words, times

    def chooses(self, request: bytes) -> bool:
        """Whether to lose the reply to this request."""
        if not any(word in request for word in self._words):
            return False
        # A repeated call may contain other times; its record identifies it.
        record = RECORD.search(request)
        call = record[0] if record else request
        self._chosen[call] += 1
        return self._chosen[call] <= self._times

    def loses(self) -> bool:
        return self._chance.random() < LOSES

    async def open(self) -> None:
        if self._listener is None:
            self._listener = await (self._listen(self.port) if self.port else self._listen_first())

    async def _listen_first(self) -> asyncio.Server:
        """Listen on a free port: only listening shows that it is free."""
        while True:
            port = free_port()
            try:
                listener = await self._listen(port)
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
            else:
                self.port = port
                return listener

    async def _listen(self, port: int) -> asyncio.Server:
        return await asyncio.get_running_loop().create_server(
            lambda: _Link(self, self._server_port).client, "127.0.0.1", port
        )

    async def close(self) -> None:
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.close()
        await self.cut_all()

    async def cut_all(self) -> None:
        for link in list(self.links):
            link.cut()

    async def make(self, trouble: Trouble, delay_s: float) -> None:
        self.trouble, self.delay_s = trouble, delay_s
        if trouble is Trouble.REFUSE:
            await self.close()
            return
        await self.open()
        if trouble is not Trouble.HANG:
            for link in list(self.links):
                link.client.release()
                link.server.release()


class Proxy:
    """Doors to one server, served by a thread; every method may be called from any other."""

    def __init__(self, server_port: int, doors: Iterable[str]) -> None:
        self._doors = {name: _Door(server_port) for name in doors}
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)
        self._thread.start()
        for door in self._doors.values():
            self._run(door.open)

    def url(self, door: str) -> str:
        """The URL for a role."""
        return f"redis://127.0.0.1:{self._doors[door].port}/0"

    def port(self, door: str) -> int:
        """The local port for a role."""
        return self._doors[door].port

    def make(self, trouble: Trouble, door: str = "*", *, delay_s: float = 0.0) -> None:
        """Start (or, with Trouble.NONE, end) a fault at one door or at all of its doors."""
        for one in self._named(door):
            self._run(one.make, trouble, delay_s)

    def lose_replies_to(self, *words: bytes, times: int = 1, door: str = "*") -> None:
        """Lose the first `times` replies to each call with one of these words.

        Applies to every request sent after this call returns.
        """
        for one in self._named(door):
            self._run(one.choose, words, times)

    def cut(self, door: str = "*") -> None:
        """Cut all connections."""
        for one in self._named(door):
            self._run(one.cut_all)

    @property
    def lost(self) -> int:
        """The number of lost replies."""
        return sum(door.lost for door in self._doors.values())

    def close(self) -> None:
        """Close all connections and stop the thread."""
        for door in self._doors.values():
            self._run(door.close)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)
        self._loop.close()

    def _named(self, door: str) -> list[_Door]:
        return list(self._doors.values()) if door == "*" else [self._doors[door]]

    def _run(self, work: Callable[..., Any], *args: Any) -> None:
        asyncio.run_coroutine_threadsafe(work(*args), self._loop).result(10)
