"""Sending rows as messages: every column and option, with a real server and real tasks."""

from __future__ import annotations

import json
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.sql import functions as F  # noqa: N812 - the usual name

from lisa import Producer
from lisa.core.model.errors import ConfigError, LisaError, ServerUnavailable
from lisa.core.model.keys import Keys
from lisa.core.model.retry_policy import RetryPolicy
from lisa.pipeline.errors import unwrapped
from lisa.pipeline.jobs.schedule import schedule

if TYPE_CHECKING:
    from collections.abc import Iterator

    import redis
    from pyspark.sql import DataFrame, SparkSession

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


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("'text'", "text"),
        ("'{\"a\": 1}'", '{"a": 1}'),
        ("cast('bytes' AS binary)", b"bytes"),
        ("named_struct('a', 1, 'b', array('x', null))", {"a": 1, "b": ["x", None]}),
        ("map('k', 1.5D)", {"k": 1.5}),
        ("map(7, true)", {"7": True}),
        ("array(1, 2)", [1, 2]),
        (
            "named_struct('at', timestamp_millis(0), 'on', date'2026-01-31', 'm', map('x', 1))",
            {"at": "1970-01-01T00:00:00Z", "on": "2026-01-31", "m": {"x": 1}},
        ),
        ("array(cast(1.10 AS decimal(4,2)))", ["1.10"]),
    ],
)
def test_every_type_of_body(
    spark: SparkSession, redis_url: str, producer: Producer, body: str, expected: object
) -> None:
    df = spark.range(1).selectExpr("'a' AS id", f"{body} AS body", f"{LATER} AS due")
    assert schedule(df, url=redis_url, topic=TOPIC).accepted == 1
    found = producer.get(TOPIC, "a")
    assert found is not None
    assert found.body == expected


@pytest.mark.parametrize("text", ['{"a": [1, null]}', '"word"', "12"])
def test_text_that_is_json_is_sent_as_json(
    spark: SparkSession, redis_url: str, producer: Producer, text: str
) -> None:
    df = spark.createDataFrame([("a", text), ("b", "{no json")], "id string, body string")
    done = schedule(
        df.withColumn("delay", F.lit(3_600_000)), url=redis_url, topic=TOPIC, body_format="json"
    )
    assert (done.accepted, done.refused) == (1, 1)
    found = producer.get(TOPIC, "a")
    assert found is not None
    assert found.body == json.loads(text)
    assert "not valid JSON" in done.reasons[0]


@pytest.mark.parametrize(
    ("due", "expected_ms"),
    [
        ("timestamp_millis(4102444800123)", 4102444800123),
        ("timestamp_micros(4102444800123001)", 4102444800124),  # never early
        ("timestamp'2100-01-01 00:00:00+01:00'", 4102441200000),
        ("4102444800123", 4102444800123),
    ],
)
def test_due_is_a_timestamp_or_epoch_milliseconds(
    spark: SparkSession, redis_url: str, client: redis.Redis, due: str, expected_ms: int
) -> None:
    df = spark.range(1).selectExpr("'a' AS id", "'x' AS body", f"{due} AS due")
    schedule(df, url=redis_url, topic=TOPIC)
    assert waiting(client) == {"a": expected_ms}


@pytest.mark.parametrize(
    ("delay", "expected_ms"),
    [
        ("interval '1 01:00:00.0001' day to second", 90_000_001),
        ("interval 5 minutes", 300_000),
        ("90000", 90_000),
    ],
)
def test_a_delay_counts_from_the_servers_clock(
    spark: SparkSession, redis_url: str, client: redis.Redis, delay: str, expected_ms: int
) -> None:
    df = spark.range(1).selectExpr("'a' AS id", "'x' AS body", f"{delay} AS delay")
    before = int(time.time() * 1000)
    schedule(df, url=redis_url, topic=TOPIC)
    assert before <= waiting(client)["a"] - expected_ms <= int(time.time() * 1000) + 1


