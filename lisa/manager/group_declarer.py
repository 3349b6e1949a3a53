"""Declare the configured groups on topics where consumers wait for a group."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from lisa.core.model.errors import LisaError
from lisa.core.model.sharding import topic_of
from lisa.core.store import presence
from lisa.core.store.reshard import spread
from lisa.core.store.store import SyncStore
from lisa.core.transitions.declare import Declare
from lisa.manager.bulk_reads import topics_with_keys
from lisa.manager.loop import Outcome
from lisa.manager.registry import Registry
from lisa.manager.topic_log import TopicLog

log = logging.getLogger(__name__)


class GroupDeclarer:
    """Declares groups for waiting consumers on topics without a group. Messages do not suffice."""

    def __init__(self, store: SyncStore, registry: Registry) -> None:
        self._store = store
        self._registry = registry

    def poll(self, topics: Sequence[str]) -> list[str]:
        """Topics without a known group that now have a group or a waiting consumer.

        Called each second. Raises ServerUnavailable.
        """
        keys = self._store.keys.topic
        return topics_with_keys(
            self._store,
            {
                topic: [keys(topic).groups, keys(topic).consumers]
                for topic in topics
                if not self._store.known_groups(topic)
            },
        )

    def step(self, topics: Sequence[str]) -> list[Outcome]:
        """Declare groups where needed. A topic is due again after `poll` or an announcement."""
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
        keys = self._store.keys.topic(topic)
        now_ms = self._store.drive(self._store.server_time_ms(keys.consumers))
        records = self._store.drive(presence.consumers(self._store, topic))
        waiting = [one.name for one in presence.alive(records, now_ms) if not one.group]
        if not waiting:
            return
        whole = topic_of(topic)
        known = () if whole == topic else self._store.drive(self._store.groups(whole))
        for group in known or self._registry.plan.groups_for(whole):
            self._store.call(Declare(whole, group))
            TopicLog(log, topic, group).info("declared for %s", ", ".join(waiting))
        self._store.drive(spread(self._store, whole))
        self._store.drive(self._store.groups(topic))
