"""Lists messages by state in pages, with cursors that stay valid while messages change state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, NamedTuple

from lisa.admin.reading import (
    Position,
    ask_stream,
    entry_number,
    pending_entries,
    shards,
    sorted_page,
    stream_group,
    stream_ids,
)
from lisa.core.model.errors import ConfigError, GroupRemoved
from lisa.core.model.options import PLACE_BYTES
from lisa.core.model.sharding import KEY_END, topic_of
from lisa.core.redis.flow import Flow
from lisa.core.store.paging import PAGE, readable
from lisa.core.store.store import Store, chunks, grouped
from lisa.core.transitions.inspect import Inspect, Inspection

MOST_SEQUENCE = 2**64 - 1
"""The highest sequence number of a stream entry id."""


class LiveState(StrEnum):
    """The states of a live message."""

    WAITING = "waiting"
    READY = "ready"
    IN_FLIGHT = "in_flight"
    PARKED = "parked"
    RETRY = "retry"
    GARBAGE = "garbage"


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One message in one state; `group` is None in state `waiting`.

    due_ms: due time of the current or next attempt; in garbage, the time of death.
    attempts: number of failed attempts.
    deferrals: how often the message was deferred since its last failure.
    """

    id: str
    topic: str
    state: LiveState
    group: str | None
    due_ms: int | None
    attempts: int = 0
    deferrals: int = 0
    consumer: str | None = None
    idle_ms: int | None = None
    reason: str | None = None
    traceback: str | None = None
    expires_ms: int | None = None


@dataclass(frozen=True, slots=True)
class MessagePage:
    """A page of rows, and the cursor of the next page; None at the end."""

    rows: tuple[Row, ...]
    cursor: str | None


class Candidate(NamedTuple):
    """An id that was in the requested state, and the position after it."""

    id: bytes
    behind: str

    @property
    def order(self) -> tuple[Any, ...]:
        """Sort key among the candidates of several shards."""
        head, colon, _ = self.behind.partition(":")
        return (int(head), self.id) if colon else entry_number(self.behind)


class FoundAt(NamedTuple):
    """A candidate and its source."""

    at: MessageSource
    id: bytes


def list_messages(
    store: Store,
    topic: str,
    state: LiveState,
    *,
    group: str | None = None,
    due_before_ms: int | None = None,
    cursor: str | None = None,
    limit: int = 100,
) -> Flow[MessagePage]:
    """List messages of a topic in one state, by due time, or in streams by order of delivery.

    group: only this group; by default all groups, one after the other. Waiting messages are for
        all groups.
    due_before_ms: only messages due before this instant (garbage: dead before it).

    Raises GroupRemoved if the group is not declared, and ConfigError for an invalid cursor.
    """
    groups = yield from selected_groups(store, topic, group)
    if state is LiveState.WAITING:
        groups = [""]
    first, slash, behind = (cursor or "/").partition("/")
    if not slash:
        raise ConfigError(f"{cursor!r} is not a cursor of this list; omit it")
    names = yield from shards(store, topic)
    rows: list[Row] = []
    for name in groups:
        if name < first:
            continue
        sources = [MessageSource(shard, name, state, due_before_ms) for shard in names]
        position: str | None = behind if name == first else ""
        while position is not None:
            wanted = min(limit - len(rows), PAGE)
            if wanted <= 0:
                return MessagePage(tuple(rows), f"{name}/{position}")
            try:
                found, position = yield from _merged(store, sources, position, wanted)
            except ValueError:
                raise ConfigError(f"{cursor!r} is not a cursor of this list; omit it") from None
            rows += yield from rows_of(store, found)
    return MessagePage(tuple(rows), None)


def selected_groups(store: Store, topic: str, group: str | None) -> Flow[Sequence[str]]:
    """The group, or all groups of a topic. Raises GroupRemoved."""
    groups = yield from store.groups(topic)
    if group is None:
        return groups
    if group not in groups:
        raise GroupRemoved(f"group {group!r} is not declared on topic {topic!r}")
    return [group]


class MessageSource(NamedTuple):
    """One state of one shard and group; in `waiting` the group is empty."""

    shard: str
    group: str
    state: LiveState
    before_ms: int | None


def _merged(
    store: Store, sources: Sequence[MessageSource], position: str, wanted: int
) -> Flow[tuple[list[FoundAt], str | None]]:
    """Ids of all shards after a position in one order, and the next position; None at the end.

    A position applies to every shard. Streams of several shards may have equal entry ids, so their
    positions also name a shard, `ENTRY@NUMBER`: later shards have not listed that entry yet.
    """
    if len(sources) == 1:
        own, after = yield from candidates(store, sources[0], position, wanted)
        return [FoundAt(sources[0], candidate.id) for candidate in own], after
    in_streams = sources[0].state in (LiveState.READY, LiveState.IN_FLIGHT)
    entry, at, number = position.rpartition("@") if in_streams else ("", "", "")
    found: list[tuple[tuple[Any, ...], int, Candidate]] = []
    is_more = False
    for i, source in enumerate(sources):
        start = position if not at else entry if i <= int(number) else _before(entry)
        own, after = yield from candidates(store, source, start, wanted)
        found += [(candidate.order, i, candidate) for candidate in own]
        is_more |= after is not None
    found.sort()
    taken = found[:wanted]
    rows = [FoundAt(sources[i], one.id) for _, i, one in taken]
    if not taken or (len(taken) == len(found) and not is_more):
        return rows, None
    _, i, last = taken[-1]
    return rows, f"{last.behind}@{i}" if in_streams else last.behind


