"""The history of a message, or of a key, from its topic's journal, and previews of bodies.

The journal has no index by id. `read_back` reads it backwards, a limited number of events per
call, and returns a cursor for the next call. `around` reads the instants at which events of the
message are expected, which finds most events quickly even in a long journal.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from lisa.admin.reading import entry_number, shards_of_id
from lisa.core.model.envelope import Envelope, decode_envelope
from lisa.core.model.errors import InvalidMessage
from lisa.core.model.sharding import KEY_END, Topic
from lisa.core.model.stream import entry_fields
from lisa.core.redis.flow import Flow
from lisa.core.store.store import Store
from lisa.core.transitions.base import text
from lisa.core.transitions.journal import Read as ReadJournal

BEFORE_MS, AFTER_MS = 1_000, 5_000
MOST_AROUND = 2_000
HEAD_ROOM = 2_048
"""Additional bytes of a preview for the envelope's head and headers of a typical size."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoryEvent:
    """One event of the journal; `ends` if it settled the message."""

    id: str
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
class Story:
    """The result of `read_back`: events, oldest first.

    looked: number of journal events read, back to the instant `back_to_ms`.
    cursor: where the next call continues; None at the beginning of the journal.
    """

    events: tuple[StoryEvent, ...]
    looked: int
    back_to_ms: int | None
    cursor: str | None


@dataclass(frozen=True, slots=True)
class Preview:
    """The first bytes of a body; `size` is the size of the whole envelope in bytes."""

    envelope: Envelope | None
    size: int
    whole: bool
    fault: str | None = None


def read_back(
    store: Store,
    topic: str,
    message_id: str,
    cursor: str | None = None,
    *,
    most: int = 20_000,
    not_before_ms: int = 0,
) -> Flow[Story]:
    """The events of an id among the `most` newest before `cursor` and since `not_before_ms`.

    The id of a key, which ends with KEY_END, stands for all ids of that key.
    """
    names = yield from shards_of_id(store, topic, message_id)
    number, slash, behind = (cursor or "").rpartition("/")
    at = int(number) if slash and number.isdigit() else 0
    if at >= len(names):
        return Story((), 0, None, None)
    start = "({}-{}".format(*entry_number(behind)) if behind else "+"
    end = str(not_before_ms) if not_before_ms else "-"
    found, looked, last, is_last = yield from _events_between(
        store, (names[at], message_id), start, end, most, backwards=True
    )
    if is_last:  # older events are in an older shard
        following = f"{at + 1}/" if at + 1 < len(names) else None
    else:
        following = f"{at}/{last}" if at else last
    back_to_ms = None if last is None else entry_number(last)[0]
    return Story(tuple(reversed(found)), looked, back_to_ms, following)


def _events_between(
    store: Store,
    where: tuple[str, str],
    start: str,
    end: str,
    most: int,
    *,
    backwards: bool = False,
) -> Flow[tuple[list[StoryEvent], int, str | None, bool]]:
    """The events of an id among the first `most` between two entries.

    Returns also how many events were read, the last one's entry, and whether there are no more.
    """
    shard, message_id = where
    found: list[StoryEvent] = []
    looked, last, is_last = 0, None, False
    while looked < most and not is_last:
        call = ReadJournal(shard, start, end, backwards=backwards, most=most - looked)
        is_last, items = yield from store.run(call)
        found += _events(items, message_id.encode())
        looked += len(items)
        if items:
            last = text(items[-1][0])
            start = f"({last}"
    return found, looked, last, is_last


def around(
    store: Store, topic: str, message_id: str, instants_ms: Iterable[int]
) -> Flow[list[StoryEvent]]:
    """The events of an id near the given instants, oldest first."""
    found: dict[tuple[str, str], StoryEvent] = {}
    for shard in (yield from shards_of_id(store, topic, message_id)):
        for instant in sorted(set(instants_ms)):
            start, end = str(max(0, instant - BEFORE_MS)), str(instant + AFTER_MS)
            events, *_ = yield from _events_between(
                store, (shard, message_id), start, end, MOST_AROUND
            )
            found |= {(shard, event.entry): event for event in events}
    return sorted(found.values(), key=lambda event: entry_number(event.entry))


def previews(store: Store, topic: str, ids: Sequence[str], most: int) -> Flow[list[Preview | None]]:
    """The first `most` bytes of bodies; None for messages that are not live."""
    if not ids:
        return []
    layout = yield from store.layout(Topic(topic))
    found: dict[str, Preview] = {}
    for count in dict.fromkeys((layout.shards, *layout.older)):
        left = [message_id for message_id in ids if message_id not in found]
        bodies = [
            store.keys.topic(layout.shard_for(Topic(topic), message_id, count)).body(message_id)
            for message_id in left
        ]
        replies = yield from store.commands(
            [
                command
                for body in bodies
                for command in (("GETRANGE", body, 0, most + HEAD_ROOM - 1), ("STRLEN", body))
            ]
        )
        found |= {
            message_id: _preview(data, size, most)
            for message_id, data, size in zip(left, replies[::2], replies[1::2], strict=True)
            if size
        }
    return [found.get(message_id) for message_id in ids]


def _preview(data: bytes, size: int, most: int) -> Preview:
    try:
        envelope = decode_envelope(data)
    except InvalidMessage as error:
        fault = (
            "its headers are too long for a preview: open the message"
            if len(data) < size
            else str(error)
        )
        return Preview(None, size, whole=False, fault=fault)
    shown = envelope._replace(body=envelope.body[:most])
    return Preview(shown, size, whole=len(data) == size and len(envelope.body) <= most)


def _events(items: Sequence[Any], wanted: bytes) -> list[StoryEvent]:
    if wanted.endswith(KEY_END.encode()):
        return [
            _event(text(entry), flat)
            for entry, flat in items
            if flat and entry_fields(flat).get(b"id", b"").startswith(wanted)
        ]
    return [
        _event(text(entry), flat)
        for entry, flat in items
        if flat and wanted in flat and entry_fields(flat).get(b"id") == wanted
    ]


def _event(entry: str, flat: Sequence[bytes]) -> StoryEvent:
    fields = {
        text(name): text(value) for name, value in entry_fields(flat).items() if name != b"envelope"
    }
    return StoryEvent(
        id=fields.get("id", ""),
        entry=entry,
        at_ms=entry_number(entry)[0],
        number=_number(fields.get("n")),
        state=fields.get("state", "?"),
        group=fields.get("group") or None,
        attempt=_number(fields.get("attempt")),
        actor=fields.get("actor", ""),
        due_ms=_number(fields.get("due")),
        late_us=_number(fields.get("late")),
        reason=fields.get("reason") or None,
        ends=fields.get("end") == "1",
    )


def _number(value: str | None) -> int | None:
    try:
        return int(float(value)) if value else None
    except (ValueError, OverflowError):
        return None
