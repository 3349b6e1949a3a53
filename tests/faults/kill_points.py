"""Named points before, within and after each call that a process makes of the server.

`install` puts them around the connections of this process. There it can be killed, and there it
writes down that it came by.

- `before:NAME`  nothing of the call was sent
- `sent:NAME`    it was sent, its reply not read: the server does it, and nobody hears of it
- `between:NAME` of calls that went out together, one reply was read and not the next
- `after:NAME`   the reply was read, and nothing was done with it

A name is a script's, or a command's with the kind of its key. No point is after a reply that is an
error, or after a blocking read that brought nothing: the server changed nothing, so `before` of the
next call is the same instant.
"""

from __future__ import annotations

import os
import re
import signal
import threading
from collections import Counter
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import redis.asyncio.connection
import redis.connection

from lisa.core import scripts
from lisa.core.connection import AsyncConnection, Connection

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from lisa.core.flow import Command

__all__ = ["DIED", "MOST_TIMES", "Point", "install", "is_plain_read", "name_of", "read_log"]

MOST_TIMES = 4
"""A daemon makes the same call for as long as it lives: so many occurrences are points."""

DIED = "died"
READS = ("XREADGROUP", "XREAD")
PLAIN_READS = {
    "EXISTS", "GET", "HEXISTS", "HGET", "HGETALL", "HKEYS", "HLEN", "HMGET", "HSCAN", "INFO",
    "SCAN", "STRLEN", "TIME", "TYPE", "XINFO", "XLEN", "XPENDING", "XRANGE", "XREAD", "XREVRANGE",
    "ZCARD", "ZCOUNT", "ZRANGE", "ZRANGEBYSCORE", "ZRANK", "ZSCAN", "ZSCORE",
}  # fmt: skip
RIGHTS = "check of rights"
"""A daemon's first call names a script that nobody has, and much else that changes nothing."""
_KEY = re.compile(r"[^{}]+:\{[^}]*\}:(?:g:[^:]+:)?([a-z]+)|lisa:([a-z]+)\Z")


class Point(NamedTuple):
    """One place in a process's life: in which call, where in it, and at which occurrence."""

    phase: str
    name: str
    time: int = 1

    def __str__(self) -> str:
        return f"{self.phase}:{self.name}#{self.time}"

    @classmethod
    def of(cls, text: str) -> Self:
        """The reverse of `str`."""
        phase, _, rest = text.partition(":")
        name, _, time = rest.rpartition("#")
        return cls(phase, name, int(time))


def read_log(log: Path) -> tuple[list[Point], Point | None]:
    """The points that a process came by, and the one at which it died."""
    lines = log.read_text().splitlines() if log.exists() else []
    died = [line.partition(" ")[2] for line in lines if line.startswith(DIED + " ")]
    points = [Point.of(line) for line in lines if not line.startswith(DIED + " ")]
    return points, Point.of(died[0]) if died else None


def name_of(commands: Sequence[Command]) -> str:
    """What a call of one command, or of several together, is named.

    Of several, those that may change something give the name. Plain reads alone go by the first in
    the alphabet: what else goes along with them differs from time to time.
    """
    names = list(dict.fromkeys(map(_name_of_one, commands)))
    if RIGHTS in names:
        return RIGHTS
    telling = [name for name in names if not is_plain_read(name)]
    return " + ".join(telling) if telling else min(names)


def is_plain_read(name: str) -> bool:
    """Whether a call changes nothing on the server: then it is all one when it was made or not."""
    return name.partition(" ")[0] in PLAIN_READS


def _name_of_one(command: Command) -> str:
    word = str(command[0])
    if word == "EVALSHA":
        return _script_names().get(str(command[1]), RIGHTS)
    if word in ("SCRIPT", "CLIENT", "XINFO", "COMMAND", "CONFIG", "XGROUP"):
        word = f"{word} {_text(command[1])}"
    if word == "SCRIPT LOAD":
        return word
    kinds = [str(found[1] or found[2]) for one in command[1:] if (found := _KEY.match(_text(one)))]
    return " ".join([word, *kinds[:1]])


def _text(value: object) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


@cache
def _script_names() -> dict[str, str]:
    return {scripts.load(name).sha: name for name in scripts.names()}


