"""Sending rows as messages: every column and option, with a real server and real tasks."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from datetime import timedelta
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import redis
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the usual name

from lisa import Producer
from lisa.core.model.errors import ConfigError, LisaError, ServerUnavailable
from lisa.core.model.keys import Keys
from lisa.core.model.retry_policy import RetryPolicy
from lisa.pipeline.errors import unwrapped
from lisa.pipeline.jobs.schedule import schedule

TOPIC = "orders"
KEYS = Keys().topic(TOPIC)
LATER = "timestamp_millis(4102444800000)"  # 2100


@pytest.fixture
def producer(redis_url: str) -> Iterator[Producer]:
    with Producer(redis_url) as producer:
        yield producer


def waiting(client: redis.Redis) -> dict[str, int]:
    rows: Any = client.zrange(KEYS.waiting, 0, -1, withscores=True)
    return {name.decode(): int(due) for name, due in rows}


def stored(client: redis.Redis, key: str) -> dict[bytes, RetryPolicy]:
    rows: Any = client.hgetall(key)
    return {name: RetryPolicy.decode(text.decode()) for name, text in rows.items()}


def later(spark: SparkSession, count: int, *, partitions: int = 2) -> DataFrame:
    """Messages with ids, due in 2100."""
    return spark.range(0, count, 1, partitions).selectExpr(
        "cast(id AS string) AS id", "concat('body ', id) AS body", f"{LATER} AS due"
    )


def save(df: DataFrame, url: str, **options: object) -> None:
    given = {"url": url, "topic": TOPIC, **{name: str(one) for name, one in options.items()}}
    with unwrapped():
        df.write.format("lisa").options(**given).mode("append").save()


def test_every_type_of_body(spark: SparkSession, redis_url: str, producer: Producer) -> None:
    moment = "'at', timestamp_millis(0), 'on', date'2026-01-31'"
    bodies: dict[str, object] = {
        "'{\"a\": 1}'": '{"a": 1}',
        "cast('bytes' AS binary)": b"bytes",
        f"named_struct('a', 1, 'b', array('x', null), {moment}, 'm', map('k', 1.5D))": {
            "a": 1,
            "b": ["x", None],
            "at": "1970-01-01T00:00:00Z",
            "on": "2026-01-31",
            "m": {"k": 1.5},
        },
        "map(7, true)": {"7": True},
        "array(cast(1.10 AS decimal(4,2)))": ["1.10"],
    }
    for number, (body, expected) in enumerate(bodies.items()):
        df = spark.range(1).selectExpr(f"'{number}' AS id", f"{body} AS body", f"{LATER} AS due")
        assert schedule(df, url=redis_url, topic=TOPIC).accepted == 1
        found = producer.get(TOPIC, str(number))
        assert found is not None
        assert found.body == expected


def test_text_that_is_json_is_sent_as_json(
    spark: SparkSession, redis_url: str, producer: Producer
) -> None:
    texts = ['{"a": [1, null]}', '"word"', "12", "{no json"]
    df = spark.createDataFrame(list(map(list, enumerate(texts))), "id long, body string")
    done = schedule(
        df.withColumn("delay", F.lit(3_600_000)), url=redis_url, topic=TOPIC, body_format="json"
    )
    assert (done.accepted, done.refused) == (3, 1)
    assert "not valid JSON" in done.reasons[0]
    for number, text in enumerate(texts[:3]):
        found = producer.get(TOPIC, str(number))
        assert found is not None
        assert found.body == json.loads(text)


def test_due_times_and_delays(spark: SparkSession, redis_url: str, client: redis.Redis) -> None:
    def dues(column: str, **values: str) -> dict[str, int]:
        """The due times of rows with values of one type."""
        client.delete(KEYS.waiting)
        rows = [
            spark.range(1).selectExpr(f"'{name}' AS id", "'x' AS body", f"{value} AS {column}")
            for name, value in values.items()
        ]
        assert schedule(reduce(DataFrame.union, rows), url=redis_url, topic=TOPIC).refused == 0
        return waiting(client)

    found = dues(
        "due",
        milli="timestamp_millis(4102444800123)",
        micro="timestamp_micros(4102444800123001)",
        zone="timestamp'2100-01-01 00:00:00+01:00'",
        past="timestampadd(YEAR, -1, current_timestamp())",
    )
    assert found.pop("past") <= time.time() * 1000
    micro = 4102444800124  # never early
    assert found == {"milli": 4102444800123, "micro": micro, "zone": 4102441200000}
    assert dues("due", number="4102444800123") == {"number": 4102444800123}
    delays = {
        "interval '1 01:00:00.0001' day to second": 90_000_001,
        "90000": 90_000,
        "'1h30m'": 5_400_000,
    }
    for number, (delay, ms) in enumerate(delays.items()):
        before = int(time.time() * 1000)
        [due] = dues("delay", **{f"d{number}": delay}).values()
        assert before <= due - ms <= int(time.time() * 1000) + 1
    schedule(spark.range(1).selectExpr("'now' AS id", "'x' AS body"), url=redis_url, topic=TOPIC)
    assert waiting(client)["now"] <= time.time() * 1000


def test_ids_ttls_headers_and_policies(
    spark: SparkSession, redis_url: str, client: redis.Redis, producer: Producer
) -> None:
    df = spark.range(3).selectExpr(
        "id",
        "'x' AS body",
        f"{LATER} AS due",
        "CASE id WHEN 0 THEN interval 1 hour WHEN 1 THEN interval '0.0001' second END AS ttl",
        "CASE id WHEN 0 THEN map('b', '2', 'a', '1') END AS headers",
        "CASE id WHEN 0 THEN '0,0,2m' WHEN 1 THEN '' END AS retry",
    )
    assert schedule(df, url=redis_url, topic=TOPIC).accepted == 3
    first = producer.get(TOPIC, "0")
    assert first is not None
    assert first.headers == {"a": "1", "b": "2"}
    rows: Any = client.zrange(KEYS.expiry, 0, -1, withscores=True)
    assert {name: int(at) for name, at in rows} == {
        b"0": 4102444800000 + 3_600_000,
        b"1": 4102444800000 + 1,
    }
    assert stored(client, KEYS.policy) == {
        b"0": RetryPolicy((0, 0, 120_000)),
        b"1": RetryPolicy(()),
    }
    arrays = {
        "x": ("array(0, 120000)", (0, 120_000)),
        "y": ("array(interval 0 second, interval 2 minutes)", (0, 120_000)),
        "z": ("cast(array() AS array<bigint>)", ()),
    }
    for name, (retry, expected) in arrays.items():
        columns = (f"'{name}' AS id", "'x' AS body", "60000 AS delay", f"{retry} AS retry")
        schedule(spark.range(1).selectExpr(*columns), url=redis_url, topic=TOPIC)
        assert stored(client, KEYS.policy)[name.encode()] == RetryPolicy(expected)


def test_a_column_may_name_the_topic(
    spark: SparkSession, redis_url: str, producer: Producer
) -> None:
    df = spark.range(0, 1000, 1, 2).selectExpr(
        "cast(id AS string) AS id",
        "'x' AS body",
        "60000 AS delay",
        "CASE WHEN id = 999 THEN 'no topic!' WHEN id = 998 THEN null"
        " ELSE concat('t', id % 2) END AS topic",
    )
    done = schedule(df, url=redis_url)
    assert {name: one.accepted for name, one in done.topics.items() if one.accepted} == {
        "t0": 499,
        "t1": 499,
    }
    assert done.refused == 2
    assert producer.get("t1", "7") is not None
    assert producer.get("t0", "7") is None


def test_wrong_columns_are_named_before_a_row_is_sent(
    spark: SparkSession, redis_url: str, client: redis.Redis
) -> None:
    body = "'x' AS body"
    wrong: list[tuple[list[str], str]] = [
        ([body, "'soon' AS due"], "column 'due' has type string; it must be timestamp"),
        ([body, "1.5D AS due"], "column 'due' has type double"),
        ([body, "timestamp_ntz'2100-01-01' AS due"], "has type timestamp_ntz"),
        ([body, "interval 2 months AS delay"], "column 'delay' has type interval"),
        (["1 AS body"], "column 'body' has type int; it must be string, binary"),
        (["map(named_struct('a', 1), 1) AS body"], "column 'body' has type map<struct"),
        ([body, "1.5D AS id"], "column 'id' has type double; it must be string"),
        ([body, "true AS ttl"], "column 'ttl' has type boolean"),
        ([body, "map('a', 1) AS headers"], "column 'headers' has type map<string,int>"),
        ([body, "5 AS retry"], "column 'retry' has type int; it must be string"),
        ([body, "5 AS prio"], "a message has no column 'prio'"),
        (["'x' AS text"], "a message has no column 'text'"),
        (["1 AS delay"], "column 'body' is missing"),
        ([body, "1 AS due", "1 AS delay"], "'due' or column 'delay'"),
        ([body, "'t' AS topic"], "not both"),
    ]
    for columns, words in wrong:
        with pytest.raises(ConfigError) as caught:
            schedule(spark.range(1).selectExpr(*columns), url=redis_url, topic=TOPIC, job="j")
        assert words in str(caught.value)
        assert "\n" not in str(caught.value)
    assert client.dbsize() <= 1  # the layout's mark
    df = later(spark, 1).drop("id")
    with pytest.raises(ConfigError, match="give option 'job'"):
        schedule(df, url=redis_url, topic=TOPIC)
    with pytest.raises(ConfigError, match="'replace' needs a column 'id'"):
        schedule(df, url=redis_url, topic=TOPIC, job="j", on_duplicate="replace")
    with pytest.raises(ConfigError, match='mode\\("append"\\)'), unwrapped():
        later(spark, 1).write.format("lisa").options(url=redis_url, topic=TOPIC).mode(
            "overwrite"
        ).save()


def test_wrong_options_are_named(spark: SparkSession, redis_url: str) -> None:
    wrong = [
        ("topci", "x", "no option 'topci' for write: did you mean 'topic'?"),
        ("batch", "0", "option 'batch': '0' is not a whole number above 0"),
        ("batch", "1.5", "option 'batch'"),
        ("max_rate", "quick", "option 'max_rate': 'quick' is not a number above 0"),
        ("on_duplicate", "drop", "option 'on_duplicate': 'drop' is not one of keep"),
        ("dedupe_for", "1", "option 'dedupe_for': '1' is not a duration with a unit"),
        ("patience", "x", "option 'patience'"),
        ("body_format", "yaml", "option 'body_format'"),
        ("refused", "nfs://x/y", "option 'refused': 'nfs://x/y' cannot be used"),
        ("prefix", "a b", "prefix 'a b' is not allowed"),
        ("url", "http://x", "'http://x' is not a server address"),
        ("topic", "a b", "topic 'a b' is not allowed"),
    ]
    for name, value, words in wrong:
        with pytest.raises((ConfigError, ValueError)) as caught:
            save(later(spark, 1), **{"url": redis_url, name: value})
        assert words in str(caught.value)


def test_repeating_a_job_adds_nothing(
    spark: SparkSession, redis_url: str, client: redis.Redis
) -> None:
    first = schedule(later(spark, 3000), url=redis_url, topic=TOPIC)
    assert (first.accepted, first.duplicate) == (3000, 0)
    again = schedule(later(spark, 3000, partitions=3), url=redis_url, topic=TOPIC)
    assert (again.accepted, again.duplicate) == (0, 3000)
    assert len(waiting(client)) == 3000


def test_a_repeated_id_in_one_job_is_one_message(
    spark: SparkSession, redis_url: str, client: redis.Redis, tmp_path: Path
) -> None:
    """In one call, in different calls, and in different tasks."""
    twice = (
        later(spark, 1000)
        .union(later(spark, 1000, partitions=1))
        .union(later(spark, 10).union(later(spark, 10)).coalesce(1))
    )
    seen: list[tuple[int, int]] = []
    report = tmp_path / "deep" / "report.json"
    done = schedule(
        twice, url=redis_url, topic=TOPIC, report=str(report), progress=lambda *at: seen.append(at)
    )
    assert (done.accepted, done.duplicate) == (1000, 1020)
    assert len(waiting(client)) == 1000
    told: dict[str, Any] = json.loads(report.read_text("utf-8"))
    assert (told["accepted"], told["topics"][TOPIC]["accepted"]) == (1000, 1000)
    assert all(tasks <= total for tasks, total in seen)


def test_on_duplicate(
    spark: SparkSession, redis_url: str, producer: Producer, tmp_path: Path
) -> None:
    schedule(later(spark, 10), url=redis_url, topic=TOPIC)
    other = later(spark, 12).withColumn("body", F.lit("new"))
    refused = tmp_path / "refused"
    done = schedule(other, url=redis_url, topic=TOPIC, on_duplicate="reject", refused=str(refused))
    assert (done.accepted, done.refused) == (2, 10)
    assert "already exists" in done.reasons[0]
    done = schedule(other, url=redis_url, topic=TOPIC, on_duplicate="replace")
    assert (done.accepted, done.replaced) == (0, 12)
    found = producer.get(TOPIC, "3")
    assert found is not None
    assert found.body == "new"


EQUAL = [("same", 1)] * 10 + [("pair", 1)] * 2 + [("same", 2)] + [("one", 1)]


def equal_rows(spark: SparkSession, partitions: int) -> DataFrame:
    df = spark.createDataFrame(EQUAL, "body string, n int").repartition(partitions)
    return df.selectExpr("named_struct('b', body, 'n', n) AS body", f"{LATER} AS due")


def test_equal_rows_are_as_many_messages_in_any_partitioning(
    spark: SparkSession, redis_url: str, client: redis.Redis, producer: Producer, tmp_path: Path
) -> None:
    """Ids are the same with Spark's save and with `schedule`, with 1 or 5 tasks."""
    report = tmp_path / "report.json"

    def counts() -> tuple[int, int]:
        told = json.loads(report.read_text("utf-8"))
        return told["accepted"], told["duplicate"]

    def run(job: str) -> tuple[int, int]:
        done = schedule(equal_rows(spark, 4), url=redis_url, topic=TOPIC, job=job)
        return done.accepted, done.duplicate

    save(equal_rows(spark, 5), redis_url, job="monday", report=report)
    assert counts() == (14, 0)
    ids = set(waiting(client))
    assert len(ids) == 14
    save(equal_rows(spark, 1), redis_url, job="monday", report=report)
    assert counts() == (0, 14)
    assert run("monday") == (0, 14)
    # Some are deleted, as if they had never been sent: the job is completed.
    for message_id in sorted(ids)[::2]:
        client.delete(KEYS.body(message_id))
        client.zrem(KEYS.waiting, message_id)
    assert run("monday") == (7, 7)
    assert set(waiting(client)) == ids
    # Settled ones are not sent again within `dedupe_for`, by default a day for a job.
    for message_id in ids:
        assert producer.cancel(TOPIC, message_id) == "cancelled"
        assert client.ttl(KEYS.done(message_id)) > 80_000
    assert run("monday") == (0, 14)
    assert run("tuesday") == (14, 0), "the equal rows of another job are other messages"


