"""Makes the places of a topic that is split follow the topic: options, groups, and who accepts.

The topic's own options hash is the truth: `configure` makes a new layout there in one step. What
follows from it is done here, in an order that keeps an id from being accepted twice: the places of
the new layout are given options and groups, then all places of older ones are closed to new
messages, then the new ones are opened. Each step may be repeated, by anyone, and a late one changes
nothing; managers repeat all of them, so that a crash half-way is mended.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, NamedTuple, TypeVar

from lisa.core import removal
from lisa.core.errors import LisaError, RemovalUnfinished
from lisa.core.flow import Flow
from lisa.core.options import TopicOptions
from lisa.core.shards import Layout, base, count_of, share
from lisa.core.store import Store, pairs
from lisa.core.transitions.base import Transition, text
from lisa.core.transitions.configure import Configure
from lisa.core.transitions.declare import Declare
from lisa.core.transitions.place import Place

__all__ = ["Seen", "look", "renumber", "spread"]

T = TypeVar("T")

_OWN = frozenset({"shards"})
"""What concerns the topic itself only."""

_COPIED = tuple(one.name for one in fields(TopicOptions) if one.name not in _OWN)
_SHARED = {"capacity": None, "max_ready": TopicOptions().max_ready}
"""Bounds of the whole topic, each shard has its share of; with their defaults."""


class Seen(NamedTuple):
    """What stands in a place: its options hash, and its declared groups."""

    options: dict[str, str]
    groups: frozenset[str]

    @property
    def accepts(self) -> int:
        """The latest layout that the place knows; negative if it takes no new messages."""
        return int(self.options.get("accepts", "0"))


def spread(store: Store, topic: str) -> Flow[Layout]:
    """Bring all places of a topic in line with it; its layout. Raises LisaError.

    A topic that was never split costs one look.
    """
    while True:
        (whole,) = yield from look(store, [topic])
        layout = Layout.read(whole.options.get("layout"))
        store.learn_layout(topic, layout)
        if not layout.number:
            return layout
        places = layout.places(topic)
        yield from store.register([topic, *places])
        seen = dict(zip(places, (yield from look(store, places)), strict=True))
        for count in (layout.shards, *layout.older):
            if count > 1:
                own = Layout(layout.number, count).current(topic)
                told = yield from _equip(store, whole, {one: seen[one] for one in own}, count)
                yield from _take_back(store, topic, told)
        latest = yield from _hand_over(store, topic, layout, seen)
        if latest is None:
            return layout
        # Another layout is being put through, or this one was lost with its server: then it is
        # numbered anew, above what the places know.
        if (yield from store.layout(topic)) == layout:
            yield from renumber(store, topic, latest)


def renumber(store: Store, topic: str, known: int) -> Flow[int]:
    """Put a layout of which the last changes were lost above a number that is known of it.

    Places that are listed and that nobody looks after any more become the topic's again: they are
    closed, drained and forgotten like those of any older number.
    """
    listed = yield from store.places()
    counts = {count_of(place) for place in listed if base(place) == topic}
    return (yield from store.run(Place(topic, "renumber", known, sorted(counts))))


def look(store: Store, places: Sequence[str]) -> Flow[list[Seen]]:
    """What stands in some places, in the order given. Raises LisaError."""
    keys = [store.keys.topic(place) for place in places]
    replies = yield from store.commands(
        [command for one in keys for command in (("HGETALL", one.options), ("HKEYS", one.groups))]
    )
    return [
        Seen(
            {text(name): text(value) for name, value in pairs(options).items()},
            frozenset(map(text, groups)),
        )
        for options, groups in zip(replies[::2], replies[1::2], strict=True)
    ]  # fmt: skip


def _equip(
    store: Store, whole: Seen, places: Mapping[str, Seen], count: int
) -> Flow[list[Declare]]:
    """Give places the topic's options and groups; the groups that were told to a place."""
    wanted = _options(whole.options, count)
    calls: list[Transition[Any]] = []
    for place, seen in places.items():
        lacking = {name: value for name, value in wanted.items() if seen.options.get(name) != value}
        if lacking:
            calls.append(Configure(place, lacking))
        calls += [Declare(place, group) for group in sorted(whole.groups - seen.groups)]
    if not calls:
        return []
    told: list[Declare] = []
    for call, result in zip(calls, (yield from store.run_many(calls)), strict=True):
        # Where a group's removal is not finished the place is told the next time.
        if isinstance(result, LisaError) and not isinstance(result, RemovalUnfinished):
            raise result
        # Also one that answers "not new": an earlier call's reply may have been lost.
        if isinstance(call, Declare) and not isinstance(result, LisaError):
            told.append(call)
    return told


def _take_back(store: Store, topic: str, told: Sequence[Declare]) -> Flow[None]:
    """Undo what was declared for a topic whose group was removed since it was looked at.

    That removal takes the topic's own declaration first, and does not come back to its places.
    """
    if told:
        groups = yield from store.groups(topic)
        for group in sorted({one.group for one in told}.difference(groups)):
            places = [one.topic for one in told if one.group == group]
            yield from removal.withdraw(store, topic, group, places)


def _options(whole: Mapping[str, str], count: int) -> dict[str, str | None]:
    """The options of one of so many places; None for what is left to the default."""
    wanted = {name: whole.get(name) for name in _COPIED}
    for name, default in _SHARED.items():
        total = whole.get(name) or default
        if total is not None:
            wanted[name] = str(share(int(total), count))
    return wanted


def _hand_over(
    store: Store, topic: str, layout: Layout, seen: Mapping[str, Seen]
) -> Flow[int | None]:
    """Close the older places, then open the present ones.

    If one follows another layout, of a later number or of the same, the latest number known to any.
    """
    number = layout.number
    steps: tuple[list[Place], list[Place]] = (
        [Place(place, "close", number) for place in layout.draining(topic)
         if seen[place].accepts != -number],
        [Place(place, "open", number) for place in layout.current(topic)
         if seen[place].accepts != number],
    )  # fmt: skip
    for calls, done in zip(steps, (-number, number), strict=True):
        known = yield from _run(store, calls)
        if any(one != done for one in known):
            return max(map(abs, known))
    return None


def _run(store: Store, calls: Sequence[Transition[T]]) -> Flow[list[T]]:
    """Run calls together. Raises the first error among them."""
    if not calls:
        return []
    done: list[T] = []
    for result in (yield from store.run_many(calls)):
        if isinstance(result, LisaError):
            raise result
        done.append(result)
    return done
