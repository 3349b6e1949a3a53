"""One line of pulls: those of one group of a topic, in their order, and the task that serves them.

Whoever is at its head is served first, with one `pull` for as many as the line wants and one `open`
for what came. While there is nothing, one blocking read watches the group's stream.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from lisa.consumer.heartbeat import FOLLOW_S
from lisa.consumer.opening import settlement_of, unpack
from lisa.core import presence
from lisa.core.errors import GroupRemoved, LisaError, ServerUnavailable
from lisa.core.failures import ClientError
from lisa.core.message import Message
from lisa.core.store import chunks
from lisa.core.stream import Entry
from lisa.core.transitions.ack import Ack, Settlement
from lisa.core.transitions.declare import Declare
from lisa.core.transitions.open import Open
from lisa.core.transitions.pull import Pull, Pulled
from lisa.core.transitions.retry import Failure
from lisa.core.transitions.retry import Retry as Fail
from lisa.gateway.receipts import Receipt, encode_receipt

if TYPE_CHECKING:
    from lisa.gateway.waiting import WaitingRoom

__all__ = ["BEAT_S", "FIRST_PAUSE_S", "LOOK_AGAIN_S", "MOST", "Delivery", "Line", "Waiter"]

log = logging.getLogger("lisa.gateway")

MOST = 500
"""Messages that one pull takes at most."""

BEAT_S = presence.BEAT.total_seconds()
LOOK_AGAIN_S = 0.5
BETWEEN_NODES_S = 0.05
"""How often the shards of a topic on several nodes are asked in turn."""
FIRST_PAUSE_S = 0.02
LONGEST_ROUND_S = 5.0

MOST_BYTES = 16 * 1024 * 1024
"""Bodies of one hand-out, together, unless a single one is larger: they all stand in memory."""

WEIGHED_FROM = 8
"""So few messages are opened without asking how large they are."""


class Delivery(NamedTuple):
    """One message in a client's hands."""

    message: Message
    receipt: Receipt
    size: int

    @property
    def receipt_text(self) -> str:
        """The receipt as the client gets it."""
        return encode_receipt(self.receipt)


class Waiter:
    """One pull: how much it wants, until when, and what it got."""

    __slots__ = ("ends", "future", "most", "timeout_ms")

    def __init__(self, most: int, timeout_ms: int | None, ends: float) -> None:
        self.most = most
        self.timeout_ms = timeout_ms
        self.ends = ends
        self.future: asyncio.Future[list[Delivery]] = asyncio.get_running_loop().create_future()

    def is_open(self) -> bool:
        """Whether it still waits."""
        return not self.future.done()

    def answer(self, found: list[Delivery]) -> None:
        """Give it what it waits for, or nothing; one that has left is passed over."""
        if self.is_open():
            self.future.set_result(found)

    def fail(self, error: Exception) -> None:
        """End it with an error."""
        if self.is_open():
            self.future.set_exception(error)


class Line:
    """The pulls of one group of a topic, and the task that serves them."""

    def __init__(self, room: WaitingRoom, topic: str, group: str) -> None:
        self._room = room
        self._store = room.store
        self._topic = topic
        self._group = group
        self.began = time.monotonic()
        self._waiters: dict[Waiter, None] = {}  # in the order of their coming
        self._nudge = asyncio.Event()
        self._bell: asyncio.Task[None] | None = None
        self._fault: ServerUnavailable | None = None
        self._pause = FIRST_PAUSE_S
        self._turn = 0
        self._task = asyncio.create_task(self._run())

    def join(self, waiter: Waiter) -> None:
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

    def _time_is_up(self, waiter: Waiter) -> None:
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
        places, empty = await self._room.places(self._topic), dict[str, Pulled]()
        self._turn += 1
        for i in range(len(places)):  # each comes first in its turn
            place = places[(i + self._turn) % len(places)]
            pulled = await self._pull(place, wanted)
            if pulled.entries:
                await self._hand_out(place, pulled.entries)
                return
            empty[place] = pulled
        now = time.monotonic()
        for waiter in list(self._waiters):
            if waiter.ends <= now or self._room.is_closing:
                waiter.answer([])
        if any(one.is_open() for one in self._waiters):
            self._watch(empty)
            await self._rest()

    async def _pull(self, place: str, wanted: int) -> Pulled:
        wanted = min(wanted, self._store.batch_size(place, Pull))
        call = Pull(place, self._group, self._room.name, wanted)
        try:
            return await self._store.call(call)
        except GroupRemoved:
            whole = self._topic
            if whole == place or self._group not in await self._store.drive(
                self._store.groups(whole)
            ):
                raise
            await self._store.call(Declare(place, self._group))  # it is just being told of it
            return await self._store.call(call)

    def _watch(self, empty: Mapping[str, Pulled]) -> None:
        if self._bell is None:
            self._bell = asyncio.create_task(self._listen(empty))

    async def _listen(self, empty: Mapping[str, Pulled]) -> None:
        """Until a stream has an entry that nobody was given; not beyond a beat."""
        if any(pulled.paused for pulled in empty.values()):
            await asyncio.sleep(LOOK_AGAIN_S)
            return
        is_split, block_s = len(empty) > 1, BEAT_S
        if is_split:  # another place may come up
            block_s = FOLLOW_S
            if self._room.watching.address.kind == "cluster":  # a read waits at one node
                await asyncio.sleep(BETWEEN_NODES_S)
                return
        streams = [self._store.keys.topic(place).group(self._group).ready for place in empty]
        seen = [pulled.last_id or "$" for pulled in empty.values()]
        try:
            await self._room.watching.execute(
                ("XREAD", "COUNT", 1, "BLOCK", math.ceil(block_s * 1000),
                 "STREAMS", *streams, *seen)
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

    async def _hand_out(self, place: str, entries: list[Entry]) -> None:
        """Deal entries to those who wait, in order; what nobody wants any more goes back."""
        held = {one.entry: one for one in entries}
        try:
            left = iter(await self._within_reach(place, entries))
            by_timeout: dict[int | None, list[tuple[Waiter, list[Entry]]]] = {}
            for waiter in [one for one in self._waiters if one.is_open()]:
                mine = list(islice(left, waiter.most))
                if not mine:
                    break
                by_timeout.setdefault(waiter.timeout_ms, []).append((waiter, mine))
            for timeout_ms, some in by_timeout.items():
                dealt = [entry for _, mine in some for entry in mine]
                opened = iter(await self._open(place, dealt, timeout_ms))
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

    async def _within_reach(self, place: str, entries: list[Entry]) -> list[Entry]:
        """As many as memory is to hold at once."""
        if len(entries) <= WEIGHED_FROM:
            return entries
        body = self._store.keys.topic(place).body
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
        self, place: str, entries: Sequence[Entry], timeout_ms: int | None
    ) -> list[Delivery | None]:
        """The deliveries behind entries; None where there is nothing to hand out."""
        found: list[Delivery | None] = []
        for some in chunks(entries, self._store.batch_size(place, Open)):
            opened = await self._store.call(Open(place, self._group, some, timeout_ms))
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
                await self._store.call(Fail(place, self._group, failed))
            if expired:
                await self._store.call(Ack(place, self._group, expired, "expired"))
        return found
