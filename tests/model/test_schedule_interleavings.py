"""Every order in which managers at a tick, edits and consumers can follow each other.

The ticks are two seconds after 1970, so each occurrence is due at once. A change that reads the
server's clock gets `LATER`, so for it all ticks have come.
"""

from collections import Counter
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import Any

import pytest

from lisa.admin import fsck
from lisa.core.model.errors import InvalidMessage
from lisa.core.model.keys import Keys
from lisa.core.model.recurring.definition import Record, define
from lisa.core.model.recurring.ticks import begin
from lisa.core.redis.address import Address
from lisa.core.redis.connection import Connection
from lisa.core.redis.flow import Flow, drive
from lisa.core.store import schedules
from lisa.core.store.store import Store, SyncStore
from lisa.core.transitions.base import Transition
from lisa.core.transitions.groups import Declare
from lisa.core.transitions.schedule import ScheduleOutcome
from lisa.core.transitions.topic import Configure
from lisa.embedded import EmbeddedServer
from tests.model.acting import FAR, canceller, consumer, manager
from tests.model.interleaving import (
    TOPIC,
    Event,
    Explorer,
    Moment,
    Role,
    levels,
    makes_roles,
    pairs,
)
from tests.model.judging import check_places, without_pauses
from tests.servers import flush

TICKS = (1_000, 2_000)
IDS = tuple(f"s@{tick}" for tick in TICKS)
RUN_NOW = (f"s@{FAR}", f"s@{int(FAR) + 1}")
"""Two occurrences that run now, in one millisecond: the second takes the next one."""
SPAN = {"every": "1s", "start": "1970-01-01T00:00:01", "until": "1970-01-01T00:00:02"}
AHEAD = {**SPAN, "catch_up": "all"}
"""Its occurrences are created ahead of their ticks."""
AT_TICK = {**AHEAD, "max_late": "1h"}


@makes_roles
def ticker(store: Store, _story: list[Event], now_ms: int) -> Flow[None]:
    """A manager that handles what is due."""
    (done,) = yield from schedules.tick_all(store, TOPIC, ["s"], now_ms)
    assert done is None or isinstance(done, ScheduleOutcome), done


@makes_roles
def editor(store: Store, _story: list[Event], /, **options: Any) -> Flow[None]:
    with suppress(InvalidMessage):  # the last tick is past and handled: no schedule to change
        yield from schedules.put(store, TOPIC, "s", define("edited", {**AHEAD, **options}))  # type: ignore[typeddict-item]


@makes_roles
def pauser(store: Store, story: list[Event], *, is_paused: bool = True) -> Flow[None]:
    changed = yield from schedules.set_paused(store, TOPIC, "s", is_paused=is_paused)
    story.append(("paused" if changed and is_paused else "resumed", "s"))


@makes_roles
def removing(store: Store, story: list[Event]) -> Flow[None]:
    removed = yield from schedules.remove(store, TOPIC, "s")
    story.append(("removed" if removed else "not removed", "s"))


@makes_roles
def runner(store: Store, story: list[Event]) -> Flow[None]:
    story.append(("run", (yield from schedules.run_now(store, TOPIC, "s"))))


@dataclass(frozen=True)
class Case:
    """Roles that run together on a schedule. may_lose: a role removes waiting occurrences."""

    roles: tuple[Role, ...]
    options: tuple[tuple[str, str], ...] = tuple(AHEAD.items())
    may_lose: bool = False


LATE = tuple(AT_TICK.items())
CASES = {
    "a tick of three managers": Case((ticker(1_000), ticker(1_000), ticker(2_000), consumer("c1"))),
    "a tick of two managers, and consumers": Case(
        (ticker(1_000), ticker(2_000), manager(), consumer("c1"), consumer("c2", then="retry"))
    ),
    "occurrences created at their ticks": Case(
        (ticker(1_000), ticker(2_000), ticker(2_000), manager(), consumer("c1")), LATE
    ),
    "overlaps are skipped": Case(
        (ticker(1_000), ticker(2_000), manager(), consumer("c1")),
        (*SPAN.items(), ("catch_up", "all"), ("overlap", "skip")),
        may_lose=True,
    ),
    "an edit at a tick": Case((ticker(1_000), editor(), consumer("c1"))),
    "two edits": Case((editor(), editor(ttl="1h"))),
    "a pause at a tick": Case((ticker(1_000), pauser(), manager(), consumer("c1"))),
    "a pause and a resumption": Case((ticker(1_000), pauser(), pauser(is_paused=False))),
    "a removal at a tick": Case(
        (ticker(1_000), ticker(2_000), removing(), manager(), consumer("c1")), may_lose=True
    ),
    "two removals": Case((ticker(1_000), removing(), removing()), may_lose=True),
    "an occurrence cancelled at its tick": Case(
        (ticker(1_000), ticker(1_000), canceller([IDS[0]]), manager(), consumer("c1")),
        may_lose=True,
    ),
    "run now, at a tick": Case((ticker(1_000), ticker(2_000), runner(), runner())),
}  # fmt: skip
SHORT = {
    "a pause and a resumption",
    "a tick of three managers",
    "an edit at a tick",
    "overlaps are skipped",
    "two edits",
    "two removals",
}
LONG = {
    "a removal at a tick",
    "a tick of two managers, and consumers",
    "occurrences created at their ticks",
}


