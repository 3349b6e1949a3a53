"""The page of one topic: counts per state, due-time forecast, lateness and throughput."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from starlette.responses import Response

from lisa.admin import history
from lisa.admin.history import HistorySpan, Horizon, Outlook
from lisa.admin.live import Interval
from lisa.admin.topics import pause, ramp_state, resume
from lisa.core.model.options import OF_GROUP, OPTIONS, TopicOptions
from lisa.core.store.store import Store
from lisa.gateway.page import attention
from lisa.gateway.page.snapshot import Line
from lisa.gateway.page.visits import Done, FormAction, PageRequest, Verb
from lisa.gateway.problems import ErrorResponse

E = TypeVar("E", Horizon, HistorySpan)

BANDS_S = 2.0
DUE_S = 5.0
HISTORY_S = 10.0

PACES = {
    Horizon.MINUTES: HistorySpan.HOUR,
    Horizon.HOURS: HistorySpan.WEEK,
    Horizon.DAYS: HistorySpan.QUARTER,
}
"""Each forecast horizon and the span of history whose best rate it is compared with."""

FAR = 4
"""A rate line this many times above the tallest bar is not drawn."""

SPANS = {
    HistorySpan.HOUR: "hour",
    HistorySpan.DAY: "day",
    HistorySpan.WEEK: "week",
    HistorySpan.QUARTER: "90 days",
}
UNITS = {Horizon.MINUTES: "minute", Horizon.HOURS: "hour", Horizon.DAYS: "day"}


async def require_topic(visit: PageRequest) -> Line:
    """The topic named in the path. Raises ErrorResponse 404 if it is unknown."""
    name = visit.topic()
    line = await visit.snapshots.line(name)
    if line is None:
        raise ErrorResponse(404, "unknown-topic", f"there is no topic {name!r}")
    return line


async def show(visit: PageRequest) -> Response:
    """The page of a topic."""
    line = await require_topic(visit)
    name, ask = line.topic, visit.snapshots.ask
    snapshot = await visit.snapshots.current()
    now_ms = snapshot.at_ms
    horizon = _choice(Horizon, visit.query.get("ahead"), Horizon.MINUTES)
    span = _choice(HistorySpan, visit.query.get("past"), HistorySpan.HOUR)
    options = await ask(BANDS_S, Store.options, name)
    bands = await ask(BANDS_S, history.bands, name, now_ms=now_ms)
    ramp = None
    if options.ramp is not None:
        ramp = await ask(BANDS_S, ramp_state, name, options.ramp, now_ms=now_ms)
    past = await ask(HISTORY_S, history.history, name, span, now_ms=now_ms)
    measured = await ask(HISTORY_S, history.history, name, PACES[horizon], now_ms=now_ms)
    ahead = await ask(DUE_S, history.due, name, horizon, now_ms=now_ms)
    outlooks = [
        history.outlook(expected, history.best_pace(measured, expected.group or None))
        for expected in ahead
    ]
    consumers = [consumer for consumer in snapshot.consumers if consumer.record.topic == name]
    outlook = _chosen(outlooks, visit.query.get("group"))
    return visit.page(
        "topic.html",
        line=line,
        snapshot=snapshot,
        problems=attention.of_topic(snapshot, line),
        topic=name,
        now_ms=now_ms,
        bands=[band for band in bands if band.messages or band.from_ms is not None],
        most_in_band=max((band.messages for band in bands), default=0),
        outlook=outlook,
        is_pace_near=_is_near(outlook),
        outlooks=outlooks,
        horizon=horizon,
        unit=UNITS[horizon],
        measured=PACES[horizon],
        past=past,
        **_contents(past),
        span=span,
        spans=SPANS,
        ramp=ramp if ramp and ramp.backlog else None,
        options=option_rows(options, await ask(BANDS_S, Store.group_options, name)),
        consumers=consumers,
        pushes=[
            push for consumer in consumers if consumer.alive for push in consumer.record.pushes
        ],
    )


def _contents(past: Sequence[Interval]) -> dict[str, Any]:
    """What the charts of a history show; a chart without values is replaced by a text."""
    counters = ("sent", "acked", "retried")
    return {
        "marks": _pauses(past),
        "has_lateness": any(interval.lateness_ms(0.5) is not None for interval in past),
        "has_rates": any(interval.rise(name) for interval in past for name in counters),
        "has_garbage": any(interval.rise("garbage") for interval in past),
    }


def _pauses(past: Sequence[Interval]) -> list[tuple[int, str]]:
    """The starts of the intervals in which the topic was paused or resumed, with a label."""
    labels = {(True, False): "paused", (False, True): "resumed", (True, True): "paused, resumed"}
    found = []
    for interval in past:
        label = labels.get(("pauses" in interval.counters, "resumes" in interval.counters))
        if label is not None:
            found.append((interval.start_ms, label))
    return found


def _chosen(outlooks: list[Outlook], group: str | None) -> Outlook:
    """The requested group, else the group with the largest expected or current backlog."""
    for outlook in outlooks:
        if outlook.group == group:
            return outlook
    return max(outlooks, key=lambda outlook: (outlook.most, outlook.backlog))


def _is_near(outlook: Outlook) -> bool:
    """Whether to draw the rate line: a line far above the bars would flatten them."""
    highest = max((step.due for step in outlook.steps), default=0)
    step_ms = outlook.steps[-1].end_ms - outlook.steps[-1].start_ms
    return outlook.pace is not None and outlook.pace * step_ms / 1000 <= FAR * max(1, highest)


def _choice(kind: type[E], name: str | None, default: E) -> E:
    return next((choice for choice in kind if choice.name.lower() == name), default)


def option_rows(
    options: TopicOptions, of_groups: Mapping[str, Mapping[str, Any]]
) -> list[tuple[str, str, bool]]:
    """Each option's name, formatted value, and whether it differs from the default.

    of_groups: by group, its own values, which follow.
    """
    rows = [
        (name, option.kind.show(value), value != option.default)
        for name, option in OPTIONS.items()
        for value in [getattr(options, name)]
    ]
    return rows + [
        (f"{name}{OF_GROUP}{group}", OPTIONS[name].kind.show(value), True)
        for group, own in sorted(of_groups.items())
        for name, value in own.items()
    ]


async def _pause(action: FormAction) -> Done:
    await action.visit.gateway.ask(pause, action.topic)
    return Done("paused")


async def _resume(action: FormAction) -> Done:
    await action.visit.gateway.ask(resume, action.topic)
    return Done("resumed")


VERBS = {"pause": Verb("pauseTopic", _pause), "resume": Verb("resumeTopic", _resume)}