def test_past_and_missing_due_times_are_due_now(
    spark: SparkSession, redis_url: str, client: redis.Redis
) -> None:
    rows = spark.range(1)
    year_ago = "timestampadd(YEAR, -1, current_timestamp()) AS due"
    past = rows.selectExpr("'past' AS id", "'x' AS body", year_ago)
    schedule(past, url=redis_url, topic=TOPIC)
    schedule(rows.selectExpr("'now' AS id", "'x' AS body"), url=redis_url, topic=TOPIC)
    now = time.time() * 1000
    assert all(due <= now for due in waiting(client).values())
    assert len(waiting(client)) == 2


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


@pytest.mark.parametrize(
    ("retry", "expected"),
    [
        ("array(0, 120000)", (0, 120_000)),
        ("array(interval 0 second, interval 2 minutes)", (0, 120_000)),
        ("cast(array() AS array<bigint>)", ()),
    ],
)
def test_a_policy_may_be_an_array(
    spark: SparkSession, redis_url: str, client: redis.Redis, retry: str, expected: tuple[int, ...]
) -> None:
    df = spark.range(1).selectExpr(
        "'a' AS id", "'x' AS body", "60000 AS delay", f"{retry} AS retry"
    )
    schedule(df, url=redis_url, topic=TOPIC)
    assert stored(client, KEYS.policy) == {b"a": RetryPolicy(expected)}


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


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        (["'x' AS body", "'soon' AS due"], "column 'due' has type string; it must be timestamp"),
        (["'x' AS body", "1.5D AS due"], "column 'due' has type double"),
        (["'x' AS body", "timestamp_ntz'2100-01-01' AS due"], "has type timestamp_ntz"),
        (["'x' AS body", "interval 2 months AS delay"], "column 'delay' has type interval"),
        (["1 AS body"], "column 'body' has type int; it must be string, binary"),
        (["map(named_struct('a', 1), 1) AS body"], "column 'body' has type map<struct"),
        (["'x' AS body", "1.5D AS id"], "column 'id' has type double; it must be string"),
        (["'x' AS body", "true AS ttl"], "column 'ttl' has type boolean"),
        (["'x' AS body", "map('a', 1) AS headers"], "column 'headers' has type map<string,int>"),
        (["'x' AS body", "5 AS retry"], "column 'retry' has type int; it must be string"),
        (["'x' AS body", "5 AS prio"], "a message has no column 'prio'"),
        (["'x' AS text"], "a message has no column 'text'"),
        (["1 AS delay"], "column 'body' is missing"),
        (["'x' AS body", "1 AS due", "1 AS delay"], "'due' or column 'delay'"),
        (["'x' AS body", "'t' AS topic"], "not both"),
    ],
)
def test_wrong_columns_are_named_before_a_row_is_sent(
    spark: SparkSession, redis_url: str, client: redis.Redis, columns: list[str], words: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        schedule(spark.range(1).selectExpr(*columns), url=redis_url, topic=TOPIC, job="j")
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert client.dbsize() <= 1  # the layout's mark


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"topci": "x"}, "no option 'topci' for write: did you mean 'topic'?"),
        ({"batch": "0"}, "option 'batch': '0' is not a whole number above 0"),
        ({"batch": "1.5"}, "option 'batch'"),
        ({"max_rate": "quick"}, "option 'max_rate': 'quick' is not a number above 0"),
        ({"on_duplicate": "drop"}, "option 'on_duplicate': 'drop' is not one of keep"),
        ({"dedupe_for": "1"}, "option 'dedupe_for': '1' is not a duration with a unit"),
        ({"patience": "x"}, "option 'patience'"),
        ({"body_format": "yaml"}, "option 'body_format'"),
        ({"refused": "nfs://x/y"}, "option 'refused': 'nfs://x/y' cannot be used"),
        ({"prefix": "a b"}, "prefix 'a b' is not allowed"),
        ({"url": "http://x"}, "'http://x' is not a server address"),
        ({"topic": "a b"}, "topic 'a b' is not allowed"),
    ],
)
def test_wrong_options_are_named(
    spark: SparkSession, redis_url: str, options: dict[str, str], words: str
) -> None:
    with pytest.raises((ConfigError, ValueError)) as caught:
        save(later(spark, 1), **{"url": redis_url, **options})
    assert words in str(caught.value)


