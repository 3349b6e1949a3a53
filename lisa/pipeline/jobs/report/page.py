"""Renders the page: one self-contained file without scripts, with a strict content policy."""

from __future__ import annotations

import base64
import hashlib
from importlib import resources
from typing import TYPE_CHECKING, Any

from lisa.core.model.extras import requires
from lisa.pipeline.jobs.report.figures import Figures
from lisa.pipeline.jobs.report.forecast import DAYS
from lisa.pipeline.jobs.report.forecast_plots import ForecastPlots
from lisa.pipeline.jobs.report.formatting import count, instant, kept, length, share
from lisa.pipeline.jobs.report.page_tables import missing, page_tables
from lisa.pipeline.jobs.report.svg import Sheet
from lisa.pipeline.jobs.report.tables import ERROR
from lisa.pipeline.jobs.report.traffic_plots import TrafficPlots

if TYPE_CHECKING:
    from jinja2 import Environment

BIGGEST_TOPICS = 8
"""Number of topics with their own plots."""

WARNED = 4
"""Number of crossings with their own plot and notice."""

MANY_COLUMNS = 9
"""Tables with more columns are printed in a smaller font."""


def render(figures: Figures, archive: str) -> str:
    """The page as HTML. archive: the archive's name on the page, without passwords.

    Raises MissingExtra if matplotlib or Jinja2 is not installed.
    """
    sheet = Sheet()
    drawn = {} if figures.empty else _drawn(figures, sheet)
    css = resources.files(__package__).joinpath("page.css").read_text("utf-8") + sheet.css
    digest = base64.b64encode(hashlib.sha256(css.encode()).digest()).decode()
    asked, totals = figures.asked, figures.totals()
    return (
        _environment(figures)
        .get_template("page.html")
        .render(
            policy=f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; "
            "form-action 'none'",
            css=css,
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
            drawn=drawn,
            tables=page_tables(figures),
            days=DAYS,
            warned=WARNED,
            many_columns=MANY_COLUMNS,
            error_percent=100 * ERROR,
        )
    )


def _drawn(figures: Figures, sheet: Sheet) -> dict[str, Any]:
    """The plots of each section; those of topics by topic."""
    plots, ahead = TrafficPlots(figures, sheet), ForecastPlots(figures, sheet)
    forecast = [
        *(ahead.due(unit) for unit in ("minute", "hour", "day")),
        *(ahead.crossing(one) for one in figures.crossings[:WARNED]),
    ]
    if figures.span is None:  # no events, only messages to come
        return {"forecast": forecast}
    return {
        "throughput": [plots.throughput(), plots.other_outcomes()],
        "lateness": [plots.lateness(), plots.distribution()],
        "outcome": [plots.attempts(), plots.reasons()],
        "slowest": [plots.slowest(), plots.slowest_handling()],
        "forecast": forecast,
        "topics": {
            topic: [
                plots.throughput(topic),
                *([] if figures.late(topic) is None else [plots.lateness(topic)]),
            ]
            for topic in list(figures.totals())[:BIGGEST_TOPICS]
        },
    }


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
