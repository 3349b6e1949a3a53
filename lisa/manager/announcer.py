"""Fires the module-wide signals for what a manager moves: a reclaim, a message past its ttl.

Bodies are fetched only where somebody listens, and receivers run on a thread of their own: a slow
one never holds up the queue. What it cannot keep up with, beyond a bound, is not announced.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import queue
import threading
from collections.abc import Sequence

import msgspec
from blinker import Signal

from lisa.core.errors import InvalidMessage
from lisa.core.message import Message
from lisa.core.shards import base
from lisa.core.signals import everywhere
from lisa.core.store import SyncStore, chunks
from lisa.core.transitions.inspect import Inspect, Inspection
from lisa.core.transitions.reclaim import TakenBack
from lisa.core.transitions.retry import Failed

__all__ = ["Announcer"]

LONGEST_QUEUE = 10_000
LEAVE_S = 5.0

log = logging.getLogger(__name__)


class Announcer:
    """Turns moved ids into messages, and hands them to the signals' receivers."""

    def __init__(self, store: SyncStore) -> None:
        self._store = store
        self._queue: queue.Queue[tuple[Signal, Message] | None] = queue.Queue(LONGEST_QUEUE)
        self._thread: threading.Thread | None = None
        self.dropped = 0

    def start(self) -> None:
        """Begin to call receivers."""
        self._thread = threading.Thread(target=self._work, name="lisa-announcer", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Call the receivers of what is left, for a few seconds at most, and end."""
        thread, self._thread = self._thread, None
        if thread is not None:
            try:
                self._queue.put(None, timeout=LEAVE_S)
            except queue.Full:
                return
            thread.join(LEAVE_S)

    def step(self) -> int:
        """Call the receivers of all that waits; answers for how many messages."""
        count = 0
        while not self._queue.empty():
            waiting = self._queue.get()
            if waiting is not None:
                self._fire(*waiting)
                count += 1
        return count

    def failed(self, topic: str, group: str, moved: Sequence[TakenBack]) -> None:
        """Announce reclaimed messages, each with the due time of the attempt that failed."""
        listening = everywhere.retrying.has_receivers_for(base(topic))
        listening |= everywhere.dead.has_receivers_for(base(topic))
        if not listening:
            return
        for some in chunks(moved, self._store.batch_size(topic, Inspect)):
            found = self._store.call(Inspect(topic, [one.id for one in some]))
            for (message_id, due_ms, retried), inspection in zip(some, found, strict=True):
                dead = retried.outcome is Failed.DEAD
                place = next((one for one in inspection.places if one.group == group), None)
                self._put(
                    everywhere.dead if dead else everywhere.retrying, inspection,
                    message_id=message_id, topic=topic, group=group,
                    due_ms=due_ms,
                    attempt=retried.failed_attempts,
                    reason=(place.reason if place else None) or "ack timeout",
                    next_due_ms=retried.due_ms,
                )  # fmt: skip

    def listens_to_expiry(self, topic: str) -> bool:
        """Whether somebody wants to hear of messages past their ttl."""
        return bool(everywhere.expired.has_receivers_for(base(topic)))

    def expired(self, topic: str, message_id: str, before: Inspection) -> None:
        """Announce a message that was ended; `before` is how it stood until then."""
        place = before.places[0] if before.places else None
        due_ms = before.waiting_due_ms or (place.due_ms if place else None)
        groups = self._store.known_groups(topic) or ()
        self._put(
            everywhere.expired, before, message_id=message_id, topic=topic,
            group=place.group if place else groups[0] if len(groups) == 1 else "", due_ms=due_ms,
            attempt=1 + (place.failed_attempts if place else 0), reason="past its ttl",
        )  # fmt: skip

    def _put(
        self, signal: Signal, found: Inspection, *, message_id: str, topic: str, group: str,
        due_ms: int | None, attempt: int, reason: str, next_due_ms: int | None = None,
    ) -> None:  # fmt: skip
        if not found.envelope:
            return  # settled meanwhile: there is nothing left to tell
        try:
            message = Message.from_envelope(
                found.envelope, message_id=message_id, topic=base(topic), group=group,
                due_ms=due_ms or 0, attempt=attempt,
            )  # fmt: skip
        except InvalidMessage as error:
            log.warning("message %r of topic %s is not announced: %s", message_id, topic, error)
            return
        try:
            told = msgspec.structs.replace(message, reason=reason, next_due_ms=next_due_ms)
            self._queue.put_nowait((signal, told))
        except queue.Full:
            self.dropped += 1
            if self.dropped == 1 or self.dropped % LONGEST_QUEUE == 0:
                log.warning("receivers are too slow: %d messages not announced", self.dropped)

    def _work(self) -> None:
        while (waiting := self._queue.get()) is not None:
            self._fire(*waiting)

    def _fire(self, signal: Signal, message: Message) -> None:
        # Signal.send would stop at the first receiver that raises, and refuse coroutines.
        for receiver in list(signal.receivers_for(message.topic)):
            try:
                answer = receiver(message.topic, message=message)
                if inspect.isawaitable(answer):
                    asyncio.run(_awaited(answer))
            except BaseException:  # sys.exit() in a receiver must not end this thread
                log.exception("a receiver of message %r raised", message.id)


async def _awaited(answer: object) -> None:
    if inspect.isawaitable(answer):
        await answer
