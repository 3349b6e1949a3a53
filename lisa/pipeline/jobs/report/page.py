"""The page: one file, nothing from elsewhere, no script, and a content policy that allows none."""

from __future__ import annotations

import base64
import hashlib
from datetime import timedelta
from importlib import resources
from string import Template

from lisa.pipeline.jobs.report.figures import Figures
from lisa.pipeline.jobs.report.forecast import DAYS, Crossing
from lisa.pipeline.jobs.report.markup import Cell, Markup, html, notice, section, tiles
from lisa.pipeline.jobs.report.page_tables import (
    crossing_table,
    forecast_table,
    gap_table,
    hourly_table,
    lateness_table,
    missing,
    reason_table,
    topic_table,
)
from lisa.pipeline.jobs.report.plots import Plots
from lisa.pipeline.jobs.report.svg import Sheet
from lisa.pipeline.jobs.report.tables import ERROR
from lisa.pipeline.jobs.report.words import count, instant, length, share

__all__ = ["render"]

BIGGEST_TOPICS = 8
"""Topics that get plots of their own."""

WARNED = 4
"""Crossings that get a plot of their own."""


def render(figures: Figures, archive: str) -> str:
    """The page as HTML. `archive` is how the archive is called: it holds no password."""
    sheet = Sheet()
    sections: list[tuple[str, str, Markup]] = []
    body = ""
    if figures.empty:
        body = (
            '<div class="empty"><p><b>The archive holds no events of this range.</b></p>'
            "<p>Is the topic's <code>journal</code> on, does <code>lisa pipeline archive</code> "
            "run, and do topics and times fit?</p></div>"
        )
    else:
        plots = Plots(figures, sheet)
        sections = [
            ("summary", "Summary", _summary(figures)),
            ("throughput", "Throughput", _throughput(plots)),
            ("lateness", "Lateness", _lateness(figures, plots)),
            ("outcome", "Attempts and garbage", _outcome(figures, plots)),
            ("slowest", "Slowest topics", _slowest(plots)),
            ("forecast", "Due forecast", _forecast(figures, plots)),
            ("topics", "Topics", _topics(figures, plots)),
            ("hours", "By topic and hour", _hours(figures)),
        ]
    if figures.gaps:
        sections.insert(1, ("gaps", "Gaps in the journal", gap_table(figures)))
    body += "\n".join(section(*one) for one in sections)
    links = "".join(f'<a href="#{name}">{html(title)}</a>' for name, title, _ in sections)
    css = resources.files(__package__).joinpath("page.css").read_text("utf-8") + sheet.css
    digest = base64.b64encode(hashlib.sha256(css.encode()).digest()).decode()
    template = resources.files(__package__).joinpath("page.html").read_text("utf-8")
    return Template(template).substitute(
        policy=f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; "
        "form-action 'none'",
        title=html(_title(figures)), css=css, lead=html(_lead(figures, archive)), body=body,
        nav=f'<nav aria-label="Contents">{links}</nav>' if links else "",
        notices=_notices(figures), footer=_footer(),
    )  # fmt: skip


def _title(figures: Figures) -> str:
    topics = figures.asked.topics
    return f"Lisa report: {', '.join(topics)}" if 0 < len(topics) <= 3 else "Lisa report"


def _lead(figures: Figures, archive: str) -> str:
    zone, asked = figures.zone, figures.asked
    start, end = asked.start or figures.first, asked.end or figures.last
    when = "No events" if start is None or end is None else (
        f"{instant(start, zone)} to {instant(end, zone)}"
    )  # fmt: skip
    topics = f", {len(asked.topics)} topics" if len(asked.topics) > 3 else ""
    return f"{when} ({zone}){topics}. {count(figures.events)} events from the archive {archive}."


def _notices(figures: Figures) -> str:
    found = []
    if figures.gaps:
        lost = sum(missing(gap) or 0 for gap in figures.gaps)
        more = f"at least {count(lost)} events are missing" if lost else "how many is unknown"
        topics = sorted({gap.topic for gap in figures.gaps})
        found.append(notice(
            "bad", f"The journal has {len(figures.gaps)} gap{'s' * (len(figures.gaps) > 1)}.",
            f"{more[0].upper()}{more[1:]}: counts of {', '.join(topics[:5])}"
            f"{' and others' if len(topics) > 5 else ''} are too low.",
        ))  # fmt: skip
    late = figures.late()
    if late is not None and late.early:
        found.append(notice(
            "bad", f"{count(late.early)} hand-overs came before they were due.",
            "The server's clock was set back in between; they are counted with lateness 0.",
        ))  # fmt: skip
    found += [notice("warn", *_warning(figures, one)) for one in figures.crossings[:WARNED]]
    if len(figures.crossings) > WARNED:
        found.append(notice("warn", f"{len(figures.crossings) - WARNED} more topics",
                            "will fall behind: see the due forecast."))  # fmt: skip
    if figures.unknown:
        owed = sum(figures.demands[topic].total for topic in figures.unknown)
        found.append(notice(
            "warn", f"{', '.join(figures.unknown[:5])}: {count(owed)} messages to come, "
            "none handled in this time.", "So nothing is known of what can be done.",
        ))  # fmt: skip
    return f'<ul class="notices">{"".join(found)}</ul>' if found else ""


