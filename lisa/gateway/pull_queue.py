"""A queue of pulls for one group of a topic, and the task that serves them in order.

One `pull` call takes messages for all waiting pulls, and one `open` call opens them. While the
group has none, one blocking read watches its stream.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from itertools import islice

from lisa.core.daemon.threads import unforeseen
from lisa.core.delivery.body_size import AHEAD_BYTES
from lisa.core.delivery.source import MOST, GroupSource, Taken
from lisa.core.model.backoff import FIRST_S, LONGEST_AWAY_S, Backoff
from lisa.core.model.errors import LisaError, ServerUnavailable
from lisa.core.model.sharding import Shard
from lisa.core.model.stream import Entry
from lisa.core.redis.connection import AsyncConnection
from lisa.core.redis.errors import ClientError
from lisa.core.store.runner import caller
from lisa.core.store.store import AsyncStore
from lisa.core.transitions.pull import Pulled
from lisa.gateway.pull_presence import BEAT_S
from lisa.gateway.receipts import Receipt
from lisa.gateway.releaser import Releaser
from lisa.gateway.waiter import HandedOut, Waiter

log = logging.getLogger("lisa.gateway")

LONGEST_ROUND_S = 5.0


class PullQueue:
    """The pulls of one group of a topic, and the task that serves them.

    `announce` runs before each round; `on_end` is called once when the queue has ended.
    """

    def __init__(
        self,
        source: GroupSource,
        store: AsyncStore,
        watching: AsyncConnection,
        releaser: Releaser,
        *,
        name: str,
        announce: Callable[[], Awaitable[None]],
        on_end: Callable[[], None],
    ) -> None:
        self._source = source
        self._store = store
        self._watching = watching
        self._releaser = releaser
        self._name = name
        self._announce = announce
        self._on_end = on_end
        self._topic, self._group = source.topic, source.group
        self._is_closing = False
        self.handed_out = 0
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
        if left_s > 0 and not self._is_closing:
            timer = loop.call_later(left_s, self._expire, waiter)
            waiter.future.add_done_callback(lambda _: timer.cancel())
        if left_s <= 0 or self._watcher is None:
            self._changed.set()

    def _left(self, waiter: Waiter) -> None:
        self._waiters.pop(waiter, None)
        if waiter.future.cancelled():
            self._release(one.receipt.settlement[:2] for one in waiter.found)

    def _answer(self, waiter: Waiter) -> None:
        if waiter.is_open():
            self.handed_out += len(waiter.found)
            waiter.answer()

    def _fail(self, waiter: Waiter, error: Exception) -> None:
        """End a pull with an error, or with the deliveries that it already has."""
        if waiter.found:
            self._answer(waiter)
        else:
            waiter.fail(error)

    def dismiss(self) -> None:
        """Answer all waiting pulls with no messages; later pulls do not wait."""
        self._is_closing = True
        for waiter in list(self._waiters):
            if waiter.ends > time.monotonic():
                self._answer(waiter)
        self._changed.set()

    async def end(self) -> None:
        """Finish the current round, whose reply may contain messages, and end the task."""
        self._changed.set()
        await asyncio.wait([self._task], timeout=LONGEST_ROUND_S)
        self._task.cancel()
        await asyncio.wait([self._task])

    def _expire(self, waiter: Waiter) -> None:
        if self._fault is not None:
            self._fail(waiter, self._fault)
        else:
            self._answer(waiter)

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
            self._on_end()
            if self._watcher is not None:
                self._watcher.cancel()
            for waiter in list(self._waiters):
                self._fail(waiter, error)

    async def _is_idle(self) -> bool:
        """Whether no pull waits; until the current watch ends, waits for one."""
        while not any(one.is_open() for one in self._waiters):
            if self._source.may_hold_some and not self._is_closing:
                return False
            if self._watcher is None or self._watcher.done() or self._is_closing:
                return True
            self._changed.clear()
            await self._rest()
        return False

    async def _serve(self) -> None:
        """Take messages for the waiting pulls; if there are none, wait for some."""
        self._changed.clear()
        await self._announce()
        wanted = min(MOST, sum(one.missing for one in self._waiters))
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
            if waiter.found or waiter.ends <= now or self._is_closing:
                self._answer(waiter)
        if any(one.is_open() for one in self._waiters):
            self._watch(taken.empty)
            await self._rest()

    def _watch(self, empty: Mapping[Shard, Pulled]) -> None:
        if self._watcher is None:
            self._watcher = asyncio.create_task(self._listen(empty))

    async def _listen(self, empty: Mapping[Shard, Pulled]) -> None:
        """Wait until a stream has an undelivered entry, at most for a heartbeat."""
        watching = self._watching
        pause_s, command = self._source.wait_for(empty, BEAT_S)
        if command is None:
            await asyncio.sleep(pause_s)
            return
        try:
            await watching.execute(command)
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
            if waiter.found or waiter.ends <= now or self._is_closing:
                self._fail(waiter, fault)
        await asyncio.sleep(self._backoff.take())

    async def _hand_out(self, taken: Taken) -> None:
        """Deal entries to the waiting pulls in order; release those that no pull wants.

        Ends the pulls that got some, unless they want more and the server may have more.
        """
        held = {one.entry: one for one in taken.entries}
        try:
            left, room = iter(taken.entries), AHEAD_BYTES
            may_have_more = taken.call is not None and len(taken.entries) >= taken.call.most
            alike: dict[tuple[int | None, str], list[tuple[Waiter, list[Entry]]]] = {}
            for waiter in [one for one in self._waiters if one.is_open()]:
                mine = list(islice(left, waiter.missing))
                if not mine:
                    break
                alike.setdefault((waiter.timeout_ms, waiter.caller), []).append((waiter, mine))
            for (timeout_ms, name), some in alike.items():
                dealt = [entry for _, mine in some for entry in mine]
                caller.set(name)
                opened = await self._open(taken, dealt, timeout_ms, room)
                room -= sum(one.size for one in opened if one is not None)
                both = zip(dealt, opened, strict=False)  # unopened entries are released
                for waiter, mine in some:
                    for entry, one in list(islice(both, len(mine))):
                        if one is not None and waiter.is_open():
                            waiter.found.append(one)
                        if one is None or waiter.is_open():
                            del held[entry.entry]
                    is_full = not waiter.missing or sum(one.size for one in waiter.found) > room
                    if waiter.found and (is_full or not may_have_more):
                        self._answer(waiter)
                if room <= 0:
                    break
        finally:
            caller.set("")
            self._release((one.id, one.entry) for one in held.values())

    def _release(self, deliveries: Iterable[tuple[str, str]]) -> None:
        if pairs := list(deliveries):
            self._releaser.release(self._topic, self._group, pairs)

    async def _open(
        self, taken: Taken, entries: Sequence[Entry], timeout_ms: int | None, room: int
    ) -> list[HandedOut | None]:
        """The deliveries of the first entries, up to `room` bytes; None if not for a handler."""
        opened = await self._store.drive(self._source.open(taken, entries, timeout_ms, room))
        found: list[HandedOut | None] = []
        for one in opened:
            if one is None or not one.is_for_handler:
                found.append(None)
                continue
            receipt = Receipt(self._group, self._name, one.settlement, timeout_ms)
            found.append(HandedOut(one.message, receipt, one.size))
        await self._store.drive(self._source.settle_unfit(opened))
        return found
