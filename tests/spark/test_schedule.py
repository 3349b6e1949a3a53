"""Sending rows as messages: every column and option, with a real server and real tasks."""

import json
import threading
import time
from dataclasses import asdict
from datetime import timedelta
from functools import reduce
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.java_gateway import ensure_callback_server_started
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812 - the usual name

from lisa import Manager
from lisa.core.model.errors import ConfigError, LisaError
from lisa.core.model.keys import LOCAL_HEADER, WINDOW_HEADER, Keys
from lisa.core.model.retry_policy import RetryPolicy
from lisa.pipeline.errors import unwrapped
from lisa.pipeline.jobs.schedule import Scheduled, schedule
from lisa.pipeline.source import writer
from lisa.pipeline.source.outcome import Counts
from lisa.pipeline.source.writer import by_due
from tests.roles import Cast
from tests.servers import wait_until
from tests.spark.jobs import KEYS, TOPIC, Jobs

LATER_MS = 4_102_444_800_000  # 2100
LATER = f"timestamp_millis({LATER_MS})"


def policies(jobs: Jobs) -> dict[str, RetryPolicy]:
    rows: Any = jobs.client.hgetall(KEYS.policy)
    return {name.decode(): RetryPolicy.decode(text.decode()) for name, text in rows.items()}


def later(jobs: Jobs, count: int, *, partitions: int = 2) -> DataFrame:
    """Messages with ids, due in 2100."""
    return jobs.spark.range(0, count, 1, partitions).selectExpr(
        "cast(id AS string) AS id", "concat('body ', id) AS body", f"{LATER} AS due"
    )


def send(jobs: Jobs, *columns: str, count: int = 1, **options: Any) -> Scheduled:
    """Send rows made of SQL expressions."""
    return jobs.schedule(jobs.spark.range(0, count, 1, 2).selectExpr(*columns), **options)


def save(jobs: Jobs, df: DataFrame, **options: object) -> None:
    given = {"url": jobs.url, "topic": TOPIC, **{name: str(one) for name, one in options.items()}}
    with unwrapped():
        df.write.format("lisa").options(**given).mode("append").save()


def test_every_type_of_body(jobs: Jobs) -> None:
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
        "array(1.1F, 0F, 16777216F, 3.4028234e38F)": [1.1, 0.0, 16777216.0, 3.4028235e38],
        "array(18446744073709551615, 18446744073709551616)": [(1 << 64) - 1, str(1 << 64)],
    }
    for number, (body, expected) in enumerate(bodies.items()):
        send(jobs, f"'{number}' AS id", f"{body} AS body", f"{LATER} AS due")
        assert jobs.message(str(number)).body == expected


def test_text_that_is_json_is_sent_as_json(jobs: Jobs) -> None:
    texts = ['{"a": [1, null]}', '"word"', "12", "{no json"]
    df = jobs.spark.createDataFrame(list(map(list, enumerate(texts))), "id long, body string")
    done = jobs.schedule(df.withColumn("delay", F.lit(3_600_000)), body_format="json")
    assert (done.accepted, done.refused) == (3, 1)
    assert "not valid JSON" in done.reasons[0]
    for number, text in enumerate(texts[:3]):
        assert jobs.message(str(number)).body == json.loads(text)


def test_due_times_and_delays(jobs: Jobs) -> None:
    def dues(column: str, **values: str) -> dict[str, int]:
        """The due times of rows with values of one type."""
        jobs.client.delete(KEYS.waiting)
        rows = [
            jobs.spark.range(1).selectExpr(f"'{name}' AS id", "'x' AS body", f"{value} AS {column}")
            for name, value in values.items()
        ]
        assert jobs.schedule(reduce(DataFrame.union, rows)).refused == 0
        return jobs.scores()

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
    send(jobs, "'now' AS id", "'x' AS body")
    assert jobs.scores()["now"] <= time.time() * 1000