def _warning(figures: Figures, found: Crossing) -> tuple[str, str]:
    """What will happen: which topic, when, by how much, and how long."""
    now, zone = figures.now, figures.zone
    assert now is not None  # noqa: S101 - there is no forecast without an event
    start = now + timedelta(hours=found.hour)
    overdue = figures.demands[found.topic].overdue
    what = f"{found.topic} falls behind from {instant(start, zone)}."
    if found.hour == 0 and overdue:
        what = f"{found.topic} is behind: {count(overdue)} are overdue."
    drained = f"not within {DAYS} days" if found.drained is None else (
        f"by {instant(now + timedelta(hours=found.drained), zone)}, "
        f"{length(round((found.drained - found.hour) * 3.6e9))} later"
    )  # fmt: skip
    return what, (
        f"In that hour there are {count(found.load)} to handle, "
        f"{count(found.load - found.capacity)} more than the {count(found.capacity)} of its best "
        f"hour. Up to {count(found.peak)} are left over; drained {drained}."
    )


def _summary(figures: Figures) -> Markup:
    late = figures.late()
    sent, handled = figures.total("sent"), figures.total("handled")
    garbage, early = figures.total("garbage"), late.early if late else 0
    owed = sum(demand.total for demand in figures.demands.values())
    overdue = sum(demand.overdue for demand in figures.demands.values())
    return tiles([
        ("Accepted", Cell(count(sent)), f"in {len(figures.totals())} topics", ""),
        ("Handled", Cell(count(handled)), f"{count(figures.total('retried'))} retries", ""),
        ("Lateness, p99", Cell(length(late.p99) if late else "none"),
         f"half within {length(late.p50)}" if late else "no first hand-over", ""),
        ("Handed over early", Cell(count(early), flag=early > 0),
         f"of {count(late.count)} hand-overs" if late else "", "good"),
        ("Garbage", Cell(count(garbage)), f"{share(garbage, sent) or 'none'} of accepted", ""),
        ("To come", Cell(count(owed)), f"{count(overdue)} of them overdue", ""),
    ])  # fmt: skip


def _throughput(plots: Plots) -> Markup:
    return _plots(plots.throughput(), plots.troubles())


def _lateness(figures: Figures, plots: Plots) -> Markup:
    return Markup(_plots(plots.lateness(), plots.distribution()) + lateness_table(figures))


def _outcome(figures: Figures, plots: Plots) -> Markup:
    return Markup(_plots(plots.attempts(), plots.reasons()) + reason_table(figures))


def _slowest(plots: Plots) -> Markup:
    return _plots(plots.slowest(), plots.slowest_handling())


def _forecast(figures: Figures, plots: Plots) -> Markup:
    text = (
        f"What is not settled, by when it falls due, counted from the archive's newest event, "
        f"{instant(figures.now, figures.zone)}. Capacity is the most messages that a topic's "
        "slowest group handled in one hour of this report: more may be possible, more was never "
        "shown. A shorter time than an hour is not judged."
    )
    drawn = _plots(
        plots.due("minute"), plots.due("hour"), plots.due("day"),
        *(plots.crossing(one) for one in figures.crossings[:WARNED]),
    )  # fmt: skip
    warned = crossing_table(figures) if figures.crossings else Markup(
        '<p class="note">No topic falls behind.</p>')  # fmt: skip
    return Markup(f'<p class="note">{html(text)}</p>{drawn}{warned}{forecast_table(figures)}')


def _topics(figures: Figures, plots: Plots) -> Markup:
    names = list(figures.totals())
    drawn = []
    for topic in names[:BIGGEST_TOPICS]:
        parts = [plots.throughput(topic)]
        if figures.late(topic) is not None:
            parts.append(plots.lateness(topic))
        drawn.append(f"<h3>{html(topic)}</h3>{_plots(*parts)}")
    note = "" if len(names) <= BIGGEST_TOPICS else (
        f'<p class="note">Plots of the {BIGGEST_TOPICS} busiest of {len(names)} topics.</p>'
    )  # fmt: skip
    return Markup(topic_table(figures) + note + "".join(drawn))


def _hours(figures: Figures) -> Markup:
    return hourly_table(figures)


def _plots(*drawn: str) -> Markup:
    return Markup(f'<div class="plots">{"".join(drawn)}</div>')


def _footer() -> str:
    terms = [
        ("accepted, sent", "What producers sent, also what replaced a message of the same id."),
        ("handled", "Acked by a consumer, counted for each group."),
        ("retried", "Attempts that failed or ran into the ack timeout, and got another one."),
        ("garbage", "All attempts failed, or the handler discarded the message."),
        ("lateness", "First hand-over to a group minus due, by the server's clock."),
        ("handling", "From the first hand-over to the ack of the last group, retries included."),
        ("percentiles", f"Within {100 * ERROR:.1f} % of the true value; maxima are exact."),
        ("reasons", "Numbers and long hex are shown as #: equal troubles are counted together."),
    ]  # fmt: skip
    items = "".join(f"<dt>{html(term)}</dt><dd>{html(said)}</dd>" for term, said in terms)
    return (
        f'<h2 id="terms">Terms</h2><dl class="terms">{items}</dl>'
        "<p>The same figures, complete, are in the directory tables beside this page.</p>"
    )
