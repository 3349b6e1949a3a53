"""Messages with a key: sends, and calls for all messages of a key, on real servers."""

from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

import lisa
from lisa import (
    DuplicateMessage,
    InvalidMessage,
    Middleware,
    NotReplicated,
    Outgoing,
    Producer,
    SendCall,
    ServerUnavailable,
    replicas,
)
from lisa.core.model.clock import ms_datetime
from lisa.core.model.keys import keyed_id
from lisa.core.redis import flow as steps
from lisa.core.redis.flow import Flow
from lisa.core.store.keyed import MOST_READS, KeyFlows
from lisa.core.transitions.base import ById
from lisa.core.transitions.change import Cancel, Reschedule
from lisa.core.transitions.promote import Promote
from lisa.core.transitions.retry import Fail, Failure
from tests.producers import Either
from tests.proxies import LossyProxy
from tests.roles import Cast
from tests.shards import Split

HOUR = timedelta(hours=1)
HOUR_MS = 3_600_000
NOON = datetime(2040, 1, 2, 12, tzinfo=UTC)
"""A Monday."""

KEYS = ("k", "*", "{a}", "a b", "%s\\1", "-", "x" * 256, "ü" * 128, "k:~1", "用户 7")


@pytest.fixture(params=["sync", "async"])
def either(request: pytest.FixtureRequest, redis_url: str) -> Iterator[Either]:
    made = Either(request.param, redis_url, zone="Europe/Berlin")
    yield made
    made.close()


@pytest.fixture
def cast(redis_url: str) -> Cast:
    return Cast(redis_url).declare()


def ids_of(key: str, own_ids: Iterable[str]) -> list[str]:
    return [keyed_id(key, own_id) for own_id in own_ids]


def outcomes(changed: Iterable[Any]) -> dict[str, str]:
    return {each.id: str(each.outcome) for each in changed}


def test_every_way_to_send_takes_a_key(either: Either) -> None:
    assert either.send("orders", 1, key="k", id="own", delay=HOUR) == keyed_id("k", "own")
    made = either.send("orders", 1, key="k", delay=HOUR)
    assert len(made) == len("k\x1f") + 16
    again = either.ask("send_one", "orders", 2, key="k", id="own")
    assert (again.id, again.outcome) == (keyed_id("k", "own"), "duplicate")
    with pytest.raises(DuplicateMessage, match="'k / own'"):
        either.send("orders", 1, key="k", id="own", on_duplicate="reject")
    bodies = [1, Outgoing(2, id="own"), Outgoing(3, key="other", id="own"), Outgoing(4, key="k")]
    report = list(either.send_many("orders", bodies, key="k", delay=HOUR))
    assert [each.outcome for each in report] == ["accepted", "duplicate", "accepted", "accepted"]
    assert [each.id.partition("\x1f")[0] for each in report] == ["k", "k", "other", "k"]
    mixed = list(either.send_many("orders", [1, Outgoing(2, key="k")], delay=HOUR))
    assert [len(each.id) for each in mixed] == [22, 18]
    assert len({each.id for each in [*report, *mixed]}) == 6
    streamed = either.stream("orders", [Outgoing(n, key="s", delay=HOUR) for n in range(3)], 3)
    assert either.ask("count_key", "orders", "s") == len({each.id for each in streamed}) == 3
    found = either.ask("get", "orders", keyed_id("other", "own"))
    assert (found.body, found.key, either.ask("get", "orders", "own")) == (3, "other", None)


def test_generated_ids_of_a_key_differ_and_sort_by_time(either: Either) -> None:
    report = either.send_many("orders", range(600), key="k", delay=HOUR)
    ids = [each.id for each in report]
    assert (report.accepted, len(set(ids)), sorted(ids)) == (600, 600, ids)