def test_ids_ttls_headers_and_policies(jobs: Jobs) -> None:
    done = send(
        jobs,
        "id",
        "'x' AS body",
        f"{LATER} AS due",
        "CASE id WHEN 0 THEN interval 1 hour WHEN 1 THEN interval '0.0001' second END AS ttl",
        "CASE id WHEN 0 THEN map('b', '2', 'a', '1') END AS headers",
        "CASE id WHEN 0 THEN '0,0,2m' WHEN 1 THEN '' END AS retry",
        count=3,
    )
    assert done.accepted == 3
    assert jobs.message("0").headers == {"a": "1", "b": "2"}
    assert jobs.scores(KEYS.expiry) == {"0": LATER_MS + 3_600_000, "1": LATER_MS + 1}
    assert policies(jobs) == {"0": RetryPolicy((0, 0, 120_000)), "1": RetryPolicy(())}
    arrays = {
        "x": ("array(0, 120000)", (0, 120_000)),
        "y": ("array(interval 0 second, interval 2 minutes)", (0, 120_000)),
        "z": ("cast(array() AS array<bigint>)", ()),
    }
    for name, (retry, expected) in arrays.items():
        send(jobs, f"'{name}' AS id", "'x' AS body", "60000 AS delay", f"{retry} AS retry")
        assert policies(jobs)[name] == RetryPolicy(expected)


def test_a_column_may_have_keys(jobs: Jobs) -> None:
    def rows(*pairs: tuple[str | None, str | None]) -> DataFrame:
        made = jobs.spark.createDataFrame(list(pairs), "key string, id string")
        return made.selectExpr("key", "id", "'x' AS body", f"{LATER} AS due")

    given = rows(("k/1", "a"), ("k/1", "b"), (None, "a"), ("ключ *", "a"))
    assert jobs.schedule(given).accepted == 4
    assert set(jobs.scores()) == {"k/1\x1fa", "k/1\x1fb", "a", "ключ *\x1fa"}
    listed = jobs.producer.list_key(TOPIC, "k/1")
    assert [one.id for one in listed] == ["k/1\x1fa", "k/1\x1fb"]
    # Without a key, an id may be one that Lisa returned.
    whole = "if(key IS NULL, id, concat(key, char(31), id)) AS id"
    again = jobs.schedule(given.selectExpr(whole, "body", "due"))
    assert (again.accepted, again.duplicate) == (0, 4)
    wrong = (("", "a"), ("k", "~1"), ("x" * 257, "a"), ("k", None), ("k", "a\x1fb"))
    refused = jobs.schedule(rows(*wrong))
    assert (refused.accepted, refused.refused) == (0, 5)
    assert any("that of messages with debounce" in reason for reason in refused.reasons)


def test_equal_rows_of_two_keys_are_different_messages(jobs: Jobs) -> None:
    """Ids are derived from the key, too, and are independent of the tasks."""
    rows = jobs.spark.range(0, 30, 1, 3).selectExpr(
        "if(id % 3 = 2, null, id % 3) AS key", "'x' AS body", f"{LATER} AS due"
    )
    assert jobs.schedule(rows, job="j").accepted == 30
    ids = set(jobs.scores())
    assert [jobs.producer.count_key(TOPIC, key) for key in "01"] == [10, 10]
    assert jobs.schedule(rows.repartition(2), job="j").duplicate == 30
    save(jobs, rows.repartition(5), job="j")
    assert set(jobs.scores()) == ids


def test_a_column_may_name_the_topic(jobs: Jobs) -> None:
    topic = "CASE id WHEN 999 THEN 'no topic!' WHEN 998 THEN null ELSE concat('t', id % 2) END"
    columns = ("cast(id AS string) AS id", "'x' AS body", "60000 AS delay", f"{topic} AS topic")
    done = send(jobs, *columns, count=1000, topic=None)
    accepted = {name: one.accepted for name, one in done.topics.items() if one.accepted}
    assert accepted == {"t0": 499, "t1": 499}
    assert done.refused == 2
    assert jobs.message("7", "t1")
    assert jobs.producer.get("t0", "7") is None


