"""open: ready -> in flight, the bodies and the time of delivery, by script and by plain reads."""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeAlias

import pytest

from lisa.core.delivery.opening import (
    MOST_READS,
    Opening,
    PlainState,
    state_commands,
    state_of,
)
from lisa.core.model.errors import GroupRemoved
from lisa.core.model.options import BYTES_PER_CALL
from lisa.core.model.stream import Entry, parse_reads, read_all_command
from lisa.core.transitions import loader
from lisa.core.transitions.delivery import Open, Opened
from lisa.core.transitions.groups import Undeclare
from lisa.core.transitions.promote import Promote
from tests.contract.bench import TOPIC, Bench, item
from tests.contract.state import FAR, G, Row, envelope

Run: TypeAlias = Callable[[Open], Opened]


@pytest.fixture(params=["script", "reads", "carried"])
def run(request: pytest.FixtureRequest, bench: Bench) -> Run:
    if request.param == "script":
        return bench.call
    opening = Opening(bench.store)
    if request.param == "reads":
        return lambda call: bench.store.drive(opening.open(call))

    def open_carried(call: Open) -> Opened:
        entries = [carrying(bench, entry) for entry in call.entries]
        return bench.store.drive(opening.open(replace(call, entries=entries), state(bench)))

    return open_carried


def carrying(bench: Bench, entry: Entry) -> Entry:
    """The entry with its envelope, as long as the stream has both."""
    body = bench.store.ask("GET", bench.keys.body(entry.id))
    indexed = bench.store.ask("HGET", bench.keys.group("lisa").entries, entry.id)
    return entry._replace(envelope=body or b"" if indexed == entry.entry.encode() else b"")


def state(bench: Bench) -> PlainState | None:
    """What a read of the group `lisa` learns of the topic."""
    asks = state_commands(bench.keys, "lisa")
    return state_of(bench.store.drive(bench.store.chain(bench.keys.waiting, asks)))


HELD = G(ready=[Row("a", 1, 1, "c1")])
BOTH = G(ready=[Row("a", 1, 1, "c1"), Row("b", 2, 1, "c1")])


def test_it_returns_bodies_time_and_ack_timeout_and_changes_nothing(bench: Bench, run: Run) -> None:
    bench.put(body={"a": "A-x", "b": "A-y"}, expiry={"a": 5, "b": FAR}, lisa=BOTH)
    said = run(Open(TOPIC, "lisa", [bench.opening("b"), bench.opening("a")]))
    assert said.envelopes == [envelope("A-y"), envelope("A-x")]
    assert (said.ack_timeout_ms, said.paused, said.past_ttl) == (10_000, False, [False, True])
    assert bench.now == said.now_us // 1000
    bench.check_unchanged()


def test_the_topics_ack_timeout_is_returned(bench: Bench, run: Run) -> None:
    bench.put(options={"ack_timeout": "1234"}, body="a", lisa=HELD)
    assert run(Open(TOPIC, "lisa", [bench.opening("a")])).ack_timeout_ms == 1234


def test_an_own_ack_timeout_becomes_a_lease(bench: Bench, run: Run) -> None:
    bench.put(body="a", lisa=HELD)
    assert run(Open(TOPIC, "lisa", [bench.opening("a")], 5000)).ack_timeout_ms == 5000
    bench.check_change(lisa=G(ready=HELD.ready, leases={"a": bench.now + 5000}))


def test_an_entry_without_a_body_is_cleared_and_counted(bench: Bench, run: Run) -> None:
    failed: dict[str, Any] = {"attempts": {"a": 1}, "reasons": {"a": "no"}, "leases": {"a": FAR}}
    bench.put(body="b", lisa=G(ready=[Row("a", 1, 2, "c1"), BOTH.ready[1]], **failed))
    said = run(Open(TOPIC, "lisa", [bench.opening("a"), bench.opening("b")]))
    assert said.envelopes == [None, envelope("A-")]
    bench.check_change(stats={"cleared@lisa": 1}, lisa=G(ready=[BOTH.ready[1]]))


