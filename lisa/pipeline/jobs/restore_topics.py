"""Prepares topics for a restore: checks journals, and restores options and groups."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from lisa.admin.topics import counts as topic_counts
from lisa.core.model.errors import ConfigError
from lisa.core.model.sharding import Topic, count_of
from lisa.core.redis.flow import Flow
from lisa.core.store import group_removal
from lisa.core.store.replies import pairs
from lisa.core.store.reshard import spread
from lisa.core.store.store import Store, SyncStore, grouped
from lisa.core.transitions.base import text
from lisa.core.transitions.groups import Declare
from lisa.core.transitions.topic import Configure
from lisa.pipeline.jobs import journal_tail
from lisa.pipeline.jobs.journal_tail import Remainder
from lisa.pipeline.jobs.message_history import topics_in
from lisa.pipeline.server import Server, check_layout, started_ms

if TYPE_CHECKING:
    from lisa.pipeline.archive import Archive


class Survey(NamedTuple):
    """The state of the server before a restore.

    now, started: the server's clock, and when its process started, in epoch ms.
    is_empty: whether none of the archive's topics has live messages.
    remainders: of all journals. groups: topic -> its groups, including restored ones.
    """

    now: int
    started: int
    is_empty: bool
    remainders: Sequence[Remainder]
    groups: Mapping[str, tuple[str, ...]]


def survey(
    server: Server, archive: Archive, topics: Sequence[str] | None, *, dry_run: bool
) -> Survey:
    """Read the state of the server; unless `dry_run`, prepare its topics."""
    with server.open() as store:
        store.drive(check_layout(store) if dry_run else store.check_schema())
        now = store.drive(store.server_time_ms())
        started = store.drive(started_ms(store))
        journals = {*archive.topics(), *archive.offsets()}
        is_empty = not any(store.drive(_has_live_messages(store, journal)) for journal in journals)
        return Survey(now, started, is_empty, *prepare(store, archive, topics, dry_run=dry_run))


def prepare(
    store: SyncStore, archive: Archive, topics: Sequence[str] | None, *, dry_run: bool
) -> tuple[list[Remainder], dict[str, tuple[str, ...]]]:
    """The remainders of all journals, and topic -> its groups, including restored ones.

    Restores missing groups and options of a topic that came back empty or older, or that has lost
    its shard layout.
    """
    records = archive.topics()
    names = topics_in(archive, topics)
    remainders, groups = store.drive(journal_tail.find_remainders(store, archive, names)), {}
    journals = grouped((one.topic, one) for one in remainders)
    for topic in names:
        seen = journals[topic]
        layout = store.drive(store.layout(Topic(topic)))
        for one in seen:
            if one.whole and one.journal in layout.active(Topic(topic)):
                store.drive(_check_journal(store, one))
        here = store.drive(store.groups(topic))
        scattered = not layout.number and any(one.shard for one in seen)
        is_whole = all(one.whole for one in seen) and not scattered
        lost = None if is_whole else records.get(topic)
        wanted = lost.groups if lost else ()
        if not dry_run:
            lacking = [name for name in wanted if name not in here]
            store.drive(rebuild(store, topic, lacking, lost.options if lost else {}))
        groups[topic] = tuple(sorted({*here, *wanted}))
    return remainders, groups


def _has_live_messages(store: Store, topic: str) -> Flow[bool]:
    """Whether a topic, or one of its shards, has live messages."""
    (counts,) = yield from topic_counts(store, [topic])
    return counts.waiting > 0 or any(
        group.ready or group.in_flight or group.retry or group.garbage for group in counts.groups
    )


def _check_journal(store: Store, remainder: Remainder) -> Flow[None]:
    """Raises ConfigError if a topic was not lost, but its journal has been turned off."""
    keeps = yield from store.command("HGET", store.keys.topic(remainder.journal).options, "journal")
    if keeps != b"1":
        raise ConfigError(
            f"topic {remainder.topic!r} was not lost, but its journal is off: messages settled "
            "since then are unknown and would be delivered again; select other topics with --topic"
        )


def rebuild(
    store: Store, topic: str, groups: Iterable[str], options: Mapping[str, str]
) -> Flow[None]:
    """Register a topic, and restore its missing options and groups on all shards.

    Does not restore a pause, or the marker of a pending group removal, which old archives contain.
    """
    yield from store.register([topic])
    reply = yield from store.command("HGETALL", store.keys.topic(topic).options)
    there = {text(name) for name in pairs(reply)}
    lacking = {
        name: value
        for name, value in options.items()
        if name != "paused" and not group_removal.is_mark(name) and name not in there
    }
    if lacking:
        yield from store.run(Configure(topic, lacking))
    for group in groups:
        yield from store.run(Declare(topic, group, unlimited=True))
    yield from spread(store, Topic(topic))


def shard_counts(remainders: Sequence[Remainder]) -> dict[str, list[int]]:
    """Topic -> the shard counts that it is known to have had."""
    counts = grouped((one.topic, count_of(one.journal)) for one in remainders if one.shard)
    return {topic: sorted(set(own)) for topic, own in counts.items()}
