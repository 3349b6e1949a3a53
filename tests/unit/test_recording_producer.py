"""Producers that record what they are given to send, without a server."""

import asyncio
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from unittest.mock import Mock
from zoneinfo import ZoneInfo

import pytest

from lisa import (
    ConfigError,
    DuplicateMessage,
    InvalidMessage,
    Outgoing,
    Producer,
    ScheduleChanged,
    replicas,
)
from lisa.core.model.options import TopicOptions
from lisa.testing import AsyncRecordingProducer, RecordingProducer, SentMessage

HOUR = timedelta(hours=1)
DUE = datetime(2027, 3, 28, 1, 30, tzinfo=UTC)


@pytest.fixture(autouse=True)
def no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    connect = Mock(side_effect=AssertionError("a recording producer opened a connection"))
    monkeypatch.setattr("socket.socket.connect", connect)


def test_every_field_is_recorded() -> None:
    producer = RecordingProducer(zone="Europe/Berlin")
    assert isinstance(producer, Producer)
    sent = producer.send("orders", {"order": 42}, delay=HOUR, headers={"a": "b"}, ttl="1d")
    producer.send("alarm", b"raw", at=datetime(2027, 3, 28, 3, 30), id="one", retry="10s,1m")  # noqa: DTZ001  in the zone
    first, second = producer.sent
    whole: dict[str, Any] = {"headers": {"a": "b"}, "delay": HOUR, "ttl": 24 * HOUR}
    assert first == SentMessage(id=sent, topic="orders", body={"order": 42}, due=None, **whole)
    assert (second.id, second.body, second.delay, second.due) == ("one", b"raw", None, DUE)
    assert "10000" in (second.retry or "")
    report = producer.send_many("many", [1, Outgoing(2, id="two", delay="2h")], delay=HOUR)
    assert (report.accepted, len(report)) == (2, 2)
    assert [one.outcome for one in producer.send_stream("many", range(600))] == ["accepted"] * 600
    assert [one.body for one in producer.sent[2:]] == [1, 2, *range(600)]
    assert [one.delay for one in producer.sent[2:5]] == [HOUR, 2 * HOUR, timedelta(0)]


def test_mistakes_are_refused_as_by_a_producer() -> None:
    producer, most = RecordingProducer(), TopicOptions().max_body_bytes
    for call, said in (
        (lambda: producer.send("orders", 1, at=datetime(2027, 3, 28)), "names no time zone"),  # noqa: DTZ001  that is the mistake
        (lambda: producer.send("or ders", 1), "topic"),
        (lambda: producer.send("orders", object()), "JSON"),
        (lambda: producer.send("orders", b"x" * (most + 1)), f"has {most + 1} bytes"),
        (lambda: producer.send_many("orders", [b"x" * (most + 1), b"x"]), f"at most {most}"),
    ):
        with pytest.raises(InvalidMessage, match=said):
            call()
    assert producer.sent == []
    producer.send("orders", b"x" * most, headers={"a": "b"})


def test_ids_that_are_known() -> None:
    producer = RecordingProducer()
    producer.send("orders", 1, id="a")
    assert producer.send_one("orders", 2, id="a").outcome == "duplicate"
    with pytest.raises(DuplicateMessage):
        producer.send("orders", 3, id="a", on_duplicate="reject")
    assert producer.send_one("orders", 4, id="a", on_duplicate="replace").outcome == "replaced"
    assert producer.send_one("others", 5, id="a").outcome == "accepted"
    again = producer.send_one("orders", 6, id="a", delay=HOUR, on_duplicate="update")
    assert (again.outcome, producer.sent[-1].delay) == ("updated", producer.sent[0].delay)
    assert [one.body for one in producer.sent] == [1, 4, 5, 6]


