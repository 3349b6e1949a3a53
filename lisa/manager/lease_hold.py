"""Leases are not reclaimed until consumers could renew them after an outage of their server."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from lisa.core.store.store import SyncStore

HARMLESS = 0.25  # of an ack timeout; consumers renew leases with two thirds left

_Outages = tuple[tuple[float, float], ...]
"""The end of each outage by `time.monotonic`, and its length in seconds."""


class LeaseHold:
    """The outages of nodes and topics, and until when they hold the leases of a topic.

    A topic alone has an outage if its node answers but refuses scripts: while a slot moves, the
    topic's keys lie on two nodes.

    node_of: returns the name of the node that holds a topic.
    """

    def __init__(self, store: SyncStore, node_of: Callable[[str], str | None]) -> None:
        self._store = store
        self._node_of = node_of
        self._of_nodes: dict[str, _Outages] = {}
        self._of_topics: dict[str, _Outages] = {}
        self._failing: dict[str, float] = {}
        self._until: dict[tuple[str, str], float] = {}
        self._added = 0

    def add(self, since: float, gap_s: float, node: str) -> None:
        """Hold the leases on a node for one ack timeout from the end of an outage.

        An outage of a quarter of the ack timeout or less is ignored, so that a connection that
        breaks again and again does not postpone reclaiming forever.
        """
        self._add(self._of_nodes, node, since, gap_s)

    def failed(self, topic: str) -> None:
        """Record that the server could not run a script for a topic."""
        self._failing.setdefault(topic, time.monotonic())

    def passed(self, topic: str) -> None:
        """Record that the server ran a script for a topic; holds its leases as `add` does."""
        since = self._failing.get(topic)
        if since is not None:
            now = time.monotonic()
            self._add(self._of_topics, topic, now, now - since)
            self._failing.pop(topic, None)

    def is_failing(self, topic: str) -> bool:
        """Whether the last script for a topic failed."""
        return topic in self._failing

    def until(self, topic: str) -> float:
        """The end of the hold of a topic's leases, by `time.monotonic`. Raises LisaError."""
        node = self._node_of(topic) or ""
        outages = self._of_nodes.get(node, ()) + self._of_topics.get(topic, ())
        if not outages:
            return 0.0
        until = self._until.get((topic, node))
        if until is None:
            added = self._added
            options = self._store.drive(self._store.options(topic))
            timeout_s = options.ack_timeout.total_seconds()
            harmful = [since for since, gap_s in outages if gap_s > timeout_s * HARMLESS]
            until = max(harmful, default=-math.inf) + timeout_s
            if added == self._added:
                self._until[topic, node] = until
        return until

    def forget(self, topic: str) -> None:
        """Drop the state of a removed topic."""
        self._failing.pop(topic, None)
        self._of_topics.pop(topic, None)
        for held in [held for held in self._until if held[0] == topic]:
            self._until.pop(held, None)

    def _add(self, outages: dict[str, _Outages], name: str, since: float, gap_s: float) -> None:
        # A later outage that is no shorter replaces the earlier ones.
        kept = tuple(one for one in outages.get(name, ()) if one[1] > gap_s)
        outages[name] = (*kept, (since, gap_s))
        self._added += 1
        self._until.clear()
