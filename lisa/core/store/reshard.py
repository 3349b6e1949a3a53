"""Applies a topic's layout, options and groups to its shards.

The topic's own options hash is authoritative: `configure` writes a new layout there in one step.
This module then updates the shards, in an order that never accepts an id twice: it copies options,
groups and limits of keys to the shards of the new layout, closes all shards of older layouts to new
messages, and opens the new shards. Every step is idempotent, and an outdated step changes nothing.
Managers repeat all steps, which completes a change that was interrupted by a crash.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any, NamedTuple, TypeVar

from lisa.core.model.errors import LisaError, RemovalUnfinished
from lisa.core.model.lanes import Rate
from lisa.core.model.late import Ramp
from lisa.core.model.options import LANE_OPTIONS, OF_GROUP, TopicOptions
from lisa.core.model.sharding import (
    JOURNALED,
    MOST_SHARDS,
    Layout,
    Shard,
    Topic,
    count_of,
    own_shard,
    shard_suffix,
    share,
    topic_of,
)
from lisa.core.redis.flow import Command, Flow
from lisa.core.store import group_removal, limits
from lisa.core.store.replies import pairs
from lisa.core.store.store import Store
from lisa.core.transitions.base import Transition, text
from lisa.core.transitions.groups import Declare
from lisa.core.transitions.topic import Configure, SetLayout

T = TypeVar("T")

_OWN = frozenset({"shards"})
"""Options that apply only to the topic itself."""

_COPIED = tuple(option.name for option in fields(TopicOptions) if option.name not in _OWN)
_SHARED: dict[str, Callable[[str, int], str]] = {
    **dict.fromkeys(
        ("capacity", "concurrency", "max_ready"), lambda value, count: str(share(int(value), count))
    ),
    "ramp": lambda value, count: Ramp.decode(value).share(count).encode(),
    "rate": lambda value, count: Rate.decode(value).share(count).encode(),
}
"""Topic-wide limits, and one shard's part of each."""


class ShardState(NamedTuple):
    """The state of a shard: its options hash and its declared groups."""

    options: dict[str, str]
    groups: frozenset[str]

    @property
    def accepts(self) -> int:
        """The latest layout that the shard has seen; negative if the shard is closed."""
        return int(self.options.get("accepts", "0"))

    @property
    def all_groups(self) -> list[str]:
        """The declared groups, and those whose removal has not ended, sorted."""
        return sorted(self.groups | group_removal.marked(self.options))


def spread(store: Store, topic: Topic) -> Flow[Layout]:
    """Update all shards of a topic and return its layout. Raises LisaError.

    A topic that was never split costs one read.
    """
    while True:
        (topic_state,) = yield from states_of(store, [own_shard(topic)])
        layout = Layout.read(topic_state.options.get("layout"))
        store.learn_layout(topic, layout)
        if not layout.number:
            return layout
        shards = layout.active(topic)
        yield from store.register([topic, *shards])
        seen = dict(zip(shards, (yield from states_of(store, shards)), strict=True))
        for count in (layout.shards, *layout.older):
            if count > 1:
                own = Layout(layout.number, count).current(topic)
                declared = yield from _copy_to_shards(
                    store, topic_state, {shard: seen[shard] for shard in own}, count
                )
                yield from _withdraw_removed(store, topic, declared)
                there = {shard: seen[shard].options for shard in own}
                yield from limits.copy(store, topic, topic_state.options, there)
        latest = yield from _close_and_open(store, topic, layout, seen, topic_state)
        if latest is None:
            return layout
        # Either the layout changed meanwhile, or its last changes were lost with a server: then
        # give it a number above any that the shards have seen.
        if (yield from store.layout(topic)) == layout:
            lost = yield from lost_shards(store, topic, (yield from store.shards()))
            yield from renumber(store, topic, latest, lost)


def renumber(store: Store, topic: Topic, known: int, lost: Sequence[Shard]) -> Flow[int]:
    """Renumber a layout whose last changes were lost to above `known`, a number seen by a shard.

    Lost shards become part of the topic again: they are closed, drained and removed like those of
    any older shard count.
    """
    counts = sorted(set(map(count_of, lost)))
    return (yield from store.run(SetLayout(topic, "renumber", known, counts)))


def lost_shards(store: Store, topic: Topic, listed: Iterable[Shard]) -> Flow[list[Shard]]:
    """The shards among `listed` that are in use, but missing from their topic's layout.

    The list alone proves nothing: a role that was away may have listed a deleted shard again.
    """
    # Read the layout after the list: it is written before its shards are listed.
    layout = yield from store.layout(topic)
    shards = unnamed((shard for shard in listed if topic_of(shard) == topic), topic, layout)
    seen = yield from states_of(store, shards)
    held = yield from hold_messages(store, shards, seen)
    # As in `clear`, which deletes the other ones.
    return [
        shard
        for shard, one, holds in zip(shards, seen, held, strict=True)
        if holds or one.accepts > 0 or -one.accepts > layout.number or shard == own_shard(topic)
    ]


def unnamed(shards: Iterable[Shard], topic: Topic, layout: Layout) -> list[Shard]:
    """The valid shards of a topic that are missing from its layout."""
    counted = set(layout.counted(topic))
    return [
        shard
        for shard in shards
        if shard not in counted
        and count_of(shard) <= MOST_SHARDS
        and shard in Layout(shards=count_of(shard)).current(topic)
    ]


