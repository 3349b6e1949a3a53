"""Camellia's queue operations, in terms of Lisa's transitions."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import lru_cache
from itertools import pairwise

import msgspec
import uuid_utils

from lisa.admin.reading import ask_all
from lisa.admin.topics import TOPICS_PER_STEP, exists
from lisa.core.model.clock import MAX_DUE_MS, duration_ms
from lisa.core.model.envelope import fence_of
from lisa.core.model.errors import DuplicateMessage
from lisa.core.model.options import encode
from lisa.core.model.retry_policy import MAX_RETRIES, RetryPolicy
from lisa.core.model.sharding import Topic
from lisa.core.redis.flow import Command, Flow
from lisa.core.settings import CamelliaSettings
from lisa.core.store.store import AsyncStore, Store, chunks
from lisa.core.transitions.ack import Acked, Settlement
from lisa.core.transitions.base import text
from lisa.core.transitions.change import Cancelled
from lisa.core.transitions.enqueue import OnDuplicate, Sent
from lisa.core.transitions.retry import Failed
from lisa.core.transitions.topic import Configure
from lisa.gateway.compat.camellia.wire import DelayMsg, Origin, as_found, as_sent, is_alive
from lisa.gateway.context import GatewayContext, RedisClock
from lisa.gateway.pulls import HandedOut
from lisa.gateway.settling import TRIES, Receipt
from lisa.producer import Outgoing

LOOK_AGAIN_S = 60.0
MOST_KNOWN = 10_000

_MINUTE, _HOUR, _DAY = 60_000, 3_600_000, 86_400_000
_ENDS = {
    "1min": _MINUTE,
    "10min": 10 * _MINUTE,
    "30min": 30 * _MINUTE,
    "1hour": _HOUR,
    "6hour": 6 * _HOUR,
    "1day": _DAY,
    "7day": 7 * _DAY,
    "30day": 30 * _DAY,
}
"""Boundaries between the bands of delays; a message on a boundary is in the later band."""

_BANDS = tuple(pairwise(("0", *_ENDS, "Infinite")))
_SIZES = tuple(f"sizeOf{start}To{end}" for start, end in _BANDS)

BANDS = tuple(f"size_{start}_{end}".lower() for start, end in _BANDS)
"""The bands' names in metrics, in order."""

MOST_RECEIPTS = 20_000

NO_ENTRY = "0-0"
"""An entry that is in no stream; an ack with it counts as late."""

PARTLY = ("+", "R")
"""Fence suffixes of an envelope that at least one of several groups has settled."""

NACKED = "ackMsg with ack=false"
DELETED = "deleteMsg while it was being handled"


class TopicInfo(msgspec.Struct, frozen=True, rename="camel"):
    """One topic's counts, summed over its groups, because the wire format has a single queue.

    waiting_queue_info: messages by time until due; overdue messages are in the first band.
    """

    topic: str
    waiting_queue_size: int
    waiting_queue_info: dict[str, int]
    ready_queue_size: int
    ack_queue_size: int


class Topics:
    """Gives new topics Camellia's default options."""

    def __init__(self, store: AsyncStore, settings: CamelliaSettings) -> None:
        self._store = store
        self._options = encode(
            {"ack_timeout": settings.ack_timeout, "retention": settings.retention}
        )
        self._known: OrderedDict[str, float] = OrderedDict()

    async def ensure(self, topic: str) -> None:
        """Declare the default options if the topic is new. Raises LisaError."""
        now = time.monotonic()
        if now - self._known.get(topic, -LOOK_AGAIN_S) < LOOK_AGAIN_S:
            return
        await self._store.drive(_ensure(self._store, topic, self._options))
        _remember(self._known, topic, now)


def _remember(times: OrderedDict[str, float], topic: str, now: float) -> None:
    times[topic] = now
    times.move_to_end(topic)
    if len(times) > MOST_KNOWN:
        times.popitem(last=False)


def _ensure(store: Store, topic: str, options: Mapping[str, str]) -> Flow[None]:
    if not (yield from exists(store, topic)):
        # Declared, not set, so that a manager's configuration takes precedence later.
        yield from store.run(Configure(topic, options, declared=True))


def topic_infos(store: Store, topics: Sequence[str]) -> Flow[list[TopicInfo]]:
    """The counts of each topic, in the given order."""
    infos: list[TopicInfo] = []
    for part in chunks(topics, TOPICS_PER_STEP):
        infos += yield from _infos(store, part)
    return infos


