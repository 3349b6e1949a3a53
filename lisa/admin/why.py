"""Says in one sentence for each group why a message is not running now."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from lisa.admin.reading import shards_of_id
from lisa.admin.roles import RolePresence, consumers, late_warning
from lisa.core.model.clock import human, ms_datetime, utc_text
from lisa.core.model.keys import keyed_id, shown_id
from lisa.core.model.lanes import KeyLimits
from lisa.core.model.options import PLACE_BYTES, TopicOptions
from lisa.core.model.sharding import KEY_END, Shard, topic_of
from lisa.core.redis.flow import Flow
from lisa.core.store.keyed import read_part
from lisa.core.store.presence import OVERDUE, ConsumerPresence
from lisa.core.store.replies import pairs
from lisa.core.store.store import Store
from lisa.core.transitions.base import text
from lisa.core.transitions.inspect import GroupState, Inspect, Inspection

MOST_HOLDERS = 3
"""The most messages that a sentence names as holders of a lane's slots."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """Why a message is not running in a group; `group` is None if that concerns all groups.

    state: of the message, as in `FoundInGroup`. until_ms: when this changes, in epoch ms; None if
        the sentence says on what it depends.
    """

    group: str | None
    state: str
    sentence: str
    until_ms: int | None = None


class Lane(NamedTuple):
    """What the hash `lanes` has of a lane; see lua/prelude/lanes.lua. `rest_ms` in epoch ms."""

    used: int = 0
    parked: int = 0
    rest_ms: int = 0
    head: str = ""

    @classmethod
    def parse(cls, stored: bytes | None) -> Lane:
        """Read a value of the hash."""
        used, parked, *more = text(stored or b"0 0").split(" ", 6)
        return (
            cls(int(used), int(parked), int(more[2]) // 1000, more[4])
            if more
            else cls(int(used), int(parked))
        )


@dataclass(frozen=True, slots=True)
class _Scene:
    """A topic at one instant, for the sentences about one of its messages."""

    store: Store
    shard: Shard
    now_ms: int
    stored: Mapping[str, str]
    groups: Sequence[str]
    consumers: Sequence[RolePresence[ConsumerPresence]]

    @property
    def is_paused(self) -> bool:
        return self.stored.get("paused") == "1"

    def options(self, group: str) -> TopicOptions:
        return TopicOptions.from_hash(self.stored, group)

    def alive_in(self, group: str) -> list[ConsumerPresence]:
        return [
            seen.record for seen in self.consumers if seen.alive and group in seen.record.groups
        ]


def why(store: Store, topic: str, message_id: str) -> Flow[list[Reason]]:
    """Why a message is not running, for each group that owes it; empty if its id is unknown.

    Raises LisaError.
    """
    shard, seen = Shard(topic), None
    for name in (yield from shards_of_id(store, topic, message_id)):
        (found,) = yield from store.run(Inspect(name, [message_id]))
        if found.envelope or (found.tombstone and seen is None):
            shard, seen = name, found
    if seen is None:
        return []
    stone = seen.tombstone
    if not seen.envelope and stone is not None:
        ended = f"It has ended: {stone.state} at {_instant(stone.at_ms)}."
        return [_reason(None, stone.state, ended)]
    scene = yield from _scene(store, shard)
    if seen.waiting_due_ms is not None:
        return [(yield from _waiting(scene, seen.waiting_due_ms))]
    reasons = []
    for held in seen.group_states:
        reasons.append((yield from _in_group(scene, message_id, held)))  # noqa: PERF401  a flow
    return reasons or [_reason(None, "lost", "No group has it: run `lisa fsck`.")]


def _scene(store: Store, shard: Shard) -> Flow[_Scene]:
    keys = store.keys.topic(shard)
    stored = pairs((yield from store.command("HGETALL", keys.options)))
    return _Scene(
        store,
        shard,
        (yield from store.server_time_ms(keys.waiting)),
        {text(name): text(value) for name, value in stored.items()},
        (yield from store.groups(shard)),
        (yield from consumers(store, [topic_of(shard)])),
    )


def _instant(ms: int) -> str:
    return utc_text(ms_datetime(ms))


def _reason(group: str | None, state: str, sentence: str, until_ms: int | None = None) -> Reason:
    return Reason(group=group, state=state, sentence=sentence, until_ms=until_ms)


def _waiting(scene: _Scene, due_ms: int) -> Flow[Reason]:
    """Why a message is in waiting."""
    say = partial(_reason, None, "waiting")
    if due_ms > scene.now_ms:
        return say(f"It waits until it is due, {_instant(due_ms)}.", due_ms)
    return (yield from _not_promoted(scene, say, due_ms, "Its due time has come"))


def _not_promoted(scene: _Scene, say: partial[Reason], due_ms: int, head: str) -> Flow[Reason]:
    """Why managers have not promoted what is due."""
    if scene.is_paused:
        return say(f"{head}, but the topic is paused: run `lisa topic resume`.")
    if not scene.groups:
        return say(f"{head}, but no group is declared: start a consumer.")
    late_ms = scene.now_ms - due_ms
    if warning := (yield from late_warning(scene.store, late_ms)):
        return say(f"{head}, but {warning}.")
    options = scene.options("")
    if options.ramp is not None and late_ms >= OVERDUE.total_seconds() * 1000:
        return say(f"{head}; a backlog is promoted at {options.ramp}.")
    return say(f"{head}: a manager promotes it as soon as its groups have room.")


def _in_group(scene: _Scene, message_id: str, held: GroupState) -> Flow[Reason]:
    """Why a message is not running in a group."""
    say = partial(_reason, held.group, held.state)
    if held.state == "in_flight":
        since = human(held.idle_ms or 0)
        return say(f"It runs, or is about to: {held.consumer} has had it for {since}.")
    if held.state == "garbage":
        return say(f"It is dead ({held.reason}): requeue or purge it.")
    if held.state == "parked":
        return (yield from _parked(scene, message_id, held, say))
    if held.state == "retry" and held.due_ms is not None:
        if held.due_ms > scene.now_ms:
            until = f"until {_instant(held.due_ms)} ({held.reason})"
            return say(f"It waits for its next delivery {until}.", held.due_ms)
        return (yield from _not_promoted(scene, say, held.due_ms, "Its retry is due"))
    return say(_ready(scene, held.group))


def _ready(scene: _Scene, group: str) -> str:
    """Why no consumer has read a message that is ready."""
    if scene.is_paused:
        return "It is ready, but the topic is paused: run `lisa topic resume`."
    alive = scene.alive_in(group)
    if not alive:
        return f"It is ready, but no consumer of group {group} runs: start one."
    if paused := [each.name for each in alive if each.state == "paused"]:
        return f"It is ready, but these consumers are paused: {', '.join(paused)}."
    if all(each.running >= each.concurrency for each in alive):
        busy = sum(each.running for each in alive)
        return f"It is ready; all {busy} handlers of group {group} are busy."
    return "It is ready: a consumer reads it next."


def _parked(scene: _Scene, message_id: str, held: GroupState, say: partial[Reason]) -> Flow[Reason]:
    """Why a lane does not let a message through."""
    key, end, own_id = message_id.partition(KEY_END)
    key, own_id = (key, own_id) if end else ("", message_id)
    keys, group, store = scene.store.keys.topic(scene.shard), held.group, scene.store
    lanes, options = keys.lanes(group), scene.options(group)
    stored, place, closed, all_closed, used, *limits = yield from store.commands(
        [
            ("HGET", lanes.lanes, key),
            ("HGET", lanes.parked, message_id),
            ("ZSCORE", lanes.closed, key),
            ("ZSCORE", lanes.closed, KEY_END),
            ("HLEN", keys.group(group).entries),
            *[("HGET", keys.limits, name) for name in (key, f"{group}{KEY_END}{key}")],
        ]
    )
    if place is None:
        return say("It was parked, and moves on.")
    lane = Lane.parse(stored)
    start = key.encode() + KEY_END.encode()
    ahead = yield from store.command(
        "ZLEXCOUNT",
        lanes.queues,
        b"[" + start,
        b"(" + start + place[:PLACE_BYTES] + own_id.encode(),
    )
    name = f"key {key}" if key else "the messages without a key"
    behind = f"; {ahead} of {name} come before it" if ahead else ""
    if scene.is_paused:
        return say("It is parked, and the topic is paused: run `lisa topic resume`.")
    if lane.head and lane.head != own_id:
        return (yield from _behind(scene, group, keyed_id(key or None, lane.head), say))
    own = KeyLimits.decode(";".join(text(each) for each in limits if each))
    most = 1 if options.order and key else (own.concurrency or options.key_concurrency)
    if key and most is not None and lane.used >= most:
        return say((yield from _full(scene, group, key, most)) + f"{behind}.")
    if lane.rest_ms > scene.now_ms:
        rests = f"A handler met a limit: {name} rests until {_instant(lane.rest_ms)}{behind}."
        return say(rests, lane.rest_ms)
    for score, rate, what in (
        (closed, own.rate or options.key_rate, name),
        (all_closed, options.rate, f"group {group}"),
    ):
        if score is not None and rate is not None:
            at = max(int(float(score)), scene.now_ms)
            opens = f"lets the next through at {_instant(at)}"
            return say(f"The rate of {what}, {rate}, {opens}{behind}.", at)
    if options.concurrency is not None and used >= options.concurrency:
        return say(f"All slots of group {group} are taken ({used}){behind}.")
    return (yield from _waits_for_turn(scene, held, say, f"the turn of {name}{behind}"))


def _waits_for_turn(
    scene: _Scene, held: GroupState, say: partial[Reason], turn: str
) -> Flow[Reason]:
    """Why a group does not take a message whose lane is open."""
    if not scene.alive_in(held.group):
        return say(f"It waits for {turn}, but no consumer of group {held.group} runs: start one.")
    late_ms = scene.now_ms - (held.due_ms or scene.now_ms)
    if warning := (yield from late_warning(scene.store, late_ms)):
        return say(f"It waits for {turn}, but {warning}.")
    return say(f"It waits for {turn}.")


def _behind(scene: _Scene, group: str, head: str, say: partial[Reason]) -> Flow[Reason]:
    """The sentence about the message that holds a lane with an order."""
    (seen,) = yield from scene.store.run(Inspect(scene.shard, [head]))
    for held in seen.group_states:
        if held.group == group and held.state == "garbage":
            return say(f"{shown_id(head)} before it is dead: requeue, cancel or purge that one.")
        if held.group == group and held.due_ms is not None:
            until = f"{shown_id(head)} before it is tried again at {_instant(held.due_ms)}"
            return say(f"{until} ({held.reason}).", held.due_ms)
    return say(f"{shown_id(head)} before it has not ended yet.")


def _full(scene: _Scene, group: str, key: str, most: int) -> Flow[str]:
    """Who holds the slots of a key."""
    part = yield from read_part(scene.store, scene.shard, key)
    ids = part.ids[:200]
    entries = scene.store.keys.topic(scene.shard).group(group).entries
    held: Sequence[bytes | None] = ()
    if ids:
        held = yield from scene.store.command("HMGET", entries, *ids)
    holders = [each for each, entry in zip(ids, held, strict=True) if entry][:MOST_HOLDERS]
    seen: Sequence[Inspection] = []
    if holders:
        seen = yield from scene.store.run(Inspect(scene.shard, holders, bodies=False))
    named = []
    for holder, inspection in zip(holders, seen, strict=True):
        where = next((one for one in inspection.group_states if one.group == group), None)
        by = f" in {where.consumer}" if where and where.consumer else ""
        named.append(f"{shown_id(holder)}{by}")
    slots = "The slot" if most == 1 else f"All {most} slots"
    verb = "is" if most == 1 else "are"
    return f"{slots} of key {key} {verb} taken, by {', '.join(named) or 'others'}"