def test_wrong_columns_are_named_before_a_row_is_sent(jobs: Jobs) -> None:
    body = "'x' AS body"
    wrong: list[tuple[list[str], str]] = [
        ([body, "'soon' AS due"], "column 'due' has type string; it must be timestamp"),
        ([body, "1.5D AS due"], "column 'due' has type double"),
        ([body, "timestamp_ntz'2100-01-01' AS due"], "has type timestamp_ntz"),
        ([body, "interval 2 months AS delay"], "column 'delay' has type interval"),
        (["1 AS body"], "column 'body' has type int; it must be string, binary"),
        (["map(named_struct('a', 1), 1) AS body"], "column 'body' has type map<struct"),
        (["array(named_struct('a', 1, 'a', 2)) AS body"], "a struct (with different names)"),
        ([body, "1.5D AS id"], "column 'id' has type double; it must be string"),
        ([body, "true AS ttl"], "column 'ttl' has type boolean"),
        ([body, "map('a', 1) AS headers"], "column 'headers' has type map<string,int>"),
        ([body, "5 AS retry"], "column 'retry' has type int; it must be string"),
        ([body, "5 AS prio"], "a message has no column 'prio'"),
        (["1 AS delay"], "column 'body' is missing"),
        ([body, "1 AS due", "1 AS delay"], "'due' or column 'delay'"),
        ([body, "'t' AS topic"], "not both"),
    ]
    for columns, words in wrong:
        with pytest.raises(ConfigError) as caught:
            send(jobs, *columns, job="j")
        assert words in str(caught.value)
        assert "\n" not in str(caught.value)
    assert jobs.client.dbsize() <= 1  # the layout's mark
    df = later(jobs, 1).drop("id")
    with pytest.raises(ConfigError, match="give option 'job'"):
        jobs.schedule(df)
    with pytest.raises(ConfigError, match="'replace' needs a column 'id'"):
        jobs.schedule(df, job="j", on_duplicate="replace")
    writer = later(jobs, 1).write.format("lisa").options(url=jobs.url, topic=TOPIC)
    with pytest.raises(ConfigError, match='mode\\("append"\\)'), unwrapped():
        writer.mode("overwrite").save()


def test_wrong_options_are_named(jobs: Jobs) -> None:
    wrong = [
        ("topci", "x", "no option 'topci' for write: did you mean 'topic'?"),
        ("batch", "0", "option 'batch': '0' is not a whole number above 0"),
        ("max_rate", "quick", "option 'max_rate': 'quick' is not a number above 0"),
        ("on_duplicate", "drop", "option 'on_duplicate': 'drop' is not one of keep"),
        ("dedupe_for", "1", "option 'dedupe_for': '1' is not a duration with a unit"),
        ("body_format", "yaml", "option 'body_format'"),
        ("refused", "nfs://x/y", "option 'refused': 'nfs://x/y' cannot be used"),
        ("prefix", "a b", "prefix 'a b' is not allowed"),
        ("url", "http://x", "'http://...' is not a server address"),
        ("topic", "a b", "topic 'a b' is not allowed"),
    ]
    for name, value, words in wrong:
        with pytest.raises((ConfigError, ValueError)) as caught:
            save(jobs, later(jobs, 1), **{name: value})
        assert words in str(caught.value)


def test_repeating_a_job_adds_nothing(jobs: Jobs) -> None:
    first = jobs.schedule(later(jobs, 3000))
    assert (first.accepted, first.duplicate) == (3000, 0)
    again = jobs.schedule(later(jobs, 3000, partitions=3))
    assert (again.accepted, again.duplicate) == (0, 3000)
    assert len(jobs.scores()) == 3000


