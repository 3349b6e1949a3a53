"""One topic: where its messages stand, what falls due when, how late and how many they were."""

from __future__ import annotations

import dataclasses
from datetime import timedelta
from itertools import groupby
from typing import TypeVar

from starlette.responses import Response

from lisa.admin import forecast, history
from lisa.admin.forecast import Horizon, Outlook
from lisa.admin.history import Interval, Span
from lisa.core.clock import duration_ms, human
from lisa.core.options import TopicOptions
from lisa.core.presence import ConsumerPresence
from lisa.core.retry_policy import RetryPolicy
from lisa.gateway.page.sight import Line
from lisa.gateway.page.visits import Visit
from lisa.gateway.problems import Problem

__all__ = ["require_topic", "show"]

E = TypeVar("E", Horizon, Span)

BANDS_S = 2.0
DUE_S = 5.0
HISTORY_S = 10.0

PACES = {Horizon.MINUTES: Span.HOUR, Horizon.HOURS: Span.WEEK, Horizon.DAYS: Span.QUARTER}
"""What was handled in one hour says nothing about one minute: each horizon has its own measure."""

FAR = 4

SPANS = {Span.HOUR: "hour", Span.DAY: "day", Span.WEEK: "week", Span.QUARTER: "90 days"}
UNITS = {Horizon.MINUTES: "minute", Horizon.HOURS: "hour", Horizon.DAYS: "day"}


async def require_topic(visit: Visit) -> Line:
    """The topic of the address. Raises Problem 404 if nothing is known of it."""
    name = visit.topic()
    line = await visit.sight.line(name)
    if line is None:
        raise Problem(404, "unknown-topic", f"there is no topic {name!r}; nothing was sent to it")
    return line


async def show(visit: Visit) -> Response:
    """A topic's page."""
    line = await require_topic(visit)
    name, store, sight = line.topic, visit.hub.store, visit.sight
    scene = await visit.scene()
    now_ms = scene.at_ms
    horizon = _choice(Horizon, visit.query.get("ahead"), Horizon.MINUTES)
    span = _choice(Span, visit.query.get("past"), Span.HOUR)
    options = await sight.flow(("options", name), BANDS_S, lambda: store.options(name))
    bands = await sight.flow(
        ("bands", name), BANDS_S, lambda: forecast.bands(store, name, now_ms=now_ms)
    )
    past = await _history(visit, name, span, now_ms)
    measured = await _history(visit, name, PACES[horizon], now_ms)
    ahead = await sight.flow(
        ("due", name, horizon), DUE_S,
        lambda: forecast.due(store, name, horizon, now_ms=now_ms),
    )  # fmt: skip
    outlooks = [
        forecast.outlook(one, history.best_pace(measured, one.group or None)) for one in ahead
    ]
    outlook = _chosen(outlooks, visit.query.get("group"))
    return visit.page(
        "topic.html", scene=scene, line=line, topic=name, now_ms=now_ms,
        bands=[band for band in bands if band.messages or band.from_ms is not None],
        most_in_band=max((band.messages for band in bands), default=0),
        outlook=outlook, is_pace_near=_is_near(outlook), outlooks=outlooks,
        horizon=horizon, horizons=list(Horizon), unit=UNITS[horizon], measured=PACES[horizon],
        past=past, span=span, spans=SPANS, options=told_options(options),
        consumers=[one for one in scene.consumers if isinstance(one.record, ConsumerPresence)
                   and one.record.topic == name],
    )  # fmt: skip


async def _history(visit: Visit, topic: str, span: Span, now_ms: int) -> list[Interval]:
    store = visit.hub.store
    return await visit.sight.flow(
        ("history", topic, span), HISTORY_S,
        lambda: history.history(store, topic, span, now_ms=now_ms),
    )  # fmt: skip


def _chosen(outlooks: list[Outlook], group: str | None) -> Outlook:
    """The group that was asked for, else the one that falls behind most, or has most to do."""
    for one in outlooks:
        if one.group == group:
            return one
    return max(outlooks, key=lambda one: (one.most, one.backlog))


def _is_near(outlook: Outlook) -> bool:
    """Whether the pace is worth drawing beside what falls due: one far above flattens the rest."""
    highest = max((step.due for step in outlook.steps), default=0)
    step_ms = outlook.steps[-1].end_ms - outlook.steps[-1].start_ms
    return outlook.pace is not None and outlook.pace * step_ms / 1000 <= FAR * max(1, highest)


def _choice(kind: type[E], name: str | None, default: E) -> E:
    return next((one for one in kind if one.name.lower() == name), default)


def told_options(options: TopicOptions) -> list[tuple[str, str, bool]]:
    """Name, value for people, and whether it differs from the default."""
    found = []
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        found.append((field.name, _told(value), value != field.default))
    return found


def _told(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, timedelta):
        return human(duration_ms(value))
    if isinstance(value, RetryPolicy):
        return _told_policy(value)
    if isinstance(value, int):
        return f"{value:,}"
    return "unlimited" if value is None else str(value)


def _told_policy(policy: RetryPolicy) -> str:
    runs = [(ms, sum(1 for _ in same)) for ms, same in groupby(policy.delays_ms)]
    pauses = ", ".join(human(ms) if n == 1 else f"{n} x {human(ms)}" for ms, n in runs) or "none"
    return f"{pauses}, jitter {policy.jitter:g}" if policy.jitter else pauses