def _before(entry: str) -> str:
    """The highest entry id below this one."""
    milliseconds, sequence = entry_number(entry)
    if sequence:
        return f"{milliseconds}-{sequence - 1}"
    return f"{max(0, milliseconds - 1)}-{MOST_SEQUENCE}"


def candidates(
    store: Store, source: MessageSource, position: str, wanted: int
) -> Flow[tuple[list[Candidate], str | None]]:
    """Candidates after a position, and the next position; None at the end.

    Raises ValueError for an invalid position.
    """
    keys = store.keys.topic(source.shard)
    if source.state in (LiveState.READY, LiveState.IN_FLIGHT):
        if position and max(entry_number(position)) > MOST_SEQUENCE:
            raise ValueError(position)
        read = _ready if source.state is LiveState.READY else _in_flight
        stream = keys.group(source.group).ready
        found = yield from read(store, stream, source.group, position, wanted)
        return found, found[-1].behind if len(found) == wanted else None
    if source.state is LiveState.WAITING:
        key = keys.waiting
    elif source.state is LiveState.PARKED:
        return (yield from _parked(store, keys.lanes(source.group).queues, position, wanted))
    else:
        own = keys.group(source.group)
        key = own.retry if source.state is LiveState.RETRY else own.garbage
    score, _, member = position.partition(":")
    known = member.encode("utf-8", "surrogateescape")
    after = Position(int(score), known) if position else None
    members = yield from sorted_page(store, key, after, wanted)
    inside = [
        member for member in members if source.before_ms is None or member.score < source.before_ms
    ]
    candidates = [
        Candidate(one, f"{due}:{one.decode('utf-8', 'surrogateescape')}") for due, one in inside
    ]
    return candidates, None if len(inside) < wanted else candidates[-1].behind


def _parked(
    store: Store, key: str, position: str, wanted: int
) -> Flow[tuple[list[Candidate], str | None]]:
    """Parked messages lane by lane. Members of `queues`: a key, a place, the rest of an id."""
    place = position.partition(":")[2].encode("utf-8", "surrogateescape")
    start = b"(" + place if position else b"-"
    members = yield from store.command("ZRANGE", key, start, "+", "BYLEX", "LIMIT", 0, wanted)
    found = []
    for member in members:
        behind = f"0:{member.decode('utf-8', 'surrogateescape')}"
        own_key, _, rest = member.partition(KEY_END.encode())
        own_id = rest[PLACE_BYTES:]
        whole = own_key + KEY_END.encode() + own_id if own_key else own_id
        found.append(Candidate(whole, behind))
    return found, found[-1].behind if len(found) == wanted else None


def _ready(store: Store, key: str, group: str, position: str, wanted: int) -> Flow[list[Candidate]]:
    fields = stream_group((yield from ask_stream(store, "XINFO", "GROUPS", key)), group)
    if fields is None:
        return []
    start = fields["last-delivered-id"].decode()
    if position and entry_number(position) > entry_number(start):
        start = position
    items = yield from store.command("XRANGE", key, f"({start}", "+", "COUNT", wanted)
    return [Candidate(one or b"", entry) for entry, one, _ in stream_ids(items)]


def _in_flight(
    store: Store, key: str, group: str, position: str, wanted: int
) -> Flow[list[Candidate]]:
    start = "({}-{}".format(*entry_number(position)) if position else "-"
    held = yield from pending_entries(store, key, group, start, wanted)
    found = []
    for row, item in held:
        named = stream_ids([item])[0][1] if item else None
        found.append(Candidate(named or b"", row[0].decode()))
    return found


def rows_of(store: Store, found: Sequence[FoundAt]) -> Flow[list[Row]]:
    """Rows of the candidates that are still in the requested state."""
    rows: dict[tuple[MessageSource, bytes], Row] = {}
    for source, raw in grouped(found).items():
        ids, _ = readable([raw_id for raw_id in raw if raw_id])
        for part in chunks(ids, store.batch_size(source.shard, Inspect)):
            seen = yield from store.run(Inspect(source.shard, part, bodies=False))
            for message_id, inspection in zip(part, seen, strict=True):
                row = _row(source, message_id, inspection)
                if row and (source.before_ms is None or (row.due_ms or 0) < source.before_ms):
                    rows[source, message_id.encode()] = row
    return [
        rows[place]
        for place in dict.fromkeys((each.at, each.id) for each in found)
        if place in rows
    ]


def _row(source: MessageSource, one: str, seen: Inspection) -> Row | None:
    row = Row(
        id=one,
        topic=topic_of(source.shard),
        state=source.state,
        group=source.group or None,
        due_ms=seen.waiting_due_ms,
        expires_ms=seen.expires_ms,
    )
    if source.state is LiveState.WAITING:
        return None if row.due_ms is None else row
    for in_group in seen.group_states:
        if in_group.group == source.group and in_group.state == source.state.value:
            return replace(
                row,
                due_ms=in_group.due_ms,
                attempts=in_group.failed_attempts,
                deferrals=in_group.deferrals,
                consumer=in_group.consumer,
                idle_ms=in_group.idle_ms,
                reason=in_group.reason,
                traceback=in_group.traceback,
            )
    return None
