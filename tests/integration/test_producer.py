"""Both producers on a real server: one suite, because both run the same flows.

A number such as `l17` names a defect of the original's producer, by its number in the review; the
test would fail on the original's behaviour.
"""

import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import redis
import time_machine

import lisa
from lisa.core.model.clock import OLDEST_DUE_MS, ms_datetime
from lisa.core.model.envelope import encode_envelope, new_token
from lisa.core.model.errors import DuplicateMessage, InvalidMessage, TopicFull
from lisa.core.transitions.garbage import Purge
from lisa.core.transitions.retry import Fail, Failure
from lisa.core.transitions.topic import Configure
from lisa.producer import AsyncProducer, Outgoing, Producer, Sent
from tests.producers import Either, Topic
from tests.rows import Item, enqueue
from tests.servers import Processes

HOUR = timedelta(hours=1)
HOUR_MS = 3_600_000
FAR_MS = 10**13


@pytest.fixture(params=["sync", "async"])
def either(request: pytest.FixtureRequest, redis_url: str) -> Iterator[Either]:
    made = Either(request.param, redis_url, zone="Asia/Shanghai")
    yield made
    made.close()


def test_l1_every_way_to_say_when_is_exact_and_never_early(either: Either, topic: Topic) -> None:
    """The original's utility dropped `expectAt`, and needed a configuration of the topic."""
    noon, noon_ms = datetime(2040, 1, 1, 12, tzinfo=UTC), 2_209_032_000_000
    naive = noon.replace(tzinfo=None)
    ways: tuple[tuple[dict[str, Any], int], ...] = (
        ({"at": noon}, noon_ms),
        ({"at": noon + timedelta(microseconds=1)}, noon_ms + 1),
        ({"at": naive}, noon_ms - 8 * HOUR_MS),
        ({"at": naive, "tz": "UTC"}, noon_ms),
        ({"at_ms": noon_ms}, noon_ms),
        ({"at_ms": OLDEST_DUE_MS}, OLDEST_DUE_MS),
    )
    expected = {either.send("orders", 1, **options): due_ms for options, due_ms in ways}
    either.send_many("orders", [Outgoing(1, id="many")], at=noon)
    either.send_many("orders", [Outgoing(1, id="own", at_ms=noon_ms)])
    assert topic.waiting() == expected | {"many": noon_ms, "own": noon_ms}
    before = topic.now_ms()
    either.send("orders", 1, id="delay", delay=HOUR)
    assert before + HOUR_MS <= topic.waiting()["delay"] <= topic.now_ms() + HOUR_MS + 1
    fresh = either.send("never.seen:before-1", 1)
    assert either.get("never.seen:before-1", fresh).state == "waiting"


def test_l2_due_times_are_compared_as_numbers(producer: Producer, topic: Topic) -> None:
    """As text, 999 is later than 1795..., and fourteen digits may be earlier than now."""
    topic.declare("lisa")
    token = new_token()
    for due_ms in (0, 9, 999, 1_700_000_000, 999_999_999_999):
        row = Item(f"m{due_ms}", str(due_ms), encode_envelope(token, 1))
        topic.store.call(enqueue("orders", token, [row]))
        assert [(one.id, one.due_ms) for one in topic.take("lisa")] == [(row.id, due_ms)]
    ahead = {producer.send("orders", 1, at_ms=ms): ms for ms in (FAR_MS, 253_402_300_799_999)}
    assert topic.waiting() == ahead
    assert topic.take("lisa") == []
    assert topic.promote() == 0


def test_l16_due_messages_and_no_others_go_straight_to_the_groups(
    either: Either, topic: Topic
) -> None:
    """The original put an init message into every queue at each start."""
    topic.declare("g1", "g2")
    later = either.send("orders", "later", delay=HOUR)
    ids = [either.send("orders", n) for n in range(3)]
    ids.append(either.send("orders", 3, at_ms=OLDEST_DUE_MS))
    for group in ("g1", "g2"):
        assert [entry.id for entry in topic.take(group)] == ids
    assert topic.waiting().keys() == {later}


