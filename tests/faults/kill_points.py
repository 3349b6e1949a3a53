"""Named points before, within and after each call from a process to the server.

`install` adds them to the connections of this process. At each point the process can be killed, and
records that it passed.

- `before:NAME`  the call was not sent
- `sent:NAME`    it was sent, and its reply not read: the server executes it unnoticed
- `after:NAME`   the reply was read, but not processed

A name is that of a script, or of a command with the kind of its key. There is no point after an
error reply or an empty blocking read: the server changed nothing, so `before` of the next call is
equivalent.
"""

import inspect
import os
import re
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, Self

import redis.asyncio.connection
import redis.connection

from lisa.core.redis.connection import AsyncConnection, Connection
from lisa.core.redis.flow import Command
from tests.scripts import all_versions

MOST_TIMES = 4
"""A daemon makes the same call for as long as it lives: so many occurrences are points."""

DIED = "died"
READS = ("XREADGROUP", "XREAD")
PLAIN_READS = {
    "EXEC", "EXISTS", "GET", "GETRANGE", "HEXISTS", "HGET", "HGETALL", "HKEYS", "HLEN", "HMGET",
    "HSCAN", "INFO", "MULTI", "SCAN", "STRLEN", "TIME", "TYPE", "XINFO", "XLEN", "XPENDING",
    "XRANGE", "XREAD", "XREVRANGE", "ZCARD", "ZCOUNT", "ZMSCORE", "ZRANGE", "ZRANGEBYSCORE",
    "ZRANK", "ZSCAN", "ZSCORE", "open", "PROBE",
}  # fmt: skip
"""Transactions only read. `open` does for ordinary messages; it is called for others only. The
probe is a write that changes nothing: it asks whether the server takes writes."""

RIGHTS = "check of rights"
"""A daemon's first call names a script that no server has, and much else that changes nothing."""
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
    if tuple(command[2:]) == ("XX", 0, ""):
        return "PROBE"
    kinds = [str(found[1] or found[2]) for one in command[1:] if (found := _KEY.match(_text(one)))]
    return " ".join([word, *kinds[:1]])


def _text(value: object) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


@cache
def _script_names() -> dict[str, str]:
    return {script.sha: script.name for script in all_versions()}


class _Points:
    """Counts the points that this process passes, and kills it at one of them."""

    def __init__(self, kill_at: Point | None, log: Path) -> None:
        self._kill_at = kill_at
        self._log = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._times: Counter[tuple[str, str]] = Counter()
        self._lock = threading.Lock()
        self._inside: ContextVar[str | None] = ContextVar("inside", default=None)

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
    def _within(self, name: str | None) -> Iterator[None]:
        token = self._inside.set(name)
        try:
            yield
        finally:
            self._inside.reset(token)

    @contextmanager
    def calling(self, commands: Sequence[Command]) -> Iterator[list[Any]]:
        """Wrap a call, unless it is a part of another; the caller appends the reply to the list."""
        replies: list[Any] = []
        if self._inside.get() is not None:
            yield replies
            return
        name = name_of(commands)
        self.reach("before", name)
        with self._within(name):
            yield replies
        found_none = name.startswith(READS) and replies and (not replies[0] or not replies[0][0])
        if replies and not found_none:
            self.reach("after", name)

    @contextmanager
    def connecting(self, connection: Any) -> Iterator[list[Any]]:
        """Opening a connection for a call counts as a separate call."""
        if connection.is_connected:
            yield []
            return
        self.reach("before", "connect")
        with self._within(None):
            yield []
        self.reach("after", "connect")

    @contextmanager
    def sending(self) -> Iterator[list[Any]]:
        yield []
        if name := self._inside.get():
            self.reach("sent", name)


def install(kill_at: Point | None, log: Path) -> None:
    """Add points to every call of this process, recorded in `log`; die at one of them."""
    points = _Points(kill_at, log)
    _script_names()
    for kind in (Connection, AsyncConnection):
        _wrap(kind, "execute", lambda _, command: points.calling([command]))
        _wrap(kind, "execute_many", lambda _, commands: points.calling(commands))
    _wrap(AsyncConnection, "execute_chain", lambda _, _key, commands: points.calling(commands))
    for own in (redis.connection.AbstractConnection, redis.asyncio.connection.AbstractConnection):
        _wrap(own, "connect_check_health", lambda self, *_: points.connecting(self))
        _wrap(own, "send_packed_command", lambda *_: points.sending())


def _wrap(kind: type, name: str, around: Callable[..., AbstractContextManager[list[Any]]]) -> None:
    """Run a method, blocking or not, within the context of its arguments, which gets its result."""
    method = getattr(kind, name)

    def blocking(*args: Any, **options: Any) -> Any:
        with around(*args) as results:
            results.append(method(*args, **options))
        return results[0]

    async def later(*args: Any, **options: Any) -> Any:
        with around(*args) as results:
            results.append(await method(*args, **options))
        return results[0]

    is_async = kind is AsyncConnection or inspect.iscoroutinefunction(method)
    setattr(kind, name, later if is_async else blocking)
