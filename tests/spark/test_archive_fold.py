"""The fold of events into messages, compared with a reference in plain Python, and single cases."""

from __future__ import annotations

from datetime import UTC
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.sql import functions as sf

from lisa.core.model.envelope import decode_envelope
from lisa.core.model.errors import InvalidMessage
from lisa.pipeline.archive.fold import fold, fold_lives, host_of
from lisa.pipeline.archive.lives import lives, of_lives, with_gone
from lisa.pipeline.archive.schemas import EVENT_SCHEMA, MESSAGES_SCHEMA
from tests.spark.stories import EPOCH, Stories, envelope, event, plain_fold, row

if TYPE_CHECKING:
    from collections.abc import Iterable
    from datetime import datetime

    from pyspark.sql import DataFrame, SparkSession

    from tests.spark.stories import Event


def frame(spark: SparkSession, events: Iterable[Event]) -> DataFrame:
    rows = [row(one) for one in events]
    values = [tuple(one[name] for name in EVENT_SCHEMA.names) for one in rows]
    return spark.createDataFrame(values, EVENT_SCHEMA)


def ms(at: datetime | None) -> int | None:
    if at is None:
        return None
    aware = at.replace(tzinfo=UTC) if at.tzinfo is None else at
    return round((aware - EPOCH).total_seconds() * 1000)


def told(messages: DataFrame) -> dict[tuple[str, str, str | None], dict[str, Any]]:
    """Rows of MESSAGES_SCHEMA in the shape of `plain_fold`."""
    found: dict[tuple[str, str, str | None], dict[str, Any]] = {}
    plain = ("state", "settled", "policy", "attempts", "reason", "late_us")
    times = ("due", "expires", "sent_at", "updated_at", "settled_at")
    # Through Arrow, because a Row's timestamps are naive, in the machine's time zone.
    for one in messages.toArrow().to_pylist():
        key = one["topic"], one["id"], one["token"]
        assert key not in found, f"two rows for {key}"
        found[key] = {
            **{name: ms(one[name]) for name in times},
            **{name: one[name] for name in plain},
            "groups": {
                g["group"]: tuple(
                    sorted(
                        {
                            "state": g["state"],
                            "attempts": g["attempts"],
                            "due": ms(g["due"]),
                            "reason": g["reason"],
                            "at": ms(g["at"]),
                        }.items()
                    )
                )
                for g in one["groups"]
            },
            "content": (
                one["kind"],
                dict(one["headers"]) if one["headers"] is not None else None,
                one["body"],
            ),
        }
    return found


def expected(events: Iterable[Event]) -> dict[tuple[str, str, str | None], dict[str, Any]]:
    found = plain_fold(events)
    for one in found.values():
        data = one.pop("envelope")
        try:
            taken = None if data is None else decode_envelope(data)
        except InvalidMessage:
            one["content"] = (None, None, data)
        else:
            one["content"] = (
                (taken.kind, taken.headers, taken.body) if taken else (None, None, None)
            )
    return found


@pytest.mark.parametrize(("seed", "sharded"), [(1, True), (2, True), (2, False)])
def test_fold_agrees_with_a_plain_python_fold(
    spark: SparkSession, seed: int, *, sharded: bool
) -> None:
    events = [*Stories("orders", seed).extend(600), *Stories("a:b", seed).extend(100)]
    assert len({one["state"] for one in events}) == 15
    shuffled = sorted(events, key=lambda one: hash((one["id"], one["number"])))
    several = frame(spark, [*shuffled, *shuffled[:50]])  # repeated events are harmless
    made = fold(several) if sharded else fold_lives(lives(several, sharded=False))
    assert made.schema.simpleString() == MESSAGES_SCHEMA.simpleString()
    found, wanted = told(made), expected(events)
    assert found.keys() == wanted.keys()
    for key, one in wanted.items():
        assert found[key] == one, key
    assert {one["state"] for one in found.values()} >= {"waiting", "acked", "cancelled", "lost"}
    tagged = with_gone(lives(several))
    gone = {tuple(row) for row in tagged.where("gone").select("topic", "id", "life").collect()}
    assert gone == {key for key, one in found.items() if one["settled"]}
    live = made.where("not settled").select("topic", "id", sf.col("token").alias("life"))
    kept = of_lives(several, live).select("topic", "id", "life", "at", "seq")
    expected_events = tagged.where("not gone").select(*kept.columns)
    assert kept.count() > len(found) - len(gone)
    assert sorted(map(str, kept.collect())) == sorted(map(str, expected_events.collect()))


SENT = {"id": "m", "state": "sent", "due": 9000, "envelope": envelope("tokentok", {"a": 1})}


def one_row(spark: SparkSession, *events: dict[str, Any]) -> Any:
    made = [event("t", 1000 + i, 0, i + 1, **one) for i, one in enumerate(events)]
    rows = fold(frame(spark, made)).collect()
    assert len(rows) == 1
    return rows[0]


def test_an_envelope_of_another_version_is_kept_whole(spark: SparkSession) -> None:
    data = b"2tokentok-j0000{}"
    found = one_row(spark, SENT | {"envelope": data})
    assert (found.token, found.kind, found.headers, found.body) == ("tokentok", None, None, data)


def test_damaged_envelopes_are_kept_as_bodies(spark: SparkSession) -> None:
    token_only = b"1\xff\xfe\xfd\xfc\xfb\xfa\xf9\xf8-j0000{}"
    damaged = [
        b"",
        b"1",
        b"1tokentok-j00",
        b"1tokentok-jzzzz{}",
        b"1tokentok-jffff{}",
        b"1tokentok-x0000{}",
        b"1tokentok-j0003{}",
        b"1tokentok-j0002[]{}",
    ]
    events = [
        event("t", 1000 + i, 0, i + 1, **SENT | {"id": f"m{i}", "envelope": data})
        for i, data in enumerate([*damaged, token_only])
    ]
    found = {row.id: row for row in fold(frame(spark, events)).collect()}
    assert len(found) == len(events)
    for i, data in enumerate(damaged):
        row = found[f"m{i}"]
        assert (row.kind, row.headers, row.body) == (None, None, data)
    assert found[f"m{len(damaged)}"].kind == "j"


def test_a_restored_message_has_its_restored_state(spark: SparkSession) -> None:
    back = SENT | {"state": "restored", "attempt": 2, "reason": "boom"}
    found = one_row(
        spark,
        SENT,
        {"id": "m", "group": "a", "state": "acked", "attempt": 1},
        {"id": "m", "group": "b", "state": "in_flight", "attempt": 3},
        back | {"group": "b", "place": "retry"},
        back | {"group": "c", "place": "garbage", "attempt": 5},
    )
    assert (found.state, found.settled, found.attempts) == ("retry", False, 5)
    assert [(g.group, g.state, g.attempts) for g in found.groups] == [
        ("a", "acked", 0),
        ("b", "retry", 2),
        ("c", "garbage", 5),
    ]


def test_hosts_of_actors(spark: SparkSession) -> None:
    actors = ["manager@a.b:1", "consumer@a:b:9", "gateway/buyer@eu@box:22", "lost", "x@:3", None]
    rows = spark.createDataFrame([(a,) for a in actors], "actor string").select(host_of())
    assert [r[0] for r in rows.collect()] == ["a.b", "a:b", "box", None, None, None]