def test_tasks_send_rows_in_the_order_of_due_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within some size; every row remains as it is."""
    rows = [
        {"id": str(n), "due": n * 7919 % 1000 if n % 10 else None, "headers": [("n", str(n))]}
        for n in range(1000)
    ]
    headers = pa.map_(pa.string(), pa.string())
    schema = pa.schema({"id": pa.string(), "due": pa.int64(), "headers": headers})
    batches = pa.Table.from_pylist(rows, schema).to_batches(50)
    monkeypatch.setattr(writer, "SORTED_BYTES", sum(batch.nbytes for batch in batches[:10]))
    ordered = list(by_due(iter(batches)))
    assert max(batch.num_rows for batch in ordered) == 50
    sent = pa.Table.from_batches(ordered).to_pylist()
    for half in (slice(None, 500), slice(500, None)):
        dues = [row["due"] for row in sent[half] if row["due"] is not None]
        assert dues == sorted(row["due"] for row in rows[half] if row["due"] is not None)
    assert sorted(sent, key=lambda row: int(row["id"])) == rows
    unordered = [batch.drop_columns("due") for batch in batches]
    assert list(by_due(iter(unordered))) == unordered
    monkeypatch.setattr(writer, "SORTED_BYTES", batches[0].nbytes // 3)
    assert list(by_due(iter(batches))) == batches, "a batch that is larger is left as it is"
    assert list(by_due(iter([]))) == []


def test_a_repeated_id_in_one_job_is_one_message(jobs: Jobs) -> None:
    """In one call, in different calls, and in different tasks."""
    twice = later(jobs, 1000).union(later(jobs, 1000, partitions=1))
    twice = twice.union(later(jobs, 10).union(later(jobs, 10)).coalesce(1))
    seen: list[tuple[int, int]] = []
    report = jobs.folder / "deep" / "report.json"
    done = jobs.schedule(twice, report=str(report), progress=lambda *at: seen.append(at))
    assert (done.accepted, done.duplicate) == (1000, 1020)
    assert len(jobs.scores()) == 1000
    told: dict[str, Any] = json.loads(report.read_text("utf-8"))
    assert (told["accepted"], told["topics"][TOPIC]["accepted"]) == (1000, 1000)
    assert all(tasks <= total for tasks, total in seen)


class Observed:
    """Spark's listener of finished queries: their observed metrics by name."""

    class Java:
        implements = ("org.apache.spark.sql.util.QueryExecutionListener",)

    def __init__(self) -> None:
        self.rows: list[dict[str, int]] = []

    def onSuccess(self, _: str, query: Any, __: int) -> None:  # noqa: N802  Spark's
        found = query.observedMetrics().get("lisa")
        if found.isDefined():
            row = found.get()
            names = row.schema().fieldNames()
            self.rows.append({name: row.get(index) for index, name in enumerate(names)})


def test_counts_are_observed_metrics_of_spark(jobs: Jobs) -> None:
    jvm_session: Any = jobs.spark._jsparkSession
    ensure_callback_server_started(jobs.spark.sparkContext._gateway)  # type: ignore[no-untyped-call]
    observed = Observed()
    jvm_session.listenerManager().register(observed)
    try:
        jobs.schedule(later(jobs, 10))
        jobs.schedule(later(jobs, 12).withColumn("body", F.expr("if(id = 11, null, body)")))
        wait_until(lambda: len(observed.rows) == 2)
    finally:
        jvm_session.listenerManager().unregister(observed)
    nothing = dict.fromkeys(asdict(Counts()), 0)
    assert observed.rows == [
        nothing | {"accepted": 10},
        nothing | {"accepted": 1, "duplicate": 10, "refused": 1},
    ]


def test_on_duplicate(jobs: Jobs) -> None:
    jobs.schedule(later(jobs, 10))
    other = later(jobs, 12).withColumn("body", F.lit("new"))
    done = jobs.schedule(other, on_duplicate="reject", refused=jobs.new_path())
    assert (done.accepted, done.refused) == (2, 10)
    assert "already exists" in done.reasons[0]
    done = jobs.schedule(other, on_duplicate="replace")
    assert (done.accepted, done.replaced) == (0, 12)
    assert jobs.schedule(other, on_duplicate="update").updated == 12
    assert jobs.message("3").body == "new"


EQUAL = [("same", 1)] * 10 + [("pair", 1)] * 2 + [("same", 2)] + [("one", 1)]


