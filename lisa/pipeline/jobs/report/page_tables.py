"""The page's tables: the most telling rows; all of them are in the files."""

from __future__ import annotations

from collections.abc import Mapping, Sized
from datetime import UTC, datetime, timedelta

from lisa.pipeline.archive.records import Gap
from lisa.pipeline.jobs.report.figures import Figures
from lisa.pipeline.jobs.report.forecast import DAYS
from lisa.pipeline.jobs.report.markup import Cell, Column, Markup, Row, table
from lisa.pipeline.jobs.report.tables import COUNTED, Percentiles
from lisa.pipeline.jobs.report.words import count, instant, length, printable, share

__all__ = [
    "crossing_table", "forecast_table", "gap_table", "hourly_table", "lateness_table", "missing",
    "reason_table", "topic_table",
]  # fmt: skip

MOST_TOPICS = 50
MOST_HOURS = 240
MOST_GAPS = 50
MOST_REASONS = 20
MOST_NAMED = 4


def lateness_table(figures: Figures) -> Markup:
    """Percentiles of every topic, the latest first."""
    ranked = _by_p99(figures.lateness)
    columns = [Column("Topic", text=True), Column("Hand-overs"), Column("p50"), Column("p90"),
               Column("p99"), Column("p99.9"), Column("Maximum"), Column("Early")]  # fmt: skip
    rows: list[Row] = [
        (topic, one.count, *_lengths(one), Cell(count(one.early), flag=one.early > 0))
        for topic, one in ranked[:MOST_TOPICS]
    ]
    return table(f"Lateness by topic{_first(rows, ranked)}, the latest first.", columns, rows)


def topic_table(figures: Figures) -> Markup:
    """Counts of every topic and how long handling took."""
    totals = figures.totals()
    columns = [Column("Topic", text=True), *(Column(name.capitalize()) for name in COUNTED),
               Column("Handling p50"), Column("Handling p99")]  # fmt: skip
    rows: list[Row] = []
    for topic, sums in list(totals.items())[:MOST_TOPICS]:
        took = figures.handling.get((("topic",), topic))
        times = (length(took.p50), length(took.p99)) if took else ("", "")
        rows.append((topic, *(sums[name] for name in COUNTED), *times))
    return table(f"Topics{_first(rows, totals)}, the busiest first.", columns, rows)


def reason_table(figures: Figures) -> Markup:
    """Garbage by reason, and the topics that it comes from."""
    topics: dict[str, list[tuple[str, int]]] = {}
    for topic, reason, n in figures.reasons:
        topics.setdefault(reason, []).append((topic, n))
    sums = {reason: sum(n for _, n in found) for reason, found in topics.items()}
    named = sorted((reason for reason in sums if reason), key=lambda reason: -sums[reason])
    for reason in named[MOST_REASONS:]:
        sums[""] = sums.get("", 0) + sums[reason]
    ranked = named[:MOST_REASONS] + ([""] if sums.get("") else [])
    columns = [Column("Reason", text=True), Column("Topics", text=True), Column("Messages"),
               Column("Share of garbage")]  # fmt: skip
    rows = [
        (printable(reason, 120) or "all other reasons", _named(topics[reason]) if reason else "",
         sums[reason], share(sums[reason], sum(sums.values())))
        for reason in ranked
    ]  # fmt: skip
    return table("Garbage by reason.", columns, rows)


def _named(topics: list[tuple[str, int]]) -> str:
    shown = ", ".join(f"{topic} {count(n)}" for topic, n in topics[:MOST_NAMED])
    return shown + (", ..." if len(topics) > MOST_NAMED else "")


