"""configure, declare, undeclare, absorb, clear: options, groups and shards of a topic."""

from collections.abc import Mapping
from typing import Any, Literal

import pytest

from lisa.core.model.errors import GroupRemoved, RemovalUnfinished, TooManyGroups
from lisa.core.model.options import LANE_OPTIONS
from lisa.core.store.replies import pairs
from lisa.core.transitions.ack import Ack, Settlement
from lisa.core.transitions.delivery import Pull
from lisa.core.transitions.enqueue import OnDuplicate
from lisa.core.transitions.groups import Declare, Undeclare, Undeclared
from lisa.core.transitions.promote import Promote
from lisa.core.transitions.topic import Absorb, Clear, Configure, LimitKeys
from tests.contract.bench import TOPIC, Bench, item
from tests.contract.state import FAR, G, Row

RETRY: dict[str, Any] = {"body": "m", "lisa": G(retry={"m": 1})}
"""Group lisa owes message m."""


def put(bench: Bench, *, declared: bool = False, **values: str | None) -> int:
    return bench.call(Configure(TOPIC, values, declared=declared))


def declare(bench: Bench, group: str = "lisa", **more: Any) -> bool:
    return bench.call(Declare(TOPIC, group, **more))


def undeclare(bench: Bench, *ids: str, **more: Any) -> Undeclared:
    return bench.call(Undeclare(TOPIC, "lisa", ids, **more))


def options(bench: Bench) -> Mapping[str, str]:
    found: Mapping[str, str] = bench.state().get("options", {})
    return {name: value for name, value in found.items() if not name.startswith("declared:")}


def test_a_new_declaration_replaces_an_old_one(bench: Bench) -> None:
    assert put(bench, declared=True, ack_timeout="5000", max_ready="7") == 2
    written = {"ack_timeout": "5000", "max_ready": "7"}
    bench.check(options=written | {f"declared:{name}": v for name, v in written.items()})
    assert put(bench, declared=True, ack_timeout="5000", max_ready="7") == 0
    assert put(bench, declared=True, ack_timeout="6000") == 1
    assert options(bench) == {"ack_timeout": "6000", "max_ready": "7"}


def test_options_set_by_an_operator_persist_until_they_are_removed(bench: Bench) -> None:
    put(bench, declared=True, ack_timeout="5000")
    assert put(bench, ack_timeout="9000", capacity="3") == 2
    assert put(bench, declared=True, ack_timeout="6000", capacity="4") == 0
    assert put(bench, declared=True, ack_timeout="7000") == 0
    assert options(bench) == {"ack_timeout": "9000", "capacity": "3"}
    assert put(bench, ack_timeout=None) == 1
    assert options(bench) == {"capacity": "3"}
    assert put(bench, declared=True, ack_timeout="8000") == 1
    assert options(bench) == {"ack_timeout": "8000", "capacity": "3"}


def test_removing_a_declaration_restores_the_default_and_keeps_operator_values(
    bench: Bench,
) -> None:
    put(bench, declared=True, ack_timeout="5000", max_ready="7")
    put(bench, max_ready="8")
    assert put(bench, declared=True, ack_timeout=None, max_ready=None) == 1
    bench.check(options={"max_ready": "8"})


def test_paused_is_never_declared(bench: Bench) -> None:
    put(bench, paused="1")
    assert put(bench, declared=True, paused="0") == 0
    bench.check(options={"paused": "1"}, stats={"pauses": 1})
    put(bench, paused=None)
    assert put(bench, declared=True, paused="1") == 0
    bench.check(stats={"pauses": 1, "resumes": 1})


def test_pauses_and_resumes_are_counted_once(bench: Bench) -> None:
    for value in ("0", "1", "1", "0", "0", None, "1"):
        put(bench, paused=value)
    bench.check(options={"paused": "1"}, stats={"pauses": 2, "resumes": 1})


