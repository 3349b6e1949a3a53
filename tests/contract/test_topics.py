"""configure, declare, undeclare, absorb, clear: options, groups and shards of a topic."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from lisa.core.model.errors import GroupRemoved, RemovalUnfinished, TooManyGroups
from lisa.core.transitions.absorb import Absorb
from lisa.core.transitions.ack import Ack, Settlement
from lisa.core.transitions.clear import Clear
from lisa.core.transitions.configure import Configure
from lisa.core.transitions.declare import Declare
from lisa.core.transitions.enqueue import OnDuplicate
from lisa.core.transitions.promote import Promote
from lisa.core.transitions.pull import Pull
from lisa.core.transitions.undeclare import Undeclare, Undeclared
from tests.contract.bench import TOPIC, Bench, item
from tests.contract.state import G, Row


def declare(bench: Bench, **values: str | None) -> int:
    return bench.call(Configure(TOPIC, values, declared=True))


def put(bench: Bench, **values: str | None) -> int:
    return bench.call(Configure(TOPIC, values))


def options(bench: Bench) -> Mapping[str, str]:
    found: Mapping[str, str] = bench.state().get("options", {})
    return {name: value for name, value in found.items() if not name.startswith("declared:")}


def test_a_declaration_is_written_with_its_values(bench: Bench) -> None:
    assert declare(bench, ack_timeout="5000", max_ready="7") == 2
    written = {"ack_timeout": "5000", "max_ready": "7"}
    bench.check(options=written | {f"declared:{name}": v for name, v in written.items()})
    assert declare(bench, ack_timeout="5000", max_ready="7") == 0


def test_a_new_declaration_replaces_an_old_one(bench: Bench) -> None:
    declare(bench, ack_timeout="5000")
    assert declare(bench, ack_timeout="6000") == 1
    assert options(bench) == {"ack_timeout": "6000"}


def test_options_set_by_an_operator_persist(bench: Bench) -> None:
    declare(bench, ack_timeout="5000")
    assert put(bench, ack_timeout="9000", capacity="3") == 2
    assert declare(bench, ack_timeout="6000", capacity="4") == 0
    assert declare(bench, ack_timeout="7000") == 0
    assert options(bench) == {"ack_timeout": "9000", "capacity": "3"}


def test_a_removed_option_follows_declarations_again(bench: Bench) -> None:
    declare(bench, ack_timeout="5000")
    put(bench, ack_timeout="9000")
    assert put(bench, ack_timeout=None) == 1
    assert options(bench) == {}
    assert declare(bench, ack_timeout="6000") == 1
    assert options(bench) == {"ack_timeout": "6000"}


def test_removing_a_declaration_restores_the_default_and_keeps_operator_values(
    bench: Bench,
) -> None:
    declare(bench, ack_timeout="5000", max_ready="7")
    put(bench, max_ready="8")
    assert declare(bench, ack_timeout=None, max_ready=None) == 1
    bench.check(options={"max_ready": "8"})


def test_paused_is_never_declared(bench: Bench) -> None:
    put(bench, paused="1")
    assert declare(bench, paused="0") == 0
    bench.check(options={"paused": "1"}, stats={"pauses": 1})
    put(bench, paused=None)
    assert declare(bench, paused="1") == 0
    bench.check(stats={"pauses": 1, "resumes": 1})


def test_pauses_and_resumes_are_counted_once(bench: Bench) -> None:
    for value in ("0", "1", "1", "0", "0", None, "1"):
        put(bench, paused=value)
    bench.check(options={"paused": "1"}, stats={"pauses": 2, "resumes": 1})


FAR = 4_000_000_000_000


def test_declare_creates_the_group_and_its_stream(bench: Bench) -> None:
    bench.put(waiting={"a": 1}, body={"a": "A-"}, audit=G())
    assert bench.call(Declare(TOPIC, "lisa")) is True
    bench.check(waiting={"a": 1}, body={"a": "A-"}, audit=G(), lisa=G())
    assert bench.call(Declare(TOPIC, "lisa")) is False
    bench.check(waiting={"a": 1}, body={"a": "A-"}, audit=G(), lisa=G())


def test_declare_recreates_a_deleted_stream(bench: Bench) -> None:
    bench.put(lisa=G())
    bench.store.ask("DEL", bench.keys.group("lisa").ready)
    assert bench.call(Declare(TOPIC, "lisa")) is False
    bench.check(lisa=G())


def test_declare_recreates_a_destroyed_group_at_the_first_entry(bench: Bench) -> None:
    bench.put(body={"a": "A-", "b": "A-"}, lisa=G(ready=[Row("a", 1, 1, "c1"), Row("b", 2)]))
    bench.store.ask("XGROUP", "DESTROY", bench.keys.group("lisa").ready, "lisa")
    bench.call(Declare(TOPIC, "lisa"))
    bench.check(body={"a": "A-", "b": "A-"}, lisa=G(ready=[Row("a", 1), Row("b", 2)]))


def test_a_repair_does_not_declare_a_removed_group(bench: Bench) -> None:
    bench.put(lisa=G(), audit=G())
    bench.store.ask("DEL", bench.keys.group("lisa").ready)
    assert bench.call(Declare(TOPIC, "lisa", only_mend=True)) is False
    bench.check(lisa=G(), audit=G())
    bench.call(Undeclare(TOPIC, "lisa", [], drop=True))
    assert bench.call(Declare(TOPIC, "lisa", only_mend=True)) is False
    bench.check(declared=["audit"], audit=G())


def test_a_repair_restores_only_lost_groups(bench: Bench) -> None:
    bench.put(declared=["audit"], body={"m": "A-"}, lisa=G(retry={"m": 1}), audit=G())
    assert bench.call(Declare(TOPIC, "lisa", only_lost=True)) is True
    bench.check(body={"m": "A-"}, lisa=G(retry={"m": 1}), audit=G())
    assert bench.call(Declare(TOPIC, "lisa", only_lost=True)) is False
    bench.call(Undeclare(TOPIC, "lisa"))
    before = bench.state()
    assert bench.call(Declare(TOPIC, "lisa", only_lost=True)) is False
    assert bench.state() == before, "its removal is at work"
    bench.call(Undeclare(TOPIC, "lisa", ["m"], drop=True))
    before = bench.state()
    assert bench.call(Declare(TOPIC, "lisa", only_lost=True)) is False
    assert bench.state() == before, "it owes nothing"


@pytest.mark.parametrize(
    "kept",
    [
        {"lisa": G()},
        {"declared": [], "lisa": G(), "options": {"removing:lisa": 1}},
        {"declared": [], "lisa": G(retry={"m": 1}), "body": {"m": "A-"}},
    ],
    ids=["declared", "being removed", "owing"],
)
def test_only_unused_keys_are_deleted_without_a_removal(bench: Bench, kept: dict[str, Any]) -> None:
    bench.put(**kept)
    assert bench.call(Undeclare(TOPIC, "lisa", rest=True)) == Undeclared(0, False)
    bench.check(**kept)
    bench.call(Undeclare(TOPIC, "lisa", ["m"], drop=True))
    bench.put(declared=[], lisa=G(attempts={"x": 1}, reasons={"x": "no"}))
    assert bench.call(Undeclare(TOPIC, "lisa", rest=True)) == Undeclared(0, True)
    assert not bench.store.ask("EXISTS", *bench.keys.group("lisa"))


def test_undeclare_settles_messages_that_no_other_group_owes(bench: Bench) -> None:
    bodies = {"r": "A-", "f": "A-", "t": "A-", "g": "A-", "both": "A-", "w": "A-", "left": "A-"}
    bench.put(
        waiting={"w": FAR},
        body=bodies,
        policy={"t": "5"},
        expiry={"t": FAR},
        lisa=G(
            ready=[Row("f", 1, 1, "c1"), Row("r", 2), Row("both", 3)],
            retry={"t": 4, "left": 6},
            garbage={"g": 5},
            attempts={"t": 1, "g": 2},
            reasons={"t": "no", "g": "no"},
            leases={"f": FAR},
        ),
        audit=G(ready=[Row("both", 3)]),
    )
    page = ["f", "r", "both", "t", "g", "w", "x"]
    said = bench.call(Undeclare(TOPIC, "lisa", page, drop=True))
    assert said == Undeclared(4, False)
    done = {
        m: ("A-", "purged", None, n, bench.now) for m, n in zip("frtg", (0, 0, 1, 2), strict=True)
    }
    bodies = {"both": "A-", "w": "A-", "left": "A-"}
    bench.check(
        declared=["audit"],
        waiting={"w": FAR},
        body=bodies,
        done=done,
        stats={"purged@lisa": 4},
        lisa=G(retry={"left": 6}),
        audit=G(ready=[Row("both", 3)]),
        options={"removing:lisa": bench.now},
    )
    after = bench.state()
    again = bench.call(Undeclare(TOPIC, "lisa", page, drop=True, begun=True))
    assert again == Undeclared(0, False)
    assert bench.state() == {**after, "options": {"removing:lisa": bench.now}}
    assert bench.call(Undeclare(TOPIC, "lisa", ["left"], drop=True)) == Undeclared(1, True)
    del bodies["left"]
    bench.check(
        waiting={"w": FAR},
        body=bodies,
        stats={"purged@lisa": 5},
        done={**done, "left": ("A-", "purged", None, 0, bench.now)},
        audit=G(ready=[Row("both", 3)]),
    )


def test_undeclare_without_drop_keeps_the_keys_and_leaves_a_mark(bench: Bench) -> None:
    bench.put(lisa=G())
    assert bench.call(Undeclare(TOPIC, "lisa")) == Undeclared(0, False)
    bench.check(declared=[], lisa=G(), options={"removing:lisa": bench.now})
    assert bench.call(Undeclare(TOPIC, "lisa", drop=True)) == Undeclared(0, True)
    bench.check()


def test_a_removed_group_may_be_declared_again(bench: Bench) -> None:
    bench.put(lisa=G(), audit=G())
    bench.call(Undeclare(TOPIC, "lisa", drop=True))
    assert bench.call(Declare(TOPIC, "lisa")) is True
    bench.check(lisa=G(), audit=G())


def test_a_topic_refuses_groups_beyond_its_maximum(bench: Bench) -> None:
    bench.put(options={"max_groups": "2"}, lisa=G())
    assert bench.call(Declare(TOPIC, "audit")) is True
    before = bench.state()
    with pytest.raises(TooManyGroups, match="'mail' is not declared: topic 'orders' has 2 groups"):
        bench.call(Declare(TOPIC, "mail"))
    assert bench.state() == before
    assert bench.call(Declare(TOPIC, "audit")) is False, "those declared stay"
    bench.call(Undeclare(TOPIC, "audit", drop=True))
    assert bench.call(Declare(TOPIC, "mail")) is True, "there is room again"


def test_a_topic_with_too_many_groups_keeps_them(bench: Bench) -> None:
    names = [f"g{number:03}" for number in range(101)]
    bench.put(**{name: G() for name in names})
    with pytest.raises(TooManyGroups):
        bench.call(Declare(TOPIC, "new"))
    bench.store.ask("DEL", bench.keys.group("g007").ready)
    assert bench.call(Declare(TOPIC, "g007", only_mend=True)) is False, "it is mended"
    assert bench.store.ask("EXISTS", bench.keys.group("g007").ready) == 1
    assert bench.call(Declare(TOPIC, "g008")) is False
    # Lost groups are restored from what they owe, or from an archive.
    bench.store.ask("HDEL", bench.keys.groups, "g009")
    bench.store.ask("ZADD", bench.keys.group("g009").retry, 1, "m")
    assert bench.call(Declare(TOPIC, "g009", only_lost=True)) is True
    assert bench.call(Declare(TOPIC, "archived", unlimited=True)) is True
    assert bench.call(Declare(f"{TOPIC}~0of2", "lisa")) is True, "a shard follows its topic"


@pytest.mark.parametrize(
    "own", [G(ready=[Row("m", 1, 1, "c1")]), G(retry={"m": 1}), G(garbage={"m": 1})]
)
def test_a_removed_group_that_owes_messages_cannot_be_declared(bench: Bench, own: G) -> None:
    bench.put(body={"m": "A-"}, lisa=own, audit=G())
    bench.call(Undeclare(TOPIC, "lisa"))
    before = bench.state()
    with pytest.raises(RemovalUnfinished, match="'lisa'"):
        bench.call(Declare(TOPIC, "lisa"))
    assert bench.state() == before
    bench.call(Undeclare(TOPIC, "lisa", ["m"], begun=True))
    assert bench.call(Declare(TOPIC, "lisa")) is True, "it owes nothing any more"
    assert "options" not in bench.state(), "and the mark has gone"


def test_a_group_declared_again_starts_without_failures(
    bench: Bench,
) -> None:
    bench.put(waiting={"m": FAR}, body={"m": "A-"}, lisa=G(attempts={"m": 1}, reasons={"m": "no"}))
    bench.call(Undeclare(TOPIC, "lisa"))
    assert bench.call(Declare(TOPIC, "lisa")) is True
    bench.check(waiting={"m": FAR}, body={"m": "A-"}, lisa=G())


def test_a_group_undeclared_by_another_program_keeps_its_messages(bench: Bench) -> None:
    bench.put(declared=["audit"], body={"m": "A-"}, lisa=G(retry={"m": 1}), audit=G())
    assert bench.call(Declare(TOPIC, "lisa")) is True
    bench.check(body={"m": "A-"}, lisa=G(retry={"m": 1}), audit=G())


def test_a_removal_stops_when_the_group_is_declared_again(bench: Bench) -> None:
    bench.put(lisa=G())
    bench.call(Undeclare(TOPIC, "lisa"))
    bench.call(Declare(TOPIC, "lisa"))
    bench.put(body={"m": "A-"}, waiting={"m": 1})
    bench.call(Promote(TOPIC))
    before = bench.state()
    assert bench.call(Undeclare(TOPIC, "lisa", ["m"], drop=True, begun=True)) == Undeclared(0, True)
    assert bench.state() == before


def test_the_mark_of_a_declared_group_is_deleted(bench: Bench) -> None:
    bench.put(body={"m": "A-"}, lisa=G(retry={"m": 1}), audit=G())
    before = bench.state()
    bench.store.ask("HSET", bench.keys.options, "removing:lisa", 1)
    assert bench.call(Undeclare(TOPIC, "lisa", ["m"], drop=True, begun=True)) == Undeclared(0, True)
    assert bench.state() == before


def test_a_half_removed_group_does_not_deliver_a_replaced_message(
    bench: Bench,
) -> None:
    bench.call(Declare(TOPIC, "lisa"))
    bench.call(Declare(TOPIC, "audit"))
    bench.send(item("m", "+0", "old"))
    (old,) = bench.call(Pull(TOPIC, "lisa", "c1", 1)).entries
    bench.call(Undeclare(TOPIC, "lisa"))
    later = item("m", str(FAR), "new", sender="B")
    bench.send(later, on_duplicate=OnDuplicate.REPLACE)
    with pytest.raises(RemovalUnfinished):
        bench.call(Declare(TOPIC, "lisa"))
    with pytest.raises(GroupRemoved):
        bench.call(Ack(TOPIC, "lisa", [Settlement("m", old.entry, "AAAAAAAA-", 0, 1)]))
    bench.call(Undeclare(TOPIC, "lisa", ["m"], drop=True, begun=True))
    bench.call(Declare(TOPIC, "lisa"))
    assert not bench.call(Pull(TOPIC, "lisa", "c1", 1)).entries
    state = bench.state()
    assert (state["waiting"], state["body"]) == ({"m": FAR}, {"m": "Brnew"})


LEFT = {"accepts": "-3"}


COUNTERS = {"sent": 4, "acked@lisa": 2}


def absorb(
    bench: Bench, number: int = 3, count: int = 8, counters: Mapping[str, int] = COUNTERS
) -> bool:
    merged = bench.store.keys.topic(TOPIC).history + ":merged"
    return bench.call(Absorb(TOPIC, number, count, counters, {"0of8": 7}, merged))


def test_a_topic_absorbs_the_counters_of_its_former_shards(bench: Bench) -> None:
    bench.put(options={"layout": "3:4:1:8,2"}, stats={"sent": 3, "promoted": 1})
    assert absorb(bench)
    bench.check(
        options={"layout": "3:4:1:2", "removed:8": "1", "journaled:0of8": "7"},
        stats={"sent": 7, "promoted": 1, "acked@lisa": 2},
    )
    assert not absorb(bench)


def test_a_topic_keeps_the_highest_lateness_of_each_group(bench: Bench) -> None:
    """The topic's own or that of its former shards, by value; they are not added up."""
    own = {"late_max@lower": 10_000, "late_max@higher": 9_999, "late_max@kept": 5_000}
    bench.put(options={"layout": "3:4:1:8"}, stats={"late:u@lower": 1, **own})
    absorbed = {"late_max@lower": 9_999, "late_max@higher": 10_000, "late_max@new": 2_000}
    assert absorb(bench, counters={"late:u@lower": 2, **absorbed})
    bench.check(
        options={"layout": "3:4:1:", "removed:8": "1", "journaled:0of8": "7"},
        stats={
            "late:u@lower": 3,
            "late_max@lower": 10_000,
            "late_max@higher": 10_000,
            "late_max@kept": 5_000,
            "late_max@new": 2_000,
        },
    )


