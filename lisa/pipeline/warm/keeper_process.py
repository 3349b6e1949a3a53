"""Starts and ends the keeper's process."""

from __future__ import annotations

import os
import selectors
import signal
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress

from lisa.pipeline.warm import keeper
from lisa.pipeline.warm.protocol import Message, MessageChannel

STOP_S = 30.0
"""How long Spark has to stop; then it is killed."""


class KeeperProcess:
    """The keeper, forked from the server; `channel` leads to it.

    close_inherited: closes in the keeper what only the server uses.
    """

    def __init__(
        self,
        close_inherited: Callable[[], None],
        master: str,
        settings: Mapping[str, str],
        environment: str | None,
    ) -> None:
        ours, theirs = socket.socketpair()
        self._pid = os.fork()
        if not self._pid:
            try:
                ours.close()
                close_inherited()
                keeper.keep(MessageChannel(theirs), master, settings, environment)
            finally:
                os._exit(0)
        theirs.close()
        self.channel = MessageChannel(ours)

    def tell(self, message: Message) -> None:
        """Send a message, unless the keeper is gone."""
        with suppress(OSError):
            self.channel.send(message)

    def end(self, wake: socket.socket, is_impatient: Callable[[], bool]) -> None:
        """Close the channel, and wait until the keeper and its JVM have stopped.

        wake: a non-blocking socket that becomes readable with each signal. is_impatient: whether to
        kill the keeper at once.
        """
        self.channel.close()
        deadline = time.monotonic() + STOP_S
        with selectors.DefaultSelector() as selector:
            selector.register(wake, selectors.EVENT_READ)
            while not os.waitpid(self._pid, os.WNOHANG)[0]:
                left = deadline - time.monotonic()
                if left <= 0 or is_impatient():
                    os.kill(self._pid, signal.SIGKILL)
                    os.waitpid(self._pid, 0)
                    return
                if selector.select(left):
                    wake.recv(4096)