def _infos(store: Store, topics: Sequence[str]) -> Flow[list[TopicInfo]]:
    now_ms = yield from store.server_time_ms()
    layouts = yield from store.layouts(list(map(Topic, topics)))
    shards = [
        (topic, shard)
        for topic, layout in zip(topics, layouts, strict=True)
        for shard in layout.active(Topic(topic))
    ]
    declared = yield from ask_all(
        store, [("HKEYS", store.keys.topic(shard).groups) for _, shard in shards]
    )
    groups = [[text(name) for name in names or ()] for names in declared]
    asked: list[Command] = []
    for (_, shard), names in zip(shards, groups, strict=True):
        asked += _commands(store, shard, names, now_ms)
    replies = iter((yield from ask_all(store, asked)))
    sums = {topic: [0] * (len(_ENDS) + 3) for topic in topics}
    for (topic, _), names in zip(shards, groups, strict=True):
        bands = [next(replies) or 0 for _ in range(len(_ENDS) + 1)]
        ready = in_flight = 0
        for _ in names:
            length, summary, due_again = (next(replies) for _ in range(3))
            held = summary[0] if summary else 0
            in_flight += held
            ready += max(0, (length or 0) - held) + (due_again or 0)
            for i in range(len(bands)):
                bands[i] += next(replies) or 0
        sums[topic] = [a + b for a, b in zip(sums[topic], [*bands, ready, in_flight], strict=True)]
    return [
        TopicInfo(topic, sum(found[:-2]), dict(zip(_SIZES, found[:-2], strict=True)), *found[-2:])
        for topic, found in sums.items()
    ]


def _commands(store: Store, topic: str, groups: Sequence[str], now_ms: int) -> list[Command]:
    keys = store.keys.topic(topic)
    commands = _counts(keys.waiting, "-inf", now_ms)
    for name in groups:
        own = keys.group(name)
        commands += [
            ("XLEN", own.ready),
            ("XPENDING", own.ready, name),
            ("ZCOUNT", own.retry, "-inf", now_ms),
            *_counts(own.retry, f"({now_ms}", now_ms),
        ]
    return commands


def _counts(key: str, start: str, now_ms: int) -> list[Command]:
    return [("ZCOUNT", key, low, high) for low, high in bands_of(start, now_ms)]


def bands_of(start: str, now_ms: int) -> list[tuple[str, str]]:
    """The bands as ranges of due times, each including its start and excluding its end."""
    borders = [now_ms + end for end in _ENDS.values()]
    return list(
        zip(
            [start, *map(str, borders)],
            [*(f"({border}" for border in borders), "+inf"],
            strict=True,
        )
    )


