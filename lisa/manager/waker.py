"""Subscribe to the wake channel, where clients announce topics with an earlier due time."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from lisa.core.daemon.threads import ServiceThread, longest_round_s
from lisa.core.model.backoff import LONGEST_AWAY_S, Backoff
from lisa.core.redis.connection import ChannelSubscription, Connection
from lisa.core.redis.errors import ClientError

LISTEN_S = 1.0
QUIET_S = 1.0
SILENT_S = 3.0
"""A connection without any reply for this long, with pings after `QUIET_S`, counts as lost."""

log = logging.getLogger(__name__)


class Waker:
    """Calls `on_wake` with each topic that one node announces, and `on_gap` after each gap.

    Both are called with the node's name as the first argument. Each node has its own waker, because
    only a topic's own node reliably receives its announcements. The nodes of a cluster forward them
    to each other, but not while the link between two of them is broken. The cluster may report no
    error during that time.

    A lost subscription is renewed with growing pauses. Announcements during the gap are lost, so
    `on_gap` must check all topics of the node. A connection that was cut without a FIN or RST never
    reports an error, so the subscription also counts as lost when the server stays silent. The gap
    ends with the first reply on the new connection; only then the server has processed SUBSCRIBE.
    """

    def __init__(
        self,
        connection: Connection,
        channel: str,
        on_wake: Callable[[str, str], None],
        on_gap: Callable[[str], None],
        node: str = "",
    ) -> None:
        self._connection = connection
        self._channel = channel
        self._on_wake = on_wake
        self._on_gap = on_gap
        self._node = node
        self._subscription: ChannelSubscription | None = None
        self._backoff = Backoff(longest_s=LONGEST_AWAY_S)
        self._is_subscribed = False
        self._last_reply = 0.0
        self._last_ping = 0.0
        self._stopped = threading.Event()
        longest_s = longest_round_s(connection.address.socket_timeout_s)
        name = f"lisa-waker-{node}" if node else "lisa-waker"
        self.thread = ServiceThread(name, self._work, longest_s, self._stopped.is_set)

    def start(self) -> None:
        """Start the thread."""
        self.thread.start()

    def close(self) -> None:
        """Tell the thread to end, without waiting for it."""
        self._stopped.set()
        subscription = self._subscription
        if subscription is not None:
            subscription.interrupt()

    def stop(self) -> None:
        """End the thread and close the subscription."""
        self.close()
        self.thread.join(LISTEN_S + 1.0)
        self._disconnect()

    def step(self) -> float:
        """Wait up to a second for an announcement; returns the pause in seconds before the next."""
        try:
            if self._subscription is None:
                self._subscription = self._connection.subscribe(self._channel, self._node)
                self._is_subscribed = False
                self._last_reply = self._last_ping = time.monotonic()
                self._subscription.ping()
            message = self._subscription.get(LISTEN_S)
            self._check_silence(self._subscription, has_reply=message is not None)
        except ClientError:
            # The server monitor logs outages.
            self._disconnect()
            return self._backoff.take()
        self._backoff.reset()
        if message:
            self._on_wake(self._node, message.decode("utf-8", "replace"))
        return 0.0

    def _check_silence(self, subscription: ChannelSubscription, *, has_reply: bool) -> None:
        now = time.monotonic()
        if has_reply:
            self._last_reply = now
            if not self._is_subscribed:
                self._is_subscribed = True
                self._on_gap(self._node)
        elif now - self._last_reply > SILENT_S:
            log.info("no reply on channel %s; subscribing again", self._channel)
            self._disconnect()
            self._on_gap(self._node)
        elif now - max(self._last_reply, self._last_ping) > QUIET_S:
            self._last_ping = now
            subscription.ping()

    def _work(self) -> None:
        try:
            while not self._stopped.is_set():
                self.thread.begin()
                if pause := self.step():
                    self._stopped.wait(pause)
        finally:  # a restarted thread must subscribe again and report a gap
            self._disconnect()

    def _disconnect(self) -> None:
        subscription, self._subscription = self._subscription, None
        if subscription is not None:
            subscription.close()