class Judge:
    """Judges each state as if all roles were killed there and another manager finished the work."""

    def __init__(self, store: SyncStore, case: Case) -> None:
        self._store, self._case = store, case
        self._keys = store.keys.topic(TOPIC)

    def __call__(self, moment: Moment) -> None:
        check_places(self._keys, {"lisa"}, moment)
        self._check_record(moment)
        if all(role.call is None for role in moment.roles):
            report = drive(without_pauses(fsck.check(self._store)), self._store.connection)
            assert report.total == 0, report.findings
        story = list(moment.history)
        for role in (*[ticker(TICKS[-1])] * 3, *[manager(), consumer("last", most=10)] * 12):
            self._store.drive(role(self._store, story))
        settled = Counter(id_ for what, id_, *_ in story if what == "settled")
        assert max(settled.values(), default=0) <= 1, f"settled twice: {settled}"
        assert settled.keys() <= set(IDS), settled
        if not self._case.may_lose:
            assert settled.keys() == set(IDS), f"missed: {set(IDS) - settled.keys()}"
        run = {id_ for what, id_, *_ in story if what == "run"}
        left = {one.decode() for one in self._store.ask("ZRANGE", self._keys.waiting, 0, -1)}
        assert left == run, f"left {left}, run {run}"
        for id_ in IDS:
            assert not self._store.ask("EXISTS", self._keys.body(id_)), f"{id_} is left"

    def _check_record(self, moment: Moment) -> None:
        """The pending occurrence waits, unless it was settled; ticks are those of the record."""
        stored = pairs(moment.seen.get(self._keys.schedules, ())).get(b"s")
        ticks = pairs(moment.seen.get(self._keys.ticks, ()))
        record = Record.decode(stored) if stored else None
        expected = {b"s"} if record is not None and record.tick is not None else set()
        assert set(ticks) == expected, f"ticks {ticks}, record {record}"
        if record is not None and record.is_made:
            id_ = f"s@{record.tick}"
            kept = {self._keys.body(id_), self._keys.done(id_)} & moment.seen.keys()
            assert kept, f"{id_} was made, and is not there"

    def witness(self, before: Moment, told: Sequence[Event]) -> None:
        """Check that the answers were true at that instant."""
        stored = pairs(before.seen.get(self._keys.schedules, ())).get(b"s")
        for what, *_ in told:
            truths = {"removed": bool(stored), "not removed": not stored}
            assert truths.get(what, True), f"{what}, and the record was {stored!r}"


@pytest.mark.parametrize("name", levels(CASES, short=SHORT, long=LONG))
def test_every_interleaving_of_a_schedule(
    valkey_server: EmbeddedServer,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(schedules, "new_token", lambda: "S" * 8)
    case = CASES[name]
    store = SyncStore(Connection(Address(flush(valkey_server.url))), Keys())
    with closing(store):
        store.drive(store.register([TOPIC]))
        store.call(Configure(TOPIC, {"ack_timeout": "0", "retry_delays": ",".join(["0"] * 10)}))
        store.call(Declare(TOPIC, "lisa"))
        store.drive(store.groups(TOPIC))
        new = Record(version=1, made_ms=0, definition=define("body", dict(case.options)))  # type: ignore[arg-type]
        step = begin(new, 0, is_split=False)
        call: Transition[ScheduleOutcome] = schedules.step_call(TOPIC, "s", None, step)
        assert store.call(call).state == "done"
        judge = Judge(store, case)
        explorer = Explorer(
            store.connection, case.roles, (*IDS, *RUN_NOW), ("lisa",), judge, judge.witness
        )
        assert explorer.explore() > 1
