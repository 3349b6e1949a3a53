"""Topics: message counts by state, counters, options, the ramp."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple

from lisa.admin.messages import selected_groups
from lisa.admin.reading import ask_all, counted, counted_pairs, stream_group, stream_ids
from lisa.core.model.clock import score_ms
from lisa.core.model.late import Ramp
from lisa.core.model.options import RAMP_LATE_MS, encode, field_of
from lisa.core.model.sharding import Topic
from lisa.core.redis.flow import Command, Flow
from lisa.core.store.registration import DELETED_LISTED_MS, IDLE_AFTER_MS
from lisa.core.store.replies import counters, summed
from lisa.core.store.reshard import spread
from lisa.core.store.store import Store, chunks, grouped
from lisa.core.transitions.base import text
from lisa.core.transitions.inspect import parted
from lisa.core.transitions.topic import Configure

TOPICS_PER_STEP = 100


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupCounts:
    """One group's message counts by state.

    `intact` is False if the group's stream is missing or one of its keys has a wrong type.
    """

    name: str
    ready: int
    in_flight: int
    retry: int
    garbage: int
    parked: int = 0
    next_retry_ms: int | None = None
    intact: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class TopicState:
    """The counts of a topic at one instant.

    next_due_ms: earliest due time of the waiting messages and all retries.
    stats: counters such as `sent`, `acked@<group>`, `late:<letter>@<group>`.
    """

    topic: str
    waiting: int
    next_due_ms: int | None
    paused: bool
    groups: tuple[GroupCounts, ...]
    stats: Mapping[str, int] = field(default_factory=dict, repr=False)

    @property
    def ready(self) -> int:
        """Due messages that are not delivered yet, over all groups."""
        return sum(group.ready for group in self.groups)

    @property
    def in_flight(self) -> int:
        """Messages that are delivered and not settled, over all groups."""
        return sum(group.in_flight for group in self.groups)

    @property
    def parked(self) -> int:
        """Due messages that wait for their lanes, over all groups."""
        return sum(group.parked for group in self.groups)

    @property
    def retry(self) -> int:
        """Messages that wait for their next attempt, over all groups."""
        return sum(group.retry for group in self.groups)

    @property
    def garbage(self) -> int:
        """Dead messages, over all groups."""
        return sum(group.garbage for group in self.groups)

    def total(self, counter: str) -> int:
        """The sum of one counter over all groups."""
        return total_of(self.stats, counter)


def total_of(counters: Mapping[str, int], counter: str) -> int:
    """The sum of one counter over all groups."""
    return sum(n for name, n in counters.items() if name.partition("@")[0] == counter)


def exists(store: Store, topic: str) -> Flow[bool]:
    """Whether a topic was registered recently or has options, groups or messages.

    The list of topics is read last, because its node may be unavailable in a cluster.
    """
    keys = store.keys.topic(topic)
    if (yield from store.command("EXISTS", keys.options, keys.groups, keys.waiting, keys.stats)):
        return True
    score = yield from store.command("ZSCORE", store.keys.topics, topic)
    deleted_ms = int(time.time() * 1000) - IDLE_AFTER_MS + DELETED_LISTED_MS
    return score is not None and float(score) > deleted_ms


def overdue_ms(states: Iterable[TopicState], now_ms: int) -> int:
    """How long the first due message has been waiting for its promotion; 0 if none is due.

    Paused topics do not count.
    """
    dues = [
        state.next_due_ms for state in states if state.next_due_ms is not None and not state.paused
    ]
    return max(0, now_ms - min(dues, default=now_ms))


def counts(store: Store, topics: Sequence[str]) -> Flow[list[TopicState]]:
    """The counts of topics in the given order, summed over shards."""
    found: list[TopicState] = []
    for part in chunks(topics, TOPICS_PER_STEP):
        parts = yield from counted(store, part)
        asked = [shard for topic in part for shard in parts[topic]]
        seen: dict[str, TopicState] = {}
        for page in chunks(asked, TOPICS_PER_STEP):
            seen |= {state.topic: state for state in (yield from _counts(store, page))}
        found += [_whole(topic, [seen[shard] for shard in parts[topic]]) for topic in part]
    return found


def _whole(topic: str, parts: Sequence[TopicState]) -> TopicState:
    """Combine the counts of a topic's shards."""
    if len(parts) == 1:
        return parts[0]
    by_name = grouped((group.name, group) for part in parts for group in part.groups)
    return TopicState(
        topic=topic,
        waiting=sum(part.waiting for part in parts),
        next_due_ms=min((part.next_due_ms for part in parts if part.next_due_ms), default=None),
        paused=any(part.paused for part in parts if part.topic == topic),
        groups=tuple(_whole_group(by_name[name]) for name in sorted(by_name)),
        stats=summed(part.stats for part in parts),
    )


