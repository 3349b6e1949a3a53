"""Tries every order in which the Redis calls of some roles can follow each other.

Each role is a flow (see `lisa.core.flow`): a generator that yields its calls one by one. From the
first state on every role that has a call left makes it in turn, and from each state so reached
again, to the end. Scripts are atomic, so nothing lies between two calls; and a role that is killed
is one that makes no further call, so each state on the way is also one in which all were killed.

States that differ in nothing that a script can see are explored once. What counts as the same:
the key space, with stream entries by their rank (one that is gone by no more than that: its name
never comes back), and instants that have passed as such, in the order in which the server has
them; what each role has been told so far, in the same terms; and what was handled and settled, in
its order. Left out are the counters (no script reads them but to add), and for how long a
delivery has been pending or a tombstone is kept: the ack timeout is 0 here, the retention long.
Due times that lie ahead must be given as instants, so that none of them passes meanwhile. A role
that looks at the clock itself is shown `LATER`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from lisa.core import scripts
from lisa.core.flow import Execute, ExecuteMany, Flow, Step
from lisa.core.keys import Keys
from lisa.core.store import Store

if TYPE_CHECKING:
    from lisa.core.connection import Connection

T = TypeVar("T")

TOPIC = "orders"
LATER = [b"4000000000", b"0"]
ENTRY = re.compile(r"(?<!\d)\d{13}-\d+(?!\d)")
PASSED = re.compile(r"(?<!\d)1[5-9]\d{11}(\d{3})?(?!\d)")  # in these years, in ms or us
GONE = "gone"

Event = tuple[str, ...]
"""What a role tells, such as ("handed", "a", "A", "lisa")."""
Role = Callable[[Store, list[Event]], Flow[None]]


@dataclass(frozen=True)
class Standing:
    """Where a role stands: what it was told, its next call (None: it is through), its story."""

    replies: tuple[Any, ...]
    call: Any
    story: tuple[Event, ...]


@dataclass(frozen=True)
class Moment:
    """One state of all, and how to come back to it."""

    dumps: dict[str, bytes]
    seen: dict[str, Any]
    roles: tuple[Standing, ...]
    history: tuple[Event, ...]


@dataclass
class Explorer:
    """Explores one case. What `judge` or `witness` raises is the failure.

    judge: is given each state that was not met before; it may change what the server holds.
    witness: is given each step: the state before it, and what was told of it.
    """

    connection: Connection
    roles: Sequence[Role]
    ids: str
    groups: tuple[str, ...]
    judge: Callable[[Moment], None]
    witness: Callable[[Moment, Sequence[Event]], None]
    before: tuple[Event, ...] = ()
    """What had happened before the first call."""
    states: int = 0
    _reads: dict[str, tuple[str, ...]] = field(default_factory=dict)
    _paths: dict[Any, int] = field(default_factory=dict)
    _judged: set[Any] = field(default_factory=set)

    def explore(self) -> int:
        """How many interleavings there are; all were looked at."""
        for name in scripts.names():
            self.connection.execute(("SCRIPT", "LOAD", scripts.load(name).source))
        self._reads = reads_of(self.ids, self.groups)
        standing = tuple(self._stand(role, ()) for role in self.roles)
        *_, (dumps, seen) = self._ask([])
        return self._from(Moment(dumps, seen, standing, self.before))

    def _from(self, moment: Moment) -> int:
        terms = in_terms(moment)
        if terms in self._paths:
            return self._paths[terms]
        if terms[0] not in self._judged:
            self._judged.add(terms[0])
            self.states += 1
            try:
                self.judge(moment)
            except AssertionError as error:
                error.add_note("\n".join(["what had happened:", *map(str, moment.history)]))
                raise
        left = [number for number, role in enumerate(moment.roles) if role.call is not None]
        self._paths[terms] = sum(self._from(self._step(moment, n)) for n in left) or 1
        return self._paths[terms]

    def _step(self, moment: Moment, number: int) -> Moment:
        """Bring the server back to a state, and make one role's call there."""
        again = [("RESTORE", key, 0, dump) for key, dump in moment.dumps.items()]
        before = moment.roles[number]
        *restored, reply, (dumps, seen) = self._ask([("FLUSHALL",), *again, before.call])
        assert set(restored) == {b"OK"}, restored
        reply = LATER if before.call == ("TIME",) else reply
        role = self._stand(self.roles[number], (*before.replies, reply))
        roles = (*moment.roles[:number], role, *moment.roles[number + 1 :])
        told = role.story[len(before.story) :]
        self.witness(moment, told)
        return Moment(dumps, seen, roles, (*moment.history, *told))

    def _stand(self, role: Role, replies: tuple[Any, ...]) -> Standing:
        """Bring a role to where it was, by what it was told."""
        store, story = Store(Keys(), "here"), list[Event]()
        store._groups[TOPIC] = self.groups  # as one that has been at work for a while
        flow = one_by_one(role(store, story))
        try:
            step = next(flow)
            for reply in replies:
                step = flow.throw(reply) if isinstance(reply, Exception) else flow.send(reply)
        except StopIteration:
            return Standing(replies, None, tuple(story))
        assert isinstance(step, Execute), f"a role that waits: {step}"
        return Standing(replies, step.command, tuple(story))

    def _ask(self, commands: Sequence[Any]) -> list[Any]:
        """Replies, errors among them; the last item is what the server holds then.

        All in one round trip: there are many.
        """
        dumps = [("DUMP", key) for key in self._reads]
        replies = self.connection.execute_many([*commands, *dumps, *self._reads.values()])
        said, held = replies[: len(commands)], replies[len(commands) :]
        dumped = dict(zip(self._reads, held, strict=False))
        seen = dict(zip(self._reads, held[len(dumps) :], strict=True))
        there = [key for key, dump in dumped.items() if dump]
        return [*said, ({key: dumped[key] for key in there}, {key: seen[key] for key in there})]