def test_an_option_of_lanes_makes_the_topic_use_lanes(bench: Bench) -> None:
    def write(values: Mapping[str, str | None]) -> None:
        bench.call(Configure(TOPIC, values))

    write({"rate": "", "fair": "0", "slack": "0", "max_per_key": "7", "order@lisa": ""})
    assert "lanes" not in options(bench)
    for changes, name in enumerate((*LANE_OPTIONS, "slack@lisa", "key_rate@lisa"), 2):
        bench.store.ask("HDEL", bench.keys.options, "lanes")
        write({name: "1"})
        assert options(bench)["lanes"] == "1", name
        assert options(bench)["lanes_changed"] == str(changes)
    before = options(bench)
    write({"rate": "1", "max_per_key": "8"})
    assert options(bench) == {**before, "max_per_key": "8"}, "no change of lanes"
    write(dict.fromkeys(before.keys() - {"lanes", "lanes_changed"}))
    assert options(bench) == {"lanes": "1", "lanes_changed": str(changes + 1)}


def test_a_declared_option_of_lanes_counts_only_where_it_applies(bench: Bench) -> None:
    put(bench, fair="0")
    put(bench, declared=True, fair="1")
    assert options(bench) == {"fair": "0", "lanes_changed": "1"}
    bench.call(Configure(TOPIC, {"fair@lisa": "1"}, declared=True))
    assert options(bench) == {"fair": "0", "fair@lisa": "1", "lanes": "1", "lanes_changed": "2"}


def limits(bench: Bench) -> Mapping[str, str]:
    stored = bench.store.ask("HGETALL", bench.keys.limits)
    return {name.decode(): value.decode() for name, value in pairs(stored).items()}


def test_limits_of_keys_make_the_topic_use_lanes_and_are_numbered(bench: Bench) -> None:
    def put_limits(**given: str) -> int:
        return bench.call(LimitKeys(TOPIC, "set", given))

    assert put_limits(a="") == 0
    assert bench.state().get("options", {}) == {}
    assert put_limits(a="weight=2", b="concurrency=1") == 2
    first = options(bench)
    assert (first["lanes"], first["lanes_changed"]) == ("1", "1")
    assert put_limits(a="weight=2") == 0
    assert options(bench) == first
    ahead = bench.clock() * 1_000 + 10**12
    bench.store.ask("HSET", bench.keys.options, "limits", str(ahead))
    assert put_limits(a="weight=3", b="") == 2
    assert options(bench) == {"lanes": "1", "lanes_changed": "2", "limits": str(ahead + 1)}
    assert limits(bench) == {"a": "weight=3"}


def test_a_copy_of_limits_ends_where_a_later_one_begins(bench: Bench) -> None:
    def copy(what: Literal["open", "copy", "close"], number: int, **given: str) -> int:
        return bench.call(LimitKeys(TOPIC, what, given, number))

    assert copy("close", 5, a="weight=2") == copy("copy", 5, a="weight=2") == -1, "not opened"
    assert copy("open", 5) == 0
    assert copy("copy", 5, a="weight=2") == 1
    assert options(bench)["limits"] == "5+"
    assert copy("open", 6) == 0
    assert copy("open", 5) == copy("copy", 5, b="weight=2") == copy("close", 5, a="") == -1
    assert copy("close", 6, c="weight=1", a="weight=2") == 1
    assert options(bench)["limits"] == "6"
    assert limits(bench) == {"a": "weight=2", "c": "weight=1"}
    assert options(bench)["lanes_changed"] == "2"


def test_the_removal_of_a_group_removes_its_own_options(bench: Bench) -> None:
    bench.put(lisa=G(), other=G(), options={"fair@lisa": "1", "slack@lisa": "7", "fair@other": "1"})
    undeclare(bench, begun=False)
    assert undeclare(bench, begun=True, drop=True).gone
    bench.check_change(lisa=None, options={"fair@other": "1"})


def test_declare_creates_the_group_and_its_stream(bench: Bench) -> None:
    bench.put(waiting={"a": 1}, body="a", audit=G())
    assert [declare(bench) for _ in range(2)] == [True, False]
    bench.check_change(lisa=G())
    bench.store.ask("DEL", bench.keys.group("lisa").ready)
    assert declare(bench) is False
    bench.check_unchanged()


def test_declare_recreates_a_destroyed_group_at_the_first_entry(bench: Bench) -> None:
    bench.put(body="ab", lisa=G(ready=[Row("a", 1, 1, "c1"), Row("b", 2)]))
    bench.store.ask("XGROUP", "DESTROY", bench.keys.group("lisa").ready, "lisa")
    declare(bench)
    bench.check_change(lisa=G(ready=[Row("a", 1), Row("b", 2)]))


