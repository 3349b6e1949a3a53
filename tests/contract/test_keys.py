"""Messages with a key: the lists of their ids."""

import random

import pytest

from lisa.core.model.errors import KeyFull
from lisa.core.model.keys import keyed_id
from lisa.core.model.sharding import Shard
from lisa.core.store.keyed import read_part
from lisa.core.transitions.ack import Ack
from lisa.core.transitions.base import ListChanged, Listed
from lisa.core.transitions.change import Cancel, Cancelled, Reschedule, Rescheduled
from lisa.core.transitions.enqueue import OnDuplicate, Sent
from lisa.core.transitions.upkeep import Mend
from tests.contract.bench import TOPIC, Bench, item
from tests.contract.state import FAR, G
from tests.rows import enqueue


def listed(bench: Bench, key: str) -> list[str]:
    """The ids that the lists of a key have."""
    found: list[str] = []
    number = parts = 1
    while number <= parts:
        part = bench.store.drive(read_part(bench.store, Shard(TOPIC), key, number))
        found += part.ids
        number, parts, total = number + 1, part.parts, part.total
    assert total == len(found)
    return found


def send(bench: Bench, ids: list[str], due: str = "+60000") -> None:
    bench.send(*[item(message_id, due) for message_id in ids])


def test_a_key_lists_its_live_messages(bench: Bench) -> None:
    a, b, other = keyed_id("k", "a"), keyed_id("k", "b"), keyed_id("kk", "a")
    send(bench, [a, b, other, "a"])
    send(bench, [a])
    assert listed(bench, "k") == [a, b]
    assert listed(bench, "kk") == [other]
    assert listed(bench, "a") == []
    bench.call(Cancel(TOPIC, [a, "a"]))
    assert listed(bench, "k") == [b]
    bench.call(Cancel(TOPIC, [b, other]))
    assert bench.store.ask("EXISTS", bench.keys.keyed) == 0


def test_a_message_that_was_handled_is_listed_no_longer(bench: Bench) -> None:
    a, b = keyed_id("k", "a"), keyed_id("k", "b")
    bench.put(lisa=G())
    send(bench, [a, b], "+0")
    bench.call(Ack(TOPIC, "lisa", [bench.settlement(a)]))
    assert listed(bench, "k") == [b]


def test_an_id_that_was_settled_and_is_replaced_is_listed_again(bench: Bench) -> None:
    a = keyed_id("k", "a")
    send(bench, [a])
    bench.call(Cancel(TOPIC, [a]))
    bench.send(item(a, "+60000", sender="B"), on_duplicate=OnDuplicate.REPLACE)
    assert listed(bench, "k") == [a]


def test_a_call_that_would_exceed_max_per_key_sends_nothing(bench: Bench) -> None:
    a, b, c, other = (keyed_id(key, own) for key, own in ("ka", "kb", "kc", "oa"))
    bench.put(options={"max_per_key": "2"}, lisa=G())
    assert bench.send(item(a, "+0"), item(a, FAR), item("x", FAR), item(other, FAR)) == [
        Sent.ACCEPTED,
        Sent.DUPLICATE,
        Sent.ACCEPTED,
        Sent.ACCEPTED,
    ]
    before = bench.state()
    said = r"key 'k' of topic 'orders' has 1 live messages and may have at most 2 \(the topic's"
    with pytest.raises(KeyFull, match=said):
        bench.send(item(b, FAR, sender="B"), item("y", FAR, sender="B"), item(c, 1, sender="B"))
    assert bench.state() == before
    assert bench.send(item(b, FAR, sender="C")) == [Sent.ACCEPTED]
    repeated = [item(a, "+0"), item(a, FAR), item("x", FAR), item(other, FAR)]
    assert bench.send(*repeated)[0] == Sent.ACCEPTED
    replace = OnDuplicate.REPLACE
    assert bench.send(item(a, 1, sender="D"), on_duplicate=replace) == [Sent.REPLACED]
    bench.call(Cancel(TOPIC, [b]))
    assert bench.send(item(b, FAR, sender="C")) == [Sent.ACCEPTED], "a repeat adds nothing"
    assert bench.send(item(b, FAR, sender="E"), on_duplicate=replace) == [Sent.REPLACED]
    for full in (item(c, FAR, sender="F"), item(keyed_id("k", "d"), "+0", sender="F")):
        with pytest.raises(KeyFull, match="has 2 live"):
            bench.send(full)
    bench.store.ask("HSET", bench.keys.options, "max_per_key", "")
    assert bench.send(item(c, FAR, sender="F")) == [Sent.ACCEPTED]


