"""Reads the state of all topics as metrics: a flow of plain reads, in bounded steps.

Topics beyond the first 1,000 by name are summed under `(others)`, as are a topic's groups beyond
20. This applies to gauges only: a sum of counters would decrease whenever a topic leaves it, which
Prometheus interprets as a restart.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from lisa.core.metrics.families import OTHERS
from lisa.core.metrics.numbers import Numbers, put
from lisa.core.metrics.topic_numbers import (
    GroupReplies,
    TopicNumbers,
    TopicReading,
    TopicReplies,
)
from lisa.core.model.errors import LisaError
from lisa.core.model.options import RAMP_LATE_MS
from lisa.core.model.sharding import Topic
from lisa.core.model.stream import entry_ms
from lisa.core.redis import errors
from lisa.core.redis.flow import Command, Flow
from lisa.core.store import presence
from lisa.core.store.replies import pairs
from lisa.core.store.store import Store, chunks
from lisa.core.transitions.base import text

NAMED_TOPICS = 1_000
NAMED_GROUPS = 20
TOPICS_PER_STEP = 100

_OPTIONS = ("paused", "capacity", "max_ready", "ramp")


def read(store: Store) -> Flow[Numbers]:
    """The numbers of the sections Topics and Server. Raises LisaError."""
    numbers: Numbers = {}
    began, asked = time.monotonic(), time.time()
    now_us = yield from store.server_time_us()
    put(numbers, "lisa_server_clock_offset_seconds", now_us / 1e6 - (asked + time.time()) / 2)
    now_ms = now_us // 1000
    infos = (yield from store.on_each_node("INFO", "memory")).values()
    # No number for a user who may not run INFO.
    _add_memory(numbers, [one for one in infos if not isinstance(one, LisaError)])
    asked_managers = ("HGETALL", store.keys.managers)
    replies = yield from store.commands_once([asked_managers, *presence.write_trials(store)])
    (managers,) = _readable(store, replies[:1])
    refusal = presence.first_refusal(replies[1:])
    put(numbers, "lisa_server_refuses_writes", float(refusal is not None))
    records = presence.records_in(managers or [], presence.ManagerPresence)
    put(numbers, "lisa_managers_alive", len(presence.alive(records, now_ms)))
    topics = yield from store.topics()
    put(numbers, "lisa_topics", len(topics))
    processes: set[str] = set()
    for is_named, part in ((True, topics[:NAMED_TOPICS]), (False, topics[NAMED_TOPICS:])):
        for some in chunks(part, TOPICS_PER_STEP):
            yield from _read_topics(store, some, TopicReading(numbers, now_ms, is_named, processes))
    put(numbers, "lisa_consumers_alive", len(processes))
    put(numbers, "lisa_reading_seconds", time.monotonic() - began)
    return numbers


def _ask(store: Store, commands: Sequence[Command]) -> Flow[list[Any]]:
    """Plain reads in one round trip; None where the server refuses. Raises LisaError."""
    replies = (yield from store.commands_once(commands)) if commands else []
    return _readable(store, replies)


def _readable(store: Store, replies: Sequence[Any]) -> list[Any]:
    for reply in replies:
        if isinstance(reply, Exception) and errors.passes(reply):
            raise errors.translated(reply, store.where) from reply
    return [None if isinstance(reply, Exception) else reply for reply in replies]


def _read_topics(store: Store, topics: Sequence[Topic], reading: TopicReading) -> Flow[None]:
    layouts = yield from store.layouts(topics)
    whole = {
        shard: topic
        for topic, layout in zip(topics, layouts, strict=True)
        for shard in layout.counted(topic)
    }
    for some in chunks(list(whole), TOPICS_PER_STEP):
        yield from _read_groups(store, {one: whole[one] for one in some}, reading)


def _read_groups(store: Store, whole: Mapping[str, str], reading: TopicReading) -> Flow[None]:
    """Read the numbers of some shards, each mapped to its topic."""
    now_ms = reading.now_ms
    asked = [one for topic in whole for one in _head(store, topic, now_ms)]
    flat = yield from _ask(store, asked)
    size = len(TopicReplies._fields)
    heads = {topic: TopicReplies(*flat[size * i : size * (i + 1)]) for i, topic in enumerate(whole)}
    lines = [(topic, text(name)) for topic in whole for name in sorted(heads[topic].groups or ())]
    asked = [one for topic, name in lines for one in _group(store, topic, name, now_ms)]
    flat = yield from _ask(store, asked)
    size = len(GroupReplies._fields)
    counts = {line: GroupReplies(*flat[size * i : size * (i + 1)]) for i, line in enumerate(lines)}
    since = yield from _oldest_ready(store, counts)
    late = yield from _on_ramps(store, heads, now_ms)
    unread = yield from _oldest_unread(store, heads)
    for topic, label in whole.items():
        own = {name: one for (of, name), one in counts.items() if of == topic}
        name_of_topic = label if reading.is_named else OTHERS
        named = set(sorted(own)[:NAMED_GROUPS])
        its = TopicNumbers(
            reading, name_of_topic, heads[topic], own, named=named, is_whole=topic == label
        )
        its.put_ramp(late.get(topic))
        its.put(
            {name: since[topic, name] for name in own if (topic, name) in since},
            {name: ms for (of, name), ms in unread.items() if of == topic},
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
        ("HGETALL", keys.archived),
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
    store: Store, counts: Mapping[tuple[str, str], GroupReplies]
) -> Flow[dict[tuple[str, str], int]]:
    """Due time of the next message to deliver, for groups that have a ready message."""
    lines = [line for line, own in counts.items() if own.ready]
    asked: list[Command] = [
        (
            "XRANGE",
            store.keys.topic(topic).group(group).ready,
            f"({counts[topic, group].last_read}",
            "+",
            "COUNT",
            1,
        )
        for topic, group in lines
    ]
    replies = yield from _ask(store, asked)
    found = {}
    for line, reply in zip(lines, replies, strict=True):
        due = pairs(reply[0][1]).get(b"due", b"") if reply else b""
        if due.isdigit():
            found[line] = int(due)
    return found


def _on_ramps(store: Store, heads: Mapping[str, TopicReplies], now_ms: int) -> Flow[dict[str, int]]:
    """How many messages the ramps of topics hold back, for the topics that have a ramp."""
    topics = [topic for topic, head in heads.items() if (head.options or [None])[-1]]
    late_ms = now_ms - RAMP_LATE_MS
    asked: list[Command] = [
        ("ZCOUNT", store.keys.topic(topic).waiting, "-inf", late_ms) for topic in topics
    ]
    replies = yield from _ask(store, asked)
    return {topic: count or 0 for topic, count in zip(topics, replies, strict=True)}


def _oldest_unread(
    store: Store, heads: Mapping[str, TopicReplies]
) -> Flow[dict[tuple[str, str], int]]:
    """By journal and archive, the time of the first event that the archive has not stored."""
    lines = [
        (topic, name, record.entry)
        for topic, head in heads.items()
        for name, record in head.archives.items()
        if record.number < head.journaled
    ]
    asked: list[Command] = [
        ("XRANGE", store.keys.topic(topic).events, f"({entry}", "+", "COUNT", 1)
        for topic, _, entry in lines
    ]
    replies = yield from _ask(store, asked)
    return {
        (topic, name): entry_ms(reply[0][0])
        for (topic, name, _), reply in zip(lines, replies, strict=True)
        if reply
    }


def _add_memory(numbers: Numbers, infos: Sequence[bytes]) -> None:
    """Of the nodes, the one whose memory is the first to run out."""
    nodes = []
    for info in infos:
        fields = dict(line.split(":", 1) for line in text(info).splitlines() if ":" in line)
        used, most = float(fields.get("used_memory", 0)), float(fields.get("maxmemory", 0))
        nodes.append((used / most if most else 0.0, used, most))
    if nodes:
        _, used, most = max(nodes)
        put(numbers, "lisa_server_memory_used_bytes", used)
        put(numbers, "lisa_server_memory_max_bytes", most)
