"""The journal: what its events say, and how it is trimmed. test_every_script has the events."""

import pytest

from lisa.core.model.keys import Keys
from lisa.core.store.store import SyncStore
from lisa.core.transitions.delivery import Open
from lisa.core.transitions.journal import Prune, Pruned
from tests.contract.bench import TOPIC, Bench, item
from tests.contract.state import FAR, G, Row
from tests.rows import enqueue

ON = {"journal": "1"}
TRIMS = pytest.mark.not_on_fakeredis("its XTRIM knows no nodes")


def test_the_lateness_of_a_first_delivery_is_journaled_in_microseconds(bench: Bench) -> None:
    due = bench.clock() - 50
    bench.put(body="a", options=ON, lisa=G(ready=[Row("a", due, 1, "c1")]))
    opened = bench.call(Open(TOPIC, "lisa", [bench.opening("a")]))
    [(_, _, _, _, more)] = bench.state()["events"]
    assert more == {"due": due, "late": opened.now_us - due * 1000}
    assert more["late"] >= 50_000


def test_the_actor_names_role_host_and_process(bench: Bench) -> None:
    bench.put(options=ON, lisa=G())
    store = SyncStore(bench.store.connection, Keys(), who="producer")
    store.call(enqueue(TOPIC, "A" * 8, [item("a", FAR)]))
    [[_, flat]] = bench.store.ask("XRANGE", bench.keys.events, "-", "+")
    fields = dict(zip(flat[::2], flat[1::2], strict=True))
    assert fields[b"actor"].decode() == store.actor
    assert store.actor.startswith("producer@")


def test_an_unusable_journal_key_stops_nothing(bench: Bench) -> None:
    bench.put(options=ON, lisa=G())
    bench.store.ask("SET", bench.keys.events, "not a stream")
    bench.call(enqueue(TOPIC, "A" * 8, [item("a", FAR)]))
    assert bench.store.ask("ZRANGE", bench.keys.waiting, 0, -1) == [b"a"]
    stats = bench.store.drive(bench.store.stats(TOPIC))
    assert (stats["journaled"], stats["journal_failed"]) == (1, 1)


def fill(bench: Bench, count: int, **options: int) -> list[str]:
    """Write events, one id each. Returns the entries' ids."""
    bench.put(options={**ON, **options})
    for start in range(0, count, 500):
        ids = [f"m{i:05}" for i in range(start, min(start + 500, count))]
        bench.call(enqueue(TOPIC, "A" * 8, [item(m, FAR) for m in ids]))
    return [entry.decode() for entry, _ in bench.store.ask("XRANGE", bench.keys.events, "-", "+")]


def record(bench: Bench, name: str, entry: str, number: int, ago_ms: int = 0) -> None:
    text = f"{entry} {number} {bench.clock() - ago_ms}"
    bench.store.ask("HSET", bench.keys.archived, name, text)


def numbers(bench: Bench) -> list[int]:
    entries = bench.store.ask("XRANGE", bench.keys.events, "-", "+")
    return [int(flat[flat.index(b"n") + 1]) for _, flat in entries]


@TRIMS
def test_the_journal_is_trimmed_to_the_slowest_archive(bench: Bench) -> None:
    entries = fill(bench, 1000)
    record(bench, "quick", entries[899], 900)
    record(bench, "slow", entries[599], 600)
    done = bench.call(Prune(TOPIC, ["quick", "slow"]))
    assert done.lost == 0
    assert 400 < done.removed < 600
    left = numbers(bench)
    assert left == list(range(done.removed + 1, 1001))
    assert 600 in left  # the slow archive's last event stays
    assert done.left == len(left)


@TRIMS
def test_an_archive_that_stopped_reporting_does_not_block_trimming(bench: Bench) -> None:
    entries = fill(bench, 1000)
    record(bench, "dead", entries[9], 10, ago_ms=10_000)
    record(bench, "quick", entries[899], 900)
    assert bench.call(Prune(TOPIC, ["dead", "quick"], hold_ms=5_000)).removed > 700


@TRIMS
def test_without_an_archive_the_oldest_events_are_removed_and_counted_as_lost(bench: Bench) -> None:
    fill(bench, 1000, journal_max=300)
    done = bench.call(Prune(TOPIC))
    assert done.lost == done.removed
    assert 600 <= done.removed <= 700
    assert numbers(bench) == list(range(done.removed + 1, 1001))
    assert bench.store.drive(bench.store.stats(TOPIC))["journal_lost"] == done.lost
    trimmed = bench.store.ask("HGET", bench.keys.archived, "~trimmed").split()
    assert int(trimmed[0]) == done.removed


@TRIMS
def test_events_archived_before_an_archive_stopped_are_not_lost(bench: Bench) -> None:
    entries = fill(bench, 1000, journal_max=300)
    record(bench, "dead", entries[499], 500, ago_ms=10_000)
    done = bench.call(Prune(TOPIC, ["dead"], hold_ms=5_000))
    assert done.lost == done.removed - 500


@TRIMS
@pytest.mark.parametrize("archived", [True, False])
def test_foreign_entries_do_not_stop_trimming(bench: Bench, *, archived: bool) -> None:
    bench.store.ask("XADD", bench.keys.events, "*", "foreign", "1")
    entries = fill(bench, 1000, journal_max=300)
    if archived:
        record(bench, "nightly", entries[700], 700)
    done = bench.call(Prune(TOPIC, ["nightly"]))
    assert 600 <= done.removed <= 701
    assert done.lost == (0 if archived else done.removed - 1)
    assert numbers(bench) == list(range(done.removed, 1001))


def test_a_journal_within_its_limits_is_not_trimmed(bench: Bench) -> None:
    fill(bench, 10)
    assert bench.call(Prune(TOPIC)) == Pruned(0, 0, 10, more=False)
    assert numbers(bench) == list(range(1, 11))
