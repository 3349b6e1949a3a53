"""Fire the module-wide signals for reclaimed and expired messages.

Bodies are read only if a signal has receivers. Receivers run on a separate thread, so a slow
receiver does not delay the manager. If more than 10,000 messages wait, further signals are dropped.
"""

from __future__ import annotations

import asyncio
import logging
import queue
from collections.abc import Awaitable, Sequence
from typing import Any

import msgspec
from blinker import Signal

from lisa.core.daemon.threads import ServiceThread
from lisa.core.model.envelope import decode_content, token_of
from lisa.core.model.errors import InvalidMessage
from lisa.core.model.keys import shown_id
from lisa.core.model.message import Message
from lisa.core.model.sharding import topic_of
from lisa.core.model.signals import call_receivers, everywhere
from lisa.core.store.store import SyncStore, chunks
from lisa.core.transitions.inspect import Inspect, Inspection
from lisa.core.transitions.lease import ReclaimedMessage
from lisa.core.transitions.retry import Failed
from lisa.core.transitions.upkeep import Expired

LONGEST_QUEUE = 10_000
LEAVE_S = 5.0

log = logging.getLogger(__name__)


class SignalQueue:
    """Reads moved messages and calls the receivers of their signals."""

    def __init__(self, store: SyncStore) -> None:
        self._store = store
        self._queue: queue.Queue[tuple[Signal, Message] | None] = queue.Queue(LONGEST_QUEUE)
        self._thread: ServiceThread | None = None
        self.dropped = 0

    def start(self) -> None:
        """Start the thread that calls receivers."""
        self._thread = ServiceThread("lisa-announcer", self._work)
        self._thread.start()

    def stop(self) -> None:
        """Wait up to 10 s for the thread to call the receivers of queued messages and end."""
        thread, self._thread = self._thread, None
        if thread is not None:
            try:
                self._queue.put(None, timeout=LEAVE_S)
            except queue.Full:
                return
            thread.join(LEAVE_S)

    def threads(self) -> list[ServiceThread]:
        """The thread, for health checks. It runs receivers, so it never counts as stalled."""
        return [self._thread] if self._thread else []

    def step(self) -> int:
        """Call the receivers of all queued messages; returns the number of messages."""
        count = 0
        while not self._queue.empty():
            waiting = self._queue.get()
            if waiting is not None:
                self._fire(*waiting)
                count += 1
        return count

    def failed(self, topic: str, group: str, moved: Sequence[ReclaimedMessage]) -> None:
        """Queue signals for reclaimed messages, each with the due time of the failed attempt."""
        if not _are_heard(topic, everywhere.retrying, everywhere.dead):
            return
        for part in chunks(moved, self._store.batch_size(topic, Inspect)):
            found = self._store.call(Inspect(topic, [message.id for message in part]))
            for (message_id, due_ms, retried), inspection in zip(part, found, strict=True):
                dead = retried.outcome is Failed.DEAD
                reasons = {state.group: state.reason for state in inspection.group_states}
                message = Message(
                    id=message_id,
                    topic=topic,
                    group=group,
                    body=None,
                    due_ms=due_ms or 0,
                    attempt=retried.failed_attempts,
                    reason=reasons.get(group) or "ack timeout",
                    next_due_ms=retried.due_ms,
                )
                signal = everywhere.dead if dead else everywhere.retrying
                self._put(signal, message, inspection.envelope)

    def listens_to_ends(self, topic: str) -> bool:
        """Whether `message_expired` or `message_dead` has receivers for the topic."""
        return _are_heard(topic, everywhere.expired, everywhere.dead)

    def ended(self, topic: str, message_id: str, before: Inspection, how: Expired) -> None:
        """Queue the signal for a message past its ttl, or one that a late policy ended.

        before: its state before it ended. Garbage concerns every group, so each gets a signal.
        """
        state = before.group_states[0] if before.group_states else None
        groups = self._store.known_groups(topic) or ()
        own = state.group if state else groups[0] if len(groups) == 1 else ""
        for group in groups if how is Expired.GARBAGE else (own,):
            message = Message(
                id=message_id,
                topic=topic,
                group=group,
                body=None,
                due_ms=before.waiting_due_ms or (state.due_ms if state else None) or 0,
                attempt=1 + (state.failed_attempts if state else 0),
                reason="past its ttl" if how is Expired.EXPIRED else "too late (late policy)",
            )
            signal = everywhere.dead if how is Expired.GARBAGE else everywhere.expired
            self._put(signal, message, before.envelope)

    def _put(self, signal: Signal, message: Message, envelope: bytes) -> None:
        """Queue the signal; `message` has a shard as its topic, and its body is in `envelope`."""
        if not envelope:
            return  # settled meanwhile; the body no longer exists
        try:
            body, headers = decode_content(envelope)
        except InvalidMessage as error:
            log.warning(
                "no signal for message %r of topic %s: %s",
                shown_id(message.id),
                message.topic,
                error,
            )
            return
        topic = topic_of(message.topic)
        complete = msgspec.structs.replace(
            message, topic=topic, body=body, headers=headers, token=token_of(envelope)
        )
        try:
            self._queue.put_nowait((signal, complete))
        except queue.Full:
            self.dropped += 1
            if self.dropped == 1 or self.dropped % LONGEST_QUEUE == 0:
                log.warning("receivers are too slow: dropped %d signals", self.dropped)

    def _work(self) -> None:
        while (waiting := self._queue.get()) is not None:
            self._fire(*waiting)

    def _fire(self, signal: Signal, message: Message) -> None:
        call_receivers([signal], message, lambda result: asyncio.run(_finish(result)), log)


def _are_heard(shard: str, *signals: Signal) -> bool:
    """Whether any of the signals has receivers for the topic of a shard."""
    return any(signal.has_receivers_for(topic_of(shard)) for signal in signals)


async def _finish(result: Awaitable[Any]) -> None:
    await result
