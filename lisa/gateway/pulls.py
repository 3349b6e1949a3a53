"""All pulls of a gateway process, with one queue for each group of a topic.

A blocking read watches the group's stream, so each new entry wakes a pull immediately: a promotion,
a due retry or a released delivery. Only shards on several nodes are polled. One `pull` call takes
messages for all waiting pulls, and one `open` call opens them. If a client disconnects, its
messages are released without counting an attempt.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import NamedTuple

from lisa.core.daemon.threads import unforeseen
from lisa.core.delivery.group_resolution import join, wait_for_group, was_emptied
from lisa.core.delivery.pace import AHEAD_BYTES
from lisa.core.delivery.source import LOOK_AGAIN_S, MOST, GroupSource, Taken
from lisa.core.model.backoff import FIRST_S, LONGEST_AWAY_S, Backoff
from lisa.core.model.errors import GroupRemoved, LisaError, ServerUnavailable
from lisa.core.model.message import Message
from lisa.core.model.sharding import Shard, Topic, own_shard
from lisa.core.model.stream import Entry
from lisa.core.redis.connection import AsyncConnection
from lisa.core.redis.errors import ClientError, is_full
from lisa.core.redis.flow import Await, Flow
from lisa.core.store import presence
from lisa.core.store.store import AsyncStore, caller, chunks
from lisa.core.transitions.delivery import Pulled
from lisa.core.transitions.lease import Release
from lisa.gateway.settling import Receipt, encode_receipt

log = logging.getLogger("lisa.gateway")

RELEASE_WITHIN_S = 60.0
"""How long to retry a release while the server is unavailable."""

LONGEST_ROUND_S = 5.0

FIRST_PULL_S = 1.0
"""How long the first pull of a topic waits for a manager to declare a group."""

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
"""After a pull has waited for a topic's first group, how long further ones do not."""


class HandedOut(NamedTuple):
    """One message for a client, which settles it by its receipt."""

    message: Message
    receipt: Receipt
    size: int

    @property
    def receipt_text(self) -> str:
        """The receipt in the form that clients get."""
        return encode_receipt(self.receipt)


class Waiter:
    """One waiting pull.

    most: the most deliveries to return.
    ends: when to stop waiting, in `time.monotonic` seconds.
    found: the deliveries so far, while further ones are taken.
    caller: on whose behalf the deliveries are opened, for the journal.
    """

    __slots__ = ("caller", "ends", "found", "future", "most", "timeout_ms")

    def __init__(self, most: int, timeout_ms: int | None, ends: float) -> None:
        self.most = most
        self.timeout_ms = timeout_ms
        self.ends = ends
        self.found: list[HandedOut] = []
        self.caller = caller.get()
        self.future: asyncio.Future[list[HandedOut]] = asyncio.get_running_loop().create_future()

    def is_open(self) -> bool:
        """Whether the pull still waits."""
        return not self.future.done()

    @property
    def missing(self) -> int:
        """How many more deliveries the pull accepts; 0 if it has ended."""
        return self.most - len(self.found) if self.is_open() else 0

    def answer(self) -> None:
        """End the pull with what it has found; does nothing if the pull has ended."""
        if self.is_open():
            self.future.set_result(self.found)

    def fail(self, error: Exception) -> None:
        """End the pull with what it has found, else an error; does nothing if it has ended."""
        if self.found:
            self.answer()
        elif self.is_open():
            self.future.set_exception(error)


