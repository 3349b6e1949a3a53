"""What camellia's clients ask of a queue, in Lisa's transitions.

Its wire format has no receipt: an ack names an id, and settles whichever delivery holds it. This
process remembers the receipts that it handed out lately, so that most acks need no look-up and are
proven; the others look for the holder.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from datetime import timedelta

import uuid_utils

from lisa.core.clock import MAX_DUE_MS, duration_ms
from lisa.core.envelope import fence_of
from lisa.core.errors import DuplicateMessage
from lisa.core.retry_policy import MAX_RETRIES, RetryPolicy
from lisa.core.settings import CamelliaSettings
from lisa.core.transitions.ack import Acked, Settlement
from lisa.core.transitions.cancel import Cancelled
from lisa.core.transitions.enqueue import Sent
from lisa.core.transitions.inspect import Inspection
from lisa.core.transitions.retry import Failed
from lisa.gateway.compat.camellia.clock import Clock
from lisa.gateway.compat.camellia.messages import DelayMsg, Origin, as_found, as_sent, is_alive
from lisa.gateway.hub import Hub
from lisa.gateway.receipts import Receipt
from lisa.gateway.settling import TRIES
from lisa.gateway.waiting import Delivery
from lisa.producer import Outgoing

__all__ = ["Queue"]

MOST_RECEIPTS = 20_000
NO_ENTRY = "0-0"
"""An entry that no stream has: what is settled with it is settled as a late success."""

PARTLY = ("+", "R")
"""Marks of an envelope that one of several groups has settled."""

NACKED = "ackMsg with ack=false"
DELETED = "deleteMsg while it was being handled"


class Queue:
    """The queue of every topic; methods raise LisaError."""

    def __init__(self, hub: Hub, clock: Clock) -> None:
        self._hub = hub
        self._clock = clock
        self._settings: CamelliaSettings = hub.settings.camellia
        self._groups = {
            topic: groups[0] for topic, groups in hub.settings.topics().items() if groups
        }
        self._policies: dict[int, RetryPolicy] = {}
        self._receipts: OrderedDict[tuple[str, str], Receipt] = OrderedDict()

    async def send(
        self, topic: str, text: str, *, message_id: str, delay_ms: int, ttl_ms: int, max_retry: int
    ) -> DelayMsg:
        """Send a message, or find the one that has its id already: it as it stands."""
        message_id = message_id or uuid_utils.uuid7().hex  # in order of their making
        retries = self._settings.max_retry if max_retry < 0 else min(max_retry, MAX_RETRIES)
        for _ in range(TRIES):
            now_us = await self._clock.now_us()
            # Rounded so that it is never early, and that without a delay it is due at once.
            produce_ms = -(-now_us // 1000) if delay_ms > 0 else now_us // 1000
            trigger_ms = produce_ms + max(0, delay_ms)
            wanted_ms = ttl_ms if ttl_ms > 0 else duration_ms(self._settings.ttl)
            lasts_ms = max(1, min(wanted_ms, MAX_DUE_MS - trigger_ms))
            origin = Origin(produce_ms, trigger_ms, lasts_ms, retries)
            sent = await self._hub.sender.offer(
                topic,
                Outgoing(
                    text, id=message_id, at_ms=trigger_ms, ttl=timedelta(milliseconds=lasts_ms),
                    retry=self._policy(retries), headers=origin.header,
                ),
            )  # fmt: skip
            if sent.outcome is not Sent.DUPLICATE:
                return as_sent(topic, message_id, text, origin, is_due=delay_ms <= 0)
            known = await self.get(topic, message_id)
            if known is not None:
                return known
            # Its tombstone has gone between the two calls: now the id is free.
        raise DuplicateMessage(
            f"id {message_id!r} of topic {topic!r} is taken by a message that stands nowhere: its "
            "group is being removed, or `lisa fsck` tells more"
        )

    async def get(self, topic: str, message_id: str) -> DelayMsg | None:
        """A message as it stands; None if it is unknown."""
        seen = await self._hub.settler.look(topic, message_id)
        return as_found(topic, message_id, seen, await self._clock.now_us() // 1000)

    async def delete(self, topic: str, message_id: str) -> bool:
        """Take a message back, also from who handles it: it is not handed out again.

        False if it is unknown or has ended, also if only one of several groups is through with it.
        """
        for _ in range(TRIES):
            seen = await self._look(topic, message_id)
            is_partly_settled = fence_of(seen.envelope)[-1:] in PARTLY
            if is_partly_settled or not is_alive(topic, message_id, seen):
                return False
            # Lisa takes nothing back that is in flight: its delivery fails for good first.
            for place in seen.places:
                if place.state == "in_flight":
                    await self._fail_for_good(topic, message_id, place.group)
            if await self._hub.sender.cancel(topic, message_id) is Cancelled.CANCELLED:
                return True
        return False

    async def settle(self, topic: str, message_id: str, *, handled: bool) -> bool:
        """Ack or nack the delivery that holds an id; False if none does."""
        receipt = self._receipts.get((topic, message_id))
        if handled:
            return await self._ack(topic, message_id, receipt)
        return await self._nack(topic, message_id, receipt)

    def remember(self, topic: str, deliveries: Sequence[Delivery]) -> None:
        """These receipts are in clients' hands now."""
        for one in deliveries:
            key = (topic, one.message.id)
            self._receipts[key] = one.receipt
            self._receipts.move_to_end(key)
        while len(self._receipts) > MOST_RECEIPTS:
            self._receipts.popitem(last=False)

    def _policy(self, retries: int) -> RetryPolicy:
        found = self._policies.get(retries)
        if found is None:
            found = self._policies[retries] = retry_policy(self._settings.retry_delays, retries)
        return found

    async def _look(self, topic: str, message_id: str) -> Inspection:
        return await self._hub.settler.look(topic, message_id, bodies=False)

    async def _fail_for_good(self, topic: str, message_id: str, group: str) -> None:
        await self._hub.settler.retry_by_id(
            topic, message_id, reason=DELETED, delay="discard", group=group
        )

    async def _ack(self, topic: str, message_id: str, receipt: Receipt | None) -> bool:
        settler, group = self._hub.settler, self._groups.get(topic)
        if receipt is not None and await settler.ack(topic, receipt) is not Acked.STALE:
            return True
        outcome = await settler.ack_by_id(topic, message_id, group)
        if outcome is not None and outcome is not Acked.STALE:
            return True
        seen = await self._look(topic, message_id)
        if not seen.places:
            return seen.tombstone is not None and seen.tombstone.state == "acked"
        # A success whose lease has ended: it was handed out before, and is not again yet.
        for place in seen.places:
            was_out = place.state in ("ready", "retry") and place.failed_attempts > 0
            if was_out and place.group == (group or place.group):
                late = Settlement(
                    message_id, NO_ENTRY, fence_of(seen.envelope), place.due_ms or 0,
                    place.failed_attempts,
                )  # fmt: skip
                return await settler.ack(topic, Receipt(place.group, "", late)) is not Acked.STALE
        return False

    async def _nack(self, topic: str, message_id: str, receipt: Receipt | None) -> bool:
        settler = self._hub.settler
        if receipt is not None:
            failed = await settler.retry(topic, receipt, reason=NACKED)
            if failed.outcome is not Failed.STALE:
                return True
        again = await settler.retry_by_id(
            topic, message_id, reason=NACKED, group=self._groups.get(topic)
        )
        return again is not None and again.outcome is not Failed.STALE


def retry_policy(configured: RetryPolicy | None, retries: int) -> RetryPolicy:
    """That many retries: at once, or after the pauses configured, the last for all beyond."""
    if configured is None or not configured.delays_ms:
        return RetryPolicy((0,) * retries)
    delays = configured.delays_ms[:retries]
    more = (configured.delays_ms[-1],) * (retries - len(delays))
    return RetryPolicy(delays + more, configured.jitter)
