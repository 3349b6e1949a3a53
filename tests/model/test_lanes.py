"""Random calls on a topic with lanes: limits, orders and turns hold, and no message is forgotten.

The server's clock stands still between the steps, and moves with them. At the end of each run,
everything is handled by a manager that calls exactly when it was told to, and consumers that ack.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
from hypothesis import Phase
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
)

from lisa.core.model.envelope import encode_envelope, fence_of
from lisa.core.model.keys import COALESCED_IDS, Keys, keyed_id
from lisa.core.redis.address import Address
from lisa.core.redis.connection import Connection
from lisa.core.store.store import SyncStore
from lisa.core.transitions.ack import Ack, Settlement
from lisa.core.transitions.base import Transition
from lisa.core.transitions.change import Cancel, Reschedule
from lisa.core.transitions.delivery import Open, Pull
from lisa.core.transitions.enqueue import OnDuplicate
from lisa.core.transitions.garbage import Purge, Requeue
from lisa.core.transitions.groups import Declare
from lisa.core.transitions.lease import FIRST, Begun, Extend, Reclaim, Release
from lisa.core.transitions.promote import Promote, Promoted
from lisa.core.transitions.retry import Deferral, Fail, Failure, Postpone
from lisa.core.transitions.topic import Configure, LimitKeys
from lisa.core.transitions.upkeep import Expire
from lisa.testing.clocked_server import ClockedServer
from tests.contract.bench import TOPIC
from tests.model.coalescing import Coalescing
from tests.model.draws import STEPS, run_machine
from tests.model.lanes import Judge, Snapshot, read
from tests.rows import Burst, Item, coalesce, enqueue
from tests.servers import no_clock

pytestmark = pytest.mark.skipif(no_clock() is not None, reason=str(no_clock()))

STEPS_OF_ONE_RUN = 60
GROUPS = ("g", "h")
ACK_TIMEOUT_MS = 10_000
START_US = 1_790_000_000_000_000
A_DAY_US = 86_400_000_000
IDLE_CALLS = 100
"""More calls in which a manager moves nothing although it was told to call would be a busy loop."""

names = st.builds(
    lambda key, own: keyed_id(key, own) if key else own,
    st.sampled_from(["", "a", "a", "b", "c"]),
    st.sampled_from("1234"),
)
batches = st.lists(names, min_size=1, max_size=4, unique=True)
coalesced = st.builds(keyed_id, st.sampled_from("ab"), st.sampled_from(COALESCED_IDS))
targets = st.lists(st.one_of(names, names, coalesced), min_size=1, max_size=4, unique=True)
rules = ["d500,2000", "d500,2000", "d1500,", "t1000", "t300", "l+0", "l+700"]
bursts = st.lists(
    st.tuples(st.sampled_from("aab"), st.sampled_from(rules), st.sampled_from([None, None, 2_000])),
    min_size=1,
    max_size=3,
)
groups = st.sampled_from(GROUPS)
dues = st.sampled_from(["+0", "+0", "+0", "+500", "+3000", "1000"])
policies = st.sampled_from([None, None, "*;;3,", "0,1000;;,2000", "*;;20,0"])
picks = st.lists(st.integers(0, 20), min_size=1, max_size=3)
rates = st.sampled_from(["", "2,1000,1", "3,1000,3", "10,60000,5"])
numbers = st.sampled_from(["", "1", "1", "2", "3"])
VALUES = {
    "rate": rates,
    "key_rate": rates,
    "concurrency": numbers,
    "key_concurrency": numbers,
    "order": st.sampled_from(["", "continue", "hold"]),
    "fair": st.sampled_from(["0", "1"]),
    "slack": st.sampled_from(["0", "1500"]),
    "retry_delays": st.sampled_from(["", "0", "1000,0", "0,0,0"]),
    "max_ready": st.sampled_from([None, "1", "3"]),
    "paused": st.sampled_from(["0", "0", "0", "0", "1"]),
}
options = st.sampled_from([*VALUES, *VALUES, *[f"{name}@h" for name in [*VALUES][:7]]]).flatmap(
    lambda name: st.tuples(st.just(name), VALUES[name.partition("@")[0]])
)
limits = st.sampled_from(
    ["", "concurrency=1", "concurrency=3;weight=2", "rate=4,1000,2", "rate=1,1000,1;weight=5"]
)
WITH_RECEIPTS = precondition(lambda self: any(self.receipts.values()))
Receipt = tuple[str, str, str]
"""The id of a message, that of its entry, and the fence of its body."""


class Machine(RuleBasedStateMachine):
    """A topic with two groups."""

    server: ClassVar[ClockedServer]
    store: ClassVar[SyncStore]
    seen: ClassVar[Counter[str]]

    def __init__(self) -> None:
        super().__init__()
        self.server.clear()
        self.now_us = START_US
        self.server.set_time(self.now_us)
        self.receipts: dict[str, list[Receipt]] = {name: [] for name in GROUPS}
        self.sends = 0
        self.is_sound = True

    @initialize(first=st.lists(options, max_size=4))
    def a_topic(self, first: list[tuple[str, str | None]]) -> None:
        store = self.store
        store.drive(store.check_schema())
        for group in GROUPS:
            store.call(Declare(TOPIC, group))
        store.call(Configure(TOPIC, {"lanes": "1", "ack_timeout": str(ACK_TIMEOUT_MS)}))
        self.judge, self.coalescing = Judge(self.look()), Coalescing(store)
        for option in first:
            self.configure(option)

    def look(self) -> Snapshot:
        return read(self.store, GROUPS)

    def call(self, transition: Transition[Any]) -> Any:
        result = self.store.call(transition)
        self.is_sound = False
        self.judge.judge(self.look())
        self.is_sound = True
        self.seen[type(transition).__name__] += 1
        return result

    def teardown(self) -> None:
        if self.is_sound and hasattr(self, "judge"):
            self.drain()

    # Producers

    @rule(batch=batches, due=dues, policy=policies, mode=st.sampled_from(OnDuplicate))
    def send(self, batch: list[str], due: str, policy: str | None, mode: OnDuplicate) -> None:
        self.sends += 1
        token = f"{self.sends:08d}"
        items = [Item(one, due, encode_envelope(token, 1), None, policy) for one in batch]
        self.call(enqueue(TOPIC, token, items, mode))

    @rule(name=names, due=dues)
    def send_with_ttl(self, name: str, due: str) -> None:
        self.sends += 1
        token = f"{self.sends:08d}"
        self.call(enqueue(TOPIC, token, [Item(name, due, encode_envelope(token, 1), 2_000, None)]))

    @rule(sent=bursts, times=st.sampled_from([1, 1, 2]))
    def send_coalescing(self, sent: list[tuple[str, str, int | None]], times: int) -> None:
        """Repeatedly if the reply was lost."""
        self.sends += 1
        token = f"{self.sends:08d}"
        items = [
            Burst(key, what, encode_envelope(token, n), ttl_ms)
            for n, (key, what, ttl_ms) in enumerate(sent)
        ]
        call = coalesce(TOPIC, token, items)
        slots = self.coalescing.look(self.judge.before, items)
        outcomes = self.call(call)
        for _ in range(1, times):
            assert self.call(call) == outcomes
        self.is_sound = False
        self.coalescing.judge(slots, items, outcomes, self.judge.before)
        self.is_sound = True
        self.seen.update(f"coalesced: {one.outcome}" for one in outcomes)

    @rule(batch=targets)
    def cancel(self, batch: list[str]) -> None:
        self.call(Cancel(TOPIC, batch))

    @rule(batch=targets, due=dues)
    def reschedule(self, batch: list[str], due: str) -> None:
        self.call(Reschedule(TOPIC, [(one, due) for one in batch]))

    # Consumers

    @rule(group=groups, most=st.integers(1, 4), consumer=st.sampled_from(["c1", "c2-h"]))
    def take(self, group: str, most: int, consumer: str) -> None:
        pulled = self.call(Pull(TOPIC, group, consumer, most))
        if not pulled.entries:
            return
        opened = self.call(Open(TOPIC, group, pulled.entries))
        for entry, envelope in zip(pulled.entries, opened.envelopes, strict=True):
            if envelope is not None:
                self.receipts[group].append((entry.id, entry.entry, fence_of(envelope)))

    def picked(self, picks: list[int]) -> tuple[str, list[Receipt]]:
        """Some receipts of one group; those of deliveries that were settled come again, too."""
        group = next(name for name in (GROUPS[picks[0] % 2], *GROUPS) if self.receipts[name])
        recent = self.receipts[group][-12:]
        return group, list(dict.fromkeys(recent[-1 - pick % len(recent)] for pick in picks))

    @WITH_RECEIPTS
    @rule(picks=picks)
    def ack(self, picks: list[int]) -> None:
        group, receipts = self.picked(picks)
        self.call(Ack(TOPIC, group, [Settlement(*one, 0, 1) for one in receipts]))

    @WITH_RECEIPTS
    @rule(picks=picks, delay=st.sampled_from([None, None, 0, 700, "discard"]))
    def fail(self, picks: list[int], delay: Any) -> None:
        group, receipts = self.picked(picks)
        self.call(Fail(TOPIC, group, [Failure(*one[:2], "no", delay) for one in receipts]))

    @WITH_RECEIPTS
    @rule(picks=picks, delay=st.sampled_from([0, 700]), rests=st.booleans())
    def defer(self, picks: list[int], delay: int, *, rests: bool) -> None:
        group, receipts = self.picked(picks)
        deferrals = [
            Deferral(*one[:2], delay, "busy", rests_lane=rests and delay > 0) for one in receipts
        ]
        self.call(Postpone(TOPIC, group, deferrals))

    @WITH_RECEIPTS
    @rule(picks=picks)
    def release(self, picks: list[int]) -> None:
        group, receipts = self.picked(picks)
        self.call(Release(TOPIC, group, [one[:2] for one in receipts]))

    @WITH_RECEIPTS
    @rule(picks=picks)
    def begin(self, picks: list[int]) -> None:
        """The handlers of suspects begin."""
        group, receipts = self.picked(picks)
        self.call(Extend(TOPIC, group, "c2-h", [one[:2] for one in receipts], None, Begun.YES))

    # Managers

    @rule(limit=st.sampled_from([2, 500, 500]))
    def promote(self, limit: int) -> None:
        self.run_manager(limit)

    def run_manager(self, limit: int = 500) -> Promoted:
        promoted: Promoted = self.call(Promote(TOPIC, limit))
        if promoted.expired:
            self.call(Expire(TOPIC, promoted.expired))
        return promoted

    @rule(group=groups)
    def reclaim(self, group: str) -> None:
        start: str | None = FIRST
        while start is not None:
            start = self.call(Reclaim(TOPIC, group, start)).cursor

    @rule(group=groups, consumer=st.sampled_from(["c1", "c2-h"]))
    def work(self, group: str, consumer: str) -> None:
        """Everything that may run is taken."""
        self.run_manager()
        self.take(group, 4, consumer)

    @rule(group=groups, consumer=st.sampled_from(["c1", "c2-h"]))
    def die(self, group: str, consumer: str) -> None:
        """A consumer dies with what it holds."""
        self.work(group, consumer)
        self.move_clock(ACK_TIMEOUT_MS + 1)
        self.reclaim(group)

    @rule(batch=targets)
    def expire(self, batch: list[str]) -> None:
        self.call(Expire(TOPIC, batch))

    @rule(by_ms=st.sampled_from([1, 100, 700, 3_000, ACK_TIMEOUT_MS + 1, -700, -60_000]))
    def move_clock(self, by_ms: int) -> None:
        self.set_clock(self.now_us + 1000 * by_ms)

    def set_clock(self, now_us: int) -> None:
        self.now_us = now_us
        self.server.set_time(now_us)
        self.coalescing.follow_clock(now_us // 1000)
        self.judge.judge(self.look())

    # Operators

    @rule(option=options)
    def configure(self, option: tuple[str, str | None]) -> None:
        self.call(Configure(TOPIC, dict([option])))

    @rule(key=st.sampled_from("ab"), group=st.sampled_from(["", "h\x1f"]), text=limits)
    def limit(self, key: str, group: str, text: str) -> None:
        self.call(LimitKeys(TOPIC, "set", {group + key: text}))

    @rule(group=groups, batch=targets)
    def requeue(self, group: str, batch: list[str]) -> None:
        self.call(Requeue(TOPIC, group, batch))

    @rule(group=groups, batch=targets)
    def purge(self, group: str, batch: list[str]) -> None:
        self.call(Purge(TOPIC, group, batch))

    # The end

    def drain(self) -> None:
        """Handle everything; the clock moves only to the instants for which managers ask."""
        self.call(Configure(TOPIC, {"paused": "0"}))
        idle, trail = 0, list[object]()
        while True:
            is_busy = sum(self._finish(name) for name in GROUPS) > 0
            promoted = self.run_manager()
            if is_busy or promoted.moved or promoted.expired:
                idle = 0
                continue
            if promoted.next_due_ms is None:
                break
            idle += 1
            trail.append((self.now_us, promoted.next_due_ms))
            assert idle < IDLE_CALLS, (promoted, trail[-5:], self.look())
            self.set_clock(max(self.now_us + 1000, 1000 * int(promoted.next_due_ms)))
        left = self.look()
        assert not left.live, f"nothing moves any more: {left}"
        self.set_clock(self.now_us + A_DAY_US)
        self.run_manager()
        for group in self.look().groups.values():
            assert [*group.lanes, *group.turns, *group.closed] == [], group

    def _finish(self, group: str) -> bool:
        """Take and ack all that is ready, and purge what is dead; returns whether there was any."""
        pulled = self.call(Pull(TOPIC, group, "c1", 100))
        seen = self.look()
        own, bodies = seen.groups[group], self.store.keys.topic(TOPIC).bodies
        held = [
            Settlement(one, entry, fence_of(data), 0, 1)
            for (one, entry), data in zip(
                own.entries.items(),
                [self.store.ask("GET", body) for body in bodies(own.entries)],
                strict=True,
            )
        ]
        if held:
            self.call(Ack(TOPIC, group, held))
        if own.garbage:
            self.call(Purge(TOPIC, group, list(own.garbage)))
        return bool(pulled.entries or held or own.garbage)


@pytest.fixture(scope="module")
def server() -> Iterator[ClockedServer]:
    with ClockedServer() as server:
        yield server


def test_lanes_hold_and_forget_nothing(server: ClockedServer) -> None:
    store = SyncStore(Connection(Address(server.url)), Keys())
    phases = [Phase.generate]  # to shrink a failure takes minutes
    seen = run_machine(Machine, STEPS_OF_ONE_RUN, *phases, server=server, store=store)
    store.close()
    assert seen.total() >= STEPS // 2
    assert {"coalesced: accepted", "coalesced: replaced", "coalesced: updated"} <= seen.keys()