class PullQueue:
    """The pulls of one group of a topic, and the task that serves them."""

    def __init__(self, broker: PullBroker, topic: Topic, group: str) -> None:
        self._broker = broker
        self._store = broker.store
        self._source = GroupSource(broker.store, topic, group, broker.name)
        self._topic, self._group = topic, group
        self.began = time.monotonic()
        self._waiters: dict[Waiter, None] = {}  # in order of arrival
        self._changed = asyncio.Event()
        self._watcher: asyncio.Task[None] | None = None
        self._fault: ServerUnavailable | None = None
        self._backoff = Backoff(longest_s=LONGEST_AWAY_S)
        self._task = asyncio.create_task(self._run())

    def join(self, waiter: Waiter) -> None:
        """Add a pull at the end of the queue."""
        self._waiters[waiter] = None
        loop = asyncio.get_running_loop()
        left_s = waiter.ends - time.monotonic()
        waiter.future.add_done_callback(lambda _: self._left(waiter))
        if left_s > 0 and not self._broker.is_closing:
            timer = loop.call_later(left_s, self._expire, waiter)
            waiter.future.add_done_callback(lambda _: timer.cancel())
        if left_s <= 0 or self._watcher is None:
            self._changed.set()

    def _left(self, waiter: Waiter) -> None:
        self._waiters.pop(waiter, None)
        if waiter.future.cancelled():
            self._release(delivery.receipt.settlement[:2] for delivery in waiter.found)
        elif waiter.future.exception() is None:
            self._broker.handed_out += len(waiter.found)

    def dismiss(self) -> None:
        """Answer all waiting pulls with no messages, because the gateway stops."""
        for waiter in list(self._waiters):
            if waiter.ends > time.monotonic():
                waiter.answer()
        self._changed.set()

    async def end(self) -> None:
        """Finish the current round, whose reply may contain messages, and end the task."""
        self._changed.set()
        await asyncio.wait([self._task], timeout=LONGEST_ROUND_S)
        self._task.cancel()
        await asyncio.wait([self._task])

    def _expire(self, waiter: Waiter) -> None:
        if self._fault is not None:
            waiter.fail(self._fault)
        else:
            waiter.answer()

    async def _run(self) -> None:
        caller.set("")  # the task serves all callers, not only the one whose pull started it
        error: Exception = ServerUnavailable("the gateway stops")
        try:
            while not await self._is_idle():
                try:
                    await self._serve()
                except ServerUnavailable as fault:
                    await self._wait_out(fault)
                else:
                    self._fault = None
                    self._backoff.reset()
        except LisaError as fault:
            error = fault
        except Exception as fault:  # noqa: BLE001  passed to the pulls; the next pull starts a new queue
            unforeseen(f"the pulls of {self._topic}", fault)
            error = fault
        finally:
            self._broker.ended(self._topic, self._group)
            if self._watcher is not None:
                self._watcher.cancel()
            for waiter in list(self._waiters):
                waiter.fail(error)

    async def _is_idle(self) -> bool:
        """Whether no pull waits; until the current watch ends, waits for one."""
        while not any(waiter.is_open() for waiter in self._waiters):
            if self._source.may_hold_some and not self._broker.is_closing:
                return False
            if self._watcher is None or self._watcher.done() or self._broker.is_closing:
                return True
            self._changed.clear()
            await self._rest()
        return False

    async def _serve(self) -> None:
        """Take messages for the waiting pulls; if there are none, wait for some."""
        self._changed.clear()
        await self._broker.presence.announce(self._topic, self._group)
        wanted = min(MOST, sum(waiter.missing for waiter in self._waiters))
        if not wanted and not self._source.may_hold_some:
            return
        if self._watcher is not None and self._watcher.done():
            self._watcher = None
        taken = await self._store.drive(self._source.take(wanted))
        if taken.entries:
            await self._hand_out(taken)
            return
        if not wanted:
            return
        now = time.monotonic()
        for waiter in list(self._waiters):
            if waiter.found or waiter.ends <= now or self._broker.is_closing:
                waiter.answer()
        if any(waiter.is_open() for waiter in self._waiters):
            if self._watcher is None:
                self._watcher = asyncio.create_task(self._listen(taken.empty))
            await self._rest()

    async def _listen(self, empty: Mapping[Shard, Pulled]) -> None:
        """Wait until a stream has an undelivered entry, at most for a heartbeat."""
        pause_s, command = self._source.wait_for(empty, BEAT_S)
        if command is None:
            await asyncio.sleep(pause_s)
            return
        try:
            await self._broker.watching.execute(command)
        except ClientError:
            await asyncio.sleep(FIRST_S)  # the next pull reports the error

    async def _rest(self) -> None:
        changed = asyncio.create_task(self._changed.wait())
        waiting = {changed, self._watcher} if self._watcher is not None else {changed}
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            changed.cancel()

    async def _wait_out(self, fault: ServerUnavailable) -> None:
        """Fail the pulls that cannot wait, and pause until the server may answer again."""
        self._fault = fault
        now = time.monotonic()
        for waiter in list(self._waiters):
            if waiter.found or waiter.ends <= now or self._broker.is_closing:
                waiter.fail(fault)
        await asyncio.sleep(self._backoff.take())

    async def _hand_out(self, taken: Taken) -> None:
        """Deal entries to the waiting pulls in order; release those that no pull wants.

        Ends the pulls that got some, unless they want more and the server may have more.
        """
        held = {entry.entry: entry for entry in taken.entries}
        try:
            left, room = iter(taken.entries), AHEAD_BYTES
            may_have_more = taken.call is not None and len(taken.entries) >= taken.call.most
            alike: dict[tuple[int | None, str], list[tuple[Waiter, list[Entry]]]] = {}
            for waiter in [waiter for waiter in self._waiters if waiter.is_open()]:
                mine = list(islice(left, waiter.missing))
                if not mine:
                    break
                alike.setdefault((waiter.timeout_ms, waiter.caller), []).append((waiter, mine))
            for (timeout_ms, name), shares in alike.items():
                dealt = [entry for _, mine in shares for entry in mine]
                caller.set(name)
                opened = await self._open(taken, dealt, timeout_ms, room)
                room -= sum(delivery.size for delivery in opened if delivery is not None)
                both = zip(dealt, opened, strict=False)  # unopened entries are released
                for waiter, mine in shares:
                    for entry, delivery in list(islice(both, len(mine))):
                        if delivery is not None and waiter.is_open():
                            waiter.found.append(delivery)
                        if delivery is None or waiter.is_open():
                            del held[entry.entry]
                    is_full = (
                        not waiter.missing or sum(delivery.size for delivery in waiter.found) > room
                    )
                    if waiter.found and (is_full or not may_have_more):
                        waiter.answer()
                if room <= 0:
                    break
        finally:
            caller.set("")
            self._release((entry.id, entry.entry) for entry in held.values())

    def _release(self, deliveries: Iterable[tuple[str, str]]) -> None:
        self._broker.release(self._topic, self._group, list(deliveries))

    async def _open(
        self, taken: Taken, entries: Sequence[Entry], timeout_ms: int | None, room: int
    ) -> list[HandedOut | None]:
        """The deliveries of the first entries, up to `room` bytes; None if not for a handler."""
        opened = await self._store.drive(self._source.open(taken, entries, timeout_ms, room))
        found: list[HandedOut | None] = []
        for delivery in opened:
            if delivery is None or not delivery.is_for_handler:
                found.append(None)
                continue
            receipt = Receipt(self._group, self._broker.name, delivery.settlement, timeout_ms)
            found.append(HandedOut(delivery.message, receipt, delivery.size))
        await self._store.drive(self._source.settle_unfit(opened))
        return found


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