def test_equal_rows_are_as_many_messages_in_any_partitioning(jobs: Jobs) -> None:
    """Ids are the same with Spark's save and with `schedule`, with 1 or 5 tasks."""
    report = jobs.folder / "report.json"

    def equal(partitions: int) -> DataFrame:
        df = jobs.spark.createDataFrame(EQUAL, "body string, n int").repartition(partitions)
        return df.selectExpr("named_struct('b', body, 'n', n) AS body", f"{LATER} AS due")

    def saved(partitions: int) -> tuple[int, int]:
        save(jobs, equal(partitions), job="monday", report=report)
        told = json.loads(report.read_text("utf-8"))
        return told["accepted"], told["duplicate"]

    def run(job: str) -> tuple[int, int]:
        done = jobs.schedule(equal(4), job=job)
        return done.accepted, done.duplicate

    assert saved(5) == (14, 0)
    ids = set(jobs.scores())
    assert len(ids) == 14
    assert saved(1) == run("monday") == (0, 14)
    # Some are deleted, as if they had never been sent: the job is completed.
    for message_id in sorted(ids)[::2]:
        jobs.client.delete(KEYS.body(message_id))
        jobs.client.zrem(KEYS.waiting, message_id)
    assert run("monday") == (7, 7)
    assert set(jobs.scores()) == ids
    # Settled ones are not sent again within `dedupe_for`, by default a day for a job.
    for message_id in ids:
        assert jobs.producer.cancel(TOPIC, message_id) == "cancelled"
        assert jobs.client.ttl(KEYS.done(message_id)) > 80_000
    assert run("monday") == (0, 14)
    assert run("tuesday") == (14, 0), "the equal rows of another job are other messages"


def test_too_many_equal_rows_in_several_tasks_are_refused_and_schedule_completes_them(
    jobs: Jobs,
) -> None:
    big = "x" * 900_000
    rows = [(big + str(n % 12), LATER_MS) for n in range(24)]
    # One of each two equal rows is in each partition.
    halves = jobs.spark.sparkContext.parallelize(rows, 2)
    df = jobs.spark.createDataFrame(halves, "body string, due long")
    with pytest.raises(LisaError, match=r"lisa\.pipeline\.schedule with the same job"):
        save(jobs, df, job="j")
    jobs.schedule(df, job="j")
    assert len(jobs.scores()) == 24


def test_refused_rows_do_not_fail_the_job(jobs: Jobs) -> None:
    jobs.client.hset(KEYS.options, "max_body_bytes", "100")
    bad = [
        ("ok", "fine", LATER_MS, "0", 1),
        ("", "empty id", LATER_MS, "0", 1),
        ("i" * 300, "long id", LATER_MS, "0", 1),
        (None, "no id", LATER_MS, "0", 1),
        ("null-body", None, LATER_MS, "0", 1),
        ("null-due", "x", None, "0", 1),
        ("seconds", "x", 1763733600, "0", 1),
        ("date", "x", 20261224, "0", 1),
        ("year-10000", "x", 253402300800000, "0", 1),
        ("large", "x" * 101, LATER_MS, "0", 1),
        ("policy", "x", LATER_MS, "often", 1),
        ("ttl", "x", LATER_MS, "0", 0),
        ("ok2", "x" * 100, LATER_MS, "0", 1),
    ]
    schema = "id string, body string, due long, retry string, ttl long"
    done = jobs.schedule(jobs.spark.createDataFrame(bad, schema), refused=jobs.new_path())
    assert (done.accepted, done.refused) == (2, 11)
    assert set(jobs.scores()) == {"ok", "ok2"}
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


def test_a_save_fails_because_of_refused_rows_unless_they_are_kept_or_dropped(jobs: Jobs) -> None:
    """All other rows are sent first; the files of refused rows are a table."""
    rows = later(jobs, 20).withColumn("body", F.expr("if(id % 8 = 7, null, body)"))
    report, folder = jobs.folder / "report.json", jobs.folder / "refused"
    with pytest.raises(LisaError, match=r"^2 rows were refused, .* option 'mode' to 'permissive'"):
        save(jobs, rows, report=report)
    assert len(jobs.scores()) == 18
    assert json.loads(report.read_text("utf-8"))["refused"] == 2
    save(jobs, rows, mode="permissive", report=report)
    save(jobs, rows, mode="failfast", report=report, refused=folder)
    told = json.loads(report.read_text("utf-8"))
    assert (told["duplicate"], told["refused"]) == (18, 2)
    jobs.spark.sql(f"CREATE TABLE refused USING json LOCATION '{folder}'")
    try:
        found = jobs.spark.table("refused").selectExpr("topic", "id", "reason", "row.due").collect()
    finally:
        jobs.spark.sql("DROP TABLE refused")
    assert sorted(row.id for row in found) == ["15", "7"]
    assert {(row.topic, row.due) for row in found} == {(TOPIC, "2100-01-01T00:00:00Z")}
    assert all(row.reason.startswith("body") for row in found)
    with pytest.raises(ConfigError, match="option 'mode': 'dropmalformed' is not one of failfast"):
        save(jobs, rows, mode="dropmalformed")


