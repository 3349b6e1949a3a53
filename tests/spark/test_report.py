"""The report's figures, compared with figures counted in plain Python; ranges, gaps, errors."""

import json
import math
import random
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import closing
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from click.testing import Result
from pyarrow import csv, parquet
from pyspark.sql import SparkSession

from lisa.core.model.clock import datetime_ms
from lisa.core.model.envelope import encode_head, encode_tail
from lisa.core.model.errors import InvalidMessage
from lisa.pipeline.archive import open_archive
from lisa.pipeline.archive.base import ArchiveGap
from lisa.pipeline.archive.schemas import EVENT_SCHEMA
from lisa.pipeline.archive.writing import FileWriter
from lisa.pipeline.jobs.report import Report, report
from lisa.pipeline.jobs.report.figures import (
    DAYS,
    ERROR,
    LATER,
    OVERDUE,
    Crossing,
    Demand,
    Figures,
    crossing,
    full_hour_shift,
    span_of,
)
from lisa.pipeline.jobs.report.formatting import change, human_us, kept
from lisa.pipeline.jobs.windows import JobScope
from lisa.pipeline.paths import without_password
from tests.spark.worlds import ArchiveSnapshot

BEGIN = datetime(2026, 11, 18, 6, 20, tzinfo=UTC)
SLO = timedelta(milliseconds=5)
Row = dict[str, Any]


def page_of(made: Report) -> str:
    return Path(made.page).read_text("utf-8")


