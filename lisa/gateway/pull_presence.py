"""The gateway's records as a consumer of the topics that its clients pull from."""

from __future__ import annotations

import math
import os
import socket
import time
from collections.abc import Callable

from lisa.core.model.errors import LisaError, ServerUnavailable
from lisa.core.redis.errors import is_full
from lisa.core.store import presence
from lisa.core.store.store import AsyncStore

BEAT_S = presence.BEAT.total_seconds()

GROUP_KEPT_S = 2 * BEAT_S
"""How long the record names a group after its last pull, which comes at least once per beat."""

KEPT_S = 20.0
"""How long a topic without pulls stays in memory once there are too many."""

MOST_REMEMBERED = 10_000
"""The most topics to remember; above that, only those with recent pulls are kept."""


class PullPresence:
    """Announces one gateway as a consumer, and notices when the server has lost its records.

    `has_older_queue` tells whether a queue of a topic has waited since before an instant.
    """

    def __init__(
        self, store: AsyncStore, name: str, has_older_queue: Callable[[str, float], bool]
    ) -> None:
        self._store = store
        self._name = name
        self._has_older_queue = has_older_queue
        self._started_ms = time.time_ns() // 1_000_000
        self._groups: dict[str, dict[str, float]] = {}  # topic -> group -> last pull
        self._pushes: dict[str, dict[str, Callable[[], presence.PushPresence]]] = {}
        self._announced: dict[str, float] = {}
        self._written: dict[str, float] = {}
        self._emptied: dict[str, float] = {}

    async def announce(self, topic: str, group: str) -> None:
        """Write the record of a topic unless it is fresh and names the group. Raises LisaError."""
        now = time.monotonic()
        pulled = self._groups.setdefault(topic, {})
        is_named, pulled[group] = group in pulled, now
        if is_named and now - self._announced.get(topic, -math.inf) < BEAT_S:
            return
        for name in [one for one, at in pulled.items() if now - at > GROUP_KEPT_S]:
            del pulled[name]
        pushes = tuple(state() for _, state in sorted(self._pushes.get(topic, {}).items()))
        record = presence.ConsumerPresence(
            name=self._name,
            topic=topic,
            group=presence.SEPARATOR.join(sorted(pulled)),
            host=socket.gethostname(),
            pid=os.getpid(),
            started_ms=self._started_ms,
            state="degraded" if any(one.state == "degraded" for one in pushes) else "running",
            pushes=pushes,
        )
        is_new = False
        try:
            is_new = await self._store.drive(presence.announce_consumer(self._store, record))
        except ServerUnavailable as error:
            # A full server takes no record; nothing depends on it, and pulls drain the server.
            if not is_full(error.__cause__):
                raise
        self.remember(topic, now, is_new=is_new)

    def add_push(self, topic: str, group: str, state: Callable[[], presence.PushPresence]) -> None:
        """Name a push of a group in the records of its topic."""
        self._pushes.setdefault(topic, {})[group] = state

    def drop_push(self, topic: str, group: str, state: Callable[[], presence.PushPresence]) -> None:
        """Undo `add_push`, unless another push has taken the place."""
        pushes = self._pushes.get(topic, {})
        if pushes.get(group) == state:
            del pushes[group]

    def remember(self, topic: str, announced: float = -math.inf, *, is_new: bool) -> None:
        """Note that the record was written; `is_new`: the server had none before."""
        before = self._written.get(topic, -math.inf)
        if is_new and self._has_older_queue(topic, before):
            self.mark_emptied(topic)  # the older queue had kept its record fresh
        if len(self._written) >= MOST_REMEMBERED:
            self._announced = _recent(self._announced)
            self._written = _recent(self._written)
            self._groups = {one: self._groups[one] for one in self._written if one in self._groups}
        self._announced[topic] = announced
        self._written[topic] = time.monotonic()

    def announce_again(self, topic: str) -> None:
        """Write the record again at the next pull, whether or not it is fresh."""
        self._announced.pop(topic, None)

    def was_emptied_since(self, topic: str, instant: float) -> bool:
        """Whether the server was found without this gateway's record after an instant."""
        return self._emptied.get(topic, -math.inf) >= instant

    def mark_emptied(self, topic: str) -> None:
        """Record the loss for all queues, because the presence record will exist again."""
        if len(self._emptied) >= MOST_REMEMBERED:
            self._emptied.clear()
        self._emptied[topic] = time.monotonic()

    async def leave(self) -> None:
        """Delete the records."""
        for topic in list(self._announced):
            try:
                await self._store.drive(presence.leave_consumer(self._store, topic, self._name))
            except ServerUnavailable:
                break  # managers delete records that are no longer renewed
            except LisaError:
                continue
        self._announced.clear()


def _recent(times: dict[str, float]) -> dict[str, float]:
    now = time.monotonic()
    return {topic: at for topic, at in times.items() if now - at < KEPT_S}
