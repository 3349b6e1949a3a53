"""Topics: how many messages stand where, counters, options."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from lisa.admin.parts import counted, summed
from lisa.admin.reading import ask_all
from lisa.core.errors import ConfigError
from lisa.core.flow import Command, Flow
from lisa.core.options import TopicOptions, encode
from lisa.core.spread import spread
from lisa.core.store import Store, chunks, counters
from lisa.core.transitions.base import text
from lisa.core.transitions.configure import Configure

__all__ = [
    "GroupCounts",
    "TopicCounts",
    "counts",
    "exists",
    "pause",
    "resume",
    "set_options",
    "unset_options",
]

TOPICS_PER_STEP = 100


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupCounts:
    """How many messages of a topic one group has in each state.

    `intact` is False where the group's stream is missing or another type of key stands in a place.
    """

    name: str
    ready: int
    in_flight: int
    retry: int
    garbage: int
    next_retry_ms: int | None = None
    intact: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class TopicCounts:
    """A topic at one instant: `waiting`, each group's counts, and the counters so far.

    `next_due_ms` is the earliest due time in waiting or any group's retry. `stats` has the names
    `sent`, `acked@<group>`, `late:<letter>@<group>` and so on.
    """

    topic: str
    waiting: int
    next_due_ms: int | None
    paused: bool
    groups: tuple[GroupCounts, ...]
    stats: Mapping[str, int] = field(default_factory=dict, repr=False)

    def total(self, counter: str) -> int:
        """One counter over all groups."""
        head = f"{counter}@"
        own = self.stats.get(counter, 0)
        return own + sum(n for name, n in self.stats.items() if name.startswith(head))


def exists(store: Store, topic: str) -> Flow[bool]:
    """Whether anything is known of a topic: its registration, options, groups or messages."""
    keys = store.keys.topic(topic)
    score, found = yield from store.commands([
        ("ZSCORE", store.keys.topics, topic),
        ("EXISTS", keys.options, keys.groups, keys.waiting, keys.stats),
    ])  # fmt: skip
    return score is not None or found > 0


def counts(store: Store, topics: Sequence[str]) -> Flow[list[TopicCounts]]:
    """The state of topics, in the order given; all shards of one together."""
    found: list[TopicCounts] = []
    for some in chunks(topics, TOPICS_PER_STEP):
        parts = yield from counted(store, some)
        asked = [place for topic in some for place in parts[topic]]
        seen: dict[str, TopicCounts] = {}
        for page in chunks(asked, TOPICS_PER_STEP):
            seen |= {one.topic: one for one in (yield from _counts(store, page))}
        found += [_whole(topic, [seen[place] for place in parts[topic]]) for topic in some]
    return found


def _whole(topic: str, parts: Sequence[TopicCounts]) -> TopicCounts:
    """Several places as one topic."""
    if len(parts) == 1:
        return parts[0]
    by_name: dict[str, list[GroupCounts]] = {}
    for part in parts:
        for group in part.groups:
            by_name.setdefault(group.name, []).append(group)
    return TopicCounts(
        topic=topic, waiting=sum(one.waiting for one in parts),
        next_due_ms=min((one.next_due_ms for one in parts if one.next_due_ms), default=None),
        paused=any(one.paused for one in parts if one.topic == topic),
        groups=tuple(_whole_group(by_name[name]) for name in sorted(by_name)),
        stats=summed(one.stats for one in parts),
    )  # fmt: skip


def _whole_group(parts: Sequence[GroupCounts]) -> GroupCounts:
    dues = [one.next_retry_ms for one in parts if one.next_retry_ms is not None]
    return GroupCounts(
        name=parts[0].name, ready=sum(one.ready for one in parts),
        in_flight=sum(one.in_flight for one in parts), retry=sum(one.retry for one in parts),
        garbage=sum(one.garbage for one in parts), next_retry_ms=min(dues, default=None),
        intact=all(one.intact for one in parts),
    )  # fmt: skip


def _counts(store: Store, topics: Sequence[str]) -> Flow[list[TopicCounts]]:
    heads = yield from ask_all(store, [one for topic in topics for one in _head(store, topic)])
    named = {
        topic: sorted(text(name) for name in heads[5 * i + 2] or ())
        for i, topic in enumerate(topics)
    }
    asked = [
        one for topic in topics for group in named[topic] for one in _group(store, topic, group)
    ]
    replies = iter((yield from ask_all(store, asked)) if asked else ())
    found = []
    for i, topic in enumerate(topics):
        waiting, first, _, paused, stats = heads[5 * i : 5 * i + 5]
        groups = tuple(_group_counts(name, [next(replies) for _ in range(5)])
                       for name in named[topic])  # fmt: skip
        dues = [group.next_retry_ms for group in groups if group.next_retry_ms is not None]
        dues += [int(float(first[1]))] if first else []
        found.append(
            TopicCounts(
                topic=topic, waiting=waiting or 0, next_due_ms=min(dues, default=None),
                paused=paused == b"1", groups=groups,
                stats=counters(stats or []),
            )
        )  # fmt: skip
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
    ]


def _group_counts(name: str, replies: list[Any]) -> GroupCounts:
    length, summary, retry, garbage, first = replies
    in_flight = summary[0] if summary else 0
    return GroupCounts(
        name=name, ready=max(0, (length or 0) - in_flight), in_flight=in_flight,
        retry=retry or 0, garbage=garbage or 0,
        next_retry_ms=int(float(first[1])) if first else None,
        intact=None not in replies,
    )  # fmt: skip


def set_options(store: Store, topic: str, options: Mapping[str, object]) -> Flow[int]:
    """Write options, as a person gives them; answers how many changed. Raises ConfigError.

    What is set so stays, whatever a manager's configuration declares later.
    """
    encoded = encode(options)
    yield from store.register([topic])
    return (yield from _configure(store, topic, encoded))


def unset_options(store: Store, topic: str, names: Iterable[str]) -> Flow[int]:
    """Take options back to what a configuration declares at its next start, else the default."""
    values: dict[str, str | None] = {}
    known = [option.name for option in fields(TopicOptions)]
    for given in names:
        name = given.replace("-", "_")
        if name not in known:
            raise ConfigError(f"there is no topic option {given!r}; there are {', '.join(known)}")
        values[name] = None
    return (yield from _configure(store, topic, values))


def _configure(store: Store, topic: str, values: Mapping[str, str | None]) -> Flow[int]:
    """Write options, in every place of the topic; how many changed."""
    changed = yield from store.run(Configure(topic, values))
    yield from spread(store, topic)
    return changed


def pause(store: Store, topic: str) -> Flow[bool]:
    """Stop promoting, reading and pulling; answers whether it ran before."""
    return (yield from _configure(store, topic, {"paused": "1"})) > 0


def resume(store: Store, topic: str) -> Flow[bool]:
    """Go on; answers whether it was paused before."""
    before = yield from store.command("HGET", store.keys.topic(topic).options, "paused")
    yield from _configure(store, topic, {"paused": "0"})
    return bool(before == b"1")
