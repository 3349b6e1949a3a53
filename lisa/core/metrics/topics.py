"""Reads the state of all topics as metrics: a flow of plain reads, in bounded steps.

Topics beyond the first 1,000 by name are summed under `(others)`, as are a topic's groups beyond
20. This applies to gauges only: a sum of counters would decrease whenever a topic leaves it, which
Prometheus interprets as a restart.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

from lisa.core.metrics.families import GROUP_COUNTERS, OTHERS, TOPIC_COUNTERS
from lisa.core.metrics.numbers import Numbers, add, put
from lisa.core.model.errors import LisaError
from lisa.core.model.keys import HIGHEST_LATENESS, TopicKeys
from lisa.core.model.late import Ramp
from lisa.core.model.lateness import EARLY, FORMER, LETTERS, bucket_counts, total_ms
from lisa.core.model.options import RAMP_LATE_MS, TopicOptions
from lisa.core.model.sharding import Topic
from lisa.core.model.stream import entry_ms
from lisa.core.redis import errors
from lisa.core.redis.flow import Command, Flow
from lisa.core.store import presence
from lisa.core.store.replies import counters, pairs
from lisa.core.store.store import Store, chunks
from lisa.core.transitions.base import text
from lisa.core.transitions.journal import ArchiveRecord, archive_records

_MAX_READY = TopicOptions().max_ready
_LATE = "late:"
NAMED_ARCHIVES = 20
"""Maximum number of archives of a journal with metrics."""

NAMED_TOPICS = 1_000
NAMED_GROUPS = 20
TOPICS_PER_STEP = 100

_OPTIONS = ("paused", "capacity", "max_ready", "ramp")


class TopicReplies(NamedTuple):
    """The first reads of a topic; None where the server refused."""

    waiting: int | None
    due: int | None
    first: list[bytes] | None
    groups: list[bytes] | None
    options: list[bytes | None] | None
    stats: Any
    consumers: Any
    archived: Any

    @property
    def journaled(self) -> int:
        """Number of events ever written to the journal."""
        return counters(self.stats or []).get("journaled", 0)

    @property
    def archives(self) -> dict[str, ArchiveRecord]:
        """The first archives by name, and the last event that each has stored."""
        records = archive_records(pairs(self.archived or []))
        return dict(islice(records.items(), NAMED_ARCHIVES))


class GroupReplies(NamedTuple):
    """The reads of one group."""

    length: int | None
    info: list[Any] | None
    retry: int | None
    due_again: int | None
    first_again: list[bytes] | None
    garbage: int | None
    parked: int | None
    turns: int | None
    closed: int | None

    @property
    def in_flight(self) -> int:
        """Entries that are delivered and not settled."""
        return int(self._of_group(b"pending"))

    @property
    def ready(self) -> int:
        """Entries that are not delivered yet."""
        return max(0, (self.length or 0) - self.in_flight)

    @property
    def last_read(self) -> str:
        """The id of the last delivered entry."""
        return text(self._of_group(b"last-delivered-id") or b"0-0")

    def _of_group(self, field: bytes) -> Any:
        # Each stream has a single group.
        return pairs(self.info[0]).get(field, 0) if self.info else 0


@dataclass(slots=True)
class TopicReading:
    """Collects the numbers of some topics.

    processes: those of the alive consumers of all topics.
    counted: what was counted already, by metric, topic and group. A consumer of a split topic has
        a record on each of its shards.
    """

    numbers: Numbers
    now_ms: int
    is_named: bool
    processes: set[str]
    counted: set[tuple[str, str, str, str]] = field(default_factory=set)


Question = tuple[Command, Callable[[Any], None]]
"""A further read, and what takes its reply."""


@dataclass(slots=True)
class TopicNumbers:
    """Writes the numbers of a topic, or adds those of a shard, under the topic's label.

    groups: the reads of each group. named: the groups that have numbers of their own.
    is_whole: whether this is the shard that has the topic's options.
    """

    reading: TopicReading
    keys: TopicKeys
    label: str
    head: TopicReplies
    groups: Mapping[str, GroupReplies]
    named: set[str]
    is_whole: bool

    def put(self) -> Iterator[Question]:
        """Write what is known, and ask for the rest."""
        numbers, label, head = self.reading.numbers, self.label, self.head
        add(numbers, "lisa_topic_messages", head.waiting or 0, label, "", "waiting")
        for name, own in self.groups.items():
            group = self._group(name)
            for state in ("ready", "in_flight", "parked", "retry", "garbage"):
                amount = getattr(own, state) or 0
                add(numbers, "lisa_topic_messages", amount, label, group, state)
            for reason, lanes in (("turn", own.turns), ("instant", own.closed)):
                if own.parked:
                    add(numbers, "lisa_topic_lanes", lanes or 0, label, group, reason)
            backlog = (head.due or 0) + own.ready + (own.parked or 0) + (own.due_again or 0)
            add(numbers, "lisa_topic_backlog_messages", backlog, label, group)
            yield from self._put_oldest(name, own)
        if not self.groups:
            add(numbers, "lisa_topic_backlog_messages", head.due or 0, label, "")
        self._put_consumers()
        if head.options and head.options[-1]:
            late_ms = self.reading.now_ms - RAMP_LATE_MS
            asked: Command = ("ZCOUNT", self.keys.waiting, "-inf", late_ms)
            yield asked, partial(self._put_ramp, text(head.options[-1]))
        if self._is_named:
            self._put_options()
            self._put_counters()
            yield from self._put_archives()

    @property
    def _is_named(self) -> bool:
        return self.label != OTHERS

    def _put_ramp(self, stored: str, late: int | None) -> None:
        """Write the backlog on the topic's ramp, and how long its promotion takes."""
        add(self.reading.numbers, "lisa_topic_ramp_messages", late or 0, self.label)
        with suppress(ValueError, OverflowError):  # another program wrote the option
            lasts = Ramp.decode(stored).lasts(late or 0).total_seconds()
            self._put_maximum("lisa_topic_ramp_seconds", None, lasts)

    def _group(self, name: str) -> str:
        return name if self._is_named and name in self.named else OTHERS

    def _put_oldest(self, name: str, own: GroupReplies) -> Iterator[Question]:
        """Write how long the next message to deliver has been due."""
        metric, group = "lisa_topic_oldest_ready_seconds", self._group(name)
        self._put_maximum(metric, group, 0.0)

        def put(reply: Any) -> None:
            due = pairs(reply[0][1]).get(b"due", b"") if reply else b""
            if due.isdigit():
                self._put_maximum(metric, group, self._age_s(int(due)))

        if own.ready:
            yield _first_after(self.keys.group(name).ready, own.last_read), put

    def _put_archives(self) -> Iterator[Question]:
        """Write how far each archive is behind the journal."""
        metric = "lisa_topic_archive_behind_seconds"

        def put(name: str, reply: Any) -> None:
            if reply:
                self._put_maximum(metric, name, self._age_s(entry_ms(reply[0][0])))

        for name, record in self.head.archives.items():
            behind = max(0, self.head.journaled - record.number)
            add(self.reading.numbers, "lisa_topic_archive_behind_events", behind, self.label, name)
            self._put_maximum(metric, name, 0.0)
            if behind:
                yield _first_after(self.keys.events, record.entry), partial(put, name)

    def _age_s(self, at_ms: int) -> float:
        return max(0.0, (self.reading.now_ms - at_ms) / 1000)

    def _put_maximum(self, name: str, group: str | None, value: float) -> None:
        """Write the highest value of a topic's shards, or of the groups in `(others)`.

        group: the second label; for some metrics an archive, for others None.
        """
        rows = self.reading.numbers.setdefault(name, {})
        labels = (self.label,) if group is None else (self.label, group)
        before = rows.get(labels, 0.0)
        rows[labels] = max(value, before) if isinstance(before, float) else value

    def _put_consumers(self) -> None:
        records = presence.records_in(self.head.consumers or [], presence.ConsumerPresence)
        alive = presence.alive(records, self.reading.now_ms)
        self.reading.processes.update(map(presence.process_of, alive))
        for name in self.groups:
            mine = [consumer for consumer in alive if name in consumer.groups]
            degraded = {consumer.name for consumer in mine if consumer.state == "degraded"}
            self._add_new("lisa_topic_consumers_alive", name, set(map(presence.process_of, mine)))
            self._add_new("lisa_topic_consumers_degraded", name, degraded)

    def _add_new(self, metric: str, group: str, members: set[str]) -> None:
        """Add the number of members that no other shard of the topic has."""
        new = {(metric, self.label, group, member) for member in members}
        if self._is_named:
            new -= self.reading.counted
            self.reading.counted.update(new)
        add(self.reading.numbers, metric, len(new), self.label, self._group(group))

    def _put_options(self) -> None:
        numbers, label, head = self.reading.numbers, self.label, self.head
        firsts = [head.first, *[own.first_again for own in self.groups.values()]]
        dues = [float(first[1]) for first in firsts if first]
        if dues:
            earliest = numbers.setdefault("lisa_topic_next_due_timestamp_seconds", {})
            known, due = earliest.get((label,)), min(dues) / 1000
            earliest[label,] = min(known, due) if isinstance(known, float) else due
        if not self.is_whole:
            return
        paused, capacity, max_ready, _ = head.options or (None, None, None, None)
        put(numbers, "lisa_topic_paused", float(paused == b"1"), label)
        if capacity and capacity.isdigit():
            put(numbers, "lisa_topic_capacity_messages", float(capacity), label)
        unread = int(max_ready) if max_ready and max_ready.isdigit() else _MAX_READY
        put(numbers, "lisa_topic_max_ready_messages", float(unread), label)

    def _put_counters(self) -> None:
        numbers, label = self.reading.numbers, self.label
        stats = counters(self.head.stats or [])
        for name, family in TOPIC_COUNTERS.items():
            add(numbers, family.name, stats.get(name, 0), label)
        for group in self.named:
            for name, family in GROUP_COUNTERS.items():
                add(numbers, family.name, stats.get(f"{name}@{group}", 0), label, group)
            self._put_lateness(stats, group)

    def _put_lateness(self, stats: Mapping[str, int], group: str) -> None:
        numbers, labels = self.reading.numbers, (self.label, group)
        late = {letter: stats.get(f"{_LATE}{letter}@{group}", 0) for letter in (*LETTERS, *FORMER)}
        histogram = [*bucket_counts(late), total_ms(late) / 1000]
        add(numbers, "lisa_topic_lateness_seconds", histogram, *labels)
        add(numbers, "lisa_topic_early_total", stats.get(f"{_LATE}{EARLY}@{group}", 0), *labels)
        highest = stats.get(f"{HIGHEST_LATENESS}@{group}")
        if highest is not None:
            self._put_maximum("lisa_topic_lateness_max_seconds", group, highest / 1000)


