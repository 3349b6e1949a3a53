"""The report's figures, compared with figures counted in plain Python; ranges, gaps, errors."""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zoneinfo import ZoneInfo

import pytest
from pyarrow import csv, parquet

from lisa.core.model.clock import datetime_ms
from lisa.core.model.envelope import encode_head, encode_tail
from lisa.core.model.errors import InvalidMessage
from lisa.pipeline.archive import open_archive
from lisa.pipeline.archive.fold import fold, host_of
from lisa.pipeline.archive.records import ArchiveGap
from lisa.pipeline.archive.schemas import EVENT_SCHEMA
from lisa.pipeline.archive.writing import FileWriter
from lisa.pipeline.jobs.report import report
from lisa.pipeline.jobs.report.figures import Range, gather
from lisa.pipeline.jobs.report.tables import ERROR
from lisa.pipeline.paths import without_password
from tests.servers import JVM_PATIENCE
from tests.spark.worlds import SMALL

if TYPE_CHECKING:
    from collections.abc import Callable

    from click.testing import Result
    from pyspark.sql import DataFrame, SparkSession

    from lisa.pipeline.jobs.report import Report

BEGIN = datetime(2026, 11, 18, 6, 20, tzinfo=UTC)
SLO = timedelta(milliseconds=5)
Row = dict[str, Any]


def page_of(made: Report) -> str:
    return Path(made.page).read_text("utf-8")


