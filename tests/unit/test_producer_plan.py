"""Send options and due times, all checked before any server call."""

from __future__ import annotations

import math
import re
from datetime import UTC, date, datetime, timedelta, timezone
from typing import Any, cast
from zoneinfo import ZoneInfo

import pytest

from lisa.core.model.clock import MAX_DUE_MS, OLDEST_DUE_MS
from lisa.core.model.errors import ConfigError, InvalidMessage
from lisa.core.model.keys import check_group, check_topic
from lisa.core.model.retry_policy import RetryPolicy
from lisa.producer import OnDuplicate, Outgoing, Producer
from lisa.producer.plan import SendOptions, SendPlan

NOWHERE = "redis://127.0.0.1:1/0"
NOON = datetime(2030, 1, 1, 12, tzinfo=UTC)
NOON_MS = 1_893_499_200_000


def plan(**options: Any) -> SendPlan:
    return SendPlan.of(cast("SendOptions", options), None)


@pytest.mark.parametrize(
    ("options", "due"),
    [
        ({}, "+0"),
        ({"delay": timedelta(0)}, "+0"),
        ({"delay": timedelta(minutes=30)}, "+1800000"),
        ({"delay": timedelta(microseconds=1)}, "+1"),
        ({"delay": timedelta(milliseconds=2, microseconds=1)}, "+3"),
        ({"at_ms": NOON_MS}, str(NOON_MS)),
        pytest.param({"at_ms": OLDEST_DUE_MS}, str(OLDEST_DUE_MS), id="oldest"),
        ({"at_ms": MAX_DUE_MS}, str(MAX_DUE_MS)),
        ({"at": NOON}, str(NOON_MS)),
        ({"at": NOON + timedelta(microseconds=1)}, str(NOON_MS + 1)),
        ({"at": NOON.replace(tzinfo=None), "tz": "UTC"}, str(NOON_MS)),
        ({"at": NOON.replace(tzinfo=None), "tz": "+08:00"}, str(NOON_MS - 28_800_000)),
        (
            {"at": NOON.replace(tzinfo=None), "tz": ZoneInfo("Asia/Tokyo")},
            str(NOON_MS - 32_400_000),
        ),
    ],
)
def test_due(options: dict[str, Any], due: str) -> None:
    assert plan(**options).due == due


def test_the_producers_zone_applies_to_naive_datetimes_unless_tz_is_given() -> None:
    zone = timezone(timedelta(hours=8))
    naive = NOON.replace(tzinfo=None)
    assert SendPlan.of(SendOptions(at=naive), zone).due == str(NOON_MS - 28_800_000)
    assert SendPlan.of(SendOptions(at=naive, tz="UTC"), zone).due == str(NOON_MS)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"delay": timedelta(microseconds=-1)}, "negative"),
        ({"delay": timedelta.max}, "9999"),
        ({"delay": 30}, "no unit"),
        ({"delay": "soon"}, "not a duration"),
        ({"delay": math.nan}, "not a duration"),
        ({"at_ms": math.nan}, "integer"),
        ({"at_ms": 1e12}, "integer"),
        ({"at_ms": True}, "integer"),
        ({"at_ms": "1893499200000"}, "integer"),
        ({"at_ms": MAX_DUE_MS + 1}, "9999"),
        ({"at_ms": 10**30}, "9999"),
        ({"at": NOON.replace(tzinfo=None)}, "zone"),
        ({"at": date(2030, 1, 1)}, "datetime"),
        ({"at": NOON_MS}, "at_ms"),
        ({"at": datetime.max.replace(tzinfo=timezone(timedelta(hours=-8)))}, "9999"),
        ({"at": datetime(9999, 12, 31, 23, 59), "tz": "America/New_York"}, "9999"),  # noqa: DTZ001  the zone is beside it
        ({"at": NOON, "tz": "Mars/Olympus"}, "Mars/Olympus"),
        ({"delay": timedelta(1), "at_ms": 1}, "contradict"),
        ({"at": NOON, "at_ms": 1}, "contradict"),
        ({"ttl": timedelta(seconds=-1)}, "ttl"),
        ({"ttl": timedelta(0)}, "ttl"),
        ({"ttl": 60}, "no unit"),
        ({"retry": "soon"}, "soon"),
        ({"retry": [timedelta(seconds=-1)]}, "negative"),
        ({"retry": timedelta(1)}, "policy"),
        ({"headers": {"a": 1}}, "text"),
        ({"headers": [("a", "b")]}, "mapping"),
        ({"headers": {"a": "x" * 70_000}}, "65535"),
        ({"headers": {"a": "\ud800"}}, "headers"),
        ({"on_duplicate": "overwrite"}, "keep, keep_live, replace, reject"),
    ],
)
def test_refusals(options: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidMessage, match=said):
        plan(**options)


def test_an_unknown_option_is_an_error_of_the_program() -> None:
    with pytest.raises(TypeError, match="dely"):
        plan(dely=timedelta(1))


