"""Tries every order in which the Redis calls of some roles can follow each other.

Each role is a flow (see `lisa.core.redis.flow`): a generator that yields its calls one by one. From
the first state, each role with calls left makes its next one, and so on from each state reached
until no calls are left. Scripts are atomic, so there are no states within a call; and a killed role
is one that makes no further call, so each intermediate state is also one in which all were killed.

States that no script can tell apart are explored once. The following must be equal: the key space,
with stream entries by their rank (deleted entries are all the same: their ids never return), and
past instants by their order on the server; the replies to each role so far, in the same terms; and
the order in which messages were handled and settled. The following may differ: the counters
(scripts only add to them), and how long a delivery has been pending or a tombstone is kept: the
ack timeout is 0 here, the retention long. Future due times must be given as instants, so that none
passes meanwhile. A role that reads the clock itself gets `LATER`.
"""

import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Concatenate, ParamSpec, TypeVar

import pytest
from _pytest.mark import ParameterSet

from lisa.core.model.keys import Keys
from lisa.core.redis.address import Address
from lisa.core.redis.connection import Connection
from lisa.core.redis.flow import Execute, ExecuteMany, Flow, Step
from lisa.core.store.store import Store
from lisa.core.transitions.base import LANES
from lisa.core.transitions.loader import NONE, Features
from tests.scripts import all_versions

P = ParamSpec("P")
T = TypeVar("T")

TOPIC = "orders"
COALESCING = "ABC"
"""The ids of calls that coalesce: a repeated one is answered from the record of the first."""
LATER = [b"4000000000", b"0"]
ENTRY = re.compile(r"(?<!\d)\d{13}-\d+(?!\d)")
PLACE = re.compile(
    r"(\d{13})(\d{10})(\d{4})(\d{13})"
)  # of a parked message: see docs/reference/keys.md
PASSED = re.compile(r"(?<!\d)1[5-9]\d{11}(\d{3})?(?!\d)")  # in these years, in ms or us
GONE = "gone"

Event = tuple[str, ...]
"""An event that a role records, such as ("handed", "a", "A", "lisa")."""
Role = Callable[[Store, list[Event]], Flow[None]]


def makes_roles(act: Callable[Concatenate[Store, list[Event], P], Flow[None]]) -> Callable[P, Role]:
    """A function that makes roles from all but the first two arguments of `act`."""

    def make(*args: P.args, **options: P.kwargs) -> Role:
        return lambda store, story: act(store, story, *args, **options)

    return make


@dataclass(frozen=True)
class Standing:
    """A role's progress: its replies, its next call (None: finished), its story."""

    replies: tuple[Any, ...]
    call: Any
    story: tuple[Event, ...]


@dataclass(frozen=True)
class Moment:
    """One state of all roles and the server, and how to restore it."""

    dumps: dict[str, bytes]
    seen: dict[str, Any]
    roles: tuple[Standing, ...]
    history: tuple[Event, ...]


@dataclass
class Explorer:
    """Explores one case. An exception from `judge` or `witness` is the failure.

    judge: is called with each new state; it may change the server's data.
    witness: is called for each step with the state before it and the recorded events.
    """

    connection: Connection
    roles: Sequence[Role]
    ids: Sequence[str]
    groups: tuple[str, ...]
    judge: Callable[[Moment], None]
    witness: Callable[[Moment, Sequence[Event]], None]
    before: tuple[Event, ...] = ()
    """The events before the first call."""
    features: Features = NONE
    """Those of the topic."""
    states: int = 0
    _reads: dict[str, tuple[str, ...]] = field(default_factory=dict)
    _paths: dict[Any, int] = field(default_factory=dict)
    _judged: set[Any] = field(default_factory=set)

    def explore(self) -> int:
        """Explore all interleavings; returns their number."""
        self.connection.execute_many([("SCRIPT", "LOAD", one.source) for one in all_versions()])
        self._reads = reads_of(self.ids, self.groups, self.features)
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
        """Restore a state on the server, and make one role's next call."""
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
        """Restore a role's progress by replaying its replies."""
        store, story = Store(SimpleNamespace(address=Address()), Keys()), list[Event]()
        # Like a role that has been running for a while:
        store._groups[TOPIC] = self.groups
        store._features[TOPIC], store._features_since = self.features, time.monotonic()
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
        """Replies, including errors; the last item is the server's state afterwards.

        All in one round trip: there are many.
        """
        dumps = [("DUMP", key) for key in self._reads]
        replies = self.connection.execute_many([*commands, *dumps, *self._reads.values()])
        said, held = replies[: len(commands)], replies[len(commands) :]
        dumped = dict(zip(self._reads, held, strict=False))
        seen = dict(zip(self._reads, held[len(dumps) :], strict=True))
        there = [key for key, dump in dumped.items() if dump]
        return [*said, ({key: dumped[key] for key in there}, {key: seen[key] for key in there})]


def levels(cases: Iterable[str], *, short: set[str], long: set[str]) -> list[ParameterSet]:
    """Cases for `make test` (short), `make test-slow` (long), and `make test-all` (the others)."""
    marks = [
        () if one in short else (pytest.mark.slow,) if one in long else (pytest.mark.full,)
        for one in cases
    ]
    return [pytest.param(one, marks=mark) for one, mark in zip(cases, marks, strict=True)]


def answered(flow: Flow[T], answer: Callable[[Step], Flow[Any]]) -> Flow[T]:
    """The same flow, with each of its steps made by `answer`."""
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
        return end.value  # type: ignore[no-any-return]  # as in core.redis.flow


def one_by_one(flow: Flow[T]) -> Flow[T]:
    """The same flow, one call at a time: other calls may run between those of a pipeline."""

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


def reads_of(
    ids: Sequence[str], groups: Sequence[str], features: Features
) -> dict[str, tuple[str, ...]]:
    """The read command for each possible key."""
    keys = Keys().topic(TOPIC)
    zsets = [Keys().topics, keys.waiting, keys.expiry, keys.ticks]
    hashes = [keys.policy, keys.options, keys.groups, keys.consumers, keys.schedules]
    strings = [key(id_) for id_ in ids for key in (keys.body, keys.done)]
    streams = []
    for own in map(keys.group, groups):
        zsets += [own.retry, own.garbage, own.leases]
        hashes += [own.entries, own.attempts, own.reasons]
        streams.append(own.ready)
    if LANES in features:
        hashes += [keys.keyed, keys.limits]
        strings += map(keys.reply, COALESCING)
        for lanes in map(keys.lanes, groups):
            zsets += [lanes.queues, lanes.turns, lanes.closed]
            hashes += [lanes.lanes, lanes.parked]
    return {
        **{key: ("GET", key) for key in strings},
        **{key: ("HGETALL", key) for key in hashes},
        **{key: ("ZRANGE", key, "0", "-1", "WITHSCORES") for key in zsets},
        **{key: ("XINFO", "STREAM", key, "FULL", "COUNT", "0") for key in streams},
    }


def in_terms(moment: Moment) -> tuple[Any, Any]:
    """A state in terms that are equal if scripts and roles see no difference.

    First the server's data and the history, then the replies to each role.
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
        return PASSED.sub("passed", PLACE.sub(r"\1 \2 \3 \4 ", text))
    return value


def pairs(flat: Any) -> dict[Any, Any]:
    return dict(zip(flat[::2], flat[1::2], strict=True))


def _order(entry: bytes) -> tuple[int, ...]:
    return tuple(int(part) for part in entry.split(b"-"))