def read(store: Store) -> Flow[Numbers]:
    """The numbers of the sections Topics and Server. Raises LisaError."""
    numbers: Numbers = {}
    began, asked = time.monotonic(), time.time()
    now_us = yield from store.server_time_us()
    put(numbers, "lisa_server_clock_offset_seconds", now_us / 1e6 - (asked + time.time()) / 2)
    now_ms = now_us // 1000
    infos = (yield from store.on_each_node("INFO", "memory")).values()
    # No number for a user who may not run INFO.
    _add_memory(numbers, [info for info in infos if not isinstance(info, LisaError)])
    asked_roles = [("HGETALL", key) for key in (store.keys.managers, store.keys.loaders)]
    replies = yield from store.commands_once([*asked_roles, *presence.write_trials(store)])
    managers, loaders = _readable(store, replies[:2])
    refusal = presence.first_refusal(replies[2:])
    for one in presence.records_in(loaders or [], presence.LoaderRecord)[:NAMED_TOPICS]:
        put(numbers, "lisa_loader_last_success_timestamp_seconds", one.seen_ms / 1000, one.name)
        put(numbers, "lisa_loader_horizon_seconds", one.horizon_ms / 1000, one.name)
    put(numbers, "lisa_server_refuses_writes", float(refusal is not None))
    records = presence.records_in(managers or [], presence.ManagerPresence)
    put(numbers, "lisa_managers_alive", len(presence.alive(records, now_ms)))
    topics = yield from store.topics()
    put(numbers, "lisa_topics", len(topics))
    processes: set[str] = set()
    for is_named, part in ((True, topics[:NAMED_TOPICS]), (False, topics[NAMED_TOPICS:])):
        for topics_of_step in chunks(part, TOPICS_PER_STEP):
            yield from _read_topics(
                store, topics_of_step, TopicReading(numbers, now_ms, is_named, processes)
            )
    put(numbers, "lisa_consumers_alive", len(processes))
    put(numbers, "lisa_reading_seconds", time.monotonic() - began)
    return numbers


