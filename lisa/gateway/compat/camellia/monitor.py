"""Statistics per interval, and their Prometheus metrics with the original's names."""

from __future__ import annotations

import asyncio
import logging
import os
import platform
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import add
from typing import TypeVar

import msgspec

import lisa
from lisa.admin.reading import ask_all, counted_pairs
from lisa.admin.topics import TOPICS_PER_STEP, total_of
from lisa.core.model.errors import LisaError
from lisa.core.redis.flow import Flow
from lisa.core.store.replies import counters
from lisa.core.store.store import Store, chunks
from lisa.gateway.compat.camellia.queue import BANDS, TopicInfo
from lisa.gateway.compat.camellia.wire import DelayMsg
from lisa.gateway.context import GatewayContext
from lisa.gateway.pulls import HandedOut

log = logging.getLogger("lisa.gateway.camellia")

Counters = dict[str, tuple[int, ...]]

_COUNTED = (("promoted",), ("expired", "skipped", "garbage"), ("reclaimed",))
"""The topic's own counters behind triggerMsgReady, triggerMsgEndLife and triggerMsgTimeout."""


class RequestStats(msgspec.Struct, rename="camel"):
    """One topic's counts in one interval; `pull_msg` counts messages, not requests.

    The last three are counters of the topic, changed by any process.
    """

    topic: str
    send_msg: int = 0
    pull_msg: int = 0
    delete_msg: int = 0
    ack_msg: int = 0
    get_msg: int = 0
    trigger_msg_ready: int = 0
    trigger_msg_end_life: int = 0
    trigger_msg_timeout: int = 0


class TimeGapStats(msgspec.Struct):
    """Statistics of a time difference in milliseconds, over one interval."""

    topic: str
    count: int = 0
    avg: float = 0.0
    max: int = 0

    def add(self, gap_ms: int) -> None:
        """Add one message."""
        self.count += 1
        self.avg += (gap_ms - self.avg) / self.count
        self.max = max(self.max, gap_ms)


class MonitorData(msgspec.Struct, rename="camel"):
    """Statistics of one interval, with delays from due to delivery and from due to promotion."""

    request_stats_list: list[RequestStats] = []
    pull_msg_time_gap_stats_list: list[TimeGapStats] = []
    ready_queue_time_gap_stats_list: list[TimeGapStats] = []


_S = TypeVar("_S", RequestStats, TimeGapStats)


class _Interval:
    def __init__(self) -> None:
        self.requests: dict[str, RequestStats] = {}
        self.pulls: dict[str, TimeGapStats] = {}
        self.readies: dict[str, TimeGapStats] = {}


class Monitor:
    """Counts in intervals and keeps the last complete interval."""

    def __init__(self, gateway: GatewayContext) -> None:
        self._gateway = gateway
        self._interval_s = gateway.settings.camellia.monitor_interval.total_seconds()
        self._now = _Interval()
        self._last = _Interval()
        self._counters: Counters | None = None
        self._cpu = (time.monotonic(), time.process_time())
        self.cpu_usage = 0.0

    def of(self, topic: str) -> RequestStats:
        """A topic's counts in the current interval."""
        return self._now.requests.setdefault(topic, RequestStats(topic))

    def pulled(self, deliveries: Sequence[HandedOut], messages: Sequence[DelayMsg]) -> None:
        """Count delivered messages."""
        now_ms = self._gateway.clock.about_ms()
        for delivery, message in zip(deliveries, messages, strict=True):
            self.of(message.topic).pull_msg += 1
            if message.trigger_time is None:
                continue
            gap = max(0, now_ms - message.trigger_time)
            self._now.pulls.setdefault(message.topic, TimeGapStats(message.topic)).add(gap)
            if message.retry == 1:
                # An entry's id starts with the time of its promotion, by the Redis clock.
                ready_ms = int(delivery.receipt.settlement.entry.partition("-")[0])
                gap = max(0, ready_ms - message.trigger_time)
                self._now.readies.setdefault(message.topic, TimeGapStats(message.topic)).add(gap)

    def last(self, sees: Callable[[str], bool]) -> MonitorData:
        """The last complete interval, limited to the topics that `sees` accepts."""

        def shown(by_topic: dict[str, _S]) -> list[_S]:
            return [by_topic[topic] for topic in sorted(by_topic) if sees(topic)]

        interval = self._last
        return MonitorData(shown(interval.requests), shown(interval.pulls), shown(interval.readies))

    async def run(self) -> None:
        """Start a new interval every `interval_s` seconds, until cancelled."""
        await self._count()
        ends = time.monotonic()
        while True:
            ends = max(ends + self._interval_s, time.monotonic())
            await asyncio.sleep(ends - time.monotonic())
            await self._count()
            self._last, self._now = self._now, _Interval()

    async def _count(self) -> None:
        wall, cpu = time.monotonic(), time.process_time()
        passed = wall - self._cpu[0]
        self.cpu_usage = (cpu - self._cpu[1]) / passed if passed > 0 else 0.0
        self._cpu = (wall, cpu)
        try:
            await self._gateway.clock.now_us()
            found = await self._gateway.ask(_counters)
        except LisaError as error:
            log.warning("trigger counts are delayed to a later interval: %s", error)
            return
        before, self._counters = self._counters, found
        if before is None:
            return
        for topic, values in found.items():
            past = before.get(topic, (0, 0, 0))
            ready, ended, timed_out = (max(0, a - b) for a, b in zip(values, past, strict=True))
            if ready or ended or timed_out:
                stats = self.of(topic)
                stats.trigger_msg_ready += ready
                stats.trigger_msg_end_life += ended
                stats.trigger_msg_timeout += timed_out


