"""The job `report`: one self-contained page of plots, and its tables as Parquet and CSV."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta, tzinfo
from pathlib import Path
from typing import TYPE_CHECKING

from lisa.core.model.clock import parse_zone
from lisa.pipeline.jobs.report.figures import Figures
from lisa.pipeline.jobs.report.page import render
from lisa.pipeline.jobs.report.table_files import write_tables
from lisa.pipeline.jobs.windows import JobScope
from lisa.pipeline.paths import without_password
from lisa.pipeline.source import files

if TYPE_CHECKING:
    from lisa.pipeline.archive import Archive

__all__ = ["Report", "report"]

PAGE = "report.html"


@dataclass(frozen=True, slots=True)
class Report:
    """The files of a report, and a summary. Counts are numbers of messages.

    page, tables: paths or URLs of the files. events: number of events; first, last: their times.
    p99_us: lateness of first deliveries in microseconds, None without deliveries.
    early: deliveries before the due time. deliveries, within: first deliveries, and how many of
        them were late by at most the SLO.
    to_come: unsettled messages; `overdue` of them are past their due time.
    falling_behind: topics with more messages due in an hour than they ever handled in one.
    gaps: number of gaps in the journal.
    """

    page: str
    tables: tuple[str, ...]
    events: int
    first: datetime | None
    last: datetime | None
    accepted: int
    handled: int
    retried: int
    garbage: int
    early: int
    deliveries: int
    within: int
    p99_us: int | None
    to_come: int
    overdue: int
    falling_behind: tuple[str, ...]
    gaps: int


def report(
    archive: Archive,
    to: str | Path,
    *,
    where: str = "",
    topics: Sequence[str] = (),
    start: datetime | None = None,
    end: datetime | None = None,
    zone: str | tzinfo = "UTC",
    slo: timedelta = timedelta(seconds=1),
    stage: Callable[[str], None] = lambda _: None,
) -> Report:
    """Make a report of an archive: `to`/report.html and `to`/tables/NAME.{parquet,csv}.

    Args:
        archive: the archive; each of its two tables is read once.
        to: a directory, or a URL such as s3a://bucket/report; created if missing, an existing
            report in it is replaced.
        where: name of the archive on the page; user and query are removed from a URL.
        topics: only these topics; empty means all.
        start, end: events from `start` up to but not including `end`, both aware datetimes.
        zone: time zone of the page.
        slo: the lateness up to which a delivery is on time.
        stage: called with a description of each stage.

    Raises:
        InvalidMessage: unknown time zone, a time without zone, or an end that is not after start.
        ConfigError: matplotlib is not installed, or a file cannot be written.
    """
    asked = JobScope(tuple(topics), start, end)
    stage("counting the archive's events and messages")
    figures = Figures(archive, asked, parse_zone(zone), slo)
    stage("drawing the page")
    page = render(figures, without_password(where))
    stage("writing the files")
    tables = write_tables(figures, files.join(str(to), "tables"))
    where_page = files.join(str(to), PAGE)
    files.write(where_page, page.encode())
    late = figures.late()
    return Report(
        page=where_page,
        tables=tables,
        events=figures.events,
        first=figures.first,
        last=figures.last,
        accepted=figures.count("sent"),
        handled=figures.count("handled"),
        retried=figures.count("retried"),
        garbage=figures.count("garbage"),
        early=late.early if late else 0,
        deliveries=late.total if late else 0,
        within=late.within if late else 0,
        p99_us=late.p99 if late else None,
        to_come=figures.due.total,
        overdue=figures.due.overdue,
        falling_behind=tuple(crossing.topic for crossing in figures.crossings),
        gaps=len(figures.gaps),
    )
