"""A command's side: asks for a server, and waits for the command's end there."""

from __future__ import annotations

import locale
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from typing import Any

from lisa.core.model.errors import ConfigError, LisaError
from lisa.pipeline.warm.protocol import (
    Accepted,
    Begin,
    CommandRefused,
    CommandRequest,
    Ended,
    MessageChannel,
    PassedSignal,
    Stopping,
    Waiting,
    check_private,
    code_version,
    is_same_user,
    socket_path,
)

ANSWER_S = 10.0
"""How long to wait for the server's answer; then the command runs without it."""

PASSED_ON = (signal.SIGINT, signal.SIGTERM)


def run_in_server(
    words: Sequence[str],
    master: str,
    settings: Mapping[str, str],
    named: Sequence[str],
    say: Callable[[str], None],
) -> int | None:
    """Run a command in the session of `lisa pipeline serve`; returns the command's exit code.

    words, master, settings, named: see `CommandRequest`. say: prints a line to stderr.

    Returns None if no server runs, or if its session does not suit the command; nothing has been
    done then. Raises LisaError if the server dies meanwhile. If a signal ends the command, it ends
    this process, too.
    """
    if any(word.startswith(("/dev/fd/", "/proc/self/", "/dev/std")) for word in words):
        say(_not_used("the command reads or writes an open file of its own process"))
        return None
    try:
        channel = _connect()
    except ConfigError as error:
        say(_not_used(str(error)))
        return None
    if channel is None:
        return None
    with closing(channel):
        try:
            channel.send(_request(words, master, settings, named), (0, 1, 2))
            reason = _refusal(channel)
        except TimeoutError:
            reason = f"it has not answered for {ANSWER_S:.0f} s"
        except (EOFError, OSError):
            reason = "it has just ended"
        if reason is not None:
            say(_not_used(reason))
            return None
        channel.socket.settimeout(None)
        try:
            with _passing_on(channel):
                channel.send(Begin())
                return _wait_for_end(channel, say)
        except (EOFError, OSError):
            raise LisaError(
                "`lisa pipeline serve` died while it ran this command: run the command again"
            ) from None


def _refusal(channel: MessageChannel) -> str | None:
    """The server's reason for not running the command; None if it accepts."""
    while True:
        for message in channel.receive():
            if isinstance(message, Accepted):
                return None
            if isinstance(message, CommandRefused):
                return message.reason


def _not_used(reason: str) -> str:
    return f"lisa: runs without `lisa pipeline serve`: {reason}"


def is_present() -> bool:
    """Whether there may be a server for this program; takes a fraction of a millisecond."""
    is_submitted = "PYSPARK_GATEWAY_PORT" in os.environ
    try:
        found = socket_path().exists()
    except OSError:  # the directory is another user's
        return False
    return found and not is_submitted and _streams_are_files()


def _streams_are_files() -> bool:
    """Whether this program writes to its own standard streams, and not to a test's."""
    try:
        return [one.fileno() for one in (sys.stdin, sys.stdout, sys.stderr)] == [0, 1, 2]
    except (AttributeError, OSError, ValueError):
        return False


def _connect() -> MessageChannel | None:
    """A connection to this user's server; None if there is none.

    Raises ConfigError if the socket may be another user's.
    """
    path = socket_path()
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(ANSWER_S)
    try:
        check_private(path.parent)
        connection.connect(str(path))
        if not is_same_user(connection):
            raise ConfigError(f"{path} belongs to another user")
    except OSError:  # a killed server has left its socket
        connection.close()
        return None
    except BaseException:
        connection.close()
        raise
    return MessageChannel(connection)


def _request(
    words: Sequence[str], master: str, settings: Mapping[str, str], named: Sequence[str]
) -> CommandRequest:
    umask = os.umask(0o077)
    os.umask(umask)
    streams = (sys.stdin, sys.stdout, sys.stderr)
    return CommandRequest(
        words=[os.fsencode(word) for word in words],
        folder=os.getcwdb(),  # noqa: PTH109  bytes
        environment=list(os.environb.items()),
        umask=umask,
        streams=[(one.encoding, one.errors or "strict") for one in streams],
        code=code_version(),
        locale=locale.getencoding(),
        master=master,
        settings=dict(settings),
        named=list(named),
    )


def _wait_for_end(channel: MessageChannel, say: Callable[[str], None]) -> int | None:
    while True:
        for message in channel.receive():
            if isinstance(message, Waiting):
                say(f"lisa: waits for {message.running} other commands of `lisa pipeline serve`")
            elif isinstance(message, Stopping):
                say("lisa: `lisa pipeline serve` stops, and cancels this command")
            elif isinstance(message, CommandRefused):
                say(_not_used(message.reason))
                return None
            elif isinstance(message, Ended):
                if message.signal == signal.SIGINT:
                    raise KeyboardInterrupt
                if message.signal:
                    signal.signal(message.signal, signal.SIG_DFL)
                    os.kill(os.getpid(), message.signal)
                return message.code


@contextmanager
def _passing_on(channel: MessageChannel) -> Iterator[None]:
    """Send the signals that this process receives to the command."""

    def send(number: int, _: Any) -> None:
        with suppress(OSError):
            channel.send(PassedSignal(number))

    before = {number: signal.getsignal(number) for number in PASSED_ON}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, send)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
