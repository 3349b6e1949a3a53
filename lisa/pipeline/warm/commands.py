"""The server's commands: what each waits for, and which may begin."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum, auto

from lisa.core.model.errors import ConfigError
from lisa.pipeline.warm.protocol import (
    CommandRequest,
    GatewayOpened,
    Message,
    MessageChannel,
    code_version,
)

CREDENTIALS = (
    "AWS_",
    "AZURE_",
    "GOOGLE_",
    "HADOOP_",
    "HOME",
    "HTTPS_PROXY",
    "HTTP_PROXY",
    "JAVA_",
    "KRB5",
    "NO_PROXY",
    "PYSPARK_",
    "PYTHONHASHSEED",
    "PYTHONPATH",
    "SPARK_",
    "SSL_CERT_",
    "TZ",
    "YARN_",
    "http_proxy",
    "https_proxy",
    "no_proxy",
)
"""Environment variables, or beginnings of their names, that the JVM and its workers read: they
must be the same for server and command."""


class CommandState(Enum):
    """What a command waits for; LOST: for its end, without a client."""

    REQUEST = auto()
    GATEWAY = auto()
    BEGIN = auto()
    TURN = auto()
    END = auto()
    LOST = auto()


@dataclass(slots=True, eq=False)
class ServedCommand:
    """One client's command. pid: its process, 0 before it began."""

    number: int
    channel: MessageChannel
    state: CommandState = CommandState.REQUEST
    request: CommandRequest | None = None
    gateway: GatewayOpened | None = None
    pid: int = 0
    began: float = field(default_factory=time.monotonic)

    @property
    def name(self) -> str:
        """The job, as in `search`, for the server's output."""
        words = self.request.words if self.request is not None else []
        after = words.index(b"pipeline") + 1 if b"pipeline" in words else 0
        return os.fsdecode(words[after]) if len(words) > after else ""

    def send(self, message: Message) -> None:
        """Send a message, unless the client is gone."""
        with suppress(OSError):
            self.channel.send(message)

    def kill(self, number: int) -> None:
        """Send a signal to the command's process, if it runs."""
        if self.pid:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)


GRACE_S = 10.0
"""How long a command has to end after the server was stopped, or after its client has gone; then it
is killed."""


class ServedCommands:
    """All commands by number, in the order in which their clients came."""

    def __init__(self, at_once: int) -> None:
        self.at_once = at_once
        self._all: dict[int, ServedCommand] = {}
        self._kill_at: dict[ServedCommand, float] = {}
        self._last = 0

    def __iter__(self) -> Iterator[ServedCommand]:
        return iter(list(self._all.values()))

    def __contains__(self, command: object) -> bool:
        return command in self._all.values()

    def __len__(self) -> int:
        return len(self._all)

    def add(self, channel: MessageChannel) -> ServedCommand:
        """A new client's command."""
        self._last += 1
        command = self._all[self._last] = ServedCommand(self._last, channel)
        return command

    def get(self, number: int) -> ServedCommand | None:
        """The command of this number; None if its client has gone."""
        return self._all.get(number)

    def remove(self, command: ServedCommand) -> None:
        """Forget a command, and close its connection."""
        self._kill_at.pop(command, None)
        self._all.pop(command.number, None)
        command.channel.close()

    @property
    def running(self) -> list[ServedCommand]:
        """The commands that have begun."""
        return [one for one in self._all.values() if one.pid]

    def next(self) -> tuple[ServedCommand, CommandRequest, GatewayOpened] | None:
        """The command that may begin now, its request, and its gateway."""
        if len(self.running) >= self.at_once:
            return None
        for one in self._all.values():
            if (
                one.state is CommandState.TURN
                and one.request is not None
                and one.gateway is not None
            ):
                return one, one.request, one.gateway
        return None

    def end(self, command: ServedCommand, number: int) -> None:
        """Send a signal to a running command, and kill it if it runs for `GRACE_S` after that."""
        command.kill(number)
        self._kill_at[command] = time.monotonic() + GRACE_S

    def patience(self) -> float | None:
        """The seconds until a command must be killed; None if none must."""
        first = min(self._kill_at.values(), default=None)
        return None if first is None else max(0.0, first - time.monotonic())

    def kill_overdue(self) -> None:
        """Kill the commands whose time is up."""
        now = time.monotonic()
        for command in [one for one, at in self._kill_at.items() if at <= now]:
            command.kill(signal.SIGKILL)
            del self._kill_at[command]

    def kill_all(self) -> None:
        """Kill all running commands."""
        for command in self.running:
            command.kill(signal.SIGKILL)


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What server and commands must have in common: code, and what a JVM gets from its process."""

    code: str
    locale: str
    umask: int
    environment: Mapping[bytes, bytes]

    @classmethod
    def of_this_process(cls, locale: str) -> Surroundings:
        """Those of the server; call this before anything changes the environment."""
        umask = os.umask(0o077)
        os.umask(umask)
        return cls(code_version(), locale, umask, dict(os.environb))

    def check(self, request: CommandRequest) -> None:
        """Raises ConfigError if the command's surroundings differ; values are not named."""
        if request.code != self.code:
            raise ConfigError("it runs other code; restart it after an update of Lisa or Python")
        theirs = dict(request.environment)
        for name in sorted(self.environment.keys() | theirs.keys()):
            if os.fsdecode(name).startswith(CREDENTIALS) and self.environment.get(
                name
            ) != theirs.get(name):
                raise ConfigError(f"it was started with another {os.fsdecode(name)}")
        if request.umask != self.umask:
            raise ConfigError(f"it was started with the umask {self.umask:04o}")
        if request.locale != self.locale:
            raise ConfigError(f"it was started with the encoding {self.locale}")


def ended(status: int) -> tuple[int, int]:
    """A process's wait status -> its exit code, and the signal that ended it or 0."""
    if os.WIFSIGNALED(status):
        return 0, signal.Signals(os.WTERMSIG(status)).value
    return os.WEXITSTATUS(status), 0