def test_a_repair_does_not_declare_a_removed_group(bench: Bench) -> None:
    bench.put(lisa=G(), audit=G())
    bench.store.ask("DEL", bench.keys.group("lisa").ready)
    assert declare(bench, only_mend=True) is False
    bench.check_unchanged()
    undeclare(bench, drop=True)
    assert declare(bench, only_mend=True) is False
    bench.check(audit=G())
    assert declare(bench) is True, "a removed group may be declared again"
    bench.check(lisa=G(), audit=G())


def test_a_repair_restores_only_lost_groups(bench: Bench) -> None:
    bench.put(declared=["audit"], **RETRY, audit=G())
    assert [declare(bench, only_lost=True) for _ in range(2)] == [True, False]
    bench.check(**RETRY, audit=G())
    for step in ({}, {"drop": True}):  # while its removal is at work; when it owes nothing
        undeclare(bench, *("m" if step else ""), **step)
        before = bench.state()
        assert declare(bench, only_lost=True) is False
        assert bench.state() == before


@pytest.mark.parametrize(
    "kept",
    [
        {"lisa": G()},
        {"declared": [], "lisa": G(), "options": {"removing:lisa": 1}},
        {"declared": [], **RETRY},
    ],
    ids=["declared", "being removed", "owing"],
)
def test_only_unused_keys_are_deleted_without_a_removal(bench: Bench, kept: dict[str, Any]) -> None:
    bench.put(**kept)
    assert undeclare(bench, rest=True) == Undeclared(0, False)
    bench.check_unchanged()
    undeclare(bench, "m", drop=True)
    bench.put(declared=[], lisa=G(attempts={"x": 1}, reasons={"x": "no"}))
    assert undeclare(bench, rest=True) == Undeclared(0, True)
    assert not bench.store.ask("EXISTS", *bench.keys.group("lisa"))


def test_undeclare_settles_messages_that_no_other_group_owes(bench: Bench) -> None:
    bench.put(
        waiting={"w": FAR},
        body="rftgbwl",
        policy={"t": "5"},
        expiry={"t": FAR},
        lisa=G(
            ready=[Row("f", 1, 1, "c1"), Row("r", 2), Row("b", 3)],
            retry={"t": 4, "l": 6},
            garbage={"g": 5},
            attempts={"t": 1, "g": 2},
            reasons={"t": "no", "g": "no"},
            leases={"f": FAR},
        ),
        audit=G(ready=[Row("b", 3)]),
    )
    assert undeclare(bench, *"frbtgwx", drop=True) == Undeclared(4, False)
    failed = zip("frtg", (0, 0, 1, 2), strict=True)
    done = {m: ("A-", "purged", None, n, bench.now) for m, n in failed}
    bench.check_change(
        declared=["audit"],
        body="bwl",
        policy=None,
        expiry=None,
        done=done,
        stats={"purged@lisa": 4},
        lisa=G(retry={"l": 6}),
        options={"removing:lisa": bench.now},
    )
    assert undeclare(bench, *"frbtgwx", drop=True, begun=True) == Undeclared(0, False)
    bench.check_unchanged()
    assert undeclare(bench, "l", drop=True) == Undeclared(1, True)
    done["l"] = ("A-", "purged", None, 0, bench.now)
    stats = {"purged@lisa": 5}
    bench.check_change(body="bw", stats=stats, done=done, options=None, lisa=None)


def test_undeclare_without_drop_keeps_the_keys_and_leaves_a_mark(bench: Bench) -> None:
    bench.put(lisa=G())
    assert undeclare(bench) == Undeclared(0, False)
    bench.check_change(declared=[], options={"removing:lisa": bench.now})
    assert undeclare(bench, drop=True) == Undeclared(0, True)
    bench.check()


def test_a_topic_refuses_groups_beyond_its_maximum(bench: Bench) -> None:
    bench.put(options={"max_groups": "2"}, audit=G())
    assert declare(bench) is True
    before = bench.state()
    with pytest.raises(TooManyGroups, match="'mail' is not declared: topic 'orders' has 2 groups"):
        declare(bench, "mail")
    assert bench.state() == before
    assert declare(bench) is False, "those declared stay"
    undeclare(bench, drop=True)
    assert declare(bench, "mail") is True, "there is room again"


