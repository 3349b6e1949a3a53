"""Finds and releases entries that the server delivered in replies that were lost."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from lisa.consumer.subscription import MOST, Subscription
from lisa.core.model.errors import LisaError, ServerUnavailable
from lisa.core.model.stream import Entry, parse_entry
from lisa.core.redis.flow import Command

log = logging.getLogger("lisa.consumer")


class LostReplies:
    """The last entry that one subscription's reads returned, and what lost replies delivered after.

    Entries that are pending for this consumer after that one, and that it does not hold, were lost.
    """

    def __init__(self, sub: Subscription) -> None:
        self._sub = sub
        self._last = "-"
        self._after: str | None = None
        self._until = 0.0

    def received(self, entries: Sequence[Entry]) -> None:
        """Record the entries of a reply."""
        self._last = entries[-1].entry

    def record(self) -> None:
        """Record that a reply was lost: the next reads look for entries that it delivered."""
        if self._after is None:
            self._after = self._last
        self._until = time.monotonic() + self._sub.leases.ack_timeout_s

    @property
    def is_possible(self) -> bool:
        """Whether a lost reply may have delivered entries."""
        return self._after is not None

    @property
    def is_last_look(self) -> bool:
        """Whether the server can no longer execute a read whose reply was lost."""
        return time.monotonic() > self._until

    def command(self) -> Command:
        """The command that finds what lost replies delivered, and what is held."""
        sub, after = self._sub, self._after or "-"
        stream = sub.store.keys.topic(sub.shard).group(sub.group).ready
        start = after if after == "-" else f"({after}"
        return "XPENDING", stream, sub.group, start, "+", MOST, sub.name

    def release(self) -> bool:
        """Release entries whose reply was lost; returns whether to check again soon.

        Raises LisaError.
        """
        lost = self._find()
        if lost:
            log.info("topic %s: releasing %d messages of a lost reply", self._sub.shard, len(lost))
            self._sub.releases.make(lost)
        return lost is not None

    def _find(self) -> list[tuple[str, str]] | None:
        """Receipts of entries whose reply was lost; None if no read was lost.

        Call this between reads until it returns None, because a server that hung may execute a read
        after its connection was closed. Raises LisaError.
        """
        sub = self._sub
        if self._after is None:
            return None
        is_last, command = self.is_last_look, self.command()
        stream = command[1]
        try:
            pending = sub.store.ask(*command)
        except ServerUnavailable:
            raise
        except LisaError as error:  # the group was removed with its entries; the next read raises
            log.debug("topic %s: cannot check for lost entries: %s", sub.shard, error)
            self._after = None
            return None
        entries = [item[0] for item in pending if item[0].decode() not in sub.leases.held]
        found = [
            parse_entry(item)
            for entry in entries
            for item in sub.store.ask("XRANGE", stream, entry, entry)
        ]
        if is_last and len(pending) < MOST:
            self._after = None
        return [(one.id, one.entry) for one in found]