@pytest.mark.parametrize(("number", "count"), [(2, 8), (4, 8), (3, 4), (3, 1), (3, 16)])
def test_a_count_in_use_or_of_another_layout_is_not_absorbed(
    bench: Bench, number: int, count: int
) -> None:
    state: dict[str, Any] = {"options": {"layout": "3:4:1:8"}, "stats": {"sent": 3}}
    bench.put(**state)
    assert not absorb(bench, number, count)
    bench.check(**state)


def test_all_keys_of_an_empty_shard_are_deleted(bench: Bench) -> None:
    bench.put(options=LEFT, stats={"sent": 3}, consumers={"c1": "{}"}, lisa=G())
    assert bench.call(Clear(TOPIC, 3, ("lisa",)))
    bench.check()


@pytest.mark.parametrize(
    "state",
    [
        {"options": {"accepts": "3"}, "lisa": G()},
        {"options": {"accepts": "-4"}, "lisa": G()},
        {"options": LEFT, "waiting": {"m": FAR}, "body": {"m": "A-"}, "lisa": G()},
        {"options": LEFT, "body": {"m": "A-"}, "lisa": G(ready=[Row("m", 1)])},
        {"options": LEFT, "body": {"m": "A-"}, "lisa": G(retry={"m": FAR})},
        {"options": LEFT, "body": {"m": "A-"}, "lisa": G(garbage={"m": 1})},
        {"options": LEFT, "lisa": G(), "audit": G()},
    ],
    ids=["open", "closed by a later layout", "waiting", "ready", "retry", "garbage", "new group"],
)
def test_a_shard_in_use_or_with_messages_is_not_cleared(
    bench: Bench, state: dict[str, Any]
) -> None:
    bench.put(**state)
    assert not bench.call(Clear(TOPIC, 3, ("lisa",)))
    bench.check(**state)


@pytest.mark.parametrize("accepts", [0, 4])
def test_all_keys_of_an_empty_topic_are_deleted(bench: Bench, accepts: int) -> None:
    options = {"capacity": "9", **({"accepts": str(accepts)} if accepts else {})}
    bench.put(options=options, stats={"sent": 3}, consumers={"c1": "{}"})
    assert bench.call(Clear(TOPIC, accepts, is_whole_topic=True))
    bench.check()


@pytest.mark.parametrize(
    "state",
    [
        {"waiting": {"m": FAR}, "body": {"m": "A-"}},
        {"options": {"accepts": "1"}},
        {"lisa": G()},
        {"body": {"m": "A-"}, "lisa": G(ready=[Row("m", 1)])},
    ],
    ids=["waiting", "another layout", "new group", "ready in a new group"],
)
def test_a_topic_in_use_is_not_cleared(bench: Bench, state: dict[str, Any]) -> None:
    bench.put(**state)
    assert not bench.call(Clear(TOPIC, 0, is_whole_topic=True))
    bench.check(**state)
