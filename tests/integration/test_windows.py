"""Local due times and windows with real producers, managers and consumers."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from click.testing import CliRunner

from lisa import InvalidMessage, Manager, Producer
from lisa.admin import groups, topics
from lisa.admin.fsck import check
from lisa.cli.main import main
from lisa.core.model.clock import zone_of
from lisa.core.model.windows import placing as local_times
from lisa.core.transitions.topic import Configure
from lisa.manager.plan import Plan
from lisa.manager.registry import Registry
from lisa.manager.scheduler import Scheduler
from lisa.manager.server_clock import ServerClock
from lisa.manager.zone_data import ZoneData
from tests.producers import Either
from tests.roles import Cast
from tests.servers import wait_until
from tests.shards import ORDERS, Split

pytestmark = pytest.mark.timeout(120)

TOPIC = "orders"
HOUR_MS = 3_600_000
CHRISTMAS_MS = 1_924_300_800_000
"""2030-12-24T00:00Z, 09:00 in Tokyo; a Tuesday."""
TOKYO: dict[str, Any] = {"at_local": "2030-12-24T09:00", "tz": "Asia/Tokyo"}


@pytest.fixture
def cast(redis_url: str) -> Cast:
    return Cast(redis_url).declare()


@pytest.fixture(params=["sync", "async"])
def producer(request: pytest.FixtureRequest, redis_url: str) -> Iterator[Either]:
    either = Either(request.param, redis_url)
    yield either
    either.close()


def waiting(cast: Cast) -> dict[str, int]:
    pairs = cast.store.ask("ZRANGE", cast.keys.waiting, 0, -1, "WITHSCORES")
    return {pairs[i].decode(): int(pairs[i + 1]) for i in range(0, len(pairs), 2)}


def zone_check(cast: Cast, version: str) -> None:
    clock = ServerClock()
    clock.sample(cast.store)
    ZoneData(cast.store, clock, version).step([TOPIC])


@contextmanager
def zone_data(offset: str) -> Iterator[None]:
    """All zones have this offset; that of Tokyo is +09:00."""
    zone = zone_of(offset)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local_times, "zone_of", lambda _: zone)
        yield


def test_a_wall_time_is_due_when_that_clock_shows_it(producer: Either, cast: Cast) -> None:
    producer.send(TOPIC, 1, id="a", **TOKYO)
    producer.send(TOPIC, 1, id="b", **TOKYO, window="mon-fri 10-11")
    assert waiting(cast) == {"a": CHRISTMAS_MS, "b": CHRISTMAS_MS + HOUR_MS}
    listed = cast.store.ask("ZRANGE", cast.keys.local, 0, -1, "WITHSCORES")
    assert listed == [b"a", b"%d" % CHRISTMAS_MS, b"b", b"%d" % (CHRISTMAS_MS + HOUR_MS)]
    assert cast.store.ask("ZSCORE", cast.store.keys.scheduled, TOPIC)
    headers = producer.ask("get", TOPIC, "b").headers
    assert headers == {
        "lisa-window": "mon-fri 10-11; tz=Asia/Tokyo",
        "lisa-local": "2030-12-24T09:00 Asia/Tokyo",
    }
    # A message with these headers, as of a handler, has only a wall time of its own.
    later = {**TOKYO, "at_local": "2030-12-25T09:00"}
    producer.send(TOPIC, 1, id="wall", headers=headers, **later)
    producer.send(TOPIC, 1, id="window", headers=headers, window="always", at_ms=CHRISTMAS_MS + 5)
    sent = waiting(cast)
    zone_check(cast, "2026a")
    assert waiting(cast) == sent
    assert sent["wall"] == CHRISTMAS_MS + 25 * HOUR_MS


def test_messages_move_when_the_time_zone_data_changes(redis_url: str, cast: Cast) -> None:
    """The old data is an hour off. Some messages got their wall time later, or another one."""
    with Producer(redis_url) as producer:
        with zone_data("+08:00"):
            producer.send(TOPIC, 1, id="moves", ttl="1h", **TOKYO)
            producer.send(TOPIC, 1, id="windowed", **TOKYO, window="11-12")
            producer.send(TOPIC, 1, id="cancelled", **TOKYO)
            producer.send(TOPIC, 1, id="plain", delay="1d")
            producer.send(TOPIC, 1, id="other", **{**TOKYO, "at_local": "2030-12-25T09:00"})
            producer.send(TOPIC, 1, id="instant", **TOKYO)
            producer.send(TOPIC, 1, id="former", delay="1d")
            for one in ("plain", "other", "former"):
                producer.reschedule(TOPIC, one, **TOKYO)
        for one in ("instant", "former"):
            producer.reschedule(TOPIC, one, at_ms=CHRISTMAS_MS + 5)
        producer.send(TOPIC, 1, id="never", at_ms=CHRISTMAS_MS + HOUR_MS)
        producer.cancel(TOPIC, "cancelled")
        for one in ("moves", "plain", "other"):
            assert waiting(cast)[one] == CHRISTMAS_MS + HOUR_MS
        zone_check(cast, "2026a")
        moved = {
            **dict.fromkeys(("moves", "plain", "other"), CHRISTMAS_MS),
            "windowed": CHRISTMAS_MS + 2 * HOUR_MS,
            "instant": CHRISTMAS_MS + 5,
            "former": CHRISTMAS_MS + 5,
            "never": CHRISTMAS_MS + HOUR_MS,
        }
        assert waiting(cast) == moved
        assert int(cast.store.ask("ZSCORE", cast.keys.expiry, "moves")) == CHRISTMAS_MS + HOUR_MS
        assert cast.store.ask("HGET", cast.keys.options, "zones") == b"2026a"
        with zone_data("+10:00"):
            zone_check(cast, "2026a")
            assert waiting(cast) == moved, "the same version changes nothing"
            zone_check(cast, "2026b")
        earlier = dict.fromkeys(("moves", "plain", "other"), CHRISTMAS_MS - HOUR_MS)
        assert waiting(cast) == {**moved, **earlier}
        assert not list(cast.store.drive(check(cast.store, [TOPIC])).findings)
        assert set(producer.cancel_many(TOPIC, [*moved])) == {"cancelled"}
    cast.store.drive(groups.delete(cast.store, TOPIC))
    assert not cast.store.ask("EXISTS", cast.keys.local)


def test_a_rescheduled_message_is_due_in_its_window(producer: Either, cast: Cast) -> None:
    for one, window in (("own", "10-11"), ("always", "always"), ("none", None)):
        producer.send(TOPIC, 1, id=one, delay="1d", window=window, tz="Asia/Tokyo", ttl="1h")
    for one in ("own", "always", "none"):
        assert producer.ask("reschedule", TOPIC, one, at_ms=CHRISTMAS_MS) == "rescheduled"
    assert waiting(cast) == {
        "own": CHRISTMAS_MS + HOUR_MS,
        "always": CHRISTMAS_MS,
        "none": CHRISTMAS_MS,
    }
    assert int(cast.store.ask("ZSCORE", cast.keys.expiry, "own")) == CHRISTMAS_MS + 2 * HOUR_MS
    cast.store.call(Configure(TOPIC, {"window": "14-15"}))
    for one in ("own", "always", "none"):
        assert producer.ask("reschedule", TOPIC, one, at_ms=CHRISTMAS_MS + 5) == "rescheduled"
    assert waiting(cast) == {
        "own": CHRISTMAS_MS + HOUR_MS,
        "always": CHRISTMAS_MS + 5,
        "none": CHRISTMAS_MS + 14 * HOUR_MS,
    }
    assert producer.ask("reschedule", TOPIC, "unknown", at_ms=CHRISTMAS_MS) == "unknown"
    cast.store.call(Configure(TOPIC, {"window": "not 2020-01-01..2099-12-31"}))
    with pytest.raises(InvalidMessage, match="does not open within 400 days"):
        producer.ask("reschedule", TOPIC, "none", delay="1h")


def test_a_message_is_rescheduled_to_a_wall_time(producer: Either, cast: Cast) -> None:
    producer.send(TOPIC, 1, id="a", delay="1d")
    producer.send(TOPIC, 1, id="b", delay="1d", window="mon,wed-fri 10-11", tz="Asia/Tokyo")
    assert producer.ask("reschedule", TOPIC, "a", **TOKYO) == "rescheduled"
    assert producer.ask("reschedule", TOPIC, "b", at_local="2030-12-24T09:00") == "rescheduled"
    assert waiting(cast) == {"a": CHRISTMAS_MS, "b": CHRISTMAS_MS + 25 * HOUR_MS}
    # Business days are those of the message's window, counted from today.
    assert (
        producer.ask("reschedule", TOPIC, "b", at_local="10:30", business_days=1) == "rescheduled"
    )
    due = datetime.fromtimestamp(waiting(cast)["b"] / 1000, ZoneInfo("Asia/Tokyo"))
    assert (due.hour, due.minute) == (10, 30)
    assert due.weekday() in {0, 2, 3, 4}
    assert timedelta(0) < due - datetime.now(UTC) < timedelta(days=4)
    overlap = {"at_local": "2030-10-27T01:30", "tz": "Europe/London"}
    producer.ask("reschedule", TOPIC, "a", **overlap)
    first = waiting(cast)["a"]
    producer.ask("reschedule", TOPIC, "a", **overlap, fold=1)
    assert waiting(cast)["a"] == first + HOUR_MS
    refused: list[tuple[dict[str, Any], str]] = [
        ({}, "needs delay, at, at_ms or at_local"),
        ({**TOKYO, "delay": "1h"}, "give one of"),
        ({"delay": "1h", "business_days": 1}, "need at_local"),
    ]
    for options, match in refused:
        with pytest.raises(InvalidMessage, match=match):
            producer.ask("reschedule", TOPIC, "a", **options)
    assert waiting(cast)["a"] == first + HOUR_MS
    listed = cast.store.ask("ZCARD", cast.keys.local)
    assert producer.ask("reschedule", TOPIC, "unknown", **TOKYO) == "unknown"
    assert cast.store.ask("ZCARD", cast.keys.local) == listed


def test_topics_are_listed_while_they_have_wall_times_to_come(redis_url: str, cast: Cast) -> None:
    with Producer(redis_url) as producer:
        producer.send(TOPIC, 1, **TOKYO)
        producer.send("past", 1, at_local="2025-01-01T09:00", tz="UTC")
        producer.schedule("s", topic="other", body=1, every="1h")
        producer.remove_schedule("other", "s")
    past, scheduled = cast.store.keys.topic("past").local, cast.store.keys.scheduled
    assert cast.store.ask("ZCARD", past) == 1
    with Manager(redis_url):
        wait_until(lambda: cast.store.ask("ZRANGE", scheduled, 0, -1) == [TOPIC.encode()])
        assert not cast.store.ask("EXISTS", past)
        wait_until(lambda: cast.store.ask("HGET", cast.keys.options, "zones") is not None)
    Scheduler(cast.store, ServerClock()).step([TOPIC])
    assert cast.store.ask("ZRANGE", scheduled, 0, -1) == [TOPIC.encode()]
    cast.store.ask("DEL", scheduled)
    Registry(cast.store, Plan(), lambda _: None).search()
    assert cast.store.ask("ZSCORE", scheduled, TOPIC) is not None


def test_past_wall_times_of_many_topics_leave_the_lists_as_fast_as_they_come(cast: Cast) -> None:
    """A manager makes a step each second; one broken list does not stop the others."""
    clock, store = ServerClock(), cast.store
    clock.sample(store)
    ids = {f"t{number:03}": 10 for number in range(100)} | {"busy": 2_000}
    lists = {topic: store.keys.topic(topic).local for topic in ids}
    store.ask("SET", store.keys.topic("broken").local, "x")
    zone_data = ZoneData(store, clock, "")
    for _ in range(2):
        for topic, count in ids.items():
            past = [x for number in range(count) for x in (1, f"id-{number}")]
            store.ask("ZADD", lists[topic], cast.now_ms() + HOUR_MS, "future", *past)
        assert zone_data.step(sorted([*ids, "broken"])) == []
        assert {store.ask("ZCARD", key) for key in lists.values()} == {1}
    for key in lists.values():
        store.ask("ZADD", key, 1, "future")
    assert zone_data.step(sorted(ids)) == sorted(ids)


def test_a_topics_window_moves_due_times_at_the_send(producer: Either, cast: Cast) -> None:
    cast.store.call(Configure(TOPIC, {"window": "12-13; tz=@zone|UTC"}))
    producer.send(TOPIC, 1, id="berlin", at_ms=CHRISTMAS_MS, headers={"zone": "Europe/Berlin"})
    producer.send(TOPIC, 1, id="utc", at_ms=CHRISTMAS_MS)
    producer.send(TOPIC, 1, id="own", at_ms=CHRISTMAS_MS, window="always")
    assert waiting(cast) == {
        "berlin": CHRISTMAS_MS + 11 * HOUR_MS,
        "utc": CHRISTMAS_MS + 12 * HOUR_MS,
        "own": CHRISTMAS_MS,
    }
    # A zone that cannot be read is refused, unless the window has another.
    producer.send(TOPIC, 1, id="cest", at_ms=CHRISTMAS_MS, headers={"zone": "CEST"})
    assert waiting(cast)["cest"] == CHRISTMAS_MS + 12 * HOUR_MS
    cast.store.call(Configure(TOPIC, {"window": "12-13; tz=@zone"}))
    for headers in ({"zone": "CEST"}, {}):
        with pytest.raises(InvalidMessage, match="'zone'"):
            producer.send(TOPIC, 1, id="refused", at_ms=CHRISTMAS_MS, headers=headers)
    assert "refused" not in waiting(cast)
    # Producers notice that the option changed, and was removed.
    cast.store.call(Configure(TOPIC, {"window": "14-15"}))
    producer.send(TOPIC, 1, id="changed", at_ms=CHRISTMAS_MS)
    assert waiting(cast)["changed"] == CHRISTMAS_MS + 14 * HOUR_MS
    cast.store.call(Configure(TOPIC, {"window": ""}))
    producer.send(TOPIC, 1, id="removed", at_ms=CHRISTMAS_MS)
    assert waiting(cast)["removed"] == CHRISTMAS_MS


def test_a_window_applies_to_every_shard(split: Split) -> None:
    split.into(3)
    split.store.drive(topics.set_options(split.store, TOPIC, {"window": "12-13"}))
    with Producer(split.url) as producer:
        assert producer.send_many(TOPIC, range(40), at_ms=CHRISTMAS_MS).accepted == 40
    dues = [
        due
        for shard in split.layout.active(ORDERS)
        for due in split.store.ask("ZRANGE", split.keys(shard).waiting, 0, -1, "WITHSCORES")[1::2]
    ]
    assert dues == [b"%d" % (CHRISTMAS_MS + 12 * HOUR_MS)] * 40


def test_lisa_next_explains_a_due_time(redis_url: str, cast: Cast) -> None:
    cast.configure(window="mon-fri 9-17; tz=Europe/Berlin")
    run = partial(CliRunner().invoke, main, catch_exceptions=False)
    at = ["--at", "2030-12-21T10:00+00:00"]
    found = run(["next", TOPIC, *at, "--redis", redis_url])
    assert found.output.splitlines()[-1] == "due: 2030-12-23T08:00:00.000Z"
    sent = run(["send", TOPIC, "x", "--at-local", "2030-12-21T09:00", "--tz", "Asia/Tokyo",
                "--window", "not sat", "--redis", redis_url])  # fmt: skip
    found = run(["next", TOPIC, "--id", sent.output.strip(), "--json", "--redis", redis_url])
    told = json.loads(found.output)
    assert told["due_ms"] == waiting(cast)[sent.output.strip()]
    assert told["steps"][-1] == "opens at Sun 2030-12-22 00:00 Asia/Tokyo: 2030-12-21T15:00:00Z"
    unknown = run(["next", TOPIC, "--id", "unsent", "--redis", redis_url])
    assert unknown.exit_code == 1
    assert unknown.stderr.endswith("message unsent is unknown, settled or in garbage\n")
    without_server = run(["next", "--delay", "1h", "--json"])
    assert json.loads(without_server.output)["steps"][-1] == "no window applies"
    wrong = CliRunner().invoke(main, ["next", "--window", "whenever"])
    assert wrong.exit_code != 0