@dataclass
class Journal:
    """Collects numbered events, and provides the tables of their archive."""

    events: list[Row] = field(default_factory=list)
    named: list[ArchiveGap] = field(default_factory=list)
    spark: SparkSession | None = None

    def add(self, topic: str, state: str, at: datetime, **fields: Any) -> None:
        one = dict.fromkeys(EVENT_SCHEMA.names)
        number = 1 + sum(event["topic"] == topic for event in self.events)
        at = at.replace(microsecond=at.microsecond // 1000 * 1000)
        one |= {
            "topic": topic,
            "state": state,
            "at": at,
            "attempt": 0,
            "settled": False,
            "actor": "consumer@box:1",
            "seq": number,
            "number": number,
        }
        self.events.append(one | fields)

    def send(self, topic: str, id_: str, at: datetime, due: datetime, state: str = "sent") -> None:
        envelope = encode_head(f"{id_:-<8}"[:8]) + encode_tail({"n": 1}, b"")
        self.add(topic, state, at, id=id_, due=due, envelope=envelope)

    def frame(self) -> DataFrame:
        assert self.spark is not None
        return self.spark.createDataFrame(
            [tuple(one.values()) for one in self.events], EVENT_SCHEMA
        )

    def log(self) -> DataFrame:
        from pyspark.sql import functions as sf

        return self.frame().withColumn("host", host_of()).withColumn("day", sf.to_date("at"))

    def messages(self) -> DataFrame:
        return fold(self.frame())

    def gaps(self) -> list[ArchiveGap]:
        return self.named

    def write(self, where: str) -> None:
        """Write the events to a real archive."""
        assert self.spark is not None
        writer = FileWriter(self.spark, where)
        try:
            writer.write(self.frame(), 0, "q")
            writer.fold()
        finally:
            writer.close()


def made_up(spark: SparkSession) -> Journal:
    """Two groups on one topic, one on the other; all outcomes; some clocks set back."""
    chance = random.Random(4)
    journal = Journal(spark=spark)
    for number in range(240):
        topic = "orders" if number % 3 else "bills"
        groups = ("audit", "lisa") if topic == "orders" else ("lisa",)
        id_, sent = f"m{number:04d}", BEGIN + timedelta(minutes=chance.uniform(0, 300))
        due = sent + timedelta(seconds=60)
        journal.send(topic, id_, sent, due, "replaced" if number % 40 == 7 else "sent")
        fate = number % 20
        if fate in {1, 2, 3}:
            end = ("cancelled", "expired", "skipped")[fate - 1]
            journal.add(topic, end, due, id=id_, settled=True)
            continue
        for group in groups:
            late = -700 if number == 33 else round(math.exp(chance.gauss(8, 2)))
            opened = due + timedelta(microseconds=late)
            about: Row = {"id": id_, "group": group, "due": due}
            journal.add(topic, "ready", due, attempt=1, **about)
            journal.add(topic, "in_flight", opened, attempt=1, late_us=late, **about)
            tries = 1 + (number % 7 == 0) + (number % 21 == 0)
            for failed in range(1, tries):
                journal.add(
                    topic,
                    "retry",
                    opened + timedelta(seconds=failed),
                    attempt=failed,
                    reason=f"KeyError: {number}",
                    **about,
                )
            if number % 5 == 0:
                journal.add(topic, "retry", opened, attempt=0, reason="group is full", **about)
            if fate in {3, 4}:
                reason = f"HTTP 503 for order {number}" if fate == 3 else None
                journal.add(
                    topic,
                    "garbage",
                    opened + timedelta(seconds=9),
                    attempt=tries,
                    reason=reason,
                    **about,
                )
                continue
            journal.add(
                topic,
                "acked",
                opened + timedelta(seconds=10),
                attempt=tries,
                settled=group == groups[-1],
                **about,
            )
    return journal


@pytest.fixture(scope="module")
def journal(spark: SparkSession) -> Journal:
    return made_up(spark)


@pytest.fixture(scope="module")
def made(
    journal: Journal, tmp_path_factory: pytest.TempPathFactory, spark: SparkSession
) -> tuple[Report, Path]:
    """A report of a real archive of these events."""
    folder = tmp_path_factory.mktemp("report")
    journal.write(str(folder / "archive"))
    archive = open_archive(spark, str(folder / "archive"))
    options: Any = {"where": "/data/archive", "zone": "Asia/Kolkata", "slo": SLO}
    return report(archive, folder / "out", **options), folder


def table(made: tuple[Report, Path], name: str) -> list[Row]:
    found: list[Row] = parquet.read_table(
        made[1] / "out" / "tables" / f"{name}.parquet"
    ).to_pylist()
    return found


WHAT = {
    "sent": "sent",
    "replaced": "sent",
    "acked": "handled",
    "garbage": "garbage",
    "cancelled": "cancelled",
    "expired": "expired",
    "skipped": "skipped",
}


def counted(event: Row) -> str | None:
    if event["state"] == "retry" and event["reason"] != "group is full":
        return "retried"
    return WHAT.get(event["state"])


def hour_of(at: datetime) -> datetime:
    """The start of the hour in India, which is at half past in UTC."""
    return (at - timedelta(minutes=30)).replace(minute=0, second=0, microsecond=0) + timedelta(
        minutes=30
    )


def exact(values: list[int], quantile: float) -> int:
    return sorted(values)[math.ceil(quantile * len(values)) - 1]


def near(found: int, wanted: int) -> bool:
    return abs(found - wanted) <= wanted * ERROR + 1


def test_counts_by_topic_and_hour(made: tuple[Report, Path], journal: Journal) -> None:
    wanted: dict[tuple[str, datetime], Counter[str]] = defaultdict(Counter)
    for event in journal.events:
        what = counted(event)
        if what is not None:
            wanted[event["topic"], hour_of(event["at"])][what] += 1
    found = {
        (row["topic"], row["hour"]): Counter(
            {name: row[name] for name in (*set(WHAT.values()), "retried") if row[name]}
        )
        for row in table(made, "hourly")
    }
    assert found == wanted
    assert {row["hour_local"][13:] for row in table(made, "hourly")} == {":00+05:30"}
    summary = made[0]
    assert summary.accepted == 240
    assert summary.handled == sum(one["handled"] for one in wanted.values())
    assert summary.garbage == sum(one["garbage"] for one in wanted.values())
    assert summary.events == len(journal.events)


def test_a_short_report_has_steps_below_an_hour(journal: Journal) -> None:
    found = gather(
        journal.log(), journal.messages(), Range(), ZoneInfo("Asia/Kolkata"), [], slo=SLO
    )
    assert found.span is not None
    assert found.span.step == "5 minutes"

    def by_step(events: list[Row]) -> list[int]:
        assert found.span is not None
        counts = Counter(found.span.index(int(one["at"].timestamp())) for one in events)
        return [counts[step] for step in range(len(found.span.edges) - 1)]

    for name in ("sent", "handled", "garbage"):
        wanted = by_step([one for one in journal.events if counted(one) == name])
        assert found.steps(name) == wanted
        assert sum(wanted) == found.total(name) > 0
    late = by_step([one for one in journal.events if one["late_us"] is not None])
    parts = [found.lateness.get((("slot",), step)) for step in range(len(late))]
    assert [one.count if one else 0 for one in parts] == late


def test_lateness_percentiles_are_within_the_error_bound(
    made: tuple[Report, Path], journal: Journal
) -> None:
    parts: dict[tuple[str | None, datetime | None], list[int]] = defaultdict(list)
    for event in journal.events:
        if event["late_us"] is not None:
            for topic in (None, event["topic"]):
                parts[topic, None].append(event["late_us"])
            parts[event["topic"], hour_of(event["at"])].append(event["late_us"])
    rows = [*table(made, "lateness"), *(row for row in table(made, "hourly") if row["hand_overs"])]
    assert {(row["topic"], row.get("hour")) for row in rows} == set(parts)
    for row in rows:
        values = parts[row["topic"], row.get("hour")]
        assert row["hand_overs"] == len(values)
        assert row["early"] == sum(value < 0 for value in values)
        assert row["within_slo"] == sum(value <= 5_000 for value in values)
        assert row["max_us"] == max(values)
        shown = [max(value, 0) for value in values]
        for name, quantile in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("p999", 0.999)):
            assert near(row[f"{name}_us"], exact(shown, quantile)), (row, name)
    [whole] = [row for row in rows if row["topic"] is None]
    assert 0 < whole["within_slo"] < whole["hand_overs"]
    assert (made[0].within, made[0].deliveries) == (whole["within_slo"], whole["hand_overs"])
    shown_share = f"{10_000 * made[0].within // made[0].deliveries / 100:g} % within 5 ms"
    assert shown_share in page_of(made[0])
    assert made[0].early == 1
    assert "1 messages were delivered before they were due" in page_of(made[0])