def test_a_full_topic_that_is_emptied_slowly_gets_all_rows(jobs: Jobs) -> None:
    """`patience` begins anew with each row that finds room, also if no whole call fits."""
    jobs.client.hset(KEYS.options, "capacity", "30")

    def empty() -> None:
        for number in range(60):
            while jobs.producer.cancel(TOPIC, str(number)) != "cancelled":
                time.sleep(0.01)

    emptying = threading.Thread(target=empty, daemon=True)
    emptying.start()
    done = jobs.schedule(later(jobs, 90, partitions=1), patience=timedelta(seconds=20))
    emptying.join()
    assert (done.accepted, done.refused) == (90, 0)


def test_a_lowered_body_limit_refuses_only_large_bodies(jobs: Jobs) -> None:
    """The script rejects whole calls; the valid rows in them are still sent."""
    df = jobs.spark.range(700).selectExpr(
        "cast(id AS string) AS id",
        f"{LATER} AS due",
        "repeat('x', if(id IN (3, 400, 699), 1048577, 10)) AS body",
    )
    jobs.client.hset(KEYS.options, "max_body_bytes", str(1 << 20))
    done = jobs.schedule(df.coalesce(1))
    assert (done.accepted, done.refused) == (697, 3)


def test_a_full_topic_is_waited_for_and_then_refuses(jobs: Jobs) -> None:
    jobs.client.hset(KEYS.options, "capacity", "700")
    began, rows = time.monotonic(), later(jobs, 2000, partitions=1)
    done = jobs.schedule(rows, patience=timedelta(seconds=1), refused=jobs.new_path())
    assert time.monotonic() - began >= 1
    assert (done.accepted, done.refused) == (700, 1300)
    assert "capacity" in done.reasons[0]
    jobs.client.hset(KEYS.options, "capacity", "5000")
    done = jobs.schedule(later(jobs, 2000))
    assert (done.accepted, done.duplicate, done.refused) == (1300, 700, 0)


def test_the_rate_the_size_of_calls_and_dedupe_for(jobs: Jobs) -> None:
    """A job may raise `dedupe_for`, but not lower it."""

    def calls() -> int:
        return int(jobs.client.info("commandstats")["cmdstat_evalsha"]["calls"])

    for days in (3, 2):
        jobs.schedule(later(jobs, 10), dedupe_for=timedelta(days=days))
        assert jobs.client.hget(KEYS.options, "dedupe_for") == b"259200000"
    before = calls()
    jobs.schedule(later(jobs, 100, partitions=1), batch=10)
    assert calls() - before == 10
    began = time.monotonic()
    done = jobs.schedule(later(jobs, 900, partitions=3), max_rate=300)
    assert done.accepted == 800
    # The first window may be used in full: 30 rows in a tenth of a second.
    assert time.monotonic() - began >= (900 - 2 * 30) / 300
    paces = list(jobs.client.scan_iter("lisa:pace:*"))
    assert all(jobs.client.pttl(key) != -1 for key in paces), "each expires"


