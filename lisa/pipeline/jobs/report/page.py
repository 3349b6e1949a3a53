"""Renders the page: one self-contained file without scripts, which loads nothing.

Its tables have a limited number of rows; the files have all rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import resources
from typing import TYPE_CHECKING

from lisa.core.model.extras import requires
from lisa.pipeline.archive.base import ArchiveGap
from lisa.pipeline.jobs.report.counts import COUNTED, ERROR, Percentiles
from lisa.pipeline.jobs.report.figures import DAYS, Figures
from lisa.pipeline.jobs.report.formatting import (
    change,
    count,
    instant,
    kept,
    length,
    printable,
    share,
)
from lisa.pipeline.jobs.report.plots import WARNED, draw_plots

if TYPE_CHECKING:
    from jinja2 import Environment

MANY_COLUMNS = 9
"""Tables with more columns are printed in a smaller font."""


MOST_TOPICS = 50

MOST_HOURS = 240

MOST_GAPS = 50

MOST_REASONS = 20

MOST_NAMED = 4


def render(figures: Figures, archive: str) -> str:
    """The page as HTML. archive: the archive's name on the page, without passwords.

    Raises MissingExtra if matplotlib or Jinja2 is not installed.
    """
    asked, totals = figures.asked, figures.totals()
    return (
        _environment(figures)
        .get_template("page.html")
        .render(
            css=resources.files(__package__).joinpath("page.css").read_text("utf-8"),
            archive=archive,
            asked=asked,
            start=asked.start or figures.first,
            end=asked.end or figures.last,
            zone=figures.zone,
            figures=figures,
            topics=totals,
            late=figures.late(),
            sent=figures.total("sent"),
            garbage=figures.total("garbage"),
            demands=list(figures.demands.values()),
            gap_topics=sorted({gap.topic for gap in figures.gaps}),
            missing_events=sum(missing(gap) or 0 for gap in figures.gaps),
            unknown_messages=sum(figures.demands[topic].total for topic in figures.unknown),
            drawn={} if figures.empty else draw_plots(figures),
            tables=page_tables(figures),
            days=DAYS,
            warned=WARNED,
            many_columns=MANY_COLUMNS,
            error_percent=100 * ERROR,
        )
    )


def _environment(figures: Figures) -> Environment:
    with requires("pipeline"):
        import jinja2
    made = jinja2.Environment(
        loader=jinja2.PackageLoader(__package__ or ""),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters.update(
        count=count,
        length_of=length,
        share=share,
        kept=kept,
        instant=lambda moment: instant(moment, figures.zone),
    )
    return made


@dataclass(frozen=True, slots=True)
class Cell:
    """The text of a cell; kind is empty, zero, or flag for a highlighted cell."""

    text: str
    kind: str = ""


Row = Sequence[str | int | Cell]


class Table:
    """A table of the page. Text columns are left-aligned: the first, and those in `texts`."""

    def __init__(
        self, caption: str, titles: Sequence[str], rows: Iterable[Row], texts: Sequence[str] = ()
    ) -> None:
        self.caption = caption
        self.titles = titles
        self.rows = [[_cell(value) for value in row] for row in rows]
        self._texts = texts

    def is_text(self, index: int) -> bool:
        """Whether a column is left-aligned."""
        return index == 0 or self.titles[index] in self._texts


def _cell(value: str | int | Cell) -> Cell:
    if isinstance(value, int):
        return Cell(count(value), "zero" if value == 0 else "")
    return Cell(value) if isinstance(value, str) else value


def page_tables(figures: Figures) -> dict[str, Table]:
    """All tables of the page by name."""
    return {
        "gaps": _gaps(figures),
        "weeks": _weeks(figures),
        "lateness": _lateness(figures),
        "reasons": _reasons(figures),
        "crossings": _crossings(figures),
        "forecast": _forecast(figures),
        "topics": _topics(figures),
        "hours": _hours(figures),
    }


def _lateness(figures: Figures) -> Table:
    """Percentiles of lateness by topic, highest p99 first."""
    ranked = _by_p99(figures.lateness)
    slo = f"Within {length(figures.slo_us)}"
    titles = ["Topic", "Deliveries", slo, "p50", "p90", "p99", "p99.9", "Maximum", "Early"]
    rows: list[Row] = [
        (
            topic,
            one.count,
            kept(one.within, one.count),
            *_lengths(one),
            Cell(count(one.early), "flag" if one.early else ""),
        )
        for topic, one in ranked[:MOST_TOPICS]
    ]
    return Table(f"Lateness by topic{_first(rows, ranked)}, highest p99 first.", titles, rows)


def _weeks(figures: Figures) -> Table:
    """The last seven days by topic, compared with the seven days before."""
    weeks, slo = figures.weeks, f"within {length(figures.slo_us)}"
    titles = [
        "Topic",
        "Accepted",
        "Change",
        "Handled",
        "Change ",
        "Garbage",
        "p99",
        "p99 before",
        slo.capitalize(),
        f"{slo.capitalize()} before",
    ]
    rows: list[Row] = []
    if weeks is None:
        return Table("", titles, rows)
    totals = [None, *figures.totals()]
    for topic in totals[: MOST_TOPICS + 1]:
        cells: list[str | int | Cell] = [topic or "all topics"]
        for name in ("sent", "handled"):
            before, now = (weeks.count(name, week, topic) for week in (0, 1))
            cells += [now, change(before, now)]
        late = [weeks.late(week, topic) for week in (1, 0)]
        cells += [
            weeks.count("garbage", 1, topic),
            *(length(week.p99) if week else "" for week in late),
            *(kept(week.within, week.count) if week else "" for week in late),
        ]
        rows.append(cells)
    begin, end = (
        instant(datetime.fromtimestamp(at, UTC), figures.zone) for at in (weeks.begin, weeks.end)
    )
    caption = f"The seven days before {end}, and the seven days before those, from {begin}."
    return Table(caption, titles, rows)


def _topics(figures: Figures) -> Table:
    """Counts and handling times by topic."""
    totals = figures.totals()
    titles = ["Topic", *(name.capitalize() for name in COUNTED), "Handling p50", "Handling p99"]
    rows: list[Row] = []
    for topic, sums in list(totals.items())[:MOST_TOPICS]:
        took = figures.handling.get((("topic",), topic))
        times = (length(took.p50), length(took.p99)) if took else ("", "")
        rows.append((topic, *(sums[name] for name in COUNTED), *times))
    return Table(f"Topics{_first(rows, totals)}, busiest first.", titles, rows)


def _reasons(figures: Figures) -> Table:
    """Garbage by reason, with the topics concerned."""
    topics: dict[str, list[tuple[str, int]]] = {}
    for topic, reason, n in figures.reasons:
        topics.setdefault(reason, []).append((topic, n))
    sums = {reason: sum(n for _, n in found) for reason, found in topics.items()}
    named = sorted((reason for reason in sums if reason), key=lambda reason: -sums[reason])
    for reason in named[MOST_REASONS:]:
        sums[""] = sums.get("", 0) + sums[reason]
    ranked = named[:MOST_REASONS] + ([""] if sums.get("") else [])
    titles = ["Reason", "Topics", "Messages", "Share of garbage"]
    rows = [
        (
            printable(reason, 120) or "all other reasons",
            _named(topics[reason]) if reason else "",
            sums[reason],
            share(sums[reason], sum(sums.values())),
        )
        for reason in ranked
    ]
    return Table("Garbage by reason.", titles, rows, texts=["Topics"])


def _named(topics: list[tuple[str, int]]) -> str:
    shown = ", ".join(f"{topic} {count(n)}" for topic, n in topics[:MOST_NAMED])
    return shown + (", ..." if len(topics) > MOST_NAMED else "")


def _forecast(figures: Figures) -> Table:
    """Messages to come and capacity by topic."""
    titles = [
        "Topic",
        "Overdue",
        "Next hour",
        "Next 24 hours",
        f"Next {DAYS} days",
        "Later",
        "Best hour",
        "95 % of busy hours",
    ]
    ranked = sorted(figures.demands.items(), key=lambda one: -one[1].total)
    rows: list[Row] = []
    for topic, demand in ranked[:MOST_TOPICS]:
        best, p95, _ = figures.capacities.get(topic, (0, 0, 0))
        rows.append(
            (
                topic,
                demand.overdue,
                demand.within(1),
                demand.within(24),
                demand.within(24 * DAYS),
                demand.later,
                best or "unknown",
                p95 or "unknown",
            )
        )
    return Table(
        f"Messages due{_first(rows, ranked)}, and messages handled per hour: in the best "
        "hour, and in the 95th percentile of busy hours.",
        titles,
        rows,
    )


def _crossings(figures: Figures) -> Table:
    """The topics that will fall behind."""
    titles = [
        "Falls behind",
        "From",
        "Load in that hour",
        "Best hour",
        "Largest backlog",
        "Drained",
    ]
    rows: list[Row] = [
        (
            crossing.topic,
            instant(figures.ahead(crossing.hour), figures.zone),
            crossing.load,
            crossing.capacity,
            Cell(count(crossing.peak), "flag"),
            instant(figures.ahead(crossing.drained), figures.zone) or f"not within {DAYS} days",
        )
        for crossing in figures.crossings[:MOST_TOPICS]
    ]
    return Table(
        f"Topics that fall behind{_first(rows, figures.crossings)}: more messages fall due in an "
        "hour than were ever handled in one.",
        titles,
        rows,
    )


def _gaps(figures: Figures) -> Table:
    """Gaps in the journal."""
    titles = ["Topic", "Found at", "After event", "Before event", "Missing", "Reason"]
    rows: list[Row] = []
    for gap in figures.gaps[:MOST_GAPS]:
        lost = missing(gap)
        rows.append(
            (
                gap.journal,
                instant(gap.at, figures.zone),
                gap.after_id or "the start",
                gap.to_id or "none yet",
                Cell("unknown" if lost is None else count(lost), "flag"),
                printable(gap.reason, 200),
            )
        )
    caption = f"Events missing in the archive{_first(rows, figures.gaps)}."
    return Table(caption, titles, rows, texts=["Reason"])


def missing(gap: ArchiveGap) -> int | None:
    """The number of events missing in a gap; None if unknown because event numbers restarted."""
    after = gap.after_number or 0
    return gap.to_number - after - 1 if gap.to_number and gap.to_number > after else None


def _hours(figures: Figures) -> Table:
    """Counts and lateness by topic and hour, newest first."""
    counted = (name.capitalize() for name in COUNTED)
    titles = ["Hour and topic", *counted, "p50", "p99", "Maximum"]
    rows: list[Row] = []
    for topic, hour, counts in list(reversed(figures.hours))[:MOST_HOURS]:
        late = figures.lateness.get((("topic", "hour"), topic, hour))
        when = instant(datetime.fromtimestamp(hour, UTC), figures.zone)
        times = (length(late.p50), length(late.p99), length(late.max)) if late else ("", "", "")
        rows.append((f"{when}  {topic}", *(counts[name] for name in COUNTED), *times))
    return Table(
        f"Each topic and hour{_first(rows, figures.hours)}, newest first; times are lateness.",
        titles,
        rows,
    )


def _by_p99(parts: Mapping[tuple[object, ...], Percentiles]) -> list[tuple[str, Percentiles]]:
    found = [(str(part[1]), one) for part, one in parts.items() if part[0] == ("topic",)]
    return sorted(found, key=lambda one: (-one[1].p99, one[0]))


def _lengths(one: Percentiles) -> tuple[str, ...]:
    return tuple(length(value) for value in (one.p50, one.p90, one.p99, one.p999, one.max))


def _first(shown: Sized, everything: Sized) -> str:
    whole = len(everything)
    return f" ({len(shown)} of {whole:,}; the files have all)" if len(shown) < whole else ""