def test_rows_without_ids_need_a_job_and_on_duplicate_keep(
    spark: SparkSession, redis_url: str
) -> None:
    df = later(spark, 1).drop("id")
    with pytest.raises(ConfigError, match="give option 'job'"):
        schedule(df, url=redis_url, topic=TOPIC)
    with pytest.raises(ConfigError, match="'replace' needs a column 'id'"):
        schedule(df, url=redis_url, topic=TOPIC, job="j", on_duplicate="replace")


def test_overwriting_is_refused(spark: SparkSession, redis_url: str) -> None:
    with pytest.raises(ConfigError, match='mode\\("append"\\)'), unwrapped():
        later(spark, 1).write.format("lisa").options(url=redis_url, topic=TOPIC).mode(
            "overwrite"
        ).save()


def test_repeating_a_job_adds_nothing(
    spark: SparkSession, redis_url: str, client: redis.Redis
) -> None:
    first = schedule(later(spark, 3000), url=redis_url, topic=TOPIC)
    assert (first.accepted, first.duplicate) == (3000, 0)
    again = schedule(later(spark, 3000, partitions=3), url=redis_url, topic=TOPIC)
    assert (again.accepted, again.duplicate) == (0, 3000)
    assert len(waiting(client)) == 3000


def test_a_repeated_id_in_one_job_is_one_message(
    spark: SparkSession, redis_url: str, client: redis.Redis
) -> None:
    """In one call, in different calls, and in different tasks."""
    twice = (
        later(spark, 2000)
        .union(later(spark, 2000, partitions=1))
        .union(later(spark, 10).union(later(spark, 10)).coalesce(1))
    )
    done = schedule(twice, url=redis_url, topic=TOPIC)
    assert (done.accepted, done.duplicate) == (2000, 2020)
    assert len(waiting(client)) == 2000


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


def test_ten_equal_rows_are_ten_messages_in_any_partitioning(
    spark: SparkSession, redis_url: str, client: redis.Redis, tmp_path: Path
) -> None:
    """Ids are the same with Spark's save and with `schedule`, with 1 or 5 tasks."""
    report = tmp_path / "report.json"

    def counts() -> tuple[int, int]:
        told = json.loads(report.read_text("utf-8"))
        return told["accepted"], told["duplicate"]

    save(equal_rows(spark, 5), redis_url, job="monday", report=report)
    assert counts() == (14, 0)
    ids = set(waiting(client))
    assert len(ids) == 14
    for partitions in (1, 3, 4):
        save(equal_rows(spark, partitions), redis_url, job="monday", report=report)
        assert counts() == (0, 14)
    done = schedule(equal_rows(spark, 4), url=redis_url, topic=TOPIC, job="monday")
    assert (done.accepted, done.duplicate) == (0, 14)
    assert set(waiting(client)) == ids


def test_equal_rows_of_two_jobs_are_different_messages(
    spark: SparkSession, redis_url: str, client: redis.Redis
) -> None:
    for day in ("monday", "tuesday"):
        done = schedule(equal_rows(spark, 3), url=redis_url, topic=TOPIC, job=day)
        assert (done.accepted, done.duplicate) == (14, 0)
    assert len(waiting(client)) == 28