def test_an_entry_missing_from_the_index_is_cleared_alone(bench: Bench, run: Run) -> None:
    row, failed = Row("a", 1, 2, "c1"), G(attempts={"a": 1})
    bench.put(body="a", lisa=replace(failed, ready=[row, row], entries={"a": 1}))
    old = bench.store.ask("XRANGE", bench.keys.group("lisa").ready, "-", "+", "COUNT", 1)[0][0]
    said = run(Open(TOPIC, "lisa", [Entry(old.decode(), "a", 1, 2), bench.opening("a")]))
    assert said.envelopes == [None, envelope("A-")]
    bench.check_change(stats={"cleared@lisa": 1}, lisa=replace(failed, ready=[row]))


def test_foreign_entries_are_cleared(bench: Bench, run: Run) -> None:
    bench.put(body="a", lisa=G())
    ready = bench.keys.group("lisa").ready
    for fields in (("x", "y"), ("id", b"\xff\xfe"), ("id", "a", "due", "soon", "attempt", "one")):
        bench.store.ask("XADD", ready, "*", *fields)
    ((_, read),) = parse_reads(bench.store.ask(*read_all_command([ready], "lisa", "c1", 10, 0)))
    found = [(one.id, one.due_ms, one.attempt) for one in read]
    assert found == [("", 0, 1), ("\ufffd\ufffd", 0, 1), ("a", 0, 1)]
    assert run(Open(TOPIC, "lisa", read)).envelopes == [None, None, None]
    bench.check_change(stats={"cleared@lisa": 3})


def test_a_paused_topic_returns_them_to_ready_as_new_entries(bench: Bench, run: Run) -> None:
    rows = [Row("a", 1, 1, "c1"), Row("b", 2, 3, "c1"), Row("x", 3, 1, "c1")]
    held = G(ready=rows, attempts={"b": 2}, leases={"a": FAR})
    bench.put(options={"paused": "1"}, body="ab", lisa=held)
    receipts = [*map(bench.opening, "abx")]
    moved = G(ready=[Row("a", 1), Row("b", 2, 3)], attempts={"b": 2})
    for cleared in (1, 4):
        said = run(Open(TOPIC, "lisa", receipts, 700))
        assert (said.paused, said.envelopes) == (True, [None, None, None])
        bench.check_change(stats={"cleared@lisa": cleared}, lisa=moved)


def test_a_paused_topic_opens_nothing(bench: Bench, run: Run) -> None:
    bench.put(options={"paused": "1"}, body="a", lisa=HELD)
    assert run(Open(TOPIC, "lisa", [bench.opening("a")])).envelopes == [None]


def test_another_groups_index_does_not_open_an_entry(bench: Bench, run: Run) -> None:
    bench.put(body="a", lisa=HELD, audit=HELD)
    foreign = Entry(bench.entry("a", "audit"), "a", 1, 1)
    if foreign.entry == bench.entry("a"):
        foreign = foreign._replace(entry="1-1")
    assert run(Open(TOPIC, "lisa", [foreign])).envelopes == [None]
    bench.check_change(stats={"cleared@lisa": 1})


def test_the_entries_of_a_removed_group_are_not_opened(bench: Bench, run: Run) -> None:
    bench.put(body="a", lisa=HELD, audit=G())
    bench.call(Undeclare(TOPIC, "lisa"))
    with pytest.raises(GroupRemoved):
        run(Open(TOPIC, "lisa", [bench.opening("a")]))


def test_the_time_of_delivery_is_not_before_the_due_time(bench: Bench, run: Run) -> None:
    bench.put(lisa=G())
    bench.send(item("a", "+20"))
    while not bench.call(Promote(TOPIC)).moved:
        pass
    read = bench.store.ask(*read_all_command([bench.keys.group("lisa").ready], "lisa", "c1", 1, 0))
    ((_, (entry,)),) = parse_reads(read)
    assert run(Open(TOPIC, "lisa", [entry])).now_us >= entry.due_ms * 1000


