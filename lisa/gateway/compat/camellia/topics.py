"""Topics: the options of those first seen here, and how many messages stand where.

A client of camellia declares nothing: its first send or pull makes the topic. What an operator or a
manager's configuration says of a topic always counts more.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence

import msgspec

from lisa.admin.reading import ask_all
from lisa.admin.topics import TOPICS_PER_STEP, exists
from lisa.core.flow import Command, Flow
from lisa.core.options import encode
from lisa.core.settings import CamelliaSettings
from lisa.core.store import AsyncStore, Store, chunks
from lisa.core.transitions.base import text
from lisa.core.transitions.configure import Configure

__all__ = ["BANDS", "TopicInfo", "Topics", "WaitingQueueInfo", "bands_of", "topic_infos"]

LOOK_AGAIN_S = 60.0
MOST_KNOWN = 10_000

_MINUTE, _HOUR, _DAY = 60_000, 3_600_000, 86_400_000
_ENDS = (
    _MINUTE, 10 * _MINUTE, 30 * _MINUTE, _HOUR, 6 * _HOUR, _DAY, 7 * _DAY, 30 * _DAY,
)  # fmt: skip
"""Where one band of delays ends and the next begins: a message on a border is in the later one."""


class WaitingQueueInfo(msgspec.Struct, frozen=True):
    """Messages by how long they still wait; what is overdue is in the first band."""

    first: int = msgspec.field(name="sizeOf0To1min")
    second: int = msgspec.field(name="sizeOf1minTo10min")
    third: int = msgspec.field(name="sizeOf10minTo30min")
    fourth: int = msgspec.field(name="sizeOf30minTo1hour")
    fifth: int = msgspec.field(name="sizeOf1hourTo6hour")
    sixth: int = msgspec.field(name="sizeOf6hourTo1day")
    seventh: int = msgspec.field(name="sizeOf1dayTo7day")
    eighth: int = msgspec.field(name="sizeOf7dayTo30day")
    ninth: int = msgspec.field(name="sizeOf30dayToInfinite")


BANDS = (
    "size_0_1min", "size_1min_10min", "size_10min_30min", "size_30min_1hour", "size_1hour_6hour",
    "size_6hour_1day", "size_1day_7day", "size_7day_30day", "size_30day_infinite",
)  # fmt: skip
"""The same bands as the metrics name them, in order."""


class TopicInfo(msgspec.Struct, frozen=True, rename="camel"):
    """One topic. Several groups count together: the wire format knows of one queue."""

    topic: str
    waiting_queue_size: int
    waiting_queue_info: WaitingQueueInfo
    ready_queue_size: int
    ack_queue_size: int


class Topics:
    """Sees that a topic that nobody knew gets camellia's options."""

    def __init__(self, store: AsyncStore, settings: CamelliaSettings) -> None:
        self._store = store
        self._options = encode(
            {"ack_timeout": settings.ack_timeout, "retention": settings.retention}
        )
        self._known: OrderedDict[str, float] = OrderedDict()

    async def meet(self, topic: str) -> None:
        """A client names a topic. Raises LisaError."""
        now = time.monotonic()
        if now - self._known.get(topic, -LOOK_AGAIN_S) < LOOK_AGAIN_S:
            return
        await self._store.drive(_meet(self._store, topic, self._options))
        self._known[topic] = now
        self._known.move_to_end(topic)
        if len(self._known) > MOST_KNOWN:
            self._known.popitem(last=False)

    async def has_group(self, topic: str) -> bool:
        """Whether anything is promoted: messages alone declare no group. Raises LisaError."""
        known = self._store.known_groups(topic)
        return bool(known or await self._store.drive(self._store.groups(topic)))


def _meet(store: Store, topic: str, options: Mapping[str, str]) -> Flow[None]:
    if not (yield from exists(store, topic)):
        # Declared, not set: a manager's configuration that comes later counts more.
        yield from store.run(Configure(topic, options, declared=True))


def topic_infos(store: Store, topics: Sequence[str]) -> Flow[list[TopicInfo]]:
    """How many messages of each topic stand where, in the order given."""
    infos: list[TopicInfo] = []
    for some in chunks(topics, TOPICS_PER_STEP):
        infos += yield from _infos(store, some)
    return infos


def _infos(store: Store, topics: Sequence[str]) -> Flow[list[TopicInfo]]:
    now_ms = (yield from store.server_time_us()) // 1000
    layouts = yield from store.layouts(topics)
    places = [
        (topic, place) for topic, layout in zip(topics, layouts, strict=True)
        for place in layout.places(topic)
    ]  # fmt: skip
    declared = yield from ask_all(
        store, [("HKEYS", store.keys.topic(one).groups) for _, one in places]
    )
    groups = [[text(name) for name in names or ()] for names in declared]
    asked: list[Command] = []
    for (_, place), names in zip(places, groups, strict=True):
        asked += _commands(store, place, names, now_ms)
    replies = iter((yield from ask_all(store, asked)))
    sums = {topic: [0] * (len(_ENDS) + 3) for topic in topics}
    for (topic, _), names in zip(places, groups, strict=True):
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
        TopicInfo(topic, sum(found[:-2]), WaitingQueueInfo(*found[:-2]), *found[-2:])
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
    """The bands as ranges of due times; each takes its beginning and leaves its end to the next."""
    borders = [now_ms + end for end in _ENDS]
    return list(
        zip([start, *map(str, borders)], [*(f"({one}" for one in borders), "+inf"], strict=True)
    )