def _ask(store: Store, commands: Sequence[Command]) -> Flow[list[Any]]:
    """Plain reads in one round trip; None where the server refuses. Raises LisaError."""
    replies = yield from store.commands_once(commands)
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
    for shards in chunks(list(whole), TOPICS_PER_STEP):
        yield from _read_groups(store, {shard: whole[shard] for shard in shards}, reading)


def _read_groups(store: Store, whole: Mapping[str, str], reading: TopicReading) -> Flow[None]:
    """Read the numbers of some shards, each mapped to its topic."""
    now_ms = reading.now_ms
    asked = [command for topic in whole for command in _head(store, topic, now_ms)]
    flat = yield from _ask(store, asked)
    size = len(TopicReplies._fields)
    heads = {topic: TopicReplies(*flat[size * i : size * (i + 1)]) for i, topic in enumerate(whole)}
    lines = [(topic, text(name)) for topic in whole for name in sorted(heads[topic].groups or ())]
    asked = [command for topic, name in lines for command in _group(store, topic, name, now_ms)]
    flat = yield from _ask(store, asked)
    size = len(GroupReplies._fields)
    counts = {line: GroupReplies(*flat[size * i : size * (i + 1)]) for i, line in enumerate(lines)}
    questions: list[Question] = []
    for topic, label in whole.items():
        own = {name: replies for (of, name), replies in counts.items() if of == topic}
        topic_numbers = TopicNumbers(
            reading=reading,
            keys=store.keys.topic(topic),
            label=label if reading.is_named else OTHERS,
            head=heads[topic],
            groups=own,
            named=set(sorted(own)[:NAMED_GROUPS]),
            is_whole=topic == label,
        )
        questions += topic_numbers.put()
    replies = yield from _ask(store, [command for command, _ in questions])
    for (_, put_reply), reply in zip(questions, replies, strict=True):
        put_reply(reply)


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
    keys, lanes = store.keys.topic(topic).group(group), store.keys.topic(topic).lanes(group)
    return [
        ("XLEN", keys.ready),
        ("XINFO", "GROUPS", keys.ready),
        ("ZCARD", keys.retry),
        ("ZCOUNT", keys.retry, "-inf", now_ms),
        ("ZRANGE", keys.retry, 0, 0, "WITHSCORES"),
        ("ZCARD", keys.garbage),
        ("HLEN", lanes.parked),
        ("ZCARD", lanes.turns),
        ("ZCARD", lanes.closed),
    ]


def _first_after(stream: str, entry: str) -> Command:
    """The command for the first entry of a stream after another one."""
    return ("XRANGE", stream, f"({entry}", "+", "COUNT", 1)


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