def test_illegal_keys_and_ids_are_refused(either: Either) -> None:
    for key in ("", "x" * 257, "a\x1fb", "\n", 7):
        with pytest.raises(InvalidMessage, match="key"):
            either.send("orders", 1, key=key)
        for call in ("list_key", "count_key", "cancel_key", "fire_key"):
            with pytest.raises(InvalidMessage, match="key"):
                either.ask(call, "orders", key)
    for options in ({"key": "k"}, {}):
        with pytest.raises(InvalidMessage, match="control characters"):
            either.send("orders", 1, id="a\x1fb", **options)
    for given in ({}, {"delay": HOUR, "shift": HOUR}, {"at": NOON, "delay": HOUR}):
        with pytest.raises(InvalidMessage, match="one of"):
            either.ask("reschedule_key", "orders", "k", **given)
    with pytest.raises(InvalidMessage, match="shift: 5 has no unit"):
        either.ask("reschedule_key", "orders", "k", shift="-5")


@pytest.mark.parametrize("key", KEYS)
def test_calls_for_all_messages_of_any_key(either: Either, key: str) -> None:
    other = either.send("orders", 0, key=key[:-1] + "z", delay=HOUR)
    either.send("orders", 0, id="plain", delay=HOUR)
    ids = [either.send("orders", n, key=key, id=str(n), at=NOON + n * HOUR) for n in range(3)]
    assert ids == ids_of(key, "012")
    listed = either.ask("list_key", "orders", key)
    assert [(each.id, each.body, each.due, each.state) for each in listed] == [
        (ids[n], n, NOON + n * HOUR, "waiting") for n in range(3)
    ]
    moved = dict.fromkeys(ids, "rescheduled")
    for shift, total in (("90m", 90), ("-30m", 60), (HOUR, 120), ("+0ms", 120), (-HOUR, 60)):
        assert outcomes(either.ask("reschedule_key", "orders", key, shift=shift)) == moved
        dues = [each.due for each in either.ask("list_key", "orders", key)]
        assert dues == [NOON + n * HOUR + timedelta(minutes=total) for n in range(3)]
    assert outcomes(either.ask("reschedule_key", "orders", key, at=NOON)) == moved
    assert {each.due for each in either.ask("list_key", "orders", key)} == {NOON}
    assert outcomes(either.ask("fire_key", "orders", key)) == moved
    assert either.ask("count_key", "orders", key) == 3
    assert outcomes(either.ask("cancel_key", "orders", key)) == dict.fromkeys(ids, "cancelled")
    assert either.ask("cancel_key", "orders", key) == either.ask("list_key", "orders", key) == []
    assert either.ask("count_key", "orders", key) == 0
    assert {either.ask("get", "orders", each).state for each in (other, "plain")} == {"waiting"}


def test_each_message_has_its_own_outcome(either: Either, cast: Cast) -> None:
    waiting, flying, dead, ready = ids_of("k", "wfdr")
    for own_id in "fd":
        either.send("orders", own_id, key="k", id=own_id, retry=[])
    entries = {entry.id: entry for entry in cast.take(2)}
    failure = Failure(dead, entries[dead].entry, "no", 0)
    cast.store.call(Fail("orders", cast.group, [failure]))
    either.send("orders", 1, key="k", id="r")
    either.send("orders", 1, key="k", id="w", at=NOON)
    states = {waiting: "waiting", flying: "in_flight", dead: "garbage", ready: "ready"}
    assert {each.id: each.state for each in either.ask("list_key", "orders", "k")} == states
    shifted = outcomes(either.ask("reschedule_key", "orders", "k", shift=HOUR))
    assert shifted == {**states, waiting: "rescheduled"}
    moved = outcomes(either.ask("reschedule_key", "orders", "k", delay=HOUR))
    kept = {flying: "in_flight", dead: "done"}
    assert moved == {waiting: "rescheduled", ready: "rescheduled", **kept}
    cancelled = outcomes(either.ask("cancel_key", "orders", "k"))
    assert cancelled == dict.fromkeys((waiting, ready, dead), "cancelled") | {flying: "in_flight"}
    assert either.ask("count_key", "orders", "k") == 1


