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

from lisa.consumer.heartbeat import FOLLOW_S
from lisa.consumer.joining import ask_for_group, join, was_emptied
from lisa.core import presence
from lisa.core.connection import AsyncConnection
from lisa.core.errors import GroupRemoved, LisaError, ServerUnavailable
from lisa.core.failures import is_full
from lisa.core.shards import PLAIN
from lisa.core.store import AsyncStore, chunks
from lisa.core.transitions.release import Release
from lisa.gateway.line import BEAT_S, FIRST_PAUSE_S, LOOK_AGAIN_S, MOST, Delivery, Line, Waiter
from lisa.gateway.meter import because

__all__ = ["BEAT_S", "MOST", "Crowded", "Delivery", "WaitingRoom"]

log = logging.getLogger("lisa.gateway")

JOIN_AGAIN_S = 20.0
"""A topic that is pulled from is made known to managers again so often."""

MOST_REMEMBERED = 10_000
"""Topics of which something is kept; beyond them only those that are pulled from now."""

RELEASE_WITHIN_S = 60.0
"""How long it is tried to give something back while the server is away."""


class Crowded(Exception):
    """More pulls wait than may; the client is to come again."""

    def __init__(self, said: str) -> None:
        super().__init__(said)
        because("waiting")


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
        self._lines: dict[tuple[str, str], Line] = {}
        self._seen: dict[str, float] = {}
        self._written: dict[str, float] = {}
        self._emptied: dict[str, float] = {}
        self._followed: dict[str, float] = {}
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
                was_lost = await self._was_emptied(topic, group or "", since, ends)
                if group is not None and not was_lost:
                    raise
                self._seen.pop(topic, None)

    async def _was_emptied(self, topic: str, group: str, since: float, ends: float) -> bool:
        """Whether the server has lost all since then: nobody has removed the group."""
        while self._emptied.get(topic, -math.inf) < since:
            try:
                if not await self.store.drive(was_emptied(self.store, topic, self.name, group)):
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
            line = self._lines[topic, group] = Line(self, topic, group)
        waiter = Waiter(most, timeout_ms, ends)
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
                    await self.store.call_by_id(Release(topic, group, some))
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

    async def places(self, topic: str) -> list[str]:
        """Where a topic's messages are, as was known a second ago at most. Raises LisaError."""
        now = time.monotonic()
        if now - self._followed.get(topic, -math.inf) > FOLLOW_S:
            if len(self._followed) >= MOST_REMEMBERED:
                self._followed.clear()
            self._followed[topic] = now
            await self.store.drive(self.store.layout(topic))
        return (self.store.known_layout(topic) or PLAIN).places(topic)

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


def _lately(times: dict[str, float], now: float) -> dict[str, float]:
    return {topic: at for topic, at in times.items() if now - at < JOIN_AGAIN_S}


def _heed(task: asyncio.Task[str | None]) -> None:
    """Whoever asked may have left: then nobody else looks at the error."""
    if not task.cancelled():
        task.exception()