def test_cancelled_and_moved_messages() -> None:
    producer = RecordingProducer()
    ids = [producer.send("orders", n, delay=HOUR) for n in range(3)]
    assert producer.cancel_many("orders", [ids[0], "unknown"]) == ["cancelled", "unknown"]
    assert [one.body for one in producer.cancelled] == [0]
    assert producer.reschedule("orders", ids[1], at=DUE) == "rescheduled"
    assert producer.fire_now("orders", ids[2]) == "rescheduled"
    assert producer.reschedule("orders", ids[0], delay=HOUR) == "unknown"
    shown = [(one.delay, one.due) for one in producer.sent]
    assert shown == [(HOUR, None), (None, DUE), (timedelta(0), None)]
    found = producer.get("orders", ids[1])
    assert found is not None
    assert (found.state, found.body, found.due) == ("waiting", 1, DUE)
    assert producer.get("orders", ids[0]) is None
    producer.sent.clear()
    for _ in range(2):
        producer.send("orders", 1, id="a", delay=HOUR)
        producer.cancel("orders", "a")
    producer.send("orders", 1, id="a", delay=HOUR)
    producer.reschedule("orders", "a", delay="2h")
    assert [one.delay for one in producer.sent] == [HOUR, HOUR, 2 * HOUR], "the latest is moved"
    producer.sent.clear()
    assert producer.reschedule("orders", "a", delay="3h") == "rescheduled"
    # Windows and wall times hold for a rescheduled message, too.
    sent = producer.send("orders", 1, delay=HOUR, window="10-11", tz="Asia/Tokyo")
    for options, minute in (({"at": DUE + HOUR}, 0), ({"at_local": "2027-03-29T10:30"}, 30)):
        assert producer.reschedule("orders", sent, **options) == "rescheduled"
        assert producer.sent[-1].due == datetime(2027, 3, 29, 1, minute, tzinfo=UTC)


def test_coalescing_sends() -> None:
    producer = RecordingProducer()
    said = [producer.send_one("orders", n, key="k", debounce="5s", max_wait="1m") for n in (1, 2)]
    first = said[0].id
    assert said == [(first, "accepted"), (first, "replaced")]
    assert [(one.body, one.key, one.delay) for one in producer.sent] == [
        (n, "k", timedelta(seconds=5)) for n in (1, 2)
    ]
    found = producer.get("orders", first)
    assert found is not None
    assert found.body == 2
    outcomes = [producer.send_one("t", n, key="k", throttle="5s").outcome for n in (1, 2)]
    assert outcomes == ["accepted", "updated"]
    producer.send("l", 1, key="k", latest=True, at=DUE)
    producer.send("l", 2, key="k", latest=True, delay=HOUR)
    assert (producer.sent[-1].body, producer.sent[-1].due) == (2, DUE)
    assert producer.count_key("l", "k") == 1


def test_messages_of_a_key() -> None:
    producer = RecordingProducer()
    producer.send("orders", 0, id="a", delay=HOUR)
    first = producer.send("orders", 1, key="k", id="a", delay=HOUR)
    second = producer.send("orders", 2, key="k", at=DUE)
    producer.send("others", 3, key="k")
    assert [one.key for one in producer.sent] == [None, "k", "k", "k"]
    found = producer.list_key("orders", "k")
    assert [(one.id, one.body, one.key) for one in found] == [(first, 1, "k"), (second, 2, "k")]
    assert producer.count_key("orders", "k") == 2
    for shift, delay, due in (("30m", 1.5, 0.5), (-2 * HOUR, 0, -1.5)):
        done = producer.reschedule_key("orders", "k", shift=shift)
        assert done == [(first, "rescheduled"), (second, "rescheduled")]
        assert producer.sent[1].delay == delay * HOUR
        assert producer.sent[2].due == DUE + due * HOUR
    assert len(producer.reschedule_key("orders", "k", at=DUE)) == 2
    assert [one.due for one in producer.sent[1:3]] == [DUE, DUE]
    assert len(producer.fire_key("orders", "k")) == 2
    assert producer.cancel_key("orders", "k") == [(first, "cancelled"), (second, "cancelled")]
    assert [one.body for one in producer.cancelled] == [1, 2]
    assert producer.cancel_key("orders", "k") == []
    sent = producer.send("orders", 4, key="w", at=DUE, window="10-11", tz="Asia/Tokyo")
    assert producer.reschedule_key("orders", "w", shift="1h") == [(sent, "rescheduled")]
    assert producer.sent[-1].due == datetime(2027, 3, 29, 1, tzinfo=UTC)
    with pytest.raises(InvalidMessage):
        producer.cancel_key("orders", "")
    other = AsyncRecordingProducer()
    asyncio.run(other.send("orders", 1, key="k"))
    assert asyncio.run(other.count_key("orders", "k")) == 1
    producer.schedule("daily", topic="orders", body=5, cron="@daily", key="s")
    assert producer.run_schedule("orders", "daily").startswith("s\x1fdaily@")