def test_too_many_equal_rows_in_several_tasks_are_refused_and_schedule_completes_them(
    spark: SparkSession, redis_url: str, client: redis.Redis
) -> None:
    big = "x" * 900_000
    rows = [(big + str(n % 12), 4102444800000) for n in range(24)]
    halves = spark.sparkContext.parallelize(rows, 2)  # one of each two equal rows in each partition
    df = spark.createDataFrame(halves, "body string, due long")
    with pytest.raises(LisaError, match=r"lisa\.pipeline\.schedule with the same job"):
        save(df, redis_url, job="j")
    schedule(df, url=redis_url, topic=TOPIC, job="j")
    assert len(waiting(client)) == 24


def test_refused_rows_do_not_fail_the_job(
    spark: SparkSession, redis_url: str, client: redis.Redis, tmp_path: Path
) -> None:
    client.hset(KEYS.options, "max_body_bytes", "100")
    bad = [
        ("ok", "fine", 4102444800000, "0", 1),
        ("", "empty id", 4102444800000, "0", 1),
        ("i" * 300, "long id", 4102444800000, "0", 1),
        (None, "no id", 4102444800000, "0", 1),
        ("null-body", None, 4102444800000, "0", 1),
        ("null-due", "x", None, "0", 1),
        ("seconds", "x", 1763733600, "0", 1),
        ("date", "x", 20261224, "0", 1),
        ("year-10000", "x", 253402300800000, "0", 1),
        ("large", "x" * 101, 4102444800000, "0", 1),
        ("policy", "x", 4102444800000, "often", 1),
        ("ttl", "x", 4102444800000, "0", 0),
        ("ok2", "x" * 100, 4102444800000, "0", 1),
    ]
    df = spark.createDataFrame(bad, "id string, body string, due long, retry string, ttl long")
    done = schedule(df, url=redis_url, topic=TOPIC, refused=str(tmp_path / "refused"))
    assert (done.accepted, done.refused) == (2, 11)
    assert set(waiting(client)) == {"ok", "ok2"}
    texts = [Path(file).read_text("utf-8") for file in done.refused_files]
    lines = [json.loads(line) for text in texts for line in text.splitlines()]
    told = {
        line["row"]["body"] if line["row"]["id"] in (None, "") else line["id"]: line["reason"]
        for line in lines
    }
    assert len(lines) == 11
    reasons = {
        "empty id": "1 to 256 bytes",
        "large": "101 bytes",
        "policy": "retry",
        "ttl": "ttl",
        **dict.fromkeys(("no id", "null-body", "null-due"), "null"),
        "seconds": "looks like seconds",
        "date": "looks like a date",
        "year-10000": "9999",
    }
    assert all(words in told[name] for name, words in reasons.items()), told
    assert next(line for line in lines if line["id"] == "large")["row"]["body"] == "x" * 101