def test_attempts_and_reasons(made: tuple[Report, Path], journal: Journal) -> None:
    wanted = Counter((e["topic"], e["attempt"]) for e in journal.events if e["state"] == "acked")
    assert {(r["topic"], r["attempt"]): r["messages"] for r in table(made, "attempts")} == wanted
    reasons = Counter(
        (e["topic"], "HTTP 503 for order #" if e["reason"] else "no reason given")
        for e in journal.events
        if e["state"] == "garbage"
    )
    assert {(r["topic"], r["reason"]): r["messages"] for r in table(made, "garbage")} == reasons


def test_handling_is_from_first_delivery_to_last_ack(
    made: tuple[Report, Path], journal: Journal
) -> None:
    times: dict[str, dict[str, list[datetime]]] = defaultdict(lambda: defaultdict(list))
    for event in journal.events:
        if event["state"] == "acked" or event["late_us"] is not None:
            times[event["topic"]][event["id"]].append(event["at"])
    found = {row["topic"]: row for row in table(made, "handling")}
    ended = {e["id"] for e in journal.events if e["settled"]}
    for topic, ids in times.items():
        took = [
            (max(at) - min(at)) / timedelta(microseconds=1)
            for id_, at in ids.items()
            if id_ in ended
        ]
        assert found[topic]["messages"] == len(took)
        # Lateness is known to the microsecond, times of events to the millisecond; with two groups
        # the first ack does not settle, and the last may belong to the earlier delivery.
        assert abs(found[topic]["p50_us"] - exact([round(one) for one in took], 0.5)) < 1_000_000


def test_capacity_is_that_of_the_slowest_group(made: tuple[Report, Path], journal: Journal) -> None:
    hours: dict[tuple[str, str], Counter[datetime]] = defaultdict(Counter)
    for event in journal.events:
        if event["state"] == "acked":
            hours[event["topic"], event["group"]][hour_of(event["at"])] += 1
    for row in table(made, "topics"):
        best = [max(found.values()) for (topic, _), found in hours.items() if topic == row["topic"]]
        assert row["best_hour"] == min(best)


