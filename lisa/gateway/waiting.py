"""Pulls that wait, and the messages that wake them.

All pulls of one group of a topic stand in one line, in their order. Whoever is at its head is
served first, with one `pull` for as many as the line wants and one `open` for what came. While
there is nothing, one blocking read watches the group's stream, whoever adds to it: a promotion, a
retry that falls due, a delivery that was given back. So a message wakes a pull at once, with any
number of gateways, and no timer looks for it.

Nothing is taken that nobody waits for; what was, since a client left or its time ran out, is given
back at once, no attempt counted.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import socket
import time
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import NamedTuple

from lisa.consumer.joining import ask_for_group, is_emptied, join
from lisa.consumer.opening import settlement_of, unpack
from lisa.core import presence
from lisa.core.connection import AsyncConnection
from lisa.core.errors import GroupRemoved, LisaError, ServerUnavailable
from lisa.core.failures import ClientError, is_full
from lisa.core.message import Message
from lisa.core.store import AsyncStore, chunks
from lisa.core.stream import Entry
from lisa.core.transitions.ack import Ack, Settlement
from lisa.core.transitions.open import Open
from lisa.core.transitions.pull import Pull, Pulled
from lisa.core.transitions.release import Release
from lisa.core.transitions.retry import Failure
from lisa.core.transitions.retry import Retry as Fail
from lisa.gateway.meter import because
from lisa.gateway.receipts import Receipt, encode_receipt

__all__ = ["MOST", "Crowded", "Delivery", "WaitingRoom"]

log = logging.getLogger("lisa.gateway")

MOST = 500
"""Messages that one pull takes at most."""

BEAT_S = presence.BEAT.total_seconds()
LOOK_AGAIN_S = 0.5
FIRST_PAUSE_S = 0.02
JOIN_AGAIN_S = 20.0
"""A topic that is pulled from is made known to managers again so often."""

MOST_REMEMBERED = 10_000
"""Topics of which something is kept; beyond them only those that are pulled from now."""

MOST_BYTES = 16 * 1024 * 1024
"""Bodies of one hand-out, together, unless a single one is larger: they all stand in memory."""

LONGEST_ROUND_S = 5.0
RELEASE_WITHIN_S = 60.0
"""How long it is tried to give something back while the server is away."""

WEIGHED_FROM = 8
"""So few messages are opened without asking how large they are."""


class Crowded(Exception):
    """More pulls wait than may; the client is to come again."""

    def __init__(self, said: str) -> None:
        super().__init__(said)
        because("waiting")


class Delivery(NamedTuple):
    """One message in a client's hands."""

    message: Message
    receipt: Receipt
    size: int

    @property
    def receipt_text(self) -> str:
        """The receipt as the client gets it."""
        return encode_receipt(self.receipt)


class _Waiter:
    """One pull: how much it wants, until when, and what it got."""

    __slots__ = ("ends", "future", "most", "timeout_ms")

    def __init__(self, most: int, timeout_ms: int | None, ends: float) -> None:
        self.most = most
        self.timeout_ms = timeout_ms
        self.ends = ends
        self.future: asyncio.Future[list[Delivery]] = asyncio.get_running_loop().create_future()

    def is_open(self) -> bool:
        return not self.future.done()

    def answer(self, found: list[Delivery]) -> None:
        if self.is_open():
            self.future.set_result(found)

    def fail(self, error: Exception) -> None:
        if self.is_open():
            self.future.set_exception(error)