def test_a_topic_with_too_many_groups_keeps_them(bench: Bench) -> None:
    bench.put(**{f"g{number:03}": G() for number in range(101)})
    with pytest.raises(TooManyGroups):
        declare(bench, "new")
    bench.store.ask("DEL", bench.keys.group("g007").ready)
    assert declare(bench, "g007", only_mend=True) is False, "it is mended"
    assert bench.store.ask("EXISTS", bench.keys.group("g007").ready) == 1
    assert declare(bench, "g008") is False
    # Lost groups are restored from what they owe, or from an archive.
    bench.store.ask("HDEL", bench.keys.groups, "g009")
    bench.store.ask("ZADD", bench.keys.group("g009").retry, 1, "m")
    assert declare(bench, "g009", only_lost=True) is True
    assert declare(bench, "archived", unlimited=True) is True
    assert bench.call(Declare(f"{TOPIC}~0of2", "lisa")) is True, "a shard follows its topic"


@pytest.mark.parametrize(
    "own", [G(ready=[Row("m", 1, 1, "c1")]), G(retry={"m": 1}), G(garbage={"m": 1})]
)
def test_a_removed_group_that_owes_messages_cannot_be_declared(bench: Bench, own: G) -> None:
    bench.put(body="m", lisa=own, audit=G())
    undeclare(bench)
    before = bench.state()
    with pytest.raises(RemovalUnfinished, match="'lisa'"):
        declare(bench)
    assert bench.state() == before
    undeclare(bench, "m", begun=True)
    assert declare(bench) is True, "it owes nothing any more"
    assert "options" not in bench.state(), "and the mark has gone"


def test_a_group_declared_again_starts_without_failures(bench: Bench) -> None:
    bench.put(waiting={"m": FAR}, body="m", lisa=G(attempts={"m": 1}, reasons={"m": "no"}))
    undeclare(bench)
    assert declare(bench) is True
    bench.check_change(lisa=G())


def test_a_group_undeclared_by_another_program_keeps_its_messages(bench: Bench) -> None:
    bench.put(declared=["audit"], **RETRY, audit=G())
    assert declare(bench) is True
    bench.check(**RETRY, audit=G())


def test_a_removal_stops_when_the_group_is_declared_again(bench: Bench) -> None:
    bench.put(lisa=G())
    undeclare(bench)
    declare(bench)
    bench.put(body="m", waiting={"m": 1})
    bench.call(Promote(TOPIC))
    before = bench.state()
    assert undeclare(bench, "m", drop=True, begun=True) == Undeclared(0, True)
    assert bench.state() == before
    bench.store.ask("HSET", bench.keys.options, "removing:lisa", 1)
    assert undeclare(bench, "m", drop=True, begun=True) == Undeclared(0, True)
    assert bench.state() == before, "the mark of a declared group is deleted"


def test_a_half_removed_group_does_not_deliver_a_replaced_message(bench: Bench) -> None:
    declare(bench)
    declare(bench, "audit")
    bench.send(item("m", "+0", "old"))
    (old,) = bench.call(Pull(TOPIC, "lisa", "c1", 1)).entries
    undeclare(bench)
    bench.send(item("m", FAR, "new", sender="B"), on_duplicate=OnDuplicate.REPLACE)
    with pytest.raises(RemovalUnfinished):
        declare(bench)
    with pytest.raises(GroupRemoved):
        bench.call(Ack(TOPIC, "lisa", [Settlement("m", old.entry, "AAAAAAAA-", 0, 1)]))
    undeclare(bench, "m", drop=True, begun=True)
    declare(bench)
    assert not bench.call(Pull(TOPIC, "lisa", "c1", 1)).entries
    state = bench.state()
    assert (state["waiting"], state["body"]) == ({"m": FAR}, {"m": "Brnew"})


