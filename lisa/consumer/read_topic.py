"""One topic of a reader: when it may be read, and what lost replies may have delivered."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence

from lisa.consumer.membership import LOOK_AGAIN_S
from lisa.consumer.subscription import MOST, Subscription
from lisa.core.delivery.opening import PlainState
from lisa.core.model.backoff import FIRST_S, Backoff, longest_after
from lisa.core.model.errors import LisaError, ServerUnavailable
from lisa.core.model.stream import Entry, parse_entry

log = logging.getLogger("lisa.consumer")


class LostReplies:
    """The last entry that one topic's reads returned, and what lost replies delivered after it.

    Entries that are pending for this consumer after that one, and that it does not hold, were lost.
    """

    def __init__(self, sub: Subscription) -> None:
        self._sub = sub
        self._last = "-"
        self._after: str | None = None
        self._until = self._next_look = 0.0

    @property
    def are_possible(self) -> bool:
        """Whether a lost reply may have delivered entries."""
        return self._after is not None

    def received(self, entries: Sequence[Entry]) -> None:
        """Record the entries of a reply."""
        self._last = entries[-1].entry

    def record(self) -> None:
        """Record that a reply was lost: the next reads look for entries that it delivered."""
        if self._after is None:
            self._after = self._last
        self._until = time.monotonic() + self._sub.leases.ack_timeout_s
        self._next_look = 0.0

    def release(self, *, now: bool = False) -> None:
        """Look for entries whose reply was lost, at most once a second, and release them.

        Call this between reads while `are_possible`, because a server that hung may execute a read
        after its connection was closed. Raises LisaError.
        """
        if self._after is None or (time.monotonic() < self._next_look and not now):
            return
        self._next_look = time.monotonic() + LOOK_AGAIN_S
        lost = self._find()
        if lost:
            log.info("topic %s: releasing %d messages of a lost reply", self._sub.shard, len(lost))
            self._sub.releases.make(lost)

    def _find(self) -> list[tuple[str, str]]:
        """Receipts of entries whose reply was lost. Raises LisaError."""
        sub, after = self._sub, self._after or "-"
        is_last_look = time.monotonic() > self._until
        stream = sub.store.keys.topic(sub.shard).group(sub.group).ready
        start = after if after == "-" else f"({after}"
        try:
            pending = sub.store.ask("XPENDING", stream, sub.group, start, "+", MOST, sub.name)
        except ServerUnavailable:
            raise
        except LisaError as error:  # the group was removed with its entries; the next read raises
            log.debug("topic %s: cannot check for lost entries: %s", sub.shard, error)
            self._after = None
            return []
        found = [
            parse_entry(item)
            for entry in (row[0] for row in pending if row[0].decode() not in sub.leases.held)
            for item in sub.store.ask("XRANGE", stream, entry, entry)
        ]
        if is_last_look and len(pending) < MOST:
            self._after = None
        return [(entry.id, entry.entry) for entry in found]


class ReadTopic:
    """A topic of a reader: its subscription, and when it may be read again.

    sub: the subscription.
    lost: what lost replies may have delivered.
    ended: set once no reader will read the topic again.
    asks_state: whether reads ask for the topic's state: the last entry carried its envelope.
    """

    def __init__(self, sub: Subscription) -> None:
        self.sub = sub
        self.lost = LostReplies(sub)
        self.ended = threading.Event()
        self.rests_until = 0.0
        self.asked_at = 0.0
        self._stream = "", ""
        self.error: BaseException | None = None
        self._backoff = Backoff()
        self._is_next_try = False
        self.asks_state = False
        self._state: PlainState | None = None

    @property
    def stream(self) -> str:
        """The key of the stream that is read; the group is known."""
        group, key = self._stream
        if group != self.sub.group:
            group = self.sub.group
            key = self.sub.store.keys.topic(self.sub.shard).group(group).ready
            self._stream = group, key
        return key

    @property
    def is_steady(self) -> bool:
        """Whether the topic can be read without further steps."""
        return self.sub.presence_state == "running" and not self.lost.are_possible

    def rest(self, seconds: float) -> None:
        """Skip the topic for some seconds."""
        self.rests_until = time.monotonic() + seconds

    def fail(self, error: BaseException) -> None:
        """Try again after a pause, which grows."""
        self.error = self.error or error
        self.rest(self._backoff.take(longest_after(error)))

    def succeed(self) -> BaseException | None:
        """Take note that the topic could be read; returns the error that this ends."""
        error, self.error = self.error, None
        if error is not None:
            self._backoff.reset()
        return error

    def prepare(self) -> bool:
        """Whether the topic can be read now; takes the steps towards that. Raises LisaError."""
        sub = self.sub
        if pause_s := sub.membership.enter():
            self.rest(pause_s)
            return False
        if sub.is_paused_topic:
            sub.check_paused()
            if sub.is_paused_topic:
                self.rest(LOOK_AGAIN_S)
                return False
        if not sub.stats.degradation.is_degraded:
            self._is_next_try = False
        elif sub.leases.held:  # messages are taken one at a time
            self.rest(FIRST_S)
            return False
        elif not self._is_next_try:
            self._is_next_try = True
            self.rest(sub.stats.degradation.backoff.pause_s)
            return False
        return True

    def received(
        self, entries: list[Entry], asked_at: float, state: PlainState | None = None
    ) -> None:
        """Take the entries that a read returned. state: the topic's, if the read asked for it."""
        self.sub.unopened, self.asked_at, self._state = entries, asked_at, state
        self.asks_state = bool(entries[-1].envelope)
        self.lost.received(entries)
        if self._is_next_try:
            self._is_next_try = False
            self.sub.stats.degradation.backoff.lengthen()

    def take_state(self) -> PlainState | None:
        """The topic's state, once: it may change before a second call to open the entries."""
        state, self._state = self._state, None
        return state
