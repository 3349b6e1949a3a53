"""Writes the numbers of one topic from the replies of the server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple

from lisa.core.metrics.families import GROUP_COUNTERS, OTHERS, TOPIC_COUNTERS
from lisa.core.metrics.numbers import Numbers, add, put
from lisa.core.model.keys import HIGHEST_LATENESS
from lisa.core.model.late import Ramp
from lisa.core.model.lateness import EARLY, FORMER, LETTERS, bucket_counts, total_ms
from lisa.core.model.options import TopicOptions
from lisa.core.store import presence
from lisa.core.store.replies import counters, pairs
from lisa.core.transitions.base import text
from lisa.core.transitions.journal import ArchiveRecord, archive_records

_MAX_READY = TopicOptions().max_ready
_LATE = "late:"
NAMED_ARCHIVES = 20
"""Maximum number of archives of a journal with metrics."""


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


class TopicNumbers:
    """Writes the numbers of a topic, or adds those of a shard, under the topic's label."""

    def __init__(
        self,
        reading: TopicReading,
        label: str,
        head: TopicReplies,
        counts: Mapping[str, GroupReplies],
        *,
        named: set[str],
        is_whole: bool,
    ) -> None:
        self._numbers = reading.numbers
        self._counted = reading.counted
        self._processes = reading.processes
        self._is_whole = is_whole
        self._label = label
        self._is_named = label != OTHERS
        self._head = head
        self._groups = counts
        self._now_ms = reading.now_ms
        self._named = named

    def put(self, since: Mapping[str, int], unread: Mapping[str, int]) -> None:
        """Write all numbers.

        since: group -> due time of its oldest ready message. unread: archive -> time of the first
        event that it has not stored.
        """
        numbers, label, head = self._numbers, self._label, self._head
        add(numbers, "lisa_topic_messages", head.waiting or 0, label, "", "waiting")
        for name, own in self._groups.items():
            group = self._group(name)
            for state in ("ready", "in_flight", "retry", "garbage"):
                amount = getattr(own, state) or 0
                add(numbers, "lisa_topic_messages", amount, label, group, state)
            backlog = (head.due or 0) + own.ready + (own.due_again or 0)
            add(numbers, "lisa_topic_backlog_messages", backlog, label, group)
            self._put_oldest(group, since.get(name))
        if not self._groups:
            add(numbers, "lisa_topic_backlog_messages", head.due or 0, label, "")
        self._put_consumers()
        if self._is_named:
            self._put_options()
            self._put_counters()
            self._put_archives(unread)

    def put_ramp(self, late: int | None) -> None:
        """Write the backlog on the topic's ramp, and how long its promotion takes."""
        stored = (self._head.options or [None])[-1]
        if late is None or not stored:
            return
        add(self._numbers, "lisa_topic_ramp_messages", late, self._label)
        try:
            lasts = Ramp.decode(text(stored)).lasts(late).total_seconds()
        except (ValueError, OverflowError):
            return  # another program wrote the option
        self._put_maximum("lisa_topic_ramp_seconds", None, lasts)

    def _group(self, name: str) -> str:
        return name if self._is_named and name in self._named else OTHERS

    def _put_oldest(self, group: str, due_ms: int | None) -> None:
        self._put_maximum("lisa_topic_oldest_ready_seconds", group, self._age_s(due_ms))

    def _put_archives(self, unread: Mapping[str, int]) -> None:
        head, name_of_age = self._head, "lisa_topic_archive_behind_seconds"
        for name, record in head.archives.items():
            behind = max(0, head.journaled - record.number)
            add(self._numbers, "lisa_topic_archive_behind_events", behind, self._label, name)
            self._put_maximum(name_of_age, name, self._age_s(unread.get(name)))

    def _age_s(self, at_ms: int | None) -> float:
        return 0.0 if at_ms is None else max(0.0, (self._now_ms - at_ms) / 1000)

    def _put_maximum(self, name: str, group: str | None, value: float) -> None:
        """Write the highest value of a topic's shards, or of the groups in `(others)`.

        group: the second label; for some metrics an archive, for others None.
        """
        rows = self._numbers.setdefault(name, {})
        labels = (self._label,) if group is None else (self._label, group)
        before = rows.get(labels, 0.0)
        rows[labels] = max(value, before) if isinstance(before, float) else value

    def _put_consumers(self) -> None:
        records = presence.records_in(self._head.consumers or [], presence.ConsumerPresence)
        alive = presence.alive(records, self._now_ms)
        self._processes.update(map(presence.process_of, alive))
        for name in self._groups:
            mine = [one for one in alive if name in one.groups]
            degraded = {one.name for one in mine if one.state == "degraded"}
            self._add_new("lisa_topic_consumers_alive", name, set(map(presence.process_of, mine)))
            self._add_new("lisa_topic_consumers_degraded", name, degraded)

    def _add_new(self, metric: str, group: str, members: set[str]) -> None:
        """Add the number of members that no other shard of the topic has."""
        new = {(metric, self._label, group, one) for one in members}
        if self._is_named:
            new -= self._counted
            self._counted.update(new)
        add(self._numbers, metric, len(new), self._label, self._group(group))

    def _put_options(self) -> None:
        numbers, label, head = self._numbers, self._label, self._head
        firsts = [head.first, *[own.first_again for own in self._groups.values()]]
        dues = [float(first[1]) for first in firsts if first]
        if dues:
            earliest = numbers.setdefault("lisa_topic_next_due_timestamp_seconds", {})
            known, due = earliest.get((label,)), min(dues) / 1000
            earliest[label,] = min(known, due) if isinstance(known, float) else due
        if not self._is_whole:
            return
        paused, capacity, max_ready, _ = head.options or (None, None, None, None)
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
            self._put_lateness(stats, group)

    def _put_lateness(self, stats: Mapping[str, int], group: str) -> None:
        numbers, labels = self._numbers, (self._label, group)
        late = {letter: stats.get(f"{_LATE}{letter}@{group}", 0) for letter in (*LETTERS, *FORMER)}
        histogram = [*bucket_counts(late), total_ms(late) / 1000]
        add(numbers, "lisa_topic_lateness_seconds", histogram, *labels)
        add(numbers, "lisa_topic_early_total", stats.get(f"{_LATE}{EARLY}@{group}", 0), *labels)
        highest = stats.get(f"{HIGHEST_LATENESS}@{group}")
        if highest is not None:
            self._put_maximum("lisa_topic_lateness_max_seconds", group, highest / 1000)
