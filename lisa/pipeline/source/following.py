"""Looking along a journal in bounded steps: where it begins, how far it goes, what is gone.

A topic that was never split has one; of one that is split each place has its own, followed by
itself.
No command here reads more than one event, however many there are: marks between two known ones
are found by their running numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from lisa.admin.reading import ask_stream, entry_number
from lisa.core.errors import LisaError
from lisa.core.flow import Flow
from lisa.core.keys import TopicKeys
from lisa.core.shards import base, bases
from lisa.core.store import Store
from lisa.pipeline.source.events import number_of
from lisa.pipeline.source.marks import Gap, Mark, before

__all__ = [
    "OLDER", "TRIMMED", "Ahead", "archived", "earliest", "is_any_archived", "journals", "latest",
    "look", "mark_at", "record_archived", "step_over",
]  # fmt: skip

_PROBES = 200  # every third halves the distance, and no span has more than 63 halves
OLDER = "the server came back empty or older than what was read"
TRIMMED = "they were trimmed away, or lost by the server, before they were read"


class Ahead(NamedTuple):
    """What lies before a reader: it goes on behind `begin`, up to `last`; `gap` comes first.

    `older`: the stream's ids lie below what was read; it must be stepped over to be read on.
    """

    begin: Mark
    last: Mark
    gap: Gap | None = None
    older: bool = False


def latest(store: Store, places: Sequence[str]) -> Flow[dict[str, Mark | None]]:
    """The last event of each journal, None where there is none."""
    keys = [store.keys.topic(place).events for place in places]
    replies = yield from store.commands([("XREVRANGE", key, "+", "-", "COUNT", 1) for key in keys])
    found: dict[str, Mark | None] = {}
    for place, key, items in zip(places, keys, replies, strict=True):
        number = number_of(items[0]) if items else None
        if items and number is None:
            found[place] = yield from _search(store, "XREVRANGE", key, "+", "-")
        else:
            found[place] = Mark(items[0][0].decode(), number or 0) if items else None
    return found


def earliest(store: Store, place: str) -> Flow[Mark | None]:
    """The mark before a journal's first event, None where there is none."""
    first = yield from _search(store, "XRANGE", store.keys.topic(place).events, "-", "+")
    return Mark(before(first.entry), first.number - 1) if first else None


def look(store: Store, place: str, start: Mark, last: Mark | None) -> Flow[Ahead | None]:
    """What lies behind `start`, given the last event; None where there is nothing new.

    Asks the server only where the last event is not the one at `start`.
    """
    if last is not None and last.entry == start.entry:
        return None
    keys = store.keys.topic(place)
    if last is not None and last.where > start.where:
        first = yield from _search(store, "XRANGE", keys.events, f"({start.entry}", "+")
        if first is None:
            return None  # emptied between the two questions: seen at the next look
        if first.number == start.number + 1:
            return Ahead(start, last)
        trimmed = first.number > start.number + 1
        gap = Gap(
            place, TRIMMED if trimmed else OLDER, start.entry, start.number + 1,
            first.number - 1 if trimmed else None, first.entry,
        )  # fmt: skip
        return Ahead(Mark(start.entry, first.number - 1), last, gap)
    return (yield from _nothing_behind(store, keys, start, last))


def _nothing_behind(
    store: Store, keys: TopicKeys, start: Mark, last: Mark | None
) -> Flow[Ahead | None]:
    """Where no event lies behind `start`: nothing is new, all was lost, or the server is older."""
    before_top = yield from _journaled(store, keys)
    top = yield from _top(store, keys)
    total = yield from _journaled(store, keys)
    if total != before_top:
        return None  # an event came meanwhile, so the next look finds it
    if top is None or entry_number(top) >= start.where:
        if total > start.number:
            gap = Gap(keys.topic, TRIMMED, start.entry, start.number + 1, total, None)
            here = Mark(top or start.entry, total)
            return Ahead(here, here, gap)
        if top is not None or total == start.number:
            return None
    here = Mark(start.entry, last.number if last is not None else total)
    gap = Gap(keys.topic, OLDER, start.entry, start.number + 1, None, None)
    return Ahead(here, here, gap, older=True)


def _journaled(store: Store, keys: TopicKeys) -> Flow[int]:
    return int((yield from store.command("HGET", keys.stats, "journaled")) or 0)


def _top(store: Store, keys: TopicKeys) -> Flow[str | None]:
    """The highest id that the stream ever gave out, None where there is no stream."""
    reply = yield from ask_stream(store, "XINFO", "STREAM", keys.events)
    if not reply:
        return None
    fields = dict(zip(reply[::2], reply[1::2], strict=False))
    return str(fields[b"last-generated-id"].decode())


