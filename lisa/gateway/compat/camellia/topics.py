"""Topics: default options of new topics, and counts by state.

Camellia clients declare nothing: the first send or pull creates the topic. Options set by an
operator or by a manager's configuration take precedence.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from itertools import pairwise

import msgspec

from lisa.admin.reading import ask_all
from lisa.admin.topics import TOPICS_PER_STEP, exists
from lisa.core.model.options import encode
from lisa.core.model.sharding import Topic
from lisa.core.redis.flow import Command, Flow
from lisa.core.settings import CamelliaSettings
from lisa.core.store.store import AsyncStore, Store, chunks
from lisa.core.transitions.base import text
from lisa.core.transitions.configure import Configure

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
    for some in chunks(topics, TOPICS_PER_STEP):
        infos += yield from _infos(store, some)
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
        store, [("HKEYS", store.keys.topic(one).groups) for _, one in shards]
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
        zip([start, *map(str, borders)], [*(f"({one}" for one in borders), "+inf"], strict=True)
    )
