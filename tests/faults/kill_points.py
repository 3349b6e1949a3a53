"""Named points before, within and after each call from a process to the server.

`install` adds them to the connections of this process. At each point the process can be killed, and
records that it passed.

- `before:NAME`  the call was not sent
- `sent:NAME`    it was sent, and its reply not read: the server executes it unnoticed
- `between:NAME` of calls sent together, one reply was read, but not the next
- `after:NAME`   the reply was read, but not processed

A name is that of a script, or of a command with the kind of its key. There is no point after an
error reply or an empty blocking read: the server changed nothing, so `before` of the next call is
equivalent.
"""

from __future__ import annotations

import os
import re
import signal
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, Self

import redis.asyncio.connection
import redis.connection

from lisa.core.redis.connection import AsyncConnection, Connection
from lisa.core.redis.flow import Command
from lisa.core.transitions import loader

MOST_TIMES = 4
"""A daemon makes the same call for as long as it lives: so many occurrences are points."""

DIED = "died"
READS = ("XREADGROUP", "XREAD")
PLAIN_READS = {
    "EXEC",  # transactions only read
    "EXISTS",
    "GET",
    "GETRANGE",
    "HEXISTS",
    "HGET",
    "HGETALL",
    "HKEYS",
    "HLEN",
    "HMGET",
    "HSCAN",
    "INFO",
    "MULTI",
    "SCAN",
    "STRLEN",
    "TIME",
    "TYPE",
    "XINFO",
    "XLEN",
    "XPENDING",
    "XRANGE",
    "XREAD",
    "XREVRANGE",
    "ZCARD",
    "ZCOUNT",
    "ZMSCORE",
    "ZRANGE",
    "ZRANGEBYSCORE",
    "ZRANK",
    "ZSCAN",
    "ZSCORE",
    "open",  # for ordinary messages; it is called for others only
}
RIGHTS = "check of rights"
"""A daemon's first call names a script that nobody has, and much else that changes nothing."""
_KEY = re.compile(r"[^{}]+:\{[^}]*\}:(?:g:[^:]+:)?([a-z]+)|lisa:([a-z]+)\Z")


class Point(NamedTuple):
    """One point in a process: the call, the place in it, and the occurrence."""

    phase: str
    name: str
    time: int = 1

    def __str__(self) -> str:
        return f"{self.phase}:{self.name}#{self.time}"

    @classmethod
    def of(cls, text: str) -> Self:
        """The inverse of `str`."""
        phase, _, rest = text.partition(":")
        name, _, time = rest.rpartition("#")
        return cls(phase, name, int(time))


def read_log(log: Path) -> tuple[list[Point], Point | None]:
    """The points that a process passed, and the point at which it died."""
    text = log.read_text() if log.exists() else ""
    lines = text[: text.rfind("\n") + 1].splitlines()  # the process may be writing another one
    died = [line.partition(" ")[2] for line in lines if line.startswith(DIED + " ")]
    points = [Point.of(line) for line in lines if not line.startswith(DIED + " ")]
    return points, Point.of(died[0]) if died else None


def name_of(commands: Sequence[Command]) -> str:
    """The name of a call of one or several commands.

    Commands that may change something determine the name. Plain reads are named after the first
    in the alphabet, because the reads sent with it vary.
    """
    names = list(dict.fromkeys(map(_name_of_one, commands)))
    if RIGHTS in names:
        return RIGHTS
    telling = [name for name in names if not is_plain_read(name)]
    return " + ".join(telling) if telling else min(names)


def is_plain_read(name: str) -> bool:
    """True if a call changes nothing on the server, so it does not matter if it was made."""
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
    return {loader.load(name).sha: name for name in loader.names()}


class _Points:
    """Counts the points that this process passes, and kills it at one of them."""

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
        """Wrap a call; the caller appends the reply to `replies`."""
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
        """Opening a connection for a call counts as a separate call."""
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
    """Add points to every call of this process, recorded in `log`; die at one of them."""
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
        if points.inside.get() is not None:  # sent by `execute_many`
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
        if len(commands) == 1:  # uses `execute_many`
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
