"""The job `report`: one self-contained page of plots, and its tables as Parquet and CSV."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, tzinfo
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from lisa.core.clock import parse_zone
from lisa.core.errors import InvalidMessage
from lisa.pipeline.archive.records import Gap
from lisa.pipeline.jobs.report.figures import Figures, Range, gather
from lisa.pipeline.jobs.report.files import replace, write_tables
from lisa.pipeline.jobs.report.page import render

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

__all__ = ["Report", "Tables", "report"]

PAGE = "report.html"


class Tables(Protocol):
    """What a report asks of an archive."""

    def log(self) -> DataFrame:
        """Every event: LOG_SCHEMA."""

    def messages(self) -> DataFrame:
        """Every message: MESSAGES_SCHEMA."""

    def gaps(self) -> Sequence[Gap]:
        """What the log lacks."""


@dataclass(frozen=True, slots=True)
class Report:
    """What was written, and its summary.

    page, tables: files. Counts are of messages; p99_us: lateness of first hand-overs in
    microseconds, None where there was none; early: hand-overs before they were due.
    to_come: not settled, `overdue` of them due already. falling_behind: topics of which more falls
    due than they ever handled in an hour. gaps: ranges of events that the archive never saw.
    """

    page: Path
    tables: tuple[Path, ...]
    events: int
    first: datetime | None
    last: datetime | None
    accepted: int
    handled: int
    retried: int
    garbage: int
    early: int
    p99_us: int | None
    to_come: int
    overdue: int
    falling_behind: tuple[str, ...]
    gaps: int


def report(
    archive: Tables, to: str | Path, *, where: str = "", topics: Sequence[str] = (),
    start: datetime | None = None, end: datetime | None = None, zone: str | tzinfo = "UTC",
    stage: Callable[[str], None] = lambda _: None,
) -> Report:  # fmt: skip
    """Make a report of an archive: `to`/report.html and `to`/tables/NAME.{parquet,csv}.

    Args:
        archive: what is reported; each of its two tables is read once.
        to: a local directory; made if need be, a report in it is replaced.
        where: what the page calls the archive; passwords are left out.
        topics: only these; none means all.
        start, end: events from `start` up to and without `end`, both aware.
        zone: of the page's times and of its days and hours.
        stage: is told what is being done.

    Raises:
        InvalidMessage: a zone that does not exist, a time without one, an end before its start.
        ConfigError: matplotlib is not installed.
    """
    for moment in (start, end):
        if moment is not None and moment.utcoffset() is None:
            raise InvalidMessage(f"{moment.isoformat()} names no time zone")
    if start is not None and end is not None and end <= start:
        raise InvalidMessage(f"the end {end.isoformat()} is not after {start.isoformat()}")
    asked = Range(tuple(topics), start, end)
    gaps = [gap for gap in archive.gaps()
            if (not topics or gap.topic in topics) and asked.holds(gap.at)]  # fmt: skip
    stage("counting the archive's events and messages")
    figures = gather(archive.log(), archive.messages(), asked, parse_zone(zone), gaps)
    stage("drawing the page")
    page = render(figures, plain_place(where))
    stage("writing the files")
    folder = Path(to)
    tables = write_tables(figures, folder / "tables")
    replace(folder / PAGE, page)
    return _summary(figures, folder / PAGE, tuple(tables.values()))


def plain_place(where: str) -> str:
    """A place without what may hold a password: user and query."""
    return re.sub(r"//[^/]*@", "//", re.sub(r"[?;].*", "", where))


def _summary(figures: Figures, page: Path, tables: tuple[Path, ...]) -> Report:
    late = figures.late()
    return Report(
        page=page, tables=tables, events=figures.events, first=figures.first, last=figures.last,
        accepted=figures.total("sent"), handled=figures.total("handled"),
        retried=figures.total("retried"), garbage=figures.total("garbage"),
        early=late.early if late else 0, p99_us=late.p99 if late else None,
        to_come=sum(demand.total for demand in figures.demands.values()),
        overdue=sum(demand.overdue for demand in figures.demands.values()),
        falling_behind=tuple(one.topic for one in figures.crossings), gaps=len(figures.gaps),
    )  # fmt: skip
