"""A topic as plain Python values: the queue's state, and the keys that hold it.

This module and its neighbours implement the queue a second time, for readability:
`sending` (what producers do), `delivering` (consumers), `managing` (managers), `operating`
(operators). They import nothing from Lisa.

A message is *live* from its send until it is settled. A live message is in `waiting`, or, for each
group that still owes it, in exactly one of that group's `stream`, `retry` and `garbage`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from tests.model.unknowns import Clock, EntryId, Instant, LateReason, Note

Time = int | Instant
"""Epoch milliseconds."""

DEFAULTS = {
    "ack_timeout": "10000",
    "retry_delays": ",".join(["20000"] * 10),
    "max_ready": "10000",
    "retention": "60000",
    "dedupe_for": "86400000",
    "max_body_bytes": "1048576",
}
STEPS = 250
"""One call moves at most this many messages, times groups."""


@dataclass
class Message:
    """A live message. `token` names the call that sent it."""

    token: str
    text: str
    mark: str = "-"
    """'-' accepted, 'r' replaced another, 'f' one in flight, 'b' one whose due time it took; '+'
    and capitals the same, once one of several groups has settled it."""

    @property
    def envelope(self) -> str:
        """The bytes of its body: version, token, mark, kind (text), length of headers, text."""
        return f"1{self.token}{self.mark}s0000{self.text}"

    @property
    def is_partly_settled(self) -> bool:
        return self.mark == "+" or self.mark.isupper()

    def settle_partly(self) -> None:
        self.mark = "+" if self.mark == "-" else self.mark.upper()


@dataclass
class Tombstone:
    """What is kept of a settled message for a while."""

    token: str
    mark: str
    state: str
    due: Time | None
    attempts: int
    at: Time
    ends: Time


@dataclass(eq=False)
class Entry:
    """A message in a group's stream: ready, or in flight once held."""

    id: str
    due: Time
    attempt: int
    number: int
    """Its position in the stream."""
    name: EntryId
    holder: str | None = None
    since: Time = 0
    times: int = 1
    """2 once its holder told that a handler has begun."""
    is_suspect: bool = False
    """A process ended while it held the message, and did not tell whether its handler had begun."""
    is_ours: bool = True
    """False: written by another program."""


@dataclass
class Group:
    """The consumers that share a topic's messages, and the messages they still owe."""

    name: str
    stream: list[Entry] = field(default_factory=list)
    given: Entry | None = None
    """The last delivered entry, which may be deleted."""
    consumers: set[str] = field(default_factory=set)
    retry: dict[str, Time] = field(default_factory=dict)
    garbage: dict[str, Time] = field(default_factory=dict)
    attempts: dict[str, int] = field(default_factory=dict)
    reasons: dict[str, str | LateReason | Note] = field(default_factory=dict)
    leases: dict[str, Time] = field(default_factory=dict)
    last_number: int = 0

    def entry(self, id_: str) -> Entry | None:
        """The entry of a message that is ready or in flight."""
        return next((one for one in self.stream if one.is_ours and one.id == id_), None)

    @property
    def ids(self) -> list[str]:
        """All ids that the group owes."""
        indexed = [entry.id for entry in self.stream if entry.is_ours]
        return sorted({*indexed, *self.retry, *self.garbage})

    def owes(self, id_: str) -> bool:
        return self.entry(id_) is not None or id_ in self.retry or id_ in self.garbage

    @property
    def unread(self) -> list[Entry]:
        given = self.given.number if self.given else 0
        return [entry for entry in self.stream if entry.number > given]

    @property
    def pending(self) -> list[Entry]:
        return [entry for entry in self.stream if entry.holder is not None]

    def room(self, topic: Topic) -> int:
        """How many more entries fit: in-flight messages do not count."""
        return int(topic.option("max_ready")) - (len(self.stream) - len(self.pending))

    def add(self, clock: Clock, id_: str, due: Time, *, is_suspect: bool = False) -> None:
        """Add a message, ready for its next attempt."""
        self.last_number += 1
        attempt = self.attempts.get(id_, 0) + 1
        entry = Entry(id_, due, attempt, self.last_number, EntryId(clock), is_suspect=is_suspect)
        self.stream.append(entry)

    def drop(self, entry: Entry) -> None:
        if entry in self.stream:
            self.stream.remove(entry)

    def forget_failures(self, id_: str) -> None:
        self.attempts.pop(id_, None)
        self.reasons.pop(id_, None)
        self.leases.pop(id_, None)

    def take_out(self, id_: str) -> bool:
        """Remove a message from the group; returns whether it was owed."""
        owed, entry = self.owes(id_), self.entry(id_)
        if entry:
            self.drop(entry)
        self.retry.pop(id_, None)
        self.garbage.pop(id_, None)
        self.forget_failures(id_)
        return owed