def test_csv_equals_parquet(made: tuple[Report, Path]) -> None:
    names = {Path(path).name for path in made[0].tables}
    assert {name.rpartition(".")[0] for name in names} == {
        "attempts",
        "due",
        "falling_behind",
        "gaps",
        "garbage",
        "handling",
        "hourly",
        "lateness",
        "lateness_trend",
        "topics",
    }
    assert len(names) == 20
    read = csv.read_csv(made[1] / "out" / "tables" / "hourly.csv").to_pylist()
    wanted = [row["handled"] for row in table(made, "hourly")]
    assert [row["handled"] for row in read] == wanted


def test_only_the_requested_range_and_topics(journal: Journal, tmp_path: Path) -> None:
    start, end = BEGIN + timedelta(hours=1), BEGIN + timedelta(hours=2)
    found = report(journal, tmp_path, topics=["bills"], start=start, end=end)
    inside = [e for e in journal.events if e["topic"] == "bills" and start <= e["at"] < end]
    assert found.events == len(inside) > 0
    assert found.handled == sum(e["state"] == "acked" for e in inside)
    assert found.first == min(e["at"] for e in inside)
    page = page_of(found)
    assert "Lisa report: bills" in page
    assert "orders" not in page


def test_forecast_and_topics_that_fall_behind(spark: SparkSession, tmp_path: Path) -> None:
    journal = Journal(spark=spark)
    now = BEGIN
    for number in range(10):  # ten in one hour: the capacity
        about: Row = {"id": f"done{number}", "group": "lisa"}
        due = now - timedelta(minutes=30)
        journal.send("orders", f"done{number}", now - timedelta(hours=1), due)
        journal.add("orders", "in_flight", due, attempt=1, late_us=10, due=due, **about)
        journal.add("orders", "acked", due, attempt=1, settled=True, due=due, **about)
    for number in range(3):
        journal.send("orders", f"late{number}", now - timedelta(hours=2), now - timedelta(hours=1))
    for number in range(35):
        journal.send("orders", f"wave{number}", now, now + timedelta(hours=4, minutes=number))
    journal.send("orders", "far", now, now + timedelta(days=90))
    # Garbage is never due. Messages in retry are due at their next attempt.
    journal.send("orders", "dead", now - timedelta(hours=2), now - timedelta(hours=1))
    journal.add("orders", "garbage", now, id="dead", group="lisa", attempt=3, reason="no")
    journal.send("orders", "again", now - timedelta(hours=2), now - timedelta(hours=1))
    journal.add(
        "orders", "retry", now, id="again", group="lisa", attempt=1, due=now + timedelta(minutes=7)
    )
    journal.send("quiet", "q1", now, now + timedelta(hours=1))
    found = report(journal, tmp_path)
    assert (found.to_come, found.overdue, found.falling_behind) == (41, 3, ("orders",))
    rows = parquet.read_table(tmp_path / "tables" / "due.parquet").to_pylist()
    by_place = {(r["topic"], r["unit"], r["from"]): r["messages"] for r in rows if r["messages"]}
    assert by_place == {
        ("orders", "overdue", None): 3,
        ("orders", "later", None): 1,
        ("orders", "minute", now + timedelta(minutes=7)): 1,
        ("orders", "hour", now): 1,
        ("orders", "hour", now + timedelta(hours=4)): 35,
        ("quiet", "hour", now + timedelta(hours=1)): 1,
    }
    [behind] = parquet.read_table(tmp_path / "tables" / "falling_behind.parquet").to_pylist()
    assert behind == {
        "topic": "orders",
        "from": now + timedelta(hours=4),
        "load": 35,
        "capacity": 10,
        "most_left_over": 25,
        "most_at": now + timedelta(hours=5),
        "drained_at": now + timedelta(hours=7, minutes=30),
    }
    page = page_of(found)
    assert "orders falls behind from 2026-11-18 10:20." in page
    assert "25 more than the 10 of its best hour" in page
    assert "drained by 2026-11-18 13:50, 3h 30m later" in page
    assert "quiet: 1 messages to come, none handled in this time." in page


