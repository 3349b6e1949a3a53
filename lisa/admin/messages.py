"""Messages by state, page by page, with a cursor that stays valid while they come and go."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

from lisa.admin.parts import places
from lisa.admin.reading import (
    Position,
    ask_stream,
    entry_number,
    sorted_page,
    stream_group,
    stream_ids,
)
from lisa.core.errors import ConfigError, GroupRemoved
from lisa.core.flow import Flow
from lisa.core.pages import PAGE, readable
from lisa.core.shards import base
from lisa.core.store import Store, chunks
from lisa.core.transitions.inspect import Inspect, Inspection

__all__ = ["Page", "Row", "State", "list_messages"]


MOST_SEQUENCE = 2**64 - 1
"""The last part of a stream entry id goes up to it."""


class State(StrEnum):
    """Where a live message may stand."""

    WAITING = "waiting"
    READY = "ready"
    IN_FLIGHT = "in_flight"
    RETRY = "retry"
    GARBAGE = "garbage"


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One message in one place. `group` is None while it waits.

    `due_ms` is the due time of the present or next attempt; in garbage, the time of death.
    `attempts` counts those that failed.
    """

    id: str
    topic: str
    state: State
    group: str | None
    due_ms: int | None
    attempts: int = 0
    consumer: str | None = None
    idle_ms: int | None = None
    reason: str | None = None
    expires_ms: int | None = None


@dataclass(frozen=True, slots=True)
class Page:
    """Some rows, and the cursor of what follows them; None at the end."""

    rows: tuple[Row, ...]
    cursor: str | None


class _Candidate(NamedTuple):
    """An id that stood in the wanted place, and the cursor behind it."""

    id: bytes
    behind: str

    @property
    def order(self) -> tuple[Any, ...]:
        """Where it comes among candidates of several shards."""
        head, colon, _ = self.behind.partition(":")
        return (int(head), self.id) if colon else entry_number(self.behind)


class _Found(NamedTuple):
    """A candidate, and which one of the topic's shards has it."""

    at: _Place
    id: bytes


def list_messages(
    store: Store,
    topic: str,
    state: State,
    *,
    group: str | None = None,
    due_before_ms: int | None = None,
    cursor: str | None = None,
    limit: int = 100,
) -> Flow[Page]:
    """Messages of a topic in one state: by due time, or in order of delivery where in a stream.

    Without `group` those of all groups, one group after the other. `due_before_ms` keeps those due
    before that instant (garbage: that died before it). Raises GroupRemoved, and ConfigError for a
    cursor that is none.
    """
    if state is State.WAITING:
        groups: Sequence[str] = [""]
    else:
        groups = yield from store.groups(topic)
        if group is not None:
            if group not in groups:
                raise GroupRemoved(f"group {group!r} is not declared on topic {topic!r}")
            groups = [group]
    first, slash, behind = (cursor or "/").partition("/")
    if not slash:
        raise ConfigError(f"{cursor!r} is no cursor of this list; leave it out")
    parts = yield from places(store, topic)
    rows: list[Row] = []
    for name in groups:
        if name < first:
            continue
        shards = [_Place(one, name, state, due_before_ms) for one in parts]
        position: str | None = behind if name == first else ""
        while position is not None:
            wanted = min(limit - len(rows), PAGE)
            if wanted <= 0:
                return Page(tuple(rows), f"{name}/{position}")
            try:
                found, position = yield from _merged(store, shards, position, wanted)
            except ValueError:
                raise ConfigError(f"{cursor!r} is no cursor of this list; leave it out") from None
            rows += yield from _rows(store, found)
    return Page(tuple(rows), None)


class _Place(NamedTuple):
    """Where is looked; in `waiting` the group is empty."""

    topic: str  # one place of it, where it is split
    group: str
    state: State
    before_ms: int | None


def _merged(
    store: Store, shards: Sequence[_Place], position: str, wanted: int
) -> Flow[tuple[list[_Found], str | None]]:
    """Ids of all shards behind a position, in one order, and the next position; None at the end.

    A position stands for the same in each shard, but that streams may hold equal entry ids: then
    it also names the shard, `ENTRY@NUMBER`, and those behind that one have not come to it yet.
    """
    if len(shards) == 1:
        own, after = yield from _candidates(store, shards[0], position, wanted)
        return [_Found(shards[0], one.id) for one in own], after
    in_streams = shards[0].state in (State.READY, State.IN_FLIGHT)
    entry, at, number = position.rpartition("@") if in_streams else ("", "", "")
    found: list[tuple[tuple[Any, ...], int, _Candidate]] = []
    is_more = False
    for i, shard in enumerate(shards):
        start = position if not at else entry if i <= int(number) else _before(entry)
        own, after = yield from _candidates(store, shard, start, wanted)
        found += [(one.order, i, one) for one in own]
        is_more |= after is not None
    found.sort()
    taken = found[:wanted]
    rows = [_Found(shards[i], one.id) for _, i, one in taken]
    if not taken or (len(taken) == len(found) and not is_more):
        return rows, None
    _, i, last = taken[-1]
    return rows, f"{last.behind}@{i}" if in_streams else last.behind