class Queue:
    """Queue operations on all topics. Methods raise LisaError."""

    def __init__(self, gateway: GatewayContext, clock: RedisClock) -> None:
        self._gateway = gateway
        self._clock = clock
        self._settings: CamelliaSettings = gateway.settings.camellia
        self._groups = gateway.groups
        self._receipts: OrderedDict[tuple[str, str], Receipt] = OrderedDict()

    async def send(
        self,
        topic: str,
        text: str,
        *,
        message_id: str,
        delay_ms: int,
        ttl_ms: int,
        max_retry: int,
        trace: Mapping[str, str],
    ) -> DelayMsg:
        """Send a message, or return the current state of a live message that already has its id.

        trace: headers with the trace context of the request.
        """
        message_id = message_id or uuid_utils.uuid7().hex  # ordered by creation
        retries = self._settings.max_retry if max_retry < 0 else min(max_retry, MAX_RETRIES)
        for _ in range(TRIES):
            now_us = await self._clock.now_us()
            # Rounded up so that it is never early; without a delay, down so that it is due now.
            produce_ms = -(-now_us // 1000) if delay_ms > 0 else now_us // 1000
            trigger_ms = produce_ms + max(0, delay_ms)
            wanted_ms = ttl_ms if ttl_ms > 0 else duration_ms(self._settings.ttl)
            lasts_ms = max(1, min(wanted_ms, MAX_DUE_MS - trigger_ms))
            origin = Origin(produce_ms, trigger_ms, lasts_ms, retries)
            sent = await self._gateway.sender.offer(
                topic,
                Outgoing(
                    text,
                    id=message_id,
                    at_ms=trigger_ms,
                    ttl=timedelta(milliseconds=lasts_ms),
                    retry=retry_policy(self._settings.retry_delays, retries),
                    headers={**origin.header, **trace},
                ),
                OnDuplicate.KEEP_LIVE,
            )
            if sent.outcome is not Sent.DUPLICATE:
                return as_sent(topic, message_id, text, origin, is_due=delay_ms <= 0)
            known = await self.get(topic, message_id)
            if known is not None:
                return known
            # It ended and its tombstone expired between the two calls, so the id is free now.
        raise DuplicateMessage(
            f"id {message_id!r} of topic {topic!r} belongs to a message without a state: its group "
            "is being removed, or the topic is damaged (run `lisa fsck`)"
        )

    async def get(self, topic: str, message_id: str) -> DelayMsg | None:
        """The current state of a message; None if it is unknown."""
        seen = await self._gateway.settler.look(topic, message_id)
        return as_found(topic, message_id, seen, await self._clock.now_us() // 1000)

    async def delete(self, topic: str, message_id: str) -> bool:
        """Cancel a message, even while it is in flight. It is not delivered again.

        False if it is unknown or settled, even if only in one of several groups.
        """
        for _ in range(TRIES):
            seen = await self._gateway.settler.look(topic, message_id, bodies=False)
            is_partly_settled = fence_of(seen.envelope)[-1:] in PARTLY
            if is_partly_settled or not is_alive(topic, message_id, seen):
                return False
            # Lisa cannot cancel a message in flight, so its delivery is discarded first.
            for copy in seen.group_states:
                if copy.state == "in_flight":
                    await self._gateway.settler.retry_by_id(
                        topic, message_id, reason=DELETED, delay="discard", group=copy.group
                    )
            if await self._gateway.sender.cancel(topic, message_id) is Cancelled.CANCELLED:
                return True
        return False

    async def settle(self, topic: str, message_id: str, *, handled: bool) -> bool:
        """Ack or nack the current delivery of an id; False if it is not in flight."""
        receipt = self._receipts.get((topic, message_id))
        if handled:
            return await self._ack(topic, message_id, receipt)
        return await self._nack(topic, message_id, receipt)

    def remember(self, topic: str, deliveries: Sequence[HandedOut]) -> None:
        """Remember the receipts of messages being delivered."""
        for delivery in deliveries:
            key = (topic, delivery.message.id)
            self._receipts[key] = delivery.receipt
            self._receipts.move_to_end(key)
        while len(self._receipts) > MOST_RECEIPTS:
            self._receipts.popitem(last=False)

    async def _ack(self, topic: str, message_id: str, receipt: Receipt | None) -> bool:
        settler, group = self._gateway.settler, self._groups.get(topic)
        if receipt is not None and await settler.ack(topic, receipt) is not Acked.STALE:
            return True
        outcome = await settler.ack_by_id(topic, message_id, group)
        if outcome is not None and outcome is not Acked.STALE:
            return True
        seen = await settler.look(topic, message_id, bodies=False)
        if not seen.group_states:
            return seen.tombstone is not None and seen.tombstone.state == "acked"
        # A late ack: the message was delivered, reclaimed, and not delivered again yet.
        for copy in seen.group_states:
            was_out = copy.state in ("ready", "retry") and copy.failed_attempts > 0
            if was_out and copy.group == (group or copy.group):
                late = Settlement(
                    message_id,
                    NO_ENTRY,
                    fence_of(seen.envelope),
                    copy.due_ms or 0,
                    copy.failed_attempts,
                )
                return await settler.ack(topic, Receipt(copy.group, "", late)) is not Acked.STALE
        return False

    async def _nack(self, topic: str, message_id: str, receipt: Receipt | None) -> bool:
        settler = self._gateway.settler
        if receipt is not None:
            failed = await settler.retry(topic, receipt, reason=NACKED)
            if failed.outcome is not Failed.STALE:
                return True
        again = await settler.retry_by_id(
            topic, message_id, reason=NACKED, group=self._groups.get(topic)
        )
        return again is not None and again.outcome is not Failed.STALE


@lru_cache(maxsize=256)
def retry_policy(configured: RetryPolicy | None, retries: int) -> RetryPolicy:
    """A policy with `retries` retries, which repeats the last configured delay as necessary.

    Without configured delays, all retries are immediate.
    """
    if configured is None or not configured.delays_ms:
        return RetryPolicy((0,) * retries)
    delays = configured.delays_ms[:retries]
    more = (configured.delays_ms[-1],) * (retries - len(delays))
    return RetryPolicy(delays + more, configured.jitter)