def test_a_producers_class_can_be_replaced(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    options: dict[str, Any] = {"prefix": "shop", "patience": "3s", "durability": replicas(1)}
    producer = RecordingProducer("redis://nowhere:1/0", zone="UTC", **options)
    producer.send("orders", 1, at=DUE.replace(tzinfo=None))
    assert [one.due for one in producer.sent] == [DUE]
    file = tmp_path / "producer.yml"
    file.write_text("lisa-delay-queue: {prefix: shop, zone: UTC, durability: replicas(1)}")
    monkeypatch.setenv("LISA_CONFIG", str(file))
    for kind in (RecordingProducer, AsyncRecordingProducer):
        assert kind.from_config().sent == []
    with pytest.raises(ConfigError, match="is missing redis://"):
        RecordingProducer("localhost")


def test_asynchronous_producers_serve_several_event_loops() -> None:
    """As with a test client of a web framework, which runs each request in a loop of its own."""
    producer = AsyncRecordingProducer()
    assert asyncio.run(producer.send("orders", 1, id="a", delay=HOUR)) == "a"
    assert asyncio.run(producer.send_many("orders", [2, 3])).accepted == 2
    assert [one.body for one in producer.sent] == [1, 2, 3]
    found = asyncio.run(producer.get("orders", "a"))
    assert found is not None
    assert found.body == 1
    assert asyncio.run(producer.cancel("orders", "a")) == "cancelled"
    assert asyncio.run(producer.schedule("s", topic="jobs", body=1, every="1h"))
    assert [one.name for one in asyncio.run(producer.schedules("jobs"))] == ["s"]
    assert asyncio.run(producer.run_schedule("jobs", "s")) == producer.sent[-1].id
    asyncio.run(producer.close())


def test_schedules_are_kept_and_checked() -> None:
    producer = RecordingProducer(zone="Europe/Berlin")
    daily: dict[str, Any] = {"topic": "reports", "body": {"kind": "daily"}, "cron": "0 9 * * 1-5"}
    assert [producer.schedule("daily", **daily) for _ in range(2)] == [True, False]
    with pytest.raises(ScheduleChanged, match="has version 1, not 0"):
        producer.schedule("daily", **daily | {"body": 1}, if_version=0)
    for every in ("20m", "10m"):  # an edit keeps what it does not change
        assert producer.schedule("sync", topic="reports", body="sync", every=every, count=2)
    wrong: Any
    for wrong in ({"cron": "61 * * * *"}, {"every": "10ms"}, {"every": "1h", "tz": "Berlim"}):
        with pytest.raises(InvalidMessage):
            producer.schedule("wrong", topic="reports", body=1, **wrong)
    assert [one.name for one in producer.schedules("reports")] == ["daily", "sync"]
    found, edited = (producer.get_schedule("reports", name) for name in ("daily", "sync"))
    assert found is not None
    assert edited is not None
    assert (edited.version, edited.made) == (2, 1)
    assert (found.definition.cron, found.definition.tz) == ("0 9 * * 1-5", "Europe/Berlin")
    ticks = producer.next_ticks("reports", "daily", 3)
    assert [tick.astimezone(ZoneInfo("Europe/Berlin")).hour for tick in ticks] == [9, 9, 9]
    assert producer.sent == []


def test_schedules_are_paused_run_backfilled_and_removed() -> None:
    producer, name = RecordingProducer(), ("jobs", "s")
    template: dict[str, Any] = {"body": {"n": "${tick_ms}"}, "template": True, "ttl": "1h"}
    producer.schedule("s", topic="jobs", cron="0 9 * * *", **template)
    assert [producer.pause_schedule(*name) for _ in range(2)] == [True, False]
    assert producer.resume_schedule(*name)
    runs = [producer.run_schedule(*name) for _ in range(2)]
    days = datetime(2026, 3, 1, tzinfo=UTC), datetime(2026, 3, 3, tzinfo=UTC)
    assert producer.backfill_schedule(*name, *days) == (2, 0)
    assert producer.backfill_schedule(*name, *days) == (0, 2)
    first, second, third, _ = producer.sent
    assert [first.id, second.id] == runs
    assert first.id != second.id
    tick = datetime(2026, 3, 1, 9, tzinfo=UTC)
    assert (third.due, third.ttl, third.headers["lisa-schedule"]) == (tick, HOUR, "s")
    assert third.body == {"n": int(tick.timestamp() * 1000)}
    assert [producer.remove_schedule(*name) for _ in range(2)] == [True, False]
    assert producer.schedules("jobs") == []
    with pytest.raises(InvalidMessage, match="no schedule 's'"):
        producer.run_schedule(*name)