@dataclass
class Topic:
    """The state of one topic."""

    name: str
    waiting: dict[str, Time] = field(default_factory=dict)
    live: dict[str, Message] = field(default_factory=dict)
    policy: dict[str, str] = field(default_factory=dict)
    expiry: dict[str, Time] = field(default_factory=dict)
    tombstones: dict[str, Tombstone] = field(default_factory=dict)
    schedules: dict[str, str] = field(default_factory=dict)
    """Records of schedules by name."""
    ticks: dict[str, int] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    stats: Counter[str] = field(default_factory=Counter)
    alive: dict[str, str] = field(default_factory=dict)
    events: list[tuple[EntryId, dict[str, Any]]] = field(default_factory=list)
    opened: set[tuple[str, EntryId]] = field(default_factory=set)
    """Group and first entry of each open call that the journal has recorded."""
    declared: dict[str, Time] = field(default_factory=dict)
    all_groups: dict[str, Group] = field(default_factory=dict)
    """The declared groups, and those whose removal has begun."""

    @property
    def groups(self) -> list[Group]:
        return [self.all_groups[name] for name in sorted(self.declared)]

    def option(self, name: str) -> str:
        return str(self.options.get(name, DEFAULTS.get(name, "")))

    @property
    def is_paused(self) -> bool:
        return self.options.get("paused") == "1"

    def count(self, what: str, n: int = 1, group: Group | None = None) -> None:
        if n:
            self.stats[f"{what}@{group.name}" if group else what] += n

    def tell(
        self, clock: Clock, id_: str, state: str, group: Group | None, attempt: int, **more: Any
    ) -> None:
        """Append an event to the journal, if the topic has one."""
        if self.options.get("journal") == "1":
            self.stats["journaled"] += 1
            name = group.name if group else ""
            given = {"id": id_, "state": state, "group": name, "attempt": attempt, **more}
            event = {key: value for key, value in given.items() if value is not None}
            event |= {"n": self.stats["journaled"], "actor": clock.actor}
            self.events.append((EntryId(clock), event))

    def is_owed(self, id_: str) -> bool:
        return any(group.owes(id_) for group in self.groups)

    def why_not_taken_back(self, id_: str, *, dead_counts: bool = False) -> str | None:
        """Why a live message that is not waiting cannot be cancelled or rescheduled."""
        if self.live[id_].is_partly_settled:
            return "done"
        owing = 0
        for group in self.groups:
            entry = group.entry(id_)
            if entry and entry.holder:
                return "in_flight"
            if dead_counts and id_ in group.garbage:
                return "done"
            owing += group.owes(id_)
        return None if owing else "done"

    def settle(
        self,
        clock: Clock,
        id_: str,
        state: str,
        *,
        due: Time | None = None,
        attempts: int = 0,
        fence: str | None = None,
    ) -> None:
        """End a live message for good; its tombstone stays for a while.

        fence: token and mark at delivery time; the current ones by default.
        """
        message = self.live.pop(id_)
        fence = fence or message.token + message.mark
        self.policy.pop(id_, None)
        self.expiry.pop(id_, None)
        lasts = int(self.option("retention"))
        if fence.startswith("~"):  # sent by a job that may be rerun much later
            lasts = max(lasts, int(self.option("dedupe_for")))
            self.options["lasting"] = clock.written + lasts  # the topic is kept for as long
        if lasts:
            self.tombstones[id_] = Tombstone(
                fence[:8], fence[8], state, due, attempts, clock.now, clock.written + lasts
            )


def earliest(zset: dict[str, Time]) -> Time | None:
    return min(zset.values(), default=None)


def in_order(zset: dict[str, Time]) -> list[tuple[str, Time]]:
    """Ids by due time; those of equal due times by name."""
    return sorted(zset.items(), key=lambda item: (item[1], item[0]))
