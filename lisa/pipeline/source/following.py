"""Finds the unread events of journals, and gaps in them, and reads them, in calls of bounded cost.

A topic has one journal, a sharded topic one per shard; each is followed separately. Positions
between two known events are found by bisection, reading one event at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from lisa.admin.reading import ask_stream, entry_number
from lisa.core.model.errors import LisaError
from lisa.core.model.keys import TopicKeys
from lisa.core.model.sharding import JOURNALED, Topic, shard_suffix, topic_of, topics_of
from lisa.core.redis.flow import Flow
from lisa.core.store.store import Store
from lisa.core.transitions.journal import Read
from lisa.pipeline.source.events import Events, Item, JournalGap, Mark, before, number_of

if TYPE_CHECKING:
    import pyarrow as pa

    from lisa.core.store.store import SyncStore

OLDER = "the server came back empty or older than what was read"
TRIMMED = "they were trimmed, or lost by the server, before they were read"


BATCH_ROWS = 20_000

BATCH_BYTES = 16 << 20


class Unread(NamedTuple):
    """The unread part of a journal: the events after `begin`, up to and including `last`.

    gap: missing events before them.
    older: the server came back with lower entry ids than those already read; `raise_last_id` is
        needed before new events can be read.
    """

    begin: Mark
    last: Mark
    gap: JournalGap | None = None
    older: bool = False


def latest(store: Store, names: Sequence[str]) -> Flow[dict[str, Mark | None]]:
    """Journal -> its last event, None if it is empty."""
    keys = [store.keys.topic(journal).events for journal in names]
    replies = yield from store.commands([("XREVRANGE", key, "+", "-", "COUNT", 1) for key in keys])
    found: dict[str, Mark | None] = {}
    for journal, key, items in zip(names, keys, replies, strict=True):
        number = number_of(items[0]) if items else None
        if items and number is None:
            found[journal] = yield from _search(store, "XREVRANGE", key, "+", "-")
        else:
            found[journal] = Mark(items[0][0].decode(), number or 0) if items else None
    return found


def earliest(store: Store, journal: str) -> Flow[Mark | None]:
    """The position before a journal's first event, None if it is empty."""
    first = yield from _search(store, "XRANGE", store.keys.topic(journal).events, "-", "+")
    return Mark(before(first.entry), first.number - 1) if first else None


def find_unread(store: Store, journal: str, start: Mark, last: Mark | None) -> Flow[Unread | None]:
    """The events after `start`, given the journal's last event; None if there are none.

    Sends no command if the last event is the one at `start`.
    """
    if last is not None and last.entry == start.entry:
        return None
    keys = store.keys.topic(journal)
    if last is not None and last.where > start.where:
        first = yield from _search(store, "XRANGE", keys.events, f"({start.entry}", "+")
        if first is None:
            return None  # emptied between the two commands: found by the next call
        if first.number == start.number + 1:
            return Unread(start, last)
        trimmed = first.number > start.number + 1
        gap = JournalGap(
            journal,
            TRIMMED if trimmed else OLDER,
            start.entry,
            start.number + 1,
            first.number - 1 if trimmed else None,
            first.entry,
        )
        return Unread(Mark(start.entry, first.number - 1), last, gap)
    return (yield from _find_loss(store, keys, start, last))


def _find_loss(
    store: Store, keys: TopicKeys, start: Mark, last: Mark | None
) -> Flow[Unread | None]:
    """Called without events after `start`: find out whether events were lost.

    None if there is no new event. Otherwise all new events were lost, or the server came back with
    an older state.
    """
    before_top = yield from journaled(store, keys)
    top = yield from _top(store, keys)
    total = yield from journaled(store, keys)
    if total != before_top:
        return None  # an event was added meanwhile: found by the next call
    if top is None or entry_number(top) >= start.where:
        if total > start.number:
            gap = JournalGap(keys.topic, TRIMMED, start.entry, start.number + 1, total, None)
            here = Mark(top or start.entry, total)
            return Unread(here, here, gap)
        if top is not None or total == start.number:
            return None
    here = Mark(start.entry, last.number if last is not None else total)
    gap = JournalGap(keys.topic, OLDER, start.entry, start.number + 1, None, None)
    return Unread(here, here, gap, older=True)


def journaled(store: Store, keys: TopicKeys) -> Flow[int]:
    """How many events were ever written; for a deleted shard, the topic's options hold it."""
    found = yield from store.command("HGET", keys.stats, "journaled")
    shard = shard_suffix(keys.topic)
    if found is None and shard is not None:
        options = store.keys.topic(topic_of(keys.topic)).options
        found = yield from store.command("HGET", options, JOURNALED + shard)
    return int(found or 0)


def _top(store: Store, keys: TopicKeys) -> Flow[str | None]:
    """The stream's last generated id, None without a stream."""
    reply = yield from ask_stream(store, "XINFO", "STREAM", keys.events)
    if not reply:
        return None
    fields = dict(zip(reply[::2], reply[1::2], strict=False))
    return str(fields[b"last-generated-id"].decode())


def raise_last_id(store: Store, journal: str, mark: Mark) -> Flow[None]:
    """Make the stream's next event have a higher id than `mark`. Idempotent."""
    key = store.keys.topic(journal).events
    try:
        if (yield from ask_stream(store, "XSETID", key, mark.entry)) is None:
            # The key does not exist: creating a group creates an empty stream.
            yield from store.command("XGROUP", "CREATE", key, "lisa-step-over", "$", "MKSTREAM")
            yield from store.command("XGROUP", "DESTROY", key, "lisa-step-over")
            yield from store.command("XSETID", key, mark.entry)
    except LisaError as error:
        # The stream has passed that id meanwhile.
        if "smaller than" not in str(error):
            raise


