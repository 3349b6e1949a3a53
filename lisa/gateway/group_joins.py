"""Which group a pull takes from, asked of the server once for all pulls of a topic."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Mapping

from lisa.core.delivery.group_resolution import join, wait_for_group
from lisa.core.model.errors import GroupRemoved
from lisa.core.model.sharding import Topic, own_shard
from lisa.core.redis.flow import Await, Flow
from lisa.core.store.store import AsyncStore
from lisa.gateway.pull_presence import PullPresence

JOIN_AGAIN_S = 20.0
"""Interval at which a topic that is pulled from is registered again."""

EXPECT_AGAIN_S = 60.0

MOST_REMEMBERED = 10_000
"""The most topics whose group is cached; above that, only recently joined ones are kept."""


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
                    key: one for key, one in self._known.items() if now - one[1] < JOIN_AGAIN_S
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