def _before(entry: str) -> str:
    """The entry id right before this one."""
    milliseconds, sequence = entry_number(entry)
    if sequence:
        return f"{milliseconds}-{sequence - 1}"
    return f"{max(0, milliseconds - 1)}-{MOST_SEQUENCE}"


def _candidates(
    store: Store, place: _Place, position: str, wanted: int
) -> Flow[tuple[list[_Candidate], str | None]]:
    """Candidates behind a position, and the next position; None at the end."""
    keys = store.keys.topic(place.topic)
    if place.state in (State.READY, State.IN_FLIGHT):
        read = _ready if place.state is State.READY else _in_flight
        stream = keys.group(place.group).ready
        found = yield from read(store, stream, place.group, position, wanted)
        return found, found[-1].behind if len(found) == wanted else None
    if place.state is State.WAITING:
        key = keys.waiting
    else:
        own = keys.group(place.group)
        key = own.retry if place.state is State.RETRY else own.garbage
    score, _, member = position.partition(":")
    after = Position(int(score), member) if position else None
    members = yield from sorted_page(store, key, after, wanted)
    inside = [one for one in members if place.before_ms is None or one[1] < place.before_ms]
    candidates = [
        _Candidate(one, f"{due}:{one.decode('utf-8', 'surrogateescape')}") for one, due in inside
    ]
    return candidates, None if len(inside) < wanted else candidates[-1].behind


def _ready(
    store: Store, key: str, group: str, position: str, wanted: int
) -> Flow[list[_Candidate]]:
    info = stream_group((yield from ask_stream(store, "XINFO", "GROUPS", key)), group)
    if info is None:
        return []
    start = info["last-delivered-id"].decode()
    if position and entry_number(position) > entry_number(start):
        start = position
    items = yield from store.command("XRANGE", key, f"({start}", "+", "COUNT", wanted)
    return [_Candidate(one or b"", entry) for entry, one, _ in stream_ids(items)]


def _in_flight(
    store: Store, key: str, group: str, position: str, wanted: int
) -> Flow[list[_Candidate]]:
    start = "({}-{}".format(*entry_number(position)) if position else "-"
    held = yield from ask_stream(store, "XPENDING", key, group, start, "+", wanted)
    entries = [item[0] for item in held or ()]
    items = yield from store.commands([("XRANGE", key, one, one) for one in entries])
    found = []
    for entry, item in zip(entries, items, strict=True):
        named = stream_ids(item)[0][1] if item else None
        found.append(_Candidate(named or b"", entry.decode()))
    return found


def _rows(store: Store, found: Sequence[_Found]) -> Flow[list[Row]]:
    """What is (still) in that state, as the server sees each id in one step."""
    by_place: dict[_Place, list[bytes]] = {}
    for candidate in found:
        by_place.setdefault(candidate.at, []).append(candidate.id)
    rows: dict[bytes, Row] = {}
    for place, raw in by_place.items():
        ids, _ = readable([one for one in raw if one])
        for some in chunks(ids, store.batch_size(place.topic, Inspect)):
            seen = yield from store.run(Inspect(place.topic, some, bodies=False))
            for one, inspection in zip(some, seen, strict=True):
                row = _row(place, one, inspection)
                if row and (place.before_ms is None or (row.due_ms or 0) < place.before_ms):
                    rows[one.encode()] = row
    return [rows[one] for one in dict.fromkeys(each.id for each in found) if one in rows]


def _row(place: _Place, one: str, seen: Inspection) -> Row | None:
    if place.state is State.WAITING:
        if seen.waiting_due_ms is None:
            return None
        return Row(
            id=one, topic=base(place.topic), state=place.state, group=None,
            due_ms=seen.waiting_due_ms, expires_ms=seen.expires_ms,
        )  # fmt: skip
    for there in seen.places:
        if there.group == place.group and there.state == place.state.value:
            return Row(
                id=one, topic=base(place.topic), state=place.state, group=place.group,
                due_ms=there.due_ms, attempts=there.failed_attempts, consumer=there.consumer,
                idle_ms=there.idle_ms, reason=there.reason, expires_ms=seen.expires_ms,
            )  # fmt: skip
    return None
