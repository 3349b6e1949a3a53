"""Reads the lists of ids that belong to a key, and changes all messages of a key.

lua/prelude/keyed.lua describes and writes the lists. A change reads one part of a list after the
other and runs its script for the part's ids, which refuses if the part has changed meanwhile. So
the messages of a key change together, up to the number of ids that a call may have, and no message
is left out that was sent before the change began.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from lisa.core.model.clock import MAX_DUE_MS
from lisa.core.model.envelope import headers_of
from lisa.core.model.errors import LisaError
from lisa.core.model.keys import keyed_id
from lisa.core.model.sharding import KEY_END, Shard, Topic
from lisa.core.redis.flow import Flow
from lisa.core.store.inspection import FoundMessage, State, found
from lisa.core.store.store import Store, chunks
from lisa.core.transitions.base import ById, HasWindow, ListChanged, Listed, Transition
from lisa.core.transitions.change import Cancel, Cancelled, Reschedule, Rescheduled
from lisa.core.transitions.inspect import Inspect

Outcome: TypeAlias = Cancelled | Rescheduled | State

Write = Callable[[ById[Any]], Flow[list[Any]]]
"""Runs a transition on the shard that its topic names."""

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


class KeyPage(NamedTuple):
    """A page of a key's live messages, without bodies and headers, by due time.

    total: ids in the key's lists. cursor: where the next page begins; None at the end.
    """

    messages: list[FoundMessage]
    total: int
    cursor: str | None


class KeyFlows:
    """The flows for all messages of a key; all raise LisaError.

    Those that change messages return one outcome per id. `outcomes` of their errors has what was
    done before; a repeated call continues.

    write: runs a transition on the shard that its topic names.
    """

    def __init__(self, store: Store, topic: str, key: str, write: Write) -> None:
        self._store = store
        self._topic = Topic(topic)
        self._key = key
        self._write = write

    def _shards(self) -> Flow[list[Shard]]:
        """The shards that may have messages of the key: the current one, then older ones."""
        layout = yield from self._store.layout(self._topic)
        return layout.shards_of_id(self._topic, keyed_id(self._key, ""))

    def count(self) -> Flow[int]:
        """How many live messages the lists of the key have."""
        total = 0
        for shard in (yield from self._shards()):
            total += (yield from read_part(self._store, shard, self._key)).total
        return total

    def messages(self) -> Flow[list[FoundMessage]]:
        """The live messages, by due time."""
        known: dict[str, FoundMessage] = {}
        for shard in (yield from self._shards()):
            number = parts = 1
            while number <= parts:
                part = yield from read_part(self._store, shard, self._key, number)
                for message in (yield from self._found(shard, part.ids)):
                    known[message.id] = message
                number, parts = number + 1, part.parts
        return _by_due(known.values())

    def page(self, cursor: str | None, limit: int) -> Flow[KeyPage]:
        """A page of the live messages, of all shards one after the other.

        No message is left out that lives all the time. Others may come twice, if the list grows
        meanwhile. A page may be short; the last one has no cursor.
        """
        shards = yield from self._shards()
        first, number, last = _position(cursor, shards)
        messages: list[FoundMessage] = []
        left = limit
        for shard in shards[shards.index(first) :]:
            parts = number
            while number <= parts:
                part = yield from read_part(self._store, shard, self._key, number)
                ids = sorted(each for each in part.ids if each > last)
                messages += yield from self._found(shard, ids[:left], bodies=False)
                if len(ids) > left:
                    here = f"{shard}/{number}:{ids[left - 1] if left else last}"
                    return KeyPage(_by_due(messages), (yield from self.count()), here)
                left -= len(ids)
                number, parts, last = number + 1, part.parts, ""
            number = 1
        return KeyPage(_by_due(messages), (yield from self.count()), None)

    def _found(
        self, shard: Shard, ids: Sequence[str], *, bodies: bool = True
    ) -> Flow[list[FoundMessage]]:
        """Those of the messages that are live."""
        messages: list[FoundMessage | None] = []
        for part in chunks(ids, self._store.batch_size(shard, Inspect)):
            seen = yield from self._store.run(Inspect(shard, part, bodies))
            messages += [
                found(self._topic, message_id, inspection, has_body=bodies)
                for message_id, inspection in zip(part, seen, strict=True)
            ]
        return [message for message in messages if message and not message.state.is_final]

    def cancel(self) -> Flow[list[KeyOutcome]]:
        """Cancel all messages."""

        def cancel(
            shard: Shard, ids: Sequence[str], listed: Listed | None
        ) -> Flow[dict[str, Outcome]]:
            outcomes = yield from self._write(Cancel(shard, ids, listed=listed))
            return dict(zip(ids, outcomes, strict=True))

        return self._change(cancel, Cancel)

    def reschedule(self, due: str) -> Flow[list[KeyOutcome]]:
        """Give all messages a due time, in their windows. due: as scripts read it."""
        move = _Move(self._store, self._topic, self._write, lambda _: due, is_shift=False)
        return self._change(move.change, Reschedule)

    def shift(self, shift_ms: int) -> Flow[list[KeyOutcome]]:
        """Move the due times of waiting messages, in their windows.

        The outcome of other messages is their state.
        """

        def due(was_ms: int) -> str:
            return shifted(was_ms, shift_ms)

        move = _Move(self._store, self._topic, self._write, due, is_shift=True)
        return self._change(move.change, Reschedule)

    def _change(self, change: Change, kind: type[Transition[Any]]) -> Flow[list[KeyOutcome]]:
        """Change all messages. kind: the transition that `change` runs."""
        outcomes: dict[str, Outcome] = {}
        try:
            for shard in (yield from self._shards()):
                number = parts = 1
                while number <= parts:
                    parts = yield from self._change_part(shard, number, change, kind, outcomes)
                    number += 1
        except LisaError as error:
            error.outcomes = [KeyOutcome(*item) for item in outcomes.items()]
            raise
        return [KeyOutcome(*item) for item in outcomes.items()]

    def _change_part(
        self,
        shard: Shard,
        number: int,
        change: Change,
        kind: type[Transition[Any]],
        outcomes: dict[str, Outcome],
    ) -> Flow[int]:
        """Change the messages of one part, add their outcomes, and return the number of parts.

        A message that was listed at first may have been settled before the list is read again, also
        by a call whose reply was lost: it gets an outcome, too.
        """
        seen: dict[str, None] = {}
        done: set[str] = set()
        reads_left = MOST_READS
        while True:
            part = yield from read_part(self._store, shard, self._key, number)
            seen.update(dict.fromkeys(part.ids))
            todo = [message_id for message_id in seen if message_id not in done]
            ids = todo[: self._store.batch_size(shard, kind)]
            if not ids:
                return part.parts
            listed = Listed(number, part.stored) if reads_left else None
            try:
                changed = yield from change(shard, ids, listed)
            except ListChanged:
                reads_left -= 1
                continue
            outcomes.update(changed)
            done.update(ids)
            if len(ids) == len(todo):
                return part.parts


def _by_due(messages: Iterable[FoundMessage]) -> list[FoundMessage]:
    return sorted(messages, key=lambda message: (message.due_ms or 0, message.id))


def _position(cursor: str | None, shards: Sequence[Shard]) -> tuple[Shard, int, str]:
    """The shard, the number of the part, and the id after which a page begins.

    It is the very beginning for a cursor of a shard that no longer has messages of the key.
    """
    name, _, place = (cursor or "").partition("/")
    number, _, last = place.partition(":")
    if name not in shards or not number:
        return shards[0], 1, ""
    return Shard(name), int(number), last


class _Move(NamedTuple):
    """Gives messages of a key new due times.

    due: the due time, as scripts read it, of a message that waits until the given instant.
    is_shift: whether it depends on that instant, so that only waiting messages have one.
    """

    store: Store
    topic: str
    write: Write
    due: Callable[[int], str]
    is_shift: bool

    def change(
        self, shard: Shard, ids: Sequence[str], listed: Listed | None
    ) -> Flow[dict[str, Outcome]]:
        """Reschedule messages; at first as if there were no windows, which few topics have."""
        outcomes: dict[str, Outcome] = {}
        todo, is_placed = list(ids), False
        for _ in range(MOST_READS):
            items = yield from self._items(shard, todo, outcomes, is_placed=is_placed)
            if not items:
                break
            call = Reschedule(shard, items, listed=listed, is_placed=is_placed)
            try:
                answers = yield from self.write(call)
            except HasWindow:
                is_placed = True
                continue
            outcomes.update(zip((message_id for message_id, _ in items), answers, strict=True))
            # A message that no longer waits until the instant that was read is read again.
            todo = [
                message_id
                for message_id, _ in items
                if self.is_shift and outcomes[message_id] is Rescheduled.DONE
            ]
            if not todo:
                break
            listed = None
        return outcomes

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
                due = in_window(due, headers_of(inspection.envelope), window)
            items.append((message_id, f"{due}@{waits_until_ms}" if self.is_shift else due))
        return items


def shifted(due_ms: int, shift_ms: int) -> str:
    """A due time that is moved, as scripts read it."""
    return str(min(max(due_ms + shift_ms, 0), MAX_DUE_MS))


def in_window(due: str, headers: Mapping[str, str], topic_window: str) -> str:
    """A due time in the window of a message or of its topic. Raises InvalidMessage."""
    from lisa.core.model.windows.placing import clock_ms, moved, window_of  # late: few have windows

    window = window_of(headers, topic_window)
    return due if window is None else moved(due, window, clock_ms())
