"""Answers consumers that wait for a group: declares the one that the configuration names."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from lisa.core import presence
from lisa.core.clock import duration_ms
from lisa.core.errors import LisaError
from lisa.core.presence import GONE_AFTER
from lisa.core.shards import base
from lisa.core.spread import spread
from lisa.core.store import SyncStore
from lisa.core.transitions.declare import Declare
from lisa.manager.lookout import standing
from lisa.manager.loop import Outcome
from lisa.manager.registry import Registry

__all__ = ["Greeter"]

log = logging.getLogger(__name__)


class Greeter:
    """Looks at topics without any group; messages alone declare nothing."""

    def __init__(self, store: SyncStore, registry: Registry) -> None:
        self._store = store
        self._registry = registry

    def glance(self, topics: Sequence[str]) -> list[str]:
        """Those without any group as far as we know, where a step may find one or a consumer.

        To be asked each second. Raises ServerUnavailable.
        """
        keys = self._store.keys.topic
        return standing(
            self._store,
            {
                topic: [keys(topic).groups, keys(topic).consumers]
                for topic in topics
                if not self._store.known_groups(topic)
            },
        )

    def step(self, topics: Sequence[str]) -> list[Outcome]:
        """Look at each topic. It is looked at again when a glance or a wake-up asks for it."""
        outcomes: list[Outcome] = []
        for topic in topics:
            try:
                self._answer(topic)
                outcomes.append(None)
            except LisaError as error:
                outcomes.append(error)
        return outcomes

    def _answer(self, topic: str) -> None:
        if self._store.drive(self._store.groups(topic)):
            return
        now_ms = self._store.drive(self._store.server_time_us()) // 1000
        oldest = now_ms - duration_ms(GONE_AFTER)
        waiting = [
            one.name
            for one in self._store.drive(presence.consumers(self._store, topic))
            if not one.group and one.seen_ms > oldest
        ]
        if not waiting:
            return
        whole = base(topic)
        known = () if whole == topic else self._store.drive(self._store.groups(whole))
        for group in known or self._registry.plan.groups_for(whole):
            self._store.call(Declare(whole, group))
            log.info("topic %s: group %s declared for %s", topic, group, ", ".join(waiting),
                     extra={"topic": topic, "group": group})  # fmt: skip
        self._store.drive(spread(self._store, whole))
        self._store.drive(self._store.groups(topic))
