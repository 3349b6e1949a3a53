"""No script blocks the server for long: a full batch of each, timed by the server itself.

The aim is 5 ms on a current machine, with ten million messages (`make bench-safety`). The bound
here is loose, and the best of several rounds counts: on a shared machine a round may have waited
for a core. A slow script is slow in every round, so rounds are added until one was quick. Waiting
messages slow no call.
"""

import re
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import pytest

from lisa.core.model.envelope import HEAD_BYTES, encode_envelope
from lisa.core.model.keys import keyed_id
from lisa.core.model.options import BYTES_PER_CALL, LARGEST_WINDOW
from lisa.core.model.stream import Entry
from lisa.core.store.store import chunks
from lisa.core.transitions import loader
from lisa.core.transitions.ack import Ack, Settlement
from lisa.core.transitions.base import Transition
from lisa.core.transitions.change import Cancel, Reschedule
from lisa.core.transitions.coalesce import Coalesce
from lisa.core.transitions.delivery import Open, Pull
from lisa.core.transitions.enqueue import Enqueue
from lisa.core.transitions.garbage import Purge, Requeue
from lisa.core.transitions.groups import Declare
from lisa.core.transitions.inspect import Inspect
from lisa.core.transitions.journal import Prune, Read
from lisa.core.transitions.lease import FIRST, Extend, Reclaim, Release, Renew
from lisa.core.transitions.promote import Promote
from lisa.core.transitions.restore import Restore, RestoreItem, RestoreState
from lisa.core.transitions.retry import Deferral, Fail, Failure, Postpone
from lisa.core.transitions.topic import Configure
from lisa.core.transitions.upkeep import Expire, Mend, Trim
from lisa.producer.calls import HIGH_COST
from tests.contract.bench import TOPIC, Bench, item
from tests.contract.samples import SAMPLES
from tests.contract.state import FAR, G, Row
from tests.rows import Burst, coalesce, enqueue

FULL = 480
"""A full batch of every script: each call is as large as it may be, or nearly."""

TOKEN = "T" * 8
ROUNDS = 30
"""At most."""

BOUND_MS = 15.0
MANY, LOOK_AT_ALL_MS = 200_000, 5.0
"""Walking this many takes a server about four times as long."""

ON_VALKEY = pytest.mark.parametrize("bench", ["valkey"], indirect=True)
TIMED = {name for name, sample in SAMPLES.items() if sample.takes_batches}