def test_a_lowered_body_limit_refuses_only_large_bodies(
    spark: SparkSession, redis_url: str, client: redis.Redis
) -> None:
    """The script rejects whole calls; the valid rows in them are still sent."""
    client.hset(
        KEYS.options, "max_body_bytes", "5000000000"
    )  # so that only the script's limit applies
    df = spark.range(700).selectExpr(
        "cast(id AS string) AS id",
        f"{LATER} AS due",
        "repeat('x', if(id IN (3, 400, 699), 1048577, 10)) AS body",
    )
    client.hset(KEYS.options, "max_body_bytes", str(1 << 20))
    done = schedule(df.coalesce(1), url=redis_url, topic=TOPIC)
    assert (done.accepted, done.refused) == (697, 3)


def test_a_full_topic_is_waited_for_and_then_refuses(
    spark: SparkSession, redis_url: str, client: redis.Redis, tmp_path: Path
) -> None:
    client.hset(KEYS.options, "capacity", "700")
    began = time.monotonic()
    done = schedule(
        later(spark, 2000, partitions=1),
        url=redis_url,
        topic=TOPIC,
        patience=timedelta(seconds=1),
        refused=str(tmp_path / "refused"),
    )
    assert time.monotonic() - began >= 1
    assert (done.accepted, done.refused) == (700, 1300)
    assert "capacity" in done.reasons[0]
    client.hset(KEYS.options, "capacity", "5000")
    done = schedule(later(spark, 2000), url=redis_url, topic=TOPIC)
    assert (done.accepted, done.duplicate, done.refused) == (1300, 700, 0)