def _whole_group(parts: Sequence[GroupCounts]) -> GroupCounts:
    dues = [part.next_retry_ms for part in parts if part.next_retry_ms is not None]
    return GroupCounts(
        name=parts[0].name,
        ready=sum(part.ready for part in parts),
        in_flight=sum(part.in_flight for part in parts),
        retry=sum(part.retry for part in parts),
        garbage=sum(part.garbage for part in parts),
        parked=sum(part.parked for part in parts),
        next_retry_ms=min(dues, default=None),
        intact=all(part.intact for part in parts),
    )


def _counts(store: Store, topics: Sequence[str]) -> Flow[list[TopicState]]:
    heads = yield from ask_all(
        store, [command for topic in topics for command in _head(store, topic)]
    )
    named = {
        topic: sorted(text(name) for name in heads[5 * i + 2] or ())
        for i, topic in enumerate(topics)
    }
    asked = [
        command
        for topic in topics
        for group in named[topic]
        for command in _group(store, topic, group)
    ]
    replies = iter((yield from ask_all(store, asked)))
    found = []
    for i, topic in enumerate(topics):
        waiting, first, _, paused, stats = heads[5 * i : 5 * i + 5]
        groups = tuple(
            _group_counts(name, [next(replies) for _ in range(6)]) for name in named[topic]
        )
        dues = [group.next_retry_ms for group in groups if group.next_retry_ms is not None]
        dues += [score_ms(first[1])] if first else []
        found.append(
            TopicState(
                topic=topic,
                waiting=waiting or 0,
                next_due_ms=min(dues, default=None),
                paused=paused == b"1",
                groups=groups,
                stats=counters(stats or []),
            )
        )
    return found


def _head(store: Store, topic: str) -> list[Command]:
    keys = store.keys.topic(topic)
    return [
        ("ZCARD", keys.waiting),
        ("ZRANGE", keys.waiting, 0, 0, "WITHSCORES"),
        ("HKEYS", keys.groups),
        ("HGET", keys.options, "paused"),
        ("HGETALL", keys.stats),
    ]


def _group(store: Store, topic: str, group: str) -> list[Command]:
    keys = store.keys.topic(topic).group(group)
    return [
        ("XLEN", keys.ready),
        ("XPENDING", keys.ready, group),
        ("ZCARD", keys.retry),
        ("ZCARD", keys.garbage),
        ("ZRANGE", keys.retry, 0, 0, "WITHSCORES"),
        ("HLEN", store.keys.topic(topic).lanes(group).parked),
    ]


def _group_counts(name: str, replies: list[Any]) -> GroupCounts:
    length, summary, retry, garbage, first, parked = replies
    in_flight = summary[0] if summary else 0
    return GroupCounts(
        name=name,
        ready=max(0, (length or 0) - in_flight),
        in_flight=in_flight,
        retry=retry or 0,
        garbage=garbage or 0,
        parked=parked or 0,
        next_retry_ms=score_ms(first[1]) if first else None,
        intact=None not in replies,
    )


class NextReady(NamedTuple):
    """When the next message to deliver is due, and when its first attempt was."""

    due_ms: int
    first_due_ms: int