def _counters(store: Store) -> Flow[Counters]:
    found: Counters = {}
    topics = yield from store.topics()
    for part in chunks(topics, TOPICS_PER_STEP):
        shards = yield from counted_pairs(store, part)
        commands = [("HGETALL", store.keys.topic(shard).stats) for _, shard in shards]
        replies = yield from ask_all(store, commands)
        for (topic, _), reply in zip(shards, replies, strict=True):
            stats = counters(reply or [])
            values = [sum(total_of(stats, name) for name in names) for names in _COUNTED]
            found[topic] = tuple(map(add, values, found.get(topic, (0, 0, 0))))
    return found


Sample = tuple[dict[str, str], float | int]

_started_ms = time.time_ns() // 1_000_000
_started = time.monotonic()


def exposition(
    prefix: str, data: MonitorData, topics: Sequence[TopicInfo], cpu_usage: float
) -> str:
    """All metrics in Prometheus's text format."""
    uptime_ms = round(1000 * (time.monotonic() - _started))
    families: list[tuple[str, str, Iterable[Sample]]] = [
        ("info", "Info", [(_info(), 1)]),
        ("uptime", "Uptime", [({}, uptime_ms)]),
        ("start_time", "StartTime", [({}, _started_ms)]),
        (
            "cpu",
            "Cpu",
            [({"type": "cpu_num"}, os.cpu_count() or 1), ({"type": "usage"}, round(cpu_usage, 6))],
        ),
        ("request", "Request", _samples(data.request_stats_list)),
        ("pull_msg_time_gap", "Pull Msg Time Gap", _samples(data.pull_msg_time_gap_stats_list)),
        (
            "ready_queue_time_gap",
            "Ready Queue Time Gap",
            _samples(data.ready_queue_time_gap_stats_list),
        ),
        ("topic_info", "Topic Info", _topics(topics)),
    ]
    lines = []
    for name, about, samples in families:
        full = prefix + name
        lines += [f"# HELP {full} Delay Queue {about}", f"# TYPE {full} gauge"]
        lines += [f"{full}{_labels(labels)} {value}" for labels, value in samples]
    return "\n".join(lines) + "\n"


def _info() -> dict[str, str]:
    return {
        "camellia_version": f"lisa-{lisa.__version__}",
        "arch": platform.machine(),
        "os_name": platform.system(),
        "os_version": platform.release(),
        "system_load_average": str(os.getloadavg()[0]),
    }


def _samples(stats: Sequence[RequestStats] | Sequence[TimeGapStats]) -> Iterator[Sample]:
    for row in stats:
        values = msgspec.to_builtins(row)
        topic = values.pop("topic")
        for name, value in values.items():
            yield {"topic": topic, "type": name}, value


def _topics(topics: Sequence[TopicInfo]) -> Iterator[Sample]:
    for info in topics:
        sizes = [
            ("readyQueueSize", info.ready_queue_size),
            ("ackQueueSize", info.ack_queue_size),
            ("waitingQueueSize", info.waiting_queue_size),
            *zip(BANDS, info.waiting_queue_info.values(), strict=True),
        ]
        for name, value in sizes:
            yield {"topic": info.topic, "type": name}, value


def _labels(labels: dict[str, str]) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items()) + "}"


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