class Timed:
    """Runs a bench's transitions, and reads from the server how long each script took."""

    def __init__(self, bench: Bench) -> None:
        self._store = bench.store
        self.took_ms: dict[str, list[float]] = {}

    def call(self, transition: Transition[Any]) -> Any:
        before = self._spent_us()
        reply = self._store.call(transition)
        took = (self._spent_us() - before) / 1000
        self.took_ms.setdefault(transition.script, []).append(took)
        return reply

    def call_in_batches(
        self, kind: type[Transition[Any]], items: Sequence[Any], call: Callable[[Any], Any]
    ) -> list[Any]:
        """Full batches of the items; returns all answers."""
        return [self.call(call(some)) for some in chunks(list(items), FULL // kind.steps)]

    def best_ms(self) -> dict[str, float]:
        return {name: min(took) for name, took in sorted(self.took_ms.items())}

    def _spent_us(self) -> int:
        stats = self._store.ask("INFO", "commandstats").decode()
        found = re.search(r"cmdstat_evalsha:calls=\d+,usec=(\d+)", stats)
        return int(found[1]) if found else 0

    def send(self, ids: list[str], due: str, ttl_ms: int | None = None) -> None:
        for some in chunks(ids, FULL // (HIGH_COST * Enqueue.steps)):
            self.call(enqueue(TOPIC, TOKEN, [item(m, due, "x" * 100, ttl_ms=ttl_ms) for m in some]))

    def take(self, timeout_ms: int | None = None) -> list[Entry]:
        entries: list[Entry] = []
        for _ in range(Pull.steps):
            pull = Pull(TOPIC, "lisa", "c1", FULL // Pull.steps, timeout_ms)
            entries += self.call(pull).entries
        assert len(entries) == FULL
        return entries

    def promote(self) -> None:
        for _ in range(2):
            assert self.call(Promote(TOPIC, FULL // 2)).moved == FULL // 2

    def reschedule(self, ids: list[str]) -> None:
        self.call_in_batches(
            Reschedule, ids, lambda some: Reschedule(TOPIC, [(m, "+0") for m in some])
        )
        self.promote()

    def fail(self, delay: int | Literal["discard"]) -> None:
        """Read ready messages and fail them."""
        failures = [Failure(one.id, one.entry, "no", delay) for one in self.take()]
        self.call_in_batches(Fail, failures, lambda some: Fail(TOPIC, "lisa", some))

    def one_round(self, number: int) -> None:
        """Full batches of each script."""
        each = self.call_in_batches
        ids = [f"{number}-{i:04}" for i in range(FULL)]
        self.send(ids, "+0")
        entries = self.take()
        each(Open, entries, lambda some: Open(TOPIC, "lisa", some, 60_000))
        receipts = [(one.id, one.entry) for one in entries]
        each(Extend, receipts, lambda some: Extend(TOPIC, "lisa", "c1", some, 60_000))
        start, ahead_ms = FIRST, int(time.time() * 1e3) + 60_000
        while start:
            renewed = self.call(Renew(TOPIC, "lisa", 1, ahead_ms, start))
            assert renewed.renewed == LARGEST_WINDOW or not renewed.cursor
            start = renewed.cursor or ""
        each(Release, receipts, lambda some: Release(TOPIC, "lisa", some))
        outside = [Deferral(one.id, one.entry, FAR, closes_ms=1) for one in self.take()]
        each(Postpone, outside, lambda some: Postpone(TOPIC, "lisa", some))
        self.reschedule(ids)
        self.fail(0)
        self.promote()
        self.call(Inspect(TOPIC, ids[: FULL // Inspect.steps]))
        self.call(Mend(TOPIC, ids[: FULL // Mend.steps]))
        self.take(1)
        time.sleep(0.003)
        windows = range(-(-FULL // LARGEST_WINDOW))
        assert sum(len(self.call(Reclaim(TOPIC, "lisa")).moved) for _ in windows) == FULL
        self.reschedule(ids)
        self.fail("discard")
        each(Requeue, ids, lambda some: Requeue(TOPIC, "lisa", some))
        self.promote()
        self.call(Trim(TOPIC, "lisa", window=FULL))
        acks = [Settlement(e.id, e.entry, "TTTTTTTT-", e.due_ms, 1, "c") for e in self.take()]
        answers = each(Ack, acks, lambda some: Ack(TOPIC, "lisa", some))
        assert {one for said in answers for one in said} == {"acked"}
        self.end_and_restore(number)
        self.coalesce(number)
        self.call(Read(TOPIC, "-", "+"))
        self.call(Prune(TOPIC))

    def coalesce(self, number: int) -> None:
        """Full batches of new messages, of replaced ones, and of ones that are ready."""
        data = encode_envelope(TOKEN, "x" * 100)
        keys = [f"k{number}-{i:04}" for i in range(FULL // Coalesce.steps)]
        for token, rule in (("U", "d0,60000"), ("V", "d0,60000"), ("W", "l+0"), ("X", "d9,")):
            if token == "W":
                self.call(Promote(TOPIC))
            bursts = [Burst(key, rule, data, 60_000, "5") for key in keys]
            self.call(coalesce(TOPIC, token * 8, bursts))
        self.call(Cancel(TOPIC, [keyed_id(key, "~1") for key in keys]))
        shared = self._store.keys.topic(TOPIC)
        self._store.ask("HDEL", shared.options, "lanes")  # the other rounds are without
        self._store.ask("DEL", *shared.lanes("lisa"))

    def end_and_restore(self, number: int) -> None:
        """Full batches from waiting and garbage, and half to each of these."""
        ends: dict[type[Transition[Any]], Any] = {
            Cancel: ("+60000", None, lambda some: Cancel(TOPIC, some), "cancelled"),
            Expire: ("1", 1, lambda some: Expire(TOPIC, some), "expired"),
            Purge: ("+0", None, lambda some: Purge(TOPIC, "lisa", some), True),
        }
        for kind, (due, ttl_ms, call, answer) in ends.items():
            ids = [f"{kind.script}{number}-{i:04}" for i in range(FULL)]
            self.send(ids, due, ttl_ms)
            if kind is Purge:
                self.fail("discard")
            answers = self.call_in_batches(kind, ids, call)
            assert {one for said in answers for one in said} == {answer}
        data = encode_envelope(TOKEN, "x" * 100)
        dead = (RestoreState("lisa", "garbage", 5, 2),)
        items = [
            RestoreItem(f"restored{number}-{i:04}", data, FAR, None, "0,5", dead[i % 2 :])
            for i in range(FULL // Restore.steps)
        ]
        assert set(self.call(Restore(TOPIC, items))) == {"restored"}


@pytest.fixture
def timed(bench: Bench) -> Timed:
    for name in loader.names():
        bench.store.ask("SCRIPT", "LOAD", loader.load(name).source)
    bench.call(Declare(TOPIC, "lisa"))
    return Timed(bench)


@pytest.mark.parametrize("journal", ["0", "1"], ids=["plain", "journal"])
@pytest.mark.parametrize(
    "bench", ["plain", pytest.param("redis", marks=pytest.mark.full)], indirect=True
)
def test_a_full_batch_of_every_script_is_quick(bench: Bench, timed: Timed, journal: str) -> None:
    bench.call(Configure(TOPIC, {"journal": journal, "journal_max": "1"}))
    for number in range(ROUNDS):
        timed.one_round(number)
        best = timed.best_ms()
        if max(best.values()) < BOUND_MS:
            break
    assert set(best) == TIMED
    assert max(best.values()) < BOUND_MS, best


@ON_VALKEY
def test_waiting_messages_do_not_slow_calls(bench: Bench, timed: Timed) -> None:
    for number in range(3):
        timed.one_round(number)
    alone = timed.best_ms()
    timed.took_ms.clear()
    scored = [part for i in range(MANY) for part in (FAR + i, f"waits-{i}")]
    for some in chunks(scored, 20_000):
        bench.store.ask("ZADD", bench.keys.waiting, *some)
    for number in range(3, ROUNDS):
        timed.one_round(number)
        slower = {
            name: (ms, alone[name])
            for name, ms in timed.best_ms().items()
            if ms > alone[name] + LOOK_AT_ALL_MS
        }
        if not slower:
            break
    assert not slower


@pytest.mark.parametrize("count", [20, 100])
@ON_VALKEY
@pytest.mark.usefixtures("timed")
def test_a_full_ack_asks_each_of_many_groups_once(bench: Bench, count: int) -> None:
    """The worst case: all groups owe messages, but only the last one owes the acked ones."""
    names = [f"m{number:03}" for number in range(count)]  # behind the group of the fixture
    others = G(entries=dict.fromkeys("abc"), retry={"d": FAR}, garbage={"e": 1})
    ids = [f"m{i:03}" for i in range(125)]
    held = G(ready=[Row(one, 1, 1, "c1") for one in ids])
    bench.put(body=ids, **dict.fromkeys(names, others) | {names[0]: held, names[-1]: held})
    bench.store.drive(bench.store.groups(TOPIC))
    size = bench.store.batch_size(TOPIC, Ack)
    assert size >= 25, "calls for a few messages spend their time on the groups"
    acks = [bench.settlement(one, group=names[0]) for one in ids[:size]]
    before = lookups(bench)
    outcomes = bench.call(Ack(TOPIC, names[0], acks))
    assert set(outcomes) == {"acked"}
    assert lookups(bench) - before <= 6 * (count + 1) + 5, "three states in each group"


def lookups(bench: Bench) -> int:
    """Number of commands that read members of hashes and sorted sets, or keys."""
    stats = bench.store.ask("INFO", "commandstats").decode()
    found = re.findall(r"cmdstat_(?:exists|hmget|hexists|zmscore|zscore):calls=(\d+)", stats)
    return sum(map(int, found))


ROOM = 32_768
"""Bytes of a reply that are not bodies."""


class Replies:
    """Records the size of each reply in bytes."""

    def __init__(self, bench: Bench, monkeypatch: pytest.MonkeyPatch, sizes: list[int]) -> None:
        self._sizes = sizes
        self.seen: list[int] = []
        execute = bench.store.connection.execute

        def measured(command: Any) -> Any:
            reply = execute(command)
            self.seen.append(bytes_of(reply))
            return reply

        monkeypatch.setattr(bench.store.connection, "execute", measured)

    def check(self) -> None:
        """No reply exceeds the budget except for a single body; few replies are far below it."""
        assert max(self.seen) <= max(BYTES_PER_CALL, *self._sizes) + ROOM, self.seen
        assert len(self.seen) <= 3 * (1 + sum(self._sizes) // BYTES_PER_CALL), self.seen
        self.seen.clear()


def bytes_of(reply: Any) -> int:
    if isinstance(reply, list):
        return sum(map(bytes_of, reply))
    return len(reply) if isinstance(reply, bytes) else 0


def body_sizes(envelopes: Sequence[bytes | None]) -> list[int]:
    return [len(data or b"") - HEAD_BYTES for data in envelopes]


@pytest.mark.parametrize(
    "sizes", [[20_000] * 40, [100] * 60 + [300_000] * 3 + [100] * 60], ids=["20 kB", "a jump"]
)
@ON_VALKEY
def test_calls_that_return_bodies_stop_at_their_byte_budget(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, sizes: list[int]
) -> None:
    bench.call(Declare(TOPIC, "lisa"))
    bench.call(Configure(TOPIC, {"journal": "1", "max_body_bytes": "1000000"}))
    ids = [f"m{i:03}" for i in range(len(sizes))]
    for message_id, size in zip(ids, sizes, strict=True):
        bench.call(enqueue(TOPIC, TOKEN, [item(message_id, "+0", "x" * size)]))
    replies = Replies(bench, monkeypatch, sizes)
    for backwards in (False, True):
        ends, is_last = ("+", "-") if backwards else ("-", "+"), False
        numbers = list[int]()
        while not is_last:
            is_last, items = bench.call(Read(TOPIC, *ends, backwards=backwards))
            numbers += [int(flat[1]) for _, flat in items]
            if items:
                ends = (f"({items[-1][0].decode()}", ends[1])
        assert numbers == sorted(range(1, 2 * len(sizes) + 1), reverse=backwards)
        replies.check()
    for call in (bench.call, bench.store.call_by_id):
        assert body_sizes([one.envelope for one in call(Inspect(TOPIC, ids))]) == sizes
        replies.check()
    assert len(bench.call(Inspect(TOPIC, ids, bodies=False))) == len(ids)
    assert len(replies.seen) == 1
    left, opened = bench.call(Pull(TOPIC, "lisa", "c1", len(ids))).entries, list[int]()
    replies.seen.clear()
    while left:
        said = bench.call(Open(TOPIC, "lisa", left))
        assert len(said.past_ttl) == len(said.envelopes) > 0
        opened += body_sizes(said.envelopes)
        left = left[len(said.envelopes) :]
    assert opened == sizes
    replies.check()
