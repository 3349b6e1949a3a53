"""All pulls of a gateway process, with one queue for each group of a topic.

A blocking read watches the group's stream, so each new entry wakes a pull immediately: a promotion,
a due retry or a released delivery. Only shards on several nodes are polled. Messages are taken
only for waiting pulls. If a client disconnects, its messages are released without counting an
attempt.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from functools import partial

from lisa.core.delivery.group_resolution import was_emptied
from lisa.core.delivery.source import LOOK_AGAIN_S, MOST, GroupSource
from lisa.core.model.errors import GroupRemoved, ServerUnavailable
from lisa.core.model.sharding import Topic, own_shard
from lisa.core.redis.connection import AsyncConnection
from lisa.core.store.store import AsyncStore
from lisa.gateway.group_joins import GroupJoins, UnknownGroup
from lisa.gateway.pull_presence import PullPresence
from lisa.gateway.pull_queue import PullQueue
from lisa.gateway.releaser import Releaser
from lisa.gateway.waiter import HandedOut, Waiter

FIRST_PULL_S = 1.0
"""How long the first pull of a topic waits for a manager to declare a group."""


class PullBroker:
    """All pulls of one gateway process.

    `groups` names the group to use for topics with several groups if a pull names none.
    """

    def __init__(
        self,
        store: AsyncStore,
        watching: AsyncConnection,
        *,
        name: str,
        groups: dict[str, str],
    ) -> None:
        self.store = store
        self.watching = watching
        self.name = name
        self._queues: dict[tuple[str, str], PullQueue] = {}
        self._releaser = Releaser(store)
        self.presence = PullPresence(store, name, self._has_older_queue)
        self._joins = GroupJoins(store, self.presence, name, groups, lambda: self.is_closing)
        self.is_closing = False
        self._handed_out = 0
        self.given_back = 0

    async def pull(
        self,
        topic: str,
        *,
        group: str | None = None,
        most: int = 1,
        wait_s: float = 0.0,
        join_s: float = 0.0,
        ack_timeout_ms: int | None = None,
        may_declare: bool = True,
    ) -> list[HandedOut]:
        """Up to `most` deliveries; waits up to `wait_s` for the first.

        `join_s`: how long to wait for the topic's first group and for its messages, if that is
        longer than `wait_s` (see `first_pull_s`).
        `may_declare`: whether an unknown group is declared; otherwise it raises GroupRemoved.

        Cancel this call if the client disconnects; its deliveries are then released. While the
        server is unavailable, the pull waits, and fails only when its time is up.

        Does not count towards the limit of pulls (see `Shares`). Raises LisaError.
        """
        whole, began = Topic(topic), time.monotonic()
        ends = began + max(wait_s, join_s)
        while True:
            since = time.monotonic()
            try:
                joined = await self._joins.group_for(whole, group, ends, may_declare=may_declare)
                if joined is None:
                    return []
                return await self._enqueue(whole, joined, min(most, MOST), ends, ack_timeout_ms)
            except UnknownGroup:
                raise
            except GroupRemoved:
                self._joins.forget(topic)
                was_lost = await self._was_emptied(whole, group or "", since, ends)
                if group is not None and not was_lost:
                    raise
                self.presence.announce_again(topic)
                may_declare = True  # the group was declared before

    async def first_pull_s(self, topic: str) -> float:
        """How long a pull that would not wait should wait, since the topic has no group yet.

        Without a group there are no messages to pull; a manager declares the group, and then moves
        the messages that are due. Raises LisaError.
        """
        return FIRST_PULL_S if await self._joins.expects_first_group(topic) else 0.0

    @property
    def handed_out(self) -> int:
        """The number of deliveries handed to clients."""
        return self._handed_out + sum(queue.handed_out for queue in self._queues.values())

    async def _was_emptied(self, topic: Topic, group: str, since: float, ends: float) -> bool:
        """Whether the server has lost its data since then, so the group was not removed."""
        while not self.presence.was_emptied_since(topic, since):
            try:
                if not await self.store.drive(
                    was_emptied(self.store, own_shard(topic), self.name, group)
                ):
                    break
                self.presence.mark_emptied(topic)
            except ServerUnavailable:
                if time.monotonic() >= ends or self.is_closing:
                    raise
                await asyncio.sleep(LOOK_AGAIN_S)
        return self.presence.was_emptied_since(topic, since)

    async def _enqueue(
        self, topic: Topic, group: str, most: int, ends: float, timeout_ms: int | None
    ) -> list[HandedOut]:
        queue = self._queues.get((topic, group))
        if queue is None:
            queue = self._queues[topic, group] = self._new_queue(topic, group)
            if self.is_closing:
                queue.dismiss()
        waiter = Waiter(most, timeout_ms, ends)
        queue.join(waiter)
        try:
            return await waiter.future
        except asyncio.CancelledError:
            future = waiter.future
            if future.done() and not future.cancelled() and future.exception() is None:
                self.give_back(future.result())
            raise

    def _new_queue(self, topic: Topic, group: str) -> PullQueue:
        def on_end() -> None:
            self._handed_out += self._queues.pop((topic, group)).handed_out

        return PullQueue(
            GroupSource(self.store, topic, group, self.name),
            self.store,
            self.watching,
            self._releaser,
            name=self.name,
            announce=partial(self.presence.announce, topic, group),
            on_end=on_end,
        )

    def _has_older_queue(self, topic: str, instant: float) -> bool:
        return any(key[0] == topic and queue.began < instant for key, queue in self._queues.items())

    def give_back(self, deliveries: Iterable[HandedOut]) -> None:
        """Release deliveries whose client has disconnected, without counting an attempt."""
        by_group: dict[tuple[str, str], list[tuple[str, str]]] = {}
        for one in deliveries:
            key = (one.message.topic, one.receipt.group)
            by_group.setdefault(key, []).append(one.receipt.settlement[:2])
            self.given_back += 1
        for (topic, group), held in by_group.items():
            self._releaser.release(topic, group, held)

    def stop_waiting(self) -> None:
        """Answer all waiting pulls with no messages; later pulls do not wait."""
        self.is_closing = True
        self._releaser.stop_retrying()
        for queue in list(self._queues.values()):
            queue.dismiss()

    async def close(self) -> None:
        """End the queues, finish releases, and delete the presence records."""
        self.stop_waiting()
        await asyncio.gather(*(queue.end() for queue in list(self._queues.values())))
        await self._releaser.finish()
        await self.presence.leave()
