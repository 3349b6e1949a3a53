"""What Redis knows of all topics, as numbers: a flow of plain reads, in bounded steps.

Topics beyond the first 1,000, in order of name, are summed under `(others)`, and so are groups of
a topic beyond 20. Only gauges are: the sum of counters would go down whenever a topic left it, and
Prometheus would take that for a restart.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from lisa.core import failures, presence
from lisa.core.flow import Command, ExecuteMany, Flow
from lisa.core.lateness import BOUNDS_MS, EARLY, LETTERS
from lisa.core.metrics.families import GROUP_COUNTERS, OTHERS, TOPIC_COUNTERS
from lisa.core.metrics.numbers import Numbers, add, put
from lisa.core.options import TopicOptions
from lisa.core.store import Store, chunks, counters, pairs
from lisa.core.transitions.base import text

__all__ = ["NAMED_GROUPS", "NAMED_TOPICS", "read"]

NAMED_TOPICS = 1_000
NAMED_GROUPS = 20
TOPICS_PER_STEP = 100

_OPTIONS = ("paused", "capacity", "max_ready")
_MAX_READY = TopicOptions().max_ready
_GONE_AFTER_MS = round(presence.GONE_AFTER.total_seconds() * 1000)
_LATE = "late:"
_LOWER_MS = (0.0, *BOUNDS_MS)
_MIDDLES_S = tuple(
    (low + high) / 2000 for low, high in zip(_LOWER_MS, (*BOUNDS_MS, BOUNDS_MS[-1]), strict=True)
)


class _Head(NamedTuple):
    """What is asked of a topic first; None where the server refused."""

    waiting: int | None
    due: int | None
    first: list[bytes] | None
    groups: list[bytes] | None
    options: list[bytes | None] | None
    stats: Any
    consumers: Any


class _Places(NamedTuple):
    """What is asked of each of its groups."""

    length: int | None
    info: list[Any] | None
    retry: int | None
    due_again: int | None
    first_again: list[bytes] | None
    garbage: int | None

    @property
    def in_flight(self) -> int:
        return int(self._of_group(b"pending"))

    @property
    def ready(self) -> int:
        return max(0, (self.length or 0) - self.in_flight)

    @property
    def last_read(self) -> str:
        """The id of the last entry that was handed out."""
        return text(self._of_group(b"last-delivered-id") or b"0-0")

    def _of_group(self, field: bytes) -> Any:
        # The stream has this one group.
        return pairs(self.info[0]).get(field, 0) if self.info else 0


def read(store: Store) -> Flow[Numbers]:
    """The numbers of the sections Topics and Server. Raises LisaError."""
    numbers: Numbers = {}
    began, asked = time.monotonic(), time.time()
    now_us = yield from store.server_time_us()
    put(numbers, "lisa_server_clock_offset_seconds", now_us / 1e6 - (asked + time.time()) / 2)
    now_ms = now_us // 1000
    info, managers = yield from _ask(store, [("INFO", "memory"), ("HGETALL", store.keys.managers)])
    _add_memory(numbers, info)
    records = presence.managers_in(managers or [])
    put(numbers, "lisa_managers_alive", _alive(records, now_ms))
    topics = yield from store.topics()
    put(numbers, "lisa_topics", len(topics))
    for some in chunks(topics[:NAMED_TOPICS], TOPICS_PER_STEP):
        yield from _read_topics(store, some, _Reading(numbers, now_ms, is_named=True))
    for some in chunks(topics[NAMED_TOPICS:], TOPICS_PER_STEP):
        yield from _read_topics(store, some, _Reading(numbers, now_ms, is_named=False))
    put(numbers, "lisa_reading_seconds", time.monotonic() - began)
    return numbers


def _ask(store: Store, commands: Sequence[Command]) -> Flow[list[Any]]:
    """Plain reads in one round trip; None for what the server refuses. Raises LisaError."""
    try:
        replies = yield ExecuteMany(commands)
    except failures.ClientError as error:
        raise failures.translated(error, store.where) from error
    for reply in replies:
        if isinstance(reply, Exception) and failures.passes(reply):
            raise failures.translated(reply, store.where) from reply
    return [None if isinstance(reply, Exception) else reply for reply in replies]


@dataclass(slots=True)
class _Reading:
    """Where the numbers of some topics go. `told`: consumers that were counted, by label and group.

    A consumer of a topic that is split stands in the records of each of its places.
    """

    numbers: Numbers
    now_ms: int
    is_named: bool
    told: set[tuple[str, str, str]] = field(default_factory=set)


def _read_topics(store: Store, topics: Sequence[str], reading: _Reading) -> Flow[None]:
    layouts = yield from store.layouts(topics)
    whole = {
        place: topic for topic, layout in zip(topics, layouts, strict=True)
        for place in layout.counted(topic)
    }  # fmt: skip
    for some in chunks(list(whole), TOPICS_PER_STEP):
        yield from _read_places(store, {one: whole[one] for one in some}, reading)


def _read_places(store: Store, whole: Mapping[str, str], reading: _Reading) -> Flow[None]:
    """The numbers of some places, each with the topic that it belongs to."""
    now_ms = reading.now_ms
    asked = [one for topic in whole for one in _head(store, topic, now_ms)]
    flat = yield from _ask(store, asked)
    size = len(_Head._fields)
    heads = {topic: _Head(*flat[size * i : size * (i + 1)]) for i, topic in enumerate(whole)}
    lines = [(topic, text(name)) for topic in whole for name in sorted(heads[topic].groups or ())]
    asked = [one for topic, name in lines for one in _group(store, topic, name, now_ms)]
    flat = (yield from _ask(store, asked)) if asked else []
    size = len(_Places._fields)
    places = {line: _Places(*flat[size * i : size * (i + 1)]) for i, line in enumerate(lines)}
    since = yield from _oldest_ready(store, places)
    for topic, label in whole.items():
        own = {name: place for (of, name), place in places.items() if of == topic}
        name_of_topic = label if reading.is_named else OTHERS
        _Topic(reading, name_of_topic, heads[topic], own, is_whole=topic == label).put(
            {name: since[topic, name] for name in own if (topic, name) in since}
        )


def _head(store: Store, topic: str, now_ms: int) -> list[Command]:
    keys = store.keys.topic(topic)
    return [
        ("ZCARD", keys.waiting),
        ("ZCOUNT", keys.waiting, "-inf", now_ms),
        ("ZRANGE", keys.waiting, 0, 0, "WITHSCORES"),
        ("HKEYS", keys.groups),
        ("HMGET", keys.options, *_OPTIONS),
        ("HGETALL", keys.stats),
        ("HGETALL", keys.consumers),
    ]


def _group(store: Store, topic: str, group: str, now_ms: int) -> list[Command]:
    keys = store.keys.topic(topic).group(group)
    return [
        ("XLEN", keys.ready),
        ("XINFO", "GROUPS", keys.ready),
        ("ZCARD", keys.retry),
        ("ZCOUNT", keys.retry, "-inf", now_ms),
        ("ZRANGE", keys.retry, 0, 0, "WITHSCORES"),
        ("ZCARD", keys.garbage),
    ]


def _oldest_ready(
    store: Store, places: Mapping[tuple[str, str], _Places]
) -> Flow[dict[tuple[str, str], int]]:
    """When the next message to be handed out fell due, for groups that have one."""
    lines = [line for line, place in places.items() if place.ready]
    asked: list[Command] = [
        ("XRANGE", store.keys.topic(topic).group(group).ready,
         f"({places[topic, group].last_read}", "+", "COUNT", 1)
        for topic, group in lines
    ]  # fmt: skip
    replies = (yield from _ask(store, asked)) if asked else []
    found = {}
    for line, reply in zip(lines, replies, strict=True):
        due = pairs(reply[0][1]).get(b"due", b"") if reply else b""
        if due.isdigit():
            found[line] = int(due)
    return found


class _Topic:
    """Writes one topic's numbers down, each under its label, or adds those of one of its shards."""

    def __init__(
        self,
        reading: _Reading,
        label: str,
        head: _Head,
        places: Mapping[str, _Places],
        *,
        is_whole: bool,
    ) -> None:
        self._numbers = reading.numbers
        self._told = reading.told
        self._is_whole = is_whole
        self._label = label
        self._is_named = label != OTHERS
        self._head = head
        self._places = places
        self._now_ms = reading.now_ms
        self._named = set(sorted(places)[:NAMED_GROUPS])

    def put(self, since: Mapping[str, int]) -> None:
        """All of it; `since` says by group when the oldest ready message fell due."""
        numbers, label, head = self._numbers, self._label, self._head
        add(numbers, "lisa_topic_messages", head.waiting or 0, label, "", "waiting")
        for name, place in self._places.items():
            group = self._group(name)
            for state in ("ready", "in_flight", "retry", "garbage"):
                amount = getattr(place, state) or 0
                add(numbers, "lisa_topic_messages", amount, label, group, state)
            backlog = (head.due or 0) + place.ready + (place.due_again or 0)
            add(numbers, "lisa_topic_backlog_messages", backlog, label, group)
            self._put_oldest(group, since.get(name))
        if not self._places:
            add(numbers, "lisa_topic_backlog_messages", head.due or 0, label, "")
        self._put_consumers()
        if self._is_named:
            self._put_options()
            self._put_counters()

    def _group(self, name: str) -> str:
        return name if self._is_named and name in self._named else OTHERS

    def _put_oldest(self, group: str, due_ms: int | None) -> None:
        age_s = 0.0 if due_ms is None else max(0.0, (self._now_ms - due_ms) / 1000)
        rows = self._numbers.setdefault("lisa_topic_oldest_ready_seconds", {})
        before = rows.get((self._label, group), 0.0)
        rows[self._label, group] = max(age_s, before) if isinstance(before, float) else age_s

    def _put_consumers(self) -> None:
        records = presence.consumers_in(self._head.consumers or [])
        alive = [one for one in records if one.seen_ms > self._now_ms - _GONE_AFTER_MS]
        for name in self._places:
            mine = [one for one in alive if one.group == name]
            mine = [one for one in mine if (self._label, name, one.name) not in self._told]
            if self._is_named:
                self._told.update((self._label, name, one.name) for one in mine)
            labels = (self._label, self._group(name))
            degraded = sum(one.state == "degraded" for one in mine)
            add(self._numbers, "lisa_topic_consumers_alive", len(mine), *labels)
            add(self._numbers, "lisa_topic_consumers_degraded", degraded, *labels)

    def _put_options(self) -> None:
        numbers, label, head = self._numbers, self._label, self._head
        firsts = [head.first, *[place.first_again for place in self._places.values()]]
        dues = [float(first[1]) for first in firsts if first]
        if dues:
            earliest = numbers.setdefault("lisa_topic_next_due_timestamp_seconds", {})
            known, due = earliest.get((label,)), min(dues) / 1000
            earliest[label,] = min(known, due) if isinstance(known, float) else due
        if not self._is_whole:
            return
        paused, capacity, max_ready = head.options or (None, None, None)
        put(numbers, "lisa_topic_paused", float(paused == b"1"), label)
        if capacity and capacity.isdigit():
            put(numbers, "lisa_topic_capacity_messages", float(capacity), label)
        unread = int(max_ready) if max_ready and max_ready.isdigit() else _MAX_READY
        put(numbers, "lisa_topic_max_ready_messages", float(unread), label)

    def _put_counters(self) -> None:
        numbers, label = self._numbers, self._label
        stats = counters(self._head.stats or [])
        for name, family in TOPIC_COUNTERS.items():
            add(numbers, family.name, stats.get(name, 0), label)
        for group in self._named:
            for name, family in GROUP_COUNTERS.items():
                add(numbers, family.name, stats.get(f"{name}@{group}", 0), label, group)
            late = [stats.get(f"{_LATE}{letter}@{group}", 0) for letter in LETTERS]
            total = sum(n * middle for n, middle in zip(late, _MIDDLES_S, strict=True))
            add(numbers, "lisa_topic_lateness_seconds", [*late, total], label, group)
            early = stats.get(f"{_LATE}{EARLY}@{group}", 0)
            add(numbers, "lisa_topic_early_total", early, label, group)


def _alive(records: Iterable[presence.ManagerPresence], now_ms: int) -> int:
    return sum(one.seen_ms > now_ms - _GONE_AFTER_MS for one in records)


def _add_memory(numbers: Numbers, info: bytes | None) -> None:
    if info is None:  # a user that may not ask
        return
    fields = dict(line.split(":", 1) for line in text(info).splitlines() if ":" in line)
    put(numbers, "lisa_server_memory_used_bytes", float(fields.get("used_memory", 0)))
    put(numbers, "lisa_server_memory_max_bytes", float(fields.get("maxmemory", 0)))