class PullBroker:
    """All pulls of one gateway process.

    groups: the group to use for topics with several groups if a pull names none.
    """

    def __init__(
        self, store: AsyncStore, watching: AsyncConnection, *, name: str, groups: Mapping[str, str]
    ) -> None:
        self.store = store
        self.watching = watching
        self.name = name
        self.is_closing = False
        self.handed_out = 0
        """The number of deliveries handed to clients."""
        self.given_back = 0
        self.presence = PullPresence(store, name, self._has_older_queue)
        self._default_groups = groups
        self._queues: dict[tuple[str, str], PullQueue] = {}
        self._releases: set[asyncio.Task[None]] = set()
        self._joined: dict[tuple[str, str], tuple[str, float]] = {}  # for `JOIN_AGAIN_S`
        self._joining: dict[tuple[str, str], asyncio.Task[str | None]] = {}
        self._expected: dict[str, float] = {}  # topics whose first group a pull has waited for

    async def pull(
        self,
        topic: str,
        *,
        group: str | None = None,
        most: int = 1,
        wait_s: float = 0.0,
        ack_timeout_ms: int | None = None,
        may_declare: bool = True,
    ) -> list[HandedOut]:
        """Up to `most` deliveries; waits up to `wait_s` for the first (see `first_pull_s`).

        `may_declare`: whether an unknown group is declared; otherwise it raises GroupRemoved.

        Cancel this call if the client disconnects; its deliveries are then released. While the
        server is unavailable, the pull waits, and fails only when its time is up.

        Does not count towards the limit of pulls (see `Shares`). Raises LisaError.
        """
        whole, ends = Topic(topic), time.monotonic() + wait_s
        while True:
            since = time.monotonic()
            try:
                joined = await self._group_for(whole, group, ends, may_declare=may_declare)
                if joined is None:
                    return []
                return await self._enqueue(whole, joined, min(most, MOST), ends, ack_timeout_ms)
            except UnknownGroup:
                raise
            except GroupRemoved:
                for key in [key for key in self._joined if key[0] == topic]:
                    del self._joined[key]
                was_lost = await self._was_emptied(whole, group or "", since, ends)
                if group is not None and not was_lost:
                    raise
                self.presence.announce_again(topic)
                may_declare = True  # the group was declared before

    async def first_pull_s(self, topic: str) -> float:
        """How long a pull that would not wait should wait, since the topic has no group yet.

        Without a group there are no messages to pull; a manager declares the group, and then moves
        the messages that are due. 0 if another pull has waited within the last `EXPECT_AGAIN_S`,
        because no manager declared a group for that pull. Raises LisaError.
        """
        if self.store.known_groups(topic) or await self.store.drive(self.store.groups(topic)):
            return 0.0
        now = time.monotonic()
        if now - self._expected.get(topic, -math.inf) < EXPECT_AGAIN_S:
            return 0.0
        if len(self._expected) >= MOST_REMEMBERED:
            self._expected.clear()
        self._expected[topic] = now
        return FIRST_PULL_S

    async def _group_for(
        self, topic: Topic, group: str | None, ends: float, *, may_declare: bool
    ) -> str | None:
        """The group to pull for; None if the topic has none and the time is up.

        Raises UnknownGroup if the pull may not declare it; LisaError.
        """
        default = self._default_groups.get(topic, "")
        wanted = group or default
        must_exist = not may_declare and wanted != default

        def resolve() -> Flow[str | None]:
            found: str | None = yield Await(self._join(topic, wanted, must_exist=must_exist))
            return found

        return await self.store.drive(
            wait_for_group(
                self.store,
                own_shard(topic),
                self.name,
                resolve,
                lambda: 0.0 if self.is_closing else ends - time.monotonic(),
                announced=lambda is_new: self.presence.remember(topic, is_new=is_new),
                is_patient=True,
            )
        )

    async def _join(self, topic: Topic, wanted: str, *, must_exist: bool) -> str | None:
        """The group that `join` finds: one call for concurrent pulls, cached for `JOIN_AGAIN_S`."""
        known, at = self._joined.get((topic, wanted), ("", -math.inf))
        if time.monotonic() - at < JOIN_AGAIN_S:
            return known
        if must_exist and wanted not in await self.store.drive(self.store.groups(topic)):
            raise UnknownGroup(
                f"group {wanted!r} is not declared on topic {topic!r}; only a token with the scope "
                f"operate declares it by pulling: lisa topic group add {topic} {wanted}"
            )
        task = self._joining.get((topic, wanted))
        if task is None:
            task = asyncio.create_task(self._ask_to_join(topic, wanted))
            self._joining[topic, wanted] = task
            # Retrieves the error, because all pulls that wait for it may have been cancelled.
            task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        return await asyncio.shield(task)

    async def _ask_to_join(self, topic: Topic, wanted: str) -> str | None:
        try:
            found = await self.store.drive(join(self.store, own_shard(topic), wanted))
        finally:
            del self._joining[topic, wanted]
        if found is not None:
            now = time.monotonic()
            if len(self._joined) >= MOST_REMEMBERED:
                self._joined = {
                    key: joined
                    for key, joined in self._joined.items()
                    if now - joined[1] < JOIN_AGAIN_S
                }
            self._joined[topic, wanted] = (found, now)
        return found

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
            queue = self._queues[topic, group] = PullQueue(self, topic, group)
        waiter = Waiter(most, timeout_ms, ends)
        queue.join(waiter)
        try:
            return await waiter.future
        except asyncio.CancelledError:
            future = waiter.future
            if future.done() and not future.cancelled() and future.exception() is None:
                self.give_back(future.result())
            raise

    def ended(self, topic: str, group: str) -> None:
        """Remove the queue of a group, whose task has ended."""
        del self._queues[topic, group]

    def _has_older_queue(self, topic: str, instant: float) -> bool:
        return any(key[0] == topic and queue.began < instant for key, queue in self._queues.items())

    def give_back(self, deliveries: Iterable[HandedOut]) -> None:
        """Release deliveries whose client has disconnected, without counting an attempt."""
        by_group: dict[tuple[str, str], list[tuple[str, str]]] = {}
        for delivery in deliveries:
            key = (delivery.message.topic, delivery.receipt.group)
            by_group.setdefault(key, []).append(delivery.receipt.settlement[:2])
            self.given_back += 1
        for (topic, group), held in by_group.items():
            self.release(topic, group, held)

    def release(self, topic: str, group: str, held: Sequence[tuple[str, str]]) -> None:
        """Start to release (message id, entry id) pairs of one group, without an attempt."""
        if held:
            task = asyncio.create_task(self._release(topic, group, held))
            self._releases.add(task)
            task.add_done_callback(self._releases.discard)

    async def _release(self, topic: str, group: str, held: Sequence[tuple[str, str]]) -> None:
        ends = time.monotonic() + RELEASE_WITHIN_S
        for part in chunks(held, self.store.batch_size(topic, Release)):
            while True:
                try:
                    await self.store.call_by_id(Release(topic, group, part))
                except ServerUnavailable as error:
                    if time.monotonic() < ends and not self.is_closing:
                        await asyncio.sleep(LOOK_AGAIN_S)
                        continue
                    log.warning(
                        "topic %s: %d deliveries were not released; they are redelivered after "
                        "their ack timeout: %s",
                        topic,
                        len(part),
                        error,
                    )
                except LisaError as error:
                    log.warning(
                        "topic %s: %d deliveries were not released; their group was removed: %s",
                        topic,
                        len(part),
                        error,
                    )
                break

    def stop_waiting(self) -> None:
        """Answer all waiting pulls with no messages; later pulls do not wait."""
        self.is_closing = True
        for queue in list(self._queues.values()):
            queue.dismiss()

    async def close(self) -> None:
        """End the queues, finish releases, and delete the presence records."""
        self.stop_waiting()
        await asyncio.gather(*(queue.end() for queue in list(self._queues.values())))
        if self._releases:
            await asyncio.wait(self._releases)
        await self.presence.leave()
