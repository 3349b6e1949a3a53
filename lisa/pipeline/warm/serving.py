"""The server: accepts commands, and forks a process for each.

It has one thread and no connection to the JVM, so that its forks are safe.
"""

from __future__ import annotations

import locale
import os
import selectors
import signal
import socket
import time
import traceback
from collections.abc import Callable, Mapping, Sequence

from lisa.core.model import errors
from lisa.core.model.errors import ConfigError, LisaError
from lisa.pipeline.warm.attached import Attached, become
from lisa.pipeline.warm.commands import (
    CommandState,
    ServedCommand,
    ServedCommands,
    Surroundings,
    ended,
)
from lisa.pipeline.warm.keeper_process import KeeperProcess
from lisa.pipeline.warm.listener import ClientListener
from lisa.pipeline.warm.protocol import (
    Accepted,
    Begin,
    CloseGateway,
    CommandRefused,
    CommandRequest,
    Ended,
    GatewayOpened,
    GatewayRefused,
    Message,
    OpenGateway,
    PassedSignal,
    SessionReady,
    StartFailure,
    Stopping,
    Waiting,
)

_PASSED_ON = frozenset({signal.SIGINT, signal.SIGTERM})


class WarmServer:
    """Runs commands in one Spark session.

    Starts Spark at once, in a process of its own; `run` waits for it.

    at_once: maximum number of running commands; the others wait for their turn. say: prints a line.
    master, settings, environment: of the session, see `spark_session`.

    Raises ConfigError if this user has a server already.
    """

    def __init__(
        self,
        at_once: int,
        say: Callable[[str], None],
        *,
        master: str,
        settings: Mapping[str, str],
        environment: str | None,
    ) -> None:
        self._surroundings = Surroundings.of_this_process(locale.getencoding())
        self._commands, self._say = ServedCommands(at_once), say
        self._listener = ClientListener()
        self._selector = selectors.DefaultSelector()
        self._wake, self._waker = socket.socketpair()
        self._stops = 0
        self._is_stopping = False
        self._keeper = KeeperProcess(
            lambda: self._listener.close(remove=False), master, settings, environment
        )

    def run(self) -> bool:
        """Serve until SIGTERM or SIGINT; returns True in a process that was forked for a command.

        Raises Lisa's error if Spark could not start, or has died.
        """
        self._watch()
        try:
            while not (self._is_stopping and not self._commands):
                for key, _ in self._selector.select(self._commands.patience()):
                    key.data(key.fileobj)
                self._reap()
                self._stop_if_asked()
                self._commands.kill_overdue()
                while found := self._commands.next():
                    if self._fork(*found):
                        return True
        except BaseException:
            self._close()
            raise
        self._close()
        return False

    def _watch(self) -> None:
        for end in (self._wake, self._waker):
            end.setblocking(False)  # noqa: FBT003  Python's
        signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_stop)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        read = selectors.EVENT_READ
        self._selector.register(self._wake, read, lambda _: self._wake.recv(4096))
        self._selector.register(self._keeper.channel.socket, read, lambda _: self._hear_keeper())

    def _on_stop(self, *_: object) -> None:
        self._stops += 1

    # The keeper.

    def _hear_keeper(self) -> None:
        try:
            messages = self._keeper.channel.receive()
        except EOFError:
            raise LisaError("the Spark session has ended; the commands in it have failed") from None
        for message in messages:
            if isinstance(message, SessionReady):
                self._listen(message.spark)
            elif isinstance(message, StartFailure):
                raise getattr(errors, message.kind, LisaError)(message.reason)
            elif isinstance(message, (GatewayOpened, GatewayRefused)):
                command = self._commands.get(message.number)
                if command is not None:
                    self._answer(command, message)

    def _listen(self, spark: str) -> None:
        self._listener.open()
        self._selector.register(
            self._listener.socket, selectors.EVENT_READ, lambda _: self._accept()
        )
        self._say(f"ready: Spark {spark}, {self._listener.path}")

    def _answer(self, command: ServedCommand, message: GatewayOpened | GatewayRefused) -> None:
        if isinstance(message, GatewayRefused):
            self._refuse(command, message.reason)
            return
        command.gateway, command.state = message, CommandState.BEGIN
        command.send(Accepted())

    # Clients.

    def _accept(self) -> None:
        channel = self._listener.accept()
        if channel is not None:
            command = self._commands.add(channel)
            self._selector.register(
                channel.socket, selectors.EVENT_READ, lambda _: self._hear(command)
            )

    def _hear(self, command: ServedCommand) -> None:
        try:
            for message in command.channel.receive():
                self._handle(command, message)
        except (EOFError, OSError, ValueError):
            self._lose(command)

    def _handle(self, command: ServedCommand, message: Message) -> None:
        if isinstance(message, CommandRequest) and command.state is CommandState.REQUEST:
            self._consider(command, message)
        elif isinstance(message, Begin) and command.state is CommandState.BEGIN:
            command.state = CommandState.TURN
            if len(self._commands.running) >= self._commands.at_once:
                command.send(Waiting(len(self._commands.running)))
        elif isinstance(message, PassedSignal) and message.number in _PASSED_ON:
            if command.pid:
                command.kill(message.number)
            else:
                command.send(Ended(0, message.number))
                self._forget(command)

    def _consider(self, command: ServedCommand, request: CommandRequest) -> None:
        command.request, command.state = request, CommandState.GATEWAY
        try:
            self._surroundings.check(request)
        except ConfigError as error:
            self._refuse(command, str(error))
            return
        self._keeper.tell(
            OpenGateway(command.number, request.master, request.settings, request.named)
        )

    def _refuse(self, command: ServedCommand, reason: str) -> None:
        command.send(CommandRefused(reason))
        self._forget(command)

    def _lose(self, command: ServedCommand) -> None:
        """The client is gone, as after kill -9: its command ends like a program that is killed."""
        if not command.pid:
            self._forget(command)
            return
        self._selector.unregister(command.channel.socket)
        command.state = CommandState.LOST
        self._commands.end(command, signal.SIGTERM)

    def _forget(self, command: ServedCommand) -> None:
        if command.state is not CommandState.LOST and command in self._commands:
            self._selector.unregister(command.channel.socket)
        if command.request is not None:
            self._keeper.tell(CloseGateway(command.number))
        self._commands.remove(command)

    # Processes.

    def _fork(
        self, command: ServedCommand, request: CommandRequest, gateway: GatewayOpened
    ) -> bool:
        """Fork a process for a command; True in that process."""
        command.began = time.monotonic()
        # A signal for the command must not reach the server's handlers in its process.
        signal.pthread_sigmask(signal.SIG_BLOCK, _PASSED_ON)
        command.pid = os.fork()
        if not command.pid:
            self._turn_into(request, command.channel.files, gateway)
            return True
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _PASSED_ON)
        command.state = CommandState.END
        command.channel.close_files()
        return False

    def _turn_into(
        self, request: CommandRequest, files: Sequence[int], gateway: GatewayOpened
    ) -> None:
        try:
            files = [os.dup(file) for file in files]
            self._close_in_fork()
            become(request, files, Attached(gateway))
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _PASSED_ON)
        except BaseException:  # noqa: BLE001  `run` must not end the server's other processes
            traceback.print_exc()
            os._exit(1)

    def _close_in_fork(self) -> None:
        signal.set_wakeup_fd(-1)
        self._selector.close()
        self._listener.close(remove=False)
        for command in self._commands:
            command.channel.close()
        for end in (self._keeper.channel, self._wake, self._waker):
            end.close()

    def _reap(self) -> None:
        for command in self._commands.running:
            pid, status = os.waitpid(command.pid, os.WNOHANG)
            if pid:
                command.pid = 0
                code, number = ended(status)
                command.send(Ended(code, number))
                how = signal.Signals(number).name if number else f"exit code {code}"
                seconds = time.monotonic() - command.began
                self._say(f"{command.name}: {how}, {seconds:,.1f} s")
                self._forget(command)

    def _stop_if_asked(self) -> None:
        if self._stops > 1:
            self._commands.kill_all()
        if not self._stops or self._is_stopping:
            return
        self._is_stopping = True
        if self._listener.is_open:
            self._selector.unregister(self._listener.socket)
        self._listener.close(remove=True)
        for command in self._commands:
            if not command.pid:
                self._refuse(command, "it is stopping")
                continue
            command.send(Stopping())
            self._commands.end(command, signal.SIGINT)

    def _close(self) -> None:
        """End all processes; the JVM ends with the keeper."""
        self._listener.close(remove=True)
        self._commands.kill_all()
        for command in self._commands:
            command.channel.close()
        self._keeper.end(self._wake, lambda: self._stops > 1)