def test_an_unreachable_server_is_a_one_line_error(spark: SparkSession) -> None:
    with pytest.raises(ServerUnavailable) as caught:
        schedule(
            later(spark, 10),
            url="redis://127.0.0.1:1/0",
            topic=TOPIC,
            patience=timedelta(milliseconds=200),
        )
    assert str(caught.value).startswith("redis://127.0.0.1:1/0 does not answer")
    assert "\n" not in str(caught.value)


def test_the_rate_limit_holds_over_all_tasks(
    spark: SparkSession, redis_url: str, client: redis.Redis
) -> None:
    schedule(later(spark, 10), url=redis_url, topic=TOPIC)  # start Python workers
    began = time.monotonic()
    done = schedule(later(spark, 900, partitions=3), url=redis_url, topic=TOPIC, max_rate=300)
    assert done.accepted == 890
    # The first window may be used in full: 30 rows in a tenth of a second.
    assert time.monotonic() - began >= (900 - 2 * 30) / 300
    assert not [key for key in client.scan_iter("lisa:pace:*") if client.pttl(key) < 0]


def test_a_job_may_raise_dedupe_for_but_not_lower_it(
    spark: SparkSession, redis_url: str, client: redis.Redis
) -> None:
    schedule(later(spark, 1), url=redis_url, topic=TOPIC, dedupe_for=timedelta(days=3))
    assert client.hget(KEYS.options, "dedupe_for") == b"259200000"
    schedule(later(spark, 1), url=redis_url, topic=TOPIC, dedupe_for=timedelta(days=2))
    assert client.hget(KEYS.options, "dedupe_for") == b"259200000"


def test_batch_limits_the_size_of_a_call(
    spark: SparkSession, redis_url: str, client: redis.Redis
) -> None:
    def calls() -> int:
        stats = client.info("commandstats")
        return int(stats.get("cmdstat_evalsha", {"calls": 0})["calls"])

    schedule(later(spark, 1), url=redis_url, topic=TOPIC)  # load the script
    before = calls()
    schedule(later(spark, 100, partitions=1), url=redis_url, topic=TOPIC, batch=10)
    assert calls() - before == 10


def test_prefix_and_server_from_the_environment(
    spark: SparkSession, redis_url: str, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    schedule(later(spark, 3), url=redis_url, topic=TOPIC, prefix="shop")
    assert client.zcard(Keys("shop").topic(TOPIC).waiting) == 3
    assert not client.exists(KEYS.waiting)
    monkeypatch.setenv("LISA_REDIS_URL", redis_url)
    monkeypatch.setenv("LISA_PREFIX", "other")
    schedule(later(spark, 3), topic=TOPIC)
    assert client.zcard(Keys("other").topic(TOPIC).waiting) == 3