def test_prefix_and_server_from_the_environment(
    jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs.schedule(later(jobs, 3), prefix="shop")
    assert len(jobs.scores(Keys("shop").topic(TOPIC).waiting)) == 3
    assert not jobs.client.exists(KEYS.waiting)
    monkeypatch.setenv("LISA_REDIS_URL", jobs.url)
    monkeypatch.setenv("LISA_PREFIX", "other")
    schedule(later(jobs, 3), topic=TOPIC)
    assert len(jobs.scores(Keys("other").topic(TOPIC).waiting)) == 3


# Wall times, windows and late policies of rows

NIGHT_MS = 4_102_441_200_000  # 2099-12-31 23:00 UTC, a Thursday
OPENS_MS = 4_102_473_600_000  # 2100-01-01 09:00 in Berlin
TOKYO_MS = LATER_MS  # 2100-01-01 09:00 in Tokyo


def test_rows_are_due_at_nine_in_their_own_time_zone(jobs: Jobs) -> None:
    rows = [
        ("tokyo", "2100-01-01T09:00", "Asia/Tokyo"),
        ("berlin", "2100-01-01 09:00:00", "Europe/Berlin"),
        ("offset", "2100-01-01T09:00", "+05:30"),
        ("skipped", "2027-03-28T02:30", "Europe/Berlin"),
        ("no-zone", "2100-01-01T09:00", None),
        ("no-time", None, "Asia/Tokyo"),
        ("text", "soon", "Asia/Tokyo"),
        ("nowhere", "2100-01-01T09:00", "Europe/Atlantis"),
    ]
    df = jobs.spark.createDataFrame(rows, "id string, at_local string, tz string")
    done = jobs.schedule(df.withColumn("body", F.lit("x")))
    assert (done.accepted, done.refused) == (4, 4)
    due = jobs.scores()
    assert due == {
        "tokyo": TOKYO_MS,
        "berlin": OPENS_MS,
        "offset": 4_102_457_400_000,
        "skipped": 1_806_195_600_000,  # right after the gap, at 03:00
    }
    assert jobs.scores(KEYS.local) == due, "managers follow these messages"
    assert jobs.client.zscore(Keys().scheduled, TOPIC) is not None
    reasons = " ".join(done.reasons)
    for words in (
        "no-zone: at_local: at_local needs tz",
        "no-time: at_local: value is null",
        "'soon' is not a local time",
        "Europe/Atlantis",
    ):
        assert words in reasons


def test_a_row_is_placed_as_by_a_producer(jobs: Jobs) -> None:
    window, wall, zone = "mon-fri 9-17", "2100-01-02T20:00", "Europe/Berlin"  # a Saturday
    df = jobs.spark.range(1).selectExpr(
        "'row' AS id",
        "'x' AS body",
        f"to_timestamp_ntz('{wall}') AS at_local",
        f"'{zone}' AS tz",
        f"'{window}' AS window",
        "map('b', '2', 'a', '1') AS headers",
        "interval 1 hour AS ttl",
    )
    assert jobs.schedule(df).accepted == 1
    given: dict[str, Any] = {"at_local": wall, "tz": zone, "window": window, "ttl": "1h"}
    jobs.producer.send(TOPIC, "x", id="sent", headers={"a": "1", "b": "2"}, **given)
    row, sent = jobs.message("row"), jobs.message("sent")
    assert row.headers == sent.headers
    assert row.headers.keys() == {WINDOW_HEADER, LOCAL_HEADER, "a", "b"}
    for key in (KEYS.waiting, KEYS.local, KEYS.expiry):
        found = jobs.scores(key)
        assert found["row"] == found["sent"], key


def test_windows_move_due_times_but_do_not_change_ids(jobs: Jobs) -> None:
    """A past due time moves to another opening each time the job runs."""
    rows = [("moved", "9-17"), ("open", "always"), ("none", None), ("never", "not mon-sun")]
    df = jobs.spark.createDataFrame(rows, "id string, window string").selectExpr(
        "id", "window", "'Europe/Berlin' AS tz", f"{NIGHT_MS} AS due", "'x' AS body"
    )
    done = jobs.schedule(df)
    assert (done.accepted, done.refused) == (3, 1)
    assert "never: window:" in done.reasons[0]
    assert jobs.scores() == {"moved": OPENS_MS, "open": NIGHT_MS, "none": NIGHT_MS}
    assert not jobs.client.exists(KEYS.local)
    now = time.gmtime(time.time() + 7200)
    window = f"'{now.tm_hour}-{now.tm_hour + 1}' AS window"
    df = jobs.spark.range(5).selectExpr("concat('body ', id) AS body", "1 AS delay", window)
    first = jobs.schedule(df, job="calls")
    assert all(due > time.time() * 1000 for due in jobs.scores().values())
    jobs.client.delete(KEYS.waiting)
    again = jobs.schedule(df.withColumn("delay", F.lit(1)), job="calls")
    assert (first.accepted, again.accepted, again.duplicate) == (5, 0, 5)


def test_costs_and_slacks_of_rows(jobs: Jobs) -> None:
    rows = [
        ("both", 5, "30s", "skip after 10m"),
        ("cost", 2, None, None),
        ("slack", None, "1500", None),
        ("plain", None, None, None),
        ("dear", 1_001, None, None),
        ("slow", None, "31d", None),
    ]
    df = jobs.spark.createDataFrame(rows, "id string, cost int, slack string, late string")
    done = jobs.schedule(df.selectExpr("*", "'x' AS body", f"{LATER} AS due"))
    assert (done.accepted, done.refused) == (4, 2)
    assert "dear: cost: " in " ".join(done.reasons)
    assert jobs.client.hgetall(KEYS.policy) == {
        b"both": b"*;600000,skip;5,30000",
        b"cost": b"*;;2,",
        b"slack": b"*;;,1500",
    }


def test_late_policies_of_rows(jobs: Jobs) -> None:
    hour_ago = int(time.time() * 1000) - 3_600_000
    rows = [
        ("skip", "skip after 10m", "7s"),
        ("run", "run", None),
        ("garbage", "garbage after 30m", None),
        ("none", None, "9s"),
        ("plain", None, None),
        ("collapse", "collapse after 10m", None),
        ("word", "drop it", None),
    ]
    df = jobs.spark.createDataFrame(rows, "id string, late string, retry string").selectExpr(
        "*", "'x' AS body", f"{hour_ago} AS due"
    )
    done = jobs.schedule(df)
    assert (done.accepted, done.refused) == (5, 2)
    assert "collapse keeps the newest occurrence" in " ".join(done.reasons)
    assert jobs.client.hgetall(KEYS.policy) == {
        b"skip": b"7000;600000,skip",
        b"run": b"*;0,run",
        b"garbage": b"*;1800000,garbage",
        b"none": b"9000",
    }
    Cast(jobs.url, TOPIC).declare()
    with Manager(jobs.url):
        wait_until(lambda: not jobs.client.exists(KEYS.waiting))
    states = {name: str(jobs.message(name).state) for name, *_ in rows[:5]}
    ready = {"run": "ready", "none": "ready", "plain": "ready"}
    assert states == {"skip": "skipped", "garbage": "garbage"} | ready


def test_the_command_takes_wall_times_and_policies(jobs: Jobs) -> None:
    """Only options make a column a wall time, a zone, a window or a policy."""
    source = jobs.folder / "campaign.csv"
    source.write_text(
        "number,nine,zone,window,late\n"
        "1,2100-01-01T09:00,Asia/Tokyo,front,no\n"
        "2,2100-01-01T09:00,Europe/Berlin,back,yes\n",
        "utf-8",
    )
    whole = ("schedule", str(source), "--topic", TOPIC, "--id", "number", "--redis", jobs.url)
    local = ("--at-local", "nine", "--tz", "zone", "--late", "skip after 10m")
    assert json.loads(jobs.command(*whole, *local, "--json").stdout)["accepted"] == 2
    assert jobs.scores() == {"1": TOKYO_MS, "2": OPENS_MS}
    policies: Any = jobs.client.hgetall(KEYS.policy)
    assert set(policies.values()) == {b"*;600000,skip"}
    assert jobs.message("1").body == {"window": "front", "late": "no"}
    for options, words in (
        (("--late", "often"), "--late: 'often' is neither a column"),
        (("--at-local", "nine", "--tz", "Mars"), "--tz: 'Mars' is neither a column"),
        (("--window", "25-26"), "--window: '25-26' is neither a column"),
        (("--at-local", "nine"), "column 'at_local' needs a column 'tz'"),
        (("--tz", "UTC"), "column 'tz' needs a column 'at_local' or 'window'"),
        (("--at-local", "nine", "--due", "nine"), "give one of --due, --delay and --at-local"),
        (("--at-local", "eight"), "--at-local: no column 'eight'"),
    ):
        assert words in jobs.command(*whole, *options, code=2).output