class Journal:
    """Collects the numbered events of an archive."""

    def __init__(self, spark: SparkSession) -> None:
        self.spark = spark
        self.events: list[Row] = []

    def add(self, topic: str, state: str, at: datetime, **fields: Any) -> None:
        number = 1 + sum(event["topic"] == topic for event in self.events)
        at = at.replace(microsecond=at.microsecond // 1000 * 1000)
        common = {"topic": topic, "state": state, "at": at, "attempt": 0, "settled": False}
        common |= {"actor": "consumer@box:1", "seq": number, "number": number}
        self.events.append(dict.fromkeys(EVENT_SCHEMA.names) | common | fields)

    def send(self, topic: str, id_: str, at: datetime, due: datetime, state: str = "sent") -> None:
        envelope = encode_head(f"{id_:-<8}"[:8]) + encode_tail({"n": 1}, b"")
        self.add(topic, state, at, id=id_, due=due, envelope=envelope)

    def archive(self, *gaps: ArchiveGap) -> ArchiveSnapshot:
        rows = [tuple(event.values()) for event in self.events]
        events = self.spark.createDataFrame(rows, EVENT_SCHEMA)
        return ArchiveSnapshot(events, {}, {}, list(gaps))


def made_up(spark: SparkSession) -> Journal:
    """Two groups on one topic, one on the other; all outcomes; some clocks set back."""
    chance = random.Random(4)
    journal = Journal(spark)
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
                at, reason = opened + timedelta(seconds=failed), f"KeyError: {number}"
                journal.add(topic, "retry", at, attempt=failed, reason=reason, **about)
            if number % 5 == 0:
                journal.add(topic, "retry", opened, attempt=0, reason="group is full", **about)
            at = opened + timedelta(seconds=9)
            if fate in {3, 4}:
                about["reason"] = f"HTTP 503 for order {number}" if fate == 3 else None
                journal.add(topic, "garbage", at, attempt=tries, **about)
                continue
            about["settled"] = group == groups[-1]
            journal.add(topic, "acked", at, attempt=tries, **about)
    return journal


@pytest.fixture(scope="module")
def journal(spark: SparkSession) -> Journal:
    return made_up(spark)


@pytest.fixture(scope="module")
def made(journal: Journal, tmp_path_factory: pytest.TempPathFactory, spark: SparkSession) -> Report:
    """A report of an archive in files; both are in the same folder."""
    folder = tmp_path_factory.mktemp("report")
    where = str(folder / "archive")
    with closing(FileWriter(spark, where)) as writer:
        writer.write(journal.archive().events, 0, "q")
        writer.fold()
    options: Any = {"where": "/data/archive", "zone": "Asia/Kolkata", "slo": SLO}
    return report(open_archive(spark, where), folder / "out", **options)


def table(made: Report, name: str) -> list[Row]:
    """A table of the report."""
    found: list[Row] = parquet.read_table(
        Path(made.page).with_name("tables") / f"{name}.parquet"
    ).to_pylist()
    return found


WHAT = {"sent": "sent", "replaced": "sent", "acked": "handled"}
WHAT |= {name: name for name in ("garbage", "cancelled", "expired", "skipped")}


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


def test_counts_by_topic_and_hour(made: Report, journal: Journal) -> None:
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
    assert made.accepted == 240
    assert made.handled == sum(one["handled"] for one in wanted.values())
    assert made.garbage == sum(one["garbage"] for one in wanted.values())
    assert made.events == len(journal.events)


def test_a_short_report_has_steps_below_an_hour(journal: Journal) -> None:
    archive, zone = journal.archive(), ZoneInfo("Asia/Kolkata")
    found = Figures(archive, JobScope(), zone, SLO)
    assert found.span is not None
    assert found.span.step == "5 minutes"
    steps = found.span.edges[:-1]

    def by_step(events: list[Row]) -> list[int]:
        counts = Counter(int(one["at"].timestamp()) // 300 * 300 for one in events)
        return [counts[step] for step in steps]

    for name in ("sent", "handled", "garbage"):
        wanted = by_step([one for one in journal.events if counted(one) == name])
        assert found.steps(name) == wanted
        assert sum(wanted) == found.count(name) > 0
    late = by_step([one for one in journal.events if one["late_us"] is not None])
    parts = [found.late(None, "slot", step) for step in steps]
    assert [one.total if one else 0 for one in parts] == late


def test_lateness_percentiles_are_within_the_error_bound(made: Report, journal: Journal) -> None:
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
    assert (made.within, made.deliveries) == (whole["within_slo"], whole["hand_overs"])
    shown_share = f"{10_000 * made.within // made.deliveries / 100:g} % within 5 ms"
    assert shown_share in page_of(made)
    assert made.early == 1
    assert "1 messages were delivered before they were due" in page_of(made)


def test_attempts_and_reasons(made: Report, journal: Journal) -> None:
    wanted = Counter((e["topic"], e["attempt"]) for e in journal.events if e["state"] == "acked")
    assert {(r["topic"], r["attempt"]): r["messages"] for r in table(made, "attempts")} == wanted
    reasons = Counter(
        (e["topic"], "HTTP 503 for order #" if e["reason"] else "no reason given")
        for e in journal.events
        if e["state"] == "garbage"
    )
    assert {(r["topic"], r["reason"]): r["messages"] for r in table(made, "garbage")} == reasons


def test_handling_and_capacity(made: Report, journal: Journal) -> None:
    times: dict[str, dict[str, list[datetime]]] = defaultdict(lambda: defaultdict(list))
    hours: dict[tuple[str, str], Counter[datetime]] = defaultdict(Counter)
    for event in journal.events:
        if event["state"] == "acked" or event["late_us"] is not None:
            times[event["topic"]][event["id"]].append(event["at"])
        if event["state"] == "acked":
            hours[event["topic"], event["group"]][hour_of(event["at"])] += 1
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
    for row in table(made, "topics"):  # the capacity is that of the slowest group
        best = [
            max(counts.values()) for (topic, _), counts in hours.items() if topic == row["topic"]
        ]
        assert row["best_hour"] == min(best)
    # Each table is also a CSV.
    names = Counter(Path(path).stem for path in made.tables)
    assert set(names.values()) == {2}
    assert set(names) == {
        *("attempts", "due", "falling_behind", "gaps", "garbage", "handling", "hourly"),
        *("lateness", "lateness_trend", "topics"),
    }
    read = csv.read_csv(Path(made.page).with_name("tables") / "hourly.csv").to_pylist()
    assert [row["handled"] for row in read] == [row["handled"] for row in table(made, "hourly")]


def test_forecast_and_topics_that_fall_behind(spark: SparkSession, tmp_path: Path) -> None:
    journal = Journal(spark)
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
    found = report(journal.archive(), tmp_path)
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


def test_gaps_are_shown_at_the_top_and_all_text_is_escaped(
    spark: SparkSession, tmp_path: Path
) -> None:
    evil = '<script>alert(1)</script> style="}</style><script>" $x^2$ \x1b[31m\n& more'
    journal = Journal(spark)
    journal.send("a.b:c", "m1", BEGIN, BEGIN)
    journal.add("a.b:c", "garbage", BEGIN, id="m1", group="lisa", attempt=1, reason=evil)
    begun, ended = (BEGIN - timedelta(days=days) for days in (2, 1))
    before, after, old = (f"{datetime_ms(one)}-0" for one in (begun, BEGIN, ended))
    archive = journal.archive(
        ArchiveGap("a.b:c", before, 100, after, 160, "trimmed before it was archived", begun),
        ArchiveGap("a.b:c", before, 900, None, None, evil, begun),
        ArchiveGap("bills", before, 1, after, 3, "another topic", begun),
        ArchiveGap("a.b:c", before, 1, old, 3, "long ago", begun),
    )
    start = BEGIN - timedelta(hours=1)
    found = report(archive, tmp_path, topics=["a.b:c"], start=start, where='/tmp/"><script>')
    assert found.gaps == 2
    page = page_of(found)
    assert page.index("The journal has 2 gaps.") < page.index('id="summary"')
    assert "At least 59 events are missing" in page
    assert page.index('id="gaps"') < page.index('id="throughput"')
    assert "another topic" not in page
    assert "long ago" not in page
    assert "<script" not in page
    assert page.count("<style") == page.count("</style>") == 1
    assert "&lt;script&gt;alert(" in page
    assert "\x1b" not in page
    assert 'style="}' not in page.partition("</style>")[0]


def test_the_last_seven_days_are_compared_with_the_seven_before(
    spark: SparkSession, tmp_path: Path
) -> None:
    journal = Journal(spark)
    end = datetime(2026, 11, 18, 6, tzinfo=UTC)
    # Hours before the end of the later week; late by seconds.
    lives = [(30, 0.5), (100, 3), (167.9, 3), (168.1, 0.5), (335.9, 0.5), (400, 9)]
    for number, (hours, late) in enumerate(lives):
        sent, topic = end - timedelta(hours=hours), "orders" if number else "bills"
        journal.send(topic, f"m{number}", sent, sent)
        delivered = {"id": f"m{number}", "group": "g", "late_us": round(late * 1e6), "due": sent}
        journal.add(topic, "in_flight", sent, attempt=1, **delivered)
    journal.send("orders", "last", end - timedelta(minutes=1), end)
    archive = journal.archive()

    def figures(asked: JobScope) -> Figures:
        return Figures(archive, asked, UTC, timedelta(seconds=1))

    found = figures(JobScope())
    weeks = [int((end - timedelta(days=days)).timestamp()) for days in (14, 7, 0)]
    assert found.weeks == tuple(weeks)
    assert [found.count("sent", None, "week", week) for week in weeks[:2]] == [2, 4]
    assert [found.count("sent", "orders", "week", week) for week in weeks[:2]] == [2, 3]
    before, now = (found.late(None, "week", week) for week in weeks[:2])
    assert before is not None
    assert now is not None
    assert (before.within, before.total, now.within, now.total) == (2, 2, 1, 3)
    assert found.late("bills", "week", weeks[0]) is None
    page = page_of(report(archive, tmp_path))
    assert '<section id="weeks">' in page
    assert "+100 %" in page
    assert "33.33 %" in page
    assert figures(JobScope(start=end - timedelta(days=13))).weeks is None


def test_a_range_without_events_shows_what_is_to_come(spark: SparkSession, tmp_path: Path) -> None:
    journal = Journal(spark)
    journal.send("orders", "later", BEGIN, BEGIN + timedelta(days=2))
    found = report(journal.archive(), tmp_path, start=BEGIN + timedelta(days=1))
    assert (found.events, found.to_come) == (0, 1)
    page = page_of(found)
    assert "The archive has no events in this range." in page
    assert '<section id="forecast">' in page
    assert '<section id="throughput">' not in page
    assert 'href="#throughput"' not in page


def test_a_time_needs_a_zone_and_places_are_shown_without_passwords(
    spark: SparkSession, tmp_path: Path
) -> None:
    with pytest.raises(InvalidMessage, match="has no time zone"):
        report(Journal(spark).archive(), tmp_path, start=datetime(2026, 1, 1))  # noqa: DTZ001
    for where, shown in (
        ("/data/archive", "/data/archive"),
        ("s3a://key:se@cret@bucket/x", "s3a://bucket/x"),
        ("jdbc:postgresql://u:p@h/db?password=secret", "jdbc:postgresql://h/db"),
        ("jdbc:mariadb://h/db;password=secret", "jdbc:mariadb://h/db"),
    ):
        assert without_password(where) == shown


def test_the_command(
    pipeline: Callable[..., Result], made: Report, journal: Journal, tmp_path: Path
) -> None:
    archive, out = Path(made.page).parents[1] / "archive", tmp_path / "out"
    words = ("--archive", str(archive), "--to", str(out))
    for options, said in {
        ("--from", "2026-01-02", "--until", "2026-01-01"): "--from must be before --until",
        ("--zone", "Mars"): "unknown time zone 'Mars'",
        ("--topic", "bill"): "the archive has no topic bill; its topics are bills, orders",
        ("--archive", "/nowhere"): "/nowhere",
        ("--archive", "jdbc:postgresql://h/db"): "only `archive` and `restore` use an archive in",
    }.items():
        wrong = pipeline("report", *words, *options, code=2)
        assert said in wrong.stderr
        assert len(wrong.stderr.splitlines()) == 1
        assert not out.exists()
    start, end = (datetime(2026, 11, 18, hour, tzinfo=UTC) for hour in (7, 9))
    span = ("--from", "2026-11-18T08:00", "--until", "2026-11-18T10:00", "--zone", "Europe/Berlin")
    document = json.loads(pipeline("report", *words, *span, "--topic", "bills", "--json").stdout)
    inside = [e for e in journal.events if e["topic"] == "bills" and start <= e["at"] < end]
    assert document["events"] == len(inside) > 0
    assert document["handled"] == sum(e["state"] == "acked" for e in inside)
    assert document["page"] == str(out / "report.html")
    assert len(document["tables"]) == 20
    page = (out / "report.html").read_text("utf-8")
    assert "Lisa report: bills" in page
    assert "Europe/Berlin" in page
    assert "orders" not in page


def test_the_forecast_finds_the_hours_above_capacity() -> None:
    whole = dict.fromkeys(range(DAYS * 24), 101)
    found: list[tuple[Demand, tuple[Any, ...] | None]] = [
        (Demand(hours=dict.fromkeys(range(700), 100)), None),
        # Hour 5 leaves 250 over, hour 6 170, hour 7 70; hour 8 has 160 to do, and leaves 60; hour 9
        # needs six tenths of itself.
        (Demand(hours={5: 350, 6: 20, 8: 90}), (5, 350, 250, 5, 9.6)),
        (Demand(hours={OVERDUE: 150, 0: 100}), (0, 250, 150, 0, 2.5)),
        # The worst of several is returned.
        (Demand(hours={1: 120, 50: 1_000}), (50, 1_000, 900, 50, 60.0)),
        # A backlog that never ends.
        (Demand(hours=whole), (0, 101, DAYS * 24, DAYS * 24 - 1, None)),
    ]
    for demand, wanted in found:
        expected = Crossing("orders", 100, *wanted) if wanted else None
        assert crossing("orders", demand, 100) == expected
    demand = Demand(hours={OVERDUE: 1, 0: 3, 23: 4, 24: 5, LATER: 2})
    assert (demand.overdue, demand.within(24), demand.total) == (1, 7, 15)


def seconds(zone: ZoneInfo | timezone, *parts: int) -> int:
    return int(datetime(*parts, tzinfo=zone).timestamp())  # type: ignore[misc, arg-type]


def test_steps_are_short_for_short_ranges_and_long_for_long_ones() -> None:
    berlin, steps = ZoneInfo("Europe/Berlin"), {}
    first = seconds(berlin, 2026, 3, 28, 22, 40)
    for hours in (0, 2, 3, 36, 37, 20 * 24):
        found = span_of(first, first + hours * 3_600, berlin, 0)
        steps[hours] = (found.step, found.part_s)
        assert found.edges[0] <= first < found.edges[1]
        assert found.edges[-2] <= first + hours * 3_600 < found.edges[-1]
        assert len(found.edges) <= 150
    assert steps == {
        0: ("minute", 60),
        2: ("minute", 60),
        3: ("5 minutes", 300),
        36: ("15 minutes", 900),
        37: ("hour", 3_600),
        480: ("day", 3_600),
    }
    days = span_of(first, first + 20 * 86_400, berlin, 0)
    # The clock goes forward on the 29th: that day has 23 hours.
    assert [b - a for a, b in zip(days.edges, days.edges[1:3], strict=False)] == [86_400, 82_800]
    assert days.edges[1:3] == (seconds(berlin, 2026, 3, 29), seconds(berlin, 2026, 3, 30))
    years = span_of(first, first + 900 * 86_400, berlin, 0)
    assert years.step == "30 days"
    assert len(years.edges) < 40


def test_hours_start_at_full_hours_of_the_zone() -> None:
    now = seconds(timezone.utc, 2026, 11, 21, 13, 17)  # noqa: UP017 - typed as the others are
    for zone, shift in (
        (UTC, 0),
        (ZoneInfo("Europe/Berlin"), 0),
        (ZoneInfo("Asia/Kolkata"), 1_800),
        (timezone(timedelta(hours=-3, minutes=-30)), 1_800),
        (timezone(timedelta(hours=5, minutes=45)), 900),
    ):
        assert full_hour_shift(zone, now) == shift
        edge = span_of(now, now + 40 * 3_600, zone, shift).edges[0]
        assert datetime.fromtimestamp(edge, UTC).astimezone(zone).minute == 0
        assert edge <= now < edge + 3_600


def test_formatting_of_numbers_and_durations() -> None:
    shares = {(1, 1): "100 %", (9_999, 10_000): "99.99 %", (99_999, 100_000): "99.99 %"}
    shares |= {(0, 3): "0 %", (0, 0): ""}
    assert {pair: kept(*pair) for pair in shares} == shares
    changes = {(4, 5): "+25 %", (5, 4): "-20 %", (3, 3): "+0 %", (0, 3): ""}
    assert {pair: change(*pair) for pair in changes} == changes
    lengths = {0: "0 s", 850: "850 µs", 1_250: "1.25 ms", 999_400: "999 ms", 3_400_000: "3.4 s"}
    lengths |= {125_000_000: "2m 5s"}
    assert {us: human_us(us) for us in lengths} == lengths
