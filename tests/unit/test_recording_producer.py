"""Producers that record what they are given to send, without a server."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
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
    def connect(*_: object, **__: object) -> None:
        raise AssertionError("a recording producer opened a connection")

    monkeypatch.setattr("socket.socket.connect", connect)


def test_every_field_is_recorded() -> None:
    producer = RecordingProducer(zone="Europe/Berlin")
    assert isinstance(producer, Producer)
    sent = producer.send("orders", {"order": 42}, delay=HOUR, headers={"a": "b"}, ttl="1d")
    producer.send("alarm", b"raw", at=datetime(2027, 3, 28, 3, 30), id="one", retry="10s,1m")  # noqa: DTZ001  in the zone
    assert producer.sent == [
        SentMessage(
            id=sent,
            topic="orders",
            body={"order": 42},
            headers={"a": "b"},
            delay=HOUR,
            due=None,
            ttl=timedelta(days=1),
        ),
        SentMessage(
            id="one",
            topic="alarm",
            body=b"raw",
            headers={},
            delay=None,
            due=DUE,
            retry=producer.sent[1].retry,
        ),
    ]
    assert "10000" in (producer.sent[1].retry or "")


def test_mistakes_are_refused_as_by_a_producer() -> None:
    producer = RecordingProducer()
    with pytest.raises(InvalidMessage, match="names no time zone"):
        producer.send("orders", 1, at=datetime(2027, 3, 28))  # noqa: DTZ001  that is the mistake
    with pytest.raises(InvalidMessage):
        producer.send("or ders", 1)
    with pytest.raises(InvalidMessage):
        producer.send("orders", object())
    assert producer.sent == []


def test_a_body_larger_than_a_topic_allows_is_refused() -> None:
    producer = RecordingProducer()
    most = TopicOptions().max_body_bytes
    producer.send("orders", b"x" * most, headers={"a": "b"})
    for call in (
        lambda: producer.send("orders", b"x" * (most + 1), id="a"),
        lambda: producer.send_many("orders", [b"x" * (most + 1), b"x"]),
    ):
        with pytest.raises(InvalidMessage, match=f"has {most + 1} bytes.*at most {most}"):
            call()
    assert len(producer.sent) == 1


def test_many_messages_and_streams() -> None:
    producer = RecordingProducer()
    report = producer.send_many("orders", [1, Outgoing(2, id="two", delay="2h")], delay=HOUR)
    assert (report.accepted, len(report)) == (2, 2)
    assert [one.outcome for one in producer.send_stream("orders", range(600))] == ["accepted"] * 600
    assert [one.body for one in producer.sent] == [1, 2, *range(600)]
    assert [one.delay for one in producer.sent[:3]] == [HOUR, 2 * HOUR, timedelta(0)]


def test_ids_that_are_known() -> None:
    producer = RecordingProducer()
    producer.send("orders", 1, id="a")
    assert producer.send_one("orders", 2, id="a").outcome == "duplicate"
    with pytest.raises(DuplicateMessage):
        producer.send("orders", 3, id="a", on_duplicate="reject")
    assert producer.send_one("orders", 4, id="a", on_duplicate="replace").outcome == "replaced"
    assert producer.send_one("others", 5, id="a").outcome == "accepted"
    assert [one.body for one in producer.sent] == [1, 4, 5]


def test_cancelled_and_moved_messages() -> None:
    producer = RecordingProducer()
    ids = [producer.send("orders", n, delay=HOUR) for n in range(3)]
    assert producer.cancel_many("orders", [ids[0], "unknown"]) == ["cancelled", "unknown"]
    assert [one.body for one in producer.cancelled] == [0]
    assert producer.reschedule("orders", ids[1], at=DUE) == "rescheduled"
    assert producer.fire_now("orders", ids[2]) == "rescheduled"
    assert producer.reschedule("orders", ids[0], delay=HOUR) == "unknown"
    assert [(one.delay, one.due) for one in producer.sent] == [
        (HOUR, None),
        (None, DUE),
        (timedelta(0), None),
    ]
    found = producer.get("orders", ids[1])
    assert found is not None
    assert (found.state, found.body, found.due) == ("waiting", 1, DUE)
    assert producer.get("orders", ids[0]) is None


def test_a_class_of_producers_can_be_replaced(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    producer = RecordingProducer(
        "redis://nowhere:1/0", prefix="shop", patience="3s", durability=replicas(1), zone="UTC"
    )
    producer.send("orders", 1, at=DUE.replace(tzinfo=None))
    assert [one.due for one in producer.sent] == [DUE]
    file = tmp_path / "producer.yml"
    file.write_text("lisa-delay-queue: {prefix: shop, zone: UTC, durability: replicas(1)}")
    monkeypatch.setenv("LISA_CONFIG", str(file))
    for kind in (RecordingProducer, AsyncRecordingProducer):
        assert kind.from_config().sent == []
    with pytest.raises(ConfigError, match="is missing redis://"):
        RecordingProducer("localhost")


def test_of_equal_messages_the_latest_is_moved() -> None:
    producer = RecordingProducer()
    for _ in range(2):
        producer.send("orders", 1, id="a", delay=HOUR)
        producer.cancel("orders", "a")
    producer.send("orders", 1, id="a", delay=HOUR)
    producer.reschedule("orders", "a", delay="2h")
    assert [one.delay for one in producer.sent] == [HOUR, HOUR, 2 * HOUR]
    producer.sent.clear()
    assert producer.reschedule("orders", "a", delay="3h") == "rescheduled"


def test_windows_and_wall_times_of_rescheduled_messages() -> None:
    producer = RecordingProducer()
    sent = producer.send("orders", 1, delay=HOUR, window="10-11", tz="Asia/Tokyo")
    assert producer.reschedule("orders", sent, at=DUE + HOUR) == "rescheduled"
    assert producer.sent[0].due == datetime(2027, 3, 29, 1, tzinfo=UTC)
    assert producer.reschedule("orders", sent, at_local="2027-03-29T10:30") == "rescheduled"
    assert producer.sent[0].due == datetime(2027, 3, 29, 1, 30, tzinfo=UTC)
    assert (
        producer.reschedule("orders", "unknown", at_local="2027-03-29T10:30", tz="UTC") == "unknown"
    )


async def test_asynchronous_producers() -> None:
    async with AsyncRecordingProducer() as producer:
        sent = await producer.send("orders", 1, delay=HOUR)
        assert (await producer.send_many("orders", [2, 3])).accepted == 2
        assert [one.body for one in producer.sent] == [1, 2, 3]
        found = await producer.get("orders", sent)
        assert found is not None
        assert found.body == 1
        assert await producer.cancel("orders", sent) == "cancelled"


def test_schedules_are_kept_and_checked() -> None:
    producer = RecordingProducer(zone="Europe/Berlin")
    daily: dict[str, Any] = {"topic": "reports", "body": {"kind": "daily"}, "cron": "0 9 * * 1-5"}
    assert producer.schedule("daily", **daily)
    assert not producer.schedule("daily", **daily)
    with pytest.raises(ScheduleChanged, match="has version 1, not 0"):
        producer.schedule("daily", **{**daily, "body": 1}, if_version=0)
    assert producer.schedule("sync", topic="reports", body="sync", every="10m", count=2)
    mistakes: list[dict[str, Any]] = [
        {"cron": "61 * * * *"},
        {"every": "10ms"},
        {"every": "1h", "tz": "Europe/Berlim"},
    ]
    for wrong in mistakes:
        with pytest.raises(InvalidMessage):
            producer.schedule("wrong", topic="reports", body=1, **wrong)
    assert [one.name for one in producer.schedules("reports")] == ["daily", "sync"]
    found = producer.get_schedule("reports", "daily")
    assert found is not None
    assert (found.definition.cron, found.definition.tz) == ("0 9 * * 1-5", "Europe/Berlin")
    ticks = producer.next_ticks("reports", "daily", 3)
    assert [tick.astimezone(ZoneInfo("Europe/Berlin")).hour for tick in ticks] == [9, 9, 9]
    assert len(producer.next_ticks("reports", "sync", 5)) == 2
    assert producer.sent == []


def test_schedules_are_paused_run_backfilled_and_removed() -> None:
    producer = RecordingProducer()
    producer.schedule(
        "s", topic="jobs", body={"n": "${tick_ms}"}, template=True, cron="0 9 * * *", ttl="1h"
    )
    assert producer.pause_schedule("jobs", "s")
    assert not producer.pause_schedule("jobs", "s")
    assert producer.resume_schedule("jobs", "s")
    first, second = producer.run_schedule("jobs", "s"), producer.run_schedule("jobs", "s")
    start, end = datetime(2026, 3, 1, tzinfo=UTC), datetime(2026, 3, 3, tzinfo=UTC)
    assert producer.backfill_schedule("jobs", "s", start, end) == (2, 0)
    assert producer.backfill_schedule("jobs", "s", start, end) == (0, 2)
    assert [one.id for one in producer.sent[:2]] == [first, second]
    assert first != second
    tick = datetime(2026, 3, 1, 9, tzinfo=UTC)
    assert producer.sent[2].due == tick
    assert producer.sent[2].body == {"n": int(tick.timestamp() * 1000)}
    assert producer.sent[2].ttl == HOUR
    assert producer.sent[2].headers["lisa-schedule"] == "s"
    assert producer.remove_schedule("jobs", "s")
    assert not producer.remove_schedule("jobs", "s")
    assert producer.schedules("jobs") == []
    with pytest.raises(InvalidMessage, match="no schedule 's'"):
        producer.run_schedule("jobs", "s")


def test_an_asynchronous_recording_producer_serves_several_event_loops() -> None:
    """As with a test client of a web framework, which runs each request in a loop of its own."""
    producer = AsyncRecordingProducer()
    assert asyncio.run(producer.send("orders", 1, id="a")) == "a"
    assert asyncio.run(producer.cancel("orders", "a")) == "cancelled"
    asyncio.run(producer.close())


def test_an_asynchronous_recording_producer_keeps_schedules() -> None:
    async def main() -> None:
        producer = AsyncRecordingProducer()
        assert await producer.schedule("s", topic="jobs", body=1, every="1h")
        assert [one.name for one in await producer.schedules("jobs")] == ["s"]
        assert await producer.run_schedule("jobs", "s") == producer.sent[0].id

    asyncio.run(main())


def test_an_edit_of_a_recorded_schedule_keeps_what_it_does_not_change() -> None:
    """A pending occurrence, which a server would move, is not among the sent messages."""
    producer = RecordingProducer()
    for every in ("1h", "2h"):
        assert producer.schedule("s", topic="jobs", body=1, every=every)
    found = producer.get_schedule("jobs", "s")
    assert found is not None
    assert (found.version, found.made, producer.sent) == (2, 1, [])