def test_repeating_an_aborted_job_completes_it(
    spark: SparkSession, redis_url: str, client: redis.Redis
) -> None:
    """Some messages of the first run are deleted, as if they had never been sent."""
    schedule(equal_rows(spark, 3), url=redis_url, topic=TOPIC, job="j")
    before = set(waiting(client))
    for message_id in sorted(before)[::2]:
        client.delete(KEYS.body(message_id))
        client.zrem(KEYS.waiting, message_id)
    save(equal_rows(spark, 5), redis_url, job="j")
    assert set(waiting(client)) == before


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
    assert "1 to 256 bytes" in told["empty id"]
    assert "null" in told["no id"]
    assert "null" in told["null-body"]
    assert "null" in told["null-due"]
    assert "looks like seconds" in told["seconds"]
    assert "looks like a date" in told["date"]
    assert "9999" in told["year-10000"]
    assert "101 bytes" in told["large"]
    assert "retry" in told["policy"]
    assert "ttl" in told["ttl"]
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
    began = time.monotonic()
    with pytest.raises(ServerUnavailable) as caught:
        schedule(
            later(spark, 10),
            url="redis://127.0.0.1:1/0",
            topic=TOPIC,
            patience=timedelta(milliseconds=200),
        )
    assert str(caught.value).startswith("redis://127.0.0.1:1/0 does not answer")
    assert "\n" not in str(caught.value)
    assert time.monotonic() - began < 60


def test_the_rate_limit_holds_over_all_tasks(
    spark: SparkSession, redis_url: str, client: redis.Redis
) -> None:
    schedule(later(spark, 10), url=redis_url, topic=TOPIC)  # start Python workers
    began = time.monotonic()
    done = schedule(later(spark, 900, partitions=3), url=redis_url, topic=TOPIC, max_rate=300)
    assert done.accepted == 890
    # The first window may be used in full: 30 rows in a tenth of a second.
    assert time.monotonic() - began >= (900 - 2 * 30) / 300
    assert time.monotonic() - began < 30
    assert not [key for key in client.scan_iter("lisa:pace:*") if client.pttl(key) < 0]


def test_a_job_may_raise_dedupe_for_but_not_lower_it(
    spark: SparkSession, redis_url: str, client: redis.Redis
) -> None:
    schedule(later(spark, 1), url=redis_url, topic=TOPIC, dedupe_for=timedelta(days=3))
    assert client.hget(KEYS.options, "dedupe_for") == b"259200000"
    schedule(later(spark, 1), url=redis_url, topic=TOPIC, dedupe_for=timedelta(days=2))
    assert client.hget(KEYS.options, "dedupe_for") == b"259200000"


def test_settled_messages_are_not_sent_again_within_dedupe_for(
    spark: SparkSession, redis_url: str, client: redis.Redis, producer: Producer
) -> None:
    done = schedule(equal_rows(spark, 2), url=redis_url, topic=TOPIC, job="j")
    for message_id in waiting(client):
        assert producer.cancel(TOPIC, message_id) == "cancelled"
        # The default retention is a minute; these are kept for a day.
        assert client.ttl(KEYS.done(message_id)) > 80_000
    again = schedule(equal_rows(spark, 3), url=redis_url, topic=TOPIC, job="j")
    assert (done.accepted, again.accepted, again.duplicate) == (14, 0, 14)


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


def test_the_report_equals_the_result(spark: SparkSession, redis_url: str, tmp_path: Path) -> None:
    report = tmp_path / "deep" / "report.json"
    seen: list[tuple[int, int]] = []
    done = schedule(
        later(spark, 50),
        url=redis_url,
        topic=TOPIC,
        report=str(report),
        progress=lambda tasks, total: seen.append((tasks, total)),
    )
    told: dict[str, Any] = json.loads(report.read_text("utf-8"))
    assert told["accepted"] == done.accepted == 50
    assert told["topics"][TOPIC]["accepted"] == done.topics[TOPIC].accepted == 50
    assert all(tasks <= total for tasks, total in seen)


def test_due_times_are_independent_of_the_session_time_zone(
    spark: SparkSession, redis_url: str, client: redis.Redis
) -> None:
    moment = datetime(2100, 6, 1, 12, 0, 0, 1, tzinfo=UTC)
    df = spark.createDataFrame([("a", "x", moment)], "id string, body string, due timestamp")
    schedule(df, url=redis_url, topic=TOPIC)
    assert waiting(client) == {"a": int(moment.timestamp()) * 1000 + 1}
