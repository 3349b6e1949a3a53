"""open: ready -> in flight, the bodies and the instant of hand-over."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lisa.core.stream import Entry, parse_read, read_command
from lisa.core.transitions.open import Open
from lisa.core.transitions.promote import Promote
from tests.contract.bench import TOPIC, item
from tests.contract.state import G, Row, envelope

if TYPE_CHECKING:
    from tests.contract.bench import Bench

FAR = 4_000_000_000_000


def test_it_answers_bodies_time_and_the_ack_timeout_and_changes_nothing(bench: Bench) -> None:
    bench.put(
        body={"a": "A-x", "b": "A-y"},
        lisa=G(ready=[Row("a", 1, 1, "c1"), Row("b", 2, 1, "c1")]),
    )  # fmt: skip
    said = bench.call(Open(TOPIC, "lisa", [bench.opening("b"), bench.opening("a")]))
    assert said.envelopes == [envelope("A-y"), envelope("A-x")]
    assert (said.ack_timeout_ms, said.paused, said.past_ttl) == (10_000, False, [False, False])
    assert bench.now == said.now_us // 1000
    bench.check(
        body={"a": "A-x", "b": "A-y"},
        lisa=G(ready=[Row("a", 1, 1, "c1"), Row("b", 2, 1, "c1")]),
    )  # fmt: skip


def test_the_topics_ack_timeout_is_told(bench: Bench) -> None:
    bench.put(options={"ack_timeout": "1234"}, body={"a": "A-"},
              lisa=G(ready=[Row("a", 1, 1, "c1")]))  # fmt: skip
    assert bench.call(Open(TOPIC, "lisa", [bench.opening("a")])).ack_timeout_ms == 1234


def test_an_own_ack_timeout_becomes_a_lease(bench: Bench) -> None:
    bench.put(body={"a": "A-"}, lisa=G(ready=[Row("a", 1, 1, "c1")]))
    said = bench.call(Open(TOPIC, "lisa", [bench.opening("a")], 5000))
    assert said.ack_timeout_ms == 5000
    bench.check(body={"a": "A-"},
                lisa=G(ready=[Row("a", 1, 1, "c1")], leases={"a": bench.now + 5000}))  # fmt: skip


def test_an_entry_without_a_body_is_cleared_and_counted(bench: Bench) -> None:
    bench.put(
        body={"b": "A-"},
        lisa=G(ready=[Row("a", 1, 2, "c1"), Row("b", 2, 1, "c1")], attempts={"a": 1},
               reasons={"a": "no"}, leases={"a": FAR}),
    )  # fmt: skip
    said = bench.call(Open(TOPIC, "lisa", [bench.opening("a"), bench.opening("b")]))
    assert said.envelopes == [None, envelope("A-")]
    bench.check(body={"b": "A-"}, stats={"cleared@lisa": 1},
                lisa=G(ready=[Row("b", 2, 1, "c1")]))  # fmt: skip


def test_an_entry_that_the_index_does_not_name_is_cleared_alone(bench: Bench) -> None:
    bench.put(
        body={"a": "A-"},
        lisa=G(ready=[Row("a", 1, 2, "c1"), Row("a", 1, 2, "c1")], attempts={"a": 1},
               entries={"a": 1}),
    )  # fmt: skip
    old = bench.store.ask("XRANGE", bench.keys.group("lisa").ready, "-", "+", "COUNT", 1)[0][0]
    said = bench.call(Open(TOPIC, "lisa", [Entry(old.decode(), "a", 1, 2), bench.opening("a")]))
    assert said.envelopes == [None, envelope("A-")]
    bench.check(
        body={"a": "A-"}, stats={"cleared@lisa": 1},
        lisa=G(ready=[Row("a", 1, 2, "c1")], attempts={"a": 1}),
    )  # fmt: skip


def test_entries_of_a_foreign_hand_are_cleared_whatever_they_hold(bench: Bench) -> None:
    bench.put(body={"a": "A-"}, lisa=G())
    ready = bench.keys.group("lisa").ready
    for fields in (("x", "y"), ("id", b"\xff\xfe"), ("id", "a", "due", "soon", "attempt", "one")):
        bench.store.ask("XADD", ready, "*", *fields)
    read = parse_read(bench.store.ask(*read_command(ready, "lisa", "c1", 10, 0)))
    assert [(one.id, one.due_ms, one.attempt) for one in read] == [
        ("", 0, 1), ("\ufffd\ufffd", 0, 1), ("a", 0, 1),
    ]  # fmt: skip
    assert bench.call(Open(TOPIC, "lisa", read)).envelopes == [None, None, None]
    bench.check(body={"a": "A-"}, stats={"cleared@lisa": 3}, lisa=G())


def test_a_paused_topic_takes_them_back_as_new_entries(bench: Bench) -> None:
    bench.put(
        options={"paused": "1"}, body={"a": "A-", "b": "A-"},
        lisa=G(ready=[Row("a", 1, 1, "c1"), Row("b", 2, 3, "c1"), Row("gone", 3, 1, "c1")],
               attempts={"b": 2}, leases={"a": FAR}),
    )  # fmt: skip
    receipts = [bench.opening("a"), bench.opening("b"), bench.opening("gone")]
    said = bench.call(Open(TOPIC, "lisa", receipts, 700))
    assert said.paused
    assert said.envelopes == [None, None, None]
    bench.check(
        options={"paused": "1"}, body={"a": "A-", "b": "A-"}, stats={"cleared@lisa": 1},
        lisa=G(ready=[Row("a", 1), Row("b", 2, 3)], attempts={"b": 2}),
    )  # fmt: skip
    again = bench.call(Open(TOPIC, "lisa", receipts, 700))
    assert again.envelopes == [None, None, None]
    bench.check(
        options={"paused": "1"}, body={"a": "A-", "b": "A-"}, stats={"cleared@lisa": 4},
        lisa=G(ready=[Row("a", 1), Row("b", 2, 3)], attempts={"b": 2}),
    )  # fmt: skip


def test_what_is_past_its_ttl_is_told(bench: Bench) -> None:
    bench.put(
        body={"a": "A-", "b": "A-"}, expiry={"a": 5, "b": FAR},
        lisa=G(ready=[Row("a", 1, 1, "c1"), Row("b", 2, 1, "c1")]),
    )  # fmt: skip
    said = bench.call(Open(TOPIC, "lisa", [bench.opening("a"), bench.opening("b")]))
    assert said.past_ttl == [True, False]
    assert None not in said.envelopes


def test_another_groups_index_does_not_open_an_entry(bench: Bench) -> None:
    row = Row("a", 1, 1, "c1")
    bench.put(body={"a": "A-"}, lisa=G(ready=[row]), audit=G(ready=[row]))
    foreign = Entry(bench.entry("a", "audit"), "a", 1, 1)
    if foreign.entry == bench.entry("a"):
        foreign = foreign._replace(entry="1-1")
    assert bench.call(Open(TOPIC, "lisa", [foreign])).envelopes == [None]
    bench.check(
        body={"a": "A-"}, stats={"cleared@lisa": 1}, lisa=G(ready=[row]), audit=G(ready=[row])
    )


def test_the_time_of_hand_over_is_not_before_due(bench: Bench) -> None:
    bench.put(lisa=G())
    bench.send(item("a", "+20"))
    while not bench.call(Promote(TOPIC)).moved:
        pass
    read = bench.store.ask(*read_command(bench.keys.group("lisa").ready, "lisa", "c1", 1, 0))
    (entry,) = parse_read(read)
    assert bench.call(Open(TOPIC, "lisa", [entry])).now_us >= entry.due_ms * 1000