def test_the_leases_of_a_late_caller_restart(bench: Bench, run: Run) -> None:
    mine, other = Row("a", 1, 1, "c1", 7_000), Row("b", 2, 1, "c2", 7_000)
    bench.put(body="ab", lisa=G(ready=[mine, other]))
    run(Open(TOPIC, "lisa", [bench.opening("a"), bench.opening("b")], late="c1"))
    ready = bench.keys.group("lisa").ready
    pending = bench.store.ask("XPENDING", ready, "lisa", "-", "+", 9)
    idle = {name: ms for _, name, ms, _ in pending}
    assert idle[b"c1"] < 5_000
    assert idle[b"c2"] >= 7_000
    assert [deliveries for *_, deliveries in pending] == [1, 1]


def calls_of(bench: Bench, command: str) -> int:
    stats = bench.store.ask("INFO", "commandstats").decode()
    found = re.search(rf"cmdstat_{command}:calls=(\d+)", stats)
    return int(found[1]) if found else 0


HALF = BYTES_PER_CALL // 2


@pytest.mark.not_on_fakeredis("it counts no commands")
@pytest.mark.parametrize(
    ("topic", "size", "count", "suffice"),
    [
        ({}, 10, 1, True),
        ({}, 10, MOST_READS, True),
        ({}, 10, MOST_READS + 1, False),
        ({}, BYTES_PER_CALL + 1, 1, False),
        ({}, HALF - 100, 2, True),
        ({}, HALF + 1, 2, False),
        ({"options": {"journal": "1"}}, 10, 1, False),
        ({"expiry": {"0": FAR}}, 10, 1, False),
    ],
)
def test_plain_reads_suffice_for_a_few_usual_messages(
    bench: Bench, topic: dict[str, Any], size: int, count: int, *, suffice: bool
) -> None:
    ids = [str(number) for number in range(count)]
    bench.put(
        **topic,
        body=dict.fromkeys(ids, "A-" + "x" * size),
        lisa=G(ready=[Row(one, 1, 1, "c1") for one in ids]),
    )
    call = Open(TOPIC, "lisa", [bench.opening(one) for one in ids])
    bench.store.ask("SCRIPT", "LOAD", loader.load(call.script).source)
    before = calls_of(bench, "evalsha")
    opened = bench.store.drive(Opening(bench.store).open(call))
    assert (calls_of(bench, "evalsha") == before) is suffice
    assert opened.envelopes == [envelope("A-" + "x" * size)] * len(opened.envelopes)


@pytest.mark.not_on_fakeredis("it counts no commands")
@pytest.mark.parametrize(
    ("topic", "carry", "suffice"),
    [
        ({}, "ab", True),
        ({}, "a", False),
        ({"options": {"journal": "1"}}, "ab", False),
        ({"options": {"paused": "1"}}, "ab", False),
        ({"options": {"window": "09:00-17:00 UTC"}}, "ab", False),
        ({"expiry": {"other": FAR}}, "ab", False),
    ],
)
def test_envelopes_in_entries_suffice_for_usual_topics(
    bench: Bench, topic: dict[str, Any], carry: str, *, suffice: bool
) -> None:
    bench.put(**topic, body="ab", lisa=BOTH)
    entries = [bench.opening(one) for one in "ab"]
    entries = [carrying(bench, one) if one.id in carry else one for one in entries]
    call, known = Open(TOPIC, "lisa", entries), state(bench)
    before = [calls_of(bench, name) for name in ("evalsha", "getrange")]
    bench.store.drive(Opening(bench.store).open(call, known))
    assert ([calls_of(bench, name) for name in ("evalsha", "getrange")] == before) is suffice


@pytest.mark.not_on_fakeredis("it counts no commands")
def test_a_topic_with_a_journal_is_not_read_again_for_a_while(bench: Bench) -> None:
    bench.put(options={"journal": "1"}, body="a", lisa=HELD)
    opening, before = Opening(bench.store), calls_of(bench, "getrange")
    for _ in range(3):
        bench.store.drive(opening.open(Open(TOPIC, "lisa", [bench.opening("a")])))
    assert calls_of(bench, "getrange") - before == 1
