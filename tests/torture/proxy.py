"""A TCP proxy that cuts, delays, refuses and hangs connections, and loses replies.

Each kind of role has its own door, so that faults can affect one of them or all.
"""

import asyncio
import errno
import random
import re
import threading
from asyncio import StreamReader, StreamWriter
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from enum import Enum
from typing import Any

import uvloop

from lisa.embedded.server import free_port

RECORD = re.compile(rb":reply:[^\r]+")
LOSES = 0.3
"""The share of losable replies that are lost: repeated calls eventually get one."""

HOST = "127.0.0.1"
PIECE = 1 << 20


class Trouble(Enum):
    """What a door does to its connections."""

    NONE = "none"
    DELAY = "delay"  # everything passes, later
    HANG = "hang"  # nothing passes until the fault is over: then all of it
    LOSE = "lose"  # requests pass; replies are dropped, and the connection is cut
    REFUSE = "refuse"  # no new connections, and the old ones are cut


class _Door:
    """The port for one kind of role; everything runs on the proxy's event loop."""

    def __init__(self, server_port: int) -> None:
        self.port = 0
        self.lost = 0
        self._trouble = Trouble.NONE
        self._delay_s = 0.0
        self._passes = asyncio.Event()  # cleared while it hangs
        self._server_port = server_port
        self._listener: asyncio.Server | None = None
        self._links: list[list[StreamWriter]] = []  # a client, and its connection to the server
        self._words: tuple[bytes, ...] = ()
        self._times = 0
        self._chosen: Counter[bytes] = Counter()

    async def make(self, trouble: Trouble, delay_s: float = 0.0) -> None:
        self._trouble, self._delay_s = trouble, delay_s
        if trouble is Trouble.HANG:
            self._passes.clear()
        else:
            self._passes.set()
        if trouble is not Trouble.REFUSE:
            await self._open()
        elif self._listener is not None:
            self._listener.close()
            self._listener = None
            await self.cut()

    async def _open(self) -> None:
        """Listen, at first on a free port: only listening shows that it is free."""
        while self._listener is None:
            port = self.port or free_port()
            try:
                self._listener = await asyncio.start_server(self._accept, HOST, port, limit=PIECE)
            except OSError as error:
                if self.port or error.errno != errno.EADDRINUSE:
                    raise
            else:
                self.port = port

    async def cut(self) -> None:
        for link in self._links:
            _cut(link)

    async def choose(self, words: tuple[bytes, ...], times: int) -> None:
        self._words, self._times = words, times

    def _chooses(self, request: bytes) -> bool:
        """Whether to lose the reply to this request."""
        if not any(word in request for word in self._words):
            return False
        # A repeated call may contain other times; its record identifies it.
        record = RECORD.search(request)
        call = record[0] if record else request
        self._chosen[call] += 1
        return self._chosen[call] <= self._times

    async def _accept(self, requests: StreamReader, client: StreamWriter) -> None:
        link, is_chosen = [client], False
        self._links.append(link)

        async def forward_replies() -> None:
            with suppress(OSError):
                while data := await replies.read(PIECE):
                    is_lost = self._trouble is Trouble.LOSE and random.random() < LOSES
                    if is_chosen or is_lost:
                        self.lost += 1
                        break
                    await self._pass_on(data, client)
            _cut(link)

        with suppress(OSError):
            replies, server = await asyncio.open_connection(HOST, self._server_port, limit=PIECE)
            link.append(server)
            if client.is_closing():
                _cut(link)
            back = asyncio.create_task(forward_replies())
            with suppress(OSError):
                while data := await requests.read(PIECE):
                    is_chosen = self._chooses(data) or is_chosen
                    await self._pass_on(data, server)
            # Data sent before the client gave up still arrives, late: the worst case on a network.
            server.close()
            await back
        _cut(link)
        self._links.remove(link)

    async def _pass_on(self, data: bytes, writer: StreamWriter) -> None:
        """One direction passes on one piece after the other: order is kept whatever the delays."""
        if self._trouble is Trouble.DELAY:
            await asyncio.sleep(self._delay_s)
        await self._passes.wait()
        if not writer.is_closing():
            writer.write(data)


def _cut(link: list[StreamWriter]) -> None:
    for writer in link:
        writer.transport.abort()


class Proxy:
    """Doors to one server, served by a thread; every method may be called from any other."""

    def __init__(self, server_port: int, doors: Iterable[str]) -> None:
        self._doors = {name: _Door(server_port) for name in doors}
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)
        self._thread.start()
        self.make(Trouble.NONE)

    def url(self, door: str) -> str:
        return f"redis://{HOST}:{self.port(door)}/0"

    def port(self, door: str) -> int:
        return self._doors[door].port

    def make(self, trouble: Trouble, door: str = "*", *, delay_s: float = 0.0) -> None:
        """Start (or, with Trouble.NONE, end) a fault at one door or at all of its doors."""
        self._run(door, lambda target: target.make(trouble, delay_s))

    def lose_replies_to(self, *words: bytes, times: int = 1, door: str = "*") -> None:
        """Lose the first `times` replies to each call with one of these words.

        Applies to every request sent after this call returns.
        """
        self._run(door, lambda target: target.choose(words, times))

    def cut(self, door: str = "*") -> None:
        self._run(door, lambda target: target.cut())

    @property
    def lost(self) -> int:
        return sum(door.lost for door in self._doors.values())

    def close(self) -> None:
        self.make(Trouble.REFUSE)
        asyncio.run_coroutine_threadsafe(_end_tasks(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)
        self._loop.close()

    def _run(self, name: str, work: Callable[[_Door], Coroutine[Any, Any, None]]) -> None:
        for door in self._doors.values() if name == "*" else [self._doors[name]]:
            asyncio.run_coroutine_threadsafe(work(door), self._loop).result(10)


async def _end_tasks() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
