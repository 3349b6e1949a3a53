"""Renders the page: one self-contained file without scripts, which loads nothing."""

from __future__ import annotations

from datetime import UTC, datetime
from importlib import resources
from typing import TYPE_CHECKING

from lisa.core.model.extras import requires
from lisa.pipeline.jobs.report import formatting
from lisa.pipeline.jobs.report.counts import COUNTED, ERROR, by_p99
from lisa.pipeline.jobs.report.figures import DAYS, Figures
from lisa.pipeline.jobs.report.plots import WARNED, draw_plots

if TYPE_CHECKING:
    from jinja2 import Environment

    from lisa.pipeline.archive.base import ArchiveGap


def render(figures: Figures, archive: str) -> str:
    """The page as HTML. archive: the archive's name on the page, without passwords.

    Raises MissingExtra if matplotlib or Jinja2 is not installed.
    """
    asked = figures.asked
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
            topics=figures.totals(),
            late=figures.late(),
            latest=by_p99(figures.lateness),
            sent=figures.total("sent"),
            garbage=figures.total("garbage"),
            demands=list(figures.demands.values()),
            gap_topics=sorted({gap.topic for gap in figures.gaps}),
            missing_events=sum(missing(gap) or 0 for gap in figures.gaps),
            unknown_messages=sum(figures.demands[topic].total for topic in figures.unknown),
            drawn={} if figures.empty else draw_plots(figures),
            counted=COUNTED,
            days=DAYS,
            warned=WARNED,
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

    def instant(moment: datetime | int | None) -> str:
        """A time, which may be in epoch seconds."""
        at = datetime.fromtimestamp(moment, UTC) if isinstance(moment, int) else moment
        return formatting.instant(at, figures.zone)

    made.filters.update(
        count=formatting.count,
        length_of=formatting.length,
        share=formatting.share,
        kept=formatting.kept,
        change=formatting.change,
        printable=formatting.printable,
        instant=instant,
        missing=missing,
    )
    return made


def missing(gap: ArchiveGap) -> int | None:
    """The number of events missing in a gap; None if unknown because event numbers restarted."""
    after = gap.after_number or 0
    return gap.to_number - after - 1 if gap.to_number and gap.to_number > after else None