class WaitingRoom:
    """All pulls of one gateway process.

    `groups` names the group of topics that have several, where a pull names none.
    """

    def __init__(
        self,
        store: AsyncStore,
        watching: AsyncConnection,
        *,
        name: str,
        most_pulls: int,
        groups: dict[str, str] | None = None,
    ) -> None:
        self.store = store
        self.watching = watching
        self.name = name
        self._most_pulls = most_pulls
        self._named = groups or {}
        self._known: dict[tuple[str, str], tuple[str, float]] = {}
        self._joining: dict[tuple[str, str], asyncio.Task[str | None]] = {}
        self._lines: dict[tuple[str, str], _Line] = {}
        self._seen: dict[str, float] = {}
        self._written: dict[str, float] = {}
        self._emptied: dict[str, float] = {}
        self._behind: set[asyncio.Task[None]] = set()
        self._started_ms = time.time_ns() // 1_000_000
        self.waiting = 0
        self.is_closing = False
        self.handed_out = 0
        self.given_back = 0

    async def pull(
        self,
        topic: str,
        *,
        group: str | None = None,
        most: int = 1,
        wait_s: float = 0.0,
        ack_timeout_ms: int | None = None,
    ) -> list[Delivery]:
        """At most `most` deliveries; waits up to `wait_s` for the first.

        Cancel it when the client has left: what was taken for it goes back. While the server is
        away a pull that may wait does; it fails only when its time is up.

        Raises Crowded, LisaError.
        """
        if self.waiting >= self._most_pulls:
            raise Crowded(f"{self.waiting} pulls wait already")
        self.waiting += 1
        try:
            return await self.take(topic, group, min(most, MOST), wait_s, ack_timeout_ms)
        finally:
            self.waiting -= 1

    async def take(
        self,
        topic: str,
        group: str | None,
        most: int,
        wait_s: float,
        timeout_ms: int | None = None,
    ) -> list[Delivery]:
        """The same for the gateway's own work, which is no client's pull: it is bounded elsewhere.

        Raises LisaError.
        """
        ends = time.monotonic() + wait_s
        while True:
            since = time.monotonic()
            try:
                joined = await self._join(topic, group, ends)
                if joined is None:
                    return []
                return await self._stand_in_line(topic, joined, most, ends, timeout_ms)
            except GroupRemoved:
                self._forget(topic)
                was_emptied = await self._is_emptied(topic, since, ends)
                if group is not None and not was_emptied:
                    raise
                self._seen.pop(topic, None)

    async def _is_emptied(self, topic: str, since: float, ends: float) -> bool:
        """Whether the server has lost all since then: nobody has removed the group."""
        while self._emptied.get(topic, -math.inf) < since:
            try:
                if not await self.store.drive(is_emptied(self.store, topic, self.name)):
                    break
                self._mark_emptied(topic)
            except ServerUnavailable:
                if time.monotonic() >= ends or self.is_closing:
                    raise
                await asyncio.sleep(LOOK_AGAIN_S)
        return self._emptied.get(topic, -math.inf) >= since

    def _mark_emptied(self, topic: str) -> None:
        """For all who wait: whoever asks the server later finds what was written anew."""
        if len(self._emptied) >= MOST_REMEMBERED:
            self._emptied.clear()
        self._emptied[topic] = time.monotonic()

    async def _stand_in_line(
        self, topic: str, group: str, most: int, ends: float, timeout_ms: int | None
    ) -> list[Delivery]:
        line = self._lines.get((topic, group))
        if line is None:
            line = self._lines[topic, group] = _Line(self, topic, group)
        waiter = _Waiter(most, timeout_ms, ends)
        line.join(waiter)
        try:
            return await waiter.future
        except asyncio.CancelledError:
            future = waiter.future
            if future.done() and not future.cancelled() and future.exception() is None:
                self.give_back(future.result())
            raise

    def give_back(self, deliveries: Iterable[Delivery]) -> None:
        """See that deliveries whose client has left go to the next, no attempt counted."""
        by_line: dict[tuple[str, str], list[tuple[str, str]]] = {}
        for one in deliveries:
            line = (one.message.topic, one.receipt.group)
            by_line.setdefault(line, []).append(one.receipt.settlement[:2])
            self.given_back += 1
        for (topic, group), held in by_line.items():
            self.release(topic, group, held)

    def release(self, topic: str, group: str, held: Sequence[tuple[str, str]]) -> None:
        """The same for (id, entry) pairs of one group."""
        task = asyncio.create_task(self._release(topic, group, held))
        self._behind.add(task)
        task.add_done_callback(self._behind.discard)

    async def _release(self, topic: str, group: str, held: Sequence[tuple[str, str]]) -> None:
        ends = time.monotonic() + RELEASE_WITHIN_S
        for some in chunks(held, self.store.batch_size(topic, Release)):
            while True:
                try:
                    await self.store.call(Release(topic, group, some))
                except ServerUnavailable as error:
                    if time.monotonic() < ends and not self.is_closing:
                        await asyncio.sleep(LOOK_AGAIN_S)
                        continue
                    log.warning("%d deliveries of %s come back by their ack timeout only: %s",
                                len(some), topic, error)  # fmt: skip
                except LisaError as error:
                    log.warning("%d deliveries of %s went with their group: %s",
                                len(some), topic, error)  # fmt: skip
                break

    async def _join(self, topic: str, group: str | None, ends: float) -> str | None:
        """The group to pull for; None if the topic has none and the time is up."""
        asked, pause = -math.inf, FIRST_PAUSE_S
        while True:
            try:
                found = await self._joined(topic, group or self._named.get(topic, ""))
                if found is None and time.monotonic() - asked >= BEAT_S:
                    flow = ask_for_group(self.store, topic, self.name)
                    self._remember(topic, -math.inf, is_new=await self.store.drive(flow))
                    asked = time.monotonic()
            except ServerUnavailable:
                if time.monotonic() >= ends or self.is_closing:
                    raise
                found = None
            if found is not None:
                return found
            left_s = ends - time.monotonic()
            if left_s <= 0 or self.is_closing:
                return None
            await asyncio.sleep(min(pause, left_s))
            pause = min(2 * pause, LOOK_AGAIN_S)

    async def _joined(self, topic: str, wanted: str) -> str | None:
        """What `join` answers: asked once for all who come together, and now and then again."""
        known, at = self._known.get((topic, wanted), ("", -math.inf))
        if time.monotonic() - at < JOIN_AGAIN_S:
            return known
        task = self._joining.get((topic, wanted))
        if task is None:
            task = asyncio.create_task(self._ask_to_join(topic, wanted))
            self._joining[topic, wanted] = task
            task.add_done_callback(_heed)
        return await asyncio.shield(task)

    async def _ask_to_join(self, topic: str, wanted: str) -> str | None:
        try:
            found = await self.store.drive(join(self.store, topic, wanted))
        finally:
            del self._joining[topic, wanted]
        if found is not None:
            self._known[topic, wanted] = (found, time.monotonic())
        return found

    def _forget(self, topic: str) -> None:
        for key in [key for key in self._known if key[0] == topic]:
            del self._known[key]

    async def announce(self, topic: str, group: str) -> None:
        """Be seen as a consumer of this topic, as long as somebody pulls."""
        now = time.monotonic()
        if now - self._seen.get(topic, -math.inf) < BEAT_S:
            return
        record = presence.ConsumerPresence(
            name=self.name, topic=topic, group=group, host=socket.gethostname(), pid=os.getpid(),
            started_ms=self._started_ms,
        )  # fmt: skip
        is_new = False
        try:
            is_new = await self.store.drive(presence.announce_consumer(self.store, record))
        except ServerUnavailable as error:
            # A full server takes no record; nothing depends on it, and pulls drain the server.
            if not is_full(error.__cause__):
                raise
        self._remember(topic, now, is_new=is_new)

    def _remember(self, topic: str, seen: float, *, is_new: bool) -> None:
        before = self._written.get(topic, -math.inf)
        if is_new and any(
            key[0] == topic and line.began < before for key, line in self._lines.items()
        ):
            self._mark_emptied(topic)  # a line that goes on had renewed its record in time
        if len(self._written) >= MOST_REMEMBERED:
            self._forget_idle(time.monotonic())
        self._seen[topic] = seen
        self._written[topic] = time.monotonic()

    def _forget_idle(self, now: float) -> None:
        self._seen = _lately(self._seen, now)
        self._written = _lately(self._written, now)
        self._known = {key: one for key, one in self._known.items() if now - one[1] < JOIN_AGAIN_S}

    def leave_line(self, topic: str, group: str) -> None:
        """A line has ended: nobody stands in it."""
        del self._lines[topic, group]

    def stop_waiting(self) -> None:
        """Answer every pull that waits, with nothing; later ones do not wait."""
        self.is_closing = True
        for line in list(self._lines.values()):
            line.dismiss()

    async def close(self) -> None:
        """End the lines, finish what is given back, take our records away."""
        self.stop_waiting()
        await asyncio.gather(*(line.end() for line in list(self._lines.values())))
        if self._behind:
            await asyncio.wait(self._behind)
        for topic in list(self._seen):
            try:
                await self.store.drive(presence.leave_consumer(self.store, topic, self.name))
            except ServerUnavailable:
                break  # for the others, too: managers forget the records of who is gone
            except LisaError:
                continue
        self._seen.clear()