def test_due_times_by_key_obey_windows(either: Either, cast: Cast) -> None:
    either.send("orders", 1, key="k", id="own", at=NOON, window="mon 9-17; tz=UTC")
    either.send("orders", 1, key="k", id="none", at=NOON)

    def dues() -> list[datetime | None]:
        listed = either.ask("list_key", "orders", "k")
        return [each.due for each in sorted(listed, key=lambda each: each.id)]

    monday, tuesday = NOON.replace(hour=9), NOON.replace(day=3, hour=9)
    assert {each.outcome for each in either.ask("reschedule_key", "orders", "k", shift="6h")} == {
        "rescheduled"
    }
    assert dues() == [NOON + 6 * HOUR, monday + timedelta(days=7)]
    cast.configure(window="tue 9-17; tz=UTC")
    either.ask("reschedule_key", "orders", "k", at=NOON)
    assert dues() == [tuesday, NOON]
    either.ask("reschedule_key", "orders", "k", shift="-1d")
    assert dues() == [tuesday, monday]


def test_a_list_without_its_message_answers_unknown(either: Either, cast: Cast) -> None:
    a, b = (either.send("orders", 1, key="k", id=own_id, delay=HOUR) for own_id in "ab")
    cast.ask("DEL", cast.keys.body(a))
    assert [each.id for each in either.ask("list_key", "orders", "k")] == [b]
    changed = outcomes(either.ask("reschedule_key", "orders", "k", delay=HOUR))
    assert changed == {a: "unknown", b: "rescheduled"}
    assert outcomes(either.ask("cancel_key", "orders", "k")) == {a: "unknown", b: "cancelled"}


