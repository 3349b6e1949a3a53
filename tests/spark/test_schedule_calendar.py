"""Rows with wall times, windows and late policies of their own."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import redis
from click.testing import Result
from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the usual name

from lisa import Manager, Producer
from lisa.core.model.keys import LOCAL_HEADER, WINDOW_HEADER, Keys
from lisa.pipeline.jobs.schedule import schedule
from tests.roles import Cast
from tests.servers import wait_until

TOPIC = "orders"
KEYS = Keys().topic(TOPIC)
NIGHT_MS = 4_102_441_200_000  # 2099-12-31 23:00 UTC, a Thursday
OPENS_MS = 4_102_473_600_000  # 2100-01-01 09:00 in Berlin
HOUR_MS = 3_600_000


def scores(client: redis.Redis, key: str) -> dict[str, int]:
    rows: Any = client.zrange(key, 0, -1, withscores=True)
    return {name.decode(): int(score) for name, score in rows}


def test_rows_are_due_at_nine_in_their_own_time_zone(
    spark: SparkSession, redis_url: str, client: redis.Redis
) -> None:
    rows = [
        ("tokyo", "2100-01-01T09:00", "Asia/Tokyo"),
        ("berlin", "2100-01-01 09:00:00", "Europe/Berlin"),
        ("berlin-too", "2100-01-01T09:00", "Europe/Berlin"),
        ("offset", "2100-01-01T09:00", "+05:30"),
        ("skipped", "2027-03-28T02:30", "Europe/Berlin"),
        ("no-zone", "2100-01-01T09:00", None),
        ("no-time", None, "Asia/Tokyo"),
        ("text", "soon", "Asia/Tokyo"),
        ("nowhere", "2100-01-01T09:00", "Europe/Atlantis"),
    ]
    df = spark.createDataFrame(rows, "id string, at_local string, tz string")
    done = schedule(df.withColumn("body", F.lit("x")), url=redis_url, topic=TOPIC)
    assert (done.accepted, done.refused) == (5, 4)
    due = scores(client, KEYS.waiting)
    assert due == {
        "tokyo": 4_102_444_800_000,
        "berlin": OPENS_MS,
        "berlin-too": OPENS_MS,
        "offset": 4_102_457_400_000,
        "skipped": 1_806_195_600_000,  # right after the gap, at 03:00
    }
    assert scores(client, KEYS.local) == due, "managers follow these messages"
    assert client.zscore(Keys().scheduled, TOPIC) is not None
    reasons = " ".join(done.reasons)
    for words in ("no-zone: at_local: at_local needs tz", "no-time: at_local: value is null"):
        assert words in reasons
    assert "'soon' is not a local time" in reasons
    assert "Europe/Atlantis" in reasons


def test_a_row_is_placed_as_by_a_producer(
    spark: SparkSession, redis_url: str, client: redis.Redis
) -> None:
    window, wall = "mon-fri 9-17", "2100-01-02T20:00"  # a Saturday
    df = spark.range(1).selectExpr(
        "'row' AS id",
        "'x' AS body",
        f"to_timestamp_ntz('{wall}') AS at_local",
        "'Europe/Berlin' AS tz",
        f"'{window}' AS window",
        "map('b', '2', 'a', '1') AS headers",
        "interval 1 hour AS ttl",
    )
    assert schedule(df, url=redis_url, topic=TOPIC).accepted == 1
    with Producer(redis_url) as producer:
        producer.send(
            TOPIC,
            "x",
            id="sent",
            at_local=wall,
            tz="Europe/Berlin",
            window=window,
            headers={"a": "1", "b": "2"},
            ttl="1h",
        )
        row, sent = producer.get(TOPIC, "row"), producer.get(TOPIC, "sent")
    assert row is not None
    assert sent is not None
    assert row.headers == sent.headers
    assert row.headers.keys() == {WINDOW_HEADER, LOCAL_HEADER, "a", "b"}
    for key in (KEYS.waiting, KEYS.local, KEYS.expiry):
        found = scores(client, key)
        assert found["row"] == found["sent"], key


def test_windows_of_rows_move_their_due_times(
    spark: SparkSession, redis_url: str, client: redis.Redis
) -> None:
    rows = [("moved", "9-17"), ("open", "always"), ("none", None), ("never", "not mon-sun")]
    df = spark.createDataFrame(rows, "id string, window string").selectExpr(
        "id", "window", "'Europe/Berlin' AS tz", f"{NIGHT_MS} AS due", "'x' AS body"
    )
    done = schedule(df, url=redis_url, topic=TOPIC)
    assert (done.accepted, done.refused) == (3, 1)
    assert "never: window:" in done.reasons[0]
    night = {"open": NIGHT_MS, "none": NIGHT_MS}
    assert scores(client, KEYS.waiting) == {"moved": OPENS_MS} | night
    assert not client.exists(KEYS.local)


def test_ids_do_not_depend_on_when_a_window_opens(
    spark: SparkSession, redis_url: str, client: redis.Redis
) -> None:
    """A past due time moves to another opening each time the job runs."""
    now = time.gmtime(time.time() + 7200)
    df = spark.range(5).selectExpr(
        "concat('body ', id) AS body", "1 AS delay", f"'{now.tm_hour}-{now.tm_hour + 1}' AS window"
    )
    first = schedule(df, url=redis_url, topic=TOPIC, job="calls")
    moved = scores(client, KEYS.waiting)
    client.delete(KEYS.waiting)
    again = schedule(df.withColumn("delay", F.lit(1)), url=redis_url, topic=TOPIC, job="calls")
    assert (first.accepted, again.accepted, again.duplicate) == (5, 0, 5)
    assert all(due > time.time() * 1000 for due in moved.values())


def test_late_policies_of_rows(spark: SparkSession, redis_url: str, client: redis.Redis) -> None:
    hour_ago = int(time.time() * 1000) - HOUR_MS
    rows = [
        ("skip", "skip after 10m", "7s"),
        ("run", "run", None),
        ("garbage", "garbage after 30m", None),
        ("none", None, "9s"),
        ("plain", None, None),
        ("collapse", "collapse after 10m", None),
        ("word", "drop it", None),
    ]
    df = spark.createDataFrame(rows, "id string, late string, retry string").selectExpr(
        "*", "'x' AS body", f"{hour_ago} AS due"
    )
    done = schedule(df, url=redis_url, topic=TOPIC)
    assert (done.accepted, done.refused) == (5, 2)
    assert "collapse keeps the newest occurrence" in " ".join(done.reasons)
    policies: Any = client.hgetall(KEYS.policy)
    assert policies == {
        b"skip": b"7000;600000,skip",
        b"run": b"*;0,run",
        b"garbage": b"*;1800000,garbage",
        b"none": b"9000",
    }
    Cast(redis_url, TOPIC).declare()
    with Producer(redis_url) as producer:
        with Manager(redis_url):
            wait_until(lambda: not client.exists(KEYS.waiting))
        found = {name: producer.get(TOPIC, name) for name, *_ in rows[:5]}
    states = {name: one.state if one else None for name, one in found.items()}
    ready = {"run": "ready", "none": "ready", "plain": "ready"}
    assert states == {"skip": "skipped", "garbage": "garbage"} | ready


def test_the_command_takes_columns_and_constants(
    pipeline: Callable[..., Result], redis_url: str, client: redis.Redis, tmp_path: Path
) -> None:
    """Only options make a column a wall time, a zone, a window or a policy."""
    source = tmp_path / "campaign.csv"
    source.write_text(
        "number,nine,zone,window,late\n"
        "1,2100-01-01T09:00,Asia/Tokyo,front,no\n"
        "2,2100-01-01T09:00,Europe/Berlin,back,yes\n",
        "utf-8",
    )
    whole = (str(source), "--topic", TOPIC, "--id", "number", "--redis", redis_url, "--json")
    more = ("--at-local", "nine", "--tz", "zone", "--late", "skip after 10m")
    done = pipeline("schedule", *whole, *more)
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["accepted"] == 2
    assert scores(client, KEYS.waiting) == {"1": 4_102_444_800_000, "2": OPENS_MS}
    policies: Any = client.hgetall(KEYS.policy)
    assert set(policies.values()) == {b"*;600000,skip"}
    with Producer(redis_url) as producer:
        found = producer.get(TOPIC, "1")
    assert found is not None
    assert found.body == {"window": "front", "late": "no"}
    for options, words in (
        (("--late", "often"), "--late: 'often' is neither a column"),
        (("--at-local", "nine", "--tz", "Mars"), "--tz: 'Mars' is neither a column"),
        (("--window", "25-26"), "--window: '25-26' is neither a column"),
        (("--at-local", "nine"), "column 'at_local' needs a column 'tz'"),
        (("--tz", "UTC"), "column 'tz' needs a column 'at_local' or 'window'"),
        (("--at-local", "nine", "--due", "nine"), "give one of --due, --delay and --at-local"),
        (("--at-local", "eight"), "--at-local: no column 'eight'"),
    ):
        wrong = pipeline("schedule", *whole, *options)
        assert wrong.exit_code == 2, wrong.output
        assert words in wrong.output
