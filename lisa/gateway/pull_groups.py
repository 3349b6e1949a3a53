"""Which groups pulls take from, and the gateway's records as a consumer of their topics."""

from __future__ import annotations

import asyncio
import math
import os
import socket
import time
from collections.abc import Callable, Mapping

from lisa.core.delivery.group_resolution import join, wait_for_group
from lisa.core.model.errors import GroupRemoved, LisaError, ServerUnavailable
from lisa.core.model.sharding import Topic, own_shard
from lisa.core.redis.errors import is_full
from lisa.core.redis.flow import Await, Flow
from lisa.core.store import presence
from lisa.core.store.store import AsyncStore

BEAT_S = presence.BEAT.total_seconds()

GROUP_KEPT_S = 2 * BEAT_S
"""How long the record names a group after its last pull, which comes at least once per beat."""

KEPT_S = 20.0
"""How long a topic without pulls stays in memory once there are too many."""

MOST_REMEMBERED = 10_000
"""The most topics to remember; above that, only those with recent pulls are kept."""

JOIN_AGAIN_S = 20.0
"""Interval at which a topic that is pulled from is registered again."""

EXPECT_AGAIN_S = 60.0

"""The most topics whose group is cached; above that, only recently joined ones are kept."""


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
        for name in [other for other, at in pulled.items() if now - at > GROUP_KEPT_S]:
            del pulled[name]
        pushes = tuple(state() for _, state in sorted(self._pushes.get(topic, {}).items()))
        record = presence.ConsumerPresence(
            name=self._name,
            topic=topic,
            group=presence.SEPARATOR.join(sorted(pulled)),
            host=socket.gethostname(),
            pid=os.getpid(),
            started_ms=self._started_ms,
            state="degraded" if any(push.state == "degraded" for push in pushes) else "running",
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
            self._groups = {
                name: self._groups[name] for name in self._written if name in self._groups
            }
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


class UnknownGroup(GroupRemoved):
    """The group does not exist, and the client may not declare it."""


class GroupJoins:
    """Joins groups for pulls, and caches the answers for `JOIN_AGAIN_S`.

    named: the group to use for a topic with several groups if a pull names none.
    is_closing: whether pulls no longer wait.
    """

    def __init__(
        self,
        store: AsyncStore,
        presence: PullPresence,
        name: str,
        named: Mapping[str, str],
        is_closing: Callable[[], bool],
    ) -> None:
        self._store = store
        self._presence = presence
        self._name = name
        self._named = named
        self._is_closing = is_closing
        self._known: dict[tuple[str, str], tuple[str, float]] = {}
        self._expected: dict[str, float] = {}  # topics whose first group a pull has waited for
        self._joining: dict[tuple[str, str], asyncio.Task[str | None]] = {}

    async def group_for(
        self, topic: Topic, group: str | None, ends: float, *, may_declare: bool
    ) -> str | None:
        """The group to pull for; None if the topic has none and the time is up.

        Raises UnknownGroup if the pull may not declare it; LisaError.
        """
        named = self._named.get(topic, "")
        wanted = group or named
        must_exist = not may_declare and wanted != named

        def resolve() -> Flow[str | None]:
            found: str | None = yield Await(self._joined(topic, wanted, must_exist=must_exist))
            return found

        return await self._store.drive(
            wait_for_group(
                self._store,
                own_shard(topic),
                self._name,
                resolve,
                lambda: 0.0 if self._is_closing() else ends - time.monotonic(),
                announced=lambda is_new: self._presence.remember(topic, is_new=is_new),
                is_patient=True,
            )
        )

    async def _joined(self, topic: Topic, wanted: str, *, must_exist: bool) -> str | None:
        """The group that `join` finds: one call for concurrent pulls, cached for `JOIN_AGAIN_S`."""
        known, at = self._known.get((topic, wanted), ("", -math.inf))
        if time.monotonic() - at < JOIN_AGAIN_S:
            return known
        if must_exist and wanted not in await self._store.drive(self._store.groups(topic)):
            raise UnknownGroup(
                f"group {wanted!r} is not declared on topic {topic!r}; only a token with the scope "
                f"operate declares it by pulling: lisa topic group add {topic} {wanted}"
            )
        task = self._joining.get((topic, wanted))
        if task is None:
            task = asyncio.create_task(self._ask_to_join(topic, wanted))
            self._joining[topic, wanted] = task
            task.add_done_callback(_retrieve_error)
        return await asyncio.shield(task)

    async def _ask_to_join(self, topic: Topic, wanted: str) -> str | None:
        try:
            found = await self._store.drive(join(self._store, own_shard(topic), wanted))
        finally:
            del self._joining[topic, wanted]
        if found is not None:
            now = time.monotonic()
            if len(self._known) >= MOST_REMEMBERED:
                self._known = {
                    key: joined
                    for key, joined in self._known.items()
                    if now - joined[1] < JOIN_AGAIN_S
                }
            self._known[topic, wanted] = (found, now)
        return found

    async def expects_first_group(self, topic: str) -> bool:
        """Whether a pull should wait until a manager declares the topic's first group.

        False if another pull has waited within the last `EXPECT_AGAIN_S`, because no manager
        declared a group for that pull. Raises LisaError.
        """
        if self._store.known_groups(topic) or await self._store.drive(self._store.groups(topic)):
            return False
        now = time.monotonic()
        if now - self._expected.get(topic, -math.inf) < EXPECT_AGAIN_S:
            return False
        if len(self._expected) >= MOST_REMEMBERED:
            self._expected.clear()
        self._expected[topic] = now
        return True

    def forget(self, topic: str) -> None:
        """Drop what is cached of a topic."""
        for key in [key for key in self._known if key[0] == topic]:
            del self._known[key]


def _retrieve_error(task: asyncio.Task[str | None]) -> None:
    """Retrieve the task's error, because all pulls that wait for it may have been cancelled."""
    if not task.cancelled():
        task.exception()