def test_the_cost_does_not_depend_on_other_messages(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[object] = []
    run = steps.Execute.run

    def counted(self: steps.Execute, link: Any) -> Any:
        sent.append(self.command)
        return run(self, link)

    with Producer(redis_url) as producer:
        producer.send_many("orders", range(2_000), delay=HOUR)
        producer.send_many("orders", range(100), key="k", delay=HOUR)
        monkeypatch.setattr(steps.Execute, "run", counted)
        assert len(producer.cancel_key("orders", "k")) == 100
        parts = 2
        assert len(sent) <= 2 + 2 * parts, sent
        assert not [command for command in sent if "SCAN" in str(command)]


def before_writes(producer: Producer, act: Callable[[int], object]) -> KeyFlows:
    """The flows of key `k`, with an action of another program before each write, by its number."""
    count = 0

    def write(call: ById[Any]) -> Flow[list[Any]]:
        nonlocal count
        act(count)
        count += 1
        return (yield from producer._store.run(call))

    return KeyFlows(producer._store, "orders", "k", write)


def test_a_message_sent_meanwhile_is_among_the_cancelled(producer: Producer) -> None:
    def act(count: int) -> None:
        if count == 0:
            producer.send("orders", 1, key="k", id="late", delay=HOUR)
            producer.cancel("orders", keyed_id("k", "0"))

    producer.send_many("orders", [Outgoing(n, id=str(n)) for n in range(3)], key="k", delay=HOUR)
    done = producer._drive(before_writes(producer, act).cancel())
    expected = dict.fromkeys(ids_of("k", ["0", "1", "2", "late"]), "cancelled")
    assert outcomes(done) == expected, "also of the one that the other program cancelled"
    assert producer.count_key("orders", "k") == 0


def test_a_list_that_never_rests_is_handled_as_it_was_read(producer: Producer) -> None:
    def act(count: int) -> None:
        producer.send("orders", 1, key="k", id=f"late-{count}", delay=HOUR)

    first = producer.send("orders", 1, key="k", delay=HOUR)
    done = producer._drive(before_writes(producer, act).cancel())
    assert outcomes(done)[first] == "cancelled"
    assert len(done) == 1 + MOST_READS
    left = [each.id for each in producer.list_key("orders", "k")]
    assert left == ids_of("k", [f"late-{MOST_READS}"])


def test_a_shift_moves_each_message_once(producer: Producer, cast: Cast) -> None:
    """Another program reschedules one message, and delivers another, after the shift read them.

    Then the topic gets a window, in which the one is rescheduled.
    """
    moved, gone, still = (producer.send("orders", 1, key="k", id=i, at=NOON) for i in "mgs")

    def act(count: int) -> None:
        if count == 0:
            producer.reschedule("orders", moved, at=NOON + 5 * HOUR)
            producer.fire_now("orders", gone)
            cast.store.call(Promote("orders"))
        else:
            cast.configure(window="9-17; tz=UTC")

    done = producer._drive(before_writes(producer, act).shift(HOUR_MS))
    assert outcomes(done) == {moved: "rescheduled", gone: "ready", still: "rescheduled"}
    dues = {each.id: each.due for each in producer.list_key("orders", "k")}
    tomorrow = NOON.replace(day=3, hour=9)
    assert (dues[moved], dues[still]) == (tomorrow, NOON + HOUR)


def test_a_call_that_fails_tells_what_was_done_and_continues(producer: Producer) -> None:
    def act(count: int) -> None:
        if count == 2:
            raise ServerUnavailable("gone")

    sent = {each.id for each in producer.send_many("orders", range(500), key="k", delay=HOUR)}
    with pytest.raises(ServerUnavailable) as error:
        producer._drive(before_writes(producer, act).cancel())
    before = outcomes(error.value.outcomes)
    assert set(before.values()) == {"cancelled"}
    assert 0 < len(before) < 500
    rest = outcomes(producer.cancel_key("orders", "k"))
    assert before.keys() | rest.keys() == sent
    assert not before.keys() & rest.keys()


def test_a_lost_reply_changes_no_outcome(redis_url: str) -> None:
    with LossyProxy(redis_url) as proxy, Producer(proxy.url) as producer:
        ids = [producer.send("orders", 1, key="k", at=NOON) for _ in range(3)]
        for n in (1, 2):
            proxy.lose(2)
            done = outcomes(producer.reschedule_key("orders", "k", shift=HOUR))
            assert done == dict.fromkeys(ids, "rescheduled")
            listed = producer.list_key("orders", "k")
            assert {each.due for each in listed} == {NOON + n * HOUR}, "none is shifted twice"
        proxy.lose(2)
        done = outcomes(producer.cancel_key("orders", "k"))
        assert done == dict.fromkeys(ids, "cancelled")
        assert proxy.lost >= 6


def test_unconfirmed_changes_name_their_messages(redis_url: str) -> None:
    with Producer(redis_url) as producer:
        ids = {producer.send("orders", 1, key="k", at=NOON) for _ in range(3)}
    with Producer(redis_url, durability=replicas(1), patience="200ms") as producer:
        for change in (producer.fire_key, producer.cancel_key):
            with pytest.raises(NotReplicated) as error:
                change("orders", "k")
            assert {*error.value.ids} == ids
            assert not error.value.outcomes
        assert producer.cancel_key("orders", "k") == [], "they were written nevertheless"


def test_middleware_sees_and_changes_keys(redis_url: str) -> None:
    class ByTenant(Middleware):
        def send(self, call: SendCall, call_next: Callable[[SendCall], Any]) -> Any:
            call.options["key"] = f"tenant-{call.options.get('key')}"
            return call_next(call)

    with Producer(redis_url, middleware=[ByTenant()]) as producer:
        assert producer.send("orders", 1, key="7", id="a") == keyed_id("tenant-7", "a")
        report = producer.send_many("orders", [1, Outgoing(2, key="own")], key="7")
        assert [each.id.partition("\x1f")[0] for each in report] == ["tenant-7", "own"]


def test_messages_of_a_key_are_found_in_all_layouts(split: Split) -> None:
    with Producer(split.url) as producer, Producer(split.url) as other:
        other.send("orders", 1, key="other", delay=HOUR)
        ids = []
        for shards in (1, 4, 8):
            if shards > 1:
                split.into(shards)
            ids += [producer.send("orders", 1, key="k", at=NOON) for _ in range(3)]
            assert other.count_key("orders", "k") == len(ids)
        holding = [shard for shard, held in split.waiting().items() if held & {*ids}]
        assert len(holding) == 3, "one shard of each layout has messages of the key"
        assert {each.id for each in other.list_key("orders", "k")} == {*ids}
        moved = outcomes(other.reschedule_key("orders", "k", shift="1h"))
        assert moved == dict.fromkeys(ids, "rescheduled")
        assert {each.due for each in other.list_key("orders", "k")} == {NOON + HOUR}
        assert outcomes(other.cancel_key("orders", "k")) == dict.fromkeys(ids, "cancelled")
        assert producer.count_key("orders", "other") == 1


def test_module_functions(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LISA_REDIS_URL", redis_url)
    try:
        sent = lisa.send("orders", 1, key="k", at=NOON)
        assert outcomes(lisa.reschedule_key("orders", "k", at=NOON + HOUR)) == {sent: "rescheduled"}
        assert [each.due for each in lisa.list_key("orders", "k")] == [NOON + HOUR]
        assert outcomes(lisa.fire_key("orders", "k")) == {sent: "rescheduled"}
        assert lisa.count_key("orders", "k") == 1
        assert lisa.cancel_key("orders", "k") == [lisa.KeyOutcome(sent, lisa.Cancelled.CANCELLED)]
    finally:
        lisa.close()


def test_a_send_without_a_key_is_as_before(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither script nor arguments have anything of keys."""
    commands: list[Any] = []
    run = steps.Execute.run

    def kept(self: steps.Execute, link: Any) -> Any:
        commands.append(self.command)
        return run(self, link)

    with Producer(redis_url) as producer:
        producer.send("orders", 1, delay=HOUR)
        monkeypatch.setattr(steps.Execute, "run", kept)
        sent = producer.send("orders", 1, delay=HOUR)
        producer.cancel("orders", sent)
        assert len(sent) == 22
        assert len(commands) == 2
        assert "\x1f" not in repr(commands)
        assert not Cancel("orders", [sent]).features
        assert not Reschedule("orders", [(sent, "1")]).features
        cast = Cast(redis_url)
        assert cast.ask("EXISTS", cast.keys.keyed) == 0


# Schedules ----------------------------------------------------------------------------------------


def pending(producer: Either, key: str) -> list[tuple[str, datetime]]:
    return [(each.id, each.due) for each in producer.ask("list_key", "orders", key)]


def test_occurrences_have_the_key_of_their_schedule(either: Either) -> None:
    def put(**options: Any) -> object:
        return either.ask("schedule", "daily", topic="orders", body=1, cron="0 9 * * *", **options)

    assert put(key="k")
    assert not put(key="k")
    info = either.ask("get_schedule", "orders", "daily")
    assert info.definition.key == "k"
    tick = keyed_id("k", f"daily@{info.next_ms}")
    assert pending(either, "k") == [(tick, ms_datetime(info.next_ms))]
    assert put(key="other")
    assert pending(either, "k") == []
    assert [each for each, _ in pending(either, "other")] == [
        keyed_id("other", f"daily@{info.next_ms}")
    ]
    made = either.ask("run_schedule", "orders", "daily")
    assert made.startswith("other\x1fdaily@")
    assert either.ask("get", "orders", made).headers["lisa-schedule"] == "daily"
    assert put()
    assert [each for each, _ in pending(either, "other")] == [made]
    assert either.ask("get", "orders", f"daily@{info.next_ms}").state == "waiting"
    assert either.ask("remove_schedule", "orders", "daily")
    assert either.ask("get", "orders", f"daily@{info.next_ms}") is None
    with pytest.raises(InvalidMessage, match="key"):
        put(key="")