class _Points:
    """Counts the points by which this process comes, and kills it at one of them."""

    def __init__(self, kill_at: Point | None, log: Path) -> None:
        self._kill_at = kill_at
        self._log = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._times: Counter[tuple[str, str]] = Counter()
        self._lock = threading.Lock()
        self.inside: ContextVar[str | None] = ContextVar("inside", default=None)

    def reach(self, phase: str, name: str) -> None:
        with self._lock:
            self._times[phase, name] += 1
            point = Point(phase, name, self._times[phase, name])
            if point.time <= MOST_TIMES:
                os.write(self._log, f"{point}\n".encode())
            if point == self._kill_at:
                os.write(self._log, f"{DIED} {point}\n".encode())
                os.kill(os.getpid(), signal.SIGKILL)

    @contextmanager
    def calling(self, name: str, replies: list[Any]) -> Iterator[None]:
        """Around a call; whoever makes it puts the reply into `replies`."""
        self.reach("before", name)
        token = self.inside.set(name)
        try:
            yield
        finally:
            self.inside.reset(token)
        if replies[0] or not name.startswith(READS):
            self.reach("after", name)

    @contextmanager
    def connecting(self) -> Iterator[None]:
        """A connection that is made for a call is a call of its own."""
        token = self.inside.set(None)
        self.reach("before", "connect")
        try:
            yield
        finally:
            self.inside.reset(token)
        self.reach("after", "connect")

    def sent(self) -> None:
        name = self.inside.get()
        if name is not None:
            self.reach("sent", name)


def install(kill_at: Point | None, log: Path) -> None:
    """Put points around every call of this process, to be written to `log`; die at one of them."""
    points = _Points(kill_at, log)
    _script_names()
    _around_blocking_calls(points)
    _around_asyncio_calls(points)
    _around_blocking_sockets(points)
    _around_asyncio_sockets(points)


def _around_blocking_calls(points: _Points) -> None:
    execute, begin, execute_many = Connection.execute, Connection.begin, Connection.execute_many

    def one(self: Connection, command: Command) -> Any:
        replies: list[Any] = []
        with points.calling(name_of([command]), replies):
            replies.append(execute(self, command))
        return replies[0]

    def many(self: Connection, commands: Sequence[Command]) -> list[Any]:
        replies: list[Any] = []
        with points.calling(name_of(commands), replies):
            replies.append(execute_many(self, commands))
        found: list[Any] = replies[0]
        return found

    def begun(self: Connection, commands: Sequence[Command]) -> Iterator[Any]:
        if points.inside.get() is not None:  # by `execute_many`
            return begin(self, commands)
        name = name_of(commands)
        points.reach("before", name)
        token = points.inside.set(name)
        try:
            replies = begin(self, commands)
        finally:
            points.inside.reset(token)
        return read(replies, name, len(commands))

    def read(replies: Iterator[Any], name: str, count: int) -> Iterator[Any]:
        for number, reply in enumerate(replies, 1):
            points.reach("after" if number == count else "between", name)
            yield reply

    _patch(Connection, execute=one, execute_many=many, begin=begun)


def _around_asyncio_calls(points: _Points) -> None:
    execute, execute_many = AsyncConnection.execute, AsyncConnection.execute_many
    execute_chain = AsyncConnection.execute_chain

    async def one(self: AsyncConnection, command: Command) -> Any:
        replies: list[Any] = []
        with points.calling(name_of([command]), replies):
            replies.append(await execute(self, command))
        return replies[0]

    async def many(self: AsyncConnection, commands: Sequence[Command]) -> list[Any]:
        replies: list[Any] = []
        with points.calling(name_of(commands), replies):
            replies.append(await execute_many(self, commands))
        found: list[Any] = replies[0]
        return found

    async def chain(self: AsyncConnection, key: str, commands: Sequence[Command]) -> list[Any]:
        if len(commands) == 1:  # goes by `execute`
            return await execute_chain(self, key, commands)
        replies: list[Any] = []
        with points.calling(name_of(commands), replies):
            replies.append(await execute_chain(self, key, commands))
        found: list[Any] = replies[0]
        return found

    _patch(AsyncConnection, execute=one, execute_many=many, execute_chain=chain)


def _around_blocking_sockets(points: _Points) -> None:
    kind: Any = redis.connection.AbstractConnection
    connect, send = kind.connect_check_health, kind.send_packed_command

    def connected(self: Any, *args: Any, **options: Any) -> None:
        if self.is_connected:
            return
        with points.connecting():
            connect(self, *args, **options)

    def sent(self: Any, *args: Any, **options: Any) -> None:
        send(self, *args, **options)
        points.sent()

    _patch(kind, connect_check_health=connected, send_packed_command=sent)


def _around_asyncio_sockets(points: _Points) -> None:
    kind: Any = redis.asyncio.connection.AbstractConnection
    connect, send = kind.connect_check_health, kind.send_packed_command

    async def connected(self: Any, *args: Any, **options: Any) -> None:
        if self.is_connected:
            return
        with points.connecting():
            await connect(self, *args, **options)

    async def sent(self: Any, *args: Any, **options: Any) -> None:
        await send(self, *args, **options)
        points.sent()

    _patch(kind, connect_check_health=connected, send_packed_command=sent)


def _patch(kind: type, **methods: Any) -> None:
    for name, method in methods.items():
        setattr(kind, name, method)
