"""Camellia's queue operations, in terms of Lisa's transitions."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import lru_cache
from itertools import pairwise
from operator import add

import msgspec
import uuid_utils

from lisa.admin.history import counts_between
from lisa.admin.reading import ask_all
from lisa.admin.topics import TOPICS_PER_STEP, TopicState, counts, exists
from lisa.core.model.clock import MAX_DUE_MS, duration_ms
from lisa.core.model.envelope import fence_of
from lisa.core.model.errors import DuplicateMessage
from lisa.core.model.options import encode
from lisa.core.model.retry_policy import MAX_RETRIES, RetryPolicy
from lisa.core.model.sharding import Topic
from lisa.core.redis.flow import Flow
from lisa.core.settings import CamelliaSettings
from lisa.core.store.store import Store, chunks
from lisa.core.transitions.ack import Acked, Settlement
from lisa.core.transitions.change import Cancelled
from lisa.core.transitions.enqueue import OnDuplicate, Sent
from lisa.core.transitions.retry import Failed
from lisa.core.transitions.topic import Configure
from lisa.gateway.compat.camellia.wire import (
    READY,
    WAITING,
    DelayMsg,
    Origin,
    as_found,
    is_alive,
    with_origin,
)
from lisa.gateway.context import GatewayContext
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


def topic_infos(store: Store, topics: Sequence[str]) -> Flow[list[TopicInfo]]:
    """The counts of each topic, in the given order."""
    edges = band_edges((yield from store.server_time_ms()))
    infos: list[TopicInfo] = []
    for part in chunks(topics, TOPICS_PER_STEP):
        infos += yield from _infos(store, (yield from counts(store, part)), edges)
    return infos


def band_edges(now_ms: int) -> list[int]:
    """The last due time that has come, and the last one of each band but the last."""
    return [now_ms, *(now_ms + end - 1 for end in _ENDS.values())]


def _infos(store: Store, states: Sequence[TopicState], edges: list[int]) -> Flow[list[TopicInfo]]:
    layouts = yield from store.layouts([Topic(state.topic) for state in states])
    asked: list[tuple[str, str, bool]] = []  # topic, key, and whether it has retries
    for state, layout in zip(states, layouts, strict=True):
        for keys in map(store.keys.topic, layout.active(Topic(state.topic))):
            asked.append((state.topic, keys.waiting, False))
            asked += [(state.topic, keys.group(group.name).retry, True) for group in state.groups]
    commands = [command for _, key, _ in asked for command in counts_between(key, edges)]
    replies = iter((yield from ask_all(store, commands)))
    bands = {state.topic: [0] * len(_SIZES) for state in states}
    ready = {state.topic: state.ready for state in states}
    for topic, _, is_retry in asked:
        due, *later = [next(replies) or 0 for _ in range(len(edges) + 1)]
        if is_retry:
            ready[topic] += due
        else:
            later[0] += due
        bands[topic] = list(map(add, bands[topic], later))
    return [
        TopicInfo(
            topic=state.topic,
            waiting_queue_size=sum(bands[state.topic]),
            waiting_queue_info=dict(zip(_SIZES, bands[state.topic], strict=True)),
            ready_queue_size=ready[state.topic],
            ack_queue_size=state.in_flight,
        )
        for state in states
    ]


class Queue:
    """Queue operations on all topics. Methods raise LisaError."""

    def __init__(self, gateway: GatewayContext) -> None:
        self._gateway = gateway
        self._clock = gateway.clock
        self._settings: CamelliaSettings = gateway.settings.camellia
        self._groups = gateway.groups
        self._receipts: OrderedDict[tuple[str, str], Receipt] = OrderedDict()
        self._known: OrderedDict[str, float] = OrderedDict()

    async def ensure(self, topic: str) -> None:
        """Declare Camellia's default options if the topic is new."""
        now = time.monotonic()
        if now - self._known.get(topic, -LOOK_AGAIN_S) < LOOK_AGAIN_S:
            return
        if not await self._gateway.ask(exists, topic):
            # Declared, not set, so that a manager's configuration takes precedence later.
            options = {
                "ack_timeout": self._settings.ack_timeout,
                "retention": self._settings.retention,
            }
            store = self._gateway.store
            await store.drive(store.run(Configure(topic, encode(options), declared=True)))
        self._known[topic] = now
        self._known.move_to_end(topic)
        if len(self._known) > MOST_KNOWN:
            self._known.popitem(last=False)

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
            status = WAITING if delay_ms > 0 else READY
            accepted = with_origin(origin, topic=topic, msg_id=message_id, msg=text, status=status)
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
                return accepted
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

    def remember(self, topic: str, deliveries: Sequence[HandedOut]) -> None:
        """Remember the receipts of messages being delivered."""
        for delivery in deliveries:
            key = (topic, delivery.message.id)
            self._receipts[key] = delivery.receipt
            self._receipts.move_to_end(key)
        while len(self._receipts) > MOST_RECEIPTS:
            self._receipts.popitem(last=False)

    async def ack(self, topic: str, message_id: str) -> bool:
        """Ack the current delivery of an id; False if it is not in flight."""
        settler, group = self._gateway.settler, self._groups.get(topic)
        receipt = self._receipts.get((topic, message_id))
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

    async def nack(self, topic: str, message_id: str) -> bool:
        """Retry the current delivery of an id; False if it is not in flight."""
        settler, group = self._gateway.settler, self._groups.get(topic)
        receipt = self._receipts.get((topic, message_id))
        if receipt is not None:
            failed = await settler.retry(topic, receipt, reason=NACKED)
            if failed.outcome is not Failed.STALE:
                return True
        again = await settler.retry_by_id(topic, message_id, reason=NACKED, group=group)
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