def test_gaps_in_the_range_are_shown_at_the_top(spark: SparkSession, tmp_path: Path) -> None:
    journal = Journal(spark=spark)
    journal.send("orders", "m1", BEGIN, BEGIN)
    begun, ended = (BEGIN - timedelta(days=days) for days in (2, 1))
    before, after, old = (f"{datetime_ms(one)}-0" for one in (begun, BEGIN, ended))
    journal.named += [
        ArchiveGap("orders", before, 100, after, 160, "trimmed before it was archived", begun),
        ArchiveGap("orders", before, 900, None, None, "the server came back older", begun),
        ArchiveGap("bills", before, 1, after, 3, "another topic", begun),
        ArchiveGap("orders", before, 1, old, 3, "long ago", begun),
    ]
    start = BEGIN - timedelta(hours=1)
    found = report(journal, tmp_path, topics=["orders"], start=start)
    assert found.gaps == 2
    page = page_of(found)
    assert page.index("The journal has 2 gaps.") < page.index('id="summary"')
    assert "At least 59 events are missing" in page
    assert page.index('id="gaps"') < page.index('id="throughput"')
    assert "another topic" not in page
    assert "long ago" not in page


def test_the_last_seven_days_are_compared_with_the_seven_before(
    spark: SparkSession, tmp_path: Path
) -> None:
    journal = Journal(spark=spark)
    end = datetime(2026, 11, 18, 6, tzinfo=UTC)
    # Hours before the end of the later week; late by seconds.
    lives = [(30, 0.5), (100, 3), (167.9, 3), (168.1, 0.5), (335.9, 0.5), (400, 9)]
    for number, (hours, late) in enumerate(lives):
        sent, topic = end - timedelta(hours=hours), "orders" if number else "bills"
        journal.send(topic, f"m{number}", sent, sent)
        delivered = {"id": f"m{number}", "group": "g", "late_us": round(late * 1e6), "due": sent}
        journal.add(topic, "in_flight", sent, attempt=1, **delivered)
    journal.send("orders", "last", end - timedelta(minutes=1), end)
    events = journal.log()
    options: Any = {"asked": Range(), "zone": UTC, "gaps": [], "slo": timedelta(seconds=1)}
    found = gather(events, journal.messages(), **options).weeks
    assert found is not None
    assert (found.begin, found.end) == (end.timestamp() - 14 * 86_400, end.timestamp())
    assert [found.count("sent", week) for week in (0, 1)] == [2, 4]
    assert [found.count("sent", week, "orders") for week in (0, 1)] == [2, 3]
    before, now = found.late(0), found.late(1)
    assert before is not None
    assert now is not None
    assert (before.within, before.count, now.within, now.count) == (2, 2, 1, 3)
    assert found.late(0, "bills") is None
    page = page_of(report(journal, tmp_path))
    assert '<section id="weeks">' in page
    assert "+100 %" in page
    assert "33.33 %" in page
    later = Range(start=end - timedelta(days=13))
    assert gather(events, journal.messages(), **options | {"asked": later}).weeks is None
    page = page_of(report(journal, tmp_path, start=later.start))
    assert "weeks" not in page


def test_an_empty_archive_yields_a_page_with_hints(spark: SparkSession, tmp_path: Path) -> None:
    found = report(Journal(spark=spark), tmp_path)
    assert (found.events, found.p99_us, found.to_come) == (0, None, 0)
    page = page_of(found)
    assert "The archive has no events in this range." in page
    assert "<svg" not in page
    assert parquet.read_table(tmp_path / "tables" / "hourly.parquet").num_rows == 0


def test_a_range_without_events_shows_what_is_to_come(spark: SparkSession, tmp_path: Path) -> None:
    journal = Journal(spark=spark)
    journal.send("orders", "later", BEGIN, BEGIN + timedelta(days=2))
    found = report(journal, tmp_path, start=BEGIN + timedelta(days=1))
    assert (found.events, found.to_come) == (0, 1)
    page = page_of(found)
    assert "The archive has no events in this range." in page
    assert '<section id="forecast">' in page
    assert '<section id="throughput">' not in page
    assert 'href="#throughput"' not in page