def forecast_table(figures: Figures) -> Markup:
    """What every topic has to come, and what it can do."""
    columns = [Column("Topic", text=True), Column("Overdue"), Column("Next hour"),
               Column("Next 24 hours"), Column(f"Next {DAYS} days"), Column("Later"),
               Column("Best hour"), Column("95 % of busy hours")]  # fmt: skip
    ranked = sorted(figures.demands.items(), key=lambda one: -one[1].total)
    rows: list[Row] = []
    for topic, demand in ranked[:MOST_TOPICS]:
        best, p95, _ = figures.capacities.get(topic, (0, 0, 0))
        rows.append((
            topic, demand.overdue, demand.within(1), demand.within(24), demand.within(24 * DAYS),
            demand.later, best or "unknown", p95 or "unknown",
        ))  # fmt: skip
    return table(f"What falls due{_first(rows, ranked)}, and the messages that were handled in an "
                 "hour: in the best one, and at most in 95 % of those with any.",
                 columns, rows)  # fmt: skip


def crossing_table(figures: Figures) -> Markup:
    """Every topic that will fall behind."""
    columns = [Column("Falls behind", text=True), Column("From"), Column("To do in that hour"),
               Column("Best hour"), Column("Most left over"), Column("Drained")]  # fmt: skip
    now, zone = figures.now, figures.zone
    rows: list[Row] = [] if now is None else [
        (one.topic, instant(now + timedelta(hours=one.hour), zone), one.load, one.capacity,
         Cell(count(one.peak), flag=True),
         f"not within {DAYS} days" if one.drained is None
         else instant(now + timedelta(hours=one.drained), zone))
        for one in figures.crossings[:MOST_TOPICS]
    ]  # fmt: skip
    return table(f"Topics that fall behind{_first(rows, figures.crossings)}: more falls due than "
                 "was ever handled.", columns, rows)  # fmt: skip


def gap_table(figures: Figures) -> Markup:
    """Events that no archive ever saw."""
    columns = [Column("Topic", text=True), Column("Met at"), Column("Behind event"),
               Column("Before event"), Column("Missing"), Column("Why", text=True)]  # fmt: skip
    rows: list[Row] = []
    for gap in figures.gaps[:MOST_GAPS]:
        lost = missing(gap)
        rows.append((
            gap.place, instant(gap.at, figures.zone), gap.after_id or "the start",
            gap.to_id or "none yet", Cell("unknown" if lost is None else count(lost), flag=True),
            printable(gap.reason, 200),
        ))  # fmt: skip
    return table(f"What the archive never saw{_first(rows, figures.gaps)}.", columns, rows)


def missing(gap: Gap) -> int | None:
    """How many events a gap stands for, None where that is not known: the numbers began anew."""
    after = gap.after_number or 0
    return gap.to_number - after - 1 if gap.to_number and gap.to_number > after else None


def hourly_table(figures: Figures) -> Markup:
    """Counts and lateness of each topic and hour, the newest first."""
    counted = (Column(name.capitalize()) for name in COUNTED)
    columns = [Column("Hour and topic", text=True), *counted, Column("p50"), Column("p99"),
               Column("Maximum")]  # fmt: skip
    rows: list[Row] = []
    for topic, hour, counts in list(reversed(figures.hours))[:MOST_HOURS]:
        late = figures.lateness.get((("topic", "hour"), topic, hour))
        when = instant(datetime.fromtimestamp(hour, UTC), figures.zone)
        times = (length(late.p50), length(late.p99), length(late.max)) if late else ("", "", "")
        rows.append((f"{when}  {topic}", *(counts[name] for name in COUNTED), *times))
    return table(f"Each topic and hour{_first(rows, figures.hours)}, the newest first; times are "
                 "lateness.", columns, rows)  # fmt: skip


def _by_p99(parts: Mapping[tuple[object, ...], Percentiles]) -> list[tuple[str, Percentiles]]:
    found = [(str(part[1]), one) for part, one in parts.items() if part[0] == ("topic",)]
    return sorted(found, key=lambda one: (-one[1].p99, one[0]))


def _lengths(one: Percentiles) -> tuple[str, ...]:
    return tuple(length(value) for value in (one.p50, one.p90, one.p99, one.p999, one.max))


def _first(shown: Sized, everything: Sized) -> str:
    whole = len(everything)
    return f" ({len(shown)} of {whole:,}; all are in the files)" if len(shown) < whole else ""