def absorb(
    bench: Bench, number: int = 3, count: int = 8, counters: Mapping[str, int] | None = None
) -> bool:
    merged = bench.keys.history + ":merged"
    counters = counters or {"sent": 4, "acked@lisa": 2}
    return bench.call(Absorb(TOPIC, number, count, counters, {"0of8": 7}, merged))


ABSORBED = {"removed:8": "1", "journaled:0of8": "7"}


def test_a_topic_absorbs_the_counters_of_its_former_shards(bench: Bench) -> None:
    bench.put(options={"layout": "3:4:1:8,2"}, stats={"sent": 3, "promoted": 1})
    assert [absorb(bench) for _ in range(2)] == [True, False]
    stats = {"sent": 7, "promoted": 1, "acked@lisa": 2}
    bench.check(options={"layout": "3:4:1:2", **ABSORBED}, stats=stats)


def test_a_topic_keeps_the_highest_lateness_of_each_group(bench: Bench) -> None:
    """The topic's own or that of its former shards, by value; they are not added up."""
    own = {"late_max@lower": 10_000, "late_max@higher": 9_999, "late_max@kept": 5_000}
    bench.put(options={"layout": "3:4:1:8"}, stats={"late:u@lower": 1, **own})
    absorbed = {"late_max@lower": 9_999, "late_max@higher": 10_000, "late_max@new": 2_000}
    assert absorb(bench, counters={"late:u@lower": 2, **absorbed})
    highest = {**absorbed, **own, "late_max@higher": 10_000}
    stats = {"late:u@lower": 3, **highest}
    bench.check(options={"layout": "3:4:1:", **ABSORBED}, stats=stats)


@pytest.mark.parametrize(("number", "count"), [(2, 8), (4, 8), (3, 4), (3, 1), (3, 16)])
def test_a_count_in_use_or_of_another_layout_is_not_absorbed(
    bench: Bench, number: int, count: int
) -> None:
    bench.put(options={"layout": "3:4:1:8"}, stats={"sent": 3})
    assert not absorb(bench, number, count)
    bench.check_unchanged()


LEFT = {"options": {"accepts": "-3"}}
WAITS = {"waiting": {"m": FAR}, "body": "m"}


def test_all_keys_of_an_empty_shard_are_deleted(bench: Bench) -> None:
    bench.put(**LEFT, stats={"sent": 3}, consumers={"c1": "{}"}, lisa=G())
    assert bench.call(Clear(TOPIC, 3, ("lisa",)))
    bench.check()


IN_USE: dict[str, dict[str, Any]] = {
    "open": {"options": {"accepts": "3"}, "lisa": G()},
    "closed by a later layout": {"options": {"accepts": "-4"}, "lisa": G()},
    "waiting": {**LEFT, **WAITS, "lisa": G()},
    "ready": {**LEFT, "body": "m", "lisa": G(ready=[Row("m", 1)])},
    "retry": {**LEFT, "body": "m", "lisa": G(retry={"m": FAR})},
    "garbage": {**LEFT, "body": "m", "lisa": G(garbage={"m": 1})},
    "new group": {**LEFT, "lisa": G(), "audit": G()},
}


@pytest.mark.parametrize("case", IN_USE)
def test_a_shard_in_use_or_with_messages_is_not_cleared(bench: Bench, case: str) -> None:
    bench.put(**IN_USE[case])
    assert not bench.call(Clear(TOPIC, 3, ("lisa",)))
    bench.check_unchanged()


@pytest.mark.parametrize("accepts", [0, 4])
def test_all_keys_of_an_empty_topic_are_deleted(bench: Bench, accepts: int) -> None:
    options = {"capacity": "9", **({"accepts": str(accepts)} if accepts else {})}
    bench.put(options=options, stats={"sent": 3}, consumers={"c1": "{}"})
    assert bench.call(Clear(TOPIC, accepts, is_whole_topic=True))
    bench.check()


@pytest.mark.parametrize(
    "state",
    [WAITS, {"options": {"accepts": "1"}}, {"lisa": G()}, RETRY],
    ids=["waiting", "another layout", "new group", "retry in a new group"],
)
def test_a_topic_in_use_is_not_cleared(bench: Bench, state: dict[str, Any]) -> None:
    bench.put(**state)
    assert not bench.call(Clear(TOPIC, 0, is_whole_topic=True))
    bench.check_unchanged()
