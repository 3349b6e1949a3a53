"""The clocks by which leases end; leases are restarted when a clock was set."""

from __future__ import annotations

import logging
from dataclasses import replace

from lisa.core.store.store import SyncStore
from lisa.core.transitions.renew import Renew
from lisa.manager.server_clock import ServerClock
from lisa.manager.topic_log import TopicLog

log = logging.getLogger(__name__)


class LeaseClocks:
    """The clock of each topic's server: one for all topics, or on a cluster one for each.

    window: number of pending entries that one call renews.
    """

    def __init__(self, store: SyncStore, clock: ServerClock, window: int) -> None:
        self._store = store
        self._clock = clock
        self._window = window
        self._clocks: dict[str, ServerClock] = {}
        self._handled_steps: dict[tuple[str, str], int] = {}
        """By group: after how many steps of the clock its leases were restarted."""

    def of(self, topic: str) -> ServerClock:
        """The clock of a topic's server."""
        if not self._store.has_nodes:
            return self._clock
        clock = self._clocks.get(topic)
        if clock is None:
            clock = self._clocks[topic] = ServerClock(self._store.keys.topic(topic).options)
        return clock

    def renew_after_step(self, topic: str, group: str) -> bool:
        """Restart all leases after a step of the clock, because their age is unknown.

        Returns whether there was a step. Raises LisaError.
        """
        steps = self.of(topic).steps
        done = self._handled_steps.setdefault((topic, group), max(0, len(steps) - 1))
        if done == len(steps):
            return False
        by_ms = sum(step.by_ms for step in steps[done:])
        self._renew(Renew(topic, group, by_ms, steps[-1].since_ms, window=self._window))
        self._handled_steps[topic, group] = len(steps)
        return True

    def restart_ahead(self, topic: str, group: str) -> None:
        """Restart the leases of deliveries that the server dates in the future."""
        self._renew(Renew(topic, group, window=self._window))

    def _renew(self, first: Renew) -> None:
        result = self._store.call(first)
        renewed = result.renewed
        while result.cursor is not None:
            result = self._store.call(replace(first, start=result.cursor))
            renewed += result.renewed
        if renewed:
            TopicLog(log, first.topic, first.group).warning(
                "restarted %d leases, because the server's clock was set", renewed
            )

    def forget(self, topic: str) -> None:
        """Drop the state of a removed topic."""
        self._clocks.pop(topic, None)
        for key in [key for key in self._handled_steps if key[0] == topic]:
            self._handled_steps.pop(key, None)
