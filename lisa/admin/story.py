"""One message's story: what its topic's journal says of it, and what its body looks like.

The journal has no index by id. It is read backwards in pages of about a mebibyte, so many events a
look; a look says how far it came, and the next one goes on from there. The instants at which
something must have happened to the message are looked at first, so that even in a long journal
most of a story is there at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lisa.admin.parts import places_of_id
from lisa.admin.reading import entry_number
from lisa.core.envelope import Envelope, decode_envelope
from lisa.core.errors import InvalidMessage
from lisa.core.flow import Flow
from lisa.core.store import Store
from lisa.core.transitions.base import text

__all__ = ["Event", "Preview", "Read", "around", "previews", "read_back"]

FIRST_PAGE = 100
LARGEST_PAGE = 2_000
PAGE_BYTES = 1 << 20
BEFORE_MS, AFTER_MS = 1_000, 5_000
MOST_AROUND = 2_000
HEAD_ROOM = 2_048
"""Bytes of a preview beyond the body's: the envelope's head, and headers of a usual size."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """One event of the journal. `ends`: it settled the message for good."""

    entry: str
    at_ms: int
    number: int | None
    state: str
    group: str | None
    attempt: int | None
    actor: str
    due_ms: int | None = None
    late_us: int | None = None
    reason: str | None = None
    ends: bool = False


@dataclass(frozen=True, slots=True)
class Read:
    """What a look found, the oldest first; `looked` events were read, back to `back_to_ms`.

    cursor: where the next look goes on; None once the journal's beginning was reached.
    """

    events: tuple[Event, ...]
    looked: int
    back_to_ms: int | None
    cursor: str | None


@dataclass(frozen=True, slots=True)
class Preview:
    """The first bytes of a body. `size` is of the whole envelope."""

    envelope: Envelope | None
    size: int
    whole: bool
    fault: str | None = None


def read_back(
    store: Store,
    topic: str,
    message_id: str,
    *,
    cursor: str | None = None,
    most: int = 20_000,
    not_before_ms: int = 0,
) -> Flow[Read]:
    """The events of an id among the `most` newest before the cursor, not before an instant."""
    places = yield from places_of_id(store, topic, message_id)
    number, slash, behind = (cursor or "").rpartition("/")
    at = int(number) if slash and number.isdigit() else 0
    if at >= len(places):
        return Read((), 0, None, None)
    read = yield from _read_back(
        store, (places[at], message_id), behind or None, most, not_before_ms
    )
    if read.cursor is None and at + 1 < len(places):  # what is older lies in an older place
        return replace(read, cursor=f"{at + 1}/")
    if at and read.cursor is not None:
        return replace(read, cursor=f"{at}/{read.cursor}")
    return read


def _read_back(
    store: Store, where: tuple[str, str], cursor: str | None, most: int, not_before_ms: int
) -> Flow[Read]:
    place, message_id = where
    key, wanted = store.keys.topic(place).events, message_id.encode()
    end = "+" if cursor is None else "({}-{}".format(*entry_number(cursor))
    start = str(not_before_ms) if not_before_ms else "-"
    found: list[Event] = []
    looked, page, last = 0, FIRST_PAGE, None
    while looked < most:
        count = min(page, most - looked)
        items = yield from store.command("XREVRANGE", key, end, start, "COUNT", count)
        found += _events(items, wanted)
        looked += len(items)
        if items:
            last = text(items[-1][0])
            end = f"({last}"
        if len(items) < count:
            return Read(tuple(reversed(found)), looked, _ms(last), None)
        page = _next_page(items)
    return Read(tuple(reversed(found)), looked, _ms(last), last)


def around(
    store: Store, topic: str, message_id: str, instants_ms: Iterable[int]
) -> Flow[list[Event]]:
    """The events of an id near some instants, the oldest first."""
    found: list[Event] = []
    instants = sorted(set(instants_ms))
    for place in (yield from places_of_id(store, topic, message_id)):
        found += yield from _around(store, place, message_id, instants)
    return sorted(found, key=lambda event: entry_number(event.entry))


def _around(
    store: Store, place: str, message_id: str, instants: Sequence[int]
) -> Flow[list[Event]]:
    key, wanted = store.keys.topic(place).events, message_id.encode()
    found: dict[str, Event] = {}
    for instant in instants:
        start, end = str(max(0, instant - BEFORE_MS)), str(instant + AFTER_MS)
        looked, page = 0, FIRST_PAGE
        while looked < MOST_AROUND:
            items = yield from store.command("XRANGE", key, start, end, "COUNT", page)
            found |= {event.entry: event for event in _events(items, wanted)}
            looked += len(items)
            if len(items) < page:
                break
            start, page = f"({text(items[-1][0])}", _next_page(items)
    return list(found.values())


def previews(store: Store, topic: str, ids: Sequence[str], most: int) -> Flow[list[Preview | None]]:
    """The first `most` bytes of bodies; None where the message is not live (any more)."""
    if not ids:
        return []
    layout = yield from store.layout(topic)
    found: dict[str, Preview] = {}
    for count in dict.fromkeys((layout.shards, *layout.older)):
        left = [one for one in ids if one not in found]
        bodies = [store.keys.topic(layout.place(topic, one, count)).body(one) for one in left]
        replies = yield from store.commands([
            one for body in bodies
            for one in (("GETRANGE", body, 0, most + HEAD_ROOM - 1), ("STRLEN", body))
        ])  # fmt: skip
        found |= {
            one: _preview(data, size, most)
            for one, data, size in zip(left, replies[::2], replies[1::2], strict=True) if size
        }  # fmt: skip
    return [found.get(one) for one in ids]


def _preview(data: bytes, size: int, most: int) -> Preview:
    try:
        envelope = decode_envelope(data)
    except InvalidMessage as error:
        fault = "its headers are long: open the message" if len(data) < size else str(error)
        return Preview(None, size, whole=False, fault=fault)
    shown = envelope._replace(body=envelope.body[:most])
    return Preview(shown, size, whole=len(data) == size and len(envelope.body) <= most)


def _events(items: Sequence[Any], wanted: bytes) -> list[Event]:
    return [_event(text(entry), flat) for entry, flat in items if flat and wanted in flat
            and _field(flat, b"id") == wanted]  # fmt: skip


def _field(flat: Sequence[bytes], name: bytes) -> bytes | None:
    return next((flat[i + 1] for i in range(0, len(flat) - 1, 2) if flat[i] == name), None)


def _event(entry: str, flat: Sequence[bytes]) -> Event:
    fields = {
        text(name): text(value) for name, value in zip(flat[::2], flat[1::2], strict=False)
        if name != b"envelope"
    }  # fmt: skip
    return Event(
        entry=entry, at_ms=entry_number(entry)[0], number=_number(fields.get("n")),
        state=fields.get("state", "?"), group=fields.get("group") or None,
        attempt=_number(fields.get("attempt")), actor=fields.get("actor", ""),
        due_ms=_number(fields.get("due")), late_us=_number(fields.get("late")),
        reason=fields.get("reason") or None, ends=fields.get("end") == "1",
    )  # fmt: skip


def _number(value: str | None) -> int | None:
    try:
        return int(float(value)) if value else None
    except (ValueError, OverflowError):
        return None


def _next_page(items: Sequence[Any]) -> int:
    """How many events make about a mebibyte, going by these."""
    size = sum(sum(map(len, flat)) for _, flat in items if flat) or 1
    return max(1, min(LARGEST_PAGE, PAGE_BYTES * len(items) // size))


def _ms(entry: str | None) -> int | None:
    return None if entry is None else entry_number(entry)[0]