def next_ready(
    store: Store, states: Iterable[TopicState]
) -> Flow[dict[tuple[str, str], NextReady]]:
    """The next message to deliver, by topic and group; of a sharded topic the earliest times.

    Reads only groups that have ready messages; omits groups whose messages have gone meanwhile.
    """
    lines = [(state.topic, group.name) for state in states for group in state.groups if group.ready]
    found: dict[tuple[str, str], NextReady] = {}
    for part in chunks(lines, TOPICS_PER_STEP):
        parts = yield from counted(store, list(dict.fromkeys(topic for topic, _ in part)))
        asked = [(line, shard) for line in part for shard in parts[line[0]]]
        keys = [store.keys.topic(shard).group(line[1]) for line, shard in asked]
        infos = yield from ask_all(store, [("XINFO", "GROUPS", key.ready) for key in keys])
        after = [
            fields["last-delivered-id"].decode() if (fields := stream_group(info, group)) else "0-0"
            for info, ((_, group), _) in zip(infos, asked, strict=True)
        ]
        ranges = [
            ("XRANGE", key.ready, f"({entry}", "+", "COUNT", 1)
            for key, entry in zip(keys, after, strict=True)
        ]
        replies = yield from ask_all(store, ranges)
        heads = [(*stream_ids(items), ("", b"", None))[0] for items in replies]
        notes = yield from ask_all(
            store,
            [
                ("HGET", key.reasons, one or b"")
                for key, (_, one, _) in zip(keys, heads, strict=True)
            ],
        )
        for (line, _), (_, _, due), note in zip(asked, heads, notes, strict=True):
            if due is not None and due.isdigit():
                ready = NextReady(int(due), parted(note or b"").first_due_ms or int(due))
                found[line] = NextReady(*map(min, ready, found.get(line, ready)))
    return found


def due_waiting(store: Store, states: Iterable[TopicState], now_ms: int) -> Flow[dict[str, int]]:
    """Waiting messages that are due, by topic; reads only topics that may have some."""
    names = [state.topic for state in states if (state.next_due_ms or now_ms) < now_ms]
    found: dict[str, int] = {}
    for part in chunks(names, TOPICS_PER_STEP):
        asked = yield from counted_pairs(store, part)
        counts = yield from ask_all(
            store,
            [("ZCOUNT", store.keys.topic(shard).waiting, "-inf", now_ms) for _, shard in asked],
        )
        for (topic, _), n in zip(asked, counts, strict=True):
            found[topic] = found.get(topic, 0) + (n or 0)
    return found


def set_options(
    store: Store, topic: str, options: Mapping[str, object], group: str | None = None
) -> Flow[int]:
    """Set options from text or typed values; returns how many changed. Raises ConfigError.

    Options set here override the configuration of managers. group: sets the values of one group,
    which replace those of the topic. Raises GroupRemoved if it is not declared.
    """
    encoded = encode({field_of(name, group): value for name, value in options.items()})
    yield from selected_groups(store, topic, group)
    yield from store.register([topic])
    return (yield from _configure(store, topic, encoded))


def unset_options(
    store: Store, topic: str, names: Iterable[str], group: str | None = None
) -> Flow[int]:
    """Reset options to their defaults, or to a manager's configuration at its next start.

    group: resets the values of one group, to which those of the topic then apply.
    """
    return (yield from _configure(store, topic, {field_of(name, group): None for name in names}))


def _configure(store: Store, topic: str, values: Mapping[str, str | None]) -> Flow[int]:
    """Write options in every shard of the topic; returns how many changed."""
    changed = yield from store.run(Configure(topic, values))
    yield from spread(store, Topic(topic))
    return changed


def pause(store: Store, topic: str) -> Flow[bool]:
    """Pause promotion and delivery; returns whether the topic was running."""
    return (yield from _configure(store, topic, {"paused": "1"})) > 0


def resume(store: Store, topic: str) -> Flow[bool]:
    """Resume a topic; returns whether it was paused."""
    before = yield from store.command("HGET", store.keys.topic(topic).options, "paused")
    yield from _configure(store, topic, {"paused": "0"})
    return bool(before == b"1")


class RampState(NamedTuple):
    """Messages of the backlog, and how long their promotion takes at the ramp's rate."""

    backlog: int
    lasts: timedelta


def ramp_state(store: Store, topic: str, ramp: Ramp, now_ms: int) -> Flow[RampState]:
    """The state of a topic's ramp; the fullest shard decides how long it takes."""
    layout = yield from store.layout(Topic(topic))
    shards = layout.active(Topic(topic))
    late_ms = now_ms - RAMP_LATE_MS
    commands = [("ZCOUNT", store.keys.topic(shard).waiting, "-inf", late_ms) for shard in shards]
    counts = yield from store.commands(commands)
    return RampState(sum(counts), ramp.share(layout.shards).lasts(max(counts)))
