"""Reads the lists of ids that belong to a key, and changes all messages of a key.

lua/prelude/keyed.lua describes and writes the lists. A change reads one part of a list after the
other and runs its script for the part's ids, which refuses if the part has changed meanwhile. So
the messages of a key change together, up to the number of ids that a call may have, and no message
is left out that was sent before the change began.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from lisa.core.model.clock import MAX_DUE_MS
from lisa.core.model.durability import Replicas
from lisa.core.model.envelope import headers_of
from lisa.core.model.errors import LisaError, NotReplicated
from lisa.core.model.keys import keyed_id
from lisa.core.model.sharding import KEY_END, Shard, Topic
from lisa.core.redis.flow import Flow
from lisa.core.store.inspection import FoundMessage, State, found
from lisa.core.store.store import Store, chunks
from lisa.core.transitions.base import HasWindow, ListChanged, Listed, Transition
from lisa.core.transitions.change import Cancel, Cancelled, Reschedule, Rescheduled
from lisa.core.transitions.inspect import Inspect

Outcome: TypeAlias = Cancelled | Rescheduled | State

Change = Callable[[Shard, Sequence[str], Listed | None], Flow[Mapping[str, Outcome]]]
"""Changes some ids of a shard, if the given part of their list is still the same."""

MOST_READS = 10
"""How often one part of a list, or a due time, is read again because others keep changing it."""


class KeyOutcome(NamedTuple):
    """What a call did to one message of a key.

    outcome: as that of `cancel` or `reschedule` of the id; of a message that does not wait, and
    whose due time is not shifted for that reason, its state.
    """

    id: str
    outcome: Outcome


class KeyPart(NamedTuple):
    """One part of a key's list.

    number, parts: which of how many parts, from 1. ids: whole ids. total: ids in the whole list.
    stored: the part as the server has it.
    """

    number: int
    parts: int
    ids: list[str]
    total: int
    stored: bytes


def read_part(store: Store, shard: Shard, key: str, number: int = 1) -> Flow[KeyPart]:
    """One part of the list of a key's live ids, in no particular order. Raises LisaError.

    A later part is read with the number after this one's, up to `parts`. New parts come at the end,
    and take ids of earlier ones with them: reading all parts in order misses no id that was there
    all the time.
    """
    field = key if number == 1 else f"{key}{KEY_END}{number}"
    keyed = store.keys.topic(shard).keyed
    head, stored = yield from store.command("HMGET", keyed, f"{key}{KEY_END}", field)
    stored = stored or b""
    own_ids = stored.decode().split(KEY_END)[:-1]
    parts, total = map(int, head.split()) if head else (1, len(own_ids))
    return KeyPart(number, parts, [keyed_id(key, own) for own in own_ids], total, stored)


def _shards(store: Store, topic: str, key: str) -> Flow[list[Shard]]:
    """The shards that may have messages of a key: the current one, then those of older layouts."""
    layout = yield from store.layout(Topic(topic))
    return layout.shards_of_id(Topic(topic), keyed_id(key, ""))


def count_key(store: Store, topic: str, key: str) -> Flow[int]:
    """How many live messages the lists of a key have. Raises LisaError."""
    count = 0
    for shard in (yield from _shards(store, topic, key)):
        count += (yield from read_part(store, shard, key)).total
    return count


def list_key(store: Store, topic: str, key: str) -> Flow[list[FoundMessage]]:
    """The live messages of a key, by due time. Raises LisaError."""
    messages: dict[str, FoundMessage] = {}
    for shard in (yield from _shards(store, topic, key)):
        number = parts = 1
        while number <= parts:
            part = yield from read_part(store, shard, key, number)
            for ids in chunks(part.ids, store.batch_size(shard, Inspect)):
                seen = yield from store.run(Inspect(shard, ids))
                for message_id, inspection in zip(ids, seen, strict=True):
                    message = found(topic, message_id, inspection)
                    if message is not None and not message.state.is_final:
                        messages[message_id] = message
            number, parts = number + 1, part.parts
    return sorted(messages.values(), key=lambda message: (message.due_ms or 0, message.id))


def cancel_key(
    store: Store, topic: str, key: str, durability: Replicas | None = None
) -> Flow[list[KeyOutcome]]:
    """Cancel all messages of a key; see `KeyChange.run`."""

    def cancel(shard: Shard, ids: Sequence[str], listed: Listed | None) -> Flow[dict[str, Outcome]]:
        call = Cancel(shard, ids, listed=listed)
        outcomes = yield from store.run(call, durability=durability)
        return dict(zip(ids, outcomes, strict=True))

    return KeyChange(store, topic, key, cancel, Cancel).run()


def reschedule_key(
    store: Store, topic: str, key: str, due: str, durability: Replicas | None = None
) -> Flow[list[KeyOutcome]]:
    """Give all messages of a key a due time, in their windows; see `KeyChange.run`.

    due: as scripts read it.
    """
    move = _Move(store, topic, lambda _: due, is_shift=False, durability=durability)
    return KeyChange(store, topic, key, move.change, Reschedule).run()


def fire_key(
    store: Store, topic: str, key: str, durability: Replicas | None = None
) -> Flow[list[KeyOutcome]]:
    """Make all messages of a key due now; see `KeyChange.run`."""
    return reschedule_key(store, topic, key, "+0", durability)


def shift_key(
    store: Store, topic: str, key: str, shift_ms: int, durability: Replicas | None = None
) -> Flow[list[KeyOutcome]]:
    """Move the due times of the waiting messages of a key, in their windows; see `KeyChange.run`.

    The outcome of other messages is their state.
    """

    def shifted(waits_until_ms: int) -> str:
        return str(min(max(waits_until_ms + shift_ms, 0), MAX_DUE_MS))

    move = _Move(store, topic, shifted, is_shift=True, durability=durability)
    return KeyChange(store, topic, key, move.change, Reschedule).run()


class KeyChange(NamedTuple):
    """A change of all messages of a key.

    change: changes some of them. kind: the transition that it runs.
    """

    store: Store
    topic: str
    key: str
    change: Change
    kind: type[Transition[Any]]

    def run(self) -> Flow[list[KeyOutcome]]:
        """Returns one outcome per id.

        Raises LisaError, whose `outcomes` has what was done before. A repeated call continues.
        """
        outcomes: dict[str, Outcome] = {}
        try:
            for shard in (yield from _shards(self.store, self.topic, self.key)):
                number = parts = 1
                while number <= parts:
                    parts = yield from self._change_part(shard, number, outcomes)
                    number += 1
        except LisaError as error:
            error.outcomes = [KeyOutcome(*item) for item in outcomes.items()]
            raise
        return [KeyOutcome(*item) for item in outcomes.items()]

    def _change_part(self, shard: Shard, number: int, outcomes: dict[str, Outcome]) -> Flow[int]:
        """Change the messages of one part, add their outcomes, and return the number of parts.

        A message that was listed at first may have been settled before the list is read again, also
        by a call whose reply was lost: it gets an outcome, too.
        """
        seen: dict[str, None] = {}
        done: set[str] = set()
        reads_left = MOST_READS
        while True:
            part = yield from read_part(self.store, shard, self.key, number)
            seen.update(dict.fromkeys(part.ids))
            todo = [message_id for message_id in seen if message_id not in done]
            ids = todo[: self.store.batch_size(shard, self.kind)]
            if not ids:
                return part.parts
            listed = Listed(number, part.stored) if reads_left else None
            try:
                changed = yield from self.change(shard, ids, listed)
            except ListChanged:
                reads_left -= 1
                continue
            except NotReplicated as error:
                error.ids = tuple(ids)
                raise
            outcomes.update(changed)
            done.update(ids)
            if len(ids) == len(todo):
                return part.parts


class _Move(NamedTuple):
    """Gives messages of a key new due times.

    due: the due time, as scripts read it, of a message that waits until the given instant.
    is_shift: whether it depends on that instant, so that only waiting messages have one.
    """

    store: Store
    topic: str
    due: Callable[[int], str]
    is_shift: bool
    durability: Replicas | None

    def change(
        self, shard: Shard, ids: Sequence[str], listed: Listed | None
    ) -> Flow[dict[str, Outcome]]:
        """Reschedule messages; first as if there were no windows, which few topics have."""
        try:
            return (yield from self._change(shard, ids, listed, is_placed=False))
        except HasWindow:
            return (yield from self._change(shard, ids, listed, is_placed=True))

    def _change(
        self, shard: Shard, ids: Sequence[str], listed: Listed | None, *, is_placed: bool
    ) -> Flow[dict[str, Outcome]]:
        outcomes: dict[str, Outcome] = {}
        todo = list(ids)
        for _ in range(MOST_READS):
            items = yield from self._items(shard, todo, outcomes, is_placed=is_placed)
            if not items:
                break
            call = Reschedule(shard, items, listed=listed, is_placed=is_placed)
            answers = yield from self.store.run(call, durability=self.durability)
            todo = [message_id for message_id, _ in items]
            outcomes.update(zip(todo, answers, strict=True))
            # A message that no longer waits until the instant that was read is read again.
            todo = [each for each in todo if outcomes[each] is Rescheduled.DONE and self.is_shift]
            listed = None
        return {message_id: outcomes[message_id] for message_id in ids}

    def _items(
        self, shard: Shard, ids: Sequence[str], outcomes: dict[str, Outcome], *, is_placed: bool
    ) -> Flow[list[tuple[str, str]]]:
        """The ids with their new due times; adds the outcomes of those that cannot be shifted."""
        if not (is_placed or self.is_shift):
            return [(message_id, self.due(0)) for message_id in ids]
        seen = yield from self.store.run(Inspect(shard, ids, bodies=is_placed))
        window = (yield from self.store.options(self.topic)).window or "" if is_placed else ""
        items = []
        for message_id, inspection in zip(ids, seen, strict=True):
            waits_until_ms = inspection.waiting_due_ms
            if self.is_shift and waits_until_ms is None:
                message = found(self.topic, message_id, inspection)
                outcomes[message_id] = message.state if message else Rescheduled.UNKNOWN
                continue
            due = self.due(waits_until_ms or 0)
            if is_placed and inspection.envelope:
                due = _in_window(due, inspection.envelope, window)
            items.append((message_id, f"{due}@{waits_until_ms}" if self.is_shift else due))
        return items


def _in_window(due: str, envelope: bytes, topic_window: str) -> str:
    """A due time in the window of a message or of its topic. Raises InvalidMessage."""
    from lisa.core.model.windows.placing import clock_ms, moved, window_of  # late: few have windows

    window = window_of(headers_of(envelope), topic_window)
    return due if window is None else moved(due, window, clock_ms())