def test_max_per_key_counts_a_list_of_several_parts(bench: Bench) -> None:
    bench.put(options={"max_per_key": "200"})
    ids = [keyed_id("k", str(n)) for n in range(201)]
    bench.send(*(item(one, FAR) for one in ids[:199]))
    call = enqueue(TOPIC, "B" * 8, [item(one, FAR) for one in ids[199:]], are_ids_new=True)
    with pytest.raises(KeyFull, match="has 199 live"):
        bench.call(call)
    bench.send(item(ids[199], FAR, sender="C"))
    with pytest.raises(KeyFull, match="has 200 live"):
        bench.send(item(ids[200], FAR, sender="C"))


@pytest.mark.parametrize("key", ["k", "*", "{a}", "ü" * 128, "a b\\1%s"])
def test_lists_of_any_length_have_exactly_the_live_ids(bench: Bench, key: str) -> None:
    chosen, live = random.Random(7), set[str]()
    for turn in range(60):
        new = [keyed_id(key, f"{turn}-{n}") for n in range(chosen.choice([1, 3, 50]))]
        send(bench, new)
        live.update(new)
        gone = chosen.sample(sorted(live), min(len(live), chosen.choice([0, 1, 30])))
        if gone:
            bench.call(Cancel(TOPIC, gone))
            live.difference_update(gone)
    found = listed(bench, key)
    assert sorted(found) == sorted(live)
    assert len(live) > 200, "the list has several parts"
    for start in range(0, len(found), 100):
        part = found[start : start + 100]
        assert bench.call(Mend(TOPIC, part)) == [[] for _ in part]
        bench.call(Cancel(TOPIC, part))
    assert bench.store.ask("EXISTS", bench.keys.keyed) == 0


def test_a_live_message_that_is_replaced_stays_listed_once(bench: Bench) -> None:
    a = keyed_id("k", "a")
    send(bench, [a])
    bench.send(item(a, FAR, sender="B"), on_duplicate=OnDuplicate.REPLACE)
    assert listed(bench, "k") == [a]


def test_mend_lists_what_was_lost(bench: Bench) -> None:
    a, b = keyed_id("k", "a"), keyed_id("k", "b")
    send(bench, [a, b])
    bench.store.ask("DEL", bench.keys.keyed)
    bench.store.ask("DEL", bench.keys.body(b))
    assert bench.call(Mend(TOPIC, [a, b])) == [["unlisted"], ["no-body"]]
    assert listed(bench, "k") == [a]


def read(bench: Bench, key: str) -> Listed:
    part = bench.store.drive(read_part(bench.store, Shard(TOPIC), key))
    return Listed(part.number, part.stored)


def test_a_change_of_a_key_refuses_if_the_list_has_changed(bench: Bench) -> None:
    a, b = keyed_id("k", "a"), keyed_id("k", "b")
    send(bench, [a])
    before = read(bench, "k")
    send(bench, [b])
    state = bench.state()
    with pytest.raises(ListChanged):
        bench.call(Cancel(TOPIC, [a], listed=before))
    with pytest.raises(ListChanged):
        bench.call(Reschedule(TOPIC, [(a, "1")], listed=before))
    assert bench.state() == state
    now = read(bench, "k")
    moved = bench.call(Reschedule(TOPIC, [(a, "+1000"), (b, "+1000")], listed=now))
    assert moved == [Rescheduled.RESCHEDULED] * 2
    assert bench.call(Cancel(TOPIC, [a, b], listed=now)) == [Cancelled.CANCELLED] * 2
    assert listed(bench, "k") == []


def test_a_repeated_reschedule_of_a_key_gets_the_first_answer(bench: Bench) -> None:
    a, b = keyed_id("k", "a"), keyed_id("k", "b")
    send(bench, [a])
    call = Reschedule(TOPIC, [(a, "+1000")], listed=read(bench, "k"))
    assert bench.call(call) == [Rescheduled.RESCHEDULED]
    send(bench, [b])
    assert bench.call(call) == [Rescheduled.RESCHEDULED]


def test_the_parts_of_a_long_list_are_compared_one_by_one(bench: Bench) -> None:
    ids = [keyed_id("k", str(n)) for n in range(200)]
    send(bench, ids)
    second = bench.store.drive(read_part(bench.store, Shard(TOPIC), "k", 2))
    first = read(bench, "k")
    assert second.parts > 2
    bench.call(Cancel(TOPIC, second.ids[:1]))
    with pytest.raises(ListChanged):
        bench.call(Cancel(TOPIC, second.ids[:1], listed=Listed(2, second.stored)))
    own = bench.store.drive(read_part(bench.store, Shard(TOPIC), "k")).ids[:1]
    assert bench.call(Cancel(TOPIC, own, listed=first)) == [Cancelled.CANCELLED]
    second = bench.store.drive(read_part(bench.store, Shard(TOPIC), "k", 2))
    fresh = Listed(2, second.stored)
    assert bench.call(Cancel(TOPIC, second.ids[:1], listed=fresh)) == [Cancelled.CANCELLED]