class _Line:
    """The pulls of one group of a topic, and the task that serves them."""

    def __init__(self, room: WaitingRoom, topic: str, group: str) -> None:
        self._room = room
        self._store = room.store
        self._topic = topic
        self._group = group
        self.began = time.monotonic()
        self._waiters: dict[_Waiter, None] = {}  # in the order of their coming
        self._nudge = asyncio.Event()
        self._bell: asyncio.Task[None] | None = None
        self._fault: ServerUnavailable | None = None
        self._pause = FIRST_PAUSE_S
        self._task = asyncio.create_task(self._run())

    def join(self, waiter: _Waiter) -> None:
        """Stand at the end of the line."""
        self._waiters[waiter] = None
        loop = asyncio.get_running_loop()
        left_s = waiter.ends - time.monotonic()
        waiter.future.add_done_callback(lambda _: self._waiters.pop(waiter, None))
        if left_s > 0 and not self._room.is_closing:
            timer = loop.call_later(left_s, self._time_is_up, waiter)
            waiter.future.add_done_callback(lambda _: timer.cancel())
        if left_s <= 0 or self._bell is None:
            self._nudge.set()

    def dismiss(self) -> None:
        """Answer all with nothing."""
        for waiter in list(self._waiters):
            if waiter.ends > time.monotonic():
                waiter.answer([])
        self._nudge.set()

    async def end(self) -> None:
        """Finish the round under way: a reply that was not waited for could hold messages."""
        self._nudge.set()
        await asyncio.wait([self._task], timeout=LONGEST_ROUND_S)
        self._task.cancel()
        await asyncio.wait([self._task])

    def _time_is_up(self, waiter: _Waiter) -> None:
        if self._fault is not None:
            waiter.fail(self._fault)
        else:
            waiter.answer([])

    async def _run(self) -> None:
        error: Exception = ServerUnavailable("the gateway stops")
        try:
            while not await self._is_deserted():
                try:
                    await self._serve()
                except ServerUnavailable as fault:
                    await self._sit_out(fault)
                else:
                    self._fault, self._pause = None, FIRST_PAUSE_S
        except LisaError as fault:
            error = fault
        except Exception as fault:
            log.exception("the pulls of %s end", self._topic)
            error = fault
        finally:
            self._room.leave_line(self._topic, self._group)
            if self._bell is not None:
                self._bell.cancel()
            for waiter in list(self._waiters):
                waiter.fail(error)

    async def _is_deserted(self) -> bool:
        """Nobody waits: stay for as long as the watch goes on, since somebody may come again."""
        while not any(one.is_open() for one in self._waiters):
            if self._bell is None or self._bell.done() or self._room.is_closing:
                return True
            self._nudge.clear()
            await self._rest()
        return False

    async def _serve(self) -> None:
        """One round: take what is there for those who wait, else wait for more."""
        self._nudge.clear()
        await self._room.announce(self._topic, self._group)
        wanted = min(MOST, sum(one.most for one in self._waiters if one.is_open()))
        if not wanted:
            return
        if self._bell is not None and self._bell.done():
            self._bell = None
        pulled = await self._store.call(Pull(self._topic, self._group, self._room.name, wanted))
        if pulled.entries:
            await self._hand_out(pulled.entries)
            return
        now = time.monotonic()
        for waiter in list(self._waiters):
            if waiter.ends <= now or self._room.is_closing:
                waiter.answer([])
        if any(one.is_open() for one in self._waiters):
            self._watch(pulled)
            await self._rest()

    def _watch(self, pulled: Pulled) -> None:
        if self._bell is None:
            self._bell = asyncio.create_task(self._listen(pulled))

    async def _listen(self, pulled: Pulled) -> None:
        """Until the stream has an entry that nobody was given; not beyond a beat."""
        if pulled.paused:
            await asyncio.sleep(LOOK_AGAIN_S)
            return
        stream = self._store.keys.topic(self._topic).group(self._group).ready
        try:
            await self._room.watching.execute(
                ("XREAD", "COUNT", 1, "BLOCK", math.ceil(BEAT_S * 1000),
                 "STREAMS", stream, pulled.last_id or "$")
            )  # fmt: skip
        except ClientError:
            await asyncio.sleep(FIRST_PAUSE_S)  # the next pull is repeated with patience, and tells

    async def _rest(self) -> None:
        nudge = asyncio.create_task(self._nudge.wait())
        waiting = {nudge, self._bell} if self._bell is not None else {nudge}
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            nudge.cancel()

    async def _sit_out(self, fault: ServerUnavailable) -> None:
        """The server is away: who cannot wait hears so, the others stay."""
        self._fault = fault
        now = time.monotonic()
        for waiter in list(self._waiters):
            if waiter.ends <= now or self._room.is_closing:
                waiter.fail(fault)
        await asyncio.sleep(self._pause)
        self._pause = min(2 * self._pause, LOOK_AGAIN_S)

    async def _hand_out(self, entries: list[Entry]) -> None:
        """Deal entries to those who wait, in order; what nobody wants any more goes back."""
        held = {one.entry: one for one in entries}
        try:
            left = iter(await self._within_reach(entries))
            by_timeout: dict[int | None, list[tuple[_Waiter, list[Entry]]]] = {}
            for waiter in [one for one in self._waiters if one.is_open()]:
                mine = list(islice(left, waiter.most))
                if not mine:
                    break
                by_timeout.setdefault(waiter.timeout_ms, []).append((waiter, mine))
            for timeout_ms, some in by_timeout.items():
                dealt = [entry for _, mine in some for entry in mine]
                opened = iter(await self._open(dealt, timeout_ms))
                for waiter, mine in some:
                    found = [one for one in islice(opened, len(mine)) if one is not None]
                    if waiter.is_open() and found:
                        waiter.answer(found)
                        self._room.handed_out += len(found)
                        gone = mine
                    else:
                        known = {one.receipt.settlement.entry for one in found}
                        gone = [one for one in mine if one.entry not in known]
                    for one in gone:
                        del held[one.entry]
        finally:
            if held:
                pairs = [(one.id, one.entry) for one in held.values()]
                self._room.release(self._topic, self._group, pairs)

    async def _within_reach(self, entries: list[Entry]) -> list[Entry]:
        """As many as memory is to hold at once."""
        if len(entries) <= WEIGHED_FROM:
            return entries
        body = self._store.keys.topic(self._topic).body
        sizes = await self._store.drive(
            self._store.commands([("STRLEN", body(one.id)) for one in entries])
        )
        total = 0
        for i, size in enumerate(sizes):
            total += size
            if total > MOST_BYTES and i:
                return entries[:i]
        return entries

    async def _open(
        self, entries: Sequence[Entry], timeout_ms: int | None
    ) -> list[Delivery | None]:
        """The deliveries behind entries; None where there is nothing to hand out."""
        found: list[Delivery | None] = []
        for some in chunks(entries, self._store.batch_size(self._topic, Open)):
            opened = await self._store.call(Open(self._topic, self._group, some, timeout_ms))
            failed: list[Failure] = []
            expired: list[Settlement] = []
            for entry, data, is_past in zip(some, opened.envelopes, opened.past_ttl, strict=True):
                if data is None:
                    found.append(None)
                    continue
                message, fault = unpack(self._topic, self._group, entry, data)
                settlement = settlement_of(message, entry.entry, data, opened.now_us)
                if fault:
                    failed.append(Failure(entry.id, entry.entry, fault, "discard"))
                elif is_past:
                    expired.append(settlement)
                if fault or is_past:
                    found.append(None)
                    continue
                receipt = Receipt(self._group, self._room.name, settlement, timeout_ms)
                found.append(Delivery(message, receipt, len(data)))
            if failed:
                await self._store.call(Fail(self._topic, self._group, failed))
            if expired:
                await self._store.call(Ack(self._topic, self._group, expired, "expired"))
        return found


def _lately(times: dict[str, float], now: float) -> dict[str, float]:
    return {topic: at for topic, at in times.items() if now - at < JOIN_AGAIN_S}


def _heed(task: asyncio.Task[str | None]) -> None:
    """Whoever asked may have left: then nobody else looks at the error."""
    if not task.cancelled():
        task.exception()
