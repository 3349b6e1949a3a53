"""The stage of a run: the server, the proxy before it, and a process for every role."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from contextlib import suppress
from functools import partial
from itertools import chain, count
from typing import IO, TYPE_CHECKING, Any, Self

from lisa.core.model.keys import Keys
from lisa.core.redis.address import Address
from lisa.core.redis.connection import Connection
from lisa.core.store.store import SyncStore
from lisa.embedded import EmbeddedServer
from lisa.embedded.server import free_port
from tests.servers import connect, redis_server
from tests.torture import restoring
from tests.torture.earlier import unpacked
from tests.torture.ledger import Ledger
from tests.torture.proxy import Proxy
from tests.torture.roles import Build, Role, leash, plain_environment
from tests.torture.tail import Tail, tail_for
from tests.torture.world import TOPICS, consumer_yaml, manager_yaml, topic_window

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.torture.options import Options
    from tests.torture.roles import Incarnation

SWIFT = ("bulk", "two")
STURDY = ("batch", "async", "hard", "hang", "fickle", "windows")
FICKLE_SHARE = 0.1
HTTP_PER_S = 15.0  # each costs a hundred times as much as one in a batch


def now_us() -> int:
    """This machine's clock, which is also the server's."""
    return time.time_ns() // 1000


class Stage:
    """All processes of a run. Events are written to `stage.jsonl`.

    `is_up`: the server can be asked; it is neither killed nor stopped.
    """

    def __init__(self, options: Options) -> None:
        self.options = options
        self.out = options.out.resolve()
        for name in ("ledgers", "logs"):
            (self.out / name).mkdir(parents=True, exist_ok=True)
        self._events = Ledger(self.out / "stage.jsonl")
        extra = {"always": ("--appendfsync", "always"), "everysec": ("--appendfsync", "everysec")}
        binary = redis_server() if options.program == "redis" else None
        self.server = EmbeddedServer(
            directory=self.out / "server",
            appendonly=options.persistence in extra,
            extra=extra.get(options.persistence, ()),
            binary=binary,
        )
        self.roles: dict[str, Role] = {}
        self.is_up = False
        path = unpacked(options.earlier, self.out / "earlier") if options.earlier else None
        self.earlier = Build(path) if path else None
        self._numbers = count(1)
        self._helpers: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        try:
            self._open()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self) -> None:
        self.server.start()
        self.is_up = True
        self.client = connect(self.server.url)
        self.store = SyncStore(Connection(Address(self.server.url)), Keys())
        more = {"loses_s": restoring.LOSES_S} if self.options.restore else {}
        self.tail: Tail = tail_for(self.options.persistence, self.server, self.client, **more)
        doors = ("manager", "consumer", "producer", "gateway")
        self.proxy = Proxy(self.server.port, doors)
        self._cast()

    def close(self) -> None:
        """Stop all processes."""
        for role in self.roles.values():
            with suppress(ProcessLookupError):
                role.end()
        for one in self._helpers:
            one.kill()
            one.wait()
        if hasattr(self, "proxy"):
            with suppress(ProcessLookupError):
                signal_server(self.server, signal.SIGCONT)
            self.proxy.close()
            self.store.close()
            self.client.close()
        self.server.stop()

    def note(self, event: str, **fields: Any) -> None:
        """Record an event, with its time by the machine's clock."""
        self._events.write([json.dumps({"at": now_us(), "event": event, **fields})])
        self._events.commit()

    # The roles

    def _cast(self) -> None:
        cast, logs = self.options.cast, self.out / "logs"
        journaled = [restoring.TOPIC] if self.options.restore else []
        window = topic_window() if self._has_windows else ""
        manager = manager_yaml(*journaled, window=window)
        (logs / "manager.yml").write_text(manager, encoding="utf-8")
        for name, topics in (("swift", SWIFT), ("sturdy", STURDY)):
            (logs / f"{name}.yml").write_text(consumer_yaml(topics), encoding="utf-8")
        self._gateway_port = free_port()
        archives = ["archive-1"] * self.options.restore
        every = (
            cast.managers,
            cast.consumers,
            cast.gateways,
            cast.pullers,
            cast.producers,
            archives,
        )
        for name in chain(*every):
            self.roles[name] = Role(
                name,
                self._command_of(name),
                partial(self._env, name),
                lambda: next(self._numbers),
                logs,
            )
            if self.earlier is not None:
                self.roles[name].build = self.earlier

    def _command_of(self, name: str) -> list[str]:
        kind, _, number = name.partition("-")
        url = self.proxy.url(kind) if kind in ("manager", "consumer", "gateway") else ""
        commands = {
            "manager": [
                "-m",
                "tests.torture.shifted",
                "lisa.cli.manager",
                "--config",
                "manager.yml",
                "--redis",
                url,
            ],
            "gateway": [
                "-m",
                "lisa.cli.gateway",
                "--redis",
                url,
                "--port",
                str(self._gateway_port),
            ],
            "archive": restoring.archive_command(self.server.url, self.out),
            "puller": ["-m", "tests.torture.web"],
            "producer": ["-m", "tests.torture.web" if number == "http" else "tests.torture.sender"],
        }
        if kind == "consumer":
            which = "swift" if int(number) % 2 else "sturdy"
            commands["consumer"] = [
                "-m",
                "lisa.cli.consumer",
                "--config",
                f"{which}.yml",
                "--redis",
                url,
                f"tests.torture.handlers:{which}",
            ]
        return commands[kind]

    def _env(self, name: str, number: int) -> dict[str, str]:
        kind, _, which = name.partition("-")
        folder = "sent" if kind == "producer" else "handled"
        door = "gateway" if kind == "puller" else "consumer"
        env = {
            "TORTURE_CLOCK_PORT": str(self.server.port),
            "TORTURE_DOOR_PORT": str(self.proxy.port(door)),
            "TORTURE_LEDGER": str(self.out / "ledgers" / f"{folder}-{number}.tsv"),
            "TORTURE_GATEWAY": f"http://127.0.0.1:{self._gateway_port}",
            "TORTURE_KIND": "pull",
        }
        if kind == "producer":
            env |= {
                "TORTURE_REDIS": self.proxy.url("producer"),
                "TORTURE_SEED": str(self.options.seed * 1_000_003 + number),
                "TORTURE_RATE": str(self._rate(which)),
                "TORTURE_LONGEST_S": str(self.options.longest_s),
                "TORTURE_KIND": self._sender(which),
                "TORTURE_SCHEDULES": "" if self.options.restore else "1",
                "TORTURE_WINDOWS": "1" if self._has_windows else "",
            }
        return env

    @property
    def _has_windows(self) -> bool:
        """Whether messages have windows, which consumers of an earlier build may ignore."""
        return self.earlier is None

    def _sender(self, which: str) -> str:
        return "http" if which == "http" else "fickle" if int(which) % 2 == 0 else "bulk"

    def _rate(self, which: str) -> float:
        rate, producers = self.options.rate, self.options.producers
        kind = self._sender(which)
        if kind == "http":
            return min(rate, HTTP_PER_S)
        if kind == "fickle":
            return rate * FICKLE_SHARE / (producers // 2)
        return rate * (1 - FICKLE_SHARE) / (producers - producers // 2)

    def start(self, role: Role) -> Incarnation:
        """Start a process for a role."""
        one = role.start()
        self.note(
            "start",
            role=role.name,
            number=one.number,
            pid=one.pid,
            shift=role.shift_s,
            earlier=role.build.path is not None,
        )
        return one

    def ended(self, one: Incarnation, how: str) -> None:
        """Record the end of a process."""
        self.note(
            "end",
            role=one.role.name,
            number=one.number,
            how=how,
            code=one.poll(),
            age_s=time.monotonic() - one.began,
        )

    def restart_those_that_died(self) -> None:
        """Restart roles that ended early: that is a defect, but the run continues."""
        for role in self.roles.values():
            if role.is_wanted and role.now is not None and not role.is_alive:
                self.ended(role.now, "by itself")
                self.start(role)

    def end_roles(self, kind: str) -> None:
        """Have roles of a kind end in order."""
        leaving = []
        for role in self.roles.values():
            if role.kind == kind and role.now is not None:
                role.is_wanted = False
                if role.is_alive:
                    role.now.tell_to_leave()
                    leaving.append(role.now)
        for one in leaving:
            one.wait()
            self.ended(one, "told to")

    def help(
        self, command: Sequence[str], stdout: IO[bytes], stderr: IO[bytes]
    ) -> subprocess.Popen[bytes]:
        """Start an operator's command; it ends with the stage at the latest."""
        one = subprocess.Popen(
            [*leash(), *command],
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            env=plain_environment(),
            cwd=self.out / "logs",
        )
        self._helpers = [*[other for other in self._helpers if other.poll() is None], one]
        return one

    @property
    def is_gateway_open(self) -> bool:
        """Whether the gateway, if any, accepts connections: its process starts slowly."""
        if not self.options.gateway:
            return True
        with suppress(OSError), socket.create_connection(("127.0.0.1", self._gateway_port), 1):
            return True
        return False

    # The server

    def kill_server(self) -> None:
        """Send SIGKILL; data that was not on disk, by the server's setting, is lost."""
        since = self.tail.before_kill()
        self.is_up = False
        self.server.kill()
        until = now_us()
        self.tail.after_kill()
        if since is not None:
            self.note("loss", since=since, until=until)

    def restart_server(self) -> None:
        """Restart the server with the same data."""
        self.server.restart()
        self.is_up = True

    def stop_server(self, *, resume: bool) -> None:
        """Send SIGSTOP or SIGCONT."""
        self.is_up = resume
        signal_server(self.server, signal.SIGCONT if resume else signal.SIGSTOP)

    def standing(self) -> dict[str, int]:
        """The number of messages by state, over all topics. Raises redis.RedisError."""
        found = dict.fromkeys(("waiting", "ready", "retry", "garbage"), 0)
        pipe = self.client.pipeline(transaction=False)
        names = []
        for topic in TOPICS:
            keys = self.store.keys.topic(topic.name)
            pipe.zcard(keys.waiting)
            names.append("waiting")
            for group in topic.groups:
                own = keys.group(group)
                pipe.hlen(own.entries)
                pipe.zcard(own.retry)
                pipe.zcard(own.garbage)
                names += ["ready", "retry", "garbage"]
        for name, n in zip(names, pipe.execute(), strict=True):
            found[name] += int(n)
        return found


def signal_server(server: EmbeddedServer, number: signal.Signals) -> None:
    """Send the server a signal."""
    os.kill(server.pid, number)