def step_over(store: Store, place: str, mark: Mark) -> Flow[None]:
    """Let the stream's next event have a higher id than `mark`; done before, it changes nothing."""
    key = store.keys.topic(place).events
    try:
        if (yield from ask_stream(store, "XSETID", key, mark.entry)) is None:
            # The key is gone: it comes back as an empty stream. The group serves for that alone.
            yield from store.command("XGROUP", "CREATE", key, "lisa-step-over", "$", "MKSTREAM")
            yield from store.command("XGROUP", "DESTROY", key, "lisa-step-over")
            yield from store.command("XSETID", key, mark.entry)
    except LisaError as error:
        # The stream has passed that id by itself meanwhile: what was wanted.
        if "smaller than" not in str(error):
            raise


def mark_at(
    store: Store, place: str, between: tuple[Mark, Mark], wanted: int, slack: int
) -> Flow[Mark]:
    """A mark behind an event whose number is `wanted` or up to `slack` less, between two marks.

    Guesses by the time of events, as one looks up a name in a telephone book.
    """
    key = store.keys.topic(place).events
    low, high = between
    low_at, high_at = low.where, high.where
    low_number, high_number = low.number, high.number
    best = low
    for turn in range(_PROBES):
        if wanted - low_number <= slack:
            break
        guess = _between(low_at, high_at, wanted - low_number, high_number - low_number, turn)
        if guess is None:
            break
        found = yield from _search(store, "XRANGE", key, "{}-{}".format(*guess), high.entry)
        if found is not None and low_number < found.number <= wanted:
            best, low_at, low_number = found, found.where, found.number
        else:
            high_at = guess
            if found is not None and wanted < found.number < high_number:
                high_number = found.number
    return best


def _between(
    low: tuple[int, int], high: tuple[int, int], steps: int, span: int, turn: int
) -> tuple[int, int] | None:
    """An id above `low` and below `high`, about where the event `steps` further on should be."""
    if low[0] == high[0]:
        guess = low[1] + max(1, steps)  # events of one millisecond stand side by side
        guess = guess if guess < high[1] else (low[1] + high[1]) // 2
        return (low[0], guess) if low[1] < guess < high[1] else None
    width = high[0] - low[0]
    ahead = width // 2 if turn % 3 == 2 else width * steps // max(span, 1)
    if ahead <= 0:
        return low[0], low[1] + max(1, steps)
    guess_ms = min(low[0] + ahead, high[0])
    if (guess_ms, 0) < high:
        return guess_ms, 0
    return (low[0] + width // 2, 0) if width > 1 else (low[0], low[1] + max(1, steps))


def _search(store: Store, command: str, key: str, start: str, end: str) -> Flow[Mark | None]:
    """The first event from an id on, in the direction of the command."""
    while True:
        items = yield from store.command(command, key, start, end, "COUNT", 1)
        if not items:
            return None
        number = number_of(items[0])
        entry = items[0][0].decode()
        if number is not None:
            return Mark(entry, number)
        start = f"({entry}"  # a foreign hand's


def journals(store: Store, named: Sequence[str]) -> Flow[list[str]]:
    """The places that have a journal: of the topics named, or of all that are registered.

    Those of every number of shards that a topic ever had, and what is listed though its topic's
    server lost what it knew of it.
    """
    listed = yield from store.places()
    topics = dict.fromkeys(named or bases(listed))
    if not topics:
        return []
    layouts = yield from store.layouts(list(topics))
    places = {one for one in listed if base(one) in topics}
    for topic, layout in zip(topics, layouts, strict=True):
        places.update(layout.counted(topic))
    asked = sorted(places)
    there = yield from store.commands(
        [("EXISTS", store.keys.topic(place).events) for place in asked]
    )
    return [place for place, exists in zip(asked, there, strict=True) if exists]


def archived(store: Store, place: str, name: str) -> Flow[Mark | None]:
    """How far an archive says it has come with a journal; None where it says nothing readable."""
    told = yield from store.command("HGET", store.keys.topic(place).archived, name)
    return _told(told)


def is_any_archived(store: Store, places: Sequence[str], name: str) -> Flow[bool]:
    """Whether an archive says of any of some journals how far it has come."""
    replies = yield from store.commands(
        [("HGET", store.keys.topic(place).archived, name) for place in places]
    )
    return any(_told(reply) is not None for reply in replies)


def _told(told: bytes | None) -> Mark | None:
    parts = told.decode("utf-8", "replace").split() if told else []
    try:
        entry_number(parts[0])
        return Mark(parts[0], int(parts[1]))
    except (IndexError, ValueError):
        return None


def record_archived(store: Store, name: str, marks: Mapping[str, Mark]) -> Flow[None]:
    """Let the manager know how far an archive has come: what lies behind may be trimmed."""
    now_ms = (yield from store.server_time_us()) // 1000
    commands = [
        ("HSET", store.keys.topic(place).archived, name, f"{mark.entry} {mark.number} {now_ms}")
        for place, mark in marks.items()
    ]
    if commands:
        yield from store.commands(commands)