def mark_at(
    store: Store, journal: str, between: tuple[Mark, Mark], wanted: int, slack: int
) -> Flow[Mark]:
    """The position after an event with number `wanted`, or up to `slack` less.

    between: positions before and after that event. Halves the time between them, and then the
    sequence numbers within a millisecond.
    """
    key = store.keys.topic(journal).events
    best, high = between
    end = high.where
    while wanted - best.number > slack:
        middle = _middle(best.where, end, wanted - best.number)
        if middle is None:
            break
        found = yield from _search(store, "XRANGE", key, "{}-{}".format(*middle), high.entry)
        if found is not None and best.number < found.number <= wanted:
            best = found
        else:
            end = middle
    return best


def _middle(low: tuple[int, int], high: tuple[int, int], steps: int) -> tuple[int, int] | None:
    """An entry id between two others, at most `steps` behind the lower one within its millisecond.

    None if there is none: sequence numbers within a millisecond are consecutive.
    """
    if high[0] - low[0] > 1:
        return (low[0] + high[0]) // 2, 0
    if high[0] > low[0]:
        return (high[0], 0) if high[1] else (low[0], low[1] + steps)
    ahead = min(steps, (high[1] - low[1]) // 2)
    return (low[0], low[1] + ahead) if ahead else None


def _search(store: Store, command: str, key: str, start: str, end: str) -> Flow[Mark | None]:
    """The first event between two ids, in the direction of the command (XRANGE or XREVRANGE)."""
    while True:
        items = yield from store.command(command, key, start, end, "COUNT", 1)
        if not items:
            return None
        number = number_of(items[0])
        entry = items[0][0].decode()
        if number is not None:
            return Mark(entry, number)
        start = f"({entry}"  # skip a foreign entry


def journals(store: Store, named: Sequence[str]) -> Flow[list[str]]:
    """The existing journals of the named topics, or of all registered topics.

    Includes journals of earlier shards, and of registered shards whose topic's server has lost the
    layout.
    """
    listed = yield from store.shards()
    topics = dict.fromkeys(map(Topic, named) if named else topics_of(listed))
    if not topics:
        return []
    layouts = yield from store.layouts(list(topics))
    names = {shard for shard in listed if topic_of(shard) in topics}
    for topic, layout in zip(topics, layouts, strict=True):
        names.update(layout.counted(Topic(topic)))
    asked = sorted(names)
    there = yield from store.commands(
        [("EXISTS", store.keys.topic(journal).events) for journal in asked]
    )
    return [journal for journal, exists in zip(asked, there, strict=True) if exists]


def archived(store: Store, names: Sequence[str], name: str) -> Flow[list[Mark | None]]:
    """The last event of each journal that an archive has reported; None without a valid report."""
    replies = yield from store.commands(
        [("HGET", store.keys.topic(journal).archived, name) for journal in names]
    )
    return list(map(_reported, replies))


def _reported(reply: bytes | None) -> Mark | None:
    parts = reply.decode("utf-8", "replace").split() if reply else []
    try:
        entry_number(parts[0])
        return Mark(parts[0], int(parts[1]))
    except (IndexError, ValueError):
        return None


def record_archived(store: Store, name: str, marks: Mapping[str, Mark]) -> Flow[None]:
    """Report an archive's progress: the manager may trim all events up to these marks."""
    now_ms = yield from store.server_time_ms()
    commands = [
        ("HSET", store.keys.topic(journal).archived, name, f"{mark.entry} {mark.number} {now_ms}")
        for journal, mark in marks.items()
    ]
    if commands:
        yield from store.commands(commands)


def read_range(
    store: SyncStore, journal: str, begin: Mark, end: Mark, schema: pa.Schema
) -> Iterator[pa.RecordBatch | JournalGap]:
    """The events after `begin` up to `end`, and each gap between them at its position."""
    events = Events(journal, schema)
    yield from add_range(store, journal, begin, end, events)
    if len(events):
        yield events.take()


def add_range(
    store: SyncStore, journal: str, begin: Mark, end: Mark, events: Events
) -> Iterator[pa.RecordBatch | JournalGap]:
    """As `read_range`, but the last events, too few for a record batch, are left in `events`."""
    here = begin
    events.turn_to(journal)
    for items in read_pages(store, journal, f"({begin.entry}", end.entry):
        numbers = events.add(items)
        if numbers != list(range(here.number + 1, here.number + 1 + len(numbers))):
            yield from _gaps(journal, here, items)
        here = Mark(items[-1][0].decode(), numbers[-1] if numbers else here.number)
        if len(events) >= BATCH_ROWS or events.size >= BATCH_BYTES:
            yield events.take()
    if here.number < end.number:
        yield JournalGap(journal, TRIMMED, here.entry, here.number + 1, end.number, None)


def read_pages(store: SyncStore, journal: str, start: str, end: str) -> Iterator[list[Item]]:
    """The entries of a journal between two ids, in calls of bounded size."""
    is_last = False
    while not is_last:
        is_last, items = store.call(Read(journal, start, end))
        if not items:
            return
        yield items
        start = f"({items[-1][0].decode()}"


def _gaps(journal: str, here: Mark, items: Sequence[Item]) -> Iterator[JournalGap]:
    """The gaps in a page of entries; the first event should be the one after `here`."""
    for item in items:
        number = number_of(item)
        if number is None:
            continue
        entry, wanted = item[0].decode(), here.number + 1
        if number > wanted:
            yield JournalGap(journal, TRIMMED, here.entry, wanted, number - 1, entry)
        elif number < wanted:
            yield JournalGap(journal, OLDER, here.entry, wanted, None, entry)
        here = Mark(entry, number)