@pytest.mark.parametrize(
    ("retry", "policy"),
    [
        (None, None),
        ([], ""),
        ("", ""),
        ("0,0,2m", "0,0,120000"),
        ([timedelta(0), timedelta(minutes=2)], "0,120000"),
        (RetryPolicy.fixed(delay=timedelta(seconds=1), count=2), "1000,1000"),
    ],
)
def test_retry(retry: Any, policy: str | None) -> None:
    assert plan(retry=retry).policy == policy


def test_ttl_is_rounded_up() -> None:
    assert plan(ttl=timedelta(microseconds=1)).ttl_ms == 1
    assert plan(ttl=timedelta.max).ttl_ms == MAX_DUE_MS


def test_outgoing_inherits_unset_options() -> None:
    call = plan(delay=timedelta(1), ttl=timedelta(2), retry="1s", headers={"a": "b"})
    same = call.with_differences(Outgoing("body"))
    assert same == call
    own = call.with_differences(
        Outgoing("body", at_ms=NOON_MS, ttl=timedelta(seconds=1), retry=[], headers={})
    )
    assert (own.due, own.ttl_ms, own.policy, own.headers) == (str(NOON_MS), 1_000, "", b"0000")
    assert own.on_duplicate is OnDuplicate.KEEP


@pytest.mark.parametrize("name", ["a|b", "a}b", "{a", "a\nb"])
def test_names_contain_no_key_separators(name: str) -> None:
    for check in (check_topic, check_group):
        with pytest.raises(InvalidMessage, match="is not allowed"):
            check(name)


@pytest.mark.parametrize("topic", ["", "a b", "t{1}", "x" * 129, "é", None, 7, ["orders"]])
def test_bad_topics_are_refused_before_a_server_is_asked(topic: Any) -> None:
    producer = Producer(NOWHERE)
    for call in (producer.cancel, producer.fire_now, producer.get, producer.send):
        with pytest.raises(InvalidMessage, match="topic"):
            call(topic, "x")
    with pytest.raises(InvalidMessage, match="topic"):
        producer.send_many(topic, ["x"])
    with pytest.raises(InvalidMessage, match="topic"):
        producer.send_stream(topic, ["x"])
    with pytest.raises(InvalidMessage, match="topic"):
        producer.reschedule(topic, "x", delay=timedelta(1))


@pytest.mark.parametrize(
    "message_id", ["", "a\nb", "\x00", "x" * 257, "é" * 129, "\ud800", 7, b"x"]
)
def test_bad_ids_are_refused_before_a_server_is_asked(message_id: Any) -> None:
    producer = Producer(NOWHERE)
    with pytest.raises(InvalidMessage, match="id"):
        producer.send("orders", "x", id=message_id)
    with pytest.raises(InvalidMessage, match="id"):
        producer.send_many("orders", [Outgoing("x", id=message_id)])
    with pytest.raises(InvalidMessage, match="id"):
        producer.cancel_many("orders", ["fine", message_id])
    for call in (producer.cancel, producer.fire_now, producer.get):
        with pytest.raises(InvalidMessage, match="id"):
            call("orders", message_id)


def recursive() -> list[Any]:
    body: list[Any] = []
    body.append(body)
    return body


@pytest.mark.parametrize(
    "body",
    [math.nan, {"a": [math.inf]}, object(), {"a": object()}, recursive(), "\ud800", {1j: 2}],
    ids=lambda value: type(value).__name__,
)
def test_bad_bodies_are_refused_before_a_server_is_asked(body: Any) -> None:
    producer = Producer(NOWHERE)
    with pytest.raises(InvalidMessage, match="body"):
        producer.send("orders", body)
    with pytest.raises(InvalidMessage, match="body"):
        producer.send_many("orders", [body])


@pytest.mark.parametrize("key", [True, None, (1, 2)])
def test_a_key_that_is_not_text_is_named(key: Any) -> None:
    with pytest.raises(InvalidMessage, match=re.escape(f"the key {key!r} is not text; quote it")):
        Producer(NOWHERE).send("orders", {"a": [{key: 1}]})


@pytest.mark.parametrize("bodies", ["text", b"bytes", {"order": 1}])
def test_one_body_in_place_of_many_is_refused(bodies: Any) -> None:
    producer = Producer(NOWHERE)
    with pytest.raises(InvalidMessage, match="iterable"):
        producer.send_many("orders", bodies)
    with pytest.raises(InvalidMessage, match="iterable"):
        producer.cancel_many("orders", bodies)
    with pytest.raises(InvalidMessage, match="iterable"):
        producer.send_stream("orders", bodies)


def test_outgoing_is_not_a_body() -> None:
    with pytest.raises(InvalidMessage, match="send_many"):
        Producer(NOWHERE).send("orders", Outgoing("x"))


def test_reschedule_requires_a_due_time() -> None:
    with pytest.raises(InvalidMessage, match="fire_now"):
        Producer(NOWHERE).reschedule("orders", "a")


@pytest.mark.parametrize("patience", [timedelta(seconds=-1), 5, None])
def test_patience_is_a_duration(patience: Any) -> None:
    with pytest.raises(ConfigError, match="patience"):
        Producer(NOWHERE, patience=patience)
