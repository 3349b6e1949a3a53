"""Renders the page: one self-contained file without scripts, which loads nothing."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

from lisa.core.model.extras import requires
from lisa.pipeline.jobs.report import formatting, plots
from lisa.pipeline.jobs.report.figures import COUNTED, DAYS, ERROR, Figures, by_topic

if TYPE_CHECKING:
    from lisa.pipeline.archive.base import ArchiveGap


def render(figures: Figures, archive: str) -> str:
    """The page as HTML. archive: the archive's name on the page, without passwords.

    Raises MissingExtra if matplotlib or Jinja2 is not installed.
    """
    with requires("pipeline"):
        import jinja2

    def instant(moment: datetime | int | None) -> str:
        """A time, which may be in epoch seconds, to the minute; empty for None."""
        if moment is None:
            return ""
        at = datetime.fromtimestamp(moment, UTC) if isinstance(moment, int) else moment
        return f"{at.astimezone(figures.zone):%Y-%m-%d %H:%M}"

    made = jinja2.Environment(
        loader=jinja2.PackageLoader(__package__ or ""),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    words = (formatting.human_us, formatting.share, formatting.kept, formatting.change)
    filters = (*words, formatting.printable, instant, missing, by_topic, plots.to_html)
    made.filters.update({function.__name__: function for function in filters})
    made.filters["count"] = formatting.count
    return made.get_template("page.html").render(
        archive=archive,
        figures=figures,
        plots=plots,
        counted=COUNTED,
        days=DAYS,
        error_percent=100 * ERROR,
    )


def missing(gap: ArchiveGap) -> int | None:
    """The number of events missing in a gap; None if unknown because event numbers restarted."""
    after = gap.after_number or 0
    return gap.to_number - after - 1 if gap.to_number and gap.to_number > after else None