def hold_messages(
    store: Store, shards: Sequence[Shard], seen: Sequence[ShardState]
) -> Flow[list[bool]]:
    """Which of some shards hold messages."""
    asked: list[Command] = []
    for shard, state in zip(shards, seen, strict=True):
        keys = store.keys.topic(shard)
        # An interrupted removal leaves messages of groups that are no longer declared.
        groups = [keys.group(group) for group in state.all_groups]
        held = [key for group in groups for key in (group.entries, group.retry, group.garbage)]
        held += [keys.lanes(group).parked for group in state.all_groups]
        asked.append(("EXISTS", keys.waiting, *held))
    return list(map(bool, (yield from store.commands(asked))))


def states_of(store: Store, shards: Sequence[Shard]) -> Flow[list[ShardState]]:
    """The state of the given shards, in the same order. Raises LisaError."""
    keys = [store.keys.topic(shard) for shard in shards]
    replies = yield from store.commands(
        [
            command
            for shard_keys in keys
            for command in (("HGETALL", shard_keys.options), ("HKEYS", shard_keys.groups))
        ]
    )
    return [
        ShardState(
            {text(name): text(value) for name, value in pairs(options).items()},
            frozenset(map(text, groups)),
        )
        for options, groups in zip(replies[::2], replies[1::2], strict=True)
    ]


def _copy_to_shards(
    store: Store, topic_state: ShardState, shards: Mapping[Shard, ShardState], count: int
) -> Flow[list[Declare]]:
    """Copy the topic's options and groups to shards. Returns the declarations that succeeded."""
    wanted = _options(topic_state.options, count)
    calls: list[Transition[Any]] = []
    for shard, seen in shards.items():
        gone = [name for name in seen.options if _is_of_group(name) and name not in wanted]
        lacking: dict[str, str | None] = dict.fromkeys(gone)
        lacking |= {
            name: value for name, value in wanted.items() if seen.options.get(name) != value
        }
        if lacking:
            calls.append(Configure(shard, lacking))
        calls += [Declare(shard, group) for group in sorted(topic_state.groups - seen.groups)]
    declared: list[Declare] = []
    for call, result in zip(calls, (yield from store.run_many(calls)), strict=True):
        # A shard whose removal of the group is unfinished gets the group in a later round.
        if isinstance(result, LisaError) and not isinstance(result, RemovalUnfinished):
            raise result
        # Include declarations that were not new: an earlier call's reply may have been lost.
        if isinstance(call, Declare) and not isinstance(result, LisaError):
            declared.append(call)
    return declared


def _withdraw_removed(store: Store, topic: Topic, declared: Sequence[Declare]) -> Flow[None]:
    """Withdraw declarations of groups that were removed from the topic in the meantime.

    A removal deletes the topic's own declaration first and does not return to the shards.
    """
    if declared:
        groups = yield from store.groups(topic)
        for group in sorted({declaration.group for declaration in declared}.difference(groups)):
            shards = [
                Shard(declaration.topic) for declaration in declared if declaration.group == group
            ]
            yield from group_removal.withdraw(store, topic, group, shards)


def _options(topic_options: Mapping[str, str], count: int) -> dict[str, str | None]:
    """The options of one of `count` shards; None for options left at the default."""
    wanted = {
        name: topic_options.get(name) for name in (*_COPIED, *filter(_is_of_group, topic_options))
    }
    wanted["max_ready"] = wanted["max_ready"] or str(TopicOptions().max_ready)
    for name, value in wanted.items():
        part_of = _SHARED.get(name.partition(OF_GROUP)[0])
        if part_of and value:
            wanted[name] = part_of(value, count)
    return wanted


def _is_of_group(name: str) -> bool:
    """Whether a field of the options hash is a group's own value of an option."""
    option, of_group, _ = name.partition(OF_GROUP)
    return bool(of_group) and option in LANE_OPTIONS


def _close_and_open(
    store: Store,
    topic: Topic,
    layout: Layout,
    seen: Mapping[Shard, ShardState],
    topic_state: ShardState,
) -> Flow[int | None]:
    """Close the older shards, then open the current ones.

    Returns None when done. If a shard follows another layout with an equal or later number, returns
    the highest number seen.
    """
    number = layout.number
    steps: tuple[list[SetLayout], list[SetLayout]] = (
        [
            SetLayout(shard, "close", number)
            for shard in layout.draining(topic)
            if seen[shard].accepts != -number
        ],
        [
            SetLayout(shard, "open", number, journaled=_journaled(topic_state, shard))
            for shard in layout.current(topic)
            if seen[shard].accepts != number
        ],
    )
    for calls, done in zip(steps, (-number, number), strict=True):
        known = yield from _run(store, calls)
        if any(number != done for number in known):
            return max(map(abs, known))
    return None


def _journaled(topic_state: ShardState, shard: Shard) -> int:
    """The last journal number of a shard whose keys were deleted; 0 if unknown."""
    found = topic_state.options.get(f"{JOURNALED}{shard_suffix(shard)}", "")
    return int(found) if found.isdigit() else 0


def _run(store: Store, calls: Sequence[Transition[T]]) -> Flow[list[T]]:
    """Run calls together. Raises the first error."""
    done: list[T] = []
    for result in (yield from store.run_many(calls)):
        if isinstance(result, LisaError):
            raise result
        done.append(result)
    return done