def test_topics_and_reasons_are_escaped(spark: SparkSession, tmp_path: Path) -> None:
    journal = Journal(spark=spark)
    evil = '<script>alert(1)</script> style="}</style><script>" $x^2$ \x1b[31m\n& more'
    journal.send("a.b:c", "m1", BEGIN, BEGIN)
    journal.add("a.b:c", "garbage", BEGIN, id="m1", group="lisa", attempt=1, reason=evil)
    journal.named.append(ArchiveGap("a.b:c", None, None, None, None, evil, BEGIN))
    page = page_of(report(journal, tmp_path, where='/tmp/"><script>'))
    assert "<script" not in page
    assert page.count("<style") == page.count("</style>") == 1
    assert "&lt;script&gt;alert(" in page
    assert "\x1b" not in page
    assert 'style="}' not in page.partition("</style>")[0]


def test_invalid_ranges_are_refused(spark: SparkSession, tmp_path: Path) -> None:
    journal = Journal(spark=spark)
    with pytest.raises(InvalidMessage, match="has no time zone"):
        report(journal, tmp_path, start=datetime(2026, 1, 1))  # noqa: DTZ001 - the very thing
    with pytest.raises(InvalidMessage, match="is not after"):
        report(journal, tmp_path, start=BEGIN, end=BEGIN)
    with pytest.raises(InvalidMessage, match="unknown time zone 'Mars'"):
        report(journal, tmp_path, zone="Mars")


@pytest.mark.parametrize(
    ("where", "shown"),
    [
        ("/data/archive", "/data/archive"),
        ("s3a://key:se@cret@bucket/x", "s3a://bucket/x"),
        ("jdbc:postgresql://u:p@h/db?password=secret", "jdbc:postgresql://h/db"),
        ("jdbc:mariadb://h/db;password=secret", "jdbc:mariadb://h/db"),
    ],
)
def test_the_page_contains_no_password(where: str, shown: str) -> None:
    assert without_password(where) == shown


def test_the_command(made: tuple[Report, Path], tmp_path: Path) -> None:
    archive = str(made[1] / "archive")
    words = ["--archive", archive, "--to", str(tmp_path / "out"), *SMALL]
    words += ["--topic", "bills", "--until", "2026-11-18T15:00", "--zone", "Europe/Berlin"]
    done = subprocess.run(
        [sys.executable, "-m", "lisa.cli.main", "pipeline", "report", *words, "--json"],
        check=False,
        capture_output=True,
        text=True,
        timeout=JVM_PATIENCE.total_seconds(),
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["page"] == str(tmp_path / "out" / "report.html")
    assert said["accepted"] == 80
    assert "Europe/Berlin" in (tmp_path / "out" / "report.html").read_text("utf-8")
    assert len(said["tables"]) == 20


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--from", "2026-01-02", "--until", "2026-01-01"), "--from must be before --until"),
        (("--zone", "Mars"), "unknown time zone 'Mars'"),
    ],
)
def test_usage_errors_of_the_command(
    pipeline: Callable[..., Result], tmp_path: Path, words: tuple[str, ...], said: str
) -> None:
    folders = ("--archive", str(tmp_path / "none"), "--to", str(tmp_path / "out"))
    done = pipeline("report", *folders, *words)
    assert done.exit_code == 2
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_an_unknown_topic_is_no_empty_report(
    pipeline: Callable[..., Result], made: tuple[Report, Path], tmp_path: Path
) -> None:
    folders = ("--archive", str(made[1] / "archive"), "--to", str(tmp_path / "out"))
    done = pipeline("report", *folders, "--topic", "bill", *SMALL)
    assert done.exit_code == 2
    assert "the archive has no topic bill; its topics are bills, orders" in done.stderr
    assert not (tmp_path / "out").exists()


def test_the_command_without_an_archive(pipeline: Callable[..., Result], tmp_path: Path) -> None:
    done = pipeline("report", "--archive", str(tmp_path / "none"), "--to", str(tmp_path / "out"))
    assert done.exit_code == 2
    assert str(tmp_path / "none") in done.stderr
    assert not (tmp_path / "out").exists()
