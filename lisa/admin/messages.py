"""Messages by state, page by page, with a cursor that stays valid while they come and go."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from lisa.admin.reading import (
    PAGE,
    Position,
    ask_stream,
    entry_number,
    readable,
    sorted_page,
    stream_group,
    stream_ids,
)
from lisa.core.errors import ConfigError, GroupRemoved
from lisa.core.flow import Flow
from lisa.core.store import Store, chunks
from lisa.core.transitions.inspect import Inspect, Inspection

__all__ = ["Page", "Row", "State", "list_messages"]


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
    rows: list[Row] = []
    for name in groups:
        if name < first:
            continue
        place = _Place(topic, name, state, due_before_ms)
        position: str | None = behind if name == first else ""
        while position is not None:
            wanted = min(limit - len(rows), PAGE)
            if wanted <= 0:
                return Page(tuple(rows), f"{name}/{position}")
            try:
                found, position = yield from _candidates(store, place, position, wanted)
            except ValueError:
                raise ConfigError(f"{cursor!r} is no cursor of this list; leave it out") from None
            rows += yield from _rows(store, place, found)
    return Page(tuple(rows), None)


class _Place(NamedTuple):
    """Where is looked; in `waiting` the group is empty."""

    topic: str
    group: str
    state: State
    before_ms: int | None


def _candidates(
    store: Store, place: _Place, position: str, wanted: int
) -> Flow[tuple[list[bytes], str | None]]:
    """Ids behind a position, and the next position; None at the end."""
    keys = store.keys.topic(place.topic)
    if place.state in (State.READY, State.IN_FLIGHT):
        read = _ready if place.state is State.READY else _in_flight
        stream = keys.group(place.group).ready
        found = yield from read(store, stream, place.group, position, wanted)
        return [one.id for one in found], found[-1].behind if len(found) == wanted else None
    if place.state is State.WAITING:
        key = keys.waiting
    else:
        own = keys.group(place.group)
        key = own.retry if place.state is State.RETRY else own.garbage
    score, _, member = position.partition(":")
    after = Position(int(score), member) if position else None
    members = yield from sorted_page(store, key, after, wanted)
    inside = [one for one in members if place.before_ms is None or one[1] < place.before_ms]
    if len(inside) < wanted:
        return [one for one, _ in inside], None
    last, due = inside[-1]
    return [one for one, _ in inside], f"{due}:{last.decode('utf-8', 'surrogateescape')}"


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


def _rows(store: Store, place: _Place, found: Sequence[bytes]) -> Flow[list[Row]]:
    """What is (still) in that state, as the server sees each id in one step."""
    ids, _ = readable([one for one in found if one])
    rows: list[Row] = []
    for some in chunks(ids, store.batch_size(place.topic, Inspect)):
        seen = yield from store.run(Inspect(place.topic, some, bodies=False))
        for one, inspection in zip(some, seen, strict=True):
            row = _row(place, one, inspection)
            if row and (place.before_ms is None or (row.due_ms or 0) < place.before_ms):
                rows.append(row)
    return rows


def _row(place: _Place, one: str, seen: Inspection) -> Row | None:
    if place.state is State.WAITING:
        if seen.waiting_due_ms is None:
            return None
        return Row(
            id=one, topic=place.topic, state=place.state, group=None, due_ms=seen.waiting_due_ms,
            expires_ms=seen.expires_ms,
        )  # fmt: skip
    for there in seen.places:
        if there.group == place.group and there.state == place.state.value:
            return Row(
                id=one, topic=place.topic, state=place.state, group=place.group,
                due_ms=there.due_ms, attempts=there.failed_attempts, consumer=there.consumer,
                idle_ms=there.idle_ms, reason=there.reason, expires_ms=seen.expires_ms,
            )  # fmt: skip
    return None