def answered(flow: Flow[T], answer: Callable[[Step], Flow[Any]]) -> Flow[T]:
    """The same flow, each of its steps made as `answer` makes it."""
    try:
        step = next(flow)
        while True:
            try:
                reply = yield from answer(step)
            except Exception as error:  # noqa: BLE001  the flow is told, and judges
                step = flow.throw(error)
            else:
                step = flow.send(reply)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]  # as in core.flow


def one_by_one(flow: Flow[T]) -> Flow[T]:
    """The same flow, one call at a time: between those of a pipeline others may come."""

    def answer(step: Step) -> Flow[Any]:
        if not isinstance(step, ExecuteMany):
            return (yield step)
        replies: list[Any] = []
        for command in step.commands:
            try:
                replies.append((yield Execute(command)))
            except Exception as error:  # noqa: BLE001  in a pipeline's replies they are values
                replies.append(error)
        return replies

    return answered(flow, answer)


def reads_of(ids: str, groups: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """How each key that there can be is read."""
    keys = Keys().topic(TOPIC)
    zsets = [Keys().topics, keys.waiting, keys.expiry]
    hashes = [keys.policy, keys.options, keys.groups, keys.consumers]
    strings = [key(id_) for id_ in ids for key in (keys.body, keys.done)]
    streams = []
    for own in map(keys.group, groups):
        zsets += [own.retry, own.garbage, own.leases]
        hashes += [own.entries, own.attempts, own.reasons]
        streams.append(own.ready)
    return {
        **{key: ("GET", key) for key in strings},
        **{key: ("HGETALL", key) for key in hashes},
        **{key: ("ZRANGE", key, "0", "-1", "WITHSCORES") for key in zsets},
        **{key: ("XINFO", "STREAM", key, "FULL", "COUNT", "0") for key in streams},
    }


def in_terms(moment: Moment) -> tuple[Any, Any]:
    """A state in terms that are equal where scripts and roles see no difference.

    First what the server holds and what has happened, then what each role was told.
    """
    entries: dict[str, str] = {}
    for key, value in moment.seen.items():
        if key.endswith(":ready"):
            for rank, (entry, _) in enumerate(pairs(value)[b"entries"]):
                name = entry.decode()
                entries[name] = f"{entries.get(name, '')}<{key} {rank}>"
    seen = {
        key: _stream(value, entries) if key.endswith(":ready") else _plain(value, entries)
        for key, value in moment.seen.items()
    }
    told = tuple(_plain(role.replies, entries) for role in moment.roles)
    return (tuple(sorted(seen.items())), moment.history), told


def _stream(raw: Any, entries: dict[str, str]) -> Any:
    stream = pairs(raw)
    groups = []
    for group in map(pairs, stream[b"groups"]):
        last = _order(group[b"last-delivered-id"])
        given = sum(_order(entry) <= last for entry, _ in stream[b"entries"])
        held = [(_plain(entry, entries), who) for entry, who, *_ in group[b"pending"]]
        names = sorted(pairs(one)[b"name"] for one in group[b"consumers"])
        groups.append((group[b"name"], given, tuple(held), tuple(names)))
    return _plain([flat for _, flat in stream[b"entries"]], entries), tuple(groups)


def _plain(value: Any, entries: dict[str, str]) -> Any:
    if isinstance(value, list | tuple):
        return tuple(_plain(one, entries) for one in value)
    if isinstance(value, bytes | int | Exception) and not isinstance(value, bool):
        text = value.decode() if isinstance(value, bytes) else str(value)
        text = ENTRY.sub(lambda found: entries.get(found[0], GONE), text)
        return PASSED.sub("passed", text)
    return value


def pairs(flat: Any) -> dict[Any, Any]:
    return dict(zip(flat[::2], flat[1::2], strict=True))


def _order(entry: bytes) -> tuple[int, ...]:
    return tuple(int(part) for part in entry.split(b"-"))
