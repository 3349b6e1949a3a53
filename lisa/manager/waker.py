"""Hears from whoever made an earlier message due: the one channel of all topics."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from lisa.core.connection import Connection, Subscription
from lisa.core.failures import ClientError

__all__ = ["Waker"]

LISTEN_S = 0.25
QUIET_S = 1.0
SILENT_S = 3.0
"""After so long without any sign of life, asked for after `QUIET_S`, nobody is at the other end."""
FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 1.0

log = logging.getLogger(__name__)


class Waker:
    """Calls `woken` with each topic that is announced, and `deaf` after each gap in listening.

    A subscription that is lost is made again, with growing pauses; what was announced meanwhile
    nobody repeats, so `deaf` is to look at all topics. It counts as lost, too, when the other end
    falls silent: a connection that was cut on its way says nothing of that. The gap ends with the
    first answer on the new one: until then the server may not have read that we subscribe.
    """

    def __init__(
        self,
        connection: Connection,
        channel: str,
        woken: Callable[[str], None],
        deaf: Callable[[], None],
    ) -> None:
        self._connection = connection
        self._channel = channel
        self._woken = woken
        self._deaf = deaf
        self._subscription: Subscription | None = None
        self._pause_s = FIRST_PAUSE_S
        self._listens = False
        self._heard = 0.0
        self._asked = 0.0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._work, name="lisa-waker", daemon=True)

    def start(self) -> None:
        """Begin to listen."""
        self._thread.start()

    def stop(self) -> None:
        """Listen no more."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join(LISTEN_S + 1.0)
        self._hang_up()

    @property
    def alive(self) -> bool:
        """Whether its thread still runs."""
        return self._thread.is_alive()

    def step(self) -> float:
        """Listen for a moment; for how many seconds to pause after that."""
        try:
            if self._subscription is None:
                self._subscription = self._connection.subscribe(self._channel)
                self._listens = False
                self._heard = self._asked = time.monotonic()
                self._subscription.ping()
            said = self._subscription.get(LISTEN_S)
            self._mind_silence(self._subscription, heard=said is not None)
        except ClientError:
            # The server's being away is told by those who look after it.
            self._hang_up()
            pause, self._pause_s = self._pause_s, min(self._pause_s * 2, LONGEST_PAUSE_S)
            return pause
        self._pause_s = FIRST_PAUSE_S
        if said:
            self._woken(said.decode("utf-8", "replace"))
        return 0.0

    def _mind_silence(self, subscription: Subscription, *, heard: bool) -> None:
        now = time.monotonic()
        if heard:
            self._heard = now
            if not self._listens:
                self._listens = True
                self._deaf()
        elif now - self._heard > SILENT_S:
            log.info("channel %s fell silent: listening anew", self._channel)
            self._hang_up()
            self._deaf()
        elif now - max(self._heard, self._asked) > QUIET_S:
            self._asked = now
            subscription.ping()

    def _work(self) -> None:
        while not self._stopped.is_set():
            if pause := self.step():
                self._stopped.wait(pause)

    def _hang_up(self) -> None:
        subscription, self._subscription = self._subscription, None
        if subscription is not None:
            subscription.close()