def test_l17_the_producers_clock_decides_nothing(producer: Producer, topic: Topic) -> None:
    """The original used the clock of the sending machine."""
    topic.declare("lisa")
    for days in (-1, 1):
        now_ms = topic.now_ms()
        with time_machine.travel(datetime.now(UTC) + timedelta(days), tick=True):
            delayed = producer.send("orders", 1, delay=HOUR)
            ahead = producer.send("orders", 1, at_ms=now_ms + HOUR_MS)
            past = producer.send("orders", 1, at_ms=now_ms - 1)
        waiting = topic.waiting()
        assert waiting.keys() >= {delayed, ahead}
        assert now_ms + HOUR_MS <= waiting[delayed] <= topic.now_ms() + HOUR_MS + 1
        assert waiting[ahead] == now_ms + HOUR_MS
        assert [entry.id for entry in topic.take("lisa")] == [past]


def test_l18_every_key_of_a_call_is_declared_and_in_one_slot(
    producer: Producer, topic: Topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The original's keys had no hash tag, and the body's key was an argument: CROSSSLOT."""
    topic.declare("g1", "g2")
    earlier = set(topic.store.ask("KEYS", "lisa:{orders}:reply:*"))
    execute = Mock(wraps=producer._store.connection.execute)
    monkeypatch.setattr(producer._store.connection, "execute", execute)
    producer.send("orders", 1, id="a", delay=HOUR, ttl=HOUR, retry="1s")
    producer.send_many("orders", [Outgoing(n, id=f"n{n}") for n in range(3)])
    producer.get("orders", "a")
    producer.reschedule("orders", "a", delay=2 * HOUR)
    producer.fire_now("orders", "a")
    producer.send("orders", 1, id="b", delay=HOUR)
    producer.cancel_many("orders", ["a", "b", "n0"])
    declared: set[object] = set()
    commands = [call.args[0] for call in execute.call_args_list]
    scripts = [command for command in commands if command[0] == "EVALSHA"]
    assert len(scripts) >= 7
    for command in scripts:
        count = int(command[2])
        keys, arguments = command[3 : 3 + count], command[3 + count :]
        assert all(str(key).startswith("lisa:{orders}:") for key in keys)
        assert not any(str(argument).startswith("lisa:{orders}") for argument in arguments)
        declared.update(keys)
    found = set(topic.store.ask("KEYS", "lisa:{orders}:*")) - earlier
    written = {key.decode() for key in found}
    assert written <= declared
    bodies = {"lisa:{orders}:body:n1", "lisa:{orders}:body:n2"}
    assert {key for key in written if ":body:" in key} == bodies


def test_l22_a_message_can_be_found_moved_and_cancelled(either: Either, topic: Topic) -> None:
    """In the original, sending returned no id; there was no cancel, query, dedupe, ttl or batch."""
    options: dict[str, Any] = {"ttl": timedelta(seconds=5), "retry": "0,2m"}
    sent = either.send("orders", {"n": 1}, at_ms=FAR_MS, headers={"a": "b"}, **options)
    assert topic.waiting() == {sent: FAR_MS}
    ends = topic.store.ask("ZRANGE", topic.keys.expiry, 0, -1, "WITHSCORES")
    assert ends == [sent.encode(), b"%d" % (FAR_MS + 5_000)]
    assert topic.store.ask("HGET", topic.keys.policy, sent) == b"0,120000"
    seen = either.get("orders", sent)
    assert (seen.id, seen.topic, seen.state, seen.body) == (sent, "orders", "waiting", {"n": 1})
    assert (seen.headers, seen.attempts, seen.groups) == ({"a": "b"}, 0, {})
    assert (seen.due_ms, seen.due) == (FAR_MS, ms_datetime(FAR_MS))
    either.send_many("orders", [Outgoing(1, id="own", retry=[], at_ms=FAR_MS)], retry="1s")
    assert topic.store.ask("HGET", topic.keys.policy, "own") == b""
    assert either.reschedule("orders", sent, at_ms=FAR_MS + 1) == "rescheduled"
    assert topic.waiting()[sent] == FAR_MS + 1
    assert either.reschedule("orders", sent, delay=2 * HOUR) == "rescheduled"
    assert topic.waiting()[sent] > topic.now_ms() + HOUR_MS
    assert either.cancel("orders", sent) == "cancelled"
    assert topic.waiting().keys() == {"own"}
    assert topic.store.ask("ZCARD", topic.keys.expiry) == 0
    assert either.get("orders", sent).state == "cancelled"
    assert either.reschedule("orders", sent, delay=HOUR) == "done"


def test_l23_a_send_is_one_round_trip_on_a_connection_that_is_given_back(
    producer: Producer, client: redis.Redis
) -> None:
    """The original called SCRIPT EXISTS each time, on a connection that it never closed."""
    producer.send("orders", 0, delay=HOUR)
    client.config_resetstat()
    connections = len(client.client_list())
    for n in range(50):
        producer.send("orders", n, delay=HOUR)
    assert len(client.client_list()) == connections
    stats: Any = client.info("commandstats")
    assert stats["cmdstat_evalsha"]["calls"] == 50
    assert not [name for name in stats if name.startswith(("cmdstat_script", "cmdstat_eval|"))]
    received: Any = client.info("stats")
    assert received["total_connections_received"] == 0


def test_known_ids(either: Either, topic: Topic) -> None:
    def send(body: str, mode: str = "keep") -> str:
        sent = either.send_one("orders", body, id="a", delay=HOUR, on_duplicate=mode)
        assert sent.id == "a"
        return str(sent.outcome)

    assert [send("first"), send("second")] == ["accepted", "duplicate"]
    assert either.send("orders", "third", id="a") == "a"
    assert either.get("orders", "a").body == "first"
    assert send("fourth", "reject") == "rejected"
    with pytest.raises(DuplicateMessage, match="'a'"):
        either.send("orders", "fifth", id="a", on_duplicate="reject")
    assert send("sixth", "replace") == "replaced"
    before = either.get("orders", "a")
    assert before.body == "sixth"
    again = either.send_one("orders", "seventh", id="a", delay=2 * HOUR, on_duplicate="update")
    found = either.get("orders", "a")
    assert (again.outcome, found.body, found.due) == ("updated", "seventh", before.due)
    bodies = [Outgoing("x", id="a"), "y", Outgoing("z", id="z", delay=2 * HOUR)]
    report = either.send_many("orders", bodies, delay=HOUR)
    assert [outcome for _, outcome in report] == [Sent.DUPLICATE, Sent.ACCEPTED, Sent.ACCEPTED]
    assert topic.waiting().keys() == {one.id for one in report}
    assert either.send_many("orders", bodies[::2], on_duplicate="reject").rejected == 2
    assert either.send_many("orders", bodies[::2], on_duplicate="update").updated == 2
    assert either.send_many("orders", bodies[::2], on_duplicate="replace").replaced == 2


def test_any_number_of_messages(either: Either, topic: Topic) -> None:
    assert len(either.send_many("orders", [])) == 0
    report = either.send_many("orders", ({"n": n} for n in range(1_234)), at_ms=FAR_MS)
    ids = [one.id for one in report]
    assert report.accepted == len(report) == 1_234
    assert list(topic.waiting()) == ids == sorted(ids)
    assert either.get("orders", ids[1_233]).body == {"n": 1_233}
    either.ask("close")  # it opens again
    assert set(either.cancel_many("orders", iter(ids))) == {"cancelled"}
    assert topic.waiting() == {}
    source = iter(range(5_000))
    outcomes = either.stream("orders", source, take=501)
    assert [one.outcome for one in outcomes] == [Sent.ACCEPTED] * 501
    assert len(topic.waiting()) == next(source) <= 1_500, "it draws only what it sends"


async def test_send_stream_draws_from_an_asynchronous_source(redis_url: str) -> None:
    async def source() -> AsyncIterator[int]:
        for n in range(700):
            yield n

    async with AsyncProducer(redis_url) as producer:
        outcomes = [one async for one in producer.send_stream("orders", source(), delay=HOUR)]
        assert [one.outcome for one in outcomes] == [Sent.ACCEPTED] * 700
        last = await producer.get("orders", outcomes[-1].id)
        assert last is not None
        assert last.body == 699


def test_an_error_among_many_says_how_many_were_sent(either: Either, topic: Topic) -> None:
    bodies: list[Any] = [*range(600), object(), *range(5)]
    with pytest.raises(InvalidMessage, match="JSON") as invalid:
        either.send_many("orders", bodies, delay=HOUR)
    assert invalid.value.sent == len(topic.waiting()) == 500
    topic.store.call(Configure("orders", {"capacity": "1200", "max_body_bytes": "100"}))
    with pytest.raises(TopicFull, match="1200") as full:
        either.send_many("orders", range(1_000), delay=HOUR)
    assert full.value.sent == 500
    either.send_many("orders", range(200), delay=HOUR)
    with pytest.raises(TopicFull) as full:
        either.send("orders", 1)
    assert full.value.sent == 0
    topic.store.call(Configure("orders", {"capacity": ""}))
    either.send("orders", "x" * 100, headers={"k": "v" * 200})
    with pytest.raises(InvalidMessage, match=r"101 bytes.*max_body_bytes"):
        either.send("orders", "x" * 101)
    with pytest.raises(InvalidMessage, match="'b'"):
        either.send_many("orders", [Outgoing("x", id="a"), Outgoing("x" * 101, id="b")])
    assert len(topic.waiting()) == 1_201


def test_outcomes_of_cancel_and_fire_now(either: Either, topic: Topic) -> None:
    topic.declare("lisa")
    waiting, taken = either.send("orders", 1, delay=HOUR), either.send("orders", 2)
    topic.take("lisa")
    asked = [waiting, taken, either.send("orders", 3), "absent"]
    outcomes = ["cancelled", "in_flight", "cancelled", "unknown"]
    assert [either.cancel("orders", one) for one in asked] == outcomes
    assert either.cancel_many("orders", iter(asked)) == outcomes
    assert either.cancel_many("orders", []) == []
    later = either.send("orders", 4, delay=HOUR)
    assert either.fire_now("orders", later) == "rescheduled"
    assert topic.promote() == 1
    assert [entry.id for entry in topic.take("lisa")] == [later]
    assert either.fire_now("orders", later) == "in_flight"
    assert either.fire_now("orders", "absent") == "unknown"


def test_get_in_every_state(either: Either, topic: Topic) -> None:
    def seen(state: str, message_id: str = "a") -> Any:
        found = either.get("orders", message_id)
        assert found.state == state
        return found

    def fail(reason: str) -> None:
        topic.store.call(Fail("orders", "lisa", [Failure("a", entry.entry, reason)]))

    topic.declare("lisa")
    assert either.get("orders", "absent") is None
    either.send("orders", {"n": 1}, id="a", retry="1h")
    ready = seen("ready")
    assert (ready.attempts, ready.body) == (0, {"n": 1})
    (entry,) = topic.take("lisa")
    held = seen("in_flight")
    assert (held.attempts, held.consumer, held.due_ms) == (1, "c1", entry.due_ms)
    assert timedelta(0) <= held.idle < HOUR
    fail("no luck")
    failed = seen("retry")
    assert (failed.attempts, failed.reason) == (1, "no luck")
    assert failed.due_ms > topic.now_ms()
    either.fire_now("orders", "a")
    topic.promote()
    (entry,) = topic.take("lisa")
    fail("no hope")
    dead = seen("garbage")
    assert (dead.attempts, dead.reason) == (2, "no hope")
    topic.store.call(Purge("orders", "lisa", ["a"]))
    purged = seen("purged")
    assert (purged.attempts, purged.body, purged.groups) == (2, None, {})
    foreign = either.send("orders", 1, delay=HOUR)
    topic.store.ask("SET", topic.keys.body(foreign), "9 from the future")
    unreadable = seen("waiting", foreign)
    assert unreadable.body is None
    assert "version" in unreadable.reason


def test_get_with_several_groups_shows_the_most_advanced(either: Either, topic: Topic) -> None:
    topic.declare("g1", "g2", "g3")
    message_id = either.send("orders", 1)
    (first,) = topic.take("g1")
    topic.store.call(Fail("orders", "g1", [Failure(message_id, first.entry, "later")]))
    topic.take("g3")
    seen = either.get("orders", message_id)
    assert (seen.state, seen.consumer) == ("in_flight", "c1")
    states = [(one.state, one.attempts, one.reason) for _, one in sorted(seen.groups.items())]
    assert states == [("retry", 1, "later"), ("ready", 0, None), ("in_flight", 1, None)]


def test_a_topic_is_known_before_its_first_message_is_there(
    either: Either, topic: Topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a sender that dies in between leaves a message that no manager finds."""

    def is_registered() -> bool:
        return topic.store.ask("ZSCORE", topic.store.keys.topics, "orders") is not None

    either.get("orders", "a")
    either.cancel("orders", "a")
    assert not is_registered(), "lookups and cancellations register no topic"
    topic.store.ask("HSET", topic.keys.options, "max_body_bytes", "1")
    with pytest.raises(InvalidMessage, match="at most 1"):
        either.send("orders", "too long", delay=HOUR)
    assert is_registered()
    topic.store.ask("DEL", topic.store.keys.topics)
    either.send("orders", 1, delay=HOUR)
    assert not is_registered(), "not at each send"
    monkeypatch.setattr("lisa.producer.flows.REGISTER_EVERY_S", 0.0)
    either.send("orders", 1, delay=HOUR)
    assert is_registered()


def test_threads_share_a_producer(producer: Producer, topic: Topic) -> None:
    start = threading.Barrier(8)

    def work(_: int) -> list[str]:
        start.wait(60)
        ids: list[str] = []
        for n in range(25):
            ids.append(producer.send("orders", n, delay=HOUR))
            ids.extend(one.id for one in producer.send_many("orders", range(10), delay=HOUR))
        return ids

    with ThreadPoolExecutor(8) as pool:
        ids = [one for made in pool.map(work, range(8)) for one in made]
    assert len(set(ids)) == len(ids) == 8 * 25 * 11
    assert topic.waiting().keys() == set(ids)


def test_from_config(redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "producer.yml"
    file.write_text(
        f"lisa-delay-queue:\n  redis: {{url: '{redis_url}'}}\n  zone: '+08:00'\n  prefix: shop\n"
        "  patience: 2s\n"
    )

    def due(producer: Producer) -> datetime | None:
        naive = datetime(2040, 1, 1, 12)  # noqa: DTZ001  the zone is the producer's
        found = producer.get("orders", producer.send("orders", 1, id="a", at=naive))
        return found.due if found else None

    with Producer.from_config(file) as producer, Producer(redis_url) as other:
        assert producer._patience == timedelta(seconds=2)
        assert due(producer) == datetime(2040, 1, 1, 4, tzinfo=UTC)
        assert other.get("orders", "a") is None, "prefixes keep systems apart"
        monkeypatch.setenv("LISA_CONFIG", str(file))
    with Producer.from_config(zone="UTC", prefix="other") as producer:
        assert due(producer) == datetime(2040, 1, 1, 12, tzinfo=UTC)


def test_functions_of_the_package_share_one_producer(
    monkeypatch: pytest.MonkeyPatch, client: redis.Redis, redis_url: str
) -> None:
    for name, value in (("REDIS_URL", redis_url), ("PREFIX", "shop"), ("ZONE", "UTC")):
        monkeypatch.setenv(f"LISA_{name}", value)
    lisa.close()
    from_config = Mock(wraps=lisa.Producer.from_config)
    monkeypatch.setattr(lisa.Producer, "from_config", from_config)
    with ThreadPoolExecutor(8) as pool:
        sends = [pool.submit(lisa.send, "orders", {"n": 1}, delay=HOUR) for _ in range(8)]
    ids = [one.result() for one in sends]
    assert (len(set(ids)), from_config.call_count) == (8, 1)
    assert client.exists("shop:{orders}:waiting")
    seen = lisa.get("orders", ids[0])
    assert seen is not None
    assert (seen.state, seen.body) == ("waiting", {"n": 1})
    assert lisa.reschedule("orders", ids[0], delay=2 * HOUR) == "rescheduled"
    assert lisa.fire_now("orders", ids[0]) == "rescheduled"
    assert lisa.cancel("orders", ids[0]) == "cancelled"
    ids = [one.id for one in lisa.send_many("orders", ["a"], delay=HOUR)]
    ids += [one.id for one in lisa.send_stream("orders", [1, 2], delay=HOUR)]
    assert lisa.cancel_many("orders", ids) == ["cancelled"] * 3
    lisa.close()


@pytest.mark.parametrize(
    ("variables", "loaded"),
    [({"LISA_PREFIX": "a", "LISA_A_SERVICE_HOST": "b"}, "False"), ({"LISA_ZONE": "UTC"}, "True")],
)
def test_a_program_ends_clean_and_loads_settings_only_if_it_needs_them(
    redis_url: str, processes: Processes, variables: dict[str, str], loaded: str
) -> None:
    program = (
        "import warnings; warnings.simplefilter('error')\n"
        "import sys, lisa; lisa.send('orders', 1); print('pydantic' in sys.modules)"
    )
    environment = variables | {"LISA_REDIS_URL": redis_url}
    process = processes.start("-X", "dev", "-c", program, env=environment)
    assert process.wait() == 0, process.output
    assert process.output == f"{loaded}\n"
