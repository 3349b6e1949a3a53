"""What coalescing sends must do, by the rules in docs/how-to/debounce.md and the data before."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from lisa.core.model.keys import COALESCED_IDS, keyed_id
from lisa.core.store.store import SyncStore
from lisa.core.transitions.enqueue import SendOutcome, Sent
from tests.contract.bench import TOPIC
from tests.model.lanes import Snapshot
from tests.rows import Burst

STAGES = ("unstarted", "free", "dead", "started", "in flight")
"""In this order a send takes one of the two ids of its key, by the stage of its message."""

OUTCOMES = {
    "free": Sent.ACCEPTED,
    "unstarted": Sent.REPLACED,
    "dead": Sent.REPLACED,
    "started": Sent.REPLACED,
    "in flight": Sent.REPLACED_IN_FLIGHT,
}
MARKS = {
    Sent.ACCEPTED: "-",
    Sent.REPLACED: "r",
    Sent.REPLACED_IN_FLIGHT: "f",
    Sent.UPDATED: "b",
}


@dataclass
class Slot:
    """One id of a key. due_ms: of an unstarted message; waits: whether it is not due yet.

    mark: that of the body which the call writes, if it does.
    """

    id: str
    stage: str
    due_ms: int | None = None
    waits: bool = False
    mark: str = ""


@dataclass
class Coalescing:
    """The model of all keys, for a server whose clock stands still during a call.

    first_ms: by id, the first send of its burst. allowed_ms: by key, the instant before which its
    next throttled message is not due.
    """

    store: SyncStore
    first_ms: dict[str, int] = field(default_factory=dict)
    allowed_ms: dict[str, int] = field(default_factory=dict)

    def look(self, before: Snapshot, bursts: Iterable[Burst]) -> dict[str, Slot]:
        """The ids that sends take, by key."""
        return {burst.key: self._choose(before, burst.key) for burst in bursts}

    def judge(
        self,
        slots: Mapping[str, Slot],
        bursts: Sequence[Burst],
        said: Sequence[SendOutcome],
        after: Snapshot,
    ) -> None:
        """Check the outcomes of a call, and what it wrote. slots: those before it.

        Delays count from the next full millisecond. The server's clock stands still at one, but may
        show up to a millisecond more.
        """
        now_ms = after.now_us // 1000
        for up_ms in (now_ms + 1, now_ms):
            model = Coalescing(self.store, dict(self.first_ms), dict(self.allowed_ms))
            taken = {key: replace(slot) for key, slot in slots.items()}
            wanted = [
                SendOutcome(
                    taken[burst.key].id, model._take(taken[burst.key], burst, now_ms, up_ms)
                )
                for burst in bursts
            ]
            if wanted == said and not model._differences(after, taken, bursts):
                self.first_ms, self.allowed_ms = model.first_ms, model.allowed_ms
                return
        differences = model._differences(after, taken, bursts)
        raise AssertionError(f"{slots}, {bursts}: {said}, not {wanted}; {differences}")

    def _take(self, slot: Slot, burst: Burst, now_ms: int, up_ms: int) -> Sent:
        """The outcome of one send, which may change when its message is due."""
        kind, span, most = re.fullmatch(r"(.)([^,]*),?(\d*)", burst.rule).groups()  # type: ignore[union-attr]
        is_new, said, due_ms = slot.stage != "unstarted", OUTCOMES[slot.stage], slot.due_ms
        if is_new:
            self.first_ms.pop(slot.id, None)
        if kind == "d":
            first_ms = self.first_ms.setdefault(slot.id, up_ms)
            due_ms = up_ms + int(span)
            due_ms = min(due_ms, first_ms + int(most)) if most else due_ms
            if slot.due_ms is not None and not slot.waits:
                is_kept = due_ms == slot.due_ms or max(due_ms, slot.due_ms) <= now_ms
                due_ms, said = (slot.due_ms, Sent.UPDATED) if is_kept else (due_ms, said)
        elif not is_new:
            said = Sent.UPDATED
        elif kind == "t":
            due_ms = max(now_ms, min(self.allowed_ms.get(burst.key, 0), up_ms + int(span)))
            self.allowed_ms[burst.key] = (due_ms if due_ms > now_ms else up_ms) + int(span)
        else:
            due_ms = up_ms + int(span) if int(span) else now_ms
        slot.stage, slot.due_ms, slot.mark = "unstarted", due_ms, slot.mark or MARKS[said]
        slot.waits = slot.waits or said is not Sent.UPDATED
        return said

    def _choose(self, before: Snapshot, key: str) -> Slot:
        """The id that a send takes; of two unstarted messages, that of the one due later."""
        one, other = (self._look(before, keyed_id(key, own)) for own in COALESCED_IDS)
        if one.stage == other.stage == "unstarted":
            return one if (one.due_ms or 0) > (other.due_ms or 0) else other
        return min(one, other, key=lambda slot: STAGES.index(slot.stage))

    def _look(self, before: Snapshot, message_id: str) -> Slot:
        """How far the message with an id is."""
        keys = self.store.keys.topic(TOPIC)
        body = self.store.ask("GET", keys.body(message_id))
        if body is None:
            return Slot(message_id, "free")
        if message_id in before.waiting:
            return Slot(message_id, "unstarted", int(before.waiting[message_id]), waits=True)
        begun, dues = body[9:10] in b"+RFB", list[int]()
        for group in before.groups.values():
            own = keys.group(group.name)
            entry = group.entries.get(message_id)
            if entry and self.store.ask("XPENDING", own.ready, group.name, entry, entry, 1):
                return Slot(message_id, "in flight")
            if message_id in group.parked:
                dues.append(group.parked[message_id].due_ms)
            elif message_id in group.retry or entry:
                dues.append(int(group.retry.get(message_id) or group.dues[message_id]))
            else:
                continue
            begun = begun or bool(self.store.ask("HEXISTS", own.attempts, message_id))
        if not dues:
            return Slot(message_id, "dead")
        return Slot(message_id, "started" if begun else "unstarted", min(dues))

    def _differences(
        self, after: Snapshot, taken: Mapping[str, Slot], sent: Sequence[Burst]
    ) -> list[str]:
        """The last body of each key is that of its id, which is due when it has to be."""
        found, last = [], {burst.key: burst.envelope for burst in sent}
        for key, slot in taken.items():
            body = self.store.ask("GET", self.store.keys.topic(TOPIC).body(slot.id))
            wanted = last[key][:9] + slot.mark.encode() + last[key][10:]
            due_ms = after.waiting.get(slot.id)
            if body != wanted or due_ms != (slot.due_ms if slot.waits else None):
                found.append(f"{slot}: {body!r}, due {due_ms}")
        return found

    def follow_clock(self, now_ms: int) -> None:
        """The clock was set back: instants that had passed before may have been forgotten."""
        throttled = self.store.keys.topic(TOPIC).throttled
        for key in list(self.allowed_ms):
            at = self.store.ask("ZSCORE", throttled, key)
            if at is None and self.allowed_ms[key] > now_ms:
                del self.allowed_ms[key]
